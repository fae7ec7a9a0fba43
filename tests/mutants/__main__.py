"""``python -m tests.mutants [PART OF A NAME ...]``: unit tests against wrong versions of the modules that they test.

Prints what survives as it goes, and ``mutants: N, killed: M`` at the end; the exit code is 0 if M / N is at least
``ENOUGH``. Of each module a sample is taken that depends on the mutants' names alone, so two runs on one commit try the
same ones, and an edit changes the sample only where it changes the code. ``MUTANTS_EACH`` is the sample's size.
With parts of names only the mutants are tried whose names have one of them, all of these.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from tests.mutants.named import NAMED, Named
from tests.mutants.operators import Mutant, mutants
from tests.mutants.process import Verdict, tried
from tests.paths import ROOT

ENOUGH: Final = 0.95
EACH: Final = int(os.environ.get("MUTANTS_EACH", "14"))
"""Mutants of one module."""

HOUR_S: Final = 3600.0
PATIENCE_S: Final = 120.0
"""A mutant hangs once its tests take longer than this, and than all tests without a mutant."""

AT_ONCE: Final = int(os.environ.get("MUTANTS_AT_ONCE", "2"))

MODULES: Final[dict[str, tuple[str, ...]]] = {
    "operator_app/apply.py": ("tests/unit/test_apply.py", "tests/unit/test_reconcile.py"),
    "operator_app/ssa/fields.py": ("tests/unit/ssa/test_fields.py", "tests/unit/ssa/test_changes.py"),
    "operator_app/ssa/changes.py": ("tests/unit/ssa/test_changes.py",),
    "operator_app/ssa/comanagers.py": ("tests/unit/ssa/test_comanagers.py", "tests/unit/test_apply.py"),
    "operator_app/ssa/contention.py": ("tests/unit/ssa/test_contention.py", "tests/unit/test_apply.py"),
    "operator_app/ssa/unblock.py": ("tests/unit/ssa/test_unblock.py", "tests/unit/test_apply.py"),
    "operator_app/status.py": ("tests/unit/test_status.py", "tests/unit/test_reconcile.py"),
    "operator_app/kube/store.py": ("tests/unit/kube/test_store.py", "tests/unit/controller/test_resync.py"),
    "operator_app/kube/fencing.py": ("tests/unit/kube/test_fencing.py", "tests/unit/kube/test_client.py"),
    "operator_app/cleanup.py": ("tests/unit/test_cleanup.py", "tests/unit/test_reconcile.py"),
    "operator_app/registration/audit.py": ("tests/unit/registration/test_audit.py",),
    "operator_app/registration/backoff.py": ("tests/unit/registration/test_backoff.py",),
    "operator_app/registration/circuit.py": ("tests/unit/registration/test_circuit.py",),
    "operator_app/registration/claims.py": ("tests/unit/registration", "tests/unit/test_reconcile.py"),
    "operator_app/registration/ledger.py": ("tests/unit/registration", "tests/unit/test_reconcile.py"),
    "operator_app/registration/registrar.py": ("tests/unit/registration", "tests/unit/test_reconcile.py"),
}
"""What is mutated, and the unit tests that have to notice, the likeliest first."""

EQUIVALENT: Final[frozenset[str]] = frozenset()
"""Names of mutants that no test can notice, since they behave as the original does."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One mutant and the tests that have to notice it."""

    name: str
    module: str
    source: Callable[[], str]
    tests: tuple[str, ...]


def originals(trials: list[Trial]) -> Iterator[Trial]:
    """One trial of an unchanged module for each set of tests: where these do not survive, no verdict means anything."""
    seen: dict[tuple[str, ...], str] = {}
    for each in trials:
        seen.setdefault(each.tests, each.module)
    for tests, module in seen.items():
        yield Trial(f"{module} as it is, by {', '.join(tests)}", module, (ROOT / module).read_text, tests)


class StaleMutantError(Exception):
    """A named mutant is about text that is not in its module, or more than once."""


def sampled() -> Iterator[Trial]:
    """The sample of every module."""
    for module, tests in MODULES.items():
        found = [each for each in mutants(module, (ROOT / module).read_text()) if each.name not in EQUIVALENT]
        for each in sorted(found, key=lambda each: each.rank)[:EACH]:
            yield _trial(each, tests)


def matching(parts: list[str]) -> Iterator[Trial]:
    """All mutants, in the sample or not, whose names have one of these parts."""
    for module, tests in MODULES.items():
        for each in mutants(module, (ROOT / module).read_text()):
            if any(part in str(each) for part in parts):
                yield _trial(each, tests)
    yield from (_named(each) for each in NAMED if any(part in each.name for part in parts))


def main(parts: list[str]) -> int:
    """Try every mutant; returns the exit code."""
    try:
        trials = [*matching(parts)] if parts else [*map(_named, NAMED), *sampled()]
    except StaleMutantError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 1
    begun_mono = time.monotonic()

    def report(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - begun_mono), 60)
        print(f"{minutes:3d}:{seconds:02d} {line}", flush=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number, (trial, verdict, printed) in enumerate(_tried(pool, originals(trials), HOUR_S), 1):
            if verdict is not Verdict.SURVIVED:
                print(f"mutants: the tests fail without any: {trial.name}\n{printed}", file=sys.stderr)
                return 1
            report(f"{number}. no mutant: {trial.name}")
        # All of these tests together took less than one mutant may take.
        timeout_s = max(PATIENCE_S, time.monotonic() - begun_mono)
        killed = 0
        for number, (trial, verdict, _) in enumerate(_tried(pool, trials, timeout_s), 1):
            killed += verdict is not Verdict.SURVIVED
            report(f"{number}/{len(trials)} {verdict.value}: {trial.name}")
    print(f"mutants: {len(trials)}, killed: {killed}")
    return 0 if trials and killed >= ENOUGH * len(trials) else 1


def _tried(pool: ThreadPoolExecutor, trials: Iterable[Trial], timeout_s: float) -> Iterator[tuple[Trial, Verdict, str]]:
    """Each trial with its verdict and what was printed, in their order."""

    def result(trial: Trial) -> tuple[Trial, Verdict, str]:
        return trial, *tried(trial.module, trial.source(), trial.tests, timeout_s=timeout_s)

    return pool.map(result, trials)


def _trial(mutant: Mutant, tests: tuple[str, ...]) -> Trial:
    return Trial(str(mutant), mutant.module, mutant.source, tests)


def _named(named: Named) -> Trial:
    source = (ROOT / named.module).read_text()
    if source.count(named.old) != 1:
        raise StaleMutantError(f"{named.name}: its text is {source.count(named.old)} times in {named.module}")
    return Trial(
        f"{named.module} {named.name}", named.module, lambda: source.replace(named.old, named.new), named.tests
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
