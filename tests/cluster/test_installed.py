"""What only a real cluster shows of the operator as it is shipped."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Final

import pytest

from operator_app.api.kinds import DEPLOYMENT, ENVOY_PROXY, NAMESPACE, PROXY_REGISTRATION, SERVICE, Key, Object
from operator_app.desired import child_key
from tests.cluster.conftest import OPERATOR, Installed, available
from tests.e2e.controlplane import service_account_user
from tests.e2e.kube import POD, KubeError, wait_until
from tests.e2e.node.network import get
from tests.e2e.proxies import holds
from tests.paths import MANIFESTS

SAMPLE: Final = MANIFESTS / "samples" / "checkout.yaml"
PROXY: Final = Key("team-a", "checkout")
READY_TIMEOUT_S: Final = 120.0
RESTRICTED: Final = "pod-security.kubernetes.io/enforce"

pytestmark = pytest.mark.timeout(900)  # the first test builds the image


@pytest.fixture(scope="module")
def sample(installed: Installed) -> Iterator[Object]:
    """The sample in a namespace that enforces the restricted Pod Security Standard, once it is ready."""
    metadata = {"name": PROXY.namespace, "labels": {RESTRICTED: "restricted"}}
    installed.admin.apply(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    installed.kubectl("apply", "--server-side", "-f", str(SAMPLE))
    yield installed.admin.wait_until(ENVOY_PROXY, PROXY, holds("Ready"), READY_TIMEOUT_S)
    installed.kubectl("delete", "--timeout=120s", "-f", str(SAMPLE))
    assert installed.admin.list(PROXY_REGISTRATION, OPERATOR.namespace) == []


def ask(installed: Installed, path: str = "/") -> tuple[int, str]:
    """Status and text of one answer at the cluster IP of the sample's Service, on a connection of its own."""
    address = installed.admin.get(SERVICE, child_key(PROXY))["spec"]["clusterIP"]
    with installed.node.inside():
        code, text = get(address, 80, path, host="checkout.example.com")
    return code, text.strip()


def test_its_pods_are_ready_restricted_and_nobody(installed: Installed) -> None:
    """Both Pods run without a restart in a namespace that enforces ``restricted``, as uid 65532, with no capability."""
    assert installed.admin.get(NAMESPACE, Key("", OPERATOR.namespace))["metadata"]["labels"][RESTRICTED] == "restricted"
    pods = installed.pods()
    assert len(pods) == 2
    program = (
        "import json, os; status = dict(line.split(':', 1) for line in open('/proc/self/status')); "
        "print(json.dumps([os.getuid(), os.getgid(), status['CapEff'].strip(), status['NoNewPrivs'].strip(), "
        "[top for top in ('/', '/tmp', '/venv', '/etc') if os.access(top, os.W_OK)]]))"
    )
    for pod in pods:
        (container,) = pod["status"]["containerStatuses"]
        assert (container["ready"], container["restartCount"]) == (True, 0)
        name = pod["metadata"]["name"]
        said = installed.kubectl("-n", OPERATOR.namespace, "exec", name, "--", "python", "-c", program)
        assert json.loads(said) == [65532, 65532, "0" * 16, "1", []], "nothing is writable: its root is read-only"


def test_a_pod_that_is_not_restricted_is_refused(installed: Installed) -> None:
    """Pod Security is enforced in the operator's namespace: a Pod that may be root is not admitted."""
    container = {"name": "main", "image": "example.invalid/none"}
    metadata = {"namespace": OPERATOR.namespace, "name": "root"}
    with pytest.raises(KubeError, match="violates PodSecurity"):
        installed.admin.create(
            POD, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
        )


@pytest.mark.usefixtures("sample")
def test_the_sample_answers_at_its_cluster_ip(installed: Installed) -> None:
    """What the sample's first lines promise is what a client of the Service meets."""
    wait_until(lambda: ask(installed) == (200, "hello from app"), 30, "the application's answer")
    assert ask(installed, "/assets/logo.svg") == (200, "hello from assets")


@pytest.mark.usefixtures("sample")
def test_explain_and_audit_run_in_the_pod(installed: Installed) -> None:
    """``kubectl exec … explain`` names the child, and ``audit`` finds nothing outside that contradicts."""
    execute = ("-n", OPERATOR.namespace, "exec", "deployment/operator-app", "--", "python", "-m", "operator_app")
    explained = installed.kubectl(*execute, "explain", str(PROXY))
    assert child_key(PROXY).name in explained
    installed.kubectl(*execute, "audit")


@pytest.mark.usefixtures("sample")
def test_no_request_fails_while_its_pods_are_replaced(installed: Installed) -> None:
    """Clients of the Service notice nothing of a rollout, of evictions and of scaling to and fro."""
    failures: list[str] = []
    answers = 0
    ended = threading.Event()

    def keep_asking() -> None:
        nonlocal answers
        while not ended.is_set():
            try:
                got = ask(installed)
            except OSError as error:
                got = (0, repr(error))
            if got != (200, "hello from app"):
                failures.append(f"{time.monotonic():.2f} {got}")
            answers += 1
            time.sleep(0.02)

    wait_until(lambda: ask(installed) == (200, "hello from app"), 30, "the application's answer")
    client = threading.Thread(target=keep_asking)
    client.start()
    try:
        for edit in ({"resources": {"requests": {"cpu": "20m"}}}, {"replicas": 3}, {"replicas": 2}):
            installed.admin.patch(ENVOY_PROXY, PROXY, {"spec": edit})
            installed.admin.wait_until(ENVOY_PROXY, PROXY, holds("Ready"), READY_TIMEOUT_S)
        _evict_one(installed)
        installed.admin.wait_until(DEPLOYMENT, child_key(PROXY), available(2), READY_TIMEOUT_S)
        time.sleep(5)  # what drains is still there
    finally:
        ended.set()
        client.join()
    assert failures == []
    assert answers > 100


def _evict_one(installed: Installed) -> None:
    pods = installed.admin.list(POD, PROXY.namespace, label_selector="app.kubernetes.io/instance=checkout")
    metadata = {name: pods[0]["metadata"][name] for name in ("namespace", "name")}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/eviction"
    installed.admin.request("POST", path, body=eviction)


def test_a_killed_leader_is_restarted_and_no_edit_is_lost(installed: Installed, sample: Object) -> None:
    """``kill -9`` of both operator processes: the kubelet starts them again, and the edit made meanwhile is applied."""
    for pod in installed.pods():
        container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        subprocess.run(installed.node.ctr("tasks", "kill", "--signal=SIGKILL", container), check=True)
    edited = installed.admin.patch(ENVOY_PROXY, PROXY, {"spec": {"replicas": 1}})
    assert edited["metadata"]["generation"] > sample["metadata"]["generation"]
    installed.admin.wait_until(ENVOY_PROXY, PROXY, holds("Ready"), READY_TIMEOUT_S)
    assert installed.admin.get(DEPLOYMENT, child_key(PROXY))["spec"]["replicas"] == 1

    def restarted() -> bool:
        return all(each["status"]["containerStatuses"][0]["restartCount"] >= 1 for each in installed.pods())

    wait_until(restarted, READY_TIMEOUT_S, "a restart of both containers")
    installed.admin.wait_until(DEPLOYMENT, OPERATOR, available(2), READY_TIMEOUT_S)


def test_it_was_never_denied_anything(installed: Installed) -> None:
    """The API server's audit log has no refusal by RBAC of what the operator asked under its ServiceAccount."""
    user = service_account_user(*OPERATOR)
    entries = [each for each in installed.plane.audit().entries() if each.user == user]
    assert entries
    assert [str(each) for each in entries if each.code in {401, 403}] == []
