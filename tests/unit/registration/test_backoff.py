"""The backoff of one record: how long a record that failed is not tried again."""

from dataclasses import replace
from typing import Any

from operator_app.api.kinds import Key
from operator_app.apply import Problem
from operator_app.registration.backoff import Backoff
from operator_app.registration.registry import Record

PROXY = Key("team-a", "checkout")
DOWN = Problem("RegistryError", "it does not answer")
FOR_GOOD = Problem("Forbidden", "it refuses us", needs_user_action=True)


def a_record(**changes: Any) -> Record:
    """A record; keywords replace its fields."""
    return replace(Record("one", 1, PROXY, "a.b", "c.d", ()), **changes)


def backoff(rand: float = 1.0) -> Backoff:
    """Pauses of 1, 2, 4, then 5 seconds, where chance gives the longest."""
    return Backoff(base_s=1, cap_s=5, rand=lambda: rand)


def test_pauses_double_up_to_the_cap() -> None:
    """Each failure in a row doubles the pause, and no number of them overflows."""
    patient = backoff()
    pauses = [patient.failed(a_record(), DOWN, now_mono=0).requeue_after_s for _ in range(5)]
    assert pauses == [1, 2, 4, 5, 5]
    assert [patient.failed(a_record(), DOWN, now_mono=0).requeue_after_s for _ in range(2000)][-1] == 5


def test_half_of_a_pause_is_chance() -> None:
    """Records that fail together do not come back together."""
    assert backoff(rand=0).failed(a_record(), DOWN, now_mono=0).requeue_after_s == 1 / 2


def test_in_a_pause_the_last_problem_stands_and_the_rest_is_told() -> None:
    """The registry is not asked, and the round knows when it may be; afterwards it is asked."""
    patient = backoff()
    patient.failed(a_record(), DOWN, now_mono=10)
    answer = patient.pause(a_record(), now_mono=10.25)
    assert answer is not None
    assert (answer.problem, answer.requeue_after_s) == (DOWN, 0.75)
    assert patient.pause(a_record(), now_mono=11) is None


def test_another_record_ends_a_pause_unless_the_registry_asked_for_it() -> None:
    """An edit may be the cure; ``Retry-After`` holds for whatever is sent."""
    patient = backoff()
    patient.failed(a_record(), DOWN, now_mono=0)
    assert patient.pause(a_record(generation=2), now_mono=0) is None
    assert patient.pause(a_record(uid="two"), now_mono=0) is None
    asked = patient.failed(a_record(), DOWN, now_mono=0, retry_after_s=30)
    assert asked.requeue_after_s == 30
    edited = patient.pause(a_record(generation=2), now_mono=0)
    assert edited is not None
    assert edited.requeue_after_s == 30


def test_an_edited_record_starts_with_a_short_pause() -> None:
    """Failures belong to the record that failed."""
    patient = backoff()
    for _ in range(4):
        patient.failed(a_record(), DOWN, now_mono=0)
    assert patient.failed(a_record(generation=2), DOWN, now_mono=0).requeue_after_s == 1


def test_what_does_not_pass_pauses_for_the_cap_at_once() -> None:
    """Credentials are not mended within seconds."""
    assert backoff().failed(a_record(), FOR_GOOD, now_mono=0).requeue_after_s == 5


def test_an_answer_ends_the_pause() -> None:
    """After a success the next failure is a first one again."""
    patient = backoff()
    patient.failed(a_record(), DOWN, now_mono=0)
    patient.forget("one")
    assert patient.pause(a_record(), now_mono=0) is None
    assert patient.failed(a_record(), DOWN, now_mono=0).requeue_after_s == 1
