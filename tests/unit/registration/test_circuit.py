"""The circuit breaker of a registry: when calls fail at once, and when one is let through as a probe."""

from typing import Final

import pytest

from operator_app.errors import TransientError
from operator_app.registration.circuit import CircuitBreaker, CircuitOpenError, Permit

DOWN: Final = TransientError("DNS did not answer within 5 s")


def a_respite() -> CircuitBreaker:
    """Rests of 1, 2, 4, then 5 seconds, where chance gives the longest."""
    return CircuitBreaker(base_s=1, cap_s=5, rand=lambda: 1.0)


def fail(circuit: CircuitBreaker, turn: Permit, *, now_mono: float, retry_after_s: float | None = None) -> float:
    """A call that fails, and the rest that follows."""
    open_s = circuit.failed(turn, str(DOWN), now_mono=now_mono, retry_after_s=retry_after_s)
    circuit.release(turn)
    return open_s


def test_rests_double_up_to_the_cap() -> None:
    """Each failure of a call that was let through doubles the rest."""
    circuit, now_mono = a_respite(), 0.0
    rests = []
    for _ in range(5):
        rests.append(fail(circuit, circuit.acquire("dns", now_mono=now_mono), now_mono=now_mono))
        now_mono += rests[-1]
    assert rests == [1, 2, 4, 5, 5]


def test_half_of_a_rest_is_chance() -> None:
    """Replicas that saw the same failure do not come back together."""
    circuit = CircuitBreaker(base_s=2, cap_s=5, rand=lambda: 0.0)
    assert fail(circuit, circuit.acquire("dns", now_mono=0), now_mono=0) == 1


def test_in_a_rest_the_sentence_stands_and_another_registry_is_asked() -> None:
    """Every call fails with what the one call said, and is told how long."""
    circuit = a_respite()
    fail(circuit, circuit.acquire("dns", now_mono=0), now_mono=0)
    with pytest.raises(CircuitOpenError, match=DOWN.message) as refused:
        circuit.acquire("dns", now_mono=0.25)
    assert refused.value.open_s == 1 - 0.25
    circuit.acquire("other", now_mono=0.25)


def test_behind_a_rest_one_call_at_a_time_is_let_through() -> None:
    """Whoever comes first tries; when that has decided nothing, the next one does; a success lets everybody through."""
    circuit = a_respite()
    fail(circuit, circuit.acquire("dns", now_mono=0), now_mono=0)
    first = circuit.acquire("dns", now_mono=1)
    with pytest.raises(CircuitOpenError) as refused:
        circuit.acquire("dns", now_mono=1)
    assert refused.value.open_s == 1
    circuit.release(first)
    second = circuit.acquire("dns", now_mono=1)
    circuit.succeeded(second)
    circuit.release(second)
    circuit.acquire("dns", now_mono=1)
    assert fail(circuit, circuit.acquire("dns", now_mono=1), now_mono=1) == 1, "and the next failure is a first one"


def test_failures_of_calls_that_were_under_way_together_count_once() -> None:
    """Sixteen timeouts of one outage are one failure."""
    circuit = a_respite()
    turns = [circuit.acquire("dns", now_mono=0) for _ in range(16)]
    assert [fail(circuit, turn, now_mono=5) for turn in turns] == [1] * 16
    assert fail(circuit, circuit.acquire("dns", now_mono=6), now_mono=6) == 2


def test_a_registry_that_asks_for_time_gets_it() -> None:
    """``Retry-After`` makes a rest longer, whichever of several calls was told it, and never shorter."""
    circuit = a_respite()
    early, late = (circuit.acquire("dns", now_mono=0) for _ in range(2))
    assert fail(circuit, early, now_mono=0, retry_after_s=0.1) == 1
    assert fail(circuit, late, now_mono=0, retry_after_s=30) == 30
    with pytest.raises(CircuitOpenError):
        circuit.acquire("dns", now_mono=29)
