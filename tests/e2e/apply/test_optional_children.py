"""Children that a proxy has only where its spec asks for them: budget, autoscaler and network policy."""

import json
import time
from functools import partial
from typing import Any, Final

import pytest

from operator_app.api.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    HORIZONTAL_POD_AUTOSCALER,
    NETWORK_POLICY,
    OPTIONAL_CHILD_KINDS,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.desired import child_key
from tests.e2e.controlplane import AuditLog
from tests.e2e.kube import Kube, path_of, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import (
    CONVERGE_TIMEOUT_S,
    OPERATOR_USER,
    SETTLED_S,
    ProxyObjects,
    a_proxy,
    content_of,
    declared_children,
    drift_of,
    not_as_declared,
    objects_of,
    settled_objects_of,
    wait_all_gone,
    wait_reconciled,
    writes_to_children,
)

REQUESTS: Final = {"requests": {"cpu": "100m"}}
STANZAS: Final[dict[Kind, dict[str, Any]]] = {
    POD_DISRUPTION_BUDGET: {"disruption": {"maxUnavailable": 2}},
    HORIZONTAL_POD_AUTOSCALER: {"autoscaling": {"maxReplicas": 1}},
    NETWORK_POLICY: {"networkPolicy": {}},
}

pytestmark = pytest.mark.usefixtures("running_operator")


def edit(admin: Kube, key: Key, **fields: Any) -> Object:
    """Change fields of a proxy's spec, ``None`` removes one; returns the proxy once it is reconciled."""
    admin.patch(ENVOY_PROXY, key, {"spec": fields})
    return wait_reconciled(admin, key)


def numbers(admin: Kube, key: Key, since: Object) -> list[int]:
    """The number of Pods in each version of the Deployment after ``since``, without repetitions."""
    params = {
        "watch": "true",
        "resourceVersion": since["metadata"]["resourceVersion"],
        "fieldSelector": f"metadata.name={child_key(key).name}",
        "timeoutSeconds": "1",
    }
    path = path_of(DEPLOYMENT, Key(key.namespace, ""))
    lines = admin.request("GET", path, params=params).text.splitlines()
    found = [json.loads(line)["object"]["spec"]["replicas"] for line in lines]
    return [each for position, each in enumerate(found) if position == 0 or each != found[position - 1]]


def scale(admin: Kube, key: Key, replicas: int) -> None:
    """Scale the Deployment as an autoscaler does: an update of the scale subresource by another manager."""
    admin.patch(DEPLOYMENT, child_key(key), {"spec": {"replicas": replicas}}, subresource="scale")


@pytest.mark.parametrize("kind", OPTIONAL_CHILD_KINDS, ids=str)
def test_a_stanza_makes_one_child_and_its_removal_prunes_it(
    admin: Kube, audit: AuditLog, namespace: str, kind: Kind
) -> None:
    """The stanza is one create, drift of the child is repaired, and without the stanza it is one delete."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, resources=REQUESTS))
    wait_reconciled(admin, key)
    before = settled_objects_of(admin, key)
    assert before.optional == {}

    mark = audit.mark()
    edit(admin, key, **STANZAS[kind])
    found = settled_objects_of(admin, key)
    assert set(found.optional) == {kind}
    others = {(DEPLOYMENT.plural, "patch")} if kind == HORIZONTAL_POD_AUTOSCALER else set()
    assert {(each.resource, each.verb) for each in writes_to_children(audit, key, mark)} == {
        (kind.plural, "patch"),
        *others,
    }

    admin.patch(kind, child_key(key), {"metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}}})
    admin.wait_until(
        kind, child_key(key), lambda live: live["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "operator-app"
    )
    admin.delete(kind, child_key(key))
    admin.wait_until(kind, child_key(key), lambda _: True)
    settled_objects_of(admin, key)
    assert not drift_of(admin, key)

    mark = audit.mark()
    edit(admin, key, **dict.fromkeys(STANZAS[kind]))
    after = settled_objects_of(admin, key)
    assert after.optional == {}
    assert after.uids == before.uids
    assert [each.verb for each in writes_to_children(audit, key, mark) if each.resource == kind.plural] == ["delete"]
    for each, member in ((CONFIG_MAP, "data"), (DEPLOYMENT, "spec"), (SERVICE, "spec")):
        assert after.children[each][member] == before.children[each][member]


ALL: Final[dict[str, Any]] = {
    "disruption": {"maxUnavailable": 2},
    "autoscaling": {"minReplicas": 2, "maxReplicas": 3, "targetCPUUtilizationPercentage": 70},
    "networkPolicy": {"from": [{"namespace": "team-b"}]},
}
DRIFTS: Final[tuple[dict[Kind, Object], ...]] = (
    {
        POD_DISRUPTION_BUDGET: {"maxUnavailable": "100%"},
        HORIZONTAL_POD_AUTOSCALER: {"maxReplicas": 50},
        NETWORK_POLICY: {"ingress": [{}]},
    },
    {
        # One excludes the other, so the declared number can only be applied where the foreign one is removed.
        POD_DISRUPTION_BUDGET: {"maxUnavailable": None, "minAvailable": 1},
        HORIZONTAL_POD_AUTOSCALER: {"minReplicas": None},
        NETWORK_POLICY: {"egress": None, "policyTypes": ["Ingress"]},
    },
    {
        POD_DISRUPTION_BUDGET: {"unhealthyPodEvictionPolicy": "IfHealthyBudget"},
        HORIZONTAL_POD_AUTOSCALER: {"scaleTargetRef": {"name": "other"}},
        NETWORK_POLICY: {"podSelector": {"matchLabels": {"app": "other"}}},
    },
    {
        POD_DISRUPTION_BUDGET: {"selector": None},
        HORIZONTAL_POD_AUTOSCALER: {"metrics": None},
        NETWORK_POLICY: {"podSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}},
    },
)
"""Changes of each child's spec, one of each kind at the same time."""


def test_every_field_of_the_optional_children_is_repaired_and_then_nothing_is_written(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess
) -> None:
    """Whatever another writer changes comes back in place, what it adds stays, and a round without drift is silent.

    Without the stanzas the three children go, and then a round is as silent.
    """
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, resources=REQUESTS, **ALL))
    wait_reconciled(admin, key)
    foreign: Object = {"metadata": {"labels": {"team": "red"}, "annotations": {"example.com/note": "keep"}}}
    behavior = {"spec": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 60}}}}
    for kind in OPTIONAL_CHILD_KINDS:
        admin.patch(kind, child_key(key), foreign | (behavior if kind == HORIZONTAL_POD_AUTOSCALER else {}))
    before = settled_objects_of(admin, key)

    for drifts in DRIFTS:
        mark = audit.mark()
        for kind, change in drifts.items():
            admin.patch(kind, child_key(key), {"spec": change}, field_manager="editor")
        wait_until(partial(is_undone, admin, key, before), CONVERGE_TIMEOUT_S, f"the repair of {drifts}")
        written = {each.resource for each in writes_to_children(audit, key, mark)}
        assert written == {kind.plural for kind in OPTIONAL_CHILD_KINDS}, drifts
    assert_silent(admin, audit, key, running_operator)

    edit(admin, key, **dict.fromkeys(ALL))
    after = settled_objects_of(admin, key)
    assert after.optional == {}
    assert after.uids == before.uids
    assert_silent(admin, audit, key, running_operator)


def is_undone(admin: Kube, key: Key, before: ProxyObjects) -> bool:
    """Whether the optional children are as they were, and an apply of ours would change nothing."""
    now = objects_of(admin, key)
    are_equal = {kind: content_of(child) for kind, child in now.optional.items()} == {
        kind: content_of(child) for kind, child in before.optional.items()
    }
    return are_equal and not any(
        not_as_declared(admin, kind, declared, (now.children | now.optional)[kind])
        for kind, declared in declared_children(now.proxy, now.children).items()
    )


def assert_silent(admin: Kube, audit: AuditLog, key: Key, operator: OperatorProcess) -> None:
    """A round of a proxy that has nothing to write sends no write."""
    settled_objects_of(admin, key)
    mark = audit.mark()
    rounds = operator.metric("operator_app_rounds_total")
    admin.patch(ENVOY_PROXY, key, {"metadata": {"annotations": {"example.com/noise": f"{rounds}"}}})
    wait_until(lambda: operator.metric("operator_app_rounds_total") > rounds, what="a round")
    time.sleep(SETTLED_S)  # what a round still has to write is written by then
    assert [each for each in audit.writes(OPERATOR_USER, mark) if each.namespace == key.namespace] == []


def test_a_budget_is_there_from_two_replicas(admin: Kube, namespace: str) -> None:
    """One proxy has no budget, two have one of one Pod; with the scale it comes and goes."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=2))
    wait_reconciled(admin, key)
    assert admin.get(POD_DISRUPTION_BUDGET, child_key(key))["spec"]["maxUnavailable"] == 1
    edit(admin, key, replicas=1)
    admin.wait_gone(POD_DISRUPTION_BUDGET, child_key(key))
    edit(admin, key, replicas=3)
    assert admin.find(POD_DISRUPTION_BUDGET, child_key(key)) is not None


def test_an_autoscaler_takes_over_and_gives_back_without_a_dip(
    admin: Kube, namespace: str, running_operator: OperatorProcess
) -> None:
    """No version of the Deployment has another number than the one before, the autoscaler's and the declared one.

    While the autoscaler owns the number, neither an edit of the spec nor a drift nor a restart resets it.
    """
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=4, resources=REQUESTS))
    wait_reconciled(admin, key)
    begin = settled_objects_of(admin, key).children[DEPLOYMENT]

    edit(admin, key, autoscaling={"minReplicas": 2, "maxReplicas": 9})
    settled_objects_of(admin, key)
    scale(admin, key, 6)
    edit(admin, key, listeners=[{"name": "http", "port": 81, "routes": [{"backend": "app"}]}], replicas=3)
    admin.patch(DEPLOYMENT, child_key(key), {"spec": {"template": {"spec": {"enableServiceLinks": True}}}})
    admin.wait_until(
        DEPLOYMENT, child_key(key), lambda live: live["spec"]["template"]["spec"]["enableServiceLinks"] is False
    )
    scale(admin, key, 7)
    settled = settled_objects_of(admin, key)
    assert settled.children[DEPLOYMENT]["spec"]["replicas"] == 7

    edit(admin, key, autoscaling=None, replicas=5)
    settled_objects_of(admin, key)
    assert numbers(admin, key, begin) == [4, 6, 7, 5]
    assert not drift_of(admin, key)
    assert running_operator.metric("operator_app_writes_total", outcome="unchanged") == 0


def test_an_autoscaler_starts_a_proxy_that_was_stopped(admin: Kube, namespace: str) -> None:
    """From no Pods the Deployment goes to one, since an autoscaler leaves a Deployment without Pods alone."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=0, resources=REQUESTS))
    wait_reconciled(admin, key)
    edit(admin, key, replicas=1, autoscaling={"minReplicas": 1, "maxReplicas": 3})
    assert admin.get(DEPLOYMENT, child_key(key))["spec"]["replicas"] == 1


def test_all_of_a_deleted_proxy_goes(admin: Kube, namespace: str) -> None:
    """The optional children have the proxy as their owner, and go with it."""
    key = Key(namespace, "web")
    admin.create(
        ENVOY_PROXY,
        a_proxy(
            namespace,
            resources=REQUESTS,
            disruption={},
            networkPolicy={},
            autoscaling={"maxReplicas": 2},
        ),
    )
    proxy = wait_reconciled(admin, key)
    assert set(objects_of(admin, key).optional) == set(OPTIONAL_CHILD_KINDS)
    admin.delete(ENVOY_PROXY, key)
    wait_all_gone(admin, proxy)
    for kind in OPTIONAL_CHILD_KINDS:
        admin.wait_gone(kind, child_key(key))


def test_two_families_are_given_back(admin: Kube, namespace: str) -> None:
    """A Service without ipFamilyPolicy is as one that never had it."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, service={"ipFamilyPolicy": "PreferDualStack"}))
    wait_reconciled(admin, key)
    admin.patch(ENVOY_PROXY, key, {"spec": {"service": {"ipFamilyPolicy": None}}})
    wait_reconciled(admin, key)
    stored = settled_objects_of(admin, key).children[SERVICE]
    assert stored["spec"]["ipFamilyPolicy"] == "SingleStack"
