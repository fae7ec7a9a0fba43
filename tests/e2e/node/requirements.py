"""What a node needs of its machine: Linux, root, and a few programs, installed from Debian's packages where missing."""

import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.e2e.controlplane.build import Report
from tests.e2e.node import cgroups
from tests.e2e.node.configuration import CNI_PROGRAMS, EMPTY, NAMESPACES

PROGRAMS: Final = {
    "ip": "iproute2",
    "ldd": "libc-bin",
    "nft": "nftables",
    "nsenter": "util-linux",
    "runc": "runc",
    "unshare": "util-linux",
}
"""Each with the Debian package that has it."""

CNI_PACKAGE: Final = "containernetworking-plugins"
CNI_NEEDED: Final = ("host-local", "loopback", "ptp")
INSTALL_TIMEOUT_S: Final = 200


class NodeUnavailableError(RuntimeError):
    """No node can run on this machine; the message is one sentence that says what is missing."""


def ensure(report: Report, *needed_paths: Path) -> None:
    """Install what is missing. Raises ``NodeUnavailableError`` where that can't be done, or would not help.

    ``needed_paths`` are read inside the node, so they must not be where it puts its own empty directories.
    """
    if platform.system() != "Linux":
        raise NodeUnavailableError("no Pods can run here: a node needs Linux")
    if os.geteuid() != 0:
        raise NodeUnavailableError("no Pods can run here: a node needs root, for namespaces, mounts and cgroups")
    hidden = [path for path in needed_paths if any(path.resolve().is_relative_to(each) for each in EMPTY)]
    if hidden:
        raise NodeUnavailableError(f"no Pods can run here: {hidden[0]} is below {', '.join(EMPTY)}, which a node hides")
    if _missing():
        _install_missing(report)
    tried = subprocess.run([*NAMESPACES, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise NodeUnavailableError(f"no Pods can run here: namespaces are not to be had: {tried.stderr.strip()}")
    if not cgroups.can_be_made():
        raise NodeUnavailableError(f"no Pods can run here: cgroups can't be made below {cgroups.MOUNT}")


def _install_missing(report: Report) -> None:
    if shutil.which("apt-get") is None:
        raise NodeUnavailableError(f"no Pods can run here: {_sentence(_missing())}")
    with (Path(tempfile.gettempdir()) / "operator-app-node-packages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if packages := _missing():
            report(f"node: installing {' '.join(packages)} from Debian's packages")
            _install(packages)
    if packages := _missing():
        raise NodeUnavailableError(f"no Pods can run here: {_sentence(packages)}, even after it was installed")


def _missing() -> list[str]:
    """The packages whose programs are not there."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    packages = {package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None}
    if not all((CNI_PROGRAMS / name).exists() for name in CNI_NEEDED):
        packages.add(CNI_PACKAGE)
    return sorted(packages)


def _sentence(packages: Iterable[str]) -> str:
    return f"something of these Debian packages is missing: {', '.join(packages)}"


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
            raise NodeUnavailableError(
                f"no Pods can run here: {' '.join(command[:2])} for {', '.join(packages)} failed: {error}"
            ) from error
