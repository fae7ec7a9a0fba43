"""Authorities, certificates and tokens that change under a running operator, which goes on without a restart."""

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from operator_app.api.kinds import ENVOY_PROXY, Key, Kind, Object
from tests.e2e.api_server.relay import Relay
from tests.e2e.controlplane import Cluster, ControlPlane
from tests.e2e.controlplane.credentials import ADMIN, Authority
from tests.e2e.kube import Kube, kubeconfig_context, wait_until
from tests.e2e.operator_process import OPERATOR_NAMESPACE, SERVICE_ACCOUNT, OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, a_proxy, wait_reconciled
from tests.e2e.shipped import CRDS, operator_identity

SECRET: Final = Kind("", "v1", "Secret", "secrets")
GROUP: Final = "system:serviceaccounts"
NOTICED_S: Final = 90.0
"""The API server looks at its own files at least once a minute, the operator at its own every 30 s."""


@pytest.fixture
def own_control_plane() -> Iterator[ControlPlane]:
    """A control plane for this test alone, whose authority the test may replace."""
    with ControlPlane(crds=CRDS) as cluster:
        yield cluster


@pytest.fixture
def process(tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator with the kubeconfig of the test's folder; at the end it is the same process that was started."""
    operator = OperatorProcess(tmp_path / "kubeconfig", tmp_path / "operator.log")
    yield operator
    starts = [line for line in operator.log() if line.get("event") == "started"]
    was_running = operator.is_running
    operator.kill()
    assert was_running, operator.log_text()
    assert len(starts) == 1


def edit(admin: Kube, key: Key, mark: str) -> Object:
    """Change a proxy and wait until the operator has verified that; its status after that."""
    admin.patch(ENVOY_PROXY, key, {"spec": {"service": {"annotations": {"edit": mark}}}})
    return wait_reconciled(admin, key, NOTICED_S)


def shows_certificate_of(authority: Authority, server: str) -> bool:
    """Whether a server's certificate is one of this authority; what it answers does not matter."""
    context = ssl.create_default_context(cadata=authority.ca.cert_pem.bytes().decode())
    try:
        urllib.request.urlopen(server, context=context, timeout=10).close()  # noqa: S310 - https on loopback
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError:
        return False
    return True


def test_a_rotated_authority_is_followed(
    own_control_plane: ControlPlane, process: OperatorProcess, tmp_path: Path
) -> None:
    """Serving certificate, CA and client certificate change, and every connection breaks: work goes on.

    In between the operator refuses the server, whose certificate is of an authority that it was not told of.
    """
    cluster, key, names = own_control_plane, Key("rotated", "web"), ("127.0.0.1", "localhost")
    with Kube(cluster.kubeconfig) as admin, Relay(cluster.port) as relay:
        operator_identity(cluster, admin)
        cluster.authority.write_kubeconfig(tmp_path / "kubeconfig", relay.server, OPERATOR_USER, GROUP)
        process.start()
        admin.create_namespace(key.namespace)
        admin.create(ENVOY_PROXY, a_proxy(key.namespace, key.name, replicas=0))
        wait_reconciled(admin, key)

        new = Authority.create(tmp_path / "new", *names)
        old_ca = cluster.authority.ca_file.read_text()
        cluster.authority.ca_file.write_text(old_ca + new.ca_file.read_text())
        new.serving_key_file.replace(cluster.authority.serving_key_file)
        new.serving_certificate_file.replace(cluster.authority.serving_certificate_file)
        wait_until(lambda: shows_certificate_of(new, relay.server), NOTICED_S, "the new serving certificate")
        relay.cut()
        process.wait_for("watch_failed", NOTICED_S)
        new.write_kubeconfig(tmp_path / "kubeconfig", relay.server, OPERATOR_USER, GROUP)

        new.write_kubeconfig(tmp_path / ADMIN, f"https://127.0.0.1:{cluster.port}", ADMIN, "system:masters")
        with Kube(tmp_path / ADMIN) as renewed:
            edit(renewed, key, "both authorities")
            # Now the client's certificate of before is refused, too.
            cluster.authority.ca_file.write_text(new.ca_file.read_text())
            relay.cut()
            edit(renewed, key, "the new one")


def token(admin: Kube, secret: str, path: Path) -> None:
    """Write a token of the operator's ServiceAccount that ends with a Secret, which is created."""
    stored = admin.create(
        SECRET,
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret, "namespace": OPERATOR_NAMESPACE}},
    )
    bound = {"apiVersion": "v1", "kind": "Secret", "name": secret, "uid": stored["metadata"]["uid"]}
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"boundObjectRef": bound},
    }
    url = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/serviceaccounts/{SERVICE_ACCOUNT}/token"
    path.write_text(admin.request("POST", url, body=request).json()["status"]["token"])


def write_kubeconfig(control_plane: Cluster, path: Path, user: Object) -> None:
    """A kubeconfig for the API server with these credentials."""
    context = kubeconfig_context(control_plane.kubeconfig)
    cluster = {"server": context.cluster.server, "certificate-authority-data": context.cluster.certificate_auth_data}
    config = {
        "clusters": [{"name": "e2e", "cluster": cluster}],
        "users": [{"name": "operator", "user": user}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "operator"}}],
        "current-context": "e2e",
    }
    path.write_text(yaml.safe_dump(config), encoding="utf-8")


def is_refused(control_plane: Cluster, token_file: Path) -> bool:
    """Whether the API server refuses a token."""
    context = kubeconfig_context(control_plane.kubeconfig)
    request = urllib.request.Request(  # noqa: S310 - https on loopback
        f"{context.cluster.server}/api", headers={"Authorization": f"Bearer {token_file.read_text()}"}
    )
    try:
        urllib.request.urlopen(request, context=ssl._create_unverified_context(), timeout=10).close()  # noqa: S310, S323
    except urllib.error.HTTPError as error:
        return error.code == 401
    return False


@pytest.mark.usefixtures("operator_kubeconfig")
def test_a_rotated_token_is_followed(
    control_plane: Cluster, admin: Kube, namespace: str, process: OperatorProcess, tmp_path: Path
) -> None:
    """The token in the file is replaced, and the one of before is refused: the next request carries the new one."""
    key, current = Key(namespace, "web"), tmp_path / "token"
    token(admin, f"{namespace}-one", current)
    write_kubeconfig(control_plane, tmp_path / "kubeconfig", {"tokenFile": str(current)})
    process.start()
    admin.create(ENVOY_PROXY, a_proxy(namespace, key.name, replicas=0))
    wait_reconciled(admin, key)

    former = current.rename(tmp_path / "former")
    token(admin, f"{namespace}-two", current)
    admin.delete(SECRET, Key(OPERATOR_NAMESPACE, f"{namespace}-one"))
    wait_until(lambda: is_refused(control_plane, former), NOTICED_S, "the refusal of the former token")

    edit(admin, key, "the new token")
    admin.delete(SECRET, Key(OPERATOR_NAMESPACE, f"{namespace}-two"))


@pytest.mark.usefixtures("operator_kubeconfig")
def test_a_credential_plugin_may_be_slower_than_every_request(
    control_plane: Cluster, admin: Kube, namespace: str, process: OperatorProcess, tmp_path: Path
) -> None:
    """It runs once, takes four times as long as a request may, and its token is used then."""
    key = Key(namespace, "web")
    token(admin, f"{namespace}-plugin", tmp_path / "token")
    plugin = tmp_path / "plugin"
    plugin.write_text(
        f"""#!/bin/sh
echo run >> {tmp_path}/runs
sleep 4
printf '{{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{{"token":"%s"}}}}' \
"$(cat {tmp_path}/token)"
"""
    )
    plugin.chmod(0o700)
    execute = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "interactiveMode": "Never"}
    write_kubeconfig(control_plane, tmp_path / "kubeconfig", {"exec": execute})
    process.start("--request-timeout-s=1", "--write-timeout-s=1", wait=False)
    process.wait_for("synced", NOTICED_S)
    admin.create(ENVOY_PROXY, a_proxy(namespace, key.name, replicas=0))
    wait_reconciled(admin, key, NOTICED_S)
    assert (tmp_path / "runs").read_text() == "run\n" * 2  # one for each of the two pools of connections
    admin.delete(SECRET, Key(OPERATOR_NAMESPACE, f"{namespace}-plugin"))
