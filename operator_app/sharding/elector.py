"""Leader election for each shard: sends the requests about Leases, and provides the fencing tokens of tenants.

The rules are in ``election``; here are the requests, the clock and the waiting. At most one request about each Lease is
in flight, and requests about different Leases never wait for each other. What to reconcile when a shard is acquired or
lost belongs to the application.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Generator
from contextlib import aclosing, contextmanager
from datetime import datetime
from typing import Final

import anyio
import structlog

from operator_app.api.kinds import LEASE, Key
from operator_app.errors import ConflictError, NotFoundError, OperatorError, TransientError
from operator_app.kube import fencing
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Changed, Deleted, Delta, Listed
from operator_app.kube.fencing import FencingToken
from operator_app.kube.store import version_of
from operator_app.sharding.election import ElectionState, LeaseAction, LeaseRequest, ShardTransition
from operator_app.sharding.hashing import Division, Rendezvous
from operator_app.sharding.leases import LABEL_ROLE, LeaseTimes, label_of

log = structlog.get_logger(__name__)

SELECTOR: Final = LABEL_ROLE
"""Label selector of the Leases to watch in the operator's namespace."""

OnChange = Callable[[int, ShardTransition], None]


class Elector:
    """Acquires, renews and releases shards for one replica.

    Reconciles in a draining shard are cancelled after ``grace_s`` seconds, so that none can prevent its release.
    ``on_change`` is called synchronously for every transition of a shard. ``clock`` gives seconds that go on while the
    process is stopped or the machine is suspended; ``now`` gives aware UTC, which is written into Leases for people.
    """

    def __init__(  # noqa: PLR0913 - each keyword is a choice of its own, of the application or of a test
        self,
        cluster: Cluster,
        *,
        namespace: str,
        replica: str,
        shards: int,
        times: LeaseTimes,
        grace_s: float,
        on_change: OnChange,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._grace_s = grace_s
        self._on_change = on_change
        self._clock = clock
        self._now = now
        self._division: Division = Rendezvous(shards)
        self._next_division: Division | None = None
        self._state = ElectionState(
            replica, shards, times, namespace=namespace, on_change=self._changed, clock=clock, rand=random.random
        )
        self._scopes: defaultdict[int, set[anyio.CancelScope]] = defaultdict(set)
        self._listed: set[str] = set()
        self._is_synced = False
        self._wake = anyio.Event()

    def apply_delta(self, delta: Delta) -> None:
        """Apply a delta of the watch of Leases."""
        now_mono = self._clock()
        match delta:
            case Changed():
                self._state.observe(delta.object, now_mono=now_mono)
                self._state.delivered(version_of(delta.object), now_mono=now_mono)
            case Deleted():
                self._state.observe_deletion(delta.object, now_mono=now_mono)
                self._state.delivered(version_of(delta.object), now_mono=now_mono)
            case Listed():
                self._apply_page(delta, now_mono)
        self._wake.set()

    def _apply_page(self, page: Listed, now_mono: float) -> None:
        if page.first:
            self._listed.clear()
        for obj in page.objects:
            self._listed.add(obj["metadata"]["name"])
            self._state.observe(obj, now_mono=now_mono)
        if page.last:
            self._end_list(self._listed, int(page.resource_version))
            self._is_synced = True

    def _end_list(self, listed: Collection[str], version: int) -> None:
        """Observe the absence of what a whole list of resourceVersion ``version`` does not have."""
        now_mono = self._clock()
        for known in self._state.known(up_to=version):
            if known["metadata"]["name"] not in listed:
                self._state.observe_deletion(known, now_mono=now_mono)
        self._state.delivered(version, now_mono=now_mono)

    @property
    def is_synced(self) -> bool:
        """Whether a whole list of the Leases was applied."""
        return self._is_synced

    @property
    def held(self) -> tuple[int, ...]:
        """The shards that this replica holds."""
        return self._state.held

    def token(self, tenant: str) -> FencingToken | None:
        """The token to start a reconcile for a tenant; None if its shard is not held here, or is draining."""
        return self._state.token(self.shard(tenant))

    def shard(self, tenant: str) -> int:
        """The shard of a tenant."""
        return self.division.shard_of(tenant)

    @property
    def division(self) -> Division:
        """How namespaces are divided into the shards that are held."""
        if self._next_division is not None and self._next_division.number == self._state.division:
            self._division, self._next_division = self._next_division, None
        return self._division

    def divide(self, division: Division) -> None:
        """Use another division into as many shards, once every shard of this one is released."""
        if division.number in (
            self.division.number,
            None if self._next_division is None else self._next_division.number,
        ):
            return
        log.info("shards_divided_anew", division=division.number)
        self._next_division = division
        self._state.divide(division.number)
        self._wake.set()

    @contextmanager
    def working(self, token: FencingToken) -> Generator[None]:
        """Run a reconcile with ``token``: every write checks it, and the reconcile is cancelled when the shard is lost.

        The shard is not released before the context ends; in a draining shard that is after ``grace_s`` at the latest.
        """
        scopes = self._scopes[token.shard]
        token.users += 1
        try:
            with anyio.CancelScope() as scope, fencing.holding(token):
                scopes.add(scope)
                yield
            if scope.cancelled_caught and token.is_valid:
                log.warning("reconcile_cancelled", shard=token.shard, epoch=token.epoch, grace_s=self._grace_s)
        finally:
            token.users -= 1
            scopes.discard(scope)
            if self._state.is_idle(token.shard):
                self._wake.set()

    def suspend(self) -> None:
        """Release each shard once no reconcile of it is in progress, and acquire none until ``resume``."""
        self._state.suspend()
        self._wake.set()

    def resume(self) -> None:
        """Take part again after ``suspend``."""
        self._state.resume()
        self._wake.set()

    def leave(self) -> None:
        """Release each shard once no reconcile of it is in progress, and acquire none any more."""
        self._state.leave()
        self._wake.set()

    async def run(self) -> None:
        """Join, and hold shards until ``leave`` was called and all are released.

        Join only once caches are synced; otherwise this replica is allotted shards that it can't serve. When cancelled,
        its Leases stay as they are, and other replicas wait until they expire.
        """
        self._state.begin()
        async with anyio.create_task_group() as requests:
            while not self._state.has_left:
                self._wake = anyio.Event()
                stamp = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                # One reading for both: what becomes due between two of them would be neither sent nor waited for.
                now_mono = self._clock()
                for request in self._state.due(now_mono=now_mono, stamp=stamp):
                    requests.start_soon(self._execute, request)
                self._limit_draining()
                await self._wait(self._state.next_due_mono(now_mono))

    def _limit_draining(self) -> None:
        """Set the deadline of reconciles in draining shards, where no further ones start."""
        deadline = anyio.current_time() + self._grace_s
        for shard in self._state.draining:
            for scope in self._scopes.get(shard, ()):
                scope.deadline = min(scope.deadline, deadline)

    async def _wait(self, next_due_mono: float | None) -> None:
        with anyio.move_on_after(None if next_due_mono is None else next_due_mono - self._clock()):
            await self._wake.wait()

    async def _execute(self, request: LeaseRequest) -> None:
        is_list, times = request.action == LeaseAction.LIST, self._state.times
        try:
            with anyio.fail_after(times.renew_deadline_s if is_list else times.request_timeout_s):
                await (self._list() if is_list else self._send(request))
        except (OperatorError, TimeoutError) as error:
            if not isinstance(error, ConflictError):
                message = str(error) or "no answer in time"
                log.warning("lease_request_failed", lease=request.name, action=request.action, error=message)
            retry_after_s = error.retry_after_s if isinstance(error, TransientError) else None
            self._state.failed(request, now_mono=self._clock(), retry_after_s=retry_after_s or 0.0)
        else:
            self._state.done(request, now_mono=self._clock())
        self._wake.set()

    async def _send(self, request: LeaseRequest) -> None:
        try:
            if request.body is not None:
                write = self._cluster.create if request.version is None else self._cluster.replace
                stored = await write(LEASE, request.body)
                self._state.observe(stored, now_mono=self._clock())
            elif request.lease is not None:
                key, version = Key(self._namespace, request.name), str(request.lease.version)
                await self._cluster.delete(LEASE, key, uid=request.lease.uid, resource_version=version)
        except (ConflictError, NotFoundError):
            await self._refresh(request)
            raise

    async def _refresh(self, request: LeaseRequest) -> None:
        """Read the Lease of a request and observe it, or its absence."""
        live = await self._cluster.get(LEASE, Key(self._namespace, request.name))
        now_mono = self._clock()
        if live is not None:
            # A Lease without its label is in no watch, but its name is ours: the next write restores the label.
            metadata = live["metadata"]
            metadata["labels"] = metadata.get("labels", {}) | {LABEL_ROLE: label_of(request.name)}
            self._state.observe(live, now_mono=now_mono)
            return
        for known in self._state.known():
            if known["metadata"]["name"] == request.name:
                self._state.observe_deletion(known, now_mono=now_mono)

    async def _list(self) -> None:
        """Observe all Leases by a consistent list, which is as good as what the watch would have delivered."""
        listed: set[str] = set()
        async with aclosing(self._cluster.list(LEASE, namespace=self._namespace, labels=SELECTOR)) as pages:
            async for page in pages:
                for obj in page.items:
                    listed.add(obj["metadata"]["name"])
                    self._state.observe(obj, now_mono=self._clock())
                if page.last:
                    self._end_list(listed, int(page.resource_version))

    def _changed(self, shard: int, transition: ShardTransition, epoch: int) -> None:
        write = log.warning if transition in (ShardTransition.LOST, ShardTransition.LAPSED) else log.info
        write(f"shard_{transition}", shard=shard, epoch=epoch, replica=self._state.identity)
        if transition != ShardTransition.TAKEN:
            for scope in self._scopes.pop(shard, ()):
                scope.cancel()
        self._on_change(shard, transition)
