"""Backpressure: what is delayed, by how much, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_app.controller.backpressure import HALF_LIFE_S, LEAST_SHARE, Backpressure
from operator_app.controller.workqueue import Priority


def test_without_refusals_nobody_waits() -> None:
    """Without 429s there is no delay and all workers run."""
    calm = Backpressure()
    assert [calm.delay_s(each, now_mono=5.0) for each in Priority] == [0.0, 0.0, 0.0]
    assert calm.share(now_mono=5.0) == 1.0


def test_one_refusal_slows_resyncs_alone() -> None:
    """Resyncs are delayed first."""
    backpressure = Backpressure()
    backpressure.refused(now_mono=100.0)
    assert backpressure.delay_s(Priority.RESYNC, now_mono=100.0) == pytest.approx(12.0)
    assert backpressure.delay_s(Priority.REPAIR, now_mono=100.0) == 0.0
    assert backpressure.delay_s(Priority.USER, now_mono=100.0) == 0.0


def test_full_backpressure_slows_users_least() -> None:
    """At level 1 users' edits wait least and resyncs longest, and some workers still run."""
    backpressure = Backpressure()
    for _ in range(50):
        backpressure.refused(now_mono=1.0)
    assert backpressure.level(now_mono=1.0) == 1.0
    assert [backpressure.delay_s(each, now_mono=1.0) for each in Priority] == pytest.approx([1.0, 10.0, 60.0])
    assert backpressure.share(now_mono=1.0) == pytest.approx(LEAST_SHARE)


def test_backpressure_fades_and_ends() -> None:
    """It halves in every half-life and is exactly 0 in the end."""
    backpressure = Backpressure()
    backpressure.refused(now_mono=0.0)
    assert backpressure.level(now_mono=HALF_LIFE_S) == pytest.approx(0.1)
    assert backpressure.level(now_mono=10 * HALF_LIFE_S) == 0.0


@given(st.lists(st.floats(0, 100), max_size=30))
def test_priorities_never_swap(gaps: list[float]) -> None:
    """Whatever the refusals, a resync waits at least as long as a repair, and a repair as long as a user's edit."""
    backpressure, now = Backpressure(), 0.0
    for gap in gaps:
        now += gap
        backpressure.refused(now_mono=now)
        user, repair, resync = (backpressure.delay_s(each, now_mono=now) for each in Priority)
        assert 0.0 <= user <= repair <= resync
        assert LEAST_SHARE <= backpressure.share(now_mono=now) <= 1.0


@given(st.integers(1, 50))
def test_nothing_waits_longer_than_the_backpressure_lasts(refusals: int) -> None:
    """A delayed key runs before the level has faded to 0."""
    backpressure = Backpressure()
    for _ in range(refusals):
        backpressure.refused(now_mono=0.0)
    longest_s = max(backpressure.delay_s(each, now_mono=0.0) for each in Priority)
    assert backpressure.level(now_mono=longest_s) > 0.0
