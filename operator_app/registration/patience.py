"""How long an outside registry is left alone about one proxy after it failed. Pure.

This is apart from the workqueue's backoff, so that a registry that is down delays nothing but itself: rounds go on, and
children are repaired at once. In the pause the last problem stands.
"""

from collections.abc import Callable
from dataclasses import dataclass

from operator_app.apply import Outcome, Problem
from operator_app.registration import Record, Registration


@dataclass(frozen=True, slots=True)
class _Pause:
    record: Record
    problem: Problem
    failures: int
    until_mono: float
    is_asked_for: bool


class Patience:
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
        return Registration(Outcome.SKIPPED, pause.problem, again_after_s=pause.until_mono - now_mono)

    def failed(
        self, record: Record, problem: Problem, *, now_mono: float, asked_s: float | None = None
    ) -> Registration:
        """Begin a pause because of ``problem``, and give the answer for it. ``asked_s`` is the registry's own wish."""
        last = self._pauses.get(record.uid)
        failures = 1 if last is None or last.record != record else last.failures + 1
        step_s = self._cap_s if problem.is_terminal else self._base_s * 2.0 ** min(failures - 1, 60)
        pause_s = max(min(self._cap_s, step_s) * (1 + self._rand()) / 2, asked_s or 0.0)
        self._pauses[record.uid] = _Pause(record, problem, failures, now_mono + pause_s, asked_s is not None)
        return Registration(Outcome.SKIPPED, problem, again_after_s=pause_s)

    def forget(self, uid: str) -> None:
        """The registry has answered about this proxy, or there is nothing to ask any more."""
        self._pauses.pop(uid, None)
