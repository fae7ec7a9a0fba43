"""The end-to-end suite as a process of its own, on a cluster that it is given by ``E2E_KUBECONFIG``."""

import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final

from operator_app.api.kinds import DEPLOYMENT
from tests.cluster.installed import OPERATOR, Installed
from tests.e2e import leash
from tests.e2e.controlplane import Report
from tests.e2e.kube import wait_until
from tests.paths import ROOT

GONE_TIMEOUT_S: Final = 60.0
ARGUMENTS_VARIABLE: Final = "SUITE_ARGS"
"""More arguments for the suite's pytest: which tests, for example."""


class Suite:
    """The whole suite on one cluster. ``start`` may be called by whoever comes first; ``wait`` starts it otherwise."""

    def __init__(self, cluster: Installed, directory: Path, report: Report) -> None:
        self.cluster = cluster
        self.output = directory / "output.txt"
        self._results = directory / "results.xml"
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Send the installed operator away and start."""
        if self._process is not None:
            return
        # The tests start operators of their own under the shipped ServiceAccount; two would be two writers.
        self.cluster.admin.patch(DEPLOYMENT, OPERATOR, {"spec": {"replicas": 0}}, subresource="scale")
        wait_until(lambda: not self.cluster.pods(), GONE_TIMEOUT_S, "the end of the operator's Pods")
        given = {
            "E2E_KUBECONFIG": str(self.cluster.kubeconfig),
            "E2E_AUDIT_LOG": str(self.cluster.log),
        }
        if self.cluster.nodes.local is not None:
            given["E2E_NETWORK"] = str(self.cluster.nodes.local.network)
        environment = {
            name: value for name, value in leash.environment().items() if not name.startswith("PYTEST_")
        } | given
        arguments = ["tests/e2e", "-p", "no:cacheprovider", "--color=no", f"--junitxml={self._results}"]
        self._report("suite: started; it runs beside the other tests")
        self._started_mono = time.monotonic()
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.cluster.leashed_pytest",
                    *arguments,
                    *shlex.split(os.environ.get(ARGUMENTS_VARIABLE, "")),
                ],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

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
