"""The dispatcher: workers, crashes, and how it stops."""

import anyio
import pytest

from operator_app.dispatch import Dispatcher, Work
from operator_app.errors import ThrottledError
from operator_app.kinds import Key
from operator_app.pressure import Pressure
from operator_app.telemetry import Metrics
from operator_app.verdict import DONE, Verdict
from operator_app.workqueue import Limits, Priority

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The operator runs on asyncio."""
    return "asyncio"


def dispatcher(work: Work, *, workers: int = 4) -> Dispatcher:
    """A dispatcher in front of ``work``, with quick retries."""
    limits = Limits(in_flight_per_lane=workers, backoff_base_s=0.001, backoff_cap_s=0.001)
    return Dispatcher(work, limits, Pressure(), Metrics(), workers=workers, rand=lambda: 1.0)


async def test_a_round_that_crashes_is_tried_again_and_costs_nobody_else_anything() -> None:
    """One key's bug is that key's failure; the other key is worked in the meantime."""
    seen: list[tuple[Key, int]] = []

    async def work(key: Key, failures: int) -> Verdict:
        await anyio.lowlevel.checkpoint()
        seen.append((key, failures))
        if key.name == "broken" and failures < 2:
            raise ZeroDivisionError
        if len(seen) == 4:
            under_test.stop()
        return DONE

    under_test = dispatcher(work)
    under_test.want(Key("a", "broken"), "a", Priority.USER)
    under_test.want(Key("b", "sound"), "b", Priority.USER)
    with anyio.fail_after(5):
        await under_test.run(grace_s=1)
    assert sorted(seen) == [(Key("a", "broken"), each) for each in range(3)] + [(Key("b", "sound"), 0)]
    assert len(under_test) == 0


async def test_no_more_rounds_than_workers() -> None:
    """Keys wait in the queue until a worker is free."""
    running = most = done = 0

    async def work(_key: Key, _failures: int) -> Verdict:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        running -= 1
        done += 1
        if done == 9:
            under_test.stop()
        return DONE

    under_test = dispatcher(work, workers=3)
    for number in range(9):
        under_test.want(Key(f"ns-{number}", "web"), f"ns-{number}", Priority.USER)
    with anyio.fail_after(5):
        await under_test.run(grace_s=1)
    assert (most, done) == (3, 9)


async def test_stopping_lets_a_round_finish_and_begins_no_other() -> None:
    """The round in progress ends by itself; what waits in the queue stays there."""
    finished: list[Key] = []

    async def work(key: Key, _failures: int) -> Verdict:
        under_test.stop()
        await anyio.lowlevel.checkpoint()
        finished.append(key)
        return DONE

    under_test = dispatcher(work, workers=1)
    under_test.want(Key("a", "first"), "a", Priority.USER)
    under_test.want(Key("b", "second"), "b", Priority.USER)
    with anyio.fail_after(5):
        await under_test.run(grace_s=1)
    assert finished == [Key("a", "first")]
    assert len(under_test) == 1


async def test_a_round_that_never_ends_is_cut_off_after_the_grace_time() -> None:
    """Shutdown is bounded, whatever a round waits for."""

    async def work(_key: Key, _failures: int) -> Verdict:
        under_test.stop()
        await anyio.sleep_forever()
        return DONE

    under_test = dispatcher(work)
    under_test.want(Key("a", "stuck"), "a", Priority.USER)
    with anyio.fail_after(5):
        await under_test.run(grace_s=0.01)


async def test_a_round_that_was_not_ours_is_forgotten() -> None:
    """Whoever has the shard looks at the key; here it leaves no trace."""

    async def work(_key: Key, _failures: int) -> None:
        under_test.stop()

    under_test = dispatcher(work)
    under_test.want(Key("a", "web"), "a", Priority.USER)
    with anyio.fail_after(5):
        await under_test.run(grace_s=1)
    assert len(under_test) == 0


async def test_what_the_server_asks_for_is_waited_for() -> None:
    """A Retry-After is longer than the backoff and wins."""

    async def work(key: Key, _failures: int) -> Verdict:
        under_test.stop()
        return Verdict(failure=ThrottledError("slow down", key=key, retry_after_s=3600))

    under_test = dispatcher(work)
    key = Key("a", "web")
    under_test.want(key, "a", Priority.USER)
    with anyio.fail_after(5):
        await under_test.run(grace_s=1)
    assert len(under_test) == 1
