"""Anti-entropy for one kind: compares the store with a complete list, and finds changes that the watch has missed.

A watch that works leaves nothing to find. A change that it misses (because of a bug in a proxy, in the API server or
here) would be missing from the store for ever. A resync costs one list, and one read for each object that still differs
after the watch has had time to deliver it.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import anyio

from operator_app.api.kinds import Key, Kind, Object
from operator_app.kube.client import Cluster
from operator_app.kube.hash_ranges import HashRange, is_covered
from operator_app.kube.store import Store
from operator_app.kube.turns import Turns

GRACE_S: Final = 5.0
"""A difference between list and store may be in delivery; a watch that works delivers it within this."""


@dataclass(frozen=True, slots=True)
class MissedChange:
    """A change that the watch had not delivered; ``object`` is the current state, or the last known one if deleted."""

    kind: Kind
    object: Object
    is_deleted: bool


async def resync(
    cluster: Cluster,
    store: Store,
    kind: Kind,
    *,
    namespace: str | None,
    labels: str | None,
    hashes: HashRange | None = None,
    is_watched: Callable[[], bool] = lambda: True,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> tuple[MissedChange, ...]:
    """List a kind, apply to the store what the watch had missed, and return it.

    Nothing more is applied once ``is_watched`` is false: what was listed is not to be in the store any more.

    Raises the client's errors. If the list fails, the store is unchanged; if a read fails, later objects are unchanged.
    """
    differing = await _differing(cluster, store, kind, namespace, labels, hashes)
    if not differing:
        return ()
    await sleep(GRACE_S)
    missed = []
    for key, version in differing.items():
        if not is_watched():
            break
        if store.version(kind, key) != version:
            continue  # the watch has delivered it meanwhile
        known = store.get(kind, key)
        with store.reading(kind, key) as reading:
            live = await cluster.get(kind, key)
            if not is_watched() or store.version(kind, key) != version or not reading.learn(live):
                continue  # the watch has delivered it during the read, or has ended
        if live is not None:
            missed.append(MissedChange(kind, live, is_deleted=False))
        elif known is not None:
            missed.append(MissedChange(kind, known, is_deleted=True))
    return tuple(missed)


async def _differing(
    cluster: Cluster, store: Store, kind: Kind, namespace: str | None, labels: str | None, hashes: HashRange | None
) -> dict[Key, int | None]:
    """Addresses at which list and store differ, with the version in the store (``None``: not in the store)."""
    differing: dict[Key, int | None] = {}
    listed: set[Key] = set()
    as_of = 0
    turns = Turns()
    coverage = namespace if hashes is None else hashes
    async with aclosing(cluster.list(kind, namespace=namespace, labels=labels, hashes=hashes)) as pages:
        async for page in pages:
            as_of = int(page.resource_version)
            for key, version in page.versions():
                if not is_covered(key.namespace, coverage):
                    continue  # from a server that does not filter
                listed.add(key)
                known = store.version(kind, key)
                if known is None or known < version:
                    differing[key] = known
                await turns.end_if_due()
    for key in store.keys(kind):
        await turns.end_if_due()
        if not is_covered(key.namespace, coverage):
            continue  # outside of the list's scope
        known = store.version(kind, key)
        if key not in listed and known is not None and known <= as_of:
            differing[key] = known
    return differing
