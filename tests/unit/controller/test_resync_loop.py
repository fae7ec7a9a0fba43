"""The periodic resync: how it slows down for the API server, and which keys it enqueues."""

import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

import anyio
import httpx2
import pytest

from operator_app.api.kinds import ENVOY_PROXY, Key
from operator_app.app import Operator
from operator_app.controller.backpressure import Backpressure
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Changed
from operator_app.observability.http import Health
from operator_app.observability.metrics import Metrics
from operator_app.registration.registrar import Registries
from operator_app.settings import Settings
from tests.unit.kube.scripted_client import cluster_over

pytestmark = pytest.mark.anyio

PROXY: Final = Key("team-a", "web")
INTERVAL_S: Final = 86_400.0
UP_TO: Final = 100
"""The version of every list."""


class Server(httpx2.AsyncBaseTransport):
    """Has nothing to list, and refuses the first so many lists."""

    refusals = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:  # noqa: ARG002  # all alike
        """The answer."""
        if self.refusals:
            self.refusals -= 1
            return httpx2.Response(429, headers={"retry-after": "7"})
        meta = {"resourceVersion": str(UP_TO)}
        body = {"kind": "List", "apiVersion": "v1", "metadata": meta, "items": []}
        return httpx2.Response(200, content=json.dumps(body))


class World:
    """An operator that knows one proxy, and the pauses that its resync makes."""

    def __init__(self, cluster: Cluster, server: Server) -> None:
        self.server = server
        self.backpressure = Backpressure()
        settings = Settings(sweep_interval_s=INTERVAL_S)
        self.operator = Operator(
            settings, cluster, Metrics(), Health(), self.backpressure, Registries({}), replica="replica"
        )
        # Newer than every list, so that no resync misses it there.
        metadata = {"namespace": PROXY.namespace, "name": PROXY.name, "uid": "u", "resourceVersion": str(UP_TO + 1)}
        proxy = {"apiVersion": ENVOY_PROXY.api_version, "kind": "EnvoyProxy", "metadata": metadata | {"generation": 1}}
        self.operator._store.apply_delta(Changed(ENVOY_PROXY, proxy))
        self.operator._scopes._synced.add(None)

    async def resynced(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """One resync of every kind; returns the pause before each list."""
        pauses: list[float] = []
        has_begun = False

        async def sleep(delay: float) -> None:
            nonlocal has_begun
            if delay < INTERVAL_S / 2:
                pauses.append(delay)
            elif has_begun:
                over.cancel()
            has_begun = True
            await anyio.lowlevel.checkpoint()

        with anyio.CancelScope() as over, monkeypatch.context() as patched:
            patched.setattr(anyio, "sleep", sleep)
            await self.operator._resync_loop.run()
        return pauses


@pytest.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World]:
    """An operator in front of a scripted server; it holds no shard."""
    server = Server()
    async with cluster_over(server, tmp_path) as cluster:
        world = World(cluster, server)
        yield world
        with anyio.CancelScope() as over:
            over.cancel()
            await world.operator._events.run()  # closes what it waits at


async def test_a_resync_waits_for_retry_after(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next list waits for the ``Retry-After`` of the last response, and no other list does."""
    world.server.refusals = 1
    first, second, *others = await world.resynced(monkeypatch)
    assert (first, second) == (0, 7)
    assert set(others) == {0}


async def test_a_resync_slows_down_under_backpressure(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list is delayed like a reconcile of the lowest priority."""
    for _ in range(10):
        world.backpressure.refused(now_mono=time.monotonic())
    pauses = await world.resynced(monkeypatch)
    assert len(pauses) == len(world.operator._scopes.kinds)
    assert min(pauses) > 10


async def test_a_standby_keeps_no_keys_of_a_resync(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of another replica's shard is not kept as pending, and a pending key is dropped with its shard."""
    await world.resynced(monkeypatch)
    assert not world.operator._resync_loop._pending
    with monkeypatch.context() as holding:
        holding.setattr(world.operator._elector, "token", lambda _namespace: object())
        await world.resynced(monkeypatch)
    assert world.operator._resync_loop._pending == {PROXY}
    assert await world.operator._reconcile(PROXY, 0) is None
    assert not world.operator._resync_loop._pending
