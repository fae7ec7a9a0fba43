"""The operator, made to die right behind its n-th write: ``python -m tests.e2e.crashing_operator run ...``.

``CRASH_BEHIND_WRITE=n`` counts requests that may change something, once the API server has answered them;
``CRASH_ABOUT=a,b`` counts only those whose path contains one of these texts, so that leftovers of another test do not
count. The process is killed by SIGKILL before the operator sees the answer: nothing is flushed, released or remembered.
"""

import functools
import os
import signal
import sys
from unittest import mock

import httpx2

from operator_app import app
from operator_app.__main__ import main
from operator_app.cluster import Cluster


class CrashBehindWrite(httpx2.AsyncBaseTransport):
    """Passes everything on and kills the process behind the n-th write."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, behind: int, about: tuple[str, ...]) -> None:
        self._inner = inner
        self._about = about
        self._left = behind

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer with the real answer, unless this was the last write."""
        response = await self._inner.handle_async_request(request)
        if request.method != "GET" and any(text in request.url.path for text in self._about):
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return response

    async def aclose(self) -> None:
        """Close the real transport."""
        await self._inner.aclose()


if __name__ == "__main__":
    crash = functools.partial(
        CrashBehindWrite,
        behind=int(os.environ["CRASH_BEHIND_WRITE"]),
        about=tuple(os.environ["CRASH_ABOUT"].split(",")),
    )
    connect = functools.partial(Cluster.connect, transport_wrapper=crash)
    with mock.patch.object(app, "run", functools.partial(app.run, connect=connect)):
        sys.exit(main())
