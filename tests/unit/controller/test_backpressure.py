"""Backpressure: who slows down, by how much, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_app.controller.backpressure import HALF_LIFE_S, LEAST_SHARE, Backpressure
from operator_app.controller.workqueue import Priority


def test_without_refusals_nobody_waits() -> None:
    """A calm API server costs no delay and all workers run."""
    calm = Backpressure()
    assert [calm.delay_s(each, now_mono=5.0) for each in Priority] == [0.0, 0.0, 0.0]
    assert calm.share(now_mono=5.0) == 1.0


def test_one_refusal_slows_sweeps_alone() -> None:
    """Sweeps make room first."""
    backpressure = Backpressure()
    backpressure.refused(now_mono=100.0)
    assert backpressure.delay_s(Priority.RESYNC, now_mono=100.0) == pytest.approx(12.0)
    assert backpressure.delay_s(Priority.REPAIR, now_mono=100.0) == 0.0
    assert backpressure.delay_s(Priority.USER, now_mono=100.0) == 0.0


def test_full_pressure_slows_users_least() -> None:
    """At the highest level everybody waits, in the order of what people wait for, and some workers still run."""
    backpressure = Backpressure()
    for _ in range(50):
        backpressure.refused(now_mono=1.0)
    assert backpressure.level(now_mono=1.0) == 1.0
    assert [backpressure.delay_s(each, now_mono=1.0) for each in Priority] == pytest.approx([1.0, 10.0, 60.0])
    assert backpressure.share(now_mono=1.0) == pytest.approx(LEAST_SHARE)


def test_pressure_fades_and_ends() -> None:
    """It halves in every half-life and is exactly nothing in the end."""
    backpressure = Backpressure()
    backpressure.refused(now_mono=0.0)
    assert backpressure.level(now_mono=HALF_LIFE_S) == pytest.approx(0.1)
    assert backpressure.level(now_mono=10 * HALF_LIFE_S) == 0.0


@given(st.lists(st.floats(0, 100), max_size=30))
def test_priorities_never_swap(gaps: list[float]) -> None:
    """Whatever the refusals, a sweep waits at least as long as a repair, and a repair as long as a user's edit."""
    backpressure, now = Backpressure(), 0.0
    for gap in gaps:
        now += gap
        backpressure.refused(now_mono=now)
        user, repair, sweep = (backpressure.delay_s(each, now_mono=now) for each in Priority)
        assert 0.0 <= user <= repair <= sweep
        assert LEAST_SHARE <= backpressure.share(now_mono=now) <= 1.0


@given(st.integers(1, 50))
def test_nobody_waits_longer_than_the_pressure_lasts(refusals: int) -> None:
    """Whoever was put off begins before, or as soon as, the API server has long been calm again."""
    backpressure = Backpressure()
    for _ in range(refusals):
        backpressure.refused(now_mono=0.0)
    longest_s = max(backpressure.delay_s(each, now_mono=0.0) for each in Priority)
    assert backpressure.level(now_mono=longest_s) > 0.0
