"""Events about a proxy, over a scripted server: one object for what repeats, and no effect on reconciles."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import anyio
import httpx2
import pytest

from operator_app.api.kinds import Object
from operator_app.kube.events import BACKLOG, NOTE_BYTES, EventRecorder, Occurrence
from tests.unit.kube.scripted_client import cluster_over

pytestmark = pytest.mark.anyio

PROXY: Final[Object] = {
    "apiVersion": "edge.operator-app.dev/v1alpha1",
    "kind": "EnvoyProxy",
    "metadata": {"namespace": "team-a", "name": "checkout", "uid": "u-1"},
}
START: Final = datetime(2026, 7, 1, 12, 0, 0, tzinfo=UTC)


def drift(note: str = "Service team-a/checkout-envoy: x", about: str = "Service", proxy: Object = PROXY) -> Occurrence:
    """The occurrence of a repaired drift."""
    return Occurrence(proxy, "Normal", "DriftRepaired", "Repair", about, note)


class Server(httpx2.AsyncBaseTransport):
    """Keeps Events like the API server: a name only once, a patch only of the version that it names.

    ``refuse`` may answer in its place.
    """

    def __init__(self, refuse: Callable[[httpx2.Request], httpx2.Response | None] = lambda _: None) -> None:
        self._refuse = refuse
        self.events: dict[str, Object] = {}
        self.requests: list[str] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The answer."""
        self.requests.append(request.method)
        return self._refuse(request) or self._answer(request.method, request.url.path, await request.aread())

    def _answer(self, method: str, path: str, content: bytes) -> httpx2.Response:
        name = path.rpartition("/")[2]
        body: Any = json.loads(content) if content else {}
        match method:
            case "POST" if body["metadata"]["name"] in self.events:
                return status(409, "AlreadyExists")
            case "POST":
                name = body["metadata"]["name"]
                self.events[name] = body | {"metadata": body["metadata"] | {"resourceVersion": "1"}}
                return httpx2.Response(201, json=self.events[name])
            case "GET" if name not in self.events:
                return status(404, "NotFound")
            case "PATCH":
                event = self.events[name]
                if body["metadata"]["resourceVersion"] != event["metadata"]["resourceVersion"]:
                    return status(409, "Conflict")
                version = str(int(event["metadata"]["resourceVersion"]) + 1)
                metadata = event["metadata"] | {"resourceVersion": version}
                self.events[name] = event | {"series": body["series"], "metadata": metadata}
            case _:
                pass
        return httpx2.Response(200, json=self.events[name])


def status(code: int, reason: str) -> httpx2.Response:
    """A refusal."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": "no"}
    return httpx2.Response(code, json=body | {"details": {"name": "x"}})


@asynccontextmanager
async def recording(server: Server, folder: Path) -> AsyncGenerator[EventRecorder]:
    """A recorder that sends to ``server``; at the end everything that was recorded has been sent."""
    moments = iter(START + timedelta(seconds=n) for n in range(10_000))
    async with (
        cluster_over(server, folder) as cluster,
        anyio.create_task_group() as tasks,
    ):
        recorder = EventRecorder(cluster, instance="pod-1", now=lambda: next(moments))
        tasks.start_soon(recorder.run)
        yield recorder
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


async def test_an_event_says_who_saw_what_of_whom(tmp_path: Path) -> None:
    """The Event regards the proxy by UID, names operator and reason, and has a time with six digits."""
    server = Server()
    async with recording(server, tmp_path) as recorder:
        recorder.record(drift())
    (event,) = server.events.values()
    assert event["regarding"] == {
        "apiVersion": "edge.operator-app.dev/v1alpha1",
        "kind": "EnvoyProxy",
        "namespace": "team-a",
        "name": "checkout",
        "uid": "u-1",
    }
    assert (event["reason"], event["action"], event["type"]) == ("DriftRepaired", "Repair", "Normal")
    assert (event["reportingController"], event["reportingInstance"]) == ("operator-app", "pod-1")
    assert event["eventTime"] == "2026-07-01T12:00:00.000000Z"
    assert "series" not in event


async def test_repeats_are_counted_on_one_object(tmp_path: Path) -> None:
    """The same reason about the same child is one object, whose series has the count and the last time."""
    server = Server()
    async with recording(server, tmp_path) as recorder:
        for number in range(4):
            recorder.record(drift(note=f"time {number}"))
    (event,) = server.events.values()
    assert event["series"]["count"] == 4
    assert event["series"]["lastObservedTime"] > event["eventTime"]
    assert event["note"] == "time 0"


async def test_a_restarted_operator_continues_the_count(tmp_path: Path) -> None:
    """The count is stored in the Event only, so a restarted operator continues where the first one stopped."""
    server = Server()
    for _ in range(3):
        async with recording(server, tmp_path) as recorder:
            recorder.record(drift())
    (event,) = server.events.values()
    assert event["series"]["count"] == 3


async def test_what_differs_has_an_event_of_its_own(tmp_path: Path) -> None:
    """Another child, or another incarnation of the proxy, has an Event of its own."""
    server = Server()
    reborn = PROXY | {"metadata": PROXY["metadata"] | {"uid": "u-2"}}
    async with recording(server, tmp_path) as recorder:
        for occurrence in (drift(), drift(about="Deployment"), drift(proxy=reborn)):
            recorder.record(occurrence)
    assert len(server.events) == 3
    assert not any("series" in each for each in server.events.values())


@pytest.mark.parametrize("letter", ["x", "é", "\U0001f9ed"])
async def test_a_long_note_is_cut_to_what_the_server_takes(tmp_path: Path, letter: str) -> None:
    """A note has at most 1024 bytes of whole characters: the server counts bytes, and managers may have any name."""
    server = Server()
    async with recording(server, tmp_path) as recorder:
        recorder.record(drift(note="a" + letter * 2000))
    (event,) = server.events.values()
    assert NOTE_BYTES - 4 < len(event["note"].encode()) <= NOTE_BYTES
    assert set(event["note"]) == {"a", letter}


async def test_what_is_refused_is_dropped_and_the_next_is_sent(tmp_path: Path) -> None:
    """A dying namespace, a missing right or a broken connection costs an Event and nothing else."""
    refusals = iter([status(403, "Forbidden"), status(500, "InternalError"), httpx2.Response(502, text="<html>")])
    server = Server(lambda _: next(refusals, None))
    async with recording(server, tmp_path) as recorder:
        for _ in range(4):
            recorder.record(drift())
    (event,) = server.events.values()
    assert "series" not in event
    assert server.requests == ["POST"] * 4


async def test_an_event_that_expired_in_between_is_dropped(tmp_path: Path) -> None:
    """An Event that is gone between the refused create and the read costs one count, and no error."""
    server = Server()
    async with recording(server, tmp_path) as recorder:
        recorder.record(drift())
        await anyio.wait_all_tasks_blocked()
        (name,) = server.events
        server._refuse = lambda request: status(404, "NotFound") if request.method == "GET" else None
        recorder.record(drift())
        await anyio.wait_all_tasks_blocked()
        assert server.requests == ["POST", "POST", "GET"]
        del server.events[name]
        recorder.record(drift())
    assert "series" not in server.events[name]


async def test_recording_never_waits(tmp_path: Path) -> None:
    """With a server that does not answer, a backlog builds up to its bound and the rest is dropped."""
    released = anyio.Event()

    class Stuck(Server):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            await released.wait()
            return await super().handle_async_request(request)

    server = Stuck()
    async with recording(server, tmp_path) as recorder:
        recorder.record(drift(about="0"))
        await anyio.wait_all_tasks_blocked()
        for number in range(1, BACKLOG + 50):
            recorder.record(drift(about=str(number)))
        released.set()
    assert len(server.events) == BACKLOG + 1
