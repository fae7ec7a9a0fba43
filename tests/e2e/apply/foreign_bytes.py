"""What a child holds beside what the operator declares, as a flat map from path to value. Pure.

*Foreign bytes* are everything in a live child that the declaration does not contain: fields, annotations, list items.
They are found by comparing the two objects; who owns what plays no part. Items of keyed lists are addressed by their
key, so neither order nor neighbours change a path.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from operator_app.api.kinds import Object, Value
from tests.e2e.proxies import content_of

Bytes = Mapping[str, Value]

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "ownerReferences": ("uid",),
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""Keyed lists by the name of their field; ``ports`` has another key in a Service than in a container."""

_SETS: Final = frozenset({"finalizers", "loadBalancerSourceRanges"})


def foreign_bytes(live: Object, declared: Object) -> Bytes:
    """Every leaf of ``live`` that ``declared`` does not contain, by its path."""
    return dict(_foreign("", content_of(live), content_of(declared)))


def declared_leaves(declared: Object) -> dict[str, Value]:
    """Every leaf that an object declares, by its path; its type and its identity are left out."""
    identity = (".apiVersion", ".kind", ".metadata.name", ".metadata.namespace", ".metadata.ownerReferences")
    return {path: value for path, value in _leaves("", declared) if not path.startswith(identity)}


def declared_parts(declared: Object) -> tuple[str, ...]:
    """The paths of all fields below the spec that are maps, or stand directly in the spec of an object or its Pods."""
    return tuple(
        path
        for path, _, value in _pointers("", "", declared)
        if path.startswith(".spec.")
        and not path.endswith("]")
        and (isinstance(value, dict) or path.rpartition(".")[0] in (".spec", ".spec.template.spec"))
    )


def pointer(obj: Object, path: str) -> str | None:
    """The JSON pointer (RFC 6901) of a path in ``obj``; ``None`` where it is not there."""
    return next((found for spelled, found, _ in _pointers("", "", obj) if spelled == path), None)


def value_at(obj: Object, path: str) -> Value:
    """The leaf at a path that is there."""
    return dict(_leaves("", obj))[path]


def _foreign(path: str, live: Value, declared: Value) -> Iterator[tuple[str, Value]]:
    if isinstance(live, dict) and isinstance(declared, dict):
        for name, value in live.items():
            if name in declared:
                yield from _foreign(f"{path}.{name}", value, declared[name])
            else:
                yield from _leaves(f"{path}.{name}", value)
    elif isinstance(live, list) and isinstance(declared, list):
        ours = dict(_items(path, declared))
        for spelled, item in _items(path, live):
            if spelled in ours:
                yield from _foreign(spelled, item, ours[spelled])
            elif _is_keyed(path, live):
                yield from _leaves(spelled, item)


def _leaves(path: str, value: Value) -> Iterator[tuple[str, Value]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    elif isinstance(value, list) and value and _is_keyed(path, value):
        for spelled, item in _items(path, value):
            yield from _leaves(spelled, item)
    else:
        yield path, value


def _pointers(path: str, found: str, value: Value) -> Iterator[tuple[str, str, Value]]:
    yield path, found, value
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _pointers(f"{path}.{name}", f"{found}/{name.replace('~', '~0').replace('/', '~1')}", inner)
    elif isinstance(value, list) and _is_keyed(path, value):
        for index, (spelled, item) in enumerate(_items(path, value)):
            yield from _pointers(spelled, f"{found}/{index}", item)


def _items(path: str, items: list[Any]) -> list[tuple[str, Value]]:
    """The items of a list with the paths by which they are addressed; of an atomic list there is nothing to address."""
    name = path.rpartition(".")[2]
    if name in _SETS:
        return [(f"{path}[{item}]", item) for item in items]
    key = _key_of(path)
    return [(f"{path}[{','.join(str(item.get(each)) for each in key)}]", item) for item in items] if key else []


def _is_keyed(path: str, items: list[Any]) -> bool:
    return path.rpartition(".")[2] in _SETS or (bool(_key_of(path)) and all(isinstance(each, dict) for each in items))


def _key_of(path: str) -> tuple[str, ...]:
    if path == ".spec.ports":
        return ("port", "protocol")
    name = path.rpartition(".")[2]
    return ("containerPort", "protocol") if name == "ports" else _KEYS.get(name, ())
