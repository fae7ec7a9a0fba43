"""What stands in the way of a declaration, and what keeps hold of it behind our back. Pure.

A forced apply takes fields, and never removes what is somebody else's. Twice that is not enough.

*Obstacles.* Some foreign parts can't stand beside ours, so that the API server refuses the merged object:

* an item of a keyed list with the *name* of one of ours, under another key. A Service port whose number somebody
  changed is to server-side apply a new port of theirs, with the name of the old one;
* another member of a *choice*: ``value`` where we declare ``valueFrom``, ``exec`` where we declare ``httpGet``.

*Shadows.* Two entries of ``managedFields`` own our fields without being us or anybody else: ``before-first-apply``,
to which the API server gives everything once somebody has wiped the list, and our own name as an *updater*, which is
how obstacles are removed. What a shadow owns would outlive our giving it up.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Final

from operator_app.api.kinds import FIELD_MANAGER, Object, Value
from operator_app.ssa.fields import Difference, Drift, Path, has_key, key_fields

_STALE_MANAGERS: Final = frozenset({"before-first-apply", FIELD_MANAGER})
_NOT_CONTENTS: Final = frozenset({"apiVersion", "kind", "metadata", "status"})


def unblocking_patch(desired: Object, live: Object, differences: Iterable[Difference]) -> Object | None:
    """A merge patch (RFC 7396) that puts our declaration in the place of its obstacles; ``None`` where there are none.

    Whatever is foreign and no obstacle stays. ReclaimedField fields come back in the same patch, so that a Pod template
    changes once and not twice.
    """
    before = {name: value for name, value in live.items() if name not in _NOT_CONTENTS}
    after = copy.deepcopy(before)
    is_clear = True
    for difference in differences:
        if difference.drift is Drift.NOT_OWNED:
            is_clear &= not _remove_conflicts(desired, after, live, difference.path)
    return None if is_clear else _merge_patch(before, after)


def _remove_conflicts(desired: Object, after: Object, live: Object, path: Path) -> bool:
    """Put what is declared at ``path`` in the place of its obstacles in ``after``; returns whether there were any."""
    *steps, last = path
    around = _at(after, steps)
    declared_around = _at(desired, steps)
    if isinstance(around, list) and isinstance(declared_around, list):
        return _remove_namesakes(declared_around, around, tuple(key_fields(last)))
    if not isinstance(around, dict) or not isinstance(declared_around, dict):
        return False
    name = last[2:]
    if not last.startswith("f:") or name not in declared_around:
        return False
    declared, found = declared_around[name], around.get(name)
    if isinstance(declared, list) and isinstance(found, list) and (key_names := _key_names(live, path)):
        return _remove_namesakes(declared, found, key_names)
    others = () if name in around else around.keys() - declared_around.keys()
    for other in others:
        del around[other]
    around[name] = declared
    return bool(others)


def _remove_namesakes(declared: list[Value], items: list[Value], key_names: tuple[str, ...]) -> bool:
    """Replace items that bear a declared name under another key than declared."""
    if not key_names or not all(isinstance(item, dict) for item in (*declared, *items)):
        return False
    keys = [{name: item.get(name) for name in key_names} for item in declared]
    names = {item["name"] for item in declared if "name" in item}

    def is_namesake(item: Object) -> bool:
        return item.get("name") in names and not any(has_key(item, key) for key in keys)

    if not any(map(is_namesake, items)):
        return False
    missing = [item for item, key in zip(declared, keys, strict=True) if not any(has_key(each, key) for each in items)]
    items[:] = [*(item for item in items if not is_namesake(item)), *missing]
    return True


def _key_names(live: Object, path: Path) -> tuple[str, ...]:
    """The key fields of the list at ``path``, as any manager's field set spells them."""
    for entry in live["metadata"].get("managedFields", ()):
        found: Mapping[str, Any] = entry.get("fieldsV1") or {}
        for element in path:
            found = found.get(element) or {}
        for element in found:
            if element.startswith("k:"):
                return tuple(key_fields(element))
    return ()


def _at(value: Value, steps: Iterable[str]) -> Value:
    for step in steps:
        if step.startswith("k:") and isinstance(value, list):
            value = next((item for item in value if has_key(item, key_fields(step))), None)
        elif step.startswith("f:") and isinstance(value, dict):
            value = value.get(step[2:])
        else:
            return None
    return value


def _merge_patch(before: Object, after: Object) -> Object:
    patch: Object = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        known = before.get(name)
        if isinstance(value, dict) and isinstance(known, dict) and value != known:
            patch[name] = _merge_patch(known, value)
        elif value != known:
            patch[name] = value
    return patch
