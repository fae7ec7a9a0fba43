"""Runs unit tests in a process of their own, in which one module is a mutant. Nothing on disk is changed.

Processes are forked from a server that has imported the libraries, since most mutants die within a second of tests.
"""

import importlib.util
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from enum import Enum
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from tests.paths import ROOT

_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "anyio.pytest_plugin",
        "hypothesis",
        "httpx",
        "lightkube",
        "prometheus_client",
        "pydantic_settings",
        "structlog",
        "trustme",
    ]
)


class Verdict(Enum):
    """What became of a mutant."""

    KILLED = "killed"
    HUNG = "killed, for it hangs"
    SURVIVED = "SURVIVED"


class UntestableError(Exception):
    """Pytest found nothing to run, or ended in a way that says nothing about the mutant."""


def tried(module: str, source: str, tests: Sequence[str], *, timeout_s: float) -> tuple[Verdict, str]:
    """Run ``tests`` until the first failure, with ``source`` in the place of ``module`` (a path below the root).

    Returns the verdict and what pytest printed. What takes longer than ``timeout_s`` hangs.
    """
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as output:
        process = _CONTEXT.Process(target=_run, args=(module, source, tuple(tests), output.name))
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
            return Verdict.HUNG, output.read()
        match process.exitcode:
            case 0:
                return Verdict.SURVIVED, output.read()
            case 1 | 2 | 3:  # a failed test, a module that can't be imported, an error inside pytest's hooks
                return Verdict.KILLED, output.read()
            case code:
                raise UntestableError(f"pytest ended with {code} on {' '.join(tests)}:\n{output.read()}")


def _run(module: str, source: str, tests: tuple[str, ...], output: str) -> None:
    """The process: its exit code is pytest's."""
    import pytest  # noqa: PLC0415 - here, and not where trials are collected
    from hypothesis import Phase, settings  # noqa: PLC0415 - as above

    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    printed = os.open(output, os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    # The first counterexample is enough.
    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
    settings.load_profile("mutants")
    sys.meta_path.insert(0, _Mutated(module, source))
    # The server has imported pytest's plugins already, which pytest warns of.
    warned = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(pytest.main(["-x", "-q", "--tb=short", "--no-showlocals", "-p", "no:cacheprovider", *warned, *tests]))


class _Mutated(MetaPathFinder, Loader):
    """Imports one module from the text given."""

    def __init__(self, module: str, source: str) -> None:
        self._file = str(ROOT / module)
        self._name = module.removesuffix(".py").replace("/", ".")
        self._source = source

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """The mutant, under the name of the module."""
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._file, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        """Run the mutant's code."""
        exec(compile(self._source, self._file, "exec"), module.__dict__)  # noqa: S102 - it is our own module
