"""Keeping shards: sends what the Leases call for, and tells the application which tenants it may work.

The rules are in ``leases.py``; here are the requests, the clock and the waiting. One request about a Lease is under way
at a time, and requests about different Leases never wait for each other. What a taken or a lost shard means for rounds
belongs to the application.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Generator
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
from operator_app.sharding.hashing import shard_of
from operator_app.sharding.leases import (
    LABEL_ROLE,
    ElectionState,
    LeaseAction,
    LeaseRequest,
    LeaseTimes,
    ShardTransition,
)

log = structlog.get_logger(__name__)

SELECTOR: Final = LABEL_ROLE
"""Label selector of the Leases to watch in the operator's namespace."""

Told = Callable[[int, ShardTransition], None]


class Elector:
    """Takes, renews and gives back shards for one replica.

    Rounds of a shard that is to be given back are cut off after ``grace_s``, so that none can keep it for ever.
    ``on_change`` is told at once of every shard that is taken, released, lost or lapsed. ``clock`` gives seconds that
    go on while the process or the machine sleeps; ``now`` gives aware UTC, which is written into Leases for people.
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
        on_change: Told,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._grace_s = grace_s
        self._on_change = on_change
        self._clock = clock
        self._now = now
        self._state = ElectionState(
            replica, shards, times, namespace=namespace, tell=self._changed, clock=clock, rand=random.random
        )
        self._rounds: defaultdict[int, set[anyio.CancelScope]] = defaultdict(set)
        self._listing: set[str] = set()
        self._is_synced = False
        self._wake = anyio.Event()

    def apply_delta(self, delta: Delta) -> None:
        """Take over what a watch of the Leases has to say."""
        now = self._clock()
        match delta:
            case Changed():
                self._state.observe(delta.object, now=now)
            case Deleted():
                self._state.forget(delta.object, now=now)
            case Listed():
                self._take_page(delta, now)
        self._wake.set()

    def _take_page(self, page: Listed, now: float) -> None:
        if page.first:
            self._listing.clear()
        for obj in page.objects:
            self._listing.add(obj["metadata"]["name"])
            self._state.observe(obj, now=now)
        if page.last:
            for known in self._state.known(up_to=int(page.resource_version)):
                if known["metadata"]["name"] not in self._listing:
                    self._state.forget(known, now=now)
            self._is_synced = True

    @property
    def is_synced(self) -> bool:
        """Whether all Leases are known."""
        return self._is_synced

    @property
    def held(self) -> tuple[int, ...]:
        """The shards that this replica holds."""
        return self._state.held

    def token(self, tenant: str) -> FencingToken | None:
        """The right to begin a round of a tenant, where this replica has it."""
        return self._state.token(self.shard(tenant))

    def shard(self, tenant: str) -> int:
        """The shard of a tenant."""
        return shard_of(tenant, self._state.shards)

    @contextmanager
    def working(self, token: FencingToken) -> Generator[None]:
        """Work on the right of ``token``: it fences all writes, and when it is lost, work in progress is cut off.

        Until the work is over, its shard is not given back.
        """
        scopes = self._rounds[token.shard]
        token.users += 1
        try:
            with anyio.CancelScope() as scope, fencing.holding(token):
                scopes.add(scope)
                yield
            if scope.cancelled_caught and token.is_valid:
                log.warning("round_cut_off", shard=token.shard, epoch=token.epoch, grace_s=self._grace_s)
        finally:
            token.users -= 1
            scopes.discard(scope)
            if self._state.is_idle(token.shard):
                self._wake.set()

    def leave(self) -> None:
        """Give back every shard as soon as no round of it is in progress, and take none any more."""
        self._state.leave()
        self._wake.set()

    async def run(self) -> None:
        """Keep shards until ``leave`` was called and everything is given back.

        To be called once the replica is able to work: from now on it is a member, and gets its share. When cancelled,
        its Leases stay as they are, and others wait for their end.
        """
        self._state.begin()
        async with anyio.create_task_group() as requests:
            while not self._state.has_left:
                self._wake = anyio.Event()
                stamp = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                for request in self._state.due(now=self._clock(), stamp=stamp):
                    requests.start_soon(self._carry_out, request)
                self._limit_rounds()
                await self._rest()

    def _limit_rounds(self) -> None:
        """Give rounds of shards that are to be given back their time of grace; no further ones begin there."""
        deadline = anyio.current_time() + self._grace_s
        for shard in self._state.ending:
            for scope in self._rounds.get(shard, ()):
                scope.deadline = min(scope.deadline, deadline)

    async def _rest(self) -> None:
        now = self._clock()
        next_at = self._state.next_at(now)
        with anyio.move_on_after(None if next_at is None else next_at - now):
            await self._wake.wait()

    async def _carry_out(self, request: LeaseRequest) -> None:
        try:
            with anyio.fail_after(self._state.times.request_timeout_s):
                await self._send(request)
        except (OperatorError, TimeoutError) as error:
            if not isinstance(error, ConflictError):
                why = str(error) or "no answer in time"
                log.warning("lease_failed", lease=request.name, action=request.action, error=why)
            asked_s = error.retry_after_s if isinstance(error, TransientError) else None
            self._state.failed(request, now=self._clock(), asked_s=asked_s or 0.0)
        else:
            self._state.done(request, now=self._clock())
        self._wake.set()

    async def _send(self, request: LeaseRequest) -> None:
        try:
            if request.body is not None:
                write = self._cluster.create if request.version is None else self._cluster.replace
                stored = await write(LEASE, request.body)
                self._state.observe(stored, now=self._clock())
            elif request.of is not None:
                key, version = Key(self._namespace, request.name), str(request.of.version)
                await self._cluster.delete(LEASE, key, uid=request.of.uid, resource_version=version)
        except (ConflictError, NotFoundError):
            await self._look(request)
            raise
        if request.action == LeaseAction.ACQUIRE:
            await self._look_at_all()

    async def _look(self, request: LeaseRequest) -> None:
        """Bring what is known of one Lease up to date."""
        live = await self._cluster.get(LEASE, Key(self._namespace, request.name))
        now = self._clock()
        if live is not None:
            # Without its label no watch shows it, but it stands under our name: the next write labels it again.
            metadata = live["metadata"]
            metadata["labels"] = metadata.get("labels", {}) | {LABEL_ROLE: request.role.value}
            self._state.observe(live, now=now)
            return
        for known in self._state.known():
            if known["metadata"]["name"] == request.name:
                self._state.forget(known, now=now)

    async def _look_at_all(self) -> None:
        async with aclosing(self._cluster.list(LEASE, namespace=self._namespace, labels=SELECTOR)) as pages:
            async for page in pages:
                for obj in page.items:
                    self._state.observe(obj, now=self._clock())

    def _changed(self, shard: int, change: ShardTransition, epoch: int) -> None:
        tell = log.warning if change in (ShardTransition.LOST, ShardTransition.LAPSED) else log.info
        tell(f"shard_{change}", shard=shard, epoch=epoch, replica=self._state.me)
        if change != ShardTransition.TAKEN:
            for scope in self._rounds.pop(shard, ()):
                scope.cancel()
        self._on_change(shard, change)
