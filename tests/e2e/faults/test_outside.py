"""Faults of DNS servers: a selection at every request; ``make faults`` tries all of them."""

from pathlib import Path

import pytest

from tests.e2e.faults.lives import STEPS, OverDns, OverHttp, Wiring, one_fault_each, serving
from tests.e2e.faults.outside import FAULTS, SCENARIOS, campaign
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.powerdns.fixture import powerdns as powerdns  # noqa: PLC0414  # fixtures are found by their import
from tests.e2e.powerdns.fixture import proxy as proxy  # noqa: PLC0414
from tests.e2e.powerdns.proxy import FaultyProxy
from tests.e2e.powerdns.server import PowerDns
from tests.e2e.rfc2136.fixture import bind as bind  # noqa: PLC0414
from tests.e2e.rfc2136.server import Bind

LANES = 8


@pytest.mark.anyio
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["carried out, answer lost", "half an answer", "422"])
async def test_a_fault_at_every_request_to_powerdns_is_survived(
    powerdns: PowerDns, proxy: FaultyProxy, fault: str
) -> None:
    """Whatever the server has carried out: the zone is as before or as after, and repeating the call completes it."""
    assert fault in FAULTS
    runs = await campaign(powerdns, proxy, [fault], lambda _: None)
    assert {run.scenario for run in runs} == {each.name for each in SCENARIOS}
    assert len(runs) >= 25, "each scenario makes several requests"
    assert [f"{run}: {problem}" for run in runs for problem in run.problems] == []


@pytest.mark.timeout(300)
def test_the_operator_survives_a_fault_at_every_request_of_a_life_in_powerdns(
    admin: Kube, namespace: str, operator: OperatorProcess, powerdns: PowerDns, tmp_path: Path
) -> None:
    """Of a proxy that is registered, moves, is renamed and deleted: another fault at each request, and all kinds."""
    survives(admin, namespace, operator, OverHttp(powerdns), tmp_path)


@pytest.mark.timeout(300)
def test_the_operator_survives_a_fault_at_every_message_of_a_life_in_rfc2136(
    admin: Kube, namespace: str, operator: OperatorProcess, bind: Bind, tmp_path: Path
) -> None:
    """The same by DNS updates: dropped, late, truncated and unsigned answers, refusals, bad signatures."""
    survives(admin, namespace, operator, OverDns(bind), tmp_path)


def survives(admin: Kube, namespace: str, operator: OperatorProcess, wiring: Wiring, folder: Path) -> None:
    """Every life ends as an undisturbed one does, and each kind of fault has struck."""
    with serving(admin, operator, wiring, folder, lanes=LANES, namespace=namespace) as lives:
        points = lives.record()
        runs = lives.live(one_fault_each(points, tuple(wiring.faults)))
    assert [f"{run}: {problem}" for run in runs for problem in run.problems] == []
    assert len(runs) == sum(map(len, points.values())) >= 4 * len(STEPS), "each step makes several requests"
    assert {run.fault for run in runs} == set(wiring.faults)
