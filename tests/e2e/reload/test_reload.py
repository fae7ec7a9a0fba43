"""Edits under traffic on a real node: the same Pods take them within seconds, lose nothing, and the status says so."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import CONFIG_MAP, ENVOY_PROXY, POD, Key, Object, key_of
from operator_app.desired import child_key
from tests.e2e.controlplane import AuditLog
from tests.e2e.envoy.test_traffic import BACKENDS, READY_TIMEOUT_S, Client, create_backends, proxy_pods
from tests.e2e.kube import SERVICE_ACCOUNT, Kube, KubeError, wait_until
from tests.e2e.node.fixture import Nodes
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, a_proxy, condition, holds, wait_ready

ARRIVAL_S: Final = 30.0
"""Generous: a kubelet that is not touched takes 60 to 90 s."""

PORT: Final = 10080

pytestmark = [pytest.mark.reload, pytest.mark.usefixtures("running_operator"), pytest.mark.timeout(900)]


@pytest.fixture
def namespace(admin: Kube, namespace: str, nodes: Nodes) -> str:
    """A namespace in which Pods may be created, with backends that answer with their names."""
    if nodes.local is None:
        pytest.skip("the operator of this test runs where Pods can be reached, which takes the local node")
    admin.wait_until(SERVICE_ACCOUNT, Key(namespace, "default"), bool)
    create_backends(admin, namespace)
    return namespace


def routed(namespace: str, to: str, *names: str, replicas: int = 1) -> Object:
    """A proxy that routes everything to the backend ``to``, and knows the backends ``names`` besides."""
    host = f"backends.{namespace}.svc.cluster.local"
    return a_proxy(
        namespace,
        replicas=replicas,
        listeners=[{"name": "http", "port": 80, "routes": [{"backend": to}]}],
        backends=[
            {"name": name, "endpoints": [{"host": host, "port": BACKENDS[name]}], "connectTimeout": "1s"}
            for name in sorted({to, *names})
        ],
    )


def serving(admin: Kube, key: Key, nodes: Nodes, answer: str) -> list[tuple[Object, str]]:
    """The Pods of a proxy that is ready, with their addresses, once each answers with a backend's name."""
    wait_ready(admin, key, READY_TIMEOUT_S)
    ask = Client(nodes)
    found = [(pod, str(pod["status"]["podIP"])) for pod in proxy_pods(admin, key)]
    for _, address in found:
        wait_until(lambda address=address: ask(address, PORT) == (200, answer), ARRIVAL_S, f"{answer} at {address}")  # type: ignore[misc]
    return found


class Kept(threading.Thread):
    """Sends requests on one kept connection until it is told to stop; a lost or refused one is a failure."""

    def __init__(self, nodes: Nodes, address: str, stop: threading.Event) -> None:
        super().__init__()
        self._nodes, self._address, self._stop_asked = nodes, address, stop
        self.answers: list[str] = []
        self.failures: list[str] = []

    def run(self) -> None:
        """Ask, about forty times a second."""
        connection = HTTPConnection(self._address, PORT, timeout=10)
        with self._nodes.inside():
            connection.connect()
        while not self._stop_asked.wait(0.02):
            try:
                connection.request("GET", "/", headers={"Host": "shop.example.com"})
                answer = connection.getresponse()
                text = answer.read().decode()
            except (OSError, HTTPException) as error:
                self.failures.append(repr(error))
                break
            if answer.status == 200:
                self.answers.append(text)
            else:
                self.failures.append(f"{answer.status} {text}")
            if answer.getheader("connection") == "close":
                self.failures.append("the connection was closed")
                break
        connection.close()


@contextmanager
def traffic(nodes: Nodes, addresses: list[str], each: int) -> Iterator[list[Kept]]:
    """That many kept connections to each address while the block lasts."""
    stop = threading.Event()
    with ExitStack() as stack:
        clients = [Kept(nodes, address, stop) for address in addresses for _ in range(each)]
        for client in clients:
            client.start()
            stack.callback(client.join, 15)
        stack.callback(stop.set)
        yield clients


def edit(admin: Kube, key: Key, spec: Object) -> int:
    """Replace the spec; returns the new generation."""
    patch = [{"op": "replace", "path": "/spec", "value": spec["spec"]}]
    generation: int = admin.patch(ENVOY_PROXY, key, patch, patch_type="json")["metadata"]["generation"]
    return generation


def test_edits_of_routes_arrive_in_seconds_and_lose_nothing(admin: Kube, namespace: str, nodes: Nodes) -> None:
    """Under traffic on kept connections, at two Pods, each edit is answered by all and told; no request is lost."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, routed(namespace, "app", "next", replicas=2))
    pods = serving(admin, key, nodes, "app")
    with traffic(nodes, [address for _, address in pods], 4) as clients:
        for number in range(6):
            to = ("next", "app")[number % 2]
            generation = edit(admin, key, routed(namespace, to, "app", "next", replicas=2))
            wait_until(lambda to=to: all(each.answers[-1:] == [to] for each in clients), ARRIVAL_S, f"{to} at all")  # type: ignore[misc]
            proxy = admin.wait_until(ENVOY_PROXY, key, holds("Programmed", generation=generation), ARRIVAL_S)
            assert holds("Ready")(proxy)
    assert [each.failures for each in clients] == [[] for _ in clients]
    assert {name for each in clients for name in each.answers} == {"app", "next"}
    after = {each["metadata"]["uid"]: each for each in proxy_pods(admin, key)}
    assert set(after) == {pod["metadata"]["uid"] for pod, _ in pods}, "the same Pods"
    assert all(each["status"]["containerStatuses"][0]["restartCount"] == 0 for each in after.values())


def test_a_new_backend_is_made_before_the_old_one_is_broken(admin: Kube, namespace: str, nodes: Nodes) -> None:
    """Another backend in place of the only one, under traffic: no request meets a cluster that is not there.

    Each such edit takes three writes of the ConfigMap, and many in a row are taken for no other writer's.
    """
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, routed(namespace, "app"))
    ((_, address),) = serving(admin, key, nodes, "app")
    with traffic(nodes, [address], 4) as clients:
        for to in ("next", "assets", "app") * 3:
            generation = edit(admin, key, routed(namespace, to))
            admin.wait_until(ENVOY_PROXY, key, holds("Programmed", generation=generation), ARRIVAL_S)
            wait_until(lambda to=to: all(each.answers[-1:] == [to] for each in clients), ARRIVAL_S, f"{to} at all")  # type: ignore[misc]
    assert [each.failures for each in clients] == [[] for _ in clients]
    data = admin.get(CONFIG_MAP, child_key(key))["data"]
    assert "backend/next" not in data["cds.json"], "what is not declared any more is gone"
    assert condition(admin.get(ENVOY_PROXY, key), "Contended") == {}


def test_a_quiet_proxy_causes_no_request(admin: Kube, namespace: str, nodes: Nodes, audit: AuditLog) -> None:
    """Once all is loaded nothing is written and nothing read; one edit of a route costs one touch of each Pod."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, routed(namespace, "app", "next", replicas=2))
    serving(admin, key, nodes, "app")
    time.sleep(3)
    mark = audit.mark()
    time.sleep(3)
    assert [each for each in audit.writes(OPERATOR_USER, mark) if each.namespace == namespace] == []
    mark = audit.mark()
    generation = edit(admin, key, routed(namespace, "next", "app", replicas=2))
    admin.wait_until(ENVOY_PROXY, key, holds("Programmed", generation=generation), ARRIVAL_S)
    time.sleep(2)
    written = sorted(each.resource for each in audit.writes(OPERATOR_USER, mark) if each.namespace == namespace)
    assert written.count("configmaps") == 1
    assert written.count("pods") == 2
    assert set(written) <= {"configmaps", "pods", "envoyproxies"}


def test_a_pod_that_cannot_be_asked_is_told(admin: Kube, namespace: str, nodes: Nodes) -> None:
    """While a Pod is ready and its address leads nowhere, ``Programmed`` is Unknown and names it."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, routed(namespace, "app", "next"))
    ((pod, address),) = serving(admin, key, nodes, "app")
    assert nodes.local is not None
    with nodes.local.unreachable(address):
        generation = edit(admin, key, routed(namespace, "next", "app"))
        found = admin.wait_until(
            ENVOY_PROXY,
            key,
            lambda live: (
                condition(live, "Programmed").get("status") == "Unknown"
                and condition(live, "Programmed")["observedGeneration"] == generation
            ),
            ARRIVAL_S,
        )
        assert condition(found, "Programmed")["reason"] == "PodUnreachable"
        assert pod["metadata"]["name"] in condition(found, "Programmed")["message"]
        assert condition(found, "Ready")["status"] == "Unknown"
    admin.wait_until(ENVOY_PROXY, key, holds("Ready", generation=generation), READY_TIMEOUT_S)
    assert Client(nodes)(address, PORT) == (200, "next"), "what is told has arrived"


@pytest.mark.parametrize(
    ("patch", "subresource"),
    [
        ({"metadata": {"annotations": {"example.com/a": "b"}}}, "status"),
        ({"metadata": {"labels": {"a": "b"}}}, "status"),
        ({"status": {"message": "all is well"}}, "status"),
        ({"metadata": {"annotations": {"edge.operator-app.dev/revision": None}}}, "status"),
    ],
    ids=["another annotation", "a label", "status", "removal"],
)
def test_the_operator_can_do_no_more_to_a_pod_than_touch_it(
    admin: Kube, namespace: str, operator_kubeconfig: Path, patch: Object, subresource: str
) -> None:
    """RBAC lets it patch the status of Pods, and the admission policy lets through one annotation alone."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, routed(namespace, "app"))
    wait_ready(admin, key, READY_TIMEOUT_S)
    (pod,) = proxy_pods(admin, key)
    with Kube(operator_kubeconfig) as operator:
        touch = {"metadata": {"annotations": {"edge.operator-app.dev/configuration": "x"}}}
        operator.patch(POD, key_of(pod), touch, subresource="status")
        with pytest.raises(KubeError, match="the operator"):
            operator.patch(POD, key_of(pod), patch, subresource=subresource)
        with pytest.raises(KubeError, match="the operator touches only Pods with its label"):
            operator.patch(POD, Key(namespace, "backends"), touch, subresource="status")


def test_what_envoy_refuses_is_taken_back_and_told(
    admin: Kube, namespace: str, nodes: Nodes, running_operator: OperatorProcess
) -> None:
    """A route that Envoy refuses: the old one goes on serving, its text returns, and the status names Pod and file."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, routed(namespace, "app", "next"))
    ((pod, address),) = serving(admin, key, nodes, "app")
    before = admin.get(CONFIG_MAP, child_key(key))["data"]
    running_operator.stop()
    running_operator.start(module=("tests.e2e.reload.refused_operator",))
    admin.wait_until(ENVOY_PROXY, key, holds("Programmed"), READY_TIMEOUT_S)

    edited = routed(namespace, "next", "app")
    edited["spec"]["listeners"][0]["routes"].insert(0, {"match": {"pathExact": "/refused"}, "backend": "app"})
    edit(admin, key, edited)
    found = admin.wait_until(
        ENVOY_PROXY, key, lambda live: condition(live, "Programmed").get("reason") == "ConfigurationRefused", ARRIVAL_S
    )
    assert f"Pod {pod['metadata']['name']} refuses rds-http.json" in condition(found, "Programmed")["message"]
    assert "no such field: 'no_such_field'" in condition(found, "Programmed")["message"], "in Envoy's words"
    assert condition(found, "Stalled")["status"] == "True"
    restored = admin.wait_until(
        CONFIG_MAP, child_key(key), lambda live: json.dumps(live["data"]) == json.dumps(before), ARRIVAL_S
    )
    assert restored["data"] == before
    assert Client(nodes)(address, PORT) == (200, "app")

    generation = edit(admin, key, routed(namespace, "next", "app"))
    admin.wait_until(ENVOY_PROXY, key, holds("Ready", generation=generation), READY_TIMEOUT_S)
    wait_until(lambda: Client(nodes)(address, PORT) == (200, "next"), ARRIVAL_S, "the next edit")
