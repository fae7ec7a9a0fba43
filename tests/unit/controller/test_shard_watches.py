"""Watches of held shards: what is watched when, what reaches the store, and that nothing of an ended one is left."""

from dataclasses import dataclass, field
from typing import NoReturn

import anyio
import anyio.lowlevel
import pytest

from operator_app.api.kinds import CONFIG_MAP, ENVOY_PROXY, Key, Kind, Object
from operator_app.controller.scopes import INDEXES, SHARED_KINDS, Scope, Scopes, coverage_of
from operator_app.controller.shard_watches import ShardWatches, Sink
from operator_app.controller.sight import Watch
from operator_app.kube.deltas import Changed, Delta, Listed
from operator_app.kube.hash_ranges import HashRange, hash_of
from operator_app.kube.store import Store

pytestmark = pytest.mark.anyio

OWN = HashRange(hash_of("team-a"), hash_of("team-a") + 1)
OTHER = HashRange(hash_of("team-b"), hash_of("team-b") + 1)
TENANTS_KINDS = set(INDEXES) - SHARED_KINDS


@dataclass
class World:
    """A divided operator's scopes, and watches that are the test."""

    sinks: dict[tuple[Kind, HashRange | None], Sink] = field(default_factory=dict)
    forgotten: list[Watch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = Store(INDEXES)
        self.scopes = Scopes(self.store, namespace="edge-system", namespaces=())
        self.scopes.divide()
        for kind, scope in self.scopes:
            self.listed(kind, scope)
        self.watches = ShardWatches(self.scopes, follow=self.follow, forget=self.forgotten.append)

    async def follow(self, kind: Kind, scope: Scope, sink: Sink) -> NoReturn:
        """A watch that delivers what the test passes to its sink."""
        self.sinks[kind, scope["hashes"]] = sink
        try:
            while True:
                await anyio.sleep_forever()
        finally:
            del self.sinks[kind, scope["hashes"]]

    def apply(self, delta: Delta) -> None:
        """The sink of every watch."""
        self.store.apply_delta(delta)

    def listed(self, kind: Kind, scope: Scope, *objects: Object) -> None:
        """Let a scope be listed."""
        hashes = scope["hashes"]
        self.apply(Listed(kind, scope["namespace"], objects, "5", first=True, last=True, hashes=hashes))

    def sync(self, hashes: HashRange, *proxies: Object) -> None:
        """Let every kind of a range be listed."""
        for (kind, covered), sink in self.sinks.items():
            if covered == hashes:
                objects = proxies if kind == ENVOY_PROXY else ()
                sink(Listed(kind, None, objects, "5", first=True, last=True, hashes=hashes))


def proxy(namespace: str, version: int = 4) -> Object:
    """A proxy."""
    return {"metadata": {"namespace": namespace, "name": "web", "uid": "u", "resourceVersion": str(version)}}


async def test_a_shard_is_watched_from_its_acquisition_to_its_end() -> None:
    """By one watch of each kind of tenants; it is synced once all are listed, and its end leaves nothing of it."""
    world = World()
    assert world.scopes.is_any_synced
    async with anyio.create_task_group() as tasks:
        world.watches.begin(3, OWN, world.apply, tasks)
        world.watches.begin(4, OTHER, world.apply, tasks)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert set(world.sinks) == {(kind, each) for kind in TENANTS_KINDS for each in (OWN, OTHER)}
        assert not world.scopes.is_synced("team-a")
        world.sync(OWN, proxy("team-a"))
        assert world.scopes.newly_synced(OWN) == (OWN,)
        assert (world.scopes.is_synced("team-a"), world.scopes.is_synced("team-b")) == (True, False)
        world.sync(OTHER, proxy("team-b"))
        assert world.scopes.newly_synced(OTHER) == (OTHER,)

        late = world.sinks[ENVOY_PROXY, OWN]
        world.watches.end(3)
        late(Changed(ENVOY_PROXY, proxy("team-a", 9)))
        assert world.store.keys(ENVOY_PROXY) == (Key("team-b", "web"),)
        assert (world.scopes.is_synced("team-a"), world.scopes.is_synced("team-b")) == (False, True)
        assert {each for kind, each in world.forgotten if kind in TENANTS_KINDS} == {OWN}
        with anyio.fail_after(20):
            while any(each == OWN for _, each in world.sinks):
                await anyio.lowlevel.checkpoint()
        assert OWN not in {coverage_of(scope) for _, scope in world.scopes}
        tasks.cancel_scope.cancel()


async def test_a_shard_that_is_lost_before_its_watches_begin_has_none() -> None:
    """An acquisition and its loss in one turn of the event loop; and acquired again it is listed anew."""
    world = World()
    async with anyio.create_task_group() as tasks:
        world.watches.begin(3, OWN, world.apply, tasks)
        world.watches.end(3)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        assert world.sinks == {}
        world.watches.begin(3, OWN, world.apply, tasks)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        world.sync(OWN, proxy("team-a"))
        assert world.scopes.newly_synced(OWN) == (OWN,)
        tasks.cancel_scope.cancel()


async def test_an_empty_range_has_no_watch() -> None:
    """No namespace can be in it, and a server refuses it."""
    world = World()
    async with anyio.create_task_group() as tasks:
        world.watches.begin(3, HashRange(5, 5), world.apply, tasks)
        await anyio.lowlevel.checkpoint()
        assert world.sinks == {}
        world.watches.end(3)


async def test_a_range_is_forgotten_with_its_marks_and_what_is_shared_stays() -> None:
    """Else a namespace that comes back would be taken for one whose deletions are known."""
    world = World()
    world.scopes.open(OWN)
    world.apply(Listed(CONFIG_MAP, None, (proxy("team-a", 7) | {"kind": "ConfigMap"},), "90", True, True, OWN))  # noqa: FBT003
    record = {"metadata": {"namespace": "edge-system", "name": "r", "uid": "r", "resourceVersion": "6"}, "spec": {}}
    shared = next(kind for kind in SHARED_KINDS if kind.kind == "Namespace")
    world.apply(Changed(shared, record))
    world.scopes.close(OWN)
    assert world.store.keys(CONFIG_MAP) == ()
    assert world.store.keys(shared) != ()
    # As of an older version than the list before: nothing is known of this range any more.
    assert world.store.learn(CONFIG_MAP, proxy("team-a", 8) | {"kind": "ConfigMap"})
