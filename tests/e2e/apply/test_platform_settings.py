"""What a platform keeps to itself, by settings of the operator, on a real API server."""

from operator_app.api.kinds import DEPLOYMENT, ENVOY_PROXY, Key
from operator_app.desired import child_key, user_id
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import a_proxy, condition, drift_of, holds, settled_objects_of, wait_reconciled

PLATFORM = ("--run-as-user=false", "--tenant-forbidden-fields=affinity,priorityClassName")
AFFINITY = {"nodes": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}]}


def test_the_user_is_left_to_the_platform_and_given_back(
    admin: Kube, namespace: str, operator: OperatorProcess
) -> None:
    """Without a user of the operator's the platform's is not undone; with the setting back it is the operator's."""
    key = Key(namespace, "web")
    operator.start(*PLATFORM)
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    proxy = wait_reconciled(admin, key)
    context = admin.get(DEPLOYMENT, child_key(key))["spec"]["template"]["spec"]["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}

    platform = {"spec": {"template": {"spec": {"securityContext": {"runAsUser": 1_000_650_000}}}}}
    assigned = admin.patch(DEPLOYMENT, child_key(key), platform)
    settled = settled_objects_of(admin, key).children[DEPLOYMENT]
    assert settled["metadata"]["generation"] == assigned["metadata"]["generation"]

    operator.stop()
    operator.start()
    user = user_id(proxy["metadata"]["uid"])
    admin.wait_until(
        DEPLOYMENT,
        child_key(key),
        lambda live: live["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == user,
    )
    settled_objects_of(admin, key)
    assert drift_of(admin, key) == {}


def test_a_forbidden_field_is_refused_and_what_ran_runs_on(
    admin: Kube, namespace: str, operator: OperatorProcess
) -> None:
    """The status says which field, no child is written, and without the field the proxy is reconciled."""
    key = Key(namespace, "web")
    operator.start(*PLATFORM)
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    before = settled_objects_of(admin, key)

    admin.patch(ENVOY_PROXY, key, {"spec": {"affinity": AFFINITY, "replicas": 2}})
    refused = admin.wait_until(ENVOY_PROXY, key, holds("Stalled"))
    stalled = condition(refused, "Stalled")
    assert stalled["reason"] == "NotAllowed"
    assert stalled["message"].startswith("spec.affinity: is not allowed here")
    after = settled_objects_of(admin, key)
    assert after.children[DEPLOYMENT]["spec"] == before.children[DEPLOYMENT]["spec"]

    admin.patch(ENVOY_PROXY, key, {"spec": {"affinity": None}})
    wait_reconciled(admin, key)
    assert admin.get(DEPLOYMENT, child_key(key))["spec"]["replicas"] == 2
