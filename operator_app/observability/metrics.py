"""What the operator tells about itself: structured logs, Prometheus metrics, and the one HTTP port that serves them.

The port is served by a thread of its own, so that ``/healthz`` can report a stuck event loop instead of being stuck
with it. What the numbers mean for a proxy belongs in its status, not here.
"""

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any, Final, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import make_wsgi_app

from operator_app.errors import ConfigurationError

LOOP_STUCK_AFTER_S: Final = 30.0
"""``/healthz`` fails when the event loop has not come around for this long."""


IDLE_TIMEOUT_S: Final = 10.0
"""A connection on which nothing arrives for this long is closed."""


def configure_logging(level: str, style: str) -> None:
    """One line for each event on standard error: JSON objects, or text for people when ``style`` is ``console``.

    Records of libraries that log through the standard library come out in the same form.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if style == "json" else structlog.dev.ConsoleRenderer(colors=False)
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
            foreign_pre_chain=shared,
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


TENANT_LABELS: Final = 50
"""So many tenants have series of their own; all others share one, however many they are."""

OTHER_TENANTS: Final = "(others)"


class Backlog(NamedTuple):
    """What one tenant waits for: rounds that could run now, and for how long the oldest has been wanted (seconds)."""

    tenant: str
    depth: int
    oldest_s: float


class Metrics:
    """All metrics of one operator, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tenants: set[str] = set()
        self._shown: set[str] = set()
        self.requests = Counter(
            "operator_app_api_requests",
            "Requests to the API server; code is the HTTP status, or none when there was no answer.",
            ["verb", "kind", "code"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "operator_app_api_request_duration_seconds",
            "Time until the API server's answer.",
            ["verb"],
            registry=self.registry,
        )
        self.writes = Counter(
            "operator_app_writes",
            "Writes by what they changed; unchanged is an avoidable write and stays at zero.",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self.rounds = Counter("operator_app_rounds", "Rounds by how they ended.", ["result"], registry=self.registry)
        self.round_seconds = Histogram(
            "operator_app_round_duration_seconds", "Duration of a round.", registry=self.registry
        )
        self.watch_restarts = Counter(
            "operator_app_watch_restarts",
            "Watches that went on over a new connection (reconnect) or from a new list (relist).",
            ["kind", "how"],
            registry=self.registry,
        )
        self.watch_errors = Counter(
            "operator_app_watch_errors", "Lists and watches that failed.", ["kind"], registry=self.registry
        )
        self.drift_repaired = Counter(
            "operator_app_drift_repaired",
            "Children in which fields that somebody else had changed were restored, or that had been deleted.",
            ["kind"],
            registry=self.registry,
        )
        self.missed = Counter(
            "operator_app_sweep_missed",
            "Changes that a sweep's list showed and the watch had not.",
            ["kind"],
            registry=self.registry,
        )
        self.audit_findings = Gauge(
            "operator_app_audit_findings",
            "What the last sweep found not to fit between the proxies and what is known of them here and outside.",
            ["kind"],
            registry=self.registry,
        )
        self.shards_held = Gauge("operator_app_shards_held", "Shards that this replica works.", registry=self.registry)
        self.lease_transitions = Counter(
            "operator_app_lease_transitions",
            "Shards taken, released, lost to another replica, or lapsed because no renewal succeeded in time.",
            ["how"],
            registry=self.registry,
        )
        self.fenced_writes = Counter(
            "operator_app_fenced_writes",
            "Writes that were not sent, because the right to write for the shard had run out.",
            registry=self.registry,
        )
        self.queued = Gauge(
            "operator_app_queue_keys", "Keys that are ready, delayed or in flight.", registry=self.registry
        )
        self.tenant_depth = Gauge(
            "operator_app_tenant_queue_depth",
            "Rounds that could run now if there were workers enough, for the tenants that wait for most.",
            ["tenant"],
            registry=self.registry,
        )
        self.tenant_oldest = Gauge(
            "operator_app_tenant_oldest_seconds",
            "For how long the longest-waiting of these rounds has been wanted.",
            ["tenant"],
            registry=self.registry,
        )
        self.tenant_rounds = Counter(
            "operator_app_tenant_rounds",
            "Rounds by tenant; the first tenants to have one get series of their own.",
            ["tenant"],
            registry=self.registry,
        )

    def count_round_of(self, tenant: str) -> None:
        """Count a round, under the tenant's own name for the first ``TENANT_LABELS`` tenants."""
        if len(self._tenants) < TENANT_LABELS:
            self._tenants.add(tenant)
        self.tenant_rounds.labels(tenant if tenant in self._tenants else OTHER_TENANTS).inc()

    def show_backlogs(self, backlogs: Iterable[Backlog]) -> None:
        """Show the ``TENANT_LABELS`` deepest backlogs one by one, and the others as one."""
        deepest = sorted(backlogs, key=lambda each: each.depth, reverse=True)
        shown, others = deepest[:TENANT_LABELS], deepest[TENANT_LABELS:]
        if others:
            shown.append(
                Backlog(OTHER_TENANTS, sum(each.depth for each in others), max(each.oldest_s for each in others))
            )
        for each in shown:
            self.tenant_depth.labels(each.tenant).set(each.depth)
            self.tenant_oldest.labels(each.tenant).set(each.oldest_s)
        # Not all at once and before: another thread may scrape at any moment.
        for gone in self._shown - {each.tenant for each in shown}:
            self.tenant_depth.remove(gone)
            self.tenant_oldest.remove(gone)
        self._shown = {each.tenant for each in shown}


class Health:
    """Whether the operator lives and is ready. Written by the event loop, read by the serving thread."""

    def __init__(self, mono: Callable[[], float] = time.monotonic) -> None:
        self._mono = mono
        self._beat_mono = mono()
        self.is_ready = False

    def beat(self) -> None:
        """Say that the event loop has come around."""
        self._beat_mono = self._mono()

    @property
    def is_alive(self) -> bool:
        """Whether the event loop has come around lately."""
        return self._mono() - self._beat_mono < LOOP_STUCK_AFTER_S


class _Server(ThreadingMixIn, WSGIServer):
    """One thread for each connection: a client that is slow or says nothing must not hold up a probe.

    Both IPv6 and IPv4 where the machine has both: probes come by the family of the cluster's Pods.
    """

    daemon_threads = True

    def __init__(self, *args: Any, **options: Any) -> None:
        self.address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        super().__init__(*args, **options)

    def server_bind(self) -> None:
        """Bind, to IPv4 as well where the socket is one of IPv6."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _QuietHandler(WSGIRequestHandler):
    """Probes come every few seconds; a log line for each tells nothing."""

    timeout = IDLE_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Say nothing."""


@contextmanager
def serving(port: int, metrics: Metrics, health: Health) -> Generator[int]:
    """Serve ``/healthz``, ``/readyz`` and ``/metrics`` on all addresses while the context lasts. Yields the port.

    Raises ``ConfigurationError`` when the port can't be had.
    """
    expose = make_wsgi_app(metrics.registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        verdicts = {"/healthz": lambda: health.is_alive, "/readyz": lambda: health.is_alive and health.is_ready}
        path = environ["PATH_INFO"]
        if path == "/metrics":
            page: Iterable[bytes] = expose(environ, start_response)
            return page
        if path not in verdicts:
            return _plain(start_response, "404 Not Found")
        return _plain(start_response, "200 OK" if verdicts[path]() else "503 Service Unavailable")

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


def _plain(start_response: Callable[..., Any], status: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [status.encode() + b"\n"]
