"""Every write explains itself: one log line, and for a repaired drift one Event and one count.

A *drift* is a write to a child of a proxy whose current generation was verified before: nobody asked for a change, so
somebody else made one.
"""

from collections.abc import Callable

import structlog

from operator_app.api.kinds import Kind, Object, key_of
from operator_app.apply import Outcome, Result
from operator_app.kube.events import EventRecorder, Occurrence
from operator_app.ssa.fields import Drift
from operator_app.status import is_verified

log = structlog.get_logger(__name__)


class Reporter:
    """Tells what became of children. ``on_drift`` is told the kind of each child in which a drift was repaired."""

    def __init__(self, events: EventRecorder, *, on_drift: Callable[[Kind], None]) -> None:
        self._events = events
        self._on_drift = on_drift

    def child(self, proxy: Object, result: Result) -> None:
        """Tell of one child of ``proxy``, as the proxy was before the round; nothing where nothing happened."""
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
