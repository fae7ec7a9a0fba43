"""A real HTTP proxy between the registry and its server: it counts, and it fails where it is told to."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self

FORWARD_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Strike:
    """What happens to one request. Without anything: it passes.

    ``before`` runs first, then comes the delay. ``status`` is answered instead of forwarding. ``is_dropped``: the
    connection is cut and the server never sees the request. ``is_lost``: the server did it, and the answer is cut off.
    """

    before: Callable[[], None] | None = None
    delay_s: float = 0
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_dropped: bool = False
    is_lost: bool = False


class FaultyProxy:
    """A proxy on a free port of loopback, up while the context lasts.

    ``requests`` has the method of each request that arrived, in their order; a search counts as ``SEARCH``.
    """

    def __init__(self, target_port: int) -> None:
        self._strikes: dict[str, dict[int, Strike]] = {}
        self._lock = threading.Lock()
        self.requests: list[str] = []
        self._server = _Server(self, target_port)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def strike(self, method: str, strike: Strike, *, nth: int = 1) -> None:
        """Strike the ``nth`` request of a method from now on."""
        with self._lock:
            seen = self.requests.count(method)
            self._strikes.setdefault(method, {})[seen + nth] = strike

    @contextmanager
    def counted(self) -> Iterator[list[str]]:
        """The methods of the requests that arrive in the context, complete at its end."""
        start, inside = len(self.requests), list[str]()
        yield inside
        inside += self.requests[start:]

    def arrived(self, method: str) -> Strike:
        """Count one request; what to do with it."""
        with self._lock:
            self.requests.append(method)
            return self._strikes.get(method, {}).pop(self.requests.count(method), Strike())


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: FaultyProxy, target_port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = proxy
        self.target_port = target_port


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Say nothing."""

    def do_GET(self) -> None:
        self._pass(b"")

    def do_PATCH(self) -> None:
        self._pass(self.rfile.read(int(self.headers["Content-Length"])))

    def _pass(self, body: bytes) -> None:
        self.close_connection = True
        strike = self.server.proxy.arrived("SEARCH" if "/search-data" in self.path else self.command)
        if strike.before is not None:
            strike.before()
        time.sleep(strike.delay_s)
        if strike.is_dropped:
            return
        if strike.status is not None:
            self._answer(strike.status, strike.headers, strike.body)
            return
        status, headers, content = self._forwarded(body)
        if not strike.is_lost:
            self._answer(status, headers, content)

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

    def _answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            return  # the client did not wait
