"""EnvoyProxy spec in, Envoy out: the bootstrap of one tenant's proxy, and how that proxy is drained. Pure.

Kubernetes objects do not belong here (``desired.py`` mounts what this room renders), nor do rules about what a tenant
may write (``api.py``). Whatever a tenant writes becomes a value: never a key, a type, a regular expression or a format
string. Names of things made from tenants' names carry a prefix, so they cannot meet the proxy's own.

Equal specs give equal text: nothing here depends on a clock, a host or chance, and the order of listeners and backends,
which are maps by name, does not matter. Field names and meanings are those of Envoy's v3 API; the choices for an
untrusted network follow "Configuring Envoy as an edge proxy" in its documentation.

Which route answers
-------------------

Of all routes of an HTTP listener whose host and path match a request, one answers, decided by, in this order:

1. host: an exact host, then a longer ``*.`` wildcard, then a shorter one, then a route without hosts;
2. path: ``pathExact``, then a longer ``pathPrefix``, then a shorter one, then a route without path;
3. the order of declaration.

So the routes of ``*.example.com`` also serve ``shop.example.com`` where its own routes do not match. Hosts are compared
without port, trailing dot and case; ``*.example.com`` takes any number of labels, but not ``example.com``. Paths are
compared without query, after percent-decoding of unreserved characters and removal of ``//``, ``/./`` and ``/../``.
``pathPrefix`` ends at a segment's end: ``/api`` and ``/api/`` both take ``/api``, ``/api/`` and ``/api/v1``, not
``/apiary`` (as Gateway API's ``PathPrefix``). A request that no route takes gets 404 from the proxy.
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from ipaddress import ip_address
from typing import Any, Final

from operator_app.api.models import (
    ADMIN_PORT,
    READINESS_PORT,
    Backend,
    Endpoint,
    EnvoyProxySpec,
    Listener,
    Protocol,
    Route,
    duration_s,
)
from operator_app.errors import TerminalError

CONFIG_FILE: Final = "envoy.json"
"""Key in the ConfigMap, and so the file's name."""

CONFIG_DIRECTORY: Final = "/etc/envoy"
"""Where the ConfigMap is mounted; hides the sample configuration of the official images."""

READINESS_PATH: Final = "/ready"
"""200 once Envoy serves, 503 from the beginning of the drain."""

DRAIN_S: Final = 20
"""How long a terminating proxy goes on serving: time for endpoints to be forgotten and for requests to finish."""

TERMINATION_GRACE_S: Final = DRAIN_S + 10
"""A Pod's grace period: starting to drain, the drain, and Envoy's own exit, with seconds to spare."""

MAX_BYTES: Final = 1_000_000
"""Upper bound of the rendered text. The API server takes ConfigMaps up to 1 MiB, keys included (``MaxSecretSize``)."""

READABLE_BYTES: Final = 100_000
"""Up to this size the text is then indented, which triples it and takes Python's encoder several times as long."""

MAX_DOWNSTREAM_CONNECTIONS: Final = 10_000
"""Client connections of one proxy, over all its listeners; more are closed at once. Bounds memory and descriptors."""

MAX_READINESS_CONNECTIONS: Final = 128
"""Connections to the readiness listener, which does not count in the bound above: a full proxy is still ready."""

MAX_BACKEND_CONNECTIONS: Final = 1024
"""Connections, waiting and running requests of one backend; beyond that, 503 at once instead of a queue."""

_BUFFER_BYTES: Final = 32 * 1024
_TYPE: Final = "type.googleapis.com/envoy.extensions."

_Config = dict[str, Any]


def bootstrap(spec: EnvoyProxySpec) -> _Config:
    """The complete static configuration of the proxy that ``spec`` declares."""
    return {
        # No port of the Pod's own address: only a process inside the Pod can reach the admin interface.
        "admin": {"address": _address("127.0.0.1", ADMIN_PORT), "ignore_global_conn_limit": True},
        "overload_manager": {
            "resource_monitors": [
                _extension(
                    "envoy.resource_monitors.global_downstream_max_connections",
                    "resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                    max_active_downstream_connections=MAX_DOWNSTREAM_CONNECTIONS,
                )
            ]
        },
        "static_resources": {
            "listeners": [
                _readiness_listener(),
                *(_listener(listener) for listener in sorted(spec.listeners, key=lambda listener: listener.name)),
            ],
            "clusters": [_cluster(backend) for backend in sorted(spec.backends, key=lambda backend: backend.name)],
        },
    }


def render(config: _Config) -> str:
    """``config`` as the text of ``CONFIG_FILE``: sorted, ASCII, indented if people can be expected to read it.

    Raises ``TerminalError`` if it does not fit into a ConfigMap, which takes thousands of hosts or long paths: every
    list of the API may be full.
    """
    text = json.dumps(config, separators=(",", ":"), sort_keys=True) + "\n"
    if len(text) <= READABLE_BYTES:
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    if len(text) > MAX_BYTES:
        raise TerminalError(
            "ConfigurationTooLarge",
            f"the Envoy configuration takes {len(text)} bytes, and a ConfigMap holds {MAX_BYTES}: "
            "declare fewer routes and hosts, or divide them between several EnvoyProxies",
        )
    return text


def config_hash(text: str) -> str:
    """16 hexadecimal digits that change with the rendered text."""
    return sha256(text.encode()).hexdigest()[:16]


def pre_stop(drain_s: int = DRAIN_S) -> _Config:
    """The ``lifecycle.preStop`` of a container that drains its Envoy for ``drain_s`` seconds before SIGTERM.

    While it runs, the readiness listener answers 503, every HTTP response ends its connection (``connection: close``,
    GOAWAY) and everything is served, new connections too, since endpoints are forgotten late. TCP connections are left
    alone. It ends about a second after ``drain_s``, whatever Envoy does, and what then still runs is cut.

    The command is Envoy itself, a second one, as the client of the admin interface: an image without a shell has
    nothing else, and nothing has to be opened to the network (docs/adr/0005-draining.md).
    """
    config = json.dumps(_drain_bootstrap(drain_s), separators=(",", ":"), sort_keys=True)
    options = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "off")
    return {"exec": {"command": ["envoy", "--config-yaml", config, *options]}}


def _drain_bootstrap(drain_s: int) -> _Config:
    """An Envoy that fails the proxy's health check, again and again, and ends itself after ``drain_s`` seconds.

    Health checks are the requests that Envoy sends on its own. One goes to the proxy's admin interface; the other, to
    this Envoy's own, through a listener that holds it back for ``drain_s``. Both interfaces of the helper are abstract
    sockets of the Pod's network namespace: no port, no file.
    """
    own_admin = {"pipe": {"path": "@operator-app/drain/admin"}}
    delayed = {"pipe": {"path": "@operator-app/drain/delayed"}}
    delay = _extension(
        "envoy.filters.http.fault",
        "filters.http.fault.v3.HTTPFault",
        delay={"fixed_delay": f"{drain_s}s", "percentage": {"numerator": 100}},
    )
    to_own_admin = {"match": {"prefix": "/"}, "route": {"cluster": "own-admin", "timeout": "0s"}}
    return {
        "admin": {"address": own_admin},
        "static_resources": {
            "listeners": [
                {
                    "name": "delayed",
                    "address": delayed,
                    "filter_chains": [
                        {
                            "filters": [
                                _http_connection_manager(
                                    stat_prefix="delayed",
                                    stream_idle_timeout="0s",
                                    route_config={
                                        "virtual_hosts": [{"name": "any", "domains": ["*"], "routes": [to_own_admin]}]
                                    },
                                    http_filters=[delay, _router()],
                                )
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                _static_cluster("own-admin", own_admin),
                _static_cluster("proxy-admin", _address("127.0.0.1", ADMIN_PORT))
                | {"health_checks": [_repeated_post("/healthcheck/fail", timeout_s=1)]},
                _static_cluster("delayed", delayed)
                | {"health_checks": [_repeated_post("/quitquitquit", timeout_s=drain_s + 10)]},
            ],
        },
    }


def _repeated_post(path: str, *, timeout_s: int) -> _Config:
    return {
        "http_health_check": {"path": path, "method": "POST", "host": "drain"},
        "timeout": f"{timeout_s}s",
        "interval": "1s",
        # Envoy checks clusters without traffic once a minute unless told otherwise.
        "no_traffic_interval": "1s",
        "no_traffic_healthy_interval": "1s",
        "healthy_threshold": 1,
        "unhealthy_threshold": 1,
    }


def _static_cluster(name: str, address: _Config) -> _Config:
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
    }


def _readiness_listener() -> _Config:
    answer = _extension(
        "envoy.filters.http.health_check",
        "filters.http.health_check.v3.HealthCheck",
        pass_through_mode=False,
        headers=[
            {"name": ":method", "string_match": {"exact": "GET"}},
            {"name": ":path", "string_match": {"exact": READINESS_PATH}},
        ],
    )
    limit = _extension(
        "envoy.filters.network.connection_limit",
        "filters.network.connection_limit.v3.ConnectionLimit",
        stat_prefix="internal/readiness",
        max_connections=MAX_READINESS_CONNECTIONS,
    )
    serve = _http_connection_manager(
        stat_prefix="internal/readiness",
        # One request at a time on a connection, and no connection for long.
        codec_type="HTTP1",
        common_http_protocol_options={"idle_timeout": "10s", "max_connection_duration": "60s"},
        request_headers_timeout="2s",
        max_request_headers_kb=8,
        # Without a virtual host there is no route: whatever the filter did not answer gets 404.
        route_config={"name": "internal/readiness"},
        http_filters=[answer, _router()],
    )
    return _tcp_listener("internal/readiness", READINESS_PORT, [limit, serve]) | {"ignore_global_conn_limit": True}


def _listener(listener: Listener) -> _Config:
    name = f"listener/{listener.name}"
    serve = _http_filter(name, listener.routes) if listener.protocol is Protocol.HTTP else _tcp_filter(name, listener)
    return _tcp_listener(name, listener.container_port, [serve])


def _tcp_listener(name: str, port: int, filters: list[_Config]) -> _Config:
    return {
        "name": name,
        "address": _address("0.0.0.0", port),  # noqa: S104  (a proxy listens on its Pod's address, not known before)
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "filter_chains": [{"filters": filters}],
    }


def _tcp_filter(name: str, listener: Listener) -> _Config:
    return _extension(
        "envoy.filters.network.tcp_proxy",
        "filters.network.tcp_proxy.v3.TcpProxy",
        stat_prefix=name,
        cluster=_cluster_name(listener.routes[0].backend),
        access_log=[_access_log(_CONNECTION_FIELDS)],
    )


def _http_filter(name: str, routes: tuple[Route, ...]) -> _Config:
    return _http_connection_manager(
        stat_prefix=name,
        # The peer's address is the client's: X-Forwarded-For from outside is not believed.
        use_remote_address=True,
        normalize_path=True,
        merge_slashes=True,
        # An escaped slash could pass one route's prefix and mean another's to the backend.
        path_with_escaped_slashes_action="UNESCAPE_AND_REDIRECT",
        strip_any_host_port=True,
        strip_trailing_host_dot=True,
        common_http_protocol_options={
            "idle_timeout": "3600s",
            # CGI-like backends can't tell X_User from X-User, so the first could smuggle the second past a check.
            # Refusing tells the client; dropping the header would change the request in silence.
            "headers_with_underscores_action": "REJECT_REQUEST",
        },
        http2_protocol_options={
            "max_concurrent_streams": 100,
            "initial_stream_window_size": 64 * 1024,
            "initial_connection_window_size": 1024 * 1024,
        },
        request_headers_timeout="10s",
        # The only bound on a request's time, see _route: five minutes without a byte in either direction.
        stream_idle_timeout="300s",
        upgrade_configs=[{"upgrade_type": "websocket"}],
        route_config={"name": name, "virtual_hosts": _virtual_hosts(routes)},
        http_filters=[_router()],
        access_log=[_access_log(_REQUEST_FIELDS)],
    )


def _virtual_hosts(routes: tuple[Route, ...]) -> list[_Config]:
    """One virtual host for all domains that the same routes serve in the same order.

    Envoy takes the virtual host with the most specific domain and never looks into another one, so each holds the
    routes of every wildcard around it. Sharing keeps the configuration from growing with hosts times routes.
    """
    by_path = sorted(routes, key=_path_rank)
    by_host: dict[str, list[int]] = {}
    for position, route in enumerate(by_path):
        for host in _hosts(route):
            by_host.setdefault(host, []).append(position)
    sharing: dict[tuple[int, ...], list[str]] = {}
    for domain in sorted(by_host):
        served = dict.fromkeys(position for host in _around(domain) for position in by_host.get(host, ()))
        sharing.setdefault(tuple(served), []).append(domain)
    return [
        {"name": domains[0], "domains": domains, "routes": [_route(by_path[position]) for position in served]}
        for served, domains in sharing.items()
    ]


def _around(domain: str) -> Iterator[str]:
    """``domain``, itself perhaps a wildcard, and every wildcard that takes all its requests, the narrowest first."""
    yield domain
    for position, character in enumerate(domain):
        if character == "." and domain[:position] != "*":
            yield "*" + domain[position:]
    yield "*"


def _path_rank(route: Route) -> tuple[bool, int]:
    """Sorts routes of one host: the exact path first, then the longest prefix; ties keep the order of declaration."""
    exact, prefix = _path(route)
    return exact is None, -len(prefix)


def _hosts(route: Route) -> tuple[str, ...]:
    return tuple(host.lower() for host in route.match.hosts) if route.match and route.match.hosts else ("*",)


def _path(route: Route) -> tuple[str | None, str]:
    """The exact path, if that is what the route matches, and the prefix, without the slash at its end."""
    if route.match is None:
        return None, ""
    return route.match.path_exact, (route.match.path_prefix or "").rstrip("/")


def _route(route: Route) -> _Config:
    exact, prefix = _path(route)
    if exact is not None:
        match = {"path": exact}
    elif prefix:
        match = {"path_separated_prefix": prefix}
    else:
        match = {"prefix": "/"}
    # Envoy's own 15 s for a whole response would cut downloads, event streams and WebSockets.
    return {"match": match, "route": {"cluster": _cluster_name(route.backend), "timeout": "0s"}}


def _cluster_name(backend: str) -> str:
    return f"backend/{backend}"


def _cluster(backend: Backend) -> _Config:
    name = _cluster_name(backend.name)
    cluster: _Config = {
        "name": name,
        "connect_timeout": f"{duration_s(backend.connect_timeout):g}s",
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": MAX_BACKEND_CONNECTIONS,
                    "max_pending_requests": MAX_BACKEND_CONNECTIONS,
                    "max_requests": MAX_BACKEND_CONNECTIONS,
                }
            ]
        },
        # Finds a backend that went away without a word while a connection to it lay idle: after 60 + 3 x 10 s.
        "upstream_connection_options": {
            "tcp_keepalive": {"keepalive_time": 60, "keepalive_interval": 10, "keepalive_probes": 3}
        },
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [_lb_endpoint(endpoint) for endpoint in backend.endpoints]}],
        },
    }
    if all(_is_ip(endpoint.host) for endpoint in backend.endpoints):
        return cluster | {"type": "STATIC"}
    return cluster | {
        "cluster_type": _extension(
            "envoy.clusters.dns",
            "clusters.dns.v3.DnsCluster",
            # AUTO would ask for IPv6 first, and a Pod of a single-stack cluster can't reach what that returns.
            dns_lookup_family="V4_PREFERRED",
            respect_dns_ttl=True,
            dns_refresh_rate="5s",
            dns_failure_refresh_rate={"base_interval": "1s", "max_interval": "10s"},
        )
    }


def _lb_endpoint(endpoint: Endpoint) -> _Config:
    """A weight belongs to every address that a name resolves to, not to the name."""
    return {
        "endpoint": {"address": _address(endpoint.host, endpoint.port)},
        "load_balancing_weight": endpoint.weight,
    }


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _address(host: str, port: int) -> _Config:
    return {"socket_address": {"address": host, "port_value": port}}


def _router() -> _Config:
    return _extension("envoy.filters.http.router", "filters.http.router.v3.Router")


def _http_connection_manager(**fields: Any) -> _Config:
    return _extension(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        **fields,
    )


def _access_log(fields: dict[str, str]) -> _Config:
    return _extension(
        "envoy.access_loggers.stdout",
        "access_loggers.stream.v3.StdoutAccessLog",
        log_format={"json_format": fields},
    )


def _extension(name: str, message: str, **fields: Any) -> _Config:
    return {"name": name, "typed_config": {"@type": _TYPE + message} | fields}


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
"""Format strings of Envoy, which escapes what they stand for; none contains a word of a tenant's."""

_REQUEST_FIELDS: Final = _CONNECTION_FIELDS | {
    "details": "%RESPONSE_CODE_DETAILS%",
    "host": "%REQ(:AUTHORITY):253%",
    "method": "%REQ(:METHOD):16%",
    # Without the query, where applications put secrets.
    "path": "%PATH(NQ):1024%",
    "protocol": "%PROTOCOL%",
    "request_id": "%REQ(X-REQUEST-ID):64%",
    "status": "%RESPONSE_CODE%",
}
