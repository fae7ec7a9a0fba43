"""One part of a campaign, in a process of its own.

Not in ``__main__``: a process that is spawned can't import that of a package.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.e2e.controlplane import ControlPlane
from tests.e2e.faults.campaign import Campaign, Run
from tests.e2e.faults.catalogue import Catalogue
from tests.e2e.faults.conduct import conduct
from tests.e2e.kube import Kube
from tests.e2e.shipped import CRDS, operator_identity

QUIET_S: Final = 20.0
RESYNC_INTERVAL_S: Final = 6.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Prints a line with the minutes and seconds since the beginning, and the part that it is about."""

    begun_mono: float
    part: str = ""

    def __call__(self, line: str) -> None:
        """Print a line."""
        minutes, seconds = divmod(int(time.monotonic() - self.begun_mono), 60)
        print(f"{minutes:2d}:{seconds:02d} {f'[{self.part}] ' if self.part else ''}{line}", flush=True)


def conducted(directory: Path, catalogue: Catalogue, report: Progress) -> tuple[list[Run], list[str]]:
    """All runs of one part; in a process of its own."""
    with new_campaign(directory, report) as campaign:
        campaign.start_operator()
        runs = conduct(campaign, catalogue, quiet_s=QUIET_S, resync_interval_s=RESYNC_INTERVAL_S, report=report)
        return runs, campaign.complaints


@contextmanager
def new_campaign(directory: Path, report: Progress) -> Iterator[Campaign]:
    """A campaign on a new control plane."""
    with ControlPlane(crds=CRDS, report=report) as control_plane, Kube(control_plane.kubeconfig) as admin:
        kubeconfig = operator_identity(control_plane, admin)
        with Campaign(admin, kubeconfig, control_plane.audit(), directory) as campaign:
            yield campaign
