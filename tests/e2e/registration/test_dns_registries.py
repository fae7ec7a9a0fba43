"""What every DNS registry does with a real server: PowerDNS on two databases, and BIND 9 by dynamic updates.

Each test compares the whole zone, so it fails on a duplicate or left-over record and on any change of a foreign one.
"""

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from operator_app.api.kinds import Key
from operator_app.errors import InvalidError, TerminalError, TransientError
from operator_app.registration.dns import Ownership
from operator_app.registration.identity import Installation
from operator_app.registration.powerdns.registry import connect as connect_powerdns
from operator_app.registration.registry import Comparison, Record, Registration, Registry
from operator_app.registration.rfc2136.registry import connect as connect_rfc2136
from operator_app.results import Outcome
from operator_app.settings import Settings
from tests.e2e.kube import wait_until
from tests.e2e.powerdns.fixture import started
from tests.e2e.powerdns.recursor import Recursor
from tests.e2e.registration.dns_records import (
    CLUSTER,
    OPERATOR,
    TIMEOUT_S,
    TTL_S,
    a_record,
    installed,
    kind_of,
    more,
    pair,
    reason,
    remove,
)
from tests.e2e.registration.dns_servers import AnyServer, AnyZone, a_server, a_zone
from tests.e2e.rfc2136.server import Bind

pytestmark = pytest.mark.anyio

Operator = Callable[..., AbstractAsyncContextManager[Registry]]


def backoff_s(tries: int) -> float:
    """How long an operator pauses after so many failures. It grows, so that all come through on a slow machine, too."""
    return random.uniform(0, min(10.0, 0.3 * 2 ** (tries - 1))) if tries else 0.0  # noqa: S311  # no secret


@pytest.fixture(scope="session", params=["powerdns-sqlite", "powerdns-postgresql", "rfc2136-bind9"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyServer]:
    """A running server of each kind; without its programs the test is skipped."""
    with started(lambda: a_server(request.param, tmp_path_factory.mktemp("dns"))) as server:
        yield server


@pytest.fixture(scope="session")
def recursor(server: AnyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recursor]:
    """A resolver in front of the server, as clients use one."""
    with started(lambda: Recursor(tmp_path_factory.mktemp("recursor"), server.dns_port)) as resolver:
        yield resolver


@pytest.fixture
def zone(server: AnyServer) -> AnyZone:
    """A new zone with foreign records in it."""
    return a_zone(server)


@pytest.fixture
def operator(server: AnyServer, zone: AnyZone) -> Operator:
    """A factory of registries that write the test's zone, or other ``zones``.

    It takes the installation's id, and the UID of the cluster where it is another one.
    """

    def make(
        name: str = OPERATOR, *, cluster: str = CLUSTER, zones: str | None = None
    ) -> AbstractAsyncContextManager[Registry]:
        given: Any = zones or (zone.name,)
        if isinstance(server, Bind):
            settings = Settings(
                rfc2136_server=server.address,
                rfc2136_zones=given,
                rfc2136_key_file=server.key_file,
                rfc2136_default_ttl_s=TTL_S,
                rfc2136_timeout_s=2 * TIMEOUT_S,
            )
            return connect_rfc2136(settings, Installation.of(cluster, name))
        settings = Settings(
            powerdns_url=server.url,
            powerdns_zones=given,
            powerdns_api_key_file=server.key_file,
            powerdns_default_ttl_s=TTL_S,
            powerdns_timeout_s=2 * TIMEOUT_S,
        )
        return connect_powerdns(settings, Installation.of(cluster, name))

    return make


@pytest.fixture
async def registry(operator: Operator) -> AsyncIterator[Registry]:
    """The registry of the operator under test."""
    async with operator() as registry:
        yield registry


@pytest.mark.parametrize("address", ["203.0.113.7", "2001:db8::7", "lb.example.net"])
async def test_a_pair_is_written_resolved_and_removed(registry: Registry, zone: AnyZone, address: str) -> None:
    """Exactly the pair, and nothing when nothing is new; its removal leaves the zone as it was."""
    foreign, record = zone.rows(), a_record(zone, address=address)
    assert record.hostname is not None
    assert await registry.observe(record) is Comparison.ABSENT
    assert await registry.register(record) == Registration(Outcome.CREATED)
    assert zone.rows() == foreign | pair(record)
    kind = kind_of(address)
    assert zone.server.resolve(record.hostname, kind) == [(kind, address)]
    serial = zone.serial
    assert await registry.register(record) == Registration(Outcome.UNCHANGED)
    assert await registry.observe(record) is Comparison.MATCHING
    assert zone.serial == serial
    assert await remove(registry, record) is Outcome.DELETED
    assert zone.rows() == foreign
    assert await remove(registry, record) is Outcome.UNCHANGED


@pytest.mark.parametrize("after", ["203.0.113.8", "2001:db8::8", "other.example.net"])
@pytest.mark.parametrize("before", ["203.0.113.7", "2001:db8::7", "lb.example.net"])
async def test_a_new_generation_replaces_the_address(
    registry: Registry, zone: AnyZone, before: str, after: str
) -> None:
    """By one of any type, and one pair is left."""
    foreign = zone.rows()
    await registry.register(a_record(zone, address=before))
    newer = a_record(zone, address=after, generation=4)
    assert await registry.observe(newer) is Comparison.DIFFERENT
    assert await registry.register(newer) == Registration(Outcome.CONFIGURED)
    assert zone.rows() == foreign | pair(newer)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("A", "192.0.2.1"),
        ("CNAME", "theirs.example.net."),
        ("MX", "10 mail.example.net."),
        ("TXT", '"v=spf1 -all"'),
    ],
)
@pytest.mark.parametrize("address", ["203.0.113.7", "lb.example.net"])
async def test_a_foreign_name_is_left(registry: Registry, zone: AnyZone, address: str, kind: str, content: str) -> None:
    """A name with any record and no ownership record of ours is not changed."""
    record = a_record(zone, address=address)
    zone.put(record.hostname or "", kind, content)
    before, serial = zone.rows(), zone.serial
    assert await registry.observe(record) is Comparison.FOREIGN
    assert reason(await registry.register(record)) == "HostnameTaken"
    assert await remove(registry, record) is Outcome.SKIPPED
    assert (zone.rows(), zone.serial) == (before, serial)


async def test_a_name_above_others_is_free(registry: Registry, zone: AnyZone) -> None:
    """Only names below it have records, so a server says that it exists, and it has none."""
    zone.put(f"deep.shop.{zone.name}", "A", "192.0.2.7")
    foreign, record = zone.rows(), a_record(zone)
    assert await registry.register(record) == Registration(Outcome.CREATED)
    assert zone.rows() == foreign | pair(record)


async def test_the_proxys_own_ttl_overrides_the_default(registry: Registry, zone: AnyZone) -> None:
    """A TTL in the record is the TTL of both records; without one it is the operator's default again."""
    foreign = zone.rows()
    await registry.register(a_record(zone, ttl_s=17))
    assert zone.rows() == foreign | pair(a_record(zone), ttl_s=17)
    assert await registry.register(a_record(zone)) == Registration(Outcome.CONFIGURED)
    assert zone.rows() == foreign | pair(a_record(zone))


async def test_a_zones_own_name_can_have_an_address(registry: Registry, zone: AnyZone) -> None:
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


async def test_the_most_specific_zone_gets_the_records(operator: Operator, zone: AnyZone) -> None:
    """Of two zones that contain a hostname the inner one gets the pair; a hostname in no zone is refused."""
    inner = zone.server.make_zone(f"eu.{zone.name}")
    outside = zone.rows()
    async with operator(zones=f"{zone.name},{inner.name}.") as registry:
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
    registry: Registry, operator: Operator, zone: AnyZone
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
    registry: Registry, recursor: Recursor, zone: AnyZone
) -> None:
    """Dual stack: A and AAAA records; another order changes nothing, one address less is one record less."""
    foreign, record = zone.rows(), a_record(zone)
    assert record.hostname is not None
    both, swapped = (more(record, *each) for each in (("203.0.113.7", "2001:db8::7"), ("2001:db8::7", "203.0.113.7")))
    assert await registry.register(both) == Registration(Outcome.CREATED)
    wait_until(lambda: recursor.addresses(record.hostname or "") == {"203.0.113.7", "2001:db8::7"})
    serial = zone.serial
    assert await registry.register(swapped) == Registration(Outcome.UNCHANGED)
    assert await registry.observe(swapped) is Comparison.MATCHING
    assert zone.serial == serial
    assert await registry.register(more(record, "203.0.113.7", "203.0.113.8")) == Registration(Outcome.CONFIGURED)
    wait_until(lambda: recursor.addresses(record.hostname or "") == {"203.0.113.7", "203.0.113.8"})
    assert await remove(registry, record) is Outcome.DELETED
    assert zone.rows() == foreign


@pytest.mark.parametrize("cut", ["team", "eu.team", "shop.eu.team"])
@pytest.mark.parametrize("kind", ["NS", "DNAME", "a zone on the same server"])
async def test_a_name_that_no_resolver_finds_is_refused(
    registry: Registry, recursor: Recursor, zone: AnyZone, kind: str, cut: str
) -> None:
    """Below a delegation, a DNAME or a child zone, or at one: refused naming it, before and after it was registered."""
    record = a_record(zone, hostname=f"shop.eu.team.{zone.name}")
    assert record.hostname is not None
    is_child = kind.startswith("a zone")
    if is_child:
        zone.server.make_zone(f"{cut}.{zone.name}")
    else:
        assert await registry.register(record) == Registration(Outcome.CREATED)
        wait_until(lambda: recursor.addresses(record.hostname or "") == {record.address})
        assert await remove(registry, record) is Outcome.DELETED
        zone.put(f"{cut}.{zone.name}", kind, "elsewhere.invalid.")
    before = zone.rows()
    is_taken = cut.startswith("shop") and kind == "DNAME"
    try:
        refused = (await registry.register(record)).problem
        said = (refused.reason, refused.message) if refused else ("", "")
    except InvalidError as error:
        said = (error.reason, error.message)
    assert said[0] in (("HostnameTaken", "BelowZoneCut") if is_taken else ("BelowZoneCut",))
    assert is_taken or f"{cut}.{zone.name} is no part of the zone" in said[1]
    assert zone.rows() == before
    wait_until(lambda: not recursor.addresses(record.hostname or ""))


async def test_a_delegation_after_the_registration_is_noticed(
    registry: Registry, recursor: Recursor, zone: AnyZone
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
    wait_until(lambda: not recursor.addresses(record.hostname or ""))
    assert await remove(registry, record) is Outcome.DELETED
    assert zone.rows() == delegated - pair(record)


@pytest.mark.parametrize("address", ["web-envoy.team-a.svc", "127.0.0.1", "fe80::1", "169.254.0.9", "::"])
async def test_an_address_of_no_use_to_a_resolver_is_refused(
    registry: Registry, recursor: Recursor, zone: AnyZone, address: str
) -> None:
    """A name of one cluster, an address of one machine or link: nothing is written, and the problem says so."""
    before, record = zone.rows(), a_record(zone, address=address)
    with pytest.raises(InvalidError) as refused:
        await registry.register(record)
    assert refused.value.reason == "AddressUnusable"
    assert zone.rows() == before
    assert recursor.addresses(record.hostname or "") == set()


async def test_a_foreign_address_at_the_apex_is_never_written(registry: Registry, zone: AnyZone) -> None:
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
    registry: Registry, zone: AnyZone, content: str
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


async def test_the_first_of_two_proxies_keeps_the_hostname(registry: Registry, zone: AnyZone) -> None:
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
    registry: Registry,
    operator: Operator,
    zone: AnyZone,
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
        assert await copy.observe(newer) is Comparison.FOREIGN
        taken = await copy.register(newer)
        assert await remove(copy, record) is Outcome.SKIPPED
        assert [each async for each in copy.entries()] == []
    assert reason(taken) == "HostnameTaken"
    assert taken.problem is not None
    assert sentence in taken.problem.message
    assert (zone.rows(), zone.serial) == (before, serial)


async def test_a_changed_id_takes_over_what_the_ledger_knows(
    registry: Registry, operator: Operator, zone: AnyZone
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


async def test_the_public_record_tells_no_names(registry: Registry, zone: AnyZone) -> None:
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


async def test_one_of_many_operators_gets_the_name(operator: Operator, zone: AnyZone) -> None:
    """Eight operators register one hostname at once: one pair is created, and the others get ``HostnameTaken``."""
    foreign = zone.rows()
    outcomes: dict[str, Registration] = {}
    tries = Counter[str]()
    records = {f"op-{n}": a_record(zone, uid=f"uid-{n}", address=f"203.0.113.{n}") for n in range(8)}

    async def contend(name: str) -> None:
        async with operator(name) as contender:
            while name not in outcomes:
                try:
                    outcomes[name] = await contender.register(records[name])
                except TransientError:
                    tries[name] += 1
                    await anyio.sleep(backoff_s(tries[name]))

    async with anyio.create_task_group() as contest:
        for name in records:
            contest.start_soon(contend, name)
    winners = [name for name, outcome in outcomes.items() if outcome.problem is None]
    assert len(winners) == 1
    assert {reason(outcome) for outcome in outcomes.values()} == {None, "HostnameTaken"}
    assert zone.rows() == foreign | pair(records[winners[0]], operator=winners[0])
    assert zone.count() == len(zone.rows())


@pytest.mark.parametrize("kinds", ["one type", "an alias and an address"])
async def test_of_racing_claims_at_most_one_is_ever_confirmed(operator: Operator, zone: AnyZone, kinds: str) -> None:
    """Six operators, six hostnames: for each, one is told that it has the name, once, whatever the database stored."""
    foreign = zone.rows()
    targets = [f"203.0.113.{n}" if kinds == "one type" or n % 2 else f"lb{n}.example.net" for n in range(6)]
    confirmed: list[tuple[str, str]] = []
    tries = Counter[tuple[str | None, str]]()

    async def contend(name: str, record: Record) -> None:
        async with operator(name) as contender:
            while not any(hostname == record.hostname for _, hostname in confirmed):
                await anyio.sleep(backoff_s(tries[record.hostname, name]))
                tries[record.hostname, name] += 1
                try:
                    registered = await contender.register(record)
                except (TransientError, InvalidError):
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


async def test_an_older_generation_never_replaces_a_newer_one(registry: Registry, zone: AnyZone) -> None:
    """A late registration finds the newer record and writes nothing."""
    foreign = zone.rows()
    newer, older = a_record(zone, generation=10, address="203.0.113.8"), a_record(zone, generation=9)
    await registry.register(newer)
    assert await registry.observe(older) is Comparison.NEWER
    assert reason(await registry.register(older)) == "NewerRecord"
    assert zone.rows() == foreign | pair(newer)


def _edit_address(zone: AnyZone, name: str) -> None:
    zone.put(name, "A", "192.0.2.66", ttl_s=TTL_S)


def _edit_ttl(zone: AnyZone, name: str) -> None:
    zone.put(name, "A", "203.0.113.7", ttl_s=1)


def _add_address(zone: AnyZone, name: str) -> None:
    zone.put(name, "A", "203.0.113.7", "192.0.2.66", ttl_s=TTL_S)


def _add_other_address(zone: AnyZone, name: str) -> None:
    zone.put(name, "AAAA", "2001:db8::66")


def _remove_address(zone: AnyZone, name: str) -> None:
    zone.remove(name, "A")


def _make_alias(zone: AnyZone, name: str) -> None:
    zone.remove(name, "A")
    zone.put(name, "CNAME", "elsewhere.example.net.")


def _age_ownership(zone: AnyZone, name: str) -> None:
    older = a_record(zone, generation=1)
    owner = Ownership(installed(OPERATOR), older.uid, older.generation).content
    zone.put(f"_edge-owner.{name}", "TXT", owner, ttl_s=TTL_S)


EDITS = [
    _edit_address,
    _edit_ttl,
    _add_address,
    _add_other_address,
    _remove_address,
    _make_alias,
    _age_ownership,
]


@pytest.mark.parametrize("edit", EDITS)
async def test_an_edit_by_hand_is_reverted(
    registry: Registry, zone: AnyZone, edit: Callable[[AnyZone, str], None]
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
    registry: Registry, zone: AnyZone, edit: Callable[[AnyZone, str], None]
) -> None:
    """Every address record at a name that we own is removed with it."""
    foreign = zone.rows()
    record = a_record(zone)
    assert record.hostname is not None
    await registry.register(record)
    edit(zone, record.hostname)
    assert await remove(registry, record) is Outcome.DELETED
    assert zone.rows() == foreign


async def test_an_address_without_its_ownership_record_is_left(registry: Registry, zone: AnyZone) -> None:
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


async def test_other_types_beside_our_address_stay(registry: Registry, zone: AnyZone) -> None:
    """A foreign MX at our name survives updates and the removal; a CNAME beside it is refused with a message."""
    record = a_record(zone)
    assert record.hostname is not None
    await registry.register(record)
    zone.put(record.hostname, "MX", "10 mail.example.net.")
    beside = (record.hostname, "MX", 60, "10 mail.example.net.", False)
    assert await registry.register(replace(record, generation=4)) == Registration(Outcome.CONFIGURED)
    assert beside in zone.rows()
    before = zone.rows()
    with pytest.raises(InvalidError) as refused:
        await registry.register(replace(record, generation=5, address="lb.example.net"))
    assert refused.value.reason == "RecordRefused"
    assert zone.rows() == before
    assert await remove(registry, record) is Outcome.DELETED
    assert zone.rows() == before - pair(replace(record, generation=4))


async def test_one_bad_name_does_not_block_another(registry: Registry, zone: AnyZone) -> None:
    """A refused record does not affect the registration of another one: each name has its own requests."""
    bad, good = a_record(zone, address="not an address"), a_record(zone, uid="good", hostname=f"good.{zone.name}")
    foreign = zone.rows()
    with pytest.raises(TerminalError):
        await registry.register(bad)
    assert await registry.register(good) == Registration(Outcome.CREATED)
    assert zone.rows() == foreign | pair(good)
