"""A proxy's NetworkPolicy, by packets: who reaches the proxy and what the proxy reaches, where policies are enforced.

Clients and servers are in the networks of Pods that do nothing else. The operator is in one, too, in another namespace
than the proxies, as in a cluster: what comes from a node itself, such as the kubelet's probes, passes every policy.
"""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import dns.message
import dns.query
import pytest

from operator_app.api.kinds import ENVOY_PROXY, NETWORK_POLICY, SERVICE, Key, Object, key_of
from operator_app.api.models import METRICS_PORT, READINESS_PORT
from operator_app.desired import child_key
from tests.e2e.envoy.test_traffic import READY_TIMEOUT_S, is_ready, proxy_pods
from tests.e2e.kube import POD, SERVICE_ACCOUNT, Kube, wait_until
from tests.e2e.node import Node, network
from tests.e2e.node.addresses import API_SERVER_PORT, NODE_ADDRESS
from tests.e2e.node.configuration import PAUSE_IMAGE
from tests.e2e.node.fixture import Nodes
from tests.e2e.node.fixture import enforced_policies as enforced_policies  # noqa: PLC0414  # a fixture, by its import
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import a_proxy, holds, leave_nothing, wait_ready
from tests.e2e.traffic.servers import serving

PORT: Final = 10080
"""Of the container, for the listener's port 80."""

TIMEOUT_S: Final = 5.0
METADATA: Final = "169.254.169.254"
"""Where clouds serve the credentials of a node."""

CLIENT: Final = {"role": "client"}

pytestmark = [pytest.mark.usefixtures("running_operator"), pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True)
class Place:
    """The network of a Pod."""

    address: str
    network: Path

    def ask(self, address: str, port: int, path: str = "/") -> str | None:
        """The text of an answer with status 200, asked for from here; None where none comes."""
        with network.inside(self.network):
            try:
                status, text = network.get(address, port, path, timeout_s=TIMEOUT_S)
            except OSError:
                return None
        return text if status == 200 else None

    def reaches(self, address: str, port: int) -> bool:
        """Whether a connection from here is accepted there."""
        with network.inside(self.network):
            try:
                socket.create_connection((address, port), TIMEOUT_S).close()
            except OSError:
                return False
        return True

    def looks_up(self, name: str, transport: Literal["udp", "tcp"]) -> str:
        """What the cluster's DNS server says of a name. Raises ``OSError`` or ``dns.exception.Timeout``."""
        query = dns.message.make_query(name, "A")
        with network.inside(self.network):
            found = getattr(dns.query, transport)(query, NODE_ADDRESS, timeout=TIMEOUT_S)
        return str(found.answer[0][0])

    def serving(self, name: str, port: int) -> AbstractContextManager[None]:
        """A server here that answers with its name."""
        return _served(self.network, name, (self.address, port))


@contextmanager
def _served(namespace: Path, name: str, address: tuple[str, int]) -> Iterator[None]:
    with ExitStack() as running:
        with network.inside(namespace):
            running.enter_context(serving(name, address=address))
        yield


@contextmanager
def metadata_service(node: Node, port: int) -> Iterator[None]:
    """A server at the address of a cloud's metadata service, where Pods of the node reach it."""
    address = (f"{METADATA}/32", "dev", "node0")
    subprocess.run(node.command("ip", "address", "add", *address), check=True)
    try:
        with _served(node.network, "credentials", (METADATA, port)):
            yield
    finally:
        subprocess.run(node.command("ip", "address", "delete", *address), check=True)


def idle(namespace: str, name: str, labels: Object) -> Object:
    """A Pod that has a network and nothing else."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": labels},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [{"name": "pause", "image": PAUSE_IMAGE, "imagePullPolicy": "Never"}],
        },
    }


def places(admin: Kube, node: Node, *pods: Object) -> list[Place]:
    """The networks of these Pods, which are started for it."""
    for pod in pods:
        admin.create(POD, pod)
    return [place_of(node, admin.wait_until(POD, key_of(pod), is_ready, READY_TIMEOUT_S)) for pod in pods]


def place_of(node: Node, pod: Object) -> Place:
    """The network of a Pod that runs."""
    return Place(pod["status"]["podIP"], node.pod_network(pod))


def create_service(admin: Kube, namespace: str, name: str, labels: Object, port: int) -> str:
    """Create a Service with port 80 for a port of the Pods with these labels; returns its address."""
    spec = {"selector": labels, "ports": [{"port": 80, "targetPort": port}]}
    metadata = {"namespace": namespace, "name": name}
    service = admin.create(SERVICE, {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    return str(service["spec"]["clusterIP"])


@pytest.fixture
def namespace(admin: Kube, namespace: str, nodes: Nodes) -> str:  # noqa: ARG001  # its Pods run
    """The proxy's namespace."""
    admin.wait_until(SERVICE_ACCOUNT, Key(namespace, "default"), bool)
    return namespace


@pytest.fixture
def elsewhere(admin: Kube, namespace: str) -> Iterator[str]:
    """Another namespace."""
    name = f"{namespace}-else"
    admin.create_namespace(name, takes_nodes=True)
    admin.wait_until(SERVICE_ACCOUNT, Key(name, "default"), bool)
    yield name
    leave_nothing(admin, name)


@pytest.fixture
def platform(admin: Kube, elsewhere: str, enforced_policies: Node) -> Place:
    """The network of a Pod in the other namespace that no policy names."""
    (place,) = places(admin, enforced_policies, idle(elsewhere, "platform", {}))
    return place


@pytest.fixture
def running_operator(platform: Place, operator: OperatorProcess) -> OperatorProcess:
    """The operator, in the network of that Pod."""
    operator.network = platform.network
    operator.start()
    return operator


def test_named_clients_alone_get_an_answer(
    admin: Kube, namespace: str, elsewhere: str, platform: Place, enforced_policies: Node
) -> None:
    """Named by labels, namespace or address; everybody before and after. The operator and scrapers ask at all times."""
    node, key = enforced_policies, Key(namespace, "web")
    app, *named, stranger = places(
        admin,
        node,
        idle(namespace, "app", {}),
        idle(namespace, "by-label", CLIENT),
        idle(elsewhere, "by-namespace", CLIENT),
        idle(namespace, "by-address", {}),
        idle(namespace, "stranger", {}),
    )
    others = (stranger, platform)
    peers = [
        {"podLabels": CLIENT},
        {"namespace": elsewhere, "podLabels": CLIENT},
        {"cidr": f"{named[-1].address}/32"},
    ]
    backends = [{"name": "app", "endpoints": [{"host": app.address, "port": 8080}]}]
    with app.serving("app", 8080):
        admin.create(ENVOY_PROXY, a_proxy(namespace, backends=backends, telemetry={"metrics": True}))
        wait_ready(admin, key, READY_TIMEOUT_S)
        service = admin.get(SERVICE, child_key(key))["spec"]["clusterIP"]

        def answers(place: Place) -> set[str | None]:
            ways = [(service, 80), *((pod["status"]["podIP"], PORT) for pod in proxy_pods(admin, key))]
            return {place.ask(*way) for way in ways}

        def all_get(*answer: str | None) -> bool:
            return all(answers(each) == set(answer) for each in others)

        wait_until(lambda: all_get("app"), what="an answer for everybody")
        assert [answers(each) for each in named] == [{"app"}] * 3

        admin.patch(ENVOY_PROXY, key, {"spec": {"networkPolicy": {"from": peers}}})
        wait_until(lambda: all_get(None), what="the end of answers for whom nobody names")
        assert [answers(each) for each in named] == [{"app"}] * 3

        # Another Pod gets ready and is asked what it has loaded, under the policy from its start.
        admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": 2}})
        admin.wait_until(ENVOY_PROXY, key, lambda live: live["status"].get("readyReplicas") == 2, READY_TIMEOUT_S)
        for kind in ("Programmed", "Ready"):
            admin.wait_until(ENVOY_PROXY, key, holds(kind, generation=3), READY_TIMEOUT_S)
        wait_until(lambda: all_get(None), what="the end of answers of the second Pod")
        assert [answers(each) for each in named] == [{"app"}] * 3
        pods = [pod["status"]["podIP"] for pod in proxy_pods(admin, key)]
        assert len(pods) == 2
        for each in others:
            for address in pods:
                assert each.ask(address, READINESS_PORT, "/ready") is not None
                assert "envoy_" in (each.ask(address, METRICS_PORT, "/stats/prometheus") or "")

        admin.patch(ENVOY_PROXY, key, {"spec": {"networkPolicy": None}})
        admin.wait_gone(NETWORK_POLICY, child_key(key))
        wait_until(lambda: all_get("app"), what="an answer for everybody again")


def test_what_the_spec_names_is_reached_and_nothing_else(
    admin: Kube, namespace: str, elsewhere: str, enforced_policies: Node
) -> None:
    """A Service of the namespace, an address, DNS, and a backend from its edit on to the edit that removes it."""
    node, key = enforced_policies, Key(namespace, "web")
    labels = ({"app": "app"}, {"app": "db"})
    app, db = places(admin, node, idle(namespace, "app", labels[0]), idle(elsewhere, "db", labels[1]))
    service = create_service(admin, namespace, "app", labels[0], 8080)
    create_service(admin, elsewhere, "later", labels[1], 8081)

    declared: dict[str, Object] = {
        "app": {"service": {"name": "app", "port": 80}},
        "db": {"endpoints": [{"host": db.address, "port": 8080}]},
        "outside": {"endpoints": [{"host": "api.example.com", "port": 8082}]},
        "later": {"endpoints": [{"host": f"later.{elsewhere}.svc", "port": 80}]},
    }

    def to(*backends: str) -> Object:
        routes = [{"match": {"pathPrefix": f"/{each}"}, "backend": each} for each in backends]
        spec: Object = a_proxy(
            namespace,
            networkPolicy={},
            listeners=[{"name": "http", "port": 80, "routes": routes}],
            backends=[{"name": each, **declared[each], "connectTimeout": "1s"} for each in backends],
        )
        return spec

    with (
        app.serving("app", 8080),
        db.serving("db", 8080),
        db.serving("later", 8081),
        db.serving("outside", 8082),
        metadata_service(node, 8082),
    ):
        admin.create(ENVOY_PROXY, to("app", "db", "outside"))
        wait_ready(admin, key, READY_TIMEOUT_S)
        (pod,) = proxy_pods(admin, key)
        proxy = place_of(node, pod)

        def forwarded(backend: str) -> str | None:
            return app.ask(proxy.address, PORT, f"/{backend}")

        unnamed = ((db.address, 8081), (NODE_ADDRESS, API_SERVER_PORT), (METADATA, 8082))
        wait_until(lambda: not any(proxy.reaches(*each) for each in unnamed), what="an end of what is not named")
        assert all(app.reaches(*each) for each in unnamed), "the policy is the proxy's alone"
        assert proxy.reaches(db.address, 8082), "a name outside of the cluster may have any address"
        for transport in ("udp", "tcp"):
            assert proxy.looks_up(f"app.{namespace}.svc.cluster.local", transport) == service
        wait_until(lambda: forwarded("app") == "app", what="the Service of the namespace")
        wait_until(lambda: forwarded("db") == "db", what="the address")

        admin.patch(ENVOY_PROXY, key, {"spec": to("app", "db", "later")["spec"]})
        wait_until(lambda: forwarded("later") == "later", what="the backend that the edit has added")
        assert forwarded("db") == "db"

        admin.patch(ENVOY_PROXY, key, {"spec": to("app")["spec"]})
        removed = [(db.address, each) for each in (8080, 8081, 8082)]
        wait_until(lambda: not any(proxy.reaches(*each) for each in removed), what="an end of what was removed")
        assert all(app.reaches(*each) for each in removed)
        admin.wait_until(ENVOY_PROXY, key, holds("Ready", generation=3), READY_TIMEOUT_S)
        assert forwarded("app") == "app"
        assert [key_of(each) for each in proxy_pods(admin, key)] == [key_of(pod)]
