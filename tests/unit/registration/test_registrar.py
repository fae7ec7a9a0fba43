"""Registration without a cluster: backoff with registries, which of them there are, what an audit finds."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from operator_app.api.kinds import Key, Object
from operator_app.api.records import RecordState
from operator_app.errors import ConfigurationError
from operator_app.registration.audit import FIXABLE, Finding, FindingKind, Survey, findings, table
from operator_app.registration.backoff import Backoff
from operator_app.registration.ledger import IN_CLUSTER, LedgerEntry, Name
from operator_app.registration.plugins import open_registries
from operator_app.registration.registrar import Registries
from operator_app.registration.registry import OutsideRecord, Record
from operator_app.results import Problem
from operator_app.settings import Settings

PROXY = Key("team-a", "checkout")
DOWN = Problem("RegistryError", "it does not answer")
FOR_GOOD = Problem("Forbidden", "it refuses us", needs_user_action=True)


def a_record(**changes: Any) -> Record:
    """A record; keywords replace its fields."""
    return replace(Record("one", 1, PROXY, "a.b", "c.d", ()), **changes)


# --- backoff ------------------------------------------------------------------------------------------------------


def backoff(rand: float = 1.0) -> Backoff:
    """Pauses of 1, 2, 4, then 5 seconds, where chance gives the longest."""
    return Backoff(base_s=1, cap_s=5, rand=lambda: rand)


def test_pauses_double_up_to_the_cap() -> None:
    """Each failure in a row doubles the pause, and no number of them overflows."""
    patient = backoff()
    pauses = [patient.failed(a_record(), DOWN, now_mono=0).requeue_after_s for _ in range(5)]
    assert pauses == [1, 2, 4, 5, 5]
    assert [patient.failed(a_record(), DOWN, now_mono=0).requeue_after_s for _ in range(2000)][-1] == 5


def test_half_of_a_pause_is_chance() -> None:
    """Records that fail together do not come back together."""
    assert backoff(rand=0).failed(a_record(), DOWN, now_mono=0).requeue_after_s == 1 / 2


def test_in_a_pause_the_last_problem_stands_and_the_rest_is_told() -> None:
    """The registry is not asked, and the round knows when it may be; afterwards it is asked."""
    patient = backoff()
    patient.failed(a_record(), DOWN, now_mono=10)
    answer = patient.pause(a_record(), now_mono=10.25)
    assert answer is not None
    assert (answer.problem, answer.requeue_after_s) == (DOWN, 0.75)
    assert patient.pause(a_record(), now_mono=11) is None


def test_another_record_ends_a_pause_unless_the_registry_asked_for_it() -> None:
    """An edit may be the cure; ``Retry-After`` holds for whatever is sent."""
    patient = backoff()
    patient.failed(a_record(), DOWN, now_mono=0)
    assert patient.pause(a_record(generation=2), now_mono=0) is None
    assert patient.pause(a_record(uid="two"), now_mono=0) is None
    asked = patient.failed(a_record(), DOWN, now_mono=0, asked_s=30)
    assert asked.requeue_after_s == 30
    edited = patient.pause(a_record(generation=2), now_mono=0)
    assert edited is not None
    assert edited.requeue_after_s == 30


def test_an_edited_record_starts_with_a_short_pause() -> None:
    """Failures belong to the record that failed."""
    patient = backoff()
    for _ in range(4):
        patient.failed(a_record(), DOWN, now_mono=0)
    assert patient.failed(a_record(generation=2), DOWN, now_mono=0).requeue_after_s == 1


def test_what_does_not_pass_pauses_for_the_cap_at_once() -> None:
    """Credentials are not mended within seconds."""
    assert backoff().failed(a_record(), FOR_GOOD, now_mono=0).requeue_after_s == 5


def test_an_answer_ends_the_pause() -> None:
    """After a success the next failure is a first one again."""
    patient = backoff()
    patient.failed(a_record(), DOWN, now_mono=0)
    patient.forget("one")
    assert patient.pause(a_record(), now_mono=0) is None
    assert patient.failed(a_record(), DOWN, now_mono=0).requeue_after_s == 1


# --- the ledger's entries ------------------------------------------------------------------------------------------


def an_entry(uid: str = "one", proxy: Key = PROXY, **spec: Any) -> Object:
    """A stored ProxyRegistration; keywords become its spec."""
    return {
        "metadata": {"name": f"proxy-{uid}", "namespace": "edge-system", "generation": 3},
        "spec": {
            "proxy": {"namespace": proxy.namespace, "name": proxy.name, "uid": uid},
            "registry": "dns",
            "state": "Registered",
        }
        | spec,
    }


@pytest.mark.parametrize(
    ("spec", "published", "names"),
    [
        ({}, None, set()),
        ({"hostname": "a.b"}, Name("dns", "a.b"), {Name("dns", "a.b")}),
        ({"hostname": "a.b", "registry": IN_CLUSTER}, None, set()),
        (
            {"hostname": "a.b", "registry": IN_CLUSTER, "retiring": [{"registry": "dns", "hostname": "c.d"}]},
            None,
            {Name("dns", "c.d")},
        ),
        (
            {"hostname": "a.b", "retiring": [{"registry": "old", "hostname": "a.b"}]},
            Name("dns", "a.b"),
            {Name("dns", "a.b"), Name("old", "a.b")},
        ),
    ],
)
def test_an_entry_names_all_that_may_stand_outside(spec: Object, published: Name | None, names: set[Name]) -> None:
    """The hostname in an outside registry and everything that retires; what is in the cluster alone is not outside."""
    entry = LedgerEntry(an_entry(**spec))
    assert entry.published == published
    assert entry.names == names


@pytest.mark.parametrize(
    ("status", "is_confirmed"), [({}, False), ({"confirmedGeneration": 2}, False), ({"confirmedGeneration": 3}, True)]
)
def test_an_entry_is_confirmed_for_exactly_one_version(status: Object, *, is_confirmed: bool) -> None:
    """What was confirmed of an older spec, another address for instance, says nothing about this one."""
    assert LedgerEntry(an_entry() | {"status": status}).is_confirmed is is_confirmed


# --- which registries there are ------------------------------------------------------------------------------------


def test_an_unknown_registry_is_answered_with_those_there_are() -> None:
    """The sentence says what to write instead."""
    registries = Registries({})
    assert registries.unknown(IN_CLUSTER) is None
    problem = registries.unknown("dsn")
    assert problem is not None
    assert problem.needs_user_action
    assert "dsn" in problem.message
    assert IN_CLUSTER in problem.message


PACKAGE = """
from contextlib import asynccontextmanager

from operator_app.errors import ConfigurationError

not_a_factory = 1
opened = []

@asynccontextmanager
async def good(settings):
    opened.append(settings.operator_id)
    yield "a registry"
    opened.clear()

@asynccontextmanager
async def refusing(settings):
    raise ConfigurationError("set OUR_URL")
    yield

def crashing(settings):
    raise RuntimeError("something\\nunexpected")
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's package with entry points, on the path."""
    (tmp_path / "their_registries.py").write_text(PACKAGE)
    for version, points in (
        (
            "a",
            "good = their_registries:good\nrefusing = their_registries:refusing\nodd = their_registries:not_a_factory",
        ),
        (
            "b",
            "crashing = their_registries:crashing\nmissing = their_registries:nothing\ntwice = their_registries:good",
        ),
        ("c", "twice = their_registries:refusing\npowerdns = their_registries:good\nabsent = no_such_package:open"),
    ):
        info = tmp_path / f"their_{version}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: their-{version}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[operator_app.registries]\n{points}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_registries", raising=False)
    return tmp_path


@pytest.mark.anyio
@pytest.mark.usefixtures("installed")
async def test_a_registry_is_opened_with_the_settings_and_closed_at_the_end() -> None:
    """What an entry point names gets the settings once, and its context lasts as long as the operator."""
    async with open_registries(Settings(registry="good", operator_id="mine")) as registries:
        assert registries.default == "good"
        assert list(registries.outside) == ["good"]
        opened = sys.modules["their_registries"].opened
        assert opened == ["mine"]
    assert opened == []


@pytest.mark.anyio
async def test_the_default_needs_nothing_installed() -> None:
    """``in-cluster`` is the ledger; no entry point is looked for."""
    async with open_registries(Settings()) as registries:
        assert registries == Registries({}, IN_CLUSTER)


@pytest.mark.anyio
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("elsewhere", "no registry elsewhere is installed; there are: .*good.*in-cluster"),
        ("absent", "absent can't be loaded from no_such_package:open: No module named"),
        ("missing", "missing can't be loaded from their_registries:nothing"),
        ("odd", "odd is no factory"),
        ("twice", "twice is installed twice, as their_registries:good and their_registries:refusing; uninstall one"),
        ("powerdns", "powerdns is installed twice"),
        ("refusing", "^set OUR_URL$"),
        ("crashing", "the registry crashing does not open: something unexpected"),
    ],
)
async def test_a_registry_that_can_not_be_opened_is_one_sentence(name: str, sentence: str) -> None:
    """Missing, broken, ambiguous or unwilling: the operator does not start, and says why."""
    with pytest.raises(ConfigurationError, match=sentence):
        async with open_registries(Settings(registries=(name,))):
            pass


# --- audit ---------------------------------------------------------------------------------------------------------


def a_claim(hostname: str, uid: str, proxy: Key = PROXY) -> Object:
    """A stored HostnameClaim."""
    reference = {"namespace": proxy.namespace, "name": proxy.name, "uid": uid}
    return {"metadata": {"name": hostname}, "spec": {"hostname": hostname, "proxy": reference}}


def surveyed(
    *entries: Object,
    living: dict[str, Key] | None = None,
    claims: tuple[Object, ...] = (),
    outside: Mapping[str, tuple[OutsideRecord, ...]] | None = None,
    namespaces: tuple[str, ...] = (),
) -> list[tuple[FindingKind, str, str]]:
    """Kind, registry and name of what an audit finds."""
    survey = Survey(living or {}, [LedgerEntry(each) for each in entries], claims, outside or {}, namespaces)
    return [(each.kind, each.registry, each.name) for each in findings(survey)]


def test_where_everything_fits_there_is_nothing_to_find() -> None:
    """A living proxy with its entry, its claim and its record, and one that is being moved from one name to another."""
    entry = an_entry(hostname="a.b", retiring=[{"registry": "dns", "hostname": "c.d"}])
    held = (OutsideRecord("one", PROXY, "a.b"), OutsideRecord("one", PROXY, "c.d"))
    claims = (a_claim("a.b", "one"), a_claim("c.d", "one"))
    assert surveyed(entry, living={"one": PROXY}, claims=claims, outside={"dns": held}) == []


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (surveyed(living={"one": PROXY}), [(FindingKind.PROXY_WITHOUT_RECORD, IN_CLUSTER, "proxy-one")]),
        (
            surveyed(an_entry(hostname="a.b"), living={"one": PROXY}, outside={"dns": ()}),
            [(FindingKind.PROXY_WITHOUT_RECORD, "dns", "a.b")],
        ),
        (surveyed(an_entry(hostname="a.b")), [(FindingKind.RECORD_WITHOUT_PROXY, IN_CLUSTER, "proxy-one")]),
        (
            surveyed(outside={"dns": (OutsideRecord("one", PROXY, "a.b"),)}),
            [(FindingKind.RECORD_WITHOUT_PROXY, "dns", "a.b")],
        ),
        (
            surveyed(
                an_entry(hostname="a.b"),
                living={"one": PROXY},
                outside={"dns": (OutsideRecord("one", PROXY, "a.b"), OutsideRecord("one", PROXY, "x.y"))},
            ),
            [(FindingKind.WRONG_OWNER, "dns", "x.y")],
        ),
        (surveyed(claims=(a_claim("a.b", "one"),)), [(FindingKind.CLAIM_WITHOUT_PROXY, IN_CLUSTER, "a.b")]),
        (
            surveyed(
                an_entry(hostname="a.b", state=RecordState.ABANDONED.value),
                claims=(a_claim("a.b", "one"),),
                outside={"dns": (OutsideRecord("one", PROXY, "a.b"),)},
            ),
            [(FindingKind.REMOVAL_PENDING, IN_CLUSTER, "proxy-one")],
        ),
    ],
    ids=[
        "no entry",
        "nothing outside",
        "an entry of the dead",
        "a record of the dead",
        "another name of the living",
        "a claim of the dead",
        "abandoned",
    ],
)
def test_what_does_not_fit_is_found_once(
    found: list[tuple[FindingKind, str, str]], expected: list[tuple[FindingKind, str, str]]
) -> None:
    """One finding for each discrepancy, under the name that people know."""
    assert found == expected


def test_what_was_orphaned_on_purpose_is_no_finding() -> None:
    """``deletionPolicy: Orphan`` keeps entry, claim and record; nothing of it may be taken for left behind."""
    entry = an_entry(hostname="a.b", state=RecordState.ORPHANED.value)
    outside = {"dns": (OutsideRecord("one", PROXY, "a.b"),)}
    assert surveyed(entry, claims=(a_claim("a.b", "one"),), outside=outside) == []


def test_nothing_is_said_about_a_registry_that_could_not_be_read() -> None:
    """An unread registry is not an empty one."""
    assert surveyed(an_entry(hostname="a.b"), living={"one": PROXY}) == []


def test_nothing_is_said_about_namespaces_that_were_not_looked_at() -> None:
    """Who may list only some namespaces can't tell who lives in the others."""
    assert surveyed(an_entry(), namespaces=("team-b",)) == []
    assert surveyed(an_entry(), namespaces=("team-a",)) != []


def test_only_findings_about_the_dead_can_be_fixed() -> None:
    """What belongs to a proxy that lives is the operator's alone."""
    assert set(FindingKind) - FIXABLE == {FindingKind.PROXY_WITHOUT_RECORD, FindingKind.WRONG_OWNER}


def test_the_table_has_a_line_for_each_finding() -> None:
    """Columns are aligned, and every line can be searched for."""
    found = Finding(FindingKind.WRONG_OWNER, "dns", "a.b", PROXY, "one")
    assert table([found]).splitlines() == [
        "FINDING      REGISTRY  NAME  PROXY            UID",
        "wrong-owner  dns       a.b   team-a/checkout  one",
    ]
