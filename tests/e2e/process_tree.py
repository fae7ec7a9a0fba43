"""Processes below another one, however they were started, and whether they still run (Linux)."""

from pathlib import Path

from tests.e2e.node.cgroups import start_time


def family_of(pid: int) -> dict[int, str]:
    """Start times of all processes below ``pid``, by process id."""
    parents: dict[int, tuple[int, str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(fields[1]), fields[19]
    found: dict[int, str] = {}
    wanted = {pid}
    while new := {each: start for each, (parent, start) in parents.items() if parent in wanted and each not in found}:
        found |= new
        wanted = set(new)
    return found


def alive(processes: dict[int, str]) -> list[int]:
    """Those that still run; a number that was used again does not count."""
    return [pid for pid, started in processes.items() if start_time(pid) == started]


def command_line(pid: int) -> bytes:
    """The words of a process's command, each ended by a zero byte; none once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
