"""What an audit finds, and what of it may be fixed."""

import json
from collections.abc import Mapping

import pytest

from operator_app.api.kinds import Key, Object
from operator_app.api.records import RecordState
from operator_app.registration.audit import (
    FIXABLE,
    Finding,
    FindingKind,
    Survey,
    as_json,
    findings,
    orphans,
    refusal,
    table,
)
from operator_app.registration.identity import Installation
from operator_app.registration.ledger import IN_CLUSTER, LedgerEntry
from operator_app.registration.registry import OutsideRecord
from tests.unit.registration.ledger_entries import PROXY, an_entry


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


def test_consistent_objects_give_no_findings() -> None:
    """A live proxy whose hostname is being changed, with its entry, and claims and records for both hostnames."""
    entry = an_entry(hostname="a.b", retiring=[{"registry": "dns", "hostname": "c.d"}])
    records = (OutsideRecord("one", "a.b", PROXY), OutsideRecord("one", "c.d", PROXY))
    claims = (a_claim("a.b", "one"), a_claim("c.d", "one"))
    assert surveyed(entry, live={"one": PROXY}, claims=claims, outside={"dns": records}) == []


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


def test_only_findings_about_deleted_proxies_can_be_fixed() -> None:
    """Whatever belongs to a live proxy is left to the operator."""
    assert set(FindingKind) - FIXABLE == {FindingKind.PROXY_WITHOUT_RECORD, FindingKind.WRONG_OWNER}


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


def test_orphans_are_listed_by_namespace_and_the_json_has_everything() -> None:
    """What ``deletionPolicy: Orphan`` keeps is no finding, and is told with its namespace."""
    orphan = LedgerEntry(an_entry(uid="two", hostname="c.d", state=RecordState.ORPHANED.value))
    survey = Survey({}, [orphan], (), {})
    assert orphans(survey) == {"team-a": (orphan,)}
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
