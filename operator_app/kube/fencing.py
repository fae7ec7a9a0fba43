"""The right to write, carried along with the work that has it, and checked right before each write.

A shard of tenants is worked by one replica at a time. Its right to write is a :class:`Hold` with a deadline, which a
round carries in its context; everything that a round calls, tasks that it starts included, sees the same hold. Whoever
writes to the outside calls :func:`check` directly before the bytes leave: ``cluster.py`` for the API server, every
registry for its own system.

Guarantees
    - Once the deadline has passed, :func:`check` raises, however late it is called: after a stuck event loop, after
      SIGSTOP and SIGCONT, after the machine was suspended (the clock of the operator goes on in all three).
    - A hold never revives. Whoever gets the shard again gets another hold.
    - Inside the operator, work that serves no shard carries ``NOBODY`` and can't write. Code that carries no hold at
      all (a command, a test) is not held up: nobody has promised it to be alone.

What does not belong here: how holds are won and prolonged (``leases``), and what is left of a write that was checked in
time and sent late; its preconditions take care of that (``docs/adr/0014-leases-and-shards.md``).
"""

import math
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from operator_app.api.kinds import Key, Kind
from operator_app.errors import FencedError

NEVER: Final = -math.inf

_SENDING: Final = frozenset({"http11.send_request_headers.started", "http11.send_request_body.started"})


class Hold:
    """The right to write for one shard until a deadline, in seconds of ``clock``.

    ``epoch`` grows with every change of hands. ``users`` counts the work that keeps the shard from being given back;
    who carries the hold only to write later, such as an Event, is not counted, and finds it ended.
    """

    __slots__ = ("_clock", "epoch", "shard", "until", "users")

    def __init__(self, shard: int, epoch: int, *, until: float, clock: Callable[[], float]) -> None:
        self.shard = shard
        self.epoch = epoch
        self.until = until
        self.users = 0
        self._clock = clock

    @property
    def is_valid(self) -> bool:
        """Whether writes are allowed at this moment."""
        return self._clock() < self.until

    def extend(self, until: float) -> None:
        """Move the deadline, never back. A hold that has ended is not to be extended."""
        self.until = max(self.until, until)

    def end(self) -> None:
        """Allow no further write."""
        self.until = NEVER


NOBODY: Final = Hold(-1, 0, until=NEVER, clock=lambda: 0.0)
"""What work carries that has no right to write."""

_carried: ContextVar[Hold | None] = ContextVar("hold", default=None)


def carried() -> Hold | None:
    """The hold of the work in progress, to hand it to work that is done later (``under``)."""
    return _carried.get()


@contextmanager
def under(hold: Hold | None) -> Generator[None]:
    """Do the work in this context on the right of ``hold``; None means: nobody's right is needed."""
    token = _carried.set(hold)
    try:
        yield
    finally:
        _carried.reset(token)


def at_the_last_moment(check: Callable[[], None]) -> Callable[[str, object], Awaitable[None]]:
    """A ``trace`` for the ``extensions`` of an ``httpx`` or ``httpx2`` request: it checks before head and body leave.

    By then the wait for a connection is over. A request whose body is missing is not carried out, so what was stopped
    between the two changes nothing either. https://www.encode.io/httpcore/extensions/#trace
    """

    async def trace(step: str, _details: object) -> None:
        if step in _SENDING:
            check()

    return trace


def check(kind: Kind | None = None, key: Key | None = None) -> None:
    """Raise ``FencedError`` about the object given if the work in progress must not write any more."""
    hold = _carried.get()
    if hold is not None and not hold.is_valid:
        whose = "work without a shard" if hold is NOBODY else f"shard {hold.shard} in epoch {hold.epoch}"
        raise FencedError(f"the right to write has run out for {whose}", kind=kind, key=key)
