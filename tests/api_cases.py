"""Values that the API accepts and refuses: an accepted value and its nearest refused ones for each rule of ``api``.

The unit tests check every case with the models, the e2e tests with a real API server, so that both stay equal.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from operator_app.api.kinds import ENVOY_PROXY, Object

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Case:
    """A field of the object, a value that it accepts, values that it refuses, and a part of the error message."""

    at: Path
    accepted: Any
    refused: Sequence[Any]
    advice: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.at))}: {self.advice[:40]}"


def proxy(name: str = "checkout", namespace: str = "team-a") -> Object:
    """An EnvoyProxy with every field except ``targetPort`` and ``pathExact``."""
    return {
        "apiVersion": ENVOY_PROXY.api_version,
        "kind": ENVOY_PROXY.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": 2,
            "image": "envoyproxy/envoy:v1.40.0",
            "listeners": [
                {
                    "name": "http",
                    "port": 80,
                    "protocol": "HTTP",
                    "routes": [{"match": {"hosts": ["shop.example.com"], "pathPrefix": "/api"}, "backend": "app"}],
                },
                {"name": "db", "port": 5432, "protocol": "TCP", "routes": [{"backend": "db"}]},
            ],
            "backends": [
                {"name": "app", "endpoints": [{"host": "app.team-a.svc", "port": 8080}], "connectTimeout": "250ms"},
                {"name": "db", "endpoints": [{"host": "10.0.0.7", "port": 5432, "weight": 2}]},
            ],
            "service": {"type": "ClusterIP", "annotations": {"example.com/owner": "team-a"}},
            "resources": {"requests": {"cpu": "100m"}, "limits": {"cpu": "1", "memory": "256Mi"}},
            "registration": {"hostname": "shop.example.com", "ttl": 300, "registry": "in-cluster"},
            "deletionPolicy": "Delete",
            "paused": False,
        },
    }


def edited(obj: Object, at: Path, value: Any) -> Object:  # noqa: ANN401  # any JSON value
    """A copy of ``obj`` in which the field at ``at`` is ``value``."""
    obj = deepcopy(obj)
    *parents, last = at
    holder: Any = obj
    for step in parents:
        holder = holder[step]
    holder[last] = value
    return obj


LISTENER: Final[Path] = ("spec", "listeners", 0)
TCP_LISTENER: Final[Path] = ("spec", "listeners", 1)
MATCH: Final[Path] = (*LISTENER, "routes", 0, "match")
HOST: Final[Path] = (*MATCH, "hosts", 0)
BACKEND: Final[Path] = ("spec", "backends", 0)
ENDPOINT: Final[Path] = (*BACKEND, "endpoints", 0)


def _listeners(*ports: Object) -> list[Object]:
    return [{"name": f"l{index}", "routes": [{"backend": "app"}], **port} for index, port in enumerate(ports)]


_ENDPOINT: Final[Object] = {"host": "a", "port": 1}


def _ports(count: int) -> list[Object]:
    return [{"port": port} for port in range(80, 80 + count)]


def _routes(*matches: Object) -> list[Object]:
    return [{"match": match, "backend": "app"} for match in matches]


def _paths(*values: str) -> list[list[Object]]:
    return [_routes({member: value}) for value in values for member in ("pathPrefix", "pathExact")]


def _text(characters: int) -> list[Object]:
    """A listener whose hosts and paths have so many characters, together with those of the endpoints of ``proxy``."""
    endpoints = [each for backend in proxy()["spec"]["backends"] for each in backend["endpoints"]]
    left = characters - sum(len(each["host"]) for each in endpoints)
    lengths = [1024] * (left // 1024) + [left % 1024]
    return _listeners({"port": 80, "routes": _routes(*({"pathPrefix": "/" + "a" * (n - 1)} for n in lengths))})


def _hosts(routes: int) -> list[Object]:
    """Listeners with so many routes of 16 hosts each, at most 60 routes in each listener."""
    match = {"hosts": [f"h{n}" for n in range(16)]}
    sizes = [60] * (routes // 60) + [routes % 60]
    return _listeners(*({"port": 80 + n, "routes": _routes(*[match] * each)} for n, each in enumerate(sizes)))


def _shared(*routes: int) -> list[Object]:
    """For each number a listener with so many routes, all of them for the same 16 wildcards."""
    match = {"hosts": [f"*.h{n}" for n in range(16)]}
    return _listeners(*({"port": 80 + n, "routes": _routes(*[match] * each)} for n, each in enumerate(routes)))


CASES: Final[tuple[Case, ...]] = (
    Case(("spec", "listeners"), _text(65_536), [_text(65_537)], "at most 65536 characters together"),
    Case(("spec", "listeners"), _hosts(128), [_hosts(129)], "write a wildcard"),
    Case(("spec", "listeners"), _shared(64), [_shared(64, 1)], "declare fewer of either"),
    Case(
        ("spec", "service", "annotations"),
        dict.fromkeys("abcd", "x" * 4095),
        [dict.fromkeys("abcd", "x" * 4096)],
        "shorten them",
    ),
    Case((*LISTENER, "name"), "web-2", ["Web", "2web", "a--b", "a-", "a_b"], "for example http"),
    Case(
        ("spec", "listeners"),
        _listeners({"port": 80}, {"port": 81}),
        [_listeners({"port": 80}, {"port": 80, "targetPort": 8080})],
        "change one of the equal ports",
    ),
    Case(
        ("spec", "listeners"),
        _listeners({"port": 80}, {"port": 10080, "targetPort": 8080}),
        [
            _listeners({"port": 80}, {"port": 10080}),
            _listeners({"port": 80, "targetPort": 8080}, {"port": 8080}),
            _listeners({"port": 80, "targetPort": 8080}, {"port": 81, "targetPort": 8080}),
        ],
        "set targetPort to a free port",
    ),
    Case(
        ("spec", "listeners"),
        _listeners({"port": 19000, "targetPort": 8080}, {"port": 19002}),
        [_listeners({"port": port}) for port in (19000, 19001)]
        + [_listeners({"port": 80, "targetPort": port}) for port in (19000, 19001)],
        "set targetPort to another port",
    ),
    Case(
        (*TCP_LISTENER, "routes"),
        [{"backend": "db"}],
        [[{"backend": "db"}, {"backend": "app"}], [{"backend": "db", "match": {}}]],
        "exactly one route, without match",
    ),
    Case((*LISTENER, "routes", 0, "backend"), "db", ["cache", "ap", "app2"], "add it to spec.backends"),
    Case((*LISTENER, "routes", 0, "backend"), "app", ["App", "app_", "-app", "app."], "for example orders-v2"),
    Case(
        HOST,
        "a-1.example.com",
        ["Shop.example.com", "shop.example.com:80", "https://a", "a/b", "a_b", "ä.de"],
        "lower case",
    ),
    Case(HOST, "*.example.com", ["*", "*example.com", "a.*.com", "**.com"], "for example *.example.com"),
    Case(
        HOST, "xn--bcher-kva.example", ["a..b", ".a", "a.", "-a.b", "a-.b", "a.b-", "a.-b"], "begins or ends with '-'"
    ),
    Case(HOST, f"{'a' * 63}.b", [f"{'a' * 64}.b", f"b.{'a' * 64}"], "more than 63 characters"),
    Case(HOST, "4.example.com", ["10.0.0.7", "a.7", "7", "1.2.3.4a"], "an IP address"),
    Case(
        (*LISTENER, "routes"),
        _routes(*({member: "/a/b-c_d.e~f!g&i(j)k+l,m;n=o:p@q/"} for member in ("pathPrefix", "pathExact"))),
        _paths("api", "a/b", "/a?b=c", "/a#b", "/a b", "/a*", "/a%2Fb", "/a'b", "/$a", "/ä"),
        "begin with '/'",
    ),
    Case(
        (*LISTENER, "routes"),
        _routes({"pathPrefix": "/a/.b/..c/d..../e."}, {"pathExact": "/"}),
        _paths("//", "/a//b", "/a/./b", "/a/../b", "/..", "/a/."),
        "write the resolved path",
    ),
    Case(
        (*LISTENER, "routes"),
        _routes({"pathPrefix": "/a"}, {"pathExact": "/a"}, {}),
        [_routes({"pathPrefix": "/a", "pathExact": "/a"})],
        "one of pathPrefix and pathExact",
    ),
    Case((*BACKEND, "name"), "app", ["App", "1app", "app-"], "for example orders-v2"),
    Case(
        (*ENDPOINT, "host"),
        "fd00::7",
        ["App.svc", "app.svc.", "10.0.0.256", "10.0.0", "[fd00::7]", "app:80", "http://app", "a_b", "fe80::1%eth0"],
        "the port has a field of its own",
    ),
    Case(
        (*ENDPOINT, "host"),
        "10.0.0.7",
        [
            "127.0.0.1",
            "::1",
            "0.0.0.0",  # noqa: S104  # refused, not bound
            "::",
            "169.254.169.254",
            "fe80::1",
            "224.0.0.1",
            "255.255.255.255",
            "localhost",
        ],
        "reachable from other Pods",
    ),
    Case(
        (*BACKEND, "connectTimeout"),
        "60s",
        ["61s", "60001ms", "0s", "5", "1m", "1.5s", "-1s", " 5s"],
        "between 1ms and 60s",
    ),
    Case(
        ("spec", "image"),
        "registry.example:5000/team/envoy:v1@sha256:" + "0" * 64,
        ["envoy ", "a b", "https://x/y", "x:"],
        "image reference",
    ),
    Case(
        ("spec", "service", "annotations"),
        {"a.b-c.example/Name_1.x": "{}", "plain": ""},
        [{key: ""} for key in ("a b", "/a", "a/", "a/b/c", "-a", "a..b/c", "x" * 64, "")],
        "qualified name",
    ),
    Case(
        ("spec", "service", "annotations"),
        {"edge.operator-app.example/x": "", "kubectl.kubernetes.io/restartedAt": ""},
        [{"edge.operator-app.dev/x": ""}, {"kubectl.kubernetes.io/last-applied-configuration": "{}"}],
        "use a key of your own",
    ),
    Case(
        ("spec", "resources"),
        {"requests": {"ephemeral-storage": "1Gi"}},
        [{"requests": {"nvidia.com/gpu": "1"}}, {"limits": {"hugepages-2Mi": "4Mi"}}, {"limits": {"CPU": "1"}}],
        "cpu, memory and ephemeral-storage",
    ),
    Case(
        ("spec", "resources"),
        {"requests": {"cpu": 2}, "limits": {"cpu": "2000m", "memory": "1e9"}},
        [{"limits": {"cpu": value}} for value in ("-1", -1, "one", "1 ", "1Kb", "1e", "0x1", "1e999", "1.5.1")],
        "a quantity that is not negative",
    ),
    Case(
        ("spec", "resources"),
        {"requests": {"memory": "1Gi", "cpu": "1"}, "limits": {"memory": "1024Mi"}},
        [
            {"requests": {"memory": "1Gi"}, "limits": {"memory": "1G"}},
            {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}},
        ],
        "raise the limit or lower the request",
    ),
    Case(
        ("spec", "registration", "hostname"),
        "shop.example.com",
        ["Shop.example.com", "shop.example.com.", "*.example.com", "shop:80", "10.0.0.7"],
        "without port, scheme or trailing dot",
    ),
    Case(
        ("spec", "registration"),
        {"hostname": "shop.example.com", "ttl": 60, "registry": "in-cluster"},
        [{"ttl": 60}, {"registry": "in-cluster"}],
        "add the hostname, or remove them",
    ),
)

NAME_CASE: Final = Case(("metadata", "name"), "a" * 57, ["a" * 58, "1a", "a.b"], "at most 57")
"""Enforced by the API server only: the models do not parse metadata."""

BOUNDS: Final[tuple[tuple[Path, Sequence[Any], Sequence[Any]], ...]] = (
    (("spec", "replicas"), [0, 100], [-1, 101, 1.5, "1", True]),
    (("spec", "paused"), [True], ["true", 1]),
    (("spec", "image"), ["a"], ["", "a" * 513]),
    (("spec", "registration", "ttl"), [1, 86_400], [0, 86_401, "60"]),
    (("spec", "registration", "registry"), ["a" * 63], ["a" * 64, "", "In-Cluster"]),
    (("spec", "deletionPolicy"), ["Orphan"], ["orphan", "Retain"]),
    (("spec", "listeners"), [_listeners(*_ports(16))], [[], _listeners(*_ports(17))]),
    ((*LISTENER, "port"), [1, 65535], [0, 65536]),
    ((*LISTENER, "targetPort"), [1024, 65535], [0, 1023, 65536, "http"]),
    ((*LISTENER, "protocol"), ["HTTP"], ["http", "UDP", ""]),
    ((*LISTENER, "name"), ["a" * 15], ["a" * 16, ""]),
    ((*TCP_LISTENER, "name"), ["other"], ["http"]),
    ((*LISTENER, "routes"), [[{"backend": "app"}] * 64], [[], [{"backend": "app"}] * 65, [{}]]),
    ((*MATCH, "hosts"), [[], ["a.b"] * 16], [["a.b"] * 17, "a.b", [""]]),
    ((*MATCH, "pathPrefix"), ["/" + "a" * 1023], ["/" + "a" * 1024, ""]),
    (("spec", "backends", 1, "name"), ["db"], ["app"]),
    ((*BACKEND, "endpoints"), [[_ENDPOINT] * 64], [[], [_ENDPOINT] * 65, [{"host": "a"}], [{"port": 1}]]),
    ((*ENDPOINT, "port"), [1, 65535], [0, 65536]),
    ((*ENDPOINT, "weight"), [1, 128], [0, 129]),
    (("spec", "service", "type"), ["NodePort", "LoadBalancer"], ["ExternalName"]),
    (
        ("spec", "service", "annotations"),
        [{"a": "x" * 4096}, {f"a{n}": "" for n in range(32)}],
        [{"a": "x" * 4097}, {f"a{n}": "" for n in range(33)}, {"a": 1}],
    ),
)
"""Field, values at its bounds, values beyond them. The schema refuses these, with messages of its own."""

TEXT_MEMBERS: Final[tuple[Path, ...]] = (
    (*LISTENER, "name"),
    (*LISTENER, "routes", 0, "backend"),
    HOST,
    (*MATCH, "pathPrefix"),
    (*BACKEND, "name"),
    (*BACKEND, "connectTimeout"),
    (*ENDPOINT, "host"),
    ("spec", "image"),
    ("spec", "registration", "hostname"),
    ("spec", "resources", "limits", "cpu"),
)
"""Every field whose text is rendered into a child, except annotation values, which are free text."""

HOSTILE: Final[tuple[str, ...]] = (
    "\n",
    "\r\n",
    "\x00",
    "\t",
    "\x1b[0m",
    "\x7f",
    "\x85",
    "\u2028",
    "\u2029",
    "\ufeff",
    "\u200b",
    "\uff0e",
    '"',
    "'",
    "`",
    "\\",
    "{",
    "}",
    "{{x}}",
    "${x}",
    "$(POD_NAME)",
    "%",
    "%REQ(authorization)%",
    "%0a",
    "<x>",
    "#",
    "/../",
    "\nadmin: {}\n",
)
"""Fragments with a meaning in YAML, JSON, HTTP, shells, templates, Kubernetes or Envoy's format strings."""


def with_fragment(value: str, fragment: str) -> tuple[str, ...]:
    """``value`` with ``fragment`` before, inside and after it."""
    middle = len(value) // 2
    return (fragment + value, value[:middle] + fragment + value[middle:], value + fragment)
