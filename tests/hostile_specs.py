"""Specs that a tenant might try in order to reach, pretend, exhaust or break something. Data only.

Each is one edit of ``api_cases.proxy``: refused by the schema's rules, refused by the platform's policy, or harmless.
"""

from typing import Any, Final

from tests.api_cases import BACKEND, ENDPOINT, HOST, LISTENER, MATCH, ROUTE, TCP_LISTENER, Path

Hostile = dict[str, tuple[Path, Any]]

_SPEC: Final[Path] = ("spec",)
_SET: Final[Path] = (*ROUTE, "requestHeaders", "set", 0)
_ANNOTATIONS: Final[Path] = ("spec", "service", "annotations")

REFUSED: Final[Hostile] = {
    "admin port of Envoy": ((*LISTENER, "targetPort"), 19000),
    "readiness port": ((*LISTENER, "targetPort"), 19001),
    "privileged port": ((*LISTENER, "targetPort"), 22),
    "a line break in a header": ((*_SET, "value"), "a\r\nx-admin: 1"),
    "a line feed in a header": ((*_SET, "value"), "a\nb"),
    "a NUL in a header": ((*_SET, "value"), "a\x00b"),
    "a pseudo header": ((*_SET, "name"), ":authority"),
    "the host by a header": ((*_SET, "name"), "host"),
    "a length of one's own": ((*_SET, "name"), "content-length"),
    "request smuggling": ((*_SET, "name"), "transfer-encoding"),
    "hop-by-hop": ((*_SET, "name"), "connection"),
    "retries by Envoy's header": ((*_SET, "name"), "x-envoy-retry-on"),
    "original destination": ((*_SET, "name"), "x-envoy-original-dst-host"),
    "removing the host": ((*ROUTE, "requestHeaders", "remove"), ["host"]),
    "a header with an underscore": ((*_SET, "name"), "x_forwarded_user"),
    "rewrite to another site": ((*ROUTE, "prefixRewrite"), "//evil.example"),
    "rewrite upwards": ((*ROUTE, "prefixRewrite"), "/../admin"),
    "rewrite with a query": ((*ROUTE, "prefixRewrite"), "/x?admin=1"),
    "rewrite with a line break": ((*ROUTE, "prefixRewrite"), "/x\r\n"),
    "host rewrite with a port": ((*ROUTE, "hostRewrite"), "a:80"),
    "host rewrite with a path": ((*ROUTE, "hostRewrite"), "a/b"),
    "redirect to a script": ((*LISTENER, "routes", 2, "redirect", "scheme"), "javascript"),
    "redirect to a host with userinfo": ((*LISTENER, "routes", 2, "redirect", "host"), "a@b"),
    "redirect without a change": ((*LISTENER, "routes", 2, "redirect"), {"status": 301}),
    "redirect path to another site": ((*LISTENER, "routes", 2, "redirect"), {"path": "//evil.example"}),
    "informational response": ((*LISTENER, "routes", 3, "response", "status"), 101),
    "a body beyond the bound": ((*LISTENER, "routes", 3, "response", "body"), "a" * 1025),
    "a type with a line break": ((*LISTENER, "routes", 3, "response", "contentType"), "a\r\nset-cookie: x"),
    "credentials for everybody": ((*ROUTE, "cors"), {"origins": ["*"], "credentials": True}),
    "endless retries": ((*ROUTE, "retries", "attempts"), 1_000_000),
    "a timeout of years": ((*ROUTE, "timeout"), "99999m"),
    "a negative weight": ((*LISTENER, "routes", 1, "backends", 0, "weight"), -1),
    "only zero weights": ((*LISTENER, "routes", 1, "backends"), [{"name": "app", "weight": 0}]),
    "an undeclared canary": ((*LISTENER, "routes", 1, "backends"), [{"name": "other-team"}]),
    "an undeclared mirror": ((*ROUTE, "mirror", "backend"), "other-team"),
    "a rate of nothing": ((*ROUTE, "rateLimit", "requests"), 0),
    "a range of addresses with host bits": ((*ROUTE, "access", "allow"), ["10.0.0.7/8"]),
    "a mapped range": ((*ROUTE, "access", "allow"), ["::ffff:10.0.0.0/104"]),
    "a pattern in a query": ((*MATCH, "queryParams"), [{"name": "a", "value": ".*"}]),
    "a pattern as a host": (HOST, "*.*"),
    "a host with a port": (HOST, "a.example.com:443"),
    "an escaped path": ((*MATCH, "pathPrefix"), "/%2e%2e"),
    "a path upwards": ((*MATCH, "pathPrefix"), "/a/../b"),
    "a Service of another namespace": ((*BACKEND, "service"), {"name": "app.team-b", "port": 80}),
    "endpoints beside a Service": ((*BACKEND, "service"), {"name": "app", "port": 80}),
    "a certificate outside of the namespace": ((*LISTENER, "tls"), {"secretName": "../../kube-system/tls"}),
    "a CA outside of the namespace": ((*BACKEND, "tls", "caSecretName"), "../../kube-system/ca"),
    "a server name with a pattern": ((*BACKEND, "tls", "serverName"), "*"),
    "every endpoint ejected": ((*BACKEND, "outlierDetection", "maxEjectedPercent"), 100),
    "checks without a pause": ((*BACKEND, "healthCheck", "interval"), "0s"),
    "a check upwards": ((*BACKEND, "healthCheck", "path"), "/../admin"),
    "a million connections": ((*BACKEND, "maxConnections"), 1_000_000),
    "a URL as an endpoint": ((*ENDPOINT, "host"), "http://a"),
    "an octal address": ((*ENDPOINT, "host"), "0177.0.0.1"),
    "a decimal address": ((*ENDPOINT, "host"), "2130706433"),
    "a hexadecimal address": ((*ENDPOINT, "host"), "0x7f000001"),
    "an address with a zone": ((*ENDPOINT, "host"), "fe80::1%eth0"),
    "a mapped address": ((*ENDPOINT, "host"), "::ffff:127.0.0.1"),
    "HTTP on a TCP listener": ((*TCP_LISTENER, "httpsRedirect"), True),
    "routes on a TCP listener": ((*TCP_LISTENER, "routes"), [{"response": {"status": 200}}]),
    "hundreds of hops": ((*LISTENER, "trustedHops"), 100),
    "headers of a gigabyte": ((*LISTENER, "limits", "maxHeaderKilobytes"), 1_048_576),
    "a label of the operator": ((*_SPEC, "podLabels"), {"edge.operator-app.dev/owner-uid": "x"}),
    "another proxy's selector": ((*_SPEC, "podLabels"), {"app.kubernetes.io/instance": "other"}),
    "an annotation of the operator": (_ANNOTATIONS, {"edge.operator-app.dev/installation": "x"}),
    "the configuration of kubectl": (_ANNOTATIONS, {"kubectl.kubernetes.io/last-applied-configuration": "{}"}),
    "the highest priority": ((*_SPEC, "priorityClassName"), "system-node-critical"),
    "a budget that blocks drains": ((*_SPEC, "disruption", "maxUnavailable"), 0),
    "an autoscaler from nothing": ((*_SPEC, "autoscaling"), {"minReplicas": 0, "maxReplicas": 1}),
    "an autoscaler without a bound": ((*_SPEC, "autoscaling"), {"maxReplicas": 10_000}),
    "a device": ((*_SPEC, "resources"), {"limits": {"nvidia.com/gpu": "1"}}),
    "an image with a shell": ((*_SPEC, "image"), "a; rm -rf /"),
    "a peer of nothing": ((*_SPEC, "networkPolicy", "from"), [{}]),
    "a Secret with a path": ((*_SPEC, "imagePullSecrets"), [{"name": "../x"}]),
}
"""Refused by the rules of the schema, each with a sentence."""

NOT_ALLOWED: Final[Hostile] = {
    "another registry": ((*_SPEC, "image"), "evil.example/envoy:v1"),
    "a registry that begins alike": ((*_SPEC, "image"), "envoyproxy.evil.example/envoy:v1"),
    "a repository that begins alike": ((*_SPEC, "image"), "envoyproxy/envoy-evil:v1"),
    "an annotation of a cloud": (_ANNOTATIONS, {"service.beta.kubernetes.io/aws-load-balancer-internal": "false"}),
    "an annotation of a service mesh": ((*_SPEC, "podAnnotations"), {"sidecar.istio.io/inject": "true"}),
    "the metadata service": ((*ENDPOINT, "host"), "169.254.169.254"),
    "the metadata service by IPv6": ((*ENDPOINT, "host"), "fd00:ec2::254"),
    "loopback": ((*ENDPOINT, "host"), "127.0.0.1"),
    "another loopback": ((*ENDPOINT, "host"), "127.1.2.3"),
    "loopback by IPv6": ((*ENDPOINT, "host"), "::1"),
    "a neighbour on the link": ((*ENDPOINT, "host"), "fe80::1"),
    "the API server's network": ((*ENDPOINT, "host"), "10.96.0.1"),
    "a choice of nodes where the platform has it": (
        (*_SPEC, "affinity"),
        {"nodes": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}]},
    ),
    "a port on every node": ((*_SPEC, "service"), {"type": "NodePort"}),
}
"""Refused by the policy of ``tests/unit/test_tenant_policy.py``, each with a sentence."""

HARMLESS: Final[Hostile] = {
    "a format string of Envoy": ((*_SET, "value"), "%REQ(authorization)% %DOWNSTREAM_LOCAL_ADDRESS%"),
    "a broken format string": ((*_SET, "value"), "%"),
    "a template": ((*_SET, "value"), "{{ .Values }} $(POD_NAME) ${HOME}"),
    "a format string as a body": (
        (*LISTENER, "routes", 3, "response"),
        {"status": 200, "body": '%RESPONSE_CODE% {"a": 1}\r\n\u2028'},
    ),
    "a format string in a match": (
        (*LISTENER, "routes", 1, "match", "headers"),
        [{"name": "x-a", "value": "%REQ(:path)%.*"}],
    ),
    "an origin with a pattern": ((*ROUTE, "cors", "origins"), [".*", "https://*.example.com"]),
}
"""Accepted, and shown to mean nothing but their letters by ``tests/e2e/traffic/test_hostile.py``."""
