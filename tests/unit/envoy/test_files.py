"""The whole configuration as data; ``tests/e2e/envoy`` runs Envoy with it."""

import itertools
import json
import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_app.api.models import EnvoyProxySpec, Listener
from operator_app.api.routes import Route, RouteMatch
from operator_app.envoy import bootstrap, files
from operator_app.envoy.files import is_file, rendered
from operator_app.envoy.listeners import route_configuration, virtual_hosts_bytes
from operator_app.errors import TerminalError
from tests.unit.envoy import cases
from tests.unit.envoy.parts import documents, last_filter, static_configuration
from tests.unit.envoy.routes import route_lists

ACCEPTED = cases.accepted()


@pytest.mark.parametrize("name", sorted(ACCEPTED.keys() - {"hostile"}))
def test_equal_specs_give_equal_text(name: str) -> None:
    """A spec and the same spec with its keys in reverse order render to the same bytes and the same revision."""
    original = ACCEPTED[name]
    turned = EnvoyProxySpec.model_validate(reversed_keys(original.model_dump(by_alias=True, exclude_none=True)))
    assert rendered(original) == rendered(turned)


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
    assert rendered(forward) == rendered(backward)


@given(route_lists(), st.randoms(use_true_random=False))
def test_order_of_hosts_does_not_matter(routes: tuple[Route, ...], chance: Random) -> None:
    """A route's hosts are a set, so their order and duplicates do not change the configuration."""
    shuffled = []
    for route in routes:
        hosts = list(route.match.hosts) if route.match else []
        chance.shuffle(hosts)
        assert route.match
        shuffled.append(route.model_copy(update={"match": route.match.model_copy(update={"hosts": (*hosts, *hosts)})}))
    assert rendered(_spec_of(routes)) == rendered(_spec_of(tuple(shuffled)))


def _spec_of(routes: tuple[Route, ...]) -> EnvoyProxySpec:
    base = cases.spec([cases.http()])
    listener = base.listeners[0].model_copy(update={"routes": routes})
    return base.model_copy(update={"listeners": (listener,)})


def test_a_file_carries_the_hash_of_its_content() -> None:
    """What Envoy reports as loaded tells one content from another: only the changed file has another version."""
    before, after = (
        rendered(cases.spec([cases.http()], [{"name": "app", "endpoints": [{"host": "a", "port": port}]}]))
        for port in (80, 81)
    )
    for each in (before, after):
        found = documents(each.texts)
        resources = ("listener_manager.lds", "lds.json"), ("cluster_manager.cds", "cds.json")
        routes = "http.listener/http.rds.listener/http", "rds-http.json"
        versions = {stat: found[name]["version_info"] for stat, name in (*resources, routes)}
        assert each.versions == versions
        assert all(re.fullmatch("sha256:[0-9a-f]{16}", version) for version in versions.values())
    assert {stat for stat in before.versions if before.versions[stat] != after.versions[stat]} == {
        "cluster_manager.cds"
    }


@pytest.mark.parametrize(
    ("listeners", "is_same"),
    [
        ([cases.http({"backend": "app", "match": {"hosts": ["a.test"]}}), cases.tcp()], True),
        ([cases.http(port=8081) | {"targetPort": 8080}, cases.tcp()], True),
        ([cases.http() | {"targetPort": 8082}, cases.tcp()], False),
        ([cases.http(name="web"), cases.tcp()], False),
        ([cases.http(), cases.tcp(), cases.http(name="more", port=8083)], False),
        ([cases.http()], False),
        ([cases.http(name="tcp", port=5432), cases.tcp(name="http", port=8080)], False),
        ([cases.http() | {"tls": {"secretName": "shop-tls"}}, cases.tcp()], False),
    ],
    ids=["route", "port of the Service", "port", "name", "one more", "one less", "protocol", "TLS"],
)
def test_the_revision_names_what_a_running_pod_can_not_follow(
    listeners: list[dict[str, object]], *, is_same: bool
) -> None:
    """A changed route keeps the revision; the names, ports, protocols and Secrets of listeners make another."""
    before = rendered(cases.spec([cases.http(), cases.tcp()]))
    after = rendered(cases.spec(listeners))
    assert (after.revision == before.revision) is is_same
    both = before.texts.keys() & after.texts.keys()
    assert (before.bootstrap_file in both) is (f"lds-{before.revision}.json" in both) is is_same
    assert all(map(is_file, (*before.texts, *after.texts, "envoy.json")))


def test_another_secret_of_backends_makes_other_files() -> None:
    """Pods that lack it keep routes and clusters that they can serve; all others follow the same files."""
    verified = {"name": "app", "endpoints": cases.ENDPOINTS["DNS"]}
    plain, one, two = (
        rendered(cases.spec([cases.http(), cases.tcp()], [verified | added]))
        for added in ({}, *({"tls": {"serverName": "app", "caSecretName": name}} for name in ("one", "two")))
    )
    for before, after in itertools.permutations((plain, one, two), 2):
        assert not before.are_read_by(after.revision)
        assert not before.texts.keys() & after.texts.keys()
        assert all(map(is_file, before.texts))
    assert one.are_read_by(rendered(cases.spec([cases.http()], [verified | {"tls": TLS}])).revision)
    assert one.secrets == {"authorities/one": "one"}


TLS = {"serverName": "other", "caSecretName": "one"}


@pytest.mark.parametrize("name", ["notes.txt", "envoy-1.json", "lds.json", "rds-.json", "xcds.json", "cds.json.bak"])
def test_a_key_of_somebody_else_is_no_file_of_a_proxy(name: str) -> None:
    """Only names that are rendered, or were once, are those of files."""
    assert not is_file(name)


def test_text_is_indented_ascii_with_sorted_keys() -> None:
    """Each text is readable JSON: sorted keys, an indentation of two, ASCII, one newline at the end."""
    texts = rendered(cases.spec([cases.http()])).texts
    assert len(texts) == 4
    for text in texts.values():
        assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
        assert text.isascii()


def test_the_largest_spec_fits_into_a_config_map() -> None:
    """A spec with full lists is rendered without indentation, to at most ``MAX_BYTES``, below a ConfigMap's 1 MiB."""
    texts = rendered(cases.largest()).texts
    assert sum(map(len, texts.values())) <= files.MAX_BYTES < 1024 * 1024
    for text in texts.values():
        assert text == json.dumps(json.loads(text), separators=(",", ":"), sort_keys=True) + "\n"


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
    monkeypatch.setattr(files, "_resources", lambda *_: pytest.fail("a listener was built"))
    with pytest.raises(TerminalError, match="declare fewer routes") as caught:
        rendered(spec)
    assert caught.value.reason == "ConfigurationTooLarge"


def test_texts_that_are_too_large_together_are_a_terminal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is below the bound in each file and above it as a whole is refused as well."""
    spec = cases.largest()
    total = sum(map(len, rendered(spec).texts.values()))
    monkeypatch.setattr(files, "MAX_BYTES", total)
    assert sum(map(len, rendered(spec).texts.values())) == total
    monkeypatch.setattr(files, "MAX_BYTES", total - 1)
    with pytest.raises(TerminalError, match="declare fewer routes") as caught:
        rendered(spec)
    assert caught.value.reason == "ConfigurationTooLarge"


@given(route_lists())
def test_the_size_of_virtual_hosts_is_known_before_they_are_built(routes: tuple[Route, ...]) -> None:
    """The computed size is exactly that of the virtual hosts as compact JSON."""
    (listener,) = _spec_of(routes).listeners
    built = last_filter(static_configuration(_spec_of(routes)), "listener/http")["route_config"]["virtual_hosts"]
    assert virtual_hosts_bytes(listener) == len(json.dumps(built, separators=(",", ":")))


def test_a_route_that_hosts_share_is_built_once() -> None:
    """The virtual hosts of 250 hosts contain one and the same object of a route for every host."""
    spec = wildcards_times_routes(1, 250)
    hosts = route_configuration(spec.listeners[0])["virtual_hosts"]
    assert len(hosts) == 251
    assert len({id(each["routes"][-1]) for each in hosts}) == 1


def test_admin_interface_has_no_port() -> None:
    """It is an abstract socket, and only the two clusters of the readiness listener refer to it."""
    config = static_configuration(cases.spec([cases.http(), cases.tcp()]))
    assert config["admin"]["address"] == {"pipe": {"path": "@operator-app/admin"}}
    clusters = config["static_resources"]["clusters"]
    assert [each["name"] for each in clusters if "@operator-app" in json.dumps(each)] == [
        "internal/admin",
        "internal/loaded",
    ]
    assert "@operator-app" not in json.dumps(config["static_resources"]["listeners"])
    assert "access_log" not in config["admin"]


def test_a_proxy_is_ready_once_each_file_was_accepted() -> None:
    """Readiness needs a version of the listeners, of the clusters, and of the routes of every HTTP listener."""
    config = static_configuration(cases.spec([cases.http(), cases.http(name="b", port=81), cases.tcp()]))
    (loaded,) = (each for each in config["static_resources"]["clusters"] if each["name"] == "internal/loaded")
    (check,) = loaded["health_checks"]
    needed = [bytes.fromhex(each["text"]).decode() for each in check["http_health_check"]["receive"]]
    assert needed == [
        'cluster_manager.cds.version_text: "sha256:',
        'http.listener/b.rds.listener/b.version_text: "sha256:',
        'http.listener/http.rds.listener/http.version_text: "sha256:',
        'listener_manager.lds.version_text: "sha256:',
    ]
    readiness = last_filter(config, "internal/readiness")["http_filters"][0]["typed_config"]
    assert readiness["cluster_min_healthy_percentages"] == {"internal/loaded": {"value": 100}}


def test_downstream_connections_are_bounded() -> None:
    """One bound applies to all listeners together; only the two internal interfaces are exempt."""
    config = static_configuration(cases.spec([cases.http(), cases.tcp()]))
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
    hostile = static_configuration(cases.hostile(marked))
    harmless = static_configuration(cases.hostile("MARK"))
    assert _shape(hostile) == _shape(harmless)
    places = {key for key, value in _leaves(hostile) if "MARK" in value or "mark" in value}
    assert places <= ALLOWED_PLACES
    assert f"backend/b{marked}" in [value for key, value in _leaves(hostile) if key == "cluster"]


def test_special_characters_are_rendered_as_values() -> None:
    """Quotes, braces, line breaks, format strings, templates and regular expressions are kept unchanged in values."""
    config = static_configuration(cases.hostile())
    assert _shape(config) == _shape(static_configuration(cases.hostile("x")))
    assert {"path": f"/e{cases.HOSTILE}-"} in [
        route["match"]
        for route in last_filter(config, f"listener/1{cases.HOSTILE}")["route_config"]["virtual_hosts"][1]["routes"]
    ]


def test_format_strings_are_fixed() -> None:
    """The format of the access log, which Envoy expands, is the same for every spec."""
    formats = {
        json.dumps(each["access_log"], sort_keys=True)
        for spec in (cases.hostile(), cases.hostile("x"))
        for each in [last_filter(static_configuration(spec), f"listener/1{spec.backends[0].name[1:]}")]
    }
    assert len(formats) == 1


@pytest.mark.parametrize("name", ACCEPTED)
def test_no_regular_expression_is_built(name: str) -> None:
    """Hosts and paths are never interpreted as patterns: no field of the configuration is a regular expression."""
    assert not {key for key in _keys(static_configuration(ACCEPTED[name])) if "regex" in key}


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
