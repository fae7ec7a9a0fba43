"""Every fault of HTTP at every request to PowerDNS: the part of the campaign about calls outside of the cluster.

A scenario is one call of the registry, on a real server. Its points are the requests that it makes undisturbed. At each
point each fault is injected by a proxy in front of the server, and the run has *survived* if

- the call ended as the fault allows: with a result, or an error of the class that says whether a retry may help;
- the zone is then as before the call or as after it, whatever the server has carried out, and no foreign record of it
  was touched;
- the same call, repeated until it succeeds, leaves exactly what an undisturbed one leaves: one pair, or none;
- one more call after that changes nothing.
"""

import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from operator_app.api.kinds import Key
from operator_app.errors import OperatorError, TerminalError, TransientError
from operator_app.registration.identity import Installation
from operator_app.registration.powerdns.registry import PowerDnsRegistry, connect
from operator_app.registration.registry import Record
from operator_app.settings import Settings
from tests.e2e.powerdns.proxy import FaultyProxy, HttpFault
from tests.e2e.powerdns.server import PowerDns, Row, Zone

TIMEOUT_S: Final = 2.0
"""The bound on a request. None that has no fault may fail for it, however busy the machine is."""

LATE_S: Final = 0.3
"""A request that hangs arrives so many seconds after it was given up."""

INSTALLATION: Final = Installation.of("a cluster", "faults")
TRIES: Final = 5

FAULTS: Final = {
    "reset before": HttpFault(is_dropped=True),
    "carried out, answer lost": HttpFault(is_lost=True),
    "half an answer": HttpFault(is_cut=True),
    "hangs": HttpFault(delay_s=TIMEOUT_S + LATE_S),
    "not JSON": HttpFault(status=200, body=b"<html>"),
    "redirect": HttpFault(status=302, headers={"Location": "/elsewhere"}),
    **{
        str(status): HttpFault(status=status, body=b'{"error": "no"}')
        for status in (400, 401, 403, 404, 408, 409, 413, 422, 500, 502, 503, 504)
    },
    "429": HttpFault(status=429, headers={"Retry-After": "1"}),
}

CALLS: Final = "calls to PowerDNS"
"""What this part of the campaign is called."""

TERMINAL: Final = frozenset({"400", "401", "403", "404", "409", "413", "422"})
"""Faults that say that a retry of the same does not help; the others may."""

Call = Callable[[PowerDnsRegistry, Zone], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class OutsideScenario:
    """One call. ``is_there``: the first generation is registered before. ``leaves``: which generation is after."""

    name: str
    call: Call
    is_there: bool
    leaves: int | None


@dataclass(slots=True)
class OutsideRun:
    """One fault at one point: the ``nth`` request of a method in a scenario. Without problems it has survived.

    ``part`` is the part of the campaign that it belongs to.
    """

    scenario: str
    method: str
    nth: int
    fault: str
    problems: list[str] = field(default_factory=list)
    part: str = CALLS

    def __str__(self) -> str:
        return f"{self.part}, {self.scenario}, {self.method} #{self.nth}, {self.fault}"


def a_record(zone: Zone, generation: int) -> Record:
    """The record of the shop: an IPv4 address at first, an alias in the second generation."""
    address = "203.0.113.7" if generation == 1 else "lb.example.net"
    return Record("uid-1", generation, Key("team-a", "shop"), f"shop.eu.{zone.name}", address, ())


async def _create(registry: PowerDnsRegistry, zone: Zone) -> object:
    return await registry.register(a_record(zone, 1))


async def _update(registry: PowerDnsRegistry, zone: Zone) -> object:
    return await registry.register(a_record(zone, 2))


async def _remove(registry: PowerDnsRegistry, zone: Zone) -> object:
    return await registry.deregister("uid-1", f"shop.eu.{zone.name}")


async def _compare(registry: PowerDnsRegistry, zone: Zone) -> object:
    return await registry.observe(a_record(zone, 1))


async def _list(registry: PowerDnsRegistry, _zone: Zone) -> object:
    return [each.name async for each in registry.entries()]


SCENARIOS: Final = (
    OutsideScenario("first registration", _create, is_there=False, leaves=1),
    OutsideScenario("unchanged registration", _create, is_there=True, leaves=1),
    OutsideScenario("update to another type", _update, is_there=True, leaves=2),
    OutsideScenario("removal", _remove, is_there=True, leaves=None),
    OutsideScenario("comparison", _compare, is_there=True, leaves=1),
    OutsideScenario("list for an audit", _list, is_there=True, leaves=1),
)


class OutsideCampaign:
    """Runs scenarios on one server; each run has a zone of its own."""

    def __init__(self, server: PowerDns, proxy: FaultyProxy) -> None:
        self._server = server
        self._proxy = proxy

    async def points(self, scenario: OutsideScenario) -> tuple[tuple[str, int], ...]:
        """The method and number of each request of an undisturbed call."""
        zone, _ = await self._prepared(scenario)
        async with self._registry(zone) as registry:
            with self._proxy.counted() as methods:
                await scenario.call(registry, zone)
        return tuple((method, methods[: at + 1].count(method)) for at, method in enumerate(methods))

    async def run(self, run: OutsideRun, scenario: OutsideScenario) -> None:
        """Inject the fault into the call, and collect what is wrong afterwards."""
        zone, foreign = await self._prepared(scenario)
        before, whole = zone.rows(), await self._after(scenario)
        fault = FAULTS[run.fault]
        async with self._registry(zone) as registry:
            self._proxy.inject(run.method, fault, nth=run.nth)
            run.problems += await _first_call(registry, zone, scenario, run.fault)
            if fault.delay_s:
                await anyio.sleep(2 * LATE_S)
            allowed = (before, foreign | _renamed(whole, zone))
            if zone.rows() not in allowed:
                run.problems.append(f"the zone is neither as before nor as after: {zone.rows() - foreign}")
            await _until_done(registry, zone, scenario)
            if zone.rows() != foreign | _renamed(whole, zone) or zone.count() != len(zone.rows()):
                run.problems.append(f"repeated, it left {zone.rows() - foreign}")
            serial = zone.serial
            await scenario.call(registry, zone)
            if zone.serial != serial:
                run.problems.append("one more call changed the zone")

    def _registry(self, zone: Zone):  # type: ignore[no-untyped-def]  # noqa: ANN202 - the type is that of connect
        return connect(
            Settings(
                powerdns_url=self._proxy.url,
                powerdns_zones=(zone.name,),
                powerdns_api_key_file=self._server.key_file,
                powerdns_timeout_s=TIMEOUT_S,
            ),
            INSTALLATION,
        )

    async def _prepared(self, scenario: OutsideScenario) -> tuple[Zone, set[Row]]:
        zone = self._server.make_zone(f"f{uuid.uuid4().hex[:8]}.example")
        zone.put(f"mail.{zone.name}", "A", "192.0.2.25")
        foreign = zone.rows()
        if scenario.is_there:
            async with self._registry(zone) as registry:
                await _create(registry, zone)
        return zone, foreign

    async def _after(self, scenario: OutsideScenario) -> set[Row]:
        """What an undisturbed call leaves beside the foreign records, with ``@`` for the zone's name."""
        zone, foreign = await self._prepared(scenario)
        async with self._registry(zone) as registry:
            await _until_done(registry, zone, scenario)
        return {(name.replace(zone.name, "@"), *rest) for name, *rest in zone.rows() - foreign}  # type: ignore[misc]


def _renamed(rows: set[Row], zone: Zone) -> set[Row]:
    return {(name.replace("@", zone.name), kind, ttl, content, off) for name, kind, ttl, content, off in rows}


async def _first_call(registry: PowerDnsRegistry, zone: Zone, scenario: OutsideScenario, fault: str) -> list[str]:
    try:
        await scenario.call(registry, zone)
    except TransientError:
        return [f"{fault} is no reason to try again"] if fault in TERMINAL else []
    except TerminalError as error:
        return [] if fault in TERMINAL else [f"a retry would help, but it says {error.reason}"]
    except OperatorError as error:
        return [f"{type(error).__name__} says nothing about a retry"]
    return []


async def _until_done(registry: PowerDnsRegistry, zone: Zone, scenario: OutsideScenario) -> None:
    """Repeat the call until it does not fail; without faults the first one does not."""
    for _ in range(TRIES):
        try:
            await scenario.call(registry, zone)
        except TransientError:
            continue
        return


async def campaign(
    server: PowerDns, proxy: FaultyProxy, faults: Sequence[str], report: Callable[[str], None]
) -> list[OutsideRun]:
    """Each of ``faults`` at every point of every scenario."""
    campaign, runs = OutsideCampaign(server, proxy), list[OutsideRun]()
    for scenario in SCENARIOS:
        points = await campaign.points(scenario)
        for method, nth in points:
            for fault in faults:
                run = OutsideRun(scenario.name, method, nth, fault)
                await campaign.run(run, scenario)
                runs.append(run)
        report(f"{scenario.name}: {len(faults)} faults at {len(points)} requests to PowerDNS")
    return runs


def everything(directory: Path, report: Callable[[str], None]) -> list[OutsideRun]:
    """The whole campaign on a server of its own, whose files are in ``directory``."""
    folder = directory / "powerdns"
    folder.mkdir()
    with closing(PowerDns(folder)) as server:
        server.start()
        with FaultyProxy(server.port) as proxy:
            return anyio.run(campaign, server, proxy, tuple(FAULTS), report)


def tables(runs: Sequence[OutsideRun]) -> Iterator[str]:
    """The lines of the page about these runs: a table for each part, and in it a row for each point."""
    for part in dict.fromkeys(run.part for run in runs):
        of_part = [run for run in runs if run.part == part]
        kinds = list(dict.fromkeys(run.fault for run in of_part))
        yield f"## {part[0].upper()}{part[1:]}\n\n"
        yield f"| point | {' | '.join(kinds)} |\n| {' | '.join(['---'] * (len(kinds) + 1))} |\n"
        for point in dict.fromkeys((run.scenario, run.method, run.nth) for run in of_part):
            cells = {run.fault: run for run in of_part if (run.scenario, run.method, run.nth) == point}
            words = ("**FAILED**" if cells[kind].problems else "survived" for kind in kinds)
            yield f"| {point[0]}: {point[1]} #{point[2]} | {' | '.join(words)} |\n"
        yield "\n"
