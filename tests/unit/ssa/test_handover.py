"""The number of Pods is handed to an autoscaler with its value, and nothing else is."""

import pytest

from operator_app.api.kinds import DEPLOYMENT, FIELD_MANAGER, SERVICE, Kind, Object
from operator_app.ssa.fields import Difference, Drift, differences, fields_of
from operator_app.ssa.handover import patch_of_hand_over, set_back

REPLICAS = Difference(("f:spec", "f:replicas"), Drift.TO_RELEASE, None, 4)


def deployment(replicas: int = 4, **others: Object) -> Object:
    """A Deployment of which we own the number of Pods and two more fields."""
    ours = {"f:metadata": {"f:labels": {"f:a": {}}}, "f:spec": {"f:replicas": {}, "f:paused": {}}}
    entry = {"manager": FIELD_MANAGER, "operation": "Apply", "apiVersion": "apps/v1", "fieldsV1": ours}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "a", "namespace": "b", "labels": {"a": "b"}, "managedFields": [entry, *others.values()]},
        "spec": {"replicas": replicas, "paused": False},
    }


def test_a_released_number_loses_its_owner_and_nothing_else() -> None:
    """Afterwards the declaration without the number has no difference; entries of others are sent as they are."""
    theirs = {"manager": "other", "operation": "Update", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    live = deployment(other=theirs)
    desired = live | {"metadata": {"name": "a", "namespace": "b", "labels": {"a": "b"}}, "spec": {"paused": False}}
    patch = patch_of_hand_over(DEPLOYMENT, live, differences(desired, live))
    assert patch is not None
    after = live | {"metadata": live["metadata"] | patch["metadata"]}
    assert differences(desired, after) == ()
    assert fields_of(after)["f:spec"] == {"f:paused": {}}
    assert patch["metadata"]["managedFields"][1] == theirs


@pytest.mark.parametrize(
    ("kind", "replicas", "difference"),
    [
        (DEPLOYMENT, 1, REPLICAS),
        (DEPLOYMENT, 0, REPLICAS),
        (DEPLOYMENT, 4, Difference(REPLICAS.path, Drift.DIFFERS, 3, 4)),
        (DEPLOYMENT, 4, Difference(("f:spec", "f:paused"), Drift.TO_RELEASE, None, "no")),
        (SERVICE, 4, REPLICAS),
    ],
    ids=["one is the default", "none would never scale", "not released", "another field", "another kind"],
)
def test_nothing_else_is_handed_over(kind: Kind, replicas: int, difference: Difference) -> None:
    """Every other release is an ordinary one, which an apply does."""
    assert patch_of_hand_over(kind, deployment(replicas), [difference]) is None


def test_a_field_that_the_server_keeps_is_set_to_its_default_first() -> None:
    """Only where it is released and has another value than the default."""
    desired = {"spec": {"type": "ClusterIP"}}
    released = Difference(("f:spec", "f:ipFamilyPolicy"), Drift.TO_RELEASE, None, "PreferDualStack")
    live = {"spec": {"type": "ClusterIP", "ipFamilyPolicy": "PreferDualStack"}}
    assert set_back(SERVICE, desired, live, [released]) == {"spec": desired["spec"] | {"ipFamilyPolicy": "SingleStack"}}
    single = {"spec": {"ipFamilyPolicy": "SingleStack"}}
    assert set_back(SERVICE, desired, single, [released]) is None
    assert set_back(SERVICE, desired, live, []) is None
    assert set_back(DEPLOYMENT, desired, live, [released]) is None
