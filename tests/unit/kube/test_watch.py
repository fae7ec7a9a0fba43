"""Following a kind through every failure that a list or watch can have, in virtual time and without a network."""

import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import pytest

from operator_app.api.kinds import CONFIG_MAP, Kind, Object
from operator_app.errors import (
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    OperatorError,
    ThrottledError,
    TransientError,
    UndecodableError,
)
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Changed, Deleted, Delta, Listed
from operator_app.kube.hash_ranges import HashRange, hash_of
from operator_app.kube.watch import (
    RETRY_AFTER_CAP_S,
    Complete,
    Ended,
    Failed,
    Listing,
    Restart,
    Watching,
    WatchTimes,
    follow,
    next_state,
)

# Long enough for a busy machine: an empty stream must end long before it counts as silent or as healthy.
TIMES = WatchTimes(timeout_s=300, idle_timeout_s=60, healthy_after_s=60, backoff_base_s=1, backoff_cap_s=30)
IMPATIENT_TIMES = replace(TIMES, idle_timeout_s=0.01)
LONG, SHORT = 1000.0, 0.001
IDLE_TIMES = WatchTimes(idle_timeout_s=150)


def delivering(version: str, lasted_s: float, error: OperatorError | None = None) -> Ended:
    """A stream that delivered something."""
    return Ended(version, has_delivered=True, lasted_s=lasted_s, error=error)


def silent(version: str, lasted_s: float, error: OperatorError | None = None) -> Ended:
    """A stream that delivered nothing."""
    return Ended(version, has_delivered=False, lasted_s=lasted_s, error=error)


# --- the state machine, pure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "outcome", "expected"),
    [
        # a list
        (Listing(), Complete("5"), Watching("5")),
        (Listing(3), Complete("5"), Watching("5", failures=3)),
        (Listing(), Failed(TransientError("x")), Listing(1)),
        (Listing(3), Failed(GoneError("x")), Listing(4)),
        (Listing(3), Failed(ForbiddenError("Forbidden", "x")), Listing(4)),
        # a stream that the server ended normally
        (Watching("5", 4), delivering("9", LONG), Watching("9")),
        (Watching("5", 4), delivering("5", LONG), Watching("5")),
        (Watching("5", 4), delivering("9", SHORT), Watching("9", 1)),
        (Watching("5", 4), silent("5", SHORT), Watching("5", 5)),
        # a stream that failed
        (Watching("5", 4), delivering("9", SHORT, TransientError("x")), Watching("9", 1)),
        (Watching("5", 4), silent("5", 20, TransientError("x")), Watching("5", 1)),
        (Watching("5", 4), silent("5", SHORT, TransientError("x")), Watching("5", 5)),
        (Watching("5", 4), silent("5", SHORT, ThrottledError("x")), Watching("5", 5)),
        # what needs a list
        (Watching("5"), silent("5", SHORT, GoneError("x")), Listing(1)),
        (Watching("5", 4), silent("5", SHORT, GoneError("x")), Listing(5)),
        (Watching("5", 4), delivering("9", LONG, GoneError("x")), Listing(1)),
        (Watching("5"), silent("5", SHORT, NotFoundError("KindNotServed", "x")), Listing(1)),
        (Watching("5"), delivering("9", SHORT, ForbiddenError("Forbidden", "x")), Listing(1)),
        (Watching("5"), delivering("9", SHORT, InvalidError("BadRequest", "x")), Listing(1)),
        # a stream without progress: once is resumed, twice from the same resourceVersion needs a list
        (Watching("5"), silent("5", SHORT, UndecodableError("x")), Watching("5", 1, is_stalled=True)),
        (Watching("5"), delivering("9", SHORT, UndecodableError("x")), Watching("9", 1)),
        (Watching("5", 1, is_stalled=True), silent("5", SHORT, UndecodableError("x")), Listing(2)),
        (Watching("5", 1, is_stalled=True), silent("5", SHORT, TransientError("x")), Watching("5", 2)),
        (Watching("5", 1, is_stalled=True), delivering("9", SHORT, UndecodableError("x")), Watching("9", 1)),
        (Watching("5"), silent("5", 150, TransientError("idle")), Watching("5", 1, is_stalled=True)),
        (Watching("5"), silent("5", 300), Watching("5", is_stalled=True)),
        (Watching("5", is_stalled=True), silent("5", 300), Listing()),
        (Watching("5", is_stalled=True), delivering("5", 300), Watching("5")),
    ],
    ids=str,
)
def test_what_follows_what(state: Listing | Watching, outcome: Complete | Ended | Failed, expected: object) -> None:
    """Each line is one rule of the state machine."""
    assert next_state(state, outcome, IDLE_TIMES) == expected


def test_pauses_double_up_to_the_cap_and_are_never_zero() -> None:
    """The n-th pause lies between half and the whole of min(cap, base * 2**(n-1)), for any n."""
    for failures in (1, 2, 3, 5, 6, 40, 10_000):
        whole = min(30.0, 2.0 ** min(failures - 1, 32))
        assert TIMES.pause_s(failures, 0.0) == whole / 2
        assert TIMES.pause_s(failures, math.nextafter(1.0, 0.0)) == pytest.approx(whole)


# --- the loop, against a scripted server ---------------------------------------------------------------------------

Answer = httpx2.Response | Exception


class Over(Exception):  # noqa: N818 - it ends a test, it is no error
    """The script is at its end."""


class Server(httpx2.AsyncBaseTransport):
    """Answers lists and watches by a script; when the script ends, so does the test."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []
        self.selectors: list[str | None] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The next answer of the script."""
        params = request.url.params
        self.selectors.append(params.get("shardSelector"))
        self.asked.append(
            f"watch {params['resourceVersion']}" if "watch" in params else f"list {params.get('continue', '')}".strip()
        )
        if not self._answers:
            raise Over
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Body(httpx2.AsyncByteStream):
    """A stream of these pieces; None is silence for ever."""

    def __init__(self, *pieces: bytes | None) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if piece is None:
                await anyio.sleep_forever()
            else:
                yield piece


def obj(name: str, version: int) -> Object:
    """An object."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "resourceVersion": str(version)}}


def page(version: int, *names: str, more: str = "") -> httpx2.Response:
    """A page of a list."""
    items = [obj(name, version) for name in names]
    return httpx2.Response(200, json={"metadata": {"resourceVersion": str(version), "continue": more}, "items": items})


def line(type_: str, name: str, version: int) -> bytes:
    """A line of a watch."""
    return json.dumps({"type": type_, "object": obj(name, version)}).encode() + b"\n"


def stream(*pieces: bytes | None) -> httpx2.Response:
    """A watch that delivers these lines and ends."""
    return httpx2.Response(200, stream=Body(*pieces))


def refusal(code: int, **headers: str) -> httpx2.Response:
    """A refusal with a Status."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"kind": "Status", "code": code, "message": "m", "details": {"kind": "configmaps"}}
    return httpx2.Response(code, json=body, headers=sent)


GONE_IN_STREAM = json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": 410}}).encode() + b"\n"


class Run:
    """What one run of ``follow`` did."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.errors: list[type[OperatorError]] = []
        self.restarts: list[Restart] = []
        self.pauses_s: list[float] = []

    @property
    def summary(self) -> list[str]:
        """The deltas, in short."""
        words = []
        for delta in self.deltas:
            match delta:
                case Listed(objects=objects, resource_version=version, first=first, last=last):
                    names = ",".join(item["metadata"]["name"] for item in objects)
                    words.append(f"{'[' if first else ''}{names}{']' if last else ''}@{version}")
                case Changed(object=item):
                    words.append(f"+{item['metadata']['name']}@{item['metadata']['resourceVersion']}")
                case Deleted(object=item):
                    words.append(f"-{item['metadata']['name']}@{item['metadata']['resourceVersion']}")
        return words


@pytest.fixture
def run(kubeconfig: Path) -> Callable[..., Run]:
    """Follow a scripted server to the end of its script; pauses are recorded and not slept."""

    def runner(server: Server, **options: Any) -> Run:
        done = Run()

        async def sleep(pause_s: float) -> None:
            done.pauses_s.append(pause_s)

        def on_error(kind: Kind, error: OperatorError) -> None:
            assert kind == error.kind == CONFIG_MAP
            done.errors.append(type(error))

        async def main() -> None:
            async with Cluster.connect(
                kubeconfig=kubeconfig, user_agent="test/1", transport_wrapper=lambda _: server
            ) as cluster:
                chosen: dict[str, Any] = {"sink": done.deltas.append, "rand": lambda: 0.0, "times": TIMES}
                await follow(
                    cluster,
                    CONFIG_MAP,
                    **chosen | options,
                    on_error=on_error,
                    on_restart=done.restarts.append,
                    sleep=sleep,
                )

        with suppress(Over):
            anyio.run(main)
        return done

    return runner


def test_a_list_and_what_changed_since(run: Callable[..., Run]) -> None:
    """Pages arrive marked, changes follow, and a bookmark moves the resourceVersion to resume from without a delta."""
    server = Server(
        page(5, "a", "b", more="t1"),
        page(5, "c", more="t2"),
        page(5),
        stream(line("ADDED", "d", 6), line("MODIFIED", "a", 7), line("DELETED", "b", 8), line("BOOKMARK", "", 12)),
    )
    done = run(server)
    assert done.summary == ["[a,b@5", "c@5", "]@5", "+d@6", "+a@7", "-b@8"]
    assert server.asked == ["list", "list t1", "list t2", "watch 5", "watch 12"]
    assert done.restarts == ["reconnect"]
    assert done.errors == []


def test_deltas_name_their_kind_and_scope(run: Callable[..., Run]) -> None:
    """Kind and namespace are in the deltas, so that one store can take many watches."""
    done = run(Server(page(5, "a"), stream(line("DELETED", "a", 6))), namespace="team-a", labels="a=b")
    assert done.deltas[0] == Listed(CONFIG_MAP, "team-a", (obj("a", 5),), "5", first=True, last=True)
    assert done.deltas[1] == Deleted(CONFIG_MAP, obj("a", 6))


def test_of_a_server_that_ignores_hashes_only_what_was_asked_for_is_delivered(run: Callable[..., Run]) -> None:
    """Objects of other namespaces, on a page or in a stream, are left out, and the watch goes on behind them."""

    def of(namespace: str, name: str, version: int) -> Object:
        return {**(each := obj(name, version)), "metadata": each["metadata"] | {"namespace": namespace}}

    items = [of("team-a", "a", 4), of("team-b", "b", 5)]
    events = [("MODIFIED", of("team-b", "b", 6)), ("ADDED", of("team-a", "c", 7)), ("DELETED", of("team-b", "b", 8))]
    lines = [json.dumps({"type": type_, "object": each}).encode() + b"\n" for type_, each in events]
    server = Server(httpx2.Response(200, json={"metadata": {"resourceVersion": "5"}, "items": items}), stream(*lines))
    own = HashRange(hash_of("team-a"), hash_of("team-a") + 1)
    done = run(server, hashes=own)
    assert done.summary == ["[a]@5", "+c@7"]
    assert done.deltas[0] == Listed(CONFIG_MAP, None, (items[0],), "5", first=True, last=True, hashes=own)
    assert server.asked == ["list", "watch 5", "watch 8"]
    assert server.selectors == [own.selector] * 3


@pytest.mark.parametrize("gone", [refusal(410), stream(GONE_IN_STREAM)], ids=["answer", "in-stream"])
def test_gone_in_any_form_lists_again(run: Callable[..., Run], gone: httpx2.Response) -> None:
    """After 410 the old version is not requested again; what was deleted meanwhile is missing from the list."""
    server = Server(page(5, "a", "b"), stream(line("MODIFIED", "a", 6)), gone, page(20, "a"))
    done = run(server)
    assert server.asked == ["list", "watch 5", "watch 6", "list", "watch 20"]
    assert done.summary == ["[a,b]@5", "+a@6", "[a]@20"]
    assert done.restarts == ["reconnect", "relist"]
    assert done.errors == [GoneError]


def test_gone_between_pages_restarts_the_list(run: Callable[..., Run]) -> None:
    """A continue token that expired discards the pages before it: the next page is a first one."""
    done = run(Server(page(5, "a", more="t1"), refusal(410), page(9, "b")))
    assert done.summary == ["[a@5", "[b]@9"]


def test_list_gone_list_gone_slows_down(run: Callable[..., Run]) -> None:
    """A server that answers every watch with 410 gets requests at growing intervals."""
    done = run(Server(*[answer for version in range(5, 12) for answer in (page(version), refusal(410))]))
    assert done.pauses_s == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert done.restarts == ["relist"] * 7


def test_an_empty_stream_does_not_spin(run: Callable[..., Run]) -> None:
    """Streams that end at once are requested at growing intervals; one that delivers something resets the pause."""
    done = run(Server(page(5), *[stream() for _ in range(7)], stream(line("ADDED", "a", 6)), stream()))
    assert done.pauses_s == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 0.5, 1.0]
    assert done.errors == []


@pytest.mark.parametrize(
    "failure",
    [
        httpx2.ConnectError(""),
        httpx2.PoolTimeout(""),
        httpx2.ReadTimeout(""),
        httpx2.RemoteProtocolError(""),
        refusal(500),
        refusal(503),
        httpx2.Response(502, text="<html>"),
    ],
    ids=repr,
)
def test_a_failure_resumes_from_the_same_version(run: Callable[..., Run], failure: Answer) -> None:
    """Connection and server failures cost a pause, never a list."""
    server = Server(page(5, "a"), failure, stream(line("ADDED", "b", 6)))
    done = run(server)
    assert server.asked == ["list", "watch 5", "watch 5", "watch 6"]
    assert done.summary == ["[a]@5", "+b@6"]
    assert done.errors == [TransientError]
    assert done.pauses_s[:1] == [0.5]


def test_retry_after_is_a_lower_bound(run: Callable[..., Run]) -> None:
    """Retry-After lengthens a pause, for lists and for watches."""
    done = run(Server(refusal(429, Retry_After="9"), page(5), refusal(503, Retry_After="40"), refusal(503)))
    assert done.errors == [ThrottledError, TransientError, TransientError]
    assert done.pauses_s == [9.0, 40.0, 2.0]


def test_retry_after_is_bounded(run: Callable[..., Run]) -> None:
    """A load balancer that asks for an hour makes no kind deaf for longer than a minute."""
    done = run(Server(refusal(503, Retry_After="3600"), page(5), refusal(503, Retry_After="3600")))
    assert done.pauses_s == [RETRY_AFTER_CAP_S, RETRY_AFTER_CAP_S]


def test_a_silent_stream_is_closed(run: Callable[..., Run]) -> None:
    """A half-open connection is closed after the idle timeout; twice from one version, and the kind is listed."""
    server = Server(page(5), stream(line("ADDED", "a", 6), None), stream(None), stream(None), page(9))
    done = run(server, times=IMPATIENT_TIMES)
    assert server.asked == ["list", "watch 5", "watch 6", "watch 6", "list", "watch 9"]
    assert done.errors == [TransientError] * 3


def test_a_stream_cut_inside_an_object_resumes_before_it(run: Callable[..., Run]) -> None:
    """The half object is not lost: the next stream delivers it."""
    whole = line("ADDED", "b", 7)
    server = Server(page(5), stream(line("ADDED", "a", 6) + whole[:20]), stream(whole))
    done = run(server)
    assert server.asked == ["list", "watch 5", "watch 6", "watch 7"]
    assert done.summary == ["[]@5", "+a@6", "+b@7"]
    assert done.errors == [UndecodableError]


def test_an_undecodable_line_is_skipped_by_a_list(run: Callable[..., Run]) -> None:
    """A line that stays undecodable is requested twice and then skipped by a list."""
    server = Server(page(5), stream(b"?\n"), stream(b"?\n"), page(9, "a"))
    done = run(server)
    assert server.asked == ["list", "watch 5", "watch 5", "list", "watch 9"]
    assert done.errors == [UndecodableError] * 2


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(httpx2.Response(404, text="404 page not found"), NotFoundError), (refusal(403), ForbiddenError)],
    ids=["not served", "forbidden"],
)
def test_a_kind_that_is_not_there_yet_is_waited_for(
    run: Callable[..., Run], answer: httpx2.Response, expected: type[OperatorError]
) -> None:
    """A missing CRD or permission is reported and requested again, at bounded intervals, until it is there."""
    server = Server(*[answer] * 8, page(5, "a"))
    done = run(server)
    assert done.errors == [expected] * 8
    assert done.pauses_s == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert done.summary == ["[a]@5"]
    assert done.restarts == []


def test_a_kind_that_was_removed_and_served_again_is_listed(run: Callable[..., Run]) -> None:
    """When a CRD is removed during a watch and created again, its objects are listed."""
    server = Server(page(5, "a"), httpx2.Response(404, text="404 page not found"), page(50))
    done = run(server)
    assert server.asked == ["list", "watch 5", "list", "watch 50"]
    assert done.summary == ["[a]@5", "[]@50"]


def test_streams_do_not_all_end_together(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server-side deadline is drawn between once and twice the setting."""
    asked: list[int] = []
    original = Cluster.watch

    def recording(self: Cluster, kind: Kind, **options: Any) -> object:
        asked.append(options["timeout_s"])
        return original(self, kind, **options)

    monkeypatch.setattr(Cluster, "watch", recording)
    draws: Iterator[float] = iter([0.0, 0.0, 0.999, 0.0, 0.5, 0.0, 0.0])
    run(Server(page(5), stream(), stream(), stream()), rand=lambda: next(draws))
    assert asked[:3] == [300, 599, 450]


def test_other_tasks_run_between_pages(kubeconfig: Path) -> None:
    """A long list yields to the other tasks after each page, even when its answers come at once."""
    turns = 0
    seen: list[int] = []

    async def main() -> None:
        async def ticker() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        server = Server(*(page(5, f"p{number}", more="t") for number in range(4)), page(5))
        async with (
            anyio.create_task_group() as tasks,
            Cluster.connect(kubeconfig=kubeconfig, user_agent="test/1", transport_wrapper=lambda _: server) as cluster,
        ):
            tasks.start_soon(ticker)
            await follow(
                cluster,
                CONFIG_MAP,
                sink=lambda _: seen.append(turns),
                times=TIMES,
                rand=lambda: 0.0,
                on_error=lambda *_: None,
                on_restart=lambda _: None,
            )

    with pytest.raises(ExceptionGroup) as ended:
        anyio.run(main)
    assert ended.group_contains(Over)
    assert len(set(seen)) == 5


def test_errors_of_the_sink_get_out(run: Callable[..., Run]) -> None:
    """A defect in the store stops the program; it is not handled as a failure of the watch."""
    server = Server(page(5, "a"))
    with pytest.raises(ZeroDivisionError):
        run(server, sink=lambda _: 1 / 0)
