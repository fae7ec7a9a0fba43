"""What became of an object and of a whole reconcile: the closed vocabulary of results."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from operator_app.errors import OperatorError


class Outcome(StrEnum):
    """What became of one object in one reconcile."""

    CREATED = "created"
    CONFIGURED = "configured"
    UNCHANGED = "unchanged"
    DELETED = "deleted"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an object does not hold what we declare. ``reason`` is CamelCase and fit for a condition.

    ``needs_user_action``: waiting does not help, the declaration or the cluster has to change. ``ends_with_event``:
    what ends it is an event of a watched object, so coming back earlier is of no use.
    """

    reason: str
    message: str
    needs_user_action: bool = False
    ends_with_event: bool = False


NOT_ASKED: Final = "NotAsked"
"""The reason of a ``Programming`` that is unknown because nobody is asked."""


@dataclass(frozen=True, slots=True)
class Programming:
    """Whether every serving Pod has loaded what is declared; ``is_true`` is ``None`` where it is not known.

    ``requeue_after_s``: look again then. ``needs_user_action``: waiting does not help.
    """

    is_true: bool | None
    reason: str
    message: str
    requeue_after_s: float | None = None
    needs_user_action: bool = False


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """How a reconcile ended. ``requeue_after_s``: reconcile again then. ``failure``: not done, again with backoff.

    Where there are both, the earlier counts, unless a server has sent Retry-After.
    """

    requeue_after_s: float | None = None
    failure: OperatorError | Problem | None = None


DONE: Final = ReconcileResult()
