"""The elector on a scripted API server: how reconciles, Events and failing requests affect the release of a shard."""

import itertools
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
from operator_app.sharding.election import ShardTransition
from operator_app.sharding.elector import Elector
from operator_app.sharding.leases import (
    ANNOTATION_DIVISION,
    ANNOTATION_SHARDS,
    LABEL_ROLE,
    LeaseTimes,
    heartbeat_lease_name,
    shard_lease_name,
)
from tests.unit.kube.scripted_client import cluster_over

pytestmark = pytest.mark.anyio

NAMESPACE: Final = "edge-system"
TIMES: Final = LeaseTimes(duration_s=3, renew_deadline_s=2, retry_period_s=0.05)


class Server(httpx2.AsyncBaseTransport):
    """Stores Leases by compare-and-set; ``refuse`` may answer instead."""

    def __init__(self) -> None:
        self.leases: dict[str, Object] = {}
        self.written: list[str] = []
        self.wrote = anyio.Event()
        self.refuse: Callable[[httpx2.Request], httpx2.Response | None] = lambda _: None
        self._version = 1

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer a request."""
        return self.refuse(request) or self._answer(request.method, request.url.path, await request.aread())

    def put(self, lease: Object) -> Object:
        """Store a Lease with a new resourceVersion."""
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
        self.wrote.set()
        return httpx2.Response(201 if known is None else 200, json=self.put(body))


class SlowLists(Server):
    """Takes its time for lists."""

    def __init__(self, list_s: float) -> None:
        super().__init__()
        self._list_s = list_s

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer a request."""
        if request.method == "GET" and request.url.path.endswith("/leases"):
            await anyio.sleep(self._list_s)
        return await super().handle_async_request(request)


def status(code: int, reason: str, **headers: str) -> httpx2.Response:
    """An error answer."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": "no"}
    return httpx2.Response(code, json=body | {"details": {"name": "x"}}, headers=headers)


def a_lease(name: str, holder: str | None = None, *, shards: int = 1, **labels: str) -> Object:
    """A Lease to store."""
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels, "annotations": {ANNOTATION_SHARDS: str(shards)}}
    spec = {"leaseDurationSeconds": 15, "leaseTransitions": 4} | ({} if holder is None else {"holderIdentity": holder})
    return {"apiVersion": LEASE.api_version, "kind": "Lease", "metadata": metadata, "spec": spec}


class RunningElector:
    """An elector, its transitions so far, and whether it has left."""

    def __init__(self, cluster: Cluster, shards: int, grace_s: float, clock: Callable[[], float]) -> None:
        self.transitions: list[ShardTransition] = []
        self._changed_again = anyio.Event()
        self.has_left = anyio.Event()
        self.elector = Elector(
            cluster,
            namespace=NAMESPACE,
            replica="me",
            shards=shards,
            times=TIMES,
            grace_s=grace_s,
            on_change=self._changed,
            clock=clock,
            now=lambda: datetime(2026, 7, 1, tzinfo=UTC),
        )
        self.elector.apply_delta(Listed(LEASE, NAMESPACE, (), "1", first=True, last=True))

    def _changed(self, _shard: int, transition: ShardTransition) -> None:
        self.transitions.append(transition)
        self._changed_again.set()

    async def run(self) -> None:
        """Run the elector until it has left."""
        await self.elector.run()
        self.has_left.set()

    async def until(self, transition: ShardTransition, count: int = 1) -> None:
        """Wait until there were ``count`` such transitions."""
        with anyio.fail_after(60):
            while self.transitions.count(transition) < count:
                self._changed_again = anyio.Event()
                await self._changed_again.wait()


@asynccontextmanager
async def an_elector(
    server: Server,
    folder: Path,
    *,
    shards: int = 1,
    grace_s: float = 60,
    clock: Callable[[], float] = anyio.current_time,
) -> AsyncGenerator[RunningElector]:
    """An elector that runs and is synced with an empty list of Leases."""
    async with (
        cluster_over(server, folder) as cluster,
        anyio.create_task_group() as tasks,
    ):
        running = RunningElector(cluster, shards, grace_s, clock)
        tasks.start_soon(running.run)
        yield running
        tasks.cancel_scope.cancel()


def tenant_of(elector: Elector, shard: int) -> str:
    """A namespace in a shard."""
    return next(name for name in map(str, range(1000)) if elector.shard(name) == shard)


async def test_a_queued_event_does_not_delay_a_release(tmp_path: Path) -> None:
    """A reconcile keeps its shard from being released; an Event in a queue does not, and finds its token ended."""
    async with an_elector(Server(), tmp_path) as running:
        await running.until(ShardTransition.TAKEN)
        token = running.elector.token("team-a")
        assert token is not None
        with fencing.holding(token):
            with running.elector.working(token):
                running.elector.leave()
                await anyio.sleep(4 * TIMES.retry_period_s)
                during = token.is_valid, running.has_left.is_set()
            with anyio.fail_after(60):
                await running.has_left.wait()
        assert during == (True, False)
        assert not token.is_valid
        assert running.transitions == [ShardTransition.TAKEN, ShardTransition.RELEASED]


async def test_a_reconcile_that_hangs_is_cancelled_after_the_grace_period(tmp_path: Path) -> None:
    """Only in a shard that moves to a new member; reconciles of other shards go on."""
    cancelled: list[int] = []

    async def hang(elector: Elector, token: FencingToken) -> None:
        with elector.working(token):
            await anyio.sleep_forever()
        cancelled.append(token.shard)

    server, grace_s = Server(), 0.2
    async with (
        an_elector(server, tmp_path, shards=2, grace_s=grace_s) as running,
        anyio.create_task_group() as reconciles,
    ):
        await running.until(ShardTransition.TAKEN, 2)
        for shard in (0, 1):
            token = running.elector.token(tenant_of(running.elector, shard))
            assert token is not None
            reconciles.start_soon(hang, running.elector, token)
        await anyio.wait_all_tasks_blocked()
        newcomer = a_lease(heartbeat_lease_name("you"), "you", shards=0, **{LABEL_ROLE: "shard"})
        newcomer["metadata"]["annotations"][ANNOTATION_DIVISION] = "2"
        running.elector.apply_delta(Changed(LEASE, server.put(newcomer)))
        begun = anyio.current_time()
        await running.until(ShardTransition.RELEASED)
        await anyio.sleep(2 * grace_s)
        assert anyio.current_time() - begun >= grace_s
        assert len(cancelled) == len(running.elector.held) == 1
        assert cancelled[0] not in running.elector.held
        reconciles.cancel_scope.cancel()


async def test_a_replica_that_can_neither_watch_nor_list_is_silent(tmp_path: Path) -> None:
    """Its first heartbeat is not confirmed: it sends no other and acquires nothing, until a list succeeds."""
    server = Server()
    is_list_refused = True
    server.refuse = lambda request: (
        status(500, "InternalError")
        if is_list_refused and request.method == "GET" and request.url.path.endswith("/leases")
        else None
    )
    async with an_elector(server, tmp_path) as running:
        await anyio.sleep(10 * TIMES.retry_period_s)
        assert server.written == [heartbeat_lease_name("me")]
        is_list_refused = False
        await running.until(ShardTransition.TAKEN)


async def test_a_lease_that_lost_its_label_is_found_by_its_name(tmp_path: Path) -> None:
    """It is in no watch, and its create conflicts: it is read, acquired, and gets its label back."""
    server = Server()
    server.put(a_lease(shard_lease_name(0), note="keep"))
    async with an_elector(server, tmp_path) as running:
        await running.until(ShardTransition.TAKEN)
    lease = server.leases[shard_lease_name(0)]
    assert lease["metadata"]["labels"] == {LABEL_ROLE: "shard", "note": "keep"}
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("me", 5)


async def test_what_becomes_due_between_two_readings_of_the_clock_is_sent(tmp_path: Path) -> None:
    """A clock that goes on with each reading: nothing falls between two readings."""
    readings = itertools.count()
    server = Server()

    def clock() -> float:
        return anyio.current_time() + next(readings) * TIMES.retry_period_s / 100

    async with an_elector(server, tmp_path, clock=clock) as running:
        await running.until(ShardTransition.TAKEN)
        before = len(server.written)
        with anyio.fail_after(60):
            while len(server.written) < before + 40:
                server.wrote = anyio.Event()
                await server.wrote.wait()
    assert running.transitions == [ShardTransition.TAKEN]


async def test_a_list_that_is_slower_than_a_request_may_be_confirms_a_heartbeat(tmp_path: Path) -> None:
    """It may take as long as the deadline: the shard is acquired once."""
    server = SlowLists(1.3 * TIMES.request_timeout_s)
    async with an_elector(server, tmp_path) as running:
        await running.until(ShardTransition.TAKEN)
    assert server.leases[shard_lease_name(0)]["spec"]["leaseTransitions"] == 0
