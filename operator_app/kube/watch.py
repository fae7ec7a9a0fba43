"""Follows the objects of one kind: lists, watches, resumes, and lists again when only that gives the whole truth.

A watch is a small state machine. It is either ``Listing``, or ``Watching`` from a resourceVersion; ``next_state`` is
the pure transition, and ``follow`` runs it for ever. Storing what is delivered belongs to ``store``; one list or one
stream, with its connection, to ``client``.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

import anyio
import anyio.lowlevel

from operator_app.api.kinds import Kind, Object
from operator_app.errors import GoneError, OperatorError, TerminalError, TransientError, UndecodableError
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Changed, Deleted, Delta, Listed
from operator_app.kube.hash_ranges import HashRange
from operator_app.kube.responses import Page, WatchEvent

QUIET_S: Final = 90.0
"""A healthy watch may be silent for this long: bookmarks come about every 60 s, from a busy server later."""


BATCH_BYTES: Final = 65_536
"""Objects of a list are decoded and delivered in batches of so many bytes of JSON, and other tasks run in between."""


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """The time limits and pauses of a watch, in seconds.

    The server is asked to end a stream after a time between ``timeout_s`` and twice that, so that not all end together.
    It sends a bookmark about once a minute, so a stream that is silent for ``idle_timeout_s`` (which must be well
    above) is taken for half-open. A stream that lasted for ``healthy_after_s`` counts as a success. The n-th pause in a
    row is ``min(backoff_cap_s, backoff_base_s * 2**(n-1))`` times a factor between one half and one, and never shorter
    than the server's ``Retry-After``, which counts up to ``RETRY_AFTER_CAP_S``.
    """

    timeout_s: float = 300
    idle_timeout_s: float = 150
    healthy_after_s: float = 10
    backoff_base_s: float = 0.5
    backoff_cap_s: float = 30

    def pause_s(self, failures: int, jitter: float) -> float:
        """The pause after the ``failures``-th failure in a row (1 or more); ``jitter`` is in [0, 1)."""
        doublings = min(failures - 1, 32)  # beyond that only the cap counts, and a float could overflow
        return min(self.backoff_cap_s, self.backoff_base_s * 2.0**doublings) * (0.5 + jitter / 2)


@dataclass(frozen=True, slots=True)
class Listing:
    """A complete list comes next: nothing was delivered yet, or deletions may have been missed."""

    failures: int = 0


@dataclass(frozen=True, slots=True)
class Watching:
    """Everything up to ``resource_version`` was delivered; ``is_stalled``: one stream from here made no progress."""

    resource_version: str
    failures: int = 0
    is_stalled: bool = False


RETRY_AFTER_CAP_S: Final = 60.0
"""A watch waits no longer than this, whatever a load balancer in between asks for: nothing else wakes it up."""

State = Listing | Watching
"""``failures`` counts the failures in a row before this state; it determines the next pause."""


@dataclass(frozen=True, slots=True)
class Complete:
    """A list was delivered completely."""

    resource_version: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream ended after ``lasted_s`` seconds.

    ``resource_version`` is the last one that it delivered, else the one that it started from; ``has_delivered`` whether
    any event or bookmark came. ``error`` is None when the server ended the stream normally.
    """

    resource_version: str
    has_delivered: bool
    lasted_s: float
    error: OperatorError | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A list failed before its last page; the pages delivered so far remove nothing."""

    error: OperatorError


StreamOutcome = Complete | Ended | Failed


def next_state(state: State, outcome: StreamOutcome, times: WatchTimes) -> State:
    """The state that follows from how a list or a stream ended.

    A stream resumes from the last resourceVersion that it delivered, except where only a list helps: after 410 in any
    form; after a terminal error (the kind may have been removed and served again with other objects); and when two
    streams from the same resourceVersion make no progress, because the next line can't be decoded or because nothing
    arrives. The latter is a half-open connection, or a server whose etcd was restored from a backup: it accepts a
    resourceVersion of the future and stays silent.

    A stream that lasted resets the count of failures, and so does one that delivered something. A stream that ended
    early is a failure even without an error, else empty streams would be requested without a pause. A complete list
    resets nothing, so that the sequence list, 410, list, 410 slows down.
    """
    match state, outcome:
        case _, Complete(version):
            return Watching(version, failures=state.failures)
        case Watching(), Ended(version, has_delivered, lasted_s, error):
            lasted = lasted_s >= times.healthy_after_s
            failures = 0 if lasted and error is None else 1 if lasted or has_delivered else state.failures + 1
            is_stalled = version == state.resource_version and (
                isinstance(error, UndecodableError) or (not has_delivered and lasted_s >= times.idle_timeout_s)
            )
            if isinstance(error, GoneError | TerminalError) or (is_stalled and state.is_stalled):
                return Listing(failures)
            return Watching(version, failures, is_stalled=is_stalled)
        case _:
            return Listing(failures=state.failures + 1)


Restart = Literal["relist", "reconnect"]
"""How a stream that ended is continued: from a new list, or over a new connection from the same resourceVersion."""


async def follow(  # noqa: PLR0913 - each keyword is a choice of its own, of the application or of a test
    cluster: Cluster,
    kind: Kind,
    *,
    sink: Callable[[Delta], None],
    times: WatchTimes,
    rand: Callable[[], float],
    on_error: Callable[[Kind, OperatorError], None],
    on_restart: Callable[[Restart], None],
    on_progress: Callable[[], None] = lambda: None,
    namespace: str | None = None,
    labels: str | None = None,
    hashes: HashRange | None = None,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> NoReturn:
    """Deliver a kind's objects, and then every change, to ``sink`` for ever.

    Guarantees: the deltas are a list (``Listed`` pages) followed by the changes since, any number of times; an object
    that was deleted without a ``Deleted`` is missing from the next list. The first ``Listed`` with ``last`` means that
    the kind is synced. ``sink`` is called for a part of a page or one event at a time, and other tasks run in between.
    No failure ends this function, not even a kind that is not served yet or that is forbidden: each one is passed to
    ``on_error`` and followed by a pause, see ``WatchTimes``. When cancelled, it closes its connection.

    With ``hashes`` only the objects of these namespaces are delivered, whether the server filters or not.

    ``on_progress`` is called for each page, event and bookmark: whatever proves that the server's state arrives.
    ``rand`` returns numbers in [0, 1). What ``sink`` raises is not caught.
    """
    state: State = Listing()
    while True:
        outcome: StreamOutcome
        if isinstance(state, Listing):
            pages = cluster.list(kind, namespace=namespace, labels=labels, hashes=hashes)
            outcome = await _list(pages, kind, namespace, hashes, sink, on_progress)
        else:
            stream = cluster.watch(
                kind,
                resource_version=state.resource_version,
                timeout_s=int(times.timeout_s * (1 + rand())),
                idle_timeout_s=times.idle_timeout_s,
                namespace=namespace,
                labels=labels,
                hashes=hashes,
            )
            outcome = await _watch(stream, kind, state.resource_version, hashes, sink, on_progress)
        before, state = state, next_state(state, outcome, times)
        if isinstance(before, Watching):
            on_restart("reconnect" if isinstance(state, Watching) else "relist")
        if isinstance(outcome, Complete):
            continue
        if outcome.error is not None:
            on_error(kind, outcome.error)
        if state.failures:
            await sleep(max(times.pause_s(state.failures, rand()), _retry_after_s(outcome.error)))


async def _list(
    listed: AsyncGenerator[Page],
    kind: Kind,
    namespace: str | None,
    hashes: HashRange | None,
    sink: Callable[[Delta], None],
    on_progress: Callable[[], None],
) -> Complete | Failed:
    """Deliver one list, batch by batch."""
    first, version = True, ""
    try:
        async with aclosing(listed) as pages:
            async for page in pages:
                version = page.resource_version
                on_progress()
                for objects, is_end in page.batches(BATCH_BYTES):
                    asked_for = tuple(each for each in objects if _is_asked_for(each, hashes))
                    last = page.last and is_end
                    sink(Listed(kind, namespace, asked_for, version, first=first, last=last, hashes=hashes))
                    first = False
                    await anyio.lowlevel.checkpoint()
    except OperatorError as error:
        return Failed(error)
    return Complete(version)


async def _watch(
    stream: AbstractAsyncContextManager[AsyncIterator[WatchEvent]],
    kind: Kind,
    version: str,
    hashes: HashRange | None,
    sink: Callable[[Delta], None],
    on_progress: Callable[[], None],
) -> Ended:
    """Deliver one stream's changes; a bookmark only moves the resourceVersion to resume from."""
    begun_mono = anyio.current_time()
    has_delivered = False
    problem: OperatorError | None = None
    try:
        async with stream as events:
            async for event in events:
                on_progress()
                match event.type:
                    case "ADDED" | "MODIFIED" if _is_asked_for(event.object, hashes):
                        sink(Changed(kind, event.object))
                    case "DELETED" if _is_asked_for(event.object, hashes):
                        sink(Deleted(kind, event.object))
                    case _:
                        pass
                version, has_delivered = event.resource_version, True
    except OperatorError as error:
        problem = error
    return Ended(version, has_delivered, anyio.current_time() - begun_mono, problem)


def _is_asked_for(obj: Object, hashes: HashRange | None) -> bool:
    """Whether an object is in ``hashes``: a server that knows no such filter sends all of them."""
    return hashes is None or obj["metadata"].get("namespace", "") in hashes


def _retry_after_s(error: OperatorError | None) -> float:
    """The seconds that the server asked to wait, up to ``RETRY_AFTER_CAP_S``; 0 where it did not ask."""
    asked_s = error.retry_after_s if isinstance(error, TransientError) else None
    return min(asked_s or 0.0, RETRY_AFTER_CAP_S)
