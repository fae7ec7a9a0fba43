"""What the random histories call a foreign byte, and how they find a declared field to change."""

from typing import Final

from operator_app.api.kinds import CHILD_KINDS, Object
from tests.e2e.apply.foreign_bytes import declared_leaves, foreign_bytes, pointer
from tests.e2e.apply.foreign_writers import paths_of

METADATA: Final = {"name": "x", "uid": "u"}
DECLARED: Final[Object] = {
    "metadata": METADATA | {"labels": {"ours/a.b": "1"}},
    "spec": {
        "template": {"spec": {"containers": [{"name": "envoy", "args": ["a"], "env": [{"name": "A", "value": "a"}]}]}}
    },
}
LIVE: Final[Object] = {
    "metadata": METADATA | {"labels": {"ours/a.b": "1", "theirs": "2"}, "finalizers": ["f"], "resourceVersion": "7"},
    "spec": {
        "template": {
            "spec": {
                "containers": [
                    {"name": "sidecar", "image": "s", "env": [{"name": "T", "value": "t"}]},
                    {"name": "envoy", "args": ["a"], "env": [{"name": "E", "value": "e"}, {"name": "A", "value": "a"}]},
                ]
            }
        }
    },
    "status": {"replicas": 1},
}
POD: Final = ".spec.template.spec"


def test_everything_beside_the_declaration_is_foreign_wherever_it_stands() -> None:
    """By keys and not by places in a list; versions, field owners and status are nobody's bytes."""
    assert foreign_bytes(LIVE, DECLARED) == {
        ".metadata.labels.theirs": "2",
        ".metadata.finalizers[f]": "f",
        f"{POD}.containers[sidecar].name": "sidecar",
        f"{POD}.containers[sidecar].image": "s",
        f"{POD}.containers[sidecar].env[T].name": "T",
        f"{POD}.containers[sidecar].env[T].value": "t",
        f"{POD}.containers[envoy].env[E].name": "E",
        f"{POD}.containers[envoy].env[E].value": "e",
    }
    assert foreign_bytes(DECLARED, DECLARED) == {}


def test_a_declared_field_is_found_behind_foreign_items() -> None:
    """The JSON pointer has the place in the live list, and escapes what the pointer's syntax needs."""
    assert pointer(LIVE, f"{POD}.containers[envoy].env[A].value") == "/spec/template/spec/containers/1/env/1/value"
    assert pointer(LIVE, ".metadata.labels.ours/a.b") == "/metadata/labels/ours~1a.b"
    assert pointer(LIVE, f"{POD}.containers[gone].image") is None


def test_every_declared_field_can_be_changed() -> None:
    """Lists that the API takes as a whole count as one field, and identity as none."""
    assert declared_leaves(DECLARED)[f"{POD}.containers[envoy].args"] == ["a"]
    assert all(len(paths_of(kind)) > 4 for kind in CHILD_KINDS)
    assert not any("ownerReferences" in path for kind in CHILD_KINDS for path in paths_of(kind))
