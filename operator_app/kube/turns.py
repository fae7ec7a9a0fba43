"""Turns on the event loop: a task with much work to do lets other tasks run again and again."""

from typing import Final

import anyio
import anyio.lowlevel

TURN_S: Final = 0.005
"""After so many seconds of its own work, a task lets others run; one step of its work may take longer."""


class Turns:
    """The turns of one task. Call ``end_if_due`` after each step of the work.

    A step that takes long (a large object) ends the turn at once, where a count of steps would add such steps up.
    """

    def __init__(self) -> None:
        self._begun_mono = anyio.current_time()

    async def end_if_due(self) -> None:
        """Let other tasks run, if this turn has lasted ``TURN_S``; a point at which the task can be cancelled."""
        if anyio.current_time() - self._begun_mono >= TURN_S:
            await anyio.lowlevel.checkpoint()
            self._begun_mono = anyio.current_time()
