"""A client of PowerDNS's HTTP API: three reads, one change, and the mapping of its failures to the operator's errors.

Requests are not retried, except once with a renewed API key; redirects are not followed, since they would carry the key
to another server. Who owns which records does not belong here.

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
from operator_app.registration.pairs import RecordSet

SEARCH_LIMIT: Final = 1000
"""Upper bound on the results of a search; the server's own default is 100."""

_MAX_ERROR_LENGTH: Final = 300

T = TypeVar("T")


class _Zone(msgspec.Struct, frozen=True):
    rrsets: tuple[RecordSet, ...]


class _Hit(msgspec.Struct, frozen=True):
    name: str = ""
    type: str = ""
    object_type: str = "record"


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
    """Remove every record of this name and type, if there are any."""

    name: str
    type: str

    def as_json(self) -> dict[str, Any]:
        """One entry of a PATCH."""
        return {"name": f"{self.name}.", "type": self.type, "changetype": "DELETE"}


Edit = Replace | Delete


class ApiKey(httpx.Auth):
    """Adds the API key from a file to requests, and reads the file again when the server refuses the key (401).

    Raises ``ForbiddenError`` (``RegistryUnauthorized``) when the file can't be read or has no valid key.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._key: str | None = None

    def __repr__(self) -> str:
        return f"ApiKey({str(self._file)!r})"

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """Send the request with the cached key; after a 401 once more, if the file has another key by now."""
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
    """One PowerDNS server. ``timeout_s`` bounds each request as a whole; of a zone's listing, each wait for data.

    Every method raises ``TransientError`` for failures that pass (no connection, no answer in time, 408, 5xx),
    ``ThrottledError`` for 429, ``UndecodableError`` for anything that is not an answer of this API, and the
    ``TerminalError`` subclasses ``ForbiddenError`` (``RegistryUnauthorized``), ``NotFoundError`` (``ZoneNotFound``) and
    ``InvalidError`` (``RecordRefused``). A change that was cancelled or failed may still have been made: read before
    the next one.
    """

    def __init__(self, client: httpx.AsyncClient, *, server_id: str, timeout_s: float) -> None:
        self._client = client
        self._server = f"/api/v1/servers/{server_id}"
        self._timeout_s = timeout_s
        self._changing: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def record_sets(self, zone: str, name: str) -> tuple[RecordSet, ...]:
        """The record sets at one name that have records; PowerDNS 4.7 leaves disabled records out.

        A server may return more than was requested (4.7: every comment of the zone; older versions: every record), so
        the answer is filtered here.
        """
        with anyio.move_on_after(self._timeout_s):
            answer = await self._send("GET", self._zone_path(zone), params={"rrset_name": f"{name}."})
            sets = _decoded(answer, _Zone).rrsets
            return tuple(each for each in sets if each.records and each.name.lower() == f"{name}.")
        raise self._too_slow()

    async def types_at(self, name: str) -> frozenset[str]:
        """The types of all records at one name, including disabled ones, in any zone of the server.

        ``SOA`` is added where a zone of that name is on the server, and ``ANY`` where the server cuts the result off. A
        search has no index: the server reads all its records, so use it rarely.
        """
        with anyio.move_on_after(self._timeout_s):
            params = {"q": name, "object_type": "all", "max": SEARCH_LIMIT}
            hits = _decoded(await self._send("GET", f"{self._server}/search-data", params=params), tuple[_Hit, ...])
            there = [hit for hit in hits if hit.name.lower().removesuffix(".") == name]
            types = {hit.type for hit in there if hit.object_type == "record"}
            types |= {"SOA" for hit in there if hit.object_type == "zone"}
            return frozenset(types | {"ANY"} if len(hits) >= SEARCH_LIMIT else types)
        raise self._too_slow()

    async def all_record_sets(self, zone: str) -> tuple[RecordSet, ...]:
        """Every record set of a zone; megabytes for a large one."""
        return _decoded(await self._send("GET", self._zone_path(zone)), _Zone).rrsets

    async def change(self, zone: str, edits: Sequence[Edit]) -> None:
        """Make all edits, in their order and in one transaction: all of them, or none.

        Changes of one zone are serialised here, and the wait does not count towards the timeout. Each change writes the
        zone's SOA, so the server serialises them anyway, and SQLite answers 500 where other databases wait. Raises
        ``FencedError``, and sends nothing, when the fencing token has expired.
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
            # The error's text may contain parts of the request; the name of its type can't.
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
    message = f"PowerDNS answered {answer.status_code}{_error_text(answer.content)}"
    match answer.status_code:
        case 401 | 403:
            return ForbiddenError("RegistryUnauthorized", f"{message}: its API key must be the one of the operator")
        case 404:
            return NotFoundError("ZoneNotFound", f"{message}: there is no such zone, or no server of the configured id")
        case 429:
            return ThrottledError(message, retry_after_s=_retry_after_s(answer.headers))
        case 400 | 409 | 413 | 422:
            return InvalidError("RecordRefused", message)
        case code if code == 408 or code >= 500:
            return TransientError(message, retry_after_s=_retry_after_s(answer.headers))
        case _:
            return UndecodableError(f"{message}, which is not an answer of its API")


def _error_text(body: bytes) -> str:
    """The server's own error message in brackets, on one line and cut to length; empty if it sent none."""
    try:
        text = msgspec.json.decode(body, type=_Error).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return f" ({' '.join(text.split())[:_MAX_ERROR_LENGTH]})" if text else ""


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The seconds in ``Retry-After`` (RFC 9110 section 10.2.3); ``None`` without the header, or for a date."""
    value = headers.get("retry-after", "").strip()
    return float(value) if value.isascii() and value.isdigit() else None
