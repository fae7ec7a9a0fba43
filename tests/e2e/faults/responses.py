"""Responses that the carriers give in place of the API server: refusals, and edited watch streams. Pure."""

import json
from collections.abc import Iterator
from enum import Enum
from http import HTTPStatus
from typing import Any, Final

from tests.e2e.faults.injector import Injector
from tests.e2e.faults.plan import FaultKind

RETRY_AFTER_S: Final = 1
DELAY_S: Final = 1.0
"""How long a delayed request waits on its way there, and its answer again on its way back."""

_CODES: Final = {
    FaultKind.UNAUTHORIZED: (401, "Unauthorized"),
    FaultKind.FORBIDDEN: (403, "Forbidden"),
    FaultKind.NOT_FOUND: (404, "NotFound"),
    FaultKind.CONFLICT: (409, "Conflict"),
    FaultKind.INVALID: (422, "Invalid"),
    FaultKind.THROTTLED: (429, "TooManyRequests"),
    FaultKind.BROKEN: (500, "InternalError"),
    FaultKind.UNAVAILABLE: (503, "ServiceUnavailable"),
    FaultKind.GONE: (410, "Expired"),
}


def refusal(kind: FaultKind) -> tuple[int, dict[str, str], bytes] | None:
    """Status, headers and body with which the API server would refuse; ``None`` for faults of another kind."""
    if kind not in _CODES:
        return None
    code, reason = _CODES[kind]
    if kind is FaultKind.NOT_FOUND:
        # A router's, of a kind that is not served for a moment: that an object is not there, it does not say.
        return code, {"content-type": "text/plain"}, b"404 page not found\n"
    headers = {"content-type": "application/json"}
    if kind is FaultKind.THROTTLED:
        headers["retry-after"] = str(RETRY_AFTER_S)
    return code, headers, json.dumps(_status(code, reason)).encode()


def phrase(code: int) -> bytes:
    """The reason phrase of a status line."""
    return HTTPStatus(code).phrase.encode()


class Break(Enum):
    """How an edited stream stops."""

    CUT = "the connection ends without the end of the body"
    SILENCE = "nothing more is sent, and the connection stays open"
    END = "the body ends correctly"


class StreamEditor:
    """Edits one watch stream, line by line, as its injector's plan says."""

    def __init__(self, injector: Injector, kind: str) -> None:
        self._injector = injector
        self._kind = kind
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes | Break]:
        """Yield what to send to the client for a chunk of the body. Nothing may follow a ``Break``."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield from self._edited(line)

    def _edited(self, line: bytes) -> Iterator[bytes | Break]:
        fault = self._injector.event(self._kind, line)
        match fault.kind if fault is not None else None:
            case None:
                yield line + b"\n"
            case FaultKind.HIDE:
                return
            case FaultKind.REPLAY if fault is not None:
                for each in (line, *self._injector.past(fault.about, self._kind)):
                    yield each + b"\n"
            case FaultKind.CUT:
                yield line[: len(line) // 2]
                yield Break.CUT
            case FaultKind.HALF_OPEN:
                yield Break.SILENCE
            case FaultKind.GONE_IN_STREAM:
                yield json.dumps({"type": "ERROR", "object": _status(410, "Expired")}).encode() + b"\n"
                yield Break.END
            case other:
                raise ValueError(f"{other} can't happen to an event")


def _status(code: int, reason: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "metadata": {},
        "code": code,
        "reason": reason,
        "message": "a fault that was injected by a test",
        # As the API server's own refusals have them; one without any is an admission webhook's.
        "details": {
            "name": "it",
            "kind": "things",
            "causes": [{"reason": "FieldValueInvalid", "field": "spec", "message": "injected"}] if code == 422 else [],
        },
    }
