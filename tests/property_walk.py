"""Edits that exercise every property of the EnvoyProxy's spec, derived from the CRD's schema. Pure.

Each property has one *trail*: a sequence of specs that set the property to several values, remove it if it is optional,
and restore the first spec. Values come from the schema (bounds, sizes, enums). The tables below supply values of free
text, and changes of other fields that a rule requires at the same time.

:func:`unexercised` compares a set of trails with the schema alone, so that it reports a property that is new in the
schema and missing in the tables.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from operator_app.api.kinds import Object, Value
from tests.api_cases import BOUNDS, CASES

PropertyPath = tuple[str, ...]
"""Names of properties from the spec down; ``*`` is any item of a list, or any value of a map with free keys."""

ABSENT: Final = object()
ITEM: Final = "*"


@dataclass(frozen=True, slots=True)
class Property:
    """One property of the schema; ``is_required`` if the object that contains it is invalid without it."""

    path: PropertyPath
    schema: Object
    is_required: bool

    def __str__(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Step:
    """One edit of a trail: a description of it, and the whole spec after it."""

    what: str
    spec: Object


def properties(schema: Object, path: PropertyPath = ()) -> Iterator[Property]:
    """Every property below ``schema``, parents first."""
    for name, inner in schema.get("properties", {}).items():
        here = (*path, name)
        yield Property(here, inner, is_required=name in schema.get("required", ()))
        yield from properties(inner, here)
        if "items" in inner:
            yield from properties(inner["items"], (*here, ITEM))


def trail(prop: Property, base: Object) -> tuple[Step, ...]:
    """The edits that exercise ``prop``, from ``base`` back to ``base``.

    Raises ``LookupError`` if ``prop`` is free text without values in a table, or if ``base`` lacks its parent.
    """
    original = base
    for path, change in PARENTS.items():
        if prop.path[: len(path)] == path:
            base = deepcopy(base)
            change(base)
    steps = [Step(f"{prop} = {_short(value)}", _with(base, prop.path, value)) for value in _values(prop, base)]
    if not prop.is_required:
        steps.append(Step(f"{prop} unset", _with(base, prop.path, ABSENT)))
    steps.append(Step("changed back", deepcopy(original)))
    if prop.path in BETWEEN:
        what, change = BETWEEN[prop.path]
        between = deepcopy(original)
        change(between)
        return tuple(each for step in steps for each in (Step(what, between), step))
    return tuple(steps)


def unexercised(schema: Object, specs: list[Object]) -> list[str]:
    """The values, absences, bounds, sizes and enum members of each property that none of ``specs`` contains."""
    return [f"{prop}: {what}" for prop in properties(schema) for what in _untried(prop, specs)]


def _untried(prop: Property, specs: list[Object]) -> Iterator[str]:
    found = [value for spec in specs for value in _found(spec, prop.path)]
    values = [each for each in found if each is not ABSENT]
    schema = prop.schema
    choices = schema.get("enum") or ([False, True] if schema.get("type") == "boolean" else [])
    if not any(values[0] != each for each in values[1:]):
        yield "not two values"
    if not prop.is_required and ABSENT not in found:
        yield "never absent"
    yield from (f"never {choice}" for choice in choices if choice not in values)
    yield from (
        f"never {schema[bound]}" for bound in ("minimum", "maximum") if bound in schema and schema[bound] not in values
    )
    for least, most in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
        sizes = {len(each) for each in values if hasattr(each, "__len__")}
        # The shortest text of most properties is one character, and no rule depends on the minimum of the others.
        bounds = (most,) if least == "minLength" else (least, most)
        yield from (f"never of size {schema[bound]}" for bound in bounds if schema.get(bound) not in {None, *sizes})


def _found(holder: Value, path: PropertyPath) -> Iterator[Value]:
    """Every value at ``path``, and ``ABSENT`` for each object without one."""
    if not path:
        yield holder
    elif path[0] == ITEM:
        for item in holder:
            yield from _found(item, path[1:])
    elif path[0] in holder:
        yield from _found(holder[path[0]], path[1:])
    elif len(path) == 1:
        yield ABSENT


def _with(base: Object, path: PropertyPath, value: Value) -> Object:
    """``base`` with ``value`` at the first match of ``path``, and with the changes that ``MOVES`` requires."""
    spec = deepcopy(base)
    holder: Any = spec
    for name in path[:-1]:
        holder = holder[0] if name == ITEM else holder[name]
    if value is ABSENT:
        holder.pop(path[-1], None)
    else:
        holder[path[-1]] = deepcopy(value)
    move_along = MOVES.get(path)
    if move_along is not None:
        move_along(spec, holder)
    return spec


def _values(prop: Property, base: Object) -> Iterator[Value]:
    schema = prop.schema
    if prop.path in IN_A_CLUSTER:
        yield from IN_A_CLUSTER[prop.path]
        return
    match schema:
        case {"enum": choices}:
            yield from choices
        case {"type": "boolean"}:
            yield from (True, False)
        case {"type": "integer"}:
            yield schema["minimum"]
            yield schema["minimum"] + 1
            yield schema["maximum"]
        case {"type": "object", "properties": _}:
            (current,) = [each for each in _found(base, prop.path) if each is not ABSENT][:1]
            yield from OBJECTS.get(prop.path, (current,))
        case {"type": "array", "maxItems": most}:
            yield from (COLLECTIONS[prop.path](size) for size in (schema.get("minItems", 0), 2, most))
        case {"type": "object", "maxProperties": most}:
            yield from (COLLECTIONS[prop.path](size) for size in (1, min(2, most), most))
        case _:
            known = (*_accepted(prop.path), *TEXTS.get(prop.path, ()))
            if not known:
                raise LookupError(f"no table has values of {prop}")
            yield from known


def _accepted(path: PropertyPath) -> Iterator[Value]:
    """The accepted values of ``api_cases`` at a path."""
    for at, values in (*((case.at, [case.accepted]) for case in CASES), *((at, good) for at, good, _ in BOUNDS)):
        # Values of another item than the first may be equal to the first item's key.
        is_first = all(each == 0 for each in at if isinstance(each, int))
        if is_first and at[0] == "spec" and tuple(ITEM if each == 0 else each for each in at[1:]) == path:
            yield from values


def _short(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


# --- tables of what the schema does not define -------------------------------------------------------------------

_LISTENER: Final[PropertyPath] = ("listeners", ITEM)
_ROUTE: Final[PropertyPath] = (*_LISTENER, "routes", ITEM)
_BACKEND: Final[PropertyPath] = ("backends", ITEM)
_TOLERATION: Final[PropertyPath] = ("tolerations", ITEM)
_NODE_AFFINITY: Final[PropertyPath] = ("affinity", "nodes", ITEM)
_POD_AFFINITY: Final[PropertyPath] = ("affinity", "pods", ITEM)
_PEER: Final[PropertyPath] = ("networkPolicy", "from", ITEM)


def _dns_name(length: int) -> str:
    """A DNS name of exactly ``length`` characters, at least 65, in labels of up to 63."""
    labels = "".join(f"{'a' * 63}." for _ in range(length // 64))
    rest = length - len(labels)
    return labels + "b" * rest if rest else labels[:-3] + ".b"


TEXTS: Final[Mapping[PropertyPath, tuple[Value, ...]]] = {
    ("image",): ("envoyproxy/envoy:v1.39.0", f"registry.example/{'a' * (512 - 17)}"),
    (*_LISTENER, "name"): ("web",),
    (*_ROUTE, "backend"): ("app", "b" * 63),
    (*_ROUTE, "backends", ITEM, "name"): ("other", "b" * 63),
    (*_ROUTE, "mirror", "backend"): ("db", "b" * 63),
    (*_ROUTE, "match", "headers", ITEM, "name"): ("x-other", "a" * 64),
    (*_ROUTE, "match", "headers", ITEM, "value"): ("2", "%REQ(a)%", "b" * 128),
    (*_ROUTE, "match", "queryParams", ITEM, "name"): ("v", "a" * 128),
    (*_ROUTE, "match", "queryParams", ITEM, "value"): ("3", "a" * 128),
    (*_ROUTE, "idleTimeout"): ("1m", "60m", "59999ms"),
    (*_ROUTE, "timeout"): ("1m", "59999ms"),
    (*_ROUTE, "retries", "perTryTimeout"): ("1ms", "15s", "14999ms"),
    (*_ROUTE, "prefixRewrite"): ("/", "/v2", "/v2/"),
    (*_ROUTE, "hostRewrite"): ("other.example.com", _dns_name(253)),
    (*_ROUTE, "redirect", "host"): ("other.example.com", _dns_name(253)),
    (*_ROUTE, "redirect", "path"): ("/", "/" + "a" * 255),
    (*_ROUTE, "redirect", "prefix"): ("/", "/" + "a" * 255),
    (*_ROUTE, "response", "body"): ("down", "<h1>%REQ(:path)%</h1>", "b" * 1024),
    (*_ROUTE, "response", "contentType"): ("text/html", "a" * 64),
    **{
        (*_ROUTE, changes, change, ITEM, member): texts
        for changes in ("requestHeaders", "responseHeaders")
        for change in ("set", "add")
        for member, texts in {"name": ("x-other", "a" * 64), "value": ("%REQ(:path)%", "v" * 256)}.items()
    },
    (*_ROUTE, "cors", "maxAge"): ("1s", "60m", "59999ms"),
    (*_ROUTE, "match", "pathPrefix"): ("/", "/api/v2"),
    (*_ROUTE, "match", "pathExact"): ("/", "/api/v2", "/" + "a" * 1023),
    (*_BACKEND, "name"): ("other", "b" * 63),
    (*_BACKEND, "endpoints", ITEM, "host"): ("app.team-a.svc", _dns_name(253)),
    (*_BACKEND, "service", "name"): ("db", "a" * 63),
    (*_BACKEND, "tls", "serverName"): ("other.example.com", _dns_name(253)),
    (*_BACKEND, "tls", "caSecretName"): ("other", _dns_name(253)),
    (*_BACKEND, "loadBalancing", "header"): ("x-other", "a" * 64),
    (*_BACKEND, "loadBalancing", "cookie"): ("session", "a" * 64),
    (*_BACKEND, "healthCheck", "path"): ("/", "/" + "a" * 1023),
    (*_BACKEND, "healthCheck", "interval"): ("2s", "60m", "59999ms"),
    (*_BACKEND, "healthCheck", "timeout"): ("1ms", "10s", "10000ms"),
    (*_BACKEND, "outlierDetection", "ejectionTime"): ("1s", "60m", "59999ms"),
    (*_BACKEND, "idleTimeout"): ("1ms", "60m", "59999ms"),
    (*_LISTENER, "tls", "secretName"): ("other", _dns_name(253)),
    (*_LISTENER, "tls", "clientCASecretName"): ("other", _dns_name(253)),
    (*_LISTENER, "limits", "headersTimeout"): ("1s", "60m", "59999ms"),
    (*_LISTENER, "limits", "idleTimeout"): ("1s", "60m", "59999ms"),
    (*_BACKEND, "connectTimeout"): ("1ms", "59999ms", "60000ms"[:7]),
    ("registration", "hostname"): ("other.example.com", _dns_name(253)),
    ("service", "loadBalancerClass"): ("example.com/other", f"{_dns_name(253)}/{'a' * 63}"),
    ("networkPolicy", "from", ITEM, "cidr"): (
        "192.0.2.0/24",
        "10.0.0.0/8",
        "fdaa:bbbb:cccc:dddd:eeee:ffff:1111:2222/128",
    ),
    ("networkPolicy", "from", ITEM, "namespace"): ("team-b", "b" * 63),
    (*_TOLERATION, "key"): ("example.com/other", f"{_dns_name(253)}/{'a' * 63}"),
    (*_TOLERATION, "value"): ("other", "a" * 63),
    (*_NODE_AFFINITY, "key"): ("example.com/other", f"{_dns_name(253)}/{'a' * 63}"),
    (*_POD_AFFINITY, "topologyKey"): ("example.com/other", f"{_dns_name(253)}/{'a' * 63}"),
    ("topologySpread", ITEM, "topologyKey"): ("kubernetes.io/hostname", f"{_dns_name(253)}/{'a' * 63}"),
    ("priorityClassName",): ("other", _dns_name(253)),
    ("serviceAccountName",): ("other", _dns_name(253)),
    ("imagePullSecrets", ITEM, "name"): ("other", _dns_name(253)),
}
"""Texts in addition to those of ``api_cases``: an ordinary one and the longest one."""


def _listeners(size: int) -> list[Object]:
    return [{"name": f"l{n}", "port": 8000 + n, "routes": [{"backend": "app"}]} for n in range(size)]


def _routes(size: int) -> list[Object]:
    return [{"match": {"pathPrefix": f"/p{n}"}, "backend": "app"} for n in range(size)]


def _backends(size: int) -> list[Object]:
    return [{"name": f"b{n}", "endpoints": [{"host": f"10.0.0.{n + 1}", "port": 80}]} for n in range(size)]


def _endpoints(size: int) -> list[Object]:
    return [{"host": f"10.0.1.{n + 1}", "port": 8080} for n in range(size)]


def _amounts(size: int) -> dict[str, str]:
    # The rules allow three resources, so the schema's bound of eight can't be reached.
    return dict(list({"cpu": "1500m", "memory": "1Gi", "ephemeral-storage": "1e9"}.items())[:size])


def _names(size: int) -> list[str]:
    return ["app", "db", *(f"b{n}" for n in range(size))][:size]


def _labels(size: int) -> dict[str, str]:
    return {f"example.com/a{n}": f"v{n}" for n in range(size)}


COLLECTIONS: Final[Mapping[PropertyPath, Callable[[int], Value]]] = {
    ("listeners",): _listeners,
    (*_LISTENER, "routes"): _routes,
    (*_ROUTE, "match", "hosts"): lambda size: [f"h{n}.example.com" for n in range(size)],
    ("backends",): _backends,
    (*_BACKEND, "endpoints"): _endpoints,
    ("service", "annotations"): lambda size: {f"example.com/a{n}": str(n) for n in range(size)},
    ("resources", "requests"): _amounts,
    ("resources", "limits"): _amounts,
    (*_ROUTE, "match", "headers"): lambda size: [{"name": f"x-a{n}"} for n in range(size)],
    (*_ROUTE, "match", "queryParams"): lambda size: [{"name": f"a{n}"} for n in range(size)],
    (*_ROUTE, "backends"): lambda size: [{"name": name} for name in _names(size)],
    (*_ROUTE, "retries", "after"): lambda size: ["connection", "gateway-error", "server-error"][:size],
    **{
        (*_ROUTE, changes, change): lambda size: [{"name": f"x-a{n}", "value": "b"} for n in range(size)]
        for changes in ("requestHeaders", "responseHeaders")
        for change in ("set", "add")
    },
    **{
        (*_ROUTE, *path): lambda size: [f"x-a{n}" for n in range(size)]
        for path in (
            ("requestHeaders", "remove"),
            ("responseHeaders", "remove"),
            ("cors", "headers"),
            ("cors", "exposeHeaders"),
        )
    },
    (*_ROUTE, "cors", "origins"): lambda size: [f"https://a{n}.example.com" for n in range(size)],
    (*_ROUTE, "cors", "methods"): lambda size: ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"][:size],
    (*_ROUTE, "access", "allow"): lambda size: [f"10.{n}.0.0/16" for n in range(size)],
    (*_ROUTE, "access", "deny"): lambda size: [f"10.{n}.0.0/16" for n in range(size)],
    ("service", "loadBalancerSourceRanges"): lambda size: [f"10.{n}.0.0/16" for n in range(size)],
    ("networkPolicy", "from"): lambda size: [{"cidr": f"10.{n}.0.0/16"} for n in range(size)],
    ("networkPolicy", "from", ITEM, "podLabels"): _labels,
    ("nodeSelector",): _labels,
    ("tolerations",): lambda size: [{"key": f"example.com/a{n}"} for n in range(size)],
    ("affinity", "nodes"): lambda size: [{"key": f"example.com/a{n}", "operator": "Exists"} for n in range(size)],
    (*_NODE_AFFINITY, "values"): lambda size: [f"v{n}" for n in range(size)],
    ("affinity", "pods"): lambda size: [{"podLabels": {"example.com/a": f"v{n}"}} for n in range(size)],
    (*_POD_AFFINITY, "podLabels"): _labels,
    ("topologySpread",): lambda size: [{"topologyKey": f"example.com/a{n}"} for n in range(size)],
    ("imagePullSecrets",): lambda size: [{"name": f"key-{n}"} for n in range(size)],
    ("podLabels",): _labels,
    ("podAnnotations",): _labels,
}
"""For every list and every map, a function that makes one of a given size."""

OBJECTS: Final[Mapping[PropertyPath, tuple[Object, ...]]] = {
    (*_ROUTE, "match"): ({"pathPrefix": "/"}, {"hosts": ["*.example.com"], "pathPrefix": "/only"}),
    (*_ROUTE, "retries"): ({}, {"attempts": 3}),
    (*_ROUTE, "requestHeaders"): ({}, {"remove": ["x-a"]}),
    (*_ROUTE, "responseHeaders"): ({}, {"remove": ["x-a"]}),
    (*_ROUTE, "mirror"): ({"backend": "app"}, {"backend": "db", "percent": 1}),
    (*_ROUTE, "rateLimit"): ({"requests": 1}, {"requests": 2, "per": "hour"}),
    (*_ROUTE, "cors"): ({"origins": ["*"]}, {"origins": ["https://a"], "credentials": True}),
    (*_ROUTE, "access"): ({}, {"deny": ["10.0.0.0/8"]}),
    (*_ROUTE, "redirect"): ({"path": "/b"}, {"scheme": "https"}),
    (*_ROUTE, "response"): ({"status": 404}, {"status": 200, "body": "%REQ(a)%"}),
    ("service",): ({"type": "NodePort"}, {"type": "ClusterIP", "annotations": {"example.com/a": "1"}}),
    ("resources",): ({"limits": {"cpu": "3"}}, {"requests": {"memory": "64Mi"}}, {}),
    ("registration",): ({}, {"hostname": "a.example.com"}),
    (*_LISTENER, "hsts"): ({}, {"maxAgeDays": 1}),
    (*_LISTENER, "tls"): ({"secretName": "a"}, {"secretName": "b", "clientCASecretName": "c"}),
    (*_LISTENER, "limits"): ({}, {"maxStreams": 1}),
    (*_BACKEND, "service"): ({"name": "app", "port": 80}, {"name": "app", "port": 81}),
    (*_BACKEND, "tls"): ({"serverName": "a"}, {"serverName": "b", "caSecretName": "c"}),
    (*_BACKEND, "loadBalancing"): ({"policy": "RoundRobin"}, {"policy": "Hash", "cookie": "a"}),
    (*_BACKEND, "healthCheck"): ({}, {"path": "/"}),
    (*_BACKEND, "outlierDetection"): ({}, {"consecutiveErrors": 1}),
    ("affinity",): ({"pods": [{"podLabels": {"a": "b"}}]}, {"nodes": [{"key": "a", "operator": "Exists"}]}),
    ("disruption",): ({"maxUnavailable": 2}, {}),
    ("autoscaling",): ({"maxReplicas": 2}, {"minReplicas": 2, "maxReplicas": 3}),
    ("networkPolicy",): ({}, {"from": [{"namespace": "team-b"}]}),
}
"""Values of objects that are replaced as a whole."""


def _without_match(_spec: Object, listener: Object) -> None:
    if listener.get("protocol") == "TCP":
        listener["routes"] = [{"backend": listener["routes"][0]["backend"]}]


def _of_http_alone(_spec: Object, listener: Object) -> None:
    if listener.get("protocol") == "TCP":
        for name in ("httpsRedirect", "hsts", "trustedHops", "http10"):
            listener.pop(name, None)


def _of_tcp(spec: Object, listener: Object) -> None:
    _without_match(spec, listener)
    _of_http_alone(spec, listener)


def _hashing(_spec: Object, balancing: Object) -> None:
    """Only Hash has something to hash, and it needs one thing."""
    if balancing.get("policy") != "Hash":
        balancing.pop("header", None)
        balancing.pop("cookie", None)
    elif "cookie" in balancing:
        balancing.pop("header", None)
    elif "header" not in balancing:
        balancing["policy"] = "Random"


def _without_endpoints(_spec: Object, backend: Object) -> None:
    """A backend has endpoints or a Service."""
    if "service" in backend:
        backend.pop("endpoints", None)
    elif "endpoints" not in backend:
        backend["service"] = {"name": "app", "port": 80}


def _with_a_prefix(_spec: Object, match: Object) -> None:
    """Keep one of both kinds of path."""
    if "pathExact" in match:
        match.pop("pathPrefix", None)


def _without_rewrite(spec: Object, _match: Object) -> None:
    """Remove rewrites of routes whose match has no prefix any more."""
    for route in (route for listener in spec["listeners"] for route in listener["routes"]):
        if "pathPrefix" not in route.get("match", {}):
            route.pop("prefixRewrite", None)


def _exact(spec: Object, match: Object) -> None:
    _with_a_prefix(spec, match)
    _without_rewrite(spec, match)


def _names_of(route: Object) -> list[str]:
    names = [each["name"] for each in route.get("backends", ())]
    return names + [each for each in (route.get("backend"), route.get("mirror", {}).get("backend")) if each is not None]


def _declared(spec: Object, _holder: Object) -> None:
    """Make each route whose backends are not declared one with the first that is."""
    names = [each["name"] for each in spec["backends"]]
    for listener in spec["listeners"]:
        listener["routes"] = [
            route if set(_names_of(route)) <= set(names) else {"backend": names[0]} for route in listener["routes"]
        ]


def _added(spec: Object, _holder: Object) -> None:
    """Declare the backends of all routes; a route that has lost its backend gets others."""
    for route in (route for listener in spec["listeners"] for route in listener["routes"]):
        if not {"backend", "backends", "redirect", "response"} & set(route):
            route["backends"] = [{"name": "app"}]
        for name in _names_of(route):
            if all(each["name"] != name for each in spec["backends"]):
                spec["backends"].append({"name": name, "endpoints": [{"host": "b.example.com", "port": 80}]})


def _one_path(_spec: Object, redirect: Object) -> None:
    """A redirect has one of path and prefix; without any change it would have none."""
    if "path" in redirect:
        redirect.pop("prefix", None)


def _below_the_limit(spec: Object, _holder: Object) -> None:
    spec["resources"].pop("limits")


def _above_the_request(spec: Object, _holder: Object) -> None:
    spec["resources"].pop("requests")


def _alone(_spec: Object, registration: Object) -> None:
    """Remove ``ttl`` and ``registry`` if there is no hostname, which they require."""
    if "hostname" not in registration:
        registration.clear()


def _for_a_load_balancer(_spec: Object, service: Object) -> None:
    """Remove what a Service of another type must not have."""
    type_ = service.get("type", "ClusterIP")
    if type_ != "LoadBalancer":
        service.pop("loadBalancerClass", None)
        service.pop("loadBalancerSourceRanges", None)
    if type_ == "ClusterIP":
        service.pop("externalTrafficPolicy", None)


def _with_node_ports(spec: Object, _listener: Object) -> None:
    spec["service"] = {"type": "NodePort"}


def _with_a_value(_spec: Object, toleration: Object) -> None:
    """Make operator, value, effect and seconds of a toleration fit each other."""
    if toleration.get("operator") == "Exists":
        toleration.pop("value", None)
    if toleration.get("operator") == "Equal":
        toleration.setdefault("value", "only")
    if "value" not in toleration:
        toleration["operator"] = "Exists"
    if toleration.get("effect") != "NoExecute":
        toleration.pop("tolerationSeconds", None)


def _with_values(_spec: Object, affinity: Object) -> None:
    """In and NotIn compare with values, Exists and DoesNotExist have none."""
    if affinity["operator"] in ("In", "NotIn"):
        affinity.setdefault("values", ["eu-1a"])
    else:
        affinity.pop("values", None)


def _existing(_spec: Object, affinity: Object) -> None:
    """Without values only whether the label is there can be asked."""
    if "values" not in affinity:
        affinity["operator"] = "Exists"


def _at_most(_spec: Object, autoscaling: Object) -> None:
    autoscaling["maxReplicas"] = max(autoscaling["maxReplicas"], autoscaling.get("minReplicas", 1))


def _at_least(_spec: Object, autoscaling: Object) -> None:
    autoscaling["minReplicas"] = min(autoscaling["maxReplicas"], autoscaling.get("minReplicas", 1))


def _one_of_both(_spec: Object, peer: Object) -> None:
    if "cidr" not in peer:
        peer["namespace"] = "team-b"


def _of_pods(_spec: Object, peer: Object) -> None:
    if "namespace" in peer or "podLabels" in peer:
        peer.pop("cidr", None)


def _autoscaled(spec: Object) -> None:
    spec["replicas"] = 1
    spec["autoscaling"] = {"minReplicas": 1, "maxReplicas": 3, "targetCPUUtilizationPercentage": 50}


def _only(*members: str) -> Callable[[Object], None]:
    """Makes the first route the one of the base that has the last of ``members``, with these members alone."""

    def change(spec: Object) -> None:
        routes = spec["listeners"][0]["routes"]
        found = next(each for each in routes if members[-1] in each)
        routes[0] = {name: deepcopy(found[name]) for name in members if name in found}

    return change


def _of_a_canary(spec: Object) -> None:
    spec["listeners"][0]["routes"][0] = deepcopy(spec["listeners"][0]["routes"][1])


def _of_a_service(spec: Object) -> None:
    backend = spec["backends"][0]
    del backend["endpoints"]
    backend["service"] = {"name": "app", "port": 8080}


PARENTS: Final[Mapping[PropertyPath, Callable[[Object], None]]] = {
    ("autoscaling",): _autoscaled,
    (*_ROUTE, "match", "headers"): _of_a_canary,
    (*_ROUTE, "backends"): _of_a_canary,
    (*_ROUTE, "redirect"): _only("match", "redirect"),
    (*_ROUTE, "response"): _only("response"),
    (*_BACKEND, "service"): _of_a_service,
}
"""What a property's trail begins with, where the base has something that excludes the property."""


def _without_load_balancer(spec: Object) -> None:
    spec["service"]["type"] = "ClusterIP"
    _for_a_load_balancer(spec, spec["service"])


BETWEEN: Final[Mapping[PropertyPath, tuple[str, Callable[[Object], None]]]] = {
    ("service", "loadBalancerClass"): ("service.type = 'ClusterIP'", _without_load_balancer),
}
"""A step before each step of a property that Kubernetes lets nobody change in place: its name, and the change."""

MOVES: Final[Mapping[PropertyPath, Callable[[Object, Object], None]]] = {
    (*_LISTENER, "protocol"): _of_tcp,
    (*_BACKEND, "endpoints"): _without_endpoints,
    (*_BACKEND, "service"): _without_endpoints,
    **{(*_BACKEND, "loadBalancing", name): _hashing for name in ("policy", "header", "cookie")},
    (*_ROUTE, "match", "pathExact"): _exact,
    (*_ROUTE, "match", "pathPrefix"): _without_rewrite,
    (*_ROUTE, "match"): _without_rewrite,
    (*_ROUTE, "backend"): _added,
    (*_ROUTE, "backends"): _added,
    (*_ROUTE, "backends", ITEM, "name"): _added,
    (*_ROUTE, "mirror", "backend"): _added,
    (*_ROUTE, "redirect"): _added,
    (*_ROUTE, "response"): _added,
    (*_ROUTE, "redirect", "path"): _one_path,
    (*_BACKEND, "name"): _declared,
    ("backends",): _declared,
    ("resources", "requests"): _below_the_limit,
    ("resources", "limits"): _above_the_request,
    ("registration", "hostname"): _alone,
    ("service", "type"): _for_a_load_balancer,
    (*_LISTENER, "nodePort"): _with_node_ports,
    (*_TOLERATION, "operator"): _with_a_value,
    (*_TOLERATION, "value"): _with_a_value,
    (*_TOLERATION, "effect"): _with_a_value,
    (*_NODE_AFFINITY, "operator"): _with_values,
    (*_NODE_AFFINITY, "values"): _existing,
    ("autoscaling", "minReplicas"): _at_most,
    ("autoscaling", "maxReplicas"): _at_least,
    (*_PEER, "cidr"): _one_of_both,
    (*_PEER, "namespace"): _of_pods,
    (*_PEER, "podLabels"): _of_pods,
}
"""Further changes that keep the spec valid when a property changes; called with the spec and the property's parent."""

IN_A_CLUSTER: Final[Mapping[PropertyPath, tuple[Value, ...]]] = {
    (*_LISTENER, "nodePort"): (30000, 30001, 30085),
}
"""Values in place of the schema's bounds, where a cluster allows fewer of them than any cluster may.

The range of node ports is a setting of each API server (``--service-node-port-range``), so the schema, which is the
same everywhere, can't have it. By default it is 30000 to 32767, and the API server takes its own choices from 30086 on
while any of those is free.
"""

UNREACHABLE: Final = frozenset(
    {
        "resources.requests: never of size 8",  # the reason is at `_amounts`
        "resources.limits: never of size 8",
        "listeners.*.nodePort: never 1",  # the reason is at `IN_A_CLUSTER`
        "listeners.*.nodePort: never 65535",
    }
)
"""Bounds of the schema that can't be reached in a cluster."""
