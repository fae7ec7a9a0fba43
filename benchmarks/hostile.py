"""What one replica takes, and another tenant feels, while tenants store and do the worst that the schema lets them.

Run as ``python -m benchmarks.hostile [BIG [SMALL]]`` (300 and 2,000 by default), or ``make bench-hostile``. One tenant
has ``BIG`` of the biggest objects that the schema accepts, half of them with full lists, half with the largest
configuration that a ConfigMap holds; one has ``SMALL`` small ones; one edits a proxy 20 times a second. Another tenant
edits its own proxy again and again; its time goes from the request until the status says that all of it is verified.
Beside each edit it makes one write that no operator takes part in, so that what the API server itself lets it wait for
is told apart: an edit takes several requests one after the other. All figures are of one run: the other tenant alone,
while everything is created as fast as an API server takes it, with all of it there, at a restart, and while resyncs go
on.
"""

import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx2

from benchmarks.situation import (
    AS_SHIPPED,
    MIB,
    MODULE,
    create_all,
    edit_latency_s,
    edit_of,
    in_background,
    make_namespace,
    measured,
    random_text,
    reconciled,
    reports_of,
    small,
)
from operator_app.api.kinds import CONFIG_MAP, ENVOY_PROXY, Key, Object
from operator_app.api.models import MAX_ENDPOINTS, MAX_ROUTES, MAX_TEXT
from operator_app.api.placement import MAX_ANNOTATIONS_TEXT
from tests.e2e.controlplane import ControlPlane
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import a_proxy, wait_reconciled
from tests.e2e.shipped import CRDS, operator_identity

BIG_TENANT, MANY_TENANT, EDITOR, VICTIM = "big", "many", "editor", "victim"
BARE: Final = Key(VICTIM, "bare")
EDITS_PER_S: Final = 20
SAMPLES: Final = 200
ALONE: Final = 50
PAUSE_S: Final = 0.1
LONGEST_S: Final = 1_800.0
"""Bound of each situation; what is not done by then is told."""


def big(namespace: str, number: int) -> Object:
    """One of the biggest proxies that the schema accepts, with 200 kB of annotations of its own."""
    chance = random.Random(number)
    spec = full_lists(chance) if number % 2 else large_configuration(chance)
    annotations = {f"example.com/a{n}": random_text(chance, 4_000) for n in range(MAX_ANNOTATIONS_TEXT // 4_100)}
    proxy = a_proxy(namespace, f"big{number}", replicas=0, **spec, service={"annotations": annotations})
    proxy["metadata"]["annotations"] = {"example.com/noise": random_text(chance, 200_000)}
    return proxy


def full_lists(chance: random.Random) -> Object:
    """As many routes, backends and endpoints as there may be (512, 64 and 1,024), and two hosts for each route."""
    routes = [
        {
            "match": {"hosts": [random_text(chance, 3) + ".a" for _ in range(2)], "pathPrefix": f"/{route}"},
            "backend": f"b{route}",
        }
        for route in range(64)
    ]
    backends = [
        {
            "name": f"b{each}",
            "endpoints": [{"host": f"{random_text(chance, 7)}.svc", "port": 80} for _ in range(MAX_ENDPOINTS // 64)],
        }
        for each in range(64)
    ]
    return {"listeners": [_listener(each, routes) for each in range(MAX_ROUTES // 64)], "backends": backends}


def large_configuration(chance: random.Random) -> Object:
    """Long paths for every host, repeated for each of 14 hosts: a configuration of nearly 1 MB."""
    shared = [{"match": {"pathPrefix": f"/{random_text(chance, 990)}"}, "backend": "app"} for _ in range(14)]
    own = [{"match": {"hosts": [f"h{each}.example.com"], "pathPrefix": "/own"}, "backend": "app"} for each in range(14)]
    spec: Object = {"listeners": [_listener(each, shared + own) for each in range(4)]}
    assert MAX_TEXT > 4 * 14 * 1_000
    return spec


def _listener(number: int, routes: list[Object]) -> Object:
    return {"name": f"l{number}", "port": 8000 + number, "routes": routes}


def edit_for_ever(kubeconfig: Path) -> None:
    """Change one proxy ``EDITS_PER_S`` times a second."""
    with Kube(kubeconfig) as admin:
        begun = time.monotonic()
        for number in itertools.count():
            with contextlib.suppress(httpx2.TransportError):
                admin.patch(ENVOY_PROXY, Key(EDITOR, "web"), edit_of(number))
            time.sleep(max(0.0, begun + number / EDITS_PER_S - time.monotonic()))


class Bench:
    """The operator and the other tenant."""

    def __init__(self, admin: Kube, operator: OperatorProcess) -> None:
        self.admin = admin
        self.operator = operator
        self._edits = itertools.count()

    def sample(self, situation: str, is_over: Callable[[], bool], *, samples: int = SAMPLES) -> None:
        """Edit the other tenant's proxy until it is over, at least ``samples`` times, and print what was measured."""
        since, begun = len(reports_of(self.operator)), time.monotonic()
        times: list[float] = []
        bare: list[float] = []
        checked = begun
        over = False
        while len(times) < samples or not over:
            number = next(self._edits)
            times.append(edit_latency_s(self.admin, Key(VICTIM, "web"), number))
            bare.append(self._bare_write_s(number))
            time.sleep(PAUSE_S)
            if not over and time.monotonic() - checked > 20:
                checked = time.monotonic()
                over = is_over() or checked - begun > LONGEST_S
        time.sleep(1.5)
        found = measured(self.operator, since)
        times.sort()
        bare.sort()
        print(
            f"{situation:<28} {time.monotonic() - begun:>6.0f}  {found.peak_bytes / MIB:>8.0f}"
            f"  {found.rss_bytes / MIB:>7.0f}  {found.block_s * 1000:>7.0f}  {found.block_cpu_s * 1000:>6.0f}"
            f"  {len(times):>4}  {statistics.median(times):>6.3f}  {_p99(times):>6.3f}  {times[-1]:>6.3f}"
            f"  {statistics.median(bare):>6.3f}  {_p99(bare):>6.3f}  {found.block}",
            flush=True,
        )

    def _bare_write_s(self, number: int) -> float:
        """Seconds of one write of the other tenant that only the API server sees."""
        begun = time.monotonic()
        self.admin.patch(CONFIG_MAP, BARE, {"data": {"number": str(number)}})
        return time.monotonic() - begun


def _p99(ordered: list[float]) -> float:
    return ordered[max(0, int(len(ordered) * 0.99) - 1)]


def situations(bench: Bench, cluster: ControlPlane, bigs: int, smalls: int) -> Iterator[str]:
    """Each situation, sampled; yields what is left undone in it."""
    with ExitStack() as running:
        bench.sample("the other tenant alone", lambda: True, samples=ALONE)
        running.enter_context(in_background(edit_for_ever, cluster.kubeconfig))
        running.enter_context(in_background(create_all, cluster.kubeconfig, big, [BIG_TENANT], bigs, 1))
        running.enter_context(in_background(create_all, cluster.kubeconfig, small, [MANY_TENANT], smalls))
        wanted = {BIG_TENANT: bigs, MANY_TENANT: smalls}

        def undone() -> str:
            done = {namespace: reconciled(bench.admin, namespace) for namespace in wanted}
            return ", ".join(
                f"{done[each]} of {wanted[each]} of {each}" for each in wanted if done[each] < wanted[each]
            )

        bench.sample("all is created", lambda: not undone())
        yield undone()
        bench.sample("all is there", lambda: True)
        yield ""
        bench.operator.stop()
        bench.operator.start(*AS_SHIPPED, module=MODULE, wait=False)
        bench.sample("restart", lambda: bench.operator.metric("operator_app_queue_keys") < 10)
        yield ""
        bench.operator.stop()
        bench.operator.start(*AS_SHIPPED, "--sweep-interval-s=120", module=MODULE, wait=False)
        bench.sample("restart, resync every 120 s", lambda: True)
        yield ""


def main() -> None:
    """Print the table as it grows."""
    bigs = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    smalls = int(sys.argv[2]) if len(sys.argv) > 2 else 2_000
    print(f"{bigs} of the biggest objects, {smalls} small ones, {EDITS_PER_S} edits a second")
    print(
        f"{'situation':<28} {'s':>6}  {'peak MiB':>8}  {'now MiB':>7}  {'loop ms':>7}  {'CPU ms':>6}"
        f"  {'n':>4}  {'p50 s':>6}  {'p99 s':>6}  {'max s':>6}  {'bare':>6}  {'p99 s':>6}  longest step"
    )
    with (
        ControlPlane(crds=CRDS, audit_bodies=False) as cluster,
        Kube(cluster.kubeconfig) as admin,
        tempfile.TemporaryDirectory() as scratch,
    ):
        operator = OperatorProcess(operator_identity(cluster, admin), Path(scratch, "operator.log"))
        for name in (BIG_TENANT, MANY_TENANT, EDITOR, VICTIM):
            make_namespace(admin, name)
        for name in (EDITOR, VICTIM):
            admin.create(ENVOY_PROXY, a_proxy(name, replicas=0))
        metadata = {"namespace": BARE.namespace, "name": BARE.name}
        admin.create(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
        operator.start(*AS_SHIPPED, module=MODULE, wait=False)
        try:
            wait_reconciled(admin, Key(VICTIM, "web"))
            for undone in situations(Bench(admin, operator), cluster, bigs, smalls):
                if undone:
                    print(f"not done within {LONGEST_S:.0f} s: {undone}", flush=True)
        finally:
            operator.kill()


if __name__ == "__main__":
    main()
