"""What an audit finds, and what of it may be fixed."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from operator_app.api.kinds import LABEL_TENANT, Key, Object
from operator_app.api.records import RecordState
from operator_app.errors import TerminalError
from operator_app.registration.audit import (
    FIXABLE,
    Finding,
    FindingKind,
    Survey,
    as_json,
    findings,
    fix,
    held_by_pause,
    orphans,
    refusal,
    resting,
    table,
)
from operator_app.registration.identity import Installation
from operator_app.registration.ledger import IN_CLUSTER, LedgerEntry
from operator_app.registration.registrar import Registries
from operator_app.registration.registry import OutsideRecord
from operator_app.results import Outcome
from tests.paths import ROOT
from tests.unit.registration.ledger_entries import PROXY, an_entry
from tests.unit.scripted_api import NOT_FOUND, Answer, Line, ScriptedApi, components, ok


def a_claim(hostname: str, uid: str, proxy: Key = PROXY) -> Object:
    """A stored HostnameClaim."""
    reference = {"namespace": proxy.namespace, "name": proxy.name, "uid": uid}
    return {"metadata": {"name": hostname}, "spec": {"hostname": hostname, "proxy": reference}}


def surveyed(
    *entries: Object,
    live: dict[str, Key] | None = None,
    claims: tuple[Object, ...] = (),
    outside: Mapping[str, tuple[OutsideRecord, ...]] | None = None,
    namespaces: tuple[str, ...] = (),
) -> list[tuple[FindingKind, str, str]]:
    """Kind, registry and name of each finding."""
    survey = Survey(live or {}, [LedgerEntry(each) for each in entries], claims, outside or {}, namespaces)
    return [(each.kind, each.registry, each.name) for each in findings(survey)]


NOW_GONE = {
    "proxy": {"namespace": PROXY.namespace, "name": PROXY.name, "uid": "one"},
    "releasedAt": "2026-07-01T12:00:00Z",
}


def test_a_hostname_that_rests_is_listed_and_is_no_finding() -> None:
    """Its proxy is gone, and its claim is kept for the tenant; of namespaces that are not audited nothing is said."""
    claim = {"metadata": {"name": "a.b"}, "spec": NOW_GONE}
    assert surveyed(claims=(claim,)) == []
    assert resting(Survey({}, (), (claim,), {})) == (claim,)
    assert resting(Survey({}, (), (claim,), {}, namespaces=("elsewhere",))) == ()


def test_versions_that_went_back_are_found_in_both_places() -> None:
    """A record, or an entry, of a newer generation than the proxy has; an older one is just not written yet."""
    entry = an_entry(hostname="a.b", generation=3)
    for outside, own, expected in (
        (3, 3, []),
        (2, 3, []),
        (3, 4, []),
        (4, 3, [("dns", "a.b")]),
        (3, 2, [(IN_CLUSTER, "proxy-one"), ("dns", "a.b")]),
    ):
        records = {"dns": (OutsideRecord("one", "a.b", generation=outside),)}
        survey = Survey({"one": PROXY}, [LedgerEntry(entry)], (), records, generations={"one": own})
        found = findings(survey)
        assert sorted((each.registry, each.name) for each in found) == sorted(expected)
        assert {each.kind for each in found} <= {FindingKind.NEWER_RECORD}


def test_an_address_that_is_left_is_found_by_each_of_its_names() -> None:
    """The entry of a deleted proxy in the state Left says where the addresses are."""
    entry = an_entry(hostname="a.b", state=RecordState.LEFT.value, retiring=[{"registry": "dns", "hostname": "c.d"}])
    kind = FindingKind.DANGLING_ADDRESS
    assert surveyed(entry) == [(kind, "dns", "a.b"), (kind, "dns", "c.d")]
    assert kind not in FIXABLE


def test_a_hostname_that_no_policy_allows_any_more_is_found() -> None:
    """By the labels of its namespace; where they could not be read, nothing is said."""
    policy = {
        "metadata": {"name": "p"},
        "spec": {"namespaceSelector": {"matchLabels": {"a": "b"}}, "hostnames": ["a.b"]},
    }
    entry, record = an_entry(hostname="a.b"), {"dns": (OutsideRecord("one", "a.b"),)}
    for labels, expected in (
        ({PROXY.namespace: {"a": "b"}}, []),
        ({}, []),
        ({PROXY.namespace: {}}, [(FindingKind.HOSTNAME_NOT_ALLOWED, "a.b")]),
    ):
        survey = Survey({"one": PROXY}, [LedgerEntry(entry)], (), record, labels=labels, policies=(policy,))
        assert [(each.kind, each.name) for each in findings(survey)] == expected


def test_every_finding_is_explained() -> None:
    """docs/operations.md has a row for each name that the audit prints."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [each.value for each in FindingKind if f"| `{each.value}` |" not in page] == []


def test_what_a_paused_proxy_keeps_is_listed_and_is_no_finding() -> None:
    """Its hostname stays as it was, whatever the spec declares meanwhile; one that is the same is nothing to tell."""
    entry, records = LedgerEntry(an_entry(hostname="a.b")), {"dns": (OutsideRecord("one", "a.b"),)}
    claims = (a_claim("a.b", "one"),)
    for paused, kept in (({}, 0), ({"one": "a.b"}, 0), ({"one": "c.d"}, 1), ({"one": None}, 1)):
        survey = Survey({"one": PROXY}, (entry,), claims, records, paused=paused)
        assert findings(survey) == ()
        assert len(held_by_pause(survey)) == kept
        told = json.loads(as_json(survey, (), (), {}))["paused"]
        assert told == [{"hostname": "a.b", "proxy": str(PROXY)}] * kept


def test_consistent_objects_give_no_findings() -> None:
    """A live proxy with its entry, its claim and its record."""
    records, claims = (OutsideRecord("one", "a.b", PROXY),), (a_claim("a.b", "one"),)
    assert surveyed(an_entry(hostname="a.b"), live={"one": PROXY}, claims=claims, outside={"dns": records}) == []


@pytest.mark.parametrize("is_outside", [True, False])
def test_what_is_not_declared_any_more_is_listed_until_it_is_gone(*, is_outside: bool) -> None:
    """A hostname that a live proxy had is kept for as long as its registry does not let it go, and is no stranger's."""
    entry = an_entry(hostname="a.b", retiring=[{"registry": "dns", "hostname": "c.d"}])
    records = (OutsideRecord("one", "a.b", PROXY), OutsideRecord("one", "c.d", PROXY))[: 1 + is_outside]
    claims = (a_claim("a.b", "one"), a_claim("c.d", "one"))
    found = surveyed(entry, live={"one": PROXY}, claims=claims, outside={"dns": records})
    assert found == [(FindingKind.REMOVAL_PENDING, "dns", "c.d")]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (surveyed(live={"one": PROXY}), [(FindingKind.PROXY_WITHOUT_RECORD, IN_CLUSTER, "proxy-one")]),
        (
            surveyed(an_entry(hostname="a.b"), live={"one": PROXY}, outside={"dns": ()}),
            [(FindingKind.PROXY_WITHOUT_RECORD, "dns", "a.b")],
        ),
        (surveyed(an_entry(hostname="a.b")), [(FindingKind.RECORD_WITHOUT_PROXY, IN_CLUSTER, "proxy-one")]),
        (
            surveyed(outside={"dns": (OutsideRecord("one", "a.b", PROXY),)}),
            [(FindingKind.RECORD_WITHOUT_PROXY, "dns", "a.b")],
        ),
        (
            surveyed(
                an_entry(hostname="a.b"),
                live={"one": PROXY},
                outside={"dns": (OutsideRecord("one", "a.b", PROXY), OutsideRecord("one", "x.y", PROXY))},
            ),
            [(FindingKind.WRONG_OWNER, "dns", "x.y")],
        ),
        (surveyed(claims=(a_claim("a.b", "one"),)), [(FindingKind.CLAIM_WITHOUT_PROXY, IN_CLUSTER, "a.b")]),
        (
            surveyed(
                an_entry(hostname="a.b", state=RecordState.ABANDONED.value),
                claims=(a_claim("a.b", "one"),),
                outside={"dns": (OutsideRecord("one", "a.b", PROXY),)},
            ),
            [(FindingKind.REMOVAL_PENDING, IN_CLUSTER, "proxy-one")],
        ),
    ],
    ids=[
        "no entry",
        "nothing outside",
        "an entry of a deleted proxy",
        "a record of a deleted proxy",
        "another hostname of a live proxy",
        "a claim of a deleted proxy",
        "abandoned",
    ],
)
def test_each_discrepancy_is_one_finding(
    found: list[tuple[FindingKind, str, str]], expected: list[tuple[FindingKind, str, str]]
) -> None:
    """One finding for each discrepancy, under the hostname or the name of the entry."""
    assert found == expected


def test_what_was_orphaned_on_request_is_no_finding() -> None:
    """``deletionPolicy: Orphan`` keeps entry, claim and record of a deleted proxy: none of them is a finding."""
    entry = an_entry(hostname="a.b", state=RecordState.ORPHANED.value)
    outside = {"dns": (OutsideRecord("one", "a.b", PROXY),)}
    assert surveyed(entry, claims=(a_claim("a.b", "one"),), outside=outside) == []


def test_there_are_no_findings_about_a_registry_that_could_not_be_read() -> None:
    """An unread registry is not an empty one."""
    assert surveyed(an_entry(hostname="a.b"), live={"one": PROXY}) == []


def test_there_are_no_findings_about_namespaces_that_were_not_listed() -> None:
    """With access to some namespaces only, proxies of the others are unknown."""
    assert surveyed(an_entry(), namespaces=("team-b",)) == []
    assert surveyed(an_entry(), namespaces=("team-a",)) != []


def test_only_what_is_provably_left_or_went_back_can_be_fixed() -> None:
    """What is missing is the operator's to write, and what nobody can prove or a policy says is for people."""
    assert set(FindingKind) - FIXABLE == {
        FindingKind.PROXY_WITHOUT_RECORD,
        FindingKind.DANGLING_ADDRESS,
        FindingKind.HOSTNAME_NOT_ALLOWED,
    }


def test_the_table_has_a_line_for_each_finding() -> None:
    """Columns are aligned, and every line can be searched for."""
    found = Finding(FindingKind.WRONG_OWNER, "dns", "a.b", PROXY, "one")
    assert table([found]).splitlines() == [
        "FINDING      REGISTRY  NAME  PROXY            UID",
        "wrong-owner  dns       a.b   team-a/checkout  one",
    ]


OURS = Installation.of("cluster-one", "prod")
RECORDS = {"dns": (OutsideRecord("one", "a.b"),)}


@pytest.mark.parametrize(
    ("entry", "outside", "sentence"),
    [
        (an_entry(hostname="a.b", installations=[str(OURS)]), RECORDS, None),
        (an_entry(hostname="a.b"), {"dns": ()}, None),
        (an_entry(uid="two", hostname="c.d"), RECORDS, "names none of the 1 records"),
        (an_entry(hostname="a.b", installations=[str(Installation.of("cluster-two", "prod"))]), RECORDS, "another"),
        (an_entry(hostname="a.b", installations=[str(Installation.of("cluster-one", "test"))]), RECORDS, "another"),
    ],
    ids=["its own", "nothing outside", "another namespace", "another cluster", "another id"],
)
def test_nothing_is_removed_by_a_ledger_that_is_not_ones_own(
    entry: Object, outside: Mapping[str, tuple[OutsideRecord, ...]], sentence: str | None
) -> None:
    """With the wrong namespace or id, every record looks as if its proxy was gone; the sentence says what to give."""
    refused = refusal(Survey({}, [LedgerEntry(entry)], (), outside), OURS)
    assert (refused is None) == (sentence is None)
    assert sentence is None or sentence in (refused or "")


def test_orphans_are_listed_by_tenant_and_the_json_has_everything() -> None:
    """What ``deletionPolicy: Orphan`` keeps is no finding, and is told with its tenant: a label, or the namespace."""
    orphan = LedgerEntry(an_entry(uid="two", hostname="c.d", state=RecordState.ORPHANED.value))
    survey = Survey({}, [orphan], (), {})
    assert orphans(survey) == {"team-a": (orphan,)}
    assert orphans(replace(survey, labels={"team-a": {LABEL_TENANT: "shops"}})) == {"shops": (orphan,)}
    assert orphans(replace(survey, namespaces=("team-a", "team-b"))) == {"team-a": (orphan,)}
    assert orphans(replace(survey, namespaces=("team-b",))) == {}, "another audit's namespace"
    gone = Finding(FindingKind.RECORD_WITHOUT_PROXY, "dns", "a.b", None, "one")
    told = json.loads(as_json(survey, [gone], [gone], {}))
    assert told["findings"] == [
        {
            "finding": "record-without-proxy",
            "name": "a.b",
            "proxy": None,
            "registry": "dns",
            "removed": False,
            "uid": "one",
        }
    ]
    assert told["orphans"] == {"team-a": [{"entry": "proxy-two", "hostname": "c.d", "proxy": "team-a/checkout"}]}


# --- removing what is left -----------------------------------------------------------------------------------------

UID: Final = "one"
VERSIONED: Final = {"resourceVersion": "7", "uid": "entry-uid"}
CLAIM_VERSIONED: Final = {"resourceVersion": "8", "uid": "claim-uid"}


class Outside:
    """A registry that notes what is removed."""

    def __init__(self) -> None:
        self.removed: list[tuple[str, str]] = []

    async def deregister(self, uid: str, hostname: str, *, former: frozenset[Installation] = frozenset()) -> Outcome:  # noqa: ARG002
        """Remove a record."""
        self.removed.append((uid, hostname))
        return Outcome.DELETED


def entry_of(uid: str = UID, **spec: Any) -> Object:
    """A stored entry."""
    found = an_entry(uid, **spec)
    found["metadata"] |= VERSIONED
    return found


def claim_of(uid: str = UID) -> Object:
    """A stored claim."""
    found = a_claim("a.b", uid)
    found["metadata"] |= CLAIM_VERSIONED
    return found


def proxy_with(uid: str) -> Object:
    """The proxy that is stored under the name."""
    return {"metadata": {"namespace": PROXY.namespace, "name": PROXY.name, "uid": uid, "resourceVersion": "9"}}


def proxy_declaring(hostname: str) -> Object:
    """The proxy of the findings, with a hostname in its spec."""
    found = proxy_with(UID)
    found["metadata"]["generation"] = 1
    return found | {"spec": {"registration": {"hostname": hostname}}}


LIVE: Final = ("get EnvoyProxy", ok(proxy_declaring("elsewhere.example")))


def listed(*objects: Object) -> Answer:
    """A page of a list."""
    return ok({"metadata": {"resourceVersion": "50"}, "items": list(objects)})


OF_ENTRY: Final = Finding(FindingKind.RECORD_WITHOUT_PROXY, IN_CLUSTER, "proxy-one", PROXY, UID)
OF_CLAIM: Final = Finding(FindingKind.CLAIM_WITHOUT_PROXY, IN_CLUSTER, "a.b", PROXY, UID)
OF_RECORD: Final = Finding(FindingKind.RECORD_WITHOUT_PROXY, "dns", "a.b", PROXY, UID)
OF_NOBODY: Final = Finding(FindingKind.RECORD_WITHOUT_PROXY, "dns", "a.b", None, UID)
OF_OTHER: Final = Finding(FindingKind.WRONG_OWNER, "dns", "a.b", PROXY, UID)
OF_NEWER: Final = Finding(FindingKind.NEWER_RECORD, "dns", "a.b", PROXY, UID)
GONE: Final = ("get EnvoyProxy", NOT_FOUND)
DONE: Final = ok({"metadata": {"resourceVersion": "60"}})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("finding", "script"),
    [
        (OF_ENTRY, [("get EnvoyProxy", ok(proxy_with(UID)))]),
        (OF_CLAIM, [("get EnvoyProxy", ok(proxy_with(UID)))]),
        (OF_RECORD, [("get EnvoyProxy", ok(proxy_with(UID)))]),
        (OF_NOBODY, [("list EnvoyProxy", listed(proxy_with(UID)))]),
        (OF_ENTRY, [GONE, ("get ProxyRegistration", NOT_FOUND)]),
        (OF_ENTRY, [GONE, ("get ProxyRegistration", ok(entry_of("other")))]),
        (OF_ENTRY, [GONE, ("get ProxyRegistration", ok(entry_of(state="Orphaned", hostname="a.b")))]),
        (OF_CLAIM, [GONE, ("get ProxyRegistration", ok(entry_of()))]),
        (OF_CLAIM, [GONE, ("get ProxyRegistration", NOT_FOUND), ("get HostnameClaim", NOT_FOUND)]),
        (OF_CLAIM, [GONE, ("get ProxyRegistration", NOT_FOUND), ("get HostnameClaim", ok(claim_of("other")))]),
        (OF_RECORD, [GONE, ("get ProxyRegistration", ok(entry_of(hostname="a.b")))]),
        (replace(OF_RECORD, kind=FindingKind.HOSTNAME_NOT_ALLOWED), []),
        (OF_OTHER, [GONE, ("get ProxyRegistration", NOT_FOUND)]),
        (OF_OTHER, [LIVE, ("get ProxyRegistration", NOT_FOUND)]),
        (OF_OTHER, [LIVE, ("get ProxyRegistration", ok(entry_of(hostname="a.b")))]),
        (OF_OTHER, [("get EnvoyProxy", ok(proxy_declaring("a.b"))), ("get ProxyRegistration", ok(entry_of()))]),
        (OF_NEWER, [LIVE, ("get ProxyRegistration", ok(entry_of(hostname="c.d")))]),
    ],
    ids=[
        "the proxy of an entry lives",
        "the proxy of a claim lives",
        "the proxy of a record lives",
        "a proxy without a known name lives",
        "the entry is gone",
        "the entry is another proxy's",
        "the entry is kept on purpose",
        "the claim has an entry",
        "the claim is gone",
        "the claim is another proxy's",
        "an entry names the record",
        "not fixable",
        "the proxy of a record with a wrong hostname is gone",
        "the entry of that proxy is gone",
        "the entry names that hostname by now",
        "the proxy declares that hostname by now",
        "the newer record has another hostname than the entry",
    ],
)
async def test_what_became_alive_or_anothers_since_the_survey_stays(
    tmp_path: Path, finding: Finding, script: list[Line]
) -> None:
    """Everything is read once more, and nothing is removed, here or outside."""
    outside = Outside()
    registry: Any = outside
    async with components(ScriptedApi(*script), tmp_path) as own:
        is_removed = await fix(own.cluster, Registries({"dns": registry}), finding, namespace="edge-system")
    assert not is_removed
    assert outside.removed == []


@pytest.mark.anyio
@pytest.mark.parametrize("proxy_found", [NOT_FOUND, ok(proxy_with("reborn"))], ids=["gone", "reborn"])
async def test_an_entry_goes_with_its_records_and_its_claims(tmp_path: Path, proxy_found: Answer) -> None:
    """The records first, then exactly the version of the entry that named them, then the claims of that proxy alone."""
    outside = Outside()
    registry: Any = outside
    api = ScriptedApi(
        ("get EnvoyProxy", proxy_found),
        ("get ProxyRegistration", ok(entry_of(hostname="a.b", retiring=[{"registry": "dns", "hostname": "old.b"}]))),
        ("delete ProxyRegistration", DONE),
        ("list HostnameClaim", listed(claim_of(), claim_of("other"))),
        ("delete HostnameClaim", DONE),
    )
    async with components(api, tmp_path) as own:
        assert await fix(own.cluster, Registries({"dns": registry}), OF_ENTRY, namespace="edge-system")
    assert outside.removed == [(UID, "a.b"), (UID, "old.b")]
    assert api.body("delete ProxyRegistration")["preconditions"] == VERSIONED
    assert api.body("delete HostnameClaim")["preconditions"] == CLAIM_VERSIONED


@pytest.mark.anyio
async def test_a_claim_that_was_given_back_since_stays(tmp_path: Path) -> None:
    """It rests for its tenant, and is the operator's to delete."""
    claim = claim_of()
    resting = claim | {"spec": claim["spec"] | {"releasedAt": "2026-07-01T12:00:00Z"}}
    api = ScriptedApi(GONE, ("get ProxyRegistration", NOT_FOUND), ("get HostnameClaim", ok(resting)))
    async with components(api, tmp_path) as own:
        assert not await fix(own.cluster, Registries({}), OF_CLAIM, namespace="edge-system")


@pytest.mark.anyio
async def test_a_claim_is_deleted_by_its_version_and_a_record_by_its_owner(tmp_path: Path) -> None:
    """Each removal names exactly what was read."""
    outside = Outside()
    registry: Any = outside
    api = ScriptedApi(
        GONE,
        ("get ProxyRegistration", NOT_FOUND),
        ("get HostnameClaim", ok(claim_of())),
        ("delete HostnameClaim", DONE),
        ("list EnvoyProxy", listed(proxy_with("other"))),
        ("get ProxyRegistration", NOT_FOUND),
    )
    async with components(api, tmp_path) as own:
        registries = Registries({"dns": registry})
        assert await fix(own.cluster, registries, OF_CLAIM, namespace="edge-system")
        assert await fix(own.cluster, registries, OF_NOBODY, namespace="edge-system")
    assert api.body("delete HostnameClaim")["preconditions"] == CLAIM_VERSIONED
    assert outside.removed == [(UID, "a.b")]


@pytest.mark.anyio
async def test_a_record_of_a_hostname_that_a_living_proxy_gave_up_is_removed(tmp_path: Path) -> None:
    """Its entry was lost and made anew without the former name; the proxy declares another one."""
    outside = Outside()
    registry: Any = outside
    api = ScriptedApi(LIVE, ("get ProxyRegistration", ok(entry_of())))
    async with components(api, tmp_path) as own:
        assert await fix(own.cluster, Registries({"dns": registry}), OF_OTHER, namespace="edge-system")
    assert outside.removed == [(UID, "a.b")]


@pytest.mark.anyio
async def test_an_entry_of_an_unknown_registry_stays(tmp_path: Path) -> None:
    """What can't be removed outside is not forgotten here."""
    api = ScriptedApi(GONE, ("get ProxyRegistration", ok(entry_of(hostname="a.b"))))
    async with components(api, tmp_path) as own:
        with pytest.raises(TerminalError) as refused:
            await fix(own.cluster, Registries({}), OF_ENTRY, namespace="edge-system")
    assert refused.value.reason == "RegistryUnknown"
