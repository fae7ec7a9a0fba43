"""The end of a proxy: take back what the world was told, let the children go where that is asked for, then let go.

Guarantees

* The finalizer goes after the removal outside is confirmed, or after it was put on a durable list (the ledger) because
  the registry stayed away for too long. Never created means nothing to remove.
* What is left of former lives of a name (removals that were put off, records whose finalizer somebody removed by hand)
  is worked off, and never holds up the present life.
* Nothing is removed on the word of the store alone: the API server is asked whether the proxy really is gone.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

import structlog

from operator_app.api.kinds import CHILD_KINDS, ENVOY_PROXY, Key, Object, key_of
from operator_app.api.models import DeletionPolicy
from operator_app.apply import Problem
from operator_app.desired import child_key, controller_uid
from operator_app.errors import ConflictError, OperatorError, TerminalError, TransientError
from operator_app.finalizer import Finalizer, has_finalizer
from operator_app.kube.client import Cluster
from operator_app.kube.events import Occurrence
from operator_app.orphan import orphan_child
from operator_app.registration.registrar import Registrar
from operator_app.results import DONE, ReconcileResult
from operator_app.status import REGISTERED, StatusWriter, condition_of, deletion_status

log = structlog.get_logger(__name__)

DEREGISTRATION_FAILED: Final = "DeregistrationFailed"
"""The reason of a deletion that waits for the registry."""


class Cleanup:
    """Ends proxies.

    A proxy whose deletion began ``abandon_after_s`` seconds ago is let go although its record could not be removed;
    ``None``: never. ``now`` gives aware UTC, ``record_event`` takes what is worth an Event.
    """

    def __init__(
        self,
        cluster: Cluster,
        finalizer: Finalizer,
        registrar: Registrar,
        statuses: StatusWriter,
        *,
        record_event: Callable[[Occurrence], None],
        abandon_after_s: float | None,
        now: Callable[[], datetime],
    ) -> None:
        self._cluster = cluster
        self._finalizer = finalizer
        self._registrar = registrar
        self._statuses = statuses
        self._record_event = record_event
        self._abandon_after_s = abandon_after_s
        self._now = now

    async def clean_up(self, proxy: Object) -> ReconcileResult:
        """The proxy is being deleted: take back what the world was told, then let it go.

        The children carry its UID as their controller, so the garbage collector takes them, unless ``deletionPolicy``
        is Orphan. Without our finalizer nothing was told, or everything was taken back.
        """
        if not has_finalizer(proxy):
            return DONE
        key, uid = key_of(proxy), proxy["metadata"]["uid"]
        if proxy["spec"].get("deletionPolicy") == DeletionPolicy.ORPHAN:
            await self._orphan_children(proxy)
            await self._registrar.orphan(uid)
        else:
            try:
                await self._registrar.deregister(key, uid)
            except ConflictError:
                raise
            except OperatorError as error:
                left_s = self._until_abandoned_s(proxy)
                if left_s is None or left_s > 0:
                    return await self._wait_for_registry(proxy, error, left_s)
                await self._registrar.abandon(uid)
                self._tell_stuck(proxy, "RemovalAbandoned", f"the proxy goes, and its record is removed later: {error}")
        await self._finalizer.remove(proxy)
        return DONE

    async def _wait_for_registry(self, proxy: Object, error: OperatorError, left_s: float | None) -> ReconcileResult:
        """Say what the deletion waits for. A registry that asked for time gets it, but not more than there is."""
        known = condition_of(proxy, REGISTERED)
        if known is None or known["reason"] != DEREGISTRATION_FAILED:
            self._tell_stuck(proxy, DEREGISTRATION_FAILED, f"the record can't be removed, and is tried again: {error}")
        problem = Problem(DEREGISTRATION_FAILED, str(error), needs_user_action=isinstance(error, TerminalError))
        await self._statuses.write(proxy, deletion_status(proxy, problem, now=self._now()))
        if isinstance(error, TransientError) and error.retry_after_s is not None and left_s is not None:
            return ReconcileResult(requeue_after_s=min(error.retry_after_s, left_s))
        return ReconcileResult(failure=error)

    def _tell_stuck(self, proxy: Object, reason: str, note: str) -> None:
        log.warning("deregistration_failed", proxy=str(key_of(proxy)), reason=reason, note=note)
        self._record_event(Occurrence(proxy, "Warning", reason, "Deregister", "record", note))

    def _until_abandoned_s(self, proxy: Object) -> float | None:
        """Seconds until the proxy is let go in any case, not positive once that is due; ``None``: never."""
        if self._abandon_after_s is None:
            return None
        begun_at = datetime.fromisoformat(proxy["metadata"]["deletionTimestamp"])
        return (begun_at + timedelta(seconds=self._abandon_after_s) - self._now()).total_seconds()

    async def _orphan_children(self, proxy: Object) -> None:
        """Orphan every child, read live: what the store does not know yet would be collected."""
        for kind in CHILD_KINDS:
            live = await self._cluster.get(kind, child_key(key_of(proxy)))
            if live is not None and controller_uid(live) == proxy["metadata"]["uid"]:
                await orphan_child(self._cluster, kind, live)
                log.info("child_orphaned", proxy=str(key_of(proxy)), kind=kind.kind)

    async def remove_orphaned_records(self, key: Key, proxy: Object | None) -> OperatorError | None:
        """Remove what is still known of proxies of this name that are gone; returns why that is not done yet.

        Such are removals that were abandoned while a registry was down, and records whose finalizer somebody removed by
        hand. The store alone is no proof of death, so the API server is asked before anything is removed. What can't
        be removed does not keep the present life waiting.
        """
        lives = self._registrar.orphaned_uids(key, proxy["metadata"]["uid"] if proxy is not None else None)
        if not lives:
            return None
        live = await self._cluster.get(ENVOY_PROXY, key)
        living = live["metadata"]["uid"] if live is not None else None
        trouble: OperatorError | None = None
        for uid in lives:
            if uid != living:
                try:
                    await self._registrar.deregister(key, uid)
                    log.warning("orphaned_record_removed", proxy=str(key), uid=uid)
                except OperatorError as error:
                    trouble = trouble or error
        return trouble
