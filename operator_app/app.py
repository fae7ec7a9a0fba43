"""Wiring: constructs the parts of one operator, starts the tasks that connect them, and stops them in order.

Watches fill the store, changes in the store enqueue keys, and the workers reconcile them. Nothing here decides which
key is enqueued or what a reconcile does.
"""

import os
import random
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Final, NoReturn

import anyio
import structlog
from anyio.abc import TaskStatus

from operator_app.api.kinds import FIELD_MANAGER, LEASE, PROXY_REGISTRATION, Key, Kind
from operator_app.apply import Applier
from operator_app.controller.backpressure import Backpressure
from operator_app.controller.drift_events import Reporter
from operator_app.controller.garbage import short_pauses
from operator_app.controller.periodic_audit import PeriodicAudit
from operator_app.controller.resync_loop import ResyncLoop
from operator_app.controller.scopes import (
    KEPT,
    SECOND_INDEXES,
    SHARED_KINDS,
    Scope,
    Scopes,
    coverage_of,
    indexes_of,
)
from operator_app.controller.shard_watches import ShardWatches
from operator_app.controller.sight import Sight
from operator_app.controller.triggers import Triggers
from operator_app.controller.workers import WorkerPool
from operator_app.controller.workqueue import Limits
from operator_app.dataplane.asking import Ask, asking
from operator_app.dataplane.plane import DataPlane
from operator_app.errors import ConfigurationError, FencedError, OperatorError
from operator_app.finalizer import Finalizer
from operator_app.kube import fencing
from operator_app.kube.client import Cluster, Request
from operator_app.kube.deltas import Delta, Listed
from operator_app.kube.events import EventRecorder
from operator_app.kube.hash_ranges import Coverage
from operator_app.kube.store import Store
from operator_app.kube.watch import WatchTimes, follow
from operator_app.observability.http import Health, serving
from operator_app.observability.metrics import Metrics
from operator_app.preflight import (
    refuse_unknown_namespaces,
    wait_for_cluster_uid,
    wait_for_filtered_lists,
    warn_of_settings,
)
from operator_app.reconcile import Reconciler
from operator_app.registration.backoff import Backoff
from operator_app.registration.circuit import CircuitBreaker
from operator_app.registration.claims import Claims
from operator_app.registration.ledger import Ledger
from operator_app.registration.plugins import open_registries
from operator_app.registration.policy import Policies
from operator_app.registration.registrar import Registrar, Registries
from operator_app.results import Outcome, ReconcileResult
from operator_app.settings import Settings
from operator_app.sharding.agreement import Agreement
from operator_app.sharding.election import ShardTransition
from operator_app.sharding.elector import SELECTOR, Elector
from operator_app.sharding.leases import LeaseTimes
from operator_app.sharding.ranges import Ranges
from operator_app.ssa.contention import ContentionTimes, ContentionTracker
from operator_app.status import StatusWriter

log = structlog.get_logger(__name__)

BALANCE_INTERVAL_S: Final = 60.0
"""How often the sizes of shards that are ranges are compared, or as often as there are resyncs."""

SWITCH_INTERVAL_S: Final = 0.001
"""For how long a thread that renders a large spec keeps the interpreter from the event loop, instead of 5 ms."""

RELEASE_TIMEOUT_S: Final = 5.0
"""How long the release of all shards may take at the end; after this, other replicas wait until the Leases expire."""

Connect = Callable[..., AbstractAsyncContextManager[Cluster]]


async def run(settings: Settings, *, connect: Connect = Cluster.connect) -> None:
    """Run the operator until SIGTERM or SIGINT. Tests pass another ``connect`` to inject faults.

    Raises ``ConfigurationError`` before anything is written when there is no usable cluster configuration or registry,
    or when the HTTP port is taken.
    """
    refused: ConfigurationError | None = None
    async with anyio.create_task_group() as tasks:
        # Before the operator has started a signal cancels the start; afterwards, Operator.stop replaces that.
        stopping = Stopping(tasks.cancel_scope.cancel)
        await tasks.start(stopping.receive)
        try:
            await _run(settings, connect, stopping)
        except ConfigurationError as error:
            refused = error  # raised outside of the task group, which would wrap it
        tasks.cancel_scope.cancel()
    if refused is not None:
        raise refused


class Stopping:
    """SIGTERM and SIGINT, from before anything is started: ``act`` is what they do at the moment."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    async def receive(self, *, task_status: TaskStatus[None]) -> None:
        """Receive signals until cancelled."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                log.info("stopping", signal=signal.Signals(number).name)
                self.act()


async def _run(settings: Settings, connect: Connect, stopping: Stopping) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    metrics, health, backpressure = Metrics(), Health(), Backpressure()
    replica = settings.replica_name or _replica_name(settings)

    def observe(request: Request, code: int | None, duration_s: float) -> None:
        metrics.requests.labels(request.verb, request.kind.kind, str(code) if code else "none").inc()
        metrics.request_seconds.labels(request.verb).observe(duration_s)
        if code == HTTPStatus.TOO_MANY_REQUESTS:
            backpressure.refused(now_mono=time.monotonic())

    def before_write(request: Request) -> None:
        if request.kind == LEASE:
            return  # fencing tokens come from Leases, and a write of one is a compare-and-set by itself
        try:
            fencing.check(request.kind, request.key)
        except FencedError:
            metrics.fenced_writes.inc()
            raise

    async with connect(
        kubeconfig=settings.kubeconfig,
        context=settings.context,
        user_agent=f"{FIELD_MANAGER}/{replica}",
        request_timeout_s=settings.request_timeout_s,
        write_timeout_s=settings.write_timeout_s,
        max_connections=settings.max_connections,
        observe=observe,
        received=lambda kind, size: metrics.received_bytes.labels(kind.kind).inc(size),
        before_write=before_write,
    ) as cluster:
        with serving(settings.http_port, metrics, health) as port:
            log.info("started", namespace=settings.namespace, http_port=port, replica=replica)
            warn_of_settings(settings)
            await refuse_unknown_namespaces(cluster, settings)
            cluster_uid = partial(wait_for_cluster_uid, cluster, beat=health.beat)
            async with open_registries(settings, cluster_uid) as registries, asking() as ask:
                with fencing.holding(fencing.NO_TOKEN), short_pauses() as garbage:
                    operator = Operator(
                        settings,
                        cluster,
                        metrics,
                        health,
                        backpressure,
                        registries,
                        replica=replica,
                        collect_garbage=garbage.step,
                        ask=ask if settings.ask_pods else None,
                    )
                    stopping.act = operator.stop
                    await operator.run()
            log.info("stopped")


def _replica_name(settings: Settings) -> str:
    """A name that no other process uses: in a Pod the Pod's name, else the host's name with a random suffix.

    A Pod's name stays the same when its container restarts, so the new process keeps the shards of the old one.
    """
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:180] or "replica"
    is_in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ and settings.kubeconfig is None
    return host if is_in_cluster else f"{host}-{random.randrange(16**8):08x}"  # noqa: S311 - no secret


def _clock() -> float:
    """Seconds for the deadlines of Leases.

    Where there is one, the clock that goes on while the machine is suspended: ``CLOCK_MONOTONIC`` stands still then,
    and after the machine resumes a replica would still hold a token for a shard that another one acquired long ago.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Operator:
    """The parts of one operator, connected."""

    def __init__(  # noqa: PLR0913 - what the application has made before
        self,
        settings: Settings,
        cluster: Cluster,
        metrics: Metrics,
        health: Health,
        backpressure: Backpressure,
        registries: Registries,
        *,
        replica: str,
        collect_garbage: Callable[[], None] = lambda: None,
        ask: Ask | None = None,
    ) -> None:
        self._collect_garbage = collect_garbage
        self._settings = settings
        self._cluster = cluster
        self._metrics = metrics
        self._health = health
        self._backpressure = backpressure
        self._registries = registries
        self._ask = ask
        self._tasks = anyio.create_task_group()
        self._can_join = anyio.Event()
        self._reaching = anyio.CancelScope()
        self._sight = Sight(settings.watch_stale_s)
        self._blind_since: datetime | None = None
        self._has_released = anyio.Event()
        self._store = Store(indexes_of(settings.namespace), KEPT, SECOND_INDEXES)
        self._scopes = Scopes(
            self._store,
            namespace=settings.namespace,
            namespaces=settings.namespaces,
            are_nodes_watched=settings.are_nodes_watched,
        )
        self._elector = self._new_elector(replica)
        self._agreement = self._new_agreement() if settings.server_side_sharding else None
        self._shard_watches = ShardWatches(self._scopes, follow=self._follow, forget=self._sight.forget)
        self._workers = self._new_workers()
        self._triggers = Triggers(self._store, self._scopes, self._elector, self._workers.enqueue)
        self._events = EventRecorder(cluster, instance=socket.gethostname(), now=_now)
        self._contention = self._new_tracker()
        self._applier = Applier(cluster, self._store, self._contention, on_write=self._count_write, mono=time.monotonic)
        self._reconciler = self._new_reconciler()
        self._resync_loop = ResyncLoop(
            cluster,
            self._store,
            self._scopes,
            self._triggers,
            self._applier,
            PeriodicAudit(
                self._store,
                self._scopes,
                registries,
                metrics,
                namespace=settings.namespace,
                namespaces=settings.namespaces,
            ),
            backpressure,
            metrics,
            interval_s=settings.sweep_interval_s,
        )

    def _new_elector(self, replica: str) -> Elector:
        settings = self._settings
        return Elector(
            self._cluster,
            namespace=settings.namespace,
            replica=replica,
            shards=settings.shards,
            times=LeaseTimes(settings.lease_duration_s, settings.renew_deadline_s, settings.retry_period_s),
            grace_s=settings.shutdown_grace_s,
            on_change=self._shard_changed,
            clock=_clock,
            now=_now,
        )

    def _new_agreement(self) -> Agreement:
        def proxies() -> Counter[str]:
            # Every proxy has a record, and every replica watches all records.
            return Counter(key.namespace for key in self._store.index_values(PROXY_REGISTRATION))

        return Agreement(
            self._cluster,
            namespace=self._settings.namespace,
            shards=self._settings.shards,
            proxies=proxies,
            on_change=self._elector.divide,
        )

    def _new_workers(self) -> WorkerPool:
        settings = self._settings
        limits = Limits(
            in_flight_per_lane=settings.in_flight_per_tenant,
            backoff_base_s=settings.backoff_base_s,
            backoff_cap_s=settings.backoff_cap_s,
        )
        return WorkerPool(
            self._reconcile,
            limits,
            self._backpressure,
            self._metrics,
            workers=settings.workers,
            rand=random.random,
            weight=settings.weight_of,
        )

    def _new_tracker(self) -> ContentionTracker:
        settings = self._settings
        times = ContentionTimes(
            threshold=settings.contention_threshold,
            window_s=settings.contention_window_s,
            base_s=settings.contention_base_s,
            cap_s=settings.contention_cap_s,
        )
        return ContentionTracker(times)

    def _new_reconciler(self) -> Reconciler:
        settings, drift_repaired = self._settings, self._metrics.drift_repaired
        reporter = Reporter(self._events, on_drift=lambda kind: drift_repaired.labels(kind.kind).inc())
        statuses = StatusWriter(
            self._cluster,
            self._store,
            self._contention,
            on_write=self._count_write,
            mono=time.monotonic,
            settle_s=settings.status_settle_s,
        )
        return Reconciler(
            self._cluster,
            self._store,
            self._applier,
            Finalizer(self._cluster, self._store, self._contention, on_write=self._count_write, mono=time.monotonic),
            self._new_registrar(),
            statuses,
            DataPlane(self._cluster, self._store, self._ask, on_write=self._count_write, mono=time.monotonic),
            report=reporter.child,
            record_event=self._events.record,
            default_image=settings.image,
            node_port_addresses=settings.node_port_addresses,
            tenant_policy=settings.tenant_policy,
            installation=settings.namespace,
            run_as_user=settings.run_as_user,
            abandon_after_s=settings.abandon_after_s,
            now=_now,
        )

    def _new_registrar(self) -> Registrar:
        namespace, sink = self._settings.namespace, self._triggers.apply_own_delete
        return Registrar(
            Ledger(
                self._applier,
                self._cluster,
                self._store,
                namespace=namespace,
                installation=self._registries.installation,
                on_write=self._count_write,
                sink=sink,
            ),
            Claims(
                self._applier,
                self._cluster,
                self._store,
                namespace=namespace,
                sink=sink,
                on_change=self._triggers.apply_own_change,
                rest_s=self._settings.hostname_rest_s,
                resting_limit=self._settings.kept_per_tenant,
                tenant_of=self._triggers.tenant_of,
                now=_now,
            ),
            self._registries,
            Backoff(base_s=self._settings.backoff_base_s, cap_s=self._settings.backoff_cap_s, rand=random.random),
            CircuitBreaker(rand=random.random),
            policies=Policies(self._store, self._cluster, apexes=self._settings.dns_zones),
            kept_limit=self._settings.kept_per_tenant,
            tenant_of=self._triggers.tenant_of,
            mono=time.monotonic,
        )

    async def run(self) -> None:
        """Work until a signal comes; then begin no further reconcile, let those in progress finish, and return.

        Reconciles still in progress after the grace time are cancelled. Each shard is released as soon as no reconcile
        of it is in progress.
        """
        async with self._tasks as tasks:
            tasks.start_soon(self._heartbeat)
            tasks.start_soon(self._start_watches)
            leases = Scope(namespace=self._settings.namespace, labels=SELECTOR, hashes=None)
            tasks.start_soon(self._follow, LEASE, leases, self._apply_lease_delta)
            tasks.start_soon(self._run_elector)
            tasks.start_soon(self._keep_balance)
            tasks.start_soon(self._triggers.enqueue_unclaimed)
            tasks.start_soon(self._resync_loop.run)
            tasks.start_soon(self._triggers.enqueue_node_ports)
            tasks.start_soon(self._events.run)
            await self._workers.run(grace_s=self._settings.shutdown_grace_s)
            with anyio.move_on_after(RELEASE_TIMEOUT_S):
                await self._has_released.wait()
            tasks.cancel_scope.cancel()

    def stop(self) -> None:
        """Begin no further reconcile; ``run`` returns once those in progress have ended."""
        self._health.is_ready = False
        self._elector.leave()
        self._reaching.cancel()
        self._can_join.set()
        self._workers.stop()

    async def _heartbeat(self) -> None:
        while True:
            begun_mono = time.monotonic()
            self._health.beat()
            self._judge_sight()
            self._collect_garbage()
            self._metrics.queued.set(len(self._workers))
            self._metrics.show_backlogs(await self._workers.backlogs())
            await anyio.sleep(1)
            self._metrics.loop_lag.observe(max(0.0, time.monotonic() - begun_mono - 1))

    def _judge_sight(self) -> None:
        """Give the shards back while a watch is silent for too long, and take part again when it delivers."""
        now_mono = time.monotonic()
        for kind, silent_s in self._sight.silent_s(now_mono).items():
            self._metrics.watch_silent.labels(kind.kind).set(silent_s)
        stale = self._sight.stale(now_mono)
        if stale is None:
            if self._blind_since is not None:
                log.info("watches_deliver_again", since=self._blind_since.isoformat())
                self._health.blind = self._blind_since = None
                self._elector.resume()
            return
        kind, silent_s = stale
        if self._blind_since is None:
            self._blind_since = _now() - timedelta(seconds=silent_s)
            since = self._blind_since.isoformat(timespec="seconds")
            self._health.blind = f"nothing of {kind.kind} has arrived since {since}; the shards are given back"
            log.error("watches_are_stale", kind=kind.kind, since=since)
            self._elector.suspend()

    async def _start_watches(self) -> None:
        """Watch all that is served, or with server-side sharding what is of no shard, and shards as they are held."""
        if self._settings.server_side_sharding:
            kinds = (kind for kind in self._scopes.kinds if kind not in SHARED_KINDS)
            if await wait_for_filtered_lists(self._cluster, kinds):
                self._scopes.divide()
        for kind, scope in self._scopes:
            self._tasks.start_soon(self._follow, kind, scope, self._apply_delta)

    async def _run_elector(self) -> None:
        """Join the election once a served namespace is synced; before, this replica can't reconcile its shards."""
        await self._can_join.wait()
        if self._agreement is not None:
            with self._reaching:
                await self._agreement.reach()
        await self._elector.run()
        self._has_released.set()

    async def _keep_balance(self) -> None:
        """Keep the shards of one size, where they are ranges and the first one is held here."""
        while self._agreement is not None:
            await anyio.sleep(min(BALANCE_INTERVAL_S, self._settings.sweep_interval_s))
            if 0 in self._elector.held:
                await self._agreement.keep()

    async def _follow(self, kind: Kind, scope: Scope, sink: Callable[[Delta], None]) -> NoReturn:
        def on_error(kind: Kind, error: OperatorError) -> None:
            self._metrics.watch_errors.labels(kind.kind).inc()
            log.warning("watch_failed", kind=kind.kind, namespace=scope["namespace"], error=str(error))

        def on_progress() -> None:
            if self._scopes.is_served(scope):  # of a watch that is being ended nothing more is expected
                self._sight.record((kind, coverage_of(scope)), now_mono=time.monotonic())

        await follow(
            self._cluster,
            kind,
            sink=sink,
            times=WatchTimes(
                timeout_s=self._settings.watch_timeout_s, idle_timeout_s=self._settings.watch_idle_timeout_s
            ),
            rand=random.random,
            on_error=on_error,
            on_progress=on_progress,
            on_restart=lambda how: self._metrics.watch_restarts.labels(kind.kind, how).inc(),
            **scope,
        )

    def _apply_delta(self, delta: Delta) -> None:
        self._metrics.received_objects.labels(delta.kind.kind).inc(
            len(delta.objects) if isinstance(delta, Listed) else 1
        )
        self._triggers.apply_delta(delta)
        if isinstance(delta, Listed) and delta.last:
            self._start_where_synced(delta.coverage)

    def _apply_lease_delta(self, delta: Delta) -> None:
        self._elector.apply_delta(delta)
        if self._agreement is not None:
            self._agreement.apply_delta(delta)
        self._become_ready()

    def _start_where_synced(self, listed: Coverage) -> None:
        """Enqueue the proxies of whatever the list of a scope has made synced."""
        for served in self._scopes.newly_synced(listed):
            self._tasks.start_soon(self._triggers.enqueue_synced, served)
        self._become_ready()

    def _become_ready(self) -> None:
        """Make this replica ready once a served namespace and the Leases are synced."""
        if self._scopes.is_any_synced and self._elector.is_synced and not self._workers.is_stopping:
            self._health.is_ready = True
            self._can_join.set()

    def _shard_changed(self, shard: int, change: ShardTransition) -> None:
        self._metrics.shards_held.set(len(self._elector.held))
        self._metrics.lease_transitions.labels(change.value).inc()
        is_taken = change == ShardTransition.TAKEN
        if self._scopes.is_whole:
            if is_taken:
                self._tasks.start_soon(self._triggers.enqueue_shard, shard)
        elif is_taken and isinstance(self._elector.division, Ranges):
            hashes = self._elector.division.range_of(shard)
            self._shard_watches.begin(shard, hashes, self._apply_delta, self._tasks)
        else:
            self._shard_watches.end(shard)

    async def _reconcile(self, key: Key, failures: int) -> ReconcileResult | None:
        """Reconcile ``key`` on its shard's fencing token; ``None`` without one or when the shard was lost meanwhile.

        The replica that acquires the shard enqueues the key again. With server-side sharding it may be this one again,
        which knows nothing of the shard's objects until they are listed. The shard follows from the namespace and not
        from the tenant, whose label may change: no object may ever belong to two shards.
        """
        token = self._elector.token(key.namespace)
        is_resync = self._resync_loop.pop_pending(key)
        if token is None or not self._scopes.is_synced(key.namespace):
            return None
        self._metrics.count_reconcile(self._triggers.tenant_of(key.namespace))
        result: ReconcileResult | None = None
        with self._elector.working(token):
            result = await self._reconciler.reconcile(key, failures=failures, is_resync=is_resync)
        return result  # noqa: RET504 - a reconcile that is cancelled because its shard was lost ends up here, too

    def _count_write(self, kind: Kind, outcome: Outcome) -> None:
        self._metrics.writes.labels(kind.kind, outcome.value).inc()


def _now() -> datetime:
    return datetime.now(UTC)
