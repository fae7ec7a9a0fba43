"""Lives with failing DNS servers: which fault strikes where, and how the page tells it."""

from collections import Counter
from itertools import product

from tests.e2e.faults.lives import STEPS, Strikes, each_fault, one_fault_each
from tests.e2e.faults.outside import CALLS, OutsideRun
from tests.e2e.faults.report import counts, page

POINTS = {step: (("GET", 1), ("PATCH", 1), ("GET", 2))[:size] for step, size in zip(STEPS, (2, 1, 3, 1), strict=True)}
FAULTS = ("500", "hangs")


def struck(plans: list[Strikes]) -> Counter[tuple[str, str, int, str]]:
    """How often each fault strikes at each point."""
    return Counter((step, *strike) for plan in plans for step, strike in plan.items() if strike is not None)


def test_each_fault_strikes_once_at_every_point() -> None:
    """In as few lives as the step with most points needs, since a life has one fault in each step."""
    plans = each_fault(POINTS, FAULTS)
    assert struck(plans) == Counter(
        (step, method, nth, fault) for step in STEPS for (method, nth), fault in product(POINTS[step], FAULTS)
    )
    assert len(plans) == 6
    assert all(tuple(plan) == STEPS for plan in plans)


def test_a_selection_has_every_point_and_the_faults_in_turn() -> None:
    """Seven points, and both faults as often as that allows."""
    plans = one_fault_each(POINTS, FAULTS)
    assert {each[:3] for each in struck(plans)} == {(step, *point) for step in STEPS for point in POINTS[step]}
    assert Counter(fault for *_, fault in struck(plans)) == {"500": 4, "hangs": 3}


def test_the_page_has_a_table_for_each_part() -> None:
    """With its own faults as columns; a step that did not survive counts, and is told."""
    runs = [
        OutsideRun("removal", "PATCH", 1, "500"),
        OutsideRun("deletion", "UPDATE", 1, "REFUSED", ["a record is left"], "lives by updates"),
        OutsideRun("deletion", "QUERY", 1, "BADSIG", [], "lives by updates"),
        OutsideRun("deletion", "QUERY", 1, "REFUSED", [], "lives by updates"),
        OutsideRun("deletion", "UPDATE", 1, "BADSIG", [], "lives by updates"),
    ]
    assert counts((), runs) == (5, 4)
    text = page([], runs, quiet_s=20, resync_interval_s=6)
    assert f"## {CALLS[0].upper()}{CALLS[1:]}\n\n| point | 500 |" in text
    assert "| deletion: UPDATE #1 | **FAILED** | survived |" in text
    assert "| lives by updates | 4 | 3 |" in text
    assert "- lives by updates, deletion, UPDATE #1, REFUSED: a record is left" in text
