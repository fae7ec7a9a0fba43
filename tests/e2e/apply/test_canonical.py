"""What the operator declares is spelled as the API server stores it, whatever spelling a tenant uses.

Otherwise the operator would find a difference in every round, or miss one.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from typing import Any, Final

import pytest

from operator_app.api.kinds import (
    CHILD_KINDS,
    DEPLOYMENT,
    ENVOY_PROXY,
    FIELD_MANAGER,
    SERVICE,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.desired import child_key
from operator_app.ssa.fields import differences
from tests.e2e.components import components
from tests.e2e.controlplane import Cluster as ControlPlane
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import a_proxy, declared_children, wait_reconciled

APP: Final = {"name": "app", "endpoints": [{"host": "app.example.com", "port": 8080}]}
HTTP: Final = {"name": "http", "port": 80, "routes": [{"backend": "app"}]}


SPECS: Final[dict[str, dict[str, Any]]] = {
    "smallest": {},
    "all-listener-shapes": {
        "listeners": [
            HTTP,
            {"name": "high", "port": 8080, "routes": [{"backend": "app"}]},
            {"name": "moved", "port": 443, "targetPort": 9443, "routes": [{"backend": "app"}]},
            {"name": "tcp", "port": 5432, "protocol": "TCP", "routes": [{"backend": "other"}]},
            {
                "name": "routed",
                "port": 8081,
                "routes": [
                    {"match": {"hosts": ["shop.example.com", "*.example.org"], "pathPrefix": "/api"}, "backend": "app"},
                    {"match": {"pathExact": "/healthz"}, "backend": "other"},
                    {"match": {}, "backend": "app"},
                ],
            },
        ],
        "backends": [
            APP,
            {
                "name": "other",
                "connectTimeout": "250ms",
                "endpoints": [
                    {"host": "10.0.0.7", "port": 1, "weight": 3},
                    {"host": "fd00::7", "port": 65535},
                    {"host": "db.example.com", "port": 5432, "weight": 128},
                ],
            },
        ],
    },
    "sixteen-listeners": {
        "listeners": [
            {"name": f"l{number}", "port": 7000 + number, "routes": [{"backend": "app"}]} for number in range(16)
        ]
    },
    "big-configuration": {
        "listeners": [
            HTTP
            | {
                "routes": [
                    {"match": {"hosts": [f"h{number}.example.com"], "pathPrefix": f"/{'p' * 900}"}, "backend": "app"}
                    for number in range(64)
                ]
            }
        ],
        "backends": [APP | {"endpoints": [{"host": f"h{number}.example.com", "port": 8080} for number in range(64)]}],
    },
    "node-port": {"service": {"type": "NodePort"}},
    "load-balancer": {
        "service": {"type": "LoadBalancer", "annotations": {"example.com/scheme": "internal", "empty": ""}}
    },
    "annotations": {
        "service": {
            "annotations": {
                "plain": "x",
                "example.com/json": '{"a": [1, 2], "b": "\\u00e9 <&>"}',
                "example.com/text": "two\nlines\tand é ☃ 😀 end ",
                # An apply is read as YAML, to which these are line breaks, marks and control characters.
                "example.com/not-yaml": "\u2028 \u2029 \x85 \x7f \x9f \ufeff \ufffe \uffff",
            }
        }
    },
    "registered": {"registration": {"hostname": "shop.example.com"}},
    "image": {"image": "registry.example.com:5000/mirror/envoy:v1.40.0@sha256:" + "0" * 64},
    "no-replicas": {"replicas": 0},
    "replicas": {"replicas": 3},
    "empty-resources": {"resources": {}},
    "empty-stanzas": {"resources": {"requests": {}, "limits": {}}, "service": {}, "registration": {}},
    "all-resources": {
        "resources": {
            "requests": {"cpu": "0.1", "memory": "64Mi", "ephemeral-storage": "1e6"},
            "limits": {"cpu": 2, "memory": "0.5Gi", "ephemeral-storage": "1G"},
        }
    },
    "request-alone": {"resources": {"requests": {"cpu": "0.250"}}},
    "placement": {
        "nodeSelector": {"example.com/pool": "edge", "plain": ""},
        "tolerations": [
            {"key": "a"},
            {"key": "a", "value": "b", "effect": "NoSchedule"},
            {"key": "a", "operator": "Equal", "value": "", "effect": "NoExecute", "tolerationSeconds": 0},
        ],
        "topologySpread": [
            {"topologyKey": "kubernetes.io/hostname"},
            {"topologyKey": "topology.kubernetes.io/zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"},
        ],
        "affinity": {
            "nodes": [
                {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["b", "a", ""]},
                {"key": "example.com/gpu", "operator": "DoesNotExist"},
                {"key": "plain", "operator": "NotIn", "values": ["c"], "weight": 1},
            ],
            "pods": [
                {"podLabels": {"app": "shop", "empty": ""}},
                {"podLabels": {"app": "a"}, "topologyKey": "topology.kubernetes.io/zone", "weight": 100},
                {"podLabels": {"app": "b"}, "apart": True},
                {"podLabels": {"app": "c"}, "apart": True, "weight": 1},
            ],
        },
        "serviceAccountName": "edge",
        "imagePullSecrets": [{"name": "b"}, {"name": "a"}],
        "podLabels": {"example.com/cost": "shop", "empty": ""},
        "podAnnotations": {"example.com/json": '{"a": 1}', "empty": ""},
    },
    "preferred-nodes": {"affinity": {"nodes": [{"key": "a", "operator": "Exists", "weight": 100}]}},
    "empty-affinity": {"affinity": {"nodes": [], "pods": []}},
    "two-proxies": {"replicas": 2},
    "optional-children": {
        "disruption": {"maxUnavailable": 2},
        "networkPolicy": {
            "from": [
                {"cidr": "fd00::/8"},
                {"namespace": "team-b"},
                {"podLabels": {"app": "web"}},
                {"namespace": "team-b", "podLabels": {"app": "web", "empty": ""}},
            ]
        },
        "autoscaling": {"minReplicas": 2, "maxReplicas": 3},
        "resources": {"requests": {"cpu": "250m"}},
    },
    "open-network-policy": {
        "networkPolicy": {},
        "backends": [
            {
                "name": "app",
                "endpoints": [
                    {"host": each, "port": 8080} for each in ("a", "a.b", "a.b.svc", "a.b.c", "10.0.0.7", "fd00::7")
                ],
            }
        ],
    },
    "load-balancer-options": {
        "service": {
            "type": "LoadBalancer",
            "loadBalancerClass": "example.com/edge",
            "loadBalancerSourceRanges": ["10.0.0.0/8", "192.0.2.0/24"],
            "externalTrafficPolicy": "Local",
            "ipFamilyPolicy": "PreferDualStack",
        },
        "listeners": [HTTP | {"nodePort": 31080}],
    },
    "load-balancer-without-options": {"service": {"type": "LoadBalancer", "loadBalancerClass": "example.com/edge"}},
    "cluster-traffic": {"service": {"type": "NodePort", "externalTrafficPolicy": "Cluster"}},
    "limit-alone": {"resources": {"limits": {"memory": "1.5Gi"}}},
}
"""Specs by the name of their proxy."""

PROXIES: Final = 4
"""Proxies that are changed at the same time."""

CPU: Final = (
    *(0, 1, "1", "0.5", ".5", "1000m", "1500m", "0.1", "100m", "1e3", "+2", "2.", "0.001", "1k", "0", "100u", "1n"),
    *("0.0001", "1001u", "1e-3", "0.250"),
)
MEMORY: Final = (
    *(0, 1, "1", "0.25Gi", "1.5Gi", "1024Mi", "1025Mi", "1e3", "1E6", "1e-1", "128974848", "129e6", "129M", "123Mi"),
    *("1Ti", "0.5", "1000k", "1024k", "0.1Mi", "2000000m", "12345678901", "1.1G", "+64Mi", "1P", "1000Ki", "1Ei"),
)
"""Spellings, most of which have a shorter or another one."""

for number, (cores, size) in enumerate(zip_longest(CPU, MEMORY, fillvalue="1")):
    amounts = {"cpu": cores, "memory": size, "ephemeral-storage": MEMORY[-number]}
    SPECS[f"amounts-{number}"] = {"resources": {"requests": amounts, "limits": amounts}}


@pytest.mark.anyio
async def test_everything_is_stored_as_declared(
    admin: Kube, control_plane: ControlPlane, namespace: str, one_operator: OperatorProcess
) -> None:
    """For every spelling: no difference is left after the first write, and the same apply again changes nothing."""
    for name, spec in SPECS.items():
        admin.create(ENVOY_PROXY, a_proxy(namespace, name, **spec))
    for name in SPECS:
        wait_reconciled(admin, Key(namespace, name))

    async with components(control_plane.kubeconfig) as parts:
        for name in SPECS:
            for kind, declared in declared_children(admin.get(ENVOY_PROXY, Key(namespace, name))).items():
                live = admin.get(kind, key_of(declared))
                assert differences(declared, live) == (), name
                again = (await parts.cluster.apply(kind, declared, force=True)).object
                assert without_status(again) == without_status(live), name
    assert one_operator.metric("operator_app_writes_total", outcome="unchanged") == 0
    assert not any(line.get("event") == "noncanonical" for line in one_operator.log()), one_operator.log_text()


def test_every_change_of_the_spec_is_stored_as_declared(
    admin: Kube, namespace: str, one_operator: OperatorProcess
) -> None:
    """A proxy gets one spec after the other: what the spec before had and this one has not is removed."""
    changing = [name for name in SPECS if not name.startswith("amounts")]
    keys = [Key(namespace, f"web-{number}") for number in range(PROXIES)]
    with ThreadPoolExecutor(PROXIES) as threads:
        changes = [
            threads.submit(change_in_turn, admin, key, [*changing[number::PROXIES], "smallest"])
            for number, key in enumerate(keys)
        ]
    for each in changes:
        each.result()
    assert one_operator.metric("operator_app_writes_total", outcome="unchanged") == 0


def change_in_turn(admin: Kube, key: Key, names: list[str]) -> None:
    """Give a new proxy each of these specs, and look at its children after each."""
    admin.create(ENVOY_PROXY, a_proxy(key.namespace, key.name))
    wait_reconciled(admin, key)
    for name in names:
        spec = a_proxy(key.namespace, **SPECS[name])["spec"]
        admin.patch(ENVOY_PROXY, key, [{"op": "replace", "path": "/spec", "value": spec}], patch_type="json")
        proxy = wait_reconciled(admin, key)
        # Files of older Pods go once the Deployment says that these are gone.
        stored_as = wait_until(partial(stored_as_declared, admin, proxy), 30.0, f"the children of {name}")
        for kind, (declared, stored) in stored_as.items():
            if kind == SERVICE:
                ports = [(each["name"], each["port"], each["targetPort"]) for each in stored["spec"]["ports"]]
                assert ports == [(each["name"], each["port"], each["targetPort"]) for each in declared["spec"]["ports"]]
                assert stored["metadata"].get("annotations", {}) == declared["metadata"].get("annotations", {})
            if kind == DEPLOYMENT:
                container = stored["spec"]["template"]["spec"]["containers"][0]
                wanted = declared["spec"]["template"]["spec"]["containers"][0]
                assert container["args"] == wanted["args"]
                assert len(container["ports"]) == len(wanted["ports"])
                assert container["resources"] == wanted.get("resources", {})


def stored_as_declared(admin: Kube, proxy: Object) -> dict[Kind, tuple[Object, Object]] | None:
    """The declared and the stored children by kind; ``None`` while one of them differs."""
    child = child_key(key_of(proxy))
    live = {kind: admin.get(kind, child) for kind in CHILD_KINDS}
    declared = declared_children(proxy, live)
    found = {kind: (each, live.get(kind) or admin.get(kind, child)) for kind, each in declared.items()}
    return None if any(differences(*each) for each in found.values()) else found


def without_status(obj: Object) -> Object:
    """A Deployment without what its controller writes; other kinds completely, their version included."""
    if obj["kind"] != DEPLOYMENT.kind:
        return obj
    metadata = {
        name: value for name, value in obj["metadata"].items() if name not in ("resourceVersion", "annotations")
    }
    metadata["managedFields"] = [each for each in metadata["managedFields"] if each["manager"] == FIELD_MANAGER]
    return {name: value for name, value in obj.items() if name != "status"} | {"metadata": metadata}
