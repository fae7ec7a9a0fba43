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
    ALL_CHILD_KINDS,
    ANNOTATION_INSTALLATION,
    ENVOY_PROXY,
    LABEL_INSTANCE,
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
from operator_app.registration.registrar import ADDRESS_LEFT, Registrar
from operator_app.results import DONE, Problem, ReconcileResult
from operator_app.status import READY, StatusWriter, condition_of, deletion_status

log = structlog.get_logger(__name__)

DEREGISTRATION_FAILED: Final = "DeregistrationFailed"
"""The reason of a deletion that waits for the registry."""

ORPHANING_FAILED: Final = "OrphaningFailed"
"""The reason of a deletion that waits because a child can't be released."""

FINALIZER_NOT_REMOVED: Final = "FinalizerNotRemoved"
"""The reason of a deletion that waits because the API server refuses to remove the finalizer."""

_OWNERSHIP_LABELS: Final = (LABEL_MANAGED_BY, LABEL_OWNER_UID, LABEL_INSTANCE)
"""Labels by which the operator, people and pruners recognise what belongs to a proxy (argo-cd#5431)."""

_NOTES: Final = {
    DEREGISTRATION_FAILED: "the record can't be removed",
    ORPHANING_FAILED: "a child can't be released from the proxy",
    FINALIZER_NOT_REMOVED: "the finalizer can't be removed",
}


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
        is_orphaned = proxy["spec"].get("deletionPolicy") == DeletionPolicy.ORPHAN
        waiting = await (self._orphan(proxy) if is_orphaned else self._deregister(proxy))
        if waiting is not None:
            return waiting
        try:
            await self._finalizer.remove(proxy)
        except TerminalError as error:
            return await self._wait(proxy, FINALIZER_NOT_REMOVED, error)
        return DONE

    async def _orphan(self, proxy: Object) -> ReconcileResult | None:
        """Leave record and children as they are; what the deletion waits for, or ``None``."""
        failed: OperatorError | None
        try:
            await self._registrar.orphan(proxy["metadata"]["uid"])
            failed = await self._orphan_children(proxy)
        except TerminalError as error:
            failed = error
        return None if failed is None else await self._wait(proxy, ORPHANING_FAILED, failed)

    async def _deregister(self, proxy: Object) -> ReconcileResult | None:
        """Remove the record, or after ``abandon_after_s`` seconds leave that for later; as :meth:`_orphan`."""
        key, uid = key_of(proxy), proxy["metadata"]["uid"]
        try:
            left = await self._registrar.deregister(key, uid)
        except ConflictError:
            raise
        except OperatorError as error:
            left_s = self._until_abandoned_s(proxy)
            if left_s is None or left_s > 0:
                return await self._wait(proxy, DEREGISTRATION_FAILED, error, left_s=left_s)
            try:
                await self._registrar.abandon(uid)
            except TerminalError as refused:
                return await self._wait(proxy, DEREGISTRATION_FAILED, refused)
            self._report(proxy, "RemovalAbandoned", f"the proxy goes, and its record is removed later: {error}")
            return None
        if left is not None:
            self._report(proxy, ADDRESS_LEFT, left)
        return None

    async def _wait(
        self, proxy: Object, reason: str, error: OperatorError, *, left_s: float | None = None
    ) -> ReconcileResult:
        """Write what the deletion waits for into the status. A Retry-After counts, up to ``left_s`` seconds."""
        known = condition_of(proxy, READY)
        if known is None or known["reason"] != reason:
            self._report(proxy, reason, f"{_NOTES[reason]}, and is tried again: {error}")
        problem = Problem(reason, str(error), needs_user_action=isinstance(error, TerminalError))
        status = deletion_status(proxy, problem, of_record=reason == DEREGISTRATION_FAILED, now=self._now())
        await self._statuses.write(proxy, status)
        if isinstance(error, TransientError) and error.retry_after_s is not None and left_s is not None:
            return ReconcileResult(requeue_after_s=min(error.retry_after_s, left_s))
        return ReconcileResult(failure=error)

    def _report(self, proxy: Object, reason: str, note: str) -> None:
        log.warning("deletion_waits", proxy=str(key_of(proxy)), reason=reason, note=note)
        self._record_event(Occurrence(proxy, "Warning", reason, "Delete", "finalizer", note))

    def _until_abandoned_s(self, proxy: Object) -> float | None:
        """Seconds until the finalizer is removed in any case, not positive once that is due; ``None``: never."""
        if self._abandon_after_s is None:
            return None
        begun_at = datetime.fromisoformat(proxy["metadata"]["deletionTimestamp"])
        return (begun_at + timedelta(seconds=self._abandon_after_s) - self._now()).total_seconds()

    async def _orphan_children(self, proxy: Object) -> OperatorError | None:
        """Orphan every child, read live: one that the store does not have yet would be collected.

        Returns the first refusal, after trying all. Raises transient errors.
        """
        first: OperatorError | None = None
        for kind in ALL_CHILD_KINDS:
            live = await self._cluster.get(kind, child_key(key_of(proxy)))
            if live is None or controller_uid(live) != proxy["metadata"]["uid"]:
                continue
            try:
                await orphan_child(self._cluster, kind, live)
                log.info("child_orphaned", proxy=str(key_of(proxy)), kind=kind.kind)
            except TerminalError as error:
                first = first or error
        return first

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
                    left = await self._registrar.deregister(key, uid)
                    event = "orphaned_record_removed" if left is None else "address_left"
                    log.warning(event, proxy=str(key), uid=uid, note=left)
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
    patch: Object = {"ownerReferences": others or None}
    for kept_in, names in (("labels", _OWNERSHIP_LABELS), ("annotations", (ANNOTATION_INSTALLATION,))):
        stored = live["metadata"].get(kept_in, {})
        patch[kept_in] = {name: None for name in names if name in stored}
    patch = {"metadata": pinned_version(live) | {name: value for name, value in patch.items() if value != {}}}
    await cluster.merge_patch(kind, key_of(live), patch)
