"""A DNS registry by dynamic updates (RFC 2136): the same pair of records for each hostname as every other one.

Guarantees

* *A pair is created, changed and removed as a whole*, by one update message, which the server makes atomically.
* *A pair is created only where the name is free*, and changed or removed only while its ownership TXT is the one that
  was read: both are preconditions of the update, which the server itself checks (RFC 2136 section 2.4).
* *A name without our TXT is never written* if it has any record; at a zone's apex, if it has an address record.
* *No state is kept in memory*, and each write is confirmed by a read after it.

Messages for one name: three queries for a comparison (four where nothing is there), and for a change an update and
three more. ``entries`` transfers each configured zone, and so does the removal of a hostname that is delegated by now,
since queries do not show it any more.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import dns.update

from operator_app.errors import ConfigurationError, ConflictError, InvalidError
from operator_app.registration.dns import AddressType, Place
from operator_app.registration.identity import Installation
from operator_app.registration.pairs import (
    NOT_OURS,
    LivePair,
    Publisher,
    RecordSet,
    WantedPair,
    cut_message,
)
from operator_app.registration.registry import Comparison, OutsideRecord, Record, Registration
from operator_app.registration.rfc2136.client import Answer, Rfc2136Server, absolute, new_update
from operator_app.results import Outcome
from operator_app.settings import Settings

_OF_DNSSEC: Final = frozenset({"RRSIG", "NSEC", "NSEC3"})
"""Types that a server that signs its zones adds by itself."""


class Rfc2136Registry:
    """See :class:`operator_app.registration.registry.Registry`. ``publisher`` says in whose name, and where.

    Raises ``TerminalError`` also for a record that can't be published: ``ZoneNotConfigured``, ``HostnameTooLong``,
    ``AddressUnusable``, ``BelowZoneCut``.
    """

    def __init__(self, server: Rfc2136Server, publisher: Publisher) -> None:
        self._server = server
        self._publisher = publisher

    async def observe(self, record: Record) -> Comparison:
        """See :class:`operator_app.registration.registry.Registry`."""
        wanted = self._publisher.wanted(record)
        live, cut = await self._read(wanted.place)
        comparison = wanted.comparison(live)
        return Comparison.DIFFERENT if cut is not None and comparison is not Comparison.FOREIGN else comparison

    async def register(self, record: Record) -> Registration:
        """See :class:`operator_app.registration.registry.Registry`."""
        wanted = self._publisher.wanted(record)
        live, cut = await self._read(wanted.place)
        before = wanted.comparison(live)
        if cut is not None:
            raise InvalidError("BelowZoneCut", cut_message(wanted.place, cut, "OPERATOR_APP_RFC2136_ZONES"))
        if before is Comparison.MATCHING:
            return Registration(Outcome.UNCHANGED)
        if before in NOT_OURS:
            return wanted.refusal(before, live)
        is_new = before is Comparison.ABSENT
        if not is_new and AddressType.CNAME in wanted.contents:
            await self._refuse_beside_others(wanted.place)
        is_made = await self._server.update(_creation(wanted) if is_new else _change(wanted, live), wanted.place.zone)
        live, _ = await self._read(wanted.place)
        match after := wanted.comparison(live):
            case Comparison.MATCHING if not is_made:
                return Registration(Outcome.UNCHANGED)
            case Comparison.MATCHING:
                return Registration(Outcome.CREATED if is_new else Outcome.CONFIGURED)
            case Comparison.FOREIGN | Comparison.NEWER | Comparison.UNOWNED:
                return wanted.refusal(after, live)
            case Comparison.ABSENT if not is_made:
                # The precondition knows of records that no query shows, such as those below a delegation.
                return wanted.refusal(Comparison.FOREIGN, live)
            case _:
                raise ConflictError(f"somebody else changed the records of {wanted.place.hostname} at the same time")

    async def deregister(self, uid: str, hostname: str, *, former: frozenset[Installation] = frozenset()) -> Outcome:
        """See :class:`operator_app.registration.registry.Registry`.

        Raises ``TerminalError`` (``ZoneNotConfigured``) for a hostname outside of all configured zones.
        """
        place = self._publisher.place(hostname)
        live, cut = await self._read(place)
        if cut is not None:
            live = await self._transferred(place)
        if live.is_free(place):
            return Outcome.UNCHANGED
        installations = former | {self._publisher.installation}
        owned = live.owned(uid, installations)
        if not owned:
            return Outcome.SKIPPED
        update = _expecting(place, live)
        if len(owned) == len(live.owners):
            for kind in AddressType:
                update.delete(absolute(place.hostname), kind.value)
            update.delete(absolute(place.owner_name), "TXT")
        for each in owned:
            update.delete(absolute(place.owner_name), "TXT", each.content)
        if not await self._server.update(update, place.zone):
            raise ConflictError(f"somebody else changed the records of {hostname} at the same time")
        live = await self._transferred(place) if cut is not None else (await self._read(place))[0]
        if live.owned(uid, installations):
            raise ConflictError(f"the records of {hostname} came back after their removal")
        return Outcome.DELETED

    async def entries(self) -> AsyncGenerator[OutsideRecord]:
        """See :class:`operator_app.registration.registry.Registry`."""
        for zone in self._publisher.zones:
            for each in self._publisher.own(await self._server.transfer(zone)):
                yield each

    async def _refuse_beside_others(self, place: Place) -> None:
        """Raise ``InvalidError`` where an alias can't stand beside what else is at the hostname.

        A server leaves such an alias out without an error, but makes the rest of the update (RFC 2136 section 3.4.2.2).
        """
        found = await self._server.query(place.zone, place.hostname, "ANY")
        others = {each.type for each in found.sets} - {each.value for each in AddressType} - _OF_DNSSEC
        if others:
            message = f"{place.hostname} can't be an alias beside its records of the types {', '.join(sorted(others))}"
            raise InvalidError("RecordRefused", message)

    async def _read(self, place: Place) -> tuple[LivePair, str | None]:
        """What the server has at both names, and the cut between them and their zone, if there is one."""
        owner = await self._server.query(place.zone, place.owner_name, "TXT")
        found = [await self._server.query(place.zone, place.hostname, kind) for kind in ("A", "AAAA")]
        sets = {each.type: each for answer in found for each in answer.sets}
        if not sets and not owner.sets and found[0].exists and found[0].cut is None and not place.is_apex:
            # The name has records of other types, or only names below it have any.
            sets = {each.type: each for each in (await self._server.query(place.zone, place.hostname, "ANY")).sets}
        return LivePair(tuple(sets.values()), owner.sets), _first_cut(*found, owner, hostname=place.hostname)

    async def _transferred(self, place: Place) -> LivePair:
        """The same from a transfer of the zone, which has what is below a delegation, too."""
        sets = await self._server.transfer(place.zone)
        return LivePair(_at(sets, place.hostname), _at(sets, place.owner_name))


def _at(sets: Sequence[RecordSet], name: str) -> tuple[RecordSet, ...]:
    return tuple(each for each in sets if each.name.lower() == f"{name}.")


def _first_cut(*answers: Answer, hostname: str) -> str | None:
    """The cut that the hostname is at or below of; one that is below it, at the owner name, does not count."""
    cuts = (each.cut for each in answers if each.cut is not None)
    return next((each for each in cuts if hostname == each or hostname.endswith(f".{each}")), None)


def _creation(wanted: WantedPair) -> dns.update.UpdateMessage:
    """An update that writes the pair where neither name is in use."""
    place = wanted.place
    update = new_update(place.zone)
    if place.is_apex:
        for kind in AddressType:
            update.absent(absolute(place.hostname), kind.value)
    else:
        update.absent(absolute(place.hostname))
    update.absent(absolute(place.owner_name))
    _add(update, wanted)
    return update


def _change(wanted: WantedPair, live: LivePair) -> dns.update.UpdateMessage:
    """An update that replaces the live pair, if its ownership is still the one that was read."""
    place = wanted.place
    update = _expecting(place, live)
    for kind in AddressType:
        update.delete(absolute(place.hostname), kind.value)
    update.delete(absolute(place.owner_name), "TXT")
    _add(update, wanted)
    return update


def _expecting(place: Place, live: LivePair) -> dns.update.UpdateMessage:
    update = new_update(place.zone)
    if live.ownership is not None:
        contents = [each.content for each in live.ownership.records]
        update.present(absolute(place.owner_name), "TXT", *contents)
    return update


def _add(update: dns.update.UpdateMessage, wanted: WantedPair) -> None:
    place = wanted.place
    update.add(absolute(place.owner_name), wanted.ttl_s, "TXT", wanted.ownership.content)
    for kind, contents in wanted.contents.items():
        for content in contents:
            update.add(absolute(place.hostname), wanted.ttl_s, kind.value, content)


@asynccontextmanager
async def connect(settings: Settings, installation: Installation) -> AsyncGenerator[Rfc2136Registry]:
    """The registry for ``settings``, written by ``installation``.

    The factory of the entry point ``rfc2136`` in ``operator_app.registries``. Opens no connection yet, so the operator
    starts while the server is down. Raises ``ConfigurationError`` for settings that can't work.
    """
    server, zones, key_file = settings.rfc2136_server, settings.rfc2136_zones, settings.rfc2136_key_file
    if server is None or not zones or key_file is None:
        raise ConfigurationError("the rfc2136 registry needs rfc2136_server, rfc2136_zones and rfc2136_key_file")
    host, _, port = server.rpartition(":")
    yield Rfc2136Registry(
        Rfc2136Server(host.strip("[]"), int(port), key_file=key_file, timeout_s=settings.rfc2136_timeout_s),
        Publisher(installation, zones, settings.rfc2136_default_ttl_s),
    )
