"""The right to write, carried along with the work that has it, and checked right before each write.

A shard of tenants is worked by one replica at a time. Its right to write is a :class:`FencingToken` with a deadline,
which a round carries in its context; everything that a round calls, tasks that it starts included, sees the same token.
Whoever writes to the outside calls :func:`check` directly before the bytes leave: ``cluster.py`` for the API server,
every registry for its own system.

Guarantees
    - Once the deadline has passed, :func:`check` raises, however late it is called: after a stuck event loop, after
      SIGSTOP and SIGCONT, after the machine was suspended (the clock of the operator goes on in all three).
    - A token never revives. Whoever gets the shard again gets another token.
    - Inside the operator, work that serves no shard carries ``NO_TOKEN`` and can't write. Code that carries no token at
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


class FencingToken:
    """The right to write for one shard until a deadline, in seconds of ``clock``.

    ``epoch`` grows with every change of hands. ``users`` counts the work that keeps the shard from being given back;
    who carries the token only to write later, such as an Event, is not counted, and finds it ended.
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
        """Move the deadline, never back. A token that has ended is not to be extended."""
        self.until = max(self.until, until)

    def end(self) -> None:
        """Allow no further write."""
        self.until = NEVER


NO_TOKEN: Final = FencingToken(-1, 0, until=NEVER, clock=lambda: 0.0)
"""What work carries that has no right to write."""

_current: ContextVar[FencingToken | None] = ContextVar("token", default=None)


def current_token() -> FencingToken | None:
    """The token of the work in progress, to hand it to work that is done later (``holding``)."""
    return _current.get()


@contextmanager
def holding(token: FencingToken | None) -> Generator[None]:
    """Do the work in this context on the right of ``token``; None means: nobody's right is needed."""
    previous = _current.set(token)
    try:
        yield
    finally:
        _current.reset(previous)


def check_before_sending(check: Callable[[], None]) -> Callable[[str, object], Awaitable[None]]:
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
    token = _current.get()
    if token is not None and not token.is_valid:
        whose = "work without a shard" if token is NO_TOKEN else f"shard {token.shard} in epoch {token.epoch}"
        raise FencedError(f"the right to write has run out for {whose}", kind=kind, key=key)
