"""A client of a DNS server that is a zone's primary: queries, zone transfers, updates with preconditions, all signed.

Each message goes over a TCP connection of its own and is not retried. The key's file is read for each message, so a new
key needs no restart. Who owns which records does not belong here.

Protocol: RFC 2136 (update), RFC 5936 (transfer), RFC 8945 (TSIG).
"""

import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import anyio
import dns.asyncquery
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import dns.tsig
import dns.update
import dns.xfr
import dns.zone

from operator_app.errors import (
    ForbiddenError,
    InvalidError,
    NotFoundError,
    TransientError,
    UndecodableError,
)
from operator_app.kube import fencing
from operator_app.registration.pairs import Content, RecordSet

T = TypeVar("T")

_KEY: Final = re.compile(
    r'key\s+"?(?P<name>[A-Za-z0-9._-]+)"?\s*\{\s*algorithm\s+"?(?P<algorithm>hmac-[a-z0-9-]+)"?\s*;\s*'
    r'secret\s+"?(?P<secret>[A-Za-z0-9+/=]+)"?\s*;\s*\}\s*;?',
    re.IGNORECASE,
)
"""A ``key`` statement, as ``tsig-keygen`` and ``keymgr -t`` write it and name servers read it."""

_UNMET: Final = frozenset({dns.rcode.YXDOMAIN, dns.rcode.YXRRSET, dns.rcode.NXRRSET, dns.rcode.NXDOMAIN})
"""Answers to an update whose preconditions do not hold (RFC 2136 section 3.2.5)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says of one name and type. ``exists``: the name has records, or names below it have.

    ``cut`` is the name at which the server stops answering for the zone that was asked about, if it does: a
    delegation, a DNAME, or a zone of its own.
    """

    sets: tuple[RecordSet, ...]
    exists: bool
    cut: str | None


class Rfc2136Server:
    """The primary server of some zones at ``host`` and ``port``. ``timeout_s`` bounds each exchange as a whole.

    Every method raises ``TransientError`` for failures that pass (no connection, no answer in time, SERVFAIL),
    ``UndecodableError`` for anything that is no DNS answer, and the ``TerminalError`` subclasses ``ForbiddenError``
    (``RegistryUnauthorized``), ``NotFoundError`` (``ZoneNotFound``) and ``InvalidError`` (``RecordRefused``). An update
    that was cancelled or failed may still have been made: read before the next one.
    """

    def __init__(self, host: str, port: int, *, key_file: Path, timeout_s: float) -> None:
        self._host = host
        self._port = port
        self._key_file = key_file
        self._timeout_s = timeout_s

    async def query(self, zone: str, name: str, kind: str) -> Answer:
        """The records of one type at one name of ``zone``; a CNAME there is returned for any type."""
        response = await self._exchange(dns.message.make_query(_name(name), kind, flags=0))
        if response.rcode() not in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
            raise _refusal(response.rcode(), zone)
        sets = tuple(_record_set(each) for each in response.answer if each.name == _name(name))
        exists = bool(response.answer) or response.rcode() == dns.rcode.NOERROR
        return Answer(sets, exists, _cut(response, zone))

    async def transfer(self, zone: str) -> tuple[RecordSet, ...]:
        """Every record set of a zone; megabytes for a large one."""
        received = dns.zone.Zone(_name(zone), relativize=False)
        query, _ = dns.xfr.make_query(received, keyring=await self._key())
        address, lifetime_s = await self._address(), self._timeout_s
        await self._bounded(dns.asyncquery.inbound_xfr(address, received, query, port=self._port, lifetime=lifetime_s))
        nodes = received.nodes.items()
        return tuple(
            _record_set(dns.rrset.from_rdata_list(name, rdataset.ttl, list(rdataset)))
            for name, node in nodes
            for rdataset in node
        )

    async def update(self, update: dns.update.UpdateMessage, zone: str) -> bool:
        """Make an update if its preconditions hold, all of it or nothing; returns whether they did.

        Raises ``FencedError``, and sends nothing, when the fencing token has expired.
        """
        fencing.check()
        response = await self._exchange(update)
        if response.rcode() == dns.rcode.NOERROR:
            return True
        if response.rcode() in _UNMET:
            return False
        raise _refusal(response.rcode(), zone)

    async def _exchange(self, message: dns.message.Message) -> dns.message.Message:
        message.use_tsig(await self._key())
        sent = dns.asyncquery.tcp(message, await self._address(), port=self._port, timeout=self._timeout_s)
        answer = await self._bounded(sent)
        if answer.flags & dns.flags.TC:
            # Over TCP no server has a reason to leave records out; what is left out would look removed.
            raise UndecodableError("the DNS server's answer is truncated")
        return answer

    async def _bounded(self, exchange: Awaitable[T]) -> T:
        try:
            with anyio.fail_after(self._timeout_s):
                return await exchange
        except (TimeoutError, dns.exception.Timeout):
            raise TransientError(f"the DNS server did not answer within {self._timeout_s:g} s") from None
        except (dns.tsig.PeerError, dns.tsig.BadSignature, dns.tsig.BadTime, dns.message.UnknownTSIGKey) as error:
            message = f"the DNS server and the operator do not trust each other's signature ({type(error).__name__})"
            raise ForbiddenError("RegistryUnauthorized", f"{message}: see the key, and both clocks") from None
        except dns.xfr.TransferError as error:
            raise _refusal(error.rcode, "") from None
        except dns.exception.DNSException as error:
            raise UndecodableError(f"the DNS server's answer can't be read: {type(error).__name__}") from None
        except (OSError, EOFError) as error:
            raise TransientError(f"no answer from the DNS server: {type(error).__name__}") from None

    async def _address(self) -> str:
        try:
            with anyio.fail_after(self._timeout_s):
                found = await anyio.getaddrinfo(self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise TransientError(
                f"the DNS server's name {self._host} is not resolved: {type(error).__name__}"
            ) from None
        return str(found[0][4][0])

    async def _key(self) -> dns.tsig.Key:
        try:
            text = await anyio.Path(self._key_file).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            problem = getattr(error, "strerror", None) or "it is not plain text"
            raise ForbiddenError("RegistryUnauthorized", f"the key in {self._key_file}: {problem}") from None
        found = _KEY.search(text)
        if found is None:
            message = f'{self._key_file} has no statement such as key "name" {{ algorithm hmac-sha256; secret "…"; }};'
            raise ForbiddenError("RegistryUnauthorized", message)
        try:
            return dns.tsig.Key(found["name"], found["secret"], found["algorithm"].lower())
        except (ValueError, dns.exception.DNSException):
            raise ForbiddenError("RegistryUnauthorized", f"the secret in {self._key_file} is not base64") from None


def _refusal(code: dns.rcode.Rcode, zone: str) -> Exception:
    message = f"the DNS server answered {dns.rcode.to_text(code)}"
    match code:
        case dns.rcode.REFUSED:
            return ForbiddenError(
                "RegistryUnauthorized",
                f"{message}: the key must be allowed to read, transfer and update {zone or 'it'}",
            )
        case dns.rcode.NOTAUTH | dns.rcode.NOTZONE:
            return NotFoundError("ZoneNotFound", f"{message}: it is not the primary server of {zone or 'the zone'}")
        case dns.rcode.FORMERR | dns.rcode.NOTIMP:
            return InvalidError("RecordRefused", message)
        case _:
            return TransientError(message)


def _cut(response: dns.message.Message, zone: str) -> str | None:
    """The name at which the server stops answering for ``zone``."""
    apex = _name(zone)
    for each in response.answer:
        if each.rdtype == dns.rdatatype.DNAME and each.name != apex:
            return _text(each.name)
    ends = (dns.rdatatype.SOA, dns.rdatatype.NS)
    for each in response.authority:
        if each.rdtype in ends and each.name != apex and each.name.is_subdomain(apex):
            return _text(each.name)
    return None


def _record_set(found: dns.rrset.RRset) -> RecordSet:
    contents = tuple(Content(each.to_text()) for each in found)
    return RecordSet(f"{_text(found.name)}.", dns.rdatatype.to_text(found.rdtype), found.ttl, contents)


def _name(text: str) -> dns.name.Name:
    return dns.name.from_text(text)


def _text(name: dns.name.Name) -> str:
    return name.to_text(omit_final_dot=True).lower()


def new_update(zone: str) -> dns.update.UpdateMessage:
    """An update of ``zone`` without preconditions or changes."""
    return dns.update.UpdateMessage(_name(zone))


def absolute(name: str) -> str:
    """A name as the methods of an update take it."""
    return f"{name}."


def contents_of(sets: Sequence[RecordSet]) -> set[tuple[str, str]]:
    """The records of some sets as (type, content)."""
    return {(each.type, record.content) for each in sets for record in each.records}
