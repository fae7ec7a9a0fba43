"""The workers: reconcile the keys of the queue, as many at a time as settings and backpressure allow.

Which key is next belongs to ``workqueue``; what a reconcile does, and whether this replica may run it, to the caller.
"""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import anyio
import structlog

from operator_app.api.kinds import Key
from operator_app.controller.backpressure import Backpressure
from operator_app.controller.workqueue import Limits, Priority, WorkQueue
from operator_app.errors import OperatorError, TransientError, bounded_s
from operator_app.kube.turns import Turns
from operator_app.observability.metrics import Backlog, Metrics
from operator_app.results import ReconcileResult

log = structlog.get_logger(__name__)

Reconcile = Callable[[Key, int], Awaitable[ReconcileResult | None]]
"""Reconciles a key that has failed that many times in a row; ``None`` when this replica may not reconcile it."""

POLL_INTERVAL_S: Final = 1.0
"""How often the number of allowed workers is checked while backpressure keeps some of them idle."""

_CRASHED: Final = "the reconcile crashed; the log has the traceback"


class WorkerPool:
    """Runs reconciles until it is stopped.

    At most ``workers`` reconciles run at a time, fewer under backpressure. An exception in a reconcile counts as a
    failure of its own key and affects no other. ``weight`` returns how many ordinary tenants a tenant counts for.
    """

    def __init__(
        self,
        reconcile: Reconcile,
        limits: Limits,
        backpressure: Backpressure,
        metrics: Metrics,
        *,
        workers: int,
        rand: Callable[[], float],
        weight: Callable[[str], int] = lambda _tenant: 1,
    ) -> None:
        self._reconcile = reconcile
        self._queue = WorkQueue(limits, rand=rand, weight=weight)
        self._backpressure = backpressure
        self._metrics = metrics
        self._workers = workers
        self._changed = anyio.Event()
        self.is_stopping = False

    def __len__(self) -> int:
        """How many keys are ready, delayed or in flight."""
        return len(self._queue)

    async def backlogs(self) -> list[Backlog]:
        """The backlog of each tenant that has keys which could run now; of many, they are of slightly different times.

        Other tasks run in between.
        """
        found, turns = [], Turns()
        for lane in self._queue.lanes():
            now = time.monotonic()
            depth = self._queue.depth(lane, now=now)
            if depth:
                found.append(Backlog(lane, depth, self._queue.oldest_age_s(lane, now=now)))
            await turns.end_if_due()
        return found

    def enqueue(self, key: Key, lane: str, priority: Priority) -> None:
        """Add ``key`` to the queue, delayed by the backpressure on its priority. ``lane`` is its tenant."""
        now = time.monotonic()
        at = now + self._backpressure.delay_s(priority, now_mono=now)
        self._queue.add_at(key, lane, priority, at=at, now=now)
        self._changed.set()

    def stop(self) -> None:
        """Begin no further reconcile."""
        self.is_stopping = True
        self._changed.set()

    async def run(self, *, grace_s: float) -> None:
        """Run reconciles until ``stop``, and cancel those that are still in progress ``grace_s`` after it."""
        async with anyio.create_task_group() as reconciles:
            while (key := await self._next()) is not None:
                reconciles.start_soon(self._run_one, key)
            reconciles.cancel_scope.deadline = anyio.current_time() + grace_s

    async def _next(self) -> Key | None:
        """The next key, once there is one and a worker for it; ``None`` after ``stop``."""
        while not self.is_stopping:
            # A free worker comes first: a key keeps its fair place in the queue until it can be reconciled.
            wake_at: float | None = None
            allowed = self._allowed()
            if self._queue.in_flight < allowed:
                key = self._queue.get(time.monotonic())
                if key is not None:
                    return key
                wake_at = self._queue.ready_at(time.monotonic())
            elif allowed < self._workers:
                wake_at = time.monotonic() + POLL_INTERVAL_S  # there is no event when backpressure fades
            await self._wait(wake_at)
        return None

    def _allowed(self) -> int:
        """How many reconciles may run now."""
        return max(1, int(self._workers * self._backpressure.share(now_mono=time.monotonic())))

    async def _wait(self, wake_at: float | None) -> None:
        """Wait for a change of the queue, at most until ``wake_at``; ``None``: without a limit."""
        self._changed = anyio.Event()
        with anyio.move_on_after(None if wake_at is None else max(0.0, wake_at - time.monotonic())):
            await self._changed.wait()

    async def _run_one(self, key: Key) -> None:
        begun_mono = time.monotonic()
        result: ReconcileResult | None = None
        try:
            result = await self._reconcile(key, self._queue.failures(key))
        except Exception:
            log.exception("reconcile_crashed", proxy=str(key))
            result = ReconcileResult(failure=OperatorError(_CRASHED))
        if result is not None:
            self._metrics.reconcile_seconds.observe(time.monotonic() - begun_mono)
            self._metrics.reconciles.labels("failed" if result.failure else "done").inc()
        try:
            self._finish(key, result or ReconcileResult())
        except Exception:
            log.exception("reconcile_unfinished", proxy=str(key))
            with suppress(ValueError):  # the key is not in flight any more: that much was done
                self._queue.failed(key, now=time.monotonic())
        self._changed.set()

    def _finish(self, key: Key, result: ReconcileResult) -> None:
        now = time.monotonic()
        requeue_s = None if result.requeue_after_s is None else bounded_s(result.requeue_after_s)
        if result.failure is None:
            self._queue.done(key, now=now, requeue_after_s=requeue_s)
            return
        retry_s = result.failure.retry_after_s if isinstance(result.failure, TransientError) else None
        if retry_s is not None:
            # The failure is the server's: its Retry-After and the backoff are waited for, not the earlier requeue.
            requeue_s = None
        delay_s = self._queue.failed(key, now=now, retry_after_s=retry_s, requeue_after_s=requeue_s)
        log.info("reconcile_failed", proxy=str(key), error=str(result.failure), retry_in_s=round(delay_s, 3))
