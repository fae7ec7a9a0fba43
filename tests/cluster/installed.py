"""The handle of a cluster on which the operator runs as it is shipped, and what tests do to its processes."""

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import LEASE, SERVICE, Key, Object
from operator_app.desired import child_key
from operator_app.sharding.leases import shard_lease_name
from tests.e2e.controlplane import AuditLog
from tests.e2e.kube import POD, Kube
from tests.e2e.node.fixture import Nodes
from tests.e2e.node.network import get
from tests.e2e.operator_process import OPERATOR_NAMESPACE
from tests.paths import MANIFESTS, ROOT

OPERATOR: Final = Key(OPERATOR_NAMESPACE, "operator-app")
SAMPLE: Final = MANIFESTS / "samples" / "checkout.yaml"
PROXY: Final = Key("team-a", "checkout")
"""The sample's."""

RESTRICTED: Final = "pod-security.kubernetes.io/enforce"
INSTALL_TIMEOUT_S: Final = 120.0
READY_TIMEOUT_S: Final = 120.0
KUBECTL_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Installed:
    """A cluster on which the operator runs as it is shipped; ``log`` is the file of its audit log."""

    kubeconfig: Path
    admin: Kube
    audit: AuditLog
    nodes: Nodes
    log: Path

    def kubectl(self, *arguments: str) -> str:
        """What kubectl prints, as the administrator. Fails the test where kubectl does."""
        done = self.tried(*arguments)
        if done.returncode != 0:
            pytest.fail(f"{' '.join(arguments)} failed: {done.stdout[-2000:]}\n{done.stderr[-2000:]}", pytrace=False)
        return done.stdout

    def tried(self, *arguments: str, given: str = "") -> "subprocess.CompletedProcess[str]":
        """The exit code of kubectl and what it prints, as the administrator; ``given`` is its standard input."""
        command = ("kubectl", f"--kubeconfig={self.kubeconfig}", *arguments)
        return subprocess.run(
            command, cwd=ROOT, input=given, capture_output=True, text=True, check=False, timeout=KUBECTL_TIMEOUT_S
        )

    def execute(self, pod: str, *command: str) -> str:
        """What a command in an operator's Pod prints."""
        return self.kubectl("-n", OPERATOR.namespace, "exec", pod, "--", *command)

    def inside(self) -> AbstractContextManager[None]:
        """In this block, what this thread connects to is looked for where Pods and Services are."""
        return self.nodes.inside()

    def ask(self, path: str = "/") -> tuple[int, str]:
        """Status and text of one answer at the cluster IP of the sample's Service, on a connection of its own.

        The status is 0 where there is no whole answer.
        """
        address = self.admin.get(SERVICE, child_key(PROXY))["spec"]["clusterIP"]
        with self.inside():
            try:
                code, text = get(address, 80, path, host="checkout.example.com")
            except OSError as error:
                return 0, repr(error)
        return code, text.strip()

    def pods(self) -> list[Object]:
        """The operator's Pods that stay."""
        found = self.admin.list(POD, OPERATOR.namespace, label_selector="app.kubernetes.io/name=operator-app")
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    def leader(self) -> Object | None:
        """The Pod that holds the shard, while one does that stays."""
        lease = self.admin.find(LEASE, Key(OPERATOR.namespace, shard_lease_name(0)))
        holder = lease["spec"].get("holderIdentity") if lease else None
        return next((each for each in self.pods() if each["metadata"]["name"] == holder), None)

    def signal(self, pod: Object, number: signal.Signals) -> None:
        """Send a signal to the process of a Pod's one container, from outside of all its namespaces."""
        os.kill(process_of(pod), number)


def install(cluster: Installed) -> None:
    """Install the CRDs and the operator as the documentation says."""
    cluster.kubectl("apply", "--server-side", "-k", "manifests")


def process_of(pod: Object) -> int:
    """The process id, on this machine, of a Pod's one container; it is found by its cgroup.

    A node's containers are processes of this machine, both where the node runs here and in a container of kind's.
    """
    (container,) = pod["status"]["containerStatuses"]
    name = container["containerID"].rpartition("/")[2]
    for file in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            if name in file.read_text(encoding="utf-8"):
                return int(file.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    msg = f"no process of this machine is in the cgroup of container {name}"
    raise ProcessLookupError(msg)


def available(replicas: int) -> Callable[[Object], bool]:
    """A predicate: a Deployment has that many Pods, all of its newest template and all available."""

    def predicate(deployment: Object) -> bool:
        status = deployment.get("status") or {}
        counts = {status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")}
        return counts == {replicas} and status.get("observedGeneration") == deployment["metadata"]["generation"]

    return predicate


def restarts(pods: list[Object]) -> int:
    """How often the containers of Pods were started again."""
    return sum(each["restartCount"] for pod in pods for each in pod["status"].get("containerStatuses", ()))
