"""The result of a campaign as the page ``docs/reliability.md``. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from operator_app.settings import Settings
from tests.e2e.faults.campaign import BOUNDS, Run
from tests.e2e.faults.catalogue import HEALED_BY_RESYNC, READS
from tests.e2e.faults.conduct import IDLE
from tests.e2e.faults.outside import OutsideRun, tables
from tests.e2e.faults.plan import FaultKind
from tests.e2e.faults.scenarios import SCENARIOS
from tests.e2e.operator_process import QUICK

START: Final = "start of the operator, with work of every scenario waiting"

_HEAD: Final = """\
# Reliability: every fault at every point

Written by `make faults`; do not edit. How it is done is in [ADR 9](adr/0009-fault-injection.md).

Every proxy has a hostname, and the edit changes it: one claim is taken and another one given back.

A point is one request of the operator, or one event of its watches, in an undisturbed run of a scenario. At every point
every fault was made to happen that an API server, a network or a kernel can cause there, in a namespace of its own.
*Survived* means, in the end and for at least {quiet_s:g} quiet seconds after it:

- the declared state holds, value by value, and the status says of it what is true, for the right generation; on the
  way `observedGeneration` never went back, and no `lastTransitionTime` moved without a flip;
- there is one of everything, and no object was made more often than the scenario calls for, by UID;
- exactly the declared hostname is claimed, by exactly this proxy; after a deletion none is;
- no orphan is left in the namespace or the registry;
- no byte of a foreign object was changed, and another writer's annotations on the children are still there;
- the operator wrote to nothing else, wrote nothing without its shard's Lease, wrote nothing that had no effect (but
  where an answer was lost, it may ask again), and wrote nothing at all any more, except that the Event of a real repair
  may come late.

Resyncs are off, so that none hides a weakness of the watches, except for three faults: after *{resynced}* the operator
can't know better, or is rightly stalled, until its next resync. These runs have one every {resync_s:g} seconds, so they
show that a resync repairs, and not how soon: by default there is one every {default_resync_s:g} seconds.

At starts of the operator the first list and the first watch of every kind that it watches go wrong, HostnameClaims,
Namespaces and Leases included. Not part of the campaign is what else is about no proxy: reads and writes of single
Leases, the read of each Namespace that the settings name, and the watch events of both kinds. One operator runs at a
time, so no run could show two holders of a Lease: with two replicas, `tests/e2e/faults/test_campaign.py` tries lists
and watches of Leases that go wrong, and `tests/e2e/sharding/test_leases.py` and `make bench-failover` kill and stop
replicas.

A point that every recording reached and that no attempt reaches again is shown as *not reached*, and then `make faults`
fails, as it does when a run did not survive.

Between two of the operator's rounds others write as well: in one scenario a stranger's Service has the name of the
proxy's, in another one a rival undoes each repair once. Where two faults are named, the second one struck at the next
request about the same proxy, the first one of the recovery. Of the scenarios with optional children, and of the one
with a Pod that serves, points are only the requests and events of the kinds that they are about. No node takes part:
that Pod serves as far as the API server knows, so that it is touched and not asked. A run whose fault found nothing to
strike is made again, and has to converge all the same. What a stranger has is read in each round; the first {reads} of
these reads are points.

DNS servers fail as well. Each call of the PowerDNS registry, and each step of a proxy's life under the whole operator
(registration, another address, another hostname, deletion), met every fault of HTTP at every request to PowerDNS, on a
real server. The same lives met every fault of a DNS message on the way to BIND. Each step had to end with exactly the
zone, claims, entry and status of an undisturbed one, and nothing else was seen in the zone on the way; see
`tests/e2e/faults/outside.py` and `lives.py`.

The runs change these settings: {flags}.

{points} points, {tried} runs with a fault at one of them, on commit {commit}, {machine}.

**points tried: {tried}, survived: {survived}**
"""

FLAGS: Final = (*QUICK, *BOUNDS, *IDLE, "--sweep-interval-s", "--http-port", "--replica-name")
"""What an operator of the campaign is told, some of them in some runs only."""


def counts(runs: Iterable[Run], calls: Sequence[OutsideRun] = ()) -> tuple[int, int]:
    """How many faults were injected, and how many of these runs survived; ``calls`` are those to DNS servers."""
    injected = [run for run in runs if run.is_injected]
    survived = sum(run.has_survived for run in injected) + sum(not call.problems for call in calls)
    return len(injected) + len(calls), survived


def distinct_points(runs: Iterable[Run]) -> int:
    """At how many points faults were injected: of one scenario, or of a start."""
    return len({(_section(run), run.point) for run in runs if run.is_injected})


def unreached(runs: Iterable[Run]) -> list[Run]:
    """Runs whose fault was never injected, because its point was not reached."""
    return [run for run in runs if not run.is_injected]


def page(
    runs: Sequence[Run],
    calls: Sequence[OutsideRun] = (),
    complaints: Sequence[str] = (),
    *,
    quiet_s: float,
    resync_interval_s: float,
    commit: str = "",
    machine: str = "",
) -> str:
    """The whole page. A fault that was never injected does not count as tried, and is shown as such."""
    tried, survived = counts(runs, calls)
    sections: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        sections[_section(run)].append(run)
    names = [name for name in (*(each.name for each in SCENARIOS), START) if name in sections]
    head = _HEAD.format(
        quiet_s=quiet_s,
        resync_s=resync_interval_s,
        default_resync_s=Settings.model_fields["sweep_interval_s"].default,
        resynced="*, *".join(kind.value for kind in FaultKind if kind in HEALED_BY_RESYNC),
        tried=tried,
        survived=survived,
        points=distinct_points(runs),
        flags=", ".join(f"`{flag}`" for flag in FLAGS),
        commit=commit,
        machine=machine,
        reads=READS,
    )
    parts = [head, *_failures(runs, calls, complaints)]
    rows = [(name, *counts(sections[name])) for name in names]
    parts_outside = dict.fromkeys(call.part for call in calls)
    rows += [(part, *counts((), [call for call in calls if call.part == part])) for part in parts_outside]
    parts.append(_table(("scenario", "points tried", "survived"), rows))
    kinds = [(kind.value, *counts(run for run in runs if run.kind is kind and run.then is None)) for kind in FaultKind]
    kinds.append(("two faults", *counts(run for run in runs if run.then is not None)))
    parts.append(_table(("fault", "points tried", "survived"), kinds))
    for name in names:
        parts += [f"## {name[0].upper()}{name[1:]}\n", _points(sections[name])]
    if calls:
        parts.append("".join(tables(calls)).rstrip("\n") + "\n")
    return "\n".join(parts)


def failures(runs: Iterable[Run], calls: Iterable[OutsideRun], complaints: Iterable[str]) -> list[str]:
    """A sentence for each run that did not survive, and for whatever else went wrong."""
    failed = [run for run in runs if run.is_injected and not run.has_survived]
    told = [f"{run}: {'; '.join(run.problems) or 'it never settled'}" for run in failed]
    told += [f"{call}: {'; '.join(call.problems)}" for call in calls if call.problems]
    return [*told, *complaints]


def _failures(runs: Sequence[Run], calls: Sequence[OutsideRun], complaints: Sequence[str]) -> list[str]:
    found = failures(runs, calls, complaints)
    return ["## Failures\n", "".join(f"- {each}\n" for each in found)] if found else []


def _section(run: Run) -> str:
    assert run.point is not None
    return START if run.point.verb in ("list", "watch") else run.scenario.name


def _points(runs: Sequence[Run]) -> str:
    kinds = [kind for kind in FaultKind if any(run.kind is kind and run.then is None for run in runs)]
    rows: defaultdict[str, defaultdict[FaultKind | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda each: each.point or ()):
        if run.then is None:
            rows[str(run.point)][run.kind].append(_cell(run))
        else:
            rows[str(run.point)][None].append(f"{run.kind}, then {run.then}: {_cell(run)}")
    table = [
        (name, *(", ".join(cells[kind]) for kind in kinds), "; ".join(cells[None])) for name, cells in rows.items()
    ]
    return _table(("point", *(kind.value for kind in kinds), "two faults"), table)


def _cell(run: Run) -> str:
    if not run.is_injected:
        return "not reached"
    return "survived" if run.has_survived else "**FAILED**"


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
