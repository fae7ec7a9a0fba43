"""How fast the operator makes what is declared, against the same writes by a script that decides nothing.

Run as ``python -m benchmarks.converge [N]`` (300 by default) or ``make bench-converge``. N proxies of 10 tenants exist
before anything begins. The *floor* sends the seven writes of a first reconcile for each proxy (finalizer, ConfigMap,
Service, Deployment, record, two statuses), with the operator's own client, as many proxies at a time as it has workers,
and what depends on each other in its order; it reads nothing, watches nothing and compares nothing. Before it, the
operator does the same for as many other proxies. Both on one control plane, one after the other, in processes of their
own.
"""

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import anyio

from benchmarks.situation import AS_SHIPPED, MODULE, create_all, make_namespace, reconciled, reports_of
from operator_app.api.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    FINALIZER,
    PROXY_REGISTRATION,
    SERVICE,
    Kind,
    Object,
)
from operator_app.api.models import parse_spec
from operator_app.apply import IMPOSSIBLE_VERSION
from operator_app.desired import children
from operator_app.kube.client import Cluster
from operator_app.settings import Settings
from tests.e2e.controlplane import ControlPlane
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.proxies import a_proxy
from tests.e2e.shipped import CRDS, operator_identity

TENANTS: Final = 10
WRITES: Final = 7
TIMEOUT_S: Final = 900.0


SETTLING_S: Final = 10.0
"""Between the two, so that neither's Pods are made beside the other's writes."""


def plain(namespace: str, number: int) -> Object:
    """The smallest useful proxy. No node runs its Pod, whose number is the second status."""
    return a_proxy(namespace, f"p{number}")


class Floor:
    """The same writes, and nothing else. Each proxy's are its own, so that none conflicts."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def write(self, proxy: Object) -> None:
        """The seven writes of one proxy: what does not depend on each other at the same time."""
        desired = children(proxy, parse_spec(proxy), default_image="envoy")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._finalize, proxy)
            tasks.start_soon(self._create, SERVICE, desired[SERVICE])
            tasks.start_soon(self._in_turn, desired)
        await self._create(PROXY_REGISTRATION, record_of(proxy))
        for replicas in (0, 1):
            body = {name: proxy[name] for name in ("apiVersion", "kind")}
            metadata = {name: proxy["metadata"][name] for name in ("name", "namespace")}
            status = {"observedGeneration": 1, "replicas": replicas, "conditions": [a_condition()]}
            await self._cluster.apply(
                ENVOY_PROXY, body | {"metadata": metadata, "status": status}, force=True, subresource="status"
            )

    async def _in_turn(self, desired: dict[Kind, Object]) -> None:
        await self._create(CONFIG_MAP, desired[CONFIG_MAP])
        await self._create(DEPLOYMENT, desired[DEPLOYMENT])

    async def _finalize(self, proxy: Object) -> None:
        metadata = {name: proxy["metadata"][name] for name in ("name", "namespace", "uid")}
        body = {"apiVersion": proxy["apiVersion"], "kind": proxy["kind"]}
        await self._cluster.apply(ENVOY_PROXY, body | {"metadata": metadata | {"finalizers": [FINALIZER]}}, force=True)

    async def _create(self, kind: Kind, obj: Object) -> None:
        pinned = obj | {"metadata": obj["metadata"] | {"resourceVersion": IMPOSSIBLE_VERSION}}
        applied = await self._cluster.apply(kind, pinned, force=False)
        assert applied.created


def record_of(proxy: Object) -> Object:
    """The record of a proxy, about as the operator has it."""
    metadata = proxy["metadata"]
    named = {"namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": PROXY_REGISTRATION.api_version,
        "kind": PROXY_REGISTRATION.kind,
        "metadata": {"namespace": OPERATOR_NAMESPACE, "name": f"proxy-{metadata['uid']}"},
        "spec": {
            "proxy": named,
            "generation": 1,
            "registry": "in-cluster",
            "state": "Registered",
            "address": f"{metadata['name']}-envoy.{metadata['namespace']}.svc",
            "ports": [{"name": "http", "port": 80, "protocol": "HTTP"}],
        },
    }


def a_condition() -> Object:
    """One condition."""
    told = {"type": "Ready", "status": "False", "reason": "Floor", "message": "written by a benchmark"}
    return told | {"observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}


async def write_all(kubeconfig: Path, proxies: Sequence[Object]) -> None:
    """All writes of all proxies, as many proxies at a time as the operator has workers."""
    settings = Settings()
    limiter = anyio.CapacityLimiter(settings.workers)

    async with Cluster.connect(
        kubeconfig=kubeconfig, user_agent="floor", max_connections=settings.max_connections
    ) as cluster:
        floor = Floor(cluster)

        async def one(proxy: Object) -> None:
            async with limiter:
                await floor.write(proxy)

        async with anyio.create_task_group() as tasks:
            for each in proxies:
                tasks.start_soon(one, each)


def run_floor(kubeconfig: Path, proxies: Sequence[Object], results: Connection) -> None:
    """The process of the floor: sends seconds and CPU seconds."""
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    anyio.run(partial(write_all, kubeconfig, proxies))
    results.send((time.monotonic() - begun_s, time.process_time() - begun_cpu_s))


def floor_of(kubeconfig: Path, admin: Kube, namespaces: Sequence[str]) -> tuple[float, float]:
    """Seconds and CPU seconds of the floor for all proxies of these namespaces."""
    proxies = [each for name in namespaces for each in admin.list(ENVOY_PROXY, name)]
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_floor, args=(kubeconfig, proxies, there))
    process.start()
    assert here.poll(TIMEOUT_S), "the floor does not end"
    took_s, cpu_s = here.recv()
    process.join()
    return took_s, cpu_s


def operator_of(operator: OperatorProcess, admin: Kube, namespaces: Sequence[str], count: int) -> tuple[float, float]:
    """Seconds from the operator's synced caches until all proxies are verified, and its CPU seconds in them."""
    operator.start(*AS_SHIPPED, "--log-level=info", module=MODULE)
    begun_s, since = time.monotonic(), len(reports_of(operator))
    while sum(reconciled(admin, name) for name in namespaces) < count:
        assert time.monotonic() - begun_s < TIMEOUT_S, "the operator does not end"
        time.sleep(0.2)
    took_s = time.monotonic() - begun_s
    time.sleep(1.5)  # the next report is about the time until now
    reports = reports_of(operator)
    return took_s, reports[-1]["cpu_s"] - reports[max(0, since - 1)]["cpu_s"]


def tenants(kubeconfig: Path, admin: Kube, who: str, count: int) -> list[str]:
    """Namespaces with that many new proxies."""
    names = [f"{who}-{number}" for number in range(TENANTS)]
    for name in names:
        make_namespace(admin, name)
    create_all(kubeconfig, plain, names, count)
    return names


def main() -> None:
    """Print what was measured."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    with (
        ControlPlane(crds=CRDS, audit_bodies=False) as cluster,
        Kube(cluster.kubeconfig) as admin,
        tempfile.TemporaryDirectory() as scratch,
    ):
        kubeconfig = operator_identity(cluster, admin)
        operator = OperatorProcess(kubeconfig, Path(scratch, "operator.log"))
        try:
            took_s, cpu_s = operator_of(operator, admin, tenants(cluster.kubeconfig, admin, "operator", count), count)
        finally:
            operator.kill()
        time.sleep(SETTLING_S)
        floor_s, floor_cpu_s = floor_of(kubeconfig, admin, tenants(cluster.kubeconfig, admin, "floor", count))
    print(f"{count} proxies of {TENANTS} tenants, {WRITES} writes each")
    for who, seconds, cpu in (("floor", floor_s, floor_cpu_s), ("operator", took_s, cpu_s)):
        print(
            f"{who:<9} {seconds:6.1f} s  {count / seconds:6.1f} a second  {1000 * cpu / count:5.1f} ms of CPU for each"
        )
    print(json.dumps({"of_the_floor": round(floor_s / took_s, 3), "cpu_ms": round(1000 * cpu_s / count, 1)}))


if __name__ == "__main__":
    main()
