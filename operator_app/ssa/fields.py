"""Field ownership: what ``managedFields`` says is ours, and how that differs from what we want. Pure.

Server-side apply records, for every manager, the set of fields that it set (``fieldsV1``, KEP-555). Because the record
lives on the object, one comparison answers all questions that other operators answer with caches, hashes or
annotations, and the answer survives restarts:

* a field that we want but do not own was taken by somebody, or never applied;
* a field that we own with another value than we want was wanted differently before;
* a field that we own and do not want any more must be released.

None of the three means: the object already is what we declare, and nothing has to be sent. Fields that belong to
others are never looked at.

The walk is driven by the field set, not by a schema. Keys of a set are ``f:<name>`` (field of a map), ``k:<json>``
(item of a keyed list), ``v:<json>`` (member of a set) and ``.`` (the item itself). An *empty* set is a leaf: a scalar
or an atomic whole, compared as one value.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from operator_app.api.kinds import FIELD_MANAGER, Object, Value

Fields = Mapping[str, Any]
"""A ``fieldsV1`` set, decoded."""

Path = tuple[str, ...]
"""A path in the spelling of ``fieldsV1``: ``("f:spec", "f:ports", 'k:{"port":80,"protocol":"TCP"}', "f:name")``."""

_NOTHING: Final[Fields] = {}
_IDENTITY: Final = frozenset({"name", "namespace", "uid", "resourceVersion"})
_ABSENT: Final = None
_ESCAPED_BY_GO: Final = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}


class Drift(StrEnum):
    """Why one field has to be written."""

    NOT_OWNED = "taken"
    """We want it and do not own it: another writer changed or removed it, or it was never applied."""

    DIFFERS = "outdated"
    """We own it with a value that we no longer want."""

    TO_RELEASE = "unwanted"
    """We own it and no longer want it at all."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that keeps a live object from being what we declare. An absent value is ``None``."""

    path: Path
    drift: Drift
    desired: Value
    live: Value

    def __str__(self) -> str:
        return dotted(self.path)


def dotted(path: Path) -> str:
    """``path`` the way the API server prints it in conflicts: ``.spec.ports[port=80,protocol="TCP"].targetPort``."""
    return "".join(_dotted_element(element) for element in path)


def fields_of(live: Object, *, manager: str = FIELD_MANAGER, operation: str = "Apply", subresource: str = "") -> Fields:
    """The fields of ``live`` that ``manager`` owns by ``operation`` on ``subresource``; empty when it owns none.

    An entry made under another apiVersion of the same object does not count: its paths may mean something else, and
    the next apply replaces it.
    """
    for entry in live["metadata"].get("managedFields", ()):
        if (
            entry.get("manager") == manager
            and entry.get("operation") == operation
            and entry.get("subresource", "") == subresource
            and entry.get("apiVersion") == live["apiVersion"]
        ):
            return entry.get("fieldsV1") or _NOTHING
    return _NOTHING


def differences(desired: Object, live: Object, *, subresource: str = "") -> tuple[Difference, ...]:
    """Everything that an apply of ``desired`` would change in what we own of ``live``; empty means: send nothing.

    ``desired`` must be canonical (spelled as the server stores it) and name every key field of its keyed lists.
    """
    owned = fields_of(live, subresource=subresource)
    return tuple(_compare_map((), _configuration(desired), _configuration(live), owned))


def others_with(path: Path, live: Object) -> tuple[Object, ...]:
    """The managedFields entries, other than our own apply's, that contain ``path`` or an atomic whole around it."""
    return tuple(
        entry
        for entry in live["metadata"].get("managedFields", ())
        if not (entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply")
        and _contains(entry.get("fieldsV1") or _NOTHING, path)
    )


def owners_of(path: Path, live: Object) -> tuple[str, ...]:
    """The managers of these entries."""
    return tuple(dict.fromkeys(entry.get("manager", "") for entry in others_with(path, live)))


def foreign_fields(live: Object, prefix: Path, *, most: int = 5) -> tuple[str, ...]:
    """What other managers have set below ``prefix`` and we have not, as ``.path by manager``; at most ``most`` of them.

    Each is told at its outermost place: a whole container, or a field of one of ours.
    """
    ours: Any = fields_of(live)
    for element in prefix:
        ours = ours.get(element, _NOTHING)
    found: dict[str, None] = {}
    for entry in live["metadata"].get("managedFields", ()):
        if entry.get("manager") == FIELD_MANAGER or entry.get("subresource"):
            continue
        theirs: Any = entry.get("fieldsV1") or _NOTHING
        for element in prefix:
            theirs = theirs.get(element, _NOTHING)
        for path in _beyond((), theirs, ours):
            found[f"{dotted((*prefix, *path))} by {entry.get('manager') or 'an unnamed manager'}"] = None
    return tuple(found)[:most]


def _beyond(path: Path, theirs: Fields, ours: Fields) -> Iterator[Path]:
    """The outermost paths that are in one field set and not in the other."""
    for element, inner in theirs.items():
        if element == ".":
            continue
        if element not in ours:
            yield (*path, element)
        elif ours[element]:
            yield from _beyond((*path, element), inner, ours[element])


def owned_values(live: Object) -> Iterator[tuple[Path, Value]]:
    """Every leaf of our field set with its live value, in the order of the set."""
    yield from _leaves((), _configuration(live), fields_of(live))


def _leaves(path: Path, live: Value, owned: Fields) -> Iterator[tuple[Path, Value]]:
    if not owned:
        yield path, live
        return
    for element, inner in owned.items():
        if element.startswith("f:"):
            value = live.get(element[2:]) if isinstance(live, dict) else None
        elif element.startswith("k:"):
            key = key_fields(element)
            items = live if isinstance(live, list) else ()
            value = next((item for item in items if has_key(item, key)), None)
        elif element.startswith("v:"):
            value = json.loads(element[2:])
        else:
            continue
        yield from _leaves((*path, element), value, inner)


def _configuration(obj: Object) -> Object:
    """``obj`` without what managedFields never records: its type and its identity."""
    configuration = {name: value for name, value in obj.items() if name not in ("apiVersion", "kind")}
    configuration["metadata"] = {
        name: value for name, value in obj.get("metadata", {}).items() if name not in _IDENTITY
    }
    if not configuration["metadata"]:
        del configuration["metadata"]
    return configuration


def _compare(path: Path, desired: Value, live: Value, owned: Fields) -> Iterator[Difference]:
    if not owned:
        if desired != live:
            yield Difference(path, Drift.DIFFERS, desired, live)
    elif any(element.startswith("v:") for element in owned):
        yield from _compare_members(path, desired, live, owned)
    elif any(element.startswith("k:") for element in owned):
        yield from _compare_keyed(path, desired, live, owned)
    elif isinstance(desired, list):
        # All of our items were taken, and with them the names of the key fields.
        yield Difference(path, Drift.NOT_OWNED, desired, live)
    else:
        yield from _compare_map(path, desired, live, owned)


def _compare_map(path: Path, desired: Value, live: Value, owned: Fields) -> Iterator[Difference]:
    wanted = desired if isinstance(desired, dict) else {}
    present = live if isinstance(live, dict) else {}
    for element, inner in owned.items():
        if element == ".":
            continue
        name = element[2:]
        if name not in wanted:
            yield Difference((*path, element), Drift.TO_RELEASE, _ABSENT, present.get(name))
        else:
            yield from _compare((*path, element), wanted[name], present.get(name), inner)
    for name, value in wanted.items():
        if f"f:{name}" not in owned:
            yield from _taken((*path, f"f:{name}"), value, present.get(name))


def _compare_keyed(path: Path, desired: Value, live: Value, owned: Fields) -> Iterator[Difference]:
    wanted: Sequence[Any] = desired if isinstance(desired, list) else ()
    present: Sequence[Any] = live if isinstance(live, list) else ()
    matched: set[int] = set()
    names: tuple[str, ...] = ()
    for element, inner in owned.items():
        if element == ".":
            continue
        key = key_fields(element)
        names = tuple(key)
        live_item = next((item for item in present if has_key(item, key)), None)
        index = next((i for i, item in enumerate(wanted) if has_key(item, key)), None)
        if index is None:
            yield Difference((*path, element), Drift.TO_RELEASE, _ABSENT, live_item)
        else:
            matched.add(index)
            yield from _compare((*path, element), wanted[index], live_item, inner)
    for index, item in enumerate(wanted):
        if index not in matched:
            key = {name: item.get(name) for name in names}
            live_item = next((found for found in present if has_key(found, key)), None)
            yield Difference((*path, f"k:{_spelled(key)}"), Drift.NOT_OWNED, item, live_item)


def _compare_members(path: Path, desired: Value, live: Value, owned: Fields) -> Iterator[Difference]:
    wanted = [_member(value) for value in desired] if isinstance(desired, list) else []
    present = [_member(value) for value in live] if isinstance(live, list) else []
    for element in owned:
        if element != "." and element not in wanted:
            yield Difference((*path, element), Drift.TO_RELEASE, _ABSENT, json.loads(element[2:]))
    for element in wanted:
        if element not in owned:
            value = json.loads(element[2:])
            yield Difference((*path, element), Drift.NOT_OWNED, value, value if element in present else _ABSENT)


def _taken(path: Path, desired: Value, live: Value) -> Iterator[Difference]:
    """Down to the single fields that are missing from our set, so that a reader learns which they are."""
    if isinstance(desired, dict) and desired and isinstance(live, dict):
        for name, value in desired.items():
            yield from _taken((*path, f"f:{name}"), value, live.get(name))
    else:
        yield Difference(path, Drift.NOT_OWNED, desired, live)


def _contains(owned: Fields, path: Path) -> bool:
    for element in path:
        if element not in owned:
            return False
        owned = owned[element]
        if not owned:
            return True
    return True


@lru_cache(maxsize=4096)
def _parsed_key(element: str) -> tuple[tuple[str, Any], ...]:
    return tuple(json.loads(element[2:]).items())


def key_fields(element: str) -> dict[str, Any]:
    """The names and values in a ``k:`` element, which tell one item of a keyed list from the others."""
    return dict(_parsed_key(element))


def has_key(item: Value, key: Mapping[str, Any]) -> bool:
    """Whether ``item`` is the one that ``key`` names."""
    return isinstance(item, dict) and all(item.get(name) == value for name, value in key.items())


def _member(value: Value) -> str:
    return f"v:{_spelled(value)}"


def _spelled(value: Value) -> str:
    """JSON as the API server writes it into path elements.

    sigs.k8s.io/structured-merge-diff, fieldpath/serialize-pe.go: compatible with Go's encoding/json, which escapes
    what HTML would read and nothing else that is printable.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.translate(_ESCAPED_BY_GO)


def _dotted_element(element: str) -> str:
    prefix, rest = element[:2], element[2:]
    if prefix == "f:":
        return f".{rest}"
    if prefix == "k:":
        inner = ",".join(f"{name}={json.dumps(value)}" for name, value in key_fields(element).items())
        return f"[{inner}]"
    return f"[={rest}]"
