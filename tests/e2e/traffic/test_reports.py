"""What people have reported of proxies like this one, each tried against this one. No Kubernetes is needed."""

import contextlib
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from operator_app.envoy.messages import BUFFER_BYTES
from tests.e2e.envoy.envoy_process import DEADLINE_S, NEEDS_ENVOY, EnvoyProcess, eventually
from tests.e2e.traffic.servers import Reply, Request, Server, ask, raw, serving
from tests.unit.envoy import cases

pytestmark = [NEEDS_ENVOY, pytest.mark.traffic]

JsonObject = dict[str, Any]

ORIGIN: Final = [("origin", "https://shop.test")]


@contextmanager
def proxying(routes: Sequence[Any], *backends: JsonObject, **listener: Any) -> Iterator[EnvoyProcess]:
    """A running Envoy with one listener called ``http``."""
    spec = cases.spec([cases.http(*routes) | listener], list(backends))
    with tempfile.TemporaryDirectory() as directory, EnvoyProcess(spec, Path(directory)) as proxy:
        yield proxy


def closed_port() -> int:
    """A port of loopback where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


# --- routes ----------------------------------------------------------------------------------------------------------


def test_one_route_has_one_rate_however_it_is_rendered(app: Server) -> None:
    """A route that needs several of Envoy's, or serves several hosts, lets no more pass than a plain one."""
    limit: JsonObject = {"backend": "app", "rateLimit": {"requests": 4, "per": "hour"}}
    routes = [
        limit | {"match": {"pathPrefix": "/rewritten"}, "prefixRewrite": "/"},
        limit | {"match": {"pathPrefix": "/retried"}, "retries": {}},
        limit | {"match": {"pathPrefix": "/granted", "method": "POST"}, "cors": {"origins": ["https://shop.test"]}},
        limit | {"match": {"pathPrefix": "/hosts", "hosts": ["a.test", "*.b.test"]}},
        {"match": {"pathPrefix": "/own", "hosts": ["a.test"]}, "backend": "app"},
        limit | {"match": {"pathPrefix": "/any"}},
        {"match": {"pathPrefix": "/text"}, "response": {"status": 200}, "rateLimit": limit["rateLimit"]},
    ]
    requests: dict[str, list[JsonObject]] = {
        "rewritten": [{"path": "/rewritten"}, {"path": "/rewritten/x"}],
        "retried": [{"path": "/retried"}, {"path": "/retried", "method": "POST", "body": b""}],
        "granted": [{"path": "/granted", "method": "POST", "body": b""}],
        "hosts": [{"path": "/hosts", "host": "a.test"}, {"path": "/hosts", "host": "x.b.test"}],
        "text": [{"path": "/text"}],
        "any": [{"path": "/any", "host": "a.test"}, {"path": "/any", "host": "other.test"}],
    }
    with proxying(routes, app.declared()) as proxy:
        passed = {
            name: sum(ask(proxy, "http", **each).status == 200 for each in found for _ in range(6))
            for name, found in requests.items()
        }
        assert passed == dict.fromkeys(requests, 4)
        assert {ask(proxy, "http", "/own", host="a.test").status for _ in range(9)} == {200}, "and others have none"


def test_an_escaped_path_leads_to_no_other_site(app: Server) -> None:
    """Whatever slashes, dots and backslashes are escaped: a redirect names the requested host, and one slash."""
    paths = ["/%2Fevil.test", "/%2f%2fevil.test/x", "/%5Cevil.test", "/%5c%5cevil.test", "/a/..%2F..%2F%2Fevil.test"]
    with proxying([{"backend": "app"}], app.declared()) as proxy:
        for path in [*paths, "//evil.test", "/.//evil.test", "/a/..//evil.test"]:
            found = ask(proxy, "http", path, host="shop.test")
            if found.status == 307:
                location = urlsplit(str(found.value("location")))
                assert location.netloc in ("", "shop.test"), path
                assert not location.path.startswith(("//", "/\\")), path
            else:
                assert found.status in (200, 400), path
    assert not [each.path for each in app.requests if each.path.startswith(("//", "/\\"))]


def test_no_spelling_of_a_path_passes_a_denied_one(app: Server) -> None:
    """A path is compared as the backend gets it: what is denied below /admin is denied in any spelling of it."""
    denied = {"match": {"pathPrefix": "/admin"}, "backend": "app", "access": {"allow": ["192.0.2.0/24"]}}
    spellings = [
        "/admin",
        "/admin/",
        "//admin",
        "/./admin",
        "/x/../admin",
        "/%61dmin",
        "/x/%2e%2e/admin",
        "/x/%2e%2e%2fadmin",
        "/%2fadmin",
        "/x%2f..%2fadmin",
        "/admin%2fx",
        "/admin%5cx",
        "/admin?x=/",
        "/admin#x",
        "/;/../admin",
    ]
    with proxying([denied, {"backend": "app"}], app.declared()) as proxy:
        for path in spellings:
            with socket.create_connection(("127.0.0.1", proxy.port("http")), DEADLINE_S) as client:
                client.sendall(f"GET {path} HTTP/1.1\r\nhost: shop.test\r\n\r\n".encode())
                status = client.recv(4096).split(b" ", 2)[1]
            assert status in (b"403", b"307", b"400"), path
    assert [each.path for each in app.requests if "admin" in each.path] == []


def test_a_host_is_the_same_in_any_spelling(app: Server) -> None:
    """Letters, port, trailing dot and the absolute form of a request line select the routes of the host they name."""
    routes = [
        {"match": {"hosts": ["shop.test"]}, "response": {"status": 200, "body": "shop"}},
        {"response": {"status": 200, "body": "other"}},
    ]
    with proxying(routes, app.declared()) as proxy:
        for host in ("shop.test", "SHOP.test", "shop.test:8080", "shop.test.", "Shop.Test.:443"):
            assert ask(proxy, "http", "/", host=host).body == "shop", host
        for host in ("xshop.test", "shop.test.evil", "shop.tes", "a.shop.test"):
            assert ask(proxy, "http", "/", host=host).body == "other", host
        absolute = b"GET http://shop.test/ HTTP/1.1\r\nhost: other.test\r\nconnection: close\r\n\r\n"
        assert raw(proxy.port("http"), absolute).endswith(b"shop")
        twice = b"GET / HTTP/1.1\r\nhost: shop.test\r\nhost: other.test\r\nconnection: close\r\n\r\n"
        assert raw(proxy.port("http"), twice).endswith(b"other"), "two hosts are none of them"


@pytest.mark.parametrize("host", ["shop.test", "shop.test:80", "shop.test:8080", "shop.test:443"])
def test_a_redirect_to_https_leaves_the_port_of_http_behind(app: Server, host: str) -> None:
    """By ``httpsRedirect`` and by a route: the location has no port, since that of the request is not one of HTTPS."""
    routes = [{"match": {"pathPrefix": "/r"}, "redirect": {"scheme": "https"}}, {"backend": "app"}]
    with proxying(routes, app.declared()) as proxy:
        assert ask(proxy, "http", "/r", host=host).value("location") == "https://shop.test/r"
    with proxying([{"backend": "app"}], app.declared(), httpsRedirect=True) as proxy:
        assert ask(proxy, "http", "/r", host=host).value("location") == "https://shop.test/r"


def test_a_redirect_names_what_the_client_asked_for(app: Server) -> None:
    """Behind a balancer that ends TLS the scheme stays https, and a header of the client's names no other host."""
    routes = [{"match": {"pathPrefix": "/old"}, "redirect": {"prefix": "/new"}}, {"backend": "app"}]
    lies = [("x-forwarded-host", "evil.test"), ("x-original-host", "evil.test"), ("forwarded", "host=evil.test")]
    encrypted = [("x-forwarded-proto", "https"), ("x-forwarded-for", "192.0.2.1")]
    with proxying(routes, app.declared(), trustedHops=1) as proxy:
        found = ask(proxy, "http", "/old/x", host="shop.test", headers=[*encrypted, *lies])
        assert found.value("location") == "https://shop.test/new/x"
    with proxying(routes, app.declared(), httpsRedirect=True) as proxy:
        found = ask(proxy, "http", "/x", host="shop.test", headers=[*encrypted, *lies])
        assert (found.status, found.value("location")) == (301, "https://shop.test/x")


def test_scripts_can_read_what_the_proxy_answers_itself(app: Server) -> None:
    """Refusals of the proxy carry the grant of CORS too; a grant of the backend is replaced and never beside ours."""
    app.script = lambda _: Reply(headers=[("access-control-allow-origin", "*"), ("access-control-allow-origin", "x")])
    cors = {"cors": {"origins": ["https://shop.test"], "credentials": True}}
    dead = {"name": "dead", "endpoints": [{"host": "127.0.0.1", "port": closed_port()}]}
    routes = [
        cors | {"match": {"pathPrefix": "/429"}, "backend": "app", "rateLimit": {"requests": 1, "per": "hour"}},
        cors | {"match": {"pathPrefix": "/403"}, "backend": "app", "access": {"deny": ["127.0.0.0/8"]}},
        cors | {"match": {"pathPrefix": "/503"}, "backend": "dead"},
        cors | {"backend": "app"},
    ]
    with proxying(routes, app.declared(), dead) as proxy:
        ask(proxy, "http", "/429")
        for path, status in (("/429", 429), ("/403", 403), ("/503", 503), ("/", 200)):
            found = ask(proxy, "http", path, headers=ORIGIN)
            granted = [value for name, value in found.headers if name.lower() == "access-control-allow-origin"]
            assert (found.status, granted) == (status, ["https://shop.test"]), path


def test_a_preflight_costs_nothing_of_the_rate(app: Server) -> None:
    """Browsers ask before each call; what they may ask is not taken from what they may do."""
    route = {"backend": "app", "cors": {"origins": ["https://shop.test"]}, "rateLimit": {"requests": 2, "per": "hour"}}
    asked = [*ORIGIN, ("access-control-request-method", "GET")]
    with proxying([route], app.declared()) as proxy:
        assert {ask(proxy, "http", "/", method="OPTIONS", headers=asked).status for _ in range(9)} == {200}
        assert [ask(proxy, "http", "/").status for _ in range(3)] == [200, 200, 429]


def test_a_mirror_is_never_felt(app: Server) -> None:
    """Not if it is down, and not if a body is too large to be copied; it gets the host and the headers of the other."""
    dead = {"name": "dead", "endpoints": [{"host": "127.0.0.1", "port": closed_port()}]}
    changed = {"hostRewrite": "app.internal", "requestHeaders": {"set": [{"name": "x-a", "value": "1"}]}}
    routes = [
        {"match": {"pathPrefix": "/dead"}, "backend": "app", "mirror": {"backend": "dead"}},
        {"match": {"pathPrefix": "/half"}, "backend": "app", "mirror": {"backend": "copy", "percent": 50}},
        {"match": {"pathPrefix": "/big"}, "backend": "app", "mirror": {"backend": "copy"}, "retries": {}},
        {"match": {"pathPrefix": "/same"}, "backend": "app", "mirror": {"backend": "copy"}} | changed,
    ]
    big = b"x" * (4 * BUFFER_BYTES)
    with serving("copy") as copy, proxying(routes, app.declared(), dead, copy.declared()) as proxy:
        assert {ask(proxy, "http", "/dead").status for _ in range(20)} == {200}
        for _ in range(5):
            assert ask(proxy, "http", "/big", method="POST", body=big).status == 200
        assert [each.body == big for each in app.requests if each.path == "/big"] == [True] * 5

        assert ask(proxy, "http", "/same", host="shop.test").status == 200
        mirrored: Request = eventually(lambda: next((e for e in copy.requests if e.path == "/same"), None), "the copy")
        (served,) = (each for each in app.requests if each.path == "/same")
        for name in ("host", "x-a"):
            assert mirrored.values(name) == served.values(name), name

        count = 400
        assert {ask(proxy, "http", "/half").status for _ in range(count)} == {200}
        eventually(lambda: True if sum(e.path == "/half" for e in copy.requests) > 100 else None, "half of the copies")
        assert sum(each.path == "/half" for each in copy.requests) < 300


def test_a_timeout_is_for_all_tries_together(app: Server) -> None:
    """However many retries are left: the client waits no longer than ``timeout``."""
    app.script = lambda _: Reply(delay_s=5.0)
    route = {"backend": "app", "timeout": "1s", "retries": {"attempts": 5, "perTryTimeout": "400ms"}}
    with proxying([route], app.declared()) as proxy:
        begin_mono = time.monotonic()
        assert ask(proxy, "http", "/").status == 504
        assert time.monotonic() - begin_mono < 4
    assert 2 <= len(app.requests) <= 3


def test_retries_do_not_multiply_the_load_of_a_failing_backend(app: Server) -> None:
    """All clients at once, all failing, and each could be tried five times more: the budget lets few be."""
    clients = 60
    app.script = lambda _: Reply(503, delay_s=0.3)
    with proxying([{"backend": "app", "retries": {"attempts": 5}}], app.declared()) as proxy:
        with ThreadPoolExecutor(clients) as pool:
            statuses = set(pool.map(lambda _: ask(proxy, "http", "/").status, range(clients)))
        assert statuses == {503}
    assert clients < len(app.requests) < 3 * clients


def test_bodies_arrive_whole_however_they_are_sent(app: Server) -> None:
    """With a length above every buffer, and after an ``Expect: 100-continue``, on routes with retries too."""
    app.script = lambda request: Reply(body=str(len(request.body)).encode())
    size = 4 * BUFFER_BYTES
    for route in ({"backend": "app"}, {"backend": "app", "retries": {"after": ["server-error"]}}):
        with proxying([route], app.declared()) as proxy:
            assert ask(proxy, "http", "/", method="PUT", body=b"x" * size).body == str(size)
            head = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
            expecting = head + b"expect: 100-continue\r\ncontent-length: 5\r\n\r\nhello"
            found = raw(proxy.port("http"), expecting)
            assert found.startswith(b"HTTP/1.1 100 ")
            assert found.endswith(b"\r\n\r\n5")


def test_a_fixed_response_is_one_for_head_and_without_a_body_too(app: Server) -> None:
    """HEAD gets the headers alone; a status that has no body has none, whatever is declared."""
    routes = [
        {"match": {"pathExact": "/text"}, "response": {"status": 200, "body": "text"}},
        {"match": {"pathExact": "/204"}, "response": {"status": 204}},
    ]
    with proxying(routes, app.declared()) as proxy:
        connection = HTTPConnection("127.0.0.1", proxy.port("http"), timeout=DEADLINE_S)
        with contextlib.closing(connection):
            # On one connection: what came too much for one would be the beginning of the next.
            for method, path, status in [("HEAD", "/text", 200), ("GET", "/204", 204), ("HEAD", "/204", 204)] * 2:
                connection.request(method, path)
                found = connection.getresponse()
                assert (found.status, found.read()) == (status, b""), (method, path)


def test_headers_of_one_name_stay_many(app: Server) -> None:
    """Two cookies of a response stay two, with headers set beside them."""
    app.script = lambda _: Reply(headers=[("set-cookie", "a=1, x"), ("set-cookie", "b=2")])
    route = {"backend": "app", "responseHeaders": {"set": [{"name": "x-a", "value": "1"}], "remove": ["server"]}}
    with proxying([route], app.declared()) as proxy:
        found = ask(proxy, "http", "/")
    assert [value for name, value in found.headers if name.lower() == "set-cookie"] == ["a=1, x", "b=2"]


def test_a_websocket_passes_every_feature_of_its_route(app: Server) -> None:
    """An upgrade through retries, a mirror, CORS, a rate, an access list and changed headers, and bytes both ways."""
    app.script = lambda _: Reply(101, headers=[("upgrade", "websocket"), ("connection", "Upgrade")])
    route = {
        "backend": "app",
        "match": {"pathPrefix": "/ws"},
        "prefixRewrite": "/",
        "retries": {},
        "timeout": "1s",
        "mirror": {"backend": "copy"},
        "cors": {"origins": ["https://shop.test"]},
        "rateLimit": {"requests": 9},
        "access": {"allow": ["127.0.0.0/8"]},
        "requestHeaders": {"set": [{"name": "x-a", "value": "1"}]},
    }
    with (
        serving("copy") as copy,
        proxying([route], app.declared(), copy.declared()) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port("http")), 10) as client,
    ):
        lines = [
            "GET /ws HTTP/1.1",
            "host: a",
            "connection: Upgrade",
            "upgrade: websocket",
            "origin: https://shop.test",
        ]
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        assert b" 101 " in client.recv(4096)
        # What follows is read by the backend as another request, so its arrival there shows bytes of the client.
        client.sendall(b"GET /frame HTTP/1.1\r\nhost: a\r\n\r\n")
        eventually(lambda: True if [e.path for e in app.requests][-1:] == ["/frame"] else None, "the client's bytes")
        assert b"HTTP/1.1 101" in client.recv(4096)


# --- listeners -------------------------------------------------------------------------------------------------------


def test_the_binary_proxy_protocol_and_its_probes_are_understood(app: Server) -> None:
    """Version 2 tells the client as version 1 does; a balancer's own probe (LOCAL) is served as its own address."""
    route = {"backend": "app", "access": {"allow": ["203.0.113.7/32", "127.0.0.1/32"]}}
    request = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    signature = b"\r\n\r\n\x00\r\nQUIT\n"

    def told(client: str) -> bytes:
        addresses = socket.inet_aton(client) + socket.inet_aton("10.0.0.1") + b"\x00\x01\x00\x02"
        return signature + b"\x21\x11\x00\x0c" + addresses

    with proxying([route], app.declared(), proxyProtocol=True) as proxy:
        port = proxy.port("http")
        assert raw(port, told("203.0.113.7") + request).startswith(b"HTTP/1.1 200")
        assert raw(port, told("203.0.113.8") + request).startswith(b"HTTP/1.1 403")
        assert raw(port, signature + b"\x20\x00\x00\x00" + request).startswith(b"HTTP/1.1 200")


def test_what_is_no_address_gives_no_access(app: Server) -> None:
    """A header of a trusted proxy that names no client makes nobody an allowed one."""
    route = {"backend": "app", "access": {"allow": ["203.0.113.0/24"]}}
    with proxying([route], app.declared(), trustedHops=1) as proxy:
        for value in ("", "unknown", "203.0.113.7:80x", "203.0.113", "203.0.113.7,", "203.0.113.7, x", ","):
            assert ask(proxy, "http", "/", headers=[("x-forwarded-for", value)]).status == 403, value
        assert ask(proxy, "http", "/").status == 403


# --- backends --------------------------------------------------------------------------------------------------------


def of(name: str, *servers: Server, **fields: Any) -> JsonObject:
    """A backend whose endpoints are ``servers``."""
    return {"name": name, "endpoints": [{"host": "127.0.0.1", "port": each.port} for each in servers]} | fields


@pytest.fixture
def apps() -> Iterator[list[Server]]:
    """Three backends."""
    with serving("app0") as first, serving("app1") as second, serving("app2") as third:
        yield [first, second, third]


def test_the_one_endpoint_that_is_well_gets_all(apps: list[Server]) -> None:
    """However many endpoints fail their check: none of them is asked while another one passes, and all if none does."""
    is_over = threading.Event()
    for each in apps[:2]:
        each.script = lambda request: Reply(500 if request.path == "/healthz" else 200, body=b"ill")
    apps[2].script = lambda request: Reply(
        500 if is_over.is_set() and request.path == "/healthz" else 200, body=b"well"
    )
    check = {"path": "/healthz", "interval": "100ms", "timeout": "100ms", "failures": 1}
    with proxying([{"backend": "app"}], of("app", *apps, healthCheck=check)) as proxy:

        def answers() -> set[str]:
            return {ask(proxy, "http", "/").body for _ in range(20)}

        eventually(lambda: True if answers() == {"well"} else None, "the others to be left out")
        is_over.set()
        eventually(lambda: True if answers() == {"well", "ill"} else None, "all to be asked")


def test_as_many_are_left_out_as_may_be(apps: list[Server]) -> None:
    """Two of three that fail are left out where so many may be: all requests are served by the third."""
    for each in apps[:2]:
        each.script = lambda _: Reply(500)
    declared = {"consecutiveErrors": 1, "ejectionTime": "60s", "maxEjectedPercent": 70}
    with proxying([{"backend": "app"}], of("app", *apps, outlierDetection=declared)) as proxy:
        eventually(
            lambda: True if {ask(proxy, "http", "/").status for _ in range(20)} == {200} else None, "two to be left out"
        )


def test_a_check_asks_for_the_host_of_its_backend(app: Server) -> None:
    """Many backends answer 404 to a host that they do not know."""
    check = {"path": "/healthz", "interval": "100ms", "timeout": "100ms"}
    endpoint = {"host": "localhost", "port": app.port}
    backend = {"name": "app", "endpoints": [endpoint], "healthCheck": check}
    with proxying([{"backend": "app"}], backend):
        probe: Request = eventually(lambda: next(iter(app.requests), None), "a check")
    assert (probe.path, probe.values("host")) == ("/healthz", ["localhost"])


def test_a_name_that_does_not_exist_delays_no_other_backend(app: Server) -> None:
    """The proxy starts and serves the others; requests for the unknown one get 503 at once."""
    unknown = {"name": "unknown", "endpoints": [{"host": "does-not-exist.invalid", "port": 80}]}
    routes = [{"match": {"pathPrefix": "/unknown"}, "backend": "unknown"}, {"backend": "app"}]
    with proxying(routes, unknown, app.declared()) as proxy:
        assert ask(proxy, "http", "/").status == 200
        assert ask(proxy, "http", "/unknown").status == 503


def test_an_endpoint_that_goes_moves_no_client_of_the_others(apps: list[Server]) -> None:
    """With sticky sessions, nearly all clients of endpoints that stay are where they were after another one went."""
    users = [[("x-user", f"user-{number}")] for number in range(60)]
    sticky = {"loadBalancing": {"policy": "Hash", "header": "x-user"}}
    with proxying([{"backend": "app"}], of("app", *apps, **sticky)) as proxy:
        before = [ask(proxy, "http", "/", headers=user).body for user in users]
        proxy.reload(cases.spec([cases.http({"backend": "app"})], [of("app", *apps[:2], **sticky)]))
        eventually(proxy.has_loaded, "the two endpoints")
        after = eventually(
            lambda: (
                found
                if "app2" not in (found := [ask(proxy, "http", "/", headers=user).body for user in users])
                else None
            ),
            "the third to be asked no more",
        )
    stayed = Counter(is_there == was for was, is_there in zip(before, after, strict=True) if was != "app2")
    assert stayed[False] <= stayed[True] // 4


def test_a_sticky_cookie_holds_for_the_whole_site(apps: list[Server]) -> None:
    """A session that begins below a path goes on elsewhere: the cookie's path is /, and scripts can't read it."""
    backend = of("app", *apps, loadBalancing={"policy": "Hash", "cookie": "session"})
    with proxying([{"match": {"pathPrefix": "/deep"}, "backend": "app"}], backend) as proxy:
        attributes = {
            each.strip().lower() for each in str(ask(proxy, "http", "/deep/x").value("set-cookie")).split(";")
        }
    assert {"path=/", "max-age=3600", "httponly"} <= attributes
