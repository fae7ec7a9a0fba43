"""The workqueue in virtual time: examples for each rule, and random walks against a model that only scans."""

import math
import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from operator_app.api.kinds import Key
from operator_app.controller.workqueue import Limits, Priority, WorkQueue

USER, REPAIR, SWEEP = Priority
LIMITS = Limits(
    in_flight_per_lane=2, age_promotes_after_s=10.0, backoff_base_s=2.0, backoff_cap_s=60.0, slow_lane_after=9
)


def key(name: str, namespace: str = "a") -> Key:
    """A key by its name alone."""
    return Key(namespace, name)


def queue_of(limits: Limits = LIMITS, *, rand: float = 0.5) -> WorkQueue:
    """A queue whose jitter is known."""
    return WorkQueue(limits, rand=lambda: rand)


def drained(queue: WorkQueue, now: float) -> list[Key]:
    """Get and finish until nothing can run at ``now``."""
    keys = []
    while (taken := queue.get(now)) is not None:
        keys.append(taken)
        queue.done(taken, now=now)
    return keys


def assert_empty(queue: WorkQueue) -> None:
    """Nothing of any key or lane is left, not even in the private structures."""
    assert (len(queue), queue.in_flight, queue.lanes()) == (0, 0, ())
    assert not queue._entries
    assert not queue._lanes
    assert not queue._ring
    assert not queue._alarms._nodes
    assert len(queue._alarms._heap) <= queue._alarms.SLACK


class TestOneKey:
    """A key is queued once, reconciled by one worker and never lost."""

    def test_adds_of_one_key_merge(self) -> None:
        """A key added many times before it runs, runs once."""
        queue = queue_of()
        for now in range(5):
            queue.add(key("x"), "a", REPAIR, now=now)
        assert drained(queue, 5) == [key("x")]
        assert_empty(queue)

    def test_an_add_in_flight_runs_again_with_its_own_priority(self) -> None:
        """A key added while in flight is not returned twice, and runs afterwards with the priority of that add."""
        queue = queue_of()
        queue.add(key("x"), "a", USER, now=0)
        assert queue.get(0) == key("x")
        queue.add(key("x"), "a", SWEEP, now=1)
        queue.add(key("y"), "a", REPAIR, now=2)
        assert queue.get(2) == key("y")
        assert queue.get(2) is None
        queue.done(key("y"), now=2)
        queue.done(key("x"), now=2)
        queue.add(key("z"), "a", REPAIR, now=3)
        assert drained(queue, 3) == [key("z"), key("x")]

    def test_a_better_priority_wins_and_a_worse_one_changes_nothing(self) -> None:
        """The priority of a waiting key only rises."""
        queue = queue_of()
        queue.add(key("x"), "a", REPAIR, now=0)
        queue.add(key("y"), "a", SWEEP, now=0)
        queue.add(key("y"), "a", USER, now=1)
        queue.add(key("y"), "a", SWEEP, now=1)
        assert drained(queue, 1) == [key("y"), key("x")]

    def test_a_key_moves_to_the_lane_of_its_latest_add(self) -> None:
        """A tenant label that changes moves the waiting key, and the empty lane is removed."""
        queue = queue_of()
        queue.add(key("x"), "a", REPAIR, now=0)
        queue.add(key("x"), "b", SWEEP, now=1)
        assert queue.lanes() == ("b",)
        assert (queue.depth("a", now=1), queue.depth("b", now=1)) == (0, 1)
        assert queue.oldest_age_s("b", now=3) == 3
        assert drained(queue, 1) == [key("x")]
        assert_empty(queue)

    def test_a_key_in_flight_moves_after_its_reconcile(self) -> None:
        """A reconcile counts against the limit of the lane it started in; the next one runs in the new lane."""
        queue = queue_of(Limits(in_flight_per_lane=1))
        queue.add(key("x"), "a", REPAIR, now=0)
        assert queue.get(0) == key("x")
        queue.add(key("x"), "b", REPAIR, now=0)
        queue.add(key("y"), "a", REPAIR, now=0)
        queue.add(key("z"), "b", REPAIR, now=0)
        assert queue.get(0) == key("z")
        assert queue.get(0) is None
        queue.done(key("x"), now=1)
        assert queue.get(1) == key("y")
        assert queue.get(1) is None
        queue.done(key("z"), now=1)
        assert queue.get(1) == key("x")

    @pytest.mark.parametrize("was_known", [True, False])
    def test_only_a_key_in_flight_can_end(self, was_known: bool) -> None:  # noqa: FBT001  # pytest passes it by name
        """Ending a reconcile that was not begun is refused and changes nothing."""
        queue = queue_of()
        if was_known:
            queue.add(key("x"), "a", REPAIR, now=0)
        with pytest.raises(ValueError, match="a/x is not in flight"):
            queue.done(key("x"), now=0)
        with pytest.raises(ValueError, match="a/x is not in flight"):
            queue.failed(key("x"), now=0)
        assert drained(queue, 0) == [key("x")] * was_known

    def test_times_that_are_not_finite_are_refused(self) -> None:
        """An add for an infinite or undefined time would wait for ever, so it is refused and changes nothing."""
        queue = queue_of()
        for at in (math.inf, -math.inf, math.nan):
            with pytest.raises(ValueError, match="not a finite time"):
                queue.add_at(key("x"), "a", REPAIR, at=at, now=0)
        assert_empty(queue)
        queue.add(key("x"), "a", REPAIR, now=0)
        queue.get(0)
        for seconds in (-1, math.inf, math.nan):
            with pytest.raises(ValueError, match="retry_after_s must be"):
                queue.failed(key("x"), now=0, retry_after_s=seconds)
            with pytest.raises(ValueError, match="requeue_after_s must be"):
                queue.failed(key("x"), now=0, requeue_after_s=seconds)
            with pytest.raises(ValueError, match="requeue_after_s must be"):
                queue.done(key("x"), now=0, requeue_after_s=seconds)
        queue.done(key("x"), now=0)
        assert_empty(queue)


class TestDelays:
    """A delayed key runs at its time: not before, and not only when something else happens."""

    def test_the_earliest_time_wins(self) -> None:
        """Of several delayed adds the earliest counts, whatever their order."""
        queue = queue_of()
        for at in (30, 10, 20):
            queue.add_at(key("x"), "a", REPAIR, at=at, now=0)
        assert queue.ready_at(0) == 10
        assert queue.get(9.999) is None
        assert drained(queue, 10) == [key("x")]
        assert queue.ready_at(10) is None
        assert_empty(queue)

    def test_at_once_supersedes_a_delay(self) -> None:
        """An add of a delayed key runs it now, and the timer does not run it a second time."""
        queue = queue_of()
        queue.add_at(key("x"), "a", REPAIR, at=30, now=0)
        queue.add(key("x"), "a", SWEEP, now=1)
        assert queue.ready_at(1) == 1
        assert drained(queue, 1) == [key("x")]
        assert queue.get(31) is None

    def test_a_time_in_the_past_is_now(self) -> None:
        """An add gets no credit for time before it was made."""
        queue = queue_of()
        queue.add(key("x"), "a", USER, now=7)
        queue.add_at(key("y"), "a", USER, at=1, now=8)
        assert queue.ready_at(8) == 8
        assert queue.oldest_age_s("a", now=8) == 1
        assert drained(queue, 8) == [key("x"), key("y")]

    def test_a_reconcile_may_ask_to_be_requeued(self) -> None:
        """``requeue_after_s`` runs the key again then, ranked with repairs even after a user's edit."""
        queue = queue_of()
        queue.add(key("x"), "a", USER, now=0)
        queue.get(0)
        queue.done(key("x"), now=2, requeue_after_s=5)
        assert queue.ready_at(2) == 7
        queue.add_at(key("y"), "a", USER, at=8, now=2)
        assert drained(queue, 8) == [key("y"), key("x")]
        assert_empty(queue)

    def test_an_add_in_flight_beats_a_requeue(self) -> None:
        """A key that is to be requeued later runs at once if it was added meanwhile."""
        queue = queue_of()
        queue.add(key("x"), "a", REPAIR, now=0)
        queue.get(0)
        queue.add(key("x"), "a", REPAIR, now=1)
        queue.done(key("x"), now=2, requeue_after_s=5)
        assert drained(queue, 2) == [key("x")]
        assert_empty(queue)

    def test_ready_at_skips_a_lane_at_its_limit(self) -> None:
        """A key that waits for a reconcile in progress has no time of its own; another lane's timer has."""
        queue = queue_of(Limits(in_flight_per_lane=1))
        queue.add(key("x"), "a", REPAIR, now=0)
        queue.get(0)
        queue.add(key("y"), "a", REPAIR, now=0)
        queue.add_at(key("z"), "a", REPAIR, at=1, now=0)
        assert queue.ready_at(5) is None
        queue.add_at(key("w"), "b", REPAIR, at=9, now=5)
        assert queue.ready_at(5) == 9
        queue.done(key("x"), now=6)
        assert queue.ready_at(6) == 6

    def test_delayed_keys_have_no_depth_until_they_are_due(self) -> None:
        """Depth and age count what could run, also in a lane at its limit."""
        queue = queue_of(Limits(in_flight_per_lane=1))
        queue.add(key("x"), "a", REPAIR, now=0)
        queue.get(0)
        queue.add_at(key("y"), "a", REPAIR, at=4, now=0)
        assert (queue.depth("a", now=3), queue.oldest_age_s("a", now=3)) == (0, 0)
        assert (queue.depth("a", now=6), queue.oldest_age_s("a", now=6)) == (1, 2)


class TestBackoff:
    """A failing key is retried at growing intervals, one success resets them, and a user's edit runs at once."""

    @given(
        failures=st.integers(1, 40),
        rand=st.floats(0, 1, exclude_max=True),
        base_s=st.floats(0.001, 10),
        cap_factor=st.floats(1, 1000),
        slow_lane_after=st.integers(1, 40),
    )
    def test_full_jitter(
        self, failures: int, rand: float, base_s: float, cap_factor: float, slow_lane_after: int
    ) -> None:
        """Delay n is ``rand() * min(cap, base * 2 ** (n - 1))``, and the whole cap in the slow lane."""
        cap_s = base_s * cap_factor
        queue = queue_of(Limits(backoff_base_s=base_s, backoff_cap_s=cap_s, slow_lane_after=slow_lane_after), rand=rand)
        now = 0.0
        queue.add(key("x"), "a", REPAIR, now=now)
        for failure in range(1, failures + 1):
            assert queue.get(now) == key("x")
            delay_s = queue.failed(key("x"), now=now)
            slow = failure >= slow_lane_after
            assert delay_s == (cap_s if slow else rand * min(cap_s, base_s * 2 ** (failure - 1)))
            assert queue.failures(key("x")) == failure
            assert queue.ready_at(now) == now + delay_s
            now += delay_s

    def test_failing_for_ever_never_overflows(self) -> None:
        """Thousands of failures without a slow lane keep the delay at the cap's jitter."""
        queue = queue_of(Limits(backoff_base_s=1e-3, backoff_cap_s=60, slow_lane_after=10_000))
        queue.add(key("x"), "a", REPAIR, now=0)
        now = delay_s = 0.0
        for _ in range(3_000):
            assert queue.get(now) == key("x")
            delay_s = queue.failed(key("x"), now=now)
            now += delay_s
        assert delay_s == 30

    def test_jitter_is_drawn_for_each_delay(self) -> None:
        """Keys that fail together are not retried together."""
        chances = iter(range(50))
        queue = WorkQueue(Limits(in_flight_per_lane=50), rand=lambda: next(chances) / 50)
        for number in range(50):
            queue.add(key(str(number)), "a", REPAIR, now=0)
        taken = [queue.get(0) for _ in range(50)]
        delays = {queue.failed(each, now=0) for each in taken if each is not None}
        assert len(delays) == 50
        assert max(delays) < Limits().backoff_base_s

    def test_success_resets_failures(self) -> None:
        """After a success the next failure is a first one."""
        queue = queue_of()
        queue.add(key("x"), "a", REPAIR, now=0)
        for now in (0, 100, 200):
            queue.get(now)
            queue.failed(key("x"), now=now)
        queue.get(300)
        queue.done(key("x"), now=300, requeue_after_s=0)
        assert queue.failures(key("x")) == 0
        queue.get(300)
        assert queue.failed(key("x"), now=300) == 1

    @given(retry_after_s=st.floats(0, 1000), failures=st.integers(0, 12))
    def test_retry_after_is_a_lower_bound(self, retry_after_s: float, failures: int) -> None:
        """A retry never comes before ``retry_after_s``, and backoff still holds where it is longer."""
        queue = queue_of()
        queue.add(key("x"), "a", REPAIR, now=0)
        for number in range(failures):
            queue.get(number * 1000)
            queue.failed(key("x"), now=number * 1000)
        now = failures * 1000
        queue.get(now)
        backoff_s = 60.0 if failures >= 8 else min(30.0, 2.0**failures)
        assert queue.failed(key("x"), now=now, retry_after_s=retry_after_s) == max(backoff_s, retry_after_s)
        queue.add(key("x"), "a", USER, now=now)
        assert queue.ready_at(now) == (now if retry_after_s == 0 else now + retry_after_s)

    @pytest.mark.parametrize("priority", [REPAIR, SWEEP])
    def test_events_do_not_defeat_backoff(self, priority: Priority) -> None:
        """A repair or resync of a key in backoff waits with it, be it added after the failure or during the reconcile.

        A user's edit does not: when it is itself delayed, it runs at its own time.
        """
        queue = queue_of()
        queue.add(key("x"), "a", REPAIR, now=0)
        queue.get(0)
        queue.add(key("x"), "a", priority, now=0)
        queue.add_at(key("x"), "a", priority, at=1, now=0)
        queue.failed(key("x"), now=2)
        queue.add(key("x"), "a", priority, now=2)
        assert queue.ready_at(2) == 3
        queue.add_at(key("x"), "a", USER, at=2.5, now=2)
        assert queue.get(2.499) is None
        assert drained(queue, 2.5) == [key("x")]
        assert_empty(queue)

    def test_a_user_s_edit_is_tried_at_once(self) -> None:
        """An edit in backoff runs now, and failures of the previous declaration do not count against it."""
        queue = queue_of()
        queue.add(key("x"), "a", REPAIR, now=0)
        for now in (0, 100, 200):
            queue.get(now)
            queue.failed(key("x"), now=now)
        queue.add(key("x"), "a", USER, now=200)
        assert queue.failures(key("x")) == 0
        assert queue.get(200) == key("x")
        assert queue.failed(key("x"), now=200) == 1

    def test_a_user_s_edit_during_a_failing_reconcile_is_tried_at_once(self) -> None:
        """A reconcile that fails on the previous declaration neither delays nor counts against the new one."""
        queue = queue_of()
        queue.add(key("x"), "a", REPAIR, now=0)
        queue.get(0)
        queue.failed(key("x"), now=0)
        queue.get(1)
        queue.add(key("x"), "a", USER, now=1)
        assert queue.failed(key("x"), now=2) == 0
        assert queue.failures(key("x")) == 0
        assert queue.get(2) == key("x")
        queue.add(key("x"), "a", USER, now=2)
        assert queue.failed(key("x"), now=2, retry_after_s=4) == 4
        assert queue.ready_at(2) == 6

    def test_an_edit_that_is_delayed_ends_the_backoff_all_the_same(self) -> None:
        """Under backpressure an edit waits for its own time and for ``retry_after_s``, but not for the backoff."""
        queue = queue_of()
        queue.add(key("x"), "a", REPAIR, now=0)
        for now in (0, 100, 200):
            queue.get(now)
            queue.failed(key("x"), now=now)
        queue.add_at(key("x"), "a", USER, at=201, now=200)
        assert (queue.failures(key("x")), queue.ready_at(200)) == (0, 201)
        queue.get(201)
        queue.add_at(key("x"), "a", USER, at=203, now=202)
        assert queue.failed(key("x"), now=202) == 1
        assert (queue.failures(key("x")), queue.ready_at(202)) == (0, 203)
        queue.get(203)
        queue.failed(key("x"), now=203, retry_after_s=4)
        queue.add_at(key("x"), "a", USER, at=204, now=203)
        assert queue.ready_at(203) == 207

    def test_a_failed_reconcile_may_ask_to_be_requeued_sooner(self) -> None:
        """Its ``requeue_after_s`` ends no backoff for other events, and is not earlier than ``retry_after_s``."""
        queue = queue_of()
        queue.add(key("x"), "a", USER, now=0)
        queue.get(0)
        assert queue.failed(key("x"), now=0, requeue_after_s=50) == 1
        queue.get(1)
        assert queue.failed(key("x"), now=1, requeue_after_s=1) == 1
        queue.add(key("x"), "a", REPAIR, now=1)
        assert (queue.failures(key("x")), queue.ready_at(1)) == (2, 2)
        queue.get(2)
        queue.add(key("x"), "a", REPAIR, now=2)
        assert queue.failed(key("x"), now=2, retry_after_s=3, requeue_after_s=1) == 3
        assert queue.ready_at(2) == 5

    def test_a_retry_keeps_its_priority_until_the_slow_lane(self) -> None:
        """A failed edit is retried before repairs; after ``slow_lane_after`` failures it comes after them."""
        queue = queue_of(Limits(in_flight_per_lane=1, slow_lane_after=2, age_promotes_after_s=1e6))
        queue.add(key("x"), "a", USER, now=0)
        queue.get(0)
        queue.failed(key("x"), now=0)
        queue.add(key("y"), "a", REPAIR, now=1)
        assert queue.get(1) == key("x")
        queue.failed(key("x"), now=1)
        assert drained(queue, 1000) == [key("y"), key("x")]


class TestFairness:
    """No tenant's load changes when another tenant's key runs, beyond the stated bound."""

    def test_a_new_key_overtakes_a_flood(self) -> None:
        """One key of B runs second although 1,000 of A were added before."""
        queue = queue_of()
        for number in range(1000):
            queue.add(key(str(number)), "a", USER, now=0)
        queue.add(key("x", "b"), "b", SWEEP, now=1)
        assert drained(queue, 1).index(key("x", "b")) == 1

    @given(
        depths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
        weights=st.lists(st.integers(1, 4), min_size=8, max_size=8),
    )
    def test_turns_are_proportional_to_weights(self, depths: list[int], weights: list[int]) -> None:
        """While all lanes have keys, each turn of the ring returns ``weight`` keys of each."""
        by_lane = {str(number): weights[number] for number in range(len(depths))}
        queue = WorkQueue(LIMITS, rand=lambda: 0.5, weight=by_lane.__getitem__)
        for lane, depth in zip(by_lane, depths, strict=True):
            for number in range(depth):
                queue.add(Key(lane, str(number)), lane, REPAIR, now=0)
        order = [taken.namespace for taken in drained(queue, 0)]
        expected = []
        left = dict(zip(by_lane, depths, strict=True))
        while any(left.values()):
            for lane, weight in by_lane.items():
                turn = min(weight, left[lane])
                expected += [lane] * turn
                left[lane] -= turn
        assert order == expected

    def test_a_weight_below_one_counts_as_one(self) -> None:
        """A lane with an invalid weight is neither starved nor does it keep the turn."""
        queue = WorkQueue(LIMITS, rand=lambda: 0.5, weight=lambda _lane: 0)
        for name in ("1", "2"):
            for lane in ("a", "b"):
                queue.add(key(name, lane), lane, REPAIR, now=0)
        assert [taken.namespace for taken in drained(queue, 0)] == ["a", "b", "a", "b"]

    def test_a_lane_back_from_its_limit_has_a_whole_turn(self) -> None:
        """A turn that was cut short by the in-flight limit is neither finished nor deducted later."""
        limits = Limits(in_flight_per_lane=1)
        queue = WorkQueue(limits, rand=lambda: 0.5, weight={"a": 3, "b": 1}.__getitem__)
        for number in range(9):
            queue.add(key(str(number)), "a", REPAIR, now=0)
            queue.add(key(str(number), "b"), "b", REPAIR, now=0)

        def take(lanes: str) -> list[Key]:
            taken = [each for each in (queue.get(0) for _ in lanes) if each is not None]
            assert "".join(each.namespace for each in taken) == lanes
            return taken

        slow, *quick = take("aaa")
        for each in quick:
            queue.done(each, now=0)
        # One reconcile of the lane goes on, so its next turn of three is cut short after two.
        for each in [slow, *take("baa")]:
            queue.done(each, now=0)
        assert "".join(taken.namespace for taken in drained(queue, 0)) == "aaababbbbbbb"

    def test_a_lane_has_reconciles_at_a_time_by_its_weight(self) -> None:
        """Turns alone would change nothing for a lane that is always at its limit."""
        queue = WorkQueue(Limits(in_flight_per_lane=2), rand=lambda: 0.5, weight={"a": 3, "b": 1}.__getitem__)
        for number in range(9):
            queue.add(key(str(number)), "a", REPAIR, now=0)
            queue.add(key(str(number), "b"), "b", REPAIR, now=0)
        taken = [queue.get(0) for _ in range(9)]
        assert Counter(each.namespace if each else None for each in taken) == {"a": 6, "b": 2, None: 1}

    def test_no_credit_for_idleness(self) -> None:
        """A lane that was empty while another ran gets single turns afterwards, not the turns that it missed."""
        queue = queue_of()
        for number in range(40):
            queue.add(key(str(number)), "a", REPAIR, now=0)
        queue.add(key("first", "b"), "b", REPAIR, now=0)
        for _ in range(20):
            queue.done(queue.get(0) or key("none"), now=0)
        for number in range(5):
            queue.add(key(str(number), "b"), "b", REPAIR, now=0)
        lanes = [taken.namespace for taken in drained(queue, 0)]
        assert all(before != after for before, after in pairwise(lanes[:10]))

    def test_a_raised_priority_keeps_the_lane_s_turn(self) -> None:
        """Changing the only entry of a lane does not move the lane to the end of the ring."""
        queue = queue_of()
        for lane in ("a", "b", "c"):
            queue.add(key("x", lane), lane, SWEEP, now=0)
        queue.add(key("x", "a"), "a", USER, now=0)
        assert queue.get(0) == key("x", "a")

    def test_a_lane_at_its_limit_holds_up_nobody(self) -> None:
        """A tenant whose reconciles hang occupies its own limit of workers and no more."""
        queue = queue_of()
        for number in range(10):
            queue.add(key(str(number)), "a", USER, now=0)
        queue.add(key("x", "b"), "b", SWEEP, now=0)
        taken = [queue.get(0) for _ in range(4)]
        assert [each.namespace for each in taken if each] == ["a", "b", "a"]
        assert (queue.in_flight, queue.ready_at(0)) == (3, None)

    @given(
        lanes=st.integers(2, 12),
        workers=st.integers(1, 6),
        reconciles_before=st.integers(0, 60),
        chance=st.randoms(use_true_random=True),
    )
    def test_the_bound_in_seconds(
        self, lanes: int, workers: int, reconciles_before: int, chance: random.Random
    ) -> None:
        """With W workers and reconciles of at most D seconds a lane's turn comes within ``ceil(L / W) * D`` seconds."""
        longest_s = 1.0
        queue = queue_of(Limits(in_flight_per_lane=workers))
        for lane in range(lanes - 1):
            for number in range(100):
                queue.add(Key(str(lane), str(number)), str(lane), USER, now=0)
        now, added_at, ends = 0.0, 0.0, list[tuple[float, Key]]()
        for ended in range(1000):
            if ended == reconciles_before:
                queue.add(key("x", "new"), "new", SWEEP, now=now)
                added_at = now
            while len(ends) < workers and (taken := queue.get(now)) is not None:
                if taken.namespace == "new":
                    assert now - added_at <= math.ceil(lanes / workers) * longest_s
                    return
                ends.append((now + chance.uniform(0, longest_s), taken))
            ends.sort()
            now, over = ends.pop(0)
            queue.done(over, now=now)
        pytest.fail("the lane never had its turn")


class TestPriorities:
    """Inside a lane the user comes first, and no key waits for ever."""

    def test_user_before_repair_before_resync(self) -> None:
        """Keys of one time run by priority, and first come first served within one."""
        queue = queue_of()
        for number, priority in enumerate((SWEEP, USER, REPAIR, SWEEP, USER, REPAIR)):
            queue.add(key(str(number)), "a", priority, now=0)
        assert [taken.name for taken in drained(queue, 0)] == ["1", "4", "2", "5", "0", "3"]

    @pytest.mark.parametrize(("priority", "bound_s"), [(USER, 0), (REPAIR, 10), (SWEEP, 20)])
    def test_ageing(self, priority: Priority, bound_s: int) -> None:
        """A stream of user edits delays a key by one ``age_promotes_after_s`` per step of priority and not longer."""
        queue = queue_of()
        queue.add(key("x"), "a", priority, now=0)
        for now in range(1, 60):
            queue.add(key(f"edit-{now}"), "a", USER, now=now)
        order = drained(queue, 60)
        assert order[: order.index(key("x"))] == [key(f"edit-{now}") for now in range(1, bound_s + 1)]

    def test_a_raised_priority_keeps_the_time_waited(self) -> None:
        """An edit of a key that waits for a resync runs before edits that were added after the resync."""
        queue = queue_of()
        queue.add(key("x"), "a", SWEEP, now=0)
        queue.add(key("y"), "a", USER, now=1)
        queue.add(key("x"), "a", USER, now=2)
        assert drained(queue, 2) == [key("x"), key("y")]


class TestMemory:
    """Nothing is kept of keys and timers that are done."""

    def test_superseded_timers_do_not_pile_up(self) -> None:
        """Ten thousand adds of one key, each earlier than the last, keep one timer and few superseded ones."""
        queue = queue_of()
        for at in range(10_000, 0, -1):
            queue.add_at(key("x"), "a", REPAIR, at=at, now=0)
            (lane,) = queue._lanes.values()
            assert len(lane.delayed._heap) <= 2 + lane.delayed.SLACK
            assert len(queue._alarms._heap) <= 2 + queue._alarms.SLACK
        assert drained(queue, 1) == [key("x")]
        assert_empty(queue)

    def test_cancelled_timers_go_with_the_last_pending_one(self) -> None:
        """Timers cancelled by edits are removed once the other keys have run."""
        queue = queue_of()
        for number in range(1000):
            queue.add_at(key(f"late-{number}"), "a", REPAIR, at=1000, now=0)
            queue.add_at(key(f"soon-{number}"), "a", REPAIR, at=1, now=0)
        queue.add_at(key("last"), "a", REPAIR, at=500, now=0)
        for number in range(1000):
            queue.add(key(f"late-{number}"), "a", USER, now=0)
        assert len(drained(queue, 1)) == 2000
        (lane,) = queue._lanes.values()
        assert len(lane.delayed._heap) <= 2 + lane.delayed.SLACK

    @given(chance=st.randoms(use_true_random=True))
    @settings(max_examples=5, deadline=None)
    def test_churn_over_many_lanes_returns_to_zero(self, chance: random.Random) -> None:
        """After every kind of call on thousands of keys and lanes the queue is as empty as a new one."""
        queue = WorkQueue(LIMITS, rand=chance.random)
        now = 0.0
        for number in range(3_000):
            now += chance.random()
            wanted = key(str(number % 700))
            queue.add_at(wanted, f"lane-{chance.randrange(300)}", chance.choice(list(Priority)), at=now + 5, now=now)
            queue.add(key(str(number)), f"lane-{number % 90}", REPAIR, now=now)
            taken = queue.get(now)
            if taken is not None and chance.randrange(3) == 0:
                queue.failed(taken, now=now)
            elif taken is not None:
                queue.done(taken, now=now)
        while (at := queue.ready_at(now)) is not None:
            now = max(now, at)
            assert drained(queue, now)
        assert_empty(queue)


class TestLimits:
    """Bounds out of range are refused with one sentence."""

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ({"in_flight_per_lane": 0}, "in_flight_per_lane must be at least 1"),
            ({"age_promotes_after_s": 0.0}, "age_promotes_after_s must be positive"),
            ({"age_promotes_after_s": math.inf}, "age_promotes_after_s must be positive"),
            ({"backoff_base_s": 0.0}, "backoff_base_s must be positive"),
            ({"backoff_base_s": 2.0, "backoff_cap_s": 1.0}, "at most backoff_cap_s"),
            ({"backoff_cap_s": math.inf}, "must be finite"),
            ({"backoff_cap_s": math.nan}, "must be finite"),
            ({"slow_lane_after": 0}, "slow_lane_after must be at least 1"),
        ],
    )
    def test_refused(self, arguments: dict[str, float], sentence: str) -> None:
        """The sentence names the setting and the value it may have."""
        with pytest.raises(ValueError, match=sentence):
            Limits(**arguments)  # type: ignore[arg-type]


@dataclass(slots=True)
class Request:
    """A requested reconcile, in the model."""

    lane: str
    priority: Priority
    at: float

    def merged(self, later: "Request") -> "Request":
        """Both requests as one."""
        return Request(later.lane, min(self.priority, later.priority), min(self.at, later.at))


class AgainstTheModel(RuleBasedStateMachine):
    """Random calls in virtual time; the model is two dictionaries, and every question is answered by scanning them."""

    KEYS: ClassVar = [Key("ns", str(number)) for number in range(8)]
    WEIGHTS: ClassVar = {"a": 1, "b": 1, "c": 2, "d": 3}

    lanes = st.sampled_from(sorted(WEIGHTS))
    keys = st.sampled_from(KEYS)
    priorities = st.sampled_from(list(Priority))
    # Quarters are exact in binary, so that equal times are common and comparisons are exact.
    seconds = st.integers(0, 120).map(lambda quarters: quarters / 4)
    maybe_seconds = st.none() | seconds

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.rand = 0.0
        self.queue = WorkQueue(LIMITS, rand=lambda: self.rand, weight=self.WEIGHTS.__getitem__)
        self.requested: dict[Key, Request] = {}
        self.running: dict[Key, Request] = {}
        self.failures: dict[Key, int] = {}
        self.backoff_until: dict[Key, float] = {}
        self.retry_not_before: dict[Key, float] = {}
        self.passed_over: dict[str, int] = {}
        self.may_be_passed_over: dict[str, int] = {}

    def is_open(self, lane: str) -> bool:
        """The lane is below its in-flight limit."""
        return sum(each.lane == lane for each in self.running.values()) < self.limit(lane)

    def limit(self, lane: str) -> int:
        """A lane has as many reconciles at a time as its weight allows."""
        return LIMITS.in_flight_per_lane * self.WEIGHTS[lane]

    def candidates(self) -> dict[Key, Request]:
        """Keys that could run if their time did not matter."""
        return {
            each: request
            for each, request in self.requested.items()
            if each not in self.running and self.is_open(request.lane)
        }

    def runnable(self) -> dict[Key, Request]:
        """Keys that could run now."""
        return {each: request for each, request in self.candidates().items() if request.at <= self.now}

    def wait_in_line(self, lane: str, runnable_lanes: set[str]) -> None:
        """The lane is queued behind all other runnable ones."""
        self.passed_over[lane] = 0
        self.may_be_passed_over[lane] = sum(self.WEIGHTS[other] for other in runnable_lanes - {lane})

    def after_each_call(self) -> None:
        """Lanes that became runnable are queued from now on; the others are not."""
        lanes = {request.lane for request in self.runnable().values()}
        for lane in lanes - self.passed_over.keys():
            self.wait_in_line(lane, lanes)
        for lane in self.passed_over.keys() - lanes:
            del self.passed_over[lane]

    @rule(seconds=seconds)
    def time_passes(self, seconds: float) -> None:
        """Delays come due without any call."""
        self.now += seconds
        self.after_each_call()

    @rule(each=keys, lane=lanes, priority=priorities, delay_s=st.just(0.0) | seconds)
    def add(self, each: Key, lane: str, priority: Priority, delay_s: float) -> None:
        """An add for now or later merges with what is requested already."""
        at = self.now + delay_s
        if delay_s:
            self.queue.add_at(each, lane, priority, at=at, now=self.now)
        else:
            self.queue.add(each, lane, priority, now=self.now)
        if priority is USER:
            self.failures.pop(each, None)
            self.backoff_until.pop(each, None)
        at = max(at, self.backoff_until.get(each, at), self.retry_not_before.get(each, at))
        request = Request(lane, priority, at)
        self.requested[each] = self.requested[each].merged(request) if each in self.requested else request
        self.after_each_call()

    @rule()
    def take(self) -> None:
        """The key is free, due, the most urgent of its lane, and no lane was passed over more often than stated."""
        runnable = self.runnable()
        lanes = {request.lane for request in runnable.values()}
        taken = self.queue.get(self.now)
        if taken is None:
            assert not runnable
            return
        assert taken in runnable
        request = self.requested.pop(taken)
        urgency = {
            each: other.at + other.priority * LIMITS.age_promotes_after_s
            for each, other in runnable.items()
            if other.lane == request.lane
        }
        assert urgency[taken] == min(urgency.values())
        self.running[taken] = request
        for lane in lanes - {request.lane}:
            self.passed_over[lane] += 1
            assert self.passed_over[lane] <= self.may_be_passed_over[lane]
        self.wait_in_line(request.lane, lanes)
        self.after_each_call()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), requeue_after_s=maybe_seconds)
    def done(self, data: st.DataObject, requeue_after_s: float | None) -> None:
        """Success ends the reconcile; what was requested meanwhile remains."""
        each = data.draw(st.sampled_from(sorted(self.running)))
        self.queue.done(each, now=self.now, requeue_after_s=requeue_after_s)
        ended = self.running.pop(each)
        self.failures.pop(each, None)
        if requeue_after_s is not None:
            again = Request(ended.lane, max(REPAIR, ended.priority), self.now + requeue_after_s)
            self.requested[each] = again.merged(self.requested[each]) if each in self.requested else again
        self.after_each_call()

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        retry_after_s=maybe_seconds,
        requeue_after_s=maybe_seconds,
        rand=st.sampled_from([0.0, 0.25, 0.5, 0.75]),
    )
    def failed(
        self, data: st.DataObject, retry_after_s: float | None, requeue_after_s: float | None, rand: float
    ) -> None:
        """Failure delays by the formula, unless the user edited meanwhile or the reconcile requeues sooner."""
        each = data.draw(st.sampled_from(sorted(self.running)))
        self.rand = rand
        delay_s = self.queue.failed(each, now=self.now, retry_after_s=retry_after_s, requeue_after_s=requeue_after_s)
        ended = self.running.pop(each)
        retry_s = retry_after_s or 0
        meanwhile = self.requested.get(each)
        if meanwhile is not None and meanwhile.priority is USER:
            self.failures.pop(each, None)
            backoff_s = max(retry_s, meanwhile.at - self.now)
            self.requested[each] = Request(meanwhile.lane, USER, self.now + backoff_s)
        else:
            count = self.failures[each] = self.failures.get(each, 0) + 1
            slow = count >= LIMITS.slow_lane_after
            jittered_s = rand * min(LIMITS.backoff_cap_s, LIMITS.backoff_base_s * 2 ** (count - 1))
            backoff_s = max(retry_s, LIMITS.backoff_cap_s if slow else jittered_s)
            retry = Request(ended.lane, SWEEP if slow else ended.priority, self.now + backoff_s)
            if meanwhile is not None:
                retry = Request(meanwhile.lane, min(retry.priority, meanwhile.priority), retry.at)
            self.requested[each] = retry
        if requeue_after_s is not None:
            again = Request(ended.lane, max(REPAIR, ended.priority), self.now + max(requeue_after_s, retry_s))
            self.requested[each] = again.merged(self.requested[each])
        assert delay_s == self.requested[each].at - self.now
        self.backoff_until[each] = self.now + backoff_s
        self.retry_not_before[each] = self.now + retry_s
        self.after_each_call()

    @precondition(lambda self: self.candidates())
    @rule()
    def sleep_until_ready(self) -> None:
        """No key can run just before ``ready_at``, and some key can at it."""
        at = self.queue.ready_at(self.now)
        assert at is not None
        if at > self.now:
            assert self.queue.get(math.nextafter(at, -math.inf)) is None
            self.now = at
        self.after_each_call()
        self.take()

    @invariant()
    def ready_at_is_exact(self) -> None:
        """It is the earliest time of any key whose lane is below its limit."""
        times = [request.at for request in self.candidates().values()]
        at = self.queue.ready_at(self.now)
        if not times:
            assert at is None
        else:
            assert at is not None
            assert max(at, self.now) == max(min(times), self.now)

    @invariant()
    def the_numbers_agree(self) -> None:
        """Sizes, failures and lanes are those of the model."""
        assert len(self.queue) == len(self.requested.keys() | self.running.keys())
        assert self.queue.in_flight == len(self.running)
        assert [self.queue.failures(each) for each in self.KEYS] == [self.failures.get(each, 0) for each in self.KEYS]
        waiting = [request for each, request in self.requested.items() if each not in self.running]
        assert set(self.queue.lanes()) == {request.lane for request in [*waiting, *self.running.values()]}

    @rule(lane=lanes)
    def look_at_a_lane(self, lane: str) -> None:
        """Depth and age are those of the due keys, and reading them changes nothing."""
        due = [
            request.at
            for each, request in self.requested.items()
            if each not in self.running and request.lane == lane and request.at <= self.now
        ]
        assert self.queue.depth(lane, now=self.now) == len(due)
        assert self.queue.oldest_age_s(lane, now=self.now) == (self.now - min(due) if due else 0)

    def teardown(self) -> None:
        """Whatever was requested when the walk ended runs in the end, and then nothing is left."""
        for each in list(self.running):
            self.queue.done(each, now=self.now)
        wanted = set(self.requested)
        self.now += 1_000_000
        assert set(drained(self.queue, self.now)) == wanted
        assert_empty(self.queue)


AgainstTheModel.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestAgainstTheModel = AgainstTheModel.TestCase
