"""Building images on this machine alone: no container engine and no image registry is needed, root is.

The base is made by debootstrap, buildah builds in a chroot, and both keep everything below one directory.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.paths import ROOT

SUITE: Final = "bookworm"
"""A Debian release whose python3 is new enough (3.11)."""

HOST_FILES: Final = ("/etc/ssl/certs", "/etc/pip.conf", "/etc/resolv.conf")
"""How this host reaches its package index; lent to the build read-only, never written into the image."""

TOOLS: Final = ("buildah", "debootstrap")
"""Programs, and the Debian packages of the same names."""


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


def build_base(buildah: Buildah, scratch: Path) -> str:
    """Debian with Python and nothing else, made here because no image registry may be reached; its name.

    ``scratch`` is a directory to work in, which is gone afterwards.
    """
    root = scratch / "root"
    subprocess.run(
        ("debootstrap", "--variant=minbase", "--include=ca-certificates,python3,python3-venv", SUITE, str(root)),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    archive = (
        *("tar", "-C", str(root), "-cf", str(scratch / "root.tar"), "--exclude=./dev/*", "--exclude=./proc/*", "."),
    )
    subprocess.run(archive, check=True)
    shutil.rmtree(root)
    (scratch / "Dockerfile").write_text("FROM scratch\nADD root.tar /\n")
    buildah("build", "-t", "base", str(scratch))
    shutil.rmtree(scratch)
    return "localhost/base"


def build_operator(buildah: Buildah, base: str) -> str:
    """The operator's image, built from the working tree on ``base``; its name."""
    mounts = [f"--volume={path}:{path}:ro" for path in HOST_FILES if Path(path).exists()]
    buildah("build", "--network=host", f"--build-arg=BUILD_IMAGE={base}", *mounts, "-t", "operator-app", str(ROOT))
    return "localhost/operator-app"
