"""The mutants of ``make mutants``: what is made of a module, what is left alone, and that a sample stays the same."""

import ast

import pytest

from tests.mutants.__main__ import MODULES, StaleMutantError, _named, sampled
from tests.mutants.named import NAMED, Named
from tests.mutants.operators import mutants
from tests.paths import ROOT

SOURCE = '''
"""A module."""

LIMIT: int = 3


def wait(seconds: float, *, ready: bool = True) -> int:
    """A function."""
    log.info("waiting", seconds=seconds)
    if seconds < 1 and ready:
        close(seconds)
    for each in range(2):
        continue
    return {"a": 1} | {"b": 2} if max(seconds, 1) else None
'''


def changes_of(source: str) -> list[str]:
    """What is changed in each mutant."""
    return [each.name.partition(": ")[2] for each in mutants("module.py", source)]


def test_each_mutant_is_one_small_change() -> None:
    """Comparisons, boolean operators, constants, conditions, calls, sides of a merge; each compiles."""
    found = changes_of(SOURCE)
    for expected in (
        "'seconds < 1' compares by LtE",
        "'seconds < 1 and ready' becomes or",
        "'True' is negated",
        "'close(seconds)' is not done",
        "'continue' goes on",
        "\"{'a': 1} | {'b': 2}\" loses its right side",
        "\"{'a': 1} | {'b': 2}\" loses its left side",
        "'max(seconds, 1)' calls min",
    ):
        assert expected in found
    for each in mutants("module.py", SOURCE):
        assert ast.dump(ast.parse(each.source())) != ast.dump(ast.parse(SOURCE)), each.name


def test_logs_docstrings_annotations_and_module_constants_are_left_alone() -> None:
    """Nobody's test need pin them."""
    found = " ".join(changes_of(SOURCE))
    assert "waiting" not in found
    assert "A function" not in found
    assert "'3'" not in found


def test_a_name_and_its_rank_survive_edits_elsewhere() -> None:
    """So a sample changes only where the code does."""
    before = {each.name: each.rank for each in mutants("module.py", SOURCE)}
    after = {each.name: each.rank for each in mutants("module.py", "def other() -> bool:\n    return False\n" + SOURCE)}
    assert before.items() <= after.items()
    assert len(before) == len(set(before))


def test_every_named_mutant_is_about_text_that_is_there() -> None:
    """Else the guarantee has moved, and its mutant has to follow: here and not only once a week."""
    for each in NAMED:
        assert _named(each).source() != (ROOT / each.module).read_text()
        ast.parse(_named(each).source())
        assert all((ROOT / test).exists() for test in each.tests)
    with pytest.raises(StaleMutantError):
        _named(Named("gone", "operator_app/apply.py", "text that is not there", "", ()))


def test_every_module_has_a_sample_and_tests_that_exist() -> None:
    """The modules that carry the guarantees."""
    assert {trial.module for trial in sampled()} == set(MODULES)
    assert all((ROOT / test).exists() for tests in MODULES.values() for test in tests)
