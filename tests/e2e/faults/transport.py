"""The carrier inside the operator's process: a transport around the real one. It alone can kill the process."""

import os
import signal
from collections.abc import AsyncIterator

import anyio
import httpx2

from tests.e2e.faults.injector import Injector
from tests.e2e.faults.plan import Asked, Fault, FaultKind, asked
from tests.e2e.faults.responses import DELAY_S, Break, StreamEditor, refusal


class FaultyTransport(httpx2.AsyncBaseTransport):
    """Passes requests on, except where the injector's plan has a fault. Several transports may share one injector."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, injector: Injector) -> None:
        self._inner = inner
        self._injector = injector
        self._first_lists: dict[str, bytes] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The real response, or what the plan makes of it."""
        target = request.url.raw_path.decode()
        what = asked(request.method, target, request.headers.get("content-type", ""))
        fault = self._injector.request(what, await request.aread())
        if fault is None:
            return await self._forward(request, what, target)
        return await self._injected(request, what, target, fault)

    async def _injected(self, request: httpx2.Request, what: Asked, target: str, fault: Fault) -> httpx2.Response:
        refused = refusal(fault.kind)
        if refused is not None:
            code, headers, body = refused
            return httpx2.Response(code, headers=headers, content=body, request=request)
        match fault.kind:
            case FaultKind.RESET:
                raise httpx2.WriteError("reset before anything was sent", request=request)
            case FaultKind.KILL_BEFORE:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.DELAY:
                await anyio.sleep(DELAY_S)
                response = await self._forward(request, what, target)
                await anyio.sleep(DELAY_S)
                return response
            case FaultKind.OLD_LIST if target in self._first_lists:
                return self._list(request, 200, self._first_lists[target])
        response = await self._forward(request, what, target)
        if fault.kind is FaultKind.HANG:
            await response.aclose()
            await anyio.sleep_forever()
        if fault.kind is FaultKind.LOST_ANSWER:
            await response.aclose()
            raise httpx2.ReadError("the answer was lost", request=request)
        if fault.kind is FaultKind.KILL_BEHIND:
            os.kill(os.getpid(), signal.SIGKILL)
        return response

    async def _forward(self, request: httpx2.Request, what: Asked, target: str) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        if response.status_code != 200 or what.verb not in ("list", "watch"):
            return response
        if what.verb == "watch":
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            edited = _EditedStream(response.stream, StreamEditor(self._injector, what.kind))
            return httpx2.Response(200, headers=response.headers, stream=edited, request=request)
        body = await response.aread()
        await response.aclose()
        self._injector.listed(what.kind, body)
        self._first_lists.setdefault(target, body)
        return self._list(request, response.status_code, body)

    def _list(self, request: httpx2.Request, code: int, body: bytes) -> httpx2.Response:
        return httpx2.Response(code, headers={"content-type": "application/json"}, content=body, request=request)

    async def aclose(self) -> None:
        """Close the real transport."""
        await self._inner.aclose()


class _EditedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, editor: StreamEditor) -> None:
        self._inner = inner
        self._editor = editor

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            for piece in self._editor.feed(chunk):
                match piece:
                    case bytes():
                        yield piece
                    case Break.CUT:
                        raise httpx2.RemoteProtocolError("the stream was cut")
                    case Break.SILENCE:
                        await anyio.sleep_forever()
                    case Break.END:
                        return

    async def aclose(self) -> None:
        await self._inner.aclose()
