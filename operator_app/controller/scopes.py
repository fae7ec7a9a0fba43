"""Which objects the operator watches, and in which served namespaces it has listed all of them. Pure.

A *scope* is one list or watch of one kind: a namespace, or all of them, or a range of their hashes, and a label
selector. The operator serves the namespaces of its settings, or the whole cluster, or the ranges of the shards that it
holds. A served namespace or range is *synced* once every watched kind has been listed completely for it. Each one is
synced independently of the others, so a namespace that can't be listed delays no other.

What a change of a watched object causes belongs in ``triggers``; the watches are started by the application.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypedDict

from operator_app.api.kinds import (
    ALL_CHILD_KINDS,
    CONFIG_MAP,
    ENVOY_PROXY,
    FIELD_MANAGER,
    HOSTNAME_CLAIM,
    HOSTNAME_POLICY,
    LABEL_MANAGED_BY,
    LABEL_TENANT,
    NAMESPACE,
    NODE,
    POD,
    PROXY_REGISTRATION,
    Key,
    Kind,
    Object,
)
from operator_app.desired import controller_uid
from operator_app.envoy.files import is_file
from operator_app.kube.hash_ranges import Coverage, HashRange, is_covered
from operator_app.kube.store import Index, Keep, Store
from operator_app.pods import kept_of_pod, owner_uid
from operator_app.registration.ledger import confirmed_hostname_of, proxy_of
from operator_app.registration.nodes import kept_of_node, usable_node

MANAGED_BY_US: Final = f"{LABEL_MANAGED_BY}={FIELD_MANAGER}"
"""Label selector of every object that this operator creates."""


def hostname_of(proxy: Object) -> str | None:
    """The hostname in a proxy's spec; ``None`` where it declares none."""
    hostname: str | None = ((proxy.get("spec") or {}).get("registration") or {}).get("hostname")
    return hostname


INDEXES: Final[Mapping[Kind, Index]] = {
    ENVOY_PROXY: hostname_of,
    NAMESPACE: lambda _: None,
    PROXY_REGISTRATION: proxy_of,
    HOSTNAME_CLAIM: proxy_of,
    HOSTNAME_POLICY: lambda _: None,
    **dict.fromkeys(ALL_CHILD_KINDS, controller_uid),
    POD: owner_uid,
}
"""Every kind that is always watched, with the index by which its objects are looked up."""


SECOND_INDEXES: Final[Mapping[Kind, Index]] = {PROXY_REGISTRATION: confirmed_hostname_of}
"""By what else objects are looked up."""


def indexes_of(installation: str) -> Mapping[Kind, Index]:
    """The indexes of all kinds that the operator in this namespace keeps.

    Claims of others in the cluster are found by name alone. Nodes are kept where they are watched.
    """

    def claimant(claim: Object) -> Key | None:
        return proxy_of(claim) if claim["spec"].get("installation") == installation else None

    return {**INDEXES, HOSTNAME_CLAIM: claimant, NODE: usable_node}


def _kept_of_proxy(proxy: Object) -> Object:
    """A proxy without its labels and annotations: the schema can't bound them, and no reconcile reads them."""
    metadata = {name: value for name, value in proxy["metadata"].items() if name not in ("annotations", "labels")}
    return proxy | {"metadata": metadata}


def _kept_of_config_map(config_map: Object) -> Object:
    """A ConfigMap with Envoy's configuration alone, and one that no EnvoyProxy controls without any data.

    Anybody may label a ConfigMap as managed by the operator, and add keys to the operator's own.
    """
    references = config_map["metadata"].get("ownerReferences", ())
    is_child = any(each.get("controller") and each["kind"] == ENVOY_PROXY.kind for each in references)
    kept = {name: value for name, value in config_map.items() if name not in ("data", "binaryData")}
    files = {name: text for name, text in (config_map.get("data") or {}).items() if is_file(name)}
    return kept | {"data": files} if is_child and files else kept


KEPT: Final[Mapping[Kind, Keep]] = {
    ENVOY_PROXY: _kept_of_proxy,
    CONFIG_MAP: _kept_of_config_map,
    POD: kept_of_pod,
    NODE: kept_of_node,
}
"""What the store keeps of the objects of a kind; of the other kinds it keeps all."""


SHARED_KINDS: Final = frozenset({NAMESPACE, NODE, PROXY_REGISTRATION, HOSTNAME_CLAIM, HOSTNAME_POLICY})
"""Kinds whose objects are in no tenant's namespace: every replica watches all of them."""


class Scope(TypedDict):
    """One list or watch, as keyword arguments of ``Cluster.list`` and ``follow``; ``None`` means no restriction."""

    namespace: str | None
    labels: str | None
    hashes: HashRange | None


def coverage_of(scope: Scope) -> Coverage:
    """What a list or watch of a scope covers."""
    return scope["namespace"] if scope["hashes"] is None else scope["hashes"]


class Scopes:
    """The scopes of one operator. Iterating yields each watched kind with each of its scopes.

    ``namespace`` is the operator's own namespace. ``namespaces`` are the served ones; without any, all are served.
    With ``are_nodes_watched``, nodes are watched as well.

    After ``divide`` the tenants' kinds are watched only in the ranges of namespaces between ``open`` and ``close``, and
    each range is served as the namespaces of the settings are.
    """

    def __init__(
        self, store: Store, *, namespace: str, namespaces: Sequence[str], are_nodes_watched: bool = False
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._served: dict[Coverage, None] = dict.fromkeys(sorted(set(namespaces))) or {None: None}
        self._synced: set[Coverage] = set()
        self._unsynced = dict.fromkeys(self._served)
        self._is_divided = False
        # Namespaces are cluster-scoped: an operator that serves only some need not be allowed to watch them.
        always = (kind for kind in INDEXES if kind != NAMESPACE or not namespaces)
        self.kinds = (*always, NODE) if are_nodes_watched else tuple(always)

    def __iter__(self) -> Iterator[tuple[Kind, Scope]]:
        for kind in self.kinds:
            if self._is_divided and kind in SHARED_KINDS:
                yield kind, self._scope(kind, None)
                continue
            scopes = {coverage_of(scope): scope for scope in map(partial(self._scope, kind), self._served)}
            yield from ((kind, scope) for scope in scopes.values())

    def divide(self) -> None:
        """Watch the tenants' kinds in open ranges only. To be called before anything is listed."""
        self._is_divided = True
        self._served, self._unsynced = {}, {}

    @property
    def is_whole(self) -> bool:
        """Whether the whole of what the operator serves is watched here, and not a part of it."""
        return not self._is_divided

    def open(self, hashes: HashRange) -> list[tuple[Kind, Scope]]:
        """Serve a range of namespaces; returns the scopes to watch for that."""
        self._served[hashes] = self._unsynced[hashes] = None
        return [(kind, self._scope(kind, hashes)) for kind in self.kinds if kind not in SHARED_KINDS]

    def close(self, hashes: HashRange) -> None:
        """Serve a range no longer, and forget everything in it; its watches have to be ended before."""
        self._served.pop(hashes, None)
        self._unsynced.pop(hashes, None)
        self._synced.discard(hashes)
        for kind in self.kinds:
            if kind not in SHARED_KINDS:
                self._store.discard(kind, hashes)

    def is_served(self, scope: Scope) -> bool:
        """Whether the scope is still one to be watched."""
        return scope["hashes"] is None or scope["hashes"] in self._served

    def serving(self, namespace: str) -> Coverage:
        """What is served that a namespace is part of: an open range, or the namespace itself."""
        if not self._is_divided:
            return namespace
        return next((each for each in self._served if is_covered(namespace, each)), namespace)

    def is_synced(self, namespace: str) -> bool:
        """Whether every watched kind has been listed completely for ``namespace``, so that it may be reconciled."""
        return not self._synced.isdisjoint((None, self.serving(namespace)))

    @property
    def is_any_synced(self) -> bool:
        """Whether some served namespace is synced, or those that a new shard may have could be at once."""
        if not self._is_divided:
            return bool(self._synced)
        shared = (kind for kind in self.kinds if kind in SHARED_KINDS)
        return all(self._is_scope_listed(kind, self._scope(kind, None)) for kind in shared)

    def newly_synced(self, listed: Coverage) -> tuple[Coverage, ...]:
        """What is served (``None``: all of the cluster) and has become synced by the complete list of a scope.

        ``listed`` is what the scope covers. Each is returned once. Only those that the scope is part of are looked at,
        which keeps a start linear in the number of namespaces.
        """
        candidates = (listed,) if listed in self._served and listed != self._namespace else (*self._unsynced,)
        new = tuple(each for each in candidates if each in self._unsynced and self._is_listed(each))
        for each in new:
            del self._unsynced[each]
        self._synced.update(new)
        return new

    def _is_listed(self, served: Coverage) -> bool:
        return all(self._store.is_synced(kind, coverage_of(self._scope(kind, served))) for kind in self.kinds)

    def _is_scope_listed(self, kind: Kind, scope: Scope) -> bool:
        return self._store.is_synced(kind, coverage_of(scope))

    def _scope(self, kind: Kind, served: Coverage) -> Scope:
        """The scope of ``kind`` that serving a namespace, a range of them, or all of them (``None``) needs."""
        if kind == NAMESPACE:
            return {"namespace": None, "labels": LABEL_TENANT, "hashes": None}
        if kind == PROXY_REGISTRATION:
            return {"namespace": self._namespace, "labels": MANAGED_BY_US, "hashes": None}
        if kind == HOSTNAME_CLAIM:
            return {"namespace": None, "labels": MANAGED_BY_US, "hashes": None}
        if kind in (HOSTNAME_POLICY, NODE):
            return {"namespace": None, "labels": None, "hashes": None}
        labels = None if kind == ENVOY_PROXY else MANAGED_BY_US
        if isinstance(served, HashRange):
            return {"namespace": None, "labels": labels, "hashes": served}
        return {"namespace": served, "labels": labels, "hashes": None}
