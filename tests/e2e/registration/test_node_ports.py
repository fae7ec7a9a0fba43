"""NodePort Services in DNS: of no use by default, and by a setting the addresses of nodes, as a resolver sees them."""

import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest

from operator_app.api.kinds import (
    ENVOY_PROXY,
    FIELD_MANAGER,
    LABEL_INSTANCE,
    LABEL_MANAGED_BY,
    LABEL_OWNER_UID,
    NODE,
    POD,
    Key,
    Object,
    key_of,
)
from tests.e2e.kube import Kube, apply_manifest, kind_of, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.powerdns.fixture import powerdns as powerdns  # noqa: PLC0414  # fixtures are found by their import
from tests.e2e.powerdns.fixture import recursor as recursor  # noqa: PLC0414
from tests.e2e.powerdns.fixture import zone as zone  # noqa: PLC0414
from tests.e2e.powerdns.recursor import Recursor
from tests.e2e.powerdns.server import Zone
from tests.e2e.proxies import CONVERGE_TIMEOUT_S, a_proxy, condition, holds, is_refused
from tests.e2e.registration.test_powerdns_operator import powerdns_flags
from tests.paths import MANIFESTS

ROLE = MANIFESTS / "components" / "node-addresses" / "cluster-role-nodes.yaml"
WEB, FAR = "203.0.113.7", ("203.0.113.8", "2001:db8::8")

Start = Callable[..., None]


@pytest.fixture
def start(operator: OperatorProcess, zone: Zone) -> Start:
    """A function that starts the operator with the test's zone and further flags."""
    return lambda *flags, **how: operator.start(*powerdns_flags(zone.server.url, zone), *flags, **how)


@pytest.fixture
def right_to_watch_nodes(admin: Kube) -> Iterator[None]:
    """The role of the component, for the time of the test."""
    granted = apply_manifest(admin, ROLE)
    yield
    for each in granted:
        admin.delete(kind_of(each), key_of(each))


@pytest.fixture
def nodes_in_sight(admin: Kube) -> Iterator[tuple[Key, Key]]:
    """Two ready nodes, on which nothing can run: the first has an IPv4 address outside, the second IPv6 as well."""
    made = []
    for outside in ((WEB,), FAR):
        key = Key("", f"test-{uuid.uuid4().hex[:8]}")
        admin.create(NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": key.name}})
        made.append(key)
        addresses = [{"type": "InternalIP", "address": "10.0.0.9"}, {"type": "Hostname", "address": key.name}]
        addresses += [{"type": "ExternalIP", "address": each} for each in outside]
        admin.patch(NODE, key, {"status": {"addresses": addresses}}, subresource="status")
        is_ready(admin, key, "True")
    yield made[0], made[1]
    for key in made:
        admin.delete(NODE, key)


def is_ready(admin: Kube, node: Key, status: str) -> None:
    """Say of a node whether it is ready, as its kubelet does, or the control plane when it does not hear from it."""
    condition = {"type": "Ready", "status": status, "reason": "Test", "message": "said by the test"}
    conditions = [condition | {"lastHeartbeatTime": datetime.now(UTC).isoformat(timespec="seconds")}]
    admin.patch(NODE, node, {"status": {"conditions": conditions}}, subresource="status", patch_type="strategic-merge")


def a_node_port(zone: Zone, namespace: str) -> Object:
    """A proxy with a hostname and a NodePort Service."""
    return a_proxy(namespace, registration={"hostname": f"shop.{zone.name}"}, service={"type": "NodePort"})


def a_pod_of(admin: Kube, proxy: Key, node: Key) -> Key:
    """A ready Pod of the proxy on a node."""
    uid = admin.get(ENVOY_PROXY, proxy)["metadata"]["uid"]
    labels = {LABEL_MANAGED_BY: FIELD_MANAGER, LABEL_INSTANCE: proxy.name, LABEL_OWNER_UID: uid}
    spec = {
        "containers": [{"name": "envoy", "image": "none"}],
        "nodeName": node.name,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
    }
    metadata = {"namespace": proxy.namespace, "name": f"on-{node.name}", "labels": labels}
    pod = key_of(admin.create(POD, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}))
    admin.patch(POD, pod, {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, subresource="status")
    return pod


def test_a_resolver_gets_nodes_that_are_ready_and_schedulable(
    admin: Kube,
    namespace: str,
    start: Start,
    recursor: Recursor,
    zone: Zone,
    right_to_watch_nodes: None,  # noqa: ARG001
    nodes_in_sight: tuple[Key, Key],
) -> None:
    """Their ExternalIPs, A and AAAA, through every change of nodes; with local traffic, where a ready Pod is."""
    hostname, key, (near, far) = f"shop.{zone.name}", Key(namespace, "web"), nodes_in_sight

    def resolves(*addresses: str, unknown: tuple[Key, ...] = ()) -> None:
        for node in nodes_in_sight:  # said each time, since a node that says nothing for 50 s is unknown
            is_ready(admin, node, "Unknown" if node in unknown else "True")
        wait_until(
            lambda: recursor.addresses(hostname) == set(addresses), CONVERGE_TIMEOUT_S, f"{hostname} {addresses}"
        )

    start("--node-port-addresses=external")
    admin.create(ENVOY_PROXY, a_node_port(zone, namespace))
    live = admin.wait_until(ENVOY_PROXY, key, holds("Registered"), CONVERGE_TIMEOUT_S)
    assert recursor.addresses(hostname) == {WEB, *FAR}
    assert live["status"]["address"] == WEB

    admin.patch(NODE, far, {"spec": {"unschedulable": True}})
    resolves(WEB)
    admin.patch(NODE, far, {"spec": {"unschedulable": None}})
    resolves(WEB, *FAR)
    resolves(*FAR, unknown=(near,))
    resolves(WEB, *FAR, unknown=(near, far))  # not one is ready: that is the control plane's trouble

    admin.patch(ENVOY_PROXY, key, {"spec": {"service": {"externalTrafficPolicy": "Local"}}})
    first = a_pod_of(admin, key, far)
    resolves(*FAR)
    a_pod_of(admin, key, near)
    resolves(WEB, *FAR)
    admin.delete(POD, first)
    resolves(WEB)
    admin.patch(ENVOY_PROXY, key, {"spec": {"service": {"type": "ClusterIP", "externalTrafficPolicy": None}}})
    admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "AddressUnusable"), CONVERGE_TIMEOUT_S)
    resolves()


def test_by_default_a_node_port_is_of_no_use_outside(admin: Kube, namespace: str, start: Start, zone: Zone) -> None:
    """``AddressUnusable``, and what to do about it, whatever nodes there are; nothing is written to PowerDNS."""
    foreign, key = zone.rows(), Key(namespace, "web")
    start()
    admin.create(ENVOY_PROXY, a_node_port(zone, namespace))
    refused = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "AddressUnusable"), CONVERGE_TIMEOUT_S)
    message = condition(refused, "Registered")["message"]
    assert "LoadBalancer" in message
    assert "OPERATOR_APP_NODE_PORT_ADDRESSES" in message
    assert zone.rows() == foreign


def test_an_operator_that_may_not_watch_nodes_does_not_become_ready(operator: OperatorProcess, start: Start) -> None:
    """With the setting and without the role nothing is reconciled on a guess, and the log says what is missing."""
    start("--node-port-addresses=external", wait=False)
    told = operator.wait_for("watch_failed")
    assert told["kind"] == "Node"
    assert "nodes" in told["error"]
    assert operator.get("/readyz")[0] == 503
