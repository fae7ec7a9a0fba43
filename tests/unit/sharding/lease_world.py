"""A simulation of replicas that hold Leases, in virtual time: one compare-and-set store behind a slow, lossy network.

Replicas have clocks of their own, with an offset and a rate. They can be crashed, paused as by SIGSTOP (their clock
goes on), disconnected, and asked to leave. After every single event the simulation asserts that no two replicas have
valid fencing tokens of one shard, or of different numbers of shards.
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
    """Leases in a compare-and-set store with one counter of resourceVersions."""

    def __init__(self) -> None:
        self.leases: dict[str, Object] = {}
        self._versions = itertools.count(1)

    def execute(self, request: LeaseRequest) -> tuple[str, Object] | None:
        """Commit a request; the watch event that follows (MODIFIED or DELETED), or None for a conflict."""
        stored = self.leases.get(request.name)
        if (None if stored is None else int(stored["metadata"]["resourceVersion"])) != request.version:
            return None
        if request.body is None:
            assert stored is not None
            del self.leases[request.name]
            deleted = copy.deepcopy(stored)
            deleted["metadata"]["resourceVersion"] = str(next(self._versions))
            return "DELETED", deleted
        return self.put(copy.deepcopy(request.body))

    def put(self, obj: Object) -> tuple[str, Object]:
        """Store a Lease with a new version."""
        name, version = obj["metadata"]["name"], str(next(self._versions))
        uid = self.leases[name]["metadata"]["uid"] if name in self.leases else f"uid-{version}"
        obj["metadata"] |= {"uid": uid, "resourceVersion": version}
        self.leases[name] = obj
        return "MODIFIED", copy.deepcopy(obj)


class Replica:
    """One replica: an election state in a process that may crash, be paused, or lose its network."""

    def __init__(self, world: "World", name: str, shards: int, *, rate: float, offset: float) -> None:
        self._world = world
        self.name = name
        self.rate = rate
        self._offset = offset
        self.is_running = True
        self.is_disconnected = False
        self.is_unable = False
        """Whether every acquisition of this replica is lost, while it renews."""
        self.paused_until = 0.0
        self._watched_until = 0.0
        self._wakes = 0
        self.transitions: list[tuple[float, int, ShardTransition]] = []
        self.tokens: list[FencingToken] = []
        self.state = ElectionState(
            name,
            shards,
            TIMES,
            namespace=NAMESPACE,
            on_change=self._changed,
            clock=self.clock,
            rand=world.random.random,
        )

    def clock(self) -> float:
        """The replica's own time in seconds."""
        return self._offset + self.rate * self._world.now

    def start(self) -> None:
        """List the Leases, start to watch them, and join."""
        for obj in self._world.server.leases.values():
            self.state.observe(copy.deepcopy(obj), now_mono=self.clock())
        self._world.watchers.append(self)
        self.state.begin()
        self.step()

    def step(self) -> None:
        """Send what is due, and schedule the next wake-up."""
        for request in self.state.due(now_mono=self.clock(), stamp="2026-01-01T00:00:00.000000Z"):
            RoundTrip(self._world, self, request).begin()
        self._wakes += 1
        this_wake, next_due_mono = self._wakes, self.state.next_due_mono(self.clock())

        def wake() -> None:
            if this_wake == self._wakes:
                self.step()

        if next_due_mono is not None:
            self._world.at(self._world.now + (next_due_mono - self.clock()) / self.rate + 1e-6, self.when_able(wake))

    def deliver(self, event: str, obj: Object) -> None:
        """Send a watch event; events arrive in their order, some time later."""
        self._watched_until = max(self._watched_until, self._world.now + self._world.delay_s())

        def arrive() -> None:
            observe = self.state.observe_deletion if event == "DELETED" else self.state.observe
            observe(obj, now_mono=self.clock())
            self.step()

        self._world.at(self._watched_until, self.when_able(arrive))

    def when_able(self, act: Callable[[], None]) -> Callable[[], None]:
        """``act``, delayed while the process is paused, and dropped once it has crashed."""

        def attempt() -> None:
            if not self.is_running:
                return
            if self._world.now < self.paused_until:
                self._world.at(self.paused_until, attempt)
            else:
                act()

        return attempt

    def _changed(self, shard: int, transition: ShardTransition, _epoch: int) -> None:
        self.transitions.append((self._world.now, shard, transition))
        token = self.state.token(shard)
        if transition == ShardTransition.TAKEN and token is not None:
            self.tokens.append(token)


class RoundTrip:
    """One request and its answer: each takes time and may be lost; the sender gives up after the timeout."""

    def __init__(self, world: "World", replica: Replica, request: LeaseRequest) -> None:
        self._world = world
        self._replica = replica
        self._request = request
        self._is_over = False

    def begin(self) -> None:
        """Send the request."""
        self._later(self._time_out, TIMES.request_timeout_s / self._replica.rate)
        is_dropped = self._replica.is_unable and self._request.action == LeaseAction.ACQUIRE
        if not is_dropped and not self._world.is_lost(self._replica):
            # Once sent, it arrives even if the sender crashes.
            self._world.at(self._world.now + self._world.delay_s(), self._commit)

    def _commit(self) -> None:
        outcome = self._world.server.execute(self._request)
        if outcome is not None:
            self._world.notify_watchers(*outcome)
        if not self._world.is_lost(self._replica):
            self._later(lambda: self._answered(outcome))

    def _answered(self, outcome: tuple[str, Object] | None) -> None:
        if self._is_over:
            return
        if outcome is None:
            self._refresh()
            self._end(self._replica.state.failed)
            return
        if self._request.body is not None:
            self._replica.state.observe(outcome[1], now_mono=self._replica.clock())
        if self._request.action == LeaseAction.ACQUIRE:
            self._later(self._list)
        else:
            self._end(self._replica.state.done)

    def _refresh(self) -> None:
        live = self._world.server.leases.get(self._request.name)
        state, now = self._replica.state, self._replica.clock()
        if live is not None:
            state.observe(copy.deepcopy(live), now_mono=now)
            return
        for known in state.known():
            if known["metadata"]["name"] == self._request.name:
                state.observe_deletion(known, now_mono=now)

    def _list(self) -> None:
        """The server makes the list some time after its answer to the write, and the list takes time to arrive."""
        items = [copy.deepcopy(each) for each in self._world.server.leases.values()]
        self._later(lambda: self._observe_all(items))

    def _observe_all(self, items: list[Object]) -> None:
        for obj in items:
            self._replica.state.observe(obj, now_mono=self._replica.clock())
        self._end(self._replica.state.done)

    def _time_out(self) -> None:
        self._end(self._replica.state.failed)

    def _end(self, report: Callable[..., None]) -> None:
        if not self._is_over:
            self._is_over = True
            report(self._request, now_mono=self._replica.clock())
            self._replica.step()

    def _later(self, act: Callable[[], None], delay_s: float | None = None) -> None:
        """Schedule something that the replica's process does, if it has not crashed by then."""
        delay_s = self._world.delay_s() if delay_s is None else delay_s
        self._world.at(self._world.now + delay_s, self._replica.when_able(act))


class World:
    """Virtual time, the network, the server and all replicas."""

    def __init__(self, seed: int, *, longest_delay_s: float = 0.05, loss: float = 0.0) -> None:
        self.random = random.Random(seed)  # noqa: S311 - reproducible
        self.now = 0.0
        self.server = Server()
        self.replicas: list[Replica] = []
        self.watchers: list[Replica] = []
        self.longest_delay_s = longest_delay_s
        self.loss = loss
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def join(
        self, name: str, shards: int = 4, *, rate: float = 1.0, offset: float = 0.0, is_unable: bool = False
    ) -> Replica:
        """Start a replica; the previous process of the same name must have crashed."""
        replica = Replica(self, name, shards, rate=rate, offset=offset)
        replica.is_unable = is_unable
        self.replicas.append(replica)
        replica.start()
        return replica

    def crash(self, replica: Replica) -> None:
        """End the process as by ``kill -9``; requests that were sent still arrive."""
        replica.is_running = False
        self.watchers.remove(replica)

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Schedule ``act`` for the time ``when``."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), act))

    def run(self, seconds: float) -> None:
        """Let virtual time pass, and check the invariants after every event."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
            self.check()
        self.now = until
        self.check()

    def check(self) -> None:
        """Never two holders of a shard, nor holders with different numbers of shards, paused ones included."""
        valid = [(each, token) for each in self.replicas if each.is_running for token in each.tokens if token.is_valid]
        holders = [token.shard for _, token in valid]
        assert len(holders) == len(set(holders)), [(each.name, token.shard, token.epoch) for each, token in valid]
        assert len({each.state.shards for each, _ in valid}) <= 1

    def delay_s(self) -> float:
        """The network delay of one message: mostly short, sometimes long."""
        return self.random.random() ** 4 * self.longest_delay_s

    def is_lost(self, replica: Replica) -> bool:
        """Whether a message from or to a replica is lost."""
        return replica.is_disconnected or self.random.random() < self.loss

    def edit(self, name: str, change: Callable[[Object], object]) -> None:
        """Somebody edits a Lease by hand: the field manager of the edited duration is theirs."""
        obj = copy.deepcopy(self.server.leases[name])
        before = obj["spec"].get("leaseDurationSeconds")
        change(obj)
        if obj["spec"].get("leaseDurationSeconds") != before:
            fields: Object = {"f:spec": {"f:leaseDurationSeconds": {}}}
            obj["metadata"]["managedFields"] = [{"manager": "kubectl-edit", "fieldsV1": fields}]
        self.notify_watchers(*self.server.put(obj))

    def notify_watchers(self, event: str, obj: Object) -> None:
        """Send a watch event to every replica that is connected."""
        for replica in self.watchers:
            if not replica.is_disconnected:
                replica.deliver(event, copy.deepcopy(obj))

    def holders(self) -> dict[int, str]:
        """The replicas with a valid token, by shard."""
        return {
            token.shard: each.name
            for each in self.replicas
            if each.is_running
            for token in each.tokens
            if token.is_valid
        }

    def shares(self) -> list[int]:
        """How many shards each running replica holds, in ascending order."""
        names = list(self.holders().values())
        return sorted(names.count(each.name) for each in self.replicas if each.is_running)

    def lease(self, shard: int) -> Object:
        """A shard's Lease as stored."""
        return self.server.leases[shard_lease_name(shard)]
