"""The parts of one operator as the application connects them: who is reconciled when, and what becomes an Event.

What the queue, the triggers and the workers promise is tested beside them. Here a whole ``Operator`` gets what its
watches would deliver, and the order of its reconciles is looked at, so that a part which is connected to nothing, or to
another one, is noticed. ``benchmarks.fifo_operator`` is the counter-example: every check here refuses it.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import anyio
import anyio.lowlevel
import pytest

from benchmarks.fifo_operator import one_fifo
from operator_app import app
from operator_app.api.kinds import DEPLOYMENT, ENVOY_PROXY, LABEL_TENANT, LEASE, Key, Kind, Object
from operator_app.app import Operator
from operator_app.apply import Result
from operator_app.controller.backpressure import Backpressure
from operator_app.controller.scopes import Scope
from operator_app.desired import child_key
from operator_app.errors import FencedError
from operator_app.kube import fencing
from operator_app.kube.client import Request
from operator_app.kube.deltas import Changed, Listed
from operator_app.kube.fencing import FencingToken
from operator_app.observability.http import Health
from operator_app.observability.metrics import Metrics
from operator_app.registration.registrar import Registries
from operator_app.results import DONE, Outcome, ReconcileResult
from operator_app.settings import Settings
from operator_app.sharding.election import ShardTransition
from operator_app.sharding.ranges import balanced
from operator_app.ssa.changes import FieldChange
from operator_app.ssa.fields import Drift
from tests.unit.kube.scripted_client import cluster_over
from tests.unit.scripted_api import ScriptedApi, created

pytestmark = pytest.mark.anyio

MANY: Final = 60
NEIGHBOUR: Final = Key("team-b", "web")


class Running:
    """An operator whose watches are the test, and whose reconciles only note their key."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.reconciled: list[Key] = []
        self._versions = 10
        self._token = FencingToken(0, 1, until=float("inf"), clock=lambda: 0.0)
        self._until = 0
        operator._elector.token = self._token_of  # type: ignore[method-assign]
        operator._reconciler.reconcile = self._reconcile  # type: ignore[method-assign]

    def _token_of(self, tenant: str) -> FencingToken | None:  # noqa: ARG002 - every shard is held
        return self._token

    async def _reconcile(self, key: Key, *, failures: int = 0, is_resync: bool = False) -> ReconcileResult:  # noqa: ARG002
        self.reconciled.append(key)
        if len(self.reconciled) == self._until:
            self.operator._workers.stop()
        await anyio.lowlevel.checkpoint()
        return DONE

    def sync(self, **listed: list[Object]) -> None:
        """Let every kind be listed; ``listed`` has the objects by plural."""
        for kind, scope in self.operator._scopes:
            objects = tuple(self._versioned(each) for each in listed.get(kind.plural, ()))
            delta = Listed(kind, scope["namespace"], objects, str(self._versions), first=True, last=True)
            self.operator._triggers.apply_delta(delta)
        assert self.operator._scopes.newly_synced(None) == (None,)

    def deliver(self, kind: Kind, obj: Object) -> None:
        """Let a watch deliver an object."""
        self.operator._apply_delta(Changed(kind, self._versioned(obj)))

    def _versioned(self, obj: Object) -> Object:
        self._versions += 1
        return obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self._versions)}}

    async def drain(self, count: int) -> list[Key]:
        """Run the workers until so many keys are reconciled; their order."""
        self._until = count
        with anyio.fail_after(60):
            await self.operator._workers.run(grace_s=1)
        return self.reconciled


@asynccontextmanager
async def running(folder: Path, api: ScriptedApi | None = None, **settings_: Any) -> AsyncGenerator[Running]:
    """An operator with one worker, so that its reconciles have an order."""
    settings = Settings(workers=1, in_flight_per_tenant=1, **settings_)
    async with cluster_over(api or ScriptedApi(), folder) as cluster:
        operator = Operator(settings, cluster, Metrics(), Health(), Backpressure(), Registries({}), replica="r")
        with operator._events._sender, operator._events._receiver:
            yield Running(operator)


def namespace(name: str, tenant: str | None = None) -> Object:
    """A Namespace, perhaps of a tenant."""
    labels = {LABEL_TENANT: tenant} if tenant else {}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "uid": name, "labels": labels}}


def proxy(key: Key, *, observed: int | None = None, generation: int = 1) -> Object:
    """A proxy whose generation was acted on, or not."""
    metadata = {"namespace": key.namespace, "name": key.name, "uid": str(key), "generation": generation}
    kind = {"apiVersion": ENVOY_PROXY.api_version, "kind": ENVOY_PROXY.kind}
    return kind | {"metadata": metadata, "spec": {}, "status": {"observedGeneration": observed}}


def deployment_of(key: Key) -> Object:
    """The child whose change enqueues a proxy."""
    child = child_key(key)
    return {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "metadata": {"namespace": child.namespace, "name": child.name, "uid": f"d-{key}"},
    }


async def neighbour_beside_many(run: Running) -> int:
    """How many reconciles precede the neighbour's, which was created after many of one other tenant."""
    run.sync(namespaces=[namespace("team-b")])
    for number in range(MANY):
        run.deliver(ENVOY_PROXY, proxy(Key("team-a", f"p{number}")))
    run.deliver(ENVOY_PROXY, proxy(NEIGHBOUR))
    return (await run.drain(MANY + 1)).index(NEIGHBOUR)


async def neighbour_beside_many_namespaces(run: Running) -> int:
    """The same, where the other tenant has many namespaces with one proxy each."""
    names = [f"team-a-{number}" for number in range(MANY)]
    run.sync(namespaces=[namespace("team-b"), *(namespace(name, tenant="a") for name in names)])
    for name in names:
        run.deliver(ENVOY_PROXY, proxy(Key(name, "web")))
    run.deliver(ENVOY_PROXY, proxy(NEIGHBOUR))
    return (await run.drain(MANY + 1)).index(NEIGHBOUR)


async def edit_behind_repairs(run: Running) -> int:
    """How many reconciles of one tenant precede its user's edit, which came after many changes of children."""
    run.sync()
    served = [Key("team-b", f"p{number}") for number in range(MANY)]
    for key in served:
        run.deliver(DEPLOYMENT, deployment_of(key))
    run.deliver(ENVOY_PROXY, proxy(NEIGHBOUR, observed=1, generation=2))
    return (await run.drain(MANY + 1)).index(NEIGHBOUR)


async def repair_behind_a_list(run: Running) -> int:
    """How many reconciles of one tenant precede a repair, which came after a list of proxies that are well."""
    served = [proxy(Key("team-b", f"p{number}"), observed=1) for number in range(MANY)]
    run.sync()
    page = tuple(run._versioned(each) for each in served)
    run.operator._apply_delta(Listed(ENVOY_PROXY, None, page, "1000", first=True, last=True))
    run.deliver(DEPLOYMENT, deployment_of(NEIGHBOUR))
    return (await run.drain(MANY + 1)).index(NEIGHBOUR)


@pytest.mark.parametrize(
    ("scenario", "most"),
    [
        (neighbour_beside_many, 1),
        (neighbour_beside_many_namespaces, 1),
        (edit_behind_repairs, 0),
        (repair_behind_a_list, 0),
    ],
)
async def test_lanes_and_priorities_reach_the_workers(
    tmp_path: Path, scenario: Callable[[Running], Awaitable[int]], most: int
) -> None:
    """A tenant waits for one reconcile of every other, whatever that has in the queue; users wait for no repair."""
    async with running(tmp_path) as run:
        assert await scenario(run) <= most
    with one_fifo():
        async with running(tmp_path) as run:
            assert await scenario(run) == MANY, "a single FIFO must not pass"


async def test_a_repaired_drift_becomes_an_event_and_a_count(tmp_path: Path) -> None:
    """What the reconciler reports of a child is sent to the API server as an Event about the proxy."""
    sent = anyio.Event()

    def stored_event(body: Object) -> tuple[int, Object]:
        sent.set()
        return created()(body)

    api = ScriptedApi(("create Event", stored_event))
    async with running(tmp_path, api) as run:
        operator = run.operator
        verified = {"type": "Reconciled", "status": "True", "reason": "Verified", "observedGeneration": 1}
        reconciled = proxy(NEIGHBOUR, observed=1) | {"status": {"conditions": [verified]}}
        change = FieldChange(".spec.replicas", Drift.NOT_OWNED, ("rival",), None, 3, 1)
        result = Result(DEPLOYMENT, child_key(NEIGHBOUR), Outcome.CONFIGURED, None, (change,))
        operator._reconciler._report(reconciled, result)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(operator._events.run)
                await sent.wait()
                tasks.cancel_scope.cancel()
    event = api.body("create Event")
    assert (event["reason"], event["regarding"]["name"]) == ("DriftRepaired", NEIGHBOUR.name)
    assert "rival" in event["note"]
    assert operator._metrics.drift_repaired.labels(DEPLOYMENT.kind)._value.get() == 1


async def test_nothing_begins_before_every_kind_is_listed(tmp_path: Path) -> None:
    """A replica is not ready, joins no election and enqueues nothing while one kind is missing."""
    async with running(tmp_path) as run:
        operator, scopes = run.operator, [*run.operator._scopes]
        operator._elector._is_synced = True
        for kind, scope in scopes[:-1]:
            operator._apply_delta(Listed(kind, scope["namespace"], (), "5", first=True, last=True))
            run.deliver(ENVOY_PROXY, proxy(NEIGHBOUR))
            assert not operator._health.is_ready
            assert not operator._can_join.is_set()
            assert len(operator._workers) == 0


async def test_an_acquired_shard_is_not_reconciled_before_it_is_listed(tmp_path: Path) -> None:
    """With server-side sharding an absent proxy looks deleted until then; a shard that was lost is forgotten."""
    async with running(tmp_path, server_side_sharding=True, shards=2) as run, anyio.create_task_group() as tasks:
        operator, ranges = run.operator, balanced({}, 2)
        operator._scopes.divide()
        operator._elector.divide(ranges)
        operator._tasks = tasks
        shard, hashes = ranges.shard_of(NEIGHBOUR.namespace), ranges.range_of(ranges.shard_of(NEIGHBOUR.namespace))

        async def silent(kind: Kind, scope: Scope, sink: object) -> NoReturn:  # noqa: ARG001
            while True:
                await anyio.sleep_forever()

        operator._shard_watches._follow = silent
        operator._shard_changed(shard, ShardTransition.TAKEN)
        assert await operator._reconcile(NEIGHBOUR, 0) is None
        for kind, scope in operator._scopes:
            objects = (run._versioned(proxy(NEIGHBOUR)),) if kind == ENVOY_PROXY else ()
            delta = Listed(kind, scope["namespace"], objects, "500", first=True, last=True, hashes=scope["hashes"])
            operator._apply_delta(delta)
        assert await operator._reconcile(NEIGHBOUR, 0) is not None
        operator._shard_changed(shard, ShardTransition.LOST)
        assert await operator._reconcile(NEIGHBOUR, 0) is None
        assert run.reconciled == [NEIGHBOUR]
        assert operator._store.keys(ENVOY_PROXY) == ()
        assert hashes not in {scope["hashes"] for _, scope in operator._scopes}
        tasks.cancel_scope.cancel()


async def test_a_resync_allows_what_was_refused_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal whose cause lies outside of what is watched is tried again with the next resync."""
    async with running(tmp_path) as run:
        operator = run.operator
        run.sync()
        operator._applier._rejected[DEPLOYMENT, NEIGHBOUR] = object()  # type: ignore[assignment]
        ends = anyio.Event()

        async def no_kinds() -> None:
            await anyio.lowlevel.checkpoint()

        async def no_audit() -> None:
            ends.set()
            await anyio.lowlevel.checkpoint()

        monkeypatch.setattr(operator._resync_loop, "_resync_kinds", no_kinds)
        monkeypatch.setattr(operator._resync_loop._audit, "run", no_audit)
        monkeypatch.setattr(operator._resync_loop, "_interval_s", 0.001)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(operator._resync_loop.run)
                await ends.wait()
                tasks.cancel_scope.cancel()
        assert operator._applier._rejected == {}


class Refused(Exception):  # noqa: N818 - it ends a start, and is no error of anybody's
    """The start ends here."""


@pytest.fixture
async def connected(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Backpressure, Metrics]:
    """With what a start connects to the API server, and the parts that this leads to."""
    found: dict[str, Any] = {}
    backpressure, metrics = Backpressure(), Metrics()
    monkeypatch.setattr(app, "Backpressure", lambda: backpressure)
    monkeypatch.setattr(app, "Metrics", lambda: metrics)

    def connect(**options: Any) -> NoReturn:
        found.update(options)
        raise Refused

    with pytest.raises(Refused):
        await app._run(Settings(), connect, app.Stopping(lambda: None))
    return found, backpressure, metrics


async def test_a_write_without_a_valid_token_is_refused_and_counted(
    connected: tuple[dict[str, Any], Backpressure, Metrics],
) -> None:
    """The client asks before each write; a Lease needs no token, since tokens come from Leases."""
    options, _, metrics = connected
    write, lease = Request("apply", DEPLOYMENT, NEIGHBOUR), Request("update", LEASE, NEIGHBOUR)
    with fencing.holding(fencing.NO_TOKEN):
        with pytest.raises(FencedError):
            options["before_write"](write)
        options["before_write"](lease)
    with fencing.holding(FencingToken(0, 1, until=float("inf"), clock=lambda: 0.0)):
        options["before_write"](write)
    assert metrics.fenced_writes._value.get() == 1


async def test_every_429_raises_the_backpressure(connected: tuple[dict[str, Any], Backpressure, Metrics]) -> None:
    """And no other answer does; each request is counted with its code."""
    options, backpressure, metrics = connected
    request = Request("get", DEPLOYMENT, NEIGHBOUR)
    for code in (200, 404, 503, None):
        options["observe"](request, code, 0.1)
    assert backpressure.level(now_mono=time.monotonic()) == 0
    options["observe"](request, 429, 0.1)
    assert backpressure.level(now_mono=time.monotonic()) > 0
    codes = [each.labels["code"] for metric in metrics.requests.collect() for each in metric.samples]
    assert {"200", "404", "429", "503", "none"} <= set(codes)


async def test_backpressure_delays_what_the_triggers_enqueue(tmp_path: Path) -> None:
    """The workers ask the very backpressure that the answers raise: a listed proxy waits, a user's edit does not."""
    async with running(tmp_path) as run:
        run.sync()
        run.operator._backpressure.refused(now_mono=time.monotonic())
        listed = run._versioned(proxy(Key("team-a", "web"), observed=1))
        run.operator._apply_delta(Listed(ENVOY_PROXY, None, (listed,), str(run._versions), first=True, last=True))
        run.deliver(ENVOY_PROXY, proxy(NEIGHBOUR))
        assert await run.drain(1) == [NEIGHBOUR]
        assert len(run.operator._workers) == 1


async def test_what_changed_before_a_throttled_start_waits_no_longer_than_a_repair(tmp_path: Path) -> None:
    """Eight refused lists raise the backpressure to its top, where a resync would wait for a minute."""
    async with running(tmp_path) as run:
        drifted = Key("team-a", "web")
        run.sync(envoyproxies=[proxy(drifted, observed=1)])
        for _ in range(8):
            run.operator._backpressure.refused(now_mono=time.monotonic())
        await run.operator._triggers.enqueue_synced(None)
        now_mono = time.monotonic()
        ready_at = run.operator._workers._queue.ready_at(now_mono)
        assert ready_at is not None
        assert ready_at - now_mono <= 10
