"""How large the operator's image is, and how long a Pod of it takes from its start until its stores are in sync.

Run as ``python -m benchmarks.image [STARTS]`` (10 by default), or ``make bench-image``; root, as for the node. The
image is that of the working tree. Each start is a new Pod of the shipped Deployment on a node that has the image, with
no proxies in the cluster; the time is that from the start of the process (by its age) to its log line ``synced`` (by
the runtime's time stamp). Beside it stands the processor time that the process has had until it was ready, which a
busy machine changes little.
"""

import json
import statistics
import subprocess
import sys
import tarfile
import time
from datetime import datetime
from pathlib import Path
from typing import Final

from operator_app.api.kinds import DEPLOYMENT, Key
from tests.delivery.images import operator_archive
from tests.e2e.controlplane import ControlPlane
from tests.e2e.kube import POD, Kube, wait_until
from tests.e2e.node import Node
from tests.e2e.operator_process import OPERATOR_NAMESPACE
from tests.paths import ROOT

STARTS: Final = 10
DEPLOYMENT_KEY: Final = Key(OPERATOR_NAMESPACE, "operator-app")
TIMEOUT_S: Final = 120.0
MIB: Final = 2**20

STARTED_AT: Final = """
import os, time
fields = open('/proc/1/stat').read().rpartition(')')[2].split()
ticks = os.sysconf('SC_CLK_TCK')
age_s = float(open('/proc/uptime').read().split()[0]) - int(fields[19]) / ticks
print(time.time() - age_s, (int(fields[11]) + int(fields[12])) / ticks)
"""
"""Prints when process 1 was started, in seconds of the epoch, and its processor time until now, in seconds."""


class Cluster:
    """A cluster with one replica of the operator."""

    def __init__(self, plane: ControlPlane, admin: Kube) -> None:
        self._kubeconfig = plane.kubeconfig
        self._admin = admin

    def install(self) -> None:
        """Install what is shipped, and keep one replica."""
        self._kubectl("apply", "--server-side", "-k", "manifests")
        self._admin.patch(DEPLOYMENT, DEPLOYMENT_KEY, {"spec": {"replicas": 1}}, subresource="scale")

    def start(self) -> tuple[float, float]:
        """Seconds from the start of a new Pod's process until it was in sync, and its processor time until ready.

        All earlier Pods are gone by then.
        """
        old = self._pods()
        for pod in old:
            self._admin.delete(POD, Key(OPERATOR_NAMESPACE, pod))
        wait_until(lambda: not set(old) & set(self._pods()), TIMEOUT_S, "the end of earlier Pods")
        (pod,) = wait_until(self._ready, TIMEOUT_S, "a ready Pod")
        said = self._kubectl("-n", OPERATOR_NAMESPACE, "exec", pod, "--", "python", "-c", STARTED_AT)
        started_at, busy_s = map(float, said.split())
        for line in self._kubectl("-n", OPERATOR_NAMESPACE, "logs", "--timestamps", pod).splitlines():
            stamp, _, entry = line.partition(" ")
            if entry.startswith("{") and json.loads(entry).get("event") == "synced":
                return datetime.fromisoformat(stamp).timestamp() - started_at, busy_s
        raise AssertionError(f"{pod} is ready and has not logged that it is in sync")

    def _pods(self) -> list[str]:
        found = self._admin.list(POD, OPERATOR_NAMESPACE, label_selector="app.kubernetes.io/name=operator-app")
        return [each["metadata"]["name"] for each in found]

    def _ready(self) -> list[str]:
        found = self._admin.list(POD, OPERATOR_NAMESPACE, label_selector="app.kubernetes.io/name=operator-app")
        statuses = {each["metadata"]["name"]: each["status"].get("containerStatuses") or [] for each in found}
        return [name for name, containers in statuses.items() if containers and containers[0]["ready"]]

    def _kubectl(self, *arguments: str) -> str:
        command = ("kubectl", f"--kubeconfig={self._kubeconfig}", *arguments)
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: S603


def tell_size(archive: Path) -> None:
    """Print what the image's layers hold, uncompressed, by their largest directories."""
    directories: dict[str, int] = {}
    with tarfile.open(archive) as image:
        (manifest,) = json.load(image.extractfile("manifest.json"))  # type: ignore[arg-type]  # it is a file
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=image.extractfile(layer)) as files:
                for member in files:
                    top = "/".join(member.name.strip("./").split("/")[:4])
                    directories[top] = directories.get(top, 0) + member.size
    print(f"image: {sum(directories.values()) / MIB:.1f} MiB in {len(manifest['Layers'])} layers")
    for name, size_bytes in sorted(directories.items(), key=lambda item: -item[1])[:8]:
        print(f"  {size_bytes / MIB:6.1f} MiB  /{name}")


def main() -> None:
    """Build, start, measure, and print."""
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else STARTS
    archive = operator_archive(print)
    tell_size(archive)
    with ControlPlane() as plane, Node(plane, more_images=[archive]), Kube(plane.kubeconfig) as admin:
        cluster = Cluster(plane, admin)
        cluster.install()
        found = []
        for _ in range(starts):
            found.append(cluster.start())
            time.sleep(1)
    took_s, busy_s = zip(*found, strict=True)
    print(f"start to in sync, {starts} starts: p50 {statistics.median(took_s):.2f} s, longest {max(took_s):.2f} s")
    print(f"processor time until ready: p50 {statistics.median(busy_s):.2f} s")


if __name__ == "__main__":
    main()
