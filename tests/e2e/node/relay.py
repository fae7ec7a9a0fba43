"""The two ways through the wall around a node's network, both carried by the keeper, which stands outside.

Inwards: the API server asks kubelets and Pods by way of an HTTP proxy on a Unix socket (its egress selector, RFC 9110
section 9.3.6), and the connections that the proxy makes begin inside. Outwards: the port that the API server has inside
leads to its real one on loopback. Nothing else passes, so no address of a node ever appears outside.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from tests.e2e.node.network import inside

CHUNK_BYTES: Final = 1 << 16
HEADER_TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 10.0

_Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def serve_outwards(namespace: Path, address: tuple[str, int], api_server_port: int) -> asyncio.Server:
    """Listen at ``address`` inside; each connection is one to ``api_server_port`` on loopback outside."""
    with inside(namespace):
        listener = socket.create_server(address)

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", api_server_port)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _relay(reader, writer, connect)

    return await asyncio.start_server(handle, sock=listener, limit=CHUNK_BYTES)


async def serve_inwards(namespace: Path, proxy_socket: Path) -> asyncio.Server:
    """Be the HTTP proxy at ``proxy_socket``: ``CONNECT`` leads to an address inside."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEADER_TIMEOUT_S)
            host, port = _target(head)
        except (TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            writer.close()
            return

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            try:
                return await _connected_inside(namespace, host, port)
            except (OSError, TimeoutError) as error:
                writer.write(f"HTTP/1.1 502 Bad Gateway\r\n\r\n{error}".encode())
                raise

        await _relay(reader, writer, connect, greeting=b"HTTP/1.1 200 Connection established\r\n\r\n")

    return await asyncio.start_unix_server(handle, proxy_socket, limit=CHUNK_BYTES)


async def _connected_inside(namespace: Path, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    with inside(namespace):
        # Made here, it stays inside; connecting may then take its time without holding this thread there.
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(connection, (host, port))
            return await asyncio.open_connection(sock=connection, limit=CHUNK_BYTES)
    except BaseException:
        connection.close()
        raise


def _target(head: bytes) -> tuple[str, int]:
    """Address and port of a ``CONNECT`` request. Raises ``ValueError`` for any other."""
    method, authority, _version = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
    if method != "CONNECT":
        raise ValueError(f"only CONNECT is served, not {method}")
    host, _, port = authority.rpartition(":")
    return host, int(port)


async def _relay(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connect: _Connect, *, greeting: bytes = b""
) -> None:
    """Copy both ways until both ends have said all, or one is gone."""
    with contextlib.suppress(OSError, TimeoutError), contextlib.closing(writer):
        far_reader, far_writer = await connect()
        with contextlib.closing(far_writer):
            writer.write(greeting)
            async with asyncio.TaskGroup() as copying:
                copying.create_task(_copy(reader, far_writer))
                copying.create_task(_copy(far_reader, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(CHUNK_BYTES):
            target.write(data)
            await target.drain()
        target.write_eof()
    except OSError:
        # The other direction has nobody to serve any more.
        target.close()
