"""Fencing tokens: the right to write for a shard, carried in the context of a reconcile and checked before each write.

One replica at a time reconciles the proxies of a shard. Its right to write is a :class:`FencingToken` with a deadline.
A reconcile carries it in its context, and so does everything that it calls, tasks that it starts included. Whoever
writes outside the process calls :func:`check` directly before the bytes are sent: ``client`` for the API server, every
registry for its own system.

Guarantees
    - Once the deadline has passed, :func:`check` raises, however late it is called: after a stuck event loop, after
      SIGSTOP and SIGCONT, after the machine was suspended (the operator's clock goes on in all three).
    - A token that has ended never becomes valid again. A replica that acquires the shard again gets another token.
    - Inside the operator, work for no shard carries ``NO_TOKEN`` and can't write. Code that carries no token at all (a
      command, a test) may write: it was never promised to be the only writer.

What does not belong here: how tokens are acquired and renewed (``sharding.election``), and a write that was checked in
time and arrives late; its preconditions make that harmless (``docs/adr/0014-leases-and-shards.md``).
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

    ``epoch`` grows whenever the shard gets another holder. ``users`` counts the reconciles in progress, until whose end
    the shard is not released. An Event that is sent later carries the token without being counted, and is not sent once
    the token has ended.
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
        """Whether writes are allowed now."""
        return self._clock() < self.until

    def extend(self, until: float) -> None:
        """Move the deadline to ``until``, never back. Must not be called once the token has ended."""
        self.until = max(self.until, until)

    def end(self) -> None:
        """Allow no further write; this is final."""
        self.until = NEVER


NO_TOKEN: Final = FencingToken(-1, 0, until=NEVER, clock=lambda: 0.0)
"""The token of work that has no right to write."""

_current: ContextVar[FencingToken | None] = ContextVar("token", default=None)


def current_token() -> FencingToken | None:
    """The token in this context, to pass it to ``holding`` around work that is done later."""
    return _current.get()


@contextmanager
def holding(token: FencingToken | None) -> Generator[None]:
    """Carry ``token`` while the context lasts; with None, writes need no token."""
    previous = _current.set(token)
    try:
        yield
    finally:
        _current.reset(previous)


def check_before_sending(check: Callable[[], None]) -> Callable[[str, object], Awaitable[None]]:
    """A ``trace`` for the ``extensions`` of an ``httpx`` or ``httpx2`` request: calls ``check`` before head and body.

    Both are sent after the wait for a connection is over. A server does not carry out a request without its body, so a
    request that is stopped between the two changes nothing. https://www.encode.io/httpcore/extensions/#trace
    """

    async def trace(step: str, _details: object) -> None:
        if step in _SENDING:
            check()

    return trace


def check(kind: Kind | None = None, key: Key | None = None) -> None:
    """Raise ``FencedError`` about the given object if the token in this context is not valid any more."""
    token = _current.get()
    if token is not None and not token.is_valid:
        whose = "work without a shard" if token is NO_TOKEN else f"shard {token.shard} in epoch {token.epoch}"
        raise FencedError(f"the right to write has run out for {whose}", kind=kind, key=key)
