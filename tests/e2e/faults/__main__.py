"""``python -m tests.e2e.faults [PART ...]``: every fault at every point.

The points are recorded first. Then the runs are made in parts, ``FAULTS_AT_ONCE`` (2) of them at the same time, each on
a control plane of its own and in a process of its own. With names of parts only these are made, and no page is written.

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
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from tests.e2e.controlplane import BuildError, StartError, ToolchainError
from tests.e2e.faults import lives, outside
from tests.e2e.faults.campaign import Run
from tests.e2e.faults.catalogue import everything
from tests.e2e.faults.parts import QUIET_S, RESYNC_INTERVAL_S, Progress, conducted, new_campaign
from tests.e2e.faults.report import counts, distinct_points, failures, page, unreached
from tests.e2e.faults.scenarios import SCENARIOS
from tests.e2e.node.packages import PackagesError
from tests.paths import ROOT

PAGE: Final = ROOT / "docs" / "reliability.md"
DIRECTORY_PREFIX: Final = "operator-app-faults-"
RECORDINGS: Final = 3
AT_ONCE: Final = int(os.environ.get("FAULTS_AT_ONCE", "2"))

Report = Callable[[str], None]


def main(only: Sequence[str] = ()) -> int:
    """Run everything, or some parts; returns the exit code."""
    report = Progress(time.monotonic())
    directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
    is_good = False
    try:
        runs, complaints = _experiment(directory, report, only)
        calls = [] if only else [*outside.everything(directory, report), *lives.everything(directory, report)]
        is_good = _reported(runs, calls, complaints, report, page_file=None if only else PAGE)
    except (BuildError, StartError, ToolchainError, PackagesError) as error:
        print(f"faults: {error}", file=sys.stderr)
    finally:
        if is_good or not any(directory.iterdir()):
            shutil.rmtree(directory)
        else:
            report(f"logs are in {directory}")
    return 0 if is_good else 1


def _experiment(directory: Path, report: Progress, only: Sequence[str]) -> tuple[list[Run], list[str]]:
    report(f"recording the points of {len(SCENARIOS)} undisturbed scenarios")
    with new_campaign(_folder(directory, "recordings"), report) as campaign:
        catalogue = everything(campaign.record(SCENARIOS, times=RECORDINGS))
    parts = {name: part for name, part in catalogue.parts().items() if not only or name in only}
    report(f"{len(catalogue)} runs to make: {', '.join(f'{len(part)} {name}' for name, part in parts.items())}")
    runs, complaints = list[Run](), list[str]()
    with ProcessPoolExecutor(AT_ONCE, mp_context=get_context("spawn")) as pool:
        results = {
            name: pool.submit(conducted, _folder(directory, name), part, replace(report, part=name))
            for name, part in parts.items()
        }
        for name, result in results.items():
            try:
                found = result.result()
            except (AssertionError, BrokenProcessPool, OSError) as error:
                complaints.append(f"the part {name!r} ended before its time: {error}")
            else:
                runs += found[0]
                complaints += found[1]
    return runs, complaints


def _folder(directory: Path, name: str) -> Path:
    folder = directory / name.replace(" ", "-")
    folder.mkdir()
    return folder


def _reported(
    runs: Sequence[Run],
    calls: Sequence[outside.OutsideRun],
    complaints: Sequence[str],
    report: Report,
    *,
    page_file: Path | None,
) -> bool:
    """Write the page, if there is to be one, and report what went wrong; returns whether nothing did."""
    text = page(
        runs,
        calls,
        complaints,
        quiet_s=QUIET_S,
        resync_interval_s=RESYNC_INTERVAL_S,
        commit=_commit(),
        machine=f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}",
    )
    if page_file is not None:
        page_file.write_text(text, encoding="utf-8")
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
    sys.exit(main(sys.argv[1:]))
