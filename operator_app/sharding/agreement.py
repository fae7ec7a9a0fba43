"""All replicas divide the namespaces by the same ranges: the cuts are in one Lease, written by compare-and-set.

Whichever replica starts first creates it. The holder of the first shard changes the cuts when the shards have become
too different, and restores them where somebody has removed them. Replicas learn of it by the watch of Leases, and hold
no shards until they know it. Where to cut is in ``ranges``, how a replica changes its division in ``election``.
"""

from collections.abc import Callable, Mapping
from typing import Final

import anyio
import structlog

from operator_app.api.kinds import GROUP, LEASE, Key, Object
from operator_app.errors import ConflictError, OperatorError
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Changed, Deleted, Delta, Listed
from operator_app.kube.store import version_of
from operator_app.sharding.leases import LABEL_ROLE, PREFIX
from operator_app.sharding.ranges import Ranges, balanced, better

log = structlog.get_logger(__name__)

NAME: Final = f"{PREFIX}-ranges"
"""The Lease that has the cuts. Nobody holds it."""

ROLE: Final = "ranges"
"""The value of its label."""

RETRY_S: Final = 1.0


def annotation_of(shards: int) -> str:
    """The annotation with the cuts for so many shards: replicas with other numbers have one of their own."""
    return f"{GROUP}/cuts-{shards}"


class Agreement:
    """The ranges that all replicas with the same number of shards use.

    ``proxies`` counts the proxies in each namespace. ``on_change`` is called with each division that becomes known.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        shards: int,
        proxies: Callable[[], Mapping[str, int]],
        on_change: Callable[[Ranges], None],
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._shards = shards
        self._proxies = proxies
        self._on_change = on_change
        self._lease: Object | None = None
        self._known: Ranges | None = None
        self._changed = anyio.Event()

    def apply_delta(self, delta: Delta) -> None:
        """Apply a delta of the watch of Leases."""
        match delta:
            case Changed():
                self._observe(delta.object)
            case Deleted():
                if delta.object["metadata"]["name"] == NAME:
                    self._lease = None
            case Listed():
                for each in delta.objects:
                    self._observe(each)

    def _observe(self, lease: Object) -> None:
        is_older = self._lease is not None and version_of(lease) <= version_of(self._lease)
        if lease["metadata"]["name"] != NAME or is_older:
            return
        self._lease = lease
        found = self._written
        if found is not None:
            if found != self._known:
                self._known = found
                self._on_change(found)
            self._changed.set()

    @property
    def _written(self) -> Ranges | None:
        """What the Lease says for this number of shards; ``None`` without it, or where it can't be read."""
        annotations = {} if self._lease is None else self._lease["metadata"].get("annotations", {})
        text = annotations.get(annotation_of(self._shards))
        return None if text is None else Ranges.of_text(text, self._shards)

    async def reach(self) -> None:
        """Return once the ranges are known; writes them where nobody has. To be called once Leases were listed."""
        while self._known is None:
            self._changed = anyio.Event()
            await self._write(balanced(self._proxies(), self._shards))
            with anyio.move_on_after(RETRY_S):
                await self._changed.wait()

    async def keep(self) -> None:
        """Write other cuts if those in use have become bad, and restore them where they were removed.

        At one time one replica is to call this: the holder of the first shard.
        """
        if self._known is None:
            return
        if self._written is None:
            await self._write(self._known)
            return
        proxies = self._proxies()
        found = better(self._known, proxies)
        if found is not None:
            before, after = self._known.largest(proxies), found.largest(proxies)
            log.info("shards_unbalanced", largest=before, largest_then=after, proxies=sum(proxies.values()))
            await self._write(found)

    async def _write(self, ranges: Ranges) -> None:
        """Write the cuts, if nobody else has written the Lease meanwhile."""
        metadata = {} if self._lease is None else dict(self._lease["metadata"])
        metadata.pop("managedFields", None)
        metadata |= {
            "name": NAME,
            "namespace": self._namespace,
            "labels": metadata.get("labels", {}) | {LABEL_ROLE: ROLE},
            "annotations": metadata.get("annotations", {}) | {annotation_of(self._shards): ranges.text},
        }
        spec = {} if self._lease is None else self._lease.get("spec") or {}
        body = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}
        write = self._cluster.create if self._lease is None else self._cluster.replace
        try:
            try:
                self._observe(await write(LEASE, body))
            except ConflictError:
                # Somebody was faster, or the Lease has lost its label, without which no watch delivers it.
                live = await self._cluster.get(LEASE, Key(self._namespace, NAME))
                if live is not None:
                    self._observe(live)
        except OperatorError as error:
            log.warning("ranges_unwritten", error=str(error))
