"""The pre-stop hook drains a running Envoy without failed requests. No Kubernetes is needed."""

import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path

from operator_app.envoy import drain
from tests.e2e.envoy.envoy_process import (
    DEADLINE_S,
    ENVOY,
    NEEDS_ENVOY,
    backend,
    declared,
    eventually,
    exchange,
    running,
)
from tests.unit.envoy import cases

pytestmark = NEEDS_ENVOY


def hook(admin_socket: str, drain_s: int) -> list[str]:
    """The hook's command with names of sockets that no other test uses."""
    _, *arguments = drain.pre_stop(drain_s)["exec"]["command"]
    return [str(ENVOY), *(each.replace("@operator-app/", admin_socket.removesuffix("admin")) for each in arguments)]


class Client(threading.Thread):
    """Sends one request after the other, on a connection that is kept until a response closes it."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port, self.done = port, threading.Event()
        self.statuses: list[int] = []
        self.closes = 0
        self.failures: list[str] = []

    def run(self) -> None:
        """Send requests until ``done`` is set, then close the connection."""
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
    """No request fails while the hook runs, and every response closes its connection.

    Readiness changes to 503 during the drain, an active request finishes, new connections are served, a TCP connection
    stays open; then the hook exits by itself, and SIGTERM ends Envoy with status 0.
    """
    drain_s = 4
    with backend("app") as app:
        spec = cases.spec([cases.http(), cases.tcp()], [declared(app)])
        with running(spec, tmp_path) as proxy, ExitStack() as stack:
            kept = stack.enter_context(closing(HTTPConnection("127.0.0.1", proxy.port("http"), timeout=DEADLINE_S)))
            raw = stack.enter_context(closing(HTTPConnection("127.0.0.1", proxy.port("tcp"), timeout=DEADLINE_S)))
            eventually(lambda: True if proxy.get("internal/readiness", "/ready")[0] == 200 else None, "ready")
            assert "connection" not in exchange(kept, "/")[2]
            assert exchange(raw, "/")[0] == 200
            slow = stack.enter_context(ThreadPoolExecutor()).submit(proxy.get, "http", "/slow")
            assert app.slow_started.wait(DEADLINE_S)
            clients = [Client(proxy.port("http")) for _ in range(4)]
            for client in clients:
                client.start()
                stack.callback(client.done.set)
            stack.callback(app.slow_released.set)

            started = time.monotonic()
            draining = stack.enter_context(subprocess.Popen(hook(proxy.admin_socket, drain_s)))
            eventually(lambda: True if proxy.get("internal/readiness", "/ready")[0] == 503 else None, "not ready")
            assert draining.poll() is None
            assert exchange(kept, "/")[2]["connection"] == "close"
            status, _, headers = proxy.get("http", "/new")
            assert (status, headers["connection"]) == (200, "close")
            assert exchange(raw, "/")[0] == 200
            app.slow_released.set()
            assert slow.result(DEADLINE_S)[:2] == (200, "app /slow")

            assert draining.wait(DEADLINE_S) == 0
            assert time.monotonic() - started >= drain_s
            assert exchange(raw, "/")[0] == 200
            for client in clients:
                client.done.set()
                client.join(DEADLINE_S)
                assert not client.failures
                assert set(client.statuses) == {200}
                assert client.closes
        assert proxy.process.returncode == 0


def test_hook_exits_although_the_proxy_does_not_answer(tmp_path: Path) -> None:
    """The hook exits with status 0 after ``drain_s``, even if the proxy's admin interface does not respond."""
    with closing(socket.socket(socket.AF_UNIX)) as silent:
        silent.bind(f"\0{tmp_path}/admin")
        silent.listen()
        started = time.monotonic()
        assert subprocess.run(hook(f"@{tmp_path}/admin", 1), check=False, timeout=DEADLINE_S).returncode == 0
        assert time.monotonic() - started >= 1
