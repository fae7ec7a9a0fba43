"""The HTTP port with ``/healthz``, ``/readyz`` and ``/metrics``, and the health that the first two report.

The port is served by a thread of its own, so that ``/healthz`` reports a stuck event loop instead of being stuck with
it.
"""

import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from socketserver import ThreadingMixIn
from typing import Any, BinaryIO, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client.exposition import make_wsgi_app

from operator_app.errors import ConfigurationError
from operator_app.observability.metrics import Metrics

LOOP_STUCK_AFTER_S: Final = 30.0
"""``/healthz`` fails when the event loop has not called ``beat`` for this long."""

IDLE_TIMEOUT_S: Final = 10.0
"""A connection on which nothing arrives for this long is closed."""

MAX_CONNECTIONS: Final = 64
"""Connections that are open at the same time; one more closes the one that is open for longest."""


MAX_REQUEST_BYTES: Final = 16_384
"""A request is read up to here; what comes behind is not. Probes and scrapers send less than one kilobyte."""


class Health:
    """Whether the operator is alive and ready. Written by the event loop, read by the serving thread."""

    def __init__(self, mono: Callable[[], float] = time.monotonic) -> None:
        self._mono = mono
        self._beat_mono = mono()
        self.is_ready = False
        self.blind: str | None = None
        """A sentence that says since when nothing of a watched kind arrives; None while everything does."""

    def beat(self) -> None:
        """Record that the event loop is running."""
        self._beat_mono = self._mono()

    @property
    def is_alive(self) -> bool:
        """Whether the last ``beat`` was less than ``LOOP_STUCK_AFTER_S`` ago."""
        return self._mono() - self._beat_mono < LOOP_STUCK_AFTER_S


class _Server(ThreadingMixIn, WSGIServer):
    """One thread for each connection, so that a slow or silent client delays no probe; ``MAX_CONNECTIONS`` of them.

    Listens on IPv6 and IPv4 where the machine has both: probes come by the family of the cluster's Pods.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any, **options: Any) -> None:
        self.address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base class
        """Serve a connection in a thread, and end the oldest one where there are too many: probes always get in."""
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > MAX_CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end of the stream, and ends
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - as in the base class
        """Close a connection that was served."""
        with self._lock:
            self._open.pop(request, None)
            super().shutdown_request(request)

    def server_bind(self) -> None:
        """Bind; an IPv6 socket is bound to IPv4 as well."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _BoundedReader:
    """A request as it arrives, with an end after ``MAX_REQUEST_BYTES``.

    Without that, the standard library keeps up to 100 header lines of 65,536 bytes for each connection.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._left_bytes = MAX_REQUEST_BYTES

    def readline(self, limit: int = -1) -> bytes:
        """The next line; empty at the end."""
        return self._counted(self._stream.readline(self._bounded(limit)))

    def read(self, limit: int = -1) -> bytes:
        """The next bytes; empty at the end."""
        return self._counted(self._stream.read(self._bounded(limit)))

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

    def _bounded(self, limit: int) -> int:
        return self._left_bytes if limit < 0 else min(limit, self._left_bytes)

    def _counted(self, found: bytes) -> bytes:
        self._left_bytes -= len(found)
        return found


class _QuietHandler(WSGIRequestHandler):
    """Logs no requests: probes come every few seconds."""

    timeout = IDLE_TIMEOUT_S

    def setup(self) -> None:
        """Bound what is read."""
        super().setup()
        self.rfile: Any = _BoundedReader(self.rfile)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Log nothing."""


@contextmanager
def serving(port: int, metrics: Metrics, health: Health) -> Generator[int]:
    """Serve ``/healthz``, ``/readyz`` and ``/metrics`` on all addresses while the context lasts. Yields the port.

    Raises ``ConfigurationError`` when the port can't be bound.
    """
    expose = make_wsgi_app(metrics.registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        checks = {
            "/healthz": lambda: health.is_alive,
            "/readyz": lambda: health.is_alive and health.is_ready and not health.blind,
        }
        path = environ["PATH_INFO"]
        if path == "/metrics":
            page: Iterable[bytes] = expose(environ, start_response)
            return page
        if path not in checks:
            return _plain(start_response, "404 Not Found")
        if checks[path]():
            return _plain(start_response, "200 OK")
        return _plain(start_response, "503 Service Unavailable", health.blind if path == "/readyz" else None)

    try:
        server = make_server("", port, answer, server_class=_Server, handler_class=_QuietHandler)
    except OSError as error:
        message = f"can't serve on port {port}: {error.strerror}; choose another --http-port"
        raise ConfigurationError(message) from error
    thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _plain(start_response: Callable[..., Any], status: str, reason: str | None = None) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{status}: {reason}\n".encode() if reason else f"{status}\n".encode()]
