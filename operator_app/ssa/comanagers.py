"""Managers that own our fields beside us without being another writer. Pure.

Two entries of ``managedFields`` are such *stale managers*: ``before-first-apply``, to which the API server gives every
field of an object whose ``managedFields`` were wiped, and our own name with the operation ``Update``, which a merge
patch of ours leaves behind. A field that a stale manager co-owns outlives our giving it up, so a released field would
stay.
"""

from collections.abc import Mapping
from typing import Any, Final

from operator_app.api.kinds import FIELD_MANAGER, Object
from operator_app.ssa.fields import Fields, fields_of

_STALE_MANAGERS: Final = frozenset({"before-first-apply", FIELD_MANAGER})


def patch_of_stale_managers(live: Object, *, subresource: str = "") -> Object:
    """The merge patch (RFC 7396) of ``metadata`` after which we alone own our fields of ``live``.

    Whoever sends it adds the preconditions.
    """
    return {"metadata": {"managedFields": without_stale_managers(live, subresource=subresource)}}


def has_stale_managers(live: Object, *, subresource: str = "") -> bool:
    """Whether a stale manager co-owns any of our fields of ``live``, or of its ``subresource``."""
    entries = live["metadata"].get("managedFields", ())
    has_stale = any(_is_stale(entry, subresource) for entry in entries)
    return has_stale and without_stale_managers(live, subresource=subresource) != list(entries)


def without_stale_managers(live: Object, *, subresource: str = "") -> list[Object]:
    """The ``managedFields`` of ``live`` without our fields in the entries of stale managers.

    A stale manager keeps the fields that are not ours: a field that lost its last owner would be removed with our next
    release, although somebody else had set it.
    """
    ours = fields_of(live, subresource=subresource)
    entries = []
    for entry in live["metadata"].get("managedFields", ()):
        is_stale = _is_stale(entry, subresource)
        left = _without(entry.get("fieldsV1") or {}, ours) if is_stale else entry.get("fieldsV1")
        if left or not is_stale:
            entries.append(entry | {"fieldsV1": left})
    return entries


def _is_stale(entry: Mapping[str, Any], subresource: str) -> bool:
    is_update = entry.get("operation") == "Update" and entry.get("subresource", "") == subresource
    return is_update and entry.get("manager") in _STALE_MANAGERS


def _without(owned: Fields, ours: Fields) -> Fields:
    """What is in one field set and not in ours. Items of ours are ours as a whole, or they could not be removed."""
    left = {}
    for element, inner in owned.items():
        if element not in ours:
            left[element] = inner
        elif element.startswith("f:") and inner and ours[element]:
            rest = _without(inner, ours[element])
            if rest:
                left[element] = rest
    return {} if left.keys() == {"."} else left
