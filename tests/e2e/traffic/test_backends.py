"""What a backend says of its endpoints, by requests through a running Envoy. No Kubernetes is needed."""

import socket
import ssl
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from operator_app.api.models import EnvoyProxySpec
from operator_app.envoy.secrets import CA_DIRECTORY, ca_directory
from tests.e2e.envoy.envoy_process import NEEDS_ENVOY, EnvoyProcess, Mount, eventually, served
from tests.e2e.traffic.servers import Reply, Request, Server, ask, serving
from tests.unit.envoy import cases

pytestmark = [NEEDS_ENVOY, pytest.mark.traffic]

EJECTION_S = 2


def spec_of(servers: list[Server], **backend: Any) -> EnvoyProxySpec:
    """One backend called app, whose endpoints are ``servers``."""
    endpoints = [{"host": "127.0.0.1", "port": each.port} for each in servers]
    return cases.spec([cases.http({"backend": "app"})], [{"name": "app", "endpoints": endpoints} | backend])


@contextmanager
def balancing(*servers: Server, **backend: Any) -> Iterator[EnvoyProcess]:
    """A running Envoy in front of ``servers``."""
    spec = spec_of(list(servers), **backend)
    with tempfile.TemporaryDirectory() as directory, EnvoyProcess(spec, Path(directory)) as proxy:
        yield proxy


@pytest.fixture
def apps() -> Iterator[list[Server]]:
    """Three backends."""
    with ExitStack() as stack:
        yield [stack.enter_context(serving(f"app{n}")) for n in range(3)]


@pytest.mark.parametrize("policy", ["RoundRobin", "LeastRequest", "Random"])
def test_requests_are_spread(apps: list[Server], policy: str) -> None:
    """Every endpoint gets some of many requests."""
    with balancing(*apps, loadBalancing={"policy": policy}) as proxy:
        found = Counter(ask(proxy, "http", "/").body for _ in range(60))
    assert set(found) == {"app0", "app1", "app2"}


def test_the_same_header_goes_to_the_same_endpoint(apps: list[Server]) -> None:
    """Requests with one value go to one endpoint, those with other values to others."""
    with balancing(*apps, loadBalancing={"policy": "Hash", "header": "x-user"}) as proxy:
        users = [[("x-user", str(user))] for user in range(20)]
        found = [{ask(proxy, "http", "/", headers=user).body for _ in range(5)} for user in users]
    assert {len(each) for each in found} == {1}
    assert len(set.union(*found)) == 3


def test_a_cookie_keeps_a_client_at_its_endpoint(apps: list[Server]) -> None:
    """A client without the cookie gets one, with which it stays where it was."""
    with balancing(*apps, loadBalancing={"policy": "Hash", "cookie": "session"}) as proxy:
        for _ in range(5):
            first = ask(proxy, "http", "/")
            cookie = str(first.value("set-cookie")).partition(";")[0]
            assert cookie.startswith("session=")
            again = {ask(proxy, "http", "/", headers=[("cookie", cookie)]).body for _ in range(5)}
            assert again == {first.body}


def test_an_endpoint_that_fails_its_check_gets_nothing(apps: list[Server]) -> None:
    """The one whose path answers 500 is left out, and comes back when it answers again."""
    is_ill = threading.Event()
    is_ill.set()

    def script(request: Request) -> Reply:
        return Reply(500 if is_ill.is_set() and request.path == "/healthz" else 200, body=b"app0")

    apps[0].script = script
    check = {"path": "/healthz", "interval": "200ms", "timeout": "200ms", "failures": 1}
    with balancing(*apps, healthCheck=check) as proxy:

        def answering() -> set[str]:
            return {ask(proxy, "http", "/").body for _ in range(12)}

        eventually(lambda: True if answering() == {"app1", "app2"} else None, "the ill one to be left out")
        is_ill.clear()
        eventually(lambda: True if "app0" in answering() else None, "it to come back")


def test_a_failing_endpoint_is_left_out_and_the_last_one_never(apps: list[Server]) -> None:
    """After so many errors in a row nothing is sent there; a backend of one endpoint goes on getting requests."""
    apps[0].script = lambda _: Reply(500)
    declared = {"consecutiveErrors": 2, "ejectionTime": "60s"}
    with balancing(*apps, outlierDetection=declared) as proxy:
        eventually(
            lambda: True if {ask(proxy, "http", "/").status for _ in range(9)} == {200} else None, "it to be left out"
        )
    apps[0].requests.clear()
    with balancing(apps[0], outlierDetection=declared) as proxy:
        assert [ask(proxy, "http", "/").status for _ in range(10)] == [500] * 10
    assert len(apps[0].requests) == 10, "the only endpoint is asked each time"


def test_all_endpoints_failing_are_not_all_left_out(apps: list[Server]) -> None:
    """However many may be left out and however all fail, each request is answered by one of them."""
    for each in apps[:2]:
        each.script = lambda _: Reply(500)
    with balancing(*apps[:2], outlierDetection={"consecutiveErrors": 1, "maxEjectedPercent": 90}) as proxy:
        assert {ask(proxy, "http", "/").status for _ in range(20)} == {500}
    assert sum(len(each.requests) for each in apps) == 20, "none is refused by the proxy itself"


def test_an_endpoint_is_left_out_for_as_long_as_is_declared(apps: list[Server]) -> None:
    """It comes back after the declared time and not after a health check, which it passes all the while."""
    is_ill = threading.Event()
    is_ill.set()
    apps[0].script = lambda request: Reply(500 if is_ill.is_set() and request.path == "/" else 200, body=b"app0")
    declared = {
        "healthCheck": {"path": "/healthz", "interval": "50ms"},
        "outlierDetection": {"consecutiveErrors": 1, "ejectionTime": f"{EJECTION_S}s"},
    }

    with balancing(*apps[:2], **declared) as proxy:
        asked_mono = time.monotonic()
        while ask(proxy, "http", "/").status != 500:
            asked_mono = time.monotonic()
        # The thread that answered tells the main thread, which leaves the endpoint out a moment later.
        eventually(lambda: True if _left_out(proxy) == 1 else None, "it to be left out")
        is_ill.clear()
        eventually(lambda: True if ask(proxy, "http", "/").body == "app0" else None, "it to come back")
        assert time.monotonic() - asked_mono >= EJECTION_S
        assert len([each for each in apps[0].requests if each.path == "/"]) == 2, "nothing in between"


def _left_out(proxy: EnvoyProcess) -> int:
    """How many endpoints are left out now for their errors."""
    return int(proxy.admin("/stats?filter=outlier_detection.ejections_active$").rpartition(": ")[2] or 0)


def test_circuit_breakers_bound_what_waits(apps: list[Server]) -> None:
    """Beyond the limits requests are answered with 503 at once."""
    release = threading.Event()

    def script(_: Request) -> Reply:
        release.wait(10)
        return Reply()

    apps[0].script = script
    with balancing(apps[0], maxConnections=1, maxPendingRequests=1, maxRequests=1) as proxy:
        statuses: list[int] = []
        clients = [threading.Thread(target=lambda: statuses.append(ask(proxy, "http", "/").status)) for _ in range(6)]
        for each in clients:
            each.start()
        eventually(lambda: True if len(statuses) >= 4 else None, "answers to what is beyond the limits")
        assert set(statuses) == {503}
        release.set()
        for each in clients:
            each.join()
    assert 200 in statuses


def test_idle_connections_are_closed_in_time(apps: list[Server]) -> None:
    """A connection to the backend is not used again after ``idleTimeout``."""
    with balancing(apps[0], idleTimeout="100ms") as proxy:
        ask(proxy, "http", "/")
        threading.Event().wait(0.5)
        ask(proxy, "http", "/")
    assert apps[0].connections == 2


class Tls(Server):
    """A backend that speaks TLS with one certificate."""

    def __init__(self, certificate: trustme.LeafCert, minimum: ssl.TLSVersion) -> None:
        super().__init__("tls")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = minimum
        certificate.configure_cert(self.context)
        self.names: list[str | None] = []
        self.context.sni_callback = lambda _socket, name, _context: self.names.append(name)

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection, encrypted."""
        connection, address = super().get_request()
        return self.context.wrap_socket(connection, server_side=True), address


@pytest.mark.parametrize(
    ("certified", "asked", "is_trusted", "status"),
    [
        ("app.internal", "app.internal", True, 200),
        ("other.internal", "app.internal", True, 503),
        ("app.internal", "app.internal", False, 503),
    ],
    ids=["right", "another name", "another authority"],
)
def test_a_backends_certificate_is_verified(
    tmp_path: Path, certified: str, asked: str, *, is_trusted: bool, status: int
) -> None:
    """Only a certificate of the declared authority with the declared name is accepted; TLS 1.3 is spoken."""
    authority, stranger = trustme.CA(), trustme.CA()
    mounted = Path(ca_directory("authority").replace(CA_DIRECTORY, f"{tmp_path}/mount-ca"))
    mounted.parent.mkdir()
    Mount(mounted).swap({"ca.crt": (authority if is_trusted else stranger).cert_pem.bytes().decode()})
    with Tls(authority.issue_cert(certified), ssl.TLSVersion.TLSv1_3) as server:
        tls = {"serverName": asked, "caSecretName": "authority"}
        with served(server), EnvoyProcess(spec_of([server], tls=tls), tmp_path) as proxy:
            assert ask(proxy, "http", "/").status == status
        assert set(server.names) == {"app.internal"}


def test_a_check_speaks_tls_as_requests_do(tmp_path: Path) -> None:
    """It asks for the declared name, by SNI and as the host, verifies the certificate, and lets requests pass."""
    authority = trustme.CA()
    mounted = Path(ca_directory("authority").replace(CA_DIRECTORY, f"{tmp_path}/mount-ca"))
    mounted.parent.mkdir()
    Mount(mounted).swap({"ca.crt": authority.cert_pem.bytes().decode()})
    with Tls(authority.issue_cert("app.internal"), ssl.TLSVersion.TLSv1_2) as server:
        backend = {"tls": {"serverName": "app.internal", "caSecretName": "authority"}, "healthCheck": {"path": "/up"}}
        with served(server), EnvoyProcess(spec_of([server], **backend), tmp_path) as proxy:
            probe: Request = eventually(lambda: next(iter(server.requests), None), "a check")
            assert (probe.path, probe.values("host")) == ("/up", ["app.internal"])
            assert ask(proxy, "http", "/").status == 200
        assert set(server.names) == {"app.internal"}


@pytest.mark.reload
@pytest.mark.parametrize("first", [{}, {"ca.crt": "x"}], ids=["missing", "broken"])
def test_authorities_that_come_late_are_used(tmp_path: Path, app: Server, first: dict[str, str]) -> None:
    """Without them that backend is not asked and the other one is; once they are there, it is."""
    authority = trustme.CA()
    mounted = Path(ca_directory("authority").replace(CA_DIRECTORY, f"{tmp_path}/mount-ca"))
    mounted.parent.mkdir()
    mount = Mount(mounted)
    mount.swap(first)
    with Tls(authority.issue_cert("app.internal"), ssl.TLSVersion.TLSv1_3) as server:
        tls = {"serverName": "app.internal", "caSecretName": "authority"}
        routes = [cases.http({"backend": "tls", "match": {"pathPrefix": "/tls"}}, {"backend": "app"})]
        spec = cases.spec(routes, [server.declared() | {"name": "tls", "tls": tls}, app.declared()])
        with served(server), EnvoyProcess(spec, tmp_path) as proxy:
            assert ask(proxy, "http", "/tls").status == 503
            assert ask(proxy, "http", "/").status == 200
            mount.swap({"ca.crt": authority.cert_pem.bytes().decode()})
            eventually(lambda: True if ask(proxy, "http", "/tls").status == 200 else None, "the backend")


def test_a_service_of_the_namespace_is_its_name(apps: list[Server]) -> None:
    """A Service is resolved by its short name, as a Pod does it; here localhost stands for it."""
    backend = {"name": "app", "service": {"name": "localhost", "port": apps[0].port}}
    spec = cases.spec([cases.http({"backend": "app"})], [backend])
    with tempfile.TemporaryDirectory() as directory, EnvoyProcess(spec, Path(directory)) as proxy:
        assert eventually(lambda: ask(proxy, "http", "/").body or None, "the name to be resolved") == "app0"


@pytest.mark.parametrize("protocol", ["http2", "grpc"])
def test_http_2_is_spoken_where_it_is_declared(protocol: str) -> None:
    """A backend that is declared so is greeted with the preface of HTTP/2."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = {"host": "127.0.0.1", "port": listener.getsockname()[1]}
        spec = cases.spec(
            [cases.http({"backend": "app", "timeout": "500ms"})],
            [{"name": "app", "endpoints": [endpoint], "protocol": protocol}],
        )
        with tempfile.TemporaryDirectory() as directory, EnvoyProcess(spec, Path(directory)) as proxy:
            client = threading.Thread(target=ask, args=(proxy, "http", "/"))
            client.start()
            listener.settimeout(10)
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(24) == b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            client.join()
