"""The Node object and its Lease: what makes the scheduler trust the node with Pods."""

import logging
import os
import platform
from datetime import UTC, datetime
from typing import Final

import anyio
import httpx2

from operator_app.api.kinds import Object
from tests.e2e.node.client import MERGE, request
from tests.e2e.node.status import timestamp

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 10
LEASE_S: Final = 40
"""The kubelet's own values: ``nodeLeaseDurationSeconds`` 40, renewed after a quarter of it."""

MODE_LABEL: Final = "standin"
RUNS_ENVOY: Final = "envoy"
VALIDATES_ONLY: Final = "validate-only"

# No limit is enforced, so the node claims more than any test asks for; Pods are limited by the addresses of a /24.
CAPACITY: Final = {"cpu": "1k", "memory": "1Ti", "ephemeral-storage": "1Ti", "pods": "250"}


def node_object(name: str, mode: str, host_ip: str, now: datetime) -> Object:
    """The Node as it registers: Ready, without taints."""
    condition = {"lastHeartbeatTime": timestamp(now), "lastTransitionTime": timestamp(now)}
    backpressure = {"status": "False", "reason": "StandIn", "message": "never under backpressure", **condition}
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": machine,
                MODE_LABEL: mode,
            },
        },
        "spec": {},
        "status": {
            "capacity": CAPACITY,
            "allocatable": CAPACITY,
            "addresses": [{"type": "Hostname", "address": name}, {"type": "InternalIP", "address": host_ip}],
            "conditions": [
                *({"type": kind, **backpressure} for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")),
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "StandInReady",
                    "message": f"the stand-in node is ready, mode {mode}",
                    **condition,
                },
            ],
            "nodeInfo": {
                "machineID": name,
                "systemUUID": name,
                "bootID": name,
                "kernelVersion": platform.release(),
                "osImage": "stand-in",
                "containerRuntimeVersion": f"standin://{os.getpid()}",
                "kubeletVersion": "v1.36.0-standin",
                "kubeProxyVersion": "",
                "operatingSystem": "linux",
                "architecture": machine,
            },
        },
    }


async def register(http: httpx2.AsyncClient, node: Object) -> None:
    """Create the Node, or take over the one of an earlier run; afterwards the scheduler may use it.

    Admission taints every new Node as not ready, and the node lifecycle controller takes that back; the node does it
    itself too, which saves the wait and needs no such controller.
    """
    path = f"/api/v1/nodes/{node['metadata']['name']}"
    try:
        await request(http, "POST", "/api/v1/nodes", node)
    except httpx2.HTTPStatusError as error:
        if error.response.status_code != httpx2.codes.CONFLICT:
            raise
        await request(http, "PATCH", path, {"metadata": {"labels": node["metadata"]["labels"]}}, MERGE)
    await request(http, "PATCH", f"{path}/status", {"status": node["status"]}, MERGE)
    await request(http, "PATCH", path, {"spec": {"taints": None, "unschedulable": None}}, MERGE)


async def unregister(http: httpx2.AsyncClient, name: str) -> None:
    """Remove the Node and its Lease, as far as the API server still answers."""
    for path in (f"/api/v1/nodes/{name}", f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}"):
        try:
            await http.delete(path, timeout=2)
        except httpx2.HTTPError as error:
            log.info("left behind: %s (%r)", path, error)
            return


async def keep_lease(http: httpx2.AsyncClient, name: str) -> None:
    """Renew the node's Lease until cancelled; a failed renewal is simply followed by the next."""
    leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    while True:
        spec = {
            "holderIdentity": name,
            "leaseDurationSeconds": LEASE_S,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        delay_s: float = HEARTBEAT_S
        try:
            await request(http, "PATCH", f"{leases}/{name}", {"spec": spec}, MERGE)
        except httpx2.HTTPError as error:
            delay_s = 1
            if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code == httpx2.codes.NOT_FOUND:
                await _create_lease(http, leases, name, spec)
        await anyio.sleep(delay_s)


async def _create_lease(http: httpx2.AsyncClient, leases: str, name: str, spec: Object) -> None:
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": "kube-node-lease"},
        "spec": spec,
    }
    try:
        await request(http, "POST", leases, lease)
    except httpx2.HTTPError as error:
        # The namespace is made by the API server shortly after its start.
        log.info("no node lease yet: %r", error)
