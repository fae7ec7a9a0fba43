"""A hostname's two records, as a DNS server has them and as a registration wants them; what differs. Pure.

Every DNS registry publishes an address at the hostname and a TXT that says whose it is (``dns.Ownership``). How they
are read and written is the registry's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from operator_app.registration.dns import (
    OWNER_LABEL,
    Address,
    AddressType,
    Ownership,
    Place,
    addresses_at,
    owners_of,
    place_of,
)
from operator_app.registration.identity import Installation
from operator_app.registration.registry import Comparison, OutsideRecord, Record, Registration
from operator_app.results import Outcome, Problem

NOT_OURS: Final = frozenset({Comparison.FOREIGN, Comparison.NEWER, Comparison.UNOWNED})
"""What is at a hostname that is not to be written."""

_APEX_ADDRESSES: Final = frozenset({"A", "AAAA", "ALIAS", "LUA"})
"""The types of address records at a zone's apex; ALIAS and LUA are PowerDNS's own."""


class Content(msgspec.Struct, frozen=True):
    """One record of a set. A disabled record is stored but not served."""

    content: str
    disabled: bool = False


class RecordSet(msgspec.Struct, frozen=True):
    """All records of one name and type. ``name`` ends with a dot; a set may have comments and no records."""

    name: str
    type: str
    ttl: int
    records: tuple[Content, ...] = ()


@dataclass(frozen=True, slots=True)
class LivePair:
    """The record sets that the server has at the hostname and at the owner name, without empty ones."""

    at_hostname: tuple[RecordSet, ...]
    at_owner_name: tuple[RecordSet, ...]

    @property
    def addresses(self) -> tuple[RecordSet, ...]:
        """The address records at the hostname."""
        return tuple(each for each in self.at_hostname if each.type in set(AddressType))

    @property
    def ownership(self) -> RecordSet | None:
        """The TXT records at the owner name."""
        return next((each for each in self.at_owner_name if each.type == "TXT"), None)

    @property
    def owners(self) -> tuple[Ownership, ...]:
        """Every owner; empty where anything else than ownership records is at the owner name."""
        return () if self.ownership is None else owners_of([each.content for each in self.ownership.records])

    @property
    def ttl_s(self) -> int:
        """The TTL of the ownership records."""
        return 0 if self.ownership is None else self.ownership.ttl

    def is_free(self, place: Place) -> bool:
        """Whether neither name has a record of anybody."""
        return not self.at_owner_name and not is_occupied(place, {each.type for each in self.at_hostname})

    def owned(self, uid: str, installations: frozenset[Installation]) -> tuple[Ownership, ...]:
        """The ownership records of the proxy with this UID by any of these installations."""
        return tuple(each for each in self.owners if each.uid == uid and each.installation in installations)


@dataclass(frozen=True, slots=True)
class WantedPair:
    """The pair of records that a registration publishes. Any of ``installations`` is an owner of it.

    ``is_held``: it was confirmed before, so it stays where the server has stored somebody else's beside it.
    ``replaces_newer`` is as in :class:`operator_app.registration.registry.Record`.
    """

    place: Place
    addresses: tuple[Address, ...]
    ownership: Ownership
    ttl_s: int
    installations: frozenset[Installation]
    is_held: bool
    replaces_newer: bool

    def comparison(self, live: LivePair) -> Comparison:
        """What the server has, compared with this pair."""
        if live.is_free(self.place):
            return Comparison.ABSENT
        if not live.at_owner_name and self._has_these_addresses(live):
            return Comparison.UNOWNED
        owned = self.owned(live)
        if not owned or (len(owned) < len(live.owners) and not self.is_held):
            return Comparison.FOREIGN
        if max(each.generation for each in owned) > self.ownership.generation and not self.replaces_newer:
            return Comparison.NEWER
        return Comparison.MATCHING if self._is_published(live) else Comparison.DIFFERENT

    def owned(self, live: LivePair) -> tuple[Ownership, ...]:
        """The ownership records of this proxy."""
        return live.owned(self.ownership.uid, self.installations)

    def refusal(self, comparison: Comparison, live: LivePair) -> Registration:
        """The problem where ``live`` is not to be written, and stays. It names no owner, only its distance."""
        hostname = self.place.hostname
        if comparison is Comparison.NEWER:
            message = f"{hostname} is registered from a newer generation already"
            return Registration(Outcome.SKIPPED, Problem("NewerRecord", message))
        if comparison is Comparison.UNOWNED:
            message = (
                f"{hostname} has this proxy's address already, and nothing says that the operator wrote it: put the "
                f"TXT record {self.place.owner_name} back or remove the address; the operator goes on by itself"
            )
            problem = Problem("HostnameTaken", message, needs_user_action=True, ends_with_event=True)
            return Registration(Outcome.SKIPPED, problem)
        owner, ours = min(live.owners, default=None), self.ownership.installation
        if owner is None or owner.installation == ours:
            message = f"{hostname} is not free"
        elif owner.installation.is_same_cluster(ours):
            message = f"{hostname} is registered by another installation of this operator in this cluster, and is left"
        else:
            message = (
                f"{hostname} is registered by this operator in another cluster, and is left: choose another hostname, "
                f"or have it removed there; if that cluster is gone, remove the TXT record {self.place.owner_name} and "
                "the address record by hand"
            )
        problem = Problem("HostnameTaken", message, needs_user_action=True, ends_with_event=True)
        uid = owner.uid if owner is not None and owner.installation == ours else None
        return Registration(Outcome.SKIPPED, problem, owner_uid=uid)

    @property
    def contents(self) -> dict[AddressType, tuple[str, ...]]:
        """The contents of the address records, by type."""
        types = dict.fromkeys(each.type for each in self.addresses)
        return {type_: tuple(each.content for each in self.addresses if each.type is type_) for type_ in types}

    def left_without_us(self, stored: RecordSet) -> tuple[str, ...]:
        """The contents of a stored set of addresses without ours: each once, since another owner may have the same."""
        left = [each.content for each in stored.records]
        for ours in self.addresses:
            same = (each for each in left if stored.type == ours.type and ours.is_equal_to(each))
            if (found := next(same, None)) is not None:
                left.remove(found)
        return tuple(left)

    def _is_published(self, live: LivePair) -> bool:
        match live.ownership:
            case RecordSet(ttl=ttl_s, records=(Content(owner, disabled=False),)):
                is_ours = ttl_s == self.ttl_s and owner == self.ownership.content
            case _:
                return False
        return (
            is_ours
            and all(each.ttl == self.ttl_s for each in live.addresses)
            and not any(record.disabled for each in live.addresses for record in each.records)
            and self._has_these_addresses(live)
        )

    def _has_these_addresses(self, live: LivePair) -> bool:
        stored = [(each.type, record) for each in live.addresses for record in each.records]
        return len(stored) == len(self.addresses) and all(_is_among(each, stored) for each in self.addresses)


@dataclass(frozen=True, slots=True)
class Publisher:
    """What ``installation`` publishes and has published in its ``zones``; a TTL of a proxy's own goes first."""

    installation: Installation
    zones: tuple[str, ...]
    default_ttl_s: int

    def place(self, hostname: str) -> Place:
        """Where a hostname is. Raises ``TerminalError`` (``HostnameTooLong``, ``ZoneNotConfigured``)."""
        return place_of(hostname, self.zones)

    def wanted(self, record: Record) -> WantedPair:
        """The pair for ``record``. Raises what :meth:`place` raises, and ``InvalidError`` for its addresses."""
        place = self.place(record.hostname or "")
        return WantedPair(
            place,
            addresses_at(place, record.addresses),
            Ownership(self.installation, record.uid, record.generation),
            self.default_ttl_s if record.ttl_s is None else record.ttl_s,
            record.former | {self.installation},
            is_held=record.is_held,
            replaces_newer=record.replaces_newer,
        )

    def own(self, sets: Iterable[RecordSet]) -> Iterator[OutsideRecord]:
        """Its own among the record sets of a zone: each proxy of a hostname once, with the newest generation."""
        for each in sets:
            label, _, hostname = each.name.lower().removesuffix(".").partition(".")
            if each.type != "TXT" or label != OWNER_LABEL:
                continue
            owners = owners_of([record.content for record in each.records])
            ours = [owner for owner in owners if owner.installation == self.installation]
            for uid in sorted({owner.uid for owner in ours}):
                generation = max(owner.generation for owner in ours if owner.uid == uid)
                yield OutsideRecord(uid, hostname, generation=generation)


def is_occupied(place: Place, types: "set[str] | frozenset[str]") -> bool:
    """Whether records of these types at a hostname without our TXT belong to another owner."""
    return bool(types & _APEX_ADDRESSES if place.is_apex else types)


def cut_message(place: Place, cut: str, setting: str) -> str:
    """Why a hostname below ``cut`` can't be published; ``setting`` names the configured zones."""
    return (
        f"{place.hostname} would never be served: {cut} is no part of the zone {place.zone}, but delegated, renamed or "
        f"a zone of its own; choose another hostname, or have that zone configured ({setting})"
    )


def _is_among(address: Address, stored: Iterable[tuple[str, Content]]) -> bool:
    return any(type_ == address.type and address.is_equal_to(record.content) for type_, record in stored)
