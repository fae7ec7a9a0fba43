"""gRPC over HTTP/2 as its protocol says it (grpc/grpc, doc/PROTOCOL-HTTP2.md): a backend, and a client that calls.

Messages are any bytes, since a proxy reads none of them. No message is longer than a window of HTTP/2 (65,535 bytes),
so that neither side has to wait for one.
"""

import socket
import socketserver
import ssl
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)

from tests.e2e.envoy.envoy_process import DEADLINE_S, served

Pairs = list[tuple[str, str]]

OK: Final = 0
NOT_FOUND: Final = 5
INTERNAL: Final = 13
UNAVAILABLE: Final = 14

HEALTH: Final = "/grpc.health.v1.Health/Check"
SERVING: Final = b"\x08\x01"
"""A HealthCheckResponse whose status is SERVING."""


def framed(message: bytes) -> bytes:
    """A message with its prefix: not compressed, and its length."""
    return struct.pack(">BI", 0, len(message)) + message


def send_message(http: H2Connection, stream: int, message: bytes) -> None:
    """Send a message in as many frames as it needs."""
    data = framed(message)
    for start in range(0, len(data), http.max_outbound_frame_size):
        http.send_data(stream, data[start : start + http.max_outbound_frame_size])


class Messages:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with ``data``."""
        self._buffer += data
        while len(self._buffer) >= 5:
            _, length = struct.unpack(">BI", self._buffer[:5])
            if len(self._buffer) < 5 + length:
                return
            message, self._buffer = self._buffer[5 : 5 + length], self._buffer[5 + length :]
            yield message


@dataclass(slots=True)
class Call:
    """One call as the backend has received it."""

    path: str
    headers: dict[str, str]
    messages: list[bytes] = field(default_factory=list)
    parser: Messages = field(default_factory=Messages)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ends: the messages before it, and the trailers."""

    messages: tuple[bytes, ...] = ()
    status: int = OK
    text: str = ""

    @property
    def trailers(self) -> Pairs:
        """The trailers, as gRPC names them."""
        return [("grpc-status", str(self.status)), *([("grpc-message", self.text)] if self.text else [])]


class Refusal(Enum):
    """How a backend ends a call without an outcome."""

    CLOSED = "it closes the connection, and nobody knows what it has done"
    NOT_BEGUN = "it resets the stream and says that it has not begun (REFUSED_STREAM)"


Method = Callable[[Call], Outcome | Refusal]
"""What the backend does with a call whose messages are all there."""


class GrpcServer(socketserver.ThreadingTCPServer):
    """A gRPC backend. ``methods`` are its methods by path; ``/Talk`` answers each message while the call goes on."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, name: str, methods: Mapping[str, Method]) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.name = name
        self.methods: dict[str, Method] = {HEALTH: lambda _: Outcome((SERVING,)), **methods}
        self.calls: list[Call] = []

    @property
    def port(self) -> int:
        """Where it listens on 127.0.0.1."""
        return int(self.server_address[1])

    def declared(self, **fields: Any) -> dict[str, Any]:
        """This server as a backend of a spec."""
        endpoints = [{"host": "127.0.0.1", "port": self.port}]
        return {"name": self.name, "protocol": "grpc", "endpoints": endpoints} | fields

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error."""


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, GrpcServer)
        self.http = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.http.initiate_connection()
        self.request.sendall(self.http.data_to_send())
        calls: dict[int, Call] = {}
        while data := self.request.recv(65536):
            for event in self.http.receive_data(data):
                if isinstance(event, RequestReceived):
                    headers = {str(name): str(value) for name, value in event.headers}
                    calls[event.stream_id] = Call(headers[":path"], headers)
                elif isinstance(event, DataReceived):
                    self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    call = calls[event.stream_id]
                    for message in call.parser.feed(event.data):
                        call.messages.append(message)
                        if call.path.endswith("/Talk"):
                            self._say(event.stream_id, message.upper(), is_first=len(call.messages) == 1)
                elif isinstance(event, StreamEnded) and not self._finish(
                    server, event.stream_id, calls.pop(event.stream_id)
                ):
                    return
            self.request.sendall(self.http.data_to_send())

    def _say(self, stream: int, message: bytes, *, is_first: bool) -> None:
        if is_first:
            self.http.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
        send_message(self.http, stream, message)

    def _finish(self, server: GrpcServer, stream: int, call: Call) -> bool:
        """End a call; returns whether the connection goes on."""
        if call.path != HEALTH:
            server.calls.append(call)
        if call.path.endswith("/Talk"):
            self.http.send_headers(stream, Outcome().trailers, end_stream=True)
            return True
        outcome = server.methods[call.path](call)
        if isinstance(outcome, Refusal):
            self.http.reset_stream(stream, ErrorCodes.REFUSED_STREAM)
            return outcome is not Refusal.CLOSED
        if not outcome.messages:
            # "Trailers-Only": status and message are in the one block of headers.
            head = [(":status", "200"), ("content-type", "application/grpc")]
            self.http.send_headers(stream, head + outcome.trailers, end_stream=True)
            return True
        for number, message in enumerate(outcome.messages):
            self._say(stream, message, is_first=number == 0)
        self.http.send_headers(stream, outcome.trailers, end_stream=True)
        return True


@contextmanager
def serving_grpc(name: str, methods: Mapping[str, Method]) -> Iterator[GrpcServer]:
    """A running gRPC backend on loopback."""
    with GrpcServer(name, methods) as server, served(server):
        yield server


@dataclass(slots=True)
class Reply:
    """What a client has received of a call. ``trailers`` are those of the end, in one block with the headers or not."""

    headers: dict[str, str] = field(default_factory=dict)
    messages: list[bytes] = field(default_factory=list)
    trailers: dict[str, str] = field(default_factory=dict)
    is_over: bool = False

    @property
    def status(self) -> int:
        """The status of the call, wherever it stands."""
        return int((self.headers | self.trailers)["grpc-status"])


class GrpcClient:
    """One HTTP/2 connection, as a context manager; by TLS with ``context``."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None, server_name: str = "api.test") -> None:
        self._socket: socket.socket = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        if context is not None:
            context.set_alpn_protocols(["h2"])
            self._socket = context.wrap_socket(self._socket, server_hostname=server_name)
        self._http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._http.initiate_connection()
        self._parsers: dict[int, Messages] = {}
        self._replies: dict[int, Reply] = {}

    def __enter__(self) -> Self:
        self._send()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, path: str, *messages: bytes, headers: Pairs | None = None) -> Reply:
        """A call with all its messages at once, to its end."""
        stream = self.begin(path, headers)
        for message in messages:
            self.say(stream, message)
        return self.end(stream)

    def begin(self, path: str, headers: Pairs | None = None) -> int:
        """Start a call; returns its stream."""
        stream = self._http.get_next_available_stream_id()
        head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "api.test")]
        head += [("te", "trailers"), ("content-type", "application/grpc"), *(headers or [])]
        self._http.send_headers(stream, head)
        self._parsers[stream], self._replies[stream] = Messages(), Reply()
        self._send()
        return stream

    def say(self, stream: int, message: bytes) -> None:
        """Send one message of a call."""
        send_message(self._http, stream, message)
        self._send()

    def hear(self, stream: int, count: int) -> list[bytes]:
        """The first ``count`` messages of a call's reply, once they are there."""
        reply = self._replies[stream]
        while len(reply.messages) < count:
            assert not reply.is_over, reply
            self._receive()
        return reply.messages[:count]

    def end(self, stream: int) -> Reply:
        """Say that nothing more comes, and wait for the end of the reply."""
        self._http.end_stream(stream)
        self._send()
        reply = self._replies[stream]
        while not reply.is_over:
            self._receive()
        return reply

    def _send(self) -> None:
        self._socket.sendall(self._http.data_to_send())

    def _receive(self) -> None:
        data = self._socket.recv(65536)
        assert data, "the proxy has closed the connection"
        for event in self._http.receive_data(data):
            assert not isinstance(event, ConnectionTerminated | StreamReset), event
            if isinstance(event, ResponseReceived):
                self._replies[event.stream_id].headers = {str(name): str(value) for name, value in event.headers}
            elif isinstance(event, TrailersReceived):
                self._replies[event.stream_id].trailers = {str(name): str(value) for name, value in event.headers}
            elif isinstance(event, DataReceived):
                self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                self._replies[event.stream_id].messages += self._parsers[event.stream_id].feed(event.data)
            elif isinstance(event, StreamEnded):
                self._replies[event.stream_id].is_over = True
        self._send()
