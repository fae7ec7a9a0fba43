"""The DNS rules of the registry: which zone a name is in, which record type an address needs, who owns a name. Pure.

Servers and their APIs do not belong here.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, Self

from operator_app.errors import InvalidError, TerminalError
from operator_app.registration.identity import Installation

OWNER_LABEL: Final = "_edge-owner"
"""The ownership record of ``shop.example.com`` is a TXT record at ``_edge-owner.shop.example.com``.

It has its own name because a CNAME can't have other records beside it (RFC 1034 section 3.6.2), and an underscore
because no host can have such a name (RFC 8552 section 1.1).
"""

MAX_NAME_LENGTH: Final = 253
"""Characters of a name in text, without the dot at the end (255 octets on the wire: RFC 1035 section 2.3.4)."""

MAX_HOSTNAME_LENGTH: Final = MAX_NAME_LENGTH - len(OWNER_LABEL) - 1

_HOST: Final = re.compile(r"(?=.{1,253}\Z)([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?[.])*[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_OWNERSHIP: Final = re.compile(
    r'"heritage=operator-app" '
    r'"cluster=(?P<cluster>[0-9a-f]{32})" '
    r'"installation=(?P<installation>[0-9a-f]{32})" '
    r'"uid=(?P<uid>[A-Za-z0-9-]{1,128})" '
    r'"generation=(?P<generation>0|[1-9][0-9]{0,18})"'
)


_LOCAL_NAMES: Final = (".svc", ".cluster.local", ".localhost", ".invalid")
"""Ends of names that only a cluster or a machine resolves, or nobody (RFC 6761)."""

CUT_TYPES: Final = frozenset({"NS", "DNAME"})
"""Where one of these is at a name below a zone's apex, the zone's server does not serve what is below that name."""


class AddressType(StrEnum):
    """The types of address records; the operator writes and removes no other types at a hostname."""

    A = "A"
    AAAA = "AAAA"
    CNAME = "CNAME"


@dataclass(frozen=True, slots=True)
class Place:
    """A hostname and the zone that it is in. ``zone`` is the apex; names have no dot at the end."""

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

    @property
    def enclosing(self) -> tuple[str, ...]:
        """The names between the zone's apex and the hostname, the shortest first, without both."""
        labels = self.hostname.removesuffix(self.zone).removesuffix(".").split(".")
        return tuple(f"{'.'.join(labels[at:])}.{self.zone}" for at in range(len(labels) - 1, 0, -1))


def place_of(hostname: str, zones: Iterable[str]) -> Place:
    """``hostname`` in the most specific of ``zones``.

    Raises ``TerminalError`` with the reason ``HostnameTooLong`` or ``ZoneNotConfigured``.
    """
    if len(hostname) > MAX_HOSTNAME_LENGTH:
        message = f"the hostname must have at most {MAX_HOSTNAME_LENGTH} characters: {OWNER_LABEL}. is put before it"
        raise TerminalError("HostnameTooLong", message)
    enclosing = [zone for zone in zones if hostname == zone or hostname.endswith(f".{zone}")]
    if not enclosing:
        raise TerminalError("ZoneNotConfigured", f"{hostname} is in none of the DNS zones that the operator may write")
    return Place(hostname, max(enclosing, key=len))


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """An address record. ``content`` is as in a zone file; a CNAME's ends with a dot."""

    type: AddressType
    content: str

    def is_equal_to(self, content: str) -> bool:
        """Whether a record of the same type with this content means the same, in whatever notation."""
        if self.type is AddressType.CNAME:
            return content.lower() == self.content
        try:
            return ip_address(content) == ip_address(self.content)
        except ValueError:
            return False


def address_at(place: Place, address: str) -> Address:
    """The record for ``address``, an IP address or a DNS name, at ``place``.

    Raises ``InvalidError`` (``AddressUnusable``) where no record is possible: for a name at a zone's apex, where SOA
    and NS exclude a CNAME (RFC 1912 section 2.4), for the hostname itself, and for anything that is neither an IP
    address nor a name; and where a record would be of no use to whoever resolves it: a name that exists in one cluster
    only, an address of one machine or link. Private addresses are usable: a zone may be an internal one.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return Address(AddressType.CNAME, f"{_target_at(place, address)}.")
    if _is_local(ip):
        raise InvalidError(
            "AddressUnusable", f"nobody else reaches {address}, an address of one machine or network link"
        )
    return Address(AddressType.A if ip.version == 4 else AddressType.AAAA, ip.compressed)


def addresses_at(place: Place, addresses: Iterable[str]) -> tuple[Address, ...]:
    """The records for all ``addresses`` of one proxy at ``place``, sorted.

    Raises what :func:`address_at` raises, and the same error for a DNS name among several: a CNAME stands alone.
    """
    found = tuple(sorted({address_at(place, each) for each in addresses}))
    if len(found) > 1 and any(each.type is AddressType.CNAME for each in found):
        raise InvalidError("AddressUnusable", f"{place.hostname} can't be an alias and have other addresses beside it")
    return found


def _is_local(ip: IPv4Address | IPv6Address) -> bool:
    if isinstance(ip, IPv6Address):
        if ip.ipv4_mapped is not None or ip.scope_id is not None:
            return True
        return ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast
    # 0.0.0.0/8 is "this network" and 240.0.0.0/4 reserved, broadcast included (RFC 6890).
    return ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_reserved or ip.packed[0] == 0


def _target_at(place: Place, address: str) -> str:
    target = address.lower().removesuffix(".")
    if _HOST.fullmatch(target) is None:
        raise InvalidError(
            "AddressUnusable", f"the proxy's address {address!r} is neither an IP address nor a DNS name"
        )
    if target.endswith(_LOCAL_NAMES) or "." not in target:
        message = (
            f"{target} is a name inside the cluster, which no resolver outside of it knows: make the proxy's Service a "
            "LoadBalancer (spec.service.type), or a NodePort where the operator publishes addresses of nodes "
            "(OPERATOR_APP_NODE_PORT_ADDRESSES), leave the hostname out, or choose the registry in-cluster"
        )
        raise InvalidError("AddressUnusable", message)
    if place.is_apex:
        message = f"{place.hostname} is a zone of its own and can't be an alias of {target}: use a name below it"
        raise InvalidError("AddressUnusable", message)
    if target == place.hostname:
        raise InvalidError("AddressUnusable", f"{target} is the proxy's own address and can't be an alias of itself")
    return target


@dataclass(frozen=True, slots=True, order=True)
class Ownership:
    """Who wrote the records of a hostname: which installation, for which EnvoyProxy, from which of its generations."""

    installation: Installation
    uid: str
    generation: int

    @property
    def content(self) -> str:
        """The content of the TXT record: five strings of the form ``key=value`` (RFC 1464, RFC 6763 section 6).

        Everybody can read it, so it has no name of a cluster, namespace or proxy. The bounds of its parts keep each
        string far below 255 octets (RFC 1035 section 3.3), and none of their characters needs an escape.
        """
        attributes = (
            "heritage=operator-app",
            f"cluster={self.installation.cluster}",
            f"installation={self.installation.name}",
            f"uid={self.uid}",
            f"generation={self.generation}",
        )
        return " ".join(f'"{each}"' for each in attributes)

    @classmethod
    def parsed(cls, content: str) -> Self | None:
        """Parse a TXT record; ``None`` for any text that ``content`` would not write exactly so."""
        found = _OWNERSHIP.fullmatch(content)
        if found is None:
            return None
        installation = Installation(found["cluster"], found["installation"])
        return cls(installation, found["uid"], int(found["generation"]))


def owners_of(contents: Sequence[str]) -> tuple[Ownership, ...]:
    """Who owns a name, by all TXT contents at its owner name; empty where any of them is not an ownership record.

    There can be several where a server's database lets two transactions create the same record set.
    """
    parsed = [Ownership.parsed(content) for content in contents]
    valid = tuple(each for each in parsed if each is not None)
    return valid if len(valid) == len(parsed) else ()
