"""A relay of DNS messages over TCP, between the registry and its server, that counts them and injects faults."""

import contextlib
import socket
import socketserver
import struct
import time
from dataclasses import dataclass
from typing import Final

import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdatatype
import dns.tsig

from tests.e2e.powerdns.counting import Counting
from tests.e2e.powerdns.proxy import FORWARD_TIMEOUT_S

_HEADER_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class DnsFault:
    """The fault of one message; without arguments it is forwarded as it is.

    The delay comes first. With ``rcode`` the message is answered with that code instead of forwarded, signed unless
    ``is_unsigned``; ``tsig_error`` is what the answer says of the message's signature. With ``is_dropped`` the
    connection is closed and the server never gets the message. With ``is_lost`` the server processes it, and the
    connection is closed instead of answered; with ``is_cut`` in the middle of its answer. With ``is_truncated`` the
    answer has no records and says that it is truncated, with ``is_garbled`` it is no DNS message.
    """

    delay_s: float = 0
    rcode: dns.rcode.Rcode | None = None
    tsig_error: dns.rcode.Rcode = dns.rcode.NOERROR
    is_unsigned: bool = False
    is_dropped: bool = False
    is_lost: bool = False
    is_cut: bool = False
    is_truncated: bool = False
    is_garbled: bool = False


class FaultyRelay(Counting[DnsFault]):
    """A relay on a free port of loopback, for as long as the context lasts.

    Messages are counted as ``QUERY``, ``UPDATE`` or ``TRANSFER``. ``key`` signs the answers that the relay makes.
    """

    def __init__(self, target_port: int, key: dns.tsig.Key) -> None:
        server = _Server(self, target_port, key)
        super().__init__(DnsFault(), server)
        self.port: int = server.server_address[1]


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, relay: FaultyRelay, target_port: int, key: dns.tsig.Key) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.relay = relay
        self.target_port = target_port
        self.key = key


class _Handler(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        """One connection, which has one message."""
        with contextlib.suppress(OSError, EOFError):
            self._relay(received(self.request))

    def _relay(self, message: bytes) -> None:
        fault = self.server.relay.arrived(_method(message))
        time.sleep(fault.delay_s)
        if fault.is_dropped:
            return
        if fault.rcode is not None or fault.is_truncated:
            send(self.request, self._made(message, fault))
            return
        with socket.create_connection(("127.0.0.1", self.server.target_port), FORWARD_TIMEOUT_S) as upstream:
            send(upstream, message)
            answer = received(upstream)
            if fault.is_lost:
                return
            if fault.is_cut:
                self.request.sendall((struct.pack("!H", len(answer)) + answer)[: len(answer) // 2])
                return
            send(self.request, bytes(len(answer)) if fault.is_garbled else answer)
            if _method(message) == "TRANSFER":
                # A transfer may take several messages, and the client closes the connection once it has all.
                while True:
                    send(self.request, received(upstream))

    def _made(self, message: bytes, fault: DnsFault) -> bytes:
        """An answer that the server has not made."""
        asked = dns.message.from_wire(message, keyring=self.server.key)
        answer = dns.message.make_response(asked, tsig_error=fault.tsig_error)
        if fault.rcode is not None:
            answer.set_rcode(fault.rcode)
        if fault.is_truncated:
            answer.flags |= dns.flags.TC
        if fault.is_unsigned:
            answer.tsig = None
        return answer.to_wire()


def _method(message: bytes) -> str:
    opcode = dns.opcode.from_flags(struct.unpack_from("!H", message, 2)[0])
    if opcode == dns.opcode.UPDATE:
        return "UPDATE"
    at = _HEADER_BYTES
    while message[at]:
        at += 1 + message[at]
    (kind,) = struct.unpack_from("!H", message, at + 1)
    return "TRANSFER" if kind == dns.rdatatype.AXFR else "QUERY"


def received(connection: socket.socket) -> bytes:
    """One message. Raises ``EOFError`` where the connection is closed before it is complete."""
    (length,) = struct.unpack("!H", _exactly(connection, 2))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def send(connection: socket.socket, message: bytes) -> None:
    """Send one message."""
    connection.sendall(struct.pack("!H", len(message)) + message)
