"""Conducting a catalogue of runs: group by group, with the operator that each group needs, and one quiet time for all.

Between groups the operator of the one before prepares the namespaces of the next, so every run is watched from the
moment that it came to rest until the end of everything, restarts and sweeps included.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tests.e2e.faults.campaign import Campaign, Run
from tests.e2e.faults.catalogue import Catalogue, again, batches, waves
from tests.e2e.faults.plan import FaultKind, Plan

BATCH: Final = 130
ATTEMPTS: Final = 5
"""How often a run is made whose fault did not strike because its point was not reached."""

IDLE_S: Final = 3
AFTER_BREAK_S: Final = 0.8
"""A broken stream is back after this long: the first pause is at most half a second."""

IDLE: Final = (f"--watch-idle-timeout-s={IDLE_S}",)

Report = Callable[[str], None]


def conduct(
    campaign: Campaign, catalogue: Catalogue, *, quiet_s: float, sweep_interval_s: float, report: Report
) -> list[Run]:
    """Make every run, wait for ``quiet_s``, judge all of them, and return them.

    A run whose fault did not strike is made again, and is returned only if the fault never strikes.
    """
    done: list[Run] = []
    missed: list[Run] = []
    wanted = catalogue
    for _ in range(ATTEMPTS):
        if len(wanted) <= BATCH:
            campaign.prepare(wanted.runs())
        # What takes many starts comes first, while there are few proxies to start with.
        _kills(campaign, wanted.kills, report)
        _starts(campaign, wanted.starts, report)
        _breaking(campaign, wanted.breaking, report)
        _alone(campaign, wanted.alone, report)
        _swept(campaign, wanted.swept, sweep_interval_s, report)
        made = wanted.runs()
        done += [run for run in made if run.is_struck]
        missed = [run for run in made if not run.is_struck]
        wanted = Catalogue()
        for run in missed:
            wanted.add(again(run))
        if not missed:
            break
        report(f"{len(missed)} faults found nothing to strike")
    report(f"{quiet_s:g} quiet seconds for all of them")
    time.sleep(quiet_s)
    campaign.judge()
    campaign.stop()
    return done + missed


def _alone(campaign: Campaign, runs: list[Run], report: Report) -> None:
    """Many answers of 429 make the operator slow down for everybody, so these runs keep to themselves."""
    by_throttling = sorted(runs, key=lambda run: run.kind is FaultKind.THROTTLED)
    first = sum(run.kind is not FaultKind.THROTTLED for run in runs) if len(runs) > BATCH else len(runs)
    parts = [*batches(by_throttling[:first], BATCH), *batches(by_throttling[first:], BATCH)]
    for number, batch in enumerate(parts, 1):
        begun = _begin(report, f"requests, batch {number}", batch)
        campaign.prepare(batch)
        campaign.operate(_plan(batch))
        _act(campaign, batch)
        campaign.settle(batch)
        _end(report, begun, batch)


def _swept(campaign: Campaign, runs: list[Run], sweep_interval_s: float, report: Report) -> None:
    for number, batch in enumerate(batches(runs, BATCH), 1):
        begun = _begin(report, f"what a sweep heals, batch {number}", batch)
        campaign.prepare(batch)
        campaign.operate(_plan(batch), f"--sweep-interval-s={sweep_interval_s}")
        _act(campaign, batch)
        campaign.settle(batch)
        _end(report, begun, batch)


def _breaking(campaign: Campaign, runs: list[Run], report: Report) -> None:
    if not runs:
        return
    begun = _begin(report, "breaking streams", runs)
    for batch in batches(runs, BATCH):
        campaign.prepare(batch)
    campaign.operate(_plan(runs), *IDLE)
    for wave in waves(runs):
        _act(campaign, wave)
        campaign.wait_struck(wave)
        campaign.pass_time(AFTER_BREAK_S + IDLE_S * (wave[0].kind is FaultKind.HALF_OPEN), runs)
    campaign.settle(runs)
    _end(report, begun, runs)


def _kills(campaign: Campaign, runs: list[Run], report: Report) -> None:
    """Each operator finishes what the one before it left undone, until it is killed in turn."""
    if not runs:
        return
    begun = _begin(report, "kills", runs)
    campaign.prepare(runs)
    campaign.stop()
    for run in runs:
        campaign.act(run)
        campaign.operate(_plan([run]), wait=False)
        campaign.wait_killed([run])
    campaign.operate()
    campaign.settle(runs)
    _end(report, begun, runs)


def _starts(campaign: Campaign, runs: list[Run], report: Report) -> None:
    """One start for each fault: it strikes every kind, and waiting for each kind is work of some scenario."""
    if not runs:
        return
    begun = _begin(report, "starts of the operator", runs)
    campaign.prepare(runs)
    together: dict[tuple[object, str], list[Run]] = {}
    for run in runs:
        assert run.point is not None
        together.setdefault((run.kind, run.point.verb), []).append(run)
    for same in together.values():
        if same[0].kind is FaultKind.OLD_LIST:
            campaign.forget_lists()
            campaign.operate()
        campaign.stop()
        _act(campaign, same)
        campaign.operate(_plan(same), wait=False)
        campaign.settle(same)
    _end(report, begun, runs)


def _act(campaign: Campaign, runs: Iterable[Run]) -> None:
    for run in runs:
        campaign.act(run)


def _plan(runs: Iterable[Run]) -> Plan:
    return Plan(tuple(run.fault for run in runs))


def _begin(report: Report, what: str, runs: Sequence[Run]) -> float:
    report(f"{what}: {len(runs)} runs")
    return time.monotonic()


def _end(report: Report, begun_mono: float, runs: Sequence[Run]) -> None:
    struck = [run for run in runs if run.is_struck]
    survived = [run for run in struck if run.has_survived]
    report(f"  {len(struck)} struck, {len(survived)} survived so far, {time.monotonic() - begun_mono:.0f} s")
    for run in runs:
        if not run.has_survived:
            report(f"  NOT AT REST: {run}: {'; '.join(run.problems) or 'it keeps changing'}")
