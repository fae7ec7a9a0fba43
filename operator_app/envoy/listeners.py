"""Envoy's listeners: what each port of a proxy does with the connections that it accepts. Pure."""

from typing import Final

from operator_app.api.connections import ListenerLimits
from operator_app.api.fields import duration_s
from operator_app.api.models import Listener, Protocol
from operator_app.envoy import routes, tls
from operator_app.envoy.messages import (
    Message,
    extension,
    http_connection_manager,
    mounted_file,
    tcp_listener,
)


def listener_name(declared: Listener) -> str:
    """The name of the Envoy listener of a ``declared`` listener, of its routes, and of its cluster if it is TCP."""
    return f"listener/{declared.name}"


def listener(declared: Listener, routes_file: str, *, is_dual_stack: bool = False) -> Message:
    """The Envoy listener for a ``declared`` listener of the spec, bound to its container port on every address.

    It depends on no route: an HTTP listener reads its routes from ``routes_file``, a TCP listener has a cluster of its
    own. Envoy replaces a listener that has changed, and with it the connections, but not one whose routes have.
    """
    name = listener_name(declared)
    serve = _http_filter(name, declared, routes_file) if declared.protocol is Protocol.HTTP else _tcp_filter(name)
    filters = [serve]
    if declared.limits and declared.limits.max_connections:
        limit = extension(
            "envoy.filters.network.connection_limit",
            "filters.network.connection_limit.v3.ConnectionLimit",
            stat_prefix=name,
            max_connections=declared.limits.max_connections,
        )
        filters.insert(0, limit)
    message = tcp_listener(name, declared.container_port, filters, is_dual_stack=is_dual_stack)
    if declared.tls is not None:
        message["filter_chains"][0]["transport_socket"] = tls.transport_socket(declared.tls, declared.protocol)
    if declared.proxy_protocol:
        message["listener_filters"] = [
            extension("envoy.filters.listener.proxy_protocol", "filters.listener.proxy_protocol.v3.ProxyProtocol")
        ]
    return message


def route_configuration(declared: Listener) -> Message:
    """The routes of a ``declared`` HTTP listener, which Envoy reloads without touching a connection.

    A route to a cluster that does not exist (yet) is valid and answers 503.
    """
    message: Message = {
        "name": listener_name(declared),
        "virtual_hosts": routes.virtual_hosts(declared.routes, https_only=declared.https_redirect),
    }
    shared = routes.shared_filters(declared.routes)
    if shared:
        message["typed_per_filter_config"] = shared
    if declared.hsts is not None:
        seconds = declared.hsts.max_age_days * 86_400
        value = f"max-age={seconds}" + ("; includeSubDomains" if declared.hsts.include_subdomains else "")
        header = {"key": "strict-transport-security", "value": value}
        message["response_headers_to_add"] = [{"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}]
    return message


def _tcp_filter(name: str) -> Message:
    return extension(
        "envoy.filters.network.tcp_proxy",
        "filters.network.tcp_proxy.v3.TcpProxy",
        stat_prefix=name,
        cluster=name,
        access_log=[_access_log(_CONNECTION_FIELDS)],
    )


def _http_filter(name: str, declared: Listener, routes_file: str) -> Message:
    limits = declared.limits or ListenerLimits()
    old: Message = {"accept_http_10": True, "default_host_for_http_10": "http10.invalid"} if declared.http10 else {}
    return http_connection_manager(
        stat_prefix=name,
        # The TCP peer is taken for the client, or the one that so many trusted proxies in front say; nothing else of
        # a request's X-Forwarded-For is trusted.
        use_remote_address=True,
        **({"xff_num_trusted_hops": declared.trusted_hops} if declared.trusted_hops else _without_claims()),
        **({"http_protocol_options": old} if old else {}),
        max_request_headers_kb=limits.max_header_kilobytes,
        normalize_path=True,
        merge_slashes=True,
        # Else a request with %2F could match one route while its backend reads the path of another.
        path_with_escaped_slashes_action="UNESCAPE_AND_REDIRECT",
        strip_any_host_port=True,
        strip_trailing_host_dot=True,
        common_http_protocol_options={
            "idle_timeout": f"{duration_s(limits.idle_timeout):g}s",
            # CGI-like backends can't tell X_User from X-User, so a client could set a header that a check has removed.
            # A refusal is visible to the client; dropping the header would change the request silently.
            "headers_with_underscores_action": "REJECT_REQUEST",
        },
        http2_protocol_options={
            "max_concurrent_streams": limits.max_streams,
            "initial_stream_window_size": 64 * 1024,
            "initial_connection_window_size": 1024 * 1024,
        },
        request_headers_timeout=f"{duration_s(limits.headers_timeout):g}s",
        # The only bound on the time of a request that declares none: five minutes without a byte in either direction.
        stream_idle_timeout="300s",
        upgrade_configs=[{"upgrade_type": "websocket"}],
        rds={"route_config_name": name, "config_source": mounted_file(routes_file)},
        http_filters=routes.filters(),
        access_log=[_access_log(_REQUEST_FIELDS)],
    )


_CLAIMS: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-port", "x-real-ip")
"""Headers by which proxies tell who the client is and what it asked for. X-Forwarded-Proto is always Envoy's own."""


def _without_claims() -> Message:
    """Where nobody in front is trusted, such headers are the client's claims: backends must not see them."""
    mutation = extension(
        "envoy.http.early_header_mutation.header_mutation",
        "http.early_header_mutation.header_mutation.v3.HeaderMutation",
        mutations=[{"remove": name} for name in _CLAIMS],
    )
    return {"early_header_mutation_extensions": [mutation]}


def virtual_hosts_bytes(declared: Listener) -> int:
    """The length in bytes of the virtual hosts of a ``declared`` listener as compact JSON in ASCII."""
    if declared.protocol is not Protocol.HTTP:
        return 0
    return routes.virtual_hosts_bytes(declared.routes, https_only=declared.https_redirect)


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
