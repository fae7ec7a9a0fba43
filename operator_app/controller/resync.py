"""Anti-entropy: hold the store against complete lists, and find what a watch has missed.

A watch that works leaves nothing to find. What it does miss (a bug in a proxy, in the API server or here) would stay
wrong for ever, since a store only changes when it is told to. A sweep costs one list for each kind, and a read only for
an object that is still unaccounted for after the watch has had time to deliver it.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import anyio

from operator_app.api.kinds import Key, Kind, Object, key_of
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Changed, Deleted
from operator_app.kube.store import Store, version_of

GRACE_S: Final = 5.0
"""What a list shows and the store does not may be on its way; a watch that works delivers within this."""


@dataclass(frozen=True, slots=True)
class Missed:
    """One change that the watch had not delivered; ``object`` is its latest state, or its last one when it is gone."""

    kind: Kind
    object: Object
    is_gone: bool


async def sweep(
    cluster: Cluster,
    store: Store,
    kind: Kind,
    *,
    namespace: str | None,
    labels: str | None,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> tuple[Missed, ...]:
    """List a kind, bring the store up to date, and return what the watch had missed.

    Raises the cluster's errors; the store is then as it was.
    """
    suspects = await _suspects(cluster, store, kind, namespace, labels)
    if not suspects:
        return ()
    await sleep(GRACE_S)
    missed = []
    for key, version in suspects.items():
        if store.version(kind, key) != version:
            continue  # the watch has spoken meanwhile
        live = await cluster.get(kind, key)
        if store.version(kind, key) != version:
            continue  # it has spoken during the read
        known = store.get(kind, key)
        if live is not None and store.apply_delta(Changed(kind, live)):
            missed.append(Missed(kind, live, is_gone=False))
        elif live is None and known is not None:
            store.apply_delta(Deleted(kind, known))
            missed.append(Missed(kind, known, is_gone=True))
    return tuple(missed)


async def _suspects(
    cluster: Cluster, store: Store, kind: Kind, namespace: str | None, labels: str | None
) -> dict[Key, int | None]:
    """Addresses where list and store disagree, with the version that the store knows (``None``: none)."""
    suspects: dict[Key, int | None] = {}
    listed: set[Key] = set()
    as_of = 0
    async with aclosing(cluster.list(kind, namespace=namespace, labels=labels)) as pages:
        async for page in pages:
            as_of = int(page.resource_version)
            for obj in page.items:
                key = key_of(obj)
                listed.add(key)
                known = store.version(kind, key)
                if known is None or known < version_of(obj):
                    suspects[key] = known
    for key in store.keys(kind):
        if namespace not in (None, key.namespace):
            continue  # the list says nothing about it
        known = store.version(kind, key)
        if key not in listed and known is not None and known <= as_of:
            suspects[key] = known
    return suspects
