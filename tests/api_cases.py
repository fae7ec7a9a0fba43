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
    """An EnvoyProxy with every field but those that exclude others, ports inside and on nodes, and autoscaling."""
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
                    "httpsRedirect": False,
                    "tls": {"secretName": "shop-tls", "clientCASecretName": "partners"},
                    "hsts": {"maxAgeDays": 365, "includeSubdomains": False},
                    "proxyProtocol": False,
                    "trustedHops": 1,
                    "http10": False,
                    "limits": {
                        "maxConnections": 1000,
                        "maxHeaderKilobytes": 60,
                        "headersTimeout": "10s",
                        "idleTimeout": "60m",
                        "maxStreams": 100,
                    },
                    "routes": [
                        {
                            "match": {
                                "hosts": ["shop.example.com"],
                                "pathPrefix": "/api",
                                "method": "POST",
                                "queryParams": [{"name": "version", "value": "2"}],
                            },
                            "backend": "app",
                            "timeout": "15s",
                            "idleTimeout": "5m",
                            "retries": {"attempts": 2, "after": ["connection"], "perTryTimeout": "2s"},
                            "prefixRewrite": "/",
                            "hostRewrite": "app.internal.example",
                            "requestHeaders": {
                                "set": [{"name": "x-env", "value": "prod"}],
                                "add": [{"name": "x-via", "value": "100%"}],
                                "remove": ["x-debug"],
                            },
                            "responseHeaders": {
                                "set": [{"name": "x-frame-options", "value": "DENY"}],
                                "add": [{"name": "x-via", "value": "edge"}],
                                "remove": ["server"],
                            },
                            "mirror": {"backend": "db", "percent": 10},
                            "rateLimit": {"requests": 100, "per": "minute", "burst": 20},
                            "cors": {
                                "origins": ["https://shop.example.com"],
                                "methods": ["POST"],
                                "headers": ["x-token"],
                                "exposeHeaders": ["x-total"],
                                "maxAge": "10m",
                                "credentials": True,
                            },
                            "access": {"allow": ["10.0.0.0/8"], "deny": ["10.0.0.7/32"]},
                        },
                        {
                            "match": {"headers": [{"name": "x-canary", "value": "1"}]},
                            "backends": [{"name": "app", "weight": 99}, {"name": "db", "weight": 1}],
                        },
                        {
                            "match": {"pathPrefix": "/old"},
                            "redirect": {
                                "scheme": "https",
                                "host": "www.example.com",
                                "port": 8443,
                                "prefix": "/new",
                                "status": 308,
                            },
                        },
                        {"response": {"status": 503, "body": "down", "contentType": "text/html"}},
                    ],
                },
                {"name": "db", "port": 5432, "protocol": "TCP", "routes": [{"backend": "db"}]},
            ],
            "backends": [
                {
                    "name": "app",
                    "endpoints": [{"host": "app.team-a.svc", "port": 8080}],
                    "connectTimeout": "250ms",
                    "protocol": "http1",
                    "tls": {"serverName": "app.internal.example", "caSecretName": "authority"},
                    "loadBalancing": {"policy": "Hash", "header": "x-user"},
                    "healthCheck": {"path": "/healthz", "interval": "10s", "timeout": "2s", "failures": 3},
                    "outlierDetection": {"consecutiveErrors": 5, "ejectionTime": "30s", "maxEjectedPercent": 50},
                    "maxConnections": 1024,
                    "maxPendingRequests": 1024,
                    "maxRequests": 1024,
                    "idleTimeout": "30s",
                },
                {"name": "db", "endpoints": [{"host": "10.0.0.7", "port": 5432, "weight": 2}]},
            ],
            "service": {
                "type": "LoadBalancer",
                "annotations": {"example.com/owner": "team-a"},
                "loadBalancerClass": "example.com/edge",
                "loadBalancerSourceRanges": ["203.0.113.0/24"],
                "externalTrafficPolicy": "Local",
                "ipFamilyPolicy": "SingleStack",
            },
            "disruption": {"maxUnavailable": 1},
            "networkPolicy": {"from": [{"cidr": "203.0.113.0/24"}, {"namespace": "b", "podLabels": {"app": "web"}}]},
            "nodeSelector": {"example.com/pool": "edge"},
            "tolerations": [
                {
                    "key": "example.com/edge",
                    "operator": "Equal",
                    "value": "only",
                    "effect": "NoExecute",
                    "tolerationSeconds": 60,
                }
            ],
            "affinity": {
                "nodes": [{"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["eu-1a"], "weight": 10}],
                "pods": [
                    {
                        "podLabels": {"app": "shop"},
                        "apart": False,
                        "topologyKey": "topology.kubernetes.io/zone",
                        "weight": 10,
                    }
                ],
            },
            "topologySpread": [
                {"topologyKey": "topology.kubernetes.io/zone", "maxSkew": 2, "whenUnsatisfiable": "ScheduleAnyway"}
            ],
            "priorityClassName": "edge",
            "serviceAccountName": "edge",
            "imagePullSecrets": [{"name": "registry-key"}],
            "podLabels": {"example.com/cost": "shop"},
            "podAnnotations": {"example.com/scrape": "true"},
            "resources": {"requests": {"cpu": "100m"}, "limits": {"cpu": "1", "memory": "256Mi"}},
            "registration": {"hostname": "shop.example.com", "ttl": 300, "registry": "in-cluster"},
            "deletionPolicy": "Delete",
            "paused": False,
            "telemetry": {"metrics": True},
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
ROUTE: Final[Path] = (*LISTENER, "routes", 0)
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


def _answers(*answers: Object) -> list[Object]:
    """Routes for the prefix /a with these members."""
    return [{"match": {"pathPrefix": "/a"}} | each for each in answers]


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


def _many_routes(*routes: int) -> list[Object]:
    """For each number a listener with so many routes."""
    return _listeners(*({"port": 80 + n, "routes": _routes(*[{}] * each)} for n, each in enumerate(routes)))


def _endpoints(*endpoints: int) -> list[Object]:
    """For each number a backend with so many endpoints; the first two have the names that routes ask for."""
    names = ["app", "db", *(f"b{n}" for n in range(len(endpoints)))]
    return [
        {"name": name, "endpoints": [{"host": "a.example.com", "port": 1 + n} for n in range(each)]}
        for name, each in zip(names, endpoints, strict=False)
    ]


def _shared(*routes: int) -> list[Object]:
    """For each number a listener with so many routes, all of them for the same 16 wildcards."""
    match = {"hosts": [f"*.h{n}" for n in range(16)]}
    return _listeners(*({"port": 80 + n, "routes": _routes(*[match] * each)} for n, each in enumerate(routes)))


def _with_spec(**fields: Any) -> Object:
    """The spec of ``proxy`` with other ``fields``."""
    spec: Object = proxy()["spec"]
    return spec | fields


CASES: Final[tuple[Case, ...]] = (
    Case(("spec", "listeners"), _text(65_536), [_text(65_537)], "at most 65536 characters together"),
    Case(("spec", "listeners"), _many_routes(*[64] * 8), [_many_routes(*[64] * 8, 1)], "at most 512 routes"),
    Case(("spec", "backends"), _endpoints(*[64] * 16), [_endpoints(*[64] * 16, 1)], "name a Service"),
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
        [
            [{"backend": "db"}, {"backend": "app"}],
            [{"backend": "db", "match": {}}],
            [{"backends": [{"name": "db"}]}],
            [{"response": {"status": 200}}],
            [{"backend": "db", "timeout": "1s"}],
            [{"backend": "db", "access": {}}],
        ],
        "exactly one route, without match",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers(
            {"backend": "app"},
            {"backends": [{"name": "app"}]},
            {"redirect": {"path": "/b"}},
            {"response": {"status": 200}},
        ),
        [
            _answers(each)
            for each in (
                {},
                {"backend": "app", "backends": [{"name": "app"}]},
                {"backend": "app", "redirect": {"path": "/b"}},
                {"redirect": {"path": "/b"}, "response": {"status": 200}},
            )
        ],
        "must have one answer",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers({"backends": [{"name": "app"}], "timeout": "1s", "mirror": {"backend": "db"}}),
        [
            _answers({"response": {"status": 200}, member: value})
            for member, value in (
                ("timeout", "1s"),
                ("idleTimeout", "1s"),
                ("retries", {}),
                ("prefixRewrite", "/"),
                ("hostRewrite", "a"),
                ("mirror", {"backend": "app"}),
            )
        ]
        + [_answers({"redirect": {"path": "/b"}, "timeout": "1s"})],
        "have no backend",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers({"backend": "app", "prefixRewrite": "/"}, {"redirect": {"prefix": "/b"}}),
        [
            [{"backend": "app", "prefixRewrite": "/"}],
            [{"match": {"pathExact": "/a"}, "backend": "app", "prefixRewrite": "/"}],
            [{"match": {}, "redirect": {"prefix": "/b"}}],
        ],
        "replace match.pathPrefix",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers({"backend": "app", "timeout": "2s", "retries": {"perTryTimeout": "2000ms"}}),
        [_answers({"backend": "app", "timeout": "2s", "retries": {"perTryTimeout": "2001ms"}})],
        "perTryTimeout must not be above timeout",
    ),
    Case(
        (*LISTENER, "routes"),
        [{"match": {"method": "POST"}, "backend": "app", "cors": {"origins": ["https://a"]}}],
        [[{"match": {"headers": [{"name": "a"}]}, "backend": "app", "cors": {"origins": ["https://a"]}}]],
        "CORS would never be granted",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers({"backend": "app", "cors": {"origins": ["*"], "credentials": False}}),
        [_answers({"backend": "app", "cors": {"origins": ["https://a", "*"], "credentials": True}})],
        "act as the user",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers({"backends": [{"name": "app", "weight": 0}, {"name": "db", "weight": 1}]}),
        [_answers({"backends": [{"name": "app", "weight": 0}, {"name": "db", "weight": 0}]})],
        "a weight above 0",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers({"backends": [{"name": "app"}], "mirror": {"backend": "db"}}),
        [_answers({"backends": [{"name": "x"}]}), _answers({"backend": "app", "mirror": {"backend": "x"}})],
        "add it to spec.backends",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers(*({"redirect": {each: value}} for each, value in (("scheme", "https"), ("host", "a"), ("port", 1)))),
        [_answers({"redirect": {}}), _answers({"redirect": {"status": 301}})],
        "must change something",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers({"redirect": {"path": "/b"}}),
        [_answers({"redirect": {"path": "/b", "prefix": "/c"}})],
        "one of path and prefix",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers({"backend": "app", "timeout": "60m"}, {"backend": "app", "idleTimeout": "1ms"}),
        [_answers({"backend": "app", "timeout": each}) for each in ("61m", "0s", "1h", "3601s", "5", "1.5s")],
        "between 1ms and 60m",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers({"backend": "app", "requestHeaders": {"set": [{"name": "x-a-1", "value": "%REQ(a)%"}]}}),
        [
            _answers({"backend": "app", "requestHeaders": {"set": [{"name": each, "value": "b"}]}})
            for each in ("X-A", "a b", "a_b", ":path", "a:", "a\n")
        ],
        "HTTP does not tell upper from lower case",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers({"backend": "app", "responseHeaders": {"remove": ["server"]}}),
        [
            _answers({"backend": "app", changes: change})
            for changes, change in (
                ("requestHeaders", {"set": [{"name": "host", "value": "a"}]}),
                ("requestHeaders", {"add": [{"name": "x-envoy-retry-on", "value": "5xx"}]}),
                ("requestHeaders", {"remove": ["content-length"]}),
                ("responseHeaders", {"set": [{"name": "transfer-encoding", "value": "chunked"}]}),
                ("responseHeaders", {"remove": ["connection"]}),
            )
        ],
        "where a message goes or ends",
    ),
    Case(
        (*LISTENER, "routes"),
        _answers({"backend": "app", "requestHeaders": {"set": [{"name": "a", "value": "~ %{}$"}]}}),
        [
            _answers({"backend": "app", "requestHeaders": {"set": [{"name": "a", "value": each}]}})
            for each in ("a\nb", "a\r\nb", "\t", "ä", "\x7f")
        ],
        "printable ASCII",
    ),
    Case(
        (*LISTENER, "routes"),
        [{"match": {"queryParams": [{"name": "a-._~1", "value": "B"}]}, "backend": "app"}],
        [
            [{"match": {"queryParams": [each]}, "backend": "app"}]
            for each in ({"name": "a b"}, {"name": "a", "value": "%20"}, {"name": "a=b"}, {"name": "a&b"})
        ],
        "need no percent-encoding",
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
        (*TCP_LISTENER,),
        proxy()["spec"]["listeners"][1] | {"proxyProtocol": True, "limits": {"maxConnections": 1}, "trustedHops": 0},
        [
            proxy()["spec"]["listeners"][1] | {name: value}
            for name, value in (("httpsRedirect", True), ("hsts", {}), ("trustedHops", 1), ("http10", True))
        ],
        "are about HTTP",
    ),
    Case(
        ("spec", "backends", 1),
        {"name": "db", "service": {"name": "db", "port": 5432}},
        [
            {"name": "db"},
            {"name": "db", "service": {"name": "db", "port": 1}, "endpoints": [{"host": "db", "port": 1}]},
        ],
        "either endpoints or service",
    ),
    Case(
        (*BACKEND, "loadBalancing"),
        {"policy": "Hash", "cookie": "session"},
        [
            {"policy": "Hash"},
            {"policy": "Random", "header": "a"},
            {"policy": "RoundRobin", "cookie": "a"},
            {"policy": "Hash", "header": "a", "cookie": "b"},
        ],
        "Hash needs what to hash",
    ),
    Case(
        (*BACKEND, "healthCheck"),
        {"interval": "1s", "timeout": "1000ms"},
        [{"interval": "1s", "timeout": "1001ms"}, {"interval": "5s", "timeout": "6s"}],
        "timeout must not be above interval",
    ),
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
        ("spec", "service"),
        {"type": "LoadBalancer", "loadBalancerClass": "a.b/c", "loadBalancerSourceRanges": ["10.0.0.0/8"]},
        [
            {"type": "NodePort", "loadBalancerClass": "a.b/c"},
            {"type": "ClusterIP", "loadBalancerSourceRanges": ["10.0.0.0/8"]},
        ],
        "are for a load balancer",
    ),
    Case(
        ("spec", "service"),
        {"type": "NodePort", "externalTrafficPolicy": "Local"},
        [{"type": "ClusterIP", "externalTrafficPolicy": "Local"}],
        "for traffic from outside",
    ),
    Case(
        ("spec", "service", "loadBalancerClass"),
        "example.com/edge",
        ["a b", "/a", "a/", "a/b/c", "-a", "a..b/c"],
        "letters, digits, '-', '_' and '.'",
    ),
    Case(
        ("spec", "service", "loadBalancerSourceRanges"),
        ["0.0.0.0/0", "fd00::/8"],
        [["10.0.0.7"], ["10.0.0.7/8"], ["10.0.0.0/33"], ["a/8"], ["::ffff:10.0.0.0/104"], ["10.0.0.0/255.0.0.0"]],
        "a range of addresses",
    ),
    Case(
        ("spec", "listeners"),
        _listeners({"port": 80, "nodePort": 30080}, {"port": 81}, {"port": 82, "nodePort": 30082}),
        [_listeners({"port": 80, "nodePort": 30080}, {"port": 81, "nodePort": 30080})],
        "a nodePort of its own",
    ),
    Case(
        ("spec",),
        _with_spec(service={"type": "NodePort"}, listeners=_listeners({"port": 80, "nodePort": 30080})),
        [_with_spec(service={"type": "ClusterIP"}, listeners=_listeners({"port": 80, "nodePort": 30080}))],
        "a Service with ports on nodes",
    ),
    Case(
        ("spec", "autoscaling"),
        {"minReplicas": 2, "maxReplicas": 2},
        [{"minReplicas": 3, "maxReplicas": 2}],
        "minReplicas must not be above",
    ),
    Case(
        ("spec",),
        _with_spec(autoscaling={"maxReplicas": 2}),
        [_with_spec(autoscaling={"maxReplicas": 2}, replicas=0)],
        "never starts from zero",
    ),
    Case(
        ("spec",),
        _with_spec(autoscaling={"maxReplicas": 2}, resources={"limits": {"cpu": "1"}}),
        [_with_spec(autoscaling={"maxReplicas": 2}, resources={"requests": {"memory": "64Mi"}})],
        "set resources.requests.cpu",
    ),
    Case(
        ("spec", "networkPolicy", "from"),
        [{"cidr": "10.0.0.0/8"}, {"namespace": "7a"}, {"podLabels": {"a": "b"}}],
        [[{}], [{"cidr": "10.0.0.0/8", "namespace": "a"}], [{"cidr": "10.0.0.0/8", "podLabels": {"a": "b"}}]],
        "either cidr",
    ),
    Case(
        ("spec", "networkPolicy", "from"),
        [{"namespace": "a-1"}],
        [[{"namespace": "A"}], [{"namespace": "a.b"}]],
        "a namespace",
    ),
    Case(
        ("spec", "nodeSelector"),
        {"a.b/c": "v1.2", "d": ""},
        [{"a": "b c"}, {"a": "-"}, {"a": "ä"}],
        "begin and end with",
    ),
    Case(
        ("spec", "tolerations"),
        [{"key": "a"}, {"key": "a", "value": "b"}, {"key": "a", "operator": "Equal", "value": "b"}],
        [[{"key": "a", "operator": "Equal"}], [{"key": "a", "operator": "Exists", "value": "b"}]],
        "write a value with Equal",
    ),
    Case(
        ("spec", "tolerations"),
        [{"key": "a", "effect": "NoExecute", "tolerationSeconds": 1}],
        [[{"key": "a", "tolerationSeconds": 1}], [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 1}]],
        "set effect to NoExecute",
    ),
    Case(
        ("spec", "affinity", "nodes"),
        [
            {"key": "a", "operator": "In", "values": ["b", ""]},
            {"key": "a", "operator": "NotIn", "values": ["c"], "weight": 1},
            {"key": "a.b/c", "operator": "DoesNotExist"},
        ],
        [
            [{"key": "a", "operator": "In"}],
            [{"key": "a", "operator": "NotIn", "weight": 1}],
            [{"key": "a", "operator": "Exists", "values": ["b"]}],
            [{"key": "a", "operator": "DoesNotExist", "values": ["b"]}],
        ],
        "write values with the former",
    ),
    Case(
        ("spec", "affinity", "pods"),
        [{"podLabels": {"a.b/c": ""}, "apart": True}],
        [[{"podLabels": {"-a": ""}}], [{"podLabels": {"a/b/c": ""}}]],
        "must be a qualified name",
    ),
    Case(
        ("spec", "topologySpread"),
        [{"topologyKey": "a"}, {"topologyKey": "b"}],
        [[{"topologyKey": "a"}, {"topologyKey": "a", "maxSkew": 2}]],
        "a topologyKey of its own",
    ),
    Case(
        ("spec", "priorityClassName"), "edge", ["system-node-critical", "system-cluster-critical"], "the cluster's own"
    ),
    Case(("spec", "serviceAccountName"), "a.b-1", ["A", "a_b", "a.", "-a"], "the name of an object"),
    Case(
        ("spec", "podLabels"),
        {"example.com/a": "b", "app": "c"},
        [{f"edge.operator-app.dev/{each}": ""} for each in ("owner-uid", "x")]
        + [{each: ""} for each in ("app.kubernetes.io/name", "app.kubernetes.io/instance", "pod-template-hash")],
        "whose Pod it is",
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
    (("spec", "telemetry", "metrics"), [True, False], ["true", 1]),
    (("spec", "image"), ["a"], ["", "a" * 513]),
    (("spec", "registration", "ttl"), [1, 86_400], [0, 86_401, "60"]),
    (("spec", "registration", "registry"), ["a" * 63], ["a" * 64, "", "In-Cluster"]),
    (("spec", "deletionPolicy"), ["Orphan"], ["orphan", "Retain"]),
    (("spec", "listeners"), [_listeners(*_ports(16))], [[], _listeners(*_ports(17))]),
    ((*LISTENER, "port"), [1, 65535], [0, 65536]),
    ((*LISTENER, "nodePort"), [1, 65535], [0, 65536, "http"]),
    (("spec", "disruption", "maxUnavailable"), [1, 100], [0, 101, "1"]),
    (
        ("spec", "autoscaling"),
        [
            {"minReplicas": 1, "maxReplicas": 100, "targetCPUUtilizationPercentage": 1},
            {"maxReplicas": 1, "targetCPUUtilizationPercentage": 1000},
        ],
        [
            {"minReplicas": 0, "maxReplicas": 1},
            {"maxReplicas": 101},
            {},
            *({"maxReplicas": 1, "targetCPUUtilizationPercentage": each} for each in (0, 1001)),
        ],
    ),
    (
        ("spec", "networkPolicy", "from"),
        [[], [{"cidr": "10.0.0.0/8"}] * 64],
        [[{"cidr": "10.0.0.0/8"}] * 65, [{"podLabels": {}}], [{"podLabels": {f"a{n}": "" for n in range(17)}}]],
    ),
    (("spec", "nodeSelector"), [{f"a{n}": "" for n in range(16)}], [{f"a{n}": "" for n in range(17)}, {"a": "b" * 64}]),
    (
        ("spec", "tolerations"),
        [[{"key": "a"}] * 16, [{"key": "a", "effect": "NoExecute", "tolerationSeconds": 86_400}]],
        [[{"key": "a"}] * 17, [{"key": "a", "effect": "NoExecute", "tolerationSeconds": 86_401}], [{"value": "a"}]],
    ),
    (
        ("spec", "affinity", "nodes"),
        [
            [{"key": f"a{n}", "operator": "Exists"} for n in range(8)],
            [{"key": "a", "operator": "In", "values": ["b"] * 16, "weight": 100}],
        ],
        [
            [{"key": f"a{n}", "operator": "Exists"} for n in range(9)],
            [{"key": "a", "operator": "In", "values": ["b"] * 17}],
            [{"key": "a", "operator": "Gt", "values": ["1"]}],
            [{"key": "a"}],
            [{"operator": "Exists"}],
            *([{"key": "a", "operator": "Exists", "weight": each}] for each in (0, 101)),
        ],
    ),
    (
        ("spec", "affinity", "pods"),
        [[{"podLabels": {"a": ""}, "weight": 100}] * 8, [{"podLabels": {f"a{n}": "" for n in range(16)}}]],
        [
            [{"podLabels": {"a": ""}}] * 9,
            [{"podLabels": {f"a{n}": "" for n in range(17)}}],
            [{"podLabels": {}}],
            [{"apart": True}],
            [{"podLabels": {"a": ""}, "weight": 0}],
        ],
    ),
    (
        ("spec", "topologySpread"),
        [[{"topologyKey": f"a{n}"} for n in range(4)], [{"topologyKey": "a", "maxSkew": 100}]],
        [[{"topologyKey": f"a{n}"} for n in range(5)], [{"topologyKey": "a", "maxSkew": 101}], [{}]],
    ),
    (("spec", "imagePullSecrets"), [[{"name": f"a{n}"} for n in range(8)]], [[{"name": f"a{n}"} for n in range(9)]]),
    (("spec", "podLabels"), [{f"a{n}": "" for n in range(16)}], [{f"a{n}": "" for n in range(17)}]),
    (("spec", "podAnnotations"), [{f"a{n}": "" for n in range(32)}], [{f"a{n}": "" for n in range(33)}]),
    (("spec", "priorityClassName"), [".".join(["a" * 63] * 3)], ["a." * 126 + "aa", "a" * 64, ""]),
    (("spec", "service", "loadBalancerSourceRanges"), [["10.0.0.0/8"] * 64], [["10.0.0.0/8"] * 65]),
    (("spec", "service", "ipFamilyPolicy"), ["PreferDualStack", "RequireDualStack"], ["DualStack"]),
    ((*LISTENER, "targetPort"), [1024, 65535], [0, 1023, 65536, "http"]),
    ((*LISTENER, "protocol"), ["HTTP"], ["http", "UDP", ""]),
    ((*LISTENER, "name"), ["a" * 15], ["a" * 16, ""]),
    ((*TCP_LISTENER, "name"), ["other"], ["http"]),
    ((*LISTENER, "routes"), [[{"backend": "app"}] * 64], [[], [{"backend": "app"}] * 65, [{}]]),
    ((*ROUTE, "timeout"), ["2s", "60m"], ["61m"]),
    ((*ROUTE, "retries", "attempts"), [1, 5], [0, 6]),
    (
        (*ROUTE, "retries", "after"),
        [[], ["connection", "gateway-error", "server-error"]],
        [["5xx"], ["connection"] * 4],
    ),
    ((*ROUTE, "mirror", "percent"), [1, 100], [0, 101]),
    ((*ROUTE, "rateLimit", "requests"), [1, 1_000_000], [0, 1_000_001]),
    ((*ROUTE, "rateLimit", "burst"), [1, 1_000_000], [0, 1_000_001]),
    ((*ROUTE, "rateLimit", "per"), ["second", "hour"], ["day"]),
    ((*ROUTE, "access", "allow"), [["10.0.0.0/8"] * 16, ["fd00::/8"]], [["10.0.0.0/8"] * 17, ["10.0.0.7"]]),
    ((*ROUTE, "cors", "origins"), [["a"] * 8, ["a" * 128]], [[], ["a"] * 9, ["a" * 129]]),
    ((*ROUTE, "cors", "methods"), [["GET", "OPTIONS"]], [["get"], ["TRACE"], ["CONNECT"]]),
    ((*ROUTE, "prefixRewrite"), ["/" + "a" * 255], ["/" + "a" * 256, "a", "/a?b", "//"]),
    ((*MATCH, "method"), ["GET", "DELETE"], ["get", "TRACE", "*"]),
    (
        (*LISTENER, "routes", 1, "match", "headers"),
        [[{"name": f"a{n}"} for n in range(8)], [{"name": "a", "value": "b" * 128}]],
        [[{"name": f"a{n}"} for n in range(9)], [{"name": "a", "value": "b" * 129}], [{"name": "a"}, {"name": "a"}]],
    ),
    (
        (*LISTENER, "routes", 1, "backends"),
        [[{"name": "app", "weight": 10_000}, {"name": "db", "weight": 0}]],
        [[], [{"name": "app", "weight": 10_001}], [{"name": "app"}, {"name": "app"}], [{"name": "app", "weight": -1}]],
    ),
    ((*LISTENER, "routes", 2, "redirect", "status"), [301, 302, 303, 307, 308], [300, 304, 305, 309]),
    ((*LISTENER, "routes", 3, "response", "status"), [200, 599], [100, 199, 600]),
    ((*LISTENER, "routes", 3, "response", "body"), ["ä" * 1024, ""], ["a" * 1025]),
    ((*MATCH, "hosts"), [[], ["a.b"] * 16], [["a.b"] * 17, "a.b", [""]]),
    ((*MATCH, "pathPrefix"), ["/" + "a" * 1023], ["/" + "a" * 1024, ""]),
    (("spec", "backends", 1, "name"), ["db"], ["app"]),
    ((*BACKEND, "endpoints"), [[_ENDPOINT] * 64], [[], [_ENDPOINT] * 65, [{"host": "a"}], [{"port": 1}]]),
    ((*ENDPOINT, "port"), [1, 65535], [0, 65536]),
    ((*LISTENER, "trustedHops"), [0, 10], [-1, 11]),
    ((*LISTENER, "hsts", "maxAgeDays"), [0, 3650], [-1, 3651]),
    ((*LISTENER, "limits", "maxConnections"), [1, 10_000], [0, 10_001]),
    ((*LISTENER, "limits", "maxHeaderKilobytes"), [1, 256], [0, 257]),
    ((*LISTENER, "limits", "maxStreams"), [1, 1000], [0, 1001]),
    ((*BACKEND, "protocol"), ["http2", "grpc"], ["h2", "HTTP1"]),
    ((*BACKEND, "maxConnections"), [1, 100_000], [0, 100_001]),
    ((*BACKEND, "maxRequests"), [1, 100_000], [0, 100_001]),
    ((*BACKEND, "maxPendingRequests"), [1, 100_000], [0, 100_001]),
    ((*BACKEND, "healthCheck", "failures"), [1, 10], [0, 11]),
    ((*BACKEND, "outlierDetection", "consecutiveErrors"), [1, 100], [0, 101]),
    ((*BACKEND, "outlierDetection", "maxEjectedPercent"), [1, 90], [0, 91]),
    ((*ENDPOINT, "weight"), [1, 128], [0, 129]),
    (("spec", "service"), [{"type": "NodePort"}, {"type": "ClusterIP"}], [{"type": "ExternalName"}]),
    (
        ("spec", "service", "annotations"),
        [{"a": "x" * 4096}, {f"a{n}": "" for n in range(32)}],
        [{"a": "x" * 4097}, {f"a{n}": "" for n in range(33)}, {"a": 1}],
    ),
)
"""Field, values at its bounds, values beyond them. The schema refuses these, with messages of its own."""

TEXT_MEMBERS: Final[tuple[Path, ...]] = (
    (*LISTENER, "name"),
    HOST,
    (*MATCH, "pathPrefix"),
    (*ROUTE, "hostRewrite"),
    (*ROUTE, "prefixRewrite"),
    (*ROUTE, "timeout"),
    (*ROUTE, "access", "allow", 0),
    (*ROUTE, "requestHeaders", "set", 0, "name"),
    (*ROUTE, "responseHeaders", "remove", 0),
    (*MATCH, "queryParams", 0, "value"),
    (*BACKEND, "name"),
    (*BACKEND, "connectTimeout"),
    (*BACKEND, "tls", "serverName"),
    (*BACKEND, "tls", "caSecretName"),
    (*LISTENER, "tls", "secretName"),
    (*LISTENER, "tls", "clientCASecretName"),
    (*BACKEND, "loadBalancing", "header"),
    (*BACKEND, "healthCheck", "path"),
    (*ENDPOINT, "host"),
    ("spec", "image"),
    ("spec", "registration", "hostname"),
    ("spec", "resources", "limits", "cpu"),
    ("spec", "service", "loadBalancerClass"),
    ("spec", "service", "loadBalancerSourceRanges", 0),
    ("spec", "networkPolicy", "from", 0, "cidr"),
    ("spec", "networkPolicy", "from", 1, "namespace"),
    ("spec", "networkPolicy", "from", 1, "podLabels", "app"),
    ("spec", "nodeSelector", "example.com/pool"),
    ("spec", "tolerations", 0, "key"),
    ("spec", "tolerations", 0, "value"),
    ("spec", "affinity", "nodes", 0, "key"),
    ("spec", "affinity", "nodes", 0, "values", 0),
    ("spec", "affinity", "pods", 0, "podLabels", "app"),
    ("spec", "affinity", "pods", 0, "topologyKey"),
    ("spec", "topologySpread", 0, "topologyKey"),
    ("spec", "priorityClassName"),
    ("spec", "serviceAccountName"),
    ("spec", "imagePullSecrets", 0, "name"),
    ("spec", "podLabels", "example.com/cost"),
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
