"""A simulation of replicas that hold Leases, in virtual time: one compare-and-set store behind a slow, lossy network.

Replicas have clocks of their own, with an offset and a rate. They can be crashed, paused as by SIGSTOP (their clock
goes on), disconnected, and asked to leave, and each kind of request can be refused. Those of the former format may run
beside those of today's. After every single event the simulation asserts that no two replicas have valid fencing tokens
of one shard, or of different divisions.
"""

import copy
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

from operator_app.api.kinds import Object
from operator_app.kube.fencing import FencingToken
from operator_app.sharding.election import ElectionState, LeaseRequest, ShardTransition
from operator_app.sharding.leases import LABEL_ROLE, LeaseTimes, shard_lease_name
from tests.unit.sharding import former_format
from tests.unit.sharding.former_format import FormerElectionState

NAMESPACE: Final = "edge-system"
TIMES: Final = LeaseTimes(duration_s=15, renew_deadline_s=10, retry_period_s=2)

Sent = LeaseRequest | former_format.LeaseRequest


class Server:
    """Leases in a compare-and-set store with one counter of resourceVersions."""

    def __init__(self) -> None:
        self.leases: dict[str, Object] = {}
        self.version = 0
        self.writes: Counter[str] = Counter()
        """How many requests of each action were stored."""

    def execute(self, request: Sent) -> tuple[str, Object] | None:
        """Commit a request; the watch event that follows (MODIFIED or DELETED), or None for a conflict."""
        stored = self.leases.get(request.name)
        if (None if stored is None else int(stored["metadata"]["resourceVersion"])) != request.version:
            return None
        self.writes[request.action.value] += 1
        if request.body is None:
            return self.delete(request.name)
        return self.put(copy.deepcopy(request.body))

    def delete(self, name: str) -> tuple[str, Object]:
        """Delete a Lease."""
        deleted = copy.deepcopy(self.leases.pop(name))
        deleted["metadata"]["resourceVersion"] = self._next_version()
        return "DELETED", deleted

    def put(self, obj: Object) -> tuple[str, Object]:
        """Store a Lease with a new version; without its label, it is deleted for those that watch."""
        name, version = obj["metadata"]["name"], self._next_version()
        uid = self.leases[name]["metadata"]["uid"] if name in self.leases else f"uid-{version}"
        obj["metadata"] |= {"uid": uid, "resourceVersion": version}
        former = self.leases.get(name, obj)
        self.leases[name] = obj
        if LABEL_ROLE in obj["metadata"].get("labels", {}):
            return "MODIFIED", copy.deepcopy(obj)
        shown = copy.deepcopy(former)
        shown["metadata"]["resourceVersion"] = version
        return "DELETED", shown

    def listed(self) -> list[Object]:
        """What a list by label returns."""
        labelled = (each for each in self.leases.values() if LABEL_ROLE in each["metadata"].get("labels", {}))
        return copy.deepcopy(list(labelled))

    def _next_version(self) -> str:
        self.version += 1
        return str(self.version)


class Replica:
    """One replica: an election state in a process that may crash, be paused, or lose its network."""

    def __init__(
        self, world: "World", name: str, shards: int, *, rate: float, offset: float, is_former: bool = False
    ) -> None:
        self._world = world
        self.name = name
        self.rate = rate
        self._offset = offset
        self.is_former = is_former
        self.is_running = True
        self._is_disconnected = self._is_watch_dead = False
        self._undelivered: list[tuple[str, Object]] = []
        self.refused: set[str] = set()
        """Actions whose requests are lost."""
        self.paused_until = 0.0
        self._watched_until = 0.0
        self._wakes = 0
        self.transitions: list[tuple[float, int, ShardTransition]] = []
        self.tokens: list[FencingToken] = []
        self.divisions: dict[FencingToken, int] = {}
        """The division of which the shard of a token is one."""
        kind = FormerElectionState if is_former else ElectionState
        self.state = kind(
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
        for obj in self._world.server.listed():
            self.state.observe(obj, now_mono=self.clock())
        self.observed_up_to(self._world.server.version)
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

    def observed_up_to(self, version: int) -> None:
        """Tell the state that everything up to a version was delivered."""
        if isinstance(self.state, ElectionState):
            self.state.delivered(version, now_mono=self.clock())

    @property
    def is_disconnected(self) -> bool:
        """Whether nothing arrives from here or there."""
        return self._is_disconnected

    @is_disconnected.setter
    def is_disconnected(self, value: bool) -> None:
        self._is_disconnected = value
        self._resume_watch()

    @property
    def is_watch_dead(self) -> bool:
        """Whether the watch delivers nothing, while requests are answered."""
        return self._is_watch_dead

    @is_watch_dead.setter
    def is_watch_dead(self, value: bool) -> None:
        self._is_watch_dead = value
        self._resume_watch()

    def _resume_watch(self) -> None:
        if not (self._is_disconnected or self._is_watch_dead):
            undelivered, self._undelivered = self._undelivered, []
            for event, obj in undelivered:
                self.deliver(event, obj)

    def deliver(self, event: str, obj: Object) -> None:
        """Send a watch event; events arrive in their order, some time later, and after an interruption."""
        if self._is_disconnected or self._is_watch_dead:
            self._undelivered.append((event, obj))
            return
        self._watched_until = max(self._watched_until, self._world.now + self._world.delay_s())

        def arrive() -> None:
            observe = self.state.observe_deletion if event == "DELETED" else self.state.observe
            observe(obj, now_mono=self.clock())
            self.observed_up_to(int(obj["metadata"]["resourceVersion"]))
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
            self.divisions[token] = self.division

    @property
    def division(self) -> int:
        """The number of the division that the replica uses."""
        return self.state.division if isinstance(self.state, ElectionState) else self.state.shards


class RoundTrip:
    """One request and its answer: each takes time and may be lost; the sender gives up after the timeout."""

    def __init__(self, world: "World", replica: Replica, request: Sent) -> None:
        self._world = world
        self._replica = replica
        self._request = request
        self._action = request.action.value
        self._is_over = False

    def begin(self) -> None:
        """Send the request."""
        timeout_s = TIMES.renew_deadline_s if self._action == "list" else TIMES.request_timeout_s
        self._later(self._time_out, timeout_s / self._replica.rate)
        if self._action not in self._replica.refused and not self._world.is_lost(self._replica):
            # Once sent, it arrives even if the sender crashes.
            self._world.at(self._world.now + self._world.delay_s(), self._commit)

    def _commit(self) -> None:
        if self._action == "list":
            self._list()
            return
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
        if self._action == "acquire" and isinstance(self._replica.state, FormerElectionState):
            self._later(self._list)
        else:
            self._end(self._replica.state.done)

    def _refresh(self) -> None:
        """As the elector does: a Lease without its label is found by its name."""
        live = copy.deepcopy(self._world.server.leases.get(self._request.name))
        state, now = self._replica.state, self._replica.clock()
        if live is not None:
            label = "replica" if "-replica-" in self._request.name else "shard"
            live["metadata"]["labels"] = live["metadata"].get("labels", {}) | {LABEL_ROLE: label}
            state.observe(live, now_mono=now)
            return
        for known in state.known():
            if known["metadata"]["name"] == self._request.name:
                state.observe_deletion(known, now_mono=now)

    def _list(self) -> None:
        """The server makes the list, which takes time to arrive, or is lost."""
        items, version = self._world.server.listed(), self._world.server.version
        if not self._world.is_lost(self._replica):
            self._later(lambda: self._observe_all(items, version))

    def _observe_all(self, items: list[Object], version: int) -> None:
        if self._is_over:
            return
        state, now = self._replica.state, self._replica.clock()
        for obj in items:
            state.observe(obj, now_mono=now)
        if isinstance(state, ElectionState):
            listed = {each["metadata"]["name"] for each in items}
            for known in state.known(up_to=version):
                if known["metadata"]["name"] not in listed:
                    state.observe_deletion(known, now_mono=now)
            state.delivered(version, now_mono=now)
        self._end(state.done)

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
        self,
        name: str,
        shards: int = 4,
        *,
        rate: float = 1.0,
        offset: float = 0.0,
        refused: Collection[str] = (),
        is_former: bool = False,
    ) -> Replica:
        """Start a replica; the previous process of the same name must have crashed."""
        replica = Replica(self, name, shards, rate=rate, offset=offset, is_former=is_former)
        replica.refused.update(refused)
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
        """Never two holders of a shard, nor holders with different divisions, paused ones included."""
        valid = [(each, token) for each in self.replicas if each.is_running for token in each.tokens if token.is_valid]
        holders = [token.shard for _, token in valid]
        assert len(holders) == len(set(holders)), [(each.name, token.shard, token.epoch) for each, token in valid]
        assert len({each.divisions.get(token, each.division) for each, token in valid}) <= 1

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
        """Send a watch event to every replica."""
        for replica in self.watchers:
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
