"""Replicas of the operator that are replaced, killed, stopped and drained while users edit: nothing is lost."""

import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import DEPLOYMENT, ENVOY_PROXY, NAMESPACE, Key, Object
from operator_app.settings import Settings
from tests.cluster.installed import OPERATOR, READY_TIMEOUT_S, Installed, available, process_of, restarts
from tests.e2e.controlplane import Report
from tests.e2e.failover import Load, epochs_out_of_order, out_of_order, waits_until_applied
from tests.e2e.kube import wait_until
from tests.e2e.proxies import OPERATOR_USER, a_proxy, wait_reconciled

TENANTS: Final = 4
EDIT_INTERVAL_S: Final = 0.25
LEASE_S: Final = Settings().lease_duration_s
MARGIN_S: Final = 10.0
"""Of a machine that has other things to do."""

PROBES_S: Final = 90.0
"""Until the kubelet has given a process up: three probes of 10 s that each wait for 5 s, and a grace period."""

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, slots=True)
class Tenants:
    """Namespaces with a proxy each, and what is asked of their edits."""

    installed: Installed
    report: Report
    namespaces: list[str] = field(default_factory=list)

    @property
    def keys(self) -> list[Key]:
        """The proxies."""
        return [Key(namespace, "web") for namespace in self.namespaces]

    def edit_during(self, what: str, disruption: Callable[[], None]) -> float:
        """Edit while something happens; the longest wait for an edit, in seconds.

        Raises ``AssertionError`` where an edit was lost, or two replicas were writers at the same time.
        """
        since = datetime.now(UTC)
        load = Load(self.installed.admin, self.keys, EDIT_INTERVAL_S)
        with load.running():
            disruption()
        for key in self.keys:
            wait_reconciled(self.installed.admin, key, READY_TIMEOUT_S)
        assert load.lost() == []
        entries = [each for each in self.installed.audit.entries() if each.user == OPERATOR_USER]
        assert out_of_order(entries, 1, self.namespaces) == []
        assert epochs_out_of_order(entries, 1) == []
        during = [each for each in entries if each.received_at >= since]
        longest_s = max(wait.total_seconds() for wait in waits_until_applied(during, load.edits))
        self.report(f"{what}: {len(load.edits)} edits, none lost, one writer; the longest wait was {longest_s:.2f} s")
        return longest_s


@pytest.fixture(scope="module")
def tenants(installed: Installed, report: Report) -> Iterator[Tenants]:
    """Tenants whose proxies are reconciled."""
    found = Tenants(installed, report)
    for number in range(TENANTS):
        name = f"edits-{number}-{uuid.uuid4().hex[:8]}"
        installed.admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        found.namespaces.append(name)
        installed.admin.create(ENVOY_PROXY, a_proxy(name, replicas=0))
    for key in found.keys:
        wait_reconciled(installed.admin, key, READY_TIMEOUT_S)
    yield found
    for name in found.namespaces:
        installed.admin.delete(NAMESPACE, Key("", name))


@pytest.fixture
def leader(installed: Installed) -> Object:
    """The Pod that works, beside a standby that is ready."""
    installed.admin.wait_until(DEPLOYMENT, OPERATOR, available(2), READY_TIMEOUT_S)
    return wait_until(installed.leader, READY_TIMEOUT_S, "a leader")


def in_place(installed: Installed, pod: Object) -> Object:
    """The same Pod as it is now."""
    (found,) = (each for each in installed.pods() if each["metadata"]["uid"] == pod["metadata"]["uid"])
    return found


@pytest.mark.usefixtures("leader")
def test_an_upgrade_loses_no_edit(installed: Installed, tenants: Tenants) -> None:
    """A rolling upgrade of the operator: each replica hands over what it works on before it goes."""
    before = {pod["metadata"]["uid"] for pod in installed.pods()}

    def upgrade() -> None:
        installed.kubectl("-n", OPERATOR.namespace, "rollout", "restart", "deployment", OPERATOR.name)
        installed.admin.wait_until(DEPLOYMENT, OPERATOR, available(2), READY_TIMEOUT_S)

    assert tenants.edit_during("rolling upgrade", upgrade) < LEASE_S
    assert not before & {pod["metadata"]["uid"] for pod in installed.pods()}


def test_a_killed_leader_loses_no_edit(installed: Installed, tenants: Tenants, leader: Object) -> None:
    """``kill -9`` of the leader's process: the kubelet starts it again, or the standby takes over."""

    def kill() -> None:
        installed.signal(leader, signal.SIGKILL)
        before = restarts([leader])
        wait_until(lambda: restarts([in_place(installed, leader)]) > before, READY_TIMEOUT_S, "a restart")
        installed.admin.wait_until(DEPLOYMENT, OPERATOR, available(2), READY_TIMEOUT_S)

    assert tenants.edit_during("kill -9 of the leader", kill) < LEASE_S + MARGIN_S


def test_a_stopped_leader_is_replaced_and_then_restarted(
    installed: Installed, tenants: Tenants, leader: Object
) -> None:
    """A leader that hangs: the standby takes over when its Lease expires, and the liveness probe ends it."""
    before = restarts([leader])

    def stop() -> None:
        installed.signal(leader, signal.SIGSTOP)
        wait_until(lambda: restarts([in_place(installed, leader)]) > before, PROBES_S, "the liveness probe's restart")
        installed.admin.wait_until(DEPLOYMENT, OPERATOR, available(2), READY_TIMEOUT_S)

    assert tenants.edit_during("SIGSTOP of the leader", stop) < LEASE_S + MARGIN_S


def test_a_drained_node_loses_no_edit(installed: Installed, tenants: Tenants, leader: Object) -> None:
    """``kubectl drain`` of the leader's node: the replicas move to another one, one after the other."""
    node = leader["spec"]["nodeName"]

    def drain() -> None:
        installed.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=180s")
        installed.admin.wait_until(DEPLOYMENT, OPERATOR, available(2), READY_TIMEOUT_S)

    try:
        assert tenants.edit_during("drain of the leader's node", drain) < LEASE_S
        assert node not in {pod["spec"]["nodeName"] for pod in installed.pods()}
    finally:
        installed.kubectl("uncordon", node)


def test_a_replica_that_was_killed_is_found_by_its_cgroup(leader: Object) -> None:
    """The process that the tests above kill is the operator's, and not the one that only holds its namespaces."""
    assert b"operator_app" in Path(f"/proc/{process_of(leader)}/cmdline").read_bytes()
