# a program that is run by name, not a package
"""The cost of fairness: the lanes of ``WorkQueue`` against one plain FIFO, in the same run.

Run as ``python -m benchmarks.bench_workqueue [KEYS]`` (100,000 by default). Each row adds all keys, adds them all again
(what deduplication costs), then gets and finishes one after the other. Times are nanoseconds per key, the best of
three passes with the garbage collector off; ``x FIFO`` compares all calls for a key.
"""

import gc
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from operator_app.api.kinds import Key
from operator_app.controller.workqueue import Limits, Priority, WorkQueue

PASSES = 3


class Queue(Protocol):
    """What both queues have in common."""

    def add(self, key: Key, lane: str, priority: Priority, *, now: float) -> None:
        """Enqueue ``key``."""

    def get(self, now: float) -> Key | None:
        """The next key."""

    def done(self, key: Key, *, now: float) -> None:
        """The round is over."""


class Fifo:
    """The least that deduplicates: a deque and a set. No lanes, priorities, delays or in-flight bookkeeping."""

    def __init__(self) -> None:
        self._keys: deque[Key] = deque()
        self._known: set[Key] = set()

    def add(self, key: Key, lane: str, priority: Priority, *, now: float) -> None:  # noqa: ARG002  # it has one lane
        """Append ``key`` unless it waits already."""
        if key not in self._known:
            self._known.add(key)
            self._keys.append(key)

    def get(self, now: float) -> Key | None:  # noqa: ARG002  # a FIFO has no time
        """The key that waits longest."""
        return self._keys.popleft() if self._keys else None

    def done(self, key: Key, *, now: float) -> None:  # noqa: ARG002  # a FIFO has no time
        """Forget ``key``."""
        self._known.discard(key)


def measured(new_queue: Callable[[], Queue], keys: list[Key]) -> tuple[float, float, float]:
    """Nanoseconds per key of add, add again, and get with done."""
    queue = new_queue()
    gc.collect()
    gc.disable()
    started = time.perf_counter_ns()
    for key in keys:
        queue.add(key, key.namespace, Priority.REPAIR, now=0.0)
    added = time.perf_counter_ns()
    for key in keys:
        queue.add(key, key.namespace, Priority.REPAIR, now=1.0)
    again = time.perf_counter_ns()
    taken = 0
    while (next_key := queue.get(2.0)) is not None:
        queue.done(next_key, now=2.0)
        taken += 1
    finished = time.perf_counter_ns()
    gc.enable()
    if taken != len(keys):
        raise AssertionError(f"{taken} of {len(keys)} keys came back")
    return (added - started) / taken, (again - added) / taken, (finished - again) / taken


def main() -> None:
    """Print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    queues: dict[str, Callable[[], Queue]] = {"FIFO": Fifo, "lanes": lambda: WorkQueue(Limits(), rand=lambda: 0.5)}
    write = sys.stdout.write
    write(f"{count:,} keys; ns per key, best of {PASSES}\n")
    write(f"{'queue':<8}{'lanes':>7}{'add':>9}{'add again':>11}{'get+done':>11}{'total':>9}{'x FIFO':>9}\n")
    for lanes in (1, 1000):
        keys = [Key(f"team-{number % lanes}", f"proxy-{number}") for number in range(count)]
        fifo_total = 0.0
        for name, new_queue in queues.items():
            passes = [measured(new_queue, keys) for _ in range(PASSES)]
            add, again, work = (min(column) for column in zip(*passes, strict=True))
            total = add + again + work
            fifo_total = fifo_total or total
            write(f"{name:<8}{lanes:>7}{add:>9.0f}{again:>11.0f}{work:>11.0f}{total:>9.0f}{total / fifo_total:>9.1f}\n")


if __name__ == "__main__":
    main()
