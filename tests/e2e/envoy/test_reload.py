"""A running Envoy takes other files without a restart, and without a lost request. No Kubernetes is needed."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from operator_app.api.models import EnvoyProxySpec
from operator_app.envoy.files import rendered
from tests.e2e.envoy.envoy_process import (
    DEADLINE_S,
    NEEDS_ENVOY,
    Backend,
    EnvoyProcess,
    backend,
    declared,
    eventually,
    exchange,
    running,
)
from tests.e2e.reload.traffic import Traffic
from tests.unit.envoy import cases

pytestmark = [NEEDS_ENVOY, pytest.mark.reload]


class Client(threading.Thread):
    """Sends one request after the other on one connection, and counts what happens."""

    def __init__(self, port: int, done: threading.Event) -> None:
        super().__init__()
        self.port, self.done = port, done
        self.answers: list[tuple[int, str]] = []
        self.failures: list[str] = []

    def run(self) -> None:
        """Send requests until ``done`` is set; a failure of any kind ends the connection and is kept."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)) as connection:
            while not self.done.is_set():
                try:
                    status, body, headers = exchange(connection, "/")
                except OSError as error:
                    self.failures.append(repr(error))
                    return
                self.answers.append((status, body))
                if headers.get("connection") == "close":
                    self.failures.append("the connection was closed")
                    return


@contextmanager
def clients(port: int, count: int) -> Iterator[list[Client]]:
    """Clients that send requests until the end of the block, each on a connection of its own."""
    done = threading.Event()
    started = [Client(port, done) for _ in range(count)]
    for client in started:
        client.start()
    try:
        yield started
    finally:
        done.set()
        for client in started:
            client.join(DEADLINE_S)


def to(name: str, backends: list[Backend], **match: Any) -> EnvoyProxySpec:
    """A spec with an HTTP and a TCP listener that lead to the backend called ``name``."""
    route = {"backend": name} | ({"match": match} if match else {})
    return cases.spec([cases.http(route), cases.tcp(backend=name)], [declared(each) for each in backends])


@pytest.fixture
def two() -> Iterator[list[Backend]]:
    """Two backends that respond with their names."""
    with ExitStack() as stack:
        yield [stack.enter_context(backend(name)) for name in ("one", "two")]


def test_routes_are_swapped_under_traffic(two: list[Backend], tmp_path: Path) -> None:
    """Twenty edits under the traffic of eight kept connections: no request fails, no connection ends."""
    with running(to("one", two), tmp_path) as proxy:
        with clients(proxy.port("http"), 8) as asking:
            for edit in range(20):
                proxy.reload(to("two" if edit % 2 == 0 else "one", two))
                eventually(proxy.has_loaded, f"edit {edit} is loaded")
            before = [len(client.answers) for client in asking]
            eventually(
                lambda: all(len(client.answers) > n + 1 for client, n in zip(asking, before, strict=True)) or None,
                "requests after the last edit",
            )
        for client in asking:
            assert not client.failures
            assert {status for status, _ in client.answers} == {200}
            assert client.answers[-1] == (200, "one /")
            assert (200, "two /") in client.answers
        assert refusals(proxy) == 0


def test_an_edit_of_routes_and_clusters_keeps_connections(two: list[Backend], tmp_path: Path) -> None:
    """A slow request, a TCP connection and a new backend: the running request ends, the TCP connection stays open."""
    one, _ = two
    with running(to("one", two[:1]), tmp_path) as proxy, ExitStack() as stack:
        raw = stack.enter_context(closing(HTTPConnection("127.0.0.1", proxy.port("tcp"), timeout=DEADLINE_S)))
        assert exchange(raw, "/")[:2] == (200, "one /")
        slow: list[tuple[int, str, dict[str, str]]] = []
        client = threading.Thread(target=lambda: slow.append(proxy.get("http", "/slow")))
        client.start()
        assert one.slow_started.wait(DEADLINE_S)
        proxy.reload(to("two", two))
        eventually(proxy.has_loaded, "the edit is loaded")
        eventually(lambda: True if proxy.get("http", "/")[:2] == (200, "two /") else None, "the new route")
        assert exchange(raw, "/")[:2] == (200, "one /"), "a connection keeps the backend that it has"
        one.slow_released.set()
        client.join(DEADLINE_S)
        assert [answer[:2] for answer in slow] == [(200, "one /slow")]
        with closing(HTTPConnection("127.0.0.1", proxy.port("tcp"), timeout=DEADLINE_S)) as new:
            assert exchange(new, "/")[:2] == (200, "two /")


def test_an_equal_update_changes_nothing(two: list[Backend], tmp_path: Path) -> None:
    """The same files swapped in again and again close no connection, and no listener is made anew."""
    spec = to("one", two)
    with running(spec, tmp_path) as proxy:
        with clients(proxy.port("http"), 2) as asking:
            for _ in range(10):
                proxy.reload(spec)
                time.sleep(0.05)
        assert all(not client.failures for client in asking)
        assert proxy.admin("/stats?filter=listener_manager.listener_(modified|in_place_updated)").count(": 0") == 2


def test_equal_updates_every_second_leave_everything_open(tmp_path: Path) -> None:
    """A WebSocket, a download and kept connections, while the same files come again each second: nothing is lost."""
    with Traffic(nullcontext(), "127.0.0.1") as traffic:
        app = {"name": "app", "endpoints": [{"host": "127.0.0.1", "port": traffic.serve("app")}]}
        spec = cases.spec([cases.http({"backend": "app"})], [app])
        with running(spec, tmp_path) as proxy:
            with traffic.flowing([("127.0.0.1", proxy.port("http"))], kept=8, every_s=0.05) as tally:
                for _ in range(4):
                    proxy.reload(spec)
                    time.sleep(1)
                messages, chunks = tally.messages, tally.chunks
                eventually(lambda: True if min(tally.messages - messages, tally.chunks - chunks) else None, "more")
            print(tally)
            assert tally.lost == []
            assert tally.answers.keys() == {"app"}
            modified = proxy.admin("/stats?filter=listener_manager.listener_(modified|in_place_updated)")
            assert modified.count(": 0") == 2


@pytest.mark.parametrize("name", ["lds", "cds", "rds-http"])
def test_a_proxy_whose_files_are_bad_at_its_start_is_not_ready(name: str, two: list[Backend], tmp_path: Path) -> None:
    """It is not ready as long as one of them was never accepted; once it is, what is refused later changes nothing."""
    spec = to("one", two)
    file = next(each for each in rendered(spec).texts if each.startswith(name))
    bad = {file: json.dumps({"version_info": "sha256:0", "resources": [{"@type": "no.such/type"}]})}
    with running(spec, tmp_path, instead=bad) as proxy:
        eventually(lambda: True if refusals(proxy) == 1 else None, "the refusal")
        deadline_mono = time.monotonic() + 1
        while time.monotonic() < deadline_mono:
            assert not ready(proxy)
        proxy.reload(spec)
        eventually(lambda: ready(proxy), "the proxy to be ready")
        proxy.find_ports()
        assert proxy.get("http", "/")[:2] == (200, "one /")

        proxy.mount.swap(proxy.local_texts(proxy.files) | bad)
        eventually(lambda: True if refusals(proxy) == 2 else None, "the refusal")
        assert ready(proxy)
        assert proxy.get("http", "/")[:2] == (200, "one /")
        assert proxy.has_loaded()


def refusals(proxy: EnvoyProcess) -> int:
    """How many updates Envoy has refused or could not read."""
    stats = proxy.admin("/stats?filter=(lds|cds|rds.*)\\.update_(rejected|failure)$")
    return sum(int(line.rpartition(": ")[2]) for line in stats.splitlines())


def ready(proxy: EnvoyProcess) -> bool | None:
    """Whether the readiness probe succeeds; ``None`` if not."""
    return True if proxy.get("internal/readiness", "/ready")[0] == 200 else None
