"""The backoff of one record: how long a record that failed is not tried again."""

from dataclasses import replace
from typing import Any

from operator_app.api.kinds import Key
from operator_app.registration.backoff import Backoff
from operator_app.registration.registry import Record
from operator_app.results import Problem

PROXY = Key("team-a", "checkout")
DOWN = Problem("RegistryError", "it does not answer")
REFUSED = Problem("Forbidden", "it refuses us", needs_user_action=True)


def a_record(**changes: Any) -> Record:
    """A record; keywords replace its fields."""
    return replace(Record("one", 1, PROXY, "a.b", "c.d", ()), **changes)


def backoff(rand: float = 1.0) -> Backoff:
    """Pauses of 1, 2, 4, then 5 seconds by default: the random part is at its maximum."""
    return Backoff(base_s=1, cap_s=5, rand=lambda: rand)


def test_pauses_double_up_to_the_cap() -> None:
    """Each failure in a row doubles the pause, and no number of them overflows."""
    failing = backoff()
    pauses = [failing.failed(a_record(), DOWN, now_mono=0).requeue_after_s for _ in range(5)]
    assert pauses == [1, 2, 4, 5, 5]
    assert [failing.failed(a_record(), DOWN, now_mono=0).requeue_after_s for _ in range(2000)][-1] == 5


def test_half_of_a_pause_is_random() -> None:
    """Records that fail together are not retried together."""
    assert backoff(rand=0).failed(a_record(), DOWN, now_mono=0).requeue_after_s == 1 / 2


def test_a_paused_record_keeps_its_problem_until_the_pause_is_over() -> None:
    """The result has the last problem and the seconds that are left; after them the record may be tried."""
    failing = backoff()
    failing.failed(a_record(), DOWN, now_mono=10)
    answer = failing.pause(a_record(), now_mono=10.25)
    assert answer is not None
    assert (answer.problem, answer.requeue_after_s) == (DOWN, 0.75)
    assert failing.pause(a_record(), now_mono=11) is None


def test_an_edit_ends_a_pause_unless_the_registry_requested_it() -> None:
    """An edit may be the fix, so it is tried at once; ``Retry-After`` applies to every record of the proxy."""
    failing = backoff()
    failing.failed(a_record(), DOWN, now_mono=0)
    assert failing.pause(a_record(generation=2), now_mono=0) is None
    assert failing.pause(a_record(uid="two"), now_mono=0) is None
    throttled = failing.failed(a_record(), DOWN, now_mono=0, retry_after_s=30)
    assert throttled.requeue_after_s == 30
    edited = failing.pause(a_record(generation=2), now_mono=0)
    assert edited is not None
    assert edited.requeue_after_s == 30


def test_an_edited_record_starts_with_a_short_pause() -> None:
    """Failures belong to the record that failed."""
    failing = backoff()
    for _ in range(4):
        failing.failed(a_record(), DOWN, now_mono=0)
    assert failing.failed(a_record(generation=2), DOWN, now_mono=0).requeue_after_s == 1


def test_a_problem_that_needs_user_action_pauses_for_the_cap_at_once() -> None:
    """Credentials are not corrected within seconds."""
    assert backoff().failed(a_record(), REFUSED, now_mono=0).requeue_after_s == 5


def test_a_success_ends_the_pause() -> None:
    """After a success the next failure is a first one again."""
    failing = backoff()
    failing.failed(a_record(), DOWN, now_mono=0)
    failing.forget("one")
    assert failing.pause(a_record(), now_mono=0) is None
    assert failing.failed(a_record(), DOWN, now_mono=0).requeue_after_s == 1


def test_a_record_that_an_open_circuit_defers_waits_for_the_next_probe_and_then_longer() -> None:
    """The first time only until the probe, then as after failures in a row, and never shorter than the circuit says."""
    waiting = backoff()
    pauses = [waiting.defer(a_record(), DOWN, now_mono=10, open_s=0.25).requeue_after_s for _ in range(4)]
    assert pauses == [0.25, 1, 2, 4]
    assert waiting.defer(a_record(), DOWN, now_mono=10, open_s=30).requeue_after_s == 30
    paused = waiting.pause(a_record(), now_mono=30)
    assert paused is not None
    assert (paused.problem, paused.requeue_after_s) == (DOWN, 10)
    assert waiting.pause(a_record(generation=2), now_mono=30) is None, "an edit may be what closes it"
    assert waiting.failed(a_record(), DOWN, now_mono=10).requeue_after_s == 5
