"""From wishes to rounds: workers that take keys from the queue, as many at a time as the API server can bear.

What a key is, who may work it and what a round does are the application's; which key is next is the queue's.
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
from operator_app.observability.metrics import Backlog, Metrics
from operator_app.results import ReconcileResult

log = structlog.get_logger(__name__)

Work = Callable[[Key, int], Awaitable[ReconcileResult | None]]
"""One round of a key that has failed that many times in a row; ``None`` when it was not this replica's to run."""

LOOK_AGAIN_S: Final = 1.0
"""How soon workers that backpressure keeps idle are noticed to be free again."""

_CRASHED: Final = "the round crashed; the log has the traceback"


class WorkerPool:
    """Runs rounds until it is stopped.

    At most ``workers`` rounds run at a time, fewer while the API server pushes back. A round that crashes costs its own
    key a failure and nobody else anything. ``weight`` tells how many ordinary tenants a tenant counts for.
    """

    def __init__(
        self,
        work: Work,
        limits: Limits,
        backpressure: Backpressure,
        metrics: Metrics,
        *,
        workers: int,
        rand: Callable[[], float],
        weight: Callable[[str], int] = lambda _tenant: 1,
    ) -> None:
        self._work = work
        self._queue = WorkQueue(limits, rand=rand, weight=weight)
        self._backpressure = backpressure
        self._metrics = metrics
        self._workers = workers
        self._news = anyio.Event()
        self.is_stopping = False

    def __len__(self) -> int:
        """How many keys are ready, delayed or in flight."""
        return len(self._queue)

    def backlogs(self) -> list[Backlog]:
        """What each tenant waits for; none for a tenant that waits for nothing."""
        now = time.monotonic()
        lanes = ((lane, self._queue.depth(lane, now=now)) for lane in self._queue.lanes())
        return [Backlog(lane, depth, self._queue.oldest_age_s(lane, now=now)) for lane, depth in lanes if depth]

    def enqueue(self, key: Key, lane: str, priority: Priority) -> None:
        """Want a round of ``key``, put off for as long as the API server pushes back on such rounds."""
        now = time.monotonic()
        at = now + self._backpressure.delay_s(priority, now_mono=now)
        self._queue.add_at(key, lane, priority, at=at, now=now)
        self._news.set()

    def stop(self) -> None:
        """Begin no further round."""
        self.is_stopping = True
        self._news.set()

    async def run(self, *, grace_s: float) -> None:
        """Run rounds; ``grace_s`` after ``stop`` those still in progress are cut off. Returns when all are over."""
        async with anyio.create_task_group() as rounds:
            while (key := await self._next()) is not None:
                rounds.start_soon(self._round, key)
            rounds.cancel_scope.deadline = anyio.current_time() + grace_s

    async def _next(self) -> Key | None:
        """The next key, once there is one and a worker for it; ``None`` when none is to be begun any more."""
        while not self.is_stopping:
            # A free worker comes first: a key keeps its fair place in the queue until somebody can work it.
            wake_at: float | None = None
            allowed = self._allowed()
            if self._queue.in_flight < allowed:
                key = self._queue.get(time.monotonic())
                if key is not None:
                    return key
                wake_at = self._queue.ready_at(time.monotonic())
            elif allowed < self._workers:
                wake_at = time.monotonic() + LOOK_AGAIN_S  # nobody tells when backpressure fades
            await self._rest(wake_at)
        return None

    def _allowed(self) -> int:
        """How many rounds may run now."""
        return max(1, int(self._workers * self._backpressure.share(now_mono=time.monotonic())))

    async def _rest(self, wake_at: float | None) -> None:
        """Sleep until there is news or ``wake_at`` has come."""
        self._news = anyio.Event()
        with anyio.move_on_after(None if wake_at is None else max(0.0, wake_at - time.monotonic())):
            await self._news.wait()

    async def _round(self, key: Key) -> None:
        begun_mono = time.monotonic()
        verdict: ReconcileResult | None = None
        try:
            verdict = await self._work(key, self._queue.failures(key))
        except Exception:
            log.exception("round_crashed", proxy=str(key))
            verdict = ReconcileResult(failure=OperatorError(_CRASHED))
        if verdict is not None:
            self._metrics.reconcile_seconds.observe(time.monotonic() - begun_mono)
            self._metrics.reconciles.labels("failed" if verdict.failure else "done").inc()
        try:
            self._settle(key, verdict or ReconcileResult())
        except Exception:
            log.exception("round_unsettled", proxy=str(key))
            with suppress(ValueError):  # the key is not in flight: so much was settled
                self._queue.failed(key, now=time.monotonic())
        self._news.set()

    def _settle(self, key: Key, verdict: ReconcileResult) -> None:
        now = time.monotonic()
        again_s = None if verdict.requeue_after_s is None else bounded_s(verdict.requeue_after_s)
        if verdict.failure is None:
            self._queue.done(key, now=now, requeue_after_s=again_s)
            return
        wish_s = verdict.failure.retry_after_s if isinstance(verdict.failure, TransientError) else None
        if wish_s is not None:
            # The server's wish and the backoff go before the round's: it is the server that is in trouble.
            again_s = None
        delay_s = self._queue.failed(key, now=now, retry_after_s=wish_s, requeue_after_s=again_s)
        log.info("round_failed", proxy=str(key), error=str(verdict.failure), retry_in_s=round(delay_s, 3))
