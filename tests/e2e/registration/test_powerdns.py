"""The PowerDNS registry against a real server: what it writes, what it never writes, and a fault at every request.

Each test compares the whole zone, so it fails on a duplicate or left-over record and on any change of a foreign one.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from operator_app.errors import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    OperatorError,
    ThrottledError,
    TransientError,
)
from operator_app.registration.dns import Ownership
from operator_app.registration.identity import Installation
from operator_app.registration.powerdns.registry import PowerDnsRegistry, connect
from operator_app.registration.registry import Comparison, Record, Registration
from operator_app.results import Outcome
from operator_app.settings import Settings
from tests.e2e.powerdns.fixture import (
    powerdns_of_each_database as powerdns_of_each_database,  # noqa: PLC0414  # fixtures are found by their import
)
from tests.e2e.powerdns.fixture import proxy as proxy  # noqa: PLC0414
from tests.e2e.powerdns.fixture import recursor as recursor  # noqa: PLC0414
from tests.e2e.powerdns.fixture import zone as zone  # noqa: PLC0414
from tests.e2e.powerdns.proxy import FaultyProxy, HttpFault
from tests.e2e.powerdns.server import PowerDns, Row, Zone
from tests.e2e.registration.dns_records import (
    ADDRESSES,
    CLUSTER,
    OPERATOR,
    TIMEOUT_S,
    TTL_S,
    a_record,
    installed,
    pair,
    reason,
    remove,
)

pytestmark = pytest.mark.anyio

SHORT_TIMEOUT_S = 1.0
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


@pytest.mark.parametrize("is_confirmed", [False, True])
@pytest.mark.parametrize(
    "addresses",
    [
        ("lb0.example.net", "lb1.example.net", "lb2.example.net"),
        ("lb0.example.net", "203.0.113.1", "203.0.113.2"),
        ("203.0.113.0", "lb1.example.net", "lb2.example.net"),
        ("203.0.113.0", "2001:db8::1", "lb2.example.net"),
    ],
    ids=" ".join,
)
async def test_whatever_the_database_stored_one_owner_is_left(
    operator: Operator, zone: Zone, addresses: tuple[str, ...], *, is_confirmed: bool
) -> None:
    """Also where the server refuses what a withdrawal would leave, such as two aliases; a confirmed owner stays."""
    foreign = zone.rows()
    records = [a_record(zone, uid=f"u{n}", address=address) for n, address in enumerate(addresses)]
    records[0] = replace(records[0], is_held=is_confirmed)
    async with AsyncExitStack() as stack:
        operators = [await stack.enter_async_context(operator(f"op-{n}")) for n in range(len(records))]
        for n, (each, record) in enumerate(zip(operators, records, strict=True)):
            await each.register(replace(record, hostname=f"at{n}.{zone.name}"))
            for name in (f"at{n}.{zone.name}", f"_edge-owner.at{n}.{zone.name}"):
                shop = name.replace(f"at{n}.", "shop.")
                zone.server.database.sql(f"UPDATE records SET name = '{shop}' WHERE name = '{name}'")  # noqa: S608
        confirmed: list[int] = []
        for _ in range(3):
            for n in reversed(range(len(records))):
                with suppress(TransientError):
                    registered = await operators[n].register(records[n])
                    confirmed += [n] if registered.problem is None and n not in confirmed else []
    (winner,) = confirmed
    assert zone.rows() == foreign | pair(records[winner], operator=f"op-{winner}")
    assert winner == 0 or not is_confirmed


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


def _disable_address(zone: Zone, name: str) -> None:
    zone.put(name, "A", "203.0.113.7", ttl_s=TTL_S, is_disabled=True)


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
    registry: PowerDnsRegistry,
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
    if step is not create:
        await registry.register(a_record(zone))
    before = zone.rows()
    proxy.inject(method, fault, nth=nth)
    async with operator(powerdns_timeout_s=SHORT_TIMEOUT_S if fault.delay_s else TIMEOUT_S) as failing:
        with pytest.raises(TransientError) as failed:
            await step(failing, zone)
    proxy.withdraw()  # on a machine so busy that another request was the slow one
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
