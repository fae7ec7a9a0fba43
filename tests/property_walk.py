"""Edits that exercise every property of the EnvoyProxy's spec, derived from the CRD's schema. Pure.

Each property has one *trail*: a sequence of specs that set the property to several values, remove it if it is optional,
and restore the first spec. Values come from the schema (bounds, sizes, enums). The tables below supply values of free
text, and changes of other fields that a rule requires at the same time.

:func:`unexercised` compares a set of trails with the schema alone, so that it reports a property that is new in the
schema and missing in the tables.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from operator_app.api.kinds import Object, Value
from tests.api_cases import BOUNDS, CASES

PropertyPath = tuple[str, ...]
"""Names of properties from the spec down; ``*`` is any item of a list, or any value of a map with free keys."""

ABSENT: Final = object()
ITEM: Final = "*"


@dataclass(frozen=True, slots=True)
class Property:
    """One property of the schema; ``is_required`` if the object that contains it is invalid without it."""

    path: PropertyPath
    schema: Object
    is_required: bool

    def __str__(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Step:
    """One edit of a trail: a description of it, and the whole spec after it."""

    what: str
    spec: Object


def properties(schema: Object, path: PropertyPath = ()) -> Iterator[Property]:
    """Every property below ``schema``, parents first."""
    for name, inner in schema.get("properties", {}).items():
        here = (*path, name)
        yield Property(here, inner, is_required=name in schema.get("required", ()))
        yield from properties(inner, here)
        if "items" in inner:
            yield from properties(inner["items"], (*here, ITEM))


def trail(prop: Property, base: Object) -> tuple[Step, ...]:
    """The edits that exercise ``prop``, from ``base`` back to ``base``.

    Raises ``LookupError`` if ``prop`` is free text without values in a table, or if ``base`` lacks its parent.
    """
    steps = [Step(f"{prop} = {_short(value)}", _with(base, prop.path, value)) for value in _values(prop, base)]
    if not prop.is_required:
        steps.append(Step(f"{prop} unset", _with(base, prop.path, ABSENT)))
    return (*steps, Step("changed back", deepcopy(base)))


def unexercised(schema: Object, specs: list[Object]) -> list[str]:
    """The values, absences, bounds, sizes and enum members of each property that none of ``specs`` contains."""
    return [f"{prop}: {what}" for prop in properties(schema) for what in _untried(prop, specs)]


def _untried(prop: Property, specs: list[Object]) -> Iterator[str]:
    found = [value for spec in specs for value in _found(spec, prop.path)]
    values = [each for each in found if each is not ABSENT]
    schema = prop.schema
    choices = schema.get("enum") or ([False, True] if schema.get("type") == "boolean" else [])
    if not any(values[0] != each for each in values[1:]):
        yield "not two values"
    if not prop.is_required and ABSENT not in found:
        yield "never absent"
    yield from (f"never {choice}" for choice in choices if choice not in values)
    yield from (
        f"never {schema[bound]}" for bound in ("minimum", "maximum") if bound in schema and schema[bound] not in values
    )
    for least, most in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
        sizes = {len(each) for each in values if hasattr(each, "__len__")}
        # The shortest text of most properties is one character, and no rule depends on the minimum of the others.
        bounds = (most,) if least == "minLength" else (least, most)
        yield from (f"never of size {schema[bound]}" for bound in bounds if schema.get(bound) not in {None, *sizes})


def _found(holder: Value, path: PropertyPath) -> Iterator[Value]:
    """Every value at ``path``, and ``ABSENT`` for each object without one."""
    if not path:
        yield holder
    elif path[0] == ITEM:
        for item in holder:
            yield from _found(item, path[1:])
    elif path[0] in holder:
        yield from _found(holder[path[0]], path[1:])
    elif len(path) == 1:
        yield ABSENT


def _with(base: Object, path: PropertyPath, value: Value) -> Object:
    """``base`` with ``value`` at the first match of ``path``, and with the changes that ``MOVES`` requires."""
    spec = deepcopy(base)
    holder: Any = spec
    for name in path[:-1]:
        holder = holder[0] if name == ITEM else holder[name]
    if value is ABSENT:
        holder.pop(path[-1], None)
    else:
        holder[path[-1]] = deepcopy(value)
    move_along = MOVES.get(path)
    if move_along is not None:
        move_along(spec, holder)
    return spec


def _values(prop: Property, base: Object) -> Iterator[Value]:
    schema = prop.schema
    match schema:
        case {"enum": choices}:
            yield from choices
        case {"type": "boolean"}:
            yield from (True, False)
        case {"type": "integer"}:
            yield schema["minimum"]
            yield schema["minimum"] + 1
            yield schema["maximum"]
        case {"type": "object", "properties": _}:
            (current,) = [each for each in _found(base, prop.path) if each is not ABSENT][:1]
            yield from OBJECTS.get(prop.path, (current,))
        case {"type": "array", "maxItems": most}:
            yield from (COLLECTIONS[prop.path](size) for size in (schema.get("minItems", 0), 2, most))
        case {"type": "object", "maxProperties": most}:
            yield from (COLLECTIONS[prop.path](size) for size in (1, min(2, most), most))
        case _:
            known = (*_accepted(prop.path), *TEXTS.get(prop.path, ()))
            if not known:
                raise LookupError(f"no table has values of {prop}")
            yield from known


def _accepted(path: PropertyPath) -> Iterator[Value]:
    """The accepted values of ``api_cases`` at a path."""
    for at, values in (*((case.at, [case.accepted]) for case in CASES), *((at, good) for at, good, _ in BOUNDS)):
        # Values of another item than the first may be equal to the first item's key.
        is_first = all(each == 0 for each in at if isinstance(each, int))
        if is_first and at[0] == "spec" and tuple(ITEM if each == 0 else each for each in at[1:]) == path:
            yield from values


def _short(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


# --- tables of what the schema does not define -------------------------------------------------------------------

_LISTENER: Final[PropertyPath] = ("listeners", ITEM)
_ROUTE: Final[PropertyPath] = (*_LISTENER, "routes", ITEM)
_BACKEND: Final[PropertyPath] = ("backends", ITEM)


def _dns_name(length: int) -> str:
    """A DNS name of exactly ``length`` characters, at least 65, in labels of up to 63."""
    labels = "".join(f"{'a' * 63}." for _ in range(length // 64))
    rest = length - len(labels)
    return labels + "b" * rest if rest else labels[:-3] + ".b"


TEXTS: Final[Mapping[PropertyPath, tuple[Value, ...]]] = {
    ("image",): ("envoyproxy/envoy:v1.39.0", f"registry.example/{'a' * (512 - 17)}"),
    (*_LISTENER, "name"): ("web",),
    (*_ROUTE, "backend"): ("b" * 63,),
    (*_ROUTE, "match", "pathPrefix"): ("/", "/api/v2"),
    (*_ROUTE, "match", "pathExact"): ("/", "/api/v2", "/" + "a" * 1023),
    (*_BACKEND, "name"): ("other", "b" * 63),
    (*_BACKEND, "endpoints", ITEM, "host"): ("app.team-a.svc", _dns_name(253)),
    (*_BACKEND, "connectTimeout"): ("1ms", "59999ms", "60000ms"[:7]),
    ("registration", "hostname"): ("other.example.com", _dns_name(253)),
}
"""Texts in addition to those of ``api_cases``: an ordinary one and the longest one."""


def _listeners(size: int) -> list[Object]:
    return [{"name": f"l{n}", "port": 8000 + n, "routes": [{"backend": "app"}]} for n in range(size)]


def _routes(size: int) -> list[Object]:
    return [{"match": {"pathPrefix": f"/p{n}"}, "backend": "app"} for n in range(size)]


def _backends(size: int) -> list[Object]:
    return [{"name": f"b{n}", "endpoints": [{"host": f"10.0.0.{n + 1}", "port": 80}]} for n in range(size)]


def _endpoints(size: int) -> list[Object]:
    return [{"host": f"10.0.1.{n + 1}", "port": 8080} for n in range(size)]


def _amounts(size: int) -> dict[str, str]:
    # The rules allow three resources, so the schema's bound of eight can't be reached.
    return dict(list({"cpu": "1500m", "memory": "1Gi", "ephemeral-storage": "1e9"}.items())[:size])


COLLECTIONS: Final[Mapping[PropertyPath, Callable[[int], Value]]] = {
    ("listeners",): _listeners,
    (*_LISTENER, "routes"): _routes,
    (*_ROUTE, "match", "hosts"): lambda size: [f"h{n}.example.com" for n in range(size)],
    ("backends",): _backends,
    (*_BACKEND, "endpoints"): _endpoints,
    ("service", "annotations"): lambda size: {f"example.com/a{n}": str(n) for n in range(size)},
    ("resources", "requests"): _amounts,
    ("resources", "limits"): _amounts,
}
"""For every list and every map, a function that makes one of a given size."""

OBJECTS: Final[Mapping[PropertyPath, tuple[Object, ...]]] = {
    (*_ROUTE, "match"): ({}, {"hosts": ["*.example.com"], "pathExact": "/only"}),
    ("service",): ({"type": "NodePort"}, {"type": "ClusterIP", "annotations": {"example.com/a": "1"}}),
    ("resources",): ({"limits": {"cpu": "3"}}, {"requests": {"memory": "64Mi"}}, {}),
    ("registration",): ({}, {"hostname": "a.example.com"}),
}
"""Values of objects that are replaced as a whole."""


def _without_match(_spec: Object, listener: Object) -> None:
    if listener.get("protocol") == "TCP":
        listener["routes"] = [{"backend": listener["routes"][0]["backend"]}]


def _without_prefix(_spec: Object, match: Object) -> None:
    if "pathExact" in match:
        match.pop("pathPrefix", None)


def _declared(spec: Object, _holder: Object) -> None:
    """Replace the backend of each route whose backend is not declared by the first declared one."""
    names = [each["name"] for each in spec["backends"]]
    for route in (route for listener in spec["listeners"] for route in listener["routes"]):
        if route["backend"] not in names:
            route["backend"] = names[0]


def _added(spec: Object, route: Object) -> None:
    if all(each["name"] != route["backend"] for each in spec["backends"]):
        spec["backends"].append({"name": route["backend"], "endpoints": [{"host": "b.example.com", "port": 80}]})


def _below_the_limit(spec: Object, _holder: Object) -> None:
    spec["resources"].pop("limits")


def _above_the_request(spec: Object, _holder: Object) -> None:
    spec["resources"].pop("requests")


def _alone(_spec: Object, registration: Object) -> None:
    """Remove ``ttl`` and ``registry`` if there is no hostname, which they require."""
    if "hostname" not in registration:
        registration.clear()


MOVES: Final[Mapping[PropertyPath, Callable[[Object, Object], None]]] = {
    (*_LISTENER, "protocol"): _without_match,
    (*_ROUTE, "match", "pathExact"): _without_prefix,
    (*_ROUTE, "backend"): _added,
    (*_BACKEND, "name"): _declared,
    ("backends",): _declared,
    ("resources", "requests"): _below_the_limit,
    ("resources", "limits"): _above_the_request,
    ("registration", "hostname"): _alone,
}
"""Further changes that keep the spec valid when a property changes; called with the spec and the property's parent."""

UNREACHABLE: Final = frozenset({"resources.requests: never of size 8", "resources.limits: never of size 8"})
"""Bounds of the schema that a rule makes unreachable; the reason is at ``_amounts``."""
