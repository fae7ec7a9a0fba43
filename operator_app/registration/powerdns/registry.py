"""The DNS registry: an address record and its ownership record for each hostname, kept in zones of a PowerDNS server.

Two records make a pair: A, AAAA or CNAME at the hostname, and a TXT at ``_edge-owner.<hostname>`` that says who made
it (``dns.Ownership``). Only the TXT makes a name ours. Ports are not told: an address record has none.

Guarantees

* *A pair appears and goes as a whole.* Both records are in one PATCH, which the server makes in one transaction.
* *A name is claimed only while it is free*, and the server itself checks that, in the transaction of the claim: see
  :func:`_only_if_free`. ``docs/adr/0013-powerdns-without-compare-and-set.md`` says what remains, on which databases.
* *A name without our TXT is never written*, whatever is at it; at a zone's apex, where SOA and NS are always there, it
  is whatever tells an address. Other types beside our address (MX, TXT, ...) are never written either.
* *Nothing rests on memory.* Each call reads first, so one that was cut off or whose answer was lost is completed by
  the next; each write is confirmed by a read after it.

Requests for one name, independent of how many others its zone has:

=====================================  ====  =====  ======
call                                   read  write  search
=====================================  ====  =====  ======
``observe``; ``register``, nothing new    2      0       0
``register``, first time                  4      1       1
``register``, repair or new generation    4      1       0
``deregister``                            4      1       0
``deregister``, nothing there             2      0       0
=====================================  ====  =====  ======

``entries`` lists each configured zone as a whole, once.
"""

import re
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import httpx
import structlog

from operator_app.errors import ConfigurationError, ConflictError, InvalidError, TerminalError
from operator_app.registration.powerdns.client import ApiKey, Content, Delete, Edit, PowerDnsApi, RecordSet, Replace
from operator_app.registration.powerdns.dns import (
    OWNER_LABEL,
    Address,
    AddressType,
    Ownership,
    Place,
    address_at,
    holder,
    place_of,
)
from operator_app.registration.registry import Comparison, OutsideRecord, Record, Registration
from operator_app.results import Outcome, Problem
from operator_app.settings import Settings

log = structlog.get_logger(__name__)

MAX_CONNECTIONS: Final = 8
"""Requests at the same time. The server gives each a thread; more only waits inside the server instead of here."""

_APEX_ADDRESSES: Final = frozenset({"A", "AAAA", "ALIAS", "LUA"})
"""What tells an address at a zone's apex; ALIAS and LUA are PowerDNS's own types for that."""

_PROBE_TYPE: Final = "TYPE65280"
"""The first of the types for private use (RFC 6895 section 3.1): in nobody's zone."""

_PROBE_CONTENT: Final = r"\# 1 00"
"""One octet in the notation for unknown types (RFC 3597 section 5)."""

_PROBE_TARGET: Final = "probe.invalid."


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one look found: the record sets at the hostname and at the owner name, without empty ones."""

    at_hostname: tuple[RecordSet, ...]
    at_owner_name: tuple[RecordSet, ...]

    @property
    def addresses(self) -> tuple[RecordSet, ...]:
        return tuple(each for each in self.at_hostname if each.type in set(AddressType))

    @property
    def claims(self) -> RecordSet | None:
        return next((each for each in self.at_owner_name if each.type == "TXT"), None)

    @property
    def holder(self) -> Ownership | None:
        return None if self.claims is None else holder([each.content for each in self.claims.records])

    def is_free(self, place: Place) -> bool:
        """Whether nobody has anything at either name."""
        return not self.at_owner_name and not _occupied(place, {each.type for each in self.at_hostname})


class PowerDnsRegistry:
    """See :class:`operator_app.registration.registry.Registry`. ``operator`` tells operators that share a zone apart.

    Raises ``TerminalError`` also for what is wrong with one record: ``ZoneNotConfigured``, ``HostnameTooLong``,
    ``AddressUnusable``.
    """

    def __init__(self, api: PowerDnsApi, *, operator: str, zones: Sequence[str], default_ttl_s: int) -> None:
        self._api = api
        self._operator = operator
        self._zones = tuple(zones)
        self._default_ttl_s = default_ttl_s

    async def observe(self, record: Record) -> Comparison:
        """See :class:`operator_app.registration.registry.Registry`."""
        wanted = self._wanted(record)
        return wanted.comparison(await self._look(wanted.place))

    async def register(self, record: Record) -> Registration:
        """See :class:`operator_app.registration.registry.Registry`."""
        wanted = self._wanted(record)
        before = wanted.comparison(await self._look(wanted.place))
        if before is Comparison.MATCHING:
            return Registration(Outcome.UNCHANGED)
        if before is Comparison.ABSENT and await self._is_parked(wanted.place):
            before = Comparison.FOREIGN
        if before in (Comparison.FOREIGN, Comparison.NEWER):
            return _refusal(before, wanted.place.hostname)
        return await self._write(wanted, before)

    async def deregister(self, uid: str, hostname: str) -> Outcome:
        """See :class:`operator_app.registration.registry.Registry`.

        A hostname that no configured zone can have was never registered under these settings: there is nothing to
        remove, and a tenant's slip of the pen must not hold a proxy for ever. So take a zone out of the settings only
        when no hostname is left in it. A zone that the server does not know (404) proves nothing, and raises.
        """
        try:
            place = place_of(hostname, self._zones)
        except TerminalError as error:
            log.warning("hostname_not_ours_to_remove", hostname=hostname, uid=uid, reason=error.reason)
            return Outcome.UNCHANGED
        seen = await self._look(place)
        if seen.is_free(place):
            return Outcome.UNCHANGED
        if not self._is_held(seen, uid):
            return Outcome.SKIPPED
        addresses = [Delete(place.hostname, each.value) for each in AddressType]
        await self._api.change(place.zone, [*addresses, Delete(place.owner_name, "TXT")])
        if self._is_held(await self._look(place), uid):
            raise ConflictError(f"the records of {hostname} came back after their removal")
        return Outcome.DELETED

    async def entries(self) -> AsyncGenerator[OutsideRecord]:
        """See :class:`operator_app.registration.registry.Registry`."""
        for zone in self._zones:
            for each in await self._api.all_record_sets(zone):
                label, _, hostname = each.name.lower().removesuffix(".").partition(".")
                owner = holder([record.content for record in each.records])
                if each.type == "TXT" and label == OWNER_LABEL and owner and owner.operator == self._operator:
                    yield OutsideRecord(owner.uid, owner.proxy, hostname)

    async def _write(self, wanted: "_Wanted", before: Comparison) -> Registration:
        refused: InvalidError | None = None
        try:
            edits = wanted.claim() if before is Comparison.ABSENT else wanted.correction()
            await self._api.change(wanted.place.zone, edits)
        except InvalidError as error:
            # The name may have been taken since the look; the next look tells that from a record that is refused.
            refused = error
        after = wanted.comparison(await self._look(wanted.place))
        match after:
            case Comparison.MATCHING if refused is not None:
                return Registration(Outcome.UNCHANGED)
            case Comparison.MATCHING:
                return Registration(Outcome.CREATED if before is Comparison.ABSENT else Outcome.CONFIGURED)
            case Comparison.FOREIGN | Comparison.NEWER:
                return _refusal(after, wanted.place.hostname)
            case _ if refused is not None:
                raise refused
            case _:
                raise ConflictError(f"somebody else changed the records of {wanted.place.hostname} at the same time")

    async def _look(self, place: Place) -> _Seen:
        at_hostname = await self._api.record_sets(place.zone, place.hostname)
        return _Seen(at_hostname, await self._api.record_sets(place.zone, place.owner_name))

    async def _is_parked(self, place: Place) -> bool:
        """Whether somebody has disabled records at a name that looks free: a look does not show them."""
        return _occupied(place, await self._api.types_at(place.hostname))

    def _is_held(self, seen: _Seen, uid: str) -> bool:
        owner = seen.holder
        return owner is not None and (owner.operator, owner.uid) == (self._operator, uid)

    def _wanted(self, record: Record) -> "_Wanted":
        place = place_of(record.hostname or "", self._zones)
        ownership = Ownership(self._operator, record.uid, record.proxy, record.generation)
        ttl_s = self._default_ttl_s if record.ttl_s is None else record.ttl_s
        return _Wanted(place, address_at(place, record.address), ownership, ttl_s)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The pair that a record asks for."""

    place: Place
    address: Address
    ownership: Ownership
    ttl_s: int

    def comparison(self, seen: _Seen) -> Comparison:
        """What ``seen`` is to this pair."""
        if seen.is_free(self.place):
            return Comparison.ABSENT
        owner = seen.holder
        if owner is None or (owner.operator, owner.uid) != (self.ownership.operator, self.ownership.uid):
            return Comparison.FOREIGN
        if owner.generation > self.ownership.generation:
            return Comparison.NEWER
        return Comparison.MATCHING if self._holds(seen) else Comparison.DIFFERENT

    def claim(self) -> list[Edit]:
        """Write the pair, or nothing where either name is not free."""
        hostname_is_alias = self.address.type is AddressType.CNAME
        guard = [] if self.place.is_apex else _only_if_free(self.place.hostname, is_alias_next=hostname_is_alias)
        return [*guard, *_only_if_free(self.place.owner_name), *self._pair()]

    def correction(self) -> list[Edit]:
        """Write the pair over what is there. What must go goes first: the server checks each edit as it comes."""
        others = [each for each in AddressType if each is not self.address.type]
        return [*(Delete(self.place.hostname, each.value) for each in others), *self._pair()]

    def _pair(self) -> list[Edit]:
        return [
            Replace(self.place.owner_name, "TXT", self.ttl_s, (self.ownership.content,)),
            Replace(self.place.hostname, self.address.type.value, self.ttl_s, (self.address.content,)),
        ]

    def _holds(self, seen: _Seen) -> bool:
        match (seen.claims, seen.addresses):
            case (
                RecordSet(ttl=claim_ttl_s, records=(Content(claim, disabled=False),)),
                (RecordSet(type=type_, ttl=ttl_s, records=(Content(told, disabled=False),)),),
            ):
                holds_ttl = claim_ttl_s == ttl_s == self.ttl_s
                observed_current_generation = type_ == self.address.type and self.address.is_told_by(told)
                return holds_ttl and observed_current_generation and claim == self.ownership.content
            case _:
                return False


def _occupied(place: Place, types: "set[str] | frozenset[str]") -> bool:
    """Whether records of these types at a hostname without our TXT make it somebody else's."""
    return bool(types & _APEX_ADDRESSES if place.is_apex else types)


def _only_if_free(name: str, *, is_alias_next: bool = False) -> list[Edit]:
    """Edits that change nothing, and make the server refuse the whole change (422) where ``name`` has any record.

    The API has no precondition, but it has one rule: no CNAME beside other records. A record of a type that nobody has
    is refused where a CNAME is; a CNAME is refused where anything else is; both go again in the same transaction. A
    CNAME that comes next is its own second half (and the server takes one REPLACE for a name and type, not two).
    """
    probe: list[Edit] = [Replace(name, _PROBE_TYPE, 0, (_PROBE_CONTENT,)), Delete(name, _PROBE_TYPE)]
    if is_alias_next:
        return probe
    return [*probe, Replace(name, "CNAME", 0, (_PROBE_TARGET,)), Delete(name, "CNAME")]


def _refusal(comparison: Comparison, hostname: str) -> Registration:
    """Tells nothing of whoever has the name."""
    if comparison is Comparison.NEWER:
        sentence = f"{hostname} is registered from a newer generation already"
        return Registration(Outcome.SKIPPED, Problem("NewerRecord", sentence))
    return Registration(
        Outcome.SKIPPED,
        Problem("HostnameTaken", f"{hostname} is not free", needs_user_action=True, ends_with_event=True),
    )


@asynccontextmanager
async def connect(settings: Settings) -> AsyncGenerator[PowerDnsRegistry]:
    """The registry that ``settings`` describe, named ``powerdns`` among the entry points ``operator_app.registries``.

    Opens no connection yet, so that the operator starts while the server is down. The environment's proxies are not
    used: the API key goes to ``powerdns_url`` and nowhere else. Raises ``ConfigurationError`` for what can't work.
    """
    url, zones, key_file = settings.powerdns_url, settings.powerdns_zones, settings.powerdns_api_key_file
    if url is None or not zones or key_file is None:
        raise ConfigurationError("the powerdns registry needs powerdns_url, powerdns_zones and powerdns_api_key_file")
    if re.fullmatch(r"https?://[^/?#@\s]+/?", url) is None:
        raise ConfigurationError("powerdns_url must be the server alone, for example https://dns.example.com:8081")
    client = httpx.AsyncClient(
        base_url=url,
        auth=ApiKey(key_file),
        headers={"Accept": "application/json"},
        timeout=settings.powerdns_timeout_s,
        limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
        trust_env=False,
        verify=_tls(settings) if url.startswith("https:") else False,
    )
    async with client:
        api = PowerDnsApi(client, server_id=settings.powerdns_server_id, timeout_s=settings.powerdns_timeout_s)
        yield PowerDnsRegistry(
            api,
            operator=settings.operator_id,
            zones=zones,
            default_ttl_s=settings.powerdns_default_ttl_s,
        )


def _tls(settings: Settings) -> ssl.SSLContext:
    file = settings.powerdns_ca_file
    if file is None:
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=str(file))
    except (OSError, ssl.SSLError):
        raise ConfigurationError(f"powerdns_ca_file ({file}) can't be read as PEM certificates") from None
