"""Foreign fields that make the API server refuse an apply of ours, and the patch that puts ours in their place. Pure.

A forced apply takes fields over and never removes a field of another manager. Some foreign fields can't exist beside
ours, so that the API server refuses the merged object (422):

* another member of a *union*: ``value`` where we declare ``valueFrom``, ``exec`` where we declare ``httpGet``. The
  API's own validation knows five unions in what we declare: the source of an environment variable, the handler of a
  probe, the handler of a lifecycle hook, the source of a volume, and the number of a PodDisruptionBudget;
* an item of a keyed list with the *name* of one of ours under another key. A Service port whose number somebody changed
  is to server-side apply a new port of theirs, with the name of the old one.

Guarantees

* A foreign field is removed only where both hold: it excludes a field that we declare, and a cause of the refusal
  (``details.causes[].field``) names its union or list. Whatever else others have declared stays.
* A refusal that names no such place (a policy, a webhook, an immutable field) gives no patch.
* A renumbered item keeps the fields that others or the API server have set in it, such as ``nodePort``.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from operator_app.api.kinds import Object, Value

_HANDLERS: Final = frozenset({"exec", "grpc", "httpGet", "sleep", "tcpSocket"})
_POD: Final = ("spec", "template", "spec")


class _Union(NamedTuple):
    """A place where the API takes one member only; without ``members``, all fields but ``name`` are members."""

    path: tuple[str, ...]
    members: frozenset[str] | None


class _NamedList(NamedTuple):
    """A list whose items have unique names, and whose key is something else."""

    path: tuple[str, ...]
    key: tuple[str, ...]


# A step that ends in [] enters the items of a list whose key is ``name``.
_UNIONS: Final = (
    _Union((*_POD, "containers[]", "env[]"), frozenset({"value", "valueFrom"})),
    *(
        _Union((*_POD, "containers[]", probe), _HANDLERS)
        for probe in ("livenessProbe", "readinessProbe", "startupProbe")
    ),
    *(_Union((*_POD, "containers[]", "lifecycle", hook), _HANDLERS) for hook in ("postStart", "preStop")),
    _Union((*_POD, "volumes[]"), None),
    _Union(("spec",), frozenset({"maxUnavailable", "minAvailable"})),
)
_NAMED_LISTS: Final = (
    _NamedList(("spec", "ports"), ("port", "protocol")),
    _NamedList((*_POD, "containers[]", "ports"), ("containerPort", "protocol")),
)
_INDEX: Final = re.compile(r"\[[^]]*\]")


def unblocking_patch(desired: Object, live: Object, refused: Iterable[str]) -> Object | None:
    """A merge patch (RFC 7396) that puts declared fields in the place of foreign ones that exclude them.

    ``refused`` are the fields that the causes of the refusal name, such as ``spec.ports[1].name``. ``None``: nothing
    foreign that they name excludes a declared field. Declared fields come in the same patch, so that a Pod template
    changes once and not twice.
    """
    before = {"spec": live.get("spec")}
    after = copy.deepcopy(before)
    fields = [_INDEX.sub("[]", each) for each in refused]
    is_changed = False
    for union in _UNIONS:
        if _is_named(union.path, fields):
            for declared, found in _pairs(desired, after, union.path):
                is_changed |= _replace_members(declared, found, union.members)
    for named in _NAMED_LISTS:
        if _is_named(named.path, fields):
            *around, last = named.path
            for declared, found in _pairs(desired, after, tuple(around)):
                is_changed |= _replace_namesakes(declared.get(last), found.get(last), named.key)
    return _merge_patch(before, after) if is_changed else None


def _is_named(path: tuple[str, ...], fields: Iterable[str]) -> bool:
    """Whether one of ``fields`` is the place at ``path``, or in it."""
    place = ".".join(path)
    return any(field == place or field.startswith((f"{place}.", f"{place}[")) for field in fields)


def _pairs(declared: Value, found: Value, path: tuple[str, ...]) -> Iterator[tuple[Object, Object]]:
    """The maps at ``path`` that are in both objects; items of lists are paired by name."""
    if not path:
        if isinstance(declared, dict) and isinstance(found, dict):
            yield declared, found
        return
    name = path[0].removesuffix("[]")
    if not isinstance(declared, dict) or not isinstance(found, dict) or name not in declared or name not in found:
        return
    if name == path[0]:
        yield from _pairs(declared[name], found[name], path[1:])
        return
    by_name = {item["name"]: item for item in found[name]}
    for item in declared[name]:
        if item["name"] in by_name:
            yield from _pairs(item, by_name[item["name"]], path[1:])


def _replace_members(declared: Object, found: Object, members: frozenset[str] | None) -> bool:
    """Remove members of the union that exclude the declared one; returns whether there were any."""
    of_union = members if members is not None else (declared.keys() | found.keys()) - {"name"}
    wanted = declared.keys() & of_union
    foreign = (found.keys() & of_union) - wanted
    if not wanted or not foreign:
        return False
    for name in foreign:
        del found[name]
    found.update(copy.deepcopy(declared))
    return True


def _replace_namesakes(declared: Value, found: Value, key: tuple[str, ...]) -> bool:
    """Give items that have a declared name under another key the declared key; returns whether there were any."""
    is_changed = False
    keys: list[Any] = [_key(item, key) for item in found or ()]
    for item in declared or ():
        others = [
            each for each in found or () if each.get("name") == item.get("name") and _key(each, key) != _key(item, key)
        ]
        for other in others if "name" in item else ():
            is_changed = True
            if _key(item, key) in keys:
                found.remove(other)
            else:
                other.update(copy.deepcopy(item))
                keys.append(_key(item, key))
    return is_changed


def _is_namesake(other: Object, item: Object, key: tuple[str, ...]) -> bool:
    return "name" in item and other.get("name") == item["name"] and _key(other, key) != _key(item, key)


def _key(item: Object, key: tuple[str, ...]) -> tuple[Value, ...]:
    return tuple(item.get(name) for name in key)


def _merge_patch(before: Object, after: Object) -> Object:
    patch: Object = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        known = before.get(name)
        if isinstance(value, dict) and isinstance(known, dict) and value != known:
            patch[name] = _merge_patch(known, value)
        elif value != known:
            patch[name] = value
    return patch
