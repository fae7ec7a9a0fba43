"""A world in which replicas keep Leases, in virtual time: one compare-and-set store, slow and lossy ways to it.

Replicas have clocks of their own, with an offset and a rate. They can be crashed, paused as by SIGSTOP (their clock
goes on), cut off, and asked to leave. After every single event the world checks what must never happen: two replicas
with a valid right to write for one shard, or for two divisions of the tenants.
"""

import copy
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Final

from operator_app.api.kinds import Object
from operator_app.kube.fencing import FencingToken
from operator_app.sharding.leases import (
    ElectionState,
    LeaseAction,
    LeaseRequest,
    LeaseTimes,
    ShardTransition,
    shard_lease_name,
)

NAMESPACE: Final = "edge-system"
TIMES: Final = LeaseTimes(duration_s=15, renew_deadline_s=10, retry_period_s=2)


class Server:
    """Leases in a compare-and-set store, with one counter of versions."""

    def __init__(self) -> None:
        self.leases: dict[str, Object] = {}
        self._versions = itertools.count(1)

    def execute(self, request: LeaseRequest) -> tuple[str, Object] | None:
        """Commit an request: what a watch then shows (ADDED or MODIFIED, or DELETED); None for a lost race."""
        stored = self.leases.get(request.name)
        if (None if stored is None else int(stored["metadata"]["resourceVersion"])) != request.version:
            return None
        version = str(next(self._versions))
        if request.body is None:
            assert stored is not None
            del self.leases[request.name]
            gone = copy.deepcopy(stored)
            gone["metadata"]["resourceVersion"] = version
            return "DELETED", gone
        obj = copy.deepcopy(request.body)
        uid = f"uid-{version}" if stored is None else stored["metadata"]["uid"]
        obj["metadata"] |= {"uid": uid, "resourceVersion": version}
        self.leases[request.name] = obj
        return "MODIFIED", copy.deepcopy(obj)


class Replica:
    """One replica: a state, and a process around it that may stop, stand still, or lose its network."""

    def __init__(self, world: "World", name: str, shards: int, *, rate: float, offset: float) -> None:
        self._world = world
        self.name = name
        self.rate = rate
        self._offset = offset
        self.is_alive = True
        self.is_cut_off = False
        self.paused_until = 0.0
        self._watched_until = 0.0
        self._wakes = 0
        self.changes: list[tuple[float, int, ShardTransition]] = []
        self.holds: list[FencingToken] = []
        self.state = ElectionState(
            name, shards, TIMES, namespace=NAMESPACE, tell=self._notify, clock=self.clock, rand=world.random.random
        )

    def clock(self) -> float:
        """The replica's own time."""
        return self._offset + self.rate * self._world.now

    def start(self) -> None:
        """List, watch, and begin."""
        for obj in self._world.server.leases.values():
            self.state.observe(copy.deepcopy(obj), now=self.clock())
        self._world.watchers.append(self)
        self.state.begin()
        self.step()

    def step(self) -> None:
        """What the process does when it wakes up."""
        for request in self.state.due(now=self.clock(), stamp="2026-01-01T00:00:00.000000Z"):
            Trip(self._world, self, request).begin()
        self._wakes += 1
        this_wake, next_at = self._wakes, self.state.next_at(self.clock())

        def wake() -> None:
            if this_wake == self._wakes:
                self.step()

        if next_at is not None:
            self._world.at(self._world.now + (next_at - self.clock()) / self.rate + 1e-6, self.when_able(wake))

    def hear(self, event: str, obj: Object) -> None:
        """A watch event was sent; events arrive in their order, some time later."""
        self._watched_until = max(self._watched_until, self._world.now + self._world.delay_s())

        def arrive() -> None:
            take = self.state.forget if event == "DELETED" else self.state.observe
            take(obj, now=self.clock())
            self.step()

        self._world.at(self._watched_until, self.when_able(arrive))

    def when_able(self, act: Callable[[], None]) -> Callable[[], None]:
        """What a process does is put off while it stands still, and not done at all once it is dead."""

        def attempt() -> None:
            if not self.is_alive:
                return
            if self._world.now < self.paused_until:
                self._world.at(self.paused_until, attempt)
            else:
                act()

        return attempt

    def _notify(self, shard: int, change: ShardTransition, _epoch: int) -> None:
        self.changes.append((self._world.now, shard, change))
        token = self.state.token(shard)
        if change == ShardTransition.TAKEN and token is not None:
            self.holds.append(token)


class Trip:
    """One request on its way: it takes its time, may be lost there or back, and is given up after the time-out."""

    def __init__(self, world: "World", replica: Replica, request: LeaseRequest) -> None:
        self._world = world
        self._replica = replica
        self._errand = request
        self._is_over = False

    def begin(self) -> None:
        """Send it."""
        self._later(self._give_up, TIMES.request_timeout_s / self._replica.rate)
        if not self._world.is_lost(self._replica):
            # Once sent, it arrives whatever becomes of the sender.
            self._world.at(self._world.now + self._world.delay_s(), self._commit)

    def _commit(self) -> None:
        outcome = self._world.server.execute(self._errand)
        if outcome is not None:
            self._world.tell_watchers(*outcome)
        if not self._world.is_lost(self._replica):
            self._later(lambda: self._hear(outcome))

    def _hear(self, outcome: tuple[str, Object] | None) -> None:
        if self._is_over:
            return
        if outcome is None:
            self._look()
            self._end(self._replica.state.failed)
            return
        if self._errand.body is not None:
            self._replica.state.observe(outcome[1], now=self._replica.clock())
        if self._errand.action == LeaseAction.ACQUIRE:
            self._later(self._list)
        else:
            self._end(self._replica.state.done)

    def _look(self) -> None:
        live = self._world.server.leases.get(self._errand.name)
        state, now = self._replica.state, self._replica.clock()
        if live is not None:
            state.observe(copy.deepcopy(live), now=now)
            return
        for known in state.known():
            if known["metadata"]["name"] == self._errand.name:
                state.forget(known, now=now)

    def _list(self) -> None:
        """The list is made at the server some time after the answer to the write was there, and takes its way back."""
        whole = [copy.deepcopy(each) for each in self._world.server.leases.values()]
        self._later(lambda: self._survey(whole))

    def _survey(self, whole: list[Object]) -> None:
        for obj in whole:
            self._replica.state.observe(obj, now=self._replica.clock())
        self._end(self._replica.state.done)

    def _give_up(self) -> None:
        self._end(self._replica.state.failed)

    def _end(self, answer: Callable[..., None]) -> None:
        if not self._is_over:
            self._is_over = True
            answer(self._errand, now=self._replica.clock())
            self._replica.step()

    def _later(self, act: Callable[[], None], delay_s: float | None = None) -> None:
        """What the replica's process does itself; it may be paused or dead by then."""
        delay_s = self._world.delay_s() if delay_s is None else delay_s
        self._world.at(self._world.now + delay_s, self._replica.when_able(act))


class World:
    """Time, the network, and everybody in it."""

    def __init__(self, seed: int, *, longest_delay_s: float = 0.05, loss: float = 0.0) -> None:
        self.random = random.Random(seed)  # noqa: S311 - the same chance every time
        self.now = 0.0
        self.server = Server()
        self.replicas: list[Replica] = []
        self.watchers: list[Replica] = []
        self.longest_delay_s = longest_delay_s
        self.loss = loss
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def join(self, name: str, shards: int = 4, *, rate: float = 1.0, offset: float = 0.0) -> Replica:
        """Start a replica; under a name that was used before, the former process must be dead."""
        replica = Replica(self, name, shards, rate=rate, offset=offset)
        self.replicas.append(replica)
        replica.start()
        return replica

    def crash(self, replica: Replica) -> None:
        """``kill -9``: what it has sent already goes its way."""
        replica.is_alive = False
        self.watchers.remove(replica)

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Let something happen later."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), act))

    def run(self, seconds: float) -> None:
        """Let time pass, and check after every event what must never be."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
            self.check()
        self.now = until
        self.check()

    def check(self) -> None:
        """At no moment two holders of a shard, nor two divisions of the tenants, whoever is asleep or cut off."""
        valid = [(each, token) for each in self.replicas if each.is_alive for token in each.holds if token.is_valid]
        holders = [token.shard for _, token in valid]
        assert len(holders) == len(set(holders)), [(each.name, token.shard, token.epoch) for each, token in valid]
        assert len({each.state.shards for each, _ in valid}) <= 1

    def delay_s(self) -> float:
        """How long one way takes: mostly short, sometimes long."""
        return self.random.random() ** 4 * self.longest_delay_s

    def is_lost(self, replica: Replica) -> bool:
        """Whether a message of a replica gets lost."""
        return replica.is_cut_off or self.random.random() < self.loss

    def tell_watchers(self, event: str, obj: Object) -> None:
        """Every watch that is not cut off hears of a change."""
        for replica in self.watchers:
            if not replica.is_cut_off:
                replica.hear(event, copy.deepcopy(obj))

    def holders(self) -> dict[int, str]:
        """Who may write for which shard now."""
        return {
            token.shard: each.name for each in self.replicas if each.is_alive for token in each.holds if token.is_valid
        }

    def shares(self) -> list[int]:
        """How many shards each living replica holds, in ascending order."""
        names = list(self.holders().values())
        return sorted(names.count(each.name) for each in self.replicas if each.is_alive)

    def lease(self, shard: int) -> Object:
        """A shard's Lease as stored."""
        return self.server.leases[shard_lease_name(shard)]
