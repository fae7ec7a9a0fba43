"""How long an outside registry is left alone after it failed: as a whole, and about one proxy. Pure.

This is apart from the workqueue's backoff, so that a registry that is down delays nothing but itself: rounds go on, and
children are repaired at once. In the pause the last problem stands.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from operator_app.errors import TransientError
from operator_app.registration.registry import Record, Registration
from operator_app.results import Outcome, Problem

OPEN_BASE_S: Final = 0.5
OPEN_CAP_S: Final = 10.0
"""No rest is longer than this, unless the registry asks for more."""


@dataclass(frozen=True, slots=True)
class _Pause:
    record: Record
    problem: Problem
    failures: int
    until_mono: float
    is_asked_for: bool


class Backoff:
    """Pauses by UID: ``min(cap_s, base_s * 2 ** (failures - 1))`` seconds, of which the second half is random.

    ``rand`` gives numbers in [0, 1). A pause ends early when the record changes, unless the registry asked for it
    (``retry_after_s``), in which case it is at least that long. A terminal problem pauses by ``cap_s`` at once.
    Memory is proportional to the records that fail.
    """

    def __init__(self, *, base_s: float, cap_s: float, rand: Callable[[], float]) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._rand = rand
        self._pauses: dict[str, _Pause] = {}

    def pause(self, record: Record, *, now_mono: float) -> Registration | None:
        """What to answer without asking the registry; ``None``: ask it."""
        pause = self._pauses.get(record.uid)
        if pause is None or pause.until_mono <= now_mono or (pause.record != record and not pause.is_asked_for):
            return None
        return Registration(Outcome.SKIPPED, pause.problem, requeue_after_s=pause.until_mono - now_mono)

    def failed(
        self, record: Record, problem: Problem, *, now_mono: float, asked_s: float | None = None
    ) -> Registration:
        """Begin a pause because of ``problem``, and give the answer for it. ``asked_s`` is the registry's own wish."""
        failures = self._failures(record)
        step_s = self._cap_s if problem.needs_user_action else self._step_s(failures)
        pause_s = max(self._with_chance(step_s), asked_s or 0.0)
        self._pauses[record.uid] = _Pause(record, problem, failures + 1, now_mono + pause_s, asked_s is not None)
        return Registration(Outcome.SKIPPED, problem, requeue_after_s=pause_s)

    def defer(self, record: Record, problem: Problem, *, now_mono: float, open_s: float) -> Registration:
        """As :meth:`failed`, of a record about which a resting registry was not asked: it comes back behind the rest.

        It falls behind as if it had failed, but for the first time, so that an edit waits for the rest alone.
        """
        failures = self._failures(record)
        pause_s = max(self._with_chance(self._step_s(failures - 1)) if failures else 0.0, open_s)
        self._pauses[record.uid] = _Pause(record, problem, failures + 1, now_mono + pause_s, is_asked_for=False)
        return Registration(Outcome.SKIPPED, problem, requeue_after_s=pause_s)

    def _failures(self, record: Record) -> int:
        last = self._pauses.get(record.uid)
        return 0 if last is None or last.record != record else last.failures

    def _step_s(self, failures: int) -> float:
        return self._base_s * 2.0 ** min(failures, 60)

    def _with_chance(self, step_s: float) -> float:
        return min(self._cap_s, step_s) * (1 + self._rand()) / 2

    def forget(self, uid: str) -> None:
        """The registry has answered about this proxy, or there is nothing to ask any more."""
        self._pauses.pop(uid, None)


class CircuitOpenError(TransientError):
    """A resting registry was not asked; the sentence is that of its failure. It may be asked in ``open_s`` seconds."""

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
    """The right to one call; ``rest`` is what it tries to end, ``None`` where the registry works."""

    registry: str
    rest: _OpenCircuit | None


class CircuitBreaker:
    """Rests by registry, so that one that hangs costs one timeout for each rest, however many proxies need it.

    After a failure no call is let through for ``min(cap_s, base_s * 2 ** (failures - 1))`` seconds, of which the second
    half is random, and for as long as the registry asked. Then one call at a time is, until one ends the rest by a
    success, or begins a longer one by a failure. Failures of calls that were under way together count once. An answer
    that is neither, such as the refusal of one name, changes nothing.

    ``rand`` gives numbers in [0, 1). Memory is proportional to the registries.
    """

    def __init__(self, *, rand: Callable[[], float], base_s: float = OPEN_BASE_S, cap_s: float = OPEN_CAP_S) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._rand = rand
        self._rests: dict[str, _OpenCircuit] = {}

    def acquire(self, registry: str, *, now_mono: float) -> Permit:
        """Permission for one call to ``registry``, to be ended by :meth:`release`.

        Raises ``CircuitOpenError`` while the circuit is open.
        """
        rest = self._rests.get(registry)
        if rest is None:
            return Permit(registry, None)
        left_s = rest.until_mono - now_mono
        if left_s > 0 or rest.is_probed:
            # Nobody knows how long the call that tries will take.
            raise CircuitOpenError(rest.message, open_s=left_s if left_s > 0 else self._with_chance(rest.step_s))
        rest.is_probed = True
        return Permit(registry, rest)

    def succeeded(self, turn: Permit) -> None:
        """The registry has done what it was asked."""
        self._rests.pop(turn.registry, None)

    def failed(self, turn: Permit, message: str, *, now_mono: float, asked_s: float | None = None) -> float:
        """The registry gave no answer, or none but that it can't. Returns the seconds that it rests from now on.

        ``asked_s`` is the registry's own wish.
        """
        known = self._rests.get(turn.registry)
        if known is None or known is turn.rest:
            failures = 0 if known is None else known.failures
            step_s = min(self._cap_s, self._base_s * 2.0 ** min(failures, 60))
            known = _OpenCircuit(message, failures + 1, step_s, now_mono + self._with_chance(step_s))
            self._rests[turn.registry] = known
        known.until_mono = max(known.until_mono, now_mono + (asked_s or 0.0))
        return known.until_mono - now_mono

    def release(self, turn: Permit) -> None:
        """The call has ended, however it did; where that has decided nothing, the next one may try."""
        if turn.rest is not None:
            turn.rest.is_probed = False

    def _with_chance(self, step_s: float) -> float:
        return step_s * (1 + self._rand()) / 2
