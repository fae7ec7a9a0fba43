"""Our one entry in ``metadata.finalizers`` of an EnvoyProxy: put there before the first outside write, taken off after.

Guarantees

* Entries of others are never touched: the finalizers are a set in which every member has its own owner.
* A stale reconcile re-creates nothing. An apply that names a UID is refused (409) when that object is gone, where an
  apply without one would create it anew.
* Where our entry is already as declared there is no request.
"""

from collections.abc import Callable
from typing import Final

from operator_app.api.kinds import ENVOY_PROXY, FINALIZER, Kind, Object, key_of
from operator_app.apply import merge_at_version
from operator_app.errors import ConflictError, InvalidError, NotFoundError
from operator_app.kube.client import Cluster
from operator_app.kube.preconditions import identity
from operator_app.kube.store import Store
from operator_app.results import Outcome
from operator_app.ssa.contention import Contention, ContentionTracker, RestoredField
from operator_app.ssa.fields import Path, fields_of

_TOO_LATE: Final = frozenset({"metadata.uid", "metadata.finalizers"})
"""The fields that a refusal names when another object has the name now, or the object is being deleted."""

_PATH: Final[Path] = ("f:metadata", "f:finalizers")
_MEMBER: Final = f'v:"{FINALIZER}"'


class Finalizer:
    """Adds and removes our finalizer.

    ``on_write`` is called with every write; ``mono`` is a monotonic clock in seconds. A finalizer that another writer
    keeps removing is added ever more slowly (``ssa.contention``).
    """

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        tracker: ContentionTracker,
        *,
        on_write: Callable[[Kind, Outcome], None],
        mono: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._contention = tracker
        self._on_write = on_write
        self._mono = mono

    def contention(self, proxy: Object) -> Contention | None:
        """Who keeps removing the finalizer, if somebody does."""
        return self._contention.contention(_subject(proxy), now_mono=self._mono())

    def pause_s(self, proxy: Object) -> float:
        """How long ``add`` leaves a ``proxy`` without our entry as it is, in seconds."""
        return self._contention.pause_s(_subject(proxy), {_PATH: ""}, is_repair=True, now_mono=self._mono())

    async def add(self, proxy: Object) -> Object:
        """Put our entry on ``proxy`` and return the stored proxy; without it while another writer contends for it.

        Raises ``ConflictError`` when the proxy is gone or its deletion has begun: read it again and decide anew. Raises
        ``InvalidError`` or ``ForbiddenError`` when a policy of the cluster refuses it.
        """
        if has_finalizer(proxy):
            return proxy
        if self.pause_s(proxy) > 0:
            return proxy
        added = await self._apply(proxy, {"finalizers": [FINALIZER]})
        if proxy.get("status"):
            # A proxy with a status had our entry before, so somebody has removed it.
            removed = RestoredField(_PATH, "the finalizer", "", ())
            self._contention.record(_subject(proxy), [removed], is_repair=True, now_mono=self._mono())
        return added

    async def remove(self, proxy: Object) -> None:
        """Take our entry off ``proxy``; a proxy that has gone already is fine.

        Where it was the last one the store forgets the proxy at once, since the API server deletes it with this write.
        Raises ``ConflictError`` when another proxy has the name or it was written to since: read it again and decide
        anew.
        """
        try:
            if _MEMBER in fields_of(proxy).get("f:metadata", {}).get("f:finalizers", {}):
                proxy = await self._apply(proxy, {})
            if has_finalizer(proxy):
                proxy = await self._remove_shared(proxy)
        except NotFoundError:
            return
        metadata = proxy["metadata"]
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            # The response has the version before this write, so the store would go on showing the entry until the
            # watch delivers the deletion, and a reconcile in between would take it off once more.
            self._store.forget(ENVOY_PROXY, proxy)

    async def _apply(self, proxy: Object, extra: Object) -> Object:
        metadata = identity(proxy) | extra
        body = {"apiVersion": proxy["apiVersion"], "kind": proxy["kind"], "metadata": metadata}
        try:
            applied = await self._cluster.apply(ENVOY_PROXY, body, force=True)
        except InvalidError as error:
            # 422 for metadata.uid: another incarnation has the name; for metadata.finalizers: the object is being
            # deleted. Any other refusal is a policy's, and stays one.
            if not any(cause.field in _TOO_LATE for cause in error.causes):
                raise
            raise ConflictError(error.message, kind=error.kind, key=error.key) from error
        return self._learned(applied.object)

    async def _remove_shared(self, proxy: Object) -> Object:
        """Remove an entry that other managers own, too; the stored proxy.

        A manifest that was exported and applied again makes its author a co-owner of our entry, and an apply releases
        only our own share. The patch is pinned to the version that was read, so it can't drop anybody else's entry.
        """
        others = [entry for entry in proxy["metadata"]["finalizers"] if entry != FINALIZER]
        patch = {"metadata": {"finalizers": others or None}}
        return await merge_at_version(self._cluster, self._store, ENVOY_PROXY, proxy, patch, on_write=self._on_write)

    def _learned(self, stored: Object) -> Object:
        self._on_write(ENVOY_PROXY, Outcome.CONFIGURED)
        self._store.learn(ENVOY_PROXY, stored)
        return stored


def _subject(proxy: Object) -> str:
    return f"EnvoyProxy {key_of(proxy)} {proxy['metadata']['uid']} finalizer"


def has_finalizer(proxy: Object) -> bool:
    """Whether our entry stands on ``proxy``."""
    return FINALIZER in proxy["metadata"].get("finalizers", ())
