"""Wiring: the rooms, the tasks that connect them, and the order in which they stop.

Watches feed the store, news in the store feeds the queue, the dispatcher takes keys and runs rounds. Nothing here
decides what a round does.
"""

import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Final, TypedDict

import anyio
import anyio.abc
import structlog

from operator_app.apply import Applier, Outcome
from operator_app.breaker import Breaker, BreakerTimes
from operator_app.cluster import Cluster, Request
from operator_app.deltas import Delta, Listed
from operator_app.desired import proxy_key
from operator_app.errors import OperatorError, TransientError
from operator_app.events import EventRecorder
from operator_app.finalizer import Finalizer
from operator_app.kinds import (
    CHILD_KINDS,
    ENVOY_PROXY,
    FIELD_MANAGER,
    LABEL_MANAGED_BY,
    PROXY_REGISTRATION,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.reconcile import Reconciler, Verdict, controller_uid
from operator_app.registration.in_cluster import InClusterRegistry, proxy_of
from operator_app.report import Reporter
from operator_app.settings import Settings
from operator_app.status import StatusWriter
from operator_app.store import Store
from operator_app.sweep import sweep
from operator_app.telemetry import Health, Metrics, serving
from operator_app.watch import WatchTimes, follow
from operator_app.workqueue import Limits, Priority, WorkQueue

log = structlog.get_logger(__name__)

WATCHED: Final = (ENVOY_PROXY, *CHILD_KINDS, PROXY_REGISTRATION)
"""Every kind that the store keeps."""

OURS: Final = f"{LABEL_MANAGED_BY}={FIELD_MANAGER}"
"""Label selector of everything that this operator makes."""


class Scope(TypedDict):
    """Where to look for the objects of a kind, as keywords of a list or a watch."""

    namespace: str | None
    labels: str | None


Connect = Callable[..., AbstractAsyncContextManager[Cluster]]


async def run(settings: Settings, *, connect: Connect = Cluster.connect) -> None:
    """Run the operator until SIGTERM or SIGINT. ``connect`` is the seam for faults and measurements.

    Raises ``ConfigurationError`` before anything is started when there is no usable cluster configuration, and
    ``OSError`` when the HTTP port is taken.
    """
    metrics, health = Metrics(), Health()

    def observe(request: Request, code: int | None, duration_s: float) -> None:
        metrics.requests.labels(request.verb, request.kind.kind, str(code) if code else "none").inc()
        metrics.request_seconds.labels(request.verb).observe(duration_s)

    async with connect(
        kubeconfig=settings.kubeconfig,
        context=settings.context,
        user_agent=FIELD_MANAGER,
        request_timeout_s=settings.request_timeout_s,
        max_connections=settings.max_connections,
        observe=observe,
    ) as cluster:
        with serving(settings.http_port, metrics, health) as port:
            log.info("started", namespace=settings.namespace, http_port=port)
            await Operator(settings, cluster, metrics, health).run()
            log.info("stopped")


class Operator:
    """The rooms of one operator, connected."""

    def __init__(self, settings: Settings, cluster: Cluster, metrics: Metrics, health: Health) -> None:
        self._settings = settings
        self._cluster = cluster
        self._metrics = metrics
        self._health = health
        self._store = Store(
            {ENVOY_PROXY: lambda _: None, PROXY_REGISTRATION: proxy_of} | dict.fromkeys(CHILD_KINDS, controller_uid)
        )
        self._queue = WorkQueue(
            Limits(
                in_flight_per_lane=settings.in_flight_per_tenant,
                backoff_base_s=settings.backoff_base_s,
                backoff_cap_s=settings.backoff_cap_s,
            ),
            rand=random.random,
        )
        self._wake = anyio.Event()
        self._is_stopping = False
        times = BreakerTimes(
            threshold=settings.contention_threshold,
            window_s=settings.contention_window_s,
            base_s=settings.contention_base_s,
            cap_s=settings.contention_cap_s,
        )
        self._applier = Applier(cluster, self._store, Breaker(times), on_write=self._count_write, mono=time.monotonic)
        self._events = EventRecorder(cluster, instance=socket.gethostname(), now=_now)
        reporter = Reporter(self._events, on_drift=lambda kind: metrics.drift_repaired.labels(kind.kind).inc())
        self._reconciler = Reconciler(
            cluster,
            self._store,
            self._applier,
            Finalizer(cluster, self._store, on_write=self._count_write),
            InClusterRegistry(self._applier, cluster, self._store, namespace=settings.namespace),
            StatusWriter(
                cluster,
                self._store,
                on_write=self._count_write,
                mono=time.monotonic,
                settle_s=settings.status_settle_s,
            ),
            report=reporter.child,
            default_image=settings.image,
            now=_now,
        )

    async def run(self) -> None:
        """Work until a signal comes; then take no new keys, let rounds finish within the grace time, and return."""
        async with anyio.create_task_group() as everything:
            everything.start_soon(self._beat)
            for kind in WATCHED:
                everything.start_soon(self._follow, kind)
            everything.start_soon(self._sweep)
            everything.start_soon(self._events.run)
            everything.start_soon(self._stop_on_signal)
            await self._dispatch()
            everything.cancel_scope.cancel()

    async def _stop_on_signal(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("stopping", signal=signal.Signals(number).name)
                self._is_stopping = True
                self._health.is_ready = False
                self._wake.set()

    async def _beat(self) -> None:
        while True:
            self._health.beat()
            self._metrics.queued.set(len(self._queue))
            await anyio.sleep(1)

    async def _follow(self, kind: Kind) -> None:
        def on_trouble(kind: Kind, error: OperatorError) -> None:
            self._metrics.watch_errors.labels(kind.kind).inc()
            log.warning("watch_failed", kind=kind.kind, error=str(error))

        await follow(
            self._cluster,
            kind,
            sink=self._take,
            settings=WatchTimes(
                timeout_s=self._settings.watch_timeout_s, idle_timeout_s=self._settings.watch_idle_timeout_s
            ),
            rand=random.random,
            on_trouble=on_trouble,
            on_event=lambda how: self._metrics.watch_restarts.labels(kind.kind, how).inc(),
            **self._scope(kind),
        )

    def _scope(self, kind: Kind) -> Scope:
        """Which objects of a kind are ours to know."""
        return {
            "namespace": self._settings.namespace if kind == PROXY_REGISTRATION else None,
            "labels": None if kind == ENVOY_PROXY else OURS,
        }

    def _take(self, delta: Delta) -> None:
        """News of any object is a reason to look at the proxy that it belongs to."""
        for obj in self._store.take(delta):
            owner = _owner(delta.kind, obj)
            if owner is not None:
                self._add(owner, _priority(delta, obj))
        if not self._health.is_ready and not self._is_stopping and self._store.is_synced:
            self._health.is_ready = True
            log.info("synced", proxies=len(self._store.keys(ENVOY_PROXY)))
        self._wake.set()

    def _add(self, key: Key, priority: Priority) -> None:
        self._queue.add(key, key.namespace, priority, now=time.monotonic())

    async def _sweep(self) -> None:
        """Anti-entropy: one list for each kind against the store, then a round for every proxy.

        A watch that works leaves nothing to find, and a round that finds nothing wrong sends nothing.
        """
        while True:
            await anyio.sleep(self._settings.sweep_interval_s * random.uniform(0.9, 1.1))  # noqa: S311 - jitter
            if not self._store.is_synced:
                continue
            for kind in WATCHED:
                await self._sweep_kind(kind)
            self._applier.forget_refusals()
            for key in self._store.keys(ENVOY_PROXY):
                self._add(key, Priority.SWEEP)
            self._wake.set()

    async def _sweep_kind(self, kind: Kind) -> None:
        try:
            missed = await sweep(self._cluster, self._store, kind, **self._scope(kind))
        except OperatorError as error:
            log.warning("sweep_failed", kind=kind.kind, error=str(error))
            return
        for each in missed:
            self._metrics.missed.labels(kind.kind).inc()
            log.warning("watch_missed", kind=kind.kind, key=str(key_of(each.object)), gone=each.is_gone)
            owner = _owner(kind, each.object)
            if owner is not None:
                self._add(owner, Priority.REPAIR)

    async def _dispatch(self) -> None:
        """Hand keys to rounds, as many at a time as there are workers; return when stopping and all rounds are over."""
        slots = anyio.CapacityLimiter(self._settings.workers)
        async with anyio.create_task_group() as rounds:
            while not self._is_stopping:
                key = self._queue.take(time.monotonic()) if self._store.is_synced else None
                if key is None:
                    await self._rest()
                    continue
                # Borrowing here, not in the task, keeps a key in its fair place in the queue until a worker is free.
                await slots.acquire_on_behalf_of(key)
                rounds.start_soon(self._work, key, slots)
            rounds.cancel_scope.deadline = anyio.current_time() + self._settings.shutdown_grace_s

    async def _rest(self) -> None:
        """Sleep until there is news or a delayed key comes due."""
        ready_at = self._queue.ready_at(time.monotonic())
        self._wake = anyio.Event()
        with anyio.move_on_after(None if ready_at is None else max(0.0, ready_at - time.monotonic())):
            await self._wake.wait()

    async def _work(self, key: Key, slots: anyio.CapacityLimiter) -> None:
        begun_mono = time.monotonic()
        try:
            verdict = await self._reconciler.round(key, failures=self._queue.failures(key))
        except Exception:
            # A bug must cost one proxy its rounds, not everybody theirs.
            log.exception("round_crashed", proxy=str(key))
            verdict = Verdict(failure=OperatorError("the round crashed; the log has the traceback"))
        finally:
            slots.release_on_behalf_of(key)
        self._metrics.round_seconds.observe(time.monotonic() - begun_mono)
        self._metrics.rounds.labels("failed" if verdict.failure else "done").inc()
        self._settle(key, verdict)
        self._wake.set()

    def _settle(self, key: Key, verdict: Verdict) -> None:
        now = time.monotonic()
        if verdict.failure is None:
            self._queue.done(key, now=now, again_after_s=verdict.again_after_s)
            return
        wish_s = verdict.failure.retry_after_s if isinstance(verdict.failure, TransientError) else None
        delay_s = self._queue.failed(key, now=now, retry_after_s=wish_s)
        log.info("round_failed", proxy=str(key), error=str(verdict.failure), retry_in_s=round(delay_s, 3))

    def _count_write(self, kind: Kind, outcome: Outcome) -> None:
        self._metrics.writes.labels(kind.kind, outcome.value).inc()


def _now() -> datetime:
    return datetime.now(UTC)


def _owner(kind: Kind, obj: Object) -> Key | None:
    """The proxy that an object belongs to, by name: deletions and stolen references must reach it, too."""
    if kind == ENVOY_PROXY:
        return key_of(obj)
    if kind == PROXY_REGISTRATION:
        return proxy_of(obj)
    return proxy_key(key_of(obj))


def _priority(delta: Delta, obj: Object) -> Priority:
    """A declaration that was not served yet goes first; a proxy that was fine at start-up can wait."""
    if delta.kind == ENVOY_PROXY:
        observed = (obj.get("status") or {}).get("observedGeneration")
        if observed != obj["metadata"]["generation"] or "deletionTimestamp" in obj["metadata"]:
            return Priority.USER
    return Priority.SWEEP if isinstance(delta, Listed) else Priority.REPAIR
