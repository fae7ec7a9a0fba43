"""Envoy's clusters: one for each backend of a spec. Pure."""

from ipaddress import ip_address
from typing import Final

from operator_app.api.fields import duration_s
from operator_app.api.models import Backend, Endpoint
from operator_app.api.routes import Method
from operator_app.envoy.messages import BUFFER_BYTES, Message, address, extension

MAX_BACKEND_CONNECTIONS: Final = 1024
"""Bound, each, on connections, pending requests and active requests of one backend; beyond it Envoy answers 503."""


_HTTP: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

REPEATABLE: Final = (Method.GET, Method.HEAD, Method.PUT, Method.DELETE, Method.OPTIONS)
"""The methods of :class:`Method` that may be sent twice (RFC 9110 section 9.2.2)."""

CONNECTION_FAILURES: Final = "connect-failure,refused-stream,reset"
"""Envoy's conditions for a connection that failed before any response."""

_DEFAULT_RETRIES: Final = {
    "retry_on": CONNECTION_FAILURES,
    "num_retries": 1,
    # A backend may close an idle connection at the moment at which a request is sent there.
    "retriable_request_headers": [{"name": ":method", "string_match": {"exact": each.value}} for each in REPEATABLE],
}
"""What becomes of a request that fails on a route without ``retries``. At the cluster, since there are fewer of them
than of routes and hosts."""


def cluster_name(backend: str) -> str:
    """The name of the cluster of the backend called ``backend``."""
    return f"backend/{backend}"


def cluster(backend: Backend, name: str | None = None) -> Message:
    """The cluster that balances over the endpoints of ``backend``, under another ``name`` than its own if one is given.

    STATIC if every endpoint is an IP address, else a DNS cluster, whose names Envoy resolves again while it runs.
    """
    name = name or cluster_name(backend.name)
    message: Message = {
        "name": name,
        "connect_timeout": f"{duration_s(backend.connect_timeout):g}s",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": MAX_BACKEND_CONNECTIONS,
                    "max_pending_requests": MAX_BACKEND_CONNECTIONS,
                    "max_requests": MAX_BACKEND_CONNECTIONS,
                }
            ]
        },
        "typed_extension_protocol_options": {
            _HTTP: extension(
                _HTTP,
                "upstreams.http.v3.HttpProtocolOptions",
                explicit_http_config={"http_protocol_options": {}},
                retry_policy=_DEFAULT_RETRIES,
            )["typed_config"]
        },
        # Detects that the peer of an idle connection has vanished without FIN or RST, after 60 + 3 x 10 s.
        "upstream_connection_options": {
            "tcp_keepalive": {"keepalive_time": 60, "keepalive_interval": 10, "keepalive_probes": 3}
        },
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [_lb_endpoint(endpoint) for endpoint in backend.endpoints]}],
        },
    }
    if all(_is_ip(endpoint.host) for endpoint in backend.endpoints):
        return message | {"type": "STATIC"}
    return message | {
        "cluster_type": extension(
            "envoy.clusters.dns",
            "clusters.dns.v3.DnsCluster",
            # AUTO would resolve AAAA first, and a Pod of an IPv4-only cluster can't reach those addresses.
            dns_lookup_family="V4_PREFERRED",
            respect_dns_ttl=True,
            dns_refresh_rate="5s",
            dns_failure_refresh_rate={"base_interval": "1s", "max_interval": "10s"},
        )
    }


def _lb_endpoint(endpoint: Endpoint) -> Message:
    """One endpoint. Envoy gives each address that a DNS name resolves to the whole weight."""
    return {
        "endpoint": {"address": address(endpoint.host, endpoint.port)},
        "load_balancing_weight": endpoint.weight,
    }


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
