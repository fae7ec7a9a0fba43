"""The checks of a failover can fail: forged audit logs, each with one defect."""

from datetime import UTC, datetime
from typing import Any, Final

from operator_app.api.kinds import Object
from tests.e2e.controlplane import AuditEntry
from tests.e2e.failover import epochs_out_of_order, out_of_order

AT: Final = datetime(2026, 7, 2, tzinfo=UTC)


def entry(resource: str, version: int, replica: str, request: Object | None = None, **changes: Any) -> AuditEntry:
    """A successful patch of an object in the namespace ``team``, of a replica."""
    found: dict[str, Any] = {
        "user": "operator",
        "verb": "patch",
        "group": "",
        "resource": resource,
        "namespace": "team",
        "name": "web",
        "subresource": "",
        "code": 200,
        "received_at": AT,
        "user_agent": f"operator-app/{replica}",
        "path": "/",
        "resource_version": str(version),
        "request": request,
    }
    return AuditEntry(**found | changes)


def lease(version: int, holder: str | None, epoch: int, **changes: Any) -> AuditEntry:
    """A successful write of the one shard's Lease."""
    spec = {"leaseTransitions": epoch} | ({} if holder is None else {"holderIdentity": holder})
    names = {"namespace": "edge-system", "name": "operator-app-shard-0", "verb": "update"}
    return entry("leases", version, holder or "a", {"spec": spec}, **names | changes)


LOG: Final = (
    lease(10, "a", 0),
    entry("services", 11, "a"),
    lease(12, "a", 0),
    lease(13, None, 0),
    lease(14, "b", 1),
    entry("services", 15, "b"),
)


def test_writes_of_the_holder_are_in_order() -> None:
    """Renewals, a release and a change of holder give no findings."""
    assert out_of_order(LOG, 1, ["team"]) == []
    assert epochs_out_of_order(LOG, 1) == []


def test_a_write_without_holding_the_shard_is_found() -> None:
    """By its resourceVersion alone: its position in the log does not matter."""
    late, between = entry("services", 16, "a"), entry("deployments", 13, "a")
    assert len(out_of_order((late, *LOG), 1, ["team"])) == 1
    assert len(out_of_order((between, *LOG), 1, ["team"])) == 1
    assert len(out_of_order((*LOG, entry("services", 9, "a")), 1, ["team"])) == 1


def test_refused_writes_and_other_namespaces_are_ignored() -> None:
    """Neither a refused write nor a write in a namespace of another test is a finding."""
    refused = entry("services", 16, "a", code=409)
    elsewhere = entry("services", 16, "a", namespace="other")
    assert out_of_order((*LOG, refused, elsewhere), 1, ["team"]) == []


def test_a_ledger_entry_counts_for_the_namespace_of_its_proxy() -> None:
    """Entries are in the operator's namespace, but belong to the shard of their proxy's namespace."""
    record = {"spec": {"proxy": {"namespace": "team"}}}
    late = entry("proxyregistrations", 16, "a", record, namespace="edge-system", name="proxy-1")
    assert len(out_of_order((*LOG, late), 1, ["team"])) == 1


def test_an_epoch_that_does_not_increase_with_a_change_of_holder_is_found() -> None:
    """Another holder needs a higher epoch, and no epoch may decrease."""
    assert len(epochs_out_of_order((lease(10, "a", 3), lease(11, "b", 3)), 1)) == 1
    assert len(epochs_out_of_order((lease(10, "a", 3), lease(11, "a", 2)), 1)) == 1
