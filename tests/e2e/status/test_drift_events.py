"""Every write logs its field changes; what other writers changed is also an Event and a count, and nothing else is."""

import json
import time
from typing import Final

import pytest

from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    EVENT,
    FIELD_MANAGER,
    SERVICE,
    Key,
    Object,
)
from operator_app.desired import child_key
from operator_app.envoy.files import CLUSTERS_FILE
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import CONTAINER, a_proxy, drift_of, wait_reconciled

WAIT_S: Final = 1.0
TARGET_PORT: Final = '.spec.ports[port=80,protocol="TCP"].targetPort'


@pytest.fixture
def key(admin: Kube, namespace: str, running_operator: OperatorProcess) -> Key:  # noqa: ARG001  # it has to run
    """A proxy that is reconciled, with an operator that has nothing more to do."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    time.sleep(WAIT_S)
    return key


def events(admin: Kube, key: Key) -> list[Object]:
    """The operator's Events about repairs in the proxy's namespace."""
    return [
        each
        for each in admin.list(EVENT, key.namespace)
        if each["reportingController"] == FIELD_MANAGER and each["reason"] == "DriftRepaired"
    ]


def count(event: Object) -> int:
    """How many repairs an Event counts."""
    return int(event.get("series", {"count": 1})["count"])


def change_port(admin: Kube, key: Key, port: int = 9999) -> Object:
    """Change the Service's target port as another writer; returns what is stored then."""
    path = "/spec/ports/0/targetPort"
    patch = [{"op": "replace", "path": path, "value": port}]
    return admin.patch(SERVICE, child_key(key), patch, patch_type="json", field_manager="kubectl-edit")


def wait_repaired(admin: Kube, key: Key) -> None:
    """Wait until every child exists and is as declared."""
    wait_until(
        lambda: all(admin.find(kind, child_key(key)) for kind in CHILD_KINDS) and not drift_of(admin, key),
        what="the repair",
    )


def logged(operator: OperatorProcess, kind: str = "Service") -> list[Object]:
    """The log lines about one child that list field changes."""
    return [
        line for line in operator.log() if line.get("event") == "child" and line["kind"] == kind and line["changes"]
    ]


def test_a_repair_names_field_manager_time_and_values(admin: Kube, key: Key, running_operator: OperatorProcess) -> None:
    """The log line has what managedFields recorded of the drift, and the tenant's Event as well."""
    broken = change_port(admin, key)
    wait_repaired(admin, key)
    wait_until(lambda: events(admin, key), what="the Event")

    (entry,) = [each for each in broken["metadata"]["managedFields"] if each["manager"] == "kubectl-edit"]
    (line,) = logged(running_operator)
    assert (line["proxy"], line["generation"], line["outcome"]) == (str(key), 1, "configured")
    assert line["changes"] == [
        {
            "field": TARGET_PORT,
            "drift": "taken",
            "managers": ["kubectl-edit"],
            "taken_at": entry["time"],
            "was": 9999,
            "becomes": "http",
        }
    ]
    (event,) = events(admin, key)
    assert event["note"] == (
        f'Service {child_key(key)}: {TARGET_PORT} taken by kubectl-edit at {entry["time"]}: 9999 -> "http"'
    )
    assert event["regarding"]["name"] == key.name
    assert event["regarding"]["uid"] == admin.get(ENVOY_PROXY, key)["metadata"]["uid"]
    assert count(event) == 1
    assert running_operator.metric("operator_app_drift_repaired_total", kind="Service") == 1
    assert running_operator.metric("operator_app_drift_repaired_total") == 1


def test_repeats_are_one_event_that_counts_over_restarts(
    admin: Kube, key: Key, running_operator: OperatorProcess
) -> None:
    """The same drift again and again, before and after a restart and a kill, is one object whose count grows."""
    for repeat in range(1, 7):
        change_port(admin, key, 9000 + repeat)
        wait_repaired(admin, key)
        wait_until(lambda: [count(each) for each in events(admin, key)] == [repeat], what=f"a count of {repeat}")  # noqa: B023
        if repeat == 2:
            running_operator.stop()
            running_operator.start()
        if repeat == 4:
            running_operator.kill()
            running_operator.start()
    (event,) = events(admin, key)
    assert event["series"]["lastObservedTime"] > event["eventTime"]
    assert running_operator.metric("operator_app_drift_repaired_total") == 2, "since the last start"


def test_a_deletion_and_a_drift_while_no_operator_runs_are_repairs(
    admin: Kube, key: Key, running_operator: OperatorProcess
) -> None:
    """What happened while no operator ran is reported as what happens while one runs, child by child."""
    running_operator.stop()
    change_port(admin, key)
    admin.delete(CONFIG_MAP, child_key(key))
    running_operator.start()
    wait_until(lambda: len(events(admin, key)) == 2, what="two Events")
    notes = sorted(each["note"] for each in events(admin, key))
    assert notes[0] == f"ConfigMap {child_key(key)}: it was deleted"
    assert notes[1].startswith(f"Service {child_key(key)}: {TARGET_PORT} taken by kubectl-edit")
    assert running_operator.metric("operator_app_drift_repaired_total", kind="ConfigMap") == 1
    assert running_operator.metric("operator_app_drift_repaired_total", kind="Service") == 1


def test_what_is_no_drift_is_no_event(admin: Kube, key: Key, running_operator: OperatorProcess) -> None:
    """A first reconcile, edits of the spec, foreign fields, a restart and a new incarnation repair nothing."""
    listener = {"name": "http", "port": 81, "routes": [{"match": {"pathPrefix": "/x"}, "backend": "app"}]}
    edits: list[Object] = [
        {"replicas": 2, "listeners": [listener]},
        {"service": {"type": "NodePort", "annotations": {"example.com/a": "1"}}},
        {"service": {"type": "ClusterIP", "annotations": None}, "resources": {"limits": {"cpu": "1"}}},
        {"resources": None, "registration": {"hostname": "a.example.com"}},
    ]
    for edit in edits:
        admin.patch(ENVOY_PROXY, key, {"spec": edit})
        wait_reconciled(admin, key)
    for kind in CHILD_KINDS:
        admin.patch(kind, child_key(key), {"metadata": {"labels": {"noise": "1"}, "annotations": {"noise": "1"}}})
    admin.patch(ENVOY_PROXY, key, {"metadata": {"labels": {"noise": "1"}}})
    running_operator.stop()
    running_operator.start()
    admin.delete(ENVOY_PROXY, key, propagation="Foreground")
    admin.wait_gone(ENVOY_PROXY, key, timeout_s=30)
    admin.create(ENVOY_PROXY, a_proxy(key.namespace))
    wait_reconciled(admin, key)
    time.sleep(WAIT_S)

    assert events(admin, key) == []
    assert running_operator.metric("operator_app_drift_repaired_total") == 0


def test_an_edit_logs_its_field_changes_as_well(admin: Kube, key: Key, running_operator: OperatorProcess) -> None:
    """A write because of an edit of the spec lists the changed fields, and names no manager."""
    admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": 3, "resources": {"limits": {"cpu": "1"}}}})
    wait_reconciled(admin, key)
    (line,) = logged(running_operator, "Deployment")
    changes = {each["field"]: (each["drift"], each["was"], each["becomes"]) for each in line["changes"]}
    assert changes[".spec.replicas"] == ("outdated", 1, 3)
    assert all(each["managers"] == [] for each in line["changes"])
    assert logged(running_operator, "ConfigMap") == []


def test_neither_secrets_nor_configurations_reach_log_and_events(
    admin: Kube, key: Key, running_operator: OperatorProcess
) -> None:
    """Values that another writer puts into the environment are masked, and long texts are a length and a digest."""
    secret, marker = "hunter2-in-the-environment", "x-marker-of-a-long-text"
    variable = {"name": "POD_NAME", "value": secret}
    patch = [{"op": "replace", "path": f"{CONTAINER}/env", "value": [variable]}]
    admin.patch(DEPLOYMENT, child_key(key), patch, patch_type="json", field_manager="kubectl-edit")
    wait_until(lambda: logged(running_operator, "Deployment"), what="a line about the Deployment")
    admin.delete(DEPLOYMENT, child_key(key))
    wait_repaired(admin, key)
    wait_reconciled(admin, key)
    admin.patch(CONFIG_MAP, child_key(key), {"data": {CLUSTERS_FILE: json.dumps({marker: "y" * 500})}})
    wait_repaired(admin, key)
    wait_until(lambda: any("ConfigMap" in each["note"] for each in events(admin, key)), what="the Event")

    everything = running_operator.log_text() + json.dumps(events(admin, key))
    assert secret not in everything
    assert marker not in everything
    assert "POD_NAME" in json.dumps(logged(running_operator, "Deployment")[0]["changes"])
    (config_map,) = logged(running_operator, "ConfigMap")
    (change,) = config_map["changes"]
    assert change["field"] == f".data.{CLUSTERS_FILE}"
    assert "characters, sha256" in change["was"]
    assert "characters, sha256" in change["becomes"]


def test_a_repair_during_contention_of_another_child_is_reported(
    admin: Kube, key: Key, running_operator: OperatorProcess
) -> None:
    """While one field is contended, the repair of another child is still a repaired drift."""
    running_operator.stop()
    running_operator.start("--contention-threshold=1", "--contention-base-s=60", "--contention-cap-s=60")
    for _ in range(2):
        admin.patch(CONFIG_MAP, child_key(key), {"data": {CLUSTERS_FILE: "{}"}}, field_manager="rival")
        time.sleep(WAIT_S)
    admin.wait_until(
        ENVOY_PROXY, key, lambda live: any(each["type"] == "Contended" for each in live["status"]["conditions"])
    )
    assert running_operator.metric("operator_app_drift_repaired_total", kind="ConfigMap") == 1
    change_port(admin, key)
    wait_until(lambda: SERVICE not in drift_of(admin, key), what="the repair of the Service")
    wait_until(lambda: len(events(admin, key)) == 2, what="an Event for each")
