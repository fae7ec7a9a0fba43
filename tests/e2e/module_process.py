"""A Python module as a process of its own, forked from one that has imported the operator already.

Importing the operator takes more than a second of CPU, and the tests start it hundreds of times.
"""

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.e2e.leash import PARENT_VARIABLE
from tests.paths import ROOT

PRELOADED: Final = ("operator_app.app", "tests.e2e.leash", "tests.e2e.module_process")

_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(list(PRELOADED))


class ModuleProcess:
    """``python -m MODULE ARGUMENTS`` in a session of its own, its output appended to ``log``; it has started.

    It does what a new interpreter does, in what the operator can see; what it does not do is read the modules again.
    """

    def __init__(self, module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._process = _forking.Process(
            target=_run, args=(module, tuple(arguments), log, dict(environment)), daemon=True
        )
        log.touch()
        with contextlib.chdir(ROOT):
            self._process.start()

    @property
    def pid(self) -> int:
        """Its process id, which is that of its session, too."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code. Raises ``TimeoutError`` after ``timeout`` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            message = f"still running after {timeout} s"
            raise TimeoutError(message)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


def _run(module: str, arguments: tuple[str, ...], log: Path, environment: Mapping[str, str]) -> None:
    gc.freeze()
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment, **{PARENT_VARIABLE: str(os.getppid())})
    # What is installed there, such as a registry of a test, is found by its entry point.
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")
