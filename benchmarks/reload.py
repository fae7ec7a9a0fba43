"""How long an edit of a route takes until every Pod answers by it, and what it costs.

Run as ``python -m benchmarks.reload [PODS...]`` (1 10 50 by default), or ``make bench-reload``; root, as for the node.
One proxy with so many Pods is edited again and again, while one kept connection to each Pod asks 25 times a second, and
all of them no more than ``MOST_A_SECOND`` times: client and Envoys share the processors with what is measured. The time
goes from just before the request with the edit to the first answer by the new route of the last Pod. Beside it,
with the same Pods: an operator without the right to touch Pods, so that files arrive when the kubelet looks by itself;
and the same edit with another annotation of the Pods, so that all of them are replaced, as every edit did once.

One Linux user may have 128 inotify instances by default, so that 42 Pods of one proxy fit on a node; for more, the
limit of this machine is raised until the end.
"""

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from operator_app.api.kinds import ENVOY_PROXY, NAMESPACE, Key, Kind, Object
from tests.e2e.controlplane import AuditLog, ControlPlane
from tests.e2e.envoy.test_traffic import proxy_pods
from tests.e2e.kube import SERVICE_ACCOUNT, Kube, wait_until
from tests.e2e.node import Node
from tests.e2e.node.addresses import NODE_ADDRESS
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, holds
from tests.e2e.reload.test_reload import PORT, edit
from tests.e2e.reload.test_traffic import routed
from tests.e2e.reload.traffic import Tally, Traffic
from tests.e2e.shipped import CRDS, operator_identity

PODS: Final = (1, 10, 50)
EDITS: Final = 30
UNTOUCHED_EDITS: Final = 1
ROLLOUTS: Final = 2
MOST_ROLLED: Final = 10
"""With more Pods, rollouts are not tried: they take minutes, and nobody doubts it."""
TIMEOUT_S: Final = 300.0
EVERY_S: Final = 0.04
MOST_A_SECOND: Final = 250
INSTANCES: Final = Path("/proc/sys/fs/inotify/max_user_instances")
CLUSTER_ROLE: Final = Kind("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles", namespaced=False)


class Bench:
    """One proxy with so many Pods."""

    def __init__(self, admin: Kube, audit: AuditLog, traffic: Traffic, pods: int) -> None:
        self._admin = admin
        self._audit = audit
        self._traffic = traffic
        self.pods = pods
        self._key = Key(f"reload-{pods}", "web")
        self._ports = {name: traffic.serve(name) for name in ("one", "two")}
        self._to = "one"
        self._rollouts = 0

    def _spec(self) -> Object:
        spec = routed(self._key.namespace, self._ports, {"backend": self._to}, replicas=self.pods)
        if self._rollouts:
            spec["spec"]["podAnnotations"] = {"example.com/rollout": str(self._rollouts)}
        return spec

    def start(self) -> None:
        """Make the proxy and wait until all its Pods serve."""
        name = self._key.namespace
        self._admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        self._admin.wait_until(SERVICE_ACCOUNT, Key(name, "default"), bool)
        self._admin.create(ENVOY_PROXY, self._spec())
        self._admin.wait_until(ENVOY_PROXY, self._key, holds("Ready"), TIMEOUT_S)

    def stop(self) -> None:
        """Remove the proxy and its Pods."""
        self._admin.delete(NAMESPACE, Key("", self._key.namespace))
        wait_until(lambda: not proxy_pods(self._admin, self._key), TIMEOUT_S, "the end of the Pods")

    def edits(self, count: int) -> tuple[list[float], Counter[str], Tally]:
        """Seconds of so many edits, the operator's requests in all of them, and the traffic beside."""
        targets = [(pod["status"]["podIP"], PORT) for pod in proxy_pods(self._admin, self._key)]
        took_s: list[float] = []
        requests: Counter[str] = Counter()
        every_s = max(EVERY_S, self.pods / MOST_A_SECOND)
        with self._traffic.flowing(targets, kept=self.pods, every_s=every_s) as tally:
            wait_until(lambda: len(tally.latest) == self.pods, TIMEOUT_S, "an answer of each Pod")
            for _ in range(count):
                mark = self._audit.mark()
                self._to = {"one": "two", "two": "one"}[self._to]
                begun_mono = time.monotonic()
                generation = edit(self._admin, self._key, self._spec())
                wait_until(lambda: set(tally.latest.values()) == {self._to}, TIMEOUT_S, "the answer of all Pods")
                took_s.append(max(tally.changed_at_mono.values()) - begun_mono)
                self._admin.wait_until(ENVOY_PROXY, self._key, holds("Ready", generation=generation), TIMEOUT_S)
                time.sleep(1.5)  # what the operator still writes belongs to this edit
                requests.update(_requests(self._audit, mark))
        return took_s, requests, tally

    def rollouts(self, count: int) -> list[float]:
        """Seconds of so many edits that replace every Pod, until the status says that it is over."""
        took_s = []
        for _ in range(count):
            self._rollouts += 1
            self._to = {"one": "two", "two": "one"}[self._to]
            begun_mono = time.monotonic()
            generation = edit(self._admin, self._key, self._spec())
            self._admin.wait_until(ENVOY_PROXY, self._key, holds("Ready", generation=generation), TIMEOUT_S)
            took_s.append(time.monotonic() - begun_mono)
        return took_s


def _requests(audit: AuditLog, mark: object) -> Iterator[str]:
    """The operator's requests since then, but for those of its Lease and for watches."""
    for each in audit.entries(mark):  # type: ignore[arg-type]  # what mark() has returned
        if each.user == OPERATOR_USER and each.resource != "leases" and each.verb != "watch":
            subresource = f"/{each.subresource}" if each.subresource else ""
            yield f"{each.verb} {each.resource}{subresource}"


@contextmanager
def many_inotify_instances() -> Iterator[None]:
    """As many instances for a user as 50 Pods of one proxy need."""
    before = INSTANCES.read_text()
    INSTANCES.write_text(str(max(int(before), 512)))
    try:
        yield
    finally:
        INSTANCES.write_text(before)


@contextmanager
def no_touching(admin: Kube) -> Iterator[None]:
    """In this block the operator may not touch Pods."""
    key = Key("", "operator-app")
    before = admin.get(CLUSTER_ROLE, key)["rules"]
    rules = [rule for rule in before if "pods/status" not in rule.get("resources", ())]
    assert len(rules) < len(before)
    admin.patch(CLUSTER_ROLE, key, {"rules": rules})
    try:
        yield
    finally:
        admin.patch(CLUSTER_ROLE, key, {"rules": before})


def tell(pods: int, what: str, took_s: list[float], rest: str = "") -> None:
    """One row of the table."""
    ordered = sorted(took_s)
    p99_s = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    times = f"{statistics.median(ordered):.2f} | {p99_s:.2f} | {ordered[-1]:.2f}"
    print(f"| {pods} | {what} | {len(ordered)} | {times} | {rest} |", flush=True)


def run(bench: Bench, admin: Kube) -> None:
    """All situations with one number of Pods."""
    took_s, requests, tally = bench.edits(EDITS)
    each = ", ".join(f"{count / EDITS:.1f} {what}" for what, count in sorted(requests.items()))
    tell(
        bench.pods, "touched, as shipped", took_s, f"{each}; {tally.tried} requests of clients, {len(tally.lost)} lost"
    )
    for line in tally.lost[:5]:
        print(f"   lost: {line}")
    with no_touching(admin):
        took_s, _, tally = bench.edits(UNTOUCHED_EDITS)
    tell(bench.pods, "not touched", took_s, f"{len(tally.lost)} lost")
    if bench.pods <= MOST_ROLLED:
        tell(bench.pods, "every Pod replaced", bench.rollouts(ROLLOUTS))


def main(arguments: list[str]) -> None:
    """Start everything, and print a table."""
    sizes = tuple(map(int, arguments)) or PODS
    with (
        many_inotify_instances(),
        ControlPlane(crds=CRDS, report=lambda line: print(f"== {line}", flush=True)) as cluster,
        Node(cluster) as node,
        Kube(cluster.kubeconfig) as admin,
        tempfile.TemporaryDirectory() as logs,
        Traffic(node.inside(), NODE_ADDRESS) as traffic,
    ):
        operator = OperatorProcess(operator_identity(cluster, admin), Path(logs, "operator.log"), node)
        operator.start()
        try:
            print("| Pods | files are | edits | p50 s | p99 s | max s | each edit |\n|---|---|---|---|---|---|---|")
            for pods in sizes:
                bench = Bench(admin, cluster.audit(), traffic, pods)
                bench.start()
                run(bench, admin)
                bench.stop()
        finally:
            operator.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
