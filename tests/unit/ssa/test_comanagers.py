"""Stale managers are found and lose our fields, and nothing else."""

import pytest

from operator_app.api.kinds import FIELD_MANAGER
from operator_app.ssa.comanagers import has_stale_managers, without_stale_managers
from tests.unit.ssa.field_sets import an_object, owner

KEY_80 = 'k:{"port":80,"protocol":"TCP"}'

OTHERS = [
    owner(FIELD_MANAGER, "Apply", "f:spec", "f:ours"),
    owner(FIELD_MANAGER, "Update", "f:status", subresource="status"),
    owner("editor", "Update", "f:spec", "f:ours"),
    owner("before-first-apply", "Apply", "f:spec", "f:ours"),
]


@pytest.mark.parametrize("name", [FIELD_MANAGER, "before-first-apply"])
def test_stale_managers_are_our_own_updates_and_before_first_apply(name: str) -> None:
    """Everybody else's entry stays, and so do ours for the apply and for a subresource."""
    assert not has_stale_managers(an_object({}, *OTHERS))
    live = an_object({}, owner(name, "Update", "f:spec", "f:ours"), *OTHERS)
    assert has_stale_managers(live)
    assert without_stale_managers(live) == OTHERS


def test_a_subresource_has_stale_managers_of_its_own() -> None:
    """Only what is owned on the same subresource is cast off there; the object's own entries stay."""
    ours = owner(FIELD_MANAGER, "Apply", "f:status", "f:ours", subresource="status")
    stale = owner("before-first-apply", "Update", "f:status", "f:ours", subresource="status")
    beside = [ours, owner("before-first-apply", "Update", "f:spec", "f:ours"), owner("editor", "Update", "f:spec")]
    live = an_object({}, *beside, stale)
    assert not has_stale_managers(live)
    assert has_stale_managers(live, subresource="status")
    assert without_stale_managers(live, subresource="status") == beside


def test_a_stale_manager_keeps_what_is_not_ours() -> None:
    """Foreign fields go on having an owner; an item of ours is left to nobody else, with all that is in it."""
    ours = {"f:annotations": {"f:ours": {}}, "f:ports": {KEY_80: {".": {}, "f:name": {}}}, "f:selector": {}}
    stale = {
        "f:annotations": {".": {}, "f:ours": {}, "f:theirs": {}},
        "f:ports": {".": {}, KEY_80: {".": {}, "f:name": {}, "f:nodePort": {}}},
        "f:selector": {"f:app": {}},
        "f:type": {},
    }
    entries = [
        {"manager": FIELD_MANAGER, "operation": "Apply", "apiVersion": "v1", "fieldsV1": ours},
        {"manager": "before-first-apply", "operation": "Update", "apiVersion": "v1", "fieldsV1": stale},
    ]
    kept = without_stale_managers(an_object({}, *entries))
    assert kept[0] == entries[0]
    assert kept[1]["fieldsV1"] == {"f:annotations": {".": {}, "f:theirs": {}}, "f:type": {}}
    assert not has_stale_managers(an_object({}, *kept))
