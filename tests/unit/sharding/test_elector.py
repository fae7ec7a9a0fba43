"""Keeping shards, over a small API server: what rounds, Events and failing requests mean for a shard."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import anyio
import httpx2
import pytest

from operator_app.api.kinds import LEASE, Object
from operator_app.kube import fencing
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Changed, Listed
from operator_app.kube.fencing import FencingToken
from operator_app.sharding.elector import Elector
from operator_app.sharding.leases import (
    ANNOTATION_SHARDS,
    LABEL_ROLE,
    LeaseTimes,
    ShardTransition,
    replica_lease_name,
    shard_lease_name,
)
from tests.unit.kube.scripted_client import cluster_over

pytestmark = pytest.mark.anyio

NAMESPACE: Final = "edge-system"
TIMES: Final = LeaseTimes(duration_s=3, renew_deadline_s=2, retry_period_s=0.05)


class Server(httpx2.AsyncBaseTransport):
    """Keeps Leases by compare-and-set; ``refuse`` may answer in its place."""

    def __init__(self) -> None:
        self.leases: dict[str, Object] = {}
        self.written: list[str] = []
        self.refuse: Callable[[httpx2.Request], httpx2.Response | None] = lambda _: None
        self._version = 1

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The answer."""
        return self.refuse(request) or self._answer(request.method, request.url.path, await request.aread())

    def put(self, lease: Object) -> Object:
        """Store a Lease as it is, with a new version."""
        self._version += 1
        metadata = {"uid": "u"} | lease["metadata"] | {"resourceVersion": str(self._version)}
        stored = lease | {"metadata": metadata}
        self.leases[metadata["name"]] = stored
        return stored

    def _answer(self, method: str, path: str, content: bytes) -> httpx2.Response:
        body = json.loads(content) if content else {}
        name = path.rpartition("/leases")[2].lstrip("/") or body.get("metadata", {}).get("name")
        known = self.leases.get(name)
        if method in ("POST", "PUT"):
            return self._write(body, known)
        if name is None:
            items = [each for each in self.leases.values() if LABEL_ROLE in each["metadata"].get("labels", {})]
            meta = {"resourceVersion": str(self._version)}
            return httpx2.Response(200, json={"kind": "LeaseList", "metadata": meta, "items": items})
        if known is None:
            return status(404, "NotFound")
        if method == "DELETE":
            del self.leases[name]
        return httpx2.Response(200, json=known)

    def _write(self, body: Object, known: Object | None) -> httpx2.Response:
        version = body["metadata"].get("resourceVersion")
        if version != (known["metadata"]["resourceVersion"] if known else None):
            return status(409, "AlreadyExists" if version is None else "Conflict")
        self.written.append(body["metadata"]["name"])
        return httpx2.Response(201 if known is None else 200, json=self.put(body))


def status(code: int, reason: str, **headers: str) -> httpx2.Response:
    """A refusal."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": "no"}
    return httpx2.Response(code, json=body | {"details": {"name": "x"}}, headers=headers)


def a_lease(name: str, holder: str | None = None, *, shards: int = 1, **labels: str) -> Object:
    """A Lease to be stored."""
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels, "annotations": {ANNOTATION_SHARDS: str(shards)}}
    spec = {"leaseDurationSeconds": 15, "leaseTransitions": 4} | ({} if holder is None else {"holderIdentity": holder})
    return {"apiVersion": LEASE.api_version, "kind": "Lease", "metadata": metadata, "spec": spec}


class Kept:
    """A elector, what it told, and when it had left."""

    def __init__(self, cluster: Cluster, shards: int, grace_s: float) -> None:
        self.changes: list[ShardTransition] = []
        self._news = anyio.Event()
        self.has_left = anyio.Event()
        self.elector = Elector(
            cluster,
            namespace=NAMESPACE,
            replica="me",
            shards=shards,
            times=TIMES,
            grace_s=grace_s,
            on_change=self._changed,
            clock=anyio.current_time,
            now=lambda: datetime(2026, 7, 1, tzinfo=UTC),
        )
        self.elector.apply_delta(Listed(LEASE, NAMESPACE, (), "1", first=True, last=True))

    def _changed(self, _shard: int, change: ShardTransition) -> None:
        self.changes.append(change)
        self._news.set()

    async def run(self) -> None:
        """Keep shards until it has left."""
        await self.elector.run()
        self.has_left.set()

    async def until(self, change: ShardTransition, count: int = 1) -> None:
        """Wait until this was told so often."""
        with anyio.fail_after(5):
            while self.changes.count(change) < count:
                self._news = anyio.Event()
                await self._news.wait()


@asynccontextmanager
async def keeping(server: Server, folder: Path, *, shards: int = 1, grace_s: float = 60) -> AsyncGenerator[Kept]:
    """A elector at work, in sync, that knows no Lease yet."""
    async with (
        cluster_over(server, folder) as cluster,
        anyio.create_task_group() as tasks,
    ):
        kept = Kept(cluster, shards, grace_s)
        tasks.start_soon(kept.run)
        yield kept
        tasks.cancel_scope.cancel()


def tenant_of(elector: Elector, shard: int) -> str:
    """Some namespace of a shard."""
    return next(name for name in map(str, range(1000)) if elector.shard(name) == shard)


async def test_what_is_sent_later_does_not_hold_up_a_hand_over(tmp_path: Path) -> None:
    """A round keeps its shard; an Event that waits in a queue does not, and finds its right ended."""
    async with keeping(Server(), tmp_path) as kept:
        await kept.until(ShardTransition.TAKEN)
        token = kept.elector.token("team-a")
        assert token is not None
        with fencing.holding(token):
            with kept.elector.working(token):
                kept.elector.leave()
                await anyio.sleep(4 * TIMES.retry_period_s)
                during = token.is_valid, kept.has_left.is_set()
            with anyio.fail_after(1):
                await kept.has_left.wait()
        assert during == (True, False)
        assert not token.is_valid
        assert kept.changes == [ShardTransition.TAKEN, ShardTransition.RELEASED]


async def test_a_round_that_hangs_does_not_keep_its_shard_for_ever(tmp_path: Path) -> None:
    """A shard that moves to a new member gets the time of grace; rounds of shards that stay are not touched."""
    over: list[int] = []

    async def hang(elector: Elector, token: FencingToken) -> None:
        with elector.working(token):
            await anyio.sleep_forever()
        over.append(token.shard)

    server, grace_s = Server(), 0.2
    async with keeping(server, tmp_path, shards=2, grace_s=grace_s) as kept, anyio.create_task_group() as rounds:
        await kept.until(ShardTransition.TAKEN, 2)
        for shard in (0, 1):
            token = kept.elector.token(tenant_of(kept.elector, shard))
            assert token is not None
            rounds.start_soon(hang, kept.elector, token)
        newcomer = a_lease(replica_lease_name("you"), "you", shards=2, **{LABEL_ROLE: "replica"})
        kept.elector.apply_delta(Changed(LEASE, server.put(newcomer)))
        begun = anyio.current_time()
        await kept.until(ShardTransition.RELEASED)
        await anyio.sleep(2 * grace_s)
        assert anyio.current_time() - begun >= grace_s
        assert len(over) == len(kept.elector.held) == 1
        assert over[0] not in kept.elector.held
        rounds.cancel_scope.cancel()


async def test_a_take_whose_list_fails_is_not_repeated_at_full_speed(tmp_path: Path) -> None:
    """The replace succeeds and the list behind it is refused: the next try comes when the server wants it."""
    server = Server()
    server.refuse = lambda request: (
        status(429, "TooManyRequests", **{"Retry-After": "1"})
        if request.method == "GET" and request.url.path.endswith("/leases")
        else None
    )
    async with keeping(server, tmp_path):
        await anyio.sleep(10 * TIMES.retry_period_s)
    assert server.written.count(shard_lease_name(0)) == 1


async def test_a_lease_that_lost_its_label_is_found_by_its_name(tmp_path: Path) -> None:
    """No watch shows it any more, and its name is taken: it is read, taken, and has its label again."""
    server = Server()
    server.put(a_lease(shard_lease_name(0), note="keep"))
    async with keeping(server, tmp_path) as kept:
        await kept.until(ShardTransition.TAKEN)
    lease = server.leases[shard_lease_name(0)]
    assert lease["metadata"]["labels"] == {LABEL_ROLE: "shard", "note": "keep"}
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("me", 5)
