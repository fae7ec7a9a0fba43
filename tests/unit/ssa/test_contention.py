"""The tracker between two writers of one field: patient at first, ever slower then, and never in the way of others."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_app.ssa.contention import FIELDS, Contention, ContentionTimes, ContentionTracker, RestoredField
from operator_app.ssa.fields import Path

TIMES: Final = ContentionTimes(threshold=3, window_s=60, base_s=2, cap_s=300)
A: Final[Path] = ("f:spec", "f:a")
B: Final[Path] = ("f:spec", "f:b")
UID: Final = "uid-1"


def taken(path: Path = A, wanted: str = "1", *managers: str) -> RestoredField:
    """A field that was taken back; by default from ``rival``."""
    return RestoredField(path, path[-1][2:], wanted, managers or ("rival",))


def removed(path: Path = A) -> RestoredField:
    """A field that somebody had removed."""
    return RestoredField(path, path[-1][2:], "1", ())


def fought(tracker: ContentionTracker, times: int, *fields: RestoredField, now_mono: float = 0.0) -> float:
    """Let the fields be taken back so often, each time as soon as the tracker allows it; returns the last moment."""
    for _ in range(times):
        now_mono += tracker.pause_s(
            UID, {each.path: each.declared for each in fields}, is_repair=False, now_mono=now_mono
        )
        tracker.record(UID, fields, is_repair=False, now_mono=now_mono)
    return now_mono


def test_the_first_repairs_are_not_delayed() -> None:
    """Below the threshold a field is taken back at once and nobody speaks of contention."""
    tracker = ContentionTracker(TIMES)
    assert fought(tracker, TIMES.threshold - 1, taken()) == 0
    assert tracker.pause_s(UID, {A: "1"}, is_repair=False, now_mono=0) == 0
    assert tracker.contention(UID, now_mono=0) is None


def test_pauses_double_up_to_the_cap() -> None:
    """The k-th repair past the threshold is followed by ``min(cap_s, base_s * 2 ** k)`` seconds, however large k is."""
    tracker = ContentionTracker(TIMES)
    now_mono = fought(tracker, TIMES.threshold - 1, taken())
    pauses = []
    for _ in range(1100):
        tracker.record(UID, [taken()], is_repair=False, now_mono=now_mono)
        pauses.append(tracker.pause_s(UID, {A: "1"}, is_repair=False, now_mono=now_mono))
        now_mono += pauses[-1]
    assert pauses[:9] == [2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert pauses[9:] == pytest.approx([300] * len(pauses[9:]))


def test_another_value_is_not_held_up() -> None:
    """A declaration that changes the contended field itself is carried out at once, and counts from one."""
    tracker = ContentionTracker(TIMES)
    fought(tracker, TIMES.threshold, taken())
    assert tracker.pause_s(UID, {A: "1"}, is_repair=False, now_mono=0) == 2
    assert tracker.pause_s(UID, {A: "2"}, is_repair=False, now_mono=0) == 0
    for pause_s in (0, 0, 2):
        tracker.record(UID, [taken(A, "2")], is_repair=False, now_mono=0)
        assert tracker.pause_s(UID, {A: "2"}, is_repair=False, now_mono=0) == pause_s


def test_another_field_is_not_held_up_and_takes_the_contended_one_along() -> None:
    """Beside a contended field, a difference in any other field means: go ahead now."""
    tracker = ContentionTracker(TIMES)
    fought(tracker, TIMES.threshold, taken())
    assert tracker.pause_s(UID, {A: "1", B: "1"}, is_repair=False, now_mono=0) == 0
    assert tracker.pause_s(UID, {B: "1"}, is_repair=False, now_mono=0) == 0


def test_another_object_is_not_held_up() -> None:
    """The same field of another object has a history of its own."""
    tracker = ContentionTracker(TIMES)
    fought(tracker, TIMES.threshold, taken())
    assert tracker.pause_s("uid-2", {A: "1"}, is_repair=False, now_mono=0) == 0
    assert tracker.contention("uid-2", now_mono=0) is None


def test_fields_taken_by_turns_are_counted_each() -> None:
    """Two rivals with a field each, or one that alternates, slow us down as one field alone would."""
    tracker = ContentionTracker(TIMES)
    for _ in range(TIMES.threshold):
        tracker.record(UID, [taken(A, "1", "first")], is_repair=False, now_mono=0)
        tracker.record(UID, [taken(B, "1", "second")], is_repair=False, now_mono=0)
    assert tracker.pause_s(UID, {A: "1"}, is_repair=False, now_mono=0) == 2
    assert tracker.pause_s(UID, {B: "1"}, is_repair=False, now_mono=0) == 2
    assert tracker.contention(UID, now_mono=0) == Contention(("first", "second"), ("a", "b"), 60)


def test_all_who_take_a_field_by_turns_are_named() -> None:
    """In their order and once each, not only whoever was the last."""
    tracker = ContentionTracker(TIMES)
    for name in ("helm", "kubectl-edit", "helm"):
        fought(tracker, 1, taken(A, "1", name))
    contention = tracker.contention(UID, now_mono=0)
    assert contention is not None
    assert contention.managers == ("helm", "kubectl-edit")


def test_removals_are_counted_like_takings() -> None:
    """A writer that removes a field leaves no name behind, and is slowed down all the same."""
    tracker = ContentionTracker(TIMES)
    fought(tracker, TIMES.threshold, removed())
    assert tracker.pause_s(UID, {A: "1"}, is_repair=False, now_mono=0) == 2
    assert str(tracker.contention(UID, now_mono=0)) == "another writer keeps taking a"


@pytest.mark.parametrize(
    ("declared", "given_up"),
    [(A, A), (("f:metadata", "f:annotations", "f:x"), ("f:metadata", "f:annotations")), (("f:spec",), A)],
    ids=["the field", "what holds it", "what it holds"],
)
def test_a_declaration_that_comes_and_goes_is_no_fight(declared: Path, given_up: Path) -> None:
    """A user who sets, unsets and sets a field again many times is served at once each time."""
    tracker = ContentionTracker(TIMES)
    for _ in range(3 * TIMES.threshold):
        assert tracker.pause_s(UID, {declared: "1"}, is_repair=False, now_mono=0) == 0
        tracker.record(UID, [removed(declared)], is_repair=False, now_mono=0)
        tracker.record(UID, [], released=[given_up], is_repair=False, now_mono=0)
    assert tracker.contention(UID, now_mono=0) is None


def test_giving_up_one_field_does_not_end_the_fight_over_another() -> None:
    """Only what is given up is forgotten."""
    tracker = ContentionTracker(TIMES)
    fought(tracker, TIMES.threshold, taken(A), taken(B))
    tracker.record(UID, [], released=[A], is_repair=False, now_mono=0)
    assert tracker.pause_s(UID, {B: "1"}, is_repair=False, now_mono=0) == 2
    contention = tracker.contention(UID, now_mono=0)
    assert contention is not None
    assert contention.fields == ("b",)


@pytest.mark.parametrize("repairs", [3, 8, 20])
def test_a_fight_is_forgotten_by_itself(repairs: int) -> None:
    """Once a repair has lasted for the memory, at least twice the last pause, the count starts anew."""
    tracker = ContentionTracker(TIMES)
    last_mono = fought(tracker, repairs, taken())
    memory_s = max(TIMES.window_s, 2 * tracker.pause_s(UID, {A: "1"}, is_repair=False, now_mono=last_mono))
    contention = tracker.contention(UID, now_mono=last_mono)
    assert contention is not None
    assert contention.forgotten_in_s == pytest.approx(memory_s)
    assert tracker.contention(UID, now_mono=last_mono + memory_s - 0.001) is not None
    assert tracker.contention(UID, now_mono=last_mono + memory_s) is None
    tracker.record(UID, [taken()], is_repair=False, now_mono=last_mono + memory_s)
    assert tracker.pause_s(UID, {A: "1"}, is_repair=False, now_mono=last_mono + memory_s) == 0


def test_repairs_far_apart_are_no_row() -> None:
    """A field that is taken once in a while is taken back at once for ever."""
    tracker = ContentionTracker(TIMES)
    for now_mono in range(0, 6000, 60):
        assert tracker.pause_s(UID, {A: "1"}, is_repair=False, now_mono=now_mono) == 0
        tracker.record(UID, [taken()], is_repair=False, now_mono=now_mono)
    assert tracker.contention(UID, now_mono=5940) is None


def test_fights_of_the_past_are_not_kept() -> None:
    """Memory holds the objects that are fought over, not all that ever were."""
    tracker = ContentionTracker(TIMES)
    for number in range(10_000):
        tracker.record(f"uid-{number}", [taken()], is_repair=False, now_mono=number)
    assert len(tracker._streaks) <= 4 * TIMES.window_s


@given(st.lists(st.tuples(st.sets(st.sampled_from("abc"), min_size=1), st.floats(0, 5)), min_size=1, max_size=80))
def test_a_tireless_rival_gets_ever_fewer_writes(takings: list[tuple[set[str], float]]) -> None:
    """Whatever a rival of three fields takes and when: writes stay below what the three fields' pauses add up to."""
    tracker = ContentionTracker(TIMES)
    now_mono, writes = 0.0, 0
    for names, gap_s in takings:
        now_mono += gap_s
        fields = [taken(("f:spec", f"f:{name}")) for name in sorted(names)]
        if tracker.pause_s(UID, {each.path: each.declared for each in fields}, is_repair=False, now_mono=now_mono) == 0:
            tracker.record(UID, fields, is_repair=False, now_mono=now_mono)
            writes += 1
    # In ``t`` seconds a field is good for the threshold and for as many doublings as fit into t.
    doublings = sum(2 * (2**k - 1) <= now_mono for k in range(1, 20))
    assert writes <= 3 * (TIMES.threshold + doublings + 1)


def test_a_rival_that_takes_another_field_each_time_is_met_as_slowly() -> None:
    """Repairs of one object are bounded together: after four times the threshold the whole object waits."""
    tracker = ContentionTracker(TIMES)
    for number in range(TIMES.object_threshold):
        path: Path = ("f:spec", f"f:{number}")
        assert tracker.pause_s(UID, {path: "1"}, is_repair=True, now_mono=0) == 0
        tracker.record(UID, [taken(path)], is_repair=True, now_mono=0)
    new: dict[Path, str] = {("f:spec", "f:new"): "1"}
    assert tracker.pause_s(UID, new, is_repair=True, now_mono=0) == TIMES.base_s
    assert tracker.pause_s(UID, new, is_repair=False, now_mono=0) == 0, "an edit of the proxy does not wait"
    contention = tracker.contention(UID, now_mono=0)
    assert contention is not None
    assert str(contention) == "rival keeps taking one field after the other"


@given(st.lists(st.tuples(st.sets(st.integers(0, 200), min_size=1), st.floats(0, 1)), min_size=1, max_size=200))
def test_repairs_of_an_object_in_any_window_are_bounded(takings: list[tuple[set[int], float]]) -> None:
    """Whatever fields a rival takes and when, ``bound`` is never exceeded in ``window_s`` seconds."""
    tracker = ContentionTracker(TIMES)
    now_mono, writes_mono = 0.0, list[float]()
    for numbers, gap_s in takings:
        now_mono += gap_s
        fields = [taken(("f:spec", f"f:{number}")) for number in sorted(numbers)]
        wanted = {each.path: each.declared for each in fields}
        if tracker.pause_s(UID, wanted, is_repair=True, now_mono=now_mono) == 0:
            tracker.record(UID, fields, is_repair=True, now_mono=now_mono)
            writes_mono.append(now_mono)
    for since_mono in writes_mono:
        assert sum(since_mono <= each < since_mono + TIMES.window_s for each in writes_mono) <= TIMES.bound


def test_the_default_bound_is_seventeen() -> None:
    """The number that docs/conditions.md promises for any rival of one object, in 60 s."""
    assert ContentionTimes().bound == 17


def test_many_names_and_fields_stay_a_short_sentence() -> None:
    """A rival with 400 manager names takes neither memory nor a status that can't be stored."""
    tracker = ContentionTracker(TIMES)
    for number in range(400):
        fields = [taken(("f:spec", f"f:{each}"), "1", f"manager-{number}-{'x' * 100}") for each in range(100)]
        tracker.record(UID, fields, is_repair=True, now_mono=0)
    assert len(str(tracker.contention(UID, now_mono=0))) < 700
    (streaks,) = tracker._streaks.values()
    assert len(streaks) <= FIELDS + 1


def test_the_default_times() -> None:
    """What ``docs/settings.md`` says, and what the bound of writes follows from."""
    assert ContentionTimes() == ContentionTimes(threshold=3, window_s=60.0, base_s=2.0, cap_s=300.0)


def test_a_known_rival_makes_the_next_restoration_wait_and_each_one_after_it_longer() -> None:
    """The first time it counts as the threshold; from then on it counts as everybody does."""
    tracker, pauses_s, now_mono = ContentionTracker(TIMES), [], 0.0
    rival = RestoredField(A, "a", "1", ("the other installation",), known_rival=True)
    for _ in range(4):
        tracker.record(UID, [rival], is_repair=False, now_mono=now_mono)
        pauses_s.append(tracker.pause_s(UID, {A: "1"}, is_repair=False, now_mono=now_mono))
        now_mono += pauses_s[-1]
    assert pauses_s == [2, 4, 8, 16]
