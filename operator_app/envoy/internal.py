"""What a proxy has beside the listeners and backends of its spec: admin interface, readiness, and its own word. Pure.

The admin interface is an abstract Unix socket: it has no port, so neither a neighbour nor a backend that resolves to a
loopback address reaches it. Envoy itself does, in two ways only:

* the cluster ``LOADED`` asks it for the versions of the configuration files until each has been accepted once. The
  readiness probe answers 200 only then, so a Pod whose files were bad at its start is never ready. A file that is
  refused later changes nothing: the configuration that was accepted before it goes on serving.
* ``LOADED_PATH`` of the readiness listener answers which versions are loaded, how many updates were refused, and how
  many clusters are not ready to be used. It is a fixed question; the request adds nothing to it.
"""

from collections.abc import Iterable
from typing import Final

from operator_app.api.models import METRICS_PORT, READINESS_PORT
from operator_app.envoy.messages import (
    Message,
    extension,
    http_connection_manager,
    pipe,
    router,
    static_cluster,
    tcp_listener,
)

ADMIN_SOCKET: Final = "@operator-app/admin"
"""The admin interface, in the Pod's network namespace."""

READINESS_PATH: Final = "/ready"
"""Answered with 200 once Envoy has loaded all files, and with 503 before, and from the start of the drain."""

LOADED_PATH: Final = "/loaded"
"""Answered with the statistics that say what Envoy has loaded, one a line, as its admin interface prints them."""

METRICS_PATH: Final = "/stats/prometheus"
"""Answered with all statistics in Prometheus' text format, where the spec asks for it."""

MAX_READINESS_CONNECTIONS: Final = 128
"""Bound on connections to the readiness listener, and on those to the metrics listener.

The bound of the whole proxy does not apply to it, so a proxy at that bound still answers its readiness probe.
"""

VERSION_PREFIX: Final = "sha256:"
"""With which every ``version_info`` begins; before a file was accepted, its version is empty."""

LISTENERS_STAT: Final = "listener_manager.lds"
CLUSTERS_STAT: Final = "cluster_manager.cds"

ADMIN: Final = "internal/admin"
LOADED: Final = "internal/loaded"

_READINESS: Final = "internal/readiness"
_METRICS: Final = "internal/metrics"
_QUESTION: Final = (
    r"^(cluster_manager\.cds|listener_manager\.lds|http\.listener/.*\.rds\.listener/.*)"
    r"\.(version_text|update_rejected|update_failure)$|\.(warming_clusters|total_listeners_warming)$"
    r"|^sds\.(certificate|authorities)/.*\.(update_success|key_rotation_failed)$"
    r"|\.ssl\.certificate\.(certificate|authorities)/.*\.expiration_unix_time_seconds$"
)
_LOADED_STATS: Final = "/stats?filter=" + "".join(
    character if character.isalnum() else f"%{ord(character):02X}" for character in _QUESTION
)
"""The question as the admin interface takes it, percent-encoded."""

_MAX_ANSWER_BYTES: Final = 64 * 1024
"""Of the answer, of which Envoy looks at 1 KiB by default: less than the names of sixteen listeners take."""

_CHECK_S: Final = 0.1
"""Seconds between two looks at the versions before all files have been accepted."""


def routes_stat(listener: str) -> str:
    """The prefix of the statistics about the routes of the Envoy listener called ``listener``."""
    return f"http.{listener}.rds.{listener}"


def admin_interface() -> Message:
    """The admin interface. It is exempt from the bound on connections: a full proxy can still be drained."""
    return {"address": pipe(ADMIN_SOCKET), "ignore_global_conn_limit": True}


def clusters(http_listeners: Iterable[str]) -> list[Message]:
    """The clusters of the readiness listener; ``http_listeners`` are the names of the Envoy listeners with routes.

    The health of ``LOADED`` says whether every file has been accepted at least once.
    """
    # Statistics are sorted by name, and the texts have to appear in this order.
    stats = sorted((CLUSTERS_STAT, LISTENERS_STAT, *map(routes_stat, http_listeners)))
    versions = [{"text": f'{each}.version_text: "{VERSION_PREFIX}'.encode().hex()} for each in stats]
    every = f"{_CHECK_S:g}s"
    check = {
        "http_health_check": {
            "host": "loaded",
            "path": _LOADED_STATS,
            "receive": versions,
            "response_buffer_size": _MAX_ANSWER_BYTES,
        },
        "timeout": "1s",
        "interval": every,
        # Without traffic of its own the cluster would be checked once a minute.
        "no_traffic_interval": every,
        # Once accepted, always accepted: what is refused later leaves the version before it.
        "no_traffic_healthy_interval": "60s",
        "healthy_threshold": 1,
        "unhealthy_threshold": 3,
    }
    return [
        static_cluster(ADMIN, pipe(ADMIN_SOCKET)),
        static_cluster(LOADED, pipe(ADMIN_SOCKET)) | {"health_checks": [check]},
    ]


def readiness_listener(*, is_dual_stack: bool = False) -> Message:
    """The listener that answers ``GET READINESS_PATH`` and ``GET LOADED_PATH``, and every other request with 404."""
    answer = extension(
        "envoy.filters.http.health_check",
        "filters.http.health_check.v3.HealthCheck",
        pass_through_mode=False,
        headers=_get(READINESS_PATH),
        cluster_min_healthy_percentages={LOADED: {"value": 100}},
    )
    # A query would be added to the question: the whole path is compared, with what follows a question mark.
    asked = {
        "match": {"path": LOADED_PATH, "headers": _get(LOADED_PATH)},
        "route": {"cluster": ADMIN, "prefix_rewrite": _LOADED_STATS, "timeout": "5s"},
    }
    return _internal_listener(_READINESS, READINESS_PORT, asked, [answer, router()], is_dual_stack=is_dual_stack)


def metrics_listener(*, is_dual_stack: bool = False) -> Message:
    """The listener that answers ``GET METRICS_PATH``, and every other request with 404."""
    asked = {
        "match": {"path": METRICS_PATH, "headers": _get(METRICS_PATH)},
        "route": {"cluster": ADMIN, "timeout": "10s"},
    }
    return _internal_listener(_METRICS, METRICS_PORT, asked, [router()], is_dual_stack=is_dual_stack)


def _internal_listener(
    name: str, port: int, route: Message, http_filters: list[Message], *, is_dual_stack: bool
) -> Message:
    """A listener for questions about the proxy: of one route, with bounds of its own on connections and headers."""
    limit = extension(
        "envoy.filters.network.connection_limit",
        "filters.network.connection_limit.v3.ConnectionLimit",
        stat_prefix=name,
        max_connections=MAX_READINESS_CONNECTIONS,
    )
    serve = http_connection_manager(
        stat_prefix=name,
        # HTTP/1 serves one request at a time on a connection, and a connection is closed after a minute.
        codec_type="HTTP1",
        common_http_protocol_options={"idle_timeout": "10s", "max_connection_duration": "60s"},
        request_headers_timeout="2s",
        max_request_headers_kb=8,
        route_config={"name": name, "virtual_hosts": [{"name": name, "domains": ["*"], "routes": [route]}]},
        http_filters=http_filters,
    )
    return tcp_listener(name, port, [limit, serve], is_dual_stack=is_dual_stack) | {
        "ignore_global_conn_limit": True,
        # A proxy that sheds load is not one that should be restarted.
        "bypass_overload_manager": True,
    }


def _get(path: str) -> list[Message]:
    return [
        {"name": ":method", "string_match": {"exact": "GET"}},
        {"name": ":path", "string_match": {"exact": path}},
    ]
