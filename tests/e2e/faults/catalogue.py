"""Which runs there are: every applicable fault at every point of every scenario. Pure.

Runs are grouped by how they have to be conducted, because a fault may affect other runs: only a resync finds an event
that was hidden, a stream that breaks carries the events of all namespaces, and a kill ends the operator.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from operator_app.api.kinds import LEASE
from operator_app.controller.scopes import INDEXES
from tests.e2e.faults.campaign import Run
from tests.e2e.faults.plan import BREAKING, KILLS, FaultKind, Point, applicable, pairs
from tests.e2e.faults.scenarios import SCENARIOS

HEALED_BY_RESYNC: Final = frozenset({FaultKind.INVALID, FaultKind.HIDE, FaultKind.REPLAY})
"""Faults after which the operator can't know better, or is rightly stalled, until its next resync."""

READS: Final = 3
"""How many reads of one object are points of a scenario: each later round reads a stranger's object once more."""

WATCHED: Final = (*INDEXES, LEASE)
"""Every kind that the operator lists and watches."""


@dataclass(slots=True)
class Catalogue:
    """Runs by how they are conducted.

    ``kills``: the operator is killed. ``starts``: its lists and the opening of its watches go wrong when it starts.
    ``breaking``: a stream breaks. ``alone``: affects one proxy only. ``resynced``: the same, repaired by a resync.
    """

    kills: list[Run] = field(default_factory=list)
    starts: list[Run] = field(default_factory=list)
    breaking: list[Run] = field(default_factory=list)
    alone: list[Run] = field(default_factory=list)
    resynced: list[Run] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.groups()))

    def groups(self) -> tuple[list[Run], ...]:
        """All groups, in the order in which they are conducted."""
        return (self.kills, self.starts, self.breaking, self.alone, self.resynced)

    def runs(self) -> list[Run]:
        """All runs."""
        return [run for group in self.groups() for run in group]

    def parts(self) -> dict[str, "Catalogue"]:
        """Catalogues of a similar length in time, by name; together they are this one. Each can be conducted alone."""
        half = len(self.kills) // 2
        parts = {
            "requests": Catalogue(alone=self.alone),
            "kills": Catalogue(kills=self.kills[:half]),
            "more kills": Catalogue(kills=self.kills[half:]),
            "starts": Catalogue(starts=self.starts),
            "streams": Catalogue(breaking=self.breaking, resynced=self.resynced),
        }
        return {name: part for name, part in parts.items() if len(part)}

    def add(self, run: Run) -> None:
        """Add a run to its group."""
        assert run.kind is not None
        assert run.point is not None
        if run.point.verb in ("list", "watch"):
            self.starts.append(run)
        elif run.kind in KILLS:
            self.kills.append(run)
        elif run.kind in BREAKING:  # no pair has one of these
            self.breaking.append(run)
        elif run.kind in HEALED_BY_RESYNC or run.then in HEALED_BY_RESYNC:
            self.resynced.append(run)
        else:
            self.alone.append(run)


def everything(points: Mapping[str, Iterable[Point]]) -> Catalogue:
    """Every fault at every point, and at every request pairs of them; ``points`` are those of undisturbed runs."""
    catalogue = Catalogue()
    number = 0
    for scenario in SCENARIOS:
        for point in points[scenario.name]:
            if point.verb == "get" and point.n > READS:
                continue
            if scenario.only and point.kind not in {kind.kind for kind in scenario.only}:
                continue
            for kind in applicable(point):
                catalogue.add(Run(scenario, kind, point))
            for kind, then in pairs(point, number):
                catalogue.add(Run(scenario, kind, point, then))
            number += 1
    for run in starts():
        catalogue.add(run)
    return catalogue


def starts() -> Iterable[Run]:
    """Every fault at the first list and the first watch of every watched kind, while work of the scenarios waits.

    The operator does not begin without Namespaces and holds no shard without Leases, so finished work shows that these
    watches have recovered as well. One operator runs at a time: what two do with wrong Leases is shown by a test with
    two replicas, in ``tests/e2e/faults/test_campaign.py``. Single reads and writes of Leases and the one read of a
    Namespace are outside of the campaign, and so are watch events of both kinds.
    """
    number = 0
    for verb in ("list", "watch"):
        for kind in applicable(Point(verb, "")):
            for each in WATCHED:
                yield Run(SCENARIOS[number % len(SCENARIOS)], kind, Point(verb, each.kind))
                number += 1


def waves(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs that break streams, in waves: no two of a wave break the same stream, and all do it in the same way."""
    lines: defaultdict[tuple[FaultKind | None, str], list[Run]] = defaultdict(list)
    for run in runs:
        assert run.point is not None
        lines[run.kind, run.point.kind].append(run)
    by_fault: defaultdict[FaultKind | None, list[list[Run]]] = defaultdict(list)
    for (fault, _), line in lines.items():
        by_fault[fault].append(line)
    return [
        [line[index] for line in same if index < len(line)]
        for same in by_fault.values()
        for index in range(max(map(len, same)))
    ]


def batches(runs: list[Run], size: int) -> list[list[Run]]:
    """``runs`` in equal parts of at most ``size``, each of them a mixture of everything."""
    parts = -(-len(runs) // size)
    return [runs[part::parts] for part in range(parts)]


def again(run: Run) -> Run:
    """The same run in another namespace."""
    return Run(run.scenario, run.kind, run.point, run.then)
