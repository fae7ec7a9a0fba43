"""The operator's rooms in this process, without its watches: rounds by hand, over a store that a test fills.

For what can't be timed from outside: a round whose knowledge is old, and a world that changes between two requests.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx2

from operator_app.apply import Applier, Outcome
from operator_app.breaker import Breaker, BreakerTimes
from operator_app.cluster import Cluster
from operator_app.finalizer import Finalizer
from operator_app.kinds import CHILD_KINDS, ENVOY_PROXY, PROXY_REGISTRATION, Kind, Object
from operator_app.reconcile import Reconciler, controller_uid
from operator_app.registration.in_cluster import InClusterRegistry, proxy_of
from operator_app.settings import Settings
from operator_app.status import StatusWriter
from operator_app.store import Store
from tests.e2e.operator_process import OPERATOR_NAMESPACE

Before = Callable[[httpx2.Request], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Rooms:
    """Everything that a round needs, and the writes that it made."""

    cluster: Cluster
    store: Store
    applier: Applier
    finalizer: Finalizer
    statuses: StatusWriter
    reconciler: Reconciler
    writes: list[tuple[Kind, Outcome]] = field(default_factory=list)

    def know(self, kind: Kind, *objects: Object) -> None:
        """Let the store hold these versions, as if a watch had told."""
        for obj in objects:
            self.store.learn(kind, obj)


class _Interrupted(httpx2.AsyncBaseTransport):
    """Lets something happen before each request is sent."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, before: Before) -> None:
        self._inner = inner
        self._before = before

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await self._before(request)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _nothing(_request: httpx2.Request) -> None:
    pass


@asynccontextmanager
async def rooms(kubeconfig: Path, *, before: Before = _nothing) -> AsyncGenerator[Rooms]:
    """Rooms around an empty store; ``before`` is awaited before each request is sent."""
    async with Cluster.connect(
        kubeconfig=kubeconfig, user_agent="rounds", transport_wrapper=lambda inner: _Interrupted(inner, before)
    ) as cluster:
        writes: list[tuple[Kind, Outcome]] = []
        store = Store(
            {ENVOY_PROXY: lambda _: None, PROXY_REGISTRATION: proxy_of} | dict.fromkeys(CHILD_KINDS, controller_uid)
        )

        def on_write(kind: Kind, outcome: Outcome) -> None:
            writes.append((kind, outcome))

        applier = Applier(cluster, store, Breaker(BreakerTimes()), on_write=on_write, mono=lambda: 0.0)
        finalizer = Finalizer(cluster, store, on_write=on_write)
        statuses = StatusWriter(cluster, store, on_write=on_write, mono=lambda: 0.0, settle_s=0.0)
        reconciler = Reconciler(
            cluster,
            store,
            applier,
            finalizer,
            InClusterRegistry(applier, cluster, store, namespace=OPERATOR_NAMESPACE),
            statuses,
            report=lambda _proxy, _result: None,
            default_image=Settings().image,
            now=lambda: datetime.now(UTC),
        )
        yield Rooms(cluster, store, applier, finalizer, statuses, reconciler, writes)
