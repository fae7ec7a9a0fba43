"""The whole configuration as data; ``tests/e2e/envoy`` runs Envoy with it."""

import json
import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_app.api.models import ADMIN_PORT, EnvoyProxySpec, Listener
from operator_app.api.routes import Route, RouteMatch
from operator_app.envoy import bootstrap
from operator_app.envoy.listeners import virtual_hosts_bytes
from operator_app.errors import TerminalError
from tests.unit.envoy import cases
from tests.unit.envoy.parts import last_filter
from tests.unit.envoy.routes import route_lists

ACCEPTED = cases.accepted()


@pytest.mark.parametrize("name", sorted(ACCEPTED.keys() - {"hostile"}))
def test_equal_specs_give_equal_text(name: str) -> None:
    """A spec and the same spec with its keys in reverse order render to the same bytes and the same hash."""
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


def test_order_of_listeners_and_backends_does_not_matter() -> None:
    """Listeners and backends are maps keyed by name, so their order does not change the text."""
    listeners = [cases.http(), cases.tcp(backend="db")]
    backends = [{"name": name, "endpoints": cases.ENDPOINTS["DNS"]} for name in ("app", "db")]
    forward, backward = cases.spec(listeners, backends), cases.spec(listeners[::-1], backends[::-1])
    assert bootstrap.render(bootstrap.bootstrap(forward)) == bootstrap.render(bootstrap.bootstrap(backward))


@given(route_lists(), st.randoms(use_true_random=False))
def test_order_of_hosts_does_not_matter(routes: tuple[Route, ...], chance: Random) -> None:
    """A route's hosts are a set, so their order and duplicates do not change the configuration."""
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


def test_different_configurations_have_different_hashes() -> None:
    """Two configurations that differ in one port have different hashes of 16 hexadecimal digits."""
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
    """The text is readable JSON: sorted keys, an indentation of two, ASCII, one newline at the end."""
    config = bootstrap.bootstrap(cases.spec([cases.http()]))
    text = bootstrap.render(config)
    assert json.loads(text) == config
    assert text.startswith('{\n  "admin": {\n    "address"')
    assert text.isascii()
    assert text.endswith("}\n")


def test_the_largest_spec_fits_into_a_config_map() -> None:
    """A spec with full lists is rendered without indentation, to at most ``MAX_BYTES``, below a ConfigMap's 1 MiB."""
    text = bootstrap.render(bootstrap.bootstrap(cases.largest()))
    assert len(text) <= bootstrap.MAX_BYTES < 1024 * 1024
    assert text.count("\n") == 1


def too_many_hosts() -> EnvoyProxySpec:
    """Every list of routes and hosts full, with different hosts of 190 characters: about 3 MB."""
    hosts = [f"{'h' * 60}.{'d' * 60}.{'e' * 60}.h{n}" for n in range(cases.bound(RouteMatch, "hosts"))]
    routes = [
        {"backend": "app", "match": {"hosts": [f"r{n}.{host}" for host in hosts]}}
        for n in range(cases.bound(Listener, "routes"))
    ]
    return cases.unchecked(cases.http(*routes, name=f"l{n}", port=8000 + n) for n in range(16))


def wildcards_times_routes(routes: int, hosts: int) -> EnvoyProxySpec:
    """Routes for every host, with paths of 200 characters, beside hosts with a route of their own each."""
    shared = [{"backend": "app", "match": {"pathPrefix": f"/{n:0199}"}} for n in range(routes)]
    own = [{"backend": "app", "match": {"hosts": [f"h{n}.example.com"], "pathPrefix": f"/{n}"}} for n in range(hosts)]
    return cases.unchecked([cases.http(*shared, *own)])


@pytest.mark.parametrize("spec", [too_many_hosts(), wildcards_times_routes(32, 250)], ids=["hosts", "wildcards"])
def test_a_configuration_that_is_too_large_is_refused_before_it_is_built(
    spec: EnvoyProxySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration above ``MAX_BYTES`` raises an error with a reason and advice, and no listener of it is built."""
    monkeypatch.setattr(bootstrap, "listener", lambda _: pytest.fail("a listener was built"))
    with pytest.raises(TerminalError, match="declare fewer routes") as caught:
        bootstrap.bootstrap(spec)
    assert caught.value.reason == "ConfigurationTooLarge"


def test_a_text_that_is_too_large_is_a_terminal_error() -> None:
    """What is below the bound in its virtual hosts and above it as a whole is refused as well."""
    with pytest.raises(TerminalError, match="declare fewer routes") as caught:
        bootstrap.render({"clusters": "x" * bootstrap.MAX_BYTES})
    assert caught.value.reason == "ConfigurationTooLarge"


@given(route_lists())
def test_the_size_of_virtual_hosts_is_known_before_they_are_built(routes: tuple[Route, ...]) -> None:
    """The computed size is exactly that of the virtual hosts as compact JSON."""
    (listener,) = _spec_of(routes).listeners
    built = last_filter(bootstrap.bootstrap(_spec_of(routes)), "listener/http")["route_config"]["virtual_hosts"]
    assert virtual_hosts_bytes(listener) == len(json.dumps(built, separators=(",", ":")))


def test_a_route_that_hosts_share_is_built_once() -> None:
    """The virtual hosts of 250 hosts contain one and the same object of a route for every host."""
    spec = wildcards_times_routes(1, 250)
    hosts = last_filter(bootstrap.bootstrap(spec), "listener/http")["route_config"]["virtual_hosts"]
    assert len(hosts) == 251
    assert len({id(each["routes"][-1]) for each in hosts}) == 1


def test_admin_interface_is_on_loopback_only() -> None:
    """The admin interface binds 127.0.0.1, and no listener or cluster refers to its port."""
    config = bootstrap.bootstrap(cases.spec([cases.http(), cases.tcp()]))
    assert config["admin"]["address"] == {"socket_address": {"address": "127.0.0.1", "port_value": ADMIN_PORT}}
    assert str(ADMIN_PORT) not in json.dumps(config["static_resources"])
    assert "access_log" not in config["admin"]


def test_downstream_connections_are_bounded() -> None:
    """One bound applies to all listeners together; only the two internal interfaces are exempt."""
    config = bootstrap.bootstrap(cases.spec([cases.http(), cases.tcp()]))
    (monitor,) = config["overload_manager"]["resource_monitors"]
    assert monitor["typed_config"]["max_active_downstream_connections"] == bootstrap.MAX_DOWNSTREAM_CONNECTIONS
    unbounded = [each["name"] for each in config["static_resources"]["listeners"] if "ignore_global_conn_limit" in each]
    assert unbounded == ["internal/readiness"]


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
def test_any_text_is_rendered_as_a_value(text: str) -> None:
    """Any text in any string of a spec appears unchanged, in values of known fields only, and changes no structure."""
    marked = f"MARK{text}"
    hostile = json.loads(bootstrap.render(bootstrap.bootstrap(cases.hostile(marked))))
    harmless = bootstrap.bootstrap(cases.hostile("MARK"))
    assert _shape(hostile) == _shape(harmless)
    places = {key for key, value in _leaves(hostile) if "MARK" in value or "mark" in value}
    assert places <= ALLOWED_PLACES
    assert f"backend/b{marked}" in [value for key, value in _leaves(hostile) if key == "cluster"]


def test_special_characters_are_rendered_as_values() -> None:
    """Quotes, braces, line breaks, format strings, templates and regular expressions are kept unchanged in values."""
    config = json.loads(bootstrap.render(bootstrap.bootstrap(cases.hostile())))
    assert _shape(config) == _shape(bootstrap.bootstrap(cases.hostile("x")))
    assert {"path": f"/e{cases.HOSTILE}-"} in [
        route["match"]
        for route in last_filter(config, f"listener/1{cases.HOSTILE}")["route_config"]["virtual_hosts"][1]["routes"]
    ]


def test_format_strings_are_fixed() -> None:
    """The format of the access log, which Envoy expands, is the same for every spec."""
    formats = {
        json.dumps(each["access_log"], sort_keys=True)
        for spec in (cases.hostile(), cases.hostile("x"))
        for each in [last_filter(bootstrap.bootstrap(spec), f"listener/1{spec.backends[0].name[1:]}")]
    }
    assert len(formats) == 1


@pytest.mark.parametrize("name", ACCEPTED)
def test_no_regular_expression_is_built(name: str) -> None:
    """Hosts and paths are never interpreted as patterns: no field of the configuration is a regular expression."""
    assert not {key for key in _keys(bootstrap.bootstrap(ACCEPTED[name])) if "regex" in key}


def _shape(value: object) -> object:
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    return [_shape(item) for item in value] if isinstance(value, list) else type(value).__name__


def _leaves(value: object, key: str = "") -> list[tuple[str, str]]:
    """Every string in ``value`` with the nearest key above it."""
    if isinstance(value, dict):
        return [leaf for name, item in value.items() for leaf in _leaves(item, name)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item, key)]
    return [(key, value)] if isinstance(value, str) else []


def _keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*(_keys(item) for item in value.values()))
    return set[str]().union(*(_keys(item) for item in value)) if isinstance(value, list) else set()
