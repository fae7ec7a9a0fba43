"""Triggers: which proxies a change enqueues, with which priority, and in which lane."""

from dataclasses import dataclass, field

import anyio
import pytest

from operator_app.api.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    HOSTNAME_CLAIM,
    HOSTNAME_POLICY,
    LABEL_INSTANCE,
    LABEL_TENANT,
    NAMESPACE,
    NODE,
    POD,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.controller.scopes import Scopes, indexes_of
from operator_app.controller.triggers import Triggers
from operator_app.controller.workqueue import Priority
from operator_app.desired import child_key
from operator_app.kube.deltas import Changed, Deleted, Listed
from operator_app.kube.fencing import FencingToken
from operator_app.kube.store import Store

pytestmark = pytest.mark.anyio

WEB = Key("team-a", "web")


@dataclass
class World:
    """Triggers of an operator that serves everything; every namespace is of shard 0 unless ``elsewhere`` has it."""

    elsewhere: set[str] = field(default_factory=set)
    enqueued: list[tuple[Key, str, Priority]] = field(default_factory=list)
    versions: int = 10

    def __post_init__(self) -> None:
        self.store = Store(indexes_of("edge-system"))
        self.scopes = Scopes(self.store, namespace="edge-system", namespaces=())
        self.triggers = Triggers(self.store, self.scopes, self, lambda *added: self.enqueued.append(added))

    def shard(self, namespace: str, /) -> int:
        """1 for a namespace of the other replica."""
        return int(namespace in self.elsewhere)

    def token(self, namespace: str, /) -> FencingToken | None:
        """A token for shard 0."""
        return None if self.shard(namespace) else FencingToken(0, 1, until=1.0, clock=lambda: 0.0)

    def sync(self) -> None:
        """Let every kind be listed, and nothing be there."""
        for kind, scope in self.scopes:
            self.triggers.apply_delta(Listed(kind, scope["namespace"], (), "5", first=True, last=True))
        assert self.scopes.newly_synced(None) == (None,)

    def change(self, kind: Kind, obj: Object) -> list[tuple[Key, str, Priority]]:
        """Deliver a change, and return what it enqueues, in the order of the keys."""
        self.versions += 1
        obj["metadata"]["resourceVersion"] = str(self.versions)
        self.enqueued.clear()
        self.triggers.apply_delta(Changed(kind, obj))
        return sorted(self.enqueued)


@pytest.fixture
def world() -> World:
    """An operator whose namespaces are all synced."""
    world = World()
    world.sync()
    return world


def proxy(key: Key = WEB, *, hostname: str | None = None, observed: int | None = None) -> Object:
    """A proxy of generation 1."""
    spec = {"registration": {"hostname": hostname}} if hostname else {}
    metadata = {"namespace": key.namespace, "name": key.name, "uid": f"u-{key.name}", "generation": 1}
    return {"metadata": metadata, "spec": spec, "status": {"observedGeneration": observed}}


def named(key: Key, **spec: object) -> Object:
    """An object of any kind."""
    return {"metadata": {"namespace": key.namespace, "name": key.name, "uid": "u"}, "spec": spec}


def test_a_proxy_is_urgent_until_its_generation_is_observed(world: World) -> None:
    """An edit and a deletion rank as the user's, any other change of a proxy as a repair."""
    assert world.change(ENVOY_PROXY, proxy()) == [(WEB, "team-a", Priority.USER)]
    assert world.change(ENVOY_PROXY, proxy(observed=1)) == [(WEB, "team-a", Priority.REPAIR)]
    deleted = proxy(observed=1)
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert world.change(ENVOY_PROXY, deleted) == [(WEB, "team-a", Priority.USER)]


@pytest.mark.parametrize("kind", [CONFIG_MAP, DEPLOYMENT])
def test_a_child_enqueues_the_proxy_of_its_name(world: World, kind: Kind) -> None:
    """By its name, so that it works without an owner reference; other objects enqueue nothing."""
    assert world.change(kind, named(child_key(WEB))) == [(WEB, "team-a", Priority.REPAIR)]
    assert world.change(kind, named(Key("team-a", "unrelated"))) == []


def test_a_pod_enqueues_the_proxy_of_its_labels(world: World) -> None:
    """A Pod's name is the Deployment's to choose; one without the label belongs to no proxy."""
    pod = named(Key("team-a", "web-envoy-5d8f")) | {"spec": {"containers": []}}
    assert world.change(POD, pod) == []
    labelled = named(Key("team-a", "web-envoy-77c9")) | {"spec": {"containers": []}}
    labelled["metadata"]["labels"] = {LABEL_INSTANCE: "web"}
    assert world.change(POD, labelled) == [(WEB, "team-a", Priority.REPAIR)]


def test_a_claim_enqueues_its_proxy_and_all_that_declare_its_hostname(world: World) -> None:
    """Whoever waits for the hostname is reconciled when it is released."""
    world.change(ENVOY_PROXY, proxy(Key("team-b", "rival"), hostname="web.example.org"))
    spec = {"hostname": "web.example.org", "proxy": {"namespace": "team-a", "name": "web"}}
    claim = named(Key("edge-system", "claim"), **spec)
    expected = [(WEB, "team-a", Priority.REPAIR), (Key("team-b", "rival"), "team-b", Priority.REPAIR)]
    assert world.change(HOSTNAME_CLAIM, claim) == expected
    world.enqueued.clear()
    world.triggers.apply_own_delete(Deleted(HOSTNAME_CLAIM, claim))
    assert sorted(world.enqueued) == expected
    assert world.store.keys(HOSTNAME_CLAIM) == ()


async def test_a_policy_enqueues_the_proxies_that_wait_for_a_hostname(world: World) -> None:
    """Not those that have theirs, nor those that declare none; its removal does the same."""
    waiting, served, again = (Key("team-b", name) for name in ("waiting", "served", "again"))
    world.change(ENVOY_PROXY, proxy(waiting, hostname="waiting.example.org"))
    world.change(ENVOY_PROXY, proxy(served, hostname="served.example.org"))
    world.change(ENVOY_PROXY, proxy(again, hostname="again.example.org"))
    world.change(ENVOY_PROXY, proxy())
    for name, uid in (("served", "u-served"), ("again", "u-before")):
        reference = {"namespace": "team-b", "name": name, "uid": uid}
        hostname = f"{name}.example.org"
        world.change(HOSTNAME_CLAIM, named(Key("", hostname), hostname=hostname, proxy=reference))
    expected = [(again, "team-b", Priority.REPAIR), (waiting, "team-b", Priority.REPAIR)]
    policy = named(Key("", "policy"))
    world.enqueued.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.triggers.enqueue_unclaimed)
        world.change(HOSTNAME_POLICY, policy)
        assert await enqueued(world, 2) == expected
        world.triggers.apply_delta(Deleted(HOSTNAME_POLICY, policy))
        assert await enqueued(world, 2) == expected
        world.triggers.enqueue_affected(HOSTNAME_POLICY, policy, Priority.REPAIR)
        assert await enqueued(world, 2) == expected, "one that a resync has found missing"
        tasks.cancel_scope.cancel()


async def enqueued(world: World, count: int) -> list[tuple[Key, str, Priority]]:
    """What is enqueued once there are so many, and nothing more comes; it is returned once."""
    with anyio.fail_after(20):
        while len(world.enqueued) < count:
            await anyio.lowlevel.checkpoint()
    for _ in range(10):
        await anyio.lowlevel.checkpoint()
    found, world.enqueued[:] = sorted(world.enqueued), []
    return found


async def test_policies_and_claims_of_many_proxies_hold_nothing_up(world: World) -> None:
    """Thousands that declare one hostname are found by their addresses, and other tasks run during a look at all."""
    for number in range(3_000):
        world.change(ENVOY_PROXY, proxy(Key("team-a", f"p{number}"), hostname="one.example.org"))
    reads = 0
    get = world.store.get

    def counted(kind: Kind, key: Key) -> Object | None:
        nonlocal reads
        reads += kind == ENVOY_PROXY
        return get(kind, key)

    world.store.get = counted  # type: ignore[method-assign]
    reference = {"namespace": "team-a", "name": "p0", "uid": "u-p0"}
    claim = named(Key("", "one.example.org"), hostname="one.example.org", proxy=reference)
    assert len(world.change(HOSTNAME_CLAIM, claim)) == 3_000
    assert reads == 0
    world.enqueued.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.triggers.enqueue_unclaimed)
        world.change(HOSTNAME_POLICY, named(Key("", "policy")))
        assert len(await enqueued(world, 2_999)) == 2_999
        tasks.cancel_scope.cancel()
    assert reads <= 1


def test_a_tenants_label_is_read_once_and_again_when_it_changes(world: World) -> None:
    """Also after the label, or the whole Namespace, is gone."""

    def labelled(tenant: str | None) -> Object:
        metadata = {"name": "team-a", "uid": "n"} | ({"labels": {LABEL_TENANT: tenant}} if tenant else {})
        return {"metadata": metadata}

    assert world.triggers.tenant_of("team-a") == "team-a"
    for tenant in ("shop", "shop", "bank"):
        world.change(NAMESPACE, labelled(tenant))
        assert [world.triggers.tenant_of("team-a") for _ in range(2)] == [tenant] * 2
    world.versions += 1
    gone = labelled("bank")
    gone["metadata"]["resourceVersion"] = str(world.versions)
    world.triggers.apply_delta(Deleted(NAMESPACE, gone))
    assert world.triggers.tenant_of("team-a") == "team-a"


def test_a_hostname_that_the_operator_gives_back_wakes_who_waits_for_it(world: World) -> None:
    """Before the watch delivers that the claim rests."""
    world.change(ENVOY_PROXY, proxy(Key("team-b", "rival"), hostname="web.example.org"))
    world.enqueued.clear()
    spec = {"hostname": "web.example.org", "proxy": {"namespace": "team-a", "name": "web", "uid": "u"}}
    world.triggers.apply_own_change(named(Key("", "web.example.org"), **spec))
    assert sorted(key for key, *_ in world.enqueued) == [WEB, Key("team-b", "rival")]


def test_a_listed_proxy_that_is_served_ranks_last(world: World) -> None:
    """A list after a start or a 410 is not urgent, except for generations that were not observed yet."""
    served, new = proxy(observed=1), proxy(Key("team-a", "new"))
    for each in (served, new):
        each["metadata"]["resourceVersion"] = "20"
    world.triggers.apply_delta(Listed(ENVOY_PROXY, None, (served, new), "21", first=True, last=True))
    assert [(key.name, priority) for key, _, priority in sorted(world.enqueued)] == [
        ("new", Priority.USER),
        ("web", Priority.RESYNC),
    ]


def test_the_lane_is_the_tenant_label_of_the_namespace(world: World) -> None:
    """A changed label enqueues nothing, and counts from the next change on."""
    labelled: Object = {"metadata": {"name": "team-a", "labels": {LABEL_TENANT: "acme"}}}
    assert world.change(NAMESPACE, labelled) == []
    assert world.change(ENVOY_PROXY, proxy()) == [(WEB, "acme", Priority.USER)]


def test_nothing_is_enqueued_before_the_namespace_is_synced_or_for_another_replica() -> None:
    """The store has the change; who may reconcile the proxy enqueues it with its shard."""
    world = World(elsewhere={"team-b"})
    assert world.change(ENVOY_PROXY, proxy()) == []
    world.sync()
    assert world.change(ENVOY_PROXY, proxy(Key("team-b", "web"))) == []
    assert Key("team-b", "web") in world.store.keys(ENVOY_PROXY)


async def test_an_acquired_shard_enqueues_its_proxies_and_what_records_still_name(world: World) -> None:
    """Proxies that wait for a reconcile come first; of other shards none is enqueued."""
    world.elsewhere.add("team-b")
    for each in (proxy(observed=1), proxy(Key("team-a", "new")), proxy(Key("team-b", "web"))):
        world.change(ENVOY_PROXY, each)
    record = named(Key("edge-system", "record"), proxy={"namespace": "team-a", "name": "gone"})
    world.change(PROXY_REGISTRATION, record)
    world.enqueued.clear()
    await world.triggers.enqueue_shard(0)
    assert sorted((key.name, priority) for key, _, priority in world.enqueued) == [
        ("gone", Priority.REPAIR),
        ("new", Priority.USER),
        ("web", Priority.REPAIR),
    ]


async def test_a_synced_namespace_enqueues_its_proxies_where_the_shard_is_held(world: World) -> None:
    """Namespaces that become synced together share one walk over the known proxies, and other shards are left out."""
    world.elsewhere.add("team-c")
    for namespace in ("team-a", "team-b", "team-c", "team-d"):
        world.change(ENVOY_PROXY, proxy(Key(namespace, "web")))
    world.enqueued.clear()
    walks = 0
    known = world.triggers.known_proxies

    def counted() -> set[Key]:
        nonlocal walks
        walks += 1
        return known()

    world.triggers.known_proxies = counted  # type: ignore[method-assign]
    async with anyio.create_task_group() as tasks:
        for namespace in ("team-a", "team-b", "team-c"):
            tasks.start_soon(world.triggers.enqueue_synced, namespace)
    assert sorted(key.namespace for key, *_ in world.enqueued) == ["team-a", "team-b"]
    assert walks <= 2


async def test_a_changed_node_enqueues_the_proxies_with_a_node_port(world: World) -> None:
    """And no report of a kubelet that changes nothing that is published; a resync that finds a change does it, too."""
    other, metadata = Key("team-a", "other"), {"name": "node-1", "uid": "n"}
    world.change(SERVICE, named(child_key(WEB), type="NodePort"))
    world.change(SERVICE, named(child_key(other), type="LoadBalancer"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.triggers.enqueue_node_ports)
        for conditions, is_news in (([], True), ([], False), ([{"type": "Ready", "status": "True"}], True)):
            assert world.change(NODE, {"metadata": dict(metadata), "status": {"conditions": conditions}}) == []
            await anyio.wait_all_tasks_blocked()
            assert world.enqueued == ([(WEB, "team-a", Priority.REPAIR)] if is_news else [])
        world.enqueued.clear()
        world.triggers.enqueue_affected(NODE, {"metadata": metadata}, Priority.REPAIR)
        await anyio.wait_all_tasks_blocked()
        assert world.enqueued == [(WEB, "team-a", Priority.REPAIR)]
        world.enqueued.clear()
        world.triggers.apply_delta(Listed(NODE, None, (), "99", first=True, last=True))
        await anyio.wait_all_tasks_blocked()
        assert world.enqueued == [(WEB, "team-a", Priority.REPAIR)]
        tasks.cancel_scope.cancel()


async def test_a_resync_enqueues_every_known_proxy_of_the_shards_held(world: World) -> None:
    """It yields exactly the proxies that it has enqueued."""
    world.elsewhere.add("team-b")
    for namespace in ("team-a", "team-b"):
        world.change(ENVOY_PROXY, proxy(Key(namespace, "web")))
    world.enqueued.clear()
    assert [key async for key in world.triggers.enqueue_resync()] == [WEB]
    assert world.enqueued == [(WEB, "team-a", Priority.RESYNC)]
