"""Fields whose release takes a write of its own: handed over with their value, or set back first. Pure.

An apply that leaves out a field which nobody else owns removes it, and the API server fills in its default: a
Deployment that an autoscaler is about to take over would go down to one Pod first. So our ownership of such a field is
removed from ``managedFields`` before the apply, and the value stays.

Of other fields the API server keeps the value when its last owner leaves it out. Such a field is set to its default
before it is released.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from operator_app.api.kinds import DEPLOYMENT, FIELD_MANAGER, SERVICE, Kind, Object
from operator_app.ssa.fields import Difference, Drift, Fields, Path

HANDED_OVER: Final[Mapping[Kind, Path]] = {DEPLOYMENT: ("f:spec", "f:replicas")}
"""The field of a kind that an autoscaler takes over."""


KEPT_BY_THE_SERVER: Final[Mapping[Kind, tuple[str, str]]] = {SERVICE: ("ipFamilyPolicy", "SingleStack")}
"""A member of a kind's ``spec`` that outlives its release, and its default."""


def set_back(kind: Kind, desired: Object, live: Object, differences: Iterable[Difference]) -> Object | None:
    """What to apply before ``desired`` so that a release leaves the default, or ``None`` without such a field."""
    name, default = KEPT_BY_THE_SERVER.get(kind, ("", ""))
    is_released = any(each.drift is Drift.TO_RELEASE and each.path == ("f:spec", f"f:{name}") for each in differences)
    if not is_released or live["spec"].get(name) in (None, default):
        return None
    return desired | {"spec": desired["spec"] | {name: default}}


def patch_of_hand_over(kind: Kind, live: Object, differences: Iterable[Difference]) -> Object | None:
    """The merge patch of ``metadata`` after which we don't own what is handed over, or ``None`` without such a field.

    One Pod is the default anyway, and an autoscaler never starts from none, so these two numbers are not handed over.
    """
    path = HANDED_OVER.get(kind)
    is_released = any(each.drift is Drift.TO_RELEASE and each.path == path for each in differences)
    if path is None or not is_released or live["spec"].get("replicas", 1) <= 1:
        return None
    entries = [
        entry | {"fieldsV1": _without(entry.get("fieldsV1") or {}, path)}
        if entry.get("manager") == FIELD_MANAGER and not entry.get("subresource")
        else entry
        for entry in live["metadata"]["managedFields"]
    ]
    return {"metadata": {"managedFields": entries}}


def _without(owned: Fields, path: Path) -> Fields:
    element, *rest = path
    if element not in owned:
        return owned
    left = {name: inner for name, inner in owned.items() if name != element}
    return left | {element: _without(owned[element], tuple(rest))} if rest else left
