"""Network streams that tell cheaply whether their server has closed them.

The connection pool asks every idle connection for that, before and after each request. The library's own answer builds
all attributes of the TLS stream anew each time, to find the socket among them: with thirty idle connections, a fifth of
the operator's CPU time. These streams look the socket up once. The pool, and what it does with the answer, stay as they
are: https://www.encode.io/httpcore/network-backends/.
"""

import select
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore2


class QuickStream(httpcore2.AsyncNetworkStream):
    """A stream of the library, with the same behaviour; ``is_readable`` of a socket that is closed is True."""

    def __init__(self, inner: httpcore2.AsyncNetworkStream) -> None:
        self._inner = inner
        self._socket = inner.get_extra_info("socket")

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - the library's
        """As the library's."""
        return await self._inner.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as above
        """As the library's."""
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        """As the library's."""
        await self._inner.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
    ) -> httpcore2.AsyncNetworkStream:
        """As the library's, on the same socket."""
        return QuickStream(await self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 - the library's own type
        """As the library's."""
        if info != "is_readable" or self._socket is None:
            return self._inner.get_extra_info(info)
        descriptor = self._socket.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))


class QuickBackend(httpcore2.AnyIOBackend):
    """Opens streams as the library does, and makes them quick."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> QuickStream:
        """As the library's."""
        return QuickStream(await super().connect_tcp(host, port, timeout, local_address, socket_options))
