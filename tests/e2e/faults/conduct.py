"""Conducts a catalogue of runs: group by group, with the operator that each group needs, and one quiet time for all.

The operator of a group also prepares the namespaces of the next group, so every run is watched from the moment that it
settled until the end of everything, restarts and resyncs included.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tests.e2e.faults.campaign import Campaign, Run
from tests.e2e.faults.catalogue import Catalogue, again, batches, waves
from tests.e2e.faults.plan import FaultKind, Plan

BATCH: Final = 130
ATTEMPTS: Final = 5
"""How often a run is made whose fault was not injected because its point was not reached."""

IDLE_S: Final = 3
AFTER_BREAK_S: Final = 0.8
"""A broken stream is back after this long: the first pause is at most half a second."""

IDLE: Final = (f"--watch-idle-timeout-s={IDLE_S}",)

Report = Callable[[str], None]


def conduct(
    campaign: Campaign, catalogue: Catalogue, *, quiet_s: float, resync_interval_s: float, report: Report
) -> list[Run]:
    """Make every run, wait for ``quiet_s``, check all of them, and return them.

    A run whose fault was not injected is made again, and is returned only if its fault never was.
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
        _resynced(campaign, wanted.resynced, resync_interval_s, report)
        made = wanted.runs()
        done += [run for run in made if run.is_injected]
        missed = [run for run in made if not run.is_injected]
        wanted = Catalogue()
        for run in missed:
            wanted.add(again(run))
        if not missed:
            break
        report(f"{len(missed)} faults were not injected")
    report(f"{quiet_s:g} quiet seconds for all of them")
    time.sleep(quiet_s)
    campaign.check_all()
    campaign.complaints += campaign.undisturbed_failures()
    campaign.stop()
    return done + missed


def _alone(campaign: Campaign, runs: list[Run], report: Report) -> None:
    """Many answers of 429 make the operator slow down for all proxies, so these runs are in batches of their own."""
    by_throttling = sorted(runs, key=lambda run: run.kind is FaultKind.THROTTLED)
    first = sum(run.kind is not FaultKind.THROTTLED for run in runs) if len(runs) > BATCH else len(runs)
    parts = [*batches(by_throttling[:first], BATCH), *batches(by_throttling[first:], BATCH)]
    for number, batch in enumerate(parts, 1):
        _together(campaign, f"requests, batch {number}", batch, report)


def _resynced(campaign: Campaign, runs: list[Run], resync_interval_s: float, report: Report) -> None:
    for number, batch in enumerate(batches(runs, BATCH), 1):
        flag = f"--sweep-interval-s={resync_interval_s}"
        _together(campaign, f"what a resync repairs, batch {number}", batch, report, flag)


def _together(campaign: Campaign, what: str, batch: list[Run], report: Report, *flags: str) -> None:
    """Make all runs of a batch at the same time, with one operator."""
    begun_mono = _begin(report, what, batch)
    campaign.prepare(batch)
    campaign.start_operator(_plan(batch), *flags)
    _act(campaign, batch)
    campaign.wait_settled(batch)
    _end(report, begun_mono, batch)


def _breaking(campaign: Campaign, runs: list[Run], report: Report) -> None:
    if not runs:
        return
    begun_mono = _begin(report, "breaking streams", runs)
    for batch in batches(runs, BATCH):
        campaign.prepare(batch)
    campaign.start_operator(_plan(runs), *IDLE)
    for wave in waves(runs):
        _act(campaign, wave)
        campaign.wait_injected(wave)
        campaign.wait(AFTER_BREAK_S + IDLE_S * (wave[0].kind is FaultKind.HALF_OPEN), runs)
    campaign.wait_settled(runs)
    _end(report, begun_mono, runs)


def _kills(campaign: Campaign, runs: list[Run], report: Report) -> None:
    """Each operator finishes what the one before it left undone, until it is killed as well."""
    if not runs:
        return
    begun_mono = _begin(report, "kills", runs)
    campaign.prepare(runs)
    campaign.stop()
    for run in runs:
        campaign.act(run)
        campaign.start_operator(_plan([run]), wait=False)
        campaign.wait_killed([run])
    campaign.start_operator()
    campaign.wait_settled(runs)
    _end(report, begun_mono, runs)


def _starts(campaign: Campaign, runs: list[Run], report: Report) -> None:
    """One start for each fault: it is injected for every kind, and for each kind a scenario's work waits."""
    if not runs:
        return
    begun_mono = _begin(report, "starts of the operator", runs)
    campaign.prepare(runs)
    together: dict[tuple[object, str], list[Run]] = {}
    for run in runs:
        assert run.point is not None
        together.setdefault((run.kind, run.point.verb), []).append(run)
    for same in together.values():
        if same[0].kind is FaultKind.OLD_LIST:
            campaign.reset_lists()
            campaign.start_operator()
        campaign.stop()
        _act(campaign, same)
        campaign.start_operator(_plan(same), wait=False)
        campaign.wait_settled(same)
    _end(report, begun_mono, runs)


def _act(campaign: Campaign, runs: Iterable[Run]) -> None:
    for run in runs:
        campaign.act(run)


def _plan(runs: Iterable[Run]) -> Plan:
    return Plan(tuple(run.fault for run in runs))


def _begin(report: Report, what: str, runs: Sequence[Run]) -> float:
    report(f"{what}: {len(runs)} runs")
    return time.monotonic()


def _end(report: Report, begun_mono: float, runs: Sequence[Run]) -> None:
    injected = [run for run in runs if run.is_injected]
    survived = [run for run in injected if run.has_survived]
    report(f"  {len(injected)} faults injected, {len(survived)} survived so far, {time.monotonic() - begun_mono:.0f} s")
    for run in runs:
        if not run.has_survived:
            report(f"  NOT SETTLED: {run}: {'; '.join(run.problems) or 'it keeps changing'}")
