"""The PowerDNS registry without a server: each request as it is sent, each answer as it is understood."""

import json
import random
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
from operator_app.registration.plugins import GROUP, Factory
from operator_app.registration.powerdns.client import Delete
from operator_app.registration.powerdns.dns import (
    MAX_HOSTNAME_LENGTH,
    Address,
    AddressType,
    Ownership,
    Place,
    address_at,
    holder,
    place_of,
)
from operator_app.registration.powerdns.registry import PowerDnsRegistry, connect
from operator_app.registration.registry import Comparison, OutsideRecord, Record, Registration
from operator_app.results import Outcome
from operator_app.settings import Settings
from tests.paths import ROOT

SERVER = "http://dns.example.net:8081"
ZONE = f"{SERVER}/api/v1/servers/localhost/zones/example.com."
KEY = "s3cret-key"
OWNER = '"heritage=operator-app" "operator=operator-app" "uid=u1" "proxy=team-a/checkout" "generation=3"'
RECORD = Record("u1", 3, Key("team-a", "checkout"), "shop.example.com", "203.0.113.7", ())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Everything that the registry needs."""
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    return Settings(powerdns_url=SERVER, powerdns_zones=("example.com",), powerdns_api_key_file=file)


@pytest.fixture
async def registry(settings: Settings) -> AsyncIterator[PowerDnsRegistry]:
    """A registry whose requests pytest-httpx answers."""
    async with connect(settings) as registry:
        yield registry


def a_set(name: str, kind: str, *contents: str, ttl: int = 300) -> Object:
    """A record set as the server tells it."""
    records = [{"content": content, "disabled": False} for content in contents]
    return {"name": f"{name}.", "type": kind, "ttl": ttl, "records": records, "comments": []}


ADDRESS = a_set("shop.example.com", "A", "203.0.113.7")
OWNERSHIP = a_set("_edge-owner.shop.example.com", "TXT", OWNER)


def looks(mock: HTTPXMock, *sets: Object) -> None:
    """Answer one look, which is two reads, with those of ``sets`` that each asks for."""
    for name in ("shop.example.com", "_edge-owner.shop.example.com"):
        mine = [each for each in sets if each["name"] == f"{name}."]
        mock.add_response(url=f"{ZONE}?rrset_name={name}.", json={"name": "example.com.", "rrsets": mine})


def nothing_parked(mock: HTTPXMock) -> None:
    """Answer the search for disabled records."""
    url = f"{SERVER}/api/v1/servers/localhost/search-data?q=shop.example.com&object_type=record&max=1000"
    mock.add_response(url=url, json=[])


def edits_of(request: httpx.Request) -> list[str]:
    """A PATCH in short: what happens to which records, in their order."""
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
async def test_a_claim_is_one_change_with_its_own_precondition(
    registry: PowerDnsRegistry, httpx_mock: HTTPXMock
) -> None:
    """Both names are probed for anything that stands there, then the pair is written, ownership first."""
    looks(httpx_mock)
    nothing_parked(httpx_mock)
    httpx_mock.add_response(method="PATCH", url=ZONE, status_code=204)
    looks(httpx_mock, ADDRESS, OWNERSHIP)
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
    """The server refuses two REPLACE of one name and type in a change, so the claim of an alias probes with itself."""
    looks(httpx_mock)
    nothing_parked(httpx_mock)
    httpx_mock.add_response(method="PATCH", url=ZONE, status_code=204)
    looks(httpx_mock, a_set("shop.example.com", "CNAME", "lb.example.net."), OWNERSHIP)
    assert await registry.register(replace(RECORD, address="lb.example.net")) == Registration(Outcome.CREATED)
    [patch] = httpx_mock.get_requests(method="PATCH")
    edits = [edit.rsplit(" ", 2)[0] if edit.startswith("REPLACE") else edit for edit in edits_of(patch)]
    assert len(edits) == len(set(edits))
    assert edits_of(patch)[-1] == "REPLACE shop.example.com. CNAME 300 lb.example.net."


@pytest.mark.anyio
async def test_a_correction_removes_before_it_writes(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """The server checks each edit as it comes: the other types of address go first."""
    looks(httpx_mock, a_set("shop.example.com", "CNAME", "old.example.net."), OWNERSHIP)
    httpx_mock.add_response(method="PATCH", url=ZONE, status_code=204)
    looks(httpx_mock, ADDRESS, OWNERSHIP)
    assert await registry.register(RECORD) == Registration(Outcome.CONFIGURED)
    [patch] = httpx_mock.get_requests(method="PATCH")
    assert edits_of(patch) == [
        "DELETE shop.example.com. AAAA",
        "DELETE shop.example.com. CNAME",
        f"REPLACE _edge-owner.shop.example.com. TXT 300 {OWNER}",
        "REPLACE shop.example.com. A 300 203.0.113.7",
    ]


@pytest.mark.anyio
async def test_a_removal_ends_with_the_ownership(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """Addresses of every type go first and the TXT last, and a read confirms it."""
    looks(httpx_mock, ADDRESS, OWNERSHIP)
    httpx_mock.add_response(method="PATCH", url=ZONE, status_code=204)
    looks(httpx_mock)
    assert await registry.deregister("u1", "shop.example.com") is Outcome.DELETED
    [patch] = httpx_mock.get_requests(method="PATCH")
    assert edits_of(patch) == [
        "DELETE shop.example.com. A",
        "DELETE shop.example.com. AAAA",
        "DELETE shop.example.com. CNAME",
        "DELETE _edge-owner.shop.example.com. TXT",
    ]


@pytest.mark.anyio
async def test_what_holds_is_only_read(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """Two reads and nothing else, whatever else the server tells: comments, other names, upper case."""
    beside = {**ADDRESS, "name": "SHOP.example.com."}
    noise = [a_set("other.example.com", "A", "192.0.2.1"), {**a_set("shop.example.com", "AAAA"), "comments": [{}]}]
    for wanted in (beside, OWNERSHIP):
        httpx_mock.add_response(json={"rrsets": [*noise, wanted]})
    assert await registry.register(RECORD) == Registration(Outcome.UNCHANGED)
    assert sent(httpx_mock) == ["GET", "GET"]


@pytest.mark.anyio
async def test_a_search_that_was_cut_short_means_taken(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """When more records mention a name than the server tells, it is not taken for free."""
    looks(httpx_mock)
    hits = [{"name": f"n{n}.example.com.", "type": "CNAME", "content": "shop.example.com."} for n in range(1000)]
    httpx_mock.add_response(json=hits)
    taken = await registry.register(RECORD)
    assert taken.problem is not None
    assert taken.problem.reason == "HostnameTaken"


@pytest.mark.anyio
async def test_entries_read_each_zone_once(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """One listing for each zone, of which only the ownership records of this operator are told."""
    other = OWNER.replace("operator=operator-app", "operator=other")
    sets = [
        ADDRESS,
        OWNERSHIP,
        a_set("_edge-owner.cart.example.com", "TXT", other),
        a_set("notes.example.com", "TXT", OWNER),
        a_set("_edge-owner.broken.example.com", "TXT", "x"),
    ]
    httpx_mock.add_response(url=ZONE, json={"rrsets": sets})
    assert [each async for each in registry.entries()] == [
        OutsideRecord("u1", Key("team-a", "checkout"), "shop.example.com")
    ]


@pytest.mark.anyio
async def test_changes_of_one_zone_do_not_overlap(settings: Settings, httpx_mock: HTTPXMock) -> None:
    """A server makes them one after the other, or refuses: they wait here. Another zone's change waits for nobody."""
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
    with anyio.fail_after(5):
        async with connect(settings) as registry, anyio.create_task_group() as changes:
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
async def test_every_failure_has_its_class(
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
    """Whatever keeps an answer from arriving passes by itself."""
    httpx_mock.add_exception(exception)
    with pytest.raises(TransientError, match=r"no answer|did not answer") as failed:
        await registry.register(RECORD)
    assert type(failed.value) is TransientError


@pytest.mark.anyio
async def test_an_answer_that_drips_is_given_up(settings: Settings, httpx_mock: HTTPXMock) -> None:
    """The bound is on the request as a whole, not on the pauses within it."""

    class Drip(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                yield b" "
                await anyio.lowlevel.checkpoint()

    httpx_mock.add_response(stream=Drip())
    async with connect(settings.model_copy(update={"powerdns_timeout_s": 0.05})) as registry:
        with pytest.raises(TransientError, match=r"did not answer within 0\.05 s"):
            await registry.observe(RECORD)


@pytest.mark.anyio
async def test_a_refused_record_is_told_with_the_servers_sentence(
    registry: PowerDnsRegistry, httpx_mock: HTTPXMock
) -> None:
    """A 422 while the name is still free is about the record: terminal, in one line of bounded length."""
    looks(httpx_mock)
    nothing_parked(httpx_mock)
    httpx_mock.add_response(method="PATCH", status_code=422, json={"error": "not\nin format" + "!" * 1000})
    looks(httpx_mock)
    with pytest.raises(InvalidError, match=r"^PowerDNS answered 422 \(not in format!+\)$") as refused:
        await registry.register(RECORD)
    assert refused.value.reason == "RecordRefused"
    assert len(refused.value.message) < 400


@pytest.mark.anyio
async def test_a_write_that_does_not_hold_is_not_confirmed(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """When the read after the write shows something else, the registration has not happened yet."""
    looks(httpx_mock)
    nothing_parked(httpx_mock)
    httpx_mock.add_response(method="PATCH", status_code=204)
    looks(httpx_mock, a_set("shop.example.com", "A", "192.0.2.66"), OWNERSHIP)
    with pytest.raises(ConflictError, match="at the same time"):
        await registry.register(RECORD)


@pytest.mark.anyio
async def test_a_removal_that_does_not_hold_is_not_confirmed(registry: PowerDnsRegistry, httpx_mock: HTTPXMock) -> None:
    """When the read after a removal still shows our ownership, the removal has not happened yet."""
    looks(httpx_mock, ADDRESS, OWNERSHIP)
    httpx_mock.add_response(method="PATCH", status_code=204)
    looks(httpx_mock, ADDRESS, OWNERSHIP)
    with pytest.raises(ConflictError, match="came back"):
        await registry.deregister("u1", "shop.example.com")


# The key


@pytest.mark.anyio
async def test_a_401_reads_the_key_again_and_resends_once(
    registry: PowerDnsRegistry, settings: Settings, httpx_mock: HTTPXMock
) -> None:
    """A renewed key is found through the 401; a key that is still the same is not sent a second time."""
    assert settings.powerdns_api_key_file is not None
    looks(httpx_mock, ADDRESS, OWNERSHIP)
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
async def test_a_key_that_cannot_be_sent_is_said_without_it(
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
async def test_what_cannot_work_is_refused_at_the_start(settings: Settings, changes: dict[str, Any]) -> None:
    """A missing or wrong setting is one sentence that names it, before any request, and without credentials in it."""
    with pytest.raises(ConfigurationError, match=next(iter(changes))) as refused:
        async with connect(settings.model_copy(update=changes)):
            pytest.fail("must not open")
    assert "word" not in str(refused.value)


def zones(text: str) -> tuple[str, ...]:
    """The zones that a flag or an environment variable means."""
    return Settings.model_validate({"powerdns_zones": text}).powerdns_zones


def test_zones_are_names_separated_by_commas() -> None:
    """Dots at the end, upper case and repetition do not matter; what is no name is refused with what to write."""
    assert zones("Example.com., example.org,example.com") == (
        "example.com",
        "example.org",
    )
    for wrong in ("*.example.com", "example..com", "a/b", "-a.com", "example.com?x"):
        with pytest.raises(ValidationError, match="can't be a DNS zone"):
            zones(wrong)


FACTORY: Factory = connect
"""For the type checker: the factory is what an entry point has to name."""


def test_the_package_announces_it() -> None:
    """The entry point in pyproject.toml leads to the factory, so an installed operator has the registry by its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    value = project["entry-points"][GROUP]["powerdns"]
    assert EntryPoint("powerdns", value, GROUP).load() is FACTORY


# Names and contents


def test_the_longest_zone_is_chosen() -> None:
    """A zone is around its own name and the names below it, and not around a name that merely ends like it."""
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
    ("address", "told"),
    [
        ("203.0.113.7", Address(AddressType.A, "203.0.113.7")),
        ("2001:DB8:0::7", Address(AddressType.AAAA, "2001:db8::7")),
        ("LB-1.example.net.", Address(AddressType.CNAME, "lb-1.example.net.")),
        ("web-envoy.team-a.svc", Address(AddressType.CNAME, "web-envoy.team-a.svc.")),
    ],
)
def test_an_address_is_told_by_its_kind(address: str, told: Address) -> None:
    """IPv4 is an A, IPv6 an AAAA, a name a CNAME, each spelled as the server takes it."""
    assert address_at(PLACE, address) == told


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
    ],
)
def test_an_address_that_no_record_can_tell_is_refused(address: str) -> None:
    """Neither address nor name, an address of one machine only, or the hostname itself: terminal, no request."""
    with pytest.raises(InvalidError) as refused:
        address_at(PLACE, address)
    assert refused.value.reason == "AddressUnusable"


def test_spelling_does_not_make_a_difference() -> None:
    """A stored address is compared by what it means, and what means nothing is different."""
    told = address_at(PLACE, "2001:db8::7")
    assert told.is_told_by("2001:0DB8::0:7")
    assert not told.is_told_by("2001:db8::8")
    assert not told.is_told_by("nonsense")
    assert address_at(PLACE, "lb.example.net").is_told_by("LB.example.net.")


NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,55}[a-z0-9])?", fullmatch=True)
OWNERSHIPS = st.builds(
    Ownership,
    operator=NAMES,
    uid=st.uuids().map(str),
    proxy=st.builds(Key, NAMES, NAMES),
    generation=st.integers(0, 2**63 - 1),
)


@given(OWNERSHIPS)
def test_an_ownership_survives_its_spelling(ownership: Ownership) -> None:
    """What was written is read back, and no character-string is longer than its 255 octets."""
    assert Ownership.parsed(ownership.content) == ownership
    assert all(len(each) <= 257 for each in ownership.content.split(" "))


@given(OWNERSHIPS, st.data())
def test_an_altered_ownership_is_not_the_same(ownership: Ownership, data: st.DataObject) -> None:
    """A text with one character changed, added or removed never reads as the same ownership."""
    text = ownership.content
    at = data.draw(st.integers(0, len(text) - 1))
    inserted = data.draw(st.sampled_from(["", "x", "0", '"', " "]))
    altered = text[:at] + inserted + text[at + 1 :]
    assert altered == text or Ownership.parsed(altered) != ownership


@given(st.lists(OWNERSHIPS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_every_reader_finds_the_same_holder(claims: list[Ownership], chance: random.Random) -> None:
    """The holder of several claims does not depend on their order, and a stranger's text among them leaves none."""
    contents = [claim.content for claim in claims]
    shuffled = chance.sample(contents, len(contents))
    assert holder(contents) == holder(shuffled) in claims
    assert holder([*contents, '"v=spf1 -all"']) is None
    assert holder([]) is None


def test_of_one_proxys_claims_the_newest_generation_holds() -> None:
    """Two claims of one UID are two generations of one proxy."""
    claims = [Ownership("a", "u", Key("n", "p"), generation) for generation in (3, 12, 5)]
    assert holder([claim.content for claim in claims]) == claims[1]
