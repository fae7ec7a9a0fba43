"""The end-to-end suite as a process of its own, on clusters that it is given by ``E2E_KUBECONFIG``."""

import json
import os
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from operator_app.api.kinds import DEPLOYMENT
from tests.cluster import shares
from tests.cluster.installed import OPERATOR, Installed
from tests.e2e import leash
from tests.e2e.controlplane import Report
from tests.e2e.kube import wait_until
from tests.e2e.node.fixture import NETWORK_VARIABLE
from tests.paths import ROOT

GONE_TIMEOUT_S: Final = 60.0
ARGUMENTS_VARIABLE: Final = "SUITE_ARGS"
"""More arguments for the suite's pytest: which tests, for example (``SUITE_ARGS="-k drift"``)."""


class Suite:
    """The suite on one or more clusters. ``start`` may be called by whoever comes first; ``wait`` starts it otherwise.

    Each cluster has a worker of its own: two operators on one cluster would be two writers of everything.
    """

    def __init__(self, clusters: Sequence[Installed], directory: Path, report: Report) -> None:
        self.clusters = clusters
        self.output = directory / "output.txt"
        self._results = directory / "results.xml"
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Send the installed operators away and start."""
        if self._process is not None:
            return
        for cluster in self.clusters:
            # The tests start operators of their own under the shipped ServiceAccount.
            cluster.admin.patch(DEPLOYMENT, OPERATOR, {"spec": {"replicas": 0}}, subresource="scale")
            wait_until(lambda cluster=cluster: not cluster.pods(), GONE_TIMEOUT_S, "the end of the operator's Pods")  # type: ignore[misc]
        # The other tests there use no cluster, or start one of their own: on these they would show nothing.
        arguments = ["tests/e2e", "-m", "api_server", "-p", "no:cacheprovider", "--color=no"]
        arguments += [f"--junitxml={self._results}", "-p", shares.__name__]
        if len(self.clusters) > 1:
            arguments += [f"-n{len(self.clusters)}", "--dist=loadfile", "--max-worker-restart=0"]
        arguments += shlex.split(os.environ.get(ARGUMENTS_VARIABLE, ""))
        self._report(f"suite: started on {len(self.clusters)} of its clusters")
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.leashed_pytest", *arguments],
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in leash.environment().items() if not name.startswith("PYTEST_")}
        named = [_named(cluster) for cluster in self.clusters]
        return own | named[0] | {shares.CLUSTERS_VARIABLE: json.dumps(named)}

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        self.start()
        assert self._process is not None
        if self._process.returncode is None:
            self._process.wait()
            self._report(f"suite: {self._summary()}")
        return self._process.returncode

    def skipped(self) -> dict[str, str]:
        """The reason of each test that was skipped."""
        cases = ET.parse(self._results).iter("testcase")  # noqa: S314  # it was written by our own pytest
        found = ((case.get("name", ""), case.find("skipped")) for case in cases)
        return {name: skipped.get("message", "") for name, skipped in found if skipped is not None}

    def stop(self) -> None:
        """End it, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    def _summary(self) -> str:
        lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
        return lines[-1].strip("= ")


def _named(cluster: Installed) -> dict[str, str]:
    """The variables by which the tests know a cluster."""
    network = {} if cluster.nodes.network is None else {NETWORK_VARIABLE: str(cluster.nodes.network.namespace)}
    return {"E2E_KUBECONFIG": str(cluster.kubeconfig), "E2E_AUDIT_LOG": str(cluster.log)} | network
