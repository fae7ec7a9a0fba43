"""``python -m tests.e2e.faults``: every fault at every point, on a control plane of its own.

Shows progress, writes ``docs/reliability.md``, and ends with ``points tried: N, survived: M``. The exit code is 0 only
if these are equal, every planned fault struck, no round crashed, and no operator counted a write that changed nothing
or wrote without its shard's Lease. What the operators logged is kept in a directory that is named when something went
wrong.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.e2e.controlplane import BuildError, ControlPlane, StartError, ToolchainError
from tests.e2e.faults.campaign import Campaign, Run
from tests.e2e.faults.catalogue import everything
from tests.e2e.faults.conduct import conduct
from tests.e2e.faults.report import counts, page, unreached
from tests.e2e.faults.scenarios import SCENARIOS
from tests.e2e.kube import Kube
from tests.e2e.shipped import CRDS, operator_identity
from tests.paths import ROOT

PAGE: Final = ROOT / "docs" / "reliability.md"
QUIET_S: Final = 20.0
SWEEP_INTERVAL_S: Final = 6.0
RECORDINGS: Final = 3


def main() -> int:
    """Run everything; the exit code."""
    begun_mono = time.monotonic()

    def report(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - begun_mono), 60)
        print(f"{minutes:2d}:{seconds:02d} {line}", flush=True)

    directory = Path(tempfile.mkdtemp(prefix="operator-app-faults-"))
    try:
        runs, complaints = _experiment(directory, report)
    except (BuildError, StartError, ToolchainError) as error:
        print(f"faults: {error}", file=sys.stderr)
        return 1
    PAGE.write_text(page(runs, quiet_s=QUIET_S, sweep_interval_s=SWEEP_INTERVAL_S), encoding="utf-8")
    for run in runs:
        if not run.is_struck:
            report(f"not reached: {run}")
        elif not run.has_survived:
            report(f"FAILED: {run}: {'; '.join(run.problems) or 'it never came to rest'}")
    for complaint in complaints:
        report(f"FAILED: {complaint}")
    tried, survived = counts(runs)
    is_good = tried == survived and not unreached(runs) and not complaints
    if is_good:
        shutil.rmtree(directory)
    else:
        report(f"logs are in {directory}")
    print(f"points tried: {tried}, survived: {survived}")
    return 0 if is_good else 1


def _experiment(directory: Path, report: Callable[[str], None]) -> tuple[list[Run], list[str]]:
    with ControlPlane(crds=CRDS, report=report) as control_plane, Kube(control_plane.kubeconfig) as admin:
        kubeconfig = operator_identity(control_plane, admin)
        with Campaign(admin, kubeconfig, control_plane.audit(), directory) as campaign:
            report(f"recording the points of {len(SCENARIOS)} undisturbed scenarios")
            catalogue = everything(campaign.record(SCENARIOS, times=RECORDINGS))
            report(f"{len(catalogue)} runs to make")
            runs = conduct(campaign, catalogue, quiet_s=QUIET_S, sweep_interval_s=SWEEP_INTERVAL_S, report=report)
            return runs, campaign.complaints


if __name__ == "__main__":
    sys.exit(main())
