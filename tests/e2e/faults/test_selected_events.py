"""A fixed selection of faults of events, lists and what a resync repairs; ``make faults`` tries all of them."""

import pytest

from tests.e2e.faults.campaign import Campaign
from tests.e2e.faults.selection import EVENTS, survived


@pytest.mark.timeout(180)
def test_a_selection_of_faults_of_events_and_lists_is_survived(campaign: Campaign) -> None:
    """Streams that break, lie or are silent, old lists of every kind: converged, one of each, then no writes."""
    survived(campaign, EVENTS)
