"""The local control plane is what other tests take it for: a real, private, observed API server and its controllers."""

import os
import signal
import socket
import ssl
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from operator_app.api.kinds import CONFIG_MAP, DEPLOYMENT, ENVOY_PROXY, NAMESPACE, Key, Kind, Object
from tests.e2e.controlplane import OPERATOR_NAMESPACE, AuditLog, Cluster, ControlPlane, cluster, service_account_user
from tests.e2e.kube import POD, REPLICA_SET, SERVICE_ACCOUNT, Kube, KubeError, kubeconfig_context, wait_until
from tests.paths import ROOT

ROLE_BINDING = Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")


def config_map(namespace: str, name: str, **data: str) -> Object:
    """A ConfigMap."""
    metadata = {"namespace": namespace, "name": name}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


@pytest.fixture
def local(control_plane: Cluster) -> ControlPlane:
    """The session's control plane, where it is one that runs here."""
    if not isinstance(control_plane, ControlPlane):
        pytest.skip("is about the local control plane, and E2E_KUBECONFIG names another cluster")
    return control_plane


@pytest.fixture
def operator_account(control_plane: Cluster, admin: Kube, namespace: str) -> Iterator[Kube]:
    """A ServiceAccount of the operator's namespace, named after the test's own, where it may edit."""
    admin.apply(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPERATOR_NAMESPACE}})
    account = {"namespace": OPERATOR_NAMESPACE, "name": namespace}
    admin.create(SERVICE_ACCOUNT, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    binding = {
        "apiVersion": ROLE_BINDING.api_version,
        "kind": ROLE_BINDING.kind,
        "metadata": {"namespace": namespace, "name": "edit"},
        "roleRef": {"apiGroup": ROLE_BINDING.group, "kind": "ClusterRole", "name": "edit"},
        "subjects": [{"kind": "ServiceAccount", **account}],
    }
    admin.create(ROLE_BINDING, binding)
    with Kube(control_plane.kubeconfig_for(OPERATOR_NAMESPACE, namespace)) as kube:
        # Authorization follows the binding by a watch, not at once.
        wait_until(lambda: _may_list_config_maps(kube, namespace))
        yield kube
    admin.delete(SERVICE_ACCOUNT, Key(OPERATOR_NAMESPACE, namespace))


def _may_list_config_maps(kube: Kube, namespace: str) -> bool:
    try:
        kube.list(CONFIG_MAP, namespace)
    except KubeError:
        return False
    return True


def _answers(server: str) -> bool:
    address, port = server.removeprefix("https://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((address, int(port))) == 0


@contextmanager
def _up() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """``python -m tests.e2e.controlplane up`` once it is up, and its kubeconfig."""
    command = [sys.executable, "-m", "tests.e2e.controlplane", "up"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip().removeprefix("KUBECONFIG="))
        finally:
            process.kill()


def test_certificate_is_from_its_own_authority(local: ControlPlane) -> None:
    """A client that trusts the usual authorities, and not this cluster's, refuses to talk to the API server."""
    server = kubeconfig_context(local.kubeconfig).cluster.server
    with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx2.get(f"{server}/readyz", trust_env=False, verify=ssl.create_default_context())


@pytest.mark.parametrize(("token", "code"), [("", 403), ("not-a-token", 401)])
def test_foreign_objects_are_refused(local: ControlPlane, token: str, code: int) -> None:
    """Nobody reads objects without credentials, or with made-up ones."""
    context = kubeconfig_context(local.kubeconfig)
    trusted = ssl.create_default_context(cadata=b64decode(context.cluster.certificate_auth_data or "").decode())
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{context.cluster.server}/api/v1/namespaces"
    assert httpx2.get(url, trust_env=False, verify=trusted, headers=headers).status_code == code


def test_service_account_may_do_what_its_role_says_and_nothing_else(operator_account: Kube, namespace: str) -> None:
    """RBAC decides: a ServiceAccount edits where it is bound to do so and is refused elsewhere."""
    assert operator_account.create(CONFIG_MAP, config_map(namespace, "allowed"))["metadata"]["uid"]
    with pytest.raises(KubeError) as refused:
        operator_account.create(CONFIG_MAP, config_map("default", "not-allowed"))
    assert (refused.value.code, refused.value.reason) == (403, "Forbidden")


def test_apply_conflicts_name_field_and_manager(admin: Kube, namespace: str) -> None:
    """Server-side apply is the server's own: another manager's field is a conflict that names both."""
    admin.apply(CONFIG_MAP, config_map(namespace, "contended", key="one"), field_manager="first")
    with pytest.raises(KubeError) as conflict:
        admin.apply(CONFIG_MAP, config_map(namespace, "contended", key="two"), field_manager="second")
    [cause] = conflict.value.status["details"]["causes"]
    assert conflict.value.code == 409
    assert cause["field"] == ".data.key"
    assert '"first"' in cause["message"]


def test_audit_tells_who_wrote_what_and_what_came_of_it(
    operator_account: Kube, admin: Kube, audit: AuditLog, namespace: str
) -> None:
    """Each request is in the log once it is answered; for the operator's writes with contents and new version."""
    mark = audit.mark()
    desired = config_map(namespace, "seen", key="value")
    versions = [operator_account.apply(CONFIG_MAP, desired)["metadata"]["resourceVersion"] for _ in range(2)]
    admin.get(CONFIG_MAP, Key(namespace, "seen"))
    by_admin = [entry for entry in audit.entries(mark) if entry.user == "admin"]
    writes = audit.writes(service_account_user(OPERATOR_NAMESPACE, namespace), mark)
    assert [(entry.verb, entry.resource, entry.name, entry.code) for entry in writes] == [
        ("patch", "configmaps", "seen", 201),
        ("patch", "configmaps", "seen", 200),
    ]
    assert [entry.resource_version for entry in writes] == versions
    assert writes[0].request == desired
    assert [(entry.verb, entry.name, entry.request) for entry in by_admin] == [("get", "seen", None)]
    assert audit.entries(audit.mark()) == []


def test_audit_leaves_the_control_plane_itself_out(admin: Kube, audit: AuditLog, namespace: str) -> None:
    """What controllers do is not recorded, so a quiet operator leaves a quiet log."""
    mark = audit.mark()
    config = Key(namespace, "kube-root-ca.crt")
    admin.delete(CONFIG_MAP, config, uid=admin.wait_until(CONFIG_MAP, config, bool)["metadata"]["uid"])
    admin.wait_until(CONFIG_MAP, config, bool)
    assert {entry.user for entry in audit.entries(mark)} == {"admin"}


def test_collector_deletes_children_of_the_custom_kind(admin: Kube, namespace: str) -> None:
    """The garbage collector knows the operator's kinds from the start: a child goes as soon as its owner does."""
    proxy = {
        "apiVersion": ENVOY_PROXY.api_version,
        "kind": ENVOY_PROXY.kind,
        "metadata": {"namespace": namespace, "name": "owner"},
        "spec": {
            "listeners": [{"name": "http", "port": 80, "routes": [{"backend": "app"}]}],
            "backends": [{"name": "app", "endpoints": [{"host": "app.example", "port": 8080}]}],
        },
    }
    owner = admin.create(ENVOY_PROXY, proxy)
    child = config_map(namespace, "child")
    child["metadata"]["ownerReferences"] = [
        {
            "apiVersion": ENVOY_PROXY.api_version,
            "kind": ENVOY_PROXY.kind,
            "name": "owner",
            "uid": owner["metadata"]["uid"],
            "controller": True,
        }
    ]
    admin.create(CONFIG_MAP, child)
    admin.delete(ENVOY_PROXY, Key(namespace, "owner"))
    admin.wait_gone(CONFIG_MAP, Key(namespace, "child"), timeout_s=10)


def test_deployment_becomes_pods_that_wait_for_a_node(admin: Kube, namespace: str) -> None:
    """The Deployment's ReplicaSet and Pod appear, and the scheduler says that no node fits."""
    labels = {"app": "waiting"}
    pod_spec = {
        "containers": [{"name": "main", "image": "example.invalid/none"}],
        "nodeSelector": {"example.invalid/no-such-node": "true"},
    }
    admin.create(
        DEPLOYMENT,
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"namespace": namespace, "name": "waiting"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod_spec},
            },
        },
    )
    [pod] = wait_until(lambda: admin.list(POD, namespace, label_selector="app=waiting"))
    [replica_set] = admin.list(REPLICA_SET, namespace)
    key = Key(namespace, pod["metadata"]["name"])
    assert pod["metadata"]["ownerReferences"][0]["uid"] == replica_set["metadata"]["uid"]
    pending = admin.wait_until(POD, key, lambda live: live["status"].get("conditions"))["status"]
    assert pending["phase"] == "Pending"
    assert [(c["type"], c["reason"]) for c in pending["conditions"]] == [("PodScheduled", "Unschedulable")]


def test_up_runs_until_it_is_told_to_end(local: ControlPlane) -> None:  # noqa: ARG001  # builds within no time limit
    """``up`` prints a kubeconfig that works; after SIGTERM it exits with 0, and neither server nor file is left."""
    with _up() as (process, kubeconfig):
        server = kubeconfig_context(kubeconfig).cluster.server
        with Kube(kubeconfig) as kube:
            assert kube.get(NAMESPACE, Key("", "default"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert not _answers(server)
    assert not kubeconfig.parent.exists()


def test_two_side_by_side_and_one_that_was_killed(local: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed run leaves no process, its files go with the next start, and a running neighbour notices nothing.

    The next start also loses the race for its first port, to the neighbour.
    """
    with _up() as (process, kubeconfig):
        server = kubeconfig_context(kubeconfig).cluster.server
        process.kill()
        process.wait()
    wait_until(lambda: not _answers(server), what="the end of the killed run's API server")
    assert kubeconfig.exists()

    neighbour = kubeconfig_context(local.kubeconfig).cluster.server
    ports = iter([int(neighbour.rsplit(":", 1)[1]), cluster._free_port()])
    monkeypatch.setattr(cluster, "_free_port", lambda: next(ports))
    with ControlPlane() as second:
        assert not kubeconfig.parent.exists()
        assert kubeconfig_context(second.kubeconfig).cluster.server != neighbour
        with Kube(second.kubeconfig) as there, Kube(local.kubeconfig) as here:
            there.create(CONFIG_MAP, config_map("default", "only-there"))
            assert here.find(CONFIG_MAP, Key("default", "only-there")) is None
        pids = second.pids.values()
    assert not second.state.exists()
    assert local.state.exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
