"""Specs for the tests of ``operator_app.envoy``: kinds, bounds, hostile values, and a model of the route precedence."""

from collections.abc import Iterable
from itertools import product
from typing import Any, Final

from annotated_types import MaxLen

from operator_app.api.models import (
    MAX_ENDPOINTS,
    MAX_ROUTES,
    Backend,
    Endpoint,
    EnvoyProxySpec,
    Listener,
    Protocol,
)
from operator_app.api.routes import Route, RouteMatch
from operator_app.api.rules import ApiModel

JsonObject = dict[str, Any]

HOSTS: Final[dict[str, list[str]]] = {
    "any host": [],
    "exact host": ["shop.example.com"],
    "wildcard host": ["*.example.com"],
    "many hosts": ["shop.example.com", "*.example.com", "*.shop.example.com", "localhost", "a-b.c"],
}

PATHS: Final[dict[str, JsonObject]] = {
    "any path": {},
    "prefix": {"pathPrefix": "/api"},
    "prefix with slash": {"pathPrefix": "/api/"},
    "root prefix": {"pathPrefix": "/"},
    "exact path": {"pathExact": "/healthz"},
    "path of all characters": {"pathPrefix": "/-AZaz09._~!&()+,;=:@/"},
}

ENDPOINTS: Final[dict[str, list[JsonObject]]] = {
    "DNS": [{"host": "app.team-a.svc", "port": 8080}],
    "IPv4": [{"host": "10.0.0.7", "port": 1}],
    "IPv6": [{"host": "fd00::7", "port": 65535}],
    "both families": [{"host": "10.0.0.7", "port": 80}, {"host": "fd00::7", "port": 80}],
    "mixed": [
        {"host": "app.team-a.svc", "port": 80},
        {"host": "10.0.0.7", "port": 80},
        {"host": "2001:db8:0:0:0:0:0:1", "port": 80},
    ],
    "weighted": [{"host": "a.svc", "port": 80, "weight": 1}, {"host": "b.svc", "port": 80, "weight": 128}],
    "the same twice": [{"host": "10.0.0.7", "port": 80}, {"host": "10.0.0.7", "port": 80}],
}


def spec(listeners: list[JsonObject], backends: list[JsonObject] | None = None) -> EnvoyProxySpec:
    """A parsed spec, with one backend named ``app`` unless ``backends`` are given."""
    backends = backends or [{"name": "app", "endpoints": ENDPOINTS["DNS"]}]
    return EnvoyProxySpec.model_validate({"listeners": listeners, "backends": backends})


def unchecked(listeners: Iterable[JsonObject]) -> EnvoyProxySpec:
    """A spec of valid listeners that together are beyond the bounds of a spec: as stored under older rules."""
    base = spec([http()])
    return base.model_copy(
        update={"listeners": tuple(Listener.model_construct(**_members(each)) for each in listeners)}
    )


def _members(listener: JsonObject) -> JsonObject:
    routes = tuple(Route.model_validate(each) for each in listener["routes"])
    return listener | {"routes": routes, "protocol": Protocol.HTTP, "target_port": None}


def http(*routes: JsonObject, name: str = "http", port: int = 8080) -> JsonObject:
    """An HTTP listener."""
    return {"name": name, "port": port, "routes": list(routes) or [{"backend": "app"}]}


def tcp(*, name: str = "tcp", port: int = 5432, backend: str = "app") -> JsonObject:
    """A TCP listener."""
    return {"name": name, "port": port, "protocol": "TCP", "routes": [{"backend": backend}]}


def accepted() -> dict[str, EnvoyProxySpec]:
    """Every kind of listener with every kind of backend, the largest spec and a hostile one, each with a readable name.

    Listeners that differ only in their path share a spec, because Envoy is started once for each spec.
    """
    cases: dict[str, EnvoyProxySpec] = {}
    for hosts, endpoints in product(HOSTS, ENDPOINTS):
        matches = [path | ({"hosts": HOSTS[hosts]} if HOSTS[hosts] else {}) for path in PATHS.values()]
        listeners = [
            http({"backend": "app", "match": match}, name=f"http{n}", port=8080 + n) for n, match in enumerate(matches)
        ]
        backend = {"name": "app", "endpoints": ENDPOINTS[endpoints], "connectTimeout": "250ms"}
        cases[f"{hosts} to {endpoints}"] = spec([*listeners, tcp()], [backend])
    # Envoy refuses line breaks in domains.
    return cases | {"every list full": largest(), "hostile": hostile(HOSTILE.replace("\n", "").replace("\r", ""))}


def bound(model: type[ApiModel], field: str) -> int:
    """The maximum number of items of the list ``field`` of ``model``."""
    return next(limit.max_length for limit in model.model_fields[field].metadata if isinstance(limit, MaxLen))


def largest() -> EnvoyProxySpec:
    """As many listeners, routes, backends and endpoints as there may be; one host a route, names of their full length.

    As many listeners as can have all the routes that one may have, and the others have one.
    """
    listeners, full = bound(EnvoyProxySpec, "listeners"), bound(Listener, "routes")
    endpoints = [{"host": f"10.0.0.{n}", "port": 80} for n in range(MAX_ENDPOINTS // bound(EnvoyProxySpec, "backends"))]
    names = [f"b{n:062}" for n in range(bound(EnvoyProxySpec, "backends"))]
    routes = [
        {
            "backend": names[n % len(names)],
            "match": {"hosts": [f"h{n}.example.com"], "pathPrefix": f"/p/{n}"},
        }
        for n in range(full)
    ]
    left = listeners - (MAX_ROUTES - listeners) // (full - 1)
    sizes = [*[full] * (listeners - left), *[1] * left]
    return spec(
        [http(*routes[:size], name=f"l{n:014}", port=65535 - n) for n, size in enumerate(sizes)],
        [{"name": name, "endpoints": endpoints, "connectTimeout": "60s"} for name in names],
    )


HOSTILE: Final = "\"'`}{][,:\n\r\t%REQ(:PATH)%%{}${HOME}$(HOME)\\u0000\\1.*|()^<&\u2028é"
"""Characters with a meaning in JSON, YAML, templates, regular expressions, shells or Envoy's format strings."""


def hostile(text: str = HOSTILE) -> EnvoyProxySpec:
    """``text`` in every string of a spec. It is built without validation, which would refuse it."""
    match = RouteMatch.model_construct(hosts=(f"h{text}",), path_prefix=f"/p{text}-")
    exact = RouteMatch.model_construct(hosts=(f"h{text}",), path_exact=f"/e{text}-")
    backend = f"b{text}"
    routes = tuple(Route.model_construct(match=each, backend=backend) for each in (match, exact, None))
    endpoint = Endpoint.model_construct(host=f"e{text}", port=80, weight=1)
    return EnvoyProxySpec.model_construct(
        listeners=(
            Listener.model_construct(name=f"1{text}", port=8080, protocol=Protocol.HTTP, routes=routes),
            Listener.model_construct(name=f"2{text}", port=5432, protocol=Protocol.TCP, routes=routes[2:]),
        ),
        backends=(Backend.model_construct(name=backend, endpoints=(endpoint,), connect_timeout="5s"),),
    )


def answering(routes: Iterable[Route], host: str, path: str) -> int | None:
    """The position of the route that answers by the precedence that ``listeners.py`` documents; ``None`` means 404.

    It ranks every route for one request, so that it shares no step with the code under test. ``host`` is in lower case
    without port, ``path`` is normalised and without query.
    """
    best: tuple[tuple[int, int, int], int] | None = None
    for position, route in enumerate(routes):
        match = route.match or RouteMatch()
        host_rank = max((_host_rank(pattern, host) for pattern in match.hosts), default=0)
        path_rank = _path_rank(match, path)
        if host_rank < 0 or path_rank < 0:
            continue
        rank = (host_rank, path_rank, -position)
        if best is None or rank > best[0]:
            best = rank, position
    return None if best is None else best[1]


_EXACT: Final = 1_000_000


def _host_rank(pattern: str, host: str) -> int:
    if not pattern.startswith("*."):
        return _EXACT if pattern == host else -1
    labels = pattern.split(".")[1:]
    return len(pattern) if host.split(".")[-len(labels) :] == labels and host.count(".") >= len(labels) else -1


def _path_rank(match: RouteMatch, path: str) -> int:
    if match.path_exact is not None:
        return _EXACT if match.path_exact == path else -1
    wanted = [segment for segment in (match.path_prefix or "").split("/") if segment]
    return len("/".join(wanted)) if path.split("/")[1 : len(wanted) + 1] == wanted else -1
