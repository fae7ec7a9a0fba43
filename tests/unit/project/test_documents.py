"""What documents name exists: links, paths, modules to run, make targets, decisions, and the oldest Kubernetes."""

import importlib.util
import re
from pathlib import Path
from typing import Final

import pytest

from tests.paths import MANIFESTS, ROOT
from tests.unit.project.definitions import documents, files

TOP: Final = "|".join(sorted({re.escape(path.relative_to(ROOT).parts[0]) for path in files() if path.parent != ROOT}))
ROOTED: Final = re.compile(rf"(?<![\w./-])(?:{TOP})/[\w./*<>-]*")
"""A path from the root of the repository, in running text or in a code block."""

BARE: Final = re.compile(r"`([\w./-]+\.(?:py|md|ya?ml|toml|txt|json|cfg|sh))`")
"""A file's name in backticks, with or without its folders."""


def document_ids() -> list[str]:
    """The documents as paths from the root, to name tests by."""
    return [str(path.relative_to(ROOT)) for path in documents()]


def missing_paths(text: str, known: set[str]) -> list[str]:
    """The paths in ``text`` that no file or folder has. ``known`` are the files, as paths from the root."""
    folders = {str(parent) for each in known for parent in Path(each).parents}
    named = {each.rstrip("/.") for each in ROOTED.findall(text) if not re.search(r"[*<>]", each)}
    rooted = {each for each in named if each not in known and each not in folders}
    names = {each for each in BARE.findall(text) if not any(f"/{path}".endswith(f"/{each}") for path in known)}
    return sorted(rooted | names)


@pytest.mark.parametrize("document", document_ids())
def test_every_path_exists(document: str) -> None:
    """A path that a document names is in the repository; the failure lists those which are not."""
    known = {str(path.relative_to(ROOT)) for path in files()}
    assert missing_paths((ROOT / document).read_text(encoding="utf-8"), known) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see `operator_app/apply.py` and operator_app/ssa/", []),
        ("see operator_app/no_such.py.", ["operator_app/no_such.py"]),
        ("see [tests](tests/no_such)", ["tests/no_such"]),
        ("`apply.py`, `ssa/fields.py`", []),
        ("`no_such.py`, `ssa/no_such.py`", ["no_such.py", "ssa/no_such.py"]),
        ("the path `/healthz`, `operator-app/manifests`, tests/*/conftest.py", []),
    ],
)
def test_a_missing_path_is_named(text: str, missing: list[str]) -> None:
    """The check above finds what is not there and nothing else."""
    known = {str(path.relative_to(ROOT)) for path in files()}
    assert missing_paths(text, known) == missing


@pytest.mark.parametrize("document", document_ids())
def test_links_lead_somewhere(document: str) -> None:
    """A relative link in a document names a file that is there, and its fragment one of that file's headings."""
    file = ROOT / document
    for target, _, fragment in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", file.read_text(encoding="utf-8")):
        linked = file.parent / target if target else file
        assert linked.exists(), target
        if fragment:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}, fragment


@pytest.mark.parametrize("document", document_ids())
def test_every_module_to_run_exists(document: str) -> None:
    """What stands behind ``python -m`` in a document can be run."""
    for module in re.findall(r"python -m ([\w.]+)", (ROOT / document).read_text(encoding="utf-8")):
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("document", document_ids())
def test_every_make_command_exists(document: str) -> None:
    """A `make` command that a document tells people to type is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = (ROOT / document).read_text(encoding="utf-8")
    assert set(re.findall(r"(?:`make |^make )([a-z0-9-]+)(?=$|`|  | [A-Z]\w*=)", text, re.MULTILINE)) <= targets


def test_every_decision_is_in_the_index() -> None:
    """The index of decisions has each record under its own number and title."""
    directory = ROOT / "docs" / "adr"
    titles = {
        file.name: file.read_text(encoding="utf-8").splitlines()[0] for file in sorted(directory.glob("[0-9]*.md"))
    }
    rows = re.findall(
        r"^\| \[(\d+)\]\((.+?)\) \| (.+) \|$", (directory / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {name: f"# {number}. {title}" for number, name, title in rows} == titles


def test_the_oldest_kubernetes_is_said_alike_and_truly() -> None:
    """Wherever the oldest version stands it is the same, and new enough for the CEL functions in the CRDs.

    ``isIP`` and ``ip`` came with 1.30 (k8s.io/apiserver, pkg/cel/environment/base.go). An API server compiles a *new*
    rule with the functions of the version before its own, so 1.31 is the first that takes these CRDs.
    """
    said = {
        version
        for file in (ROOT / "README.md", ROOT / "docs" / "operations.md", MANIFESTS / "kustomization.yaml")
        for version in re.findall(r"Kubernetes (1\.\d+) or newer", file.read_text(encoding="utf-8")) or [file.name]
    }
    rules = "".join(file.read_text(encoding="utf-8") for file in (MANIFESTS / "crd").glob("*.yaml"))
    assert re.search(r"\bisIP\(|\bip\(", rules)
    assert said == {"1.31"}
