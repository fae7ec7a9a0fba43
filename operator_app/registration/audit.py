"""Compare the EnvoyProxies that exist with ledger entries, hostname claims and records in outside registries.

Normally there are no findings. A finding is due to an edit by hand (a finalizer removed, a record deleted) or to a lost
cluster, or a reconcile is still in progress; in the last case it is gone in the next audit.

``findings`` is pure. ``survey`` reads a cluster, ``survey_of`` the store of a running operator. Whatever belongs to a
live proxy is left to the operator: ``fix`` removes only what provably belongs to a deleted one.
"""

import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import anyio

from operator_app.api.kinds import (
    ENVOY_PROXY,
    FIELD_MANAGER,
    HOSTNAME_CLAIM,
    HOSTNAME_POLICY,
    LABEL_MANAGED_BY,
    LABEL_TENANT,
    NAMESPACE,
    PROXY_REGISTRATION,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.api.records import RecordState
from operator_app.errors import ForbiddenError, OperatorError, TerminalError, TransientError
from operator_app.kube.client import Cluster
from operator_app.kube.store import Store
from operator_app.kube.turns import Turns
from operator_app.registration.claims import owner_uid, released_at
from operator_app.registration.identity import Installation
from operator_app.registration.ledger import IN_CLUSTER, LedgerEntry, Name, proxy_of
from operator_app.registration.policy import refusal as refusal_of_policies
from operator_app.registration.registrar import CALL_TIMEOUT_S, Registries, was_never_published
from operator_app.registration.registry import OutsideRecord, Registry
from operator_app.results import Outcome

_OURS: Final = f"{LABEL_MANAGED_BY}={FIELD_MANAGER}"
_NOWHERE: Final = Key("", "")
_BATCH_BYTES: Final = 65_536
"""Objects of a list that are decoded at the same time, in bytes of JSON."""


class FindingKind(StrEnum):
    """The kinds of discrepancy; values of a metric label and of the command's output."""

    PROXY_WITHOUT_RECORD = "proxy-without-record"
    RECORD_WITHOUT_PROXY = "record-without-proxy"
    WRONG_OWNER = "wrong-owner"
    """A record of a live proxy under a hostname that is not in its entry."""
    CLAIM_WITHOUT_PROXY = "claim-without-proxy"
    REMOVAL_PENDING = "removal-pending"
    """What is not declared any more is outside while a registry is down; the operator goes on trying to remove it."""
    DANGLING_ADDRESS = "dangling-address"
    """An address of a deleted proxy is left outside, because the proof that the operator wrote it was removed."""
    NEWER_RECORD = "newer-record"
    """A record was made from a newer generation than the proxy has: the cluster was restored to an older state."""
    HOSTNAME_NOT_ALLOWED = "hostname-not-allowed"
    """A proxy has a hostname that no policy allows its namespace any more."""


FIXABLE: Final = frozenset(
    {
        FindingKind.RECORD_WITHOUT_PROXY,
        FindingKind.CLAIM_WITHOUT_PROXY,
        FindingKind.REMOVAL_PENDING,
        FindingKind.WRONG_OWNER,
        FindingKind.NEWER_RECORD,
    }
)
"""Findings about what provably is a proxy's own or a deleted one's. The others are left to the operator or people."""

_OF_LIVE: Final = frozenset({FindingKind.WRONG_OWNER, FindingKind.NEWER_RECORD})
"""Findings about proxies that exist, due to entries that were lost, or to versions that went back."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One discrepancy. ``name`` is a hostname, or the name of an object in the operator's namespace.

    ``proxy`` is ``None`` where only a record outside knows of the proxy, and does not tell its name.
    """

    kind: FindingKind
    registry: str
    name: str
    proxy: Key | None
    uid: str


@dataclass(frozen=True, slots=True)
class Survey:
    """The input of an audit. ``proxies`` are the live ones, by UID; ``outside`` has the records by registry.

    ``generations`` are those of the live proxies, by UID. ``labels`` are the labels of namespaces, as far as they could
    be read, and ``policies`` who may have which hostname; ``apexes`` are the zones of the registries. ``paused`` has
    the hostnames that paused proxies declare, by UID; ``None`` for none.

    A registry that could not be read is missing in ``outside``. There are no findings about proxies outside of
    ``namespaces``; without any, all namespaces are audited.
    """

    proxies: Mapping[str, Key]
    entries: Sequence[LedgerEntry]
    claims: Sequence[Object]
    outside: Mapping[str, Sequence[OutsideRecord]]
    namespaces: Sequence[str] = ()
    generations: Mapping[str, int] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    policies: Sequence[Object] = ()
    apexes: Sequence[str] = ()
    paused: Mapping[str, str | None] = field(default_factory=dict)

    def tenant_of(self, namespace: str) -> str:
        """The tenant of a namespace: its label, or its own name."""
        return self.labels.get(namespace, {}).get(LABEL_TENANT) or namespace


def findings(survey: Survey) -> tuple[Finding, ...]:
    """Every discrepancy, sorted. Pure."""
    entries = {each.uid: each for each in survey.entries}
    found = [*_of_entries(survey), *_of_outside(survey, entries)]
    found += [
        Finding(FindingKind.PROXY_WITHOUT_RECORD, IN_CLUSTER, f"proxy-{uid}", proxy, uid)
        for uid, proxy in survey.proxies.items()
        if uid not in entries
    ]
    for claim in survey.claims:
        uid = owner_uid(claim)
        # A deleted proxy keeps its claims as long as it has an entry, and one that rests is kept for its tenant.
        if uid not in survey.proxies and uid not in entries and released_at(claim) is None:
            name = claim["metadata"]["name"]
            found.append(Finding(FindingKind.CLAIM_WITHOUT_PROXY, IN_CLUSTER, name, proxy_of(claim), uid))
    # A UID that is known outside only may be of a namespace that was not listed.
    served = survey.namespaces
    audited = (each for each in found if not served or (each.proxy or _NOWHERE).namespace in served)
    return tuple(sorted(audited, key=lambda each: (each.kind, each.registry, each.name, each.uid)))


def _of_entries(survey: Survey) -> list[Finding]:
    found = []
    outside = {(registry, each.uid, each.name) for registry, records in survey.outside.items() for each in records}
    for entry in survey.entries:
        name, published = f"proxy-{entry.uid}", entry.published
        if entry.uid not in survey.proxies:
            if entry.state is RecordState.ABANDONED:
                found.append(Finding(FindingKind.REMOVAL_PENDING, IN_CLUSTER, name, entry.proxy, entry.uid))
            elif entry.state is RecordState.REGISTERED:
                found.append(Finding(FindingKind.RECORD_WITHOUT_PROXY, IN_CLUSTER, name, entry.proxy, entry.uid))
            elif entry.state is RecordState.LEFT:
                kind = FindingKind.DANGLING_ADDRESS
                found += [Finding(kind, *each, entry.proxy, entry.uid) for each in sorted(entry.names)]
            continue
        kind = FindingKind.REMOVAL_PENDING
        found += [Finding(kind, *each, entry.proxy, entry.uid) for each in sorted(entry.retiring)]
        if entry.object["spec"].get("generation", 0) > survey.generations.get(entry.uid, math.inf):
            found.append(Finding(FindingKind.NEWER_RECORD, IN_CLUSTER, name, entry.proxy, entry.uid))
        if survey.policies and entry.hostname is not None and entry.proxy.namespace in survey.labels:
            place, labels = entry.proxy.namespace, survey.labels[entry.proxy.namespace]
            if refusal_of_policies(survey.policies, place, labels, entry.hostname, survey.apexes) is not None:
                kind, registry = FindingKind.HOSTNAME_NOT_ALLOWED, entry.object["spec"]["registry"]
                found.append(Finding(kind, registry, entry.hostname, entry.proxy, entry.uid))
        is_readable = published is not None and published.registry in survey.outside
        if published is not None and is_readable and (published.registry, entry.uid, published.hostname) not in outside:
            kind = FindingKind.PROXY_WITHOUT_RECORD
            found.append(Finding(kind, published.registry, published.hostname, entry.proxy, entry.uid))
    return found


def _of_outside(survey: Survey, entries: Mapping[str, LedgerEntry]) -> list[Finding]:
    found = []
    for registry, records in survey.outside.items():
        for record in records:
            entry = entries.get(record.uid)
            if entry is None or Name(registry, record.name) not in entry.names:
                is_live = record.uid in survey.proxies
                kind = FindingKind.WRONG_OWNER if is_live else FindingKind.RECORD_WITHOUT_PROXY
                proxy = survey.proxies.get(record.uid) or (entry.proxy if entry is not None else record.proxy)
                found.append(Finding(kind, registry, record.name, proxy, record.uid))
            elif (record.generation or 0) > survey.generations.get(record.uid, math.inf):
                kind = FindingKind.NEWER_RECORD
                found.append(Finding(kind, registry, record.name, survey.proxies.get(record.uid), record.uid))
    return found


async def outside_entries(
    registries: Registries,
) -> tuple[dict[str, tuple[OutsideRecord, ...]], dict[str, OperatorError]]:
    """The records of this operator by registry, and by registry the error where one could not be read."""
    read: dict[str, tuple[OutsideRecord, ...]] = {}
    failed: dict[str, OperatorError] = {}
    for name, registry in registries.outside.items():
        try:
            read[name] = await _all_of(registry)
        except OperatorError as error:
            failed[name] = error
        except TimeoutError:
            failed[name] = TransientError(f"its list did not go on for {CALL_TIMEOUT_S:g} s")
    return read, failed


async def _all_of(registry: Registry) -> tuple[OutsideRecord, ...]:
    """A registry's whole list; the timeout is for each record, so it bounds silence, not length."""
    entries, read = registry.entries(), []
    while True:
        with anyio.fail_after(CALL_TIMEOUT_S):
            try:
                read.append(await anext(entries))
            except StopAsyncIteration:
                return tuple(read)


async def survey(
    cluster: Cluster,
    outside: Mapping[str, Sequence[OutsideRecord]],
    *,
    namespace: str,
    namespaces: Sequence[str] = (),
    apexes: Sequence[str] = (),
) -> Survey:
    """Read the cluster; ``namespace`` is the operator's, ``namespaces`` are those that it serves, if not all.

    ``apexes`` are the zones of the registries.

    EnvoyProxies are listed last: a UID that was found in a record before and is not among them has been deleted, since
    UIDs are never reused. Raises the API server's errors.
    """
    entries = [_entry(each) async for each in _listed(cluster, PROXY_REGISTRATION, namespace, _OURS)]
    claims = [
        _identity(each) async for each in _listed(cluster, HOSTNAME_CLAIM, None, _OURS) if _is_of(each, namespace)
    ]
    policies = [each async for each in _listed(cluster, HOSTNAME_POLICY, None, None)]
    labels = await _labels(cluster, {each.proxy.namespace for each in entries}, namespaces)
    proxies: dict[str, Key] = {}
    generations: dict[str, int] = {}
    paused: dict[str, str | None] = {}
    for scope in namespaces or (None,):
        async for each in _listed(cluster, ENVOY_PROXY, scope, None):
            uid = each["metadata"]["uid"]
            proxies[uid], generations[uid] = key_of(each), each["metadata"]["generation"]
            if each["spec"].get("paused"):
                paused[uid] = (each["spec"].get("registration") or {}).get("hostname")
    return Survey(proxies, entries, claims, outside, namespaces, generations, labels, policies, apexes, paused)


async def _labels(cluster: Cluster, named: AbstractSet[str], served: Sequence[str]) -> dict[str, dict[str, str]]:
    """The labels of the ``named`` namespaces; only those of ``served`` can be read, if there are any."""
    if not served:
        found = [each async for each in _listed(cluster, NAMESPACE, None, None)]
    else:
        read = [await _namespace(cluster, name) for name in sorted(named & set(served))]
        found = [each for each in read if each is not None]
    return {
        each["metadata"]["name"]: each["metadata"].get("labels") or {}
        for each in found
        if each["metadata"]["name"] in named
    }


async def _namespace(cluster: Cluster, name: str) -> Object | None:
    """A namespace; ``None`` where it may not be read."""
    try:
        return await cluster.get(NAMESPACE, Key("", name))
    except ForbiddenError:
        return None


async def survey_of(
    store: Store, outside: Mapping[str, Sequence[OutsideRecord]], *, namespace: str, namespaces: Sequence[str] = ()
) -> Survey:
    """The same from the store of a running operator, without a request; other tasks run in between."""
    entries = [_entry(each) async for each in _stored(store, PROXY_REGISTRATION)]
    claims = [_identity(each) async for each in _stored(store, HOSTNAME_CLAIM) if _is_of(each, namespace)]
    proxies: dict[str, Key] = {}
    generations: dict[str, int] = {}
    async for each in _stored(store, ENVOY_PROXY):
        proxies[each["metadata"]["uid"]] = key_of(each)
        generations[each["metadata"]["uid"]] = each["metadata"]["generation"]
    return Survey(proxies, entries, claims, outside, namespaces, generations)


async def fix(cluster: Cluster, registries: Registries, finding: Finding, *, namespace: str) -> bool:
    """Remove what a deleted proxy has left, or repair what an older state of the cluster has left of a live one.

    Returns False where nothing was done. Proxy, entry, claim and record are read once more before: what has become
    alive since the survey, what is orphaned by policy and what is not ours stays. Raises the registry's and the API
    server's errors.
    """
    if finding.kind in _OF_LIVE:
        return await _fix_of_live(cluster, registries, finding, namespace=namespace)
    if finding.kind not in FIXABLE or await _is_live(cluster, finding):
        return False
    stored = await cluster.get(PROXY_REGISTRATION, Key(namespace, f"proxy-{finding.uid}"))
    entry = None if stored is None or owner_uid(stored) != finding.uid else LedgerEntry(stored)
    if finding.registry != IN_CLUSTER:
        return await _fix_outside(registries, finding, entry)
    if finding.kind is FindingKind.CLAIM_WITHOUT_PROXY:
        return entry is None and await _fix_claim(cluster, finding.uid, Key("", finding.name))
    return entry is not None and await _fix_entry(cluster, registries, entry)


async def _fix_of_live(cluster: Cluster, registries: Registries, finding: Finding, *, namespace: str) -> bool:
    """Repair a record of a proxy that exists: one that its entry does not name, or that is newer than the proxy."""
    proxy = None if finding.proxy is None else await cluster.get(ENVOY_PROXY, finding.proxy)
    stored = await cluster.get(PROXY_REGISTRATION, Key(namespace, f"proxy-{finding.uid}"))
    if proxy is None or stored is None or proxy["metadata"]["uid"] != finding.uid or owner_uid(stored) != finding.uid:
        return False
    entry, generation = LedgerEntry(stored), proxy["metadata"]["generation"]
    name = Name(finding.registry, finding.name)
    if finding.kind is FindingKind.WRONG_OWNER:
        declared = (proxy["spec"].get("registration") or {}).get("hostname")
        return finding.name != declared and await _fix_outside(registries, finding, entry)
    if finding.registry == IN_CLUSTER:
        # An entry never goes back, so it is made anew; what it named besides is found outside by the next audit.
        is_newer = stored["spec"]["generation"] > generation
        return is_newer and await _delete_version(cluster, PROXY_REGISTRATION, stored)
    if entry.published != name:
        return False
    record = replace(entry.record_of(name), generation=generation, is_held=True, replaces_newer=True)
    return (await registries.outside[finding.registry].register(record)).problem is None


async def _fix_outside(registries: Registries, finding: Finding, entry: LedgerEntry | None) -> bool:
    """Remove a record that no entry names. The registry itself checks whose it is."""
    if entry is not None and Name(finding.registry, finding.name) in entry.names:
        return False
    outcome = await registries.outside[finding.registry].deregister(finding.uid, finding.name)
    return outcome is not Outcome.SKIPPED


async def _fix_claim(cluster: Cluster, uid: str, key: Key) -> bool:
    """Delete a claim, if it still is that proxy's."""
    claim = await cluster.get(HOSTNAME_CLAIM, key)
    if claim is None or owner_uid(claim) != uid or released_at(claim) is not None:
        return False
    return await _delete_version(cluster, HOSTNAME_CLAIM, claim)


async def _delete_version(cluster: Cluster, kind: Kind, read: Object) -> bool:
    """Delete exactly the version that was read: an entry may name more by now, a claim may be another proxy's."""
    metadata = read["metadata"]
    version = metadata["resourceVersion"]
    return await cluster.delete(kind, key_of(read), uid=metadata["uid"], resource_version=version)


async def _fix_entry(cluster: Cluster, registries: Registries, entry: LedgerEntry) -> bool:
    """Remove the records that an entry names, then exactly this version of the entry, then its claims."""
    if entry.state is RecordState.ORPHANED:
        return False
    key, ours = key_of(entry.object), registries.installation
    former = frozenset() if ours is None else ours.former(entry.installations)
    for name in sorted(entry.names):
        unknown = registries.unknown(name.registry)
        if unknown is not None:
            raise TerminalError(unknown.reason, unknown.message, kind=PROXY_REGISTRATION, key=key)
        try:
            await registries.outside[name.registry].deregister(entry.uid, name.hostname, former=former)
        except TerminalError as error:
            if not was_never_published(error, entry, name):
                raise
    is_removed = await _delete_version(cluster, PROXY_REGISTRATION, entry.object)
    async for claim in _listed(cluster, HOSTNAME_CLAIM, None, _OURS):
        if owner_uid(claim) == entry.uid:
            await _delete_version(cluster, HOSTNAME_CLAIM, claim)
    return is_removed


def refusal(survey: Survey, installation: Installation | None) -> str | None:
    """Why nothing may be removed by this survey: its ledger is not this installation's. ``None`` where it is.

    With the wrong namespace of the operator, or another id, every record outside looks as if its proxy was gone. Pure.
    """
    if installation is None:
        return None
    others = [each for each in survey.entries if each.installations and str(installation) not in each.installations]
    if others:
        return (
            f"{len(others)} entries of the ledger, such as proxy-{others[0].uid}, are another installation's or "
            "cluster's: give the operator's own --namespace and --operator-id"
        )
    named = {(name, each.uid) for each in survey.entries for name in each.names}
    records = [(Name(registry, each.name), each.uid) for registry, found in survey.outside.items() for each in found]
    if records and named.isdisjoint(records):
        return (
            f"the ledger names none of the {len(records)} records of this installation outside, so it may be the wrong "
            "one: give the operator's own --namespace, or remove the records by hand"
        )
    return None


def orphans(survey: Survey) -> dict[str, tuple[LedgerEntry, ...]]:
    """The entries that ``deletionPolicy: Orphan`` keeps for proxies that are gone, by tenant. Pure."""
    kept = [each for each in survey.entries if each.state is RecordState.ORPHANED]
    audited = [each for each in kept if not survey.namespaces or each.proxy.namespace in survey.namespaces]
    tenants = sorted({survey.tenant_of(each.proxy.namespace) for each in audited})
    return {name: tuple(each for each in audited if survey.tenant_of(each.proxy.namespace) == name) for name in tenants}


def held_by_pause(survey: Survey) -> tuple[LedgerEntry, ...]:
    """The entries whose hostname stays as it was although its proxy declares another one, which is paused. Pure."""
    paused = [each for each in survey.entries if each.uid in survey.paused]
    return tuple(each for each in paused if each.hostname not in (None, survey.paused[each.uid]))


def resting(survey: Survey) -> tuple[Object, ...]:
    """The claims on hostnames that were given back and rest, sorted by name. Pure."""
    claims = [each for each in survey.claims if released_at(each) is not None]
    audited = [each for each in claims if not survey.namespaces or proxy_of(each).namespace in survey.namespaces]
    return tuple(sorted(audited, key=lambda each: str(each["metadata"]["name"])))


def as_json(
    survey: Survey, found: Sequence[Finding], left: Sequence[Finding], unread: Mapping[str, OperatorError]
) -> str:
    """The whole audit as one JSON object on one line; ``left`` are the findings that were not removed."""
    content = {
        "findings": [
            {
                "finding": each.kind.value,
                "registry": each.registry,
                "name": each.name,
                "proxy": None if each.proxy is None else str(each.proxy),
                "uid": each.uid,
                "removed": each not in left,
            }
            for each in found
        ],
        "orphans": {
            tenant: [
                {"entry": f"proxy-{each.uid}", "proxy": str(each.proxy), "hostname": each.hostname} for each in entries
            ]
            for tenant, entries in orphans(survey).items()
        },
        "resting": [
            {
                "hostname": each["metadata"]["name"],
                "proxy": str(proxy_of(each)),
                "released": each["spec"]["releasedAt"],
            }
            for each in resting(survey)
        ],
        "paused": [{"hostname": each.hostname, "proxy": str(each.proxy)} for each in held_by_pause(survey)],
        "unread": {name: str(error) for name, error in unread.items()},
        "proxies": len(survey.proxies),
        "records": len(survey.entries),
    }
    return json.dumps(content, sort_keys=True) + "\n"


def table(found: Sequence[Finding]) -> str:
    """The findings as text: a header, then one line each, in aligned columns."""
    rows = [("FINDING", "REGISTRY", "NAME", "PROXY", "UID")]
    rows += [(each.kind.value, each.registry, each.name, str(each.proxy or "-"), each.uid) for each in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


async def _is_live(cluster: Cluster, finding: Finding) -> bool:
    """Whether the proxy of a finding exists now. Where its name is not known, all proxies are listed."""
    if finding.proxy is not None:
        live = await cluster.get(ENVOY_PROXY, finding.proxy)
        return live is not None and bool(live["metadata"]["uid"] == finding.uid)
    uids = [each["metadata"]["uid"] async for each in _listed(cluster, ENVOY_PROXY, None, None)]
    return finding.uid in uids


async def _listed(cluster: Cluster, kind: Kind, namespace: str | None, labels: str | None) -> AsyncIterator[Object]:
    async with aclosing(cluster.list(kind, namespace=namespace, labels=labels)) as pages:
        async for page in pages:
            for objects, _ in page.batches(_BATCH_BYTES):
                for each in objects:
                    yield each


async def _stored(store: Store, kind: Kind) -> AsyncIterator[Object]:
    turns = Turns()
    for key in store.keys(kind):
        obj = store.get(kind, key)
        if obj is not None:
            yield obj
        await turns.end_if_due()


def _entry(registration: Object) -> LedgerEntry:
    """The entry of a ProxyRegistration without what no audit reads, most of all its managedFields."""
    spec = {name: value for name, value in registration["spec"].items() if name not in ("address", "ports")}
    return LedgerEntry({"spec": spec})


def _identity(claim: Object) -> Object:
    """A HostnameClaim's name, the proxy that it is for, and when it was given back."""
    spec = {name: claim["spec"][name] for name in ("proxy", "releasedAt") if name in claim["spec"]}
    return {"metadata": {"name": claim["metadata"]["name"]}, "spec": spec}


def _is_of(claim: Object, installation: str) -> bool:
    """Whether the operator in this namespace took a HostnameClaim; others of the cluster see to theirs."""
    return bool(claim["spec"].get("installation") == installation)
