"""Envoy's clusters: one for each backend of a spec. Pure."""

from ipaddress import ip_address
from typing import Final

from operator_app.api.connections import BackendProtocol, BackendTls, BalancingPolicy, OutlierDetection
from operator_app.api.fields import duration_s
from operator_app.api.models import Backend, Endpoint
from operator_app.envoy import secrets
from operator_app.envoy.messages import BUFFER_BYTES, Message, address, extension, typed

SYSTEM_CA_FILE: Final = "/etc/ssl/certs/ca-certificates.crt"
"""The authorities that the image trusts."""


RETRY_BUDGET_PERCENT: Final = 20
"""Retries of a backend at the same time, in percent of its active requests; ten are always allowed. Bounds what retries
add to the load of a backend that fails because of it."""


_EJECTION_CHECK_S: Final = 10.0

_PANIC_PERCENT: Final = 1
"""Where fewer endpoints of a hundred are well, all are asked: of up to a hundred endpoints, where none is. Envoy rounds
it to a whole number, and with 0 it would answer 503 without asking any."""


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
                    "max_connections": backend.max_connections,
                    "max_pending_requests": backend.max_pending_requests,
                    "max_requests": backend.max_requests,
                    # Else three retries at the same time would be all.
                    "retry_budget": {"budget_percent": {"value": RETRY_BUDGET_PERCENT}, "min_retry_concurrency": 10},
                }
            ]
        },
        # Detects that the peer of an idle connection has vanished without FIN or RST, after 60 + 3 x 10 s.
        "upstream_connection_options": {
            "tcp_keepalive": {"keepalive_time": 60, "keepalive_interval": 10, "keepalive_probes": 3}
        },
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [_lb_endpoint(endpoint) for endpoint in backend.addresses]}],
        },
    }
    message |= _balancing(backend) | _http(backend) | _checks(backend) | _outliers(backend.outlier_detection)
    if backend.health_check is not None or backend.outlier_detection is not None:
        # By default all are asked as soon as less than half of them are well, the failing ones among them.
        message["common_lb_config"] = {"healthy_panic_threshold": {"value": _PANIC_PERCENT}}
    if backend.tls is not None:
        message["transport_socket"] = _tls(backend.tls, is_http2=backend.protocol is not BackendProtocol.HTTP1)
    return message | _discovery(backend)


def _discovery(backend: Backend) -> Message:
    """How Envoy finds the addresses."""
    if all(_is_ip(endpoint.host) for endpoint in backend.addresses):
        return {"type": "STATIC"}
    return {
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


def _balancing(backend: Backend) -> Message:
    """Round robin is Envoy's default."""
    declared = backend.load_balancing
    if declared is None or declared.policy is BalancingPolicy.ROUND_ROBIN:
        return {}
    names = {
        BalancingPolicy.LEAST_REQUEST: "LEAST_REQUEST",
        BalancingPolicy.RANDOM: "RANDOM",
        BalancingPolicy.HASH: "MAGLEV",
    }
    return {"lb_policy": names[declared.policy]}


def _http(backend: Backend) -> Message:
    """What is spoken; none where Envoy's defaults are meant."""
    options: Message = {}
    declared = backend.load_balancing
    if declared is not None and declared.header is not None:
        options["hash_policy"] = [{"header": {"header_name": declared.header}}]
    if declared is not None and declared.cookie is not None:
        options["hash_policy"] = [{"cookie": {"name": declared.cookie, "ttl": "3600s", "path": "/"}}]
    if backend.idle_timeout is not None:
        options["common_http_protocol_options"] = {"idle_timeout": f"{duration_s(backend.idle_timeout):g}s"}
    if not options and backend.protocol is BackendProtocol.HTTP1:
        return {}
    spoken = "http_protocol_options" if backend.protocol is BackendProtocol.HTTP1 else "http2_protocol_options"
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    message = typed("upstreams.http.v3.HttpProtocolOptions", explicit_http_config={spoken: {}}, **options)
    return {"typed_extension_protocol_options": {name: message}}


def _checks(backend: Backend) -> Message:
    declared = backend.health_check
    if declared is None:
        return {}
    interval = f"{duration_s(declared.interval):g}s"
    check: Message = {
        "interval": interval,
        "timeout": f"{duration_s(declared.timeout):g}s",
        "unhealthy_threshold": declared.failures,
        "healthy_threshold": 1,
        # So that the checks of all proxies don't come at the same moment.
        "interval_jitter_percent": 20,
        # Envoy's default without traffic is once a minute.
        "no_traffic_interval": interval,
    }
    if declared.path is not None:
        codec = {} if backend.protocol is BackendProtocol.HTTP1 else {"codec_client_type": "HTTP2"}
        host = backend.tls.server_name if backend.tls else backend.addresses[0].host
        check["http_health_check"] = {"path": declared.path, "host": host} | codec
    elif backend.protocol is BackendProtocol.GRPC:
        check["grpc_health_check"] = {}
    else:
        check["tcp_health_check"] = {}
    return {"health_checks": [check]}


def _outliers(declared: OutlierDetection | None) -> Message:
    if declared is None:
        return {}
    return {
        "outlier_detection": {
            "consecutive_5xx": declared.consecutive_errors,
            "base_ejection_time": f"{duration_s(declared.ejection_time):g}s",
            "max_ejection_percent": declared.max_ejected_percent,
            # How often Envoy looks whose time is over; its default would make ten seconds of any shorter time.
            "interval": f"{min(duration_s(declared.ejection_time), _EJECTION_CHECK_S):g}s",
            # Else the next health check that succeeds would let in again who fails requests.
            "successful_active_health_check_uneject_host": False,
            # Else one endpoint is left out whatever the percentage, even if it is the only one.
            "always_eject_one_host": False,
            "enforcing_success_rate": 0,
        }
    }


def _tls(declared: BackendTls, *, is_http2: bool) -> Message:
    """The socket that speaks TLS, and goes on only with a certificate that has the declared name."""
    context: Message = {
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2", "tls_maximum_protocol_version": "TLSv1_3"},
    }
    verified: Message = {
        "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": declared.server_name}}]
    }
    if declared.ca_secret_name is None:
        context["validation_context"] = verified | {"trusted_ca": {"filename": SYSTEM_CA_FILE}}
    else:
        context["combined_validation_context"] = {
            "default_validation_context": verified,
            "validation_context_sds_secret_config": secrets.authorities(declared.ca_secret_name),
        }
    if is_http2:
        context["alpn_protocols"] = ["h2"]
    return extension(
        "envoy.transport_sockets.tls",
        "transport_sockets.tls.v3.UpstreamTlsContext",
        sni=declared.server_name,
        common_tls_context=context,
    )


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
