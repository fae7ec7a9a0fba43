"""``python -m operator_app audit`` on a real API server: what it finds, what it removes, and what it never removes."""

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from operator_app.api.kinds import (
    ENVOY_PROXY,
    FIELD_MANAGER,
    HOSTNAME_CLAIM,
    LABEL_MANAGED_BY,
    NAMESPACE,
    PROXY_REGISTRATION,
    Key,
    Kind,
    Object,
)
from operator_app.registration.identity import Installation
from tests.e2e.controlplane import Cluster
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.outside import CHOSEN, FLAGS, NAME, OPERATOR_ID, Outside
from tests.e2e.proxies import a_proxy, holds, record_key

OURS = {"installation": OPERATOR_NAMESPACE}
"""What a claim says of the operator that took it."""


def audited(kubeconfig: Path, namespace: str, *flags: str) -> tuple[int, list[str], str]:
    """Exit code, lines of standard output and standard error of an audit of one namespace."""
    command = (sys.executable, "-m", "operator_app", "audit", f"--kubeconfig={kubeconfig}", *CHOSEN)
    run = subprocess.run(
        (*command, f"--namespaces={namespace}", *flags), capture_output=True, text=True, check=False, timeout=60
    )
    assert "Traceback" not in run.stderr
    return run.returncode, run.stdout.splitlines(), run.stderr


def finding(line: str) -> tuple[str, ...]:
    """The first columns of a line: finding, registry, name."""
    return tuple(line.split()[:3])


def registered(admin: Kube, key: Key, hostname: str) -> Object:
    """Create a proxy and wait until its record is confirmed; the object."""
    admin.create(ENVOY_PROXY, a_proxy(*key, registration={"hostname": hostname}))
    return admin.wait_until(ENVOY_PROXY, key, holds("Registered"))


def left_behind(kind: Kind, name: str, namespace: str, uid: str, **spec: Any) -> Object:
    """An object of the operator for a proxy that does not exist."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"name": name, "labels": {LABEL_MANAGED_BY: FIELD_MANAGER}}
        | ({"namespace": OPERATOR_NAMESPACE} if kind.namespaced else {}),
        "spec": {"proxy": {"namespace": namespace, "name": "gone", "uid": uid}} | spec,
    }


def outside_record(admin: Kube, uid: str, namespace: str, operator_id: str = OPERATOR_ID) -> dict[str, Any]:
    """A record in the format of the registry of files."""
    cluster_uid = admin.get(NAMESPACE, Key("", "kube-system"))["metadata"]["uid"]
    return {
        "operator": str(Installation.of(cluster_uid, operator_id)),
        "uid": uid,
        "proxy": [namespace, "gone"],
        "generation": 1,
        "address": "x",
        "ttl": None,
    }


def test_consistent_objects_give_no_findings(
    admin: Kube, namespace: str, operator: OperatorProcess, operator_kubeconfig: Path, outside: Outside
) -> None:
    """With one registered proxy the exit code is 0 and the output one line."""
    operator.start(*FLAGS)
    registered(admin, Key(namespace, "web"), f"{namespace}.example.com")
    code, lines, errors = audited(operator_kubeconfig, namespace)
    assert (code, errors) == (0, "")
    assert len(lines) == 1
    assert lines[0].startswith("1 proxies, ")
    assert lines[0].endswith(" 0 findings, 0 left")
    assert outside.calls("register") == [f"register {namespace}.example.com"]


def test_fix_removes_only_what_deleted_proxies_have_left(
    admin: Kube, namespace: str, operator: OperatorProcess, operator_kubeconfig: Path, outside: Outside
) -> None:
    """Their entries, claims and records go; those of live proxies, other operators and foreign owners stay."""
    deleted_uid, live = str(uuid.uuid4()), Key(namespace, "web")
    mine, lost, stray, claimed = (f"{each}.{namespace}.example.com" for each in ("mine", "lost", "stray", "claimed"))
    foreign, other = f"foreign.{namespace}.example.com", f"other.{namespace}.example.com"
    operator.start(*FLAGS)
    proxy = registered(admin, live, mine)
    operator.stop()
    ports = {"generation": 1, "address": "x", "ports": [], "registry": NAME, "hostname": lost}
    admin.create(
        PROXY_REGISTRATION, left_behind(PROXY_REGISTRATION, f"proxy-{deleted_uid}", namespace, deleted_uid, **ports)
    )
    admin.create(HOSTNAME_CLAIM, left_behind(HOSTNAME_CLAIM, lost, namespace, deleted_uid, hostname=lost, **OURS))
    admin.create(
        HOSTNAME_CLAIM, left_behind(HOSTNAME_CLAIM, claimed, namespace, str(uuid.uuid4()), hostname=claimed, **OURS)
    )
    outside.put(lost, outside_record(admin, deleted_uid, namespace))
    outside.put(stray, outside_record(admin, str(uuid.uuid4()), namespace))
    outside.put(foreign, {"address": "192.0.2.1"})
    outside.put(other, outside_record(admin, deleted_uid, namespace, operator_id="another"))
    before = outside.records()

    code, lines, _ = audited(operator_kubeconfig, namespace)
    assert code == 1
    assert {finding(each) for each in lines[1:-1]} == {
        ("record-without-proxy", "in-cluster", f"proxy-{deleted_uid}"),
        ("record-without-proxy", NAME, stray),
        ("claim-without-proxy", "in-cluster", claimed),
    }
    assert outside.records() == before, "without --fix nothing is written"

    code, lines, _ = audited(operator_kubeconfig, namespace, "--fix")
    assert code == 0
    assert sum(each.startswith("removed: ") for each in lines) == 3
    assert set(outside.records()) == {mine, foreign, other}
    assert admin.find(PROXY_REGISTRATION, Key(OPERATOR_NAMESPACE, f"proxy-{deleted_uid}")) is None
    assert [admin.find(HOSTNAME_CLAIM, Key("", each)) for each in (lost, claimed)] == [None, None]
    assert admin.find(PROXY_REGISTRATION, record_key(proxy)) is not None
    assert admin.find(HOSTNAME_CLAIM, Key("", mine)) is not None
    assert audited(operator_kubeconfig, namespace)[0] == 0


def test_fix_refuses_a_ledger_that_is_not_its_own(
    admin: Kube, namespace: str, operator: OperatorProcess, control_plane: Cluster, outside: Outside
) -> None:
    """With another namespace as the operator's own, nothing is removed, and the JSON says what was found."""
    hostname = f"{namespace}.example.com"
    operator.start(*FLAGS)
    proxy = registered(admin, Key(namespace, "web"), hostname)
    operator.stop()
    outside.put(f"stray.{hostname}", outside_record(admin, str(uuid.uuid4()), namespace))
    before = outside.records()
    command = (sys.executable, "-m", "operator_app", "audit", f"--kubeconfig={control_plane.kubeconfig}", *CHOSEN)
    flags = (f"--namespace={namespace}", f"--namespaces={namespace}", "--fix", "--output=json")
    run = subprocess.run((*command, *flags), capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 1
    assert "nothing is removed: the ledger names none of the 2 records" in run.stderr
    found = {each["name"]: each for each in json.loads(run.stdout)["findings"]}
    assert found[f"stray.{hostname}"]["removed"] is False
    assert outside.records() == before
    assert admin.find(PROXY_REGISTRATION, record_key(proxy)) is not None


def test_findings_about_a_live_proxy_are_reported_and_not_fixed(
    admin: Kube, namespace: str, operator: OperatorProcess, operator_kubeconfig: Path, outside: Outside
) -> None:
    """A missing record, and one under a hostname that is not declared: ``--fix`` changes neither."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS)
    proxy = registered(admin, key, hostname)
    operator.stop()
    record = outside.records()[hostname]
    outside.put(hostname, None)
    outside.put(f"more.{hostname}", record)

    code, lines, _ = audited(operator_kubeconfig, namespace, "--fix")

    assert code == 1
    assert {finding(each) for each in lines[1:-1]} == {
        ("proxy-without-record", NAME, hostname),
        ("wrong-owner", NAME, f"more.{hostname}"),
    }
    assert list(outside.records()) == [f"more.{hostname}"]
    assert admin.find(PROXY_REGISTRATION, record_key(proxy)) is not None


def test_a_registry_that_cannot_be_read_is_reported_and_not_taken_for_empty(
    admin: Kube, namespace: str, operator: OperatorProcess, operator_kubeconfig: Path, outside: Outside
) -> None:
    """Exit code 1, one line on standard error, no findings about that registry, nothing removed."""
    operator.start(*FLAGS)
    registered(admin, Key(namespace, "web"), f"{namespace}.example.com")
    outside.fail("down")
    code, lines, errors = audited(operator_kubeconfig, namespace, "--fix")
    assert code == 1
    assert errors.splitlines() == [
        f"operator_app: the registry {NAME} can't be read, so nothing is said about it: the registry does not answer"
    ]
    assert lines[-1].endswith(" 0 findings, 0 left")
    outside.fail(None)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--kubeconfig=/nowhere",), "/nowhere"),
        (("--registries=elsewhere",), "no registry elsewhere is installed"),
    ],
    ids=["no cluster", "no such registry"],
)
def test_bad_input_is_reported_in_one_sentence(
    flags: tuple[str, ...], sentence: str, namespace: str, operator_kubeconfig: Path, outside: Outside
) -> None:
    """Exit code 2, one line on standard error, nothing on standard output."""
    code, lines, errors = audited(operator_kubeconfig, namespace, *flags)
    assert (code, lines) == (2, [])
    assert len(errors.splitlines()) == 1
    assert sentence in errors
    assert outside.calls("") == []


def test_the_resync_counts_findings(admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside) -> None:
    """The operator's metrics show a finding, and no longer show it once it is gone."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*CHOSEN, "--sweep-interval-s=1", f"--namespaces={namespace}")
    registered(admin, key, hostname)
    outside.put(stray := f"stray.{hostname}", outside_record(admin, str(uuid.uuid4()), namespace))

    def counted() -> float:
        return operator.metric("operator_app_audit_findings", kind="record-without-proxy")

    wait_until(lambda: counted() == 1, what="the finding in the metrics")
    outside.put(stray, None)
    wait_until(lambda: counted() == 0, what="no finding")
