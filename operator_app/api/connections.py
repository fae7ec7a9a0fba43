"""What a listener and a backend say of their connections: limits, checks, balancing, TLS to backends. Pure."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from operator_app.api.fields import DnsLabel, DnsName, HeaderName, Int32, LongDuration, Port, Subdomain, UrlPath
from operator_app.api.rules import ApiModel, Rule


class Hsts(ApiModel):
    """Tells browsers to use HTTPS alone (Strict-Transport-Security). For listeners that clients reach by HTTPS."""

    max_age_days: Annotated[Int32, Field(ge=0, le=3650)] = 365
    """For how many days browsers remember it, 0 to 3650; 0 makes them forget it. Left out: 365."""

    include_subdomains: Annotated[bool, Field(strict=True)] = False
    """Whether it holds for all names below the host. Left out: false."""


class ListenerTls(ApiModel):
    """Speaks TLS 1.2 and 1.3 to clients (Mozilla's intermediate profile), and HTTP/2 with those who ask for it."""

    secret_name: Subdomain
    """Secret of the namespace with the certificate chain under the key tls.crt and its key under tls.key, as
    cert-manager makes it. While it is missing or broken, this listener serves nobody; a renewed certificate is served
    without a restart."""

    client_ca_secret_name: Annotated[Subdomain | None, Field(alias="clientCASecretName")] = None
    """Secret of the namespace with the certificates of authorities under the key ca.crt. Clients must then have a
    certificate of one of them. Left out: clients need none."""


class ListenerLimits(ApiModel):
    """Bounds of what clients may use of a listener."""

    max_connections: Annotated[Int32, Field(ge=1, le=10_000)] | None = None
    """Connections of this listener at the same time in each proxy, 1 to 10000; more are closed. Left out: 10000 of all
    listeners together."""

    max_header_kilobytes: Annotated[Int32, Field(ge=1, le=256)] = 60
    """Size of all headers of a request in KiB, 1 to 256; more is 431. Left out: 60."""

    headers_timeout: LongDuration = "10s"
    """How long a client may take to send the headers of a request. Left out: 10s."""

    idle_timeout: LongDuration = "60m"
    """How long a connection without a request stays open. Left out: 60m."""

    max_streams: Annotated[Int32, Field(ge=1, le=1000)] = 100
    """Requests at the same time on one HTTP/2 connection, 1 to 1000. Left out: 100."""


class BackendService(ApiModel):
    """A Service of the proxy's namespace."""

    name: DnsLabel
    """Name of the Service, for example app."""

    port: Port
    """Port of the Service, 1 to 65535."""


class BackendTls(ApiModel):
    """Speaks TLS to the backend and verifies its certificate."""

    server_name: DnsName
    """Name that the backend's certificate must have, and that it is asked for by (SNI), for example
    app.internal.example."""

    ca_secret_name: Subdomain | None = None
    """Secret of the namespace with the certificates of the authorities to trust under the key ca.crt. While it is
    missing, the backend gets no requests. Left out: those of the image."""


class BackendProtocol(StrEnum):
    """What a backend speaks."""

    HTTP1 = "http1"
    HTTP2 = "http2"
    GRPC = "grpc"


class BalancingPolicy(StrEnum):
    """How an endpoint is chosen."""

    ROUND_ROBIN = "RoundRobin"
    LEAST_REQUEST = "LeastRequest"
    RANDOM = "Random"
    HASH = "Hash"


class LoadBalancing(ApiModel):
    """How one of the backend's endpoints is chosen for a request."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(self.policy == 'Hash') == (has(self.header) || has(self.cookie)) && "
            "!(has(self.header) && has(self.cookie))",
            message="Hash needs what to hash, one of header and cookie, and other policies hash nothing: add one of "
            "them, or remove both",
            is_valid=lambda balancing: (
                (balancing.policy is BalancingPolicy.HASH)
                == ((balancing.header is not None) != (balancing.cookie is not None))
                and not (balancing.header and balancing.cookie)
            ),
        ),
    )

    policy: BalancingPolicy
    """RoundRobin, one after the other; LeastRequest, the less busy of two; Random; Hash, always the same for the same
    value, as long as the endpoints stay the same."""

    header: HeaderName | None = None
    """Header whose value is hashed, for example x-user."""

    cookie: HeaderName | None = None
    """Cookie whose value is hashed, for example session. A client without it gets one for an hour."""


class HealthCheck(ApiModel):
    """Asks each endpoint again and again, and sends no request to one that does not answer while another one does."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!(has(self.timeout) && has(self.interval)) || duration(self.timeout) <= duration(self.interval)",
            message="timeout must not be above interval: lower it, or raise interval",
            field=".timeout",
        ),
    )

    path: UrlPath | None = None
    """Path that answers 200, for example /healthz. Left out: a connection is enough, or for grpc its health service."""

    interval: LongDuration = "10s"
    """Time between two checks of an endpoint by each proxy. Left out: 10s."""

    timeout: LongDuration = "2s"
    """How long an answer may take. Left out: 2s."""

    failures: Annotated[Int32, Field(ge=1, le=10)] = 3
    """After so many failed checks in a row nothing is sent there, 1 to 10. Left out: 3."""


class OutlierDetection(ApiModel):
    """Sends nothing for a while to an endpoint that fails again and again."""

    consecutive_errors: Annotated[Int32, Field(ge=1, le=100)] = 5
    """Responses of 5xx, or failed connections, in a row, 1 to 100. Left out: 5."""

    ejection_time: LongDuration = "30s"
    """How long nothing is sent there the first time. Left out: 30s."""

    max_ejected_percent: Annotated[Int32, Field(ge=1, le=90)] = 50
    """How many endpoints of a hundred may be left out at the same time, 1 to 90, so the last one never is. Left out:
    50."""
