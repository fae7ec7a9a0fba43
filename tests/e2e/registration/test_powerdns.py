"""The PowerDNS registry against a real server: what it makes, what it leaves alone, and every fault on the way.

Each test compares the whole zone, so a duplicate, an orphan or a stranger's record that changed fails it.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from operator_app.api.kinds import Key
from operator_app.errors import (
    ForbiddenError,
    InvalidError,
    NotFoundError,
    OperatorError,
    TerminalError,
    ThrottledError,
    TransientError,
)
from operator_app.registration.powerdns.dns import Ownership
from operator_app.registration.powerdns.registry import PowerDnsRegistry, connect
from operator_app.registration.registry import Comparison, Record, Registration
from operator_app.results import Outcome
from operator_app.settings import Settings
from tests.e2e.powerdns.fixture import powerdns as powerdns  # noqa: PLC0414  # fixtures are found by their import
from tests.e2e.powerdns.fixture import proxy as proxy  # noqa: PLC0414
from tests.e2e.powerdns.fixture import zone as zone  # noqa: PLC0414
from tests.e2e.powerdns.proxy import FaultyProxy, Strike
from tests.e2e.powerdns.server import PowerDns, Row, Zone

pytestmark = pytest.mark.anyio

OPERATOR = "edge"
TTL_S = 300
TIMEOUT_S = 10.0
SHORT_TIMEOUT_S = 1.0
ADDRESSES = [("203.0.113.7", "A"), ("2001:db8::7", "AAAA"), ("lb.example.net", "CNAME")]
Operator = Callable[..., AbstractAsyncContextManager[PowerDnsRegistry]]


@pytest.fixture
def operator(powerdns: PowerDns, proxy: FaultyProxy, zone: Zone) -> Operator:
    """Makes a registry that writes the test's zone through the failing proxy; keywords change its settings."""

    def make(name: str = OPERATOR, **settings: Any) -> AbstractAsyncContextManager[PowerDnsRegistry]:
        return connect(
            Settings(
                **{
                    "powerdns_url": proxy.url,
                    "powerdns_zones": (zone.name,),
                    "powerdns_api_key_file": powerdns.key_file,
                    "operator_id": name,
                    "powerdns_default_ttl_s": TTL_S,
                    "powerdns_timeout_s": TIMEOUT_S,
                    **settings,
                }
            )
        )

    return make


@pytest.fixture
async def registry(operator: Operator) -> AsyncIterator[PowerDnsRegistry]:
    """The registry of this operator."""
    async with operator() as registry:
        yield registry


def a_record(zone: Zone, **changes: Any) -> Record:
    """A record for ``shop`` in the zone; keywords replace its fields."""
    record = Record(
        uid="11111111-2222-3333-4444-555555555555",
        generation=3,
        proxy=Key("team-a", "checkout"),
        hostname=f"shop.{zone.name}",
        address="203.0.113.7",
        ports=(),
    )
    return replace(record, **changes)


def kind_of(address: str) -> str:
    """The type of record that an address of ``ADDRESSES`` needs."""
    return dict(ADDRESSES).get(address, "A")


def pair(record: Record, *, operator: str = OPERATOR, ttl_s: int = TTL_S) -> set[Row]:
    """The two records that a registered record is."""
    assert record.hostname is not None
    kind = kind_of(record.address)
    content = f"{record.address}." if kind == "CNAME" else record.address
    owner = Ownership(operator, record.uid, record.proxy, record.generation).content
    return {
        (record.hostname, kind, ttl_s, content, False),
        (f"_edge-owner.{record.hostname}", "TXT", ttl_s, owner, False),
    }


def reason(registration: Registration) -> str | None:
    """Why a registration did not happen."""
    assert (registration.outcome is Outcome.SKIPPED) == (registration.problem is not None)
    return registration.problem.reason if registration.problem else None


async def remove(registry: PowerDnsRegistry, record: Record) -> Outcome:
    """Deregister a record."""
    assert record.hostname is not None
    return await registry.deregister(record.uid, record.hostname)


# What it makes


@pytest.mark.parametrize(("address", "kind"), ADDRESSES)
async def test_a_pair_appears_answers_and_goes(
    registry: PowerDnsRegistry, proxy: FaultyProxy, zone: Zone, address: str, kind: str
) -> None:
    """A first registration makes exactly the pair, DNS answers it, and removal leaves the zone as it was before."""
    strangers = zone.rows()
    record = a_record(zone, address=address)
    assert record.hostname is not None
    assert await registry.observe(record) is Comparison.ABSENT
    with proxy.counted() as first:
        assert await registry.register(record) == Registration(Outcome.CREATED)
    assert first == ["GET", "GET", "SEARCH", "PATCH", "GET", "GET"]
    assert zone.rows() == strangers | pair(record)
    assert zone.server.resolve(record.hostname, kind) == [(kind, address)]
    [(_, ownership)] = zone.server.resolve(f"_edge-owner.{record.hostname}", "TXT")
    assert f"uid={record.uid}" in ownership.split()

    serial = zone.serial
    with proxy.counted() as quiet:
        assert await registry.register(record) == Registration(Outcome.UNCHANGED)
        assert await registry.observe(record) is Comparison.MATCHING
    assert quiet == ["GET"] * 4
    assert zone.serial == serial

    with proxy.counted() as removal:
        assert await remove(registry, record) is Outcome.DELETED
    assert removal == ["GET", "GET", "PATCH", "GET", "GET"]
    assert zone.rows() == strangers
    assert zone.server.resolve(record.hostname, kind) == []
    with proxy.counted() as again:
        assert await remove(registry, record) is Outcome.UNCHANGED
    assert again == ["GET", "GET"]


@pytest.mark.parametrize(("after", "_kind"), ADDRESSES)
@pytest.mark.parametrize(("before", "_before_kind"), ADDRESSES)
async def test_an_address_of_another_type_replaces_the_former_one(
    registry: PowerDnsRegistry, proxy: FaultyProxy, zone: Zone, before: str, after: str, _kind: str, _before_kind: str
) -> None:
    """A new generation with an address of any type leaves one pair, in one change."""
    strangers = zone.rows()
    await registry.register(a_record(zone, address=before))
    newer = a_record(zone, address=after, generation=4)
    assert await registry.observe(newer) is Comparison.DIFFERENT
    with proxy.counted() as update:
        assert await registry.register(newer) == Registration(Outcome.CONFIGURED)
    assert update == ["GET", "GET", "PATCH", "GET", "GET"]
    assert zone.rows() == strangers | pair(newer)


async def test_the_proxys_own_ttl_wins(registry: PowerDnsRegistry, zone: Zone) -> None:
    """A TTL in the record is the TTL of both records; without one it is the operator's default again."""
    strangers = zone.rows()
    await registry.register(a_record(zone, ttl_s=17))
    assert zone.rows() == strangers | pair(a_record(zone), ttl_s=17)
    assert await registry.register(a_record(zone)) == Registration(Outcome.CONFIGURED)
    assert zone.rows() == strangers | pair(a_record(zone))


async def test_a_zones_own_name_can_have_an_address(registry: PowerDnsRegistry, zone: Zone) -> None:
    """At the apex an address stands beside SOA, NS and MX, which stay; an alias is refused with a sentence."""
    strangers = zone.rows()
    record = a_record(zone, hostname=zone.name)
    assert await registry.register(record) == Registration(Outcome.CREATED)
    assert zone.rows() == strangers | pair(record)
    with pytest.raises(InvalidError, match="can't be an alias") as refused:
        await registry.register(replace(record, address="lb.example.net"))
    assert refused.value.reason == "AddressUnusable"
    assert await remove(registry, record) is Outcome.DELETED
    assert zone.rows() == strangers


async def test_the_longest_zone_takes_the_name(operator: Operator, zone: Zone) -> None:
    """Of two zones around a hostname the inner one gets the pair; a hostname in none of them is refused."""
    inner = zone.server.make_zone(f"eu.{zone.name}")
    outside = zone.rows()
    async with operator(powerdns_zones=f"{zone.name},{inner.name}.") as registry:
        record = a_record(zone, hostname=f"shop.{inner.name}")
        await registry.register(record)
        assert pair(record) < inner.rows()
        assert zone.rows() == outside
        elsewhere = a_record(zone, hostname=f"shop.x{zone.name}")
        with pytest.raises(TerminalError) as refused:
            await registry.register(elsewhere)
        assert refused.value.reason == "ZoneNotConfigured"
        assert await remove(registry, elsewhere) is Outcome.UNCHANGED


async def test_entries_are_ours_alone(registry: PowerDnsRegistry, operator: Operator, zone: Zone) -> None:
    """The audit's list has each record of this operator once, and neither another operator's nor a stranger's."""
    record, second = a_record(zone), a_record(zone, uid="u2", hostname=f"cart.{zone.name}", proxy=Key("team-b", "cart"))
    await registry.register(record)
    await registry.register(second)
    async with operator("other") as other:
        await other.register(a_record(zone, uid="u3", hostname=f"third.{zone.name}"))
    zone.put(f"_edge-owner.noise.{zone.name}", "TXT", '"heritage=operator-app"')
    found = {(entry.uid, entry.proxy, entry.name) async for entry in registry.entries()}
    assert found == {(each.uid, each.proxy, each.hostname) for each in (record, second)}


# Whose names they are


@pytest.mark.parametrize("address", [address for address, _ in ADDRESSES])
@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("A", "192.0.2.1"),
        ("AAAA", "2001:db8::1"),
        ("CNAME", "theirs.example.net."),
        ("MX", "10 mail.example.net."),
        ("TXT", '"v=spf1 -all"'),
    ],
)
async def test_a_strangers_name_is_never_touched(
    registry: PowerDnsRegistry, proxy: FaultyProxy, zone: Zone, address: str, kind: str, content: str
) -> None:
    """A name with any record and no ownership of ours stays as it is, and the refusal tells nothing of who has it."""
    record = a_record(zone, address=address)
    assert record.hostname is not None
    zone.put(record.hostname, kind, content)
    before, serial = zone.rows(), zone.serial
    assert await registry.observe(record) is Comparison.FOREIGN
    taken = await registry.register(record)
    assert reason(taken) == "HostnameTaken"
    assert taken.problem is not None
    assert taken.problem.needs_user_action
    assert content not in taken.problem.message
    assert await remove(registry, record) is Outcome.SKIPPED
    assert (zone.rows(), zone.serial) == (before, serial)
    assert "PATCH" not in proxy.requests


async def test_a_disabled_record_keeps_its_name(registry: PowerDnsRegistry, proxy: FaultyProxy, zone: Zone) -> None:
    """A record that somebody has parked is not served, and is still not overwritten."""
    before = zone.rows()
    assert reason(await registry.register(a_record(zone, hostname=f"parked.{zone.name}"))) == "HostnameTaken"
    assert zone.rows() == before
    assert "PATCH" not in proxy.requests


async def test_a_strangers_address_at_the_apex_stays(registry: PowerDnsRegistry, zone: Zone) -> None:
    """SOA and NS do not make the apex somebody's; an address there does."""
    zone.put(zone.name, "AAAA", "2001:db8::1")
    before = zone.rows()
    assert reason(await registry.register(a_record(zone, hostname=zone.name))) == "HostnameTaken"
    assert zone.rows() == before


@pytest.mark.parametrize(
    "content",
    [
        '"v=spf1 -all"',
        '"heritage=operator-app"',
        '"heritage=operator-app" "operator=edge" "uid={uid}" "proxy=team-a/checkout" "generation=03"',
        '"heritage=operator-app operator=edge uid={uid} proxy=team-a/checkout generation=3"',
        '"heritage=operator-app" "operator=other" "uid={uid}" "proxy=team-a/checkout" "generation=3"',
        '"heritage=operator-app" "operator=edge" "uid=another" "proxy=team-a/checkout" "generation=3"',
    ],
)
async def test_an_ownership_that_is_not_exactly_ours_is_foreign(
    registry: PowerDnsRegistry, zone: Zone, content: str
) -> None:
    """Another text, operator or UID at the owner name: not ours to write and not ours to remove."""
    record = a_record(zone)
    zone.put(f"_edge-owner.{record.hostname}", "TXT", content.format(uid=record.uid))
    before = zone.rows()
    assert await registry.observe(record) is Comparison.FOREIGN
    assert reason(await registry.register(record)) == "HostnameTaken"
    assert await remove(registry, record) is Outcome.SKIPPED
    assert zone.rows() == before


async def test_the_first_of_two_proxies_keeps_the_hostname(registry: PowerDnsRegistry, zone: Zone) -> None:
    """The second proxy gets nothing until the first one is deregistered, and then everything."""
    strangers = zone.rows()
    first, second = a_record(zone), a_record(zone, uid="second", address="203.0.113.8")
    await registry.register(first)
    assert reason(await registry.register(second)) == "HostnameTaken"
    assert await remove(registry, second) is Outcome.SKIPPED
    assert zone.rows() == strangers | pair(first)
    await remove(registry, first)
    assert await registry.register(second) == Registration(Outcome.CREATED)
    assert zone.rows() == strangers | pair(second)


@pytest.mark.parametrize("address", [address for address, _ in ADDRESSES])
@pytest.mark.parametrize(
    ("name", "kind", "content"),
    [
        ("shop", "A", "192.0.2.1"),
        ("shop", "CNAME", "theirs.example.net."),
        ("shop", "TXT", '"theirs"'),
        ("_edge-owner.shop", "TXT", '"theirs"'),
        ("_edge-owner.shop", "CNAME", "theirs.example.net."),
    ],
)
async def test_a_name_taken_between_look_and_write_is_not_touched(
    registry: PowerDnsRegistry, proxy: FaultyProxy, zone: Zone, address: str, name: str, kind: str, content: str
) -> None:
    """A stranger who writes right before our claim keeps the name: the server refuses the claim as a whole."""
    proxy.strike("PATCH", Strike(before=lambda: zone.put(f"{name}.{zone.name}", kind, content)))
    strangers = zone.rows()
    assert reason(await registry.register(a_record(zone, address=address))) == "HostnameTaken"
    assert zone.rows() == strangers | {(f"{name}.{zone.name}", kind, 60, content, False)}


async def test_of_many_operators_one_gets_the_name(operator: Operator, zone: Zone) -> None:
    """Eight operators claim one hostname at once: one pair stands, it is the winner's, and the others say so."""
    strangers = zone.rows()
    outcomes: dict[str, Registration] = {}
    records = {f"op-{n}": a_record(zone, uid=f"uid-{n}", address=f"203.0.113.{n}") for n in range(8)}

    async def contend(name: str) -> None:
        async with operator(name, powerdns_timeout_s=20) as contender:
            while name not in outcomes:
                try:
                    outcomes[name] = await contender.register(records[name])
                except TransientError:
                    await anyio.sleep(0.01)

    async with anyio.create_task_group() as contest:
        for name in records:
            contest.start_soon(contend, name)
    winners = [name for name, outcome in outcomes.items() if outcome.problem is None]
    assert len(winners) == 1
    assert {reason(outcome) for outcome in outcomes.values()} == {None, "HostnameTaken"}
    assert zone.rows() == strangers | pair(records[winners[0]], operator=winners[0])
    assert zone.count() == len(zone.rows())


async def test_an_older_generation_never_replaces_a_newer_one(
    registry: PowerDnsRegistry, proxy: FaultyProxy, zone: Zone
) -> None:
    """What arrives late finds the newer record and writes nothing."""
    strangers = zone.rows()
    newer, older = a_record(zone, generation=10, address="203.0.113.8"), a_record(zone, generation=9)
    await registry.register(newer)
    with proxy.counted() as requests:
        assert await registry.observe(older) is Comparison.NEWER
        assert reason(await registry.register(older)) == "NewerRecord"
    assert "PATCH" not in requests
    assert zone.rows() == strangers | pair(newer)


async def test_a_first_registration_overtaken_by_a_newer_one_yields(
    registry: PowerDnsRegistry, operator: Operator, proxy: FaultyProxy, zone: Zone
) -> None:
    """Two holders of one proxy both find the name free: the later claim is refused, though it is of the same UID."""
    strangers = zone.rows()
    newer, older = a_record(zone, generation=10, address="203.0.113.8"), a_record(zone, generation=9)

    async def overtake() -> None:
        async with operator(powerdns_url=zone.server.url) as second:
            await second.register(newer)

    proxy.strike("PATCH", Strike(before=lambda: anyio.run(overtake)))
    assert reason(await registry.register(older)) == "NewerRecord"
    assert zone.rows() == strangers | pair(newer)


async def test_of_several_claims_side_by_side_the_lowest_holds(
    registry: PowerDnsRegistry, operator: Operator, zone: Zone
) -> None:
    """A database that let two claims in is put right by one of them, whichever comes first."""
    strangers = zone.rows()
    ours, theirs = a_record(zone), a_record(zone, uid="theirs", address="203.0.113.8")
    both = [
        Ownership(name, each.uid, each.proxy, each.generation).content
        for name, each in ((OPERATOR, ours), ("other", theirs))
    ]
    assert ours.hostname is not None
    zone.put(f"_edge-owner.{ours.hostname}", "TXT", *both)
    zone.put(ours.hostname, "A", ours.address, theirs.address)
    async with operator("other") as other:
        assert reason(await other.register(theirs)) == "HostnameTaken"
        assert await remove(other, theirs) is Outcome.SKIPPED
        assert await registry.register(ours) == Registration(Outcome.CONFIGURED)
        assert reason(await other.register(theirs)) == "HostnameTaken"
    assert zone.rows() == strangers | pair(ours)


async def test_a_record_that_stands_twice_is_made_one(registry: PowerDnsRegistry, zone: Zone) -> None:
    """Overlapping changes can leave equal records on some databases; the next round leaves one of each."""
    record = a_record(zone)
    await registry.register(record)
    count = zone.count()
    zone.server.sql(
        "INSERT INTO records (domain_id, name, type, content, ttl, prio, disabled, auth)"
        " SELECT domain_id, name, type, content, ttl, prio, disabled, auth FROM records WHERE name LIKE ?",
        f"%{record.hostname}",
    )
    assert zone.count() == count + 2
    assert await registry.register(record) == Registration(Outcome.CONFIGURED)
    assert zone.count() == count


# Drift


def _edit_address(zone: Zone, name: str) -> None:
    zone.put(name, "A", "192.0.2.66", ttl_s=TTL_S)


def _edit_ttl(zone: Zone, name: str) -> None:
    zone.put(name, "A", "203.0.113.7", ttl_s=1)


def _add_address(zone: Zone, name: str) -> None:
    zone.put(name, "A", "203.0.113.7", "192.0.2.66", ttl_s=TTL_S)


def _add_other_address(zone: Zone, name: str) -> None:
    zone.put(name, "AAAA", "2001:db8::66")


def _disable_address(zone: Zone, name: str) -> None:
    zone.put(name, "A", "203.0.113.7", ttl_s=TTL_S, is_disabled=True)


def _remove_address(zone: Zone, name: str) -> None:
    zone.remove(name, "A")


def _make_alias(zone: Zone, name: str) -> None:
    zone.remove(name, "A")
    zone.put(name, "CNAME", "elsewhere.example.net.")


def _age_ownership(zone: Zone, name: str) -> None:
    older = a_record(zone, generation=1)
    owner = Ownership(OPERATOR, older.uid, older.proxy, older.generation).content
    zone.put(f"_edge-owner.{name}", "TXT", owner, ttl_s=TTL_S)


EDITS = [
    _edit_address,
    _edit_ttl,
    _add_address,
    _add_other_address,
    _disable_address,
    _remove_address,
    _make_alias,
    _age_ownership,
]


@pytest.mark.parametrize("edit", EDITS)
async def test_what_is_changed_by_hand_is_put_back(
    registry: PowerDnsRegistry, zone: Zone, edit: Callable[[Zone, str], None]
) -> None:
    """Any edit of a name that our ownership stands at is seen and undone, a half pair is completed."""
    record = a_record(zone)
    assert record.hostname is not None
    await registry.register(record)
    whole = zone.rows()
    edit(zone, record.hostname)
    assert zone.rows() != whole
    assert await registry.observe(record) is Comparison.DIFFERENT
    assert await registry.register(record) == Registration(Outcome.CONFIGURED)
    assert zone.rows() == whole


@pytest.mark.parametrize("edit", EDITS)
async def test_what_was_changed_by_hand_is_removed_all_the_same(
    registry: PowerDnsRegistry, zone: Zone, edit: Callable[[Zone, str], None]
) -> None:
    """Whatever address stands at our name goes with the name: no orphan."""
    strangers = zone.rows()
    record = a_record(zone)
    assert record.hostname is not None
    await registry.register(record)
    edit(zone, record.hostname)
    assert await remove(registry, record) is Outcome.DELETED
    assert zone.rows() == strangers


async def test_without_its_ownership_an_address_is_nobodys_to_write(registry: PowerDnsRegistry, zone: Zone) -> None:
    """Once the TXT is deleted by hand nothing proves the address ours: it stays, and the condition says so."""
    record = a_record(zone)
    await registry.register(record)
    zone.remove(f"_edge-owner.{record.hostname}", "TXT")
    before = zone.rows()
    assert await registry.observe(record) is Comparison.FOREIGN
    assert reason(await registry.register(record)) == "HostnameTaken"
    assert await remove(registry, record) is Outcome.SKIPPED
    assert zone.rows() == before


async def test_other_types_beside_our_address_stay(registry: PowerDnsRegistry, zone: Zone) -> None:
    """An MX that somebody puts at our name outlives updates and removal; it keeps an alias out, which is said."""
    record = a_record(zone)
    assert record.hostname is not None
    await registry.register(record)
    zone.put(record.hostname, "MX", "10 mail.example.net.")
    beside = (record.hostname, "MX", 60, "10 mail.example.net.", False)
    assert await registry.register(replace(record, generation=4)) == Registration(Outcome.CONFIGURED)
    assert beside in zone.rows()
    before = zone.rows()
    with pytest.raises(InvalidError, match="Conflicts") as refused:
        await registry.register(replace(record, generation=5, address="lb.example.net"))
    assert refused.value.reason == "RecordRefused"
    assert zone.rows() == before
    assert await remove(registry, record) is Outcome.DELETED
    assert zone.rows() == before - pair(replace(record, generation=4))


async def test_comments_of_others_do_not_count(registry: PowerDnsRegistry, zone: Zone) -> None:
    """The server tells every comment of a zone with each answer; they are neither records nor in the way."""
    comment = {"content": "by hand", "account": "admin"}
    change = {"name": f"mail.{zone.name}.", "type": "A", "changetype": "REPLACE", "comments": [comment]}
    zone.server.api("PATCH", f"/zones/{zone.name}.", {"rrsets": [change]})
    assert await registry.register(a_record(zone)) == Registration(Outcome.CREATED)
    assert await registry.register(a_record(zone)) == Registration(Outcome.UNCHANGED)


# Faults


async def create(registry: PowerDnsRegistry, zone: Zone) -> object:
    """A first registration."""
    return await registry.register(a_record(zone))


async def update(registry: PowerDnsRegistry, zone: Zone) -> object:
    """A new generation with an address of another type."""
    return await registry.register(a_record(zone, generation=4, address="lb.example.net"))


async def delete(registry: PowerDnsRegistry, zone: Zone) -> object:
    """A removal."""
    return await remove(registry, a_record(zone))


STEPS = [create, update, delete]
FAULTS = [
    pytest.param(Strike(is_lost=True), id="answer-lost"),
    pytest.param(Strike(is_dropped=True), id="never-arrived"),
    pytest.param(Strike(status=500, body=b'{"error": "database is locked"}'), id="500"),
    pytest.param(Strike(status=502, body=b"<html>"), id="502"),
    pytest.param(Strike(status=503, headers={"Retry-After": "7"}), id="503"),
    pytest.param(Strike(status=429, headers={"Retry-After": "7"}), id="429"),
    pytest.param(Strike(delay_s=SHORT_TIMEOUT_S + 0.2), id="slow"),
]


def after(zone: Zone, step: Callable[..., Any]) -> set[Row]:
    """The pair that stands after a step."""
    if step is create:
        return pair(a_record(zone))
    return pair(a_record(zone, generation=4, address="lb.example.net")) if step is update else set()


@pytest.mark.parametrize("strike", FAULTS)
@pytest.mark.parametrize(("method", "nth"), [("GET", 1), ("GET", 2), ("PATCH", 1), ("GET", 3), ("GET", 4)])
@pytest.mark.parametrize("step", STEPS)
async def test_a_fault_at_any_request_is_completed_by_the_next_call(
    operator: Operator,
    proxy: FaultyProxy,
    zone: Zone,
    step: Callable[..., Any],
    method: str,
    nth: int,
    strike: Strike,
) -> None:
    """Each fault at each request is a TransientError that leaves the state before or after; the next call ends it."""
    strangers = zone.rows()
    async with operator(powerdns_timeout_s=SHORT_TIMEOUT_S if strike.delay_s else TIMEOUT_S) as registry:
        if step is not create:
            await registry.register(a_record(zone))
        before = zone.rows()
        proxy.strike(method, strike, nth=nth)
        with pytest.raises(TransientError) as failed:
            await step(registry, zone)
        assert isinstance(failed.value, ThrottledError) == (strike.status == 429)
        assert failed.value.retry_after_s == (7 if strike.headers else None)
        if strike.delay_s:
            await anyio.sleep(0.4)  # what is only late still arrives
        assert zone.rows() in (before, strangers | after(zone, step))
        await step(registry, zone)
        assert zone.rows() == strangers | after(zone, step)
        assert zone.count() == len(zone.rows())


async def test_a_change_that_arrives_late_still_finds_the_name_taken(
    registry: PowerDnsRegistry, operator: Operator, proxy: FaultyProxy, zone: Zone
) -> None:
    """A claim that was given up and reaches the server after another operator's has no effect."""
    strangers = zone.rows()
    proxy.strike("PATCH", Strike(delay_s=SHORT_TIMEOUT_S + 0.5))
    async with operator(powerdns_timeout_s=SHORT_TIMEOUT_S) as hasty:
        with pytest.raises(TransientError, match="did not answer within"):
            await hasty.register(a_record(zone))
    theirs = a_record(zone, uid="theirs")
    async with operator("other", powerdns_url=zone.server.url) as other:
        assert await other.register(theirs) == Registration(Outcome.CREATED)
    await anyio.sleep(0.7)
    assert zone.rows() == strangers | pair(theirs, operator="other")
    assert reason(await registry.register(a_record(zone))) == "HostnameTaken"


async def test_a_server_that_is_down_is_waited_for(operator: Operator, zone: Zone, powerdns: PowerDns) -> None:
    """Nobody listens: every call is transient; when the server is back each does what it should."""
    strangers = zone.rows()
    async with operator(powerdns_url=powerdns.url) as registry:
        await create(registry, zone)
        powerdns.stop()
        try:
            for step in (registry.observe(a_record(zone)), update(registry, zone), delete(registry, zone)):
                with pytest.raises(TransientError, match="no answer from PowerDNS"):
                    await step
        finally:
            powerdns.start()
        assert await delete(registry, zone) is Outcome.DELETED
    assert zone.rows() == strangers


async def test_a_renewed_key_is_read_when_the_old_one_is_refused(
    operator: Operator, proxy: FaultyProxy, powerdns: PowerDns, zone: Zone, tmp_path: Path
) -> None:
    """A wrong key is terminal, and once the mounted Secret has the right one the next request goes through."""
    file = tmp_path / "key"
    file.write_text("wrong")
    before = zone.rows()
    async with operator(powerdns_api_key_file=file) as registry:
        for step in STEPS:
            with pytest.raises(ForbiddenError) as refused:
                await step(registry, zone)
            assert refused.value.reason == "RegistryUnauthorized"
        assert zone.rows() == before
        file.write_text(powerdns.api_key)
        with proxy.counted() as requests:
            assert await registry.register(a_record(zone)) == Registration(Outcome.CREATED)
        assert requests.count("GET") == 5  # the first one twice


async def test_a_zone_that_the_server_lacks_is_terminal(operator: Operator, zone: Zone) -> None:
    """Configured and unknown: said with its reason, at removal too, since a 404 proves nothing."""
    missing = Zone(zone.server, f"missing-{zone.name}")
    async with operator(powerdns_zones=(missing.name,)) as registry:
        for step in STEPS:
            with pytest.raises(NotFoundError) as refused:
                await step(registry, missing)
            assert refused.value.reason == "ZoneNotFound"


async def test_one_bad_name_does_not_block_another(registry: PowerDnsRegistry, zone: Zone) -> None:
    """A record that is refused leaves its neighbour's registration alone: each name has requests of its own."""
    bad, good = a_record(zone, address="not an address"), a_record(zone, uid="good", hostname=f"good.{zone.name}")
    strangers = zone.rows()
    with pytest.raises(TerminalError):
        await registry.register(bad)
    assert await registry.register(good) == Registration(Outcome.CREATED)
    assert zone.rows() == strangers | pair(good)


async def test_the_key_is_told_to_nobody(
    operator: Operator,
    proxy: FaultyProxy,
    powerdns: PowerDns,
    zone: Zone,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither logs at the lowest level nor errors nor the settings contain the key."""
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "key"
    file.write_text(powerdns.api_key)
    said: list[str] = [repr(Settings(powerdns_api_key_file=file))]
    for strike in (Strike(), Strike(status=401), Strike(status=500), Strike(is_dropped=True), Strike(status=200)):
        proxy.strike("PATCH", strike)
        async with operator(powerdns_api_key_file=file) as registry:
            said += [repr(registry), repr(vars(registry._api)), repr(vars(registry._api._client))]
            try:
                await registry.register(a_record(zone, generation=len(said)))
            except OperatorError as error:
                said += [str(error), repr(error), repr(error.__cause__), repr(error.__context__)]
    assert len(said) > 10
    assert powerdns.api_key not in "".join(said) + caplog.text
