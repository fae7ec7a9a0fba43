"""Traffic that notices what a reload loses: paced requests on kept connections, a WebSocket, a long download.

Servers and clients are sockets in the node's network, driven by one event loop in a thread of its own, so hundreds of
requests a second take little of a busy machine. Nothing here knows Kubernetes.
"""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final, Self

TIMEOUT_S: Final = 15.0
"""Bound on each request: what takes longer is lost."""

_CHUNK_S: Final = 0.05
_UPGRADE: Final = "connection: upgrade\r\nupgrade: websocket\r\n"


@dataclass(slots=True)
class Tally:
    """What became of the traffic of one block: ``answers`` by text, and what was lost, in words."""

    tried: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    messages: int = 0
    chunks: int = 0
    latest: dict[int, str] = field(default_factory=dict)
    """The last answer of each kept connection."""
    changed_at_mono: dict[int, float] = field(default_factory=dict)
    """When that came for the first time in a row."""

    def __str__(self) -> str:
        return (
            f"{self.tried} requests tried, {len(self.lost)} lost; {self.messages} messages of a WebSocket, "
            f"{self.chunks} pieces of a download"
        )


class Traffic:
    """Backends and clients, as long as the context lasts; ``inside`` is a block in which sockets are where Pods are."""

    def __init__(self, inside: AbstractContextManager[None], address: str) -> None:
        self._inside = inside
        self._address = address
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._run)
        self._is_up = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.call_soon_threadsafe(self._end.set)
        self._thread.join(TIMEOUT_S)

    @property
    def _running(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    def _run(self) -> None:
        # Sockets belong to the network in which this thread is when it makes them.
        with self._inside, asyncio.Runner() as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_up.set()
        await self._end.wait()
        for server in self._servers:
            server.close()

    def serve(self, name: str) -> int:
        """Start a backend that answers with ``name``; returns its port."""
        started = asyncio.run_coroutine_threadsafe(_server(self._address, name), self._running)
        server = started.result(TIMEOUT_S)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    @contextmanager
    def flowing(self, targets: list[tuple[str, int]], *, kept: int, every_s: float) -> Iterator[Tally]:
        """Traffic to these addresses and ports in turn: ``kept`` connections with a request each ``every_s`` seconds.

        The first target has a WebSocket and a download beside. At the end of the block all end in order, and what does
        not is lost.
        """
        tally, done = Tally(), asyncio.Event()

        async def flow() -> None:
            async with asyncio.TaskGroup() as tasks:
                for number in range(kept):
                    host, port = targets[number % len(targets)]
                    delay_s = every_s * number / kept
                    tasks.create_task(_requests(tally, done, number, host, port, every_s=every_s, delay_s=delay_s))
                tasks.create_task(_web_socket(tally, done, *targets[0]))
                tasks.create_task(_download(tally, done, *targets[0]))

        flowing = asyncio.run_coroutine_threadsafe(flow(), self._running)
        try:
            yield tally
        finally:
            self._running.call_soon_threadsafe(done.set)
            flowing.result(2 * TIMEOUT_S)


async def _server(address: str, name: str) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if "upgrade: websocket" in head.lower():
                    writer.write(f"HTTP/1.1 101 Switching Protocols\r\n{_UPGRADE}\r\n".encode())
                    while data := await reader.read(1024):
                        writer.write(data)
                    break
                if " /download " in head:
                    await _pieces(writer)
                    break
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(name)}\r\n\r\n{name}".encode())

    return await asyncio.start_server(answer, address, 0)


async def _pieces(writer: asyncio.StreamWriter) -> None:
    """An endless download of numbered lines; the client ends it."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    number = 0
    while True:
        line = f"{number:07d}\n"
        writer.write(f"{len(line):x}\r\n{line}\r\n".encode())
        await writer.drain()
        number += 1
        await asyncio.sleep(_CHUNK_S)


@asynccontextmanager
async def _connected(
    tally: Tally, what: str, host: str, port: int
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection; whatever ends it early is lost."""
    writer = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
        yield reader, writer
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
        tally.lost.append(f"{what}: {error!r}")
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> str:
    async with asyncio.timeout(TIMEOUT_S):
        return (await reader.readuntil(b"\r\n\r\n")).decode().lower()


async def _wait(done: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await done.wait()


async def _requests(
    tally: Tally, done: asyncio.Event, number: int, host: str, port: int, *, every_s: float, delay_s: float
) -> None:
    """Requests on one connection, at a fixed pace."""
    await _wait(done, delay_s)
    loop = asyncio.get_running_loop()
    async with _connected(tally, f"connection {number}", host, port) as (reader, writer):
        due_mono = loop.time()
        while not done.is_set():
            tally.tried += 1
            writer.write(b"GET / HTTP/1.1\r\nhost: shop.example.com\r\n\r\n")
            head = await _head(reader)
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
            async with asyncio.timeout(TIMEOUT_S):
                text = (await reader.readexactly(length)).decode()
            if not head.startswith("http/1.1 200 "):
                tally.lost.append(f"{head.splitlines()[0]}: {text}")
            else:
                tally.answers[text] += 1
                if tally.latest.get(number) != text:
                    tally.latest[number], tally.changed_at_mono[number] = text, loop.time()
            if "connection: close" in head:
                raise ValueError("the connection was closed")
            due_mono += every_s
            await _wait(done, max(0.0, due_mono - loop.time()))


async def _web_socket(tally: Tally, done: asyncio.Event, host: str, port: int) -> None:
    """One connection whose numbered messages come back, one after the other."""
    async with _connected(tally, "WebSocket", host, port) as (reader, writer):
        key = "sec-websocket-version: 13\r\nsec-websocket-key: dGVzdA==\r\n"
        writer.write(f"GET /socket HTTP/1.1\r\nhost: shop.example.com\r\n{_UPGRADE}{key}\r\n".encode())
        head = await _head(reader)
        if not head.startswith("http/1.1 101 "):
            raise ValueError(head.splitlines()[0])
        while not done.is_set():
            message = f"{tally.messages:07d}".encode()
            writer.write(message)
            async with asyncio.timeout(TIMEOUT_S):
                back = await reader.readexactly(len(message))
            if back != message:
                raise ValueError(f"{back!r} instead of {message!r}")
            tally.messages += 1
            await _wait(done, _CHUNK_S)


async def _download(tally: Tally, done: asyncio.Event, host: str, port: int) -> None:
    """One response that never ends, of numbered lines."""
    async with _connected(tally, "download", host, port) as (reader, writer):
        writer.write(b"GET /download HTTP/1.1\r\nhost: shop.example.com\r\n\r\n")
        head = await _head(reader)
        if not head.startswith("http/1.1 200 "):
            raise ValueError(head.splitlines()[0])
        while not done.is_set():
            async with asyncio.timeout(TIMEOUT_S):
                size = int(await reader.readline(), 16)
                line = (await reader.readexactly(size + 2))[:size]
            for each in line.decode().splitlines():
                if int(each) != tally.chunks:
                    raise ValueError(f"piece {each} after {tally.chunks}")
                tally.chunks += 1
