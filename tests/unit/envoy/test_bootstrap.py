"""What ``envoy.py`` promises of the configuration as data; ``tests/e2e/envoy/test_bootstrap.py`` shows it to Envoy."""

import json
import re
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_app.api.models import ADMIN_PORT, READINESS_PORT, EnvoyProxySpec, Listener, Route, RouteMatch
from operator_app.envoy import bootstrap, drain
from operator_app.errors import TerminalError
from tests.unit.envoy import cases

ACCEPTED = cases.accepted()

HOSTS = ("example.com", "shop.example.com", "a.shop.example.com", "other.org")
PATTERNS = (*HOSTS, "*.example.com", "*.shop.example.com", "*.com")
PATHS = ("/", "/api", "/api/v1", "/api/v1/users", "/apiary", "/health")

matches = st.fixed_dictionaries(
    {},
    optional={
        "hosts": st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=4),
        "path": st.tuples(st.sampled_from(["pathPrefix", "pathExact"]), st.sampled_from([*PATHS, "/api/"])),
    },
)


@st.composite
def route_lists(draw: st.DrawFn) -> tuple[Route, ...]:
    """Routes that overlap a lot; each has a backend of its own, so that the winner can be told."""
    routes: list[dict[str, Any]] = []
    for position, drawn in enumerate(draw(st.lists(matches, min_size=1, max_size=8))):
        match = {"hosts": drawn.get("hosts", [])}
        if "path" in drawn:
            kind, path = drawn["path"]
            match[kind] = path
        routes.append({"backend": f"b{position}", "match": match})
    return tuple(Route.model_validate(route) for route in routes)


def listener_config(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The listener of that name in Envoy's configuration."""
    found: dict[str, Any] = next(each for each in config["static_resources"]["listeners"] if each["name"] == name)
    return found


def last_filter(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The network filter that serves a listener's connections."""
    typed: dict[str, Any] = listener_config(config, name)["filter_chains"][0]["filters"][-1]["typed_config"]
    return typed


def virtual_hosts(routes: tuple[Route, ...]) -> list[dict[str, Any]]:
    """The virtual hosts of a listener with ``routes``."""
    backends = [{"name": route.backend, "endpoints": cases.ENDPOINTS["DNS"]} for route in routes]
    plain = [route.model_dump(by_alias=True, exclude_none=True) for route in routes]
    spec = cases.spec([cases.http(*plain)], list({backend["name"]: backend for backend in backends}.values()))
    found: list[dict[str, Any]] = last_filter(bootstrap.bootstrap(spec), "listener/http")["route_config"][
        "virtual_hosts"
    ]
    return found


def cluster(endpoints: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The cluster of a backend with ``endpoints``."""
    spec = cases.spec([cases.http()], [{"name": "app", "endpoints": endpoints, **fields}])
    found: dict[str, Any] = bootstrap.bootstrap(spec)["static_resources"]["clusters"][0]
    return found


def taken(hosts: list[dict[str, Any]], host: str, path: str) -> str | None:
    """The cluster that Envoy would take: the most specific domain, then the first route that matches, else none."""
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


# --- the same spec, the same text


@pytest.mark.parametrize("name", sorted(ACCEPTED.keys() - {"hostile"}))
def test_equal_specs_give_equal_text(name: str) -> None:
    """Parsing the same spec again, with its keys in another order, gives the same bytes and the same hash."""
    original = ACCEPTED[name]
    turned = EnvoyProxySpec.model_validate(reversed_keys(original.model_dump(by_alias=True, exclude_none=True)))
    first, second = (bootstrap.render(bootstrap.bootstrap(spec)) for spec in (original, turned))
    assert first == second
    assert bootstrap.config_hash(first) == bootstrap.config_hash(second)


def reversed_keys(value: object) -> object:
    """``value`` with every dict's keys in the opposite order."""
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(item) for item in value] if isinstance(value, list | tuple) else value


def test_order_of_maps_by_name_does_not_matter() -> None:
    """Listeners and backends are keyed by name, so their order in the list changes nothing."""
    listeners = [cases.http(), cases.tcp(backend="db")]
    backends = [{"name": name, "endpoints": cases.ENDPOINTS["DNS"]} for name in ("app", "db")]
    forward, backward = cases.spec(listeners, backends), cases.spec(listeners[::-1], backends[::-1])
    assert bootstrap.render(bootstrap.bootstrap(forward)) == bootstrap.render(bootstrap.bootstrap(backward))


@given(route_lists(), st.randoms(use_true_random=False))
def test_order_of_hosts_does_not_matter(routes: tuple[Route, ...], chance: Random) -> None:
    """A route's hosts are a set: their order and repetition change nothing."""
    shuffled = []
    for route in routes:
        hosts = list(route.match.hosts) if route.match else []
        chance.shuffle(hosts)
        assert route.match
        shuffled.append(route.model_copy(update={"match": route.match.model_copy(update={"hosts": (*hosts, *hosts)})}))
    assert bootstrap.bootstrap(_spec_of(routes)) == bootstrap.bootstrap(_spec_of(tuple(shuffled)))


def _spec_of(routes: tuple[Route, ...]) -> EnvoyProxySpec:
    base = cases.spec([cases.http()])
    listener = base.listeners[0].model_copy(update={"routes": routes})
    return base.model_copy(update={"listeners": (listener,)})


def test_hash_tells_configurations_apart() -> None:
    """Another port of a backend is another hash; the hash is 16 hexadecimal digits."""
    hashes = {
        bootstrap.config_hash(
            bootstrap.render(
                bootstrap.bootstrap(
                    cases.spec([cases.http()], [{"name": "app", "endpoints": [{"host": "a", "port": port}]}])
                )
            )
        )
        for port in (80, 81)
    }
    assert len(hashes) == 2
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in hashes)


def test_text_is_indented_ascii_with_sorted_keys() -> None:
    """The text is JSON that people and ``diff`` can read: sorted, indented by two, ASCII, one newline at the end."""
    config = bootstrap.bootstrap(cases.spec([cases.http()]))
    text = bootstrap.render(config)
    assert json.loads(text) == config
    assert text.startswith('{\n  "admin": {\n    "address"')
    assert text.isascii()
    assert text.endswith("}\n")


def test_every_list_full_still_fits_a_config_map() -> None:
    """A spec with every list full is rendered without indentation, and stays below what a ConfigMap holds."""
    text = bootstrap.render(bootstrap.bootstrap(cases.largest()))
    assert len(text) <= bootstrap.MAX_BYTES < 1024 * 1024
    assert text.count("\n") == 1


def test_too_large_a_configuration_is_a_terminal_error() -> None:
    """What no ConfigMap can hold ends as a reason and a sentence, not as a refused write."""
    hosts = [f"{'h' * 60}.{'d' * 60}.{'e' * 60}.h{n}" for n in range(cases.bound(RouteMatch, "hosts"))]
    routes = [
        {"backend": "app", "match": {"hosts": [f"r{n}.{host}" for host in hosts]}}
        for n in range(cases.bound(Listener, "routes"))
    ]
    listeners = [
        cases.http(*routes, name=f"l{n}", port=8000 + n) for n in range(cases.bound(EnvoyProxySpec, "listeners"))
    ]
    with pytest.raises(TerminalError, match="declare fewer routes") as caught:
        bootstrap.render(bootstrap.bootstrap(cases.spec(listeners)))
    assert caught.value.reason == "ConfigurationTooLarge"


# --- shape


def test_admin_interface_is_on_loopback_only() -> None:
    """Nothing outside the Pod reaches Envoy's admin interface, by no listener and by no cluster."""
    config = bootstrap.bootstrap(cases.spec([cases.http(), cases.tcp()]))
    assert config["admin"]["address"] == {"socket_address": {"address": "127.0.0.1", "port_value": ADMIN_PORT}}
    assert str(ADMIN_PORT) not in json.dumps(config["static_resources"])
    assert "access_log" not in config["admin"]


def test_listeners_bind_the_container_port_of_every_address() -> None:
    """A listener binds its target port, else its port, which is raised out of the privileged range."""
    listeners = [cases.http(port=80), cases.tcp(port=5432), cases.http(name="alt", port=81) | {"targetPort": 9000}]
    bound = {
        each["name"]: each["address"]["socket_address"]
        for each in bootstrap.bootstrap(cases.spec(listeners))["static_resources"]["listeners"]
    }
    assert {each["address"] for each in bound.values()} == {"0.0.0.0"}  # noqa: S104  # it is what is claimed
    assert {name: each["port_value"] for name, each in bound.items()} == {
        "internal/readiness": READINESS_PORT,
        "listener/alt": 9000,
        "listener/http": 10080,
        "listener/tcp": 5432,
    }


def test_readiness_listener_has_no_route() -> None:
    """The readiness listener answers its own path only, also when a tenant's listener has its name."""
    config = bootstrap.bootstrap(cases.spec([cases.http(name="readiness")]))
    serve = last_filter(config, "internal/readiness")
    assert serve["route_config"] == {"name": "internal/readiness"}
    check = serve["http_filters"][0]["typed_config"]
    assert check["pass_through_mode"] is False
    assert {"name": ":path", "string_match": {"exact": "/ready"}} in check["headers"]
    assert listener_config(config, "internal/readiness")["ignore_global_conn_limit"] is True


def test_downstream_connections_are_bounded() -> None:
    """One bound holds for all listeners of a tenant together; only the two internal interfaces do not count."""
    config = bootstrap.bootstrap(cases.spec([cases.http(), cases.tcp()]))
    (monitor,) = config["overload_manager"]["resource_monitors"]
    assert monitor["typed_config"]["max_active_downstream_connections"] == bootstrap.MAX_DOWNSTREAM_CONNECTIONS
    unbounded = [each["name"] for each in config["static_resources"]["listeners"] if "ignore_global_conn_limit" in each]
    assert unbounded == ["internal/readiness"]


@pytest.mark.parametrize(
    ("endpoints", "static"),
    [("DNS", False), ("IPv4", True), ("IPv6", True), ("both families", True), ("mixed", False), ("weighted", False)],
)
def test_names_are_resolved_and_addresses_are_not(endpoints: str, *, static: bool) -> None:
    """A backend with any DNS name is resolved by Envoy, one of addresses alone never is."""
    found = cluster(cases.ENDPOINTS[endpoints])
    assert (found.get("type") == "STATIC") is static
    assert ("cluster_type" in found) is not static


def test_endpoints_keep_address_port_and_weight() -> None:
    """Every endpoint arrives with its host as written, IPv6 without brackets, its port and its weight."""
    endpoints = [{"host": "fd00::7", "port": 1}, {"host": "a.svc", "port": 65535, "weight": 128}]
    (locality,) = cluster(endpoints)["load_assignment"]["endpoints"]
    assert [
        (*each["endpoint"]["address"]["socket_address"].values(), each["load_balancing_weight"])
        for each in locality["lb_endpoints"]
    ] == [("fd00::7", 1, 1), ("a.svc", 65535, 128)]


@pytest.mark.parametrize(("written", "rendered"), [("1ms", "0.001s"), ("250ms", "0.25s"), ("5s", "5s"), ("60s", "60s")])
def test_connect_timeout_is_a_protobuf_duration(written: str, rendered: str) -> None:
    """Envoy reads seconds with a fraction and no other unit (protobuf's JSON mapping of Duration)."""
    assert cluster(cases.ENDPOINTS["DNS"], connectTimeout=written)["connect_timeout"] == rendered


def test_tcp_listener_hands_connections_to_its_backend() -> None:
    """A TCP listener has no HTTP in it."""
    served = last_filter(bootstrap.bootstrap(cases.spec([cases.tcp()])), "listener/tcp")
    assert served["@type"].endswith("tcp_proxy.v3.TcpProxy")
    assert served["cluster"] == "backend/app"


def test_access_log_leaves_the_query_out() -> None:
    """Applications put secrets into the query, so the log has the path without it and no header that a client chose."""
    served = last_filter(bootstrap.bootstrap(cases.spec([cases.http()])), "listener/http")
    fields = served["access_log"][0]["typed_config"]["log_format"]["json_format"]
    assert fields["path"] == "%PATH(NQ):1024%"
    requested = {name for text in fields.values() for name in re.findall(r"%REQ\(([^)]*)\)", text)}
    assert requested == {":AUTHORITY", ":METHOD", "X-REQUEST-ID"}


# --- precedence


@given(route_lists())
def test_every_domain_appears_once(routes: tuple[Route, ...]) -> None:
    """Envoy refuses a domain in two virtual hosts; every declared host is there once, and ``*`` if a route has none."""
    domains = [domain for each in virtual_hosts(routes) for domain in each["domains"]]
    declared = {host for route in routes if route.match for host in route.match.hosts or ("*",)}
    assert len(domains) == len(set(domains))
    assert set(domains) == declared


@given(route_lists(), st.sampled_from(HOSTS), st.sampled_from([*PATHS, "/api/", "/api/v1/", "/nothing"]))
def test_the_documented_precedence_decides(routes: tuple[Route, ...], host: str, path: str) -> None:
    """For any routes and any request, the route that Envoy takes is the one that the docstring says."""
    position = cases.answering(routes, host, path)
    assert taken(virtual_hosts(routes), host, path) == (None if position is None else f"backend/b{position}")


def test_hosts_that_share_routes_share_a_virtual_host() -> None:
    """A route of many hosts is written once and not once for each, nor is the route that serves every host."""
    hosts = [f"h{n}.example.com" for n in range(cases.bound(RouteMatch, "hosts"))]
    routes = ({"backend": "app", "match": {"hosts": hosts}}, {"backend": "app", "match": {"pathPrefix": "/all"}})
    found = virtual_hosts(tuple(Route.model_validate(route) for route in routes))
    assert [(len(each["domains"]), len(each["routes"])) for each in found] == [(1, 1), (len(hosts), 2)]


# --- nothing a tenant writes is structure

ALLOWED_PLACES = {
    "name",
    "stat_prefix",
    "cluster",
    "cluster_name",
    "domains",
    "path",
    "path_separated_prefix",
    "address",
}


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_hostile_text_is_only_ever_a_value(text: str) -> None:
    """Any text, anywhere, leaves the structure as it is with harmless text, and arrives unchanged in values alone."""
    marked = f"MARK{text}"
    hostile = json.loads(bootstrap.render(bootstrap.bootstrap(cases.hostile(marked))))
    harmless = bootstrap.bootstrap(cases.hostile("MARK"))
    assert _shape(hostile) == _shape(harmless)
    places = {key for key, value in _leaves(hostile) if "MARK" in value or "mark" in value}
    assert places <= ALLOWED_PLACES
    assert f"backend/b{marked}" in [value for key, value in _leaves(hostile) if key == "cluster"]


def test_a_selection_of_hostile_texts_is_only_ever_a_value() -> None:
    """Quotes, braces, line ends, format strings, templates and regular expressions are kept as they were typed."""
    config = json.loads(bootstrap.render(bootstrap.bootstrap(cases.hostile())))
    assert _shape(config) == _shape(bootstrap.bootstrap(cases.hostile("x")))
    assert {"path": f"/e{cases.HOSTILE}-"} in [
        route["match"]
        for route in last_filter(config, f"listener/1{cases.HOSTILE}")["route_config"]["virtual_hosts"][1]["routes"]
    ]


def test_format_strings_are_fixed() -> None:
    """The access logs' format, which Envoy expands, is the same for every tenant."""
    formats = {
        json.dumps(each["access_log"], sort_keys=True)
        for spec in (cases.hostile(), cases.hostile("x"))
        for each in [last_filter(bootstrap.bootstrap(spec), f"listener/1{spec.backends[0].name[1:]}")]
    }
    assert len(formats) == 1


@pytest.mark.parametrize("name", ACCEPTED)
def test_no_regular_expression_is_built(name: str) -> None:
    """Hosts and paths are compared, never interpreted: the configuration holds no regular expression at all."""
    assert not {key for key in _keys(bootstrap.bootstrap(ACCEPTED[name])) if "regex" in key}


def _shape(value: object) -> object:
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    return [_shape(item) for item in value] if isinstance(value, list) else type(value).__name__


def _leaves(value: object, key: str = "") -> list[tuple[str, str]]:
    """Every string with the nearest key above it."""
    if isinstance(value, dict):
        return [leaf for name, item in value.items() for leaf in _leaves(item, name)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item, key)]
    return [(key, value)] if isinstance(value, str) else []


def _keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*(_keys(item) for item in value.values()))
    return set[str]().union(*(_keys(item) for item in value)) if isinstance(value, list) else set()


# --- draining


def test_pre_stop_runs_envoy_without_a_shell() -> None:
    """The hook is one program with literal arguments, so that it works in an image that holds nothing but Envoy."""
    command = drain.pre_stop(7)["exec"]["command"]
    assert command[0] == "envoy"
    assert "--disable-hot-restart" in command
    config = json.loads(command[command.index("--config-yaml") + 1])
    assert '"fixed_delay": "7s"' in json.dumps(config)
    assert drain.pre_stop() == drain.pre_stop(drain.DRAIN_S)


def test_drain_helper_opens_no_port() -> None:
    """What the hook binds are abstract sockets of the Pod; the one address it knows is the proxy's admin interface."""
    command = drain.pre_stop()["exec"]["command"]
    config = json.loads(command[command.index("--config-yaml") + 1])
    bound = [config["admin"], *config["static_resources"]["listeners"]]
    assert all(each["address"]["pipe"]["path"].startswith("@") for each in bound)
    assert json.dumps(config).count("socket_address") == 1


def test_grace_period_outlasts_the_drain() -> None:
    """Kubernetes counts the hook's time in the grace period, so the drain has to end before it, with Envoy's exit."""
    assert drain.TERMINATION_GRACE_S - drain.DRAIN_S >= 5
