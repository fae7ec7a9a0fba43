"""What stands in the way of a declaration is found and replaced, and nothing else."""

import pytest

from operator_app.api.kinds import Object
from operator_app.ssa.fields import Difference, Drift, Path
from operator_app.ssa.unblock import unblocking_patch
from tests.unit.ssa.field_sets import an_object, owner

PORT_80 = {"name": "http", "port": 80, "protocol": "TCP", "targetPort": 10080}
PORT_81 = PORT_80 | {"port": 81}
EXTRA = {"name": "extra", "port": 9090, "protocol": "TCP"}
KEY_80 = 'k:{"port":80,"protocol":"TCP"}'


def taken(*path: str, desired: object = "wanted", live: object = None) -> Difference:
    """A field of ours that somebody took; an absent live value means that they removed it."""
    return Difference(("f:spec", *path), Drift.NOT_OWNED, desired, live)


def test_an_item_with_our_name_under_another_key_gives_way() -> None:
    """A port that somebody renumbered is replaced by the declared one; a port of theirs stays."""
    live = an_object({"ports": [PORT_81, EXTRA], "type": "ClusterIP"})
    patch = unblocking_patch(an_object({"ports": [PORT_80]}), live, [taken("f:ports", KEY_80, desired=PORT_80)])
    assert patch == {"spec": {"ports": [EXTRA, PORT_80]}}


def test_the_key_of_a_list_that_was_taken_whole_is_read_off_the_taker() -> None:
    """Where none of our items is left, the other manager's field set names the key fields."""
    live = an_object({"ports": [PORT_81]}, owner("editor", "Update", "f:spec", "f:ports", KEY_80.replace("80", "81")))
    difference = taken("f:ports", desired=[PORT_80], live=[PORT_81])
    assert unblocking_patch(an_object({"ports": [PORT_80]}), live, [difference]) == {"spec": {"ports": [PORT_80]}}


def test_without_a_key_nothing_is_guessed() -> None:
    """A list whose key fields nobody spells out is left alone."""
    difference = taken("f:ports", desired=[PORT_80], live=[PORT_81])
    assert unblocking_patch(an_object({"ports": [PORT_80]}), an_object({"ports": [PORT_81]}), [difference]) is None


@pytest.mark.parametrize(
    ("desired", "live", "path", "patch"),
    [
        (
            {"env": [{"name": "A", "valueFrom": {"x": 1}}]},
            {"env": [{"name": "A", "value": "me"}, {"name": "B"}]},
            ("f:env", 'k:{"name":"A"}', "f:valueFrom"),
            {"env": [{"name": "A", "valueFrom": {"x": 1}}, {"name": "B"}]},
        ),
        (
            {"probe": {"httpGet": {"port": 1}, "periodSeconds": 5}},
            {"probe": {"exec": {"command": ["x"]}, "periodSeconds": 5}, "other": 1},
            ("f:probe", "f:httpGet"),
            {"probe": {"exec": None, "httpGet": {"port": 1}}},
        ),
    ],
    ids=["in a list", "in a map"],
)
def test_another_member_of_a_choice_gives_way(desired: Object, live: Object, path: Path, patch: Object) -> None:
    """Beside a declared field that is absent, what is not declared may be what replaced it."""
    assert unblocking_patch(an_object(desired), an_object(live), [taken(*path)]) == {"spec": patch}


@pytest.mark.parametrize(
    "difference",
    [
        taken("f:replicas", desired=1, live=7),
        Difference(("f:spec", "f:replicas"), Drift.DIFFERS, 1, 7),
        taken("f:ports", 'k:{"port":9090,"protocol":"TCP"}', "f:name", desired="extra"),
        taken("f:missing", "f:deeper"),
        taken('v:"x"'),
    ],
    ids=["value", "own change", "field of an item", "in nothing", "member of a set"],
)
def test_where_nothing_stands_in_the_way_there_is_no_patch(difference: Difference) -> None:
    """A changed value, an own change and a missing field alone are the apply's business."""
    desired = an_object({"replicas": 1, "ports": [EXTRA]})
    live = an_object({"replicas": 7, "ports": [{"port": 9090, "protocol": "TCP"}], "foreign": "yes"})
    assert unblocking_patch(desired, live, [difference]) is None


def test_the_live_object_is_not_changed() -> None:
    """The store's object is nobody's to write in."""
    live = an_object({"ports": [dict(PORT_81)]})
    unblocking_patch(an_object({"ports": [PORT_80]}), live, [taken("f:ports", KEY_80, desired=PORT_80)])
    assert live["spec"] == {"ports": [PORT_81]}
