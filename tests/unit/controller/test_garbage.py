"""Collections look only at what is new, cycles are still freed, and the interpreter is left as it was."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from operator_app.controller.garbage import COLLECT_EVERY, MOST_OBJECTS, THAW_EVERY, Garbage, short_pauses


class Node:
    """An object that can be part of a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


def cycle() -> Node:
    """What only the collector frees once nothing else refers to it."""
    one, two = Node(), Node()
    one.other, two.other = two, one
    return one


@pytest.fixture
def garbage() -> Iterator[Garbage]:
    """Steps in the middle of an operator's life."""
    with short_pauses() as found:
        yield found


def looked_at() -> int:
    """How many objects a full collection would look at."""
    return sum(len(gc.get_objects(generation=each)) for each in range(3))


def test_what_existed_before_is_looked_at_no_more(garbage: Garbage) -> None:
    """Neither the modules, nor what has survived a collection after that."""
    assert looked_at() < MOST_OBJECTS
    kept = [[Node()] for _ in range(2 * MOST_OBJECTS)]
    gc.collect(1)
    garbage.step()
    assert looked_at() < MOST_OBJECTS
    assert len(kept) == 2 * MOST_OBJECTS


def test_cycles_are_freed_within_a_minute(garbage: Garbage) -> None:
    """Also in the oldest generation, which nothing else collects."""
    nodes = cycle()
    gc.collect(1)
    left = weakref.ref(nodes)
    del nodes
    for _ in range(COLLECT_EVERY):
        garbage.step()
    assert left() is None


def test_what_became_garbage_after_it_was_frozen_is_freed_within_a_day(
    garbage: Garbage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freezing forgets that it is to be looked at, so everything is looked at once in a while."""
    nodes = cycle()
    gc.freeze()
    left = weakref.ref(nodes)
    del nodes
    for _ in range(COLLECT_EVERY):
        garbage.step()
    assert left() is not None
    monkeypatch.setattr(garbage, "_steps", THAW_EVERY - 1)
    garbage.step()
    assert left() is None


def test_the_interpreter_is_left_as_it_was() -> None:
    """Other code in the same process collects as before."""
    before = gc.get_threshold()
    with short_pauses():
        assert gc.get_threshold() != before
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
