"""The whole operator with a DNS server that fails, at every request of a proxy's life.

A *life* is that of one proxy: it is registered, its address changes, its hostname changes, and it is deleted. Its
points are the requests to the DNS server that an undisturbed life makes in each of these steps. In each step of a
disturbed life one fault strikes at one of them, and the step has *survived* if

- the zone ends exactly as it does without the fault, record by record, foreign ones included, and so do the claims, the
  ledger's entry and the condition ``Registered``, which is true of this generation; of a deleted proxy nothing is left;
- on the way, the zone was never anything but as before, as after, or with the new pair beside the old one; where the
  new hostname was refused for good, with neither, since one that is not declared any more is withdrawn all the same;
- then nothing is sent any more (looked at for a second, after the last two steps).

One operator serves many lives at the same time. Each has a registry of its own, with a zone and a circuit breaker, so
that no fault delays another life.
"""

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from unittest import mock

import dns.rcode

from operator_app.api.kinds import (
    ENVOY_PROXY,
    HOSTNAME_CLAIM,
    NAMESPACE,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
)
from operator_app.desired import child_key
from operator_app.registration.claims import owner_uid
from operator_app.registration.dns import Ownership
from operator_app.registration.identity import Installation
from operator_app.registration.ledger import LedgerEntry, Name
from tests.e2e.controlplane import ControlPlane
from tests.e2e.faults import registries
from tests.e2e.faults.outside import FAULTS as HTTP_FAULTS
from tests.e2e.faults.outside import LATE_S, TERMINAL, TIMEOUT_S, OutsideRun
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.powerdns.counting import Counting
from tests.e2e.powerdns.proxy import FaultyProxy
from tests.e2e.powerdns.server import PowerDns, Row
from tests.e2e.proxies import a_proxy, holds
from tests.e2e.rfc2136.relay import DnsFault, FaultyRelay
from tests.e2e.rfc2136.server import Bind
from tests.e2e.shipped import CRDS, operator_identity

CONVERGE_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.1
QUIET_S: Final = 1.0
OPERATOR_ID: Final = "faults"
TTL_S: Final = 300
RECORDINGS: Final = 2
LANES: Final = 16

DNS_FAULTS: Final = {
    "reset before": DnsFault(is_dropped=True),
    "carried out, answer lost": DnsFault(is_lost=True),
    "half an answer": DnsFault(is_cut=True),
    "late answer": DnsFault(delay_s=TIMEOUT_S + LATE_S),
    "no DNS message": DnsFault(is_garbled=True),
    "truncated": DnsFault(is_truncated=True),
    "not signed": DnsFault(rcode=dns.rcode.NOERROR, is_unsigned=True),
    **{
        dns.rcode.to_text(code): DnsFault(rcode=code)
        for code in (dns.rcode.SERVFAIL, dns.rcode.REFUSED, dns.rcode.NOTAUTH, dns.rcode.FORMERR, dns.rcode.NOTIMP)
    },
    **{
        dns.rcode.to_text(code, tsig=True): DnsFault(rcode=dns.rcode.NOTAUTH, tsig_error=code)
        for code in (dns.rcode.BADSIG, dns.rcode.BADKEY, dns.rcode.BADTIME)
    },
}


REFUSALS: Final = TERMINAL | {"REFUSED", "NOTAUTH", "FORMERR", "NOTIMP", "BADSIG", "BADKEY", "BADTIME"}
"""Faults that say that a retry of the same does not help."""


class ServerZone(Protocol):
    """A zone of either server."""

    @property
    def name(self) -> str:
        """Its name, without the dot at the end."""
        ...

    @property
    def serial(self) -> int:
        """The serial of its SOA."""
        ...

    def rows(self) -> set[Row]:
        """Every record except the SOA."""
        ...

    def count(self) -> int:
        """The number of records except the SOA, duplicates included."""
        ...

    def put(self, name: str, kind: str, *contents: str) -> None:
        """Make these the only records of a name and type."""
        ...


@dataclass(frozen=True, slots=True)
class Lane:
    """What the lives of one registry have for themselves: its name, a zone, and what strikes on the way to it."""

    registry: str
    zone: ServerZone
    faulty: Counting[Any]


class Wiring(Protocol):
    """One kind of DNS server, and how lanes lead to it."""

    @property
    def name(self) -> str:
        """The shipped registry that speaks to it."""
        ...

    @property
    def part(self) -> str:
        """What this part of the campaign is called."""
        ...

    @property
    def faults(self) -> Mapping[str, Any]:
        """Every fault of a request to it."""
        ...

    def lane(self, registry: str, stack: ExitStack) -> tuple[Lane, dict[str, Any]]:
        """A new lane, and the settings of its registry; what it needs lasts as long as ``stack``."""
        ...


@dataclass(frozen=True, slots=True)
class OverHttp:
    """PowerDNS behind HTTP proxies."""

    server: PowerDns
    name: str = "powerdns"
    part: str = "lives of proxies in PowerDNS"
    faults: Mapping[str, Any] = field(default_factory=lambda: HTTP_FAULTS)

    def lane(self, registry: str, stack: ExitStack) -> tuple[Lane, dict[str, Any]]:
        """See :class:`Wiring`."""
        zone, proxy = self.server.make_zone(_a_zone()), stack.enter_context(FaultyProxy(self.server.port))
        return Lane(registry, zone, proxy), {
            "powerdns_url": proxy.url,
            "powerdns_zones": [zone.name],
            "powerdns_api_key_file": self.server.key_file,
            "powerdns_timeout_s": TIMEOUT_S,
        }


@dataclass(frozen=True, slots=True)
class OverDns:
    """BIND behind relays of DNS messages."""

    server: Bind
    name: str = "rfc2136"
    part: str = "lives of proxies in BIND, by updates"
    faults: Mapping[str, Any] = field(default_factory=lambda: DNS_FAULTS)

    def lane(self, registry: str, stack: ExitStack) -> tuple[Lane, dict[str, Any]]:
        """See :class:`Wiring`."""
        zone = self.server.make_zone(_a_zone())
        relay = stack.enter_context(FaultyRelay(self.server.dns_port, self.server.operator_key))
        return Lane(registry, zone, relay), {
            "rfc2136_server": f"127.0.0.1:{relay.port}",
            "rfc2136_zones": [zone.name],
            "rfc2136_key_file": self.server.key_file,
            "rfc2136_timeout_s": TIMEOUT_S,
        }


def _a_zone() -> str:
    return f"f{uuid.uuid4().hex[:8]}.example"


class Strike(NamedTuple):
    """One fault at one point: the ``nth`` request of a method in a step."""

    method: str
    nth: int
    fault: str


STEPS: Final = ("registration", "another address", "another hostname", "deletion")
QUIET_AFTER: Final = frozenset(STEPS[2:])
"""Whether all is quiet is looked at with a proxy that is registered, and with one that is gone."""

Strikes = Mapping[str, Strike | None]
"""For each step what strikes in it."""


@dataclass(slots=True)
class Life:
    """One proxy on its way through the steps. ``expected`` are its records after the last step that was taken."""

    lives: "Lives"
    lane: Lane
    key: Key
    foreign: set[Row]
    uid: str = ""
    expected: set[Row] = field(default_factory=set)

    def take(self, step: str, *, is_refused: bool = False) -> list[str]:
        """Take one step and wait until it is done; what was wrong. With ``is_refused``, a refusal strikes in it."""
        before = self.expected
        match step:
            case "registration":
                self._create()
                self._give_addresses("203.0.113.7")
                self.expected = self._pair("a", "203.0.113.7", generation=1)
            case "another address":
                self._give_addresses("203.0.113.8", "2001:db8::8")
                self.expected = self._pair("a", "203.0.113.8", "2001:db8::8", generation=1)
            case "another hostname":
                change = {"spec": {"registration": {"hostname": self._hostname("b")}}}
                self.lives.admin.patch(ENVOY_PROXY, self.key, change)
                self.expected = self._pair("b", "203.0.113.8", "2001:db8::8", generation=2)
            case _:
                self.lives.admin.delete(ENVOY_PROXY, self.key)
                self.expected = set()
        allowed = [before, self.expected]
        if step == "another hostname":
            allowed += [before | self.expected, *([set[Row]()] if is_refused else [])]
        return self._converged([self.foreign | each for each in allowed])

    def _converged(self, allowed: Sequence[set[Row]]) -> list[str]:
        deadline_mono = time.monotonic() + CONVERGE_TIMEOUT_S
        while True:
            rows = self.lane.zone.rows()
            if rows not in allowed:
                return [f"on the way the zone had {sorted(rows - self.foreign)}, without {sorted(self.foreign - rows)}"]
            if rows == self.foreign | self.expected and not self._differences():
                is_single = self.lane.zone.count() == len(rows)
                return [] if is_single else [f"the zone has a record twice: {sorted(rows)}"]
            if time.monotonic() > deadline_mono:
                return [f"in the end the zone has {sorted(rows - self.foreign)}", *self._differences()]
            time.sleep(POLL_S)

    def _differences(self) -> list[str]:
        """What the cluster says other than that exactly the expected records are there, and confirmed."""
        admin, names = self.lives.admin, {name for name, kind, *_ in self.expected if kind != "TXT"}
        claimed = {name for label in "ab" if self._is_claimed(name := self._hostname(label))}
        wrong = [] if claimed == names else [f"the claims are {sorted(claimed)}"]
        proxy = admin.find(ENVOY_PROXY, self.key)
        stored = admin.find(PROXY_REGISTRATION, Key(OPERATOR_NAMESPACE, f"proxy-{self.uid}"))
        if not names:
            wrong += [f"there still is a {each['kind']}" for each in (proxy, stored) if each is not None]
            return wrong
        if proxy is None or not holds("Registered")(proxy):
            wrong.append(f"the status is {(proxy or {}).get('status')}")
        entry = None if stored is None else LedgerEntry(stored)
        if entry is None or entry.names != {Name(self.lane.registry, *names)} or not entry.is_confirmed:
            wrong.append(f"the entry is {stored}")
        return wrong

    def _is_claimed(self, hostname: str) -> bool:
        claim = self.lives.admin.find(HOSTNAME_CLAIM, Key("", hostname))
        return claim is not None and owner_uid(claim) == self.uid

    def _create(self) -> None:
        registration = {"hostname": self._hostname("a"), "registry": self.lane.registry, "ttl": TTL_S}
        proxy = a_proxy(self.key.namespace, self.key.name, registration=registration, service={"type": "LoadBalancer"})
        self.uid = self.lives.admin.create(ENVOY_PROXY, proxy)["metadata"]["uid"]

    def _give_addresses(self, *addresses: str) -> None:
        service = child_key(self.key)
        self.lives.admin.wait_until(SERVICE, service, lambda _: True, CONVERGE_TIMEOUT_S)
        patch = {"status": {"loadBalancer": {"ingress": [{"ip": each} for each in addresses]}}}
        self.lives.admin.patch(SERVICE, service, patch, subresource="status")

    def _hostname(self, label: str) -> str:
        return f"{label}-{self.key.name}.{self.lane.zone.name}"

    def _pair(self, label: str, *addresses: str, generation: int) -> set[Row]:
        hostname = self._hostname(label)
        content = Ownership(self.lives.installation, self.uid, generation).content
        rows = {(hostname, "AAAA" if ":" in each else "A", TTL_S, each, False) for each in addresses}
        return rows | {(f"_edge-owner.{hostname}", "TXT", TTL_S, content, False)}


class Lives:
    """Lives of proxies in one namespace, each in a free lane; to be made by :func:`serving`."""

    def __init__(self, admin: Kube, wiring: Wiring, lanes: Sequence[Lane], namespace: str) -> None:
        self.admin = admin
        self.wiring = wiring
        self.namespace = namespace
        self.installation = Installation.of(
            admin.get(NAMESPACE, Key("", "kube-system"))["metadata"]["uid"], OPERATOR_ID
        )
        self._lanes = deque(lanes)
        self._workers = len(lanes)

    def record(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """The points of each step: what every one of some undisturbed lives reaches, in the order of the first."""
        with ThreadPoolExecutor(RECORDINGS) as pool:
            recorded = list(pool.map(self._recorded, range(RECORDINGS)))
        return {
            step: tuple(point for point in recorded[0][step] if all(point in each[step] for each in recorded))
            for step in STEPS
        }

    def _recorded(self, number: int) -> dict[str, list[tuple[str, int]]]:
        found = {}
        with self._life(f"recorded-{number}") as life:
            for step in STEPS:
                with life.lane.faulty.counted() as methods:
                    problems = life.take(step)
                assert problems == [], f"{step}, undisturbed: {problems}"
                found[step] = [(each, methods[: at + 1].count(each)) for at, each in enumerate(methods)]
        return found

    def live(self, plans: Sequence[Strikes]) -> list[OutsideRun]:
        """One life for each of ``plans``, as many at a time as there are lanes."""
        with ThreadPoolExecutor(self._workers) as pool:
            lived = pool.map(lambda plan: self._lived(f"life-{plan[0]}", plan[1]), enumerate(plans))
            return [run for runs in lived for run in runs]

    def _lived(self, name: str, strikes: Strikes) -> list[OutsideRun]:
        runs = []
        with self._life(name) as life:
            for step in STEPS:
                strike = strikes.get(step)
                if strike is not None:
                    life.lane.faulty.inject(strike.method, self.wiring.faults[strike.fault], nth=strike.nth)
                problems = life.take(step, is_refused=strike is not None and strike.fault in REFUSALS)
                if life.lane.faulty.withdraw():
                    problems.append("the request was not reached, so no fault struck")
                if strike is not None and self.wiring.faults[strike.fault].delay_s:
                    time.sleep(2 * LATE_S)  # what was held back arrives
                if step in QUIET_AFTER and not problems:
                    problems += self._noise(life)
                if strike is not None:
                    runs.append(OutsideRun(step, *strike, problems, self.wiring.part))
                elif problems:
                    raise AssertionError(f"{name}, {step}, undisturbed: {problems}")
                if problems:
                    break
        return runs

    def _noise(self, life: Life) -> list[str]:
        """What is sent although all is done."""
        serial = life.lane.zone.serial
        with life.lane.faulty.counted() as methods:
            time.sleep(QUIET_S)
        wrong = [] if not methods else [f"all was done, and it sent {methods}"]
        return wrong if life.lane.zone.serial == serial else [*wrong, "all was done, and the zone was changed"]

    @contextmanager
    def _life(self, name: str) -> Iterator[Life]:
        lane, key = self._lanes.popleft(), Key(self.namespace, name)
        try:
            yield Life(self, lane, key, lane.zone.rows())
        finally:
            if self.admin.find(ENVOY_PROXY, key) is not None:  # one that did not survive: its lane is for the next one
                self.admin.delete(ENVOY_PROXY, key)
                self.admin.wait_gone(ENVOY_PROXY, key, timeout_s=CONVERGE_TIMEOUT_S)
            self._lanes.append(lane)


@contextmanager
def serving(
    admin: Kube, operator: OperatorProcess, wiring: Wiring, directory: Path, *, lanes: int, namespace: str
) -> Iterator[Lives]:
    """An operator with a registry for each lane. It must not be running, and is stopped."""
    with ExitStack() as stack:
        made = {f"life-{number}": wiring.lane(f"life-{number}", stack) for number in range(lanes)}
        for lane, _ in made.values():
            lane.zone.put(f"mail.{lane.zone.name}", "A", "192.0.2.25")
        connections = {name: {"registry": wiring.name, "settings": settings} for name, (_, settings) in made.items()}
        environment = registries.install(directory / f"{wiring.name}-registries", connections)
        with mock.patch.dict(os.environ, environment):
            operator.start(
                f"--registries={','.join(made)}",
                f"--operator-id={OPERATOR_ID}",
                f"--namespaces={namespace}",
                f"--in-flight-per-tenant={lanes}",
                f"--workers={lanes}",
            )
        stack.callback(operator.stop)
        yield Lives(admin, wiring, [lane for lane, _ in made.values()], namespace)


def each_fault(points: Mapping[str, Sequence[tuple[str, int]]], faults: Sequence[str]) -> list[Strikes]:
    """Plans with each of ``faults`` at every point."""
    return _plans(
        {step: [Strike(*point, fault) for point in found for fault in faults] for step, found in points.items()}
    )


def one_fault_each(points: Mapping[str, Sequence[tuple[str, int]]], faults: Sequence[str]) -> list[Strikes]:
    """Plans with one of ``faults`` in turn at every point."""
    turn = cycle(faults)
    return _plans({step: [Strike(*point, next(turn)) for point in found] for step, found in points.items()})


def _plans(strikes: Mapping[str, Sequence[Strike]]) -> list[Strikes]:
    return [dict(zip(strikes, each, strict=True)) for each in zip_longest(*strikes.values())]


def everything(directory: Path, report: Callable[[str], None]) -> list[OutsideRun]:
    """The whole campaign on a control plane and servers of its own, whose files are in ``directory``."""
    runs = list[OutsideRun]()
    with ControlPlane(crds=CRDS, report=report) as control_plane, Kube(control_plane.kubeconfig) as admin:
        kubeconfig = operator_identity(control_plane, admin)
        for name in ("powerdns", "rfc2136"):
            folder = directory / f"lives-{name}"
            folder.mkdir()
            with closing(PowerDns(folder) if name == "powerdns" else Bind(folder)) as server:
                server.start()
                wiring = OverHttp(server) if isinstance(server, PowerDns) else OverDns(server)
                operator = OperatorProcess(kubeconfig, folder / "operator.log")
                runs += _of_server(admin, operator, wiring, folder, report)
    return runs


def _of_server(
    admin: Kube, operator: OperatorProcess, wiring: Wiring, folder: Path, report: Callable[[str], None]
) -> list[OutsideRun]:
    namespace = f"lives-{wiring.name}"
    admin.create_namespace(namespace)
    with serving(admin, operator, wiring, folder, lanes=LANES, namespace=namespace) as lives:
        points = lives.record()
        plans = each_fault(points, tuple(wiring.faults))
        requests = sum(map(len, points.values()))
        report(f"{wiring.part}: {len(wiring.faults)} faults at {requests} requests, {len(plans)} lives")
        return lives.live(plans)
