"""A fixed selection of faults of requests; ``make faults`` tries every fault at every point."""

import pytest

from tests.e2e.faults.campaign import Campaign
from tests.e2e.faults.scenarios import SCENARIOS
from tests.e2e.faults.selection import REQUESTS, survived


@pytest.mark.timeout(180)
def test_a_selection_of_faults_of_requests_is_survived(campaign: Campaign) -> None:
    """Each fault of a write over all scenarios: converged, one of each, nothing foreign written, then no writes."""
    runs = survived(campaign, REQUESTS)
    assert {run.scenario.name for run in runs} == {each.name for each in SCENARIOS}
