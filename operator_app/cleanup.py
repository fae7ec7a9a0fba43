"""Deletion of a proxy: remove its outside record, orphan the children where the spec asks for it, remove the finalizer.

Guarantees

* The finalizer is removed after the removal of the record is confirmed, or after it was noted in the ledger because the
  registry failed for too long. A proxy without our finalizer has nothing outside to remove.
* Records of previous incarnations of a name (removals that were abandoned, records whose finalizer was removed by hand)
  are removed later, and never delay the present incarnation.
* Nothing is removed because of the store alone: the API server is asked whether the proxy is gone.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

import structlog

from operator_app.api.kinds import (
    CHILD_KINDS,
    ENVOY_PROXY,
    LABEL_MANAGED_BY,
    LABEL_OWNER_UID,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.api.models import DeletionPolicy
from operator_app.desired import child_key, controller_uid
from operator_app.errors import ConflictError, OperatorError, TerminalError, TransientError
from operator_app.finalizer import Finalizer, has_finalizer
from operator_app.kube.client import Cluster
from operator_app.kube.events import Occurrence
from operator_app.kube.preconditions import pinned_version
from operator_app.registration.registrar import Registrar
from operator_app.results import DONE, Problem, ReconcileResult
from operator_app.status import REGISTERED, StatusWriter, condition_of, deletion_status

log = structlog.get_logger(__name__)

DEREGISTRATION_FAILED: Final = "DeregistrationFailed"
"""The reason of a deletion that waits for the registry."""


class Cleanup:
    """Cleans up proxies that are being deleted.

    A proxy whose deletion began ``abandon_after_s`` seconds ago loses its finalizer although its record could not be
    removed; ``None``: never. ``now`` gives aware UTC, ``record_event`` is called with what becomes an Event.
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
        """Remove the record of a proxy that is being deleted, then its finalizer.

        The children have the proxy as their controller, so the garbage collector deletes them, unless
        ``deletionPolicy`` is Orphan. Without our finalizer nothing was registered, or everything was removed.
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
                self._report_stuck(
                    proxy, "RemovalAbandoned", f"the proxy goes, and its record is removed later: {error}"
                )
        await self._finalizer.remove(proxy)
        return DONE

    async def _wait_for_registry(self, proxy: Object, error: OperatorError, left_s: float | None) -> ReconcileResult:
        """Write what the deletion waits for into the status. A Retry-After counts, up to the time of abandoning."""
        known = condition_of(proxy, REGISTERED)
        if known is None or known["reason"] != DEREGISTRATION_FAILED:
            self._report_stuck(
                proxy, DEREGISTRATION_FAILED, f"the record can't be removed, and is tried again: {error}"
            )
        problem = Problem(DEREGISTRATION_FAILED, str(error), needs_user_action=isinstance(error, TerminalError))
        await self._statuses.write(proxy, deletion_status(proxy, problem, now=self._now()))
        if isinstance(error, TransientError) and error.retry_after_s is not None and left_s is not None:
            return ReconcileResult(requeue_after_s=min(error.retry_after_s, left_s))
        return ReconcileResult(failure=error)

    def _report_stuck(self, proxy: Object, reason: str, note: str) -> None:
        log.warning("deregistration_failed", proxy=str(key_of(proxy)), reason=reason, note=note)
        self._record_event(Occurrence(proxy, "Warning", reason, "Deregister", "record", note))

    def _until_abandoned_s(self, proxy: Object) -> float | None:
        """Seconds until the finalizer is removed in any case, not positive once that is due; ``None``: never."""
        if self._abandon_after_s is None:
            return None
        begun_at = datetime.fromisoformat(proxy["metadata"]["deletionTimestamp"])
        return (begun_at + timedelta(seconds=self._abandon_after_s) - self._now()).total_seconds()

    async def _orphan_children(self, proxy: Object) -> None:
        """Orphan every child, read live: one that the store does not have yet would be collected."""
        for kind in CHILD_KINDS:
            live = await self._cluster.get(kind, child_key(key_of(proxy)))
            if live is not None and controller_uid(live) == proxy["metadata"]["uid"]:
                await orphan_child(self._cluster, kind, live)
                log.info("child_orphaned", proxy=str(key_of(proxy)), kind=kind.kind)

    async def remove_orphaned_records(self, key: Key, proxy: Object | None) -> OperatorError | None:
        """Remove the records of previous incarnations of this name; returns the first error, after trying all.

        Such are removals that were abandoned while a registry was down, and records whose finalizer was removed by
        hand. The store alone does not prove that a proxy is gone, so the API server is asked before anything is
        removed.
        """
        uids = self._registrar.orphaned_uids(key, proxy["metadata"]["uid"] if proxy is not None else None)
        if not uids:
            return None
        live = await self._cluster.get(ENVOY_PROXY, key)
        existing = live["metadata"]["uid"] if live is not None else None
        first: OperatorError | None = None
        for uid in uids:
            if uid != existing:
                try:
                    await self._registrar.deregister(key, uid)
                    log.warning("orphaned_record_removed", proxy=str(key), uid=uid)
                except OperatorError as error:
                    first = first or error
        return first


async def orphan_child(cluster: Cluster, kind: Kind, live: Object) -> None:
    """Release ``live`` from its controller: it runs on as it is, and the garbage collector leaves it alone.

    A patch and no apply: an apply without the owner reference would have to repeat every other field, and what is
    declared at a deletion need not be what runs; an empty one would remove every field that nobody else owns. Raises
    ``ConflictError`` when ``live`` is not the stored version any more.
    """
    others = [each for each in live["metadata"]["ownerReferences"] if not each.get("controller")]
    labels = dict.fromkeys((LABEL_MANAGED_BY, LABEL_OWNER_UID))
    patch = {"metadata": pinned_version(live) | {"ownerReferences": others or None, "labels": labels}}
    await cluster.merge_patch(kind, key_of(live), patch)
