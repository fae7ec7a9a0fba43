"""``python -m tests.e2e.faults``: every fault at every point, on a control plane of its own.

Shows progress, writes ``docs/reliability.md``, and ends with ``points tried: N, survived: M``. The exit code is 0 only
if these are equal, every planned fault was injected, no round crashed, and no operator counted a write that changed
nothing or wrote without its shard's Lease. Otherwise the logs of the operators stay in a temporary directory that the
output names; nothing stays where there are none, or where all is well.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tests.e2e.controlplane import BuildError, ControlPlane, StartError, ToolchainError
from tests.e2e.faults import lives, outside
from tests.e2e.faults.campaign import Campaign, Run
from tests.e2e.faults.catalogue import everything
from tests.e2e.faults.conduct import conduct
from tests.e2e.faults.report import counts, distinct_points, failures, page, unreached
from tests.e2e.faults.scenarios import SCENARIOS
from tests.e2e.kube import Kube
from tests.e2e.node.packages import PackagesError
from tests.e2e.shipped import CRDS, operator_identity
from tests.paths import ROOT

PAGE: Final = ROOT / "docs" / "reliability.md"
DIRECTORY_PREFIX: Final = "operator-app-faults-"
QUIET_S: Final = 20.0
RESYNC_INTERVAL_S: Final = 6.0
RECORDINGS: Final = 3

Report = Callable[[str], None]


def main() -> int:
    """Run everything; returns the exit code."""
    begun_mono = time.monotonic()

    def report(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - begun_mono), 60)
        print(f"{minutes:2d}:{seconds:02d} {line}", flush=True)

    directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
    is_good = False
    try:
        runs, complaints = _experiment(directory, report)
        calls = [*outside.everything(directory, report), *lives.everything(directory, report)]
        is_good = _reported(runs, calls, complaints, report)
    except (BuildError, StartError, ToolchainError, PackagesError) as error:
        print(f"faults: {error}", file=sys.stderr)
    finally:
        if is_good or not any(directory.iterdir()):
            shutil.rmtree(directory)
        else:
            report(f"logs are in {directory}")
    return 0 if is_good else 1


def _experiment(directory: Path, report: Report) -> tuple[list[Run], list[str]]:
    with ControlPlane(crds=CRDS, report=report) as control_plane, Kube(control_plane.kubeconfig) as admin:
        kubeconfig = operator_identity(control_plane, admin)
        with Campaign(admin, kubeconfig, control_plane.audit(), directory) as campaign:
            report(f"recording the points of {len(SCENARIOS)} undisturbed scenarios")
            catalogue = everything(campaign.record(SCENARIOS, times=RECORDINGS))
            report(f"{len(catalogue)} runs to make")
            runs = conduct(campaign, catalogue, quiet_s=QUIET_S, resync_interval_s=RESYNC_INTERVAL_S, report=report)
            return runs, campaign.complaints


def _reported(
    runs: Sequence[Run], calls: Sequence[outside.OutsideRun], complaints: Sequence[str], report: Report
) -> bool:
    """Write the page and report what went wrong; returns whether nothing did."""
    text = page(
        runs,
        calls,
        complaints,
        quiet_s=QUIET_S,
        resync_interval_s=RESYNC_INTERVAL_S,
        commit=_commit(),
        machine=f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}",
    )
    PAGE.write_text(text, encoding="utf-8")
    for run in unreached(runs):
        report(f"not reached: {run}")
    for failure in failures(runs, calls, complaints):
        report(f"FAILED: {failure}")
    tried, survived = counts(runs, calls)
    report(f"{distinct_points(runs)} points, {tried} runs with a fault at one of them")
    print(f"points tried: {tried}, survived: {survived}")
    return tried == survived and not unreached(runs) and not complaints


def _commit() -> str:
    """The commit that is tried, and whether there is more in the working tree."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
