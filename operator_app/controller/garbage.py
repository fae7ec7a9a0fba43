"""Garbage collection in short pauses, however much the store holds.

Python's collector stops everything while it looks at all objects that may be part of a cycle: a tenth of a second for
the modules of this process and a thousand proxies, more with each of them. Nothing that lives long here is garbage:
what has survived one collection is moved out of the collector's sight (``gc.freeze``), and reference counts go on
freeing it. So a collection looks only at what has come since.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

MOST_OBJECTS: Final = 10_000
"""When the oldest generation has more, it is collected and frozen; looking at so many takes about 10 ms."""

COLLECT_EVERY: Final = 60
"""The oldest generation is collected in every so-many-th step at least, since cycles may hold large objects."""

THAW_EVERY: Final = 86_400
"""In every so-many-th step everything is looked at once: what was alive when it was frozen may be garbage by now."""

_NEVER: Final = 2**31 - 1


@contextmanager
def short_pauses() -> Generator["Garbage"]:
    """Collect the oldest generation only in steps, while the context lasts. What exists now is frozen first."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(before[0], before[1], _NEVER)
    try:
        yield Garbage()
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class Garbage:
    """Collects step by step; ``step`` is to be called about once a second."""

    def __init__(self) -> None:
        self._steps = 0

    def step(self) -> None:
        """Collect if that is due."""
        self._steps += 1
        is_thaw = self._steps % THAW_EVERY == 0
        if is_thaw:
            gc.unfreeze()
        if is_thaw or self._steps % COLLECT_EVERY == 0 or _looked_at() > MOST_OBJECTS:
            gc.collect()
            if is_thaw or _looked_at() > MOST_OBJECTS // 2:
                gc.freeze()


def _looked_at() -> int:
    """How many objects a collection would look at, without those that are new."""
    return len(gc.get_objects(generation=2))
