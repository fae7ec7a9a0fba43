"""Following one kind without ever losing a change: list, watch, resume, and list again when told to.

A watch is a small state machine. It is either ``Listing`` or ``Watching`` from a resourceVersion; ``after`` says which
state follows what happened, and ``follow`` runs it for ever. What the changes mean, and keeping them, belongs to the
store; what a connection is, to ``cluster.py``.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

import anyio
import anyio.lowlevel

from operator_app.api.kinds import Kind
from operator_app.errors import GoneError, OperatorError, TerminalError, TransientError, UndecodableError
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Changed, Deleted, Delta, Listed
from operator_app.kube.responses import WatchEvent

QUIET_S: Final = 90.0
"""For so long a healthy watch may be silent: bookmarks come about every 60 s, from a busy server later."""


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """How long a watch waits for what; all in seconds.

    A stream is asked to end after a time between ``timeout_s`` and twice that, so that not all end together. The API
    server sends a bookmark about once a minute, so a stream silent for ``idle_timeout_s`` (which must be well above)
    is half-open. A stream that lasted ``healthy_after_s`` proves that things work. The n-th pause in a row is
    ``min(backoff_cap_s, backoff_base_s * 2**(n-1))`` times a factor between one half and one, and never shorter than
    the server's ``Retry-After``.
    """

    timeout_s: float = 300
    idle_timeout_s: float = 150
    healthy_after_s: float = 10
    backoff_base_s: float = 0.5
    backoff_cap_s: float = 30

    def pause_s(self, failures: int, chance: float) -> float:
        """The pause after the ``failures``-th failure in a row, at least the first; ``chance`` is in [0, 1)."""
        doublings = min(failures - 1, 32)  # beyond that only the cap counts, and a float could overflow
        return min(self.backoff_cap_s, self.backoff_base_s * 2.0**doublings) * (0.5 + chance / 2)


@dataclass(frozen=True, slots=True)
class Listing:
    """Nothing is known, or what is known may miss deletions: only a complete list helps."""

    failures: int = 0


@dataclass(frozen=True, slots=True)
class Watching:
    """Everything up to ``resource_version`` was delivered. ``doubtful``: a stream from here has led nowhere once."""

    resource_version: str
    failures: int = 0
    doubtful: bool = False


State = Listing | Watching
"""``failures`` counts the failures in a row that led here; it sets the next pause."""


@dataclass(frozen=True, slots=True)
class Complete:
    """A list was delivered to its end."""

    resource_version: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream is over after ``lasted_s``; ``reached`` is the last resourceVersion that it delivered, or began from.

    ``heard`` tells whether any event or bookmark came. ``error`` is None when the server ended it in good order.
    """

    reached: str
    heard: bool
    lasted_s: float
    error: OperatorError | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A list broke off; its pages count for nothing."""

    error: OperatorError


StreamOutcome = Complete | Ended | Failed


def after(state: State, ended: StreamOutcome, times: WatchTimes) -> State:
    """The state that follows from how a list or a stream went.

    A stream resumes from where it got to, except where only a list helps: after 410 in any form; after a terminal error
    (the kind may have gone and come back with other objects); and when it leads nowhere twice from the same place,
    because the next line is undecodable or because nothing comes. The latter is a half-open connection, or a server
    whose etcd was restored from a backup: it accepts a resourceVersion of the future and stays silent.

    A stream that lasted forgets the failures before it, and one that delivered something does too; but a stream that
    ended early is a failure even without an error, else an empty answer would be asked for at full speed. A complete
    list forgets nothing, so that list, 410, list, 410 slows down.
    """
    match state, ended:
        case _, Complete(version):
            return Watching(version, failures=state.failures)
        case Watching(), Ended(reached, heard, lasted_s, error):
            lasted = lasted_s >= times.healthy_after_s
            failures = 0 if lasted and error is None else 1 if lasted or heard else state.failures + 1
            nowhere = reached == state.resource_version and (
                isinstance(error, UndecodableError) or (not heard and lasted_s >= times.idle_timeout_s)
            )
            if isinstance(error, GoneError | TerminalError) or (nowhere and state.doubtful):
                return Listing(failures)
            return Watching(reached, failures, doubtful=nowhere)
        case _:
            return Listing(failures=state.failures + 1)


Happening = Literal["relist", "reconnect"]
"""What is worth counting: a watch that has to list anew, and one that goes on over another connection."""


async def follow(  # noqa: PLR0913 - each keyword is a choice of its own, of the application or of a test
    cluster: Cluster,
    kind: Kind,
    *,
    sink: Callable[[Delta], None],
    settings: WatchTimes,
    rand: Callable[[], float],
    on_trouble: Callable[[Kind, OperatorError], None],
    on_event: Callable[[Happening], None],
    namespace: str | None = None,
    labels: str | None = None,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> NoReturn:
    """Deliver a kind's objects, and then every change, to ``sink`` for ever.

    Guarantees: the deltas are a list (``Listed`` pages) followed by the changes since, any number of times; whatever
    was deleted unseen is missing from the next list. The first ``Listed`` with ``last`` means in sync. ``sink`` is
    called for one page or one event at a time, and other tasks run in between. No failure ends it, a kind that is not
    served yet or is forbidden included: each is told to ``on_trouble`` and followed by a pause, see ``WatchTimes``.
    When cancelled, it closes its connection.

    ``rand`` yields numbers in [0, 1). What ``sink`` raises is not caught.
    """
    state: State = Listing()
    while True:
        ended: StreamOutcome
        if isinstance(state, Listing):
            ended = await _list(cluster, kind, namespace, labels, sink)
        else:
            stream = cluster.watch(
                kind,
                resource_version=state.resource_version,
                timeout_s=int(settings.timeout_s * (1 + rand())),
                idle_timeout_s=settings.idle_timeout_s,
                namespace=namespace,
                labels=labels,
            )
            ended = await _watch(stream, kind, state.resource_version, sink)
        before, state = state, after(state, ended, settings)
        if isinstance(before, Watching):
            on_event("reconnect" if isinstance(state, Watching) else "relist")
        if isinstance(ended, Complete):
            continue
        if ended.error is not None:
            on_trouble(kind, ended.error)
        if state.failures:
            await sleep(max(settings.pause_s(state.failures, rand()), _wish_s(ended.error)))


async def _list(
    cluster: Cluster, kind: Kind, namespace: str | None, labels: str | None, sink: Callable[[Delta], None]
) -> Complete | Failed:
    """Deliver one list, page by page."""
    first, version = True, ""
    try:
        async with aclosing(cluster.list(kind, namespace=namespace, labels=labels)) as pages:
            async for page in pages:
                version = page.resource_version
                sink(Listed(kind, namespace, tuple(page.items), version, first=first, last=page.last))
                first = False
                await anyio.lowlevel.checkpoint()
    except OperatorError as error:
        return Failed(error)
    return Complete(version)


async def _watch(
    stream: AbstractAsyncContextManager[AsyncIterator[WatchEvent]],
    kind: Kind,
    version: str,
    sink: Callable[[Delta], None],
) -> Ended:
    """Deliver one stream's changes; bookmarks only move the place to resume from."""
    begun_mono = anyio.current_time()
    heard = False
    problem: OperatorError | None = None
    try:
        async with stream as events:
            async for event in events:
                match event.type:
                    case "ADDED" | "MODIFIED":
                        sink(Changed(kind, event.object))
                    case "DELETED":
                        sink(Deleted(kind, event.object))
                    case "BOOKMARK":
                        pass
                version, heard = event.resource_version, True
    except OperatorError as error:
        problem = error
    return Ended(version, heard, anyio.current_time() - begun_mono, problem)


def _wish_s(error: OperatorError | None) -> float:
    """What the server asked us to wait."""
    return (error.retry_after_s or 0.0) if isinstance(error, TransientError) else 0.0
