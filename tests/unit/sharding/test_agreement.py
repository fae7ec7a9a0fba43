"""All replicas use the ranges of one Lease, on a scripted API server: who writes it, and what edits of it do."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from string import ascii_lowercase

import anyio
import pytest

from operator_app.api.kinds import LEASE, Object
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Changed, Deleted, Listed
from operator_app.sharding.agreement import NAME, Agreement, annotation_of
from operator_app.sharding.leases import LABEL_ROLE, LeaseTimes, lease_of
from operator_app.sharding.ranges import Ranges, balanced
from tests.unit.kube.scripted_client import cluster_over
from tests.unit.sharding.test_elector import NAMESPACE, Server, status

pytestmark = pytest.mark.anyio

FEW = {"shop": 3}
MANY = {f"team-{letter}": 10 for letter in ascii_lowercase}


class Replica:
    """One replica's part of the agreement, and the divisions that it was told."""

    def __init__(self, cluster: Cluster, proxies: dict[str, int], shards: int = 4) -> None:
        self.proxies = proxies
        self.told: list[Ranges] = []
        self.agreement = Agreement(
            cluster, namespace=NAMESPACE, shards=shards, proxies=lambda: self.proxies, on_change=self.told.append
        )

    def deliver(self, server: Server) -> None:
        """Let the watch deliver the Lease as it is."""
        self.agreement.apply_delta(Changed(LEASE, server.leases[NAME]))


@asynccontextmanager
async def connected(folder: Path) -> AsyncGenerator[tuple[Server, Cluster]]:
    """An API server without Leases."""
    server = Server()
    async with cluster_over(server, folder) as cluster:
        yield server, cluster


async def reached(replica: Replica) -> None:
    """The replica knows the ranges, within a bound."""
    with anyio.fail_after(20):
        await replica.agreement.reach()


async def test_the_first_replica_writes_the_cuts_and_the_second_uses_them(tmp_path: Path) -> None:
    """Whatever the second one would have written; the conflict of two that start together ends the same way."""
    async with connected(tmp_path) as (server, cluster):
        first, second, third = Replica(cluster, FEW), Replica(cluster, MANY), Replica(cluster, MANY)
        await reached(first)
        second.agreement.apply_delta(Listed(LEASE, NAMESPACE, (server.leases[NAME],), "9", first=True, last=True))
        await reached(second)
        await reached(third)
        assert first.told == second.told == third.told == [balanced(FEW, 4)]
        assert server.written == [NAME]


async def test_cuts_change_when_the_shards_have_become_too_different(tmp_path: Path) -> None:
    """Every replica is told once, and what is good enough is left alone."""
    async with connected(tmp_path) as (server, cluster):
        keeper, other = Replica(cluster, FEW), Replica(cluster, FEW)
        await reached(keeper)
        other.deliver(server)
        await keeper.agreement.keep()
        keeper.proxies = MANY
        await keeper.agreement.keep()
        for _ in range(2):
            keeper.deliver(server)
            other.deliver(server)
        await keeper.agreement.keep()
        assert keeper.told == other.told == [balanced(FEW, 4), balanced(MANY, 4)]
        assert server.written == [NAME, NAME]


@pytest.mark.parametrize("damage", ["deleted", "garbage", "unlabelled"])
async def test_edits_by_hand_change_no_division_and_are_mended(tmp_path: Path, damage: str) -> None:
    """The ranges in use stay in use, and the keeper writes them again."""
    async with connected(tmp_path) as (server, cluster):
        keeper = Replica(cluster, FEW)
        await reached(keeper)
        lease = server.leases[NAME]
        if damage == "deleted":
            keeper.agreement.apply_delta(Deleted(LEASE, server.leases.pop(NAME)))
        elif damage == "garbage":
            annotations = {annotation_of(4): "edited"}
            keeper.agreement.apply_delta(Changed(LEASE, server.put(edited(lease, annotations=annotations))))
        else:
            keeper.agreement.apply_delta(Deleted(LEASE, server.put(edited(lease, labels={}))))
        for _ in range(3):
            await keeper.agreement.keep()
        assert keeper.told == [balanced(FEW, 4)]
        assert server.leases[NAME]["metadata"]["annotations"][annotation_of(4)] == balanced(FEW, 4).text


def edited(lease: Object, **metadata: object) -> Object:
    """A Lease with other metadata."""
    return lease | {"metadata": lease["metadata"] | metadata}


async def test_other_numbers_of_shards_have_cuts_of_their_own(tmp_path: Path) -> None:
    """While ``--shards`` is changed replica by replica, neither undoes what the other has written."""
    async with connected(tmp_path) as (server, cluster):
        four, six = Replica(cluster, FEW), Replica(cluster, FEW, shards=6)
        await reached(four)
        six.deliver(server)
        await reached(six)
        four.deliver(server)
        assert (four.told, six.told) == ([balanced(FEW, 4)], [balanced(FEW, 6)])


async def test_a_server_that_refuses_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing write ends nothing: the next attempt, or what another replica wrote, does."""
    monkeypatch.setattr("operator_app.sharding.agreement.RETRY_S", 0.01)
    async with connected(tmp_path) as (server, cluster):
        refusals = iter(range(3))
        server.refuse = lambda _: None if next(refusals, None) is None else status(500, "InternalError")
        replica = Replica(cluster, FEW)
        await reached(replica)
        assert replica.told == [balanced(FEW, 4)]


async def test_the_lease_of_the_ranges_is_no_shard_and_no_heartbeat(tmp_path: Path) -> None:
    """The election ignores it, although it has the label by which Leases are watched."""
    async with connected(tmp_path) as (server, cluster):
        await reached(Replica(cluster, FEW))
        lease = server.leases[NAME]
        assert LABEL_ROLE in lease["metadata"]["labels"]
        assert lease_of(lease, LeaseTimes()) is None
