"""Optional children and Pod placement: what each part of a spec becomes, and that an absent part becomes nothing."""

from typing import Any

import pytest

from operator_app.api.kinds import (
    DEPLOYMENT,
    HORIZONTAL_POD_AUTOSCALER,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    Kind,
    Object,
)
from operator_app.api.models import parse_spec
from operator_app.desired import children
from tests.unit.network_policies import Peer, lets_in, lets_out

UID = "5d1b2f1e-0000-4000-8000-000000000001"
OWN = {
    "app.kubernetes.io/name": "envoy",
    "app.kubernetes.io/instance": "checkout",
    "edge.operator-app.dev/owner-uid": UID,
}


def made(**spec: Any) -> dict[Kind, Object]:
    """The children of a proxy whose spec has these fields beside one listener and one backend."""
    full = {
        "listeners": [{"name": "http", "port": 80, "routes": [{"backend": "app"}]}],
        "backends": [{"name": "app", "endpoints": [{"host": "app.team-a.svc", "port": 8080}]}],
    } | spec
    proxy = {
        "apiVersion": "edge.operator-app.dev/v1alpha1",
        "kind": "EnvoyProxy",
        "metadata": {"name": "checkout", "namespace": "team-a", "uid": UID, "generation": 1},
        "spec": full,
    }
    return children(proxy, parse_spec(proxy), default_image="envoy:default")


def endpoints(*hosts: str, port: int = 8080) -> list[Object]:
    """One backend with these hosts."""
    return [{"name": "app", "endpoints": [{"host": host, "port": port} for host in hosts]}]


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ({}, None),
        ({"replicas": 0}, None),
        ({"replicas": 2}, 1),
        ({"replicas": 1, "disruption": {}}, 1),
        ({"replicas": 9, "disruption": {"maxUnavailable": 3}}, 3),
        ({"autoscaling": {"maxReplicas": 1}}, None),
        ({"autoscaling": {"maxReplicas": 5}}, 1),
        ({"replicas": 5, "autoscaling": {"maxReplicas": 1}}, None),
    ],
    ids=repr,
)
def test_a_budget_is_there_when_it_is_asked_for_or_of_use(spec: Object, most: int | None) -> None:
    """Without the stanza there is a budget of one Pod as soon as two Pods are possible."""
    found = made(**spec, resources={"requests": {"cpu": "1"}}).get(POD_DISRUPTION_BUDGET)
    assert (found and found["spec"]["maxUnavailable"]) == most
    if found:
        assert found["spec"]["selector"] == {"matchLabels": OWN}


def test_an_autoscaler_owns_the_number_of_pods() -> None:
    """With an autoscaler the Deployment has no number of Pods, without one it has the declared number."""
    found = made(replicas=3, autoscaling={"maxReplicas": 5}, resources={"requests": {"cpu": "1"}})
    assert "replicas" not in found[DEPLOYMENT]["spec"]
    assert found[HORIZONTAL_POD_AUTOSCALER]["spec"]["scaleTargetRef"]["name"] == found[DEPLOYMENT]["metadata"]["name"]
    assert made(replicas=3)[DEPLOYMENT]["spec"]["replicas"] == 3


@pytest.mark.parametrize(
    ("host", "namespaces", "blocks"),
    [
        ("app", {"team-a"}, set()),
        ("app.team-b", {"team-b"}, {"0.0.0.0/0", "::/0"}),
        ("app.team-b.svc", {"team-b"}, set()),
        ("app.team-b.svc.cluster.local", {"team-b"}, set()),
        ("pod-0.app.team-b.svc", {"team-b"}, set()),
        ("pod-0.app.team-b.svc.cluster.local", {"team-b"}, set()),
        ("svc.example.com", set(), {"0.0.0.0/0", "::/0"}),
        ("api.example.com", set(), {"0.0.0.0/0", "::/0"}),
        ("10.0.0.7", set(), {"10.0.0.7/32"}),
        ("fd00:0::7", set(), {"fd00::7/128"}),
    ],
)
def test_a_policy_lets_out_to_what_the_backends_name(host: str, namespaces: set[str], blocks: set[str]) -> None:
    """A Service's name opens its namespace, an address itself, any other name its port everywhere."""
    (dns, *rules) = made(networkPolicy={}, backends=endpoints(host))[NETWORK_POLICY]["spec"]["egress"]
    assert {(each["port"], each["protocol"]) for each in dns["ports"]} >= {(53, "UDP"), (53, "TCP")}
    assert "to" not in dns, "name servers may be anywhere: on the node, in kube-system, outside"
    found: dict[str, set[str]] = {"namespaces": set(), "blocks": set()}
    for rule in rules:
        for peer in rule["to"]:
            if "ipBlock" in peer:
                found["blocks"].add(peer["ipBlock"]["cidr"])
                assert rule["ports"] == [{"port": 8080, "protocol": "TCP"}]
            else:
                found["namespaces"].update(peer["namespaceSelector"]["matchLabels"].values())
                assert "ports" not in rule, "the port of a Service's Pods is not known"
    assert found == {"namespaces": namespaces, "blocks": blocks}


def test_a_policy_lets_in_the_named_clients_and_every_probe() -> None:
    """Listener ports for the named clients, for everybody where none is named; the readiness port always."""
    listeners = [
        {"name": "a", "port": 80, "routes": [{"backend": "app"}]},
        {"name": "b", "port": 8443, "routes": [{"backend": "app"}]},
    ]
    peers = [
        {"cidr": "10.0.0.0/8"},
        {"namespace": "b"},
        {"podLabels": {"a": "b"}},
        {"namespace": "c", "podLabels": {"a": "b"}},
    ]
    spec = made(listeners=listeners, networkPolicy={"from": peers})[NETWORK_POLICY]["spec"]
    clients, probes = spec["ingress"]
    assert [each["port"] for each in clients["ports"]] == [8443, 10080]
    assert clients["from"] == [
        {"ipBlock": {"cidr": "10.0.0.0/8"}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "b"}}},
        {"podSelector": {"matchLabels": {"a": "b"}}},
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "c"}},
            "podSelector": {"matchLabels": {"a": "b"}},
        },
    ]
    assert probes == {"ports": [{"port": 19001, "protocol": "TCP"}]}
    assert "from" not in made(networkPolicy={})[NETWORK_POLICY]["spec"]["ingress"][0]
    assert spec["podSelector"] == {"matchLabels": OWN}
    assert spec["policyTypes"] == ["Egress", "Ingress"]


@pytest.mark.parametrize(
    "hosts", [("app",), ("app.team-b.svc",), ("10.0.0.7", "fd00::7"), ("api.example.com",)], ids=repr
)
@pytest.mark.parametrize("peers", [[], [{"namespace": "team-b"}], [{"cidr": "10.0.0.0/8"}]], ids=repr)
def test_no_policy_blocks_dns_or_a_probe(hosts: tuple[str, ...], peers: list[Object]) -> None:
    """Whatever the spec says, name servers are reached wherever they are, by UDP and TCP, and probes get in."""
    policy = made(networkPolicy={"from": peers}, backends=endpoints(*hosts))[NETWORK_POLICY]
    # A Service of the cluster, a cache on the node, one outside, one by IPv6.
    servers = [
        Peer("10.96.0.10", "kube-system", (("k8s-app", "kube-dns"),)),
        *map(Peer, ("169.254.20.10", "9.9.9.9", "fd00::a")),
    ]
    for server in servers:
        for port, protocol in ((53, "UDP"), (53, "TCP"), (5353, "UDP"), (5353, "TCP")):
            assert lets_out(policy, server, port, protocol), (server, port, protocol)
    for prober in (Peer("192.0.2.1"), Peer("10.1.0.9", "edge-system")):
        assert lets_in(policy, prober, 19001)


@pytest.mark.parametrize(
    ("host", "peer", "is_let_out"),
    [
        ("app", Peer("10.1.0.1", "team-a"), True),
        ("app", Peer("10.1.0.1", "team-b"), False),
        ("app.team-b.svc", Peer("10.1.0.1", "team-b"), True),
        ("app.team-b.svc", Peer("10.1.0.1", "team-c"), False),
        ("10.0.0.7", Peer("10.0.0.7"), True),
        ("10.0.0.7", Peer("10.0.0.8"), False),
        ("fd00::7", Peer("fd00::7"), True),
        ("api.example.com", Peer("198.51.100.7"), True),
        ("api.example.com", Peer("169.254.169.254"), False),
        ("api.example.com", Peer("fd00:ec2::254"), False),
        ("app", Peer("198.51.100.7"), False),
    ],
)
def test_a_policy_lets_out_to_the_backends_alone(host: str, peer: Peer, *, is_let_out: bool) -> None:
    """By an independent reading of the object: what a backend names is reached at its port, and nothing else."""
    policy = made(networkPolicy={}, backends=endpoints(host))[NETWORK_POLICY]
    assert lets_out(policy, peer, 8080) is is_let_out
    if peer.namespace is None:
        assert not lets_out(policy, peer, 22)


def test_a_policy_lets_in_the_named_clients_alone() -> None:
    """To the listeners, whatever else they could reach; everybody where nobody is named."""
    peers = [{"cidr": "10.0.0.0/8"}, {"namespace": "b"}, {"podLabels": {"a": "b"}}]
    policy = made(networkPolicy={"from": peers})[NETWORK_POLICY]
    for peer, is_let_in in (
        (Peer("10.9.9.9"), True),
        (Peer("192.0.2.1"), False),
        (Peer("192.0.2.1", "b"), True),
        (Peer("192.0.2.1", "team-a", (("a", "b"),)), True),
        (Peer("192.0.2.1", "team-a"), False),
        (Peer("192.0.2.1", "c", (("a", "b"),)), False),
    ):
        assert lets_in(policy, peer, 10080) is is_let_in, peer
        assert not lets_in(policy, peer, 9901), "no other port"
        assert lets_in(made(networkPolicy={})[NETWORK_POLICY], peer, 10080)


def test_no_label_of_a_tenant_replaces_one_of_the_operator() -> None:
    """Labels and annotations of the spec come to those of the operator, which win although the schema refuses both."""
    template = made(podLabels={"example.com/cost": "shop"}, podAnnotations={"example.com/a": "b"})[DEPLOYMENT]["spec"][
        "template"
    ]["metadata"]
    assert OWN.items() < template["labels"].items()
    assert template["labels"]["example.com/cost"] == "shop"
    assert template["annotations"]["example.com/a"] == "b"
    assert len(template["annotations"]) == 2


@pytest.mark.parametrize(
    ("declared", "rendered"),
    [
        ({"key": "a"}, {"key": "a", "operator": "Exists"}),
        ({"key": "a", "value": "b"}, {"key": "a", "operator": "Equal", "value": "b"}),
        ({"key": "a", "operator": "Equal", "value": ""}, {"key": "a", "operator": "Equal"}),
        (
            {"key": "a", "effect": "NoExecute", "tolerationSeconds": 0},
            {"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0},
        ),
    ],
    ids=repr,
)
def test_a_toleration_is_rendered_as_it_is_stored(declared: Object, rendered: Object) -> None:
    """The operator is explicit, and an empty value, which the API server drops, is absent."""
    pod = made(tolerations=[declared])[DEPLOYMENT]["spec"]["template"]["spec"]
    assert pod["tolerations"] == [rendered]


ZONE = "topology.kubernetes.io/zone"
REQUIRED, PREFERRED = (f"{each}DuringSchedulingIgnoredDuringExecution" for each in ("required", "preferred"))


@pytest.mark.parametrize(
    ("declared", "rendered"),
    [
        ({}, None),
        ({"nodes": [], "pods": []}, None),
        (
            {
                "nodes": [
                    {"key": ZONE, "operator": "In", "values": ["b", "a"]},
                    {"key": "example.com/gpu", "operator": "DoesNotExist"},
                    {"key": "example.com/fast", "operator": "Exists", "weight": 10},
                    {"key": ZONE, "operator": "NotIn", "values": ["c"], "weight": 1},
                ]
            },
            {
                "nodeAffinity": {
                    REQUIRED: {
                        "nodeSelectorTerms": [
                            {
                                "matchExpressions": [
                                    {"key": ZONE, "operator": "In", "values": ["b", "a"]},
                                    {"key": "example.com/gpu", "operator": "DoesNotExist"},
                                ]
                            }
                        ]
                    },
                    PREFERRED: [
                        {
                            "weight": 10,
                            "preference": {"matchExpressions": [{"key": "example.com/fast", "operator": "Exists"}]},
                        },
                        {
                            "weight": 1,
                            "preference": {"matchExpressions": [{"key": ZONE, "operator": "NotIn", "values": ["c"]}]},
                        },
                    ],
                }
            },
        ),
        (
            {
                "pods": [
                    {"podLabels": {"app": "shop"}, "topologyKey": ZONE, "weight": 5},
                    {"podLabels": {"app": "batch"}, "apart": True},
                ]
            },
            {
                "podAffinity": {
                    PREFERRED: [
                        {
                            "weight": 5,
                            "podAffinityTerm": {"labelSelector": {"matchLabels": {"app": "shop"}}, "topologyKey": ZONE},
                        }
                    ]
                },
                "podAntiAffinity": {
                    REQUIRED: [
                        {"labelSelector": {"matchLabels": {"app": "batch"}}, "topologyKey": "kubernetes.io/hostname"}
                    ]
                },
            },
        ),
    ],
    ids=["empty", "empty lists", "nodes", "pods"],
)
def test_affinity_is_rendered_as_it_is_stored(declared: Object, rendered: Object | None) -> None:
    """What has no weight must hold, all of it together; what has one is preferred; nothing empty is rendered."""
    pod = made(affinity=declared)[DEPLOYMENT]["spec"]["template"]["spec"]
    assert pod.get("affinity") == rendered


def test_what_is_not_declared_is_not_rendered() -> None:
    """The smallest proxy has none of the optional members, and three children."""
    smallest = made()
    assert len(smallest) == 3
    pod = smallest[DEPLOYMENT]["spec"]["template"]["spec"]
    optional = {
        "affinity",
        "nodeSelector",
        "tolerations",
        "topologySpreadConstraints",
        "priorityClassName",
        "serviceAccountName",
    }
    assert not (optional | {"serviceAccount", "imagePullSecrets"}) & set(pod)
    assert set(smallest[SERVICE]["spec"]) == {"type", "selector", "ports"}
