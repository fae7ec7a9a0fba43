"""What a node needs of its machine: Linux, root, and a few programs, installed from Debian's packages where missing."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.e2e.controlplane.build import Report
from tests.e2e.node import cgroups, packages
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


class NodeUnavailableError(RuntimeError):
    """No node can run on this machine; the message is one sentence that says what is missing."""

    def __init__(self, why: str) -> None:
        super().__init__(f"no Pods can run here: {why}")


def ensure(report: Report, *needed_paths: Path) -> None:
    """Install what is missing. Raises ``NodeUnavailableError`` where that can't be done, or would not help.

    ``needed_paths`` are read inside the node, so they must not be where it puts its own empty directories.
    """
    if platform.system() != "Linux":
        raise NodeUnavailableError("a node needs Linux")
    if os.geteuid() != 0:
        raise NodeUnavailableError("a node needs root, for namespaces, mounts and cgroups")
    hidden = [path for path in needed_paths if any(path.resolve().is_relative_to(each) for each in EMPTY)]
    if hidden:
        raise NodeUnavailableError(f"{hidden[0]} is below {', '.join(EMPTY)}, of which a node sees nothing")
    try:
        packages.install(_missing, lambda line: report(f"node: {line}"))
    except packages.PackagesError as error:
        raise NodeUnavailableError(str(error)) from error
    tried = subprocess.run([*NAMESPACES, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise NodeUnavailableError(f"namespaces are not to be had: {tried.stderr.strip()}")
    if not cgroups.can_be_made():
        raise NodeUnavailableError(f"cgroups can't be made below {cgroups.MOUNT}")


def _missing() -> list[str]:
    """The packages whose programs are not there."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    missing = {package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None}
    if not all((CNI_PROGRAMS / name).exists() for name in CNI_NEEDED):
        missing.add(CNI_PACKAGE)
    return sorted(missing)
