"""Names of Services inside Pods: a DNS server that knows what the cluster's own would know, and little else.

``<service>.<namespace>.svc.cluster.local`` resolves to the ready addresses of its EndpointSlices. Shorter names reach
it through the search list of the Pod's ``resolv.conf``, as they do on any node. Answers are UDP only (RFC 1035 section
4.2.1), so at most as many addresses are given as fit into 512 bytes.
"""

import struct
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address
from typing import Final

import anyio

from operator_app.api.kinds import Object

DOMAIN: Final = "svc.cluster.local"
TTL_S: Final = 1
MAX_ADDRESSES: Final = 20

_TYPE_A: Final = 1
_NXDOMAIN: Final = 3
_HEADER: Final = struct.Struct("!6H")

Lookup = Callable[[str], list[str] | None]
"""Addresses of a full name without its last dot: none known (``[]``), or no such name (``None``)."""


def service_addresses(name: str, slices: Iterable[Object]) -> list[str] | None:
    """Ready IPv4 addresses of the Service that ``name`` stands for, sorted; None if there is no such Service.

    ``ready`` that is absent counts as true, as the EndpointSlice API says.
    """
    service, _, rest = name.partition(".")
    namespace, _, domain = rest.partition(".")
    if domain != DOMAIN:
        return None
    own = [
        item
        for item in slices
        if item["metadata"]["namespace"] == namespace
        and (item["metadata"].get("labels") or {}).get("kubernetes.io/service-name") == service
    ]
    if not own:
        return None
    return sorted(
        address
        for item in own
        if item["addressType"] == "IPv4"
        for endpoint in item.get("endpoints") or []
        if endpoint.get("conditions", {}).get("ready") is not False
        for address in endpoint["addresses"]
    )


def answer(query: bytes, lookup: Lookup) -> bytes:
    """The response to one query message (RFC 1035 section 4). Raises ValueError for what is no query."""
    if len(query) <= _HEADER.size:
        raise ValueError("a query is longer than its header")
    ident, flags, questions, *_ = _HEADER.unpack_from(query)
    if questions != 1:
        raise ValueError("exactly one question is answered")
    labels, end = [], _HEADER.size
    while length := query[end]:
        labels.append(query[end + 1 : end + 1 + length].decode("ascii", "replace").lower())
        end += 1 + length
        if end >= len(query):
            raise ValueError("the name does not end inside the message")
    if end + 5 > len(query):
        raise ValueError("the question has no type")
    (record_type,) = struct.unpack_from("!H", query, end + 1)
    known = lookup(".".join(labels))
    addresses = (known or [])[:MAX_ADDRESSES] if record_type == _TYPE_A else []
    # QR, AA and RA set; RD as asked.
    response_flags = 0x8480 | flags & 0x0100 | (_NXDOMAIN if known is None else 0)
    # 0xC00C points back to the name of the question.
    records = b"".join(
        struct.pack("!HHHIH4s", 0xC00C, _TYPE_A, 1, TTL_S, 4, IPv4Address(address).packed) for address in addresses
    )
    header = _HEADER.pack(ident, response_flags, 1, len(addresses), 0, 0)
    return header + query[_HEADER.size : end + 5] + records


async def serve(host: str, lookup: Lookup) -> None:
    """Answer queries on UDP port 53 of ``host`` until cancelled; what is no query gets no answer."""
    async with await anyio.create_udp_socket(local_host=host, local_port=53) as udp:
        async for packet, (peer_host, peer_port) in udp:
            try:
                response = answer(packet, lookup)
            except ValueError:
                continue
            await udp.sendto(response, peer_host, peer_port)
