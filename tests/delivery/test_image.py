"""The image: built from the Dockerfile on this machine alone, then run.

How it is built without a container engine, ``images.py`` says.
"""

import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.delivery.images import Buildah, missing_tools, operator_archive
from tests.paths import ROOT

pytestmark = [pytest.mark.delivery, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """A builder whose storage lives as long as this module; skips where images can't be built."""
    if os.geteuid() != 0:
        pytest.skip("building an image in a chroot needs root")
    if missing := missing_tools():
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: apt-get install {' '.join(missing)})")
    directory = tmp_path_factory.mktemp("image")
    yield Buildah(directory)
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def image(buildah: Buildah) -> str:
    """The operator's image, built from the working tree."""
    return buildah("pull", "--quiet", f"docker-archive:{operator_archive(print)}").stdout.strip()


@pytest.fixture(scope="module")
def container(buildah: Buildah, image: str) -> str:
    """A container of the image, in which single programs are run."""
    return buildah("from", image).stdout.strip()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the image, unpacked."""
    directory = tmp_path_factory.mktemp("root")
    with tarfile.open(operator_archive(print)) as image:
        (manifest,) = json.load(image.extractfile("manifest.json"))  # type: ignore[arg-type]  # it is a file
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=image.extractfile(layer)) as files:
                files.extractall(directory, filter="tar")
    return directory


def python(buildah: Buildah, container: str, program: str) -> str:
    """What ``program`` prints inside the image, run by its interpreter without any shell."""
    return buildah("run", container, "--", "python", "-c", program).stdout.strip()


def test_the_operator_starts_in_its_image(buildah: Buildah, container: str) -> None:
    """The entry point runs with nothing but the content of the image."""
    assert "usage" in buildah("run", container, "--", "python", "-m", "operator_app", "--help").stdout.lower()


def test_the_image_prints_the_checked_in_crds(buildah: Buildah, container: str) -> None:
    """The code in the image is that of this working tree: it prints the CRDs which are checked in."""
    printed = buildah("run", container, "--", "python", "-m", "operator_app", "crd").stdout
    files = sorted((ROOT / "manifests" / "crd").glob("*.operator-app.dev.yaml"))
    checked_in = [yaml.safe_load(path.read_text()) for path in files]
    assert sorted(yaml.safe_load_all(printed), key=lambda crd: str(crd["metadata"]["name"])) == checked_in


def test_the_process_has_no_privileges_and_can_write_nothing(buildah: Buildah, container: str) -> None:
    """The user is 65532 in a group of its own, and neither the root nor the code is writable by it."""
    program = "import os; print(os.getuid(), os.getgid(), [p for p in ('/', '/venv', '/etc') if os.access(p, os.W_OK)])"
    assert python(buildah, container, program) == "65532 65532 []"


def test_no_installer_is_shipped(buildah: Buildah, container: str) -> None:
    """The image has neither pip nor the build back end."""
    program = "import importlib.util as u; print([m for m in ('pip', 'setuptools', 'hatchling') if u.find_spec(m)])"
    assert python(buildah, container, program) == "[]"


def test_modules_are_compiled(buildah: Buildah, container: str) -> None:
    """With a read-only root no start has to compile: the module was compiled when the image was built."""
    program = "import operator_app.api.models as m, os; print(os.path.exists(m.__cached__))"
    assert python(buildah, container, program) == "True"


def test_the_image_declares_how_it_is_run(buildah: Buildah, image: str) -> None:
    """Exec-form entry point, numeric user (runAsNonRoot can be checked), the port, and the licence."""
    inspected: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", image).stdout)
    config = inspected["OCIv1"]["config"]
    assert config["Entrypoint"] == ["python", "-m", "operator_app"]
    assert config["User"] == "65532:65532"
    assert list(config["ExposedPorts"]) == ["8080/tcp"]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_python_is_the_one_of_the_dockerfile(buildah: Buildah, container: str) -> None:
    """What is shipped runs on the version that its base is tagged with, wherever it was built."""
    (version,) = re.findall(r"BUILD_IMAGE=python:([\d.]+)-", (ROOT / "Dockerfile").read_text())
    program = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    assert python(buildah, container, program) == version


def test_python_is_the_only_program(root: Path) -> None:
    """No shell, no package tool, nothing set-uid: all that can be executed is Python, scripts of it, and libraries."""
    programs, privileged = set(), []
    for path in root.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        mode = path.stat().st_mode
        if mode & 0o7000:
            privileged.append(path)
        with path.open("rb") as file:
            head = file.read(64)
        is_library = ".so" in path.name
        if mode & 0o111 and not is_library and (head.startswith(b"\x7fELF") or path.parent.name in {"bin", "sbin"}):
            is_of_python = path.name.startswith("python") or b"python" in head.splitlines()[0]
            programs.add("python" if is_of_python else str(path.relative_to(root)))
    assert (programs, privileged) == ({"python"}, [])
    assert {path.name for path in root.iterdir()} <= {"etc", "lib", "lib64", "usr", "venv", "dev", "proc", "sys", "run"}


def test_nothing_of_the_building_host_is_in_the_image(buildah: Buildah, container: str) -> None:
    """The host's pip configuration was mounted for the build and is not part of the image."""
    program = "import pathlib; p = pathlib.Path('/etc/pip.conf'); print(p.read_text() if p.exists() else '')"
    assert python(buildah, container, program) == ""
