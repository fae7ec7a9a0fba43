"""How a round ended, and when there should be another one."""

from dataclasses import dataclass
from typing import Final

from operator_app.apply import Problem
from operator_app.errors import OperatorError


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """How a round ended. ``requeue_after_s``: come back then. ``failure``: not done, come back with backoff.

    Where there are both, the earlier counts, unless a server asked for time.
    """

    requeue_after_s: float | None = None
    failure: OperatorError | Problem | None = None


DONE: Final = ReconcileResult()
