"""A fixed selection of the campaign's runs, for tests that take seconds: each fault once, each scenario at least once.

All points are the first of their sort or certain to be reached, so that no run has to be made again.
"""

import sys
import time
from collections.abc import Iterable
from typing import Final

from operator_app.api.kinds import CHILD_KINDS, ENVOY_PROXY, HOSTNAME_CLAIM, LEASE, NAMESPACE, PROXY_REGISTRATION
from tests.e2e.faults.campaign import Campaign, Run
from tests.e2e.faults.catalogue import Catalogue
from tests.e2e.faults.conduct import conduct
from tests.e2e.faults.plan import FaultKind, Point
from tests.e2e.faults.scenarios import SCENARIOS, Scenario

FIRST, EDIT, LOSS, DRIFT, DELETION, RE_CREATION, STRANGER, RIVAL, ADDED, REMOVED, OPTIONAL_DRIFT, SERVING = SCENARIOS
QUIET_S: Final = 3.0
RESYNC_INTERVAL_S: Final = 2.0

Selected = tuple[Scenario, FaultKind, Point, FaultKind | None]

LISTED: Final = (ENVOY_PROXY, *CHILD_KINDS, PROXY_REGISTRATION, HOSTNAME_CLAIM, NAMESPACE, LEASE)
"""The kinds without which nothing is reconciled."""

REQUESTS: Final[tuple[Selected, ...]] = (
    (LOSS, FaultKind.RESET, Point("apply", "ConfigMap"), None),
    (FIRST, FaultKind.LOST_ANSWER, Point("apply", "Deployment"), None),
    (RE_CREATION, FaultKind.LOST_ANSWER, Point("apply", "ProxyRegistration"), None),
    (FIRST, FaultKind.DELAY, Point("apply", "ProxyRegistration"), None),
    (FIRST, FaultKind.HANG, Point("apply", "Service"), None),
    (EDIT, FaultKind.UNAUTHORIZED, Point("apply", "ConfigMap"), None),
    (DELETION, FaultKind.FORBIDDEN, Point("delete", "ProxyRegistration"), None),
    (RE_CREATION, FaultKind.NOT_FOUND, Point("apply", "Service"), None),
    (DELETION, FaultKind.CONFLICT, Point("apply", "EnvoyProxy"), None),
    (DRIFT, FaultKind.THROTTLED, Point("apply", "Service"), None),
    (RIVAL, FaultKind.BROKEN, Point("apply", "Deployment"), None),
    (STRANGER, FaultKind.UNAVAILABLE, Point("apply", "Deployment"), None),
    (FIRST, FaultKind.KILL_BEFORE, Point("apply", "EnvoyProxy"), None),
    (EDIT, FaultKind.KILL_BEHIND, Point("apply", "HostnameClaim"), None),
    (EDIT, FaultKind.LOST_ANSWER, Point("apply", "Deployment"), FaultKind.HANG),
    (DRIFT, FaultKind.BROKEN, Point("apply", "Service"), FaultKind.CONFLICT),
    (ADDED, FaultKind.LOST_ANSWER, Point("apply", "HorizontalPodAutoscaler"), None),
    (REMOVED, FaultKind.KILL_BEHIND, Point("delete", "PodDisruptionBudget"), None),
    (OPTIONAL_DRIFT, FaultKind.CONFLICT, Point("apply", "NetworkPolicy"), None),
    (SERVING, FaultKind.LOST_ANSWER, Point("patch", "Pod", "status"), None),
    (SERVING, FaultKind.KILL_BEFORE, Point("patch", "Pod", "status"), None),
)
"""Faults of writes, alone and in pairs."""

EVENTS: Final[tuple[Selected, ...]] = (
    (FIRST, FaultKind.CUT, Point("event", "EnvoyProxy"), None),
    (DRIFT, FaultKind.HALF_OPEN, Point("event", "ConfigMap"), None),
    (LOSS, FaultKind.GONE_IN_STREAM, Point("event", "Service"), None),
    (FIRST, FaultKind.HIDE, Point("event", "EnvoyProxy"), None),
    (DELETION, FaultKind.REPLAY, Point("event", "Deployment"), None),
    (EDIT, FaultKind.INVALID, Point("apply", "Deployment"), None),
    *((SCENARIOS[1 + n % 5], FaultKind.OLD_LIST, Point("list", kind.kind), None) for n, kind in enumerate(LISTED)),
)
"""Faults of events, those that only a resync repairs, and old lists of several kinds at one start."""


def survived(campaign: Campaign, selection: Iterable[Selected]) -> list[Run]:
    """Make the selected runs; every fault was injected and survived, and nothing else went wrong."""
    catalogue = Catalogue()
    for scenario, kind, point, then in selection:
        catalogue.add(Run(scenario, kind, point, then))
    with campaign:
        campaign.start_operator()
        runs = conduct(campaign, catalogue, quiet_s=QUIET_S, resync_interval_s=RESYNC_INTERVAL_S, report=report)
    missed = [str(run) for run in runs if not run.is_injected]
    assert not missed, missed
    problems = {str(run): run.problems for run in runs if not run.has_survived}
    assert not problems, problems
    assert len(runs) == len(catalogue)
    assert not campaign.complaints, campaign.complaints
    return runs


def report(line: str) -> None:
    """Print a line, which pytest shows with a failure."""
    print(time.strftime("%X"), line, file=sys.stderr)
