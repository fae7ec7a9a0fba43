"""The budget of writes: which of the operator's writes changed nothing, by the API server's audit log.

A write that changes something gets a new resourceVersion. One whose answer has the version that the same object had
after an earlier write was *avoidable*. Where another writer wrote in between, the operator's own metric shows it:
``operator_app_writes_total{outcome="unchanged"}`` compares with the version that the decision was based on.
"""

from collections.abc import Iterable
from typing import Final

from tests.e2e.controlplane import AuditEntry

DONE: Final = frozenset({200, 201})


def avoidable(entries: Iterable[AuditEntry]) -> list[AuditEntry]:
    """The writes among ``entries``, of one writer and in the order of the log, that left their object as it was."""
    known: dict[tuple[str, str, str, str], set[str]] = {}
    found = []
    for each in entries:
        if not each.is_write or each.verb.startswith("delete") or each.code not in DONE or not each.resource_version:
            continue
        if _is_release(each):
            continue
        versions = known.setdefault((each.group, each.resource, each.namespace, each.name), set())
        if each.resource_version in versions:
            found.append(each)
        versions.add(each.resource_version)
    return found


def _is_release(entry: AuditEntry) -> bool:
    """Whether a write removes a finalizer: where that deletes the object, the response has the version before it."""
    request = entry.request or {}
    is_bare = set(request) == {"apiVersion", "kind", "metadata"} and "finalizers" not in request["metadata"]
    return entry.resource == "envoyproxies" and not entry.subresource and is_bare
