"""Building images on this machine alone: no container engine and no image registry is needed, root is.

The base is made by debootstrap, and buildah builds on it in a chroot. What comes out are archives below the project's
cache directory, named by a digest of all that goes in, so that nothing is built twice.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.e2e.controlplane.build import Report, cache_directory
from tests.e2e.node import packages
from tests.paths import ROOT

IMAGE_NAME: Final = "operator-app:dev"
"""As ``manifests/kustomization.yaml`` names it."""

HOST_FILES: Final = ("/etc/ssl/certs", "/etc/pip.conf", "/etc/resolv.conf")
"""How this host reaches its package index; lent to the build read-only, never written into the image."""

TOOLS: Final = ("buildah", "debootstrap")
"""Programs, and the Debian packages of the same names."""

BASE_PACKAGES: Final = ("ca-certificates", "python3", "python3-venv")
KEPT_ARCHIVES: Final = 4
"""Of the operator's image; each is smaller than 100 MB."""

SOURCES: Final = (
    "Dockerfile",
    "LICENSE",
    "README.md",
    "image",
    "operator_app",
    "pyproject.toml",
    "requirements/build.txt",
    "requirements/runtime.txt",
)
"""What the build reads (``.dockerignore`` lets nothing else in)."""


class ImageError(RuntimeError):
    """An image could not be built; the message ends with what the tool printed."""


def missing_tools() -> list[str]:
    """Those of ``TOOLS`` that are not on the path."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


class Buildah:
    """buildah with a storage of its own, so that no image of the machine's user is seen or left behind."""

    def __init__(self, directory: Path) -> None:
        self._command = ("buildah", "--root", str(directory / "storage"), "--runroot", str(directory / "run"))
        self._environ = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}

    def __call__(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one sub-command. Raises ``ImageError`` where it fails, unless ``check`` is off."""
        done = subprocess.run(
            (*self._command, *arguments), env=self._environ, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            raise ImageError(f"buildah {arguments[0]} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done


def operator_archive(report: Report) -> Path:
    """The operator's image of the working tree as ``docker save`` would write it, built if it is not cached.

    Minutes, the first time. Raises ``PackagesError`` where buildah and debootstrap are missing and can't be installed,
    ``ImageError`` where the build fails. Needs root.
    """
    archive = _directory() / f"operator-{_digest()}.tar"
    with _exclusive():
        if archive.exists():
            archive.touch()
            return archive
        packages.install(missing_tools, report)
        started_mono = time.monotonic()
        base = _base_archive(report)
        report("image: building the operator's image")
        with _scratch() as scratch:
            buildah = Buildah(scratch)
            mounts = [f"--volume={path}:{path}:ro" for path in HOST_FILES if Path(path).exists()]
            pulled = buildah("pull", "--quiet", f"docker-archive:{base}").stdout.strip()
            base_argument = f"--build-arg=BUILD_IMAGE={pulled}"
            buildah("build", "--network=host", base_argument, *mounts, "-t", "operator-app", str(ROOT))
            unfinished = scratch / archive.name
            buildah("push", "localhost/operator-app", f"docker-archive:{unfinished}:{IMAGE_NAME}")
            unfinished.rename(archive)
        report(f"image: {archive.stat().st_size >> 20} MiB, built in {time.monotonic() - started_mono:.0f} s")
        for old in sorted(_directory().glob("operator-*.tar"), key=lambda path: -path.stat().st_mtime)[KEPT_ARCHIVES:]:
            old.unlink()
        return archive


def debian_release() -> str:
    """The Debian release of the Dockerfile's base, so that the interpreter is the one of its tag here, too."""
    (release,) = re.findall(r"BUILD_IMAGE=python:[\d.]+-slim-([a-z]+)@", (ROOT / "Dockerfile").read_text())
    return str(release)


def _base_archive(report: Report) -> Path:
    """Debian with Python and nothing else, made here because no image registry may be reached."""
    release = debian_release()
    digest = hashlib.sha256(repr((release, BASE_PACKAGES)).encode()).hexdigest()
    archive = _directory() / f"base-{digest}.tar"
    if archive.exists():
        return archive
    report(f"image: making a base of Debian {release} with debootstrap; a minute or more, the first time")
    with _scratch() as scratch:
        root, layer = scratch / "root", scratch / "root.tar"
        include = f"--include={','.join(BASE_PACKAGES)}"
        done = subprocess.run(
            ("debootstrap", "--variant=minbase", include, release, str(root)),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ImageError(f"debootstrap failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        exclude = ("--exclude=./dev/*", "--exclude=./proc/*", "--exclude=./var/cache/apt/archives/*.deb")
        subprocess.run(("tar", "-C", str(root), "-cf", str(layer), *exclude, "."), check=True)
        shutil.rmtree(root)
        (scratch / "Dockerfile").write_text("FROM scratch\nADD root.tar /\n")
        buildah = Buildah(scratch)
        buildah("build", "-t", "base", str(scratch))
        unfinished = scratch / archive.name
        buildah("push", "localhost/base", f"docker-archive:{unfinished}:base:{release}")
        unfinished.rename(archive)
    return archive


def _digest() -> str:
    """Of everything that decides what the operator's image is, but for the packages of an index and of Debian."""
    decisive = hashlib.sha256(repr((debian_release(), BASE_PACKAGES)).encode())
    for file in _source_files():
        content = file.read_bytes()
        decisive.update(f"{file.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return decisive.hexdigest()


def _source_files() -> Iterator[Path]:
    for name in SOURCES:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in files if file.is_file() and "__pycache__" not in file.parts)


def _directory() -> Path:
    directory = cache_directory() / "images"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory beside the archives: what is finished is moved there in one step. Those of killed builds go first."""
    for abandoned in _directory().glob("build-*"):
        shutil.rmtree(abandoned)  # whoever builds holds the lock
    directory = Path(tempfile.mkdtemp(prefix="build-", dir=_directory()))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def _exclusive() -> Iterator[None]:
    """One process at a time builds; the lock ends with the process that holds it."""
    with (_directory() / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
