"""One DNS query over UDP (RFC 1035 section 4), for tests that check what DNS clients get."""

import secrets
import socket
import struct
from ipaddress import ip_address
from typing import Final

TYPES: Final = {"A": 1, "CNAME": 5, "TXT": 16, "AAAA": 28}
_NAMES: Final = {number: name for name, number in TYPES.items()}
TIMEOUT_S: Final = 5.0


_RECURSION_DESIRED: Final = 0x0100


def resolve(port: int, name: str, kind: str, *, is_recursive: bool = False) -> list[tuple[str, str]]:
    """The answers of the server on loopback as (type, content); empty if there are none, or no such name.

    With ``is_recursive`` the server is asked to find the answer at other servers.
    """
    number = secrets.randbits(16)
    flags = _RECURSION_DESIRED if is_recursive else 0
    question = _wire(name) + struct.pack("!HH", TYPES[kind], 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(TIMEOUT_S)
        client.sendto(
            struct.pack("!6H", number, flags, 1, 0, 0, 0) + question,
            ("127.0.0.1", port),
        )
        message = client.recv(4096)
    echoed, _, _, answers, _, _ = struct.unpack_from("!6H", message)
    assert echoed == number
    found, at = [], 12 + len(question)
    for _ in range(answers):
        _, at = _name(message, at)
        type_, _, _, length = struct.unpack_from("!HHIH", message, at)
        at += 10
        found.append((_NAMES.get(type_, str(type_)), _content(message, at, type_, length)))
        at += length
    return found


def _wire(name: str) -> bytes:
    labels = [label.encode() for label in name.removesuffix(".").split(".")]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def _name(message: bytes, at: int) -> tuple[str, int]:
    """The name at an offset, decompressed, and the offset after it."""
    labels, after = [], None
    while length := message[at]:
        if length >= 0xC0:
            after = after or at + 2
            at = struct.unpack_from("!H", message, at)[0] & 0x3FFF
            continue
        labels.append(message[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels), after or at + 1


def _content(message: bytes, at: int, type_: int, length: int) -> str:
    data = message[at : at + length]
    match _NAMES.get(type_):
        case "A" | "AAAA":
            return str(ip_address(data))
        case "CNAME":
            return _name(message, at)[0]
        case _:
            strings = []
            while data:
                strings.append(data[1 : 1 + data[0]].decode())
                data = data[1 + data[0] :]
            return " ".join(strings)
