"""The README is short, and the tests that prove its promises exist."""

import re
from typing import Final

from tests.paths import ROOT
from tests.unit.project.definitions import defined_tests

README: Final = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text below a second-level heading, up to the next one."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_it_is_read_in_five_minutes() -> None:
    """About 120 lines; what is longer belongs to a page below docs."""
    assert len(README.splitlines()) <= 130


def test_what_it_gives_and_what_is_missing_come_first() -> None:
    """A reader who needs something that is not there learns it on the first screen, feature by feature."""
    headings = re.findall(r"^## (.+)$", README, re.MULTILINE)
    assert headings[:2] == ["What a tenant gets", "Two commands"]
    rows = [row.split("|")[1:-1] for row in section("What a tenant gets").splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 8
    assert all(len(row) == 3 and all(cell.strip() for cell in row[:2]) for row in rows)


def test_every_promise_names_a_test_that_exists() -> None:
    """A promise without a test is none."""
    defined = set(defined_tests())
    promises = [row for row in section("What it promises").splitlines() if row.startswith("| ")][1:]
    assert promises
    for row in promises:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= defined, row
