"""The PowerDNS registry against a real server: what it writes, what it never writes, and a fault at every request.

Each test compares the whole zone, so it fails on a duplicate or left-over record and on any change of a foreign one.
"""

import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from operator_app.api.kinds import Key
from operator_app.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    OperatorError,
    TerminalError,
    ThrottledError,
    TransientError,
)
from operator_app.registration.identity import Installation
from operator_app.registration.powerdns.dns import Ownership
from operator_app.registration.powerdns.registry import PowerDnsRegistry, connect
from operator_app.registration.registry import Comparison, Record, Registration
from operator_app.results import Outcome
from operator_app.settings import Settings
from tests.e2e.kube import wait_until
from tests.e2e.powerdns.fixture import (
    powerdns_of_each_database as powerdns_of_each_database,  # noqa: PLC0414  # fixtures are found by their import
)
from tests.e2e.powerdns.fixture import proxy as proxy  # noqa: PLC0414
from tests.e2e.powerdns.fixture import recursor as recursor  # noqa: PLC0414
from tests.e2e.powerdns.fixture import zone as zone  # noqa: PLC0414
from tests.e2e.powerdns.proxy import FaultyProxy, HttpFault
from tests.e2e.powerdns.recursor import Recursor
from tests.e2e.powerdns.server import PowerDns, Row, Zone

pytestmark = pytest.mark.anyio

CLUSTER = "0f0f0f0f-1111-2222-3333-444444444444"
OPERATOR = "edge"
TTL_S = 300
TIMEOUT_S = 10.0
SHORT_TIMEOUT_S = 1.0
ADDRESSES = [("203.0.113.7", "A"), ("2001:db8::7", "AAAA"), ("lb.example.net", "CNAME")]
Operator = Callable[..., AbstractAsyncContextManager[PowerDnsRegistry]]


@pytest.fixture
def operator(powerdns: PowerDns, proxy: FaultyProxy, zone: Zone) -> Operator:
    """A factory of registries that write the test's zone through the faulty proxy; keywords change their settings.

    It takes the installation's id, and the UID of the cluster where it is another one.
    """

    def make(
        name: str = OPERATOR, *, cluster: str = CLUSTER, **settings: Any
    ) -> AbstractAsyncContextManager[PowerDnsRegistry]:
        return connect(
            Settings(
                **{
                    "powerdns_url": proxy.url,
                    "powerdns_zones": (zone.name,),
                    "powerdns_api_key_file": powerdns.key_file,
                    "powerdns_default_ttl_s": TTL_S,
                    "powerdns_timeout_s": TIMEOUT_S,
                    **settings,
                }
            ),
            Installation.of(cluster, name),
        )

    return make


@pytest.fixture
async def registry(operator: Operator) -> AsyncIterator[PowerDnsRegistry]:
    """The registry of the operator under test."""
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


def installed(name: str) -> Installation:
    """The installation with this id in the cluster of the tests."""
    return Installation.of(CLUSTER, name)


def more(record: Record, *addresses: str) -> Record:
    """The record with these addresses."""
    return replace(record, address=addresses[0], more_addresses=addresses[1:])


def kind_of(address: str) -> str:
    """The type of record that an address of ``ADDRESSES`` needs."""
    return dict(ADDRESSES).get(address, "A")


def pair(record: Record, *, operator: str = OPERATOR, ttl_s: int = TTL_S) -> set[Row]:
    """The two DNS records of a registered record."""
    assert record.hostname is not None
    kind = kind_of(record.address)
    content = f"{record.address}." if kind == "CNAME" else record.address
    owner = Ownership(installed(operator), record.uid, record.generation).content
    return {
        (record.hostname, kind, ttl_s, content, False),
        (f"_edge-owner.{record.hostname}", "TXT", ttl_s, owner, False),
    }


def reason(registration: Registration) -> str | None:
    """The reason of a registration's problem; None if it succeeded."""
    assert (registration.outcome is Outcome.SKIPPED) == (registration.problem is not None)
    return registration.problem.reason if registration.problem else None


async def remove(registry: PowerDnsRegistry, record: Record) -> Outcome:
    """Deregister a record."""
    assert record.hostname is not None
    return await registry.deregister(record.uid, record.hostname)


# What it writes


@pytest.mark.parametrize(("address", "kind"), ADDRESSES)
async def test_a_pair_is_created_resolved_and_removed(
    registry: PowerDnsRegistry, proxy: FaultyProxy, zone: Zone, address: str, kind: str
) -> None:
    """A first registration creates exactly the pair, DNS resolves it, and its removal restores the zone."""
    foreign = zone.rows()
    record = a_record(zone, address=address)
    assert record.hostname is not None
    assert await registry.observe(record) is Comparison.ABSENT
    with proxy.counted() as first:
        assert await registry.register(record) == Registration(Outcome.CREATED)
    assert first == ["GET", "GET", "SEARCH", "PATCH", "GET", "GET"]
    assert zone.rows() == foreign | pair(record)
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
    assert zone.rows() == foreign
    assert zone.server.resolve(record.hostname, kind) == []
    with proxy.counted() as repeated:
        assert await remove(registry, record) is Outcome.UNCHANGED
    assert repeated == ["GET", "GET"]


@pytest.mark.parametrize(("after", "_kind"), ADDRESSES)
@pytest.mark.parametrize(("before", "_before_kind"), ADDRESSES)
async def test_an_address_of_another_type_replaces_the_previous_one(
    registry: PowerDnsRegistry, proxy: FaultyProxy, zone: Zone, before: str, after: str, _kind: str, _before_kind: str
) -> None:
    """A new generation with an address of any type leaves one pair, in one change."""
    foreign = zone.rows()
    await registry.register(a_record(zone, address=before))
    newer = a_record(zone, address=after, generation=4)
    assert await registry.observe(newer) is Comparison.DIFFERENT
    with proxy.counted() as update:
        assert await registry.register(newer) == Registration(Outcome.CONFIGURED)
    assert update == ["GET", "GET", "PATCH", "GET", "GET"]
    assert zone.rows() == foreign | pair(newer)


async def test_the_proxys_own_ttl_overrides_the_default(registry: PowerDnsRegistry, zone: Zone) -> None:
    """A TTL in the record is the TTL of both records; without one it is the operator's default again."""
    foreign = zone.rows()
    await registry.register(a_record(zone, ttl_s=17))
    assert zone.rows() == foreign | pair(a_record(zone), ttl_s=17)
    assert await registry.register(a_record(zone)) == Registration(Outcome.CONFIGURED)
    assert zone.rows() == foreign | pair(a_record(zone))


async def test_a_zones_own_name_can_have_an_address(registry: PowerDnsRegistry, zone: Zone) -> None:
    """At the apex an address is added beside SOA, NS and MX, which stay; a CNAME is refused with a message."""
    foreign = zone.rows()
    record = a_record(zone, hostname=zone.name)
    assert await registry.register(record) == Registration(Outcome.CREATED)
    assert zone.rows() == foreign | pair(record)
    with pytest.raises(InvalidError, match="can't be an alias") as refused:
        await registry.register(replace(record, address="lb.example.net"))
    assert refused.value.reason == "AddressUnusable"
    assert await remove(registry, record) is Outcome.DELETED
    assert zone.rows() == foreign


async def test_the_most_specific_zone_gets_the_records(operator: Operator, zone: Zone) -> None:
    """Of two zones that contain a hostname the inner one gets the pair; a hostname in no zone is refused."""
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
        with pytest.raises(TerminalError) as refused:
            await remove(registry, elsewhere)
        assert refused.value.reason == "ZoneNotConfigured"


async def test_entries_lists_only_records_of_this_operator(
    registry: PowerDnsRegistry, operator: Operator, zone: Zone
) -> None:
    """The list for audits has each record of this operator once, and no record of anybody else."""
    record, second = a_record(zone), a_record(zone, uid="u2", hostname=f"cart.{zone.name}", proxy=Key("team-b", "cart"))
    await registry.register(record)
    await registry.register(second)
    async with operator("other") as other:
        await other.register(a_record(zone, uid="u3", hostname=f"third.{zone.name}"))
    zone.put(f"_edge-owner.noise.{zone.name}", "TXT", '"heritage=operator-app"')
    async with operator(cluster="another") as elsewhere:
        await elsewhere.register(a_record(zone, uid="u4", hostname=f"fourth.{zone.name}"))
    found = {(entry.uid, entry.proxy, entry.name) async for entry in registry.entries()}
    assert found == {(each.uid, None, each.hostname) for each in (record, second)}


async def test_a_resolver_gets_all_addresses_in_whatever_order_they_come(
    registry: PowerDnsRegistry, recursor: Recursor, zone: Zone
) -> None:
    """Dual stack: A and AAAA records; another order changes nothing, one address less is one record less."""
    foreign, record = zone.rows(), a_record(zone)
    assert record.hostname is not None
    both, swapped = (more(record, *each) for each in (("203.0.113.7", "2001:db8::7"), ("2001:db8::7", "203.0.113.7")))
    assert await registry.register(both) == Registration(Outcome.CREATED)
    assert recursor.addresses(record.hostname) == {"203.0.113.7", "2001:db8::7"}
    serial = zone.serial
    assert await registry.register(swapped) == Registration(Outcome.UNCHANGED)
    assert await registry.observe(swapped) is Comparison.MATCHING
    assert zone.serial == serial
    assert await registry.register(more(record, "203.0.113.7", "203.0.113.8")) == Registration(Outcome.CONFIGURED)
    wait_until(lambda: recursor.addresses(record.hostname or "") == {"203.0.113.7", "203.0.113.8"}, 20)
    assert await remove(registry, record) is Outcome.DELETED
    assert zone.rows() == foreign


@pytest.mark.parametrize("cut", ["team", "eu.team", "shop.eu.team"])
@pytest.mark.parametrize("kind", ["NS", "DNAME", "a zone on the same server"])
async def test_a_name_that_no_resolver_finds_is_refused(
    registry: PowerDnsRegistry, recursor: Recursor, zone: Zone, kind: str, cut: str
) -> None:
    """Below a delegation, a DNAME or a child zone, or at one: refused naming it, before and after it was registered."""
    record = a_record(zone, hostname=f"shop.eu.team.{zone.name}")
    assert record.hostname is not None
    is_child = kind.startswith("a zone")
    if is_child:
        zone.server.make_zone(f"{cut}.{zone.name}")
    else:
        assert await registry.register(record) == Registration(Outcome.CREATED)
        assert recursor.addresses(record.hostname) == {record.address}
        assert await remove(registry, record) is Outcome.DELETED
        zone.put(f"{cut}.{zone.name}", kind, "elsewhere.invalid.")
    before = zone.rows()
    is_taken = cut.startswith("shop") and kind == "DNAME"
    try:
        refused = (await registry.register(record)).problem
        said = (refused.reason, refused.message) if refused else ("", "")
    except InvalidError as error:
        said = (error.reason, error.message)
    assert said[0] == ("HostnameTaken" if is_taken else "BelowZoneCut")
    assert is_taken or f"{cut}.{zone.name} is no part of the zone" in said[1]
    assert zone.rows() == before
    wait_until(lambda: not recursor.addresses(record.hostname or ""), 20)


async def test_a_delegation_after_the_registration_is_noticed(
    registry: PowerDnsRegistry, recursor: Recursor, zone: Zone
) -> None:
    """A comparison differs once the name is delegated, and registering again says why; removal works all the same."""
    record = a_record(zone, hostname=f"shop.eu.{zone.name}")
    assert record.hostname is not None
    await registry.register(record)
    zone.put(f"eu.{zone.name}", "NS", "elsewhere.invalid.")
    delegated = zone.rows()
    assert await registry.observe(record) is Comparison.DIFFERENT
    with pytest.raises(InvalidError, match=f"eu.{zone.name}") as refused:
        await registry.register(record)
    assert refused.value.reason == "BelowZoneCut"
    wait_until(lambda: not recursor.addresses(record.hostname or ""), 20)
    assert await remove(registry, record) is Outcome.DELETED
    assert zone.rows() == delegated - pair(record)


@pytest.mark.parametrize("address", ["web-envoy.team-a.svc", "127.0.0.1", "fe80::1", "169.254.0.9", "::"])
async def test_an_address_of_no_use_to_a_resolver_is_refused(
    registry: PowerDnsRegistry, recursor: Recursor, zone: Zone, address: str
) -> None:
    """A name of one cluster, an address of one machine or link: nothing is written, and the problem says so."""
    before, record = zone.rows(), a_record(zone, address=address)
    with pytest.raises(InvalidError) as refused:
        await registry.register(record)
    assert refused.value.reason == "AddressUnusable"
    assert zone.rows() == before
    assert recursor.addresses(record.hostname or "") == set()


# Who owns which names


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
async def test_a_foreign_name_is_never_written(
    registry: PowerDnsRegistry, proxy: FaultyProxy, zone: Zone, address: str, kind: str, content: str
) -> None:
    """A name with any record and no ownership record of ours is not changed; the problem hides its owner."""
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


async def test_a_name_with_a_disabled_record_is_not_free(
    registry: PowerDnsRegistry, proxy: FaultyProxy, zone: Zone
) -> None:
    """A disabled record is not served, and is not overwritten all the same."""
    before = zone.rows()
    assert reason(await registry.register(a_record(zone, hostname=f"parked.{zone.name}"))) == "HostnameTaken"
    assert zone.rows() == before
    assert "PATCH" not in proxy.requests


async def test_a_foreign_address_at_the_apex_is_never_written(registry: PowerDnsRegistry, zone: Zone) -> None:
    """With SOA and NS alone the apex is free; with an address it is not."""
    zone.put(zone.name, "AAAA", "2001:db8::1")
    before = zone.rows()
    assert reason(await registry.register(a_record(zone, hostname=zone.name))) == "HostnameTaken"
    assert zone.rows() == before


@pytest.mark.parametrize(
    "content",
    [
        '"v=spf1 -all"',
        '"heritage=operator-app"',
        '"heritage=operator-app" "cluster={cluster}" "installation={name}" "uid={uid}" "generation=03"',
        '"heritage=operator-app cluster={cluster} installation={name} uid={uid} generation=3"',
        '"heritage=operator-app" "operator=edge" "uid={uid}" "proxy=team-a/checkout" "generation=3"',
        '"heritage=operator-app" "cluster={cluster}" "installation={other}" "uid={uid}" "generation=3"',
        '"heritage=operator-app" "cluster={other}" "installation={name}" "uid={uid}" "generation=3"',
        '"heritage=operator-app" "cluster={cluster}" "installation={name}" "uid=another" "generation=3"',
    ],
)
async def test_an_ownership_record_that_is_not_exactly_ours_is_foreign(
    registry: PowerDnsRegistry, zone: Zone, content: str
) -> None:
    """With another text, cluster, installation or UID at the owner name, nothing is written and nothing is removed."""
    record, ours = a_record(zone), installed(OPERATOR)
    parts = {"uid": record.uid, "cluster": ours.cluster, "name": ours.name, "other": "0" * 32}
    zone.put(f"_edge-owner.{record.hostname}", "TXT", content.format(**parts))
    before = zone.rows()
    assert await registry.observe(record) is Comparison.FOREIGN
    assert reason(await registry.register(record)) == "HostnameTaken"
    assert await remove(registry, record) is Outcome.SKIPPED
    assert zone.rows() == before


async def test_the_first_of_two_proxies_keeps_the_hostname(registry: PowerDnsRegistry, zone: Zone) -> None:
    """The second proxy is refused until the first one is deregistered, and then registered."""
    foreign = zone.rows()
    first, second = a_record(zone), a_record(zone, uid="second", address="203.0.113.8")
    await registry.register(first)
    assert reason(await registry.register(second)) == "HostnameTaken"
    assert await remove(registry, second) is Outcome.SKIPPED
    assert zone.rows() == foreign | pair(first)
    await remove(registry, first)
    assert await registry.register(second) == Registration(Outcome.CREATED)
    assert zone.rows() == foreign | pair(second)


@pytest.mark.parametrize(
    ("name", "cluster", "sentence"),
    [(OPERATOR, "the cluster of a backup", "in another cluster"), ("other", CLUSTER, "another installation")],
    ids=["another cluster with the same id", "another id in the same cluster"],
)
async def test_records_of_another_cluster_or_installation_are_left(
    registry: PowerDnsRegistry,
    operator: Operator,
    proxy: FaultyProxy,
    zone: Zone,
    name: str,
    cluster: str,
    sentence: str,
) -> None:
    """With the same UID, as after a restore: nothing is written, removed or listed; the problem says whose it is."""
    record = a_record(zone)
    assert await registry.register(record) == Registration(Outcome.CREATED)
    before, serial = zone.rows(), zone.serial
    newer = replace(record, generation=9, address="203.0.113.9")
    async with operator(name, cluster=cluster) as copy:
        with proxy.counted() as requests:
            assert await copy.observe(newer) is Comparison.FOREIGN
            taken = await copy.register(newer)
            assert await remove(copy, record) is Outcome.SKIPPED
            assert [each async for each in copy.entries()] == []
    assert reason(taken) == "HostnameTaken"
    assert taken.problem is not None
    assert sentence in taken.problem.message
    assert "PATCH" not in requests
    assert (zone.rows(), zone.serial) == (before, serial)


async def test_a_changed_id_takes_over_what_the_ledger_knows(
    registry: PowerDnsRegistry, operator: Operator, zone: Zone
) -> None:
    """The record of the id before is rewritten, updated and removed; not without the ledger's word, nor another UID."""
    foreign, record = zone.rows(), a_record(zone)
    known = frozenset({installed(OPERATOR)})
    await registry.register(record)
    async with operator("renamed") as renamed:
        assert reason(await renamed.register(record)) == "HostnameTaken"
        assert reason(await renamed.register(replace(record, uid="another", former=known))) == "HostnameTaken"
        assert await renamed.observe(replace(record, former=known)) is Comparison.DIFFERENT
        assert await renamed.register(replace(record, former=known)) == Registration(Outcome.CONFIGURED)
        assert zone.rows() == foreign | pair(record, operator="renamed")
        assert await renamed.register(record) == Registration(Outcome.UNCHANGED)
    assert reason(await registry.register(record)) == "HostnameTaken", "it is not the id before any more"
    async with operator("again") as again:
        assert await again.deregister(record.uid, record.hostname or "", former=known) is Outcome.SKIPPED
        former = known | {installed("renamed")}
        assert await again.deregister(record.uid, record.hostname or "", former=former) is Outcome.DELETED
    assert zone.rows() == foreign


async def test_the_public_record_tells_no_names(registry: PowerDnsRegistry, zone: Zone) -> None:
    """What anybody can resolve has no name of a namespace, proxy, cluster or installation in it."""
    record = a_record(zone)
    await registry.register(record)
    [(_, text)] = zone.server.resolve(f"_edge-owner.{record.hostname}", "TXT")
    for name in (*record.proxy, CLUSTER, OPERATOR):
        assert name not in text
    assert {each.partition("=")[0] for each in text.split()} == {
        "heritage",
        "cluster",
        "installation",
        "uid",
        "generation",
    }


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
async def test_a_name_taken_between_read_and_write_is_not_written(
    registry: PowerDnsRegistry, proxy: FaultyProxy, zone: Zone, address: str, name: str, kind: str, content: str
) -> None:
    """A foreign record written right before our create stays: the server refuses the create as a whole."""
    proxy.inject("PATCH", HttpFault(before=lambda: zone.put(f"{name}.{zone.name}", kind, content)))
    foreign = zone.rows()
    assert reason(await registry.register(a_record(zone, address=address))) == "HostnameTaken"
    assert zone.rows() == foreign | {(f"{name}.{zone.name}", kind, 60, content, False)}


async def test_one_of_many_operators_gets_the_name(operator: Operator, zone: Zone) -> None:
    """Eight operators register one hostname at once: one pair is created, and the others get ``HostnameTaken``."""
    foreign = zone.rows()
    outcomes: dict[str, Registration] = {}
    records = {f"op-{n}": a_record(zone, uid=f"uid-{n}", address=f"203.0.113.{n}") for n in range(8)}

    async def contend(name: str) -> None:
        async with operator(name, powerdns_timeout_s=20) as contender:
            while name not in outcomes:
                try:
                    outcomes[name] = await contender.register(records[name])
                except TransientError:
                    await anyio.sleep(random.uniform(0, 1))  # noqa: S311  # as the operator's backoff does

    async with anyio.create_task_group() as contest:
        for name in records:
            contest.start_soon(contend, name)
    winners = [name for name, outcome in outcomes.items() if outcome.problem is None]
    assert len(winners) == 1
    assert {reason(outcome) for outcome in outcomes.values()} == {None, "HostnameTaken"}
    assert zone.rows() == foreign | pair(records[winners[0]], operator=winners[0])
    assert zone.count() == len(zone.rows())


async def test_an_older_generation_never_replaces_a_newer_one(
    registry: PowerDnsRegistry, proxy: FaultyProxy, zone: Zone
) -> None:
    """A late registration finds the newer record and writes nothing."""
    foreign = zone.rows()
    newer, older = a_record(zone, generation=10, address="203.0.113.8"), a_record(zone, generation=9)
    await registry.register(newer)
    with proxy.counted() as requests:
        assert await registry.observe(older) is Comparison.NEWER
        assert reason(await registry.register(older)) == "NewerRecord"
    assert "PATCH" not in requests
    assert zone.rows() == foreign | pair(newer)


async def test_a_first_registration_overtaken_by_a_newer_one_writes_nothing(
    registry: PowerDnsRegistry, operator: Operator, proxy: FaultyProxy, zone: Zone
) -> None:
    """Two replicas with one proxy both find the name free: the later create is refused, in spite of the same UID."""
    foreign = zone.rows()
    newer, older = a_record(zone, generation=10, address="203.0.113.8"), a_record(zone, generation=9)

    async def overtake() -> None:
        async with operator(powerdns_url=zone.server.url) as second:
            await second.register(newer)

    proxy.inject("PATCH", HttpFault(before=lambda: anyio.run(overtake)))
    assert reason(await registry.register(older)) == "NewerRecord"
    assert zone.rows() == foreign | pair(newer)


def both_stored(zone: Zone, *records: tuple[str, Record]) -> None:
    """What a database may have after it let the creates of several operators pass at the same time."""
    hostname = records[0][1].hostname
    contents = [Ownership(installed(name), each.uid, each.generation).content for name, each in records]
    zone.put(f"_edge-owner.{hostname}", "TXT", *contents, ttl_s=TTL_S)
    assert hostname is not None
    zone.put(hostname, "A", *(each.address for _, each in records), ttl_s=TTL_S)


async def test_of_several_owners_the_one_that_was_confirmed_keeps_the_name(
    registry: PowerDnsRegistry, operator: Operator, zone: Zone
) -> None:
    """Whichever is lower, whichever comes first: the other never reads itself as confirmed, and leaves one pair."""
    foreign = zone.rows()
    ours, theirs = a_record(zone, is_held=True), a_record(zone, uid="theirs", address="203.0.113.8")
    for other in ("other-1", "other-2", "other-3", "other-4"):
        async with operator(other) as second:
            both_stored(zone, (OPERATOR, ours), (other, theirs))
            assert await second.observe(theirs) is Comparison.FOREIGN
            with pytest.raises(ConflictError, match="at the same time"):
                await second.register(theirs)
            assert zone.rows() == foreign | pair(ours)
            both_stored(zone, (OPERATOR, ours), (other, theirs))
            assert await registry.register(ours) == Registration(Outcome.CONFIGURED)
            assert reason(await second.register(theirs)) == "HostnameTaken"
            assert await remove(second, theirs) is Outcome.SKIPPED
            assert zone.rows() == foreign | pair(ours)


async def test_of_several_owners_that_were_never_confirmed_none_is_confirmed(
    registry: PowerDnsRegistry, operator: Operator, zone: Zone
) -> None:
    """Each gives way, and what it had beside the other goes; the one that is left registers at its next try."""
    foreign = zone.rows()
    ours, theirs = a_record(zone), a_record(zone, uid="theirs", address="203.0.113.8")
    both_stored(zone, (OPERATOR, ours), ("other", theirs))
    async with operator("other") as second:
        with pytest.raises(ConflictError, match="at the same time"):
            await registry.register(ours)
        assert zone.rows() == foreign | pair(theirs, operator="other")
        assert reason(await registry.register(ours)) == "HostnameTaken"
        assert await second.register(theirs) == Registration(Outcome.UNCHANGED)
        both_stored(zone, (OPERATOR, ours), ("other", theirs))
        assert await remove(registry, ours) is Outcome.DELETED
        assert await second.register(replace(theirs, is_held=True)) == Registration(Outcome.CONFIGURED)
    assert zone.rows() == foreign | pair(theirs, operator="other")


async def test_a_claim_stored_beside_ours_before_we_confirm_it_is_noticed(
    registry: PowerDnsRegistry, operator: Operator, proxy: FaultyProxy, zone: Zone
) -> None:
    """Both creates are stored, then both read: neither is confirmed at first, and one is in the end."""
    foreign = zone.rows()
    ours, theirs = a_record(zone), a_record(zone, uid="theirs", address="203.0.113.8")
    proxy.inject("GET", HttpFault(before=lambda: both_stored(zone, (OPERATOR, ours), ("other", theirs))), nth=3)
    with pytest.raises(ConflictError, match="at the same time"):
        await registry.register(ours)
    async with operator("other") as second:
        if installed(OPERATOR) < installed("other"):
            assert {row[1] for row in zone.rows() - foreign} == {"A", "TXT"}, "the lower one stays for now"
            with pytest.raises(ConflictError, match="at the same time"):
                await second.register(theirs)
            assert await registry.register(ours) == Registration(Outcome.UNCHANGED)
            assert reason(await second.register(theirs)) == "HostnameTaken"
        else:
            assert await second.register(theirs) == Registration(Outcome.UNCHANGED)
            assert reason(await registry.register(ours)) == "HostnameTaken"


@pytest.mark.parametrize("kinds", ["one type", "an alias and an address"])
async def test_of_racing_claims_at_most_one_is_ever_confirmed(operator: Operator, zone: Zone, kinds: str) -> None:
    """Six operators, six hostnames: for each, one is told that it has the name, once, whatever the database stored."""
    foreign = zone.rows()
    targets = [f"203.0.113.{n}" if kinds == "one type" or n % 2 else f"lb{n}.example.net" for n in range(6)]
    confirmed: list[tuple[str, str]] = []

    async def contend(name: str, record: Record) -> None:
        async with operator(name, powerdns_url=zone.server.url, powerdns_timeout_s=20) as contender:
            while not any(hostname == record.hostname for _, hostname in confirmed):
                try:
                    registered = await contender.register(record)
                except (TransientError, InvalidError):
                    await anyio.sleep(random.uniform(0, 1))  # noqa: S311  # as the operator's backoff does
                    continue
                if registered.problem is None:
                    confirmed.append((name, record.hostname or ""))
                return

    for round_ in range(6):
        hostname = f"shop-{round_}.{zone.name}"
        while not any(each == hostname for _, each in confirmed):
            async with anyio.create_task_group() as contest:
                for n, target in enumerate(targets):
                    contest.start_soon(
                        contend, f"op-{n}", a_record(zone, uid=f"u{n}", hostname=hostname, address=target)
                    )
        assert [each for _, each in confirmed].count(hostname) == 1
    owned = {row[0] for row in zone.rows() - foreign if row[1] == "TXT"}
    assert owned == {f"_edge-owner.{hostname}" for _, hostname in confirmed}


async def test_a_duplicate_record_is_made_one(registry: PowerDnsRegistry, zone: Zone) -> None:
    """Overlapping changes can leave duplicates on some databases; the next call leaves one of each."""
    record = a_record(zone)
    await registry.register(record)
    count = zone.count()
    columns = "domain_id, name, type, content, ttl, prio, disabled, auth"
    zone.server.database.sql(
        f"INSERT INTO records ({columns}) SELECT {columns} FROM records WHERE name LIKE '%{record.hostname}'"  # noqa: S608
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
    owner = Ownership(installed(OPERATOR), older.uid, older.generation).content
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
async def test_an_edit_by_hand_is_reverted(
    registry: PowerDnsRegistry, zone: Zone, edit: Callable[[Zone, str], None]
) -> None:
    """Any edit of a name that we own is detected and reverted; half a pair is completed."""
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
async def test_a_record_that_was_edited_by_hand_is_removed_all_the_same(
    registry: PowerDnsRegistry, zone: Zone, edit: Callable[[Zone, str], None]
) -> None:
    """Every address record at a name that we own is removed with it."""
    foreign = zone.rows()
    record = a_record(zone)
    assert record.hostname is not None
    await registry.register(record)
    edit(zone, record.hostname)
    assert await remove(registry, record) is Outcome.DELETED
    assert zone.rows() == foreign


async def test_an_address_without_its_ownership_record_is_left(registry: PowerDnsRegistry, zone: Zone) -> None:
    """Once the TXT is deleted by hand nothing proves that the address is ours: it is neither written nor removed.

    The problem says what to do; an address that is not this proxy's is anybody's.
    """
    record = a_record(zone)
    await registry.register(record)
    zone.remove(f"_edge-owner.{record.hostname}", "TXT")
    before = zone.rows()
    assert await registry.observe(record) is Comparison.UNOWNED
    assert await registry.observe(replace(record, address="203.0.113.8")) is Comparison.FOREIGN
    refused = await registry.register(record)
    assert reason(refused) == "HostnameTaken"
    assert refused.problem is not None
    assert f"put the TXT record _edge-owner.{record.hostname} back" in refused.problem.message
    assert await remove(registry, record) is Outcome.SKIPPED
    assert zone.rows() == before


async def test_other_types_beside_our_address_stay(registry: PowerDnsRegistry, zone: Zone) -> None:
    """A foreign MX at our name survives updates and the removal; a CNAME beside it is refused with a message."""
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


async def test_comments_in_the_zone_are_ignored(registry: PowerDnsRegistry, zone: Zone) -> None:
    """The server returns every comment of a zone with each answer; they do not count as records."""
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
    pytest.param(HttpFault(is_lost=True), id="answer-lost"),
    pytest.param(HttpFault(is_dropped=True), id="never-arrived"),
    pytest.param(HttpFault(status=500, body=b'{"error": "database is locked"}'), id="500"),
    pytest.param(HttpFault(status=502, body=b"<html>"), id="502"),
    pytest.param(HttpFault(status=503, headers={"Retry-After": "7"}), id="503"),
    pytest.param(HttpFault(status=429, headers={"Retry-After": "7"}), id="429"),
    pytest.param(HttpFault(delay_s=SHORT_TIMEOUT_S + 0.2), id="slow"),
]


def after(zone: Zone, step: Callable[..., Any]) -> set[Row]:
    """The pair that is in the zone after a step."""
    if step is create:
        return pair(a_record(zone))
    return pair(a_record(zone, generation=4, address="lb.example.net")) if step is update else set()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("method", "nth"), [("GET", 1), ("GET", 2), ("PATCH", 1), ("GET", 3), ("GET", 4)])
@pytest.mark.parametrize("step", STEPS)
async def test_a_fault_at_any_request_is_completed_by_the_next_call(
    operator: Operator,
    proxy: FaultyProxy,
    zone: Zone,
    step: Callable[..., Any],
    method: str,
    nth: int,
    fault: HttpFault,
) -> None:
    """A fault at any request is a TransientError that leaves the state before or after; the next call completes it."""
    foreign = zone.rows()
    async with operator(powerdns_timeout_s=SHORT_TIMEOUT_S if fault.delay_s else TIMEOUT_S) as registry:
        if step is not create:
            await registry.register(a_record(zone))
        before = zone.rows()
        proxy.inject(method, fault, nth=nth)
        with pytest.raises(TransientError) as failed:
            await step(registry, zone)
        assert isinstance(failed.value, ThrottledError) == (fault.status == 429)
        assert failed.value.retry_after_s == (7 if fault.headers else None)
        if fault.delay_s:
            await anyio.sleep(0.4)  # a delayed request still arrives
        assert zone.rows() in (before, foreign | after(zone, step))
        await step(registry, zone)
        assert zone.rows() == foreign | after(zone, step)
        assert zone.count() == len(zone.rows())


async def test_a_change_that_arrives_late_still_finds_the_name_taken(
    registry: PowerDnsRegistry, operator: Operator, proxy: FaultyProxy, zone: Zone
) -> None:
    """A create that timed out and reaches the server after another operator's create has no effect."""
    foreign = zone.rows()
    proxy.inject("PATCH", HttpFault(delay_s=SHORT_TIMEOUT_S + 0.5))
    async with operator(powerdns_timeout_s=SHORT_TIMEOUT_S) as hasty:
        with pytest.raises(TransientError, match="did not answer within"):
            await hasty.register(a_record(zone))
    theirs = a_record(zone, uid="theirs")
    async with operator("other", powerdns_url=zone.server.url) as other:
        assert await other.register(theirs) == Registration(Outcome.CREATED)
    await anyio.sleep(0.7)
    assert zone.rows() == foreign | pair(theirs, operator="other")
    assert reason(await registry.register(a_record(zone))) == "HostnameTaken"


async def test_calls_are_transient_errors_while_the_server_is_down(
    operator: Operator, zone: Zone, powerdns: PowerDns
) -> None:
    """Every call raises a TransientError; when the server is back, calls succeed."""
    foreign = zone.rows()
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
    assert zone.rows() == foreign


async def test_a_renewed_key_is_read_when_the_old_one_is_refused(
    operator: Operator, proxy: FaultyProxy, powerdns: PowerDns, zone: Zone, tmp_path: Path
) -> None:
    """A wrong key is a TerminalError; once the mounted file has the right one, the next request succeeds."""
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
    """Every call raises ``ZoneNotFound``, a removal too, since a 404 proves nothing about the record."""
    missing = Zone(zone.server, f"missing-{zone.name}")
    async with operator(powerdns_zones=(missing.name,)) as registry:
        for step in STEPS:
            with pytest.raises(NotFoundError) as refused:
                await step(registry, missing)
            assert refused.value.reason == "ZoneNotFound"


async def test_one_bad_name_does_not_block_another(registry: PowerDnsRegistry, zone: Zone) -> None:
    """A refused record does not affect the registration of another one: each name has its own requests."""
    bad, good = a_record(zone, address="not an address"), a_record(zone, uid="good", hostname=f"good.{zone.name}")
    foreign = zone.rows()
    with pytest.raises(TerminalError):
        await registry.register(bad)
    assert await registry.register(good) == Registration(Outcome.CREATED)
    assert zone.rows() == foreign | pair(good)


async def test_the_key_is_never_revealed(
    operator: Operator,
    proxy: FaultyProxy,
    powerdns: PowerDns,
    zone: Zone,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither logs at the lowest level nor errors nor representations of objects contain the key."""
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "key"
    file.write_text(powerdns.api_key)
    texts: list[str] = [repr(Settings(powerdns_api_key_file=file))]
    for fault in (
        HttpFault(),
        HttpFault(status=401),
        HttpFault(status=500),
        HttpFault(is_dropped=True),
        HttpFault(status=200),
    ):
        proxy.inject("PATCH", fault)
        async with operator(powerdns_api_key_file=file) as registry:
            texts += [repr(registry), repr(vars(registry._api)), repr(vars(registry._api._client))]
            try:
                await registry.register(a_record(zone, generation=len(texts)))
            except OperatorError as error:
                texts += [str(error), repr(error), repr(error.__cause__), repr(error.__context__)]
    assert len(texts) > 10
    assert powerdns.api_key not in "".join(texts) + caplog.text
