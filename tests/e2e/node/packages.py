"""Debian packages that this project's tests need, installed by root where they are missing."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.e2e.controlplane.build import Report

INSTALL_TIMEOUT_S: Final = 240
_POLICY: Final = Path("/usr/sbin/policy-rc.d")


class PackagesError(RuntimeError):
    """Packages are missing and can't be installed; the message is one sentence that names them."""


def install(missing: Callable[[], list[str]], report: Report) -> None:
    """Install what ``missing`` returns, one process at a time and without starting services; then it returns nothing.

    Raises ``PackagesError``: no apt-get, not root, a failure, or packages that did not bring what is missing.
    """
    if not missing():
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise PackagesError(_sentence(missing(), "is missing, and only root on Debian can install it from here"))
    with (Path(tempfile.gettempdir()) / "operator-app-packages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if packages := missing():
            report(f"installing Debian's {' '.join(packages)}")
            with _no_services():
                _install(packages)
    if packages := missing():
        raise PackagesError(_sentence(packages, "is missing even after it was installed"))


def _sentence(packages: list[str], what: str) -> str:
    return f"something of these Debian packages {what}: {', '.join(packages)}"


@contextmanager
def _no_services() -> Iterator[None]:
    """Keep an installation from starting a server, such as one on port 53, by Debian's ``policy-rc.d``."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


def _install(packages: list[str]) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ("apt-get", "install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=60", *packages)
    for command in (("apt-get", "update"), install):
        try:
            subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=INSTALL_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise PackagesError(f"{' '.join(command[:2])} for {', '.join(packages)} failed: {error}") from error
