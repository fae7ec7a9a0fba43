"""The resync finds what a watch has missed, does not count what is only late, and costs one list of each kind."""

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Final

from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
)
from operator_app.controller.resync import GRACE_S
from operator_app.desired import child_key
from tests.e2e.controlplane import AuditEntry, AuditLog
from tests.e2e.controlplane.audit import Mark
from tests.e2e.faults.plan import EVENT_VERB, Fault, FaultKind, Plan, Point
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, a_proxy, drift_of, record_key, settled_objects_of, wait_reconciled

SWEPT: Final = (ENVOY_PROXY, *CHILD_KINDS, PROXY_REGISTRATION)
INTERVAL_S: Final = 3.0
SWEEPS: Final = 4


def start_blind(operator: OperatorProcess, folder: Path, namespace: str, *kinds: Kind) -> None:
    """Start an operator whose watches hide the first event of each of these kinds in a namespace."""
    hidden = [Fault(kind.kind, FaultKind.HIDE, Point(EVENT_VERB, kind.kind), namespace) for kind in kinds]
    plan = folder / "plan.json"
    Plan(tuple(hidden)).write(plan)
    module = ("tests.e2e.faults.operator", str(plan), str(folder / "told"), "run")
    operator.start(f"--sweep-interval-s={INTERVAL_S:g}", module=module)


def missed(operator: OperatorProcess) -> dict[str, float]:
    """The missed changes that the resyncs have counted, by kind; without the kinds that missed none."""
    counts = {kind.kind: operator.metric("operator_app_sweep_missed_total", kind=kind.kind) for kind in SWEPT}
    return {kind: count for kind, count in counts.items() if count}


def asked(audit: AuditLog, since: Mark) -> list[AuditEntry]:
    """The operator's requests."""
    return [each for each in audit.entries(since) if each.user == OPERATOR_USER]


def converged(admin: Kube, namespace: str, *names: str) -> list[Key]:
    """Proxies that are reconciled, with nothing left to do."""
    for name in names:
        admin.create(ENVOY_PROXY, a_proxy(namespace, name))
    keys = [Key(namespace, name) for name in names]
    for key in keys:
        wait_reconciled(admin, key)
    for key in keys:
        settled_objects_of(admin, key)
    return keys


def test_what_the_watch_missed_is_found_counted_and_repaired(
    admin: Kube, audit: AuditLog, namespace: str, operator: OperatorProcess, tmp_path: Path
) -> None:
    """An edit, a drift and a deletion that the watch hides each cost one read, are counted once and repaired."""
    operator.start()
    edited, drifted, bereft, healthy = converged(admin, namespace, "edited", "drifted", "bereft", "healthy")
    operator.stop()
    start_blind(operator, tmp_path, namespace, ENVOY_PROXY, SERVICE, CONFIG_MAP)
    mark = audit.mark()

    admin.patch(ENVOY_PROXY, edited, {"spec": {"replicas": 2}})
    admin.patch(SERVICE, child_key(drifted), {"spec": {"selector": {"app": "other"}}})
    admin.delete(CONFIG_MAP, child_key(bereft))
    wait_until(lambda: len((tmp_path / "told").read_text().splitlines()) == 3, what="three hidden events")
    assert drift_of(admin, drifted), "only the resync can find it"
    assert admin.find(CONFIG_MAP, child_key(bereft)) is None
    assert admin.get(DEPLOYMENT, child_key(edited))["spec"]["replicas"] == 1

    wait_until(lambda: sum(missed(operator).values()) >= 3, INTERVAL_S + 2 * GRACE_S * len(SWEPT), "the resyncs")
    wait_until(lambda: admin.find(CONFIG_MAP, child_key(bereft)) and not drift_of(admin, drifted), what="the repairs")
    admin.wait_until(DEPLOYMENT, child_key(edited), lambda live: live["spec"]["replicas"] == 2)
    wait_reconciled(admin, edited)
    time.sleep(INTERVAL_S + GRACE_S)

    assert missed(operator) == {"EnvoyProxy": 1, "Service": 1, "ConfigMap": 1}
    told = [line["key"] for line in operator.log() if line.get("event") == "watch_missed"]
    assert sorted(told) == sorted(map(str, (edited, child_key(drifted), child_key(bereft))))
    reads = Counter((each.resource, each.name) for each in asked(audit, mark) if each.verb == "get")
    ours = {key: count for key, count in reads.items() if key[1] in {str(each.name) for each in _names(admin, healthy)}}
    assert ours == {}, "no read of what is healthy"
    assert reads["envoyproxies", edited.name] == 1
    assert reads["services", child_key(drifted).name] == 1
    assert reads["configmaps", child_key(bereft).name] == 1, "one of the resync, and none before the create"


def _names(admin: Kube, key: Key) -> tuple[Key, ...]:
    return (key, child_key(key), record_key(admin.get(ENVOY_PROXY, key)))


def test_a_sweep_of_healthy_objects_is_one_list_of_each_kind(
    admin: Kube, audit: AuditLog, namespace: str, operator: OperatorProcess
) -> None:
    """Where nothing is wrong, resyncs list each kind once, read no object, write nothing and find nothing."""
    operator.start("--sweep-interval-s=1")
    converged(admin, namespace, *(f"web-{number}" for number in range(5)))
    rounds = operator.metric("operator_app_rounds_total")
    mark = audit.mark()

    def swept() -> list[int]:
        lists = Counter(each.resource for each in asked(audit, mark) if each.verb == "list")
        return [lists[kind.plural] for kind in SWEPT]

    wait_until(lambda: min(swept()) >= SWEEPS, what=f"{SWEEPS} resyncs")
    assert max(swept()) - min(swept()) <= 1
    assert [each for each in asked(audit, mark) if each.namespace == namespace] == []
    assert operator.metric("operator_app_rounds_total") >= rounds + 5 * (SWEEPS - 1), "every proxy gets its round"
    assert missed(operator) == {}


def test_a_busy_cluster_gives_no_false_alarm(admin: Kube, namespace: str, operator: OperatorProcess) -> None:
    """A change that is in delivery during a resync is not counted as missed, however many changes there are."""
    operator.start("--sweep-interval-s=0.5")
    over = threading.Event()

    def churn(name: str) -> None:
        key = Key(namespace, name)
        number = 0
        while not over.is_set():
            admin.create(ENVOY_PROXY, a_proxy(namespace, name))
            wait_reconciled(admin, key)
            for _ in range(5):
                number += 1
                admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": number % 100}})
                admin.patch(SERVICE, child_key(key), {"metadata": {"annotations": {"example.com/n": str(number)}}})
                admin.patch(CONFIG_MAP, child_key(key), {"data": {"cds.json": str(number)}})
            admin.delete(ENVOY_PROXY, key, propagation="Foreground")
            admin.wait_gone(ENVOY_PROXY, key, timeout_s=30)

    writers = [threading.Thread(target=churn, args=(f"busy-{number}",)) for number in range(3)]
    for writer in writers:
        writer.start()
    time.sleep(8)
    over.set()
    for writer in writers:
        writer.join(60)
        assert not writer.is_alive()
    time.sleep(GRACE_S + 1)

    assert missed(operator) == {}
