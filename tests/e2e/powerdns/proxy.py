"""An HTTP proxy between the registry and its server that counts requests and injects faults."""

import http.client
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from tests.e2e.powerdns.counting import Counting

FORWARD_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class HttpFault:
    """The fault of one request; without arguments it is forwarded as it is.

    ``before`` is called first, then comes the delay. With a ``status`` it is answered instead of forwarded. With
    ``is_dropped`` the connection is closed and the server never gets the request. With ``is_lost`` the server processes
    it, and the connection is closed instead of answered; with ``is_cut`` in the middle of its answer.
    """

    before: Callable[[], None] | None = None
    delay_s: float = 0
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_dropped: bool = False
    is_lost: bool = False
    is_cut: bool = False


class FaultyProxy(Counting[HttpFault]):
    """A proxy on a free port of loopback, for as long as the context lasts; a search is counted as ``SEARCH``."""

    def __init__(self, target_port: int) -> None:
        server = _Server(self, target_port)
        super().__init__(HttpFault(), server)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: FaultyProxy, target_port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = proxy
        self.target_port = target_port


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Log nothing."""

    def do_GET(self) -> None:
        self._handle(b"")

    def do_PATCH(self) -> None:
        self._handle(self.rfile.read(int(self.headers["Content-Length"])))

    def _handle(self, body: bytes) -> None:
        self.close_connection = True
        fault = self.server.proxy.arrived("SEARCH" if "/search-data" in self.path else self.command)
        if fault.before is not None:
            fault.before()
        time.sleep(fault.delay_s)
        if fault.is_dropped:
            return
        if fault.status is not None:
            self._answer(fault.status, fault.headers, fault.body)
            return
        status, headers, content = self._forwarded(body)
        if not fault.is_lost:
            self._answer(status, headers, content, is_cut=fault.is_cut)

    def _forwarded(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target_port, timeout=FORWARD_TIMEOUT_S)
        try:
            connection.request(self.command, self.path, body or None, dict(self.headers))
            answer = connection.getresponse()
            return answer.status, {"Content-Type": answer.headers["Content-Type"] or ""}, answer.read()
        except OSError:
            return 502, {}, b""
        finally:
            connection.close()

    def _answer(self, status: int, headers: Mapping[str, str], content: bytes, *, is_cut: bool = False) -> None:
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            # An empty answer is cut by promising more.
            self.send_header("Content-Length", str(max(1, len(content)) if is_cut else len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if is_cut else content)
        except OSError:
            return  # the client has closed the connection
