"""The operator's components in the test's process, without its watches: rounds by call, over a store that a test fills.

For what can't be timed from outside: a round with an old store, and a cluster that changes between two requests.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx2

from operator_app.api.kinds import Kind, Object
from operator_app.apply import Applier
from operator_app.controller.scopes import INDEXES, SECOND_INDEXES
from operator_app.dataplane.plane import DataPlane
from operator_app.finalizer import Finalizer
from operator_app.kube.client import Cluster
from operator_app.kube.events import Occurrence
from operator_app.kube.store import Store
from operator_app.reconcile import Reconciler
from operator_app.registration.backoff import Backoff
from operator_app.registration.circuit import CircuitBreaker
from operator_app.registration.claims import Claims
from operator_app.registration.ledger import Ledger
from operator_app.registration.policy import Policies
from operator_app.registration.registrar import Registrar, Registries
from operator_app.results import Outcome
from operator_app.settings import Settings
from operator_app.ssa.contention import ContentionTimes, ContentionTracker
from operator_app.status import StatusWriter
from tests.e2e.operator_process import OPERATOR_NAMESPACE

Before = Callable[[httpx2.Request], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Components:
    """Everything that a round needs, and the writes that it made."""

    cluster: Cluster
    store: Store
    applier: Applier
    finalizer: Finalizer
    statuses: StatusWriter
    reconciler: Reconciler
    registrar: Registrar
    writes: list[tuple[Kind, Outcome]] = field(default_factory=list)
    occurrences: list[Occurrence] = field(default_factory=list)

    def deliver(self, kind: Kind, *objects: Object) -> None:
        """Put these versions into the store, as if a watch had delivered them."""
        for obj in objects:
            self.store.learn(kind, obj)


class _Interrupted(httpx2.AsyncBaseTransport):
    """Awaits a function before each request is sent."""

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
async def components(
    kubeconfig: Path,
    *,
    before: Before = _nothing,
    registries: Registries | None = None,
    circuit: CircuitBreaker | None = None,
    abandon_after_s: float | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    mono: Callable[[], float] = lambda: 0.0,
) -> AsyncGenerator[Components]:
    """Components around an empty store; ``before`` is awaited before each request is sent.

    An outside registry that failed is called again in the next round, unless ``circuit`` says otherwise; ``mono`` is
    the time for that.
    """
    async with Cluster.connect(
        kubeconfig=kubeconfig, user_agent="rounds", transport_wrapper=lambda inner: _Interrupted(inner, before)
    ) as cluster:
        writes: list[tuple[Kind, Outcome]] = []
        occurrences: list[Occurrence] = []
        store = Store(INDEXES, second=SECOND_INDEXES)

        def on_write(kind: Kind, outcome: Outcome) -> None:
            writes.append((kind, outcome))

        tracker = ContentionTracker(ContentionTimes())
        applier = Applier(cluster, store, tracker, on_write=on_write, mono=lambda: 0.0)
        finalizer = Finalizer(cluster, store, tracker, on_write=on_write, mono=lambda: 0.0)
        statuses = StatusWriter(cluster, store, tracker, on_write=on_write, mono=lambda: 0.0, settle_s=0.0)
        registries = registries or Registries({})
        ledger = Ledger(
            applier,
            cluster,
            store,
            namespace=OPERATOR_NAMESPACE,
            installation=registries.installation,
            on_write=on_write,
            sink=store.apply_delta,
        )
        registrar = Registrar(
            ledger,
            Claims(applier, cluster, store, namespace=OPERATOR_NAMESPACE, sink=store.apply_delta, now=now),
            registries,
            Backoff(base_s=0.0, cap_s=0.0, rand=lambda: 0.0),
            circuit or CircuitBreaker(base_s=0.0, cap_s=0.0, rand=lambda: 0.0),
            policies=Policies(store, cluster, apexes=()),
            mono=mono,
        )
        reconciler = Reconciler(
            cluster,
            store,
            applier,
            finalizer,
            registrar,
            statuses,
            DataPlane(cluster, store, None, on_write=lambda _kind, _outcome: None, mono=lambda: 0.0),
            report=lambda _proxy, _result: None,
            record_event=occurrences.append,
            default_image=Settings().image,
            abandon_after_s=abandon_after_s,
            now=now,
        )
        yield Components(cluster, store, applier, finalizer, statuses, reconciler, registrar, writes, occurrences)
