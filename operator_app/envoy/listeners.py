"""Envoy's listeners: what each port of a proxy does with the connections that it accepts. Pure.

Route precedence
----------------

Of all routes of an HTTP listener that match a request's host and path, the first by this order answers:

1. host: an exact host, then a longer ``*.`` wildcard, then a shorter one, then a route without hosts;
2. path: ``pathExact``, then a longer ``pathPrefix``, then a shorter one, then a route without path;
3. the order of declaration.

A request for ``shop.example.com`` that matches none of its own routes can therefore match a route of ``*.example.com``.
Hosts are compared without port, trailing dot and case; ``*.example.com`` matches one or more labels before
``.example.com``, but not ``example.com``. Paths are compared without query, after percent-decoding of unreserved
characters and resolution of ``//``, ``/./`` and ``/../``. ``pathPrefix`` matches whole segments: ``/api`` and ``/api/``
both match ``/api``, ``/api/`` and ``/api/v1``, but not ``/apiary`` (as Gateway API's ``PathPrefix``). Envoy answers a
request that matches no route with 404.
"""

import json
from collections.abc import Iterator
from typing import Final

from operator_app.api.models import Listener, Protocol, Route
from operator_app.envoy.clusters import cluster_name
from operator_app.envoy.messages import (
    Message,
    extension,
    http_connection_manager,
    mounted_file,
    router,
    tcp_listener,
)


def listener_name(declared: Listener) -> str:
    """The name of the Envoy listener of a ``declared`` listener, of its routes, and of its cluster if it is TCP."""
    return f"listener/{declared.name}"


def routes_file(declared: Listener) -> str:
    """The name of the file with the routes of a ``declared`` HTTP listener."""
    return f"rds-{declared.name}.json"


def listener(declared: Listener) -> Message:
    """The Envoy listener for a ``declared`` listener of the spec, bound to its container port on every IPv4 address.

    It depends on no route: an HTTP listener reads its routes from ``routes_file``, a TCP listener has a cluster of its
    own. Envoy replaces a listener that has changed, and with it the connections, but not one whose routes have.
    """
    name = listener_name(declared)
    serve = _http_filter(name, declared) if declared.protocol is Protocol.HTTP else _tcp_filter(name)
    return tcp_listener(name, declared.container_port, [serve])


def route_configuration(declared: Listener) -> Message:
    """The routes of a ``declared`` HTTP listener, which Envoy reloads without touching a connection.

    A route to a cluster that does not exist (yet) is valid and answers 503.
    """
    return {"name": listener_name(declared), "virtual_hosts": _virtual_hosts(declared.routes)}


def _tcp_filter(name: str) -> Message:
    return extension(
        "envoy.filters.network.tcp_proxy",
        "filters.network.tcp_proxy.v3.TcpProxy",
        stat_prefix=name,
        cluster=name,
        access_log=[_access_log(_CONNECTION_FIELDS)],
    )


def _http_filter(name: str, declared: Listener) -> Message:
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
        # The only bound on the time of a request (see _route): five minutes without a byte in either direction.
        stream_idle_timeout="300s",
        upgrade_configs=[{"upgrade_type": "websocket"}],
        rds={"route_config_name": name, "config_source": mounted_file(routes_file(declared))},
        http_filters=[router()],
        access_log=[_access_log(_REQUEST_FIELDS)],
    )


def virtual_hosts_bytes(declared: Listener) -> int:
    """The length in bytes of the virtual hosts of a ``declared`` listener as compact JSON in ASCII.

    Computed without building them: a route that several virtual hosts share is encoded once.
    """
    if declared.protocol is not Protocol.HTTP:
        return 0
    by_path, sharing = _shared_routes(declared.routes)
    route_bytes = [_json_bytes(_route(route)) for route in by_path]
    # Each virtual host, and each route, is followed by a comma or by the bracket that closes its list.
    return 1 + sum(
        _json_bytes({"name": domains[0], "domains": domains, "routes": []})
        + sum(route_bytes[position] + 1 for position in served)
        for served, domains in sharing.items()
    )


def _virtual_hosts(routes: tuple[Route, ...]) -> list[Message]:
    """The virtual hosts of a listener, one for all domains that have the same routes in the same order.

    Virtual hosts that serve the same route contain the same object.
    """
    by_path, sharing = _shared_routes(routes)
    rendered = [_route(route) for route in by_path]
    return [
        {"name": domains[0], "domains": domains, "routes": [rendered[position] for position in served]}
        for served, domains in sharing.items()
    ]


def _shared_routes(routes: tuple[Route, ...]) -> tuple[list[Route], dict[tuple[int, ...], list[str]]]:
    """``routes`` in the order of their paths, and for the positions that a virtual host serves, its domains.

    Envoy searches only the virtual host with the most specific domain, so each one also serves the routes of every
    wildcard that covers its domains. Sharing bounds the size, which would else grow with hosts times routes.
    """
    by_path = sorted(routes, key=_path_rank)
    by_host: dict[str, list[int]] = {}
    for position, route in enumerate(by_path):
        for host in _hosts(route):
            by_host.setdefault(host, []).append(position)
    sharing: dict[tuple[int, ...], list[str]] = {}
    for domain in sorted(by_host):
        served = dict.fromkeys(position for host in _covering(domain) for position in by_host.get(host, ()))
        sharing.setdefault(tuple(served), []).append(domain)
    return by_path, sharing


def _json_bytes(message: Message) -> int:
    return len(json.dumps(message, separators=(",", ":")))


def _covering(domain: str) -> Iterator[str]:
    """``domain`` (a host or a wildcard), then every wildcard that covers it, the most specific first."""
    yield domain
    for position, character in enumerate(domain):
        if character == "." and domain[:position] != "*":
            yield "*" + domain[position:]
    yield "*"


def _path_rank(route: Route) -> tuple[bool, int]:
    """Sort key for the routes of one host: exact paths first, then the longest prefix.

    The sort is stable, so routes of equal rank keep the order of declaration.
    """
    exact, prefix = _path(route)
    return exact is None, -len(prefix)


def _hosts(route: Route) -> tuple[str, ...]:
    return tuple(host.lower() for host in route.match.hosts) if route.match and route.match.hosts else ("*",)


def _path(route: Route) -> tuple[str | None, str]:
    """The exact path or ``None``, then the prefix without its trailing slash, empty if the route has none."""
    if route.match is None:
        return None, ""
    return route.match.path_exact, (route.match.path_prefix or "").rstrip("/")


def _route(route: Route) -> Message:
    exact, prefix = _path(route)
    if exact is not None:
        match = {"path": exact}
    elif prefix:
        match = {"path_separated_prefix": prefix}
    else:
        match = {"prefix": "/"}
    # Envoy's default of 15 s for a whole response would cut downloads, event streams and WebSockets.
    return {"match": match, "route": {"cluster": cluster_name(route.backend), "timeout": "0s"}}


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
