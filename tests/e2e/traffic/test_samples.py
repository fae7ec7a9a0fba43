"""The samples by requests: each does what its first lines say. Its backends are servers of the test."""

import contextlib
import re
import socket
import ssl
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any, Final

import pytest
import trustme

from tests.e2e.envoy.envoy_process import DEADLINE_S, NEEDS_ENVOY, EnvoyProcess, eventually
from tests.e2e.traffic.certificates import Secret
from tests.e2e.traffic.grpc_calls import OK, GrpcClient, GrpcServer, Outcome, serving_grpc
from tests.e2e.traffic.grpc_calls import Reply as RpcReply
from tests.e2e.traffic.servers import Answer, Pairs, Reply, Server, answer_of, ask, serving
from tests.samples import samples, with_backends_at

pytestmark = [NEEDS_ENVOY, pytest.mark.traffic]

NAME: Final = "shop.example.com"
ENDPOINTS: Final = {"sticky-sessions": 3, "resilient": 2}
"""How many endpoints the backend of a sample has, if not one."""


@dataclass(frozen=True, slots=True)
class Running:
    """A sample that is served."""

    proxy: EnvoyProcess
    backends: Mapping[str, Sequence[Server]]
    calls: GrpcServer
    authority: trustme.CA

    def ask(self, path: str, listener: str = "http", **request: Any) -> Answer:
        """One request."""
        return ask(self.proxy, listener, path, **request)

    @property
    def trusting(self) -> ssl.SSLContext:
        """What a client needs that verifies the certificate."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


def minimal(sample: Running) -> None:
    """Everything goes to the one backend."""
    assert sample.ask("/any/path").body == "app"


def checkout(sample: Running) -> None:
    """By path and by host."""
    assert [sample.ask(path).body for path in ("/assets", "/assets/a", "/assetsa")] == ["assets", "assets", "app"]
    assert sample.ask("/", host="assets.example.com").body == "assets"
    assert sample.ask("/", host=NAME).body == "app"


def tls(sample: Running) -> None:
    """Plain HTTP is redirected, HTTPS is served with the certificate, and browsers are told to stay there."""
    redirected = sample.ask("/a?b=1", host=NAME)
    assert (redirected.status, redirected.value("location")) == (301, f"https://{NAME}/a?b=1")
    port = sample.proxy.port("https")
    connection = HTTPSConnection("127.0.0.1", port, timeout=DEADLINE_S, context=sample.trusting)
    with contextlib.closing(connection):
        plain = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        connection.sock = sample.trusting.wrap_socket(plain, server_hostname=NAME)
        connection.request("GET", "/", headers={"host": NAME})
        answer = answer_of(connection.getresponse())
    assert (answer.status, answer.value("strict-transport-security")) == (200, "max-age=2592000")
    assert sample.backends["app"][0].requests[-1].values("x-forwarded-proto") == ["https"]


def behind_balancer(sample: Running) -> None:
    """What the balancer says counts, what a client claims does not."""

    def status(path: str, forwarded: str, proto: str = "https") -> int:
        headers = [("x-forwarded-for", forwarded), ("x-forwarded-proto", proto)]
        return sample.ask(path, headers=headers).status

    assert status("/", "198.51.100.9", "http") == 301
    assert status("/", "198.51.100.9") == 200
    assert status("/admin", "198.51.100.9") == 403
    assert status("/admin", "203.0.113.5") == 200
    assert status("/admin", "203.0.113.5, 198.51.100.9") == 403


def canary(sample: Running) -> None:
    """About one of a hundred, and everything of whoever asks for it."""
    assert {sample.ask("/", headers=[("x-canary", "always")]).body for _ in range(10)} == {"app-next"}
    found = Counter(sample.ask("/").body for _ in range(300))
    assert set(found) <= {"app", "app-next"}
    assert found["app"] >= 280


def grpc(sample: Running) -> None:
    """A call by TLS reaches the backend, whose health is asked by gRPC; other paths are not served."""
    port = sample.proxy.port("grpc")
    with GrpcClient(port, sample.trusting, NAME) as client:
        reply = eventually(lambda: _ok(client), "the backend to be healthy")
        assert reply.messages == [b"order 7"]
        assert client.call("/other.Service/Get", b"").headers[":status"] == "200"
        assert client.call("/other.Service/Get", b"").status != OK


def header_routing(sample: Running) -> None:
    """The most specific route, with what it changes."""
    assert sample.ask("/api/x", host=NAME).body == "api"
    request = sample.backends["api"][0].requests[-1]
    assert (request.path, request.values("x-forwarded-prefix")) == ("/x", ["/api"])
    partner = [("x-tenant", "partner")]
    assert sample.ask("/api/x", host=f"eu.{NAME}", method="POST", headers=partner, body=b"").body == "partners"
    assert sample.ask("/api/x", host=NAME, headers=partner).body == "api"
    assert sample.ask("/search?version=2", host=NAME).body == "api"
    old = sample.ask("/old/x", host=NAME)
    assert (old.status, old.value("location")) == (308, f"http://{NAME}/new/x")
    for path in ("/search?version=1", "/"):
        missing = sample.ask(path, host=NAME)
        assert (missing.status, missing.body) == (404, "there is no such shop")


def public_api(sample: Running) -> None:
    """One origin may call, a header of the backend is hidden, and requests beyond the rate are refused."""
    backend = sample.backends["api"][0]
    backend.script = lambda _: Reply(headers=[("x-powered-by", "secret")])

    def preflight(origin: str) -> str | None:
        headers: Pairs = [("origin", origin), ("access-control-request-method", "POST")]
        return sample.ask("/v1/x", method="OPTIONS", headers=headers).value("access-control-allow-origin")

    assert preflight("https://shop.example.com") == "https://shop.example.com"
    assert preflight("https://evil.example") is None
    answer = sample.ask("/v1/x")
    assert (answer.value("x-content-type-options"), answer.value("x-powered-by")) == ("nosniff", None)
    eventually(lambda: True if sample.ask("/v1/x").status == 429 else None, "a request beyond the rate")
    assert sample.ask("/v2").status == 404


def network_policy(sample: Running) -> None:
    """Both listeners serve; what a network does with the policy is not Envoy's."""
    assert sample.ask("/").body == "app"
    assert sample.ask("/", listener="postgres").body == "db"


def sticky_sessions(sample: Running) -> None:
    """A client with its cookie stays where it was, and others go elsewhere."""
    cookies = {str(sample.ask("/").value("set-cookie")).partition(";")[0] for _ in range(20)}
    homes = [{sample.ask("/", headers=[("cookie", each)]).body for _ in range(4)} for each in cookies]
    assert {len(each) for each in homes} == {1}
    assert len(set.union(*homes)) > 1


def resilient(sample: Running) -> None:
    """A GET is tried again elsewhere, a POST is not, and what fails again and again is left out."""
    bad, good = sample.backends["app"]
    bad.script = lambda request: Reply(200 if request.path == "/healthz" else 503)
    assert {sample.ask("/").status for _ in range(10)} == {200}
    bad.requests.clear()
    good.requests.clear()
    assert [sample.ask("/", method="POST", body=b"1").status for _ in range(10)] == [200] * 10, "it is left out"
    bad.script = good.script = lambda request: Reply(200 if request.path == "/healthz" else 503)
    assert sample.ask("/pay", method="POST", body=b"1").status == 503
    assert len([each for each in (*bad.requests, *good.requests) if each.path == "/pay"]) == 1


CHECKS: Final[dict[str, Callable[[Running], None]]] = {
    "autoscaled": minimal,
    "behind-balancer": behind_balancer,
    "canary": canary,
    "checkout": checkout,
    "grpc": grpc,
    "header-routing": header_routing,
    "minimal": minimal,
    "network-policy": network_policy,
    "public-api": public_api,
    "resilient": resilient,
    "sticky-sessions": sticky_sessions,
    "tls": tls,
}


def _ok(client: GrpcClient) -> RpcReply | None:
    reply = client.call("/orders.v1.Orders/Get", b"7")
    return reply if reply.status == OK else None


@pytest.mark.parametrize("name", samples())
def test_a_sample_does_what_it_says(name: str) -> None:
    """Each sample, in a running Envoy with servers in place of its backends."""
    sample = samples()[name]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        authority = trustme.CA()
        for secret in set(re.findall(r"'secretName': '([^']+)'", str(sample))):
            Secret(directory, secret).store(authority.issue_cert(NAME))
        methods = {"/orders.v1.Orders/Get": lambda call: Outcome((b"order " + call.messages[0],))}
        calls = stack.enter_context(serving_grpc("orders", methods))
        names = [each["name"] for each in sample["spec"]["backends"]]
        servers = {
            each: [stack.enter_context(serving(f"{each}{n or ''}")) for n in range(ENDPOINTS.get(name, 1))]
            for each in names
        }
        ports = {each: [server.port for server in servers[each]] for each in names} | {"orders": [calls.port]}
        proxy = stack.enter_context(EnvoyProcess(with_backends_at(sample, ports), directory))
        CHECKS[name](Running(proxy, servers, calls, authority))
