"""docs/ideas.md: its invariants are counted, and every test that it names exists where it says."""

import re
from typing import Final

from tests.paths import ROOT
from tests.unit.project.definitions import defined_tests

PAGE: Final = (ROOT / "docs" / "ideas.md").read_text(encoding="utf-8")
CONTRACT: Final = (
    "tests/e2e/api_server/test_client_contract.py",
    "tests/e2e/api_server/test_repeated_verbs.py",
)
"""Where the behaviour of the API server is measured."""


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    table = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_every_test_named_exists() -> None:
    """A claim on this page is held by the test beside it."""
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named
    assert named - set(defined_tests()) == set()


def test_every_cell_about_a_verb_is_measured() -> None:
    """Each cell of the table of verbs names tests that run against a real API server."""
    defined = defined_tests()
    table = rows("What repeating a verb does")
    assert {"POST", "PUT", "JSON patch", "merge patch", "strategic merge patch", "apply", "DELETE"} == {
        row[0].split(",")[0] for row in table
    }
    for row in table:
        for cell in row[1:]:
            named = re.findall(r"`(test_\w+)`", cell)
            assert named, cell
            for name in named:
                assert {str(file) for file in defined[name]} & set(CONTRACT), name


def test_every_invariant_is_reported_with_its_proof_or_without() -> None:
    """Thirty invariants, in their order, each with a test that exists or with the words "not yet"."""
    table = rows("What each invariant prevents")
    assert [row[0] for row in table] == [str(number) for number in range(1, 31)]
    for number, rule, prevented, proof in table:
        assert rule, number
        assert prevented, number
        assert re.search(r"`test_\w+`", proof) or "not yet" in proof, number
