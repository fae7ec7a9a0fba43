"""A whole run of these tests that is killed leaves nothing behind, whatever it has started."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.cluster.suite import ARGUMENTS_VARIABLE
from tests.e2e.kube import wait_until
from tests.e2e.node import cgroups
from tests.e2e.process_tree import alive, command_line, family_of, node_mounts
from tests.paths import ROOT

START_TIMEOUT_S: Final = 900.0
END_TIMEOUT_S: Final = 90.0
PROGRAMS: Final = (
    "kube-apiserver",
    "kubelet",
    "containerd",
    "tests.cluster.leashed_pytest",
    "tests.e2e.leashed_operator",
)


@pytest.mark.timeout(1500)  # building the image first
@pytest.mark.usefixtures("image")
@pytest.mark.skipif("E2E_KUBECONFIG" in os.environ, reason="it starts clusters of its own")
def test_a_run_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """After ``kill -9`` of pytest: no cluster, no node, no suite and no operator of it, no mount and no cgroup."""
    mounts = node_mounts()
    command = [sys.executable, "-m", "pytest", "tests/cluster", "-k", "probes or suite", "-p", "no:cacheprovider"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = inherited | {ARGUMENTS_VARIABLE: "-k test_leases"}
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def started() -> dict[int, str] | None:
        assert run.poll() is None, (tmp_path / "output").read_text(encoding="utf-8")[-5000:]
        family = family_of(run.pid)
        commands = b" ".join(map(command_line, family))
        return family if all(each.encode() in commands for each in PROGRAMS) else None

    try:
        family = wait_until(started, START_TIMEOUT_S, "all kinds of processes")
    finally:
        run.kill()
        run.wait()
    wait_until(lambda: not alive(family), END_TIMEOUT_S, "the end of all processes")
    wait_until(lambda: not cgroups.of_keepers(family), END_TIMEOUT_S, "the end of its cgroups")
    assert node_mounts() <= mounts
