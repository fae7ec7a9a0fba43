"""From a change of a watched object to keys in the queue: which EnvoyProxies, how urgently, in which tenant's lane.

Every change of an object enqueues the proxies that it affects, and the reconcile finds out what there is to do. Only
keys of synced namespaces whose shard this replica holds are enqueued: the others are enqueued by ``enqueue_synced`` and
``enqueue_shard``, once the namespace is synced or the shard is acquired.
"""

from collections.abc import AsyncIterator, Callable
from typing import NoReturn, Protocol

import anyio
import structlog

from operator_app.api.kinds import (
    ENVOY_PROXY,
    HOSTNAME_CLAIM,
    HOSTNAME_POLICY,
    LABEL_TENANT,
    NAMESPACE,
    NODE,
    POD,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.api.models import ServiceType
from operator_app.controller.scopes import Scopes
from operator_app.controller.workqueue import Priority
from operator_app.desired import proxy_key
from operator_app.kube.deltas import Deleted, Delta, Listed
from operator_app.kube.fencing import FencingToken
from operator_app.kube.hash_ranges import Coverage, HashRange
from operator_app.kube.store import Store
from operator_app.kube.turns import Turns
from operator_app.pods import proxy_of_pod
from operator_app.registration.ledger import proxy_of

log = structlog.get_logger(__name__)

Enqueue = Callable[[Key, str, Priority], None]
"""Adds a key to the queue, in the lane of a tenant (``WorkerPool.enqueue``)."""


class Shards(Protocol):
    """Which shard a namespace belongs to, and whether this replica holds it (``Elector``)."""

    def shard(self, namespace: str, /) -> int:
        """The shard of a namespace."""

    def token(self, namespace: str, /) -> FencingToken | None:
        """The fencing token of the namespace's shard; ``None`` where this replica does not hold it."""


class Triggers:
    """Applies changes to the store and enqueues the proxies that they affect."""

    def __init__(self, store: Store, scopes: Scopes, shards: Shards, enqueue: Enqueue) -> None:
        self._store = store
        self._scopes = scopes
        self._shards = shards
        self._enqueue = enqueue
        self._newly_synced: set[Coverage] = set()
        self._walk = anyio.Lock()
        self._are_nodes_changed = anyio.Event()
        self._policy_changed = anyio.Event()
        self._tenants: dict[str, tuple[int, str]] = {}
        """The tenant of each labelled namespace, with the version of the Namespace that it was read from."""

    def apply_delta(self, delta: Delta) -> None:
        """Apply what a watch delivered, and enqueue the proxies that each changed object affects."""
        if delta.kind == NODE:
            self._apply_nodes(delta)
            return
        for obj in self._store.apply_delta(delta):
            self.enqueue_affected(delta.kind, obj, priority_of(delta, obj))

    def _apply_nodes(self, delta: Delta) -> None:
        """Apply what the watch of nodes delivered; most reports of kubelets change nothing that is published."""
        usable = set(self._store.index_values(NODE))
        self._store.apply_delta(delta)
        if usable != set(self._store.index_values(NODE)):
            self._are_nodes_changed.set()

    def apply_own_delete(self, delta: Deleted) -> None:
        """Apply a delete that the operator sent itself, so that no reconcile waits for the watch to deliver it."""
        self._store.forget(delta.kind, delta.object, is_certain=False)
        self.enqueue_affected(delta.kind, delta.object, Priority.REPAIR)

    def apply_own_change(self, claim: Object) -> None:
        """Enqueue the proxies that wait for a hostname whose claim the operator has rewritten itself.

        The store knows that write already, so its watch event will not be news.
        """
        self.enqueue_affected(HOSTNAME_CLAIM, claim, Priority.REPAIR)

    async def enqueue_unclaimed(self) -> NoReturn:
        """Enqueue the proxies that wait for a hostname whenever a policy has changed, which may allow it now.

        That looks at every hostname, and other tasks run in between. Policies that change meanwhile share one look.
        """
        while True:
            await self._policy_changed.wait()
            self._policy_changed = anyio.Event()
            await self._enqueue_all_unclaimed()

    async def _enqueue_all_unclaimed(self) -> None:
        turns = Turns()
        for hostname in self._store.index_values(ENVOY_PROXY):
            claim = self._store.get(HOSTNAME_CLAIM, Key("", hostname))
            owner = None if claim is None else proxy_of(claim)
            for key in self._store.indexed_keys(ENVOY_PROXY, hostname):
                if key != owner or claim is None or self._is_of_another(claim, key):
                    self.enqueue(key, Priority.REPAIR)
                await turns.end_if_due()

    def _is_of_another(self, claim: Object, key: Key) -> bool:
        """Whether a claim that names the proxy at ``key`` is one of another incarnation of it."""
        proxy = self._store.get(ENVOY_PROXY, key)
        return proxy is not None and claim["spec"]["proxy"]["uid"] != proxy["metadata"]["uid"]

    def enqueue_affected(self, kind: Kind, obj: Object, priority: Priority) -> None:
        """Enqueue the proxy that owns an object and, for a claim, every proxy that declares its hostname."""
        if kind == HOSTNAME_POLICY:
            self._policy_changed.set()
        if kind == NODE:
            self._are_nodes_changed.set()
        if kind == NAMESPACE:
            self._tenants.pop(obj["metadata"]["name"], None)
        owner = owner_of(kind, obj)
        affected = {owner} if owner is not None else set()
        if kind == HOSTNAME_CLAIM:
            # By address alone: thousands of proxies may declare one hostname, and each may be large.
            affected.update(self._store.indexed_keys(ENVOY_PROXY, obj["spec"]["hostname"]))
        for key in affected:
            self.enqueue(key, priority)

    async def enqueue_node_ports(self) -> None:
        """Enqueue the proxies with a NodePort Service whenever nodes have changed what is published, until cancelled.

        Changes during a walk over the Services share the next one.
        """
        while True:
            await self._are_nodes_changed.wait()
            self._are_nodes_changed = anyio.Event()
            turns = Turns()
            for key in self._store.keys(SERVICE):
                service = self._store.get(SERVICE, key)
                if service is not None and service["spec"].get("type") == ServiceType.NODE_PORT:
                    self.enqueue_affected(SERVICE, service, Priority.REPAIR)
                await turns.end_if_due()

    async def enqueue_shard(self, shard: int) -> None:
        """Enqueue every proxy of a shard, since its last holder may have left any of them half reconciled."""
        turns = Turns()
        for key in self.known_proxies():
            if self._shards.shard(key.namespace) == shard:
                self._enqueue_unknown(key)
            await turns.end_if_due()

    async def enqueue_synced(self, served: Coverage) -> None:
        """Enqueue every proxy in what has become synced (``None``: all of the cluster), where its shard is held.

        What becomes synced while a walk over the known proxies is in progress shares the next one.
        """
        self._newly_synced.add(served)
        async with self._walk:
            synced, self._newly_synced = self._newly_synced, set()
            if not synced:
                return
            counts = dict.fromkeys(synced, 0)
            turns = Turns()
            for key in self.known_proxies():
                for each in synced.intersection((None, self._scopes.serving(key.namespace))):
                    counts[each] += 1
                    self._enqueue_unknown(key)
                await turns.end_if_due()
        for each, proxies in counts.items():
            part = {"hashes": each.selector} if isinstance(each, HashRange) else {"namespace": each}
            log.info("synced", **part, proxies=proxies)

    async def enqueue_resync(self) -> AsyncIterator[Key]:
        """Enqueue every known proxy for a resync; yields each that was enqueued."""
        turns = Turns()
        for key in self.known_proxies():
            if self.enqueue(key, Priority.RESYNC):
                yield key
            await turns.end_if_due()

    def _enqueue_unknown(self, key: Key) -> None:
        """Enqueue a proxy of which it is unknown whether anything is wrong.

        What changed while nobody watched is a drift like any other: after a start that the API server throttled it does
        not wait as long as a resync, of which nobody expects anything.
        """
        if self._can_enqueue(key):
            is_urgent = _is_unserved(self._store.get(ENVOY_PROXY, key))
            self.enqueue(key, Priority.USER if is_urgent else Priority.REPAIR)

    def enqueue(self, key: Key, priority: Priority) -> bool:
        """Enqueue a proxy if its namespace is synced and this replica holds its shard. Returns whether it did."""
        if not self._can_enqueue(key):
            return False
        self._enqueue(key, self.tenant_of(key.namespace), priority)
        return True

    def _can_enqueue(self, key: Key) -> bool:
        return self._scopes.is_synced(key.namespace) and self._shards.token(key.namespace) is not None

    def known_proxies(self) -> set[Key]:
        """Every proxy that exists, or that a record or a claim still names."""
        named = (self._store.index_values(kind) for kind in (PROXY_REGISTRATION, HOSTNAME_CLAIM))
        return set(self._store.keys(ENVOY_PROXY)).union(*named)

    def tenant_of(self, namespace: str) -> str:
        """The tenant of a namespace, which is its lane in the queue: its tenant label, or its own name without one."""
        key = Key("", namespace)
        version = self._store.version(NAMESPACE, key) if NAMESPACE in self._scopes.kinds else None
        if version is None:
            self._tenants.pop(namespace, None)
            return namespace
        known = self._tenants.get(namespace)
        if known is None or known[0] != version:
            self._tenants[namespace] = known = (version, self._read_tenant(namespace))
        return known[1]

    def _read_tenant(self, namespace: str) -> str:
        labelled = self._store.get(NAMESPACE, Key("", namespace))
        tenant: str | None = labelled["metadata"].get("labels", {}).get(LABEL_TENANT) if labelled else None
        return tenant or namespace


def owner_of(kind: Kind, obj: Object) -> Key | None:
    """The proxy that an object belongs to; ``None`` for a Namespace, whose new label needs none, a policy and a node.

    By the object's name and not by its owner reference, so that deletions and removed references find it, too.
    """
    if kind == ENVOY_PROXY:
        return key_of(obj)
    if kind in (PROXY_REGISTRATION, HOSTNAME_CLAIM):
        return proxy_of(obj)
    if kind in (NAMESPACE, HOSTNAME_POLICY, NODE):
        return None
    return proxy_of_pod(obj) if kind == POD else proxy_key(key_of(obj))


def priority_of(delta: Delta, obj: Object) -> Priority:
    """``USER`` for a generation or a deletion that was not acted on yet, ``RESYNC`` in a list, else ``REPAIR``."""
    if delta.kind == ENVOY_PROXY and _is_unserved(obj):
        return Priority.USER
    return Priority.RESYNC if isinstance(delta, Listed) else Priority.REPAIR


def _is_unserved(proxy: Object | None) -> bool:
    """Whether a proxy's generation or deletion has not been acted on yet; False for a proxy that does not exist."""
    if proxy is None:
        return False
    observed = (proxy.get("status") or {}).get("observedGeneration")
    return observed != proxy["metadata"]["generation"] or "deletionTimestamp" in proxy["metadata"]
