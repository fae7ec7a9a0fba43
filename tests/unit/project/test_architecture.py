"""docs/architecture.md has one sentence for each package and each module at the top, and for no other."""

import re
from typing import Final

from tests.paths import ROOT
from tests.unit.project.definitions import packages, top_modules

PAGE: Final = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, str]:
    """The table below a heading: what stands in its first column, and the sentence beside it."""
    table = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", table, re.MULTILINE))


def test_every_package_has_its_sentence() -> None:
    """The table of packages names those that exist, each with one sentence."""
    told = rows("Packages")
    assert set(told) == packages()
    assert all(sentence.endswith(".") and ". " not in sentence for sentence in told.values())


def test_every_module_at_the_top_has_its_sentence() -> None:
    """What is in no package is what composes them, and the page says how."""
    told = rows("At the top")
    assert set(told) == top_modules()
    assert all(sentence.endswith(".") and ". " not in sentence for sentence in told.values())
