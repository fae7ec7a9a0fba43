"""``python -m operator_app explain``: owners of fields, drift, and what would be written, without writing."""

import subprocess
import sys
from pathlib import Path

from operator_app.api.kinds import CONFIG_MAP, DEPLOYMENT, ENVOY_PROXY, SERVICE, Key
from operator_app.desired import child_key
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import a_proxy, objects_of, settled_objects_of, wait_reconciled


def explain(kubeconfig: Path, proxy: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    command = [sys.executable, "-m", "operator_app", "explain", proxy, "--kubeconfig", str(kubeconfig)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_explain_shows_owner_desired_and_live_of_every_field_and_writes_nothing(
    admin: Kube, namespace: str, operator_kubeconfig: Path, running_operator: OperatorProcess
) -> None:
    """A drifted field has its manager, the declared and the live value; all others are as declared; nothing changes."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    settled_objects_of(admin, key)
    running_operator.stop()
    port = {"spec": {"ports": [{"name": "http", "port": 80, "targetPort": 9999, "protocol": "TCP"}]}}
    admin.patch(SERVICE, child_key(key), port, field_manager="somebody")
    admin.delete(CONFIG_MAP, child_key(key))
    before = admin.get(SERVICE, child_key(key)), admin.get(DEPLOYMENT, child_key(key)), admin.get(ENVOY_PROXY, key)

    explained = explain(operator_kubeconfig, str(key))

    assert explained.returncode == 0, explained.stderr
    lines = explained.stdout.splitlines()
    service = f"Service {child_key(key)}"
    assert f"ConfigMap {child_key(key)}: does not exist; the next reconcile creates it" in lines
    assert f"Deployment {child_key(key)}: holds; nothing to write" in lines
    assert f"{service}: differs; the next reconcile writes the fields marked with !" in lines
    field = '.spec.ports[port=80,protocol="TCP"].targetPort'
    assert f'  ! {field}  owner somebody  desired "http"  live 9999  (taken)' in lines
    assert "    .spec.replicas  owner operator-app  = 1" in lines
    assert any(line.startswith("  Reconciled=True (Verified) for generation 1, since ") for line in lines)
    after = admin.get(SERVICE, child_key(key)), admin.get(DEPLOYMENT, child_key(key)), admin.get(ENVOY_PROXY, key)
    assert after == before

    running_operator.start()
    admin.wait_until(SERVICE, child_key(key), lambda live: live["spec"]["ports"][0]["targetPort"] == "http")
    admin.wait_until(CONFIG_MAP, child_key(key), lambda live: "data" in live)
    repaired = explain(operator_kubeconfig, str(key)).stdout
    assert "!" not in repaired
    assert objects_of(admin, key).children.keys() == {CONFIG_MAP, DEPLOYMENT, SERVICE}


def test_explain_answers_bad_input_with_one_sentence(operator_kubeconfig: Path) -> None:
    """A malformed address ends with 2, a proxy that does not exist with 1, and neither with a traceback."""
    malformed = explain(operator_kubeconfig, "web")
    assert (malformed.returncode, malformed.stderr) == (2, "operator_app: 'web' is not NAMESPACE/NAME\n")
    absent = explain(operator_kubeconfig, "default/no-such-proxy")
    assert absent.returncode == 1
    assert absent.stderr == "operator_app: EnvoyProxy default/no-such-proxy: there is no such object\n"
