"""Requests through a running Envoy: routes, headers, access log and internal interfaces. No Kubernetes is needed."""

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from operator_app.api.models import Telemetry
from tests.e2e.envoy.envoy_process import (
    DEADLINE_S,
    NEEDS_ENVOY,
    Backend,
    EnvoyProcess,
    backend,
    declared,
    exchange,
    running,
)
from tests.unit.envoy import cases

pytestmark = NEEDS_ENVOY

BACKENDS = ("b0", "b1", "b2", "b3", "b4", "b5")


@pytest.fixture(scope="module")
def backends() -> Iterator[list[Backend]]:
    """Six HTTP backends that respond with their name."""
    with ExitStack() as stack:
        yield [stack.enter_context(backend(name)) for name in BACKENDS]


@pytest.fixture(scope="module")
def proxy(backends: list[Backend]) -> Iterator[EnvoyProcess]:
    """An Envoy with an HTTP listener with every kind of route, one with a catch-all route, and a TCP listener."""
    routes = [
        {"backend": "b0", "match": {"pathPrefix": "/api/"}},
        {"backend": "b1", "match": {"pathPrefix": "/api/v1"}},
        {"backend": "b2", "match": {"pathExact": "/api/v1"}},
        {"backend": "b3", "match": {"hosts": ["*.example.com"], "pathPrefix": "/api"}},
        {"backend": "b4", "match": {"hosts": ["shop.example.com"], "pathExact": "/only"}},
    ]
    spec = cases.spec(
        [cases.http(*routes), cases.http({"backend": "b5"}, name="all", port=8081), cases.tcp(backend="b5")],
        [declared(each) for each in backends],
    )
    with tempfile.TemporaryDirectory() as directory, running(spec, Path(directory)) as proxy:
        yield proxy


@pytest.mark.parametrize(
    ("host", "path", "answers"),
    [
        ("other.test", "/api", "b0"),
        ("other.test", "/api/", "b0"),
        ("other.test", "/api/x?q=1", "b0"),
        ("other.test", "/apiary", None),
        ("other.test", "/api/v1", "b2"),
        ("other.test", "/api/v1?q=1", "b2"),
        ("other.test", "/api/v1/", "b1"),
        ("other.test", "/api/v1/users", "b1"),
        ("other.test", "/api/v10", "b0"),
        ("other.test", "/only", None),
        ("www.example.com", "/api/v1", "b3"),
        ("a.b.example.com", "/api/v1", "b3"),
        ("example.com", "/api/v1", "b2"),
        ("shop.example.com", "/only", "b4"),
        ("shop.example.com", "/api/v1", "b3"),
        ("SHOP.Example.COM", "/only", "b4"),
        ("shop.example.com:8443", "/only", "b4"),
        ("shop.example.com.", "/only", "b4"),
        ("www.example.com", "/only", None),
        ("other.test", "//api///v1", "b2"),
        ("other.test", "/x/../api/./v1", "b2"),
        ("other.test", "/%61pi/v1", "b2"),
    ],
)
def test_host_and_path_select_the_route(proxy: EnvoyProcess, host: str, path: str, answers: str | None) -> None:
    """Host precedes path, exact precedes prefix, longer precedes shorter, prefixes match whole segments; else 404."""
    status, body, _ = proxy.get("http", path, host)
    assert (status, body.partition(" ")[0] or None) == ((200, answers) if answers else (404, None))


def test_envoy_follows_the_documented_precedence(backends: list[Backend], tmp_path: Path) -> None:
    """For hundreds of requests to overlapping routes, Envoy selects the route of the documented precedence."""
    chance = random.Random(20260729)  # noqa: S311  # any fixed sequence will do
    hosts = ["example.com", "shop.example.com", "a.shop.example.com", "other.org"]
    patterns = [*hosts, "*.example.com", "*.shop.example.com", "*.com"]
    paths = ["/", "/api", "/api/v1", "/api/v1/users", "/apiary"]

    def match() -> dict[str, Any]:
        path = chance.choice(
            [{}, *({kind: path} for kind in ("pathPrefix", "pathExact") for path in [*paths, "/api/"])]
        )
        return {"hosts": chance.sample(patterns, chance.randrange(4)), **path}

    listeners = [
        cases.http(*({"backend": name, "match": match()} for name in BACKENDS), name=f"l{n}", port=8080 + n)
        for n in range(12)
    ]
    spec = cases.spec(listeners, [declared(each) for each in backends])
    with running(spec, tmp_path) as proxy:
        for listener in spec.listeners:
            with closing(HTTPConnection("127.0.0.1", proxy.port(listener.name), timeout=DEADLINE_S)) as connection:
                for host in hosts:
                    for path in [*paths, "/api/", "/api/v1/"]:
                        position = cases.answering(listener.routes, host, path)
                        status, body, _ = exchange(connection, path, host)
                        expected = (404, "") if position is None else (200, f"b{position} {path}")
                        assert (status, body) == expected, (listener.routes, host, path)


def test_escaped_slash_is_redirected_to_the_plain_path(proxy: EnvoyProcess) -> None:
    """A path with ``%2F`` is redirected to the path with ``/``, so Envoy and the backend read the same path."""
    status, _, headers = proxy.get("http", "/api%2Fv1")
    assert (status, headers["location"]) == (307, "/api/v1")


def test_header_with_underscore_is_refused(proxy: EnvoyProcess) -> None:
    """A request with an underscore in a header name gets 400; CGI-like backends would read ``_`` as ``-``."""
    assert proxy.get("all", "/", x_forwarded_user="root")[0] == 400


def test_a_client_cannot_claim_another_address(proxy: EnvoyProcess) -> None:
    """Envoy puts the peer's address in place of a client's ``X-Forwarded-For`` and removes its ``X-Envoy-Internal``."""
    status, body, _ = proxy.get("all", "/headers", **{"x-forwarded-for": "10.0.0.1", "x-envoy-internal": "true"})
    seen = json.loads(body)
    assert status == 200
    assert ip_address(seen["x-forwarded-for"]) != ip_address("10.0.0.1")
    assert "x-envoy-internal" not in seen


def test_tcp_listener_forwards_bytes(proxy: EnvoyProcess) -> None:
    """A TCP listener forwards the bytes of a connection unchanged."""
    with closing(HTTPConnection("127.0.0.1", proxy.port("tcp"), timeout=DEADLINE_S)) as connection:
        status, body, headers = exchange(connection, "/raw")
    assert (status, body) == (200, "b5 /raw")
    assert "x-envoy-upstream-service-time" not in headers


def test_a_name_is_resolved(backends: list[Backend], tmp_path: Path) -> None:
    """An endpoint with a DNS name is reached at an address that the name resolves to."""
    # Nothing listens on 127.0.0.3, so a response of 200 comes from the resolved name: at once, or after a retry.
    endpoints = [{"host": "localhost", "port": backends[0].server_port}, {"host": "127.0.0.3", "port": 1}]
    spec = cases.spec([cases.http({"backend": "b0"})], [{"name": "b0", "endpoints": endpoints}])
    with running(spec, tmp_path) as proxy:
        assert {proxy.get("http", "/")[0] for _ in range(8)} == {200}


def test_access_log_is_one_json_line_without_the_query(backends: list[Backend], tmp_path: Path) -> None:
    """Each request is one JSON object on stdout, with special characters escaped and without the query."""
    spec = cases.spec([cases.http({"backend": "b5"})], [declared(backends[5])])
    with running(spec, tmp_path) as proxy:
        assert proxy.get("http", '/"},{"%REQ(:PATH)%?password=hunter2', "log.test")[0] == 200
    # Envoy flushes its buffer when it exits, else every ten seconds.
    log = proxy.log_path.read_text()
    (entry,) = (json.loads(line) for line in log.splitlines() if "log.test" in line)
    assert (entry["status"], entry["method"], entry["host"], entry["cluster"]) == (200, "GET", "log.test", "backend/b5")
    assert entry["path"] == "/%22%7D,%7B%22%REQ(:PATH)%"
    assert "hunter2" not in log


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/ready", 200),
        ("POST", "/ready", 404),
        ("GET", "/ready/", 404),
        ("GET", "/ready?x", 404),
        ("GET", "/", 404),
        ("GET", "/stats", 404),
        ("POST", "/loaded", 404),
        ("POST", "/healthcheck/fail", 404),
        ("POST", "/quitquitquit", 404),
    ],
)
def test_readiness_listener_serves_nothing_else(proxy: EnvoyProcess, method: str, path: str, status: int) -> None:
    """Beside its two paths the readiness listener serves no path of the admin interface and no route of the spec."""
    with closing(HTTPConnection("127.0.0.1", proxy.port("internal/readiness"), timeout=DEADLINE_S)) as connection:
        found, body, _ = exchange(connection, path, "shop.example.com", method)
    assert (found, body) == (status, "")


def test_the_proxy_says_what_it_has_loaded(proxy: EnvoyProcess) -> None:
    """``GET /loaded`` answers the versions of all files, refusals and what is warming, and nothing else."""
    with closing(HTTPConnection("127.0.0.1", proxy.port("internal/readiness"), timeout=DEADLINE_S)) as connection:
        status, body, _ = exchange(connection, "/loaded")
    assert status == 200
    found = dict(line.split(": ", 1) for line in body.splitlines())
    expected = {f"{stat}.version_text": f'"{version}"' for stat, version in proxy.files.versions.items()}
    expected |= {
        f"{stat}.{each}": "0" for stat in proxy.files.versions for each in ("update_failure", "update_rejected")
    }
    assert found == expected | {
        "cluster_manager.warming_clusters": "0",
        "listener_manager.total_listeners_warming": "0",
    }


@pytest.mark.parametrize("path", ["/loaded?", "/loaded?filter=.*", "/loaded&filter=.*", "/loaded/", "/loaded#x"])
def test_nothing_can_be_added_to_the_question(proxy: EnvoyProcess, path: str) -> None:
    """A request with anything behind the path is not forwarded to the admin interface."""
    with closing(HTTPConnection("127.0.0.1", proxy.port("internal/readiness"), timeout=DEADLINE_S)) as connection:
        assert exchange(connection, path)[0] in {400, 404}


def test_metrics_are_served_at_a_port_of_their_own(backends: list[Backend], tmp_path: Path) -> None:
    """``GET /stats/prometheus`` has counts of requests; every other path, method and query gets 404."""
    spec = cases.spec([cases.http({"backend": "b5"})], [declared(backends[5])])
    with running(spec.model_copy(update={"telemetry": Telemetry(metrics=True)}), tmp_path) as proxy:
        assert proxy.get("http", "/")[0] == 200
        status, body, _ = proxy.get("internal/metrics", "/stats/prometheus")
        assert status == 200
        assert "envoy_http_downstream_rq_total" in body
        for path in ("/", "/stats", "/stats/prometheus?usedonly", "/stats/prometheus/", "/config_dump", "/ready"):
            assert proxy.get("internal/metrics", path)[0] == 404, path
        with closing(HTTPConnection("127.0.0.1", proxy.port("internal/metrics"), timeout=DEADLINE_S)) as connection:
            assert exchange(connection, "/stats/prometheus", method="POST")[0] == 404


def test_admin_interface_has_no_port(proxy: EnvoyProcess) -> None:
    """Envoy listens at the ports of its listeners alone; the admin interface answers at its socket."""
    assert proxy.admin("/ready") == "LIVE\n"
    listening = {
        int(line.split()[1].rpartition(":")[2], 16)
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{proxy.process.pid}/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[9] in _sockets_of(proxy.process.pid)
    }
    names = ("http", "all", "tcp", "internal/readiness")
    assert listening == {proxy.port(name) for name in names}


def _sockets_of(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    links = (str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir())
    return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
