"""What the API server records when a configuration is applied: a model for tests, independent of ``ownership.py``.

It knows just enough of the schema: which lists are keyed by what, which are sets, and which values are atomic. All
else is a map of fields, or a scalar.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final, Literal

from operator_app.api.kinds import FIELD_MANAGER, Object

Shape = tuple[str, ...] | Literal["map", "set", "atomic"]
"""The names of a list's key fields, or what else the value of a field is; scalars are whatever."""

KEYS: Final[dict[str, Shape]] = {
    "ownerReferences": ("uid",),
    "containers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "conditions": ("type",),
    "finalizers": "set",
    # Both selectors, and a reference to a field of the Pod, are atomic in the core API.
    "selector": "atomic",
    "fieldRef": "atomic",
}
ATOMIC_ITEMS: Final = ("ownerReferences",)


def kubernetes(name: str, value: Any) -> Shape:  # noqa: ANN401
    """The shape of a field of the objects that the operator applies."""
    if name == "ports" and isinstance(value, list) and value and "protocol" in value[0]:
        return ("containerPort", "protocol") if "containerPort" in value[0] else ("port", "protocol")
    return KEYS.get(name, "map" if isinstance(value, dict) else "atomic")


def field_set(
    value: Any,  # noqa: ANN401
    name: str = "",
    *,
    shape: Callable[[str, Any], Shape] = kubernetes,
) -> dict[str, Any]:
    """The ``fieldsV1`` set of ``value``, which stands under ``name``; empty for a leaf."""
    match shape(name, value):
        case "map" if isinstance(value, dict):
            return {f"f:{inner}": field_set(each, inner, shape=shape) for inner, each in value.items()}
        case "set" if isinstance(value, list):
            return {element("v", each): {} for each in value}
        case tuple(keys) if isinstance(value, list):
            return {
                element("k", {key: item[key] for key in sorted(keys)}): {}
                if name in ATOMIC_ITEMS
                else {".": {}} | {f"f:{inner}": field_set(each, inner, shape=shape) for inner, each in item.items()}
                for item in value
            }
        case _:
            return {}


def element(prefix: str, value: Any) -> str:  # noqa: ANN401
    """A path element: ``k:{"uid":"u-1"}``, ``v:"a"``."""
    return f"{prefix}:{json.dumps(value, separators=(',', ':'), ensure_ascii=False)}"


def entry(
    obj: Object,
    fields: dict[str, Any],
    *,
    manager: str = FIELD_MANAGER,
    operation: str = "Apply",
    subresource: str = "",
) -> Object:
    """One entry of ``managedFields``."""
    made = {
        "manager": manager,
        "operation": operation,
        "apiVersion": obj["apiVersion"],
        "time": "2026-07-01T00:00:00Z",
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
    }
    return made | ({"subresource": subresource} if subresource else {})


def configuration(obj: Object) -> Object:
    """What of an applied object is recorded: neither its type nor its identity."""
    metadata = {
        name: value
        for name, value in obj["metadata"].items()
        if name not in ("name", "namespace", "uid", "resourceVersion")
    }
    rest = {name: value for name, value in obj.items() if name not in ("apiVersion", "kind", "metadata")}
    return ({"metadata": metadata} if metadata else {}) | rest


def stored(desired: Object, *, version: int = 1, uid: str = "child-uid", **metadata: Any) -> Object:
    """``desired`` as the server keeps it after our apply on a free name."""
    live = deepcopy(desired)
    live["metadata"] |= {
        "uid": uid,
        "resourceVersion": str(version),
        "generation": 1,
        "creationTimestamp": "2026-07-01T00:00:00Z",
        "managedFields": [entry(desired, field_set(configuration(desired)))],
    }
    live["metadata"] |= metadata
    return live


def an_object(spec: Object, *entries: Object) -> Object:
    """An object with that spec and these managedFields."""
    return {"apiVersion": "v1", "kind": "Any", "metadata": {"name": "x", "managedFields": list(entries)}, "spec": spec}


def owner(manager: str, operation: str, *path: str, subresource: str = "") -> Object:
    """A managedFields entry that owns one path."""
    fields: Object = {}
    for element in reversed(path):
        fields = {element: fields}
    entry = {"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": fields}
    return entry | ({"subresource": subresource} if subresource else {})
