"""A foreign field goes only where it excludes a declared one and the refusal names its place."""

import copy
from typing import Final

import pytest

from operator_app.api.kinds import Object
from operator_app.ssa.unblock import unblocking_patch

PORT_80: Final = {"name": "http", "port": 80, "protocol": "TCP", "targetPort": 10080}
PORT_81: Final = PORT_80 | {"port": 81, "nodePort": 30080}
EXTRA: Final = {"name": "extra", "port": 9090, "protocol": "TCP"}
DUPLICATE: Final = "spec.ports[1].name"


def service(*ports: Object, **spec: object) -> Object:
    """A Service with these ports."""
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"ports": list(ports)} | spec}


def deployment(container: Object, *volumes: Object, **pod: object) -> Object:
    """A Deployment whose container ``envoy`` has these fields."""
    spec = {"containers": [{"name": "envoy"} | container], "volumes": list(volumes)} | pod
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "x"},
        "spec": {"template": {"spec": spec}},
    }


def test_a_renumbered_port_gets_its_number_back_and_keeps_its_node_port() -> None:
    """Other ports and every sibling of the list stay: source ranges, policies, affinity."""
    live = service(PORT_81, EXTRA, loadBalancerSourceRanges=["192.0.2.0/24"], externalTrafficPolicy="Local")
    patch = unblocking_patch(service(PORT_80, selector={"app": "x"}), live, [DUPLICATE])
    assert patch == {"spec": {"ports": [PORT_80 | {"nodePort": 30080}, EXTRA]}}


def test_a_budget_gets_the_number_that_is_declared() -> None:
    """A PodDisruptionBudget has one of two numbers; what else others have declared stays."""
    kind = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "x"}}
    declared = kind | {"spec": {"maxUnavailable": 1}}
    live = kind | {"spec": {"minAvailable": "50%", "unhealthyPodEvictionPolicy": "AlwaysAllow"}}
    assert unblocking_patch(declared, live, ["spec"]) == {"spec": {"minAvailable": None, "maxUnavailable": 1}}
    assert unblocking_patch(declared, live, ["metadata"]) is None
    assert unblocking_patch(declared, kind | {"spec": {"maxUnavailable": 3}}, ["spec"]) is None


def test_a_foreign_port_goes_where_ours_is_there_and_lost_only_its_name() -> None:
    """Two items can't have one name, and the declared one keeps it."""
    live = service(PORT_80 | {"name": "other"}, EXTRA | {"name": "http"})
    patch = unblocking_patch(service(PORT_80), live, [DUPLICATE])
    assert patch == {"spec": {"ports": [PORT_80 | {"name": "other"}]}}


@pytest.mark.parametrize(
    "refused",
    [
        (),
        ("",),
        ("spec.selector",),
        ("spec.portsOfOthers[0].name",),
        ("metadata.annotations",),
        ("spec.template.spec.containers[0].image",),
    ],
)
def test_a_refusal_that_names_no_such_place_removes_nothing(refused: tuple[str, ...]) -> None:
    """A policy, a webhook or an immutable field is no reason to touch what others declared."""
    assert unblocking_patch(service(PORT_80), service(PORT_81, EXTRA), refused) is None
    declared = deployment({"env": [{"name": "A", "valueFrom": {"x": 1}}]})
    assert unblocking_patch(declared, deployment({"env": [{"name": "A", "value": "me"}]}), refused) is None


CONFIG: Final = {"name": "config", "configMap": {"name": "web"}}


@pytest.mark.parametrize(
    ("declared", "live", "field", "after"),
    [
        (
            deployment({"env": [{"name": "A", "valueFrom": {"x": 1}}]}),
            deployment({"env": [{"name": "A", "value": "me"}, {"name": "B", "value": "b"}]}),
            "spec.template.spec.containers[0].env[0].valueFrom",
            deployment({"env": [{"name": "A", "valueFrom": {"x": 1}}, {"name": "B", "value": "b"}]}),
        ),
        (
            deployment({"env": [{"name": "A", "value": "a"}]}),
            deployment({"env": [{"name": "A", "valueFrom": {"x": 1}}]}),
            "spec.template.spec.containers[0].env[0].valueFrom",
            deployment({"env": [{"name": "A", "value": "a"}]}),
        ),
        (
            deployment({"readinessProbe": {"httpGet": {"port": 1}, "periodSeconds": 5}}),
            deployment({"readinessProbe": {"exec": {"command": ["x"]}, "timeoutSeconds": 9}, "tty": True}),
            "spec.template.spec.containers[0].readinessProbe.httpGet",
            deployment(
                {"readinessProbe": {"httpGet": {"port": 1}, "periodSeconds": 5, "timeoutSeconds": 9}, "tty": True}
            ),
        ),
        (
            deployment({"lifecycle": {"preStop": {"exec": {"command": ["drain"]}}}}),
            deployment({"lifecycle": {"preStop": {"sleep": {"seconds": 1}}, "postStart": {"sleep": {"seconds": 2}}}}),
            "spec.template.spec.containers[0].lifecycle.preStop.sleep",
            deployment(
                {"lifecycle": {"preStop": {"exec": {"command": ["drain"]}}, "postStart": {"sleep": {"seconds": 2}}}}
            ),
        ),
        (
            deployment({}, CONFIG),
            deployment({}, {"name": "config", "emptyDir": {}}, {"name": "cache", "emptyDir": {}}),
            "spec.template.spec.volumes[0].configMap",
            deployment({}, CONFIG, {"name": "cache", "emptyDir": {}}),
        ),
        (
            deployment({"ports": [{"name": "ready", "containerPort": 1, "protocol": "TCP"}]}),
            deployment({"ports": [{"name": "ready", "containerPort": 2, "protocol": "TCP"}], "stdin": True}),
            "spec.template.spec.containers[0].ports[1].name",
            deployment({"ports": [{"name": "ready", "containerPort": 1, "protocol": "TCP"}], "stdin": True}),
        ),
    ],
    ids=["valueFrom", "value", "probe", "lifecycle", "volume", "container port"],
)
def test_another_member_of_a_union_gives_way(declared: Object, live: Object, field: str, after: Object) -> None:
    """The declared member replaces the foreign one; items, hooks and fields beside it stay."""
    before = copy.deepcopy(live)
    patch = unblocking_patch(declared, live, ["spec.somewhere", field])
    assert patch is not None
    assert live == before, "the store's object is not written to"
    assert patch["spec"]["template"]["spec"] == {
        name: value
        for name, value in after["spec"]["template"]["spec"].items()
        if value != before["spec"]["template"]["spec"][name]
    }


@pytest.mark.parametrize(
    "field", ["spec.template.spec.volumes[0].configMap", "spec.template.spec.containers[0].env[0]"]
)
def test_what_excludes_nothing_stays_even_where_it_is_named(field: str) -> None:
    """A refusal about one of our own values gives no patch: nothing foreign is in the way."""
    container = {"env": [{"name": "A", "value": "a"}], "securityContext": {"runAsUser": 7}}
    live = deployment({"env": [{"name": "A", "value": "b"}, {"name": "B", "value": "b"}]}, CONFIG, hostNetwork=True)
    assert unblocking_patch(deployment(container, CONFIG), live, [field]) is None
