"""Both sides held against each other: the proxies that there are, and what is known of proxies here and outside.

Where everything works there is nothing to find. What is found was left by somebody's hand (a finalizer stripped off, a
record deleted), by a lost cluster, or is still being worked on; a finding that stays is none of the last.

``findings`` is pure. ``survey`` reads a cluster and its registries, ``survey_of`` what a running operator knows. What
belongs to a proxy that lives is the operator's alone: ``fix`` removes only what provably was a dead one's.
"""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import anyio.lowlevel

from operator_app.api.kinds import (
    ENVOY_PROXY,
    FIELD_MANAGER,
    HOSTNAME_CLAIM,
    LABEL_MANAGED_BY,
    PROXY_REGISTRATION,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.api.records import RecordState
from operator_app.errors import OperatorError, TerminalError, TransientError
from operator_app.kube.client import Cluster
from operator_app.kube.store import Store
from operator_app.registration.claims import holder_of
from operator_app.registration.ledger import IN_CLUSTER, LedgerEntry, Name, proxy_of
from operator_app.registration.registrar import LONGEST_CALL_S, Registries
from operator_app.registration.registry import OutsideRecord, Registry

_OURS: Final = f"{LABEL_MANAGED_BY}={FIELD_MANAGER}"
_BATCH: Final = 200
"""Objects that are looked at before other tasks get their turn."""


class FindingKind(StrEnum):
    """What can be wrong between the two sides."""

    PROXY_WITHOUT_RECORD = "proxy-without-record"
    RECORD_WITHOUT_PROXY = "record-without-proxy"
    WRONG_OWNER = "wrong-owner"
    """A record of a living proxy under a name that is not its own."""
    CLAIM_WITHOUT_PROXY = "claim-without-proxy"
    REMOVAL_PENDING = "removal-pending"
    """The proxy was let go while a registry was down; the operator goes on trying."""


FIXABLE: Final = frozenset(
    {FindingKind.RECORD_WITHOUT_PROXY, FindingKind.CLAIM_WITHOUT_PROXY, FindingKind.REMOVAL_PENDING}
)
"""Findings about proxies that are gone. The others are for the operator or for people."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One discrepancy. ``name`` is a hostname, or the name of an object in the operator's namespace."""

    kind: FindingKind
    registry: str
    name: str
    proxy: Key
    uid: str


@dataclass(frozen=True, slots=True)
class Survey:
    """What there is. ``proxies`` are the living, by UID. A registry that could not be read is missing in ``outside``.

    Nothing is said about proxies outside of ``namespaces``; without any, all are known.
    """

    proxies: Mapping[str, Key]
    entries: Sequence[LedgerEntry]
    claims: Sequence[Object]
    outside: Mapping[str, Sequence[OutsideRecord]]
    namespaces: Sequence[str] = ()


def findings(survey: Survey) -> tuple[Finding, ...]:
    """Everything that does not fit, sorted. Pure."""
    entries = {each.uid: each for each in survey.entries}
    found = [*_of_entries(survey), *_of_outside(survey, entries)]
    found += [
        Finding(FindingKind.PROXY_WITHOUT_RECORD, IN_CLUSTER, f"proxy-{uid}", proxy, uid)
        for uid, proxy in survey.proxies.items()
        if uid not in entries
    ]
    for claim in survey.claims:
        uid = holder_of(claim)
        # A dead proxy that has an entry has its claims by right, until the entry goes.
        if uid not in survey.proxies and uid not in entries:
            name = claim["metadata"]["name"]
            found.append(Finding(FindingKind.CLAIM_WITHOUT_PROXY, IN_CLUSTER, name, proxy_of(claim), uid))
    return tuple(sorted(each for each in found if not survey.namespaces or each.proxy.namespace in survey.namespaces))


def _of_entries(survey: Survey) -> list[Finding]:
    found = []
    held = {(registry, each.uid, each.name) for registry, records in survey.outside.items() for each in records}
    for entry in survey.entries:
        name, published = f"proxy-{entry.uid}", entry.published
        if entry.uid not in survey.proxies:
            if entry.state is RecordState.ABANDONED:
                found.append(Finding(FindingKind.REMOVAL_PENDING, IN_CLUSTER, name, entry.proxy, entry.uid))
            elif entry.state is RecordState.REGISTERED:
                found.append(Finding(FindingKind.RECORD_WITHOUT_PROXY, IN_CLUSTER, name, entry.proxy, entry.uid))
            continue
        is_readable = published is not None and published.registry in survey.outside
        if published is not None and is_readable and (published.registry, entry.uid, published.hostname) not in held:
            kind = FindingKind.PROXY_WITHOUT_RECORD
            found.append(Finding(kind, published.registry, published.hostname, entry.proxy, entry.uid))
    return found


def _of_outside(survey: Survey, entries: Mapping[str, LedgerEntry]) -> list[Finding]:
    found = []
    for registry, records in survey.outside.items():
        for record in records:
            entry = entries.get(record.uid)
            if entry is None or Name(registry, record.name) not in entry.names:
                is_alive = record.uid in survey.proxies
                kind = FindingKind.WRONG_OWNER if is_alive else FindingKind.RECORD_WITHOUT_PROXY
                found.append(Finding(kind, registry, record.name, record.proxy, record.uid))
    return found


async def outside_entries(
    registries: Registries,
) -> tuple[dict[str, tuple[OutsideRecord, ...]], dict[str, OperatorError]]:
    """Every record that our registries hold of ours, and why a registry could not be read."""
    read: dict[str, tuple[OutsideRecord, ...]] = {}
    failed: dict[str, OperatorError] = {}
    for name, registry in registries.outside.items():
        try:
            read[name] = await _all_of(registry)
        except OperatorError as error:
            failed[name] = error
        except TimeoutError:
            failed[name] = TransientError(f"its list did not go on for {LONGEST_CALL_S:g} s")
    return read, failed


async def _all_of(registry: Registry) -> tuple[OutsideRecord, ...]:
    """All of a registry's list, however long, as long as it goes on."""
    entries, read = registry.entries(), []
    while True:
        with anyio.fail_after(LONGEST_CALL_S):
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
) -> Survey:
    """Read the cluster; ``namespace`` is the operator's, ``namespaces`` are those that it serves, if not all.

    The living are listed last: whoever is not among them then, and has a record that was seen before, is dead. UIDs are
    never used again. Raises the cluster's errors.
    """
    entries = [LedgerEntry(each) for each in await _listed(cluster, PROXY_REGISTRATION, namespace, _OURS)]
    claims = await _listed(cluster, HOSTNAME_CLAIM, namespace, _OURS)
    scopes = namespaces or (None,)
    living = [each for scope in scopes for each in await _listed(cluster, ENVOY_PROXY, scope, None)]
    proxies = {each["metadata"]["uid"]: key_of(each) for each in living}
    return Survey(proxies, entries, claims, outside, namespaces)


async def survey_of(
    store: Store, outside: Mapping[str, Sequence[OutsideRecord]], *, namespaces: Sequence[str] = ()
) -> Survey:
    """The same from what a running operator knows, without a request."""
    entries = [LedgerEntry(each) for each in await _known(store, PROXY_REGISTRATION)]
    claims = await _known(store, HOSTNAME_CLAIM)
    proxies = {each["metadata"]["uid"]: key_of(each) for each in await _known(store, ENVOY_PROXY)}
    return Survey(proxies, entries, claims, outside, namespaces)


async def fix(cluster: Cluster, registries: Registries, finding: Finding, *, namespace: str) -> bool:
    """Remove what was a dead proxy's. Returns False where nothing was removed: it is not ours, or not a dead one's.

    The API server is asked once more whether the proxy lives. Raises the registry's and the API server's errors.
    """
    live = await cluster.get(ENVOY_PROXY, finding.proxy)
    if finding.kind not in FIXABLE or (live is not None and live["metadata"]["uid"] == finding.uid):
        return False
    if finding.registry != IN_CLUSTER:
        await registries.outside[finding.registry].deregister(finding.uid, finding.name)
        return True
    key = Key(namespace, finding.name)
    kind = HOSTNAME_CLAIM if finding.kind is FindingKind.CLAIM_WITHOUT_PROXY else PROXY_REGISTRATION
    found = await cluster.get(kind, key)
    if found is None or holder_of(found) != finding.uid:
        return False
    if kind == PROXY_REGISTRATION:
        for name in sorted(LedgerEntry(found).names):
            unknown = registries.unknown(name.registry)
            if unknown is not None:
                raise TerminalError(unknown.reason, unknown.message, kind=kind, key=key)
            await registries.outside[name.registry].deregister(finding.uid, name.hostname)
    is_removed = await cluster.delete(kind, key, uid=found["metadata"]["uid"])
    if kind == PROXY_REGISTRATION:
        for claim in await _listed(cluster, HOSTNAME_CLAIM, namespace, _OURS):
            if holder_of(claim) == finding.uid:
                await cluster.delete(HOSTNAME_CLAIM, key_of(claim), uid=claim["metadata"]["uid"])
    return is_removed


def table(found: Sequence[Finding]) -> str:
    """The findings for people, one a line, in columns."""
    rows = [("FINDING", "REGISTRY", "NAME", "PROXY", "UID")]
    rows += [(each.kind.value, each.registry, each.name, str(each.proxy), each.uid) for each in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


async def _listed(cluster: Cluster, kind: Kind, namespace: str | None, labels: str | None) -> list[Object]:
    async with aclosing(cluster.list(kind, namespace=namespace, labels=labels)) as pages:
        return [each async for page in pages for each in page.items]


async def _known(store: Store, kind: Kind) -> list[Object]:
    known = []
    for number, key in enumerate(store.keys(kind)):
        obj = store.get(kind, key)
        if obj is not None:
            known.append(obj)
        if number % _BATCH == 0:
            await anyio.lowlevel.checkpoint()
    return known
