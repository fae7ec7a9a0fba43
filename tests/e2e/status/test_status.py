"""The status is true, is written at the right time, and changes only when what it reports changes."""

import shutil
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import pytest

from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    Key,
    Object,
)
from operator_app.desired import child_key
from operator_app.ssa.fields import fields_of
from tests.e2e.controlplane import AuditLog
from tests.e2e.controlplane import Cluster as ControlPlane
from tests.e2e.kube import RESOURCE_QUOTA, Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import (
    OPERATOR_USER,
    a_proxy,
    assert_one_of_everything,
    condition,
    drift_of,
    history,
    holds,
    kstatus,
    objects_of,
    version,
    wait_ready,
    wait_reconciled,
    writes_to_children,
)

WAIT_S: Final = 1.5
"""Longer than counters take to settle (1 s in tests)."""

FOREIGN_CONDITION: Final[Object] = {
    "type": "example.com/Scanned",
    "status": "True",
    "observedGeneration": 1,
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "reason": "Scanned",
    "message": "by another writer",
}


def is_stalled(reason: str) -> Callable[[Object], bool]:
    """A predicate: the proxy is ``Stalled`` for that reason."""
    return lambda proxy: condition(proxy, "Stalled").get("reason") == reason


def test_existing_children_are_not_reconciled_yet(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess
) -> None:
    """Drift, a deletion and an edit while no operator runs are repaired before the status says ``Reconciled``.

    Every version of the proxy that was stored is checked, and every write in the audit log.
    """
    key, child = Key(namespace, "web"), child_key(Key(namespace, "web"))
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    before = wait_reconciled(admin, key)
    running_operator.stop()

    admin.patch(SERVICE, child, {"spec": {"selector": {"app": "other"}}})
    admin.patch(CONFIG_MAP, child, {"data": {"cds.json": "{}"}})
    admin.delete(DEPLOYMENT, child)
    admin.wait_gone(DEPLOYMENT, child)
    edit = {"registration": {"hostname": f"{namespace}.example.com"}, "replicas": 2}
    edited = admin.patch(ENVOY_PROXY, key, {"spec": edit})
    assert edited["metadata"]["generation"] == 2
    assert condition(edited, "Reconciled")["status"] == "True", "it is about the generation before"
    assert kstatus(edited) == "InProgress", "a reader that compares generations is not misled"
    mark = audit.mark()
    running_operator.start()
    wait_reconciled(admin, key)

    repaired = max(version(each) for each in objects_of(admin, key).children.values() if each["kind"] != "Deployment")
    deployment_at = next(
        int(each.resource_version or 0)
        for each in writes_to_children(audit, key, mark)
        if each.resource == DEPLOYMENT.plural
    )
    reconciled = [each for each in history(admin, key, before) if holds("Reconciled", generation=2)(each)]
    assert reconciled, "the history has the version with that status"
    assert version(reconciled[0]) > max(repaired, deployment_at)
    writes = [each for each in audit.writes(OPERATOR_USER, mark) if each.namespace == namespace]
    order = [(each.resource, each.subresource) for each in writes]
    # Two replicas bring a disruption budget along.
    assert set(order[:4]) == {(kind.plural, "") for kind in (*CHILD_KINDS, POD_DISRUPTION_BUDGET)}
    assert order[4] == (ENVOY_PROXY.plural, "status")
    assert not drift_of(admin, key)
    assert_one_of_everything(admin, key)


def test_a_proxy_without_an_operator_is_in_progress(admin: Kube, namespace: str, crds: object) -> None:  # noqa: ARG001  # served
    """Before any operator has written its status, a proxy is ``InProgress`` for tools that follow kstatus."""
    proxy = admin.create(ENVOY_PROXY, a_proxy(namespace))
    assert proxy["status"] == {"observedGeneration": -1}
    assert kstatus(proxy) == "InProgress"


def test_times_and_generations_change_only_with_the_state(
    admin: Kube, namespace: str, running_operator: OperatorProcess, control_plane: ControlPlane
) -> None:
    """Over edits, noise, drift and flips: a condition's time moves when its status flips, and at no other time.

    Without replicas a proxy is ready, and with an image that no node can run it is not: so scaling flips conditions.
    """
    key = Key(namespace, "web")
    created = admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=0, image="nobody-has/this:1"))
    ready = wait_ready(admin, key)
    assert kstatus(ready) == "Current"
    assert {each["type"] for each in ready["status"]["conditions"]} == {
        "Ready",
        "Reconciled",
        "Available",
        "Registered",
        "Programmed",
    }
    kubectl_waits(control_plane, namespace, "condition=Ready")
    # Times have a resolution of one second, so flips must be further apart to be told apart.
    time.sleep(1.1)

    rounds = running_operator.metric("operator_app_rounds_total")
    noisy = admin.patch(ENVOY_PROXY, key, {"metadata": {"labels": {"noise": "1"}, "annotations": {"noise": "2"}}})
    wait_until(lambda: running_operator.metric("operator_app_rounds_total") > rounds, what="a round")
    time.sleep(0.3)
    assert admin.get(ENVOY_PROXY, key) == noisy, "noise in the labels is no reason to write"

    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"hostname": f"{namespace}.example.com"}}})
    admin.wait_until(ENVOY_PROXY, key, holds("Ready", generation=2))
    admin.patch(SERVICE, child_key(key), {"spec": {"selector": {"app": "other"}}})
    wait_until(lambda: not drift_of(admin, key), what="the repair")
    admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": 1}})
    down = admin.wait_until(ENVOY_PROXY, key, lambda live: condition(live, "Available")["status"] == "False")
    assert kstatus(down) == "InProgress"
    time.sleep(1.1)
    admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": 0}})
    last = admin.wait_until(ENVOY_PROXY, key, holds("Ready", generation=4))
    time.sleep(WAIT_S)

    versions = [created, *history(admin, key, created)]
    assert version(versions[-1]) >= version(last)
    for earlier, later in pairwise(versions):
        assert_valid_transition(earlier, later)
    times = {
        kind: {condition(each, kind)["lastTransitionTime"] for each in versions if condition(each, kind)}
        for kind in ("Ready", "Available", "Reconciled", "Registered")
    }
    assert len(times["Available"]) == 3, "up, down and up again"
    assert len(times["Reconciled"]) == len(times["Registered"]) == 1, "these were true all the time"
    progress = [condition(each, "Reconciling").get("status") for each in versions]
    assert set(progress) <= {None, "True"}, "it exists only while it is true"
    assert condition(versions[-1], "Reconciling") == condition(versions[-1], "Stalled") == {}


def assert_valid_transition(earlier: Object, later: Object) -> None:
    """No generation goes back or runs ahead, and the time of a condition changes only together with its status."""
    assert earlier["status"]["observedGeneration"] <= later["status"]["observedGeneration"]
    assert later["status"]["observedGeneration"] <= later["metadata"]["generation"]
    for now in later["status"].get("conditions", ()):
        was = condition(earlier, now["type"])
        if not was:
            continue
        is_flip = was["status"] != now["status"]
        has_other_time = was["lastTransitionTime"] != now["lastTransitionTime"]
        assert is_flip or not has_other_time, now
        assert was["observedGeneration"] <= now["observedGeneration"]


@pytest.mark.usefixtures("running_operator")
def test_what_others_write_into_the_status_stays(admin: Kube, namespace: str) -> None:
    """Conditions and fields of other writers stay; a condition of ours that another writer changed is repaired."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=0, service={"type": "LoadBalancer"}))
    before = wait_reconciled(admin, key)
    assert "address" not in before["status"], "no load balancer has given one"

    foreign = {"status": {"conditions": [FOREIGN_CONDITION], "address": "192.0.2.7"}}
    admin.apply(ENVOY_PROXY, shell(before) | foreign, field_manager="scanner", subresource="status")
    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"hostname": f"{namespace}.example.com"}}})
    after = admin.wait_until(ENVOY_PROXY, key, holds("Reconciled", generation=2))
    assert condition(after, FOREIGN_CONDITION["type"]) == FOREIGN_CONDITION
    assert after["status"]["address"] == "192.0.2.7"

    index = [each["type"] for each in after["status"]["conditions"]].index("Reconciled")
    wrong = [{"op": "replace", "path": f"/status/conditions/{index}/status", "value": "False"}]
    admin.patch(ENVOY_PROXY, key, wrong, patch_type="json", subresource="status", field_manager="other")
    admin.wait_until(ENVOY_PROXY, key, holds("Reconciled", generation=2))
    # An Update replaces the whole list.
    admin.patch(ENVOY_PROXY, key, {"status": {"conditions": [FOREIGN_CONDITION]}}, subresource="status")
    again = admin.wait_until(ENVOY_PROXY, key, holds("Reconciled", generation=2))
    assert condition(again, FOREIGN_CONDITION["type"]) == FOREIGN_CONDITION
    assert again["status"]["observedGeneration"] == again["metadata"]["generation"] == 2


@pytest.mark.usefixtures("running_operator")
def test_the_counters_are_the_deployments(admin: Kube, namespace: str) -> None:
    """``replicas`` and ``readyReplicas`` count Pods: of an image that no node can run some exist, and none is ready."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=3, image="nobody-has/this:1"))
    proxy = admin.wait_until(ENVOY_PROXY, key, lambda live: live["status"].get("replicas") == 3)
    assert proxy["status"]["readyReplicas"] == 0
    assert proxy["status"]["address"] == f"web-envoy.{namespace}.svc"
    assert proxy["status"]["selector"] == "app.kubernetes.io/instance=web,app.kubernetes.io/name=envoy"
    assert condition(proxy, "Available")["reason"] == "NotEnoughReady"
    assert condition(proxy, "Reconciling")["status"] == "True"


@pytest.mark.usefixtures("running_operator")
def test_a_configuration_that_is_too_large_stalls_without_a_write(admin: Kube, audit: AuditLog, namespace: str) -> None:
    """An error that only the operator can find becomes ``Stalled`` with its reason, and nothing else is written."""
    key = Key(namespace, "web")
    mark = audit.mark()
    admin.create(ENVOY_PROXY, a_proxy(namespace, **too_large()))
    proxy = admin.wait_until(ENVOY_PROXY, key, is_stalled("ConfigurationTooLarge"))
    assert kstatus(proxy) == "Failed"
    assert condition(proxy, "Reconciled")["reason"] == condition(proxy, "Ready")["reason"] == "ConfigurationTooLarge"
    assert writes_to_children(audit, key, mark) == []

    admin.patch(ENVOY_PROXY, key, {"spec": a_proxy(namespace)["spec"]})
    recovered = wait_reconciled(admin, key)
    assert condition(recovered, "Stalled") == {}
    running = objects_of(admin, key)
    # The same edit of a running proxy leaves everything as it runs.
    mark = audit.mark()
    admin.patch(ENVOY_PROXY, key, {"spec": too_large()})
    admin.wait_until(ENVOY_PROXY, key, is_stalled("ConfigurationTooLarge"))
    assert writes_to_children(audit, key, mark) == []
    assert objects_of(admin, key).uids == running.uids


@pytest.mark.usefixtures("running_operator")
def test_an_immutable_child_stalls_and_names_itself(admin: Kube, audit: AuditLog, namespace: str) -> None:
    """A ConfigMap that was made immutable can't follow an edit: it is named, and no Pod gets the new hash."""
    key, child = Key(namespace, "web"), child_key(Key(namespace, "web"))
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    admin.patch(CONFIG_MAP, child, {"immutable": True})
    before = objects_of(admin, key)
    mark = audit.mark()

    backends = [{"name": "app", "endpoints": [{"host": "new.example.com", "port": 8080}]}]
    admin.patch(ENVOY_PROXY, key, {"spec": {"backends": backends}})
    proxy = admin.wait_until(ENVOY_PROXY, key, is_stalled("Invalid"))
    assert "data" in condition(proxy, "Stalled")["message"]
    assert str(child) in condition(proxy, "Stalled")["message"]
    time.sleep(WAIT_S)
    deployment = admin.get(DEPLOYMENT, child)
    assert deployment["spec"] == before.children[DEPLOYMENT]["spec"]
    attempts = [each.resource for each in writes_to_children(audit, key, mark)]
    assert attempts == [CONFIG_MAP.plural], "what was refused is not sent again"

    admin.delete(CONFIG_MAP, child)
    wait_reconciled(admin, key)
    assert not drift_of(admin, key)


@pytest.mark.usefixtures("running_operator")
def test_a_quota_stalls_until_it_is_raised(admin: Kube, namespace: str) -> None:
    """A child that a quota forbids needs a user's action; once it is allowed, it is created without another edit."""
    key = Key(namespace, "web")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"namespace": namespace, "name": "none"}}
    admin.create(RESOURCE_QUOTA, quota | {"spec": {"hard": {"services": "0"}}})
    at = Key(namespace, "none")
    admin.wait_until(RESOURCE_QUOTA, at, lambda live: live.get("status", {}).get("hard") == {"services": "0"})

    admin.create(ENVOY_PROXY, a_proxy(namespace))
    proxy = admin.wait_until(ENVOY_PROXY, key, is_stalled("Forbidden"))
    assert str(child_key(key)) in condition(proxy, "Stalled")["message"]
    assert condition(proxy, "Registered")["status"] == "False"

    admin.delete(RESOURCE_QUOTA, at)
    wait_reconciled(admin, key)
    assert_one_of_everything(admin, key)


@pytest.mark.parametrize("is_edited_unseen", [False, True], ids=["one by one", "at once"])
def test_conditions_can_still_be_removed_after_ownership_was_wiped(
    admin: Kube, namespace: str, running_operator: OperatorProcess, *, is_edited_unseen: bool
) -> None:
    """A condition that had no owner for a while is removed when it is not true any more; another writer's stays."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=0, **too_large()))
    stalled = admin.wait_until(ENVOY_PROXY, key, is_stalled("ConfigurationTooLarge"))
    foreign = {"status": {"conditions": [FOREIGN_CONDITION]}}
    admin.apply(ENVOY_PROXY, shell(stalled) | foreign, field_manager="scanner", subresource="status")

    if is_edited_unseen:
        running_operator.stop()
    admin.patch(ENVOY_PROXY, key, {"metadata": {"managedFields": [{}]}})
    if not is_edited_unseen:
        admin.wait_until(ENVOY_PROXY, key, lambda live: bool(fields_of(live, subresource="status")))
    admin.patch(ENVOY_PROXY, key, {"spec": a_proxy(namespace)["spec"]})
    if is_edited_unseen:
        running_operator.start()

    wait_ready(admin, key)
    admin.wait_until(ENVOY_PROXY, key, lambda live: not condition(live, "Stalled"))
    settled = admin.wait_until(ENVOY_PROXY, key, lambda live: not condition(live, "Reconciling"))
    assert kstatus(settled) == "Current"
    assert condition(settled, FOREIGN_CONDITION["type"]) == FOREIGN_CONDITION
    time.sleep(WAIT_S)
    assert admin.get(ENVOY_PROXY, key) == settled, "nothing is written repeatedly"


def shell(proxy: Object) -> Object:
    """A proxy's kind and name, to which an apply adds fields."""
    metadata = {name: proxy["metadata"][name] for name in ("namespace", "name")}
    return {"apiVersion": proxy["apiVersion"], "kind": proxy["kind"], "metadata": metadata}


def too_large() -> dict[str, Any]:
    """A spec that obeys every rule of the schema and whose Envoy configuration does not fit into a ConfigMap."""
    by_host = [
        {"match": {"hosts": [f"h{number}.d{group}.example.com" for number in range(16)]}, "backend": "app"}
        for group in range(32)
    ]
    # Each of these serves every host above, too.
    by_path = [{"match": {"pathPrefix": f"/{number}/{'p' * 400}"}, "backend": "app"} for number in range(32)]
    routes = [*by_host, *by_path]
    return {"listeners": [{"name": f"l{number}", "port": 8000 + number, "routes": routes} for number in range(2)]}


def kubectl_waits(control_plane: ControlPlane, namespace: str, condition: str) -> None:
    """``kubectl wait`` finds the condition, where there is a kubectl."""
    if shutil.which("kubectl") is None:
        return
    command = ["kubectl", f"--kubeconfig={control_plane.kubeconfig}", "--namespace", namespace]
    subprocess.run(
        [*command, "wait", "envoyproxies.edge.operator-app.dev/web", f"--for={condition}", "--timeout=5s"],
        check=True,
        timeout=20,
    )
