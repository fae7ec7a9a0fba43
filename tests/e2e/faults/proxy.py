"""The carrier between processes: a reverse proxy with TLS of its own, between the operator and the API server.

It shows a certificate of its own authority, and the kubeconfig that it writes trusts only that one; the bearer token
passes through. HTTP/1.1 with keep-alive and chunked bodies is h11's. Every client connection has a connection to the
API server of its own, so that a broken one affects no other client.
"""

import base64
import socket
import ssl
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

import anyio
import anyio.abc
import h11
import trustme
import yaml
from anyio.from_thread import start_blocking_portal
from anyio.streams.tls import TLSListener, TLSStream

from operator_app.kube.kubeconfig import endpoint
from tests.e2e.faults.injector import Injector, Notify
from tests.e2e.faults.plan import KILLS, Asked, Fault, FaultKind, Plan, asked
from tests.e2e.faults.responses import DELAY_S, Break, StreamEditor, phrase, refusal

_CHUNK_BYTES: Final = 65536
_DISCONNECTED: Final = (
    anyio.EndOfStream,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    h11.RemoteProtocolError,
    OSError,
)
"""What a connection raises whose other end is closed."""


class FaultProxy:
    """A running proxy for as long as the block lasts; ``use`` gives it plans from any thread.

    Without a plan it changes nothing. ``kubeconfig`` is the file to give to a client in place of the one that the proxy
    was made from.
    """

    def __init__(self, kubeconfig: Path, directory: Path) -> None:
        self._upstream = endpoint(kubeconfig, None, environ={})
        self._original = kubeconfig
        self.kubeconfig = directory / f"through-faults-{kubeconfig.name}"
        self._injector = Injector(Plan(), lambda _: None)
        self._first_lists: dict[str, bytes] = {}
        self._resources = ExitStack()

    def use(self, plan: Plan, notify: Notify) -> None:
        """Replace the plan, and begin to count anew. Raises ``ValueError`` for a fault that no proxy can cause."""
        impossible = [fault for fault in plan.faults if fault.kind in KILLS]
        if impossible:
            raise ValueError(f"a proxy can't kill the operator: {impossible[0]}")
        self._injector = Injector(plan, notify)

    def reset_lists(self) -> None:
        """The next answer to each list is the one that ``OLD_LIST`` repeats later."""
        self._first_lists.clear()

    def __enter__(self) -> Self:
        authority = trustme.CA()
        with ExitStack() as resources:
            portal = resources.enter_context(start_blocking_portal())
            _, (scope, port) = portal.start_task(self._serve, authority)
            resources.callback(portal.call, scope.cancel)
            self._write_kubeconfig(port, authority)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def _write_kubeconfig(self, port: int, authority: trustme.CA) -> None:
        config = yaml.safe_load(self._original.read_text(encoding="utf-8"))
        for each in config["clusters"]:
            each["cluster"] = {
                "server": f"https://127.0.0.1:{port}",
                "certificate-authority-data": _base64(authority.cert_pem.bytes()),
            }
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(yaml.safe_dump(config), encoding="utf-8")

    async def _serve(self, authority: trustme.CA, *, task_status: anyio.abc.TaskStatus[object]) -> None:
        ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(ours)
        tcp = await anyio.create_tcp_listener(local_host="127.0.0.1")
        listener = _QuietListener(tcp, ours, standard_compatible=False)
        with anyio.CancelScope() as scope:
            async with listener:
                task_status.started((scope, tcp.extra(anyio.abc.SocketAttribute.local_port)))
                await listener.serve(self._serve_connection)

    async def _serve_connection(self, stream: TLSStream) -> None:
        """One client's connection, request by request."""
        client = _Peer(stream, h11.Connection(h11.SERVER))
        async with stream:
            with suppress(*_DISCONNECTED):
                async with await self._connect() as behind:
                    server = _Peer(behind, h11.Connection(h11.CLIENT))
                    while await self._exchange(client, server):
                        client.http.start_next_cycle()
                        if server.http.our_state is h11.DONE:
                            server.http.start_next_cycle()

    async def _connect(self) -> TLSStream:
        url = urlsplit(self._upstream.server)
        assert url.hostname is not None
        theirs = ssl.create_default_context(cadata=self._upstream.ca)
        return await anyio.connect_tcp(url.hostname, url.port or 443, ssl_context=theirs, tls_standard_compatible=False)

    async def _exchange(self, client: "_Peer", server: "_Peer") -> bool:
        """Pass one request and its answer on, as the plan says. Returns whether both connections can go on."""
        request = await client.event()
        if not isinstance(request, h11.Request):
            return False
        body = await client.body()
        target = request.target.decode()
        headers = {name.decode().lower(): value.decode() for name, value in request.headers}
        what = asked(request.method.decode(), target, headers.get("content-type", ""))
        fault = self._injector.request(what, body)
        kind = fault.kind if fault is not None else None
        refused = refusal(kind) if kind is not None else None
        if refused is not None:
            await client.answer(*refused)
            return True
        if kind is FaultKind.RESET:
            await client.reset()
            return False
        if kind is FaultKind.DELAY:
            await anyio.sleep(DELAY_S)
        await server.send(request, h11.Data(body), h11.EndOfMessage())
        response = await server.event()
        assert isinstance(response, h11.Response)
        is_lost = kind in (FaultKind.LOST_ANSWER, FaultKind.HANG)
        if what.verb == "watch" and is_lost:
            # The body of a watch has no end to wait for.
            return await self._answer(client, response, b"", what, target, fault)
        if what.verb == "watch" and response.status_code == 200:
            if kind is FaultKind.DELAY:
                await anyio.sleep(DELAY_S)
            await self._stream(client, server, response, StreamEditor(self._injector, what.kind))
            return False
        return await self._answer(client, response, await server.body(), what, target, fault)

    async def _answer(
        self, client: "_Peer", response: h11.Response, body: bytes, what: Asked, target: str, fault: Fault | None
    ) -> bool:
        kind = fault.kind if fault is not None else None
        if kind is FaultKind.LOST_ANSWER:
            await client.reset()
            return False
        if kind is FaultKind.HANG:
            with suppress(*_DISCONNECTED):
                await client.stream.receive()  # returns when the client gives up
            return False
        if kind is FaultKind.DELAY:
            await anyio.sleep(DELAY_S)
        if what.verb == "list" and response.status_code == 200:
            self._injector.listed(what.kind, body)
            first = self._first_lists.setdefault(target, body)
            if kind is FaultKind.OLD_LIST:
                body = first
        headers = {name.decode(): value.decode() for name, value in response.headers}
        await client.answer(response.status_code, headers, body)
        return True

    async def _stream(self, client: "_Peer", server: "_Peer", response: h11.Response, editor: StreamEditor) -> None:
        """Pass a watch on until it ends, breaks, or the client closes; its connections are not used again."""
        async with anyio.create_task_group() as both:

            async def end_with_client() -> None:
                with suppress(*_DISCONNECTED):
                    await client.stream.receive()  # a client that watches sends nothing: this returns when it closes
                both.cancel_scope.cancel()

            both.start_soon(end_with_client)
            with suppress(*_DISCONNECTED):
                await self._pass_on(client, server, response, editor)
            both.cancel_scope.cancel()

    async def _pass_on(self, client: "_Peer", server: "_Peer", response: h11.Response, editor: StreamEditor) -> None:
        await client.send(response)
        while isinstance(event := await server.event(), h11.Data):
            for piece in editor.feed(bytes(event.data)):
                match piece:
                    case bytes():
                        await client.send(h11.Data(piece))
                    case Break.CUT:
                        return  # the connection is closed, though the body has not ended
                    case Break.SILENCE:
                        await anyio.sleep_forever()
                    case Break.END:
                        await client.send(h11.EndOfMessage())
                        return
        await client.send(h11.EndOfMessage())


class _QuietListener(TLSListener):
    """Logs nothing about a client that is killed while it connects."""

    @staticmethod
    async def handle_handshake_error(exc: BaseException, stream: anyio.abc.AnyByteStream) -> None:
        """Close the connection."""
        await anyio.aclose_forcefully(stream)
        if not isinstance(exc, Exception):
            raise exc


class _Peer:
    """One end of a connection: a stream of bytes, and the HTTP state of it."""

    def __init__(self, stream: TLSStream, http: h11.Connection) -> None:
        self.stream = stream
        self.http = http

    async def event(self) -> object:
        """The next part of a message; informational answers are passed over."""
        while True:
            event = self.http.next_event()
            if event is h11.NEED_DATA:
                try:
                    data = await self.stream.receive(_CHUNK_BYTES)
                except anyio.EndOfStream:
                    data = b""
                self.http.receive_data(data)
            elif not isinstance(event, h11.InformationalResponse):
                return event

    async def body(self) -> bytes:
        """The rest of the message."""
        parts = []
        while isinstance(event := await self.event(), h11.Data):
            parts.append(bytes(event.data))
        return b"".join(parts)

    async def send(self, *events: h11.Event) -> None:
        """Send parts of a message, as one write."""
        data = b"".join(self.http.send(event) or b"" for event in events)
        if data:
            await self.stream.send(data)

    async def answer(self, code: int, headers: dict[str, str], body: bytes) -> None:
        """Send a whole answer; its framing is made anew."""
        framing = {"content-length", "transfer-encoding", "connection"}
        kept = [(name, value) for name, value in headers.items() if name.lower() not in framing]
        response = h11.Response(
            status_code=code, reason=phrase(code), headers=[*kept, ("content-length", str(len(body)))]
        )
        await self.send(response, h11.Data(body), h11.EndOfMessage())

    async def reset(self) -> None:
        """Close the connection with a TCP reset: the other end's next read or write fails."""
        raw: socket.socket = self.stream.extra(anyio.abc.SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await anyio.aclose_forcefully(self.stream.transport_stream)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
