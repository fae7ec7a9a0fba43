"""Envoy as a process on loopback, with HTTP backends.

The ports of a configuration are replaced by free ones; nothing else of it is changed.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import pytest

from operator_app.api.models import EnvoyProxySpec
from operator_app.envoy import bootstrap

ENVOY = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")

NEEDS_ENVOY = pytest.mark.skipif(ENVOY is None, reason="no envoy beside the interpreter or on PATH")

T = TypeVar("T")

DEADLINE_S = 10.0


def eventually(probe: Callable[[], T | None], what: str) -> T:
    """The first result of ``probe`` that is not ``None``; fails after ``DEADLINE_S`` seconds."""
    deadline = time.monotonic() + DEADLINE_S
    while (result := probe()) is None:
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        threading.Event().wait(0.02)
    return result


class EnvoyProcess:
    """A running Envoy. ``port`` returns the real port of a listener of the spec or of ``internal/readiness``."""

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
        """The body that the admin interface returns for a GET, empty if the request fails."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=DEADLINE_S) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def port(self, name: str) -> int:
        """The port of the listener called ``name``."""
        return int(self._ports.get(f"listener/{name}", self._ports.get(name, 0)))

    def get(self, listener: str, path: str, host: str = "any.test", **headers: str) -> tuple[int, str, dict[str, str]]:
        """Status, body and headers of one request on a new connection. Underscores in header names are kept."""
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
    """Responds with the backend's name and the request's path, to ``/headers`` with the request's headers.

    The response to ``/slow`` waits for ``slow_released``.
    """

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # One packet per response: two would wait for a delayed acknowledgement.

    def do_GET(self) -> None:
        backend = cast("Backend", self.server)
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
        """Log nothing."""


class Backend(ThreadingHTTPServer):
    """An HTTP server whose slow request starts and ends under the test's control."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.name = name
        self.slow_started, self.slow_released = threading.Event(), threading.Event()


@contextmanager
def backend(name: str) -> Iterator[Backend]:
    """An HTTP server on loopback that responds with its name."""
    with Backend(name) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def declared(server: Backend, host: str = "127.0.0.1") -> dict[str, Any]:
    """``server`` as a backend of a spec."""
    return {"name": server.name, "endpoints": [{"host": host, "port": server.server_port}]}


def running(spec: EnvoyProxySpec, directory: Path) -> EnvoyProcess:
    """The Envoy that ``spec`` declares, as a context manager that starts and stops it."""
    return EnvoyProcess(bootstrap.bootstrap(spec), directory)
