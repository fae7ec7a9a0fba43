"""The cgroup below which a node's Pods get theirs: made, removed, and swept when whoever made it is dead.

In version 1 of cgroups each controller has a hierarchy of its own, in version 2 there is one (cgroups(7)); both are
below ``/sys/fs/cgroup``. The name of a node's cgroup tells which process keeps it: its id and its start time, which
together are never used twice while the machine runs.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

MOUNT: Final = Path("/sys/fs/cgroup")
REMOVAL_TIMEOUT_S: Final = 20.0
_PREFIX: Final = "operator-app-node"
_CPUSET: Final = ("cpuset.cpus", "cpuset.mems")


def create(*inner: str) -> str:
    """Make this process's cgroup in every hierarchy and return its path below each, as ``/name``.

    ``inner`` are the names of cgroups to make in it.
    """
    name = f"{_PREFIX}-{os.getpid()}-{start_time(os.getpid())}"
    for hierarchy in _hierarchies():
        (hierarchy / name).mkdir(exist_ok=True)
        _make_usable(hierarchy, hierarchy / name)
        for each in inner:
            (hierarchy / name / each).mkdir(exist_ok=True)
            _make_usable(hierarchy / name, hierarchy / name / each)
    return f"/{name}"


def remove(cgroup: str) -> None:
    """Remove a cgroup and all below it, once no process is left in it. Raises ``TimeoutError`` where some stays."""
    deadline_mono = time.monotonic() + REMOVAL_TIMEOUT_S
    while left := [directory for hierarchy in _hierarchies() if (directory := hierarchy / cgroup[1:]).exists()]:
        for directory in left:
            _remove_tree(directory)
        if time.monotonic() > deadline_mono:
            raise TimeoutError(f"processes stay in {', '.join(map(str, left))}")
        time.sleep(0.02)


def sweep() -> None:
    """Remove what dead keepers left behind."""
    for hierarchy in _hierarchies():
        for directory in hierarchy.glob(f"{_PREFIX}-*"):
            _, pid, started = directory.name.rsplit("-", 2)
            if start_time(int(pid)) != started:
                _remove_tree(directory)


def can_be_made() -> bool:
    """Whether this process may make cgroups in every hierarchy."""
    return MOUNT.is_dir() and all(os.access(hierarchy, os.W_OK) for hierarchy in _hierarchies())


def of_keepers(processes: Mapping[int, str]) -> list[Path]:
    """The cgroups that exist of nodes whose keepers are among these processes, given by id and start time."""
    names = [f"{_PREFIX}-{pid}-{started}" for pid, started in processes.items()]
    found = (hierarchy / name for hierarchy in _hierarchies() for name in names)
    return [directory for directory in found if directory.exists()]


def _hierarchies() -> Iterator[Path]:
    if _is_version_2():
        yield MOUNT
        return
    # A link such as cpu -> cpu,cpuacct is the same hierarchy once more.
    yield from (entry for entry in sorted(MOUNT.iterdir()) if entry.is_dir() and not entry.is_symlink())


def _is_version_2() -> bool:
    return (MOUNT / "cgroup.controllers").exists()


def _make_usable(parent: Path, directory: Path) -> None:
    """A new cgroup has neither processors nor memory nodes in version 1, and no controllers for others in version 2."""
    if not _is_version_2():
        for name in _CPUSET:
            if (directory / name).exists():
                (directory / name).write_text((parent / name).read_text())
    else:
        wanted = " ".join(f"+{name}" for name in (MOUNT / "cgroup.controllers").read_text().split())
        for each in (parent, directory):
            (each / "cgroup.subtree_control").write_text(wanted)


def _remove_tree(top: Path) -> None:
    """Remove the cgroups that have no process, innermost first."""
    for directory, _, _ in os.walk(top, topdown=False):
        with suppress(OSError):
            Path(directory).rmdir()


def start_time(pid: int) -> str | None:
    """In clock ticks since the machine's start (``/proc/PID/stat``, field 22); None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[19]
