"""Backends that remember what they were asked, and clients that send exactly what a test says."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any, Final

from tests.e2e.envoy.envoy_process import DEADLINE_S, EnvoyProcess, served

Pairs = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a backend has received it; header names in lower case, in their order."""

    method: str
    path: str
    headers: Pairs
    body: bytes
    number: int
    """How many requests the backend had received with this one."""

    def values(self, name: str) -> list[str]:
        """The values of a header."""
        return [value for each, value in self.headers if each == name]


@dataclass(frozen=True, slots=True)
class Reply:
    """One response; ``delay_s`` seconds before it, ``closes`` the connection after it."""

    status: int = 200
    body: bytes = b""
    headers: Pairs = field(default_factory=list)
    delay_s: float = 0.0
    closes: bool = False


Script = Callable[[Request], Reply | None]
"""What a backend does with a request; ``None``: it closes the connection without a response."""


class Server(socketserver.ThreadingTCPServer):
    """An HTTP/1.1 backend at ``address`` that answers with its name, or as its ``script`` says."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, name: str, script: Script | None = None, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, _Connection)
        self.name = name
        self.requests: list[Request] = []
        self.connections = 0
        self.script = script or (lambda _: Reply(body=name.encode()))
        self.lock = threading.Lock()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    def declared(self, **fields: Any) -> dict[str, Any]:
        """This server as a backend of a spec."""
        return {"name": self.name, "endpoints": [{"host": "127.0.0.1", "port": self.port}]} | fields

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error."""


class _Connection(socketserver.StreamRequestHandler):
    wbufsize = -1
    disable_nagle_algorithm = True

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        with server.lock:
            server.connections += 1
        while line := self.rfile.readline().decode().strip():
            method, path, _ = line.split(" ", 2)
            headers: Pairs = []
            while entry := self.rfile.readline().decode().strip():
                name, _, value = entry.partition(":")
                headers.append((name.lower(), value.strip()))
            length = int(dict(headers).get("content-length", 0))
            body = self.rfile.read(length)
            with server.lock:
                request = Request(method, path, headers, body, len(server.requests) + 1)
                server.requests.append(request)
            reply = server.script(request)
            if reply is None:
                return
            threading.Event().wait(reply.delay_s)
            extra = "".join(f"{name}: {value}\r\n" for name, value in reply.headers)
            head = f"HTTP/1.1 {reply.status} X\r\ncontent-length: {len(reply.body)}\r\n{extra}\r\n"
            self.wfile.write(head.encode() + (b"" if method == "HEAD" else reply.body))
            self.wfile.flush()
            if reply.closes:
                return


@contextmanager
def serving(name: str, script: Script | None = None, address: tuple[str, int] = ("127.0.0.1", 0)) -> Iterator[Server]:
    """A running backend, on loopback unless ``address`` is another one."""
    with Server(name, script, address) as server, served(server):
        yield server


@dataclass(frozen=True, slots=True)
class Answer:
    """One response as a client has received it."""

    status: int
    body: str
    headers: Pairs

    def value(self, name: str) -> str | None:
        """The first value of a header."""
        return next((value for each, value in self.headers if each.lower() == name), None)


LOOPBACK: Final = "127.0.0.1"


def ask(
    proxy: EnvoyProcess,
    listener: str,
    path: str,
    *,
    method: str = "GET",
    host: str = "any.test",
    headers: Pairs | None = None,
    body: bytes | None = None,
    source: str = LOOPBACK,
) -> Answer:
    """One request on a connection of its own, from the loopback address ``source``."""
    connection = HTTPConnection(LOOPBACK, proxy.port(listener), timeout=DEADLINE_S, source_address=(source, 0))
    with contextlib.closing(connection):
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in [("host", host), *(headers or [])]:
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        return answer_of(connection.getresponse())


def answer_of(response: HTTPResponse) -> Answer:
    """A response, read to its end."""
    return Answer(response.status, response.read().decode(), response.getheaders())


def raw(port: int, sent: bytes, *, family: int = socket.AF_INET) -> bytes:
    """Everything that comes back for some bytes, until the peer closes the connection."""
    address = "::1" if family == socket.AF_INET6 else LOOPBACK
    with socket.socket(family) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect((address, port))
        connection.sendall(sent)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                found += chunk
        return found
