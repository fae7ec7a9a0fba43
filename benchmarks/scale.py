"""What N proxies of varied specs in N / 10 namespaces cost one replica.

Run as ``python -m benchmarks.scale [N]`` (1,000 by default), or ``make bench-scale N=1000``. All figures are of one run
on one local control plane: seconds until all are verified, then a restart (seconds until the caches are synced and
until no proxy waits for a reconcile, and the requests until then), then one resync (its requests and its CPU time), the
memory for each proxy above that of an operator without any, and the longest step of the event loop in each.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.situation import (
    AS_SHIPPED,
    MIB,
    MODULE,
    create_all,
    in_background,
    make_namespace,
    measured,
    reconciled,
    reports_of,
    small,
)
from operator_app.api.kinds import LEASE
from tests.e2e.controlplane import ControlPlane
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.shipped import CRDS, operator_identity

PER_NAMESPACE: Final = 10
SWEEP_S: Final = 60


def requests_of(operator: OperatorProcess) -> Counter[str]:
    """Requests of the latest run by verb, without those about Leases."""
    found: Counter[str] = Counter()
    for labels, value in operator.series("operator_app_api_requests_total"):
        if labels["kind"] != LEASE.kind:
            found[labels["verb"]] += int(value)
    return found


def wait_for(is_over: Callable[[], bool], timeout_s: float, pause_s: float = 0.5) -> float:
    """Seconds until it is over; fails after ``timeout_s``."""
    begun = time.monotonic()
    while not is_over():
        assert time.monotonic() - begun < timeout_s, "it does not end"
        time.sleep(pause_s)
    return time.monotonic() - begun


def told(operator: OperatorProcess, what: str, since: int = 0) -> None:
    """Print memory and the longest step from a report on."""
    time.sleep(1.5)
    found = measured(operator, since)
    print(
        f"  {what}: {found.rss_bytes / MIB:.0f} MiB resident, at most {found.peak_bytes / MIB:.0f}; longest step "
        f"{found.block_s * 1000:.0f} ms, {found.block_cpu_s * 1000:.0f} ms of CPU ({found.block})",
        flush=True,
    )


def main() -> None:
    """Print what was measured."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    namespaces = [f"tenant-{number}" for number in range(max(1, count // PER_NAMESPACE))]
    print(f"{count} proxies of varied specs in {len(namespaces)} namespaces")
    with (
        ControlPlane(crds=CRDS, audit_bodies=False) as cluster,
        Kube(cluster.kubeconfig) as admin,
        tempfile.TemporaryDirectory() as scratch,
    ):
        operator = OperatorProcess(operator_identity(cluster, admin), Path(scratch, "operator.log"))
        for name in namespaces:
            make_namespace(admin, name)
        try:
            operator.start(*AS_SHIPPED, module=MODULE)
            time.sleep(2)
            empty_bytes = measured(operator).rss_bytes
            with in_background(create_all, cluster.kubeconfig, small, namespaces, count):
                took_s = wait_for(lambda: reconciled(admin, "") == count, 120 + count, pause_s=2)
            print(f"created and verified: {took_s:.0f} s, {count / took_s:.1f} a second")
            told(operator, "while they were created")
            operator.stop()
            restart(operator, (*AS_SHIPPED, f"--sweep-interval-s={SWEEP_S}"), empty_bytes, count)
        finally:
            operator.kill()


def restart(operator: OperatorProcess, flags: tuple[str, ...], empty_bytes: int, count: int) -> None:
    """Restart the operator with everything there, then wait for a resync."""
    begun = time.monotonic()
    operator.start(*flags, module=MODULE, wait=False)
    operator.wait_for("synced", timeout_s=600)
    synced_s = time.monotonic() - begun
    wait_for(lambda: operator.metric("operator_app_rounds_total") >= count, 600)
    wait_for(lambda: operator.metric("operator_app_queue_keys") == 0, 600)
    print(
        f"restart: synced after {synced_s:.1f} s, nothing left to reconcile after {time.monotonic() - begun:.1f} s; "
        f"requests {dict(requests_of(operator))}"
    )
    told(operator, "restart")
    resident = measured(operator).rss_bytes
    print(f"memory: {(resident - empty_bytes) / count:,.0f} bytes a proxy above {empty_bytes / MIB:.0f} MiB")
    before, since = requests_of(operator), len(reports_of(operator))
    rounds = operator.metric("operator_app_rounds_total")
    wait_for(lambda: operator.metric("operator_app_rounds_total") >= rounds + count, 600)
    cost = requests_of(operator) - before
    cpu_s = measured(operator, since).cpu_s
    print(f"resync: requests {dict(cost)}; {cpu_s:.1f} s of CPU until every proxy was reconciled, waiting included")
    told(operator, "resync", since)


if __name__ == "__main__":
    main()
