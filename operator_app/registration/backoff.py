"""When a record that failed is tried again in its outside registry: one exponential backoff for each record. Pure.

It is separate from the workqueue's backoff, so that a failing registry delays nothing but registration: reconciles of
the proxy go on and its children are repaired at once. Until the pause is over, the last problem stays in the status.

Failures of a registry as a whole belong to ``circuit``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from operator_app.registration.registry import Record, Registration
from operator_app.results import Outcome, Problem


@dataclass(frozen=True, slots=True)
class _Pause:
    record: Record
    problem: Problem
    failures: int
    until_mono: float
    is_requested: bool


class Backoff:
    """Pauses by UID: ``min(cap_s, base_s * 2 ** (failures - 1))`` seconds, of which the second half is random.

    ``rand`` gives numbers in [0, 1). A pause ends early when the record changes, unless the registry requested it
    (``retry_after_s``); then it lasts at least that long. A problem that needs user action pauses for ``cap_s`` at
    once. Memory is proportional to the number of records that are failing.
    """

    def __init__(self, *, base_s: float, cap_s: float, rand: Callable[[], float]) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._rand = rand
        self._pauses: dict[str, _Pause] = {}

    def pause(self, record: Record, *, now_mono: float) -> Registration | None:
        """The last problem and the seconds that are left while ``record`` is paused; ``None`` if it may be tried."""
        pause = self._pauses.get(record.uid)
        if pause is None or pause.until_mono <= now_mono or (pause.record != record and not pause.is_requested):
            return None
        return Registration(Outcome.SKIPPED, pause.problem, requeue_after_s=pause.until_mono - now_mono)

    def failed(
        self, record: Record, problem: Problem, *, now_mono: float, retry_after_s: float | None = None
    ) -> Registration:
        """Start a pause because of ``problem`` and return the result to report.

        ``retry_after_s`` is what the registry requested, in seconds; the pause is never shorter.
        """
        failures = self._failures(record)
        step_s = self._cap_s if problem.needs_user_action else self._step_s(failures)
        pause_s = max(self._jittered(step_s), retry_after_s or 0.0)
        self._pauses[record.uid] = _Pause(record, problem, failures + 1, now_mono + pause_s, retry_after_s is not None)
        return Registration(Outcome.SKIPPED, problem, requeue_after_s=pause_s)

    def defer(self, record: Record, problem: Problem, *, now_mono: float, open_s: float) -> Registration:
        """Start a pause of at least ``open_s`` seconds for a record that was not tried: the circuit is open.

        Counts as a failure, except the first time, so an edit waits only until the next probe of the circuit.
        """
        failures = self._failures(record)
        pause_s = max(self._jittered(self._step_s(failures - 1)) if failures else 0.0, open_s)
        self._pauses[record.uid] = _Pause(record, problem, failures + 1, now_mono + pause_s, is_requested=False)
        return Registration(Outcome.SKIPPED, problem, requeue_after_s=pause_s)

    def _failures(self, record: Record) -> int:
        last = self._pauses.get(record.uid)
        return 0 if last is None or last.record != record else last.failures

    def _step_s(self, failures: int) -> float:
        return self._base_s * 2.0 ** min(failures, 60)

    def _jittered(self, step_s: float) -> float:
        return min(self._cap_s, step_s) * (1 + self._rand()) / 2

    def forget(self, uid: str) -> None:
        """Drop the pause of the proxy with this UID: its record succeeded, or is not to be registered any more."""
        self._pauses.pop(uid, None)
