"""docs/features.md names every field of the spec, no other, and tests that exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from operator_app.api.crd import crds
from operator_app.api.kinds import Object
from tests.paths import MANIFESTS

ROOT: Final = MANIFESTS.parent
SPEC: Final[Object] = crds()[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


TEXT: Final = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")


def rows() -> list[tuple[set[str], set[str]]]:
    """The fields and the tests of each row of the first table."""
    text = TEXT.partition("\n## ")[0]
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    return [(set(re.findall("`([^`]+)`", row[1])), set(re.findall("`([^`]+)`", row[2]))) for row in cells]


def paths(schema: Object, path: str = "") -> Iterator[str]:
    """Every property below ``schema``; items of lists have no part of their own."""
    for name, inner in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        yield here
        yield from paths(inner, here)
        yield from paths(inner.get("items", {}), here)


def test_every_field_is_on_the_page_and_no_other() -> None:
    """Each field of the schema, or what contains it, is in a row; each row names fields that exist."""
    known, told = set(paths(SPEC)), set().union(*(fields for fields, _ in rows()))
    assert told <= known, told - known
    leaves = {each for each in known if not any(other.startswith(f"{each}.") for other in known)}
    untold = {each for each in leaves if not any(each == field or each.startswith(f"{field}.") for field in told)}
    assert untold == set()


def test_every_row_names_tests_that_exist() -> None:
    """A row without a test would be a promise."""
    for fields, tests in rows():
        assert tests, fields
        for each in tests:
            file, _, function = each.partition("::")
            text = Path(ROOT / file).read_text(encoding="utf-8")
            assert f"def {function}(" in text, each


def test_what_is_missing_is_told_with_a_reason() -> None:
    """Each row of the comparison says of each of the others whether it has the feature, and why it is not here."""
    section = TEXT.partition("\n## What others have and this has not\n")[2].partition("\n## ")[0]
    compared = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    assert compared[0][1:4] == ["Contour", "Envoy Gateway", "ingress-nginx"]
    assert len(compared) >= 17
    for feature, *others, reason in compared[2:]:
        assert len(others) == 3, feature
        assert set(others) <= {"yes", "some", "no"}, feature
        assert "yes" in others or "some" in others, feature
        assert len(reason.split()) >= 4, feature
