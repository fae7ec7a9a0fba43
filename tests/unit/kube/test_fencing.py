"""The check of the fencing token between the decision to write and the bytes that are sent, on real connections."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc
import anyio.lowlevel
import httpx
import pytest

from operator_app.api.kinds import CONFIG_MAP, EVENT, LEASE, Key, Object
from operator_app.errors import FencedError
from operator_app.kube import fencing
from operator_app.kube.client import Cluster, Request
from operator_app.kube.events import EventRecorder, Occurrence
from operator_app.kube.fencing import FencingToken
from operator_app.registration.powerdns.client import Delete, PowerDnsApi
from tests.unit.kube.scripted_client import kubeconfig_in
from tests.unit.scripted_api import Clock

pytestmark = pytest.mark.anyio

NOW: Final = datetime(2026, 7, 2, tzinfo=UTC)
KEY: Final = Key("team-a", "checkout")
OBJECT: Final[Object] = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "checkout", "namespace": "team-a", "uid": "u-1", "resourceVersion": "7"},
}
ANSWER: Final = b'{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"checkout","resourceVersion":"8"}}'


@dataclass
class Server:
    """A plain HTTP server on loopback that keeps what it received, and answers each request when it is let to."""

    received: list[bytes] = field(default_factory=list)
    may_answer: anyio.Event = field(default_factory=anyio.Event)

    async def serve(self, connection: anyio.abc.SocketStream) -> None:
        """Answer one request after the other."""
        async with connection:
            try:
                while True:
                    self.received.append(await connection.receive())
                    await self.may_answer.wait()
                    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(ANSWER)}\r\n\r\n"
                    await connection.send(head.encode() + ANSWER)
            except anyio.EndOfStream:
                return


@asynccontextmanager
async def connected(
    tmp_path: Path, before_write: Callable[[Request], None], **options: Any
) -> AsyncGenerator[tuple[Cluster, Server]]:
    """A cluster whose API server is a ``Server``."""
    server = Server()
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra_attributes[anyio.abc.SocketAttribute.local_port]()
    path = kubeconfig_in(tmp_path, {"server": f"http://127.0.0.1:{port}"})
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, server.serve)
        async with Cluster.connect(kubeconfig=path, user_agent="test", before_write=before_write, **options) as cluster:
            yield cluster, server
        tasks.cancel_scope.cancel()


async def test_every_request_that_may_change_something_is_checked_and_no_read_is(tmp_path: Path) -> None:
    """Apply, create, replace, patch and delete ask before they go out; get and list do not."""
    asked: list[str] = []
    async with connected(tmp_path, lambda request: asked.append(request.verb)) as (cluster, server):
        server.may_answer.set()
        await cluster.get(CONFIG_MAP, KEY)
        assert asked == []
        await cluster.apply(CONFIG_MAP, OBJECT, force=True)
        await cluster.create(CONFIG_MAP, OBJECT)
        await cluster.replace(CONFIG_MAP, OBJECT)
        await cluster.merge_patch(CONFIG_MAP, KEY, {"data": {}})
        await cluster.delete(CONFIG_MAP, KEY, uid="u-1")
    assert list(dict.fromkeys(asked)) == ["apply", "create", "update", "patch", "delete"]


async def test_a_write_that_waited_for_a_connection_is_checked_again(tmp_path: Path) -> None:
    """A deadline that passes while all connections are busy stops the write; nothing of it is sent."""
    now = 0.0
    token = FencingToken(0, 1, until=10.0, clock=lambda: now)
    checked = anyio.Event()

    def before_write(request: Request) -> None:
        fencing.check(request.kind, request.key)
        checked.set()

    async with (
        connected(tmp_path, before_write, max_connections=1) as (cluster, server),
        anyio.create_task_group() as tasks,
    ):

        async def write() -> None:
            with pytest.raises(FencedError), fencing.holding(token):
                await cluster.apply(CONFIG_MAP, OBJECT, force=True)

        tasks.start_soon(cluster.get, CONFIG_MAP, KEY)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(write)
        await checked.wait()
        await anyio.wait_all_tasks_blocked()
        now = 11.0
        server.may_answer.set()
    assert [text.split(b" ")[0] for text in server.received] == [b"GET"]


async def test_a_write_that_stops_behind_its_head_is_never_complete(tmp_path: Path) -> None:
    """A process that is stopped between head and body sends no body, so the API server does nothing."""
    now = 0.0
    token = FencingToken(0, 1, until=10.0, clock=lambda: now)
    checks = 0

    def before_write(request: Request) -> None:
        nonlocal checks, now
        checks += 1
        if checks == 3:
            now = 11.0
        fencing.check(request.kind, request.key)

    async with connected(tmp_path, before_write) as (cluster, server):
        server.may_answer.set()
        with pytest.raises(FencedError, match="ConfigMap team-a/checkout"), fencing.holding(token):
            await cluster.apply(CONFIG_MAP, OBJECT, force=True)
        await anyio.wait_all_tasks_blocked()
    assert not any(b"resourceVersion" in text for text in server.received)


async def test_a_renewal_does_not_wait_behind_other_requests(tmp_path: Path) -> None:
    """Requests about Leases have connections of their own: a busy operator must not lose its shards."""
    lease = OBJECT | {"apiVersion": LEASE.api_version, "kind": "Lease"}
    async with (
        connected(tmp_path, lambda _: None, max_connections=1) as (cluster, server),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(cluster.get, CONFIG_MAP, KEY)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(cluster.replace, LEASE, lease)
        with anyio.fail_after(60):
            while len(server.received) < 2:
                await anyio.lowlevel.checkpoint()
        server.may_answer.set()
    assert server.received[1].startswith(b"PUT ")


async def test_an_event_is_sent_on_the_token_of_its_reconcile(tmp_path: Path) -> None:
    """Events are sent later by another task and keep the token: after the shard is lost, none is sent."""
    now, current_token = 0.0, []
    token = FencingToken(0, 1, until=10.0, clock=lambda: now)
    proxy = {"apiVersion": "v1", "kind": "EnvoyProxy", "metadata": {"namespace": "a", "name": "web", "uid": "u"}}

    def before_write(request: Request) -> None:
        current_token.append((request.kind, fencing.current_token()))
        fencing.check(request.kind, request.key)

    async with connected(tmp_path, before_write) as (cluster, server):
        server.may_answer.set()
        recorder = EventRecorder(cluster, instance="test", now=lambda: NOW)
        async with anyio.create_task_group() as tasks:
            with fencing.holding(fencing.NO_TOKEN):
                tasks.start_soon(recorder.run)
            with fencing.holding(token):
                recorder.record(Occurrence(proxy, "Normal", "Repaired", "Apply", "Service", "it was broken"))
            now = 11.0
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert current_token == [(EVENT, token)]
    assert server.received == []


async def test_a_registry_outside_is_fenced_the_same_way() -> None:
    """Writes to PowerDNS need the same token; a read needs none."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        return httpx.Response(200, json=[])

    async with httpx.AsyncClient(base_url="http://dns.invalid", transport=httpx.MockTransport(answer)) as client:
        api = PowerDnsApi(client, server_id="localhost", timeout_s=5)
        with fencing.holding(FencingToken(0, 1, until=0.0, clock=lambda: 1.0)):
            assert await api.types_at("web.example.com") == frozenset()
            with pytest.raises(FencedError):
                await api.change("example.com", [Delete("web.example.com", "A")])
    assert asked == ["GET"]


def test_a_token_is_not_valid_any_more_at_its_deadline() -> None:
    """At that very moment another replica may acquire the shard; a deadline never moves back, and an end is final."""
    clock = Clock(9.0)
    token = FencingToken(0, 1, until=10.0, clock=clock)
    found = []
    for clock.mono, until in ((9.0, 10.0), (10.0, 10.0), (10.0, 11.0), (10.9, 10.5), (11.0, 11.0)):
        token.extend(until)
        found.append(token.is_valid)
    assert found == [True, False, True, True, False]
    token.end()
    assert not token.is_valid


def test_a_refused_write_says_whose_right_has_run_out() -> None:
    """That of a shard and its epoch, or of work that never had one; a new token is used by nobody yet."""
    token = FencingToken(3, 7, until=1.0, clock=lambda: 2.0)
    assert token.users == 0
    with fencing.holding(token), pytest.raises(FencedError, match="shard 3 in epoch 7"):
        fencing.check()
    with fencing.holding(fencing.NO_TOKEN), pytest.raises(FencedError, match="work without a shard"):
        fencing.check()
