"""The circuit breaker of a registry: when calls fail at once, and when one is permitted as a probe."""

from typing import Final

import pytest

from operator_app.errors import TransientError
from operator_app.registration.circuit import CircuitBreaker, CircuitOpenError, Permit

DOWN: Final = TransientError("DNS did not answer within 5 s")


def a_circuit() -> CircuitBreaker:
    """A circuit that is open for 1, 2, 4, then 5 seconds: the random part is at its maximum."""
    return CircuitBreaker(base_s=1, cap_s=5, rand=lambda: 1.0)


def fail(circuit: CircuitBreaker, permit: Permit, *, now_mono: float, retry_after_s: float | None = None) -> float:
    """End a call with a failure; the seconds that the circuit is open."""
    open_s = circuit.failed(permit, str(DOWN), now_mono=now_mono, retry_after_s=retry_after_s)
    circuit.release(permit)
    return open_s


def test_open_periods_double_up_to_the_cap() -> None:
    """Each failure of a probe doubles the time that the circuit is open."""
    circuit, now_mono = a_circuit(), 0.0
    open_s: list[float] = []
    for _ in range(5):
        open_s.append(fail(circuit, circuit.acquire("dns", now_mono=now_mono), now_mono=now_mono))
        now_mono += open_s[-1]
    assert open_s == [1, 2, 4, 5, 5]


def test_half_of_an_open_period_is_random() -> None:
    """Replicas that saw the same failure do not probe at the same moment."""
    circuit = CircuitBreaker(base_s=2, cap_s=5, rand=lambda: 0.0)
    assert fail(circuit, circuit.acquire("dns", now_mono=0), now_mono=0) == 1


def test_an_open_circuit_refuses_with_its_failure_and_spares_other_registries() -> None:
    """Every call fails with the message of the failure that opened the circuit, and the seconds that are left."""
    circuit = a_circuit()
    fail(circuit, circuit.acquire("dns", now_mono=0), now_mono=0)
    with pytest.raises(CircuitOpenError, match=DOWN.message) as refused:
        circuit.acquire("dns", now_mono=0.25)
    assert refused.value.open_s == 1 - 0.25
    circuit.acquire("other", now_mono=0.25)


def test_after_an_open_period_one_probe_at_a_time_is_permitted() -> None:
    """The first call probes; if it neither succeeds nor fails, the next one does; a success closes the circuit."""
    circuit = a_circuit()
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


def test_failures_of_calls_in_flight_together_count_once() -> None:
    """Sixteen timeouts of one outage are one failure."""
    circuit = a_circuit()
    permits = [circuit.acquire("dns", now_mono=0) for _ in range(16)]
    assert [fail(circuit, permit, now_mono=5) for permit in permits] == [1] * 16
    assert fail(circuit, circuit.acquire("dns", now_mono=6), now_mono=6) == 2


def test_retry_after_prolongs_an_open_period() -> None:
    """``Retry-After`` makes an open period longer, whichever of several calls received it, and never shorter."""
    circuit = a_circuit()
    early, late = (circuit.acquire("dns", now_mono=0) for _ in range(2))
    assert fail(circuit, early, now_mono=0, retry_after_s=0.1) == 1
    assert fail(circuit, late, now_mono=0, retry_after_s=30) == 30
    with pytest.raises(CircuitOpenError):
        circuit.acquire("dns", now_mono=29)
