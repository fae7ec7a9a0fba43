"""What only a real cluster shows of the operator's Pods as they are shipped."""

import json
import re
from typing import Final

import pytest

from operator_app.api.kinds import NAMESPACE, Key
from operator_app.desired import child_key
from tests.cluster.installed import OPERATOR, PROXY, RESTRICTED, Installed
from tests.e2e.kube import POD, KubeError
from tests.paths import ROOT

pytestmark = pytest.mark.timeout(1500)  # the first test builds the image

SEEN_FROM_INSIDE: Final = """
import json, os, sys
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
writable = [top for top in ('/', '/tmp', '/venv', '/etc', '/run', '/var') if os.access(top, os.W_OK)]
capabilities = [status[name].strip() for name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')]
version = '.'.join(map(str, sys.version_info[:2]))
print(json.dumps([os.getuid(), os.getgid(), capabilities, status['NoNewPrivs'].strip(), status['Seccomp'].strip(),
                  writable, version]))
"""


def test_its_pods_are_ready_restricted_and_nobody(installed: Installed) -> None:
    """Both replicas run without a restart as uid 65532, filtered by seccomp, with no capability and nothing to write.

    The interpreter is the one that the Dockerfile names.
    """
    pods = installed.pods()
    assert len(pods) == 2
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2, "each on a node of its own"
    (python,) = re.findall(r"BUILD_IMAGE=python:([\d.]+)-", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    for pod in pods:
        (container,) = pod["status"]["containerStatuses"]
        assert (container["ready"], container["restartCount"]) == (True, 0)
        said = installed.execute(pod["metadata"]["name"], "python", "-c", SEEN_FROM_INSIDE)
        assert json.loads(said) == [65532, 65532, ["0" * 16] * 5, "1", "2", [], python]


def test_its_probes_answer_and_nobody_else_is_told_more(installed: Installed) -> None:
    """The kubelet has found each replica started, alive and ready by the probes of the manifest."""
    for pod in installed.pods():
        conditions = {each["type"]: each["status"] for each in pod["status"]["conditions"]}
        assert {conditions[name] for name in ("Ready", "ContainersReady", "Initialized", "PodScheduled")} == {"True"}
        (container,) = pod["status"]["containerStatuses"]
        assert container["started"] is True
    events = installed.kubectl("-n", OPERATOR.namespace, "get", "events", "-o", "name", "--field-selector=type=Warning")
    assert "Unhealthy" not in events


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize("namespace", [OPERATOR.namespace, PROXY.namespace])
def test_a_pod_that_is_not_restricted_is_refused(installed: Installed, namespace: str) -> None:
    """Pod Security is enforced beside the operator and beside the sample: what may be root is not admitted."""
    labels = installed.admin.get(NAMESPACE, Key("", namespace))["metadata"]["labels"]
    assert labels[RESTRICTED] == "restricted"
    container = {"name": "main", "image": "example.invalid/none"}
    metadata = {"namespace": namespace, "name": "root"}
    with pytest.raises(KubeError, match="violates PodSecurity"):
        installed.admin.create(
            POD, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
        )


@pytest.mark.usefixtures("sample")
def test_explain_and_audit_run_in_the_pod(installed: Installed) -> None:
    """``kubectl exec … explain`` names the child, and ``audit`` finds nothing outside that contradicts."""
    command = ("deployment/operator-app", "python", "-m", "operator_app")
    assert child_key(PROXY).name in installed.execute(*command, "explain", str(PROXY))
    installed.execute(*command, "audit")


@pytest.mark.usefixtures("sample")
def test_only_who_may_change_a_proxys_finalizers_may_block_its_deletion(installed: Installed) -> None:
    """OwnerReferencesPermissionEnforcement is on: what the operator writes into its children is refused to a tenant."""
    uid = installed.kubectl(
        "-n",
        PROXY.namespace,
        "get",
        f"envoyproxies.edge.operator-app.dev/{PROXY.name}",
        "-o",
        "jsonpath={.metadata.uid}",
    )
    owner = {
        "apiVersion": "edge.operator-app.dev/v1alpha1",
        "kind": "EnvoyProxy",
        "name": PROXY.name,
        "uid": uid,
        "blockOwnerDeletion": True,
    }
    metadata = {"name": "blocks", "namespace": PROXY.namespace, "ownerReferences": [owner]}
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    tenant = "--as=system:serviceaccount:team-a:default"
    installed.kubectl(
        "-n",
        PROXY.namespace,
        "create",
        "rolebinding",
        "tenant",
        "--clusterrole=edit",
        "--serviceaccount=team-a:default",
    )
    try:
        done = installed.tried("create", "-f", "-", tenant, given=json.dumps(manifest))
        assert done.returncode != 0
        assert "cannot set blockOwnerDeletion" in done.stderr
    finally:
        installed.kubectl("-n", PROXY.namespace, "delete", "rolebinding", "tenant")
