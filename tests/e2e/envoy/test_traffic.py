"""HTTP and TCP requests through running proxies, before, during and after an edit of the spec."""

import json
import os
import socket
import time
from typing import Any, Final

import pytest

from operator_app.api.kinds import CONFIG_MAP, DEPLOYMENT, ENVOY_PROXY, SERVICE, Key, Object, key_of
from operator_app.api.models import READINESS_PORT
from operator_app.desired import child_key, selector_labels
from tests.e2e.kube import POD, SERVICE_ACCOUNT, Kube, wait_until
from tests.e2e.node.fixture import Nodes
from tests.e2e.node.network import get
from tests.e2e.proxies import a_proxy, condition, history, holds, kstatus, objects_of, version, wait_ready

IMAGE: Final = "envoyproxy/envoy:v1.40.0"
READY_TIMEOUT_S: Final = 60.0
ARRIVAL_TIMEOUT_S: Final = 120.0
"""A kubelet that is left alone looks at a mounted ConfigMap every 60 to 90 s."""
BACKENDS: Final = {"app": 8080, "assets": 8081, "next": 8082}
"""Name and port of each backend; a backend responds with its name."""

pytestmark = [pytest.mark.usefixtures("running_operator"), pytest.mark.timeout(300)]


@pytest.fixture
def namespace(admin: Kube, namespace: str, nodes: Nodes) -> str:  # noqa: ARG001  # its Pods run
    """A namespace in which Pods may be created."""
    admin.wait_until(SERVICE_ACCOUNT, Key(namespace, "default"), bool)
    return namespace


def listener(name: str, port: int) -> Object:
    """An Envoy listener that responds to every request with its name."""
    types = "type.googleapis.com/envoy.extensions.filters"
    answer = {"match": {"prefix": "/"}, "direct_response": {"status": 200, "body": {"inline_string": name}}}
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": name, "domains": ["*"], "routes": [answer]}]},
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}
        ],
    }
    return {
        "name": name,
        "address": {"socket_address": {"address": "0.0.0.0", "port_value": port}},  # noqa: S104  # a Pod's own address
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def create_backends(admin: Kube, namespace: str) -> None:
    """Create one Pod with a listener for each backend, and the Service that resolves to it."""
    labels = {"app": "backends"}
    at = {"namespace": namespace, "name": "backends"}
    config = {"static_resources": {"listeners": [listener(name, port) for name, port in BACKENDS.items()]}}
    data = {"envoy.json": json.dumps(config)}
    admin.create(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": at, "data": data})
    container = {
        "name": "envoy",
        "image": IMAGE,
        "args": ["-c", "/etc/envoy/envoy.json", "--concurrency", "1", "--disable-hot-restart"],
        "readinessProbe": {"httpGet": {"path": "/", "port": BACKENDS["app"]}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/envoy", "readOnly": True}],
        "securityContext": {"runAsNonRoot": True, "runAsUser": 101, "runAsGroup": 101},
    }
    pod = {
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "backends"}}],
    }
    admin.create(POD, {"apiVersion": "v1", "kind": "Pod", "metadata": at | {"labels": labels}, "spec": pod})
    ports = [{"name": name, "port": port} for name, port in BACKENDS.items()]
    spec = {"selector": labels, "ports": ports}
    admin.create(SERVICE, {"apiVersion": "v1", "kind": "Service", "metadata": at, "spec": spec})


def routed(namespace: str, *, to: str = "app", **spec: Any) -> Object:
    """An EnvoyProxy with routes by host and by path, and a route for all other requests to the backend ``to``."""
    host = f"backends.{namespace}.svc.cluster.local"
    return a_proxy(
        namespace,
        listeners=[
            {
                "name": "http",
                "port": 80,
                "routes": [
                    {"match": {"hosts": ["assets.example.com"]}, "backend": "assets"},
                    {"match": {"pathPrefix": "/assets"}, "backend": "assets"},
                    {"match": {"hosts": ["closed.example.com"], "pathExact": "/only"}, "backend": "next"},
                    {"backend": to},
                ],
            },
            {"name": "tcp", "port": 5432, "protocol": "TCP", "routes": [{"backend": "next"}]},
        ],
        backends=[
            {"name": name, "endpoints": [{"host": host, "port": port}], "connectTimeout": "1s"}
            for name, port in BACKENDS.items()
        ],
        **spec,
    )


def proxy_pods(admin: Kube, key: Key) -> list[Object]:
    """The Pods of one proxy that have an address and are not being deleted."""
    selector = ",".join(f"{name}={value}" for name, value in selector_labels(key.name).items())
    pods = admin.list(POD, key.namespace, label_selector=selector)
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("podIP")]


def reachable(nodes: Nodes, pod: Object, port: int) -> str:
    """The address of a Pod; the test is skipped if Pods of another cluster can't be reached from here."""
    address: str = pod["status"]["podIP"]
    try:
        with nodes.inside():
            socket.create_connection((address, port), timeout=3).close()
    except OSError as error:
        if os.environ.get("E2E_KUBECONFIG"):
            pytest.skip(f"the Pods of this cluster can't be reached from here: {error}")
        raise
    return address


class Client:
    """Asks from where the Pods are."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def __call__(self, address: str, port: int, host: str = "shop.example.com", path: str = "/") -> tuple[int, str]:
        """Status and text of one answer, on a connection of its own."""
        with self._nodes.inside():
            return get(address, port, path, host=host, timeout_s=3)


def test_requests_reach_the_declared_backend(admin: Kube, namespace: str, nodes: Nodes) -> None:
    """Requests are routed by host, path and port as declared; an edit of routes is taken by the same Pod."""
    ask = Client(nodes)
    key = Key(namespace, "web")
    create_backends(admin, namespace)
    admin.create(ENVOY_PROXY, routed(namespace))
    proxy = wait_ready(admin, key, READY_TIMEOUT_S)
    assert kstatus(proxy) == "Current"
    assert all(condition(proxy, kind)["status"] == "True" for kind in ("Available", "Reconciled", "Registered"))
    assert (proxy["status"]["replicas"], proxy["status"]["readyReplicas"]) == (1, 1)

    (pod,) = proxy_pods(admin, key)
    address = reachable(nodes, pod, 10080)
    wait_until(lambda: ask(address, 10080) == (200, "app"), what="the backend to be resolved")
    assert ask(address, 10080, path="/assets/logo.png") == (200, "assets")
    assert ask(address, 10080, path="/assetsX") == (200, "app")
    assert ask(address, 10080, host="assets.example.com") == (200, "assets")
    assert ask(address, 10080, host="closed.example.com", path="/only") == (200, "next")
    assert ask(address, 10080, host="closed.example.com", path="/other") == (200, "app")
    assert ask(address, 5432) == (200, "next"), "a TCP listener forwards bytes"
    assert ask(address, READINESS_PORT, path="/ready")[0] == 200
    for path in ("/", "/readyz", "/stats", "/assets", "/ready/"):
        assert ask(address, READINESS_PORT, path=path)[0] == 404, "the readiness listener serves nothing else"

    before = objects_of(admin, key)
    admin.patch(ENVOY_PROXY, key, {"spec": routed(namespace, to="next")["spec"]})
    deadline_mono = time.monotonic() + ARRIVAL_TIMEOUT_S
    answers: list[tuple[int, str]] = []
    while not answers or answers[-1] != (200, "next"):
        assert time.monotonic() < deadline_mono, answers[-1]
        answers.append(ask(address, 10080))
        time.sleep(0.05)
    assert set(answers) == {(200, "app"), (200, "next")}, "the Pod serves the old route until it serves the new one"
    assert ask(address, 10080, path="/assets/logo.png") == (200, "assets")
    admin.wait_until(ENVOY_PROXY, key, holds("Ready", generation=2), READY_TIMEOUT_S)
    assert objects_of(admin, key).uids == before.uids
    (same,) = proxy_pods(admin, key)
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert same["status"]["containerStatuses"][0]["restartCount"] == 0

    after_edit = [each for each in history(admin, key, before.proxy) if each["metadata"]["generation"] == 2]
    assert all(condition(each, "Available")["status"] == "True" for each in after_edit), "a Pod is ready all the time"


def test_an_edit_of_a_port_replaces_the_pods(admin: Kube, namespace: str, nodes: Nodes) -> None:
    """A container port can't be reloaded: the old Pod serves as it was rolled out until the new one is ready."""
    ask = Client(nodes)
    key = Key(namespace, "web")
    create_backends(admin, namespace)
    admin.create(ENVOY_PROXY, routed(namespace))
    before = wait_ready(admin, key, READY_TIMEOUT_S)
    (pod,) = proxy_pods(admin, key)
    address = reachable(nodes, pod, 10080)
    wait_until(lambda: ask(address, 10080) == (200, "app"), what="the backend to be resolved")
    data = admin.get(CONFIG_MAP, child_key(key))["data"]

    edited = routed(namespace, to="next")["spec"]
    edited["listeners"][0]["targetPort"] = 10081
    admin.patch(ENVOY_PROXY, key, {"spec": edited})
    admin.wait_until(CONFIG_MAP, child_key(key), lambda live: len(live["data"]) == len(data) + 2, READY_TIMEOUT_S)
    deadline_mono = time.monotonic() + READY_TIMEOUT_S
    answers = []
    while not holds("Ready", generation=2)(admin.get(ENVOY_PROXY, key)):
        assert time.monotonic() < deadline_mono, condition(admin.get(ENVOY_PROXY, key), "Ready")
        answers.append(ask(address, 10080))
        time.sleep(0.05)
    assert {status for status, _ in answers} == {200}, "the old Pod listens at the old port to its end"
    wait_until(lambda: len(proxy_pods(admin, key)) == 1, READY_TIMEOUT_S, "the old Pod to go")

    (new,) = proxy_pods(admin, key)
    assert new["metadata"]["uid"] != pod["metadata"]["uid"]
    moved = reachable(nodes, new, 10081)
    wait_until(lambda: ask(moved, 10081) == (200, "next"), what="the backend to be resolved")
    left = admin.wait_until(CONFIG_MAP, child_key(key), lambda live: len(live["data"]) == len(data), READY_TIMEOUT_S)[
        "data"
    ]
    assert len(left.keys() & data.keys()) == len(data) - 2, "the files of the old revision go with its last Pod"

    after_edit = [each for each in history(admin, key, before) if each["metadata"]["generation"] == 2]
    ready_at = next(version(each) for each in after_edit if holds("Ready", generation=2)(each))
    waiting = [each for each in after_edit if version(each) < ready_at]
    assert all(kstatus(each) == "InProgress" for each in waiting)
    assert any(condition(each, "Reconciling").get("status") == "True" for each in waiting)
    assert all(condition(each, "Available")["status"] == "True" for each in after_edit), "a Pod is ready all the time"


@pytest.mark.reload
def test_a_pod_of_the_old_template_is_replaced_by_its_like(admin: Kube, namespace: str, nodes: Nodes) -> None:
    """While a rollout can't go on, a Pod that dies comes back with the ports of its template and the new routes."""
    ask = Client(nodes)
    key = Key(namespace, "web")
    create_backends(admin, namespace)
    admin.create(ENVOY_PROXY, routed(namespace))
    wait_ready(admin, key, READY_TIMEOUT_S)
    (pod,) = proxy_pods(admin, key)
    reachable(nodes, pod, 10080)

    edited = routed(namespace, to="next", image="example.com/not/an-image:v1")["spec"]
    edited["listeners"][0]["targetPort"] = 10081
    admin.patch(ENVOY_PROXY, key, {"spec": edited})
    admin.wait_until(ENVOY_PROXY, key, holds("Reconciled", generation=2), READY_TIMEOUT_S)
    admin.delete(POD, key_of(pod))

    def replacement() -> Object | None:
        pods = [each for each in proxy_pods(admin, key) if each["spec"]["containers"][0]["image"] == IMAGE]
        return next((each for each in pods if is_ready(each) and key_of(each) != key_of(pod)), None)

    successor = wait_until(replacement, what="a Pod of the old template")
    address = reachable(nodes, successor, 10080)
    wait_until(lambda: ask(address, 10080) == (200, "next"), what="the backend to be resolved")


def is_ready(pod: Object) -> bool:
    """Whether a Pod answers its readiness probe."""
    conditions = pod["status"].get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def test_a_proxy_that_cannot_start_is_not_ready(admin: Kube, namespace: str) -> None:
    """Without a ready Pod the proxy is reconciled but not available; it becomes ready once its image is valid."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, routed(namespace, image="example.com/not/an-image:v1"))
    admin.wait_until(ENVOY_PROXY, key, holds("Reconciled"), READY_TIMEOUT_S)
    time.sleep(2)
    proxy = admin.get(ENVOY_PROXY, key)
    assert condition(proxy, "Available")["status"] == condition(proxy, "Ready")["status"] == "False"
    assert proxy["status"]["readyReplicas"] == 0

    admin.patch(ENVOY_PROXY, key, {"spec": {"image": IMAGE, "replicas": 2}})
    recovered = wait_ready(admin, key, READY_TIMEOUT_S)
    assert admin.get(DEPLOYMENT, child_key(key))["status"]["readyReplicas"] == 2
    admin.wait_until(ENVOY_PROXY, key, lambda live: live["status"]["readyReplicas"] == 2)
    assert kstatus(recovered) == "Current"
