"""What is committed: no host of anybody's infrastructure, no path of one machine, and locks that pin by content."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Final

import pytest

from tests.paths import ROOT

LOCKS: Final = sorted(path.stem for path in (ROOT / "requirements").glob("*.txt"))

# Each pattern is written so that it does not match its own line.
FORBIDDEN: Final = {
    "package index": re.compile(
        r"py[p]i\.org|files\.pythonhoste[d]\.org|(?:--|_)(?:extra-)?inde[x]-url|--find-link[s]"
    ),
    "module proxy": re.compile(r"proxy\.golan[g]\.org|sum\.golan[g]\.org|registry\.npmj[s]\.org"),
    "image registry": re.compile(
        r"docker\.i[o]/|gcr\.i[o]/|ghcr\.i[o]/|quay\.i[o]/|registry\.k8s\.i[o]/|mcr\.microsof[t]"
    ),
    "path of one machine": re.compile(r"(?<![\w.])/(?:wor[k]|hom[e]|root/\.pyen[v]|User[s])/"),
    "unfinished": re.compile(r"\b(?:TOD[O]|FIXM[E]|XX[X])\b"),
}
GENERATED: Final = frozenset(
    {"tests/e2e/controlplane/go.sum", "tests/e2e/node/go/go.sum", "tests/e2e/node/policies/go.sum"}
)
"""Checksums in base64 spell anything now and then."""


def tracked_files() -> list[Path]:
    """The files that git tracks; outside a git checkout (an unpacked archive) the tests that need it are skipped."""
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and name not in GENERATED]


def requirements(lock: str) -> dict[str, str]:
    """The entries of a lock file: canonical name → everything up to the next entry."""
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    return {entry.partition("==")[0]: entry for entry in entries}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_committed_file_names(what: str) -> None:
    """Where packages and images come from is the machine's business; nothing in the repository says it."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in tracked_files()
        if path.is_file()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if FORBIDDEN[what].search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("package index", "https://py" + "pi.org/simple"),
        ("module proxy", "GOPROXY=https://proxy.golan" + "g.org"),
        ("image registry", "image: ghcr.i" + "o/somebody/something"),
        ("path of one machine", "open('/hom" + "e/me/file')"),
        ("unfinished", "# TO" + "DO: later"),
    ],
)
def test_the_patterns_find_what_they_are_for(what: str, line: str) -> None:
    """Each pattern matches an example, so the test above can fail."""
    assert FORBIDDEN[what].search(line)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_requirement_is_exact_and_hashed(lock: str) -> None:
    """Each entry is one exact version with at least one SHA-256, so any mirror that serves it serves the same bytes."""
    entries = requirements(lock)
    assert entries
    for name, entry in entries.items():
        assert re.match(r"[a-z0-9-]+==[^ ;\\]+", entry), name
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), name


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_name_no_place(lock: str) -> None:
    """A lock holds no address at all: no index, no direct reference, no local path."""
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    assert "://" not in text
    assert " @ " not in text
    assert not re.search(r"^-", text, flags=re.MULTILINE)


def test_every_runtime_dependency_is_locked_everywhere_alike() -> None:
    """The project's dependencies are in the runtime lock, and the development lock has the very same entries."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    runtime, dev = requirements("runtime"), requirements("dev")
    for requirement in declared:
        assert re.split(r"[<>=!~\[; ]", requirement)[0] in runtime
    for name, entry in runtime.items():
        assert name in dev
        assert hashes(dev[name]) == hashes(entry), name


def test_the_build_uses_the_back_end_that_is_locked() -> None:
    """What build-system.requires asks for is what the build lock pins."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert set(requires) <= set(requirements("build"))


def hashes(entry: str) -> set[str]:
    """The digests of one lock entry."""
    return set(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))


def test_the_supported_pythons_are_tested_and_the_image_has_one_of_them() -> None:
    """From the oldest that pyproject allows to the image's: the workflow, `make unit-pythons` and the classifiers.

    A job of the workflow that needs one interpreter takes the image's, whose base is named by its content.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = project["requires-python"].removeprefix(">=3.")
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    tested = [int(each) for each in re.findall(r'"3\.(\d+)"', re.findall(r"python: \[(.*?)\]", workflow)[0])]
    in_make = re.findall(r"for minor in ([\d ]+);", (ROOT / "Makefile").read_text())[0]
    dockerfile = (ROOT / "Dockerfile").read_text()
    (image,) = re.findall(r"BUILD_IMAGE=python:3\.(\d+)[\w.-]*@sha256:[0-9a-f]{64}$", dockerfile, re.MULTILINE)
    assert tested == list(range(int(lowest), int(image) + 1)) == [int(each) for each in in_make.split()]
    told = re.findall(r"Python :: 3\.(\d+)", " ".join(project["classifiers"]))
    assert [int(each) for each in told] == tested
    assert set(re.findall(r'python-version: "3\.(\d+)"', workflow)) == {image}
