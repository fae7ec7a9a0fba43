"""How long do users wait when a replica crashes, and does any replica write an object whose shard it does not hold?

Run as ``python -m benchmarks.failover [CYCLES]`` (6 by default), or ``make bench-failover``. Three replicas share four
shards of 40 proxies in 20 namespaces, which users edit ten times a second. In each cycle a replica that holds shards is
killed (``kill -9``) or stopped (SIGSTOP, then SIGCONT once others hold its shards). The wait for an edit is the time
from the user's request to the operator's status write that confirms it, by the API server's audit log. Exits with 1
if a write was out of order, an edit was lost, or a wait was longer than the Lease duration and 2 s.
"""

import statistics
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Final

from tests.e2e.controlplane import ControlPlane
from tests.e2e.failover import Fleet, Load, epochs_out_of_order, longest_wait_s, out_of_order, tenures, waits
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.shipped import CRDS, operator_identity

LEASE_S: Final = 5
FLAGS: Final = (f"--lease-duration-s={LEASE_S}", "--renew-deadline-s=3.3", "--retry-period-s=0.7")
SHARDS: Final = 4
ALLOWED_S: Final = LEASE_S + 2.0
UNDISTURBED_EDITS: Final = 50


def main(arguments: list[str]) -> int:
    """Run the cycles and print the table."""
    cycles = int(arguments[0]) if arguments else 6
    with (
        ControlPlane(crds=CRDS, report=lambda line: print(f"== {line}", flush=True)) as cluster,
        Kube(cluster.kubeconfig) as admin,
        tempfile.TemporaryDirectory() as logs,
    ):
        identity = operator_identity(cluster, admin)
        replicas = [OperatorProcess(identity, Path(logs, f"operator-{number}.log")) for number in range(3)]
        fleet = Fleet(admin, cluster.audit(), replicas, FLAGS, shards=SHARDS)
        try:
            return run(fleet, cycles)
        finally:
            for each in replicas:
                each.kill()


def run(fleet: Fleet, cycles: int) -> int:
    """Run the cycles under load, and report."""
    fleet.start()
    fleet.populate(f"failover-{uuid.uuid4().hex[:6]}", tenants=20, proxies=2)
    print(f"== {len(fleet.keys)} proxies are reconciled; shards are held by {fleet.holders()}", flush=True)
    load = Load(fleet.admin, fleet.keys, interval_s=0.1)
    with load.running():
        fleet.wait_held(lambda _: len(load.edits) >= UNDISTURBED_EDITS)
        for cycle in range(cycles):
            holders = fleet.holders()
            victim = next(each for each in fleet.replicas if each.replica == holders[cycle % SHARDS])
            disrupt = fleet.kill if cycle % 2 == 0 else fleet.stop
            print(f"== cycle {cycle + 1} of {cycles}: {disrupt.__name__} {victim.replica}", flush=True)
            disrupt(victim, for_s=LEASE_S + 3)
            fleet.wait_held(lambda held: len(set(held.values())) == len(fleet.replicas))
    fleet.wait_reconciled()
    return report(fleet, load)


def report(fleet: Fleet, load: Load) -> int:
    """Print the measured values; 1 if a promise was broken."""
    entries = fleet.entries()
    waited = waits(entries, load.edits)
    undisturbed = [wait.total_seconds() for _, wait in waited[:UNDISTURBED_EDITS]]
    print(f"\nedits {len(load.edits)}, of which the first {len(undisturbed)} undisturbed: median wait ", end="")
    print(f"{statistics.median(undisturbed):.3f} s, longest {max(undisturbed):.3f} s\n")
    print(f"{'fault':<10}{'replica':<12}{'its shards':<14}longest wait for an edit in them (allowed {ALLOWED_S:g} s)")
    max_s = 0.0
    for each in fleet.disruptions:
        longest_s = longest_wait_s(each, waited, SHARDS)
        max_s = max(max_s, longest_s)
        print(f"{each.what:<10}{each.replica:<12}{', '.join(map(str, each.shards)):<14}{longest_s:.2f} s")
    wrong = out_of_order(entries, SHARDS, fleet.namespaces)
    epochs, lost = epochs_out_of_order(entries, SHARDS), load.lost()
    changes = sum(
        len({(each.replica, each.epoch) for each in history}) for history in tenures(entries, SHARDS).values()
    )
    writes = [each for each in entries if each.is_write and each.resource != "leases"]
    fenced = sum(each.metric("operator_app_fenced_writes_total") for each in fleet.replicas)
    print(
        f"\nwrites of objects {len(writes)}, tenures of shards {changes}, writes fenced in live replicas {fenced:.0f}"
    )
    print(
        f"out of order: writes {len(wrong)}, epochs {len(epochs)}; edits lost {len(lost)}; longest wait {max_s:.2f} s"
    )
    for line in (*wrong, *epochs, *lost):
        print(f"   {line}")
    return int(bool(wrong or epochs or lost) or max_s > ALLOWED_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
