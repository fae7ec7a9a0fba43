"""Repeated rounds, retries, crashes and restarts: the same objects, and no unnecessary write."""

import time
from collections import Counter
from pathlib import Path

import pytest

from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.desired import child_key
from tests.e2e.controlplane import AuditEntry, AuditLog
from tests.e2e.controlplane.audit import Mark
from tests.e2e.faults.plan import Fault, FaultKind, Plan, Point
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import (
    OPERATOR_USER,
    a_proxy,
    assert_one_of_everything,
    objects_of,
    record_key,
    settled_objects_of,
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
    plan = tmp_path / "plan.json"
    Plan((Fault("kill", FaultKind.KILL_BEHIND, behind, namespace),)).write(plan)
    module = ("tests.e2e.faults.operator", str(plan), str(tmp_path / "notices.jsonl"), "run")
    operator.start(module=module, wait=False)
    assert operator.wait_dead() == -9, operator.log_text()
    places = dict.fromkeys(CHILD_KINDS, child_key(key)) | {PROXY_REGISTRATION: record_key(admin.get(ENVOY_PROXY, key))}
    created = {
        kind: live["metadata"]["uid"] for kind, place in places.items() if (live := admin.find(kind, place)) is not None
    }
    assert must_be_there <= created.keys() <= must_be_there | may_be_there, "the crash came at the intended write"

    operator.start()
    wait_reconciled(admin, key)

    found = assert_one_of_everything(admin, key)
    assert {kind: found.uids[kind.kind] for kind in created} == created
