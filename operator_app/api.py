"""The EnvoyProxy API: pydantic models that are the one source of the CRD, of its defaults, texts and rules.

What a user may write is declared here once. ``crd.py`` turns these models into the CustomResourceDefinitions under
``manifests/crd``; the operator parses stored objects with the same models. No I/O, no Kubernetes client, no Envoy.
"""

from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_NAME_LENGTH: Final = 57
"""``<name>-envoy`` names a Service, which is a DNS label of at most 63 characters (RFC 1035 section 2.3.1)."""

PRIVILEGED_PORT_OFFSET: Final = 10_000
"""Envoy runs without the right to bind ports below 1024, so those are moved up by this much inside the Pod."""

ADMIN_PORT: Final = 19000
"""Envoy's admin interface, on loopback only. Not available as a ``targetPort``."""

READINESS_PORT: Final = 19001
"""The listener that answers the readiness probe and nothing else. Not available as a ``targetPort``."""

DnsLabel = Annotated[str, Field(max_length=63, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Host = Annotated[str, Field(min_length=1, max_length=253)]
Quantity = Annotated[
    str,
    Field(pattern=r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"),
]


class ApiModel(BaseModel):
    """Common settings: camelCase on the wire, immutable, unknown fields ignored (a newer CRD may have more)."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")


class Protocol(StrEnum):
    """What a listener speaks."""

    HTTP = "HTTP"
    TCP = "TCP"


class ServiceType(StrEnum):
    """How the Service is exposed, as in the core API."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class RouteMatch(ApiModel):
    """Which requests a route takes; an empty match takes all."""

    hosts: Annotated[tuple[Host, ...], Field(max_length=32)] = ()
    path_prefix: str | None = None
    path_exact: str | None = None


class Route(ApiModel):
    """One rule of a listener: what it matches and the backend that answers."""

    match: RouteMatch | None = None
    backend: DnsLabel


class Listener(ApiModel):
    """One port of the proxy."""

    name: DnsLabel
    port: Port
    target_port: Annotated[int | None, Field(ge=1024, le=65535)] = None
    protocol: Protocol = Protocol.HTTP
    routes: Annotated[tuple[Route, ...], Field(min_length=1, max_length=64)]

    @property
    def container_port(self) -> int:
        """The port that Envoy binds inside the Pod, always at least 1024."""
        if self.target_port is not None:
            return self.target_port
        return self.port if self.port >= 1024 else self.port + PRIVILEGED_PORT_OFFSET


class Endpoint(ApiModel):
    """One address of a backend: a DNS name, resolved by Envoy again and again, or an IP address."""

    host: Host
    port: Port
    weight: Annotated[int, Field(ge=1, le=128)] = 1


class Backend(ApiModel):
    """A named set of endpoints that routes point to."""

    name: DnsLabel
    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=1, max_length=64)]
    connect_timeout: str = "5s"


class Service(ApiModel):
    """The Service in front of the proxy."""

    type: ServiceType = ServiceType.CLUSTER_IP
    annotations: dict[str, str] = {}


class Resources(ApiModel):
    """Compute resources of the Envoy container, as on a Pod."""

    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}


class Registration(ApiModel):
    """What the outside record says beyond the proxy's address."""

    hostname: str | None = None


class EnvoyProxySpec(ApiModel):
    """The desired state of one tenant's proxy."""

    replicas: Annotated[int, Field(ge=0, le=100)] = 1
    image: str | None = None
    listeners: Annotated[tuple[Listener, ...], Field(min_length=1, max_length=16)]
    backends: Annotated[tuple[Backend, ...], Field(min_length=1, max_length=64)]
    service: Service = Service()
    resources: Resources | None = None
    registration: Registration | None = None
    paused: bool = False


class ConditionStatus(StrEnum):
    """The three values of a condition, as in the core API."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One observation, in the shape of ``metav1.Condition``."""

    type: str
    status: ConditionStatus
    observed_generation: int
    last_transition_time: str
    reason: str
    message: str


class EnvoyProxyStatus(ApiModel):
    """What the operator has verified, for ``observedGeneration``."""

    observed_generation: int = -1
    conditions: tuple[Condition, ...] = ()
    replicas: int | None = None
    ready_replicas: int | None = None
    selector: str | None = None
    address: str | None = None


class ProxyReference(ApiModel):
    """Whose record this is; the UID decides, the names are for people."""

    namespace: str
    name: str
    uid: str


class RegisteredPort(ApiModel):
    """One reachable port of the proxy."""

    name: DnsLabel
    port: Port
    protocol: Protocol


class ProxyRegistrationSpec(ApiModel):
    """One proxy's entry in the in-cluster registry, written by the operator alone."""

    proxy: ProxyReference
    generation: int
    hostname: str | None = None
    address: str
    ports: tuple[RegisteredPort, ...]


def parse_spec(obj: dict[str, Any]) -> EnvoyProxySpec:
    """The spec of a stored EnvoyProxy. Raises ``pydantic.ValidationError`` for what the CRD's schema would refuse."""
    return EnvoyProxySpec.model_validate(obj.get("spec") or {})
