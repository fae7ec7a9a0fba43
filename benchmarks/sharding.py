"""What three replicas are sent with server-side sharding and without it.

Run as ``python -m benchmarks.sharding [PROXIES]`` (300 by default), or ``make bench-sharding``. All of one run on one
control plane: proxies of varied specs, five in each namespace of neighbouring names, six shards, three replicas. These
are started with everything there, until all shards are held and nothing is left to reconcile; then every proxy is
edited once. For each replica: bytes and objects that its lists and watches have brought, and its resident memory; first
without the setting, then with it.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.scale import wait_for
from benchmarks.situation import (
    AS_SHIPPED,
    MIB,
    MODULE,
    create_all,
    edit_of,
    in_background,
    make_namespace,
    measured,
    reconciled,
    small,
)
from operator_app.api.kinds import ENVOY_PROXY, LEASE, Key
from operator_app.controller.scopes import INDEXES, SHARED_KINDS
from operator_app.sharding.leases import shard_lease_name
from tests.e2e.controlplane import ControlPlane
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.shipped import CRDS, operator_identity

SHARDS: Final = 6
REPLICAS: Final = 3
PER_NAMESPACE: Final = 5
LONGEST_S: Final = 400.0
TENANTS_KINDS: Final = frozenset(kind.kind for kind in set(INDEXES) - SHARED_KINDS)
FLAGS: Final = (*AS_SHIPPED, f"--shards={SHARDS}", "--status-settle-s=1")


@dataclass(frozen=True, slots=True)
class Received:
    """What one replica was sent so far: of tenants' kinds, and of those that every replica watches as a whole."""

    tenants_bytes: float
    tenants_objects: float
    shared_bytes: float
    shared_objects: float

    def since(self, before: "Received") -> "Received":
        """What came after ``before``."""
        return Received(
            self.tenants_bytes - before.tenants_bytes,
            self.tenants_objects - before.tenants_objects,
            self.shared_bytes - before.shared_bytes,
            self.shared_objects - before.shared_objects,
        )


def received(operator: OperatorProcess) -> Received:
    """By the operator's own metrics, without Leases."""
    sums = [0.0] * 4
    for position, name in enumerate(("bytes", "objects")):
        for labels, value in operator.series(f"operator_app_received_{name}_total"):
            if labels["kind"] != LEASE.kind:
                sums[position + 2 * (labels["kind"] not in TENANTS_KINDS)] += value
    return Received(*sums)


def are_even(admin: Kube) -> bool:
    """Whether every shard is held, and each replica holds some."""
    leases = [admin.find(LEASE, Key(OPERATOR_NAMESPACE, shard_lease_name(shard))) for shard in range(SHARDS)]
    holders = [lease["spec"].get("holderIdentity") for lease in leases if lease]
    return len(holders) == SHARDS and None not in holders and len(set(holders)) == REPLICAS


def are_idle(replicas: Sequence[OperatorProcess]) -> bool:
    """Whether nothing waits for a reconcile."""
    return sum(each.metric("operator_app_queue_keys") for each in replicas) == 0


def told(what: str, setting: str, found: Sequence[Received]) -> None:
    """Print a line for each replica, and their sum."""
    total = Received(*(sum(values) for values in zip(*map(tuple_of, found), strict=True)))
    for name, each in (*((f"replica {n}", each) for n, each in enumerate(found, 1)), ("all", total)):
        print(
            f"{setting:<8} {what:<6} {name:<10} {each.tenants_bytes / MIB:>9.2f} {each.tenants_objects:>9,.0f}"
            f" {each.shared_bytes / MIB:>9.2f} {each.shared_objects:>9,.0f}",
            flush=True,
        )


def tuple_of(each: Received) -> tuple[float, float, float, float]:
    """The four sums."""
    return each.tenants_bytes, each.tenants_objects, each.shared_bytes, each.shared_objects


def compare(admin: Kube, replicas: Sequence[OperatorProcess], keys: Sequence[Key], *, is_on: bool) -> None:
    """Start the replicas, then edit every proxy once; print what each replica was sent in both."""
    setting = "with" if is_on else "without"
    for each in replicas:
        each.start(*FLAGS, f"--server-side-sharding={'true' if is_on else 'false'}", module=MODULE, wait=False)
    begun = time.monotonic()
    wait_for(lambda: are_even(admin), LONGEST_S)
    time.sleep(5)
    wait_for(lambda: are_idle(replicas), LONGEST_S)
    started = [received(each) for each in replicas]
    told("start", setting, started)
    for number, key in enumerate(keys):
        admin.patch(ENVOY_PROXY, key, edit_of(f"{setting}-{number}"))
    wait_for(lambda: reconciled(admin, "") == len(keys), LONGEST_S)
    time.sleep(5)
    told("edits", setting, [received(each).since(before) for each, before in zip(replicas, started, strict=True)])
    resident = ", ".join(f"{measured(each).rss_bytes / MIB:.0f}" for each in replicas)
    print(f"{setting:<8} resident MiB: {resident}; {time.monotonic() - begun:.0f} s", flush=True)
    for each in replicas:
        each.stop()


def main() -> None:
    """Print the table as it grows."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    namespaces = [f"team-{number}" for number in range(max(1, count // PER_NAMESPACE))]
    print(f"{count} proxies in {len(namespaces)} namespaces, {SHARDS} shards, {REPLICAS} replicas")
    print(f"{'':<26} {'tenants MiB':>9} {'objects':>7} {'shared MiB':>9} {'objects':>8}")
    with (
        ControlPlane(crds=CRDS, audit_bodies=False, gates=["ShardedListAndWatch"]) as cluster,
        Kube(cluster.kubeconfig) as admin,
        tempfile.TemporaryDirectory() as scratch,
    ):
        identity = operator_identity(cluster, admin)
        replicas = [OperatorProcess(identity, Path(scratch, f"replica-{number}.log")) for number in range(REPLICAS)]
        for name in namespaces:
            make_namespace(admin, name)
        try:
            replicas[0].start(*AS_SHIPPED, module=MODULE)
            with in_background(create_all, cluster.kubeconfig, small, namespaces, count):
                wait_for(lambda: reconciled(admin, "") == count, LONGEST_S, pause_s=2)
            replicas[0].stop()
            keys = [Key(namespaces[number % len(namespaces)], f"p{number}") for number in range(count)]
            for is_on in (False, True):
                compare(admin, replicas, keys, is_on=is_on)
        finally:
            for each in replicas:
                each.kill()


if __name__ == "__main__":
    main()
