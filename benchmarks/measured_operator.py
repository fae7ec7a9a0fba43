"""The operator with a report on itself each second: ``python -m benchmarks.measured_operator run ...``.

The report is a log line ``measured``: the longest step of the event loop since the line before, in seconds of the wall
clock and of its own CPU time, what ran in it, and the process's memory and CPU time so far. On a machine with more
load than cores the wall clock counts the time in which the step did not run as well.
"""

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from operator_app.__main__ import main

REPORT_INTERVAL_S: Final = 1.0


class Blocks:
    """The longest step of the event loop, by the wall clock and by CPU time."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self.what = ""

    def install(self) -> None:
        """Measure every callback that asyncio runs from now on."""
        run = asyncio.Handle._run  # type: ignore[attr-defined] # noqa: SLF001 - there is no public hook

        def measured(handle: Any) -> None:  # noqa: ANN401 - asyncio.Handle with its private parts
            begun, begun_cpu = time.perf_counter(), time.thread_time()
            run(handle)
            wall_s, cpu_s = time.perf_counter() - begun, time.thread_time() - begun_cpu
            self.wall_s = max(self.wall_s, wall_s)
            if cpu_s > self.cpu_s:
                self.cpu_s, self.what = cpu_s, what(handle)

        asyncio.Handle._run = measured  # type: ignore[attr-defined] # noqa: SLF001 - as above

    def taken(self) -> dict[str, float | str]:
        """The longest since the last call."""
        found: dict[str, float | str] = {"block_s": self.wall_s, "block_cpu_s": self.cpu_s, "block": self.what}
        self.wall_s, self.cpu_s, self.what = 0.0, 0.0, ""
        return found


def what(handle: Any) -> str:  # noqa: ANN401 - asyncio.Handle with its private parts
    """The outermost and the innermost function of the operator that wait at the end of the step, or the task's name."""
    callback = handle._callback  # noqa: SLF001 - there is no public name for it
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(callback)
    names = []
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        code = getattr(coroutine, "cr_code", None) or getattr(coroutine, "ag_code", None)
        if code is not None and "operator_app" in code.co_filename:
            names.append(code.co_qualname)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return " > ".join(dict.fromkeys((*names[:1], *names[-1:]))) or task.get_name()


def memory() -> dict[str, int]:
    """Resident bytes now and at most so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {
        name: int(found[field].split()[0]) * 1024 for name, field in (("rss_bytes", "VmRSS"), ("peak_bytes", "VmHWM"))
    }


def report(blocks: Blocks) -> None:
    """Print a line each second, for ever."""
    while True:
        time.sleep(REPORT_INTERVAL_S)
        line = {"event": "measured", "cpu_s": time.process_time(), **memory(), **blocks.taken()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    blocks = Blocks()
    blocks.install()
    threading.Thread(target=report, args=(blocks,), daemon=True).start()
    sys.exit(main())
