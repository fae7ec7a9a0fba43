"""Why a field is written: who took it, when, from what to what; and what of it may be shown."""

import hashlib
import json
from typing import Final

import pytest

from operator_app.api.kinds import Object, Value
from operator_app.ssa.changes import MASKED, SHOWN_CHARACTERS, FieldChange, field_changes, shown
from operator_app.ssa.fields import Drift, Path, differences
from tests.unit.ssa.field_sets import entry, stored

ENV: Final[Path] = (
    "f:spec",
    "f:template",
    "f:spec",
    "f:containers",
    'k:{"name":"envoy"}',
    "f:env",
)
TOKEN: Final[Path] = (*ENV, 'k:{"name":"TOKEN"}')
SECRET_VALUE: Final = "hunter2"

DESIRED: Final[Object] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web-envoy", "namespace": "team-a", "labels": {"a": "1", "b": "2"}},
    "spec": {"replicas": 2},
}


def taken(live: Object, manager: str, at: str, value: int = 5, **options: str) -> Object:
    """``live`` after ``manager`` took ``replicas``."""
    ours, *others = live["metadata"]["managedFields"]
    ours = ours | {"fieldsV1": {name: fields for name, fields in ours["fieldsV1"].items() if name != "f:spec"}}
    theirs = entry(live, {"f:spec": {"f:replicas": {}}}, manager=manager, operation="Update", **options) | {"time": at}
    return live | {
        "spec": {"replicas": value},
        "metadata": live["metadata"] | {"managedFields": [ours, *others, theirs]},
    }


def why(live: Object, desired: Object = DESIRED) -> tuple[FieldChange, ...]:
    """The changes for bringing ``live`` to ``desired``."""
    return field_changes(differences(desired, live), live)


def test_a_taken_field_names_who_when_from_and_to() -> None:
    """A drift tells its author and its moment, as the API server recorded them, and both values."""
    (reason,) = why(taken(stored(DESIRED), "kubectl-edit", "2026-07-02T10:00:00Z"))
    assert reason == FieldChange(".spec.replicas", Drift.NOT_OWNED, ("kubectl-edit",), "2026-07-02T10:00:00Z", 5, 2)
    assert str(reason) == ".spec.replicas taken by kubectl-edit at 2026-07-02T10:00:00Z: 5 -> 2"


def test_a_field_that_was_not_taken_names_nobody() -> None:
    """A co-owner of a field that is ours has taken nothing, and an edit of the declaration is no rival's doing."""
    live = stored(DESIRED | {"spec": {"replicas": 5}})
    live["metadata"]["managedFields"].append(entry(live, {"f:spec": {"f:replicas": {}}}, manager="helm"))
    (reason,) = why(live)
    assert (reason.drift, reason.managers, reason.taken_at) == (Drift.DIFFERS, (), None)


def test_the_moment_is_the_one_of_the_taking() -> None:
    """Later writes of the same manager to other fields, its status updates for instance, are not the moment."""
    live = taken(stored(DESIRED), "rival", "2026-07-02T10:00:00Z")
    elsewhere = entry(live, {"f:status": {"f:replicas": {}}}, manager="rival", operation="Update", subresource="status")
    live["metadata"]["managedFields"].append(elsewhere | {"time": "2026-07-09T00:00:00Z"})
    (reason,) = why(live)
    assert (reason.managers, reason.taken_at) == (("rival",), "2026-07-02T10:00:00Z")


def test_of_several_owners_all_are_named_and_the_newest_moment() -> None:
    """Two managers that agree with each other and not with us are both told."""
    live = taken(taken(stored(DESIRED), "first", "2026-07-02T10:00:00Z"), "second", "2026-07-02T11:00:00Z")
    (reason,) = why(live)
    assert (reason.managers, reason.taken_at) == (("first", "second"), "2026-07-02T11:00:00Z")


def test_a_removed_field_names_nobody() -> None:
    """A removal leaves no owner behind, and the reason does not make one up."""
    live = taken(stored(DESIRED), "rival", "2026-07-02T10:00:00Z")
    live["metadata"]["managedFields"].pop()
    live["spec"] = {}
    (reason,) = why(live)
    assert reason == FieldChange(".spec.replicas", Drift.NOT_OWNED, (), None, None, 2)
    assert str(reason) == ".spec.replicas taken: nothing -> 2"


def test_what_we_changed_our_mind_about_has_no_rival() -> None:
    """A new declaration is a reason of its own: the old value was ours."""
    edited = DESIRED | {"spec": {"replicas": 3}, "metadata": DESIRED["metadata"] | {"labels": {"b": "2"}}}
    told = {each.field: (each.drift, each.managers, each.was, each.becomes) for each in why(stored(DESIRED), edited)}
    assert told == {
        ".metadata.labels.a": (Drift.TO_RELEASE, (), "1", None),
        ".spec.replicas": (Drift.DIFFERS, (), 2, 3),
    }


def test_a_new_object_needs_no_reason() -> None:
    """What did not exist was not different."""
    assert field_changes((), None) == ()


def test_a_reason_is_fit_for_a_structured_line() -> None:
    """As a dictionary it is plain JSON."""
    (reason,) = why(taken(stored(DESIRED), "rival", "2026-07-02T10:00:00Z"))
    line = reason.as_dict()
    assert json.loads(json.dumps(line)) == line
    assert line == {
        "field": ".spec.replicas",
        "drift": "taken",
        "managers": ["rival"],
        "taken_at": "2026-07-02T10:00:00Z",
        "was": 5,
        "becomes": 2,
    }


@pytest.mark.parametrize("length", [SHOWN_CHARACTERS, SHOWN_CHARACTERS + 1])
def test_long_values_are_reported_by_length_and_digest(length: int) -> None:
    """A text is shown up to the limit, and as what it can be recognised by above."""
    text = "x" * length
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    expected = text if length == SHOWN_CHARACTERS else f"{length} characters, sha256 {digest}"
    assert shown(("f:data", "f:envoy.json"), text) == expected


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*TOKEN, "f:value"), SECRET_VALUE),
        (TOKEN, {"name": "TOKEN", "value": SECRET_VALUE}),
        (ENV, [{"name": "TOKEN", "value": SECRET_VALUE}]),
        (ENV[:-1], {"name": "envoy", "env": [{"name": "TOKEN", "value": SECRET_VALUE}]}),
        (ENV[:-2], [{"name": "envoy", "env": [{"name": "TOKEN", "value": SECRET_VALUE}]}]),
        (("f:spec",), {"template": {"spec": {"initContainers": [{"env": [{"value": SECRET_VALUE}]}]}}}),
    ],
    ids=lambda value: "/".join(value) if isinstance(value, tuple) else None,
)
def test_secret_values_are_never_shown(path: Path, value: Value) -> None:
    """Values of environment variables are masked, wherever around them the difference is."""
    told = json.dumps(shown(path, value))
    assert SECRET_VALUE not in told
    assert MASKED in told


def test_masking_hides_no_more_than_it_must() -> None:
    """Names of variables, references, and values of other things stay readable."""
    reference = {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    assert shown(ENV, [reference]) == [reference]
    assert shown(TOKEN, {"name": "TOKEN", "value": SECRET_VALUE}) == {"name": "TOKEN", "value": MASKED}
    headers = {"httpHeaders": [{"name": "x", "value": "y"}]}
    assert shown(("f:spec", "f:probe"), headers) == headers
    assert shown(("f:data", "f:value"), "plain") == "plain"


def test_nothing_is_shown_as_nothing() -> None:
    """An absent value of a secret is absent, not masked: that it was removed is what people want to know."""
    assert shown((*TOKEN, "f:value"), None) is None
