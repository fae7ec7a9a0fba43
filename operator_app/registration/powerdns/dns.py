"""DNS as a registry sees it: which zone a name is in, what kind of record an address needs, who owns a name. Pure.

Nothing here knows a server or its API.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Final, Self

from operator_app.api.kinds import Key
from operator_app.errors import InvalidError, TerminalError

OWNER_LABEL: Final = "_edge-owner"
"""The ownership of ``shop.example.com`` is told at ``_edge-owner.shop.example.com``.

It has a name of its own because a CNAME can't have other records beside it (RFC 1034 section 3.6.2), and one with an
underscore because no host can have it (RFC 8552 section 1.1).
"""

MAX_NAME_LENGTH: Final = 253
"""Characters of a name in text, without the dot at the end (255 octets on the wire: RFC 1035 section 2.3.4)."""

MAX_HOSTNAME_LENGTH: Final = MAX_NAME_LENGTH - len(OWNER_LABEL) - 1

_HOST: Final = re.compile(r"(?=.{1,253}\Z)([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?[.])*[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_OWNERSHIP: Final = re.compile(
    r'"heritage=operator-app" '
    r'"operator=(?P<operator>[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)" '
    r'"uid=(?P<uid>[A-Za-z0-9-]{1,128})" '
    r'"proxy=(?P<namespace>[a-z0-9-]{1,63})/(?P<name>[a-z0-9.-]{1,127})" '
    r'"generation=(?P<generation>0|[1-9][0-9]{0,18})"'
)


class AddressType(StrEnum):
    """The record types that say where a name is; the operator writes and removes no other at a hostname."""

    A = "A"
    AAAA = "AAAA"
    CNAME = "CNAME"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a hostname's records are. ``zone`` is the apex; all names are without the dot at the end."""

    hostname: str
    zone: str

    @property
    def owner_name(self) -> str:
        """The name of the ownership record."""
        return f"{OWNER_LABEL}.{self.hostname}"

    @property
    def is_apex(self) -> bool:
        """Whether the hostname is the zone's own name, which always has records: SOA and NS."""
        return self.hostname == self.zone


def place_of(hostname: str, zones: Iterable[str]) -> Place:
    """The place of ``hostname`` in the longest of ``zones`` that it is in.

    Raises ``TerminalError`` with the reason ``HostnameTooLong`` or ``ZoneNotConfigured``.
    """
    if len(hostname) > MAX_HOSTNAME_LENGTH:
        message = f"the hostname must have at most {MAX_HOSTNAME_LENGTH} characters: {OWNER_LABEL}. is put before it"
        raise TerminalError("HostnameTooLong", message)
    around = [zone for zone in zones if hostname == zone or hostname.endswith(f".{zone}")]
    if not around:
        raise TerminalError("ZoneNotConfigured", f"{hostname} is in none of the DNS zones that the operator may write")
    return Place(hostname, max(around, key=len))


@dataclass(frozen=True, slots=True)
class Address:
    """What is told of a hostname. ``content`` is as a zone file has it; a CNAME's has the dot at the end."""

    type: AddressType
    content: str

    def is_told_by(self, content: str) -> bool:
        """Whether a record of the same type with this content says the same, however it is spelled."""
        if self.type is AddressType.CNAME:
            return content.lower() == self.content
        try:
            return ip_address(content) == ip_address(self.content)
        except ValueError:
            return False


def address_at(place: Place, address: str) -> Address:
    """How ``address``, an IP address or a DNS name, is told at ``place``.

    Raises ``InvalidError`` (``AddressUnusable``) for what no record can tell: a name at a zone's apex, where SOA and NS
    leave no room for a CNAME (RFC 1912 section 2.4), the hostname itself, and what is neither address nor name.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return Address(AddressType.CNAME, f"{_target_at(place, address)}.")
    if ip.version == 4:
        return Address(AddressType.A, str(ip))
    if ip.ipv4_mapped is not None or ip.scope_id is not None:
        raise InvalidError("AddressUnusable", f"{address} has no meaning outside of one machine")
    return Address(AddressType.AAAA, ip.compressed)


def _target_at(place: Place, address: str) -> str:
    target = address.lower().removesuffix(".")
    if _HOST.fullmatch(target) is None:
        raise InvalidError(
            "AddressUnusable", f"the proxy's address {address!r} is neither an IP address nor a DNS name"
        )
    if place.is_apex:
        message = f"{place.hostname} is a zone of its own and can't be an alias of {target}: use a name below it"
        raise InvalidError("AddressUnusable", message)
    if target == place.hostname:
        raise InvalidError("AddressUnusable", f"{target} is the proxy's own address and can't be an alias of itself")
    return target


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who made the records of a hostname: which operator, for which EnvoyProxy, from which of its generations."""

    operator: str
    uid: str
    proxy: Key
    generation: int

    @property
    def content(self) -> str:
        """The TXT record: five character-strings, each one attribute as ``key=value`` (RFC 1464, RFC 6763 section 6).

        The bounds of operator, uid, namespace and name keep each string far below 255 octets (RFC 1035 section 3.3),
        and none of their characters needs an escape.
        """
        attributes = (
            "heritage=operator-app",
            f"operator={self.operator}",
            f"uid={self.uid}",
            f"proxy={self.proxy}",
            f"generation={self.generation}",
        )
        return " ".join(f'"{each}"' for each in attributes)

    @classmethod
    def parsed(cls, content: str) -> Self | None:
        """What a TXT record says, or ``None`` for anything that ``content`` does not write exactly so."""
        found = _OWNERSHIP.fullmatch(content)
        if found is None:
            return None
        proxy = Key(found["namespace"], found["name"])
        return cls(found["operator"], found["uid"], proxy, int(found["generation"]))


def holder(contents: Sequence[str]) -> Ownership | None:
    """Who owns a name, by all TXT contents at its owner name; ``None`` where any of them is not an ownership.

    Several claims can stand side by side where a server's database lets two transactions create the same record. Then
    the lowest operator and UID holds, and of one UID the newest generation: whoever reads comes to the same answer.
    """
    claims = [Ownership.parsed(content) for content in contents]
    valid = [claim for claim in claims if claim is not None]
    if not valid or len(valid) < len(claims):
        return None
    return min(valid, key=lambda claim: (claim.operator, claim.uid, -claim.generation))
