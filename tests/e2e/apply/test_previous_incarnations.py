"""Deletion and creation under the same name: nothing of a previous incarnation is taken over, and nothing is left."""

import time
from typing import Final

import pytest

from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    ENVOY_PROXY,
    FINALIZER,
    NAMESPACE,
    PROXY_REGISTRATION,
    Key,
    Object,
)
from operator_app.desired import child_key
from tests.e2e.controlplane import AuditLog
from tests.e2e.kube import Kube, KubeError, wait_until
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.proxies import (
    a_proxy,
    assert_one_of_everything,
    condition,
    drift_of,
    is_refused,
    objects_of,
    record_key,
    settled_objects_of,
    wait_all_gone,
    wait_reconciled,
    writes_to_children,
)

WAIT_S: Final = 1.0
"""Several rounds long: the backoff of tests begins at 0.1 s."""

NAMESPACE_TIMEOUT_S: Final = 90.0
OTHER_FINALIZER: Final = "example.com/other"


def recreated(admin: Kube, proxy: Object) -> Object:
    """A proxy of the same name, created as soon as the name is free."""

    def create() -> Object | None:
        try:
            return admin.create(ENVOY_PROXY, proxy)
        except KubeError as error:
            if error.reason != "AlreadyExists":
                raise
            return None

    return wait_until(create, what="the name to be free")


@pytest.mark.usefixtures("running_operator")
@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_a_new_incarnation_takes_over_nothing(admin: Kube, audit: AuditLog, namespace: str, propagation: str) -> None:
    """Deleted and created again at once: new children, a new record, and no write to any old child."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    old = objects_of(admin, key)
    mark = audit.mark()

    admin.delete(ENVOY_PROXY, key, propagation=propagation)
    created = recreated(admin, a_proxy(namespace, registration={"hostname": f"{namespace}.example.com"}))
    wait_reconciled(admin, key)

    new = assert_one_of_everything(admin, key)
    assert new.proxy["metadata"]["uid"] == created["metadata"]["uid"]
    assert not set(new.uids.values()) & set(old.uids.values())
    assert admin.find(PROXY_REGISTRATION, record_key(old.proxy)) is None
    assert new.record["spec"]["hostname"] == f"{namespace}.example.com"
    assert not drift_of(admin, key)
    done = [each for each in writes_to_children(audit, key, mark) if each.code < 400]
    assert sorted((each.resource, each.code) for each in done) == sorted((kind.plural, 201) for kind in CHILD_KINDS)


def test_a_child_of_a_previous_incarnation_is_waited_out(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess
) -> None:
    """While a finalizer keeps an old child, the new proxy's status says so; once it is gone, the child is created."""
    key = Key(namespace, "web")
    child = child_key(key)
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    old = wait_reconciled(admin, key)
    admin.patch(CONFIG_MAP, child, {"metadata": {"finalizers": [OTHER_FINALIZER]}})

    admin.delete(ENVOY_PROXY, key)
    recreated(admin, a_proxy(namespace))
    proxy = admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "PreviousIncarnation"))
    assert condition(proxy, "Stalled") == {}, "nobody has to act"
    kept = admin.wait_until(CONFIG_MAP, child, lambda live: "deletionTimestamp" in live["metadata"])
    mark = audit.mark()
    rounds = running_operator.metric("operator_app_rounds_total")
    wait_until(lambda: running_operator.metric("operator_app_rounds_total") > rounds + 1, what="two more rounds")

    assert admin.get(CONFIG_MAP, child) == kept
    assert not [each for each in writes_to_children(audit, key, mark) if each.resource == CONFIG_MAP.plural]
    admin.patch(CONFIG_MAP, child, {"metadata": {"finalizers": None}})
    wait_reconciled(admin, key)
    new = assert_one_of_everything(admin, key)
    assert kept["metadata"]["uid"] not in new.uids.values()
    assert old["metadata"]["uid"] not in new.uids.values()


@pytest.mark.usefixtures("running_operator")
def test_orphans_are_foreign_to_the_next_incarnation(admin: Kube, audit: AuditLog, namespace: str) -> None:
    """Children that were orphaned on purpose are not adopted: the next proxy of the name reports them, unwritten."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=0))
    proxy = wait_reconciled(admin, key)
    before = objects_of(admin, key)

    admin.delete(ENVOY_PROXY, key, propagation="Orphan")
    wait_all_gone(admin, proxy)
    orphans = {kind: admin.get(kind, child_key(key)) for kind in CHILD_KINDS}
    assert {kind.kind: each["metadata"]["uid"] for kind, each in orphans.items()}.items() <= before.uids.items()
    assert not any(each["metadata"].get("ownerReferences") for each in orphans.values())
    mark = audit.mark()
    admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=0))
    admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "NameConflict"))
    time.sleep(WAIT_S)

    assert {kind: admin.get(kind, child_key(key)) for kind in CHILD_KINDS} == orphans
    assert writes_to_children(audit, key, mark) == []


def test_what_happened_while_no_operator_ran_is_finished_after_a_start(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess
) -> None:
    """After a start a deletion is finished, an orphaned record removed, a new incarnation served, the others unchanged.

    The orphaned record is of a proxy whose finalizer somebody removed by hand, so that it was deleted without cleanup.
    """
    names = ("deleted", "unfinalized", "recreated", "unchanged")
    keys = {name: Key(namespace, name) for name in names}
    for name in names:
        admin.create(ENVOY_PROXY, a_proxy(namespace, name))
    for key in keys.values():
        wait_reconciled(admin, key)
    old = {name: settled_objects_of(admin, key) for name, key in keys.items()}
    running_operator.stop()

    admin.delete(ENVOY_PROXY, keys["deleted"])
    for name in ("unfinalized", "recreated"):
        admin.patch(ENVOY_PROXY, keys[name], {"metadata": {"finalizers": None}})
        admin.delete(ENVOY_PROXY, keys[name])
        admin.wait_gone(ENVOY_PROXY, keys[name])
    admin.create(ENVOY_PROXY, a_proxy(namespace, "recreated"))
    time.sleep(WAIT_S)
    assert all(admin.find(PROXY_REGISTRATION, record_key(each.proxy)) for each in old.values()), "nobody cleaned up"
    mark = audit.mark()
    running_operator.start()

    for name in ("deleted", "unfinalized"):
        wait_all_gone(admin, old[name].proxy)
    wait_reconciled(admin, keys["recreated"])
    new = assert_one_of_everything(admin, keys["recreated"])
    assert not set(new.uids.values()) & set(old["recreated"].uids.values())
    wait_until(
        lambda: admin.find(PROXY_REGISTRATION, record_key(old["recreated"].proxy)) is None, what="the old record's end"
    )
    assert objects_of(admin, keys["unchanged"]).versions == old["unchanged"].versions
    assert writes_to_children(audit, keys["unchanged"], mark) == []


@pytest.mark.usefixtures("running_operator")
def test_a_namespace_goes_with_everything(admin: Kube, namespace: str) -> None:
    """A namespace with proxies in it can be deleted, and no record outside of it is left behind."""
    for name in ("one", "two"):
        admin.create(ENVOY_PROXY, a_proxy(namespace, name))
    proxies = [wait_reconciled(admin, Key(namespace, name)) for name in ("one", "two")]

    admin.delete(NAMESPACE, Key("", namespace))
    admin.wait_gone(NAMESPACE, Key("", namespace), timeout_s=NAMESPACE_TIMEOUT_S)

    records = [each["spec"]["proxy"] for each in admin.list(PROXY_REGISTRATION, OPERATOR_NAMESPACE)]
    assert not [each for each in records if each["namespace"] == namespace]
    assert all(admin.find(PROXY_REGISTRATION, record_key(each)) is None for each in proxies)


@pytest.mark.usefixtures("running_operator")
def test_finalizers_of_others_stay(admin: Kube, namespace: str) -> None:
    """Ours is added and removed beside a foreign one; while that one keeps the proxy, nothing is created again."""
    key = Key(namespace, "web")
    declared = a_proxy(namespace)
    declared["metadata"]["finalizers"] = [OTHER_FINALIZER]
    admin.create(ENVOY_PROXY, declared)
    proxy = wait_reconciled(admin, key)
    assert set(proxy["metadata"]["finalizers"]) == {OTHER_FINALIZER, FINALIZER}

    admin.delete(ENVOY_PROXY, key)
    kept = admin.wait_until(ENVOY_PROXY, key, lambda live: live["metadata"].get("finalizers") == [OTHER_FINALIZER])
    assert admin.find(PROXY_REGISTRATION, record_key(proxy)) is None
    for kind in CHILD_KINDS:
        admin.delete(kind, child_key(key))
    admin.patch(ENVOY_PROXY, key, {"metadata": {"labels": {"noise": "yes"}}})
    time.sleep(WAIT_S)
    assert admin.get(ENVOY_PROXY, key)["metadata"]["finalizers"] == [OTHER_FINALIZER]
    assert admin.get(ENVOY_PROXY, key)["status"] == kept["status"]
    assert admin.find(PROXY_REGISTRATION, record_key(proxy)) is None
    assert not any(admin.find(kind, child_key(key)) for kind in CHILD_KINDS)

    admin.patch(ENVOY_PROXY, key, {"metadata": {"finalizers": None}})
    wait_all_gone(admin, proxy)


@pytest.mark.usefixtures("running_operator")
def test_our_finalizer_goes_although_others_own_it_too(admin: Kube, namespace: str) -> None:
    """A manifest that was exported and applied again makes its author an owner of our entry; deletion still works."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    proxy = wait_reconciled(admin, key)
    copied = {"name": key.name, "namespace": key.namespace, "finalizers": [FINALIZER, OTHER_FINALIZER]}
    exported = {"apiVersion": proxy["apiVersion"], "kind": proxy["kind"], "metadata": copied}
    admin.apply(ENVOY_PROXY, exported, field_manager="gitops")

    admin.delete(ENVOY_PROXY, key)
    admin.wait_until(ENVOY_PROXY, key, lambda live: live["metadata"].get("finalizers") == [OTHER_FINALIZER])
    assert admin.find(PROXY_REGISTRATION, record_key(proxy)) is None
    admin.patch(ENVOY_PROXY, key, {"metadata": {"finalizers": None}})
    wait_all_gone(admin, proxy)


@pytest.mark.usefixtures("running_operator")
def test_a_finalizer_removed_by_hand_comes_back(admin: Kube, namespace: str) -> None:
    """Our finalizer is added again to a proxy that is not being deleted, so that its record can't be left behind."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    before = wait_reconciled(admin, key)

    admin.patch(ENVOY_PROXY, key, {"metadata": {"finalizers": None}})
    admin.wait_until(ENVOY_PROXY, key, lambda live: live["metadata"].get("finalizers") == [FINALIZER])
    assert admin.get(ENVOY_PROXY, key)["status"] == before["status"]
