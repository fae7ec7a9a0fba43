"""Several replicas at one API server: one holds a shard, others stand by and take over, and none writes late."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import ENVOY_PROXY, LEASE, Key
from operator_app.sharding.leases import heartbeat_lease_name, shard_lease_name
from tests.e2e.controlplane import AuditLog, Mark
from tests.e2e.failover import Fleet, Load, epochs_out_of_order, longest_wait_s, out_of_order, replica_of, waits
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, a_proxy, wait_reconciled
from tests.e2e.sharding.replicas import three_replicas

LEASE_S: Final = 3
SHORT: Final = (f"--lease-duration-s={LEASE_S}", "--renew-deadline-s=2", "--retry-period-s=0.5")
SHARDS: Final = 4


@pytest.fixture
def replicas(operator_kubeconfig: Path, tmp_path: Path) -> Iterator[list[OperatorProcess]]:
    """Three replicas that are not running yet; at the end no reconcile has crashed and no write changed nothing."""
    yield from three_replicas(operator_kubeconfig, tmp_path)


def transitions(process: OperatorProcess) -> list[str]:
    """The log events of a replica about its shards, in order."""
    return [line["event"] for line in process.log() if line.get("event", "").startswith("shard_")]


def writers(audit: AuditLog, since: Mark, namespace: str) -> set[str]:
    """The replicas that have written objects of a namespace."""
    return {replica_of(each) for each in audit.writes(OPERATOR_USER, since) if each.namespace == namespace}


def test_one_replica_leads_and_its_standby_takes_over_at_once(
    admin: Kube, audit: AuditLog, namespace: str, replicas: list[OperatorProcess]
) -> None:
    """A standby is ready and writes nothing; when the leader ends it takes over within a second, without a new list."""
    leader, standby, _ = replicas
    started = audit.mark()
    leader.start(*SHORT)
    leader.wait_for("shard_taken")
    standby.start(*SHORT)
    admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=0))
    wait_reconciled(admin, Key(namespace, "web"))

    wait_until(lambda: standby.get("/readyz")[0] == 200, what="the standby to be ready")
    assert transitions(standby) == []
    assert [each.metric("operator_app_shards_held") for each in (leader, standby)] == [1, 0]
    names = {each["metadata"]["name"] for each in admin.list(LEASE, OPERATOR_NAMESPACE)}
    assert {heartbeat_lease_name(each.replica) for each in (leader, standby)} <= names
    assert writers(audit, started, namespace) == {leader.replica}

    standing_by = audit.mark()
    leader.stop()
    left_mono = time.monotonic()
    standby.wait_for("shard_taken")
    assert time.monotonic() - left_mono < 1
    assert transitions(leader) == ["shard_taken", "shard_released"]
    left = audit.mark()
    admin.patch(ENVOY_PROXY, Key(namespace, "web"), {"spec": {"service": {"annotations": {"edit": "one"}}}})
    wait_reconciled(admin, Key(namespace, "web"))

    assert writers(audit, left, namespace) == {standby.replica}
    lists = [each for each in audit.entries(standing_by) if each.user == OPERATOR_USER and each.verb == "list"]
    assert {each.resource for each in lists} <= {LEASE.plural}
    assert admin.find(LEASE, Key(OPERATOR_NAMESPACE, heartbeat_lease_name(leader.replica))) is None
    assert standby.metric("operator_app_lease_transitions_total", how="taken") == 1


def test_a_restart_acquires_its_own_lease_at_once(admin: Kube, replicas: list[OperatorProcess]) -> None:
    """After ``kill -9`` a process of the same name acquires its Lease before it expires, with a higher epoch."""
    (replica, *_) = replicas
    replica.start("--lease-duration-s=600")
    replica.wait_for("shard_taken")
    replica.kill()
    before = admin.get(LEASE, Key(OPERATOR_NAMESPACE, shard_lease_name(0)))

    replica.start()
    replica.wait_for("shard_taken", timeout_s=5)

    after = admin.get(LEASE, Key(OPERATOR_NAMESPACE, shard_lease_name(0)))
    assert after["spec"]["holderIdentity"] == before["spec"]["holderIdentity"] == replica.replica
    assert after["spec"]["leaseTransitions"] == before["spec"]["leaseTransitions"] + 1
    assert after["spec"]["leaseDurationSeconds"] == 6


def test_killed_and_stopped_replicas_are_replaced_and_write_nothing_late(
    admin: Kube, audit: AuditLog, namespace: str, replicas: list[OperatorProcess]
) -> None:
    """Under load: no write out of order, no edit lost, and no wait longer than two Lease durations and 2 s.

    On a quiet machine it is one Lease duration and 2 s at most; docs/benchmarks.md has figures.
    """
    fleet = Fleet(admin, audit, replicas, SHORT, shards=SHARDS)
    fleet.start()
    fleet.populate(namespace, tenants=8, proxies=1)
    load = Load(admin, fleet.keys, interval_s=0.1)
    with load.running():
        holders = fleet.holders()
        fleet.kill(next(each for each in replicas if each.replica == holders[0]), for_s=LEASE_S + 1)
        holder = wait_until(lambda: fleet.holders().get(1), what="shard 1 to be held, which may just be handed over")
        stopped = next(each for each in replicas if each.replica == holder)
        fleet.stop(stopped, for_s=LEASE_S + 1)
        wait_until(lambda: {"shard_lost", "shard_lapsed"} & set(transitions(stopped)), what="the stopped one to notice")
    fleet.wait_reconciled()

    entries = fleet.entries()
    assert out_of_order(entries, SHARDS, fleet.namespaces) == []
    assert epochs_out_of_order(entries, SHARDS) == []
    assert load.lost() == []
    waited = waits(entries, load.edits)
    longest = {each.what: longest_wait_s(each, waited, SHARDS) for each in fleet.disruptions}
    assert all(wait_s <= 2 * LEASE_S + 2 for wait_s in longest.values()), longest
    fleet.delete_namespaces()
