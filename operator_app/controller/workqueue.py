"""Which key is reconciled next: one fair lane per tenant. Pure, in virtual time.

Guarantees
    - *Nothing is lost.* A key that was added is returned by ``get``, or it is in flight and runs again afterwards.
    - *One worker per key.* A key in flight is never returned; adding it then makes it run once more after this run.
    - *One entry per key.* Adds of the same key merge: the earliest time, the better priority, the latest lane.
    - *Fair between lanes.* A lane that can run is passed over for at most as many calls of ``get`` as the other
      runnable lanes weigh together (with L runnable lanes of weight 1: L - 1), whatever their depth. With W workers
      that never idle while a lane can run, and reconciles of at most D seconds, its turn comes within
      ``ceil(L / W) * D`` seconds. A lane that was empty or at its in-flight limit is queued last again, with one turn
      and no credit for the turns it did not use.
    - *Priorities, and no starvation.* In a lane, the lowest ``time + priority * age_promotes_after_s`` goes first. So a
      user's edit goes before a repair unless that has waited this much longer, and a key of priority P that is due
      since T is never preceded by one that is due later than ``T + P * age_promotes_after_s``.
    - *No burst of retries.* The n-th consecutive failure of a key delays it by
      ``rand() * min(backoff_cap_s, backoff_base_s * 2 ** (n - 1))`` seconds (full jitter), and from the
      ``slow_lane_after``-th on by ``backoff_cap_s`` exactly (the earlier delays have spread the keys, so a key
      that fails for ever costs one reconcile per cap). A ``requeue_after_s`` or a user's edit ends the delay earlier;
      a server's ``retry_after_s`` is waited for in any case.
    - *No leak.* Memory is proportional to the keys that are ready, delayed or in flight. An empty lane is removed, and
      cancelled or superseded timers never outnumber the pending ones by more than a constant.

Every call costs amortised O(log n) in the number of keys of a lane and in the number of lanes.

All times and ``now`` are seconds of one monotonic clock that the caller reads; ``now`` never decreases. What does not
belong here: I/O, the clock, tasks, waking up sleeping workers, metrics, and what a reconcile does.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

from operator_app.api.kinds import Key

T = TypeVar("T")

NEVER: Final = math.inf
"""The time of a reconcile that was not requested."""


class Priority(IntEnum):
    """Why a key is in the queue; a lower number goes first."""

    USER = 0
    """Somebody changed the declaration: a new generation, or a deletion."""
    REPAIR = 1
    """Something that belongs to the object changed, or a reconcile asked to be requeued."""
    RESYNC = 2
    """Nothing is known to be wrong; the periodic resync checks anyway."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a queue. Raises ``ValueError`` with one sentence when a value is out of range."""

    in_flight_per_lane: int = 4
    """Reconciles at the same time in a lane of weight 1, at least 1; a lane of weight W has W times as many."""
    age_promotes_after_s: float = 30.0
    """Waiting this long outweighs one step of priority; positive."""
    backoff_base_s: float = 0.5
    """Upper bound of the first retry's delay; positive."""
    backoff_cap_s: float = 300.0
    """Upper bound of every delay but a server's ``retry_after_s``; at least ``backoff_base_s``."""
    slow_lane_after: int = 12
    """From this many consecutive failures on, a retry waits for the whole cap and ranks with resyncs; at least 1."""

    def __post_init__(self) -> None:
        if self.in_flight_per_lane < 1:
            raise ValueError(f"in_flight_per_lane must be at least 1, not {self.in_flight_per_lane}")
        if not 0 < self.age_promotes_after_s < math.inf:
            raise ValueError(f"age_promotes_after_s must be positive and finite, not {self.age_promotes_after_s}")
        if not 0 < self.backoff_base_s <= self.backoff_cap_s < math.inf:
            raise ValueError(
                "backoff_base_s must be positive and at most backoff_cap_s, which must be finite, "
                f"not {self.backoff_base_s} and {self.backoff_cap_s}"
            )
        if self.slow_lane_after < 1:
            raise ValueError(f"slow_lane_after must be at least 1, not {self.slow_lane_after}")


class _Schedule(Generic[T]):
    """Items in the order of their times, first come first served among equals; an item has one time at most.

    A superseded or discarded node stays in the heap until it is at the top. Once there are more of these than valid
    ones plus a constant, the heap is rebuilt, which keeps every call amortised O(log n).
    """

    __slots__ = ("_heap", "_nodes", "_order")

    SLACK: Final = 8

    def __init__(self) -> None:
        self._nodes: dict[T, tuple[float, int, T]] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, item: T, at: float) -> None:
        """Schedule ``item`` for ``at`` alone; keeps its place among equals when it has that time already."""
        old = self._nodes.get(item)
        if old is not None and old[0] == at:
            return
        node = (at, next(self._order), item)
        self._nodes[item] = node
        heappush(self._heap, node)
        if old is not None:
            self._compact()

    def discard(self, item: T) -> None:
        """Remove ``item``, if it is scheduled."""
        if self._nodes.pop(item, None) is not None:
            self._compact()

    def next_at(self) -> float:
        """The earliest time; ``NEVER`` when empty."""
        heap = self._heap
        while heap and self._nodes.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        return heap[0][0] if heap else NEVER

    def pop(self) -> tuple[T, float]:
        """Remove the earliest item and return it with its time. Raises ``IndexError`` when empty."""
        self.next_at()
        at, _, item = heappop(self._heap)
        del self._nodes[item]
        self._compact()
        return item, at

    def peek(self) -> T:
        """The earliest item. Raises ``IndexError`` when empty."""
        self.next_at()
        return self._heap[0][2]

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._nodes) + self.SLACK:
            self._heap = list(self._nodes.values())
            heapify(self._heap)


@dataclass(eq=False, slots=True)
class _Entry:
    """One key: the requested reconcile (none while ``at`` is ``NEVER``) and the one in progress (``running_in``)."""

    key: Key
    lane: str
    # Nothing requested is the worst priority at no time, so that merging it with a request needs no special case.
    priority: Priority = Priority.RESYNC
    at: float = NEVER
    running_in: "_Lane | None" = None
    running_priority: Priority = Priority.RESYNC
    failures: int = 0
    backoff_until: float = -math.inf
    retry_not_before: float = -math.inf

    def request(self, priority: Priority, at: float) -> None:
        """Merge one more request for a reconcile into this entry."""
        self.priority = min(self.priority, priority)
        self.at = min(self.at, at)


@dataclass(eq=False, slots=True)
class _Lane:
    """One tenant's keys. Runnable: it has a ready key and is below its in-flight limit."""

    name: str
    weight: int
    gets_left: int
    in_flight: int = 0
    ready: tuple[_Schedule[_Entry], ...] = field(default_factory=lambda: tuple(_Schedule() for _ in Priority))
    """By priority; ordered by the time since which the key is due."""
    delayed: _Schedule[_Entry] = field(default_factory=_Schedule)

    def put(self, entry: _Entry, now: float) -> None:
        (self.ready[entry.priority] if entry.at <= now else self.delayed).put(entry, entry.at)

    def discard(self, entry: _Entry) -> None:
        self.ready[entry.priority].discard(entry)
        self.delayed.discard(entry)

    def release(self, now: float) -> None:
        """Make ready the keys that were delayed until ``now`` or earlier."""
        while self.delayed.next_at() <= now:
            entry, at = self.delayed.pop()
            self.ready[entry.priority].put(entry, at)

    def pop(self, age_promotes_after_s: float) -> _Entry:
        """Remove and return the most urgent entry: a step of priority weighs ``age_promotes_after_s`` of waiting."""
        urgency = [ready.next_at() + rank * age_promotes_after_s for rank, ready in enumerate(self.ready)]
        return self.ready[urgency.index(min(urgency))].pop()[0]

    @property
    def depth(self) -> int:
        return sum(map(len, self.ready))

    @property
    def ready_since(self) -> float:
        return min(ready.next_at() for ready in self.ready)


def _equal_weight(_lane: str) -> int:
    return 1


def _seconds(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of seconds and not negative, but is {value}")
    return value


class WorkQueue:
    """Keys in lanes; the module's docstring states what is guaranteed.

    ``rand`` returns floats in [0, 1). ``weight`` gives a lane's number of keys per turn (less than 1 counts as 1). It
    is called when a lane is created, so a changed weight is used from the next time that the lane was empty.

    A caller calls ``get`` until it returns ``None``, then sleeps until ``ready_at`` or until the next ``add``,
    ``add_at``, ``done`` or ``failed``, whichever comes first.
    """

    def __init__(
        self, limits: Limits, *, rand: Callable[[], float], weight: Callable[[str], int] = _equal_weight
    ) -> None:
        self._limits = limits
        self._rand = rand
        self._weight = weight
        self._entries: dict[Key, _Entry] = {}
        self._lanes: dict[str, _Lane] = {}
        self._ring: OrderedDict[_Lane, None] = OrderedDict()
        """The runnable lanes, in the order of their turns; the first one has the turn."""
        self._alarms: _Schedule[_Lane] = _Schedule()
        """The lanes below their in-flight limit that have delayed keys, by the earliest time of these."""
        self._in_flight = 0

    def add(self, key: Key, lane: str, priority: Priority, *, now: float) -> None:
        """Request a reconcile of ``key`` now, in ``lane``; a key that is in another lane moves.

        A ``USER`` request, for now or for later, ends the key's backoff and resets its failures: they belong to an
        earlier declaration. Other requests do not, or every event of a broken child would end the backoff. What a
        server asked for (``failed(retry_after_s=...)``) is waited for in any case.
        """
        self.add_at(key, lane, priority, at=now, now=now)

    def add_at(self, key: Key, lane: str, priority: Priority, *, at: float, now: float) -> None:
        """Request a reconcile of ``key`` at ``at``; an ``at`` that is not in the future means now.

        Raises ``ValueError`` if ``at`` is not finite.
        """
        if not math.isfinite(at):
            raise ValueError(f"{key} can't be requested for {at}: not a finite time")
        self._release_due(now)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(key, lane)
        if priority is Priority.USER:
            entry.failures = 0
            entry.backoff_until = -math.inf
        at = max(at, now, entry.backoff_until, entry.retry_not_before)

        if entry.running_in is not None:
            entry.lane = lane
            entry.request(priority, at)
            return
        if entry.lane == lane and entry.priority <= priority and entry.at <= at:
            return
        left = self._lanes.get(entry.lane)
        if left is not None:
            left.discard(entry)
        entry.lane = lane
        entry.request(priority, at)
        # The lane that the key leaves is updated last: where it is the same one, it must keep its place in the ring.
        self._place(entry, now)
        if left is not None and left.name != lane:
            self._update(left, now)

    def get(self, now: float) -> Key | None:
        """The next key, in flight from now until ``done`` or ``failed``; ``None`` when nothing can run at ``now``."""
        self._release_due(now)
        if not self._ring:
            return None
        lane = next(iter(self._ring))
        entry = lane.pop(self._limits.age_promotes_after_s)
        entry.running_in, entry.running_priority = lane, entry.priority
        entry.priority, entry.at = Priority.RESYNC, NEVER
        lane.in_flight += 1
        self._in_flight += 1
        lane.gets_left -= 1
        if lane.gets_left == 0:
            lane.gets_left = lane.weight
            self._ring.move_to_end(lane)
        self._update(lane, now)
        return entry.key

    def done(self, key: Key, *, now: float, requeue_after_s: float | None = None) -> None:
        """The reconcile succeeded: failures are reset, and the key is removed unless another reconcile is requested.

        ``requeue_after_s`` requests another one, which ranks no better than a repair: the user's edit was served.
        Raises ``ValueError`` if ``key`` is not in flight or the seconds are negative or not finite.
        """
        requeue_at = None if requeue_after_s is None else now + _seconds("requeue_after_s", requeue_after_s)
        entry, lane = self._finish(key, now)
        entry.failures = 0
        if requeue_at is not None:
            entry.request(max(entry.running_priority, Priority.REPAIR), requeue_at)
        if entry.at == NEVER:
            del self._entries[key]
        else:
            self._place(entry, now)
        self._update(lane, now)

    def failed(
        self, key: Key, *, now: float, retry_after_s: float | None = None, requeue_after_s: float | None = None
    ) -> float:
        """The reconcile failed: the key is delayed, by the seconds that are returned.

        The retry keeps the priority of the reconcile that failed (or a better one that was added meanwhile) until it is
        in the slow lane, where it ranks with resyncs. If the user changed the declaration during the reconcile, the
        failure is not about the new one: it does not count, and only the edit's own time and ``retry_after_s`` are
        waited for. ``requeue_after_s`` is as in ``done``; it may be earlier than the backoff, and is not earlier than
        ``retry_after_s``.

        Raises ``ValueError`` if ``key`` is not in flight or the seconds are negative or not finite.
        """
        retry_s = 0.0 if retry_after_s is None else _seconds("retry_after_s", retry_after_s)
        requeue_s = None if requeue_after_s is None else max(retry_s, _seconds("requeue_after_s", requeue_after_s))
        entry, lane = self._finish(key, now)
        edited = entry.priority is Priority.USER
        if edited:
            entry.failures = 0
            delay_s = max(retry_s, entry.at - now)
        else:
            entry.failures += 1
            delay_s = max(retry_s, self._backoff_s(entry.failures))
            is_slow = entry.failures >= self._limits.slow_lane_after
            entry.priority = min(entry.priority, Priority.RESYNC if is_slow else entry.running_priority)
        entry.retry_not_before = now + retry_s
        entry.backoff_until = entry.at = now + delay_s
        if requeue_s is not None:
            entry.request(max(entry.running_priority, Priority.REPAIR), now + requeue_s)
            delay_s = min(delay_s, requeue_s)
        self._place(entry, now)
        self._update(lane, now)
        return delay_s

    def ready_at(self, now: float) -> float | None:
        """The earliest time at which ``get`` returns a key, if nothing else is called before; ``now`` if it would now.

        ``None`` when there is no such time: the queue is empty, or all its keys wait for reconciles in progress.
        """
        if self._ring:
            return now
        at = self._alarms.next_at()
        return None if at == NEVER else at

    def __len__(self) -> int:
        """How many keys are known: ready, delayed or in flight."""
        return len(self._entries)

    @property
    def in_flight(self) -> int:
        """How many keys are being reconciled."""
        return self._in_flight

    def lanes(self) -> tuple[str, ...]:
        """The lanes with any key, in the order in which they were created."""
        return tuple(self._lanes)

    def depth(self, lane: str, *, now: float) -> int:
        """How many keys of a lane are due at ``now``; delayed ones do not count."""
        found = self._lane_at(lane, now)
        return 0 if found is None else found.depth

    def oldest_age_s(self, lane: str, *, now: float) -> float:
        """For how many seconds the longest-waiting key that ``depth`` counts has been due; 0 without any."""
        found = self._lane_at(lane, now)
        return 0.0 if found is None or not found.depth else now - found.ready_since

    def failures(self, key: Key) -> int:
        """The number of consecutive failures of a key; 0 for one that is not known."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.failures

    def _backoff_s(self, failures: int) -> float:
        limits = self._limits
        if failures >= limits.slow_lane_after:
            return limits.backoff_cap_s
        # The exponent is bounded because 2.0 ** 1024 raises OverflowError; the cap is reached long before.
        return self._rand() * min(limits.backoff_cap_s, limits.backoff_base_s * 2.0 ** min(failures - 1, 1000))

    def _finish(self, key: Key, now: float) -> tuple[_Entry, _Lane]:
        """End the reconcile of ``key``; the caller must update the lane that it ran in."""
        entry = self._entries.get(key)
        if entry is None or entry.running_in is None:
            raise ValueError(f"{key} is not in flight")
        self._release_due(now)
        lane, entry.running_in = entry.running_in, None
        lane.in_flight -= 1
        self._in_flight -= 1
        return entry, lane

    def _place(self, entry: _Entry, now: float) -> None:
        lane = self._lanes.get(entry.lane)
        if lane is None:
            weight = max(1, self._weight(entry.lane))
            lane = self._lanes[entry.lane] = _Lane(entry.lane, weight, gets_left=weight)
        lane.put(entry, now)
        self._update(lane, now)

    def _release_due(self, now: float) -> None:
        """Put lanes whose delayed keys have become due into the ring, in the order of these times."""
        while self._alarms.next_at() <= now:
            self._update(self._alarms.peek(), now)

    def _update(self, lane: _Lane, now: float) -> None:
        """Update the ring and the alarms after a change of a lane, and remove the lane when it is empty."""
        lane.release(now)
        below_limit = lane.in_flight < self._limits.in_flight_per_lane * lane.weight
        depth = lane.depth
        if below_limit and depth:
            self._ring.setdefault(lane)
        elif lane in self._ring:
            del self._ring[lane]
            lane.gets_left = lane.weight
        if below_limit and lane.delayed:
            self._alarms.put(lane, lane.delayed.next_at())
        else:
            self._alarms.discard(lane)
        if not (depth or lane.delayed or lane.in_flight):
            del self._lanes[lane.name]

    def _lane_at(self, name: str, now: float) -> _Lane | None:
        self._release_due(now)
        lane = self._lanes.get(name)
        if lane is not None:
            # A lane at its in-flight limit has no alarm, so keys that are due may still be among the delayed ones. It
            # is not in the ring either, so neither is to be updated.
            lane.release(now)
        return lane
