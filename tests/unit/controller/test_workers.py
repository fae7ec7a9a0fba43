"""The pool: workers, crashes, and how it stops."""

import math
import time
from typing import Any

import anyio
import pytest

from operator_app.api.kinds import Key
from operator_app.controller import workers
from operator_app.controller.backpressure import Backpressure
from operator_app.controller.workers import Reconcile, WorkerPool
from operator_app.controller.workqueue import Limits, Priority
from operator_app.errors import LONGEST_WAIT_S, OperatorError, ThrottledError, TransientError
from operator_app.observability.metrics import Metrics
from operator_app.results import DONE, ReconcileResult

pytestmark = pytest.mark.anyio


def pool(
    reconcile: Reconcile, *, workers: int = 4, backoff_s: float = 0.001, backpressure: Backpressure | None = None
) -> WorkerPool:
    """A pool that runs ``reconcile``, with quick retries."""
    limits = Limits(in_flight_per_lane=workers, backoff_base_s=backoff_s, backoff_cap_s=backoff_s)
    return WorkerPool(reconcile, limits, backpressure or Backpressure(), Metrics(), workers=workers, rand=lambda: 1.0)


async def test_a_reconcile_that_crashes_is_retried_and_affects_no_other_key() -> None:
    """An exception is a failure of its key; the other key is reconciled in the meantime."""
    seen: list[tuple[Key, int]] = []

    async def reconcile(key: Key, failures: int) -> ReconcileResult:
        await anyio.lowlevel.checkpoint()
        seen.append((key, failures))
        if key.name == "broken" and failures < 2:
            raise ZeroDivisionError
        if len(seen) == 4:
            under_test.stop()
        return DONE

    under_test = pool(reconcile)
    under_test.enqueue(Key("a", "broken"), "a", Priority.USER)
    under_test.enqueue(Key("b", "sound"), "b", Priority.USER)
    with anyio.fail_after(60):
        await under_test.run(grace_s=1)
    assert sorted(seen) == [(Key("a", "broken"), each) for each in range(3)] + [(Key("b", "sound"), 0)]
    assert len(under_test) == 0


async def most_at_a_time(keys: int, **options: Any) -> tuple[int, int]:
    """How many reconciles of so many keys, each of another tenant, ran at the same time, and how many in all."""
    running = most = done = 0

    async def reconcile(_key: Key, _failures: int) -> ReconcileResult:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        running -= 1
        done += 1
        if done == keys:
            under_test.stop()
        return DONE

    under_test = pool(reconcile, **options)
    for number in range(keys):
        under_test.enqueue(Key(f"ns-{number}", "web"), f"ns-{number}", Priority.USER)
    with anyio.fail_after(60):
        await under_test.run(grace_s=1)
    return most, done


async def test_no_more_reconciles_than_workers() -> None:
    """Keys wait in the queue until a worker is free."""
    assert await most_at_a_time(9, workers=3) == (3, 9)


async def test_stopping_lets_a_reconcile_finish_and_begins_no_other() -> None:
    """The reconcile in progress ends by itself; keys in the queue stay there."""
    finished: list[Key] = []

    async def reconcile(key: Key, _failures: int) -> ReconcileResult:
        under_test.stop()
        await anyio.lowlevel.checkpoint()
        finished.append(key)
        return DONE

    under_test = pool(reconcile, workers=1)
    under_test.enqueue(Key("a", "first"), "a", Priority.USER)
    under_test.enqueue(Key("b", "second"), "b", Priority.USER)
    with anyio.fail_after(60):
        await under_test.run(grace_s=1)
    assert finished == [Key("a", "first")]
    assert len(under_test) == 1


async def test_a_reconcile_that_never_ends_is_cancelled_after_the_grace_time() -> None:
    """Shutdown is bounded, whatever a reconcile waits for."""

    async def reconcile(_key: Key, _failures: int) -> ReconcileResult:
        under_test.stop()
        await anyio.sleep_forever()
        return DONE

    under_test = pool(reconcile)
    under_test.enqueue(Key("a", "stuck"), "a", Priority.USER)
    with anyio.fail_after(60):
        await under_test.run(grace_s=0.01)


async def test_a_key_of_another_replica_is_removed() -> None:
    """The holder of the shard reconciles the key; nothing of it is kept here."""

    async def reconcile(_key: Key, _failures: int) -> None:
        under_test.stop()

    under_test = pool(reconcile)
    under_test.enqueue(Key("a", "web"), "a", Priority.USER)
    with anyio.fail_after(60):
        await under_test.run(grace_s=1)
    assert len(under_test) == 0


async def test_retry_after_is_waited_for() -> None:
    """A Retry-After that is longer than the backoff is waited for."""

    async def reconcile(key: Key, _failures: int) -> ReconcileResult:
        under_test.stop()
        return ReconcileResult(failure=ThrottledError("slow down", key=key, retry_after_s=3600))

    under_test = pool(reconcile)
    key = Key("a", "web")
    under_test.enqueue(key, "a", Priority.USER)
    with anyio.fail_after(60):
        await under_test.run(grace_s=1)
    assert len(under_test) == 1


@pytest.mark.parametrize("asked_s", [-1.0, math.inf, -math.inf, math.nan, 1e300])
@pytest.mark.parametrize("is_failure", [True, False])
async def test_an_invalid_delay_ends_nothing(asked_s: float, is_failure: bool) -> None:  # noqa: FBT001  # pytest passes it by name
    """Whatever a server or a registry asks for, the key stays in the queue and the next one is reconciled."""
    failure = TransientError("odd", retry_after_s=asked_s) if is_failure else None
    seen: set[str] = set()

    async def reconcile(key: Key, _failures: int) -> ReconcileResult:
        await anyio.lowlevel.checkpoint()
        seen.add(key.name)
        if key.name == "odd":
            under_test.enqueue(Key("b", "next"), "b", Priority.USER)
            return ReconcileResult(requeue_after_s=None if is_failure else asked_s, failure=failure)
        under_test.stop()
        return DONE

    under_test = pool(reconcile, workers=1)
    under_test.enqueue(Key("a", "odd"), "a", Priority.USER)
    with anyio.fail_after(60):
        await under_test.run(grace_s=1)
    assert seen == {"odd", "next"}
    assert len(under_test) == 1


async def test_a_result_that_can_not_be_handled_is_a_failure_of_its_key() -> None:
    """A plugin may return an invalid result; its key is retried and occupies no worker."""
    seen: list[int] = []

    async def reconcile(key: Key, failures: int) -> ReconcileResult:
        await anyio.lowlevel.checkpoint()
        seen.append(failures)
        if failures == 2:
            under_test.stop()
            return DONE
        nonsense = TransientError("nonsense", key=key)
        nonsense.retry_after_s = "soon"  # type: ignore[assignment]
        return ReconcileResult(failure=nonsense)

    under_test = pool(reconcile, workers=1)
    under_test.enqueue(Key("a", "web"), "a", Priority.USER)
    with anyio.fail_after(60):
        await under_test.run(grace_s=1)
    assert seen == [0, 1, 2]
    assert len(under_test) == 0


@pytest.mark.parametrize("failure", [OperatorError("something else"), ThrottledError("busy", retry_after_s=3600)])
async def test_a_failure_does_not_drop_the_requeue(failure: OperatorError) -> None:
    """A requeue that is due before the backoff is not delayed by a failure, unless a server asked for that."""
    runs = 0
    requeued = anyio.Event()

    async def reconcile(_key: Key, _failures: int) -> ReconcileResult:
        nonlocal runs
        runs += 1
        await anyio.lowlevel.checkpoint()
        if runs == 2:
            requeued.set()
        return ReconcileResult(requeue_after_s=0.001, failure=failure)

    under_test = pool(reconcile, backoff_s=60)
    under_test.enqueue(Key("a", "web"), "a", Priority.USER)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: under_test.run(grace_s=1))
        with anyio.move_on_after(5 if type(failure) is OperatorError else 0.05):
            await requeued.wait()
        under_test.stop()
    assert requeued.is_set() == (type(failure) is OperatorError)


class Fading(Backpressure):
    """Backpressure that ends when the test says so."""

    least = 0.25

    def share(self, *, now_mono: float) -> float:  # noqa: ARG002  # no clock here
        """The share of workers that the test allows."""
        return self.least


async def test_idle_workers_resume_when_backpressure_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow reconcile keeps others waiting for no longer than the backpressure lasts."""
    monkeypatch.setattr(workers, "POLL_INTERVAL_S", 0.001, raising=False)
    backpressure, is_over = Fading(), anyio.Event()

    async def reconcile(key: Key, _failures: int) -> ReconcileResult:
        if key.name == "slow":
            backpressure.least = 1.0
            await is_over.wait()
        else:
            is_over.set()
            under_test.stop()
        return DONE

    under_test = pool(reconcile, workers=4, backpressure=backpressure)
    under_test.enqueue(Key("a", "slow"), "a", Priority.USER)
    under_test.enqueue(Key("b", "edit"), "b", Priority.USER)
    with anyio.fail_after(60):
        await under_test.run(grace_s=1)
    assert is_over.is_set()


async def test_the_grace_time_begins_although_all_workers_are_busy() -> None:
    """Stopping needs no free worker."""
    begun = anyio.Event()

    async def reconcile(_key: Key, _failures: int) -> ReconcileResult:
        begun.set()
        await anyio.sleep_forever()
        return DONE

    under_test = pool(reconcile, workers=1)
    under_test.enqueue(Key("a", "stuck"), "a", Priority.USER)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: under_test.run(grace_s=0.01))
            await begun.wait()
            await anyio.wait_all_tasks_blocked()
            under_test.stop()


async def test_under_full_backpressure_one_reconcile_runs_at_a_time() -> None:
    """However many workers there are, and however many tenants wait."""
    backpressure = Fading()
    backpressure.least = 0.1
    assert await most_at_a_time(4, workers=10, backpressure=backpressure) == (1, 4)


@pytest.mark.parametrize("asked_s", [math.inf, math.nan, 1e12, -5.0])
async def test_a_requeue_that_nobody_can_wait_for_is_no_failure_and_comes_within_the_hour(asked_s: float) -> None:
    """A delay comes from a plugin's answer: it is bounded, and does not count as a failure of the key."""

    async def reconcile(_key: Key, _failures: int) -> ReconcileResult:
        await anyio.lowlevel.checkpoint()
        under_test.stop()
        return ReconcileResult(requeue_after_s=asked_s)

    key = Key("a", "web")
    under_test = pool(reconcile, workers=1)
    under_test.enqueue(key, "a", Priority.USER)
    with anyio.fail_after(60):
        await under_test.run(grace_s=1)
    now_mono = time.monotonic()
    ready_at = under_test._queue.ready_at(now_mono)
    assert ready_at is not None
    assert ready_at - now_mono <= LONGEST_WAIT_S
    assert under_test._queue.failures(key) == 0
