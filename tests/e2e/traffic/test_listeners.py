"""What a listener says of its clients, by connections to a running Envoy. No Kubernetes is needed."""

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.envoy.envoy_process import NEEDS_ENVOY, EnvoyProcess
from tests.e2e.traffic.servers import Server, ask, raw
from tests.unit.envoy import cases

pytestmark = [NEEDS_ENVOY, pytest.mark.traffic]


@contextmanager
def listening(app: Server, *routes: Any, service: str | None = None, **listener: Any) -> Iterator[EnvoyProcess]:
    """A running Envoy whose one listener has further fields."""
    listeners = [cases.http(*routes) | listener]
    spec = cases.spec(listeners, [app.declared()])
    if service is not None:
        spec = spec.model_validate(
            {"listeners": listeners, "backends": [app.declared()], "service": {"ipFamilyPolicy": service}}
        )
    with tempfile.TemporaryDirectory() as directory, EnvoyProcess(spec, Path(directory)) as proxy:
        yield proxy


def test_plain_http_is_redirected_to_https(app: Server) -> None:
    """Each request is redirected to the same place by HTTPS; one that a trusted proxy got by HTTPS is served."""
    with listening(app, {"backend": "app"}, httpsRedirect=True, trustedHops=1) as proxy:
        found = ask(proxy, "http", "/a?b=1", host="shop.test")
        assert (found.status, found.value("location")) == (301, "https://shop.test/a?b=1")
        behind = [("x-forwarded-proto", "https"), ("x-forwarded-for", "192.0.2.1")]
        assert ask(proxy, "http", "/a", headers=behind).status == 200
    with listening(app, {"backend": "app"}, httpsRedirect=True) as proxy:
        assert ask(proxy, "http", "/a", headers=behind).status == 301, "nobody in front is trusted"


def test_hsts_is_on_every_response(app: Server) -> None:
    """Responses of backends and of the proxy itself carry the header."""
    routes = [{"match": {"pathPrefix": "/x"}, "response": {"status": 404}}, {"backend": "app"}]
    with listening(app, *routes, hsts={"maxAgeDays": 1, "includeSubdomains": True}) as proxy:
        for path in ("/", "/x"):
            assert ask(proxy, "http", path).value("strict-transport-security") == "max-age=86400; includeSubDomains"


@pytest.mark.parametrize(
    ("hops", "forwarded", "status"),
    [
        (0, "203.0.113.7", 403),
        (1, "203.0.113.7", 200),
        (1, "198.51.100.1, 203.0.113.7", 200),
        (1, "203.0.113.7, 198.51.100.1", 403),
        (2, "203.0.113.7, 10.0.0.1", 200),
        (2, "10.9.9.9, 203.0.113.7, 10.0.0.1", 200),
        (2, "203.0.113.7, 10.9.9.9, 10.0.0.1", 403),
    ],
)
def test_as_many_hops_are_trusted_as_are_declared(app: Server, hops: int, forwarded: str, status: int) -> None:
    """The client's address is the one that the outermost trusted proxy has added; what it sends itself counts not."""
    route = {"backend": "app", "access": {"allow": ["203.0.113.7/32"]}}
    with listening(app, route, trustedHops=hops) as proxy:
        assert ask(proxy, "http", "/", headers=[("x-forwarded-for", forwarded)]).status == status


@pytest.mark.parametrize("address", ["203.0.113.7", "::ffff:203.0.113.7", "::ffff:cb00:7107"])
def test_an_address_is_the_same_in_either_spelling(app: Server, address: str) -> None:
    """A denied IPv4 address is denied, and an allowed one allowed, if a proxy in front tells it as an IPv6 address."""
    networks = ["203.0.113.0/24"]
    routes = [
        {"match": {"pathPrefix": "/denied"}, "backend": "app", "access": {"deny": networks}},
        {"match": {"pathPrefix": "/allowed"}, "backend": "app", "access": {"allow": networks}},
    ]
    with listening(app, *routes, trustedHops=1) as proxy:
        for path, status in (("/denied", 403), ("/allowed", 200)):
            assert ask(proxy, "http", path, headers=[("x-forwarded-for", address)]).status == status
    version = 6 if ":" in address else 4
    with listening(app, *routes, proxyProtocol=True) as proxy:
        for path, status in (("/denied", 403), ("/allowed", 200)):
            request = f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
            destination = "10.0.0.1" if version == 4 else "fd00::1"
            told = f"PROXY TCP{version} {address} {destination} 1 2\r\n{request}"
            assert f" {status} ".encode() in raw(proxy.port("http"), told.encode()).splitlines()[0]


PEER = "192.0.2.99"
CLAIMS = [
    ("x-forwarded-for", "203.0.113.7"),
    ("x-forwarded-proto", "https"),
    ("x-forwarded-host", "evil.test"),
    ("x-forwarded-port", "443"),
    ("x-real-ip", "203.0.113.7"),
    ("forwarded", "for=203.0.113.7"),
    ("x-envoy-external-address", "203.0.113.7"),
    ("x-envoy-original-path", "/admin"),
]


@pytest.mark.parametrize("hops", [0, 1])
def test_a_backend_is_told_no_lie_of_a_client(app: Server, hops: int) -> None:
    """Without a trusted proxy a backend gets the peer's address alone; behind one, what that proxy says, then its own.

    A client's X-Forwarded-For is removed in any spelling and number, so that a backend that reads its beginning is not
    deceived either.
    """
    lines = [f"{name}: {value}" for name, value in [*CLAIMS, ("X-Forwarded-For", "198.51.100.1")]]
    head = "\r\n".join(["GET / HTTP/1.1", "host: shop.test", "connection: close", *lines, "", ""])
    # By the PROXY protocol the peer has an address of its own; to Envoy a peer on loopback is the host itself.
    with listening(app, {"backend": "app"}, trustedHops=hops, proxyProtocol=True) as proxy:
        assert b" 200 " in raw(proxy.port("http"), f"PROXY TCP4 {PEER} 10.0.0.1 1 2\r\n{head}".encode())
    (request,) = app.requests
    told = {name: ",".join(request.values(name)) for name, _ in CLAIMS}
    claimed = {name: value for name, value in CLAIMS if not name.startswith("x-envoy-")}
    forwarded = f"203.0.113.7,198.51.100.1,{PEER}" if hops else PEER
    expected = {name: value if hops else "" for name, value in claimed.items()}
    expected |= {"x-forwarded-for": forwarded, "x-forwarded-proto": "https" if hops else "http"}
    assert {name: told[name].replace(" ", "") for name in claimed} == expected
    assert told["x-envoy-external-address"] == ("198.51.100.1" if hops else PEER)
    assert told["x-envoy-original-path"] == ""


def test_the_proxy_protocol_tells_the_client(app: Server) -> None:
    """The address is that of the PROXY header; without one the connection is closed."""
    route = {"backend": "app", "access": {"allow": ["203.0.113.7/32"]}}
    request = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    with listening(app, route, proxyProtocol=True) as proxy:
        port = proxy.port("http")
        assert raw(port, b"PROXY TCP4 203.0.113.7 10.0.0.1 1 2\r\n" + request).startswith(b"HTTP/1.1 200")
        assert raw(port, b"PROXY TCP4 203.0.113.8 10.0.0.1 1 2\r\n" + request).startswith(b"HTTP/1.1 403")
        assert raw(port, request) == b""


def test_http_1_0_is_answered_where_it_is_asked_for(app: Server) -> None:
    """With ``http10`` a request without a host is served, else the client is told to upgrade."""
    request = b"GET / HTTP/1.0\r\n\r\n"
    with listening(app, {"backend": "app"}, http10=True) as proxy:
        assert b" 200 " in raw(proxy.port("http"), request).splitlines()[0]
    with listening(app, {"backend": "app"}) as proxy:
        assert b" 426 " in raw(proxy.port("http"), request).splitlines()[0]


def test_limits_are_kept(app: Server) -> None:
    """Connections beyond the limit are closed, headers beyond it are 431, slow ones time out."""
    limits = {"maxConnections": 2, "maxHeaderKilobytes": 1, "headersTimeout": "300ms", "idleTimeout": "300ms"}
    with listening(app, {"backend": "app"}, limits=limits) as proxy:
        port = proxy.port("http")
        assert ask(proxy, "http", "/", headers=[("x", "a" * 2_000)]).status == 431
        assert b" 408 " in raw(port, b"GET / HTTP/1.1\r\nhost: a\r\n").splitlines()[0]
        assert raw(port, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").startswith(b"HTTP/1.1 200"), "and is closed when idle"
        held = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(2)]
        try:
            assert raw(port, b"") == b""
        finally:
            for each in held:
                each.close()


def test_both_families_are_served(app: Server) -> None:
    """With two families the proxy and its readiness answer on IPv6 and IPv4, which stays an IPv4 address."""
    route = {"backend": "app", "access": {"allow": ["127.0.0.1/32"]}}
    request = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    with listening(
        app, route, {"match": {"pathPrefix": "/open"}, "backend": "app"}, service="PreferDualStack"
    ) as proxy:
        port = proxy.port("http")
        assert raw(port, request).startswith(b"HTTP/1.1 200")
        assert raw(port, request, family=socket.AF_INET6).startswith(b"HTTP/1.1 403")
        assert raw(port, request.replace(b"/", b"/open", 1), family=socket.AF_INET6).startswith(b"HTTP/1.1 200")
        probe = b"GET /ready HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        assert raw(proxy.port("internal/readiness"), probe, family=socket.AF_INET6).startswith(b"HTTP/1.1 200")
