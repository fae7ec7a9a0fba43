"""Asks one Pod what its Envoy has loaded, over HTTP at its readiness port."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio
import httpx

from operator_app.api.models import READINESS_PORT
from operator_app.dataplane.answers import MAX_ANSWER_BYTES, Answer, parsed
from operator_app.envoy.internal import LOADED_PATH

TIMEOUT_S: Final = 1.5
"""Bound on one question. A Pod that is reached at all answers within milliseconds."""

MAX_ASKED_AT_ONCE: Final = 64
"""Questions in flight, of all proxies together."""

Ask = Callable[[str], Awaitable[Answer]]
"""Asks the Pod at an IP address. Raises ``UnreachableError``."""


class UnreachableError(Exception):
    """A Pod could not be asked; the text is why, in a few words."""


@asynccontextmanager
async def asking() -> AsyncGenerator[Ask]:
    """A client for as long as the context lasts; each question is a connection of its own, and follows no redirect."""
    limiter = anyio.CapacityLimiter(MAX_ASKED_AT_ONCE)
    limits = httpx.Limits(max_connections=MAX_ASKED_AT_ONCE, max_keepalive_connections=0)
    async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, limits=limits) as client:

        async def ask(ip: str) -> Answer:
            async with limiter:
                try:
                    with anyio.fail_after(TIMEOUT_S):
                        return parsed(await _text(client, ip))
                except (TimeoutError, httpx.TimeoutException):
                    raise UnreachableError(f"no answer within {TIMEOUT_S:g} s") from None
                except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                    raise UnreachableError(str(error) or type(error).__name__) from None
                except ValueError as error:
                    raise UnreachableError(f"what answers is no proxy: {error}") from None

        yield ask


async def _text(client: httpx.AsyncClient, ip: str) -> str:
    host = f"[{ip}]" if ":" in ip else ip
    async with client.stream("GET", f"http://{host}:{READINESS_PORT}{LOADED_PATH}") as response:
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"status {response.status_code}")
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes")
    return body.decode(errors="replace")
