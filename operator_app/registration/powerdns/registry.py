"""The DNS registry: an address record and an ownership record for each hostname, in zones of a PowerDNS server.

Two records make a pair: A, AAAA or CNAME at the hostname, and a TXT at ``_edge-owner.<hostname>`` that says which
cluster and installation wrote it, for which proxy (``dns.Ownership``). The TXT alone decides who owns the name. Ports
are not published: an address record has none.

Guarantees

* *A pair is created and removed as a whole.* Both records are in one PATCH, which the server makes in one transaction.
* *A pair is created only where the name is free.* The server itself checks that, in the transaction of the create: see
  :func:`_only_if_free`. ``docs/adr/0013-powerdns-without-compare-and-set.md`` lists the exceptions by database.
* *A name without our TXT is never written* if it has any record; at a zone's apex, which always has SOA and NS, if it
  has an address record. Other types beside our address (MX, TXT, ...) are never written either.
* *No state is kept in memory.* Each call reads first, so the next call completes one that was cancelled or whose answer
  was lost; each write is confirmed by a read after it.

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

For each name between the hostname and its zone, ``observe`` and ``register`` read once more, and a first registration
searches once more: where such a name is delegated, no resolver would find the hostname. ``entries`` lists each
configured zone as a whole, once.
"""

import re
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import httpx

from operator_app.errors import ConfigurationError, ConflictError, InvalidError
from operator_app.registration.dns import CUT_TYPES, AddressType, Place
from operator_app.registration.identity import Installation
from operator_app.registration.pairs import (
    NOT_OURS,
    LivePair,
    Publisher,
    WantedPair,
    cut_message,
    is_occupied,
)
from operator_app.registration.powerdns.client import ApiKey, Delete, Edit, PowerDnsApi, Replace
from operator_app.registration.registry import Comparison, OutsideRecord, Record, Registration
from operator_app.results import Outcome
from operator_app.settings import Settings

MAX_CONNECTIONS: Final = 8
"""Upper bound on concurrent requests. The server has a thread for each; more of them would wait inside the server."""

_PROBE_TYPE: Final = "TYPE65280"
"""The first of the types for private use (RFC 6895 section 3.1): no zone has such records."""

_PROBE_CONTENT: Final = r"\# 1 00"
"""One octet in the notation for unknown types (RFC 3597 section 5)."""

_PROBE_TARGET: Final = "probe.invalid."


class PowerDnsRegistry:
    """See :class:`operator_app.registration.registry.Registry`. ``publisher`` says in whose name, and where.

    Raises ``TerminalError`` also for a record that can't be published: ``ZoneNotConfigured``, ``HostnameTooLong``,
    ``AddressUnusable``, ``BelowZoneCut``.
    """

    def __init__(self, api: PowerDnsApi, publisher: Publisher) -> None:
        self._api = api
        self._publisher = publisher

    async def observe(self, record: Record) -> Comparison:
        """See :class:`operator_app.registration.registry.Registry`."""
        wanted = self._publisher.wanted(record)
        live = await self._read(wanted.place)
        comparison = wanted.comparison(live)
        if comparison is Comparison.MATCHING and await self._cut(wanted.place, live) is not None:
            return Comparison.DIFFERENT
        return comparison

    async def register(self, record: Record) -> Registration:
        """See :class:`operator_app.registration.registry.Registry`."""
        wanted = self._publisher.wanted(record)
        live = await self._read(wanted.place)
        before = wanted.comparison(live)
        cut = await self._cut(wanted.place, live)
        if cut is None and before is Comparison.MATCHING:
            return Registration(Outcome.UNCHANGED)
        if cut is None and before is Comparison.ABSENT:
            cut, is_occupied = await self._search(wanted.place)
            before = Comparison.FOREIGN if is_occupied else before
        if cut is not None:
            raise InvalidError("BelowZoneCut", cut_message(wanted.place, cut, "OPERATOR_APP_POWERDNS_ZONES"))
        if before in NOT_OURS:
            await self._yield(wanted, live, is_first_to_stay=False)
            return wanted.refusal(before, live)
        return await self._write(wanted, before)

    async def deregister(self, uid: str, hostname: str, *, former: frozenset[Installation] = frozenset()) -> Outcome:
        """See :class:`operator_app.registration.registry.Registry`.

        Raises ``TerminalError`` (``ZoneNotConfigured``) for a hostname outside of all configured zones: whether it was
        published under earlier settings is for the caller to know. A zone that the server does not know (404) proves
        nothing either, and raises.
        """
        place = self._publisher.place(hostname)
        live = await self._read(place)
        if live.is_free(place):
            return Outcome.UNCHANGED
        installations = former | {self._publisher.installation}
        owned = live.owned(uid, installations)
        if not owned:
            return Outcome.SKIPPED
        if len(owned) < len(live.owners):
            # Whose the addresses are is for the others to say: each of them corrects them.
            others = tuple(each.content for each in live.owners if each not in owned)
            edits: list[Edit] = [Replace(place.owner_name, "TXT", live.ttl_s, others)]
        else:
            addresses = [Delete(place.hostname, each.value) for each in AddressType]
            edits = [*addresses, Delete(place.owner_name, "TXT")]
        await self._api.change(place.zone, edits)
        if (await self._read(place)).owned(uid, installations):
            raise ConflictError(f"the records of {hostname} came back after their removal")
        return Outcome.DELETED

    async def entries(self) -> AsyncGenerator[OutsideRecord]:
        """See :class:`operator_app.registration.registry.Registry`."""
        for zone in self._publisher.zones:
            for each in self._publisher.own(await self._api.all_record_sets(zone)):
                yield each

    async def _write(self, wanted: WantedPair, before: Comparison) -> Registration:
        refused: InvalidError | None = None
        try:
            edits = _creation(wanted) if before is Comparison.ABSENT else _correction(wanted)
            await self._api.change(wanted.place.zone, edits)
        except InvalidError as error:
            # Either the name was taken since the read, or the record itself is refused: the next read tells which.
            refused = error
        live = await self._read(wanted.place)
        match after := wanted.comparison(live):
            case Comparison.MATCHING if refused is not None:
                return Registration(Outcome.UNCHANGED)
            case Comparison.MATCHING:
                return Registration(Outcome.CREATED if before is Comparison.ABSENT else Outcome.CONFIGURED)
            case Comparison.FOREIGN | Comparison.NEWER | Comparison.UNOWNED:
                await self._yield(wanted, live, is_first_to_stay=True)
                return wanted.refusal(after, live)
            case _ if refused is not None:
                raise refused
            case _:
                raise ConflictError(f"somebody else changed the records of {wanted.place.hostname} at the same time")

    async def _yield(self, wanted: WantedPair, live: LivePair, *, is_first_to_stay: bool) -> None:
        """Take back our half of a hostname that another owner has as well, because the database let both pass.

        Only the last of the two to be stored is certain to see both, so whoever does and was never confirmed gives way:
        no two are ever confirmed, whatever the database stores in between. With ``is_first_to_stay`` the lowest of the
        owners stays until its next try, so that one of several that see each other is left. Raises ``ConflictError``,
        so that the next try finds out who has it in the end.
        """
        edits = _withdrawal(wanted, live)
        if edits:
            if not is_first_to_stay or min(live.owners) not in wanted.owned(live):
                await self._api.change(wanted.place.zone, edits)
            raise ConflictError(f"somebody else registered {wanted.place.hostname} at the same time")

    async def _read(self, place: Place) -> LivePair:
        at_hostname = await self._api.record_sets(place.zone, place.hostname)
        return LivePair(at_hostname, await self._api.record_sets(place.zone, place.owner_name))

    async def _cut(self, place: Place, live: LivePair) -> str | None:
        """The name below the apex that is delegated (NS) or renamed (DNAME), so that the hostname is not served."""
        for name in place.enclosing:
            if any(each.type in CUT_TYPES for each in await self._api.record_sets(place.zone, name)):
                return name
        is_delegated = not place.is_apex and any(each.type == "NS" for each in live.at_hostname)
        return place.hostname if is_delegated else None

    async def _search(self, place: Place) -> tuple[str | None, bool]:
        """What only a search shows of a name that looks free: a zone of its own on the server, and disabled records."""
        for name in () if place.is_apex else place.enclosing:
            if "SOA" in await self._api.types_at(name):
                return name, False
        types = await self._api.types_at(place.hostname)
        cut = place.hostname if "SOA" in types and not place.is_apex else None
        return cut, is_occupied(place, types)


def _creation(wanted: WantedPair) -> list[Edit]:
    """Edits that write the pair, or nothing where either name is not free."""
    place = wanted.place
    is_alias = AddressType.CNAME in wanted.contents
    guard = [] if place.is_apex else _only_if_free(place.hostname, is_alias_next=is_alias)
    return [*guard, *_only_if_free(place.owner_name), *_pair(wanted)]


def _correction(wanted: WantedPair) -> list[Edit]:
    """Edits that replace the live pair. Removals come first: the server checks each edit in turn."""
    others = [each for each in AddressType if each not in wanted.contents]
    return [*(Delete(wanted.place.hostname, each.value) for each in others), *_pair(wanted)]


def _withdrawal(wanted: WantedPair, live: LivePair) -> list[Edit]:
    """Edits that leave the other owners what is theirs; none where we are not one of several owners.

    What the server would refuse to store again stays as it is, our address in it: the owner that is left corrects it.
    Otherwise owners of three aliases, none of which may go because two would be left, would wait for each other.
    """
    owned = wanted.owned(live)
    if wanted.is_held or not owned or len(owned) == len(live.owners):
        return []
    others = tuple(each.content for each in live.owners if each not in owned)
    edits: list[Edit] = [Replace(wanted.place.owner_name, "TXT", live.ttl_s, others)]
    is_beside_alias = len(live.addresses) > 1 and any(each.type == AddressType.CNAME for each in live.addresses)
    for stored in live.addresses:
        left = wanted.left_without_us(stored)
        is_refused = is_beside_alias or (stored.type == AddressType.CNAME and len(left) > 1)
        if not left:
            edits.insert(0, Delete(wanted.place.hostname, stored.type))
        elif len(left) < len(stored.records) and not is_refused:
            edits.append(Replace(wanted.place.hostname, stored.type, stored.ttl, left))
    return edits


def _pair(wanted: WantedPair) -> list[Edit]:
    place, contents = wanted.place, wanted.contents
    return [
        Replace(place.owner_name, "TXT", wanted.ttl_s, (wanted.ownership.content,)),
        *(Replace(place.hostname, each.value, wanted.ttl_s, contents[each]) for each in contents),
    ]


def _only_if_free(name: str, *, is_alias_next: bool = False) -> list[Edit]:
    """Edits that change nothing, and make the server refuse the whole change (422) where ``name`` has any record.

    The API has no preconditions, but one rule serves as one: no CNAME beside other records. A record of an unused type
    is refused where there is a CNAME, and a CNAME is refused where there is anything else; both are deleted again in
    the same transaction. Where the pair itself is a CNAME, its REPLACE is the second half: the server accepts only one
    REPLACE for each name and type.
    """
    probe: list[Edit] = [Replace(name, _PROBE_TYPE, 0, (_PROBE_CONTENT,)), Delete(name, _PROBE_TYPE)]
    if is_alias_next:
        return probe
    return [*probe, Replace(name, "CNAME", 0, (_PROBE_TARGET,)), Delete(name, "CNAME")]


@asynccontextmanager
async def connect(settings: Settings, installation: Installation) -> AsyncGenerator[PowerDnsRegistry]:
    """The registry for ``settings``, written by ``installation``.

    The factory of the entry point ``powerdns`` in ``operator_app.registries``.

    Opens no connection yet, so the operator starts while the server is down. Proxy settings in the environment are not
    used: the API key is sent to ``powerdns_url`` only. Raises ``ConfigurationError`` for settings that can't work.
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
        yield PowerDnsRegistry(api, Publisher(installation, zones, settings.powerdns_default_ttl_s))


def _tls(settings: Settings) -> ssl.SSLContext:
    file = settings.powerdns_ca_file
    if file is None:
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=str(file))
    except (OSError, ssl.SSLError):
        raise ConfigurationError(f"powerdns_ca_file ({file}) can't be read as PEM certificates") from None
