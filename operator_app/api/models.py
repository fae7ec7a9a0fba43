"""The EnvoyProxy API: pydantic models that are the one source of the CRD, of its defaults, texts and rules.

What a user may write is declared here once. ``crd.py`` turns these models into the CustomResourceDefinitions under
``manifests/crd``; the operator parses stored objects with the same models. No I/O, no Kubernetes client, no Envoy.

The docstring under a field is its ``kubectl explain`` text. A ``Rule`` stands at what it protects: on a type when it
judges one value, in a model's ``rules`` when it compares fields. The API server refuses what breaks a rule with the
rule's message, which says what to write instead; the models refuse the same again, for objects that no API server has
judged (``render -f``) or that were stored under older rules.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from operator_app.api.kinds import GROUP

MAX_NAME_LENGTH: Final = 57
"""``<name>-envoy`` names a Service, which is a DNS label of at most 63 characters (RFC 1035 section 2.3.1)."""

PRIVILEGED_PORT_OFFSET: Final = 10_000
"""Envoy runs without the right to bind ports below 1024, so those are moved up by this much inside the Pod."""

ADMIN_PORT: Final = 19000
"""Envoy's admin interface, on loopback only. Not available as a ``targetPort``."""

READINESS_PORT: Final = 19001
"""The listener that answers the readiness probe and nothing else. Not available as a ``targetPort``."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule:
    """One sentence of the API's grammar, in the two languages that judge it.

    ``cel`` is what the API server evaluates (``x-kubernetes-validations``), ``holds`` the same spec for the
    models. ``holds`` is None where the API server alone judges: the object's name or history, what the child's own
    validation refuses as well, and what is unwise but harmless to render. ``field`` is the member that an error of a
    model's rule is reported at (``fieldPath``), as ``.listeners``.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None
    field: str | None = None

    @property
    def validation(self) -> dict[str, str]:
        """The rule as one entry of ``x-kubernetes-validations``."""
        entry = {"rule": self.cel, "message": self.message}
        return entry | {"fieldPath": self.field} if self.field else entry

    def check(self, value: T) -> T:
        """``value`` itself. Raises ``ValueError`` with the rule's message if the rule is broken."""
        if self.holds is not None and not self.holds(value):
            raise ValueError(self.message)
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        rendered = handler(schema)
        rendered.setdefault("x-kubernetes-validations", []).append(self.validation)
        return rendered


def matches(expression: str, message: str) -> Rule:
    """A rule for a whole string. ``expression`` is RE2 without quotes, anchors and Unicode classes.

    Within that subset Go's engine and Python's agree, and no expression here can be matched in two ways, so that
    Python's backtracking stays linear.
    """
    return Rule(
        cel=f"self.matches(r'^({expression})$')",
        message=message,
        holds=lambda value: re.fullmatch(expression, value) is not None,
    )


def lacks(expression: str, message: str) -> Rule:
    """A rule for what occurs nowhere in a string. ``expression`` is as for :func:`matches`, anchors allowed."""
    python_expression = expression.replace("$", r"\Z")
    return Rule(
        cel=f"!self.matches(r'{expression}')",
        message=message,
        holds=lambda value: re.search(python_expression, value) is None,
    )


_LABEL: Final = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
# The last label of a DNS name is never numeric: this tells a name from a mistyped IPv4 address (RFC 1123 section 2.1).
_DNS_NAME: Final = f"({_LABEL}[.])*[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?"


def _is_dns_name(value: str) -> bool:
    return re.fullmatch(_DNS_NAME, value) is not None


def _is_ip(value: str) -> bool:
    """What CEL's ``isIP`` accepts: no zone, no IPv4 address in IPv6 clothes."""
    try:
        address = ip_address(value)
    except ValueError:
        return False
    return "%" not in value and not (address.version == 6 and address.ipv4_mapped is not None)


DnsLabel = Annotated[
    str,
    Field(min_length=1, max_length=63),
    matches(
        "[a-z]([-a-z0-9]*[a-z0-9])?",
        "must be lower-case letters, digits and '-', begin with a letter and not end with '-', for example orders-v2",
    ),
]
"""RFC 1035 section 2.3.1, in lower case."""

PortName = Annotated[
    str,
    Field(min_length=1, max_length=15),
    matches(
        "[a-z](-?[a-z0-9])*",
        "must be at most 15 lower-case letters, digits and single '-', and begin with a letter, for example http",
    ),
]
"""Fit for a port of a Service and of a container (RFC 6335 section 5.1); the first letter makes it a DNS label too."""

Int32 = Annotated[int, Field(strict=True, json_schema_extra={"format": "int32"})]
Int64 = Annotated[int, Field(strict=True, json_schema_extra={"format": "int64"})]
Port = Annotated[Int32, Field(ge=1, le=65535)]
TargetPort = Annotated[Int32, Field(ge=1024, le=65535)]

DnsName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    matches(
        _DNS_NAME,
        "must be a DNS name in lower case, without port, scheme or trailing dot, for example shop.example.com",
    ),
]

# One exact expression for the many hosts that a proxy may have would break the API server's cost budget for rules;
# several short ones do not, and each can say what is wrong.
RequestHost = Annotated[
    str,
    Field(min_length=1, max_length=253),
    matches(
        "[*a-z0-9.-]+",
        "must be a DNS name in lower case, without scheme, port or path, for example shop.example.com",
    ),
    lacks(
        ".[*]|[*]([^.]|$)",
        "may have one '*', as the whole first label, for example *.example.com; leave hosts out to match every host",
    ),
    lacks(
        r"(^|\.)[.-]|[.-]$|-\.",
        "must not have a label that is empty or begins or ends with '-': write it like shop.example.com, without a dot "
        "at the end",
    ),
    lacks("[^.]{64}", "must not have a label of more than 63 characters: no such DNS name exists"),
    lacks(
        "(^|[.])[0-9][^.]*$",
        "must not be an IP address or end in a number: write a DNS name, or leave hosts out to match every host",
    ),
]
"""What ``matches(rf"([*][.])?{_DNS_NAME}", ...)`` accepts."""

Host = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Rule(
        cel=f"isIP(self) || self.matches(r'^({_DNS_NAME})$')",
        message="must be a DNS name in lower case, for example app.team-a.svc, or an IP address without brackets, for "
        "example 10.0.0.7 or fd00::7; the port has a field of its own",
        holds=lambda value: _is_ip(value) or _is_dns_name(value),
    ),
    # Envoy is alone in its Pod: a loopback address could only reach its own admin interface.
    Rule(
        cel="isIP(self) ? ip(self).isGlobalUnicast() : self != 'localhost' && !self.endsWith('.localhost')",
        message="must be reachable from other Pods: write the backend's Service name or its own address, not a "
        "loopback, unspecified, link-local, multicast or broadcast address",
    ),
]

_PATH_CHARACTERS: Final = "[-A-Za-z0-9._~!&()+,;=:@/]"
Path = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    matches(
        f"/{_PATH_CHARACTERS}*",
        "must begin with '/' and hold only letters, digits and -._~!&()+,;=:@/ after it, for example /api/v1; "
        "wildcards, percent-encoding, query and fragment can't be matched: end the path before them",
    ),
    Rule(
        cel=r"!self.contains('//') && !self.matches(r'/[.][.]?(/|$)')",
        message="must not contain //, /./ or /../: Envoy resolves them before it compares, so such a path never "
        "matches; write the resolved path",
        holds=lambda value: "//" not in value and re.search(r"/\.\.?(/|\Z)", value) is None,
    ),
]
"""Characters of a path segment (RFC 3986 section 3.3) without percent-encoding, quote, star and dollar."""

_IMAGE_PART: Final = "[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*"
Image = Annotated[
    str,
    Field(min_length=1, max_length=512),
    matches(
        f"([A-Za-z0-9][-A-Za-z0-9.]*(:[0-9]{{1,5}})?/)?{_IMAGE_PART}(/{_IMAGE_PART})*"
        "(:[A-Za-z0-9_][-A-Za-z0-9._]{0,127})?(@sha256:[0-9a-f]{64})?",
        "must be an image reference without spaces, for example envoyproxy/envoy:v1.40.0",
    ),
]

Duration = Annotated[
    str,
    Field(min_length=1, max_length=7),
    Rule(
        cel="self.matches(r'^[1-9][0-9]{0,4}(ms|s)$') && duration(self) <= duration('60s')",
        message="must be between 1ms and 60s, as a whole number with its unit, for example 250ms or 5s",
        holds=lambda value: re.fullmatch("[1-9][0-9]{0,4}(ms|s)", value) is not None and duration_s(value) <= 60,
    ),
]


def duration_s(duration: str) -> float:
    """A ``Duration`` in seconds: ``"250ms"`` is 0.25."""
    if duration.endswith("ms"):
        return int(duration.removesuffix("ms")) / 1000
    return float(duration.removesuffix("s"))


def _quantity_text(value: object) -> object:
    """YAML's ``cpu: 2`` is a number; a Pod takes it as the text "2", and so do we."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


# Two digits of exponent are more than any amount needs, and keep a hostile "1e999999999" from everybody's arithmetic.
_QUANTITY: Final = "[+]?([0-9]+([.][0-9]*)?|[.][0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,2})?"
Quantity = Annotated[
    str,
    BeforeValidator(_quantity_text),
    Field(min_length=1, max_length=32, json_schema_extra={"x-kubernetes-int-or-string": True}),
    Rule(
        cel=f"string(self).matches(r'^({_QUANTITY})$')",
        message="must be a quantity that is not negative, for example 250m or 2 for cpu, 256Mi for memory",
        holds=lambda value: re.fullmatch(_QUANTITY, value) is not None,
    ),
]
"""``resource.Quantity`` of the core API without a minus sign: nobody can ask for less than nothing."""


def _differ(values: Iterable[object]) -> bool:
    values = list(values)
    return len(values) == len(set(values))


@dataclass(frozen=True, slots=True)
class MapBy:
    """The list is a map by ``key`` for the API server, which then refuses an equal key and merges entry by entry."""

    key: str

    def check(self, entries: tuple[Any, ...]) -> tuple[Any, ...]:
        """``entries`` themselves. Raises ``ValueError`` if two of them have the same key."""
        if not _differ(getattr(entry, self.key) for entry in entries):
            raise ValueError(f"every entry must have a {self.key} of its own")
        return entries

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [self.key]}


def _add_rules(schema: dict[str, Any], model: type[Any]) -> None:
    if model.rules:
        schema["x-kubernetes-validations"] = [rule.validation for rule in model.rules]


class ApiModel(BaseModel):
    """Common settings: camelCase on the wire, immutable, unknown fields ignored (a newer CRD may have more)."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
        json_schema_extra=_add_rules,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    """What must hold between the fields of one object of this model."""

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        for rule in self.rules:
            rule.check(self)
        return self


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
    """Which requests a route takes: those that fit both the hosts and the path. An empty match takes all."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!(has(self.pathPrefix) && has(self.pathExact))",
            message="must have one of pathPrefix and pathExact, not both: remove one, or write two routes",
            holds=lambda match: match.path_prefix is None or match.path_exact is None,
        ),
    )

    hosts: Annotated[tuple[RequestHost, ...], Field(max_length=16)] = ()
    """Names that the request's Host header may have, without port, for example shop.example.com. The label * in front
    stands for one or more labels: *.example.com takes a.example.com and a.b.example.com, but not example.com. Left
    out: every host. At most 16."""

    path_prefix: Path | None = None
    """Takes this path and every path below it: /api takes /api and /api/v1, but not /apiary. At most 1024 characters.
    Left out together with pathExact: every path."""

    path_exact: Path | None = None
    """Takes this path alone, for example /healthz. Query and fragment of the request do not count. At most 1024
    characters."""


class Route(ApiModel):
    """One rule of a listener: what it matches and the backend that answers."""

    match: RouteMatch | None = None
    """Which requests the route takes. Left out: all. Not available on a TCP listener, where a connection has neither
    host nor path."""

    backend: DnsLabel
    """Name of the entry of spec.backends that answers, for example app."""


def _container_port(listener: str) -> str:
    """``Listener.container_port`` in CEL, for the variable ``listener``."""
    raised = f"{listener}.port < 1024 ? {listener}.port + {PRIVILEGED_PORT_OFFSET} : {listener}.port"
    return f"(has({listener}.targetPort) ? {listener}.targetPort : {raised})"


class Listener(ApiModel):
    """One port of the proxy, and what happens to the traffic that arrives there."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!({_container_port('self')} in [{ADMIN_PORT}, {READINESS_PORT}])",
            message=f"the proxy itself needs {ADMIN_PORT} and {READINESS_PORT} inside the Pod: set targetPort to "
            "another port, for example 8080; port may stay",
            holds=lambda listener: listener.container_port not in {ADMIN_PORT, READINESS_PORT},
        ),
        Rule(
            cel="self.protocol != 'TCP' || (self.routes.size() == 1 && !has(self.routes[0].match))",
            message="a TCP listener must have exactly one route, without match: keep the one backend, or set "
            "protocol to HTTP",
            holds=lambda listener: (
                listener.protocol is not Protocol.TCP
                or (len(listener.routes) == 1 and listener.routes[0].match is None)
            ),
            field=".routes",
        ),
    )

    name: PortName
    """Name of the listener and of its port of the Service, for example http. At most 15 characters, unique among the
    listeners."""

    port: Port
    """Port of the Service, 1 to 65535, unique among the listeners. Clients connect here."""

    target_port: TargetPort | None = None
    """Port that Envoy binds inside the Pod, 1024 to 65535, unique among the listeners; 19000 and 19001 are taken. Left
    out: port where it is at least 1024, else port + 10000, so 80 becomes 10080."""

    protocol: Protocol = Protocol.HTTP
    """HTTP routes each request by host and path; TCP hands each connection to one backend."""

    routes: Annotated[tuple[Route, ...], Field(min_length=1, max_length=64)]
    """Where traffic goes, 1 to 64 entries. Of the routes that fit a request the most specific one answers; between
    equals the first. A request that fits none is answered with 404. On a TCP listener: exactly one, without match."""

    @property
    def container_port(self) -> int:
        """The port that Envoy binds inside the Pod, always at least 1024."""
        if self.target_port is not None:
            return self.target_port
        return self.port if self.port >= 1024 else self.port + PRIVILEGED_PORT_OFFSET


class Endpoint(ApiModel):
    """One address of a backend: a DNS name, resolved by Envoy again and again, or an IP address."""

    host: Host
    """DNS name in lower case, for example app.team-a.svc, or an IPv4 or IPv6 address without brackets, for example
    10.0.0.7 or fd00::7. Loopback and link-local addresses are refused."""

    port: Port
    """Port at that host, 1 to 65535."""

    weight: Annotated[Int32, Field(ge=1, le=128)] = 1
    """Share of the backend's traffic in proportion to its other endpoints, 1 to 128."""


class Backend(ApiModel):
    """A named set of endpoints that routes point to."""

    name: DnsLabel
    """Name that routes use, for example app. At most 63 characters, unique among the backends."""

    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=1, max_length=64)]
    """Addresses that share the traffic, 1 to 64. A DNS name with several addresses shares its weight between them."""

    connect_timeout: Duration = "5s"
    """How long Envoy waits for a connection to an endpoint: a whole number of ms or s between 1ms and 60s, for example
    250ms."""


_ANNOTATION_KEY: Final = f"(({_LABEL}[.])*{_LABEL}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


class Service(ApiModel):
    """The Service in front of the proxy."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!has(self.annotations) || self.annotations.all(k, k.matches(r'^({_ANNOTATION_KEY})$'))",
            message="every key must be a qualified name, for example example.com/owner: letters, digits, '-', '_' "
            "and '.', with an optional lower-case DNS name and '/' before it",
            holds=lambda service: all(re.fullmatch(_ANNOTATION_KEY, key) for key in service.annotations),
            field=".annotations",
        ),
        Rule(
            cel="!has(self.annotations) || "
            f"self.annotations.all(k, !k.startsWith('{GROUP}/') && k != '{_LAST_APPLIED}')",
            message=f"keys under {GROUP}/ belong to the operator and {_LAST_APPLIED} to kubectl: use a key of your own",
            holds=lambda service: (
                not any(key.startswith(f"{GROUP}/") or key == _LAST_APPLIED for key in service.annotations)
            ),
            field=".annotations",
        ),
    )

    type: ServiceType = ServiceType.CLUSTER_IP
    """Who can reach the proxy: ClusterIP, the cluster; NodePort, whoever reaches a node; LoadBalancer, what the
    cluster's load balancer serves."""

    annotations: Annotated[
        dict[str, Annotated[str, Field(max_length=4096)]],
        Field(max_length=32),
    ] = {}
    """Annotations of the Service, mostly for load balancers, for example
    service.beta.kubernetes.io/aws-load-balancer-type: external. At most 32, each value at most 4096 characters.
    Annotations that others put on the Service stay."""


_RESOURCE_NAMES: Final = ("cpu", "memory", "ephemeral-storage")


def _are_resource_names(amounts: dict[str, str]) -> bool:
    return all(name in _RESOURCE_NAMES for name in amounts)


Amounts = Annotated[
    dict[str, Quantity],
    Field(max_length=8),
    # A Pod takes other resources too, but Envoy would not use them: huge pages and devices need more than a request.
    Rule(
        cel=f"self.all(name, name in {list(_RESOURCE_NAMES)})",
        message="every key must be one of cpu, memory and ephemeral-storage: the proxy can't use any other resource",
        holds=_are_resource_names,
    ),
]


class Resources(ApiModel):
    """Compute resources of the Envoy container, as on a Pod."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || "
            "!isQuantity(string(self.requests[name])) || !isQuantity(string(self.limits[name])) || "
            "quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
            message="a request must not be above the limit of the same resource: raise the limit or lower the request",
            field=".requests",
        ),
    )

    requests: Amounts = {}
    """What the scheduler sets aside for each proxy, by resource, for example cpu: 100m and memory: 128Mi. Keys are cpu,
    memory and ephemeral-storage."""

    limits: Amounts = {}
    """What each proxy may use at most, by resource, for example cpu: 1 and memory: 512Mi. The CPU limit, rounded up,
    is also the number of Envoy's worker threads."""


# DNS lets a TTL go up to 2^31-1 (RFC 2181 section 8). A day is the most that a name may be wrong after a change, and 0
# would send every look-up to the name server.
Ttl = Annotated[Int32, Field(ge=1, le=86_400)]


class Registration(ApiModel):
    """What the outside record says beyond the proxy's address."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.hostname) || !(has(self.ttl) || has(self.registry))",
            message="ttl and registry say how a hostname is published: add the hostname, or remove them",
            holds=lambda registration: (
                registration.hostname is not None or (registration.ttl is None and registration.registry is None)
            ),
            field=".hostname",
        ),
    )

    hostname: DnsName | None = None
    """Name under which the proxy is registered, for example shop.example.com. One proxy has it at a time, the first
    that asks. Left out: the record has the address alone."""

    ttl: Ttl | None = None
    """For how many seconds others may remember the record, 1 to 86400. Left out: the registry's default."""

    registry: DnsLabel | None = None
    """Name of the registry that publishes the hostname, one of those that the operator is set up with, for example
    in-cluster. Left out: the operator's default."""


class DeletionPolicy(StrEnum):
    """What becomes of what a deleted proxy has made."""

    DELETE = "Delete"
    ORPHAN = "Orphan"


class EnvoyProxySpec(ApiModel):
    """The desired state of one tenant's proxy."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.listeners.all(l, self.listeners.exists_one(o, o.port == l.port))",
            message="every listener must have a port of its own: change one of the equal ports, or move its routes to "
            "the other listener",
            holds=lambda spec: _differ(listener.port for listener in spec.listeners),
            field=".listeners",
        ),
        Rule(
            cel="self.listeners.all(l, self.listeners.exists_one(o, "
            f"{_container_port('o')} == {_container_port('l')}))",
            message="every listener must have a port of its own inside the Pod (targetPort, else port, which is raised "
            f"by {PRIVILEGED_PORT_OFFSET} where it is below 1024): set targetPort to a free port of 1024 or above",
            holds=lambda spec: _differ(listener.container_port for listener in spec.listeners),
            field=".listeners",
        ),
        Rule(
            cel="self.listeners.all(l, l.routes.all(r, self.backends.exists(b, b.name == r.backend)))",
            message="every route's backend must be declared: add it to spec.backends, or write the name of one that is "
            "there",
            holds=lambda spec: (
                {route.backend for listener in spec.listeners for route in listener.routes}
                <= {backend.name for backend in spec.backends}
            ),
            field=".listeners",
        ),
    )

    replicas: Annotated[Int32, Field(ge=0, le=100)] = 1
    """How many Envoys run, 0 to 100. kubectl scale changes it too."""

    image: Image | None = None
    """Envoy image, for example envoyproxy/envoy:v1.40.0. Left out: the operator's default, which moves with the
    operator."""

    listeners: Annotated[tuple[Listener, ...], Field(min_length=1, max_length=16), MapBy("name")]
    """Ports on which the proxy takes traffic, 1 to 16, by name."""

    backends: Annotated[tuple[Backend, ...], Field(min_length=1, max_length=64), MapBy("name")]
    """Where traffic can go, 1 to 64, by name."""

    service: Service = Service()
    """The Service in front of the proxy. It has the proxy's name followed by -envoy."""

    resources: Resources | None = None
    """Compute resources of each Envoy. Left out: no requests and no limits, which is fit for a try and for nothing
    more."""

    registration: Registration | None = None
    """What the record in the registry says. Every proxy is registered with its address; left out: without a
    hostname."""

    deletion_policy: DeletionPolicy = DeletionPolicy.DELETE
    """What becomes of children and record when this object is deleted: Delete, they go along; Orphan, they stay as they
    are, belong to nobody, and the hostname stays taken."""

    paused: Annotated[bool, Field(strict=True)] = False
    """While true the operator writes nothing for this object but its status. What runs goes on running."""


class ConditionStatus(StrEnum):
    """The three values of a condition, as in the core API."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One observation, in the shape of metav1.Condition."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """What was observed, for example Ready, Reconciled, Available or Registered."""

    status: ConditionStatus
    """Whether it holds; Unknown where it could not be observed."""

    observed_generation: Annotated[Int64, Field(ge=0)]
    """The metadata.generation that the observation is about."""

    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When status last changed, in UTC."""

    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """Why, as one CamelCase word for programs."""

    message: Annotated[str, Field(max_length=32768)]
    """Why, as a sentence for people."""


class EnvoyProxyStatus(ApiModel):
    """What the operator has verified, for observedGeneration."""

    observed_generation: Annotated[Int64, Field(ge=-1)] = -1
    """The newest metadata.generation that the operator has acted on; -1 until it has seen the object."""

    conditions: Annotated[tuple[Condition, ...], Field(max_length=16), MapBy("type")] = ()
    """Ready sums up Reconciled (every declared field of every child holds), Available (enough proxies are ready) and
    Registered (the outside record is confirmed). Reconciling and Stalled exist only while they are true."""

    replicas: Annotated[Int32, Field(ge=0)] | None = None
    """Proxies that exist."""

    ready_replicas: Annotated[Int32, Field(ge=0)] | None = None
    """Proxies that answer their readiness probe."""

    selector: str | None = None
    """Label selector of the proxies' Pods, as kubectl scale and autoscalers need it."""

    address: str | None = None
    """Where clients reach the proxy: an IP address or a DNS name."""


class EnvoyProxy(ApiModel):
    """An Envoy of a tenant's own.

    The operator keeps its configuration, Deployment, Service and registration as declared here, and says in the status
    what it has verified.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && "
            "self.metadata.name.matches(r'^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            message=f"metadata.name must be at most {MAX_NAME_LENGTH} lower-case letters, digits and '-', begin with a "
            "letter and not end with '-', for example checkout: its children are called <name>-envoy",
        ),
    )

    spec: EnvoyProxySpec
    """The desired state."""

    status: EnvoyProxyStatus = EnvoyProxyStatus()
    """What the operator has verified."""


class ProxyReference(ApiModel):
    """Whose record this is; the UID decides, the names are for people."""

    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    """Namespace of the EnvoyProxy."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the EnvoyProxy."""

    uid: Annotated[
        str,
        Field(min_length=1, max_length=128),
        Rule(cel="self == oldSelf", message="a record keeps its owner: delete it and create another one"),
    ]
    """metadata.uid of the EnvoyProxy. Never changes."""


class RegisteredPort(ApiModel):
    """One reachable port of the proxy."""

    name: PortName
    """Name of the listener."""

    port: Port
    """Port at the record's address."""

    protocol: Protocol
    """What the listener speaks."""


class RetiringName(ApiModel):
    """A name that may still be published for the proxy, and has to be taken back."""

    registry: DnsLabel
    """Name of the registry that may hold it."""

    hostname: DnsName
    """The name there."""


class RecordState(StrEnum):
    """Why there is a record: for its proxy, or although its proxy is gone."""

    REGISTERED = "Registered"
    ABANDONED = "Abandoned"
    ORPHANED = "Orphaned"


class ProxyRegistrationSpec(ApiModel):
    """One proxy's entry in the in-cluster registry, written by the operator alone."""

    proxy: ProxyReference
    """Whose record this is."""

    generation: Annotated[
        Int64,
        Field(ge=0),
        Rule(cel="self >= oldSelf", message="an older generation must not replace a newer one: read the record again"),
    ]
    """metadata.generation of the EnvoyProxy that the record was made from. Never goes back."""

    hostname: DnsName | None = None
    """spec.registration.hostname of the EnvoyProxy, once it has the claim on it."""

    ttl: Ttl | None = None
    """spec.registration.ttl of the EnvoyProxy."""

    registry: DnsLabel = "in-cluster"
    """Name of the registry that publishes the hostname; in-cluster is this record itself."""

    retiring: Annotated[tuple[RetiringName, ...], Field(max_length=64)] = ()
    """Names that were published before and may still be. Noted here before anything replaces them, struck out once
    their removal is confirmed."""

    state: RecordState = RecordState.REGISTERED
    """Registered: the proxy exists. Abandoned: it is gone, and its names are still to be taken back. Orphaned: it is
    gone, and its deletionPolicy keeps the record."""

    address: Annotated[str, Field(min_length=1, max_length=253)]
    """Where clients reach the proxy: an IP address or a DNS name."""

    ports: Annotated[tuple[RegisteredPort, ...], Field(max_length=16)]
    """The proxy's listeners."""


class ProxyRegistrationStatus(ApiModel):
    """What an outside registry has confirmed; nothing where this record is the registration itself."""

    confirmed_generation: Annotated[Int64, Field(ge=0)] | None = None
    """The metadata.generation of this record that the registry has confirmed; 0 once it was found otherwise."""


class ProxyRegistration(ApiModel):
    """The record that makes a proxy known outside its namespace.

    The operator writes and removes it; edits by others are undone. It is also the operator's memory of what it has
    published elsewhere: remove it by hand and published names are forgotten.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.metadata.name == 'proxy-' + self.spec.proxy.uid",
            message="metadata.name must be proxy- followed by spec.proxy.uid: one proxy has one record",
        ),
    )

    spec: ProxyRegistrationSpec
    """What is registered."""

    status: ProxyRegistrationStatus | None = None
    """What an outside registry has confirmed."""


class HostnameClaimSpec(ApiModel):
    """Who has a hostname."""

    hostname: DnsName
    """The name that is taken."""

    proxy: ProxyReference
    """Whose it is."""


class HostnameClaim(ApiModel):
    """One hostname, taken by one EnvoyProxy: the API server's uniqueness of names makes it the only one.

    The operator writes and removes it.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.metadata.name == self.spec.hostname",
            message="metadata.name must be spec.hostname: one hostname has one claim",
        ),
    )

    spec: HostnameClaimSpec
    """Who has the hostname."""


def parse_spec(obj: dict[str, Any]) -> EnvoyProxySpec:
    """The spec of a stored EnvoyProxy. Raises ``pydantic.ValidationError`` for what the CRD's schema would refuse."""
    return EnvoyProxySpec.model_validate(obj.get("spec") or {})


def sentence(error: ValidationError) -> str:
    """The first thing that is wrong with a spec, as ``spec.<field>: what``; ``spec: what`` for a rule about it all."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(('spec', *map(str, first['loc'])))}: {problem_of(first)}"


def problem_of(details: ErrorDetails) -> str:
    """Pydantic's message without the name of the Python exception that a rule was written with."""
    return details["msg"].removeprefix("Value error, ")
