"""Wiring: the rooms, the tasks that connect them, and the order in which they stop.

Watches feed the store, news in the store feeds the queue, the pool takes keys and runs rounds. Nothing here
decides what a round does.
"""

import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, TypedDict

import anyio
import anyio.lowlevel
import structlog

from operator_app.api.kinds import (
    CHILD_KINDS,
    ENVOY_PROXY,
    FIELD_MANAGER,
    HOSTNAME_CLAIM,
    LABEL_MANAGED_BY,
    LABEL_TENANT,
    LEASE,
    NAMESPACE,
    PROXY_REGISTRATION,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.apply import Applier, Outcome
from operator_app.controller.backpressure import Backpressure
from operator_app.controller.drift_events import Reporter
from operator_app.controller.resync import sweep
from operator_app.controller.workers import WorkerPool
from operator_app.controller.workqueue import Limits, Priority
from operator_app.desired import controller_uid, proxy_key
from operator_app.errors import ConfigurationError, FencedError, OperatorError, TransientError
from operator_app.finalizer import Finalizer
from operator_app.kube import fencing
from operator_app.kube.client import Cluster, Request
from operator_app.kube.deltas import Deleted, Delta, Listed
from operator_app.kube.events import EventRecorder
from operator_app.kube.store import Index, Store
from operator_app.kube.watch import QUIET_S, WatchTimes, follow
from operator_app.observability.metrics import Health, Metrics, serving
from operator_app.reconcile import Reconciler
from operator_app.registration.audit import FindingKind, findings, outside_entries, survey_of
from operator_app.registration.backoff import Backoff
from operator_app.registration.circuit import CircuitBreaker
from operator_app.registration.claims import Claims
from operator_app.registration.ledger import Ledger, proxy_of
from operator_app.registration.plugins import open_registries
from operator_app.registration.registrar import Registrar, Registries
from operator_app.results import ReconcileResult
from operator_app.settings import Settings
from operator_app.sharding.elector import SELECTOR, Elector
from operator_app.sharding.leases import LeaseTimes, ShardTransition
from operator_app.ssa.contention import ContentionTimes, ContentionTracker
from operator_app.status import StatusWriter

log = structlog.get_logger(__name__)


def hostname_of(proxy: Object) -> str | None:
    """The hostname that a proxy wants."""
    wanted: str | None = ((proxy.get("spec") or {}).get("registration") or {}).get("hostname")
    return wanted


INDEXES: Final[Mapping[Kind, Index]] = {
    ENVOY_PROXY: hostname_of,
    NAMESPACE: lambda _: None,
    PROXY_REGISTRATION: proxy_of,
    HOSTNAME_CLAIM: proxy_of,
    **dict.fromkeys(CHILD_KINDS, controller_uid),
}
"""Every kind that the store keeps, and what its objects are looked up by."""

OURS: Final = f"{LABEL_MANAGED_BY}={FIELD_MANAGER}"
"""Label selector of everything that this operator makes."""


FILL_CHUNK: Final = 100
"""Proxies to look at between two turns of the event loop, when a shard is taken."""

RELEASE_TIMEOUT_S: Final = 5.0
"""How long to try to give back shards at the end; after this, others wait until the Leases run out."""


class Scope(TypedDict):
    """Where to look for the objects of a kind, as keywords of a list or a watch."""

    namespace: str | None
    labels: str | None


Connect = Callable[..., AbstractAsyncContextManager[Cluster]]


async def run(settings: Settings, *, connect: Connect = Cluster.connect) -> None:
    """Run the operator until SIGTERM or SIGINT. ``connect`` is the seam for faults and measurements.

    Raises ``ConfigurationError`` before anything is started when there is no usable cluster configuration or registry,
    or when the HTTP port is taken.
    """
    metrics, health, backpressure = Metrics(), Health(), Backpressure()
    replica = settings.replica_name or _replica_name(settings)

    def observe(request: Request, code: int | None, duration_s: float) -> None:
        metrics.requests.labels(request.verb, request.kind.kind, str(code) if code else "none").inc()
        metrics.request_seconds.labels(request.verb).observe(duration_s)
        if code == HTTPStatus.TOO_MANY_REQUESTS:
            backpressure.refused(now_mono=time.monotonic())

    def before_write(request: Request) -> None:
        if request.kind == LEASE:
            return  # a compare-and-set by itself, and what rights to write come from
        try:
            fencing.check(request.kind, request.key)
        except FencedError:
            metrics.fenced_writes.inc()
            raise

    async with (
        connect(
            kubeconfig=settings.kubeconfig,
            context=settings.context,
            user_agent=f"{FIELD_MANAGER}/{replica}",
            request_timeout_s=settings.request_timeout_s,
            max_connections=settings.max_connections,
            observe=observe,
            before_write=before_write,
        ) as cluster,
        open_registries(settings) as registries,
    ):
        with serving(settings.http_port, metrics, health) as port:
            log.info("started", namespace=settings.namespace, http_port=port, replica=replica)
            _warn_of_settings(settings)
            await _refuse_unknown_namespaces(cluster, settings)
            with fencing.holding(fencing.NO_TOKEN):
                await Operator(settings, cluster, metrics, health, backpressure, registries, replica=replica).run()
            log.info("stopped")


def _warn_of_settings(settings: Settings) -> None:
    """Tell of settings that work, but cost more than they seem to."""
    if settings.watch_idle_timeout_s < QUIET_S:
        sentence = (
            f"a healthy watch may be silent for {QUIET_S:g} s; with --watch-idle-timeout-s "
            f"({settings.watch_idle_timeout_s:g}) below that, quiet kinds are listed again and again"
        )
        log.warning("watch_idle_timeout_short", note=sentence)


async def _refuse_unknown_namespaces(cluster: Cluster, settings: Settings) -> None:
    """Raise ``ConfigurationError`` where nothing can be served; doubt is no reason not to start.

    That is so without the operator's own namespace, and when none of the served ones exists. One that has gone must not
    stop the others at the next restart.
    """
    missing: set[str] = set()

    async def ask(name: str) -> None:
        try:
            if await cluster.get(NAMESPACE, Key("", name)) is None:
                missing.add(name)
        except OperatorError as error:
            log.warning("namespace_unchecked", namespace=name, error=str(error))

    # At once: the time-outs of many names, one after the other, would be taken for a stuck event loop.
    async with anyio.create_task_group() as questions:
        for name in {settings.namespace, *settings.namespaces}:
            questions.start_soon(ask, name)
    if settings.namespace in missing:
        raise ConfigurationError(f"there is no namespace {settings.namespace!r}; create it, or name another")
    if settings.namespaces and missing.issuperset(settings.namespaces):
        names = " and no namespace ".join(map(repr, settings.namespaces))
        raise ConfigurationError(f"there is no namespace {names}; create it, or name another")
    for name in sorted(missing):
        log.warning("namespace_missing", namespace=name)


def _replica_name(settings: Settings) -> str:
    """A name that no other process uses: in a Pod that of the Pod, else the host's with something random.

    A Pod's name comes back when its container restarts, and the new process goes on where the old one stopped.
    """
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:180] or "replica"
    is_in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ and settings.kubeconfig is None
    return host if is_in_cluster else f"{host}-{random.randrange(16**8):08x}"  # noqa: S311 - no secret


def _clock() -> float:
    """Seconds for the deadlines of Leases.

    Where there is one, the clock that goes on while the machine is suspended: ``CLOCK_MONOTONIC`` stands still then,
    and a replica would wake up with a right to write that others have taken over long ago.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Operator:
    """The rooms of one operator, connected."""

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        metrics: Metrics,
        health: Health,
        backpressure: Backpressure,
        registries: Registries,
        *,
        replica: str,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._metrics = metrics
        self._health = health
        self._backpressure = backpressure
        self._store = Store(INDEXES)
        self._scopes: frozenset[str | None] = frozenset(settings.namespaces or (None,))
        # Namespaces are cluster-scoped: who may serve only some of them need not be allowed to watch them.
        self._watched = tuple(kind for kind in INDEXES if kind != NAMESPACE or not settings.namespaces)
        self._begun: set[str | None] = set()
        self._workers = WorkerPool(
            self._work,
            Limits(
                in_flight_per_lane=settings.in_flight_per_tenant,
                backoff_base_s=settings.backoff_base_s,
                backoff_cap_s=settings.backoff_cap_s,
            ),
            backpressure,
            metrics,
            workers=settings.workers,
            rand=random.random,
            weight=settings.weight_of,
        )
        self._tasks = anyio.create_task_group()
        self._elector = Elector(
            cluster,
            namespace=settings.namespace,
            replica=replica,
            shards=settings.shards,
            times=LeaseTimes(settings.lease_duration_s, settings.renew_deadline_s, settings.retry_period_s),
            grace_s=settings.shutdown_grace_s,
            on_change=self._shard_changed,
            clock=_clock,
            now=_now,
        )
        self._is_able = anyio.Event()
        self._has_given_back = anyio.Event()
        times = ContentionTimes(
            threshold=settings.contention_threshold,
            window_s=settings.contention_window_s,
            base_s=settings.contention_base_s,
            cap_s=settings.contention_cap_s,
        )
        self._applier = Applier(
            cluster, self._store, ContentionTracker(times), on_write=self._count_write, mono=time.monotonic
        )
        self._events = EventRecorder(cluster, instance=socket.gethostname(), now=_now)
        self._registries = registries
        self._to_look_outside: set[Key] = set()
        reporter = Reporter(self._events, on_drift=lambda kind: metrics.drift_repaired.labels(kind.kind).inc())
        self._reconciler = Reconciler(
            cluster,
            self._store,
            self._applier,
            Finalizer(cluster, self._store, on_write=self._count_write),
            self._registrar(),
            StatusWriter(
                cluster,
                self._store,
                on_write=self._count_write,
                mono=time.monotonic,
                settle_s=settings.status_settle_s,
            ),
            report=reporter.child,
            record_event=self._events.record,
            default_image=settings.image,
            abandon_after_s=settings.abandon_after_s,
            now=_now,
        )

    def _registrar(self) -> Registrar:
        namespace = self._settings.namespace
        return Registrar(
            Ledger(
                self._applier,
                self._cluster,
                self._store,
                namespace=namespace,
                on_write=self._count_write,
                sink=self._forget,
            ),
            Claims(self._applier, self._store, namespace=namespace, sink=self._forget),
            self._registries,
            Backoff(base_s=self._settings.backoff_base_s, cap_s=self._settings.backoff_cap_s, rand=random.random),
            CircuitBreaker(rand=random.random),
            mono=time.monotonic,
        )

    async def run(self) -> None:
        """Work until a signal comes; then take no new keys, let rounds finish within the grace time, and return.

        Each shard is given back as soon as no round of it is in progress any more.
        """
        async with self._tasks as everything:
            everything.start_soon(self._beat)
            for kind in self._watched:
                for scope in self._scopes_of(kind):
                    everything.start_soon(self._follow, kind, scope, self._take)
            everything.start_soon(
                self._follow, LEASE, Scope(namespace=self._settings.namespace, labels=SELECTOR), self._take_leases
            )
            everything.start_soon(self._run_elector)
            everything.start_soon(self._sweep)
            everything.start_soon(self._events.run)
            everything.start_soon(self._stop_on_signal)
            await self._workers.run(grace_s=self._settings.shutdown_grace_s)
            with anyio.move_on_after(RELEASE_TIMEOUT_S):
                await self._has_given_back.wait()
            everything.cancel_scope.cancel()

    async def _stop_on_signal(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("stopping", signal=signal.Signals(number).name)
                self._health.is_ready = False
                self._elector.leave()
                self._is_able.set()
                self._workers.stop()

    async def _beat(self) -> None:
        while True:
            self._health.beat()
            self._metrics.queued.set(len(self._workers))
            self._metrics.show_backlogs(self._workers.backlogs())
            await anyio.sleep(1)

    async def _run_elector(self) -> None:
        """Be a member from the moment on that this replica can work; before, others would wait for it in vain."""
        await self._is_able.wait()
        await self._elector.run()
        self._has_given_back.set()

    def _take_leases(self, delta: Delta) -> None:
        self._elector.apply_delta(delta)
        self._begin_where_synced()

    def _shard_changed(self, shard: int, change: ShardTransition) -> None:
        self._metrics.shards_held.set(len(self._elector.held))
        self._metrics.lease_transitions.labels(change.value).inc()
        if change == ShardTransition.TAKEN:
            self._tasks.start_soon(self._fill, shard)

    async def _fill(self, shard: int) -> None:
        """Want a round for every proxy of a shard: what its last holder has left undone, nobody tells."""
        for count, key in enumerate(self._known_proxies(), 1):
            if self._elector.shard(key.namespace) == shard:
                self._add(key, Priority.USER if _is_unserved(self._store.get(ENVOY_PROXY, key)) else Priority.RESYNC)
            if count % FILL_CHUNK == 0:
                await anyio.lowlevel.checkpoint()

    async def _follow(self, kind: Kind, scope: Scope, sink: Callable[[Delta], None]) -> None:
        def on_trouble(kind: Kind, error: OperatorError) -> None:
            self._metrics.watch_errors.labels(kind.kind).inc()
            log.warning("watch_failed", kind=kind.kind, namespace=scope["namespace"], error=str(error))

        await follow(
            self._cluster,
            kind,
            sink=sink,
            settings=WatchTimes(
                timeout_s=self._settings.watch_timeout_s, idle_timeout_s=self._settings.watch_idle_timeout_s
            ),
            rand=random.random,
            on_trouble=on_trouble,
            on_event=lambda how: self._metrics.watch_restarts.labels(kind.kind, how).inc(),
            **scope,
        )

    def _scope(self, kind: Kind, namespace: str | None) -> Scope:
        """Which objects of a kind are ours to know, when ``namespace`` (``None``: all) is served."""
        if kind == ENVOY_PROXY:
            return {"namespace": namespace, "labels": None}
        if kind == NAMESPACE:
            return {"namespace": None, "labels": LABEL_TENANT}
        if kind in (PROXY_REGISTRATION, HOSTNAME_CLAIM):
            return {"namespace": self._settings.namespace, "labels": OURS}
        return {"namespace": namespace, "labels": OURS}

    def _scopes_of(self, kind: Kind) -> list[Scope]:
        """The scopes in which a kind is watched, each once."""
        scopes = [self._scope(kind, namespace) for namespace in sorted(self._scopes, key=str)]
        return [scope for index, scope in enumerate(scopes) if scope not in scopes[:index]]

    def _take(self, delta: Delta) -> None:
        """News of any object is a reason to look at the proxies that it concerns."""
        for obj in self._store.apply_delta(delta):
            for key in self._concerned(delta.kind, obj):
                self._add(key, _priority(delta, obj))
        if isinstance(delta, Listed) and delta.last:
            self._begin_where_synced()

    def _forget(self, delta: Deleted) -> None:
        """What we deleted ourselves is gone at once, and whoever waited for that need not wait for the watch."""
        self._store.apply_delta(delta)
        for key in self._concerned(delta.kind, delta.object):
            self._add(key, Priority.REPAIR)

    def _concerned(self, kind: Kind, obj: Object) -> set[Key]:
        """The proxies that an object belongs to or is wanted by."""
        owner = _owner(kind, obj)
        concerned = {owner} if owner is not None else set()
        if kind == HOSTNAME_CLAIM:
            concerned.update(map(key_of, self._store.indexed(ENVOY_PROXY, obj["spec"]["hostname"])))
        return concerned

    def _begin_where_synced(self) -> None:
        """Start working in every scope in which everything has been listed; one that never is holds up no other."""
        for namespace in self._scopes - self._begun:
            if all(self._store.is_synced(kind, self._scope(kind, namespace)["namespace"]) for kind in self._watched):
                self._begun.add(namespace)
                known = [key for key in self._known_proxies() if namespace in (None, key.namespace)]
                for shard in self._elector.held:
                    self._tasks.start_soon(self._fill, shard)
                log.info("synced", namespace=namespace, proxies=len(known))
        if self._begun and self._elector.is_synced and not self._workers.is_stopping:
            self._health.is_ready = True
            self._is_able.set()

    def _known_proxies(self) -> set[Key]:
        """Every proxy that exists, or of which a record or a claim still tells."""
        told = (owner for kind in (PROXY_REGISTRATION, HOSTNAME_CLAIM) for owner in self._store.index_values(kind))
        return {*self._store.keys(ENVOY_PROXY), *told}

    def _add(self, key: Key, priority: Priority) -> bool:
        """Want a round, if it is this replica's to run; whether it is.

        Where not everything is known yet, or the shard is another's, ``_fill`` does it when that changes.
        """
        if self._begun.isdisjoint((None, key.namespace)) or self._elector.token(key.namespace) is None:
            return False
        self._workers.enqueue(key, self._tenant(key.namespace), priority)
        return True

    def _tenant(self, namespace: str) -> str:
        """The lane of a namespace: its tenant label, or itself."""
        labelled = self._store.get(NAMESPACE, Key("", namespace)) if NAMESPACE in self._watched else None
        tenant: str | None = labelled["metadata"].get("labels", {}).get(LABEL_TENANT) if labelled else None
        return tenant or namespace

    async def _sweep(self) -> None:
        """Anti-entropy: one list for each kind against the store, then a round for every proxy.

        A watch that works leaves nothing to find, and a round that finds nothing wrong sends nothing.
        """
        while True:
            await anyio.sleep(self._settings.sweep_interval_s * random.uniform(0.9, 1.1))  # noqa: S311 - jitter
            if not self._begun:
                continue
            asked_s = 0.0
            for kind in self._watched:
                for scope in self._scopes_of(kind):
                    # Whole lists are the dearest requests, and nobody waits for these.
                    put_off_s = self._backpressure.delay_s(Priority.RESYNC, now_mono=time.monotonic())
                    await anyio.sleep(max(put_off_s, asked_s))
                    asked_s = await self._sweep_kind(kind, scope)
            self._applier.reset_rejected()
            await self._audit()
            for key in self._known_proxies():
                if self._add(key, Priority.RESYNC):
                    self._to_look_outside.add(key)

    async def _audit(self) -> None:
        try:
            outside, failed = await outside_entries(self._registries)
        except Exception:
            # A registry may be somebody else's code; its bug must not end the sweeps.
            log.exception("audit_crashed")
            return
        for name, error in failed.items():
            log.warning("registry_unread", registry=name, error=str(error))
        found = findings(await survey_of(self._store, outside, namespaces=self._settings.namespaces))
        counts = Counter(each.kind for each in found)
        for kind in FindingKind:
            self._metrics.audit_findings.labels(kind.value).set(counts[kind])
        if found:
            log.warning("audit_findings", **{kind.value: count for kind, count in counts.items()})

    async def _sweep_kind(self, kind: Kind, scope: Scope) -> float:
        """Sweep one kind; returns for how many seconds the API server wants to be left alone."""
        try:
            missed = await sweep(self._cluster, self._store, kind, **scope)
        except OperatorError as error:
            log.warning("sweep_failed", kind=kind.kind, error=str(error))
            return (error.retry_after_s or 0.0) if isinstance(error, TransientError) else 0.0
        for each in missed:
            self._metrics.missed.labels(kind.kind).inc()
            log.warning("watch_missed", kind=kind.kind, key=str(key_of(each.object)), gone=each.is_gone)
            for key in self._concerned(kind, each.object):
                self._add(key, Priority.REPAIR)
        return 0.0

    async def _work(self, key: Key, failures: int) -> ReconcileResult | None:
        """One round, on the right of the shard; where that has gone, whoever gets the shard looks at all of it."""
        # By its namespace and not by its tenant: that label may change, and an object must never have two holders.
        token = self._elector.token(key.namespace)
        is_resync = key in self._to_look_outside
        self._to_look_outside.discard(key)
        if token is None:
            return None
        self._metrics.count_round_of(self._tenant(key.namespace))
        verdict: ReconcileResult | None = None
        with self._elector.working(token):
            verdict = await self._reconciler.reconcile(key, failures=failures, is_resync=is_resync)
        return verdict  # noqa: RET504 - a round that is cut off, because the shard was lost, ends up here, too

    def _count_write(self, kind: Kind, outcome: Outcome) -> None:
        self._metrics.writes.labels(kind.kind, outcome.value).inc()


def _now() -> datetime:
    return datetime.now(UTC)


def _owner(kind: Kind, obj: Object) -> Key | None:
    """The proxy that an object belongs to, by name: deletions and stolen references must reach it, too."""
    if kind == ENVOY_PROXY:
        return key_of(obj)
    if kind in (PROXY_REGISTRATION, HOSTNAME_CLAIM):
        return proxy_of(obj)
    if kind == NAMESPACE:
        return None  # a new tenant label counts from the next wish for a round on
    return proxy_key(key_of(obj))


def _priority(delta: Delta, obj: Object) -> Priority:
    """A declaration that was not served yet goes first; a proxy that was fine at start-up can wait."""
    if delta.kind == ENVOY_PROXY and _is_unserved(obj):
        return Priority.USER
    return Priority.RESYNC if isinstance(delta, Listed) else Priority.REPAIR


def _is_unserved(proxy: Object | None) -> bool:
    """Whether a proxy's declaration, or its deletion, has not been acted on yet."""
    if proxy is None:
        return False
    observed = (proxy.get("status") or {}).get("observedGeneration")
    return observed != proxy["metadata"]["generation"] or "deletionTimestamp" in proxy["metadata"]
