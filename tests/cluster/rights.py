"""What the operator may do, and what it was seen doing: rules of its roles against the API server's audit log.

Pure. A right is one verb on one resource in one scope. The log says of each request whether the authorizer allowed it.
Three rights are used without a request of their own, because the server asks for them while it carries out another:
``create`` by an apply that finds no object; and, where the admission plugin OwnerReferencesPermissionEnforcement is on,
``update`` of an owner's ``finalizers`` by a new owner reference that blocks the owner's deletion, and ``delete`` of an
object whose owner references are changed, as those of a child are that is to outlive its proxy.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import httpx2

from operator_app.api.kinds import ENVOY_PROXY, Object
from tests.e2e.controlplane import AuditEntry

REFUSED_AFTERWARDS: Final = ("cannot create resource", "cannot set blockOwnerDeletion", "cannot set an ownerRef")
"""What the server says where it refuses a right that only shows while the request is carried out."""


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """``namespace`` is empty for a right in the whole cluster; ``resource`` has its subresource behind a slash."""

    namespace: str
    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        scope = f"in {self.namespace}" if self.namespace else "everywhere"
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''} {scope}"


def granted(manifests: Iterable[Object], name: str) -> set[Right]:
    """The rights that ClusterRoles and Roles grant whose names begin with ``name``."""
    all_roles = [each for each in manifests if each["kind"] in {"ClusterRole", "Role"}]
    roles = [each for each in all_roles if each["metadata"]["name"].startswith(name)]
    return {
        Right(role["metadata"].get("namespace", ""), group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(entries: Iterable[AuditEntry], rights: set[Right]) -> set[Right]:
    """Those of ``rights`` without which one of the requests would have been refused."""
    needed = {right for each in entries if each.decision == "allow" for right in _needed(each)}
    return rights & (needed | {Right("", each.group, each.resource, each.verb) for each in needed})


def denied(entries: Iterable[AuditEntry]) -> list[str]:
    """The requests that were refused for want of a right or of credentials, and not for what they contained."""
    return [
        f"{each}: {each.message or each.grant}"
        for each in entries
        if each.decision == "forbid"
        or each.code == httpx2.codes.UNAUTHORIZED
        or (each.code == httpx2.codes.FORBIDDEN and any(said in each.message for said in REFUSED_AFTERWARDS))
    ]


def _needed(entry: AuditEntry) -> Iterator[Right]:
    resource = f"{entry.resource}/{entry.subresource}" if entry.subresource else entry.resource
    yield Right(entry.namespace, entry.group, resource, entry.verb)
    if entry.verb != "patch" or not isinstance(entry.request, dict):
        return
    owners = (entry.request.get("metadata") or {}).get("ownerReferences")
    if entry.code == httpx2.codes.CREATED:
        yield Right(entry.namespace, entry.group, resource, "create")
        if any(owner.get("blockOwnerDeletion") for owner in owners or ()):
            yield Right(entry.namespace, ENVOY_PROXY.group, f"{ENVOY_PROXY.plural}/finalizers", "update")
    # An apply, which names its kind, declares owners that may be there; a merge patch names what it changes.
    is_merge = "kind" not in entry.request
    if entry.code == httpx2.codes.OK and is_merge and "ownerReferences" in (entry.request.get("metadata") or {}):
        yield Right(entry.namespace, entry.group, resource, "delete")
