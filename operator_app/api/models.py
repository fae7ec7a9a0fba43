"""The EnvoyProxy: the pydantic models that define its schema, defaults, field descriptions and rules. Pure.

``crd.py`` derives the CustomResourceDefinition under ``manifests/crd`` from these models, and the operator parses
stored objects with them, so the two can't differ. The objects that the operator itself writes are in ``records.py``.

The docstring under a field is its ``kubectl explain`` text. A rule about one value belongs to the value's type
(``fields.py``), a rule that compares fields to the ``rules`` of their model. The API server refuses an object that
violates a rule with the rule's message. The models check the rules again, for objects that no API server has validated
(``render -f``) and for objects that were stored under older rules.
"""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from operator_app.api.availability import Autoscaling, Disruption
from operator_app.api.connections import (
    BackendProtocol,
    BackendService,
    BackendTls,
    HealthCheck,
    Hsts,
    ListenerLimits,
    ListenerTls,
    LoadBalancing,
    OutlierDetection,
)
from operator_app.api.fields import (
    Cidr,
    DnsLabel,
    DnsName,
    Duration,
    Host,
    Image,
    Int32,
    Int64,
    LongDuration,
    Port,
    PortName,
    QualifiedName,
    Quantity,
    Subdomain,
    TargetPort,
    Ttl,
)
from operator_app.api.network import NetworkPolicy
from operator_app.api.placement import (
    Affinity,
    Annotations,
    NodeSelector,
    PodLabels,
    PriorityClassName,
    SecretReference,
    Toleration,
    TopologySpread,
)
from operator_app.api.routes import TEXT, Route
from operator_app.api.rules import ApiModel, MapBy, Rule, all_distinct

MAX_NAME_LENGTH: Final = 57
"""``<name>-envoy`` names a Service, which is a DNS label of at most 63 characters (RFC 1035 section 2.3.1)."""

PRIVILEGED_PORT_OFFSET: Final = 10_000
"""Added to a port below 1024 inside the Pod, because Envoy runs without the capability to bind such ports."""

MAX_TEXT: Final = 65_536
"""Characters of all hosts, paths, headers and texts of one spec together.

Bounds what is stored, rendered and kept for one proxy.
"""

MAX_HOSTS: Final = 2_048
"""Hosts of all routes of one spec together. The API server evaluates its rules for each of them at every write."""

MAX_ROUTES: Final = 512
"""Routes of all listeners of one spec together."""

MAX_ENDPOINTS: Final = 1_024
"""Endpoints of all backends of one spec together. Like routes, they cost the API server at every write of the object,
of its status as well: a spec with twice as many of both takes it a second of CPU each time (``make bench-hostile``).
"""

MAX_SHARED_ROUTES: Final = 65_536
"""Upper bound of ``Listener.shared_routes``, added up over the listeners."""

METRICS_PORT: Final = 19000
"""Port of the listener that answers with statistics alone, where the spec asks for it. Not available as a
``targetPort``."""

READINESS_PORT: Final = 19001
"""Port of the listener that answers the readiness probe, and what is loaded. Not available as a ``targetPort``."""


class Protocol(StrEnum):
    """What a listener speaks."""

    HTTP = "HTTP"
    TCP = "TCP"


class ServiceType(StrEnum):
    """How the Service is exposed, as in the core API."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class ExternalTrafficPolicy(StrEnum):
    """What a node does with traffic from outside of the cluster, as in the core API."""

    CLUSTER = "Cluster"
    LOCAL = "Local"


class IPFamilyPolicy(StrEnum):
    """How many IP families a Service has, as in the core API."""

    SINGLE_STACK = "SingleStack"
    PREFER_DUAL_STACK = "PreferDualStack"
    REQUIRE_DUAL_STACK = "RequireDualStack"


def _container_port(listener: str) -> str:
    """``Listener.container_port`` in CEL, for the variable ``listener``."""
    raised = f"{listener}.port < 1024 ? {listener}.port + {PRIVILEGED_PORT_OFFSET} : {listener}.port"
    return f"(has({listener}.targetPort) ? {listener}.targetPort : {raised})"


_IS_PLAIN: Final = " && ".join(
    ("has(r.backend)", *(f"!has(r.{each.alias})" for name, each in Route.model_fields.items() if name != "backend"))
)
_HOSTS_OF_ROUTE: Final = "(has(r.match) && has(r.match.hosts) ? r.match.hosts.size() : 0)"
_IS_SHARED_ROUTE: Final = f"({_HOSTS_OF_ROUTE} == 0 || r.match.hosts.exists(h, h.startsWith('*')))"
_SHARED_ROUTES: Final = (
    f"self.listeners.map(l, l.routes.map(r, {_HOSTS_OF_ROUTE}).sum() "
    f"* l.routes.filter(r, {_IS_SHARED_ROUTE}).size()).sum()"
)
_HOSTS: Final = f"self.listeners.map(l, l.routes.map(r, {_HOSTS_OF_ROUTE}).sum()).sum()"
_ENDPOINTS: Final = "self.backends.map(b, has(b.endpoints) ? b.endpoints.size() : 0).sum()"
_TEXT: Final = (
    f"self.listeners.map(l, l.routes.map(r, {TEXT}).sum()).sum() "
    "+ self.backends.map(b, has(b.endpoints) ? b.endpoints.map(e, e.host.size()).sum() : 0).sum()"
)


_HTTP_ONLY: Final = {
    "https_redirect": "(has(self.httpsRedirect) && self.httpsRedirect)",
    "hsts": "has(self.hsts)",
    "trusted_hops": "(has(self.trustedHops) && self.trustedHops > 0)",
    "http10": "(has(self.http10) && self.http10)",
}
"""Members of a listener that a TCP listener must not have, with the CEL expression that it has one."""


class Listener(ApiModel):
    """One port of the proxy, and what happens to the traffic that arrives there."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!({_container_port('self')} in [{METRICS_PORT}, {READINESS_PORT}])",
            message=f"the proxy itself needs {METRICS_PORT} and {READINESS_PORT} inside the Pod: set targetPort to "
            "another port, for example 8080; port may stay",
            is_valid=lambda listener: listener.container_port not in {METRICS_PORT, READINESS_PORT},
        ),
        Rule(
            cel="!has(self.protocol) || self.protocol != 'TCP' || "
            f"(self.routes.size() == 1 && self.routes.all(r, {_IS_PLAIN}))",
            message="a TCP listener must have exactly one route, without match and with nothing but its backend: keep "
            "the one backend, or set protocol to HTTP",
            is_valid=lambda listener: (
                listener.protocol is not Protocol.TCP or (len(listener.routes) == 1 and listener.routes[0].is_plain)
            ),
            field=".routes",
        ),
        Rule(
            cel=f"!has(self.protocol) || self.protocol != 'TCP' || !({' || '.join(_HTTP_ONLY.values())})",
            message="httpsRedirect, hsts, trustedHops and http10 are about HTTP: remove them, or set protocol to HTTP",
            is_valid=lambda listener: (
                listener.protocol is not Protocol.TCP or not any(getattr(listener, name) for name in _HTTP_ONLY)
            ),
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

    node_port: Port | None = None
    """Port on every node, in the cluster's range (30000 to 32767 by default), unique among the listeners; for
    service.type NodePort or LoadBalancer. Left out: the cluster chooses one."""

    protocol: Protocol = Protocol.HTTP
    """HTTP routes each request by host and path; TCP hands each connection to one backend. Left out: HTTP."""

    tls: ListenerTls | None = None
    """Speaks TLS to clients, with a certificate from a Secret. Left out: plain text."""

    https_redirect: Annotated[bool, Field(strict=True)] = False
    """Answers requests by plain HTTP with a redirect (301) to the same place by HTTPS. Left out: false."""

    hsts: Hsts | None = None
    """Tells browsers to use HTTPS alone."""

    proxy_protocol: Annotated[bool, Field(strict=True)] = False
    """Whether a balancer in front sends the client's address by the PROXY protocol. Connections without it are then
    closed, since any client could claim any address. Left out: false."""

    trusted_hops: Annotated[Int32, Field(ge=0, le=10)] = 0
    """How many proxies in front add to X-Forwarded-For and are trusted, 0 to 10: with 1 the last address in it is the
    client's, and X-Forwarded-Proto of the request counts. With 0 nobody is trusted: backends get neither
    X-Forwarded-For nor Forwarded, X-Real-IP, X-Forwarded-Host and X-Forwarded-Port from clients. Left out: 0."""

    http10: Annotated[bool, Field(strict=True)] = False
    """Whether HTTP/1.0 is answered, as some probes speak it. Left out: false."""

    limits: ListenerLimits | None = None
    """Bounds of what clients may use."""

    routes: Annotated[tuple[Route, ...], Field(min_length=1, max_length=64)]
    """Where traffic goes, 1 to 64 entries. Of the routes that fit a request the most specific one answers; between
    equals the first. A request that fits none is answered with 404. On a TCP listener: exactly one, without match."""

    @property
    def shared_routes(self) -> int:
        """Hosts times routes for a wildcard or for every host: at most so many times such a route is repeated."""
        shared = [each for each in self.routes if not each.hosts or any(host.startswith("*") for host in each.hosts)]
        return self.host_count * len(shared)

    @property
    def host_count(self) -> int:
        """Hosts of all its routes."""
        return sum(len(each.hosts) for each in self.routes)

    @property
    def text_length(self) -> int:
        """Characters of what is free text in its routes."""
        return sum(each.text_length for each in self.routes)

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
    """Share of the backend's traffic in proportion to its other endpoints, 1 to 128. Left out: 1."""


class Backend(ApiModel):
    """A named set of endpoints that routes point to."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.endpoints) != has(self.service)",
            message="must have either endpoints or service: keep the one that says where the backend is",
            is_valid=lambda backend: bool(backend.endpoints) != (backend.service is not None),
        ),
    )

    name: DnsLabel
    """Name that routes use, for example app. At most 63 characters, unique among the backends."""

    service: BackendService | None = None
    """A Service of the proxy's namespace, which shares the traffic between its Pods."""

    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=1, max_length=64)] = ()
    """Addresses that share the traffic, 1 to 64. A DNS name with several addresses shares its weight between them."""

    connect_timeout: Duration = "5s"
    """How long Envoy waits for a connection to an endpoint: a whole number of ms or s between 1ms and 60s, for example
    250ms. Left out: 5s."""

    protocol: BackendProtocol = BackendProtocol.HTTP1
    """What the backend speaks: http1, http2 or grpc. Left out: http1."""

    tls: BackendTls | None = None
    """Speaks TLS to the backend. Left out: plain text."""

    load_balancing: LoadBalancing | None = None
    """How an endpoint is chosen. Left out: one after the other."""

    health_check: HealthCheck | None = None
    """Asks endpoints whether they are there. Left out: nobody asks."""

    outlier_detection: OutlierDetection | None = None
    """Leaves failing endpoints out for a while. Left out: never."""

    max_connections: Annotated[Int32, Field(ge=1, le=100_000)] = 1024
    """Connections of each proxy to the backend, 1 to 100000. Left out: 1024."""

    max_pending_requests: Annotated[Int32, Field(ge=1, le=100_000)] = 1024
    """Requests that wait for a connection, 1 to 100000; more are answered with 503. Left out: 1024."""

    max_requests: Annotated[Int32, Field(ge=1, le=100_000)] = 1024
    """Requests under way at the same time, 1 to 100000; more are answered with 503. Left out: 1024."""

    idle_timeout: LongDuration | None = None
    """How long a connection without a request is kept, best below the backend's own time. Left out: an hour."""

    @property
    def addresses(self) -> tuple[Endpoint, ...]:
        """The endpoints, or that of the Service, whose name a Pod resolves in its own namespace."""
        if self.service is not None:
            return (Endpoint.model_construct(host=self.service.name, port=self.service.port, weight=1),)
        return self.endpoints


class Service(ApiModel):
    """The Service in front of the proxy."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.type == 'LoadBalancer' || !(has(self.loadBalancerClass) || has(self.loadBalancerSourceRanges))",
            message="loadBalancerClass and loadBalancerSourceRanges are for a load balancer: set type to LoadBalancer, "
            "or remove them",
            is_valid=lambda service: (
                service.type is ServiceType.LOAD_BALANCER
                or (service.load_balancer_class is None and not service.load_balancer_source_ranges)
            ),
        ),
        Rule(
            cel="self.type != 'ClusterIP' || !has(self.externalTrafficPolicy)",
            message="externalTrafficPolicy is for traffic from outside: set type to NodePort or LoadBalancer, or "
            "remove it",
            is_valid=lambda service: (
                service.type is not ServiceType.CLUSTER_IP or service.external_traffic_policy is None
            ),
        ),
    )

    type: ServiceType = ServiceType.CLUSTER_IP
    """Who can reach the proxy: ClusterIP, the cluster; NodePort, whoever reaches a node; LoadBalancer, what the
    cluster's load balancer serves."""

    annotations: Annotations = Field(default_factory=dict)
    """Annotations of the Service, mostly for load balancers, for example
    service.beta.kubernetes.io/aws-load-balancer-type: external. At most 32, each value at most 4096 characters.
    Annotations that others put on the Service stay."""

    load_balancer_class: QualifiedName | None = None
    """Which of the cluster's load balancers serves the Service, for example service.k8s.aws/nlb. It can't be changed in
    place: set type to ClusterIP, and after that to LoadBalancer with another class. Left out: the cluster's default."""

    load_balancer_source_ranges: Annotated[tuple[Cidr, ...], Field(max_length=64)] = ()
    """Addresses of clients that the load balancer lets in, for example 203.0.113.0/24, at most 64, where it can tell.
    Left out: every client."""

    external_traffic_policy: ExternalTrafficPolicy | None = None
    """What a node does with traffic from outside: Cluster, it may pass it on to another node, which hides the client's
    address; Local, it serves it by its own proxies, and the address stays. Left out: Cluster."""

    ip_family_policy: IPFamilyPolicy | None = None
    """IPv4, IPv6 or both: SingleStack, the cluster's first; PreferDualStack, both where the cluster has them;
    RequireDualStack, both or an error. With the last two the proxy listens on IPv6 as well. Left out: SingleStack."""

    @property
    def is_dual_stack(self) -> bool:
        """Whether the proxy listens on IPv6 too."""
        return self.ip_family_policy not in (None, IPFamilyPolicy.SINGLE_STACK)


_RESOURCE_NAMES: Final = ("cpu", "memory", "ephemeral-storage")


def _are_resource_names(amounts: dict[str, str]) -> bool:
    return all(name in _RESOURCE_NAMES for name in amounts)


Amounts = Annotated[
    dict[str, Quantity],
    Field(max_length=8),
    # A Pod accepts other resources too (huge pages, devices), but Envoy can't use them.
    Rule(
        cel=f"self.all(name, name in {list(_RESOURCE_NAMES)})",
        message="every key must be one of cpu, memory and ephemeral-storage: the proxy can't use any other resource",
        is_valid=_are_resource_names,
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

    requests: Amounts = Field(default_factory=dict)
    """What the scheduler sets aside for each proxy, by resource, for example cpu: 100m and memory: 128Mi. Keys are cpu,
    memory and ephemeral-storage."""

    limits: Amounts = Field(default_factory=dict)
    """What each proxy may use at most, by resource, for example cpu: 1 and memory: 512Mi. The CPU limit, rounded up,
    is also the number of Envoy's worker threads."""


class Registration(ApiModel):
    """What the outside record says beyond the proxy's address."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.hostname) || !(has(self.ttl) || has(self.registry))",
            message="ttl and registry say how a hostname is published: add the hostname, or remove them",
            is_valid=lambda registration: (
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


class Telemetry(ApiModel):
    """What the proxy tells of itself."""

    metrics: Annotated[bool, Field(strict=True)] = False
    """Whether each Pod serves Envoy's statistics for Prometheus: GET /stats/prometheus at container port proxy-metrics
    (19000), and nothing else there. Switching it replaces the Pods."""


class EnvoyProxySpec(ApiModel):
    """The desired state of one tenant's proxy."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.listeners.all(l, self.listeners.exists_one(o, o.port == l.port))",
            message="every listener must have a port of its own: change one of the equal ports, or move its routes to "
            "the other listener",
            is_valid=lambda spec: all_distinct(listener.port for listener in spec.listeners),
            field=".listeners",
        ),
        Rule(
            cel="self.listeners.all(l, self.listeners.exists_one(o, "
            f"{_container_port('o')} == {_container_port('l')}))",
            message="every listener must have a port of its own inside the Pod (targetPort, else port, which is raised "
            f"by {PRIVILEGED_PORT_OFFSET} where it is below 1024): set targetPort to a free port of 1024 or above",
            is_valid=lambda spec: all_distinct(listener.container_port for listener in spec.listeners),
            field=".listeners",
        ),
        Rule(
            # Sets are compared outside of CEL, where an expression for each pair would take a second for full lists.
            cel="self.listeners.all(l, sets.contains(self.backends.map(b, b.name), "
            "l.routes.filter(r, has(r.backend)).map(r, r.backend) "
            "+ l.routes.filter(r, has(r.mirror)).map(r, r.mirror.backend)) && "
            "l.routes.all(r, !has(r.backends) || sets.contains(self.backends.map(b, b.name), "
            "r.backends.map(b, b.name))))",
            message="every route's backend must be declared: add it to spec.backends, or write the name of one that is "
            "there",
            is_valid=lambda spec: (
                {name for listener in spec.listeners for route in listener.routes for name in route.backend_names}
                <= {backend.name for backend in spec.backends}
            ),
            field=".listeners",
        ),
        Rule(
            cel=f"{_TEXT} <= {MAX_TEXT}",
            message=f"hosts, paths, headers and texts of all routes and endpoints must be at most {MAX_TEXT} "
            "characters together: divide them between several EnvoyProxies",
            is_valid=lambda spec: (
                sum(listener.text_length for listener in spec.listeners)
                + sum(len(endpoint.host) for backend in spec.backends for endpoint in backend.endpoints)
                <= MAX_TEXT
            ),
        ),
        Rule(
            cel=f"self.listeners.map(l, l.routes.size()).sum() <= {MAX_ROUTES}",
            message=f"all listeners together must have at most {MAX_ROUTES} routes: divide them between several "
            "EnvoyProxies",
            is_valid=lambda spec: sum(len(listener.routes) for listener in spec.listeners) <= MAX_ROUTES,
            field=".listeners",
        ),
        Rule(
            cel=f"{_ENDPOINTS} <= {MAX_ENDPOINTS}",
            message=f"all backends together must have at most {MAX_ENDPOINTS} endpoints: name a Service instead of its "
            "Pods, or divide them between several EnvoyProxies",
            is_valid=lambda spec: sum(len(backend.endpoints) for backend in spec.backends) <= MAX_ENDPOINTS,
            field=".backends",
        ),
        Rule(
            cel=f"{_HOSTS} <= {MAX_HOSTS}",
            message=f"all routes together must have at most {MAX_HOSTS} hosts: write a wildcard for hosts of a domain, "
            "or divide them between several EnvoyProxies",
            is_valid=lambda spec: sum(listener.host_count for listener in spec.listeners) <= MAX_HOSTS,
            field=".listeners",
        ),
        Rule(
            cel=f"{_SHARED_ROUTES} <= {MAX_SHARED_ROUTES}",
            message="hosts times routes for a wildcard or for every host, added up over the listeners, must be at most "
            f"{MAX_SHARED_ROUTES}, since Envoy needs such a route once for each host: declare fewer of either, or "
            "divide them between several EnvoyProxies",
            is_valid=lambda spec: sum(listener.shared_routes for listener in spec.listeners) <= MAX_SHARED_ROUTES,
            field=".listeners",
        ),
        Rule(
            cel="self.service.type != 'ClusterIP' || self.listeners.all(l, !has(l.nodePort))",
            message="a nodePort needs a Service with ports on nodes: set service.type to NodePort or LoadBalancer, or "
            "remove nodePort",
            is_valid=lambda spec: (
                spec.service.type is not ServiceType.CLUSTER_IP
                or all(listener.node_port is None for listener in spec.listeners)
            ),
            field=".listeners",
        ),
        Rule(
            cel="self.listeners.all(l, !has(l.nodePort) || "
            "self.listeners.exists_one(o, has(o.nodePort) && o.nodePort == l.nodePort))",
            message="every listener must have a nodePort of its own: change one of the equal ones, or leave it out",
            is_valid=lambda spec: all_distinct(
                listener.node_port for listener in spec.listeners if listener.node_port is not None
            ),
            field=".listeners",
        ),
        Rule(
            cel="!has(self.autoscaling) || self.replicas > 0",
            message="autoscaling never starts from zero proxies: set replicas to 1 or more, or remove autoscaling to "
            "stop them all",
            is_valid=lambda spec: spec.autoscaling is None or spec.replicas > 0,
            field=".replicas",
        ),
        Rule(
            cel="!has(self.autoscaling) || (has(self.resources) && "
            "((has(self.resources.requests) && 'cpu' in self.resources.requests) || "
            "(has(self.resources.limits) && 'cpu' in self.resources.limits)))",
            message="autoscaling compares the CPU use with what is requested: set resources.requests.cpu, for example "
            "250m",
            is_valid=lambda spec: (
                spec.autoscaling is None
                or (spec.resources is not None and "cpu" in (spec.resources.requests | spec.resources.limits))
            ),
            field=".autoscaling",
        ),
    )

    replicas: Annotated[Int32, Field(ge=0, le=100)] = 1
    """How many Envoys run, 0 to 100. kubectl scale changes it too. Does not count while autoscaling is set."""

    image: Image | None = None
    """Envoy image, for example envoyproxy/envoy:v1.40.0. Left out: the operator's default, which moves with the
    operator."""

    listeners: Annotated[tuple[Listener, ...], Field(min_length=1, max_length=16), MapBy("name")]
    """Ports on which the proxy takes traffic, 1 to 16, by name."""

    backends: Annotated[tuple[Backend, ...], Field(min_length=1, max_length=64), MapBy("name")]
    """Where traffic can go, 1 to 64, by name."""

    service: Service = Service()
    """The Service in front of the proxy. It has the proxy's name followed by -envoy."""

    disruption: Disruption | None = None
    """How many proxies a drain of nodes may take at the same time. Left out: one, once there are two or more."""

    autoscaling: Autoscaling | None = None
    """Lets the load decide how many proxies run; replicas does not count meanwhile. Left out: replicas counts, at
    once."""

    network_policy: NetworkPolicy | None = None
    """Limits the proxy's connections: in to its listeners from the named clients, out to its backends and to DNS. Left
    out: the operator limits nothing."""

    resources: Resources | None = None
    """Compute resources of each Envoy. Left out: no requests and no limits, which is fit for a try and for nothing
    more."""

    node_selector: NodeSelector = Field(default_factory=dict)
    """Labels of the nodes that proxies may run on, for example example.com/pool: edge, at most 16."""

    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] = ()
    """Taints of nodes that don't keep proxies away, at most 16."""

    affinity: Affinity | None = None
    """Nodes and neighbours that proxies want, beyond nodeSelector. Left out: any."""

    topology_spread: Annotated[
        tuple[TopologySpread, ...],
        Field(max_length=4),
        Rule(
            cel="self.all(each, self.exists_one(other, other.topologyKey == each.topologyKey))",
            message="every entry must have a topologyKey of its own: remove one of the equal ones",
            is_valid=lambda spread: all_distinct(each.topology_key for each in spread),
        ),
    ] = ()
    """How proxies are spread over nodes and zones, at most 4 entries. Left out: as the cluster does by default."""

    priority_class_name: PriorityClassName | None = None
    """Priority of the Pods among all that wait for room, the name of a PriorityClass. Left out: the cluster's
    default."""

    service_account_name: Subdomain | None = None
    """ServiceAccount of the Pods, for policies that look at it; no token of it is mounted. Left out: default."""

    image_pull_secrets: Annotated[tuple[SecretReference, ...], Field(max_length=8), MapBy("name")] = ()
    """Secrets with the credentials for the image's registry, at most 8."""

    pod_labels: PodLabels = Field(default_factory=dict)
    """Further labels of the Pods, for example for cost reports or policies, at most 16. A change replaces the Pods."""

    pod_annotations: Annotations = Field(default_factory=dict)
    """Annotations of the Pods, for example for a metrics collector, at most 32. A change replaces the Pods."""

    registration: Registration | None = None
    """What the record in the registry says. Every proxy is registered with its address; left out: without a
    hostname."""

    telemetry: Telemetry | None = None
    """What the proxy tells of itself. Left out: no metrics."""

    deletion_policy: DeletionPolicy = DeletionPolicy.DELETE
    """What becomes of children and record when this object is deleted: Delete, they go along; Orphan, they stay as they
    are, belong to nobody, and the hostname stays taken."""

    paused: Annotated[bool, Field(strict=True)] = False
    """While true the operator writes nothing for this object but its status. What runs goes on running."""

    @property
    def has_metrics(self) -> bool:
        """Whether each Pod serves Envoy's statistics."""
        return self.telemetry is not None and self.telemetry.metrics


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


def parse_spec(obj: dict[str, Any]) -> EnvoyProxySpec:
    """The spec of an EnvoyProxy. Raises ``pydantic.ValidationError`` if it violates the schema or a rule.

    Listeners and backends are validated one by one: in one piece, a spec at its bounds holds the interpreter lock for
    some hundred milliseconds, in which no other thread runs.
    """
    spec = obj.get("spec") or {}
    try:
        parts = {
            "listeners": [Listener.model_validate(each) for each in spec["listeners"]],
            "backends": [Backend.model_validate(each) for each in spec["backends"]],
        }
    except (KeyError, TypeError, ValidationError):
        # The whole spec's error names the field by its whole path.
        return EnvoyProxySpec.model_validate(spec)
    return EnvoyProxySpec.model_validate(spec | parts)


def sentence(error: ValidationError) -> str:
    """The first error of a spec as ``spec.<field>: message``, or ``spec: message`` for a rule of the whole spec."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(('spec', *map(str, first['loc'])))}: {problem_of(first)}"


def problem_of(details: ErrorDetails) -> str:
    """Pydantic's message of one error, without the name of the Python exception that the rule raised."""
    return details["msg"].removeprefix("Value error, ")
