"""Reports writes to children: a log line for each, and an Event and a count for each repaired drift.

A write repairs a *drift* if the proxy's current generation was reported as reconciled before: the declaration did not
change, so somebody else changed or deleted the child.
"""

from collections.abc import Callable

import structlog

from operator_app.api.kinds import Kind, Object, key_of
from operator_app.apply import Result
from operator_app.kube.events import EventRecorder, Occurrence
from operator_app.results import Outcome
from operator_app.ssa.fields import Drift
from operator_app.status import is_verified

log = structlog.get_logger(__name__)


class Reporter:
    """Reports the results of children. ``on_drift`` is called with the kind of each child whose drift was repaired."""

    def __init__(self, events: EventRecorder, *, on_drift: Callable[[Kind], None]) -> None:
        self._events = events
        self._on_drift = on_drift

    def child(self, proxy: Object, result: Result) -> None:
        """Report one child's result, unless it is unchanged. ``proxy`` is as it was before the reconcile."""
        is_write = result.outcome in (Outcome.CREATED, Outcome.CONFIGURED)
        if not is_write and result.problem is None:
            return
        log.info(
            "child",
            proxy=str(key_of(proxy)),
            generation=proxy["metadata"]["generation"],
            kind=result.kind.kind,
            outcome=result.outcome.value,
            changes=[each.as_dict() for each in result.changes],
            problem=result.problem.reason if result.problem else None,
        )
        drift = _drift(result) if is_write and is_verified(proxy) else ()
        if drift:
            self._on_drift(result.kind)
            note = f"{result.kind} {result.key}: {'; '.join(drift)}"
            self._events.record(Occurrence(proxy, "Normal", "DriftRepaired", "Repair", result.kind.kind, note))


def _drift(result: Result) -> tuple[str, ...]:
    if result.outcome is Outcome.CREATED:
        return ("it was deleted",)
    return tuple(str(each) for each in result.changes if each.drift is Drift.NOT_OWNED)
