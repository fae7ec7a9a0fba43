"""The check of the operator's rights can fail: a missing right is found, and so is one that nobody used."""

from datetime import UTC, datetime
from typing import Any

import pytest

from operator_app.api.kinds import Object
from tests.cluster.rights import Right, denied, granted, used
from tests.e2e.controlplane import AuditEntry

NAMESPACE = "edge-system"


def an_entry(**changes: Any) -> AuditEntry:
    """An allowed apply of a ConfigMap that changed it; keywords replace fields."""
    found: dict[str, Any] = {
        "user": "operator",
        "verb": "patch",
        "group": "",
        "resource": "configmaps",
        "namespace": "team",
        "name": "web",
        "subresource": "",
        "code": 200,
        "received_at": datetime(2026, 1, 1, tzinfo=UTC),
        "user_agent": "",
        "path": "",
        "decision": "allow",
    }
    return AuditEntry(**found | changes)


def a_role(namespace: str, *rules: Object) -> Object:
    """A Role, or a ClusterRole without a namespace."""
    metadata = {"name": "operator"} | ({"namespace": namespace} if namespace else {})
    return {"kind": "Role" if namespace else "ClusterRole", "metadata": metadata, "rules": list(rules)}


def test_rules_are_multiplied_out_by_verb_resource_and_scope() -> None:
    """Roles of other names, and objects that are no roles, grant nothing."""
    rule = {"apiGroups": [""], "resources": ["configmaps", "services"], "verbs": ["get", "list"]}
    manifests = [a_role("", rule), a_role(NAMESPACE, rule), {"kind": "Service", "metadata": {"name": "operator"}}]
    assert len(granted(manifests, "operator")) == 8
    assert granted(manifests, "another") == set()


def test_a_right_that_no_request_needed_is_found() -> None:
    """What is left over is what no allowed request needed; a refused request uses nothing."""
    patch, delete = Right("", "", "configmaps", "patch"), Right("", "", "configmaps", "delete")
    entries = [an_entry(), an_entry(verb="delete", decision="forbid", code=403)]
    assert used(entries, {patch, delete}) == {patch}


def test_a_right_in_one_namespace_is_not_used_in_another() -> None:
    """The scope counts: a Role's right is used where the Role is."""
    here = Right(NAMESPACE, "", "configmaps", "patch")
    assert used([an_entry()], {here}) == set()
    assert used([an_entry(namespace=NAMESPACE)], {here}) == {here}


def test_an_apply_that_creates_uses_create_and_the_owners_finalizers() -> None:
    """Neither has a request of its own; what is refused, or names no owner that waits, uses no right to finalizers."""
    create = Right("", "", "configmaps", "create")
    finalizers = Right("", "edge.operator-app.dev", "envoyproxies/finalizers", "update")
    owned: Object = {"kind": "ConfigMap", "metadata": {"ownerReferences": [{"blockOwnerDeletion": True}]}}
    rights = {create, finalizers}
    assert used([an_entry(request={"kind": "ConfigMap"})], rights) == set()
    assert used([an_entry(code=201, request={"kind": "ConfigMap"})], rights) == {create}
    assert used([an_entry(code=201, request=owned)], rights) == {create, finalizers}
    assert used([an_entry(code=409, request=owned)], rights) == set()


def test_a_patch_of_owners_uses_the_right_to_delete() -> None:
    """An apply declares the owners that are there, and uses nothing of it; a patch names them only to change them."""
    delete = Right("", "", "configmaps", "delete")
    metadata: Object = {"ownerReferences": None}
    assert used([an_entry(request={"metadata": metadata})], {delete}) == {delete}
    assert used([an_entry(request={"metadata": metadata}, code=409)], {delete}) == set()
    assert used([an_entry(request={"metadata": {"labels": {}}})], {delete}) == set()
    assert used([an_entry(request={"kind": "ConfigMap", "metadata": metadata})], {delete}) == set()


def test_a_subresource_is_a_right_of_its_own() -> None:
    """To write a status does not use the right to write the object."""
    of_object, of_status = Right("", "", "configmaps", "patch"), Right("", "", "configmaps/status", "patch")
    assert used([an_entry(subresource="status")], {of_object, of_status}) == {of_status}


@pytest.mark.parametrize(
    ("changes", "is_denied"),
    [
        ({"decision": "forbid", "code": 403}, True),
        ({"decision": "", "code": 401}, True),
        ({"code": 403, "message": 'User "x" cannot create resource "configmaps" in API group ""'}, True),
        ({"code": 403, "message": "cannot set blockOwnerDeletion if an ownerReference refers to a resource"}, True),
        ({"code": 403, "message": "exceeded quota: pods"}, False),
        ({"code": 409}, False),
    ],
)
def test_a_refusal_for_want_of_a_right_is_told_from_others(changes: dict[str, Any], *, is_denied: bool) -> None:
    """A quota or a policy refuses what a request contains, and no right would change that."""
    assert bool(denied([an_entry(**changes)])) is is_denied
