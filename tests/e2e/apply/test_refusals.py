"""Every wait ends with the event that ends it, and every refusal is told, bounded, and silences nothing else."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import pytest

from operator_app.api.kinds import (
    ANNOTATION_ADOPTABLE_BY,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    SERVICE,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.desired import child_key
from tests.e2e.controlplane import AuditLog
from tests.e2e.kube import RESOURCE_QUOTA, Kube, KubeError, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import (
    OPERATOR_USER,
    a_proxy,
    condition,
    drift_of,
    holds,
    is_refused,
    wait_reconciled,
)

POLICY: Final = Kind(
    "admissionregistration.k8s.io",
    "v1",
    "ValidatingAdmissionPolicy",
    "validatingadmissionpolicies",
    namespaced=False,
)
BINDING: Final = Kind(
    POLICY.group, "v1", "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings", namespaced=False
)
ENFORCED_S: Final = 30.0


@contextmanager
def policy(
    admin: Kube,
    namespace: str,
    resource: tuple[str, str],
    operations: list[str],
    probe: Callable[[], object],
    **said: str,
) -> Iterator[str]:
    """A ValidatingAdmissionPolicy that denies these operations of the operator in one namespace.

    ``probe`` is repeated until the API server denies it too, for that is how long a new policy takes.
    """
    name = f"deny-{namespace}"
    group, plural = resource
    rules = [{"apiGroups": [group], "apiVersions": ["*"], "operations": operations, "resources": [plural]}]
    spec: Object = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": rules,
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        },
        "validations": [{"expression": "false", "message": "the platform says no"} | said],
    }
    admin.create(
        POLICY, {"apiVersion": POLICY.api_version, "kind": POLICY.kind, "metadata": {"name": name}, "spec": spec}
    )
    bound = {"policyName": name, "validationActions": ["Deny"]}
    binding = {"apiVersion": BINDING.api_version, "kind": BINDING.kind, "metadata": {"name": name}, "spec": bound}
    admin.create(BINDING, binding)

    def is_enforced() -> bool:
        try:
            probe()
        except KubeError as error:
            return "the platform says no" in str(error)
        return False

    try:
        wait_until(is_enforced, ENFORCED_S, "the policy to be enforced")
        yield name
    finally:
        admin.delete(BINDING, Key("", name))
        admin.delete(POLICY, Key("", name))


def dry_service(admin: Kube, namespace: str) -> Callable[[], object]:
    """A write that the policy about Services denies once it is enforced, and that is undone else."""
    body: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {"ports": [{"port": 1}]},
    }

    def probe() -> None:
        admin.apply(SERVICE, body)
        admin.delete(SERVICE, Key(namespace, "probe"))

    return probe


@pytest.mark.parametrize("said", [{}, {"reason": "Forbidden"}], ids=["422", "403"])
def test_a_policys_refusal_is_reported_with_its_name_and_costs_the_others_nothing(
    admin: Kube, audit: AuditLog, key: Key, operator: OperatorProcess, said: dict[str, str]
) -> None:
    """The other children are made, the refused one is tried again rarely, and no field of others is touched."""
    operator.start()
    denied, probe = ["CREATE", "UPDATE"], dry_service(admin, key.namespace)
    with policy(admin, key.namespace, ("", "services"), denied, probe, **said) as name:
        mark = audit.mark()
        admin.create(ENVOY_PROXY, a_proxy(key.namespace))
        told = admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "RefusedByPolicy"))
        assert name in condition(told, "Reconciled")["message"]
        assert condition(told, "Stalled")["reason"] == "RefusedByPolicy"
        assert admin.get(DEPLOYMENT, child_key(key))
        time.sleep(3)
        tried = [
            each
            for each in audit.writes(OPERATOR_USER, mark)
            if each.resource == "services" and each.namespace == key.namespace
        ]
        assert len(tried) == 1, "no event tells that it has gone, so it is tried again after a minute"
    operator.stop()
    operator.start()
    wait_reconciled(admin, key)


def test_a_foreground_deletion_is_made_good_with_the_event_of_its_end(
    admin: Kube, key: Key, running_operator: OperatorProcess
) -> None:
    """The wait for a child on its way out is no failure, so no backoff stands between its end and its return."""
    admin.create(ENVOY_PROXY, a_proxy(key.namespace))
    wait_reconciled(admin, key)
    latencies_s = []
    for _ in range(3):
        before = admin.get(DEPLOYMENT, child_key(key))
        hold = {"metadata": {"finalizers": ["example.com/hold"]}}
        admin.patch(DEPLOYMENT, child_key(key), hold, field_manager="holder")
        admin.delete(DEPLOYMENT, child_key(key), propagation="Foreground")
        told = admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "Terminating"))
        assert "example.com/hold" in condition(told, "Reconciled")["message"]
        time.sleep(2)  # long enough for a backoff to have grown, if the wait were counted as failures
        admin.patch(DEPLOYMENT, child_key(key), {"metadata": {"finalizers": None}}, field_manager="holder")
        admin.wait_gone(DEPLOYMENT, child_key(key), uid=before["metadata"]["uid"])
        gone_mono = time.monotonic()
        wait_until(lambda: admin.find(DEPLOYMENT, child_key(key)), what="the new Deployment")
        latencies_s.append(time.monotonic() - gone_mono)
        wait_reconciled(admin, key)
    assert running_operator.metric("operator_app_rounds_total", result="failed") == 0, latencies_s


def test_what_the_deployment_cannot_do_is_reported_in_its_words(
    admin: Kube,
    namespace: str,
    running_operator: OperatorProcess,  # noqa: ARG001  # it works in the background
) -> None:
    """A quota that leaves no room for Pods stands in our conditions as the Deployment says it, within seconds."""
    key = Key(namespace, "web")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"namespace": namespace, "name": "pods"}}
    admin.create(RESOURCE_QUOTA, quota | {"spec": {"hard": {"pods": "0"}}})
    admin.wait_until(RESOURCE_QUOTA, Key(namespace, "pods"), lambda live: "hard" in live.get("status", {}))
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    told = admin.wait_until(ENVOY_PROXY, key, is_refused("Ready", "FailedCreate"))
    assert "exceeded quota" in condition(told, "Ready")["message"]
    assert condition(told, "Stalled")["reason"] == "FailedCreate"


def test_a_deletion_that_a_policy_holds_up_says_so(
    admin: Kube,
    namespace: str,
    running_operator: OperatorProcess,  # noqa: ARG001  # it works in the background
) -> None:
    """The finalizer can't be removed: the status names the policy, and the deletion ends once it is gone."""
    key = Key(namespace, "web")
    created = admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    resource = (ENVOY_PROXY.group, ENVOY_PROXY.plural)

    def probe() -> None:
        admin.patch(ENVOY_PROXY, key, {"metadata": {"annotations": {"example.com/n": str(time.monotonic())}}})

    with policy(admin, namespace, resource, ["UPDATE"], probe) as name:
        admin.delete(ENVOY_PROXY, key)
        told = admin.wait_until(ENVOY_PROXY, key, is_refused("Ready", "FinalizerNotRemoved"))
        assert name in condition(told, "Ready")["message"]
    admin.wait_gone(ENVOY_PROXY, key, uid=created["metadata"]["uid"], timeout_s=90)


def test_an_object_whose_side_consents_is_adopted(
    admin: Kube,
    namespace: str,
    running_operator: OperatorProcess,  # noqa: ARG001  # it works in the background
) -> None:
    """Children restored without owner references are a conflict, until whoever may write them names the proxy."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    orphan: Object = {"metadata": {"ownerReferences": None}}
    admin.patch(CONFIG_MAP, child_key(key), orphan)
    admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "NameConflict"))
    uid = admin.get(CONFIG_MAP, child_key(key))["metadata"]["uid"]
    admin.patch(CONFIG_MAP, child_key(key), {"metadata": {"annotations": {ANNOTATION_ADOPTABLE_BY: "other"}}})
    admin.patch(CONFIG_MAP, child_key(key), {"metadata": {"annotations": {ANNOTATION_ADOPTABLE_BY: "web"}}})
    admin.wait_until(ENVOY_PROXY, key, holds("Reconciled"))
    adopted = admin.get(CONFIG_MAP, child_key(key))
    assert adopted["metadata"]["uid"] == uid
    assert adopted["metadata"]["ownerReferences"][0]["uid"] == admin.get(ENVOY_PROXY, key)["metadata"]["uid"]
    assert drift_of(admin, key) == {}


def says(words: str, proxy: Object) -> bool:
    """Whether these words are in what is told of the children."""
    return words in condition(proxy, "Reconciled").get("message", "")


def test_a_node_port_that_cannot_be_had_is_told_and_taken_once_it_can(
    admin: Kube, namespace: str, running_operator: OperatorProcess
) -> None:
    """Outside of the cluster's range, or another Service's: the API server's words are told, and all else is there."""
    taken: Object = {"type": "NodePort", "ports": [{"port": 1, "nodePort": 30079}]}
    other = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "other", "namespace": namespace}}
    admin.create(SERVICE, other | {"spec": taken})

    def asking(port: int) -> Object:
        listener = {"name": "http", "port": 80, "nodePort": port, "routes": [{"backend": "app"}]}
        return a_proxy(namespace, f"web-{port}", listeners=[listener], service={"type": "NodePort"})

    refused = [asking(1), asking(30079)]
    for proxy in refused:
        admin.create(ENVOY_PROXY, proxy)
    for proxy, words in zip(refused, ("not in the valid range", "already allocated"), strict=True):
        key = key_of(proxy)
        told = admin.wait_until(ENVOY_PROXY, key, partial(says, words))
        assert condition(told, "Reconciled")["status"] == "False"
        assert admin.get(DEPLOYMENT, child_key(key))
        assert admin.find(SERVICE, child_key(key)) is None
    listeners = asking(30078)["spec"]["listeners"]
    admin.patch(ENVOY_PROXY, key_of(refused[0]), {"spec": {"listeners": listeners}})
    wait_reconciled(admin, key_of(refused[0]))
    assert admin.get(SERVICE, child_key(key_of(refused[0])))["spec"]["ports"][0]["nodePort"] == 30078
    admin.delete(SERVICE, Key(namespace, "other"))
    running_operator.stop()
    running_operator.start()  # else it would ask again in a minute
    wait_reconciled(admin, key_of(refused[1]))
