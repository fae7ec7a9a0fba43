"""Repeated rounds, retries, crashes and restarts: the same objects, and no unnecessary write."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    FINALIZER,
    LABEL_MANAGED_BY,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.desired import child_key
from operator_app.envoy.files import CLUSTERS_FILE
from tests.e2e.controlplane import AuditEntry, AuditLog
from tests.e2e.controlplane.audit import Mark
from tests.e2e.faults.plan import Fault, FaultKind, Plan, Point
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import (
    OPERATOR_USER,
    SETTLED_S,
    ProxyObjects,
    a_proxy,
    assert_one_of_everything,
    declared_children,
    drift_of,
    holds,
    is_refused,
    objects_of,
    record_key,
    settled_objects_of,
    wait_all_gone,
    wait_reconciled,
)

EVERYTHING = {*CHILD_KINDS, PROXY_REGISTRATION}
QUIET_S = 3.0
"""Long enough for watches to deliver, rounds to run and counters to settle (1 s in tests)."""


def requests_for(audit: AuditLog, key: Key, proxy: Object, since: Mark) -> list[AuditEntry]:
    """The operator's requests about one proxy, its children and its record."""
    ours = {(key.namespace, key.name), child_key(key), record_key(proxy)}
    return [each for each in audit.entries(since) if each.user == OPERATOR_USER and (each.namespace, each.name) in ours]


def test_a_first_reconcile_takes_no_read_and_seven_writes(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess
) -> None:
    """One proxy costs one write for each object and status; creates are atomic and need no read before them."""
    key = Key(namespace, "web")
    mark = audit.mark()
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    proxy = wait_reconciled(admin, key)
    time.sleep(QUIET_S)

    spent = Counter((each.verb, each.resource, each.subresource) for each in requests_for(audit, key, proxy, mark))

    # Without a node the Pods stay pending: one status for the children, one for the counters of the Deployment.
    assert spent == {
        ("patch", "envoyproxies", ""): 1,
        ("patch", "configmaps", ""): 1,
        ("patch", "deployments", ""): 1,
        ("patch", "services", ""): 1,
        ("patch", "proxyregistrations", ""): 1,
        ("patch", "envoyproxies", "status"): 2,
    }
    assert running_operator.metric("operator_app_writes_total", outcome="created") == 4


def test_nothing_is_written_when_nothing_is_wrong(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess
) -> None:
    """Rounds after label noise on the proxy, a restart and another round write no object."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    before = settled_objects_of(admin, key)
    mark = audit.mark()

    touched = admin.patch(ENVOY_PROXY, key, {"metadata": {"labels": {"noise": "one"}}})
    time.sleep(QUIET_S / 2)
    running_operator.stop()
    running_operator.start()
    rounds = running_operator.metric("operator_app_rounds_total")
    admin.patch(ENVOY_PROXY, key, {"metadata": {"annotations": {"noise": "two"}}})
    wait_until(lambda: running_operator.metric("operator_app_rounds_total") > rounds, what="another round")
    time.sleep(QUIET_S)

    after = objects_of(admin, key)
    assert after.uids == before.uids
    assert {kind: child["metadata"]["resourceVersion"] for kind, child in after.children.items()} == {
        kind: child["metadata"]["resourceVersion"] for kind, child in before.children.items()
    }
    assert after.children[DEPLOYMENT]["metadata"]["generation"] == before.children[DEPLOYMENT]["metadata"]["generation"]
    assert after.proxy["status"] == before.proxy["status"] == touched["status"]
    assert requests_for(audit, key, after.proxy, mark) == [], "the operator sends no request at all"
    assert [each for each in audit.writes(OPERATOR_USER, mark) if each.namespace == namespace] == []


@pytest.mark.parametrize(
    ("behind", "must_be_there", "may_be_there"),
    [
        # Finalizer, ConfigMap and Service are written at the same time; the record follows finalizer and Service.
        (Point("apply", "EnvoyProxy"), set(), {CONFIG_MAP, SERVICE, DEPLOYMENT}),
        (Point("apply", "ConfigMap"), {CONFIG_MAP}, {SERVICE, PROXY_REGISTRATION}),
        (Point("apply", "Deployment"), {CONFIG_MAP, DEPLOYMENT}, {SERVICE, PROXY_REGISTRATION}),
        (Point("apply", "Service"), {SERVICE}, {CONFIG_MAP, DEPLOYMENT}),
        (Point("apply", "ProxyRegistration"), {SERVICE, PROXY_REGISTRATION}, {CONFIG_MAP, DEPLOYMENT}),
        (Point("apply", "EnvoyProxy", "status", n=1), EVERYTHING, set()),
        (Point("apply", "EnvoyProxy", "status", n=2), EVERYTHING, set()),
    ],
    ids=lambda value: str(value) if isinstance(value, Point) else "",
)
def test_a_crash_behind_any_write_leaves_what_the_next_reconcile_completes(
    admin: Kube,
    namespace: str,
    operator: OperatorProcess,
    tmp_path: Path,
    *,
    behind: Point,
    must_be_there: set[Kind],
    may_be_there: set[Kind],
) -> None:
    """``kill -9`` after each write of a first reconcile: after a restart one of everything, with the same UIDs."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    crash_behind(operator, behind, namespace, tmp_path)
    places = dict.fromkeys(CHILD_KINDS, child_key(key)) | {PROXY_REGISTRATION: record_key(admin.get(ENVOY_PROXY, key))}
    created = {
        kind: live["metadata"]["uid"] for kind, place in places.items() if (live := admin.find(kind, place)) is not None
    }
    assert must_be_there <= created.keys() <= must_be_there | may_be_there, "the crash came at the intended write"

    operator.start()
    wait_reconciled(admin, key)

    found = assert_one_of_everything(admin, key)
    assert {kind: found.uids[kind.kind] for kind in created} == created


def change_everything(admin: Kube, key: Key) -> None:
    """Change something in every object of a proxy, the proxy's spec, status and finalizers included."""
    record = record_key(admin.get(ENVOY_PROXY, key))
    admin.patch(CONFIG_MAP, child_key(key), {"data": {CLUSTERS_FILE: "{}"}})
    admin.patch(SERVICE, child_key(key), {"metadata": {"managedFields": [{}]}})
    admin.patch(DEPLOYMENT, child_key(key), {"metadata": {"labels": {LABEL_MANAGED_BY: None}}})
    admin.patch(PROXY_REGISTRATION, record, {"spec": {"address": "elsewhere.example.com"}})
    admin.patch(ENVOY_PROXY, key, {"status": {"replicas": 7, "address": "elsewhere"}}, subresource="status")
    edit = {"service": {"annotations": {"example.com/a": "1"}}}
    admin.patch(ENVOY_PROXY, key, {"metadata": {"finalizers": None}, "spec": edit})


def delete_everything(admin: Kube, key: Key) -> None:
    """Delete the record and the children that are there."""
    admin.delete(PROXY_REGISTRATION, record_key(admin.get(ENVOY_PROXY, key)))
    for kind in CHILD_KINDS:
        if admin.find(kind, child_key(key)) is not None:
            admin.delete(kind, child_key(key))


def disown_everything(admin: Kube, key: Key) -> None:
    """Remove all field owners and the operator's label from the children that are there."""
    for kind in CHILD_KINDS:
        if admin.find(kind, child_key(key)) is not None:
            metadata = {"managedFields": [{}], "labels": {LABEL_MANAGED_BY: None}}
            admin.patch(kind, child_key(key), {"metadata": metadata})


@pytest.mark.parametrize(
    ("behind", "tamper"),
    [
        (Point("apply", "EnvoyProxy", "status"), change_everything),
        (Point("apply", "ProxyRegistration"), delete_everything),
        (Point("apply", "Deployment"), disown_everything),
    ],
    ids=["changed", "deleted", "disowned"],
)
def test_tampering_between_a_crash_and_the_restart_is_undone(
    admin: Kube,
    namespace: str,
    operator: OperatorProcess,
    tmp_path: Path,
    behind: Point,
    tamper: Callable[[Kube, Key], None],
) -> None:
    """The first reconcile is cut short, what it has left is tampered with, and the next start completes everything."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    crash_behind(operator, behind, namespace, tmp_path)
    tamper(admin, key)

    operator.start()
    wait_until(lambda: objects_of_if_whole(admin, key), 30, "everything to be there")
    wait_until(partial(is_as_declared, admin, key), 30, "everything to be as declared")
    admin.wait_until(ENVOY_PROXY, key, holds("Registered"), 30)
    found = assert_one_of_everything(admin, key)
    assert found.record["spec"]["address"] == f"web-envoy.{namespace}.svc"
    assert found.record["spec"]["generation"] == found.proxy["metadata"]["generation"]
    assert found.proxy["status"]["address"] == f"web-envoy.{namespace}.svc"
    assert found.proxy["metadata"]["finalizers"] == [FINALIZER]


def test_a_stranger_that_takes_a_childs_name_after_a_crash_is_left_alone(
    admin: Kube, namespace: str, operator: OperatorProcess, tmp_path: Path
) -> None:
    """The crashed reconcile has not made the Service yet, and somebody else does: it stays, until they remove it."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    crash_behind(operator, Point("apply", "EnvoyProxy"), namespace, tmp_path)
    stranger = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": namespace, "name": child_key(key).name},
        "spec": {"ports": [{"port": 1}]},
    }
    if admin.find(SERVICE, child_key(key)) is not None:
        admin.delete(SERVICE, child_key(key))
        admin.wait_gone(SERVICE, child_key(key))
    before = admin.create(SERVICE, stranger)

    operator.start()
    admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "NameConflict"), 30)
    assert admin.get(SERVICE, child_key(key)) == before
    admin.delete(SERVICE, child_key(key))
    wait_reconciled(admin, key)
    assert_one_of_everything(admin, key)


def spent_by(audit: AuditLog, key: Key, proxy: Object, since: Mark) -> Counter[tuple[str, str, str]]:
    """How many requests of each sort the operator has sent about a proxy, its children, its record and its claims."""
    spent = Counter((each.verb, each.resource, each.subresource) for each in requests_for(audit, key, proxy, since))
    claims = [each for each in audit.entries(since) if each.user == OPERATOR_USER and each.resource == "hostnameclaims"]
    return spent + Counter((each.verb, each.resource, "") for each in claims if each.name.startswith(f"{key.name}."))


def settled(admin: Kube, keys: Collection[Key]) -> dict[Key, ProxyObjects]:
    """All of several proxies, once nothing of any has changed for ``SETTLED_S``."""
    found: dict[Key, ProxyObjects] = {}

    def has_settled() -> bool:
        before = {key: each.versions for key, each in found.items()}
        found.update({key: objects_of(admin, key) for key in keys})
        if before == {key: each.versions for key, each in found.items()}:
            return True
        time.sleep(SETTLED_S)
        return False

    wait_until(has_settled, 60, "everything to settle")
    return found


def new_proxies(admin: Kube, namespace: str, names: Iterable[str]) -> dict[str, Key]:
    """Proxies that have converged, by what they are for."""
    keys = {name: Key(namespace, name) for name in names}
    for key in keys.values():
        registration = {"hostname": f"{key.name}.{namespace}.example.com"}
        admin.create(ENVOY_PROXY, a_proxy(*key, registration=registration))
    for key in keys.values():
        wait_reconciled(admin, key)
    return keys


STATUS: Final = ("patch", "envoyproxies", "status")
EDITS: Final[dict[str, Object]] = {
    "route": {
        "listeners": [{"name": "http", "port": 80, "routes": [{"match": {"pathPrefix": "/x"}, "backend": "app"}]}]
    },
    "port": {"listeners": [{"name": "http", "port": 81, "targetPort": 8081, "routes": [{"backend": "app"}]}]},
    "replicas": {"replicas": 2},
    "annotations": {"service": {"annotations": {"example.com/a": "1"}}},
}


def test_edits_and_a_deletion_take_no_read_and_one_write_for_each_object_that_they_change(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess
) -> None:
    """An edit: the children that declare something else, the record of the new generation, and the status.

    A deletion: the record, the claim, and the finalizer; the children are the garbage collector's.
    """
    keys = new_proxies(admin, namespace, (*EDITS, "deleted"))
    deleted = keys.pop("deleted")
    before = settled(admin, [*keys.values(), deleted])
    mark = audit.mark()
    admin.delete(ENVOY_PROXY, deleted)
    edited = {what: admin.patch(ENVOY_PROXY, key, {"spec": EDITS[what]}) for what, key in keys.items()}
    for key in keys.values():
        wait_reconciled(admin, key)
    wait_all_gone(admin, before[deleted].proxy)
    settled(admin, keys.values())
    for what, key in keys.items():
        known = before[key]
        one, other = (declared_children(each, known.children) for each in (known.proxy, edited[what]))
        changed = [kind.plural for kind, child in other.items() if child != one.get(kind)]
        assert changed
        spent = spent_by(audit, key, known.proxy, mark)
        # The numbers of a rollout settle in one more status, or in the same one.
        assert spent.pop(STATUS, 0) in {1, 2}, what
        assert spent == {("patch", plural, ""): 1 for plural in (*changed, "proxyregistrations")}, what
    assert spent_by(audit, deleted, before[deleted].proxy, mark) == {
        ("delete", "proxyregistrations", ""): 1,
        ("delete", "hostnameclaims", ""): 1,
        ("patch", "envoyproxies", ""): 1,
    }
    assert running_operator.metric("operator_app_writes_total", outcome="unchanged") == 0


DRIFTS: Final[dict[str, tuple[Object | None, int, int]]] = {
    "changed": ({"metadata": {"labels": {"app.kubernetes.io/component": "nobody"}}}, 0, 1),
    "deleted": (None, 0, 1),
    # An object without this label is in no watch of the operator: it is created, refused, read, and repaired.
    "hidden": ({"metadata": {"labels": {LABEL_MANAGED_BY: "nobody"}}}, 1, 2),
}
"""Edits of a child (``None``: its deletion), with the reads and the writes that its repair takes."""


def test_a_drift_that_is_seen_takes_no_read_and_one_write(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess
) -> None:
    """The repair is an apply of the one child; a deleted Deployment's new numbers are a status or two."""
    cases = {f"{drift}-{kind.kind.lower()}": (drift, kind) for drift in DRIFTS for kind in CHILD_KINDS}
    keys = new_proxies(admin, namespace, cases)
    before = settled(admin, keys.values())
    mark = audit.mark()
    for name, (drift, kind) in cases.items():
        edit = DRIFTS[drift][0]
        if edit is None:
            admin.delete(kind, child_key(keys[name]))
        else:
            admin.patch(kind, child_key(keys[name]), edit)
    for name, (drift, kind) in cases.items():
        key, uid = keys[name], before[keys[name]].uids[kind.kind]
        if DRIFTS[drift][0] is None:
            wait_until(partial(is_anew, admin, kind, key, uid), 30, name)
        wait_until(partial(is_as_declared, admin, key), 30, f"the repair of {name}")
    settled(admin, keys.values())
    for name, (drift, kind) in cases.items():
        edit, reads, writes = DRIFTS[drift]
        spent = spent_by(audit, keys[name], before[keys[name]].proxy, mark)
        assert spent.pop(STATUS, 0) <= (2 if kind == DEPLOYMENT and edit is None else 0), name
        assert spent == Counter({("patch", kind.plural, ""): writes, ("get", kind.plural, ""): reads}), name
    assert running_operator.metric("operator_app_writes_total", outcome="unchanged") == 0


def is_anew(admin: Kube, kind: Kind, key: Key, uid: str) -> bool:
    """Whether there is a child other than the one with this UID."""
    live = admin.find(kind, child_key(key))
    return live is not None and live["metadata"]["uid"] != uid


def is_as_declared(admin: Kube, key: Key) -> bool:
    """Whether every child of a proxy is exactly as declared."""
    return not drift_of(admin, key)


def objects_of_if_whole(admin: Kube, key: Key) -> bool:
    """Whether no child is missing."""
    return all(admin.find(kind, child_key(key)) is not None for kind in CHILD_KINDS)


def crash_behind(operator: OperatorProcess, point: Point, namespace: str, directory: Path) -> None:
    """Start an operator that is killed right behind one write."""
    plan = directory / "plan.json"
    Plan((Fault("kill", FaultKind.KILL_BEHIND, point, namespace),)).write(plan)
    module = ("tests.e2e.faults.operator", str(plan), str(directory / "notices.jsonl"), "run")
    operator.start(module=module, wait=False)
    assert operator.wait_dead() == -9, operator.log_text()
