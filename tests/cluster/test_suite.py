"""The whole end-to-end suite, on the cluster that the operator was installed on: nobody's but its audit log is read."""

import os
import subprocess
import sys
import time

import pytest

from operator_app.api.kinds import DEPLOYMENT
from tests.cluster.conftest import OPERATOR, Installed
from tests.e2e.controlplane import Report
from tests.e2e.kube import wait_until
from tests.paths import ROOT

GONE_TIMEOUT_S = 60.0


@pytest.mark.timeout(3000)
def test_the_end_to_end_suite_passes(installed: Installed, report: Report) -> None:
    """Every test passes here, too, with the shipped RBAC and Pods that really run; what is skipped says why."""
    # The tests start operators of their own under the shipped ServiceAccount; two would be two writers.
    scale = {"spec": {"replicas": 0}}
    installed.admin.patch(DEPLOYMENT, OPERATOR, scale, subresource="scale")
    wait_until(lambda: not installed.pods(), GONE_TIMEOUT_S, "the end of the operator's Pods")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {
        "E2E_KUBECONFIG": str(installed.plane.kubeconfig),
        "E2E_AUDIT_LOG": str(installed.plane.audit_log),
        "E2E_NETWORK": str(installed.node.network),
    }
    arguments = os.environ.get("SUITE_ARGS", "").split()
    command = [sys.executable, "-m", "pytest", "tests/e2e", "--color=no", *arguments]
    started_mono = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as suite:
        assert suite.stdout is not None
        for line in suite.stdout:
            report(f"suite: {line.rstrip()}")
    report(f"suite: took {time.monotonic() - started_mono:.0f} s")
    assert suite.returncode == 0
