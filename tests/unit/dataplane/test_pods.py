"""What is known of a Pod, and what of it is kept."""

import json
from typing import Any

import pytest

from operator_app.api.kinds import Key, Object
from operator_app.dataplane.pods import pod_of
from operator_app.pods import kept_of_pod, owner_uid, proxy_of_pod
from tests.unit.dataplane.pod_objects import pod


def test_a_ready_pod_serves() -> None:
    """With its address, its revision and what its kubelet was made to fetch last."""
    found = pod_of(pod(configuration="c"))
    assert (found.key, found.uid, found.ip) == (Key("team-a", "web-1"), "web-1", "10.0.0.1")
    assert (found.revision, found.configuration, found.is_serving) == ("r", "c", True)


@pytest.mark.parametrize(
    "obj",
    [
        pod(ready="False"),
        pod(ready="Unknown"),
        pod(ip=""),
        pod(deletionTimestamp="2026-07-02T00:00:00Z"),
        {**pod(), "status": {}},
    ],
    ids=["not ready", "unknown", "no address", "being deleted", "new"],
)
def test_any_other_pod_does_not(obj: Object) -> None:
    """It gets no traffic, so nothing has to arrive there."""
    assert not pod_of(obj).is_serving


def test_what_is_kept_is_all_that_is_needed() -> None:
    """The same Pod and the same owner follow from it, and the rest takes no memory."""
    noise: dict[str, Any] = {"managedFields": [{"x": "y" * 1000}], "creationTimestamp": "2026-07-02T00:00:00Z"}
    whole = pod(configuration="c", **noise) | {"spec": {"containers": [{"name": "envoy", "env": [{}] * 100}]}}
    whole["metadata"]["annotations"]["other"] = "x" * 1000
    kept = kept_of_pod(whole)
    assert pod_of(kept) == pod_of(whole)
    assert (
        (proxy_of_pod(kept), owner_uid(kept))
        == (proxy_of_pod(whole), owner_uid(whole))
        == (Key("team-a", "web"), "proxy-uid")
    )
    assert len(json.dumps(kept)) < 800


def test_a_pod_without_our_labels_has_no_owner() -> None:
    """It may carry only the label by which Pods are watched."""
    stranger = pod()
    del stranger["metadata"]["labels"]
    assert (proxy_of_pod(stranger), owner_uid(stranger)) == (None, None)
    assert kept_of_pod(stranger)["metadata"]["labels"] == {}
