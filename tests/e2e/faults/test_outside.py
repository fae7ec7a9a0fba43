"""Faults of the calls to PowerDNS: a selection at every request; ``make faults`` tries all of them."""

import pytest

from tests.e2e.faults.outside import FAULTS, SCENARIOS, campaign
from tests.e2e.powerdns.fixture import powerdns as powerdns  # noqa: PLC0414  # fixtures are found by their import
from tests.e2e.powerdns.fixture import proxy as proxy  # noqa: PLC0414
from tests.e2e.powerdns.proxy import FaultyProxy
from tests.e2e.powerdns.server import PowerDns

pytestmark = pytest.mark.anyio


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["carried out, answer lost", "half an answer", "hangs", "422", "401"])
async def test_a_fault_at_every_request_to_powerdns_is_survived(
    powerdns: PowerDns, proxy: FaultyProxy, fault: str
) -> None:
    """Whatever the server has carried out: the zone is as before or as after, and repeating the call completes it."""
    assert fault in FAULTS
    runs = await campaign(powerdns, proxy, [fault], lambda _: None)
    assert {run.scenario for run in runs} == {each.name for each in SCENARIOS}
    assert len(runs) >= 25, "each scenario makes several requests"
    assert [f"{run}: {problem}" for run in runs for problem in run.problems] == []
