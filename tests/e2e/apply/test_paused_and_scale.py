"""``spec.paused`` stops every write except the status; the ``scale`` subresource changes the number of Pods."""

import time
from typing import Final

import pytest

from operator_app.api.kinds import (
    CHILD_KINDS,
    DEPLOYMENT,
    ENVOY_PROXY,
    FINALIZER,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Object,
)
from operator_app.desired import child_key
from tests.e2e.controlplane import AuditLog
from tests.e2e.kube import Kube, path_of, wait_until
from tests.e2e.proxies import (
    OPERATOR_USER,
    a_proxy,
    assert_one_of_everything,
    condition,
    drift_of,
    holds,
    is_refused,
    objects_of,
    record_key,
    wait_all_gone,
    wait_reconciled,
)

WAIT_S: Final = 1.5
"""Longer than counters take to settle (1 s in tests)."""

pytestmark = pytest.mark.usefixtures("running_operator")


def test_a_proxy_created_paused_gets_only_a_status(admin: Kube, audit: AuditLog, namespace: str) -> None:
    """Nothing is created, not even the finalizer; the status says what waits; resumed, the proxy converges."""
    key = Key(namespace, "web")
    mark = audit.mark()
    proxy = admin.create(ENVOY_PROXY, a_proxy(namespace, paused=True))
    paused = admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "Paused"))
    time.sleep(WAIT_S)

    writes = [each for each in audit.writes(OPERATOR_USER, mark) if each.namespace == namespace]
    assert [(each.resource, each.subresource) for each in writes] == [(ENVOY_PROXY.plural, "status")]
    assert "finalizers" not in paused["metadata"]
    assert admin.find(PROXY_REGISTRATION, record_key(proxy)) is None
    assert condition(paused, "Ready")["status"] == "False"

    admin.patch(ENVOY_PROXY, key, {"spec": {"paused": False}})
    resumed = wait_reconciled(admin, key)
    assert resumed["metadata"]["finalizers"] == [FINALIZER]
    assert_one_of_everything(admin, key)


def test_drift_of_a_paused_proxy_is_reported_and_repaired_later(admin: Kube, audit: AuditLog, namespace: str) -> None:
    """Edits and drift of a paused proxy are named in its status, and all of them are applied after it is resumed."""
    key, child = Key(namespace, "web"), child_key(Key(namespace, "web"))
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    admin.patch(ENVOY_PROXY, key, {"spec": {"paused": True}})
    paused = admin.wait_until(ENVOY_PROXY, key, holds("Reconciled", generation=2))
    assert paused["status"]["observedGeneration"] == 2, "a paused proxy whose children are as declared is reconciled"
    time.sleep(WAIT_S)
    before = objects_of(admin, key)
    mark = audit.mark()

    admin.patch(SERVICE, child, {"spec": {"selector": {"app": "other"}}})
    paused = admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "Paused"))
    assert ".spec.selector" in condition(paused, "Reconciled")["message"]
    admin.delete(DEPLOYMENT, child)
    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"hostname": f"{namespace}.example.com"}}})
    paused = admin.wait_until(ENVOY_PROXY, key, lambda live: live["status"]["observedGeneration"] == 3)
    assert condition(paused, "Registered")["status"] == "False"
    time.sleep(WAIT_S)

    concerned = {(namespace, key.name), child, record_key(paused)}
    writes = [each for each in audit.writes(OPERATOR_USER, mark) if (each.namespace, each.name) in concerned]
    assert {(each.resource, each.subresource) for each in writes} == {(ENVOY_PROXY.plural, "status")}
    assert admin.get(SERVICE, child)["spec"]["selector"]["app"] == "other"
    assert admin.get(PROXY_REGISTRATION, record_key(paused)) == before.record
    assert admin.find(DEPLOYMENT, child) is None

    admin.patch(ENVOY_PROXY, key, {"spec": {"paused": False}})
    wait_reconciled(admin, key)
    assert not drift_of(admin, key)
    after = assert_one_of_everything(admin, key)
    assert after.record["spec"]["hostname"] == f"{namespace}.example.com"


def test_a_paused_proxy_can_be_deleted(admin: Kube, namespace: str) -> None:
    """Pausing does not stop a deletion: record, children and proxy are removed."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    proxy = wait_reconciled(admin, key)
    admin.patch(ENVOY_PROXY, key, {"spec": {"paused": True}})
    admin.wait_until(ENVOY_PROXY, key, lambda live: live["status"]["observedGeneration"] == 2)

    admin.delete(ENVOY_PROXY, key)
    wait_all_gone(admin, proxy)
    for kind in CHILD_KINDS:
        admin.wait_gone(kind, child_key(key))


def test_scale_changes_the_number_of_pods(admin: Kube, namespace: str) -> None:
    """A write to the scale subresource reaches the Deployment, and a read of it has what an autoscaler needs."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    before = objects_of(admin, key)

    admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": 3}}, subresource="scale")
    admin.wait_until(ENVOY_PROXY, key, holds("Reconciled", generation=2))
    assert admin.get(DEPLOYMENT, child_key(key))["spec"]["replicas"] == 3

    def scale() -> Object | None:
        found: Object = admin.request("GET", path_of(ENVOY_PROXY, key, "scale")).json()
        return found if found["status"]["replicas"] == 3 else None

    found = wait_until(scale, what="the number of Pods in the scale")
    assert found == found | {
        "spec": {"replicas": 3},
        "status": {"replicas": 3, "selector": "app.kubernetes.io/instance=web,app.kubernetes.io/name=envoy"},
    }
    after = objects_of(admin, key)
    assert after.uids == before.uids
    template = before.children[DEPLOYMENT]["spec"]["template"]
    assert after.children[DEPLOYMENT]["spec"]["template"] == template, "no Pod is replaced for it"
