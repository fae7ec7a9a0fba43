"""Envoy's listeners: what each port of a proxy does with the connections that it accepts. Pure."""

from typing import Final

from operator_app.api.models import READINESS_PORT, Listener, Protocol
from operator_app.api.routes import Route
from operator_app.envoy import routes
from operator_app.envoy.clusters import cluster_name
from operator_app.envoy.messages import BUFFER_BYTES, Message, address, extension, http_connection_manager, router

READINESS_PATH: Final = "/ready"
"""Answered with 200 once Envoy serves, and with 503 from the start of the drain."""

MAX_READINESS_CONNECTIONS: Final = 128
"""Bound on connections to the readiness listener.

The bound of the whole proxy does not apply to it, so a proxy at that bound still answers its readiness probe.
"""


def readiness_listener() -> Message:
    """The listener that answers ``GET READINESS_PATH``, and every other request with 404."""
    answer = extension(
        "envoy.filters.http.health_check",
        "filters.http.health_check.v3.HealthCheck",
        pass_through_mode=False,
        headers=[
            {"name": ":method", "string_match": {"exact": "GET"}},
            {"name": ":path", "string_match": {"exact": READINESS_PATH}},
        ],
    )
    limit = extension(
        "envoy.filters.network.connection_limit",
        "filters.network.connection_limit.v3.ConnectionLimit",
        stat_prefix="internal/readiness",
        max_connections=MAX_READINESS_CONNECTIONS,
    )
    serve = http_connection_manager(
        stat_prefix="internal/readiness",
        # HTTP/1 serves one request at a time on a connection, and a connection is closed after a minute.
        codec_type="HTTP1",
        common_http_protocol_options={"idle_timeout": "10s", "max_connection_duration": "60s"},
        request_headers_timeout="2s",
        max_request_headers_kb=8,
        # There is no virtual host and so no route: what the filter does not answer gets 404.
        route_config={"name": "internal/readiness"},
        http_filters=[answer, router()],
    )
    return _tcp_listener("internal/readiness", READINESS_PORT, [limit, serve]) | {"ignore_global_conn_limit": True}


def listener(declared: Listener) -> Message:
    """The Envoy listener for a ``declared`` listener of the spec, bound to its container port on every IPv4 address."""
    name = f"listener/{declared.name}"
    serve = _http_filter(name, declared.routes) if declared.protocol is Protocol.HTTP else _tcp_filter(name, declared)
    return _tcp_listener(name, declared.container_port, [serve])


def _tcp_listener(name: str, port: int, filters: list[Message]) -> Message:
    return {
        "name": name,
        "address": address("0.0.0.0", port),  # noqa: S104  (the Pod's address is unknown at this time)
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [{"filters": filters}],
    }


def _tcp_filter(name: str, listener: Listener) -> Message:
    return extension(
        "envoy.filters.network.tcp_proxy",
        "filters.network.tcp_proxy.v3.TcpProxy",
        stat_prefix=name,
        cluster=cluster_name(listener.routes[0].backend or ""),
        access_log=[_access_log(_CONNECTION_FIELDS)],
    )


def _http_filter(name: str, declared: tuple[Route, ...]) -> Message:
    return http_connection_manager(
        stat_prefix=name,
        # The TCP peer is taken for the client; X-Forwarded-For of a request is not trusted.
        use_remote_address=True,
        normalize_path=True,
        merge_slashes=True,
        # Else a request with %2F could match one route while its backend reads the path of another.
        path_with_escaped_slashes_action="UNESCAPE_AND_REDIRECT",
        strip_any_host_port=True,
        strip_trailing_host_dot=True,
        common_http_protocol_options={
            "idle_timeout": "3600s",
            # CGI-like backends can't tell X_User from X-User, so a client could set a header that a check has removed.
            # A refusal is visible to the client; dropping the header would change the request silently.
            "headers_with_underscores_action": "REJECT_REQUEST",
        },
        http2_protocol_options={
            "max_concurrent_streams": 100,
            "initial_stream_window_size": 64 * 1024,
            "initial_connection_window_size": 1024 * 1024,
        },
        request_headers_timeout="10s",
        # The only bound on the time of a request that declares none: five minutes without a byte in either direction.
        stream_idle_timeout="300s",
        upgrade_configs=[{"upgrade_type": "websocket"}],
        route_config={"name": name, "virtual_hosts": routes.virtual_hosts(declared)},
        http_filters=routes.filters(),
        access_log=[_access_log(_REQUEST_FIELDS)],
    )


def virtual_hosts_bytes(declared: Listener) -> int:
    """The length in bytes of the virtual hosts of a ``declared`` listener as compact JSON in ASCII."""
    return routes.virtual_hosts_bytes(declared.routes) if declared.protocol is Protocol.HTTP else 0


def _access_log(fields: dict[str, str]) -> Message:
    return extension(
        "envoy.access_loggers.stdout",
        "access_loggers.stream.v3.StdoutAccessLog",
        log_format={"json_format": fields},
    )


_CONNECTION_FIELDS: Final = {
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
    "cluster": "%UPSTREAM_CLUSTER%",
    "duration_ms": "%DURATION%",
    "flags": "%RESPONSE_FLAGS%",
    "port": "%DOWNSTREAM_LOCAL_PORT%",
    "time": "%START_TIME%",
    "upstream": "%UPSTREAM_HOST%",
}
"""Envoy's format strings of a connection's access log, by JSON key. Envoy escapes the values; none is from a spec."""

_REQUEST_FIELDS: Final = _CONNECTION_FIELDS | {
    "details": "%RESPONSE_CODE_DETAILS%",
    "host": "%REQ(:AUTHORITY):253%",
    "method": "%REQ(:METHOD):16%",
    # Without the query, which may contain secrets.
    "path": "%PATH(NQ):1024%",
    "protocol": "%PROTOCOL%",
    "request_id": "%REQ(X-REQUEST-ID):64%",
    "status": "%RESPONSE_CODE%",
}
"""As above, for one HTTP request."""
