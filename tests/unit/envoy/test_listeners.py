"""The listeners that a spec is rendered to, and which route answers a request."""

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from operator_app.api.models import METRICS_PORT, READINESS_PORT, Telemetry
from operator_app.api.routes import Route, RouteMatch
from operator_app.envoy.files import rendered
from tests.unit.envoy import cases
from tests.unit.envoy.parts import documents, last_filter, listener_config, static_configuration
from tests.unit.envoy.routes import HOSTS, PATHS, route_lists


def virtual_hosts(routes: tuple[Route, ...]) -> list[dict[str, Any]]:
    """The virtual hosts of a listener with ``routes``."""
    backends = [{"name": route.backend, "endpoints": cases.ENDPOINTS["DNS"]} for route in routes]
    plain = [route.model_dump(by_alias=True, exclude_none=True) for route in routes]
    spec = cases.spec([cases.http(*plain)], list({backend["name"]: backend for backend in backends}.values()))
    found: list[dict[str, Any]] = last_filter(static_configuration(spec), "listener/http")["route_config"][
        "virtual_hosts"
    ]
    return found


def selected_cluster(hosts: list[dict[str, Any]], host: str, path: str) -> str | None:
    """The cluster that Envoy selects: in the virtual host of the most specific domain, by the first matching route."""
    domains = {domain: each for each in hosts for domain in each["domains"]}
    wildcards = ["*" + host[start:] for start in range(1, len(host) + 1)]
    chosen = next((domains[domain] for domain in (host, *wildcards) if domain in domains), None)
    for route in chosen["routes"] if chosen else ():
        match, cluster_name = route["match"], str(route["route"]["cluster"])
        separated = match.get("path_separated_prefix")
        if separated is not None:
            hit = path == separated or path.startswith(separated + "/")
        else:
            hit = path == match["path"] if "path" in match else path.startswith(match["prefix"])
        if hit:
            return cluster_name
    return None


def test_listeners_bind_the_container_port_on_every_address() -> None:
    """A listener binds ``targetPort``, else ``port``, plus 10000 if ``port`` is below 1024."""
    listeners = [cases.http(port=80), cases.tcp(port=5432), cases.http(name="alt", port=81) | {"targetPort": 9000}]
    bound = {
        each["name"]: each["address"]["socket_address"]
        for each in static_configuration(cases.spec(listeners))["static_resources"]["listeners"]
    }
    assert {each["address"] for each in bound.values()} == {"0.0.0.0"}  # noqa: S104  # the claim of the test
    assert {name: each["port_value"] for name, each in bound.items()} == {
        "internal/readiness": READINESS_PORT,
        "listener/alt": 9000,
        "listener/http": 10080,
        "listener/tcp": 5432,
    }


def test_readiness_listener_has_one_route() -> None:
    """The readiness listener forwards one fixed question, also if a listener of the spec is called ``readiness``."""
    config = static_configuration(cases.spec([cases.http(name="readiness")]))
    serve = last_filter(config, "internal/readiness")
    (host,) = serve["route_config"]["virtual_hosts"]
    (route,) = host["routes"]
    assert {"name": ":path", "string_match": {"exact": "/loaded"}} in route["match"]["headers"]
    assert route["route"]["prefix_rewrite"].startswith("/stats?filter=")
    check = serve["http_filters"][0]["typed_config"]
    assert check["pass_through_mode"] is False
    assert {"name": ":path", "string_match": {"exact": "/ready"}} in check["headers"]
    assert listener_config(config, "internal/readiness")["ignore_global_conn_limit"] is True


def test_metrics_have_a_listener_of_their_own_where_they_are_asked_for() -> None:
    """Without ``telemetry.metrics`` nothing listens at that port; with it, one path is forwarded."""
    spec = cases.spec([cases.http()])
    names = {each["name"] for each in static_configuration(spec)["static_resources"]["listeners"]}
    assert names == {"internal/readiness", "listener/http"}
    config = static_configuration(spec.model_copy(update={"telemetry": Telemetry(metrics=True)}))
    assert listener_config(config, "internal/metrics")["address"]["socket_address"]["port_value"] == METRICS_PORT
    (host,) = last_filter(config, "internal/metrics")["route_config"]["virtual_hosts"]
    (route,) = host["routes"]
    assert {"name": ":path", "string_match": {"exact": "/stats/prometheus"}} in route["match"]["headers"]
    assert "prefix_rewrite" not in route["route"]


def test_tcp_listener_proxies_to_its_backend() -> None:
    """A TCP listener has a cluster of its own name, which has the endpoints of its one backend."""
    config = static_configuration(cases.spec([cases.tcp()]))
    served = last_filter(config, "listener/tcp")
    assert served["@type"].endswith("tcp_proxy.v3.TcpProxy")
    assert served["cluster"] == "listener/tcp"
    clusters = {each["name"]: each for each in config["static_resources"]["clusters"]}
    endpoints = [clusters[name]["load_assignment"]["endpoints"] for name in ("listener/tcp", "backend/app")]
    assert endpoints[0] == endpoints[1]


def test_listeners_depend_on_no_route_and_no_backend() -> None:
    """Another route, another backend of a TCP listener, or another endpoint leaves the listeners' bytes as they are."""
    backends = [{"name": name, "endpoints": cases.ENDPOINTS["DNS"]} for name in ("app", "db")]
    before = rendered(cases.spec([cases.http(), cases.tcp()], backends))
    moved = [cases.http({"backend": "db", "match": {"hosts": ["a.test"]}}), cases.tcp(backend="db")]
    after = rendered(cases.spec(moved, [backends[0], backends[1] | {"endpoints": cases.ENDPOINTS["IPv4"]}]))
    assert after.revision == before.revision
    changed = {name for name in before.texts if before.texts[name] != after.texts[name]}
    assert changed == {"cds.json", "rds-http.json"}
    assert after.texts.keys() == before.texts.keys()


def test_routes_are_named_by_the_listener_that_reads_them() -> None:
    """The file with the routes of a listener is the one that the listener reads, under the name that it asks for."""
    found = documents(rendered(cases.spec([cases.http(name="web")])).texts)
    (listener,) = found["lds.json"]["resources"]
    rds = listener["filter_chains"][0]["filters"][-1]["typed_config"]["rds"]
    source = rds["config_source"]["path_config_source"]
    assert source == {"path": "/etc/envoy/..data/rds-web.json", "watched_directory": {"path": "/etc/envoy"}}
    (routes,) = found["rds-web.json"]["resources"]
    assert routes["name"] == rds["route_config_name"] == "listener/web"


def test_access_log_leaves_the_query_out() -> None:
    """The access log contains the path without the query, which may hold secrets, and three known headers only."""
    served = last_filter(static_configuration(cases.spec([cases.http()])), "listener/http")
    fields = served["access_log"][0]["typed_config"]["log_format"]["json_format"]
    assert fields["path"] == "%PATH(NQ):1024%"
    requested = {name for text in fields.values() for name in re.findall(r"%REQ\(([^)]*)\)", text)}
    assert requested == {":AUTHORITY", ":METHOD", "X-REQUEST-ID"}


@given(route_lists())
def test_every_domain_appears_once(routes: tuple[Route, ...]) -> None:
    """Every declared host is in exactly one virtual host, and ``*`` if a route has none; Envoy refuses duplicates."""
    domains = [domain for each in virtual_hosts(routes) for domain in each["domains"]]
    declared = {host for route in routes if route.match for host in route.match.hosts or ("*",)}
    assert len(domains) == len(set(domains))
    assert set(domains) == declared


@given(route_lists(), st.sampled_from(HOSTS), st.sampled_from([*PATHS, "/api/", "/api/v1/", "/nothing"]))
def test_the_documented_precedence_selects_the_route(routes: tuple[Route, ...], host: str, path: str) -> None:
    """For any routes and any request, Envoy's rules select the route that the documented precedence selects."""
    position = cases.answering(routes, host, path)
    assert selected_cluster(virtual_hosts(routes), host, path) == (None if position is None else f"backend/b{position}")


def test_hosts_that_share_routes_share_a_virtual_host() -> None:
    """Hosts with the same routes share one virtual host, so a route of many hosts is rendered once."""
    hosts = [f"h{n}.example.com" for n in range(cases.bound(RouteMatch, "hosts"))]
    routes = ({"backend": "app", "match": {"hosts": hosts}}, {"backend": "app", "match": {"pathPrefix": "/all"}})
    found = virtual_hosts(tuple(Route.model_validate(route) for route in routes))
    assert [(len(each["domains"]), len(each["routes"])) for each in found] == [(1, 1), (len(hosts), 2)]
