"""Repeated rounds, retries, crashes and restarts: the same objects, and no unnecessary write."""

import time
from collections import Counter
from collections.abc import Callable
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


TAMPERINGS: Final[dict[str, tuple[Point, Callable[[Kube, Key], object]]]] = {
    "a child was changed": (
        Point("apply", "ConfigMap"),
        lambda admin, key: admin.patch(CONFIG_MAP, child_key(key), {"data": {CLUSTERS_FILE: "{}"}}),
    ),
    "a child lost its ownership": (
        Point("apply", "Service"),
        lambda admin, key: admin.patch(SERVICE, child_key(key), {"metadata": {"managedFields": [{}]}}),
    ),
    "a child lost its label": (
        Point("apply", "Deployment"),
        lambda admin, key: admin.patch(DEPLOYMENT, child_key(key), {"metadata": {"labels": {LABEL_MANAGED_BY: None}}}),
    ),
    "a child was deleted": (
        Point("apply", "ConfigMap"),
        lambda admin, key: admin.delete(CONFIG_MAP, child_key(key)),
    ),
    "the record was deleted": (
        Point("apply", "ProxyRegistration"),
        lambda admin, key: admin.delete(PROXY_REGISTRATION, record_key(admin.get(ENVOY_PROXY, key))),
    ),
    "the record was changed": (
        Point("apply", "ProxyRegistration"),
        lambda admin, key: admin.patch(
            PROXY_REGISTRATION, record_key(admin.get(ENVOY_PROXY, key)), {"spec": {"address": "elsewhere.example.com"}}
        ),
    ),
    "the finalizer was removed": (
        Point("apply", "EnvoyProxy"),
        lambda admin, key: admin.patch(ENVOY_PROXY, key, {"metadata": {"finalizers": None}}),
    ),
    "the spec was changed": (
        Point("apply", "Deployment"),
        lambda admin, key: admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": 2}}),
    ),
    "the status was written by another": (
        Point("apply", "EnvoyProxy"),
        lambda admin, key: admin.patch(
            ENVOY_PROXY, key, {"status": {"replicas": 7, "address": "elsewhere"}}, subresource="status"
        ),
    ),
}
"""What others do between a crash behind a write of the first reconcile and the restart, by name."""


@pytest.mark.parametrize("what", TAMPERINGS)
def test_tampering_between_a_crash_and_the_restart_is_undone(
    admin: Kube, namespace: str, operator: OperatorProcess, tmp_path: Path, what: str
) -> None:
    """The first reconcile is cut short, what it has left is changed, and the next start brings everything about."""
    behind, tamper = TAMPERINGS[what]
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    crash_behind(operator, behind, namespace, tmp_path)
    tamper(admin, key)

    operator.start()
    wait_until(lambda: objects_of_if_whole(admin, key), 30, "everything to be there")
    wait_until(lambda: not drift_of(admin, key), 30, "everything to be as declared")
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


def spent_by(audit: AuditLog, key: Key, proxy: Object, since: Mark) -> dict[tuple[str, str, str], int]:
    """How many requests of each sort the operator has sent about a proxy, its children, its record and its claims."""
    spent = Counter((each.verb, each.resource, each.subresource) for each in requests_for(audit, key, proxy, since))
    claims = [each for each in audit.entries(since) if each.user == OPERATOR_USER and each.resource == "hostnameclaims"]
    return dict(spent + Counter((each.verb, each.resource, "") for each in claims if each.name))


STATUS: Final = ("patch", "envoyproxies", "status")
EDITS: Final[dict[str, Object]] = {
    "a route": {
        "listeners": [{"name": "http", "port": 80, "routes": [{"match": {"pathPrefix": "/x"}, "backend": "app"}]}]
    },
    "a port": {"listeners": [{"name": "http", "port": 81, "targetPort": 8081, "routes": [{"backend": "app"}]}]},
    "the number of replicas": {"replicas": 2},
    "the Service's annotations": {"service": {"annotations": {"example.com/a": "1"}}},
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_takes_no_read_and_one_write_for_each_object_that_it_changes(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess, what: str
) -> None:
    """The children that declare something else, the record of the new generation, and the status."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    before = settled_objects_of(admin, key)
    mark = audit.mark()
    edited = admin.patch(ENVOY_PROXY, key, {"spec": EDITS[what]})
    wait_reconciled(admin, key)
    declared = (declared_children(each, before.children) for each in (before.proxy, edited))
    changed = [kind.plural for kind, (one, other) in _paired(*declared).items() if one != other]
    assert changed
    settled_objects_of(admin, key)
    spent = spent_by(audit, key, before.proxy, mark)
    # The numbers of a rollout settle in one more status, or in the same one.
    assert spent.pop(STATUS, 0) in {1, 2}
    assert spent == {("patch", plural, ""): 1 for plural in (*changed, "proxyregistrations")}
    assert running_operator.metric("operator_app_writes_total", outcome="unchanged") == 0


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
@pytest.mark.parametrize("is_deleted", [False, True], ids=["changed", "deleted"])
def test_a_drift_takes_no_read_and_one_write(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess, kind: Kind, *, is_deleted: bool
) -> None:
    """The repair is an apply of the one child; a deleted Deployment's new numbers are a status or two."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    before = settled_objects_of(admin, key)
    mark = audit.mark()
    if is_deleted:
        admin.delete(kind, child_key(key))
        wait_until(lambda: uid_of(admin, kind, key) not in {None, before.uids[kind.kind]}, 30, "the new child")
    else:
        admin.patch(kind, child_key(key), {"metadata": {"labels": {LABEL_MANAGED_BY: "nobody"}}})
    wait_until(lambda: not drift_of(admin, key), 30, "the repair")
    settled_objects_of(admin, key)
    spent = spent_by(audit, key, before.proxy, mark)
    assert spent.pop(STATUS, 0) <= (2 if kind == DEPLOYMENT and is_deleted else 0)
    assert spent == {("patch", kind.plural, ""): 1}
    assert running_operator.metric("operator_app_writes_total", outcome="unchanged") == 0


def test_a_deletion_takes_no_read_and_three_writes(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess
) -> None:
    """The record, the claim, and the finalizer; the children are the garbage collector's."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, registration={"hostname": f"web.{namespace}.example.com"}))
    wait_reconciled(admin, key)
    proxy = settled_objects_of(admin, key).proxy
    mark = audit.mark()
    admin.delete(ENVOY_PROXY, key)
    wait_all_gone(admin, proxy)
    for kind in CHILD_KINDS:
        admin.wait_gone(kind, child_key(key), timeout_s=60)
    time.sleep(QUIET_S)
    assert spent_by(audit, key, proxy, mark) == {
        ("delete", "proxyregistrations", ""): 1,
        ("delete", "hostnameclaims", ""): 1,
        ("patch", "envoyproxies", ""): 1,
    }
    assert running_operator.metric("operator_app_writes_total", outcome="unchanged") == 0


def _paired(one: dict[Kind, Object], other: dict[Kind, Object]) -> dict[Kind, tuple[Object, Object]]:
    return {kind: (one[kind], other[kind]) for kind in CHILD_KINDS}


def uid_of(admin: Kube, kind: Kind, key: Key) -> str | None:
    """The UID of a child; ``None`` where there is none."""
    live = admin.find(kind, child_key(key))
    uid: str | None = None if live is None else live["metadata"]["uid"]
    return uid


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
