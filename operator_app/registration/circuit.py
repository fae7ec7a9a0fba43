"""Whether an outside registry is called at all: one circuit breaker for each registry, shared by all proxies. Pure.

A registry that hangs costs a whole timeout for each call. While its circuit is open, calls fail at once with the error
message of the failure that opened it, so an outage costs one timeout for each open period, however many proxies use
the registry.

Retries of a single record belong to ``backoff``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from operator_app.errors import TransientError

OPEN_BASE_S: Final = 0.5
OPEN_CAP_S: Final = 10.0
"""A circuit is open for at most this long, unless the registry asks for more (``Retry-After``)."""


class CircuitOpenError(TransientError):
    """The registry was not called, because its circuit is open; try again in ``open_s`` seconds.

    The message is that of the failure that opened the circuit.
    """

    def __init__(self, message: str, *, open_s: float) -> None:
        super().__init__(message)
        self.open_s = open_s


@dataclass(slots=True)
class _OpenCircuit:
    message: str
    failures: int
    step_s: float
    until_mono: float
    is_probed: bool = False


@dataclass(frozen=True, slots=True)
class Permit:
    """Permission for one call to ``registry``. ``probes`` is the open circuit that the call may close, if any."""

    registry: str
    probes: _OpenCircuit | None


class CircuitBreaker:
    """One circuit for each registry: closed (every call is permitted) or open (only a probe is).

    A failure opens the circuit for ``min(cap_s, base_s * 2 ** (failures - 1))`` seconds, of which the second half is
    random, and for at least as long as the registry requested. After that time one call at a time is permitted as a
    probe: a success closes the circuit, a failure opens it for longer. Calls that were in flight when the circuit
    opened count as one failure together. An answer that is neither, such as the refusal of one hostname, changes
    nothing.

    ``rand`` gives numbers in [0, 1). Memory is proportional to the number of registries.
    """

    def __init__(self, *, rand: Callable[[], float], base_s: float = OPEN_BASE_S, cap_s: float = OPEN_CAP_S) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._rand = rand
        self._open: dict[str, _OpenCircuit] = {}

    def acquire(self, registry: str, *, now_mono: float) -> Permit:
        """Permission for one call to ``registry``, to be ended by :meth:`release`.

        Raises ``CircuitOpenError`` while the circuit is open and it is too early for a probe, or one is in flight.
        """
        circuit = self._open.get(registry)
        if circuit is None:
            return Permit(registry, None)
        left_s = circuit.until_mono - now_mono
        if left_s > 0 or circuit.is_probed:
            # How long the probe in flight takes is unknown: wait for about as long as the circuit was open last.
            raise CircuitOpenError(circuit.message, open_s=left_s if left_s > 0 else self._jittered(circuit.step_s))
        circuit.is_probed = True
        return Permit(registry, circuit)

    def succeeded(self, permit: Permit) -> None:
        """Close the circuit: the registry has done what the call asked for."""
        self._open.pop(permit.registry, None)

    def failed(self, permit: Permit, message: str, *, now_mono: float, retry_after_s: float | None = None) -> float:
        """Open the circuit: the registry did not answer, or only that it can't. Returns the seconds it stays open.

        ``message`` becomes that of ``CircuitOpenError``; ``retry_after_s`` is what the registry requested, in seconds.
        """
        circuit = self._open.get(permit.registry)
        if circuit is None or circuit is permit.probes:
            failures = 0 if circuit is None else circuit.failures
            step_s = min(self._cap_s, self._base_s * 2.0 ** min(failures, 60))
            circuit = _OpenCircuit(message, failures + 1, step_s, now_mono + self._jittered(step_s))
            self._open[permit.registry] = circuit
        circuit.until_mono = max(circuit.until_mono, now_mono + (retry_after_s or 0.0))
        return circuit.until_mono - now_mono

    def release(self, permit: Permit) -> None:
        """The call has ended, in whichever way. If a probe neither succeeded nor failed, the next call may probe."""
        if permit.probes is not None:
            permit.probes.is_probed = False

    def _jittered(self, step_s: float) -> float:
        return step_s * (1 + self._rand()) / 2
