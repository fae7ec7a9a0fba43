"""Tenant B's waits while tenant A misbehaves: B creates one proxy a second; lanes against one FIFO.

Run as ``python -m benchmarks.tenants [OBJECTS]`` (1,000 proxies of tenant A by default), or ``make bench-tenants``. All
figures are of one run on one local control plane: B alone, then while A creates all its proxies at once, while all of
A's proxies fail in every round (a quota forbids their Services), and while A undoes every repair. B's time goes from
the request that creates a proxy to the watch event in which its status says ``Reconciled``.
"""

import contextlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from operator_app.api.kinds import ENVOY_PROXY, NAMESPACE, SERVICE, Key, Object
from operator_app.desired import child_key
from tests.e2e.controlplane import ControlPlane
from tests.e2e.kube import RESOURCE_QUOTA, Kube, KubeError, path_of
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import a_proxy, holds
from tests.e2e.shipped import CRDS, operator_identity

ALONE_S: Final = 20
FAILING_S: Final = 20
UNDO_S: Final = 20
AS_SHIPPED: Final = ("--backoff-base-s=0.5", "--backoff-cap-s=60", "--status-settle-s=2", "--log-level=warning")
"""The waits of a cluster, where tests have shorter ones."""

VARIANTS: Final = {
    "lanes": (("operator_app", "run"), AS_SHIPPED),
    # All keys are in one lane there, so the limit of a lane must be that of all workers.
    "one FIFO": (("benchmarks.fifo_operator", "run"), (*AS_SHIPPED, "--in-flight-per-tenant=16")),
}


@dataclass
class Watcher:
    """Records when each proxy of one namespace was first seen reconciled, on this process's monotonic clock."""

    admin: Kube
    namespace: str
    reconciled_at: dict[str, float] = field(default_factory=dict)

    def run(self, stop: threading.Event) -> None:
        """Watch until ``stop``."""
        is_reconciled = holds("Reconciled")
        path = path_of(ENVOY_PROXY, Key(self.namespace, ""))
        while not stop.is_set():
            with contextlib.suppress(Exception):
                self._watch(path, is_reconciled)

    def _watch(self, path: str, is_reconciled: Callable[[Object], bool]) -> None:
        http = self.admin._http  # noqa: SLF001 - no other user of the client watches
        with http.stream("GET", path, params={"watch": "true", "timeoutSeconds": "2"}) as lines:
            for line in lines.iter_lines():
                obj = json.loads(line)["object"]
                if obj.get("kind") == ENVOY_PROXY.kind and is_reconciled(obj):
                    self.reconciled_at.setdefault(obj["metadata"]["name"], time.monotonic())


def create_proxies(kubeconfig: Path, namespace: str, count: int) -> None:
    """Create that many proxies as fast as eight connections can."""
    with Kube(kubeconfig) as admin, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: admin.create(ENVOY_PROXY, a_proxy(namespace, f"a{number}")), range(count)))


class Bench:
    """One variant of the operator with fresh tenants."""

    def __init__(self, admin: Kube, kubeconfig: Path, tag: str, objects: int) -> None:
        self.admin = admin
        self.kubeconfig = kubeconfig
        self.a, self.b = f"tenant-a-{tag}", f"tenant-b-{tag}"
        self.objects = objects
        for name in (self.a, self.b):
            admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        self.watcher = Watcher(admin, self.b)
        self.count = 0

    def b_while(self, is_over: Callable[[float], bool]) -> list[float]:
        """Let B create a proxy a second until ``is_over(seconds since begin)``; its times to ``Reconciled``."""
        begun, created = time.monotonic(), {}
        while not is_over(time.monotonic() - begun):
            name = f"b{self.count}"
            self.count += 1
            created[name] = time.monotonic()
            self.admin.create(ENVOY_PROXY, a_proxy(self.b, name))
            time.sleep(max(0.0, created[name] + 1 - time.monotonic()))
        deadline = time.monotonic() + 120
        while any(name not in self.watcher.reconciled_at for name in created) and time.monotonic() < deadline:
            time.sleep(0.05)
        late = time.monotonic()
        return [self.watcher.reconciled_at.get(name, late) - at for name, at in created.items()]

    def create_all(self) -> Callable[[float], bool]:
        """Let A create all its proxies; over when they have converged, or after three minutes."""
        # In a process of its own: threads of this one would share its interpreter lock with B's clock.
        creating = multiprocessing.get_context("spawn").Process(
            target=create_proxies, args=(self.kubeconfig, self.a, self.objects), daemon=True
        )
        creating.start()
        is_reconciled = holds("Reconciled")

        def is_over(seconds: float) -> bool:
            if seconds > 180:
                return True
            if seconds < 10 or int(seconds) % 5:
                return False
            found = self.admin.list(ENVOY_PROXY, self.a)
            return len(found) == self.objects and all(map(is_reconciled, found))

        return is_over

    def fail_all(self, pool: ThreadPoolExecutor) -> None:
        """Forbid A's Services and delete those that exist, so that every round of A fails."""
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none", "namespace": self.a}}
        self.admin.create(RESOURCE_QUOTA, quota | {"spec": {"hard": {"count/services": "0"}}})
        time.sleep(1)
        list(pool.map(self._delete_service, range(self.objects)))

    def _delete_service(self, number: int) -> None:
        with contextlib.suppress(KubeError):
            self.admin.delete(SERVICE, child_key(Key(self.a, f"a{number}")))

    def undo_repairs(self, pool: ThreadPoolExecutor, stop: threading.Event) -> None:
        """Change the target port of A's Services again and again."""
        self.admin.delete(RESOURCE_QUOTA, Key(self.a, "none"))

        def change(worker: int) -> None:
            patch = [{"op": "replace", "path": "/spec/ports/0/targetPort", "value": 9999}]
            while not stop.is_set():
                for number in range(worker, self.objects, 2):
                    if stop.is_set():
                        return
                    with contextlib.suppress(KubeError):
                        key = child_key(Key(self.a, f"a{number}"))
                        self.admin.patch(SERVICE, key, patch, patch_type="json", field_manager="rival")

        for worker in range(2):
            pool.submit(change, worker)


def measure(bench: Bench) -> Iterator[tuple[str, list[float]]]:
    """B's times in each situation."""
    stop = threading.Event()
    pool = ThreadPoolExecutor(8)
    threading.Thread(target=bench.watcher.run, args=(stop,), daemon=True).start()
    try:
        bench.b_while(lambda seconds: seconds > 3)  # warm up
        yield "B alone", bench.b_while(lambda seconds: seconds > ALONE_S)
        yield f"A creates {bench.objects:,}", bench.b_while(bench.create_all())
        bench.fail_all(pool)
        yield "all of A fails", bench.b_while(lambda seconds: seconds > FAILING_S)
        bench.undo_repairs(pool, stop)
        yield "A undoes repairs", bench.b_while(lambda seconds: seconds > UNDO_S)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def main() -> None:
    """Print the table as it grows."""
    objects = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    print("operator   situation           n   p50 s   p99 s   max s   p99 / alone")
    for tag, (name, (module, flags)) in enumerate(VARIANTS.items()):
        # A control plane of its own for each variant: neither inherits the other's objects.
        with (
            ControlPlane(crds=CRDS, audit_bodies=False) as cluster,
            Kube(cluster.kubeconfig) as admin,
            tempfile.TemporaryDirectory() as scratch,
        ):
            operator = OperatorProcess(operator_identity(cluster, admin), Path(scratch, "operator.log"))
            operator.start(*flags, module=module, wait=False)
            alone = 0.0
            for situation, times in measure(Bench(admin, cluster.kubeconfig, str(tag), objects)):
                times.sort()
                p99 = times[min(len(times) - 1, int(len(times) * 0.99))]
                alone = alone or p99
                print(
                    f"{name:<10} {situation:<18} {len(times):>3}  {statistics.median(times):>6.3f}  {p99:>6.3f}"
                    f"  {times[-1]:>6.3f}  {p99 / alone:>12.1f}",
                    flush=True,
                )
            operator.kill()


if __name__ == "__main__":
    main()
