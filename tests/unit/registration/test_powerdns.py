"""The PowerDNS registry with scripted answers: which requests it sends, and how it reads each answer."""

import json
import tomllib
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import anyio.lowlevel
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pytest_httpx import HTTPXMock

from operator_app.api.kinds import Key, Object
from operator_app.errors import (
    LONGEST_WAIT_S,
    ConfigurationError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    OperatorError,
    TerminalError,
    ThrottledError,
    TransientError,
    UndecodableError,
)
from operator_app.registration.dns import (
    MAX_HOSTNAME_LENGTH,
    Address,
    AddressType,
    Ownership,
    Place,
    address_at,
    addresses_at,
    owners_of,
    place_of,
)
from operator_app.registration.identity import Installation
from operator_app.registration.plugins import GROUP, Factory
from operator_app.registration.powerdns.client import Delete
from operator_app.registration.powerdns.registry import PowerDnsRegistry, connect
from operator_app.registration.registry import Comparison, OutsideRecord, Record, Registration
from operator_app.results import Outcome
from operator_app.settings import Settings
from tests.paths import ROOT

SERVER = "http://dns.example.net:8081"
ZONE = f"{SERVER}/api/v1/servers/localhost/zones/example.com."
KEY = "s3cret-key"
CLUSTER, OURS, OTHER = "c" * 32, "1" * 32, "2" * 32
INSTALLATION = Installation(CLUSTER, OURS)
OWNER = f'"heritage=operator-app" "cluster={CLUSTER}" "installation={OURS}" "uid=u1" "generation=3"'
RECORD = Record("u1", 3, Key("team-a", "checkout"), "shop.example.com", "203.0.113.7", ())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """All settings that the registry needs."""
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    return Settings(powerdns_url=SERVER, powerdns_zones=("example.com",), powerdns_api_key_file=file)


@pytest.fixture
async def registry(settings: Settings) -> AsyncIterator[PowerDnsRegistry]:
    """A registry whose requests pytest-httpx answers."""
    async with connect(settings, INSTALLATION) as registry:
        yield registry


def a_set(name: str, kind: str, *contents: str, ttl: int = 300) -> Object:
    """A record set as the server returns it."""
    records = [{"content": content, "disabled": False} for content in contents]
    return {"name": f"{name}.", "type": kind, "ttl": ttl, "records": records, "comments": []}


ADDRESS = a_set("shop.example.com", "A", "203.0.113.7")
OWNERSHIP = a_set("_edge-owner.shop.example.com", "TXT", OWNER)


def reads(mock: HTTPXMock, *sets: Object) -> None:
    """Answer the two reads of a hostname and its owner name with those of ``sets`` that each requests."""
    for name in ("shop.example.com", "_edge-owner.shop.example.com"):
        mine = [each for each in sets if each["name"] == f"{name}."]
        mock.add_response(url=f"{ZONE}?rrset_name={name}.", json={"name": "example.com.", "rrsets": mine})


def no_disabled_records(mock: HTTPXMock) -> None:
    """Answer the search for disabled records."""
    url = f"{SERVER}/api/v1/servers/localhost/search-data?q=shop.example.com&object_type=all&max=1000"
    mock.add_response(url=url, json=[])


def edits_of(request: httpx.Request) -> list[str]:
    """The edits of a PATCH in short form, in their order."""
    return [
        f"{each['changetype']} {each['name']} {each['type']}"
        + "".join(f" {each['ttl']} {record['content']}" for record in each.get("records", ()))
        for each in json.loads(request.content)["rrsets"]
    ]


def sent(mock: HTTPXMock) -> list[str]:
    """The methods of all requests."""
    return [request.method for request in mock.get_requests()]


# Requests


@pytest.mark.anyio
async def test_a_creation_is_one_change_with_its_own_precondition(
    registry: PowerDnsRegistry, httpx_mock: HTTPXMock
) -> None:
    """Both names are probed for any record, then the pair is written, the ownership record first."""
    reads(httpx_mock)
    no_disabled_records(httpx_mock)
    httpx_mock.add_response(method="PATCH", url=ZONE, status_code=204)
    reads(httpx_mock, ADDRESS, OWNERSHIP)
    assert await registry.register(RECORD) == Registration(Outcome.CREATED)
    assert sent(httpx_mock) == ["GET", "GET", "GET", "PATCH", "GET", "GET"]
    [patch] = httpx_mock.get_requests(method="PATCH")
    assert edits_of(patch) == [
        r"REPLACE shop.example.com. TYPE65280 0 \# 1 00",
        "DELETE shop.example.com. TYPE65280",
        "REPLACE shop.example.com. CNAME 0 probe.invalid.",
        "DELETE shop.example.com. CNAME",
        r"REPLACE _edge-owner.shop.example.com. TYPE65280 0 \# 1 00",
        "DELETE _edge-owner.shop.example.com. TYPE65280",
        "REPLACE _edge-owner.shop.example.com. CNAME 0 probe.invalid.",
        "DELETE _edge-owner.shop.example.com. CNAME",
        f"REPLACE _edge-owner.shop.example.com. TXT 300 {OWNER}",
        "REPLACE shop.example.com. A 300 203.0.113.7",
    ]
    assert {request.headers["X-API-Key"] for request in httpx_mock.get_requests()} == {KEY}


@pytest.mark.anyio
async def test_no_change_replaces_the_same_records_twice(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """The server refuses two REPLACE of one name and type in a change, so a new CNAME is its own probe."""
    reads(httpx_mock)
    no_disabled_records(httpx_mock)
    httpx_mock.add_response(method="PATCH", url=ZONE, status_code=204)
    reads(httpx_mock, a_set("shop.example.com", "CNAME", "lb.example.net."), OWNERSHIP)
    assert await registry.register(replace(RECORD, address="lb.example.net")) == Registration(Outcome.CREATED)
    [patch] = httpx_mock.get_requests(method="PATCH")
    edits = [edit.rsplit(" ", 2)[0] if edit.startswith("REPLACE") else edit for edit in edits_of(patch)]
    assert len(edits) == len(set(edits))
    assert edits_of(patch)[-1] == "REPLACE shop.example.com. CNAME 300 lb.example.net."


@pytest.mark.anyio
async def test_a_correction_removes_before_it_writes(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """The server checks each edit in turn, so the other types of address are removed first."""
    reads(httpx_mock, a_set("shop.example.com", "CNAME", "old.example.net."), OWNERSHIP)
    httpx_mock.add_response(method="PATCH", url=ZONE, status_code=204)
    reads(httpx_mock, ADDRESS, OWNERSHIP)
    assert await registry.register(RECORD) == Registration(Outcome.CONFIGURED)
    [patch] = httpx_mock.get_requests(method="PATCH")
    assert edits_of(patch) == [
        "DELETE shop.example.com. AAAA",
        "DELETE shop.example.com. CNAME",
        f"REPLACE _edge-owner.shop.example.com. TXT 300 {OWNER}",
        "REPLACE shop.example.com. A 300 203.0.113.7",
    ]


@pytest.mark.anyio
async def test_a_removal_ends_with_the_ownership_record(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """Addresses of every type are removed first and the TXT last, and a read confirms it."""
    reads(httpx_mock, ADDRESS, OWNERSHIP)
    httpx_mock.add_response(method="PATCH", url=ZONE, status_code=204)
    reads(httpx_mock)
    assert await registry.deregister("u1", "shop.example.com") is Outcome.DELETED
    [patch] = httpx_mock.get_requests(method="PATCH")
    assert edits_of(patch) == [
        "DELETE shop.example.com. A",
        "DELETE shop.example.com. AAAA",
        "DELETE shop.example.com. CNAME",
        "DELETE _edge-owner.shop.example.com. TXT",
    ]


@pytest.mark.anyio
async def test_a_matching_record_is_only_read(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """Two reads and nothing else, whatever else the server returns: comments, other names, upper case."""
    beside = {**ADDRESS, "name": "SHOP.example.com."}
    noise = [a_set("other.example.com", "A", "192.0.2.1"), {**a_set("shop.example.com", "AAAA"), "comments": [{}]}]
    for wanted in (beside, OWNERSHIP):
        httpx_mock.add_response(json={"rrsets": [*noise, wanted]})
    assert await registry.register(RECORD) == Registration(Outcome.UNCHANGED)
    assert sent(httpx_mock) == ["GET", "GET"]


@pytest.mark.anyio
async def test_a_search_that_was_cut_short_means_taken(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """When more records mention a name than the server returns, the name counts as taken."""
    reads(httpx_mock)
    hits = [{"name": f"n{n}.example.com.", "type": "CNAME", "content": "shop.example.com."} for n in range(1000)]
    httpx_mock.add_response(json=hits)
    taken = await registry.register(RECORD)
    assert taken.problem is not None
    assert taken.problem.reason == "HostnameTaken"


@pytest.mark.anyio
async def test_entries_read_each_zone_once(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """One listing for each zone, and only the ownership records of this operator are returned."""
    other = OWNER.replace(f"installation={OURS}", f"installation={OTHER}")
    sets = [
        ADDRESS,
        OWNERSHIP,
        a_set("_edge-owner.cart.example.com", "TXT", other),
        a_set("notes.example.com", "TXT", OWNER),
        a_set("_edge-owner.broken.example.com", "TXT", "x"),
    ]
    httpx_mock.add_response(url=ZONE, json={"rrsets": sets})
    assert [each async for each in registry.entries()] == [OutsideRecord("u1", "shop.example.com", generation=3)]


@pytest.mark.anyio
async def test_changes_of_one_zone_do_not_overlap(settings: Settings, httpx_mock: HTTPXMock) -> None:
    """Changes of one zone are serialised by the client; a change of another zone does not wait for them."""
    running: list[str] = []
    seen: set[tuple[str, ...]] = set()
    both_run = anyio.Event()

    async def server(request: httpx.Request) -> httpx.Response:
        zone = request.url.path.rsplit("/", 1)[1]
        running.append(zone)
        seen.add(tuple(sorted(running)))
        if len(set(running)) == 2:
            both_run.set()
        await both_run.wait()
        running.remove(zone)
        return httpx.Response(204)

    httpx_mock.add_callback(server, is_reusable=True)
    with anyio.fail_after(60):
        async with connect(settings, INSTALLATION) as registry, anyio.create_task_group() as changes:
            for zone in ("example.com", "example.org") * 3:
                changes.start_soon(registry._api.change, zone, [Delete(f"x.{zone}", "A")])
    assert ("example.com.", "example.org.") in seen
    assert all(len(each) == len(set(each)) for each in seen)


# Answers


FAILURES: list[tuple[dict[str, Any], type[OperatorError], str | None, float | None]] = [
    ({"status_code": 400, "text": "Bad Request"}, InvalidError, "RecordRefused", None),
    ({"status_code": 401, "text": "Unauthorized"}, ForbiddenError, "RegistryUnauthorized", None),
    ({"status_code": 403}, ForbiddenError, "RegistryUnauthorized", None),
    ({"status_code": 404, "text": "Not Found"}, NotFoundError, "ZoneNotFound", None),
    ({"status_code": 408}, TransientError, None, None),
    ({"status_code": 413}, InvalidError, "RecordRefused", None),
    ({"status_code": 422, "json": {"error": "no"}}, InvalidError, "RecordRefused", None),
    ({"status_code": 429, "headers": {"Retry-After": "12"}}, ThrottledError, None, 12.0),
    ({"status_code": 429, "headers": {"Retry-After": "9" * 310}}, ThrottledError, None, LONGEST_WAIT_S),
    ({"status_code": 500, "json": {"error": "locked"}}, TransientError, None, None),
    ({"status_code": 502, "html": "<html>"}, TransientError, None, None),
    ({"status_code": 503, "headers": {"Retry-After": "soon"}}, TransientError, None, None),
    ({"status_code": 302, "headers": {"Location": "http://elsewhere.example.net/"}}, UndecodableError, None, None),
    ({"status_code": 200, "html": "<html>"}, UndecodableError, None, None),
    ({"status_code": 200, "json": {"rrsets": [{"name": 1}]}}, UndecodableError, None, None),
    ({"status_code": 200, "json": {}}, UndecodableError, None, None),
    ({"status_code": 200, "content": b"\xff"}, UndecodableError, None, None),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("answer", "error", "reason", "retry_after_s"), FAILURES)
async def test_every_failure_has_its_error_class(
    registry: PowerDnsRegistry,
    httpx_mock: HTTPXMock,
    answer: dict[str, Any],
    error: type[OperatorError],
    reason: str | None,
    retry_after_s: float | None,
) -> None:
    """A failed read raises its exact class, with reason or Retry-After, and nothing is written."""
    for call in (registry.observe(RECORD), registry.register(RECORD), registry.deregister("u1", "shop.example.com")):
        httpx_mock.add_response(**answer)
        with pytest.raises(OperatorError) as failed:
            await call
        assert type(failed.value) is error
        assert getattr(failed.value, "reason", None) == reason
        assert getattr(failed.value, "retry_after_s", None) == retry_after_s
    assert set(sent(httpx_mock)) == {"GET"}


@pytest.mark.anyio
@pytest.mark.parametrize(
    "exception",
    [
        httpx.ConnectError("refused"),
        httpx.ReadError("cut"),
        httpx.WriteError("cut"),
        httpx.RemoteProtocolError("no answer"),
        httpx.ConnectTimeout("slow"),
        httpx.ReadTimeout("slow"),
        httpx.PoolTimeout("busy"),
    ],
)
async def test_no_answer_is_transient(
    registry: PowerDnsRegistry, httpx_mock: HTTPXMock, exception: httpx.TransportError
) -> None:
    """Every failure of the connection is a TransientError."""
    httpx_mock.add_exception(exception)
    with pytest.raises(TransientError, match=r"no answer|did not answer") as failed:
        await registry.register(RECORD)
    assert type(failed.value) is TransientError


@pytest.mark.anyio
async def test_a_slow_answer_is_bounded_as_a_whole(settings: Settings, httpx_mock: HTTPXMock) -> None:
    """The timeout is for the request as a whole, not for the pauses within it."""

    class Drip(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                yield b" "
                await anyio.lowlevel.checkpoint()

    httpx_mock.add_response(stream=Drip())
    async with connect(settings.model_copy(update={"powerdns_timeout_s": 0.05}), INSTALLATION) as registry:
        with pytest.raises(TransientError, match=r"did not answer within 0\.05 s"):
            await registry.observe(RECORD)


@pytest.mark.anyio
async def test_a_refused_record_is_reported_with_the_servers_message(
    registry: PowerDnsRegistry, httpx_mock: HTTPXMock
) -> None:
    """A 422 while the name is still free is about the record: a TerminalError with one line of bounded length."""
    reads(httpx_mock)
    no_disabled_records(httpx_mock)
    httpx_mock.add_response(method="PATCH", status_code=422, json={"error": "not\nin format" + "!" * 1000})
    reads(httpx_mock)
    with pytest.raises(InvalidError, match=r"^PowerDNS answered 422 \(not in format!+\)$") as refused:
        await registry.register(RECORD)
    assert refused.value.reason == "RecordRefused"
    assert len(refused.value.message) < 400


@pytest.mark.anyio
async def test_a_write_that_is_not_read_back_is_not_confirmed(
    registry: PowerDnsRegistry, httpx_mock: HTTPXMock
) -> None:
    """When the read after the write returns something else, the call fails with a ConflictError."""
    reads(httpx_mock)
    no_disabled_records(httpx_mock)
    httpx_mock.add_response(method="PATCH", status_code=204)
    reads(httpx_mock, a_set("shop.example.com", "A", "192.0.2.66"), OWNERSHIP)
    with pytest.raises(ConflictError, match="at the same time"):
        await registry.register(RECORD)


@pytest.mark.anyio
async def test_a_removal_that_is_not_read_back_is_not_confirmed(
    registry: PowerDnsRegistry, httpx_mock: HTTPXMock
) -> None:
    """When the read after a removal still returns our ownership record, the call fails with a ConflictError."""
    reads(httpx_mock, ADDRESS, OWNERSHIP)
    httpx_mock.add_response(method="PATCH", status_code=204)
    reads(httpx_mock, ADDRESS, OWNERSHIP)
    with pytest.raises(ConflictError, match="came back"):
        await registry.deregister("u1", "shop.example.com")


# The key


@pytest.mark.anyio
async def test_a_401_reads_the_key_again_and_resends_once(
    registry: PowerDnsRegistry, settings: Settings, httpx_mock: HTTPXMock
) -> None:
    """After a 401 the file is read again: a renewed key is sent, an unchanged one is not sent a second time."""
    assert settings.powerdns_api_key_file is not None
    reads(httpx_mock, ADDRESS, OWNERSHIP)
    await registry.observe(RECORD)
    httpx_mock.add_response(status_code=401)
    with pytest.raises(ForbiddenError):
        await registry.observe(RECORD)
    assert len(httpx_mock.get_requests()) == 3
    settings.powerdns_api_key_file.write_text("renewed")
    keys: list[str] = []

    def server(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["X-API-Key"])
        mine = ADDRESS if request.url.params["rrset_name"] == ADDRESS["name"] else OWNERSHIP
        return httpx.Response(200, json={"rrsets": [mine]}) if keys[-1] == "renewed" else httpx.Response(401)

    httpx_mock.add_callback(server, is_reusable=True)
    assert await registry.observe(RECORD) is Comparison.MATCHING
    assert keys == [KEY, "renewed", "renewed"]


@pytest.mark.anyio
@pytest.mark.parametrize("content", [None, b"", b"\n", b"one\ntwo\n", b"\xff\xfe"])
async def test_an_invalid_key_is_reported_without_its_contents(
    registry: PowerDnsRegistry, settings: Settings, content: bytes | None
) -> None:
    """A missing, empty, or unreadable key file is a terminal error that names the file and shows nothing of it."""
    file = settings.powerdns_api_key_file
    assert file is not None
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ForbiddenError) as refused:
        await registry.observe(RECORD)
    assert refused.value.reason == "RegistryUnauthorized"
    assert str(file) in refused.value.message
    assert "two" not in refused.value.message


# Settings


@pytest.mark.anyio
@pytest.mark.parametrize(
    "changes",
    [
        {"powerdns_url": None},
        {"powerdns_zones": ()},
        {"powerdns_api_key_file": None},
        {"powerdns_url": "dns.example.net:8081"},
        {"powerdns_url": "http://user:word@dns.example.net"},
        {"powerdns_url": "http://dns.example.net/api/v1"},
        {"powerdns_ca_file": Path("/nowhere/ca.pem"), "powerdns_url": "https://dns.example.net"},
    ],
)
async def test_settings_that_cannot_work_are_refused_at_the_start(settings: Settings, changes: dict[str, Any]) -> None:
    """A missing or wrong setting is one sentence that names it, before any request, and without credentials in it."""
    with pytest.raises(ConfigurationError, match=next(iter(changes))) as refused:
        async with connect(settings.model_copy(update=changes), INSTALLATION):
            pytest.fail("must not open")
    assert "word" not in str(refused.value)


def zones(text: str) -> tuple[str, ...]:
    """The zones of a flag or an environment variable."""
    return Settings.model_validate({"powerdns_zones": text}).powerdns_zones


def test_zones_are_names_separated_by_commas() -> None:
    """Dots at the end, upper case and repetition are normalised; anything but a DNS name is refused."""
    assert zones("Example.com., example.org,example.com") == (
        "example.com",
        "example.org",
    )
    for wrong in ("*.example.com", "example..com", "a/b", "-a.com", "example.com?x"):
        with pytest.raises(ValidationError, match="can't be a DNS zone"):
            zones(wrong)


FACTORY: Factory = connect
"""For the type checker: the factory is what an entry point has to name."""


def test_the_package_has_the_entry_point() -> None:
    """The entry point in pyproject.toml names the factory, so an installed operator finds the registry."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    value = project["entry-points"][GROUP]["powerdns"]
    assert EntryPoint("powerdns", value, GROUP).load() is FACTORY


# Names and contents


def test_the_longest_zone_is_chosen() -> None:
    """A zone contains its own name and the names below it, but not a name that merely ends like it."""
    zones = ("example.com", "eu.example.com", "com.example")
    assert place_of("shop.eu.example.com", zones) == Place("shop.eu.example.com", "eu.example.com")
    assert place_of("eu.example.com", zones).is_apex
    assert place_of("shop.example.com", zones).owner_name == "_edge-owner.shop.example.com"
    for outside in ("shopexample.com", "com", "example.org"):
        with pytest.raises(TerminalError) as refused:
            place_of(outside, zones)
        assert refused.value.reason == "ZoneNotConfigured"


def test_a_hostname_leaves_room_for_its_owner_name() -> None:
    """The longest hostname has an owner name of exactly 253 characters; one more is refused with the bound."""
    longest = ".".join(["a" * 60] * 3 + ["b" * (MAX_HOSTNAME_LENGTH - 183)])
    assert len(place_of(longest, ("b" * (MAX_HOSTNAME_LENGTH - 183),)).owner_name) == 253
    with pytest.raises(TerminalError, match=str(MAX_HOSTNAME_LENGTH)) as refused:
        place_of(f"a{longest}", ("b",))
    assert refused.value.reason == "HostnameTooLong"


PLACE = Place("shop.example.com", "example.com")


@pytest.mark.parametrize(
    ("address", "record"),
    [
        ("203.0.113.7", Address(AddressType.A, "203.0.113.7")),
        ("2001:DB8:0::7", Address(AddressType.AAAA, "2001:db8::7")),
        ("LB-1.example.net.", Address(AddressType.CNAME, "lb-1.example.net.")),
        ("10.1.2.3", Address(AddressType.A, "10.1.2.3")),
        ("fd00::7", Address(AddressType.AAAA, "fd00::7")),
    ],
)
def test_an_address_has_the_record_type_of_its_kind(address: str, record: Address) -> None:
    """IPv4 is an A, IPv6 an AAAA, a name a CNAME, each in the server's notation."""
    assert address_at(PLACE, address) == record


@pytest.mark.parametrize(
    "address",
    [
        "",
        "not a name",
        "203.0.113",
        "203.0.113.999",
        "::ffff:203.0.113.7",
        "fe80::1%eth0",
        "a..b",
        "shop.example.com",
        "*.x",
        "web-envoy.team-a.svc",
        "web-envoy.team-a.svc.cluster.local",
        "localhost",
        "127.0.0.1",
        "169.254.1.1",
        "0.0.0.0",  # noqa: S104
        "0.1.2.3",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "ff02::1",
    ],
)
def test_an_address_without_a_possible_record_is_refused(address: str) -> None:
    """Neither address nor name, of use in one machine, link or cluster only, or the hostname itself: no request."""
    with pytest.raises(InvalidError) as refused:
        address_at(PLACE, address)
    assert refused.value.reason == "AddressUnusable"


def test_several_addresses_have_a_record_each_in_any_order() -> None:
    """IPv4 and IPv6 stand side by side; an alias stands alone, and one address twice is one."""
    both = (Address(AddressType.A, "203.0.113.7"), Address(AddressType.AAAA, "2001:db8::7"))
    assert addresses_at(PLACE, ("203.0.113.7", "2001:db8::7")) == both
    assert addresses_at(PLACE, ("2001:DB8::7", "203.0.113.7", "2001:db8:0::7")) == both
    with pytest.raises(InvalidError, match="can't be an alias") as refused:
        addresses_at(PLACE, ("203.0.113.7", "lb.example.net"))
    assert refused.value.reason == "AddressUnusable"


@pytest.mark.parametrize(
    ("hostname", "enclosing"),
    [
        ("example.com", ()),
        ("shop.example.com", ()),
        ("a.shop.example.com", ("shop.example.com",)),
        ("b.a.shop.example.com", ("shop.example.com", "a.shop.example.com")),
    ],
)
def test_the_names_between_a_hostname_and_its_zone(hostname: str, enclosing: tuple[str, ...]) -> None:
    """Each may be delegated; the zone itself and the hostname are not among them."""
    assert Place(hostname, "example.com").enclosing == enclosing


def test_addresses_are_compared_by_value() -> None:
    """Another notation of the same address is equal; an invalid one is different."""
    record = address_at(PLACE, "2001:db8::7")
    assert record.is_equal_to("2001:0DB8::0:7")
    assert not record.is_equal_to("2001:db8::8")
    assert not record.is_equal_to("nonsense")
    assert address_at(PLACE, "lb.example.net").is_equal_to("LB.example.net.")


NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,55}[a-z0-9])?", fullmatch=True)
OWNERSHIPS = st.builds(
    Ownership,
    installation=st.builds(Installation.of, st.uuids().map(str), NAMES),
    uid=st.uuids().map(str),
    generation=st.integers(0, 2**63 - 1),
)


@given(OWNERSHIPS)
def test_an_ownership_record_is_read_back(ownership: Ownership) -> None:
    """What was written is parsed to the same value, and no string is longer than 255 octets."""
    assert Ownership.parsed(ownership.content) == ownership
    assert all(len(each) <= 257 for each in ownership.content.split(" "))


@given(OWNERSHIPS, st.data())
def test_an_altered_ownership_record_is_not_the_same(ownership: Ownership, data: st.DataObject) -> None:
    """A text with one character changed, added or removed is never parsed to the same ownership."""
    text = ownership.content
    at = data.draw(st.integers(0, len(text) - 1))
    inserted = data.draw(st.sampled_from(["", "x", "0", '"', " "]))
    altered = text[:at] + inserted + text[at + 1 :]
    assert altered == text or Ownership.parsed(altered) != ownership


@given(st.lists(OWNERSHIPS, min_size=1, max_size=4))
def test_a_name_with_any_other_text_has_no_owner(ownerships: list[Ownership]) -> None:
    """Several ownership records are several owners; beside a foreign text none of them counts."""
    contents = [each.content for each in ownerships]
    assert owners_of(contents) == tuple(ownerships)
    assert owners_of([*contents, '"v=spf1 -all"']) == ()
    assert owners_of([]) == ()
