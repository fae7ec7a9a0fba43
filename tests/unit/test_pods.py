"""What a Pod's status says of why it does not serve, as one reason and one sentence that stay while it stays so."""

from typing import Any

import pytest

from operator_app.api.kinds import Key, Object
from operator_app.pods import PodTrouble, kept_of_pod, owner_uid, proxy_of_pod, trouble

IMAGE = "example.com/envoy:v1"
PENDING = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


def a_pod(name: str = "web-1", *, is_ready: bool = False, limit: str = "", **container: Any) -> Object:
    """A Pod with one container; keywords are parts of that container's status."""
    resources = {"resources": {"limits": {"memory": limit}}} if limit else {}
    return {
        "metadata": {"namespace": "team", "name": name},
        "spec": {"containers": [{"name": "envoy", "image": IMAGE} | resources]},
        "status": {
            "conditions": [{"type": "Ready", "status": "True" if is_ready else "False"}],
            "containerStatuses": [{"name": "envoy", "image": IMAGE} | container],
        },
    }


def waiting(reason: str, message: str = "") -> Object:
    """The state of a container that is waited for."""
    return {"waiting": {"reason": reason, "message": message}}


def ended(reason: str, code: int) -> Object:
    """The state of a container that has ended."""
    return {"terminated": {"reason": reason, "exitCode": code}}


@pytest.mark.parametrize("said", ["ErrImagePull", "ImagePullBackOff"])
def test_an_image_that_cannot_be_pulled_is_told_alike_between_and_during_attempts(said: str) -> None:
    """The kubelet's two reasons, which take turns, are one; its growing pauses are not repeated."""
    found = trouble([a_pod(state=waiting(said, f"Back-off pulling image {IMAGE}: 10s"))])
    assert found == PodTrouble("ImagePullBackOff", f"the image {IMAGE} of container envoy can't be pulled")


@pytest.mark.parametrize(
    "state",
    [
        {"state": ended("OOMKilled", 137)},
        {"state": waiting("CrashLoopBackOff", "back-off 20s"), "lastState": ended("OOMKilled", 137)},
        {"state": {"running": {}}, "lastState": ended("OOMKilled", 137)},
    ],
)
def test_a_container_that_was_killed_for_its_memory_is_told_until_it_is_ready(state: Object) -> None:
    """Killed, waiting to be started again, or started and not ready yet: one reason, with the limit."""
    expected = "container envoy was killed, because it needs more memory than its limit of 16Mi"
    assert trouble([a_pod(limit="16Mi", **state)]) == PodTrouble("OOMKilled", expected)
    assert trouble([a_pod(limit="16Mi", is_ready=True, **state)]) is None


def test_a_node_without_memory_is_no_limit() -> None:
    """Without a limit the node itself ran out of memory."""
    found = trouble([a_pod(state=ended("OOMKilled", 137))])
    assert found is not None
    assert found.message.endswith("more memory than there is")


def test_what_ends_again_and_again_is_told_with_its_exit_code() -> None:
    """A container that ends by itself."""
    found = trouble([a_pod(state=waiting("CrashLoopBackOff"), lastState=ended("Error", 1))])
    assert found == PodTrouble("CrashLoopBackOff", "container envoy ends again and again, with exit code 1")


def test_what_cannot_be_started_is_told_in_the_kubelets_words() -> None:
    """A Secret or ConfigMap that is not there, or a command that can't be run."""
    found = trouble([a_pod(state=waiting("CreateContainerConfigError", 'secret "tls" not found'))])
    message = 'container envoy can\'t be started: secret "tls" not found'
    assert found == PodTrouble("CreateContainerConfigError", message)


@pytest.mark.parametrize(
    "pod",
    [
        a_pod(state={"waiting": {"reason": "ContainerCreating"}}),
        a_pod(state={"running": {}}),
        {"metadata": {"namespace": "team", "name": "new"}, "spec": {"containers": []}},
        {"metadata": {"name": "pending"}, "spec": {"containers": []}} | {"status": {"conditions": [PENDING]}},
        {"metadata": {"name": "going", "deletionTimestamp": "now"}} | {"spec": {"containers": []}, "status": {}},
    ],
)
def test_a_pod_that_starts_or_goes_or_waits_for_a_node_is_no_trouble(pod: Object) -> None:
    """Nothing is said of what takes its time."""
    assert trouble([pod]) is None


def test_the_first_by_name_speaks_for_all() -> None:
    """So that the sentence does not change with the order of a list."""
    pods = [
        a_pod("web-2", state=waiting("ErrImagePull")),
        a_pod("web-1", state=waiting("CrashLoopBackOff"), lastState=ended("Error", 1)),
        a_pod("web-0", state={"running": {}}),
    ]
    found = trouble(pods)
    assert found == trouble(reversed(pods))
    assert found is not None
    assert found.reason == "CrashLoopBackOff"


def test_what_is_kept_of_a_pod_says_the_same_and_finds_its_proxy() -> None:
    """The store keeps a small part; what is wrong, and whose Pod it is, is read off that part alike."""
    pod = a_pod(limit="16Mi", state=ended("OOMKilled", 137), imageID="sha256:0")
    pod["metadata"] |= {
        "labels": {"app.kubernetes.io/instance": "web", "edge.operator-app.dev/owner-uid": "uid-1", "more": "x"},
        "annotations": {"more": "x" * 1000},
    }
    pod["spec"] |= {"volumes": [{"name": "more"}], "nodeName": "node-1"}
    kept = kept_of_pod(pod)
    assert trouble([kept]) == trouble([pod])
    assert trouble([kept]) is not None
    assert (owner_uid(kept), proxy_of_pod(kept)) == ("uid-1", Key("team", "web"))
    assert kept["spec"]["nodeName"] == "node-1"
    assert len(str(kept)) < len(str(pod)) / 2


def test_a_pod_without_labels_belongs_to_no_proxy() -> None:
    """Whatever else a selector may have let through."""
    assert (owner_uid(a_pod()), proxy_of_pod(a_pod())) == (None, None)
