"""Where a proxy is reached: load balancers, nodes, and which of many."""

from collections.abc import Sequence

import pytest

from operator_app.api.kinds import LABEL_OWNER_UID, NODE, POD, Object
from operator_app.controller.scopes import KEPT, indexes_of
from operator_app.kube.store import Store
from operator_app.registration.addresses import MAX_ADDRESSES, Addresses
from operator_app.registration.nodes import UsableNode, usable_node

PROXY: Object = {"metadata": {"uid": "one"}}


def service(**spec: object) -> Object:
    """The proxy's Service."""
    owner = {"uid": "one", "controller": True}
    metadata = {"name": "web-envoy", "namespace": "team-a", "ownerReferences": [owner]}
    return {"metadata": metadata, "spec": {"type": "NodePort", **spec}}


def node(name: str, *addresses: tuple[str, str], **fields: Object) -> Object:
    """A ready node with addresses as (type, address)."""
    found: Object = {
        "metadata": {"name": name, "uid": name, "resourceVersion": "1", **fields.get("metadata", {})},
        "spec": fields.get("spec", {}),
        "status": {
            "addresses": [{"type": kind, "address": address} for kind, address in addresses],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    return found


def external(name: str, ip: str, **fields: Object) -> Object:
    """A ready node with one ExternalIP, and an InternalIP beside it."""
    return node(name, ("InternalIP", "10.0.0.1"), ("ExternalIP", ip), ("Hostname", name), **fields)


def pod(name: str, node_name: str, *, is_ready: bool = True, **metadata: object) -> Object:
    """A Pod of the proxy on a node."""
    return {
        "metadata": {
            "namespace": "team-a",
            "name": name,
            "uid": name,
            "resourceVersion": "1",
            "labels": {LABEL_OWNER_UID: "one"},
            **metadata,
        },
        "spec": {"containers": [], "nodeName": node_name},
        "status": {"conditions": [{"type": "Ready", "status": str(is_ready)}]},
    }


def of(
    nodes: Sequence[Object], *pods: Object, node_ports: str = "external", uid: str = "one", **spec: object
) -> tuple[str, ...]:
    """The addresses of a proxy with a NodePort Service in a cluster of these nodes and Pods."""
    store = Store(indexes_of("edge-system"), KEPT)
    for each in nodes:
        store.learn(NODE, each)
    for each in pods:
        store.learn(POD, each)
    own = service(**spec)
    own["metadata"]["ownerReferences"][0]["uid"] = uid
    return Addresses(store, node_ports=node_ports).of({"metadata": {"uid": uid}}, own)


@pytest.mark.parametrize(
    ("ingress", "addresses"),
    [
        ([], ()),
        ([{"ip": "203.0.113.7"}], ("203.0.113.7",)),
        ([{"ip": "2001:db8::7"}, {"ip": "203.0.113.7"}], ("203.0.113.7", "2001:db8::7")),
        ([{"ip": "203.0.113.7"}, {"ip": "2001:db8::7"}, {"ip": "203.0.113.7"}], ("203.0.113.7", "2001:db8::7")),
        ([{"hostname": "b.lb.example.net"}, {"hostname": "a.lb.example.net"}], ("a.lb.example.net",)),
        ([{"hostname": "lb.example.net"}, {"ip": "203.0.113.7"}], ("203.0.113.7",)),
        ([{"hostname": "lb.example.net", "ip": "203.0.113.7"}], ("lb.example.net",)),
        ([{"ip": f"203.0.113.{n}"} for n in range(99)], tuple(sorted(f"203.0.113.{n}" for n in range(99)))[:16]),
    ],
)
def test_the_addresses_of_a_load_balancer_do_not_depend_on_their_order(
    ingress: list[dict[str, str]], addresses: tuple[str, ...]
) -> None:
    """All IP addresses, IPv4 first, or else one name: a change of order is no change."""
    found = Addresses(Store(indexes_of("edge-system")))
    balancer = service(type="LoadBalancer") | {"status": {"loadBalancer": {"ingress": ingress}}}
    assert found.of(PROXY, balancer) == addresses
    balancer["status"] = {"loadBalancer": {"ingress": ingress[::-1]}}
    assert found.of(PROXY, balancer) == addresses


def test_without_the_setting_a_node_port_has_its_name_in_the_cluster_alone() -> None:
    """No store of nodes is asked for."""
    assert of([external("a", "203.0.113.7")], node_ports="none") == ("web-envoy.team-a.svc",)
    assert of([external("a", "203.0.113.7")], type="ClusterIP") == ("web-envoy.team-a.svc",)


def test_a_node_port_has_the_addresses_of_the_type_that_the_setting_names() -> None:
    """Of one type: a resolver hands out any of them, so internal ones never stand beside external ones."""
    both, inner = external("a", "203.0.113.7"), node("b", ("InternalIP", "10.0.0.2"), ("InternalIP", "fd00::2"))
    assert of([both, inner], node_ports="external") == ("203.0.113.7",)
    assert of([both, inner], node_ports="internal") == ("10.0.0.1", "10.0.0.2", "fd00::2")
    assert of([both, inner], node_ports="external-or-internal") == ("203.0.113.7",)
    assert of([inner], node_ports="external-or-internal") == ("10.0.0.2", "fd00::2")
    assert of([inner], node_ports="external") == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"spec": {"unschedulable": True}},
        {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"metadata": {"labels": {"node.kubernetes.io/exclude-from-external-load-balancers": ""}}},
    ],
)
def test_no_client_is_led_to_a_node_that_is_taken_out_of_service(fields: dict[str, Object]) -> None:
    """Cordoned, being deleted, or excluded from load balancers: not even if there is no other."""
    assert of([external("a", "203.0.113.7", **fields), external("b", "203.0.113.8")]) == ("203.0.113.8",)
    assert of([external("a", "203.0.113.7", **fields)]) == ()


def test_a_node_that_is_not_ready_counts_only_where_none_is() -> None:
    """That no node is ready is what an API server says that was away itself; names must not vanish for that."""
    lost, well = external("a", "203.0.113.7"), external("b", "203.0.113.8")
    lost["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    assert of([lost, well]) == ("203.0.113.8",)
    well["status"]["conditions"] = []
    assert of([lost, well]) == ("203.0.113.7", "203.0.113.8")


def test_with_local_traffic_only_nodes_with_a_ready_pod_count() -> None:
    """Other nodes drop what arrives at the port; where no Pod is ready, all of them count."""
    nodes = [external(name, f"203.0.113.{n}") for n, name in enumerate("abc")]
    pods = [pod("one", "a"), pod("two", "b", is_ready=False), pod("old", "c", deletionTimestamp="2026-01-01T00:00:00Z")]
    assert of(nodes, *pods, externalTrafficPolicy="Local") == ("203.0.113.0",)
    assert of(nodes, *pods[1:], externalTrafficPolicy="Local") == ("203.0.113.1",)
    assert of(nodes, externalTrafficPolicy="Local") == ()
    assert of(nodes, *pods, externalTrafficPolicy="Cluster") == ("203.0.113.0", "203.0.113.1", "203.0.113.2")


def test_of_many_nodes_each_proxy_has_some_and_keeps_them() -> None:
    """At most as many as the ledger has room for; another node that comes or goes changes at most one of them."""
    nodes = [external(f"n{n}", f"203.0.113.{n}") for n in range(100)]
    chosen = of(nodes)
    assert len(chosen) == MAX_ADDRESSES
    assert of(nodes[::-1]) == chosen
    assert of(nodes, uid="two") != chosen
    assert len(set(chosen) - set(of(nodes[1:]))) <= 1
    assert len(set(chosen) - set(of([*nodes, external("new", "203.0.113.200")]))) <= 1


def test_an_address_that_is_none_is_left_out() -> None:
    """The API server does not validate what a cloud provider writes there."""
    odd = node("a", ("ExternalIP", "not an address"), ("ExternalIP", "2001:DB8:0::7"), ("ExternalDNS", "a.example.com"))
    assert usable_node(odd) == UsableNode("a", is_ready=True, addresses=(("ExternalIP", "2001:db8::7"),))
    assert usable_node({"metadata": {"name": "new"}}) == UsableNode("new", is_ready=False, addresses=())


def test_a_proxy_without_an_address_says_what_is_missing() -> None:
    """Of a NodePort, which addresses of nodes the setting asks for."""
    addresses = Addresses(Store(indexes_of("edge-system")), node_ports="external-or-internal")
    assert "ExternalIP or InternalIP" in addresses.missing(service()).message
    assert "no address to register yet" in addresses.missing(service(type="LoadBalancer")).message
    assert addresses.missing(None).reason == addresses.missing(service()).reason == "NoAddress"
