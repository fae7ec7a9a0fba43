"""Field ownership: every kind of path element, every kind of drift, and nothing of what belongs to others."""

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operator_app.api.kinds import Object
from operator_app.ssa.fields import (
    Difference,
    Drift,
    Path,
    differences,
    dotted,
    fields_of,
    foreign_fields,
    owned_values,
    owners_of,
)
from tests.unit.ssa.field_sets import Shape, configuration, element, entry, field_set, stored

TAKEN, OUTDATED, UNWANTED = Drift
Json = Any
PORT_80, PORT_81 = 'k:{"port":80,"protocol":"TCP"}', 'k:{"port":81,"protocol":"TCP"}'


def port(number: int, **rest: Json) -> Json:
    """An item of a list that is keyed by port and protocol."""
    return {"port": number, "protocol": "TCP", **rest}


def owned_port(*fields: str) -> Json:
    """The set of such an item of which we own ``fields``."""
    return {".": {}, "f:port": {}, "f:protocol": {}} | {f"f:{field}": {} for field in fields}


def declared(value: Json) -> Object:
    """An object whose field ``.spec.x`` is ``value``."""
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "namespace": "n"}, "spec": {"x": value}}


def living(value: Json, owned: Json) -> Object:
    """A live object whose field ``.spec.x`` is ``value``; ``owned`` is our field set of ``.spec``."""
    live = declared(value)
    live["metadata"] |= {
        "uid": "u",
        "resourceVersion": "7",
        "managedFields": [entry(live, {"f:spec": owned} if owned else {})],
    }
    return live


def found(desired: Object, live: Object) -> list[tuple[str, Drift, Json, Json]]:
    """The differences, in the server's spelling of paths."""
    return [(str(each), each.drift, each.desired, each.live) for each in differences(desired, live)]


NAMES = [{"name": "a", "v": 1}, {"name": "b", "v": 2}]
OWNED_NAMES: Json = {
    'k:{"name":"a"}': {".": {}, "f:name": {}, "f:v": {}},
    'k:{"name":"b"}': {".": {}, "f:name": {}, "f:v": {}},
}


@pytest.mark.parametrize(
    ("want", "live", "owned", "expected"),
    [
        pytest.param(1, 1, {"f:x": {}}, [], id="scalar holds"),
        pytest.param(2, 1, {"f:x": {}}, [(".spec.x", OUTDATED, 2, 1)], id="scalar wanted differently before"),
        pytest.param(2, None, {"f:x": {}}, [(".spec.x", OUTDATED, 2, None)], id="scalar null"),
        pytest.param(1, 2, {}, [(".spec.x", TAKEN, 1, 2)], id="scalar taken"),
        pytest.param(
            1, 1, {"f:y": {}}, [(".spec.y", UNWANTED, None, None), (".spec.x", TAKEN, 1, 1)], id="one for one"
        ),
        # maps
        pytest.param({"a": 1}, {"a": 1, "b": 2}, {"f:x": {"f:a": {}}}, [], id="map with a foreign field"),
        pytest.param({"a": 1}, {"a": 1, "b": 2}, {"f:x": {".": {}, "f:a": {}}}, [], id="map that is owned as such"),
        pytest.param({"a": 1}, {"a": 9}, {"f:x": {"f:a": {}}}, [(".spec.x.a", OUTDATED, 1, 9)], id="field of a map"),
        pytest.param(
            {"a": 1},
            {"a": 1, "b": 2},
            {"f:x": {"f:a": {}, "f:b": {}}},
            [(".spec.x.b", UNWANTED, None, 2)],
            id="a field more",
        ),
        pytest.param(
            {"a": 1, "b": 2},
            {"a": 1, "b": 9},
            {"f:x": {"f:a": {}}},
            [(".spec.x.b", TAKEN, 2, 9)],
            id="field of a map taken",
        ),
        pytest.param(
            {"a": 1, "b": {"c": 2, "d": 3}},
            {"a": 1, "b": {"c": 9}},
            {"f:x": {"f:a": {}}},
            [(".spec.x.b.c", TAKEN, 2, 9), (".spec.x.b.d", TAKEN, 3, None)],
            id="a map taken, told field by field",
        ),
        pytest.param(
            {"a": 1}, "text", {"f:x": {"f:a": {}}}, [(".spec.x.a", OUTDATED, 1, None)], id="map that is no map"
        ),
        pytest.param(
            {"a": 1}, {"b": 1}, {"f:x": {".": {}}}, [(".spec.x.a", TAKEN, 1, None)], id="map that lost all fields"
        ),
        # an empty set is a whole
        pytest.param({"a": 1}, {"a": 1}, {"f:x": {}}, [], id="atomic map holds"),
        pytest.param(
            {"a": 1},
            {"a": 1, "b": 2},
            {"f:x": {}},
            [(".spec.x", OUTDATED, {"a": 1}, {"a": 1, "b": 2})],
            id="atomic map with more in it",
        ),
        pytest.param(
            [1, 2], [2, 1], {"f:x": {}}, [(".spec.x", OUTDATED, [1, 2], [2, 1])], id="atomic list keeps its order"
        ),
        pytest.param([1], [1, 2], {}, [(".spec.x", TAKEN, [1], [1, 2])], id="atomic list taken"),
        # keyed lists
        pytest.param(NAMES, NAMES[::-1], {"f:x": OWNED_NAMES}, [], id="keyed items in another order"),
        pytest.param(
            NAMES,
            [{"name": "c"}, NAMES[1], {"name": "d"}, NAMES[0], "?"],
            {"f:x": OWNED_NAMES},
            [],
            id="foreign items between",
        ),
        pytest.param(
            [port(80, name="http")],
            [port(80, name="x"), port(81)],
            {"f:x": {PORT_80: owned_port("name")}},
            [('.spec.x[port=80,protocol="TCP"].name', OUTDATED, "http", "x")],
            id="field of an item",
        ),
        pytest.param(
            [port(80, name="http")],
            [port(80, name="x", nodePort=30000)],
            {"f:x": {PORT_80: owned_port()}},
            [('.spec.x[port=80,protocol="TCP"].name', TAKEN, "http", "x")],
            id="field of an item taken",
        ),
        pytest.param(
            [port(80)],
            [port(80), port(81)],
            {"f:x": {PORT_80: owned_port(), PORT_81: owned_port()}},
            [('.spec.x[port=81,protocol="TCP"]', UNWANTED, None, port(81))],
            id="an item more",
        ),
        pytest.param(
            [port(80), port(81)],
            [port(80), {"port": 81, "protocol": "UDP"}],
            {"f:x": {PORT_80: owned_port()}},
            [('.spec.x[port=81,protocol="TCP"]', TAKEN, port(81), None)],
            id="an item taken; every key field counts",
        ),
        pytest.param(
            [port(80)],
            [],
            {"f:x": {PORT_80: owned_port()}},
            [
                ('.spec.x[port=80,protocol="TCP"].port', OUTDATED, 80, None),
                ('.spec.x[port=80,protocol="TCP"].protocol', OUTDATED, "TCP", None),
            ],
            id="an item that we own but that is not there",
        ),
        pytest.param(
            [{"uid": "u", "name": "a"}],
            [{"uid": "u", "name": "b"}],
            {"f:x": {'k:{"uid":"u"}': {}}},
            [('.spec.x[uid="u"]', OUTDATED, {"uid": "u", "name": "a"}, {"uid": "u", "name": "b"})],
            id="an item that is owned as one whole",
        ),
        pytest.param(
            [{"uid": "u"}],
            [{"uid": "u", "other": 1}],
            {"f:x": {'k:{"uid":"u"}': {".": {}, "f:uid": {}}}},
            [],
            id="existence",
        ),
        pytest.param(
            [port(80)],
            [port(80), port(80, name="twice")],
            {"f:x": {PORT_80: owned_port()}},
            [],
            id="a duplicate key: the first item counts",
        ),
        pytest.param(
            [{"name": "c", "ports": [port(80, n=1)]}],
            [{"name": "d"}, {"name": "c", "ports": [port(81), port(80, n=2)]}],
            {"f:x": {'k:{"name":"c"}': {".": {}, "f:name": {}, "f:ports": {PORT_80: owned_port("n")}}}},
            [('.spec.x[name="c"].ports[port=80,protocol="TCP"].n', OUTDATED, 1, 2)],
            id="a keyed list within a keyed list",
        ),
        pytest.param(
            None,
            [port(80)],
            {"f:x": {PORT_80: owned_port()}},
            [('.spec.x[port=80,protocol="TCP"]', UNWANTED, None, port(80))],
            id="a keyed list where none is wanted",
        ),
        pytest.param(
            [port(80)],
            "text",
            {"f:x": {".": {}}},
            [(".spec.x", TAKEN, [port(80)], "text")],
            id="a list that is no list",
        ),
        pytest.param(
            NAMES, [], {"f:x": {".": {}}}, [(".spec.x", TAKEN, NAMES, [])], id="a list that lost all of its items"
        ),
        pytest.param(
            NAMES,
            [{"name": "z"}],
            {"f:x": {".": {}}},
            [(".spec.x", TAKEN, NAMES, [{"name": "z"}])],
            id="a list that has only items of others left",
        ),
        # sets
        pytest.param(
            ["a", "b"], ["c", "b", "a"], {"f:x": {'v:"a"': {}, 'v:"b"': {}}}, [], id="members in another order"
        ),
        pytest.param(
            ["a"], ["a", "b"], {"f:x": {'v:"a"': {}, 'v:"b"': {}}}, [('.spec.x[="b"]', UNWANTED, None, "b")], id="+1"
        ),
        pytest.param(
            ["a", "b"], ["a"], {"f:x": {'v:"a"': {}}}, [('.spec.x[="b"]', TAKEN, "b", None)], id="member taken"
        ),
        pytest.param(
            ["a", "b"], ["a", "b"], {"f:x": {'v:"a"': {}}}, [('.spec.x[="b"]', TAKEN, "b", "b")], id="not ours"
        ),
        pytest.param([1, 2], [1, 2], {"f:x": {"v:1": {}, "v:2": {}}}, [], id="a set of numbers"),
        pytest.param(
            ["<é&>"], ["<é&>"], {"f:x": {'v:"\\u003cé\\u0026\\u003e"': {}}}, [], id="Go's spelling of a member"
        ),
        pytest.param(
            ["a"], None, {"f:x": {".": {}}}, [(".spec.x", TAKEN, ["a"], None)], id="a set that lost all members"
        ),
        pytest.param(
            None, ["a"], {"f:x": {'v:"a"': {}}}, [('.spec.x[="a"]', UNWANTED, None, "a")], id="no set is wanted"
        ),
    ],
)
def test_differences(want: Json, live: Json, owned: Json, expected: list[tuple[str, Drift, Json, Json]]) -> None:
    """Given what we want, what is there and what of it is ours: this has to be written, and nothing else."""
    assert found(declared(want), living(live, owned)) == expected


# --- which entry is ours -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strange",
    [
        {"manager": "kubectl"},
        {"operation": "Update"},
        {"subresource": "status"},
        {"subresource": "scale"},
        {"apiVersion": "v2"},
        {"fieldsV1": None},
        {"fieldsV1": {}},
    ],
    ids=str,
)
def test_only_our_own_apply_of_this_version_counts(strange: Json) -> None:
    """An entry of another manager, operation, subresource or apiVersion gives us nothing, so all is to be written."""
    live = living(1, {"f:x": {}})
    live["metadata"]["managedFields"][0] |= strange
    assert fields_of(live) == {}
    assert found(declared(1), live) == [(".spec.x", TAKEN, 1, 1)]


def test_our_entry_is_found_among_others() -> None:
    """The order of the entries means nothing."""
    live = living(1, {"f:x": {}})
    others = [entry(live, {"f:spec": {"f:y": {}}}, manager=name, operation="Update") for name in ("a", "operator-app")]
    live["metadata"]["managedFields"] = [others[0], *live["metadata"]["managedFields"], others[1]]
    assert fields_of(live) == {"f:spec": {"f:x": {}}}
    assert differences(declared(1), live) == ()


def test_an_object_without_managed_fields_owes_us_everything() -> None:
    """Where nothing is recorded every field is missing, named one by one, whatever its value is."""
    live = declared(1)
    live["metadata"]["labels"] = {"a": "b"}
    desired = deepcopy(live)
    desired["metadata"]["annotations"] = {"c": "d"}
    assert found(desired, live) == [
        (".metadata.labels.a", TAKEN, "b", "b"),
        (".metadata.annotations", TAKEN, {"c": "d"}, None),
        (".spec.x", TAKEN, 1, 1),
    ]


def test_a_subresource_has_an_entry_of_its_own() -> None:
    """The status is compared with what we applied through the status subresource."""
    live = declared(1) | {"status": {"a": 1, "b": 2}}
    live["metadata"]["managedFields"] = [
        entry(live, {"f:spec": {"f:x": {}}}),
        entry(live, {"f:status": {"f:a": {}}}, subresource="status"),
    ]
    desired = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "status": {"a": 3}}
    (difference,) = differences(desired, live, subresource="status")
    assert difference == Difference(("f:status", "f:a"), OUTDATED, 3, 1)


def test_what_is_never_recorded_is_never_compared() -> None:
    """apiVersion, kind, name, namespace, uid and resourceVersion are identity, not configuration."""
    desired, live = declared(1), living(1, {"f:x": {}})
    desired["metadata"] |= {"uid": "other", "resourceVersion": "1"}
    assert differences(desired, live) == ()


# --- who else ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "owners"),
    [
        (("f:spec", "f:replicas"), ("scaler",)),
        (("f:spec", "f:selector", "f:app"), ("editor", "scaler")),
        (("f:spec", "f:ports", PORT_80, "f:name"), ("editor",)),
        (("f:spec", "f:ports"), ("editor",)),
        (("f:spec", "f:ports", PORT_81), ()),
        (("f:metadata",), ()),
        (("f:spec", "f:x"), ()),
    ],
    ids=lambda each: dotted(each) if each and each[0].startswith("f:") else None,
)
def test_owners(path: Path, owners: tuple[str, ...]) -> None:
    """Managers whose sets contain the path or an atomic whole around it, each once; our own apply is not among them."""
    live = living(1, {"f:x": {}, "f:replicas": {}})
    spec = {"f:selector": {}, "f:ports": {PORT_80: owned_port("name")}}
    live["metadata"]["managedFields"] += [
        entry(live, {"f:spec": spec}, manager="editor", operation="Update"),
        entry(live, {"f:spec": spec}, manager="editor"),
        entry(live, {"f:spec": {"f:replicas": {}, "f:selector": {"f:app": {}}}}, manager="scaler", operation="Update"),
        {"manager": "empty", "operation": "Update"},
    ]
    assert owners_of(path, live) == owners


def test_our_manager_is_another_writer_when_it_updates() -> None:
    """An Update under our name (``kubectl edit --field-manager``) is not our apply."""
    live = living(1, {})
    live["metadata"]["managedFields"].append(entry(live, {"f:spec": {"f:x": {}}}, operation="Update"))
    assert owners_of(("f:spec", "f:x"), live) == ("operator-app",)


def test_no_managed_fields_no_owners() -> None:
    """An object whose managedFields were cut off has no known owners."""
    assert owners_of(("f:spec",), declared(1)) == ()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), ""),
        (("f:spec", "f:replicas"), ".spec.replicas"),
        (("f:metadata", "f:labels", "f:app.kubernetes.io/name"), ".metadata.labels.app.kubernetes.io/name"),
        (("f:spec", "f:ports", PORT_80, "f:targetPort"), '.spec.ports[port=80,protocol="TCP"].targetPort'),
        (("f:metadata", "f:finalizers", 'v:"a/b"'), '.metadata.finalizers[="a/b"]'),
    ],
)
def test_paths_are_printed_as_the_server_prints_them(path: Path, text: str) -> None:
    """As in the ``field`` of a conflict's cause."""
    assert dotted(path) == text
    assert str(Difference(path, TAKEN, 1, 2)) == text


# --- properties ----------------------------------------------------------------------------------------------------
# A field's first letter is its schema: m a map, a atomic, k a list keyed by id, s a set, x a scalar.

SCALARS = st.one_of(st.integers(1, 9), st.sampled_from(["a", "b", "é<"]), st.booleans())


def shape(name: str, _value: Json) -> Shape:
    """The schema of the random configurations; metadata, spec and labels are maps."""
    shapes: dict[str, Shape] = {"a": "atomic", "k": ("id",), "s": "set", "x": "atomic"}
    return shapes.get(name[:1], "map") if name != "spec" else "map"


def fields(depth: int) -> st.SearchStrategy[Json]:
    """A map of random fields, never empty."""
    inner = fields(depth - 1) if depth else st.fixed_dictionaries({"x": SCALARS})
    items = st.lists(inner, min_size=1, max_size=3).map(lambda each: [{"id": n} | item for n, item in enumerate(each)])
    members = st.lists(st.sampled_from("abcdé"), min_size=1, max_size=3, unique=True)
    optional = {
        "x1": SCALARS,
        "a1": st.one_of(st.lists(SCALARS, min_size=1, max_size=2), st.fixed_dictionaries({"q": SCALARS})),
        "m1": inner,
        "m2": inner,
        "k1": items,
        "s1": members,
    }
    return st.fixed_dictionaries({"x": SCALARS}, optional=optional)


@st.composite
def declarations(draw: st.DrawFn) -> Object:
    """A random declaration."""
    obj = declared(None)
    obj["metadata"]["labels"] = {"app": "a"}
    obj["spec"] = draw(fields(2))
    return obj


def applied(desired: Object) -> Object:
    """What the server stores of a declaration that is all there is."""
    live = stored(desired)
    live["metadata"]["managedFields"] = [entry(live, field_set(configuration(desired), shape=shape))]
    return live


def with_strangers(live: Object, chance: random.Random) -> None:
    """Let others add fields to maps, items to lists and members to sets of ``live``, and reorder both."""

    def live_among(value: Json, name: str) -> None:
        if isinstance(value, dict) and shape(name, value) == "map":
            for inner, each in value.items():
                live_among(each, inner)
            if name not in ("managedFields", ""):
                value |= {"x9": 9, "m9": {"x": 9}}
        elif isinstance(value, list) and name.startswith("k"):
            for item in value:
                live_among(item, "m")
            value += [{"id": 100, "x": 9}, {"id": 101}]
            chance.shuffle(value)
        elif isinstance(value, list) and name.startswith("s"):
            value += ["stranger"]
            chance.shuffle(value)

    live_among(live["spec"], "spec")
    live["metadata"]["labels"]["stranger"] = "x"
    live["metadata"]["managedFields"].insert(0, entry(live, {"f:spec": {"f:x9": {}}}, manager="z", operation="Update"))
    live["status"] = {"x": 1}


def leaves(value: Json, owned: Json, path: Path = ()) -> Iterator[tuple[Path, Json, str]]:
    """Every owned scalar and atomic whole of ``value``: its path, and where it stands under which name."""
    for part, inner in owned.items():
        if part == "." or part.startswith("v:") or part == "f:id":
            continue
        if part.startswith("k:"):
            held = next(item for item in value if element("k", {"id": item["id"]}) == part)
        elif inner:
            held = value[part[2:]]
        else:
            yield (*path, part), value, part[2:]
            continue
        yield from leaves(held, inner, (*path, part))


def disown(owned: Json, path: Path) -> None:
    """Take ``path`` from a set as the server does: a field that holds no more of ours goes with it."""
    first, *rest = path
    if rest:
        disown(owned[first], tuple(rest))
    if not rest or not owned[first]:
        del owned[first]


RELAXED = settings(deadline=None)


@RELAXED
@given(declarations(), st.randoms(use_true_random=False))
def test_what_was_applied_holds_among_any_foreign_fields(desired: Object, chance: random.Random) -> None:
    """After an apply there is no difference, whatever others add and in whatever order lists are stored."""
    live = applied(desired)
    with_strangers(live, chance)
    assert differences(desired, live) == ()
    chance.shuffle(live["metadata"]["managedFields"])
    assert differences(deepcopy(desired), live) == ()


@RELAXED
@given(declarations(), st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_one_changed_leaf_is_one_difference(
    desired: Object, chance: random.Random, is_removed: bool, is_recorded: bool  # noqa: FBT001
) -> None:  # fmt: skip
    """One owned field altered or removed, recorded by the server as taken or not, is reported under its path alone."""
    live = applied(desired)
    with_strangers(live, chance)
    owned = live["metadata"]["managedFields"][1]["fieldsV1"]
    path, container, name = chance.choice(list(leaves(live, owned)))
    was = container[name]
    if is_removed:
        del container[name]
    else:
        container[name] = ["altered"]
    if is_recorded:
        disown(owned, path)
    (difference,) = differences(desired, live)
    assert difference == Difference(path, TAKEN if is_recorded else OUTDATED, was, container.get(name))


@RELAXED
@given(declarations(), st.randoms(use_true_random=False))
def test_one_leaf_wanted_otherwise_is_one_difference(desired: Object, chance: random.Random) -> None:
    """An edit of the declaration is reported at the edited field, and only there."""
    live = applied(desired)
    with_strangers(live, chance)
    owned = live["metadata"]["managedFields"][1]["fieldsV1"]
    path, container, name = chance.choice(list(leaves(desired, owned)))
    was, container[name] = container[name], ["edited"]
    assert differences(desired, live) == (Difference(path, OUTDATED, ["edited"], was),)


@RELAXED
@given(declarations(), declarations(), st.randoms(use_true_random=False))
def test_differences_are_empty_exactly_when_an_apply_would_change_nothing(
    old: Object, new: Object, chance: random.Random
) -> None:
    """Of two declarations the second is held by what the first left exactly when both say the same.

    The order of keyed items and of set members says nothing.
    """
    live = applied(old)
    with_strangers(live, chance)
    assert (differences(new, live) == ()) == (without_order(new) == without_order(old))


def without_order(value: Json, name: str = "spec") -> Json:
    """``value`` with its keyed lists and sets in one order."""
    if isinstance(value, dict):
        return {inner: without_order(each, inner) for inner, each in value.items()}
    if isinstance(value, list) and name[0] in "ks":
        return sorted((without_order(each, "m") for each in value), key=repr)
    return value


ANYTHING = st.recursive(
    st.none() | SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["x", "x1", "a1", "m1", "m2", "k1", "s1", "id", "q"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@RELAXED
@given(declarations(), ANYTHING)
def test_no_live_value_can_break_the_comparison(desired: Object, live_spec: Json) -> None:
    """Whatever stands where we have fields, the answer is differences and never an exception."""
    live = applied(desired)
    live["spec"] = live_spec
    for difference in differences(desired, live):
        assert dotted(difference.path).startswith(".spec")


def test_every_leaf_that_we_own_is_read_with_its_live_value() -> None:
    """Through maps, items of keyed lists and members of sets; what is gone is None, and what others own is left out."""
    desired: Object = {
        "apiVersion": "v1",
        "kind": "Any",
        "metadata": {"name": "x", "namespace": "y", "finalizers": ["a/b"]},
        "spec": {"ports": [{"port": 80, "protocol": "TCP", "name": "http"}], "replicas": 2, "selector": {"app": "x"}},
    }
    live = stored(desired)
    live["spec"]["ports"].insert(0, {"port": 81, "protocol": "TCP", "name": "theirs"})
    live["spec"] |= {"replicas": 3, "theirs": True}
    del live["spec"]["selector"]
    key = 'k:{"port":80,"protocol":"TCP"}'
    assert dict(owned_values(live)) == {
        ("f:metadata", "f:finalizers", 'v:"a/b"'): "a/b",
        ("f:spec", "f:ports", key, "f:port"): 80,
        ("f:spec", "f:ports", key, "f:protocol"): "TCP",
        ("f:spec", "f:ports", key, "f:name"): "http",
        ("f:spec", "f:replicas"): 3,
        ("f:spec", "f:selector"): None,
    }


def test_foreign_fields_are_told_with_their_manager_at_their_outermost_place() -> None:
    """Not what is ours as well, not what our updates or a subresource own, and at most as many as asked for."""
    live = living({"a": 1, "b": {"c": 1, "d": 1}}, {"f:x": {"f:a": {}, "f:b": {"f:c": {}}}})
    live["metadata"]["managedFields"] += [
        entry(live, {"f:spec": {"f:x": {"f:a": {}, "f:b": {".": {}, "f:c": {}, "f:d": {}}}}}, manager="helm"),
        entry(live, {"f:spec": {"f:y": {"f:z": {}}}}, manager="", operation="Update"),
        entry(live, {"f:spec": {"f:mine": {}}}, operation="Update"),
        entry(live, {"f:spec": {"f:counted": {}}}, manager="controller", subresource="status"),
    ]
    assert foreign_fields(live, ("f:spec",)) == (".spec.x.b.d by helm", ".spec.y by an unnamed manager")
    assert foreign_fields(live, ("f:spec", "f:x")) == (".spec.x.b.d by helm",)
    assert foreign_fields(live, ("f:spec",), most=1) == (".spec.x.b.d by helm",)
    assert foreign_fields(live, ("f:status",)) == ()
