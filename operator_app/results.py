"""How a reconcile ended, and when there should be another one."""

from dataclasses import dataclass
from typing import Final

from operator_app.apply import Problem
from operator_app.errors import OperatorError


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """How a reconcile ended. ``requeue_after_s``: reconcile again then. ``failure``: not done, again with backoff.

    Where there are both, the earlier counts, unless a server has sent Retry-After.
    """

    requeue_after_s: float | None = None
    failure: OperatorError | Problem | None = None


DONE: Final = ReconcileResult()
