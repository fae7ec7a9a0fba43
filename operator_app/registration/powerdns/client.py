"""PowerDNS's HTTP API as far as the registry needs it: three reads and one change, and what each failure means.

Requests are never retried here, but for a key that was renewed; redirects are not followed, since they would carry the
key elsewhere. Whose records they are is not known here.

API: the PowerDNS Authoritative Server's manual, "Built-in Webserver and HTTP API", ``/api/v1/servers/.../zones``.
"""

from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import httpx
import msgspec

from operator_app.errors import (
    ForbiddenError,
    InvalidError,
    NotFoundError,
    ThrottledError,
    TransientError,
    UndecodableError,
)
from operator_app.kube import fencing

SEARCH_LIMIT: Final = 1000
"""Results asked for of a search, which the server would otherwise end at 100."""

_MAX_SENTENCE: Final = 300

T = TypeVar("T")


class Content(msgspec.Struct, frozen=True):
    """One record of a set. A disabled one is stored and not served."""

    content: str
    disabled: bool = False


class RecordSet(msgspec.Struct, frozen=True):
    """All records of one name and type. ``name`` has the dot at the end; a set may have comments and no records."""

    name: str
    type: str
    ttl: int
    records: tuple[Content, ...] = ()


class _Zone(msgspec.Struct, frozen=True):
    rrsets: tuple[RecordSet, ...]


class _Hit(msgspec.Struct, frozen=True):
    name: str = ""
    type: str = ""


class _Error(msgspec.Struct, frozen=True):
    error: str = ""


@dataclass(frozen=True, slots=True)
class Replace:
    """Make ``contents`` the only records of this name and type."""

    name: str
    type: str
    ttl_s: int
    contents: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """One entry of a PATCH."""
        records = [{"content": content, "disabled": False} for content in self.contents]
        entry = {"name": f"{self.name}.", "type": self.type, "ttl": self.ttl_s}
        return entry | {"changetype": "REPLACE", "records": records}


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove every record of this name and type; none is fine."""

    name: str
    type: str

    def as_json(self) -> dict[str, Any]:
        """One entry of a PATCH."""
        return {"name": f"{self.name}.", "type": self.type, "changetype": "DELETE"}


Edit = Replace | Delete


class ApiKey(httpx.Auth):
    """Signs requests with the key in a file, which is read again when the server refuses the key (401).

    Raises ``ForbiddenError`` (``RegistryUnauthorized``) when there is no key that could be sent.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._key: str | None = None

    def __repr__(self) -> str:
        return f"ApiKey({str(self._file)!r})"

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """Send with the known key; after a 401 once more, if the file has another one."""
        known = self._key
        if known is None:
            known = self._key = await self._read()
        request.headers["X-API-Key"] = known
        response = yield request
        if response.status_code == httpx.codes.UNAUTHORIZED:
            self._key = await self._read()
            if self._key != known:
                request.headers["X-API-Key"] = self._key
                yield request

    async def _read(self) -> str:
        try:
            key = (await anyio.Path(self._file).read_text(encoding="ascii")).strip()
        except (OSError, UnicodeDecodeError) as error:
            problem = getattr(error, "strerror", None) or "it is not plain text"
            raise ForbiddenError("RegistryUnauthorized", f"the API key in {self._file}: {problem}") from None
        if not key.isprintable() or not key:
            raise ForbiddenError("RegistryUnauthorized", f"the API key in {self._file} is empty or more than one line")
        return key


class PowerDnsApi:
    """One PowerDNS server. ``timeout_s`` bounds each request as a whole, but the listing of a zone only while silent.

    Every method raises ``TransientError`` for what passes by itself (no connection, no answer in time, 408, 5xx),
    ``ThrottledError`` for 429, ``UndecodableError`` for what is not this API's answer, and the ``TerminalError``
    leaves ``ForbiddenError`` (``RegistryUnauthorized``), ``NotFoundError`` (``ZoneNotFound``) and ``InvalidError``
    (``RecordRefused``). A cancelled or failed change may have been made: read before the next one.
    """

    def __init__(self, client: httpx.AsyncClient, *, server_id: str, timeout_s: float) -> None:
        self._client = client
        self._server = f"/api/v1/servers/{server_id}"
        self._timeout_s = timeout_s
        self._changing: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def record_sets(self, zone: str, name: str) -> tuple[RecordSet, ...]:
        """The record sets at one name that have records; 4.7 leaves disabled records out.

        A server may tell more than was asked (4.7: every comment of the zone; old ones: every record), so the answer is
        filtered here.
        """
        with anyio.move_on_after(self._timeout_s):
            answer = await self._send("GET", self._zone_path(zone), params={"rrset_name": f"{name}."})
            sets = _decoded(answer, _Zone).rrsets
            return tuple(each for each in sets if each.records and each.name.lower() == f"{name}.")
        raise self._too_slow()

    async def types_at(self, name: str) -> frozenset[str]:
        """The types of every record at one name, the disabled ones included, in whatever zone of the server.

        The server looks at all its records for this (a search has no index), so it is for rare questions. Too many
        results to tell are told as the type ``ANY``.
        """
        with anyio.move_on_after(self._timeout_s):
            params = {"q": name, "object_type": "record", "max": SEARCH_LIMIT}
            hits = _decoded(await self._send("GET", f"{self._server}/search-data", params=params), tuple[_Hit, ...])
            types = {hit.type for hit in hits if hit.name.lower().removesuffix(".") == name}
            return frozenset(types | {"ANY"} if len(hits) >= SEARCH_LIMIT else types)
        raise self._too_slow()

    async def all_record_sets(self, zone: str) -> tuple[RecordSet, ...]:
        """Every record set of a zone: megabytes where it is large."""
        return _decoded(await self._send("GET", self._zone_path(zone)), _Zone).rrsets

    async def change(self, zone: str, edits: Sequence[Edit]) -> None:
        """Make all edits, in their order and in one transaction: all of them, or none.

        Changes of one zone wait here for each other, and that time does not count for the timeout: each writes the
        zone's SOA, so at the server they exclude each other anyway, and SQLite refuses with a 500 what another database
        lets wait.
        Nothing is sent once the right to write has run out (``FencedError``).
        """
        async with self._changing[zone]:
            with anyio.move_on_after(self._timeout_s):
                fencing.check()
                await self._send(
                    "PATCH",
                    self._zone_path(zone),
                    json={"rrsets": [edit.as_json() for edit in edits]},
                    extensions={"trace": fencing.check_before_sending(fencing.check)},
                )
                return
        raise self._too_slow()

    def _zone_path(self, zone: str) -> str:
        return f"{self._server}/zones/{zone}."

    async def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            answer = await self._client.request(method, path, **content)
        except httpx.TimeoutException:
            raise self._too_slow() from None
        except httpx.HTTPError as error:
            # The error's text may come from deep below; its type says enough and can't hold anything of the request.
            raise TransientError(f"no answer from PowerDNS: {type(error).__name__}") from None
        if answer.is_success:
            return answer
        raise _failure(answer)

    def _too_slow(self) -> TransientError:
        return TransientError(f"PowerDNS did not answer within {self._timeout_s:g} s")


def _decoded(answer: httpx.Response, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(answer.content, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UndecodableError(
            f"PowerDNS answered {answer.status_code} with something else than its API's JSON"
        ) from None


def _failure(answer: httpx.Response) -> Exception:
    sentence = f"PowerDNS answered {answer.status_code}{_told(answer.content)}"
    match answer.status_code:
        case 401 | 403:
            return ForbiddenError("RegistryUnauthorized", f"{sentence}: its API key must be the one of the operator")
        case 404:
            return NotFoundError(
                "ZoneNotFound", f"{sentence}: there is no such zone, or no server of the configured id"
            )
        case 429:
            return ThrottledError(sentence, retry_after_s=_retry_after_s(answer.headers))
        case 400 | 409 | 413 | 422:
            return InvalidError("RecordRefused", sentence)
        case code if code == 408 or code >= 500:
            return TransientError(sentence, retry_after_s=_retry_after_s(answer.headers))
        case _:
            return UndecodableError(f"{sentence}, which is not an answer of its API")


def _told(body: bytes) -> str:
    """The server's own sentence, on one line and bounded; nothing where it told none."""
    try:
        sentence = msgspec.json.decode(body, type=_Error).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return f" ({' '.join(sentence.split())[:_MAX_SENTENCE]})" if sentence else ""


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, where ``Retry-After`` (RFC 9110 section 10.2.3) tells them as a number."""
    value = headers.get("retry-after", "").strip()
    return float(value) if value.isascii() and value.isdigit() else None
