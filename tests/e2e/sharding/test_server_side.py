"""Server-side sharding on a real API server with the gate on, and on one without it: who gets, and who writes, what."""

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

import anyio
import pytest

from operator_app.api.kinds import CONFIG_MAP, ENVOY_PROXY, LEASE, NAMESPACE, Key
from operator_app.controller.scopes import INDEXES, SHARED_KINDS
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Delta, Listed
from operator_app.kube.hash_ranges import HASHES, HashRange, hash_of
from operator_app.kube.watch import WatchTimes, follow
from operator_app.sharding.agreement import NAME, annotation_of
from operator_app.sharding.leases import shard_lease_name
from operator_app.sharding.ranges import Ranges
from tests.e2e.controlplane import AuditEntry, ControlPlane
from tests.e2e.failover import replica_of
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, a_proxy, wait_reconciled
from tests.e2e.sharding.replicas import three_replicas
from tests.e2e.shipped import CRDS, operator_identity

SHARDS: Final = 6
TENANTS: Final = tuple(f"team-{letter}" for letter in "abcdefghijkl")
"""Namespaces with neighbouring hashes: of even ranges, all are in one."""

FLAGS: Final = (
    "--server-side-sharding=true",
    f"--shards={SHARDS}",
    "--sweep-interval-s=3",
    "--lease-duration-s=3",
    "--renew-deadline-s=2",
    "--retry-period-s=0.5",
)
TENANTS_PLURALS: Final = {kind.plural for kind in set(INDEXES) - SHARED_KINDS}


@pytest.fixture(scope="module")
def sharding_plane() -> Iterator[ControlPlane]:
    """A control plane whose API server filters by hash."""
    with ControlPlane(crds=CRDS, gates=["ShardedListAndWatch"]) as plane:
        yield plane


@pytest.fixture(scope="module")
def sharding_admin(sharding_plane: ControlPlane) -> Iterator[Kube]:
    """Its administrator."""
    with Kube(sharding_plane.kubeconfig) as admin:
        yield admin


@pytest.fixture
def replicas(sharding_plane: ControlPlane, sharding_admin: Kube, tmp_path: Path) -> Iterator[list[OperatorProcess]]:
    """Three replicas that are not running yet; at the end no reconcile has crashed and no write changed nothing."""
    yield from three_replicas(operator_identity(sharding_plane, sharding_admin), tmp_path)


@pytest.mark.anyio
async def test_the_server_hashes_as_we_do(sharding_plane: ControlPlane, sharding_admin: Kube) -> None:
    """A range of one hash has the objects of that namespace, built-in and custom; the ranges beside it the rest."""
    names = ("hash-a", "hash-b", "kube-public")
    for name in names[:2]:
        sharding_admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        sharding_admin.create(ENVOY_PROXY, a_proxy(name, replicas=0, paused=True))
    wait = partial(sharding_admin.find, CONFIG_MAP, Key("hash-b", "kube-root-ca.crt"))
    wait_until(wait, what="the controllers to fill the namespace")
    async with Cluster.connect(kubeconfig=sharding_plane.kubeconfig, user_agent="contract-test") as cluster:
        for name in names:
            own = HashRange(hash_of(name), hash_of(name) + 1)
            assert await _namespaces(cluster, own) == {name}
        below, above = HashRange(0, hash_of("hash-a")), HashRange(hash_of("hash-a") + 1, HASHES)
        found = await _namespaces(cluster, below) | await _namespaces(cluster, above)
        assert "hash-a" not in found
        assert set(names[1:]) <= found
        assert await cluster.filters_by_hash(CONFIG_MAP)
        delivered = await _followed(cluster, HashRange(hash_of("hash-a"), hash_of("hash-a") + 1), sharding_admin)
        assert delivered == {"hash-a"}
    for name in names[:2]:
        sharding_admin.delete(ENVOY_PROXY, Key(name, "web"))


async def _namespaces(cluster: Cluster, hashes: HashRange) -> set[str]:
    found = set()
    async with aclosing(cluster.list(CONFIG_MAP, hashes=hashes)) as pages:
        async for page in pages:
            assert page.is_filtered
            found |= {each["metadata"]["namespace"] for each in page.items}
    return found


async def _followed(cluster: Cluster, hashes: HashRange, admin: Kube) -> set[str]:
    """The namespaces of proxies that a raw watch of a range delivers while proxies in two namespaces change."""
    events: list[str] = []

    def edit(name: str) -> None:
        admin.patch(ENVOY_PROXY, Key(name, "web"), {"metadata": {"annotations": {"edited": "yes"}}})

    (page,) = [page async for page in cluster.list(ENVOY_PROXY, hashes=hashes)]
    events += [each["metadata"]["namespace"] for each in page.items]
    async with cluster.watch(
        ENVOY_PROXY, resource_version=page.resource_version, timeout_s=60, idle_timeout_s=60, hashes=hashes
    ) as stream:
        for name in ("hash-b", "hash-a"):
            await anyio.to_thread.run_sync(edit, name)
        async for event in stream:
            if event.type != "BOOKMARK":
                events.append(event.object["metadata"]["namespace"])
                break
    return set(events)


def test_replicas_get_their_own_shards_and_no_others(
    sharding_plane: ControlPlane, sharding_admin: Kube, replicas: list[OperatorProcess]
) -> None:
    """Namespaces that are alike are divided among three replicas, each of which gets about a third of all events.

    Every proxy is reconciled, by one replica at a time, while the cuts change and after a replica was killed.
    """
    for each in replicas:
        each.start(*FLAGS, wait=False)
    for name in TENANTS:
        sharding_admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        sharding_admin.create(ENVOY_PROXY, a_proxy(name, replicas=0))
    for name in TENANTS:
        wait_reconciled(sharding_admin, Key(name, "web"), 60)
    wait_until(lambda: _is_even(_sizes(sharding_admin)), 60, "cuts that divide the tenants")
    wait_until(lambda: len(set(_holders(sharding_admin).values())) == len(replicas), 60, "every replica to hold some")
    _edited(sharding_admin, "settled", TENANTS)

    audit = sharding_plane.audit()
    mark, before = audit.mark(), _received(replicas)
    _edited(sharding_admin, "measured", TENANTS)
    gained = [after - earlier for after, earlier in zip(_received(replicas), before, strict=True)]
    assert min(gained) > 0
    assert max(gained) <= sum(gained) * 0.5, gained
    entries = [each for each in audit.entries(mark) if each.user == OPERATOR_USER]
    for name in TENANTS:
        assert len({replica_of(each) for each in entries if each.is_write and each.namespace == name}) == 1, name

    victim, *others = replicas
    victim.kill()
    _edited(sharding_admin, "after", TENANTS)
    assert set(_holders(sharding_admin).values()) <= {each.replica for each in others}
    asked = [each for each in audit.entries(mark) if each.user == OPERATOR_USER and each.verb in ("list", "watch")]
    assert asked
    assert all(_selector(each) for each in asked if each.resource in TENANTS_PLURALS)
    for name in TENANTS:
        sharding_admin.delete(ENVOY_PROXY, Key(name, "web"))
    wait_until(
        lambda: not any(sharding_admin.find(ENVOY_PROXY, Key(name, "web")) for name in TENANTS), 60, "all to be gone"
    )


def _edited(admin: Kube, text: str, names: Sequence[str]) -> None:
    """Edit the proxy of each namespace, and wait until it is reconciled."""
    for name in names:
        admin.patch(ENVOY_PROXY, Key(name, "web"), {"spec": {"service": {"annotations": {"example.com/edit": text}}}})
    for name in names:
        wait_reconciled(admin, Key(name, "web"), 60)


def _sizes(admin: Kube) -> list[int]:
    """How many tenants are in each shard, by the cuts in the Lease."""
    lease = admin.get(LEASE, Key(OPERATOR_NAMESPACE, NAME))
    ranges = Ranges.of_text(lease["metadata"]["annotations"][annotation_of(SHARDS)], SHARDS)
    assert ranges is not None
    return [sum(ranges.shard_of(name) == shard for name in TENANTS) for shard in range(SHARDS)]


def _is_even(sizes: Sequence[int]) -> bool:
    return max(sizes) <= 3


def _holders(admin: Kube) -> dict[int, str]:
    found = {}
    for shard in range(SHARDS):
        lease = admin.find(LEASE, Key(OPERATOR_NAMESPACE, shard_lease_name(shard)))
        if lease is not None and lease["spec"].get("holderIdentity"):
            found[shard] = lease["spec"]["holderIdentity"]
    return found


def _received(replicas: Sequence[OperatorProcess]) -> list[float]:
    """How many objects of tenants each replica was sent."""
    kinds = {kind.kind for kind in set(INDEXES) - SHARED_KINDS}
    return [
        sum(value for labels, value in each.series("operator_app_received_objects_total") if labels["kind"] in kinds)
        for each in replicas
    ]


def _selector(entry: AuditEntry) -> list[str]:
    return parse_qs(urlsplit(entry.path).query).get("shardSelector", [])


@pytest.fixture
def plain_operator(operator_kubeconfig: Path, tmp_path: Path) -> Iterator[OperatorProcess]:
    """A replica of an API server without the gate."""
    process = OperatorProcess(operator_kubeconfig, tmp_path / "plain.log")
    yield process
    process.stop()


def test_a_server_without_it_is_watched_as_before(admin: Kube, namespace: str, plain_operator: OperatorProcess) -> None:
    """The setting changes nothing but the division there, and the log says why."""
    plain_operator.start(*FLAGS)
    plain_operator.wait_for("server_side_sharding_unavailable")
    admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=0))
    wait_reconciled(admin, Key(namespace, "web"))
    synced = plain_operator.wait_for("synced")
    assert synced["namespace"] is None
    wait_until(lambda: len(_holders(admin)) == SHARDS, what="every shard to be held")


@pytest.mark.anyio
async def test_what_a_server_without_it_sends_is_filtered_here(control_plane: ControlPlane, namespace: str) -> None:
    """It ignores the range, so only the consumer's own filter keeps other namespaces out."""
    delivered: list[Delta] = []
    own = HashRange(hash_of(namespace), hash_of(namespace) + 1)
    async with Cluster.connect(kubeconfig=control_plane.kubeconfig, user_agent="contract-test") as cluster:
        assert not await cluster.filters_by_hash(CONFIG_MAP)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:

                def sink(delta: Delta) -> None:
                    delivered.append(delta)
                    if isinstance(delta, Listed) and delta.last:
                        tasks.cancel_scope.cancel()

                times, rand = WatchTimes(), lambda: 0.0
                await follow(
                    cluster,
                    CONFIG_MAP,
                    sink=sink,
                    times=times,
                    rand=rand,
                    on_error=lambda _, error: pytest.fail(str(error)),
                    on_restart=lambda _: None,
                    hashes=own,
                )
    objects = [each for delta in delivered if isinstance(delta, Listed) for each in delta.objects]
    assert {each["metadata"]["namespace"] for each in objects} <= {namespace}
