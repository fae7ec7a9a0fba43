"""The operator's settings, read from the environment (``OPERATOR_APP_*``) and from the flags of ``run``.

A flag takes precedence over the environment, the environment over the default. Durations are in seconds.
"""

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from operator_app.api.kinds import OPERATOR_NAMESPACE
from operator_app.api.models import ServiceType
from operator_app.sharding.leases import LeaseTimes
from operator_app.tenant_policy import OPTIONAL_FIELDS, TenantPolicy

ENV_PREFIX: Final = "OPERATOR_APP_"

_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_ZONE_LABEL: Final = re.compile(r"[a-z0-9_]([-a-z0-9_]{0,61}[a-z0-9_])?")
_TENANT_WEIGHT: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?=([1-9][0-9]?|100)")
"""A tenant, which is a namespace's name or a label's value (k8s.io/apimachinery, pkg/util/validation), and a weight."""

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Settings(BaseSettings):
    """All settings. Every duration has its unit in its name; the defaults suit a cluster of thousands of proxies.

    Raises ``pydantic.ValidationError`` if a value is out of bounds or two values contradict each other.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore")

    namespace: str = Field(
        OPERATOR_NAMESPACE, min_length=1, description="own namespace; registry records are kept there"
    )
    image: str = Field(
        "envoyproxy/envoy:v1.40.0", min_length=1, description="Envoy image of proxies whose spec names none"
    )
    tenant_images: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="registries or repositories that spec.image may name, separated by commas; without any, all"
    )
    tenant_service_types: Annotated[tuple[ServiceType, ...], NoDecode] = Field(
        tuple(ServiceType), description="Service types that tenants may use, separated by commas"
    )
    tenant_annotation_prefixes: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="how keys of annotations that tenants set may begin, separated by commas; without any, all"
    )
    tenant_forbidden_fields: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="fields of spec that tenants may not use, such as affinity,tolerations, separated by commas"
    )
    forbidden_networks: Annotated[tuple[str, ...], NoDecode] = Field(
        ("127.0.0.0/8", "::1/128", "169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128"),
        description="addresses that no backend may have, such as 10.0.0.0/8, separated by commas",
    )
    namespaces: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="namespaces to serve, separated by commas; without any, all of them"
    )
    kubeconfig: Path | None = Field(
        None, description="kubeconfig file; without it in-cluster configuration, then KUBECONFIG, then ~/.kube/config"
    )
    context: str | None = Field(None, description="context of the kubeconfig; without it the current one")
    http_port: int = Field(8080, ge=0, le=65535, description="port of /healthz, /readyz and /metrics; 0 picks one")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")
    log_format: Literal["json", "console"] = Field("json", description="json: one object a line; console: for people")
    run_as_user: bool = Field(
        default=True,
        description="run each proxy's Pods as a Linux user of its own; off where the platform assigns users to "
        "namespaces and refuses others, as OpenShift does",
    )
    ask_pods: bool = Field(
        default=True,
        description="ask each proxy's Pods what they have loaded; off where the operator can't reach their addresses",
    )
    workers: int = Field(16, ge=1, le=1000, description="reconciles running at the same time")
    in_flight_per_tenant: int = Field(1, ge=1, le=1000, description="reconciles of one tenant running at the same time")
    tenant_weights: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="tenants that count for several, such as team-a=3, separated by commas; all others count for 1"
    )
    max_connections: int = Field(64, ge=1, le=1000, description="connections to the API server beside watches")
    request_timeout_s: Seconds = Field(10, description="bound on each read from the API server, and on each Lease")
    write_timeout_s: Seconds = Field(
        65, description="bound on each write; above the API server's own 60 s, which slow webhooks may take up"
    )
    watch_timeout_s: Seconds = Field(300, description="after this, up to twice this, a watch is renewed")
    watch_idle_timeout_s: Seconds = Field(150, description="a watch silent for this long is taken for dead")
    watch_stale_s: Seconds = Field(
        300, description="a replica with a watch silent for this long gives its shards back and is not ready"
    )
    backoff_base_s: Seconds = Field(0.5, description="upper bound of the delay after a first failure")
    backoff_cap_s: Seconds = Field(60, description="upper bound of the delay after many failures")
    status_settle_s: Seconds = Field(2, description="time that replica counters are debounced before they are written")
    sweep_interval_s: Seconds = Field(900, description="time between full sweeps")
    contention_threshold: int = Field(3, ge=1, le=100, description="repairs of a taken field before they slow down")
    contention_window_s: Seconds = Field(60, description="repairs of a field closer together than this are a row")
    contention_base_s: Seconds = Field(2, description="first pause between repairs of a field that is taken again")
    contention_cap_s: Seconds = Field(300, description="longest pause between repairs of a field that is taken again")
    shutdown_grace_s: Seconds = Field(
        20, description="time for reconciles to finish after SIGTERM or when a shard moves"
    )
    shards: int = Field(1, ge=1, le=256, description="parts that replicas divide the namespaces into; the same for all")
    replica_name: str | None = Field(
        None,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        max_length=200,
        description="name of this replica among its Leases, such as the Pod's; without it the host's, made unique",
    )
    lease_duration_s: int = Field(15, ge=1, le=3600, description="silence after which others take a replica's shards")
    renew_deadline_s: Seconds = Field(10, description="a replica that could not renew for this long stops working")
    retry_period_s: Seconds = Field(2, description="longest time between heartbeats of a replica")
    registry: str = Field(
        "in-cluster", min_length=1, description="registry that publishes the hostnames of proxies that name none"
    )
    registries: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="further registries that proxies may name, separated by commas; in-cluster is always there"
    )
    abandon_after_s: Annotated[float, Field(gt=0, le=31_536_000)] | None = Field(
        None,
        description="let a deleted proxy go after this, although its registry is down; the removal is worked off later",
    )
    hostname_rest_s: Annotated[float, Field(ge=0, le=31_536_000)] = Field(
        300, description="time for which a hostname that was given back is kept for its tenant; 0: for no time"
    )
    kept_per_tenant: int = Field(
        100,
        ge=0,
        le=100_000,
        description="hostnames of one tenant that may rest, records that deletionPolicy Orphan may keep for it, and "
        "removals that may be pending for it after abandon_after_s",
    )
    operator_id: str | None = Field(
        None,
        pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$",
        description="id of this installation, such as prod-eu; needed, and to be its own, where a registry is outside",
    )
    node_port_addresses: Literal["none", "external", "internal", "external-or-internal"] = Field(
        "none",
        description="addresses of nodes that proxies with a NodePort Service publish: ExternalIP, InternalIP, or the "
        "second where no node has the first; needs the right to list and watch nodes",
    )
    powerdns_url: str | None = Field(
        None, description="PowerDNS's HTTP API without its path, for example https://dns.example.com:8081"
    )
    powerdns_zones: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="DNS zones that hostnames may be in, separated by commas; the longest that fits is used"
    )
    powerdns_api_key_file: Path | None = Field(None, description="file with the API key, read again when it is refused")
    powerdns_ca_file: Path | None = Field(None, description="PEM certificates that the server's is verified by")
    powerdns_server_id: str = Field(
        "localhost", pattern=r"^[A-Za-z0-9._-]+$", description="PowerDNS's server id in its API"
    )
    powerdns_default_ttl_s: int = Field(
        300, ge=1, le=2_147_483_647, description="time to live of DNS records whose proxy names none"
    )
    powerdns_timeout_s: Seconds = Field(5, description="bound on each request to PowerDNS")
    rfc2136_server: str | None = Field(
        None,
        pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[1-9][0-9]{0,4}$",
        description="primary DNS server that takes dynamic updates, with its port, such as ns1.example.com:53",
    )
    rfc2136_zones: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="DNS zones that it may be sent updates of, separated by commas; the longest that fits is used"
    )
    rfc2136_key_file: Path | None = Field(
        None, description="file with the TSIG key, as tsig-keygen writes it; read again for each message"
    )
    rfc2136_default_ttl_s: int = Field(
        300, ge=1, le=2_147_483_647, description="time to live of DNS records whose proxy names none"
    )
    rfc2136_timeout_s: Seconds = Field(5, description="bound on each exchange with the DNS server")

    @field_validator(
        "namespaces",
        "tenant_weights",
        "registries",
        "powerdns_zones",
        "rfc2136_zones",
        "tenant_images",
        "tenant_service_types",
        "tenant_annotation_prefixes",
        "tenant_forbidden_fields",
        "forbidden_networks",
        mode="before",
    )
    @classmethod
    def _names_are_separated_by_commas(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        names = tuple(filter(None, map(str.strip, value.split(","))))
        if value and not names:
            message = f"{value!r} names nothing; leave it empty, or write names separated by commas"
            raise ValueError(message)
        return names

    @field_validator("forbidden_networks")
    @classmethod
    def _names_are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            try:
                ip_network(name)
            except ValueError:
                message = f"{name!r} is no range of addresses; write for example 10.0.0.0/8 or fd00::/8"
                raise ValueError(message) from None
        return value

    @field_validator("tenant_forbidden_fields")
    @classmethod
    def _names_are_optional_fields(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in OPTIONAL_FIELDS:
                message = (
                    f"{name!r} is no field of spec that can be left out; write some of {', '.join(OPTIONAL_FIELDS)}"
                )
                raise ValueError(message)
        return value

    @field_validator("powerdns_zones", "rfc2136_zones")
    @classmethod
    def _names_are_zones(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        zones = tuple(dict.fromkeys(name.lower().removesuffix(".") for name in value))
        for zone in zones:
            if not all(map(_ZONE_LABEL.fullmatch, zone.split("."))) or len(zone) > 253:
                message = (
                    f"{zone!r} can't be a DNS zone; write names separated by commas, such as example.com,example.org"
                )
                raise ValueError(message)
        return zones

    @field_validator("namespace")
    @classmethod
    def _name_is_a_namespace(cls, value: str) -> str:
        if not _DNS_LABEL.fullmatch(value):
            message = f"{value!r} can't be a namespace; write a DNS label such as edge-system"
            raise ValueError(message)
        return value

    @field_validator("namespaces")
    @classmethod
    def _names_are_namespaces(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not _DNS_LABEL.fullmatch(name):
                message = f"{name!r} can't be a namespace; write DNS labels separated by commas, such as team-a,team-b"
                raise ValueError(message)
        return tuple(dict.fromkeys(value))

    @field_validator("tenant_weights")
    @classmethod
    def _weights_are_numbers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for weight in value:
            if not _TENANT_WEIGHT.fullmatch(weight):
                message = f"{weight!r} can't be a tenant's weight; write a tenant, '=' and 1 to 100, such as team-a=3"
                raise ValueError(message)
        return value

    @property
    def tenant_policy(self) -> TenantPolicy:
        """What tenants may declare."""
        return TenantPolicy(
            self.tenant_images,
            tuple(each.value for each in self.tenant_service_types),
            self.tenant_annotation_prefixes,
            self.forbidden_networks,
            self.tenant_forbidden_fields,
        )

    @property
    def are_nodes_watched(self) -> bool:
        """Whether addresses of nodes are published."""
        return self.node_port_addresses != "none"

    @property
    def dns_zones(self) -> tuple[str, ...]:
        """The zones of every DNS registry that is configured."""
        return (*self.powerdns_zones, *self.rfc2136_zones)

    def weight_of(self, tenant: str) -> int:
        """The scheduling weight of ``tenant``, 1 to 100; 1 unless ``tenant_weights`` names it."""
        weights = dict(each.split("=") for each in self.tenant_weights)
        return int(weights.get(tenant, 1))

    @model_validator(mode="after")
    def _lease_times_are_ordered(self) -> Self:
        LeaseTimes(self.lease_duration_s, self.renew_deadline_s, self.retry_period_s)
        return self

    @model_validator(mode="after")
    def _watches_are_renewed_before_they_are_stale(self) -> Self:
        if self.watch_stale_s <= self.watch_idle_timeout_s:
            message = (
                f"--watch-stale-s ({self.watch_stale_s:g}) must exceed --watch-idle-timeout-s "
                f"({self.watch_idle_timeout_s:g}): a silent watch is renewed first"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _backoff_is_ordered(self) -> Self:
        if self.backoff_base_s > self.backoff_cap_s:
            message = (
                f"--backoff-base-s ({self.backoff_base_s:g}) must not exceed --backoff-cap-s ({self.backoff_cap_s:g})"
            )
            raise ValueError(message)
        return self
