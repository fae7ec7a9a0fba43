"""What stands in the way of a declaration is found and replaced, and nothing else."""

import pytest

from operator_app.api.kinds import FIELD_MANAGER, Object
from operator_app.ssa.fields import Difference, Drift, Path
from operator_app.ssa.unblock import has_stale_managers, unblocking_patch, without_stale_managers

PORT_80 = {"name": "http", "port": 80, "protocol": "TCP", "targetPort": 10080}
PORT_81 = PORT_80 | {"port": 81}
EXTRA = {"name": "extra", "port": 9090, "protocol": "TCP"}
KEY_80 = 'k:{"port":80,"protocol":"TCP"}'


def an_object(spec: Object, *entries: Object) -> Object:
    """An object with that spec and these managedFields."""
    return {"apiVersion": "v1", "kind": "Any", "metadata": {"name": "x", "managedFields": list(entries)}, "spec": spec}


def taken(*path: str, desired: object = "wanted", live: object = None) -> Difference:
    """A field of ours that somebody took; an absent live value means that they removed it."""
    return Difference(("f:spec", *path), Drift.NOT_OWNED, desired, live)


def owner(manager: str, operation: str, *path: str, subresource: str = "") -> Object:
    """A managedFields entry that owns one path."""
    fields: Object = {}
    for element in reversed(path):
        fields = {element: fields}
    entry = {"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": fields}
    return entry | ({"subresource": subresource} if subresource else {})


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


OTHERS = [
    owner(FIELD_MANAGER, "Apply", "f:spec", "f:ours"),
    owner(FIELD_MANAGER, "Update", "f:status", subresource="status"),
    owner("editor", "Update", "f:spec", "f:ours"),
    owner("before-first-apply", "Apply", "f:spec", "f:ours"),
]


@pytest.mark.parametrize("name", [FIELD_MANAGER, "before-first-apply"])
def test_shadows_are_our_own_updates_and_the_api_servers_stand_in(name: str) -> None:
    """Everybody else's entry stays, and so do ours for the apply and for a subresource."""
    assert not has_stale_managers(an_object({}, *OTHERS))
    live = an_object({}, owner(name, "Update", "f:spec", "f:ours"), *OTHERS)
    assert has_stale_managers(live)
    assert without_stale_managers(live) == OTHERS


def test_a_subresource_has_shadows_of_its_own() -> None:
    """Only what is owned on the same subresource is cast off there; the object's own entries stay."""
    ours = owner(FIELD_MANAGER, "Apply", "f:status", "f:ours", subresource="status")
    shadow = owner("before-first-apply", "Update", "f:status", "f:ours", subresource="status")
    beside = [ours, owner("before-first-apply", "Update", "f:spec", "f:ours"), owner("editor", "Update", "f:spec")]
    live = an_object({}, *beside, shadow)
    assert not has_stale_managers(live)
    assert has_stale_managers(live, subresource="status")
    assert without_stale_managers(live, subresource="status") == beside


def test_a_shadow_keeps_what_is_not_ours() -> None:
    """Foreign fields go on having an owner; an item of ours is left to nobody else, with all that is in it."""
    ours = {"f:annotations": {"f:ours": {}}, "f:ports": {KEY_80: {".": {}, "f:name": {}}}, "f:selector": {}}
    shadow = {
        "f:annotations": {".": {}, "f:ours": {}, "f:theirs": {}},
        "f:ports": {".": {}, KEY_80: {".": {}, "f:name": {}, "f:nodePort": {}}},
        "f:selector": {"f:app": {}},
        "f:type": {},
    }
    entries = [
        {"manager": FIELD_MANAGER, "operation": "Apply", "apiVersion": "v1", "fieldsV1": ours},
        {"manager": "before-first-apply", "operation": "Update", "apiVersion": "v1", "fieldsV1": shadow},
    ]
    kept = without_stale_managers(an_object({}, *entries))
    assert kept[0] == entries[0]
    assert kept[1]["fieldsV1"] == {"f:annotations": {".": {}, "f:theirs": {}}, "f:type": {}}
    assert not has_stale_managers(an_object({}, *kept))
