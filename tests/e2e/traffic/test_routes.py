"""Every feature of a route, by requests through a running Envoy. No Kubernetes is needed."""

import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.envoy.envoy_process import NEEDS_ENVOY, EnvoyProcess, eventually
from tests.e2e.traffic.servers import Answer, Reply, Request, Script, Server, ask, serving
from tests.unit.envoy import cases

pytestmark = [NEEDS_ENVOY, pytest.mark.traffic]

JsonObject = dict[str, Any]


@contextmanager
def proxying(routes: Sequence[Any], *servers: Server, **backend: JsonObject) -> Iterator[EnvoyProcess]:
    """A running Envoy with one listener called ``http``; ``backend`` has further fields of backends by name."""
    backends = [each.declared(**backend.get(each.name, {})) for each in servers]
    spec = cases.spec([cases.http(*map(dict, routes))], backends)
    with tempfile.TemporaryDirectory() as directory, EnvoyProcess(spec, Path(directory)) as proxy:
        yield proxy


def test_headers_methods_and_queries_select_the_route() -> None:
    """More specific first: path, then method, then more headers, then more query parameters, then the place."""
    matches: list[tuple[str, JsonObject]] = [
        ("place", {"pathPrefix": "/a"}),
        ("query", {"pathPrefix": "/a", "queryParams": [{"name": "v", "value": "2"}]}),
        ("present", {"pathPrefix": "/a", "queryParams": [{"name": "w"}]}),
        ("header", {"pathPrefix": "/a", "headers": [{"name": "x-canary", "value": "1"}]}),
        ("headers", {"pathPrefix": "/a", "headers": [{"name": "x-canary", "value": "1"}, {"name": "x-user"}]}),
        ("method", {"pathPrefix": "/a", "method": "POST"}),
        ("longer", {"pathPrefix": "/a/b"}),
        ("exact", {"pathExact": "/a/b"}),
        ("never", {"pathPrefix": "/a"}),
    ]
    requests: list[tuple[str, JsonObject]] = [
        ("place", {"path": "/a"}),
        ("place", {"path": "/a?v=20"}),
        ("query", {"path": "/a?u=1&v=2"}),
        ("present", {"path": "/a?w"}),
        ("place", {"path": "/a", "headers": [("x-canary", "11")]}),
        ("header", {"path": "/a?v=2", "headers": [("X-Canary", "1")]}),
        ("headers", {"path": "/a", "headers": [("x-canary", "1"), ("x-user", "")]}),
        ("method", {"path": "/a?v=2", "headers": [("x-canary", "1"), ("x-user", "a")], "method": "POST"}),
        ("longer", {"path": "/a/b/c", "method": "POST"}),
        ("exact", {"path": "/a/b", "method": "POST"}),
    ]
    routes = [{"match": match, "response": {"status": 200, "body": name}} for name, match in matches]
    with serving("app") as app, proxying(routes, app) as proxy:
        for expected, request in requests:
            assert ask(proxy, "http", **request).body == expected, request
        assert ask(proxy, "http", "/b").status == 404


@pytest.mark.parametrize(
    ("weights", "shares"), [((100, 0), (1.0, 0.0)), ((99, 1), (0.99, 0.01)), ((1, 3), (0.25, 0.75))]
)
def test_weights_share_the_requests(weights: tuple[int, int], shares: tuple[float, float]) -> None:
    """A weight of 0 takes nothing, and one of a hundred takes one of a hundred, within chance."""
    count = 2_000
    routes = [{"backends": [{"name": f"b{n}", "weight": weight} for n, weight in enumerate(weights)]}]
    with serving("b0") as first, serving("b1") as second, proxying(routes, first, second) as proxy:
        with ThreadPoolExecutor(4) as clients:
            statuses = set(clients.map(lambda _: ask(proxy, "http", "/").status, range(count)))
        assert statuses == {200}
        for server, share in zip((first, second), shares, strict=True):
            deviation = 5 * (count * share * (1 - share)) ** 0.5
            assert abs(len(server.requests) - count * share) <= deviation, server.name


def test_weights_move_without_a_lost_request() -> None:
    """From all to none, and back, while requests arrive: each is answered, and the one that has 0 gets none."""

    def shared(first: int, second: int) -> list[JsonObject]:
        return [{"backends": [{"name": "b0", "weight": first}, {"name": "b1", "weight": second}]}]

    with serving("b0") as old, serving("b1") as new, proxying(shared(1, 0), old, new) as proxy:
        is_over = threading.Event()

        def shares(names: set[str]) -> bool | None:
            """Whether the latest weights count; each of Envoy's threads takes them up by itself."""
            return True if {ask(proxy, "http", "/").body for _ in range(50)} == names else None

        def client() -> set[int]:
            found = set()
            while not is_over.is_set():
                found.add(ask(proxy, "http", "/").status)
            return found

        backends = [each.declared() for each in (old, new)]
        with ThreadPoolExecutor(2) as clients:
            running = [clients.submit(client) for _ in range(2)]
            try:
                for weights, names in (((1, 1), {"b0", "b1"}), ((0, 1), {"b1"}), ((10_000, 0), {"b0"})):
                    proxy.reload(cases.spec([cases.http(*shared(*weights))], backends))
                    eventually(partial(shares, names), f"weights of {weights}")
            finally:
                is_over.set()
            assert {status for each in running for status in each.result()} == {200}


def test_a_timeout_ends_a_response_and_none_is_the_default(app: Server) -> None:
    """A response that takes longer than ``timeout`` is 504; without a timeout it is waited for."""
    app.script = lambda _: Reply(delay_s=1.0)
    routes = [{"match": {"pathPrefix": "/fast"}, "backend": "app", "timeout": "200ms"}, {"backend": "app"}]
    with proxying(routes, app) as proxy:
        assert ask(proxy, "http", "/fast").status == 504
        assert ask(proxy, "http", "/").status == 200


def test_an_idle_timeout_ends_what_stands_still(app: Server) -> None:
    """A request for which nothing moves for ``idleTimeout`` is answered with 504 or 408."""
    app.script = lambda _: Reply(delay_s=2.0)
    with proxying([{"backend": "app", "idleTimeout": "200ms"}], app) as proxy:
        assert ask(proxy, "http", "/").status in (408, 504)


def failing(times: int, reply: Reply | None) -> Script:
    """A script that gives ``reply`` so many times, and then answers."""
    return lambda request: reply if request.number <= times else Reply(body=b"at last")


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "POST", "PATCH"])
@pytest.mark.parametrize("declared", [None, {"after": ["connection", "server-error"]}], ids=["default", "declared"])
def test_what_was_sent_is_sent_again_only_where_that_is_safe(
    app: Server, method: str, declared: JsonObject | None
) -> None:
    """A connection that ends without a response: methods that may be repeated are, POST and PATCH never."""
    repeated = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS") if declared else ("GET", "HEAD")
    tries = 2 if method in repeated else 1
    app.script = failing(1, None)
    route = {"backend": "app"} | ({"retries": declared} if declared else {})
    with proxying([route], app) as proxy:
        found = ask(proxy, "http", "/pay", method=method, body=b"1")
        assert len(app.requests) == tries
        assert found.status == (200 if tries == 2 else 503)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_refused_connection_is_tried_elsewhere(app: Server, method: str) -> None:
    """With retries, even a POST goes to another endpoint where the first refuses the connection: nothing was sent."""
    with serving("gone") as gone:
        port = gone.port
    endpoints = [{"host": "127.0.0.1", "port": port}, {"host": "127.0.0.1", "port": app.port}]
    with proxying([{"backend": "app", "retries": {"attempts": 5}}], app, app={"endpoints": endpoints}) as proxy:
        statuses = [ask(proxy, "http", "/", method=method, body=b"").status for _ in range(20)]
    assert statuses == [200] * 20
    assert len(app.requests) == 20


@pytest.mark.parametrize(
    ("retries", "reply", "failures", "status", "tries"),
    [
        ({"attempts": 3}, Reply(503), 3, 200, 4),
        ({"attempts": 2}, Reply(502), 9, 502, 3),
        ({"after": ["connection"]}, Reply(503), 1, 503, 1),
        ({"after": ["gateway-error"]}, Reply(500), 1, 500, 1),
        ({"after": ["server-error"]}, Reply(500), 1, 200, 2),
        ({"after": ["server-error"]}, Reply(404), 1, 404, 1),
        ({"attempts": 1, "perTryTimeout": "200ms"}, Reply(delay_s=2.0), 1, 200, 2),
    ],
    ids=str,
)
def test_retries_are_as_many_and_after_what_is_declared(
    app: Server, retries: JsonObject, reply: Reply, failures: int, status: int, tries: int
) -> None:
    """A GET is tried again after the declared failures only, at most so often; a POST is not tried again at all."""
    app.script = failing(failures, reply)
    with proxying([{"backend": "app", "retries": retries}], app) as proxy:
        assert ask(proxy, "http", "/").status == status
        assert len(app.requests) == tries
        app.requests.clear()
        ask(proxy, "http", "/", method="POST", body=b"1")
        assert len(app.requests) == 1


def test_a_backend_that_closes_idle_connections_costs_no_request(app: Server) -> None:
    """A backend that closes each connection after its response, without saying so: no GET fails."""
    app.script = lambda _: Reply(closes=True)
    with proxying([{"backend": "app"}], app) as proxy, ThreadPoolExecutor(4) as clients:
        statuses = list(clients.map(lambda _: ask(proxy, "http", "/").status, range(400)))
    assert set(statuses) == {200}


def test_clients_cannot_ask_for_retries(app: Server) -> None:
    """Headers by which Envoy can be told to retry or to wait are ignored and do not reach the backend."""
    app.script = lambda _: Reply(503)
    headers = [("x-envoy-retry-on", "5xx"), ("x-envoy-max-retries", "9"), ("x-envoy-upstream-rq-timeout-ms", "1")]
    with proxying([{"backend": "app"}], app) as proxy:
        assert ask(proxy, "http", "/", method="POST", headers=headers, body=b"").status == 503
    (request,) = app.requests
    assert not [name for name, _ in request.headers if name in dict(headers)]


@pytest.mark.parametrize(
    ("prefix", "rewrite", "path", "seen"),
    [
        ("/api", "/", "/api", "/"),
        ("/api", "/", "/api/", "/"),
        ("/api", "/", "/api/v1", "/v1"),
        ("/api/", "/", "/api/v1?q=/api", "/v1?q=/api"),
        ("/api", "/", "/api?q=1", "/?q=1"),
        ("/api", "/", "/api//v1", "/v1"),
        ("/api", "/v2", "/api", "/v2"),
        ("/api", "/v2", "/api/x", "/v2/x"),
        ("/api", "/v2/", "/api/x", "/v2/x"),
        ("/api", "/v2/", "/api", "/v2"),
        ("/api", "/v2", "/apiary", None),
        ("/api", "/", "/apiary", None),
        ("/", "/v2", "/x", "/v2/x"),
        ("/", "/v2/", "/", "/v2/"),
        ("/", "/", "/x", "/x"),
    ],
)
def test_a_prefix_is_rewritten_without_a_double_slash(
    app: Server, prefix: str, rewrite: str, path: str, seen: str | None
) -> None:
    """The backend sees the new prefix in place of the old one, whole segments only, and never ``//``."""
    routes = [{"match": {"pathPrefix": prefix}, "backend": "app", "prefixRewrite": rewrite}]
    with proxying(routes, app) as proxy:
        assert ask(proxy, "http", path).status == (404 if seen is None else 200)
    assert [each.path for each in app.requests] == ([] if seen is None else [seen])


def test_the_host_is_rewritten(app: Server) -> None:
    """The backend sees the declared host, else the requested one."""
    routes = [{"match": {"pathPrefix": "/a"}, "backend": "app", "hostRewrite": "app.internal"}, {"backend": "app"}]
    with proxying(routes, app) as proxy:
        ask(proxy, "http", "/a", host="shop.example.com")
        ask(proxy, "http", "/", host="shop.example.com")
    assert [each.values("host") for each in app.requests] == [["app.internal"], ["shop.example.com"]]


@pytest.mark.parametrize(
    ("redirect", "status", "location"),
    [
        ({"scheme": "https"}, 302, "https://shop.test/old/x?q=1"),
        ({"host": "www.test"}, 302, "http://www.test/old/x?q=1"),
        ({"scheme": "https", "port": 8443, "status": 308}, 308, "https://shop.test:8443/old/x?q=1"),
        ({"path": "/new", "status": 301}, 301, "http://shop.test/new?q=1"),
        ({"prefix": "/new", "status": 303}, 303, "http://shop.test/new/x?q=1"),
        ({"prefix": "/", "status": 307}, 307, "http://shop.test/x?q=1"),
    ],
    ids=str,
)
def test_a_redirect_changes_what_is_declared(app: Server, redirect: JsonObject, status: int, location: str) -> None:
    """Status and location are as declared, what is left out is as requested, and no backend is asked."""
    with proxying([{"match": {"pathPrefix": "/old"}, "redirect": redirect}], app) as proxy:
        found = ask(proxy, "http", "/old/x?q=1", host="shop.test")
    assert (found.status, found.value("location")) == (status, location)
    assert app.requests == []


def test_a_redirect_never_leads_to_another_site(app: Server) -> None:
    """Whatever slashes a client sends, the location names the requested host, and its path has no double slash."""
    routes = [
        {"match": {"pathPrefix": "/old"}, "redirect": {"prefix": "/"}},
        {"match": {"pathPrefix": "/older"}, "redirect": {"prefix": "/new"}},
    ]
    paths = [f"/{name}{rest}" for name in ("old", "older") for rest in ("", "/", "//evil.test", "///e/x", "?q=//e")]
    with proxying(routes, app) as proxy:
        for path in paths:
            location = urlsplit(str(ask(proxy, "http", path, host="shop.test").value("location")))
            assert (location.scheme, location.netloc) == ("http", "shop.test"), path
            assert location.path.startswith("/new" if "older" in path else "/"), path
            assert "//" not in location.path, path


def test_a_fixed_response_is_sent_as_it_is_written(app: Server) -> None:
    """Status, text and type are as declared; nothing in the text is replaced."""
    text = "%REQ(:path)% {down} \u00e9 $(HOME) %%"
    routes = [
        {"match": {"pathExact": "/x"}, "response": {"status": 503, "body": text, "contentType": "text/html"}},
        {"match": {"pathExact": "/full"}, "response": {"status": 200, "body": "\u20ac" * 1024}},
        {"response": {"status": 404}},
    ]
    with proxying(routes, app) as proxy:
        found = ask(proxy, "http", "/x")
        assert (found.status, found.body, found.value("content-type")) == (503, text, "text/html")
        assert ask(proxy, "http", "/full").body == "\u20ac" * 1024
        assert (ask(proxy, "http", "/").status, ask(proxy, "http", "/").body) == (404, "")


def test_headers_are_set_added_and_removed_as_they_are_written(app: Server) -> None:
    """Set replaces, add keeps what is there, remove removes; percent signs and braces are plain text."""
    app.script = lambda _: Reply(headers=[("server-secret", "1"), ("x-old", "1"), ("x-both", "1")])
    changes = {
        "set": [{"name": "x-old", "value": "%REQ(authorization)% 100% {}"}],
        "add": [{"name": "x-both", "value": "2"}],
    }
    route = {
        "backend": "app",
        "requestHeaders": changes | {"remove": ["x-debug"]},
        "responseHeaders": changes | {"remove": ["server-secret"]},
    }
    with proxying([route], app) as proxy:
        sent = [("x-old", "1"), ("x-both", "1"), ("x-debug", "1"), ("authorization", "secret")]
        found = ask(proxy, "http", "/", headers=sent)
    (request,) = app.requests
    assert request.values("x-old") == ["%REQ(authorization)% 100% {}"]
    assert ",".join(request.values("x-both")) == "1,2"
    assert request.values("x-debug") == []
    assert [value for name, value in found.headers if name == "x-old"] == ["%REQ(authorization)% 100% {}"]
    assert [value for name, value in found.headers if name == "x-both"] == ["1", "2"]
    assert found.value("server-secret") is None


def test_a_mirror_gets_copies_and_delays_nothing(app: Server) -> None:
    """The second backend gets the request with its body, and a response that it never gives is not waited for."""
    routes = [{"backend": "app", "mirror": {"backend": "copy"}}]
    with serving("copy", lambda _: Reply(500, delay_s=5.0)) as copy, proxying(routes, app, copy) as proxy:
        found = ask(proxy, "http", "/x", method="POST", body=b"data", host="shop.test")
        assert (found.status, found.body) == (200, "app")
        mirrored: Request = eventually(lambda: next(iter(copy.requests), None), "the copy")
        assert (mirrored.method, mirrored.path, mirrored.body) == ("POST", "/x", b"data")
        assert mirrored.values("host") == ["shop.test"]


def test_a_rate_limit_lets_so_many_pass_and_is_each_routes_own(app: Server) -> None:
    """Of many requests at once as many pass as declared; the others get 429, and other routes are not affected."""
    routes = [
        {"match": {"pathPrefix": "/a"}, "backend": "app", "rateLimit": {"requests": 5, "per": "hour"}},
        {"match": {"pathPrefix": "/b"}, "backend": "app", "rateLimit": {"requests": 1, "per": "hour", "burst": 3}},
        {"backend": "app"},
    ]
    with proxying(routes, app) as proxy:
        for path, passing in (("/a", 5), ("/b", 3), ("/c", 9)):
            statuses = [ask(proxy, "http", path).status for _ in range(9)]
            assert statuses == [200] * passing + [429] * (9 - passing), path


def preflight(proxy: EnvoyProcess, path: str, origin: str, method: str = "POST") -> Answer:
    """The answer to a preflight request of a browser."""
    headers = [("origin", origin), ("access-control-request-method", method)]
    return ask(proxy, "http", path, method="OPTIONS", headers=headers)


def test_cors_is_granted_to_the_named_origins_alone(app: Server) -> None:
    """A preflight is answered by the proxy, also where the route is for one method; others get no grant."""
    cors = {
        "origins": ["https://shop.test"],
        "methods": ["POST"],
        "headers": ["x-token"],
        "exposeHeaders": ["x-total"],
        "maxAge": "10m",
        "credentials": True,
    }
    routes = [
        {"match": {"pathPrefix": "/api", "method": "POST"}, "backend": "app", "cors": cors},
        {"match": {"pathPrefix": "/open"}, "backend": "app", "cors": {"origins": ["*"]}},
        {"match": {"pathPrefix": "/none"}, "backend": "app"},
    ]
    with proxying(routes, app) as proxy:
        granted = preflight(proxy, "/api/x", "https://shop.test")
        assert granted.status == 200
        assert {name: value for name, value in granted.headers if name.startswith("access-control")} == {
            "access-control-allow-origin": "https://shop.test",
            "access-control-allow-credentials": "true",
            "access-control-allow-methods": "POST",
            "access-control-allow-headers": "x-token",
            "access-control-expose-headers": "x-total",
            "access-control-max-age": "600",
        }
        for origin in ("https://evil.test", "https://shop.test.evil.test", "http://shop.test", "null"):
            assert preflight(proxy, "/api/x", origin).value("access-control-allow-origin") is None, origin
        assert preflight(proxy, "/open", "https://evil.test").value("access-control-allow-origin") is not None
        assert app.requests == [], "no preflight reaches the backend"
        posted = ask(proxy, "http", "/api/x", method="POST", headers=[("origin", "https://shop.test")], body=b"")
        assert (posted.status, posted.body) == (200, "app")
        assert posted.value("access-control-allow-origin") == "https://shop.test"
        assert posted.value("access-control-expose-headers") == "x-total"
        plain = ask(proxy, "http", "/none", headers=[("origin", "https://shop.test")])
        assert plain.value("access-control-allow-origin") is None


def test_clients_are_allowed_and_denied_by_their_address(app: Server) -> None:
    """Only allowed addresses that are not denied pass; an address in a header counts for nothing."""
    routes = [
        {
            "match": {"pathPrefix": "/a"},
            "backend": "app",
            "access": {"allow": ["127.0.0.0/29"], "deny": ["127.0.0.2/32"]},
        },
        {"match": {"pathPrefix": "/d"}, "backend": "app", "access": {"deny": ["127.0.0.2/32"]}},
        {"backend": "app"},
    ]
    spoofed = [("x-forwarded-for", "127.0.0.1"), ("x-real-ip", "127.0.0.1"), ("forwarded", "for=127.0.0.1")]
    with proxying(routes, app) as proxy:
        for path, source, status in (
            ("/a", "127.0.0.1", 200),
            ("/a", "127.0.0.2", 403),
            ("/a", "127.0.0.9", 403),
            ("/d", "127.0.0.2", 403),
            ("/d", "127.0.0.9", 200),
            ("/", "127.0.0.2", 200),
        ):
            assert ask(proxy, "http", path, source=source, headers=spoofed).status == status, (path, source)


def test_a_route_edit_keeps_connections_and_changes_what_it_says(app: Server) -> None:
    """A filter that a route begins to use is used on connections that are open, without a new listener."""
    with proxying([{"backend": "app"}], app) as proxy:
        before = proxy.files.texts
        limited = [{"backend": "app", "rateLimit": {"requests": 1, "per": "hour"}, "access": {"deny": ["10.0.0.0/8"]}}]
        spec = cases.spec([cases.http(*limited)], [app.declared()])
        proxy.reload(spec)
        eventually(proxy.has_loaded, "the new routes")
        changed = {name for name in before if before[name] != proxy.files.texts.get(name)}
        assert changed == {"rds-http.json"}
        assert [ask(proxy, "http", "/").status for _ in range(3)] == [200, 429, 429]


def test_a_websocket_outlives_the_timeout_of_its_route(app: Server) -> None:
    """An upgraded connection is not cut when ``timeout`` has passed."""
    upgraded = threading.Event()

    def script(_: Request) -> Reply:
        upgraded.set()
        return Reply(101, headers=[("upgrade", "websocket"), ("connection", "Upgrade")])

    app.script = script
    with proxying([{"backend": "app", "timeout": "500ms"}], app) as proxy, ExitStack() as stack:
        client = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port("http")), 10))
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n")
        assert b" 101 " in client.recv(4096)
        assert upgraded.wait(10)
        client.settimeout(1.5)
        with pytest.raises(TimeoutError):
            client.recv(1)
