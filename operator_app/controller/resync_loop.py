"""The periodic resync: compares every watched kind with a list, audits the registries, then enqueues every proxy.

A watch that works leaves nothing to find, and a reconcile that finds nothing wrong writes nothing. How one list is
compared with the store is in ``resync``.
"""

import random
import time
from functools import partial

import anyio
import structlog

from operator_app.api.kinds import Key, Kind, key_of
from operator_app.apply import Applier
from operator_app.controller.backpressure import Backpressure
from operator_app.controller.periodic_audit import PeriodicAudit
from operator_app.controller.resync import resync
from operator_app.controller.scopes import Scope, Scopes
from operator_app.controller.triggers import Triggers
from operator_app.controller.workqueue import Priority
from operator_app.errors import OperatorError, TransientError
from operator_app.kube.client import Cluster
from operator_app.kube.store import Store
from operator_app.observability.metrics import Metrics

log = structlog.get_logger(__name__)


class ResyncLoop:
    """Resyncs about every ``interval_s`` seconds, 10 % more or less, once a served namespace is synced."""

    def __init__(  # noqa: PLR0913 - one for each part that a resync reads or drives
        self,
        cluster: Cluster,
        store: Store,
        scopes: Scopes,
        triggers: Triggers,
        applier: Applier,
        audit: PeriodicAudit,
        backpressure: Backpressure,
        metrics: Metrics,
        *,
        interval_s: float,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._scopes = scopes
        self._triggers = triggers
        self._applier = applier
        self._audit = audit
        self._backpressure = backpressure
        self._metrics = metrics
        self._interval_s = interval_s
        self._pending: set[Key] = set()

    def pop_pending(self, key: Key) -> bool:
        """Whether the last resync enqueued ``key`` and no reconcile has begun since; True once for each resync.

        Such a reconcile also compares the records outside, which no watch reports.
        """
        is_pending = key in self._pending
        self._pending.discard(key)
        return is_pending

    async def run(self) -> None:
        """Resync for ever. A kind that can't be listed is logged, and the other kinds are compared all the same."""
        while True:
            await anyio.sleep(self._interval_s * random.uniform(0.9, 1.1))  # noqa: S311 - jitter
            if not self._scopes.is_any_synced:
                continue
            await self._resync_kinds()
            self._applier.reset_rejected()
            await self._audit.run()
            async for key in self._triggers.enqueue_resync():
                self._pending.add(key)

    async def _resync_kinds(self) -> None:
        retry_after_s = 0.0
        for kind, scope in tuple(self._scopes):
            if not self._scopes.is_served(scope):
                continue  # another replica's by now
            # A complete list is the most expensive request, and no user waits for this one.
            delay_s = self._backpressure.delay_s(Priority.RESYNC, now_mono=time.monotonic())
            await anyio.sleep(max(delay_s, retry_after_s))
            retry_after_s = await self._resync_kind(kind, scope)

    async def _resync_kind(self, kind: Kind, scope: Scope) -> float:
        """Compare one kind; returns for how many seconds the API server asked not to be sent the next list."""
        try:
            is_watched = partial(self._scopes.is_served, scope)
            missed = await resync(self._cluster, self._store, kind, is_watched=is_watched, **scope)
        except OperatorError as error:
            log.warning("resync_failed", kind=kind.kind, error=str(error))
            return (error.retry_after_s or 0.0) if isinstance(error, TransientError) else 0.0
        for each in missed:
            self._metrics.resync_missed.labels(kind.kind).inc()
            log.warning("watch_missed", kind=kind.kind, key=str(key_of(each.object)), gone=each.is_deleted)
            self._triggers.enqueue_affected(kind, each.object, Priority.REPAIR)
        return 0.0
