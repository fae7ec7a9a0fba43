"""Real Envoy reads what ``envoy.py`` writes: it accepts every shape, routes as documented, and drains without loss.

Needs no Kubernetes: Envoy runs as a process on loopback. Its ports are replaced by free ones, nothing else is changed.
"""

import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import pytest

from operator_app.api.models import ADMIN_PORT, EnvoyProxySpec
from operator_app.envoy import bootstrap, drain
from tests.unit.envoy import cases

ENVOY = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
pytestmark = pytest.mark.skipif(ENVOY is None, reason="no envoy beside the interpreter or on PATH")

T = TypeVar("T")
DEADLINE_S = 10.0
ACCEPTED = cases.accepted()


def eventually(probe: Callable[[], T | None], what: str) -> T:
    """The first result of ``probe`` that is not ``None``; fails after ``DEADLINE_S`` seconds."""
    deadline = time.monotonic() + DEADLINE_S
    while (result := probe()) is None:
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        threading.Event().wait(0.02)
    return result


class Proxy:
    """A running Envoy. ``port`` tells where a listener of the spec, or ``internal/readiness``, really listens."""

    def __init__(self, config: dict[str, Any], directory: Path) -> None:
        config = json.loads(bootstrap.render(config))
        config["admin"]["address"]["socket_address"]["port_value"] = 0
        for listener in config["static_resources"]["listeners"]:
            listener["address"]["socket_address"]["port_value"] = 0
        (directory / bootstrap.CONFIG_FILE).write_text(json.dumps(config))
        self._admin_file = directory / "admin"
        self._log = (directory / "log").open("wb")
        self.log_path = directory / "log"
        command = [ENVOY, "-c", directory / bootstrap.CONFIG_FILE, "--admin-address-path", self._admin_file]
        self.process = subprocess.Popen(
            [*map(str, command), "--disable-hot-restart", "--concurrency", "2"], stdout=self._log, stderr=self._log
        )

    def __enter__(self) -> Self:
        self.admin_port = eventually(self._find_admin, "Envoy's admin interface")
        eventually(lambda: True if self.admin("/ready") == "LIVE\n" else None, "Envoy is live")
        listeners = json.loads(self.admin("/listeners?format=json"))["listener_statuses"]
        self._ports = {each["name"]: each["local_address"]["socket_address"]["port_value"] for each in listeners}
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(DEADLINE_S)
        self._log.close()

    def _find_admin(self) -> int | None:
        assert self.process.poll() is None, self.log_path.read_text()
        text = self._admin_file.read_text() if self._admin_file.exists() else ""
        return int(text.rpartition(":")[2]) if text else None

    def admin(self, path: str) -> str:
        """The admin interface's answer to a GET."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=DEADLINE_S) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def port(self, name: str) -> int:
        """Where ``name`` listens."""
        return int(self._ports.get(f"listener/{name}", self._ports.get(name, 0)))

    def get(self, listener: str, path: str, host: str = "any.test", **headers: str) -> tuple[int, str, dict[str, str]]:
        """Status, body and headers of one request on a connection of its own. Underscores in header names stay."""
        with closing(HTTPConnection("127.0.0.1", self.port(listener), timeout=DEADLINE_S)) as connection:
            return exchange(connection, path, host, **headers)


def exchange(
    connection: HTTPConnection, path: str, host: str = "any.test", method: str = "GET", **headers: str
) -> tuple[int, str, dict[str, str]]:
    """Status, body and headers (names in lower case) of one request on ``connection``."""
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in {"Host": host, **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}


class _Answer(BaseHTTPRequestHandler):
    """Says which backend it is and which path it saw, or for ``/headers`` which headers.

    ``/slow`` waits until the test lets it go.
    """

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # One packet for an answer: two would wait for each other's acknowledgement.

    def do_GET(self) -> None:
        backend = cast("_Backend", self.server)
        if self.path == "/slow":
            backend.slow_started.set()
            backend.slow_released.wait(DEADLINE_S)
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = (json.dumps(headers) if self.path == "/headers" else f"{backend.name} {self.path}").encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is the base class's
        """Nothing: the test's own assertions say what went wrong."""


class _Backend(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.name = name
        self.slow_started, self.slow_released = threading.Event(), threading.Event()


@contextmanager
def backend(name: str) -> Iterator[_Backend]:
    """An HTTP server on loopback that answers with its name."""
    with _Backend(name) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def declared(server: _Backend, host: str = "127.0.0.1") -> dict[str, Any]:
    """``server`` as a backend of a spec."""
    return {"name": server.name, "endpoints": [{"host": host, "port": server.server_port}]}


def validated(config: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """What Envoy says about a configuration, without serving it."""
    path = directory / bootstrap.CONFIG_FILE
    path.write_text(config)
    return subprocess.run(
        [str(ENVOY), "--mode", "validate", "-c", path, "-l", "warning"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


# --- acceptance


@pytest.mark.parametrize("name", ACCEPTED)
def test_envoy_accepts_every_shape(name: str, tmp_path: Path) -> None:
    """Every shape of listener with every shape of backend is valid, and neither deprecated nor worth a warning."""
    result = validated(bootstrap.render(bootstrap.bootstrap(ACCEPTED[name])), tmp_path)
    assert result.returncode == 0, result.stdout[-500:] + result.stderr[-500:]
    assert not result.stderr


def test_envoy_accepts_the_drain_helper(tmp_path: Path) -> None:
    """The configuration that the hook carries is valid and not deprecated."""
    command = drain.pre_stop()["exec"]["command"]
    result = validated(command[command.index("--config-yaml") + 1], tmp_path)
    assert result.returncode == 0, result.stdout[-500:] + result.stderr[-500:]
    assert "deprecat" not in result.stderr.lower()


# --- traffic

BACKENDS = ("b0", "b1", "b2", "b3", "b4", "b5")


@pytest.fixture(scope="module")
def backends() -> Iterator[list[_Backend]]:
    """Six HTTP backends that tell their name."""
    with ExitStack() as stack:
        yield [stack.enter_context(backend(name)) for name in BACKENDS]


def running(spec: EnvoyProxySpec, directory: Path) -> Proxy:
    """The proxy that ``spec`` declares, to be entered."""
    return Proxy(bootstrap.bootstrap(spec), directory)


@pytest.fixture(scope="module")
def proxy(backends: list[_Backend]) -> Iterator[Proxy]:
    """A proxy with an HTTP listener that has a route of every kind, one with a route for all, and a TCP listener."""
    routes = [
        {"backend": "b0", "match": {"pathPrefix": "/api/"}},
        {"backend": "b1", "match": {"pathPrefix": "/api/v1"}},
        {"backend": "b2", "match": {"pathExact": "/api/v1"}},
        {"backend": "b3", "match": {"hosts": ["*.example.com"], "pathPrefix": "/api"}},
        {"backend": "b4", "match": {"hosts": ["shop.example.com"], "pathExact": "/only"}},
    ]
    spec = cases.spec(
        [cases.http(*routes), cases.http({"backend": "b5"}, name="all", port=8081), cases.tcp(backend="b5")],
        [declared(each) for each in backends],
    )
    with tempfile.TemporaryDirectory() as directory, running(spec, Path(directory)) as proxy:
        yield proxy


@pytest.mark.parametrize(
    ("host", "path", "answers"),
    [
        ("other.test", "/api", "b0"),
        ("other.test", "/api/", "b0"),
        ("other.test", "/api/x?q=1", "b0"),
        ("other.test", "/apiary", None),
        ("other.test", "/api/v1", "b2"),
        ("other.test", "/api/v1?q=1", "b2"),
        ("other.test", "/api/v1/", "b1"),
        ("other.test", "/api/v1/users", "b1"),
        ("other.test", "/api/v10", "b0"),
        ("other.test", "/only", None),
        ("www.example.com", "/api/v1", "b3"),
        ("a.b.example.com", "/api/v1", "b3"),
        ("example.com", "/api/v1", "b2"),
        ("shop.example.com", "/only", "b4"),
        ("shop.example.com", "/api/v1", "b3"),
        ("SHOP.Example.COM", "/only", "b4"),
        ("shop.example.com:8443", "/only", "b4"),
        ("shop.example.com.", "/only", "b4"),
        ("www.example.com", "/only", None),
        ("other.test", "//api///v1", "b2"),
        ("other.test", "/x/../api/./v1", "b2"),
        ("other.test", "/%61pi/v1", "b2"),
    ],
)
def test_hosts_and_paths_decide(proxy: Proxy, host: str, path: str, answers: str | None) -> None:
    """Host before path, exact before prefix, longer before shorter, whole segments; no match is 404."""
    status, body, _ = proxy.get("http", path, host)
    assert (status, body.partition(" ")[0] or None) == ((200, answers) if answers else (404, None))


def test_the_model_of_the_precedence_is_envoys(backends: list[_Backend], tmp_path: Path) -> None:
    """Over hundreds of requests to overlapping routes, real Envoy answers as the documented precedence says."""
    chance = random.Random(20260729)  # noqa: S311  # any fixed sequence of overlapping routes will do
    hosts = ["example.com", "shop.example.com", "a.shop.example.com", "other.org"]
    patterns = [*hosts, "*.example.com", "*.shop.example.com", "*.com"]
    paths = ["/", "/api", "/api/v1", "/api/v1/users", "/apiary"]

    def match() -> dict[str, Any]:
        path = chance.choice(
            [{}, *({kind: path} for kind in ("pathPrefix", "pathExact") for path in [*paths, "/api/"])]
        )
        return {"hosts": chance.sample(patterns, chance.randrange(4)), **path}

    listeners = [
        cases.http(*({"backend": name, "match": match()} for name in BACKENDS), name=f"l{n}", port=8080 + n)
        for n in range(12)
    ]
    spec = cases.spec(listeners, [declared(each) for each in backends])
    with running(spec, tmp_path) as proxy:
        for listener in spec.listeners:
            with closing(HTTPConnection("127.0.0.1", proxy.port(listener.name), timeout=DEADLINE_S)) as connection:
                for host in hosts:
                    for path in [*paths, "/api/", "/api/v1/"]:
                        position = cases.answering(listener.routes, host, path)
                        status, body, _ = exchange(connection, path, host)
                        expected = (404, "") if position is None else (200, f"b{position} {path}")
                        assert (status, body) == expected, (listener.routes, host, path)


def test_escaped_slash_is_redirected_to_the_plain_path(proxy: Proxy) -> None:
    """An escaped slash can't carry a request past one route's prefix to a backend that reads it as a slash."""
    status, _, headers = proxy.get("http", "/api%2Fv1")
    assert (status, headers["location"]) == (307, "/api/v1")


def test_header_with_underscore_is_refused(proxy: Proxy) -> None:
    """A header that a CGI-like backend would mistake for another one does not reach it."""
    assert proxy.get("all", "/", x_forwarded_user="root")[0] == 400


def test_a_client_cannot_claim_another_address(proxy: Proxy) -> None:
    """What a client says about itself is followed by the address that Envoy saw, and is not believed by Envoy."""
    status, body, _ = proxy.get("all", "/headers", **{"x-forwarded-for": "10.0.0.1", "x-envoy-internal": "true"})
    seen = json.loads(body)
    assert status == 200
    claimed, _, peer = seen["x-forwarded-for"].rpartition(",")
    assert claimed == "10.0.0.1" != peer
    assert "x-envoy-internal" not in seen


def test_tcp_listener_passes_bytes_on(proxy: Proxy) -> None:
    """A TCP listener hands the connection to its backend as it is."""
    with closing(HTTPConnection("127.0.0.1", proxy.port("tcp"), timeout=DEADLINE_S)) as connection:
        status, body, headers = exchange(connection, "/raw")
    assert (status, body) == (200, "b5 /raw")
    assert "x-envoy-upstream-service-time" not in headers


def test_a_name_is_resolved(backends: list[_Backend], tmp_path: Path) -> None:
    """A backend with a DNS name among its endpoints is reached at what the name resolves to."""
    # Nothing listens on 127.0.0.3, so only the name can have led to the answer.
    endpoints = [{"host": "localhost", "port": backends[0].server_port}, {"host": "127.0.0.3", "port": 1}]
    spec = cases.spec([cases.http({"backend": "b0"})], [{"name": "b0", "endpoints": endpoints}])
    with running(spec, tmp_path) as proxy:
        assert {proxy.get("http", "/")[0] for _ in range(8)} == {200, 503}


def test_access_log_is_one_json_line_without_the_query(backends: list[_Backend], tmp_path: Path) -> None:
    """Each request is one JSON object on stdout; hostile text is escaped, and the query is left out."""
    spec = cases.spec([cases.http({"backend": "b5"})], [declared(backends[5])])
    with running(spec, tmp_path) as proxy:
        assert proxy.get("http", '/"},{"%REQ(:PATH)%?password=hunter2', "log.test")[0] == 200
    # Envoy writes what it has buffered when it ends, else every ten seconds.
    log = proxy.log_path.read_text()
    (entry,) = (json.loads(line) for line in log.splitlines() if "log.test" in line)
    assert (entry["status"], entry["method"], entry["host"], entry["cluster"]) == (200, "GET", "log.test", "backend/b5")
    assert entry["path"] == "/%22%7D,%7B%22%REQ(:PATH)%"
    assert "hunter2" not in log


# --- the internal interfaces


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/ready", 200),
        ("POST", "/ready", 404),
        ("GET", "/ready/", 404),
        ("GET", "/ready?x", 404),
        ("GET", "/", 404),
        ("GET", "/stats", 404),
        ("POST", "/healthcheck/fail", 404),
        ("POST", "/quitquitquit", 404),
    ],
)
def test_readiness_listener_serves_one_path(proxy: Proxy, method: str, path: str, status: int) -> None:
    """The readiness listener answers ``GET /ready`` and nothing else: no admin path, no route of the tenant's."""
    with closing(HTTPConnection("127.0.0.1", proxy.port("internal/readiness"), timeout=DEADLINE_S)) as connection:
        found, body, _ = exchange(connection, path, "shop.example.com", method)
    assert (found, body) == (status, "")


def test_admin_interface_is_reachable_on_one_loopback_address_only(proxy: Proxy) -> None:
    """127.0.0.2 stands for any address that is not 127.0.0.1: listeners answer there, the admin interface does not."""
    assert proxy.admin("/ready") == "LIVE\n"
    with socket.create_connection(("127.0.0.2", proxy.port("all")), DEADLINE_S):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", proxy.admin_port), DEADLINE_S)


# --- draining


def hook(proxy_admin_port: int, drain_s: int) -> list[str]:
    """The hook's command, for an Envoy whose admin port is another one and beside other tests on this machine."""
    _, *arguments = drain.pre_stop(drain_s)["exec"]["command"]
    arguments = [each.replace(f'"port_value":{ADMIN_PORT}', f'"port_value":{proxy_admin_port}') for each in arguments]
    return [str(ENVOY), *(each.replace("@operator-app/", f"@{proxy_admin_port}/") for each in arguments)]


class Client(threading.Thread):
    """Sends requests one after the other, on a connection that is kept until the proxy says ``close``."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port, self.done = port, threading.Event()
        self.statuses: list[int] = []
        self.closes = 0
        self.failures: list[str] = []

    def run(self) -> None:
        """Until ``done`` is set; the last connection is closed in between two requests."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        while not self.done.wait(0.005):
            try:
                status, _, headers = exchange(connection, "/")
            except OSError as error:
                self.failures.append(repr(error))
                connection.close()
                continue
            self.statuses.append(status)
            if headers.get("connection") == "close":
                self.closes += 1
                connection.close()
        connection.close()


def test_draining_loses_nothing(tmp_path: Path) -> None:
    """No request fails while the hook runs, and every response asks its connection to end.

    Readiness is 503 at once, a request in flight finishes, new connections are served, a TCP connection stays; then the
    hook ends by itself, and SIGTERM finds nothing left to cut.
    """
    drain_s = 3
    with backend("app") as app:
        spec = cases.spec([cases.http(), cases.tcp()], [declared(app)])
        with running(spec, tmp_path) as proxy, ExitStack() as stack:
            kept = stack.enter_context(closing(HTTPConnection("127.0.0.1", proxy.port("http"), timeout=DEADLINE_S)))
            raw = stack.enter_context(closing(HTTPConnection("127.0.0.1", proxy.port("tcp"), timeout=DEADLINE_S)))
            assert "connection" not in exchange(kept, "/")[2]
            assert exchange(raw, "/")[0] == 200
            slow: list[tuple[int, str, dict[str, str]]] = []
            slow_client = threading.Thread(target=lambda: slow.append(proxy.get("http", "/slow")))
            slow_client.start()
            assert app.slow_started.wait(DEADLINE_S)
            clients = [Client(proxy.port("http")) for _ in range(4)]
            for client in clients:
                client.start()

            started = time.monotonic()
            draining = subprocess.Popen(hook(proxy.admin_port, drain_s))
            eventually(lambda: True if proxy.get("internal/readiness", "/ready")[0] == 503 else None, "not ready")
            assert time.monotonic() - started < drain_s
            assert exchange(kept, "/")[2]["connection"] == "close"
            status, _, headers = proxy.get("http", "/new")
            assert (status, headers["connection"]) == (200, "close")
            assert exchange(raw, "/")[0] == 200
            app.slow_released.set()
            slow_client.join(DEADLINE_S)
            assert [(status, body) for status, body, _ in slow] == [(200, "app /slow")]

            assert draining.wait(DEADLINE_S) == 0
            assert drain_s <= time.monotonic() - started < drain_s + 4
            assert exchange(raw, "/")[0] == 200
            for client in clients:
                client.done.set()
                client.join(DEADLINE_S)
                assert not client.failures
                assert set(client.statuses) == {200}
                assert client.closes
        assert proxy.process.returncode == 0


def test_hook_ends_without_a_proxy() -> None:
    """The hook takes its time and ends well even if the proxy's admin interface does not answer at all."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        started = time.monotonic()
        assert subprocess.run(hook(silent.getsockname()[1], 1), check=False, timeout=DEADLINE_S).returncode == 0
        assert time.monotonic() - started >= 1
