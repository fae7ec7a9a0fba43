"""Reads the API server's responses: from bytes to objects, pages and watch events, or to an ``OperatorError``.

Pure: it neither sends nor receives, and uses no HTTP library. A refusal can have many shapes (a JSON ``Status``, a
proxy's HTML page, plain text, an empty body), so the body is parsed whatever its Content-Type is. Retrying does not
belong here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz
from http import HTTPStatus
from typing import Any, Final, Literal

import msgspec

from operator_app.api.kinds import Key, Kind, Object
from operator_app.errors import (
    Cause,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    OperatorError,
    PolicyError,
    ThrottledError,
    TransientError,
    UndecodableError,
)

_MAX_SENTENCE: Final = 1000
"""The length, in characters, to which the server's message is cut: it may quote a large refused object in full."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some objects of a list, still encoded. All pages of one list show the cluster at the same ``resource_version``.

    ``continue_token`` asks for the next page; it is empty on the last one. Objects are decoded when they are asked for:
    decoded ones take several times the memory of their JSON. What decodes them raises ``UndecodableError`` for an item
    that is no object. ``is_filtered`` is whether the server says that it has filtered by a range of hashes, which it
    says of built-in kinds only.
    """

    kind: Kind
    encoded: tuple[msgspec.Raw, ...]
    resource_version: str
    continue_token: str
    is_filtered: bool = False

    @property
    def last(self) -> bool:
        """Whether the list ends with this page."""
        return not self.continue_token

    @property
    def items(self) -> list[Object]:
        """All objects, decoded anew by each call."""
        return [self._decoded(each) for each in self.encoded]

    def batches(self, size_bytes: int) -> Iterator[tuple[tuple[Object, ...], bool]]:
        """The objects in batches, each with whether it is the page's last one; of no objects there is an empty one.

        A batch has at most ``size_bytes`` of JSON, or one object. It is decoded when it is asked for.
        """
        batch: list[msgspec.Raw] = []
        batch_bytes = 0
        for each in self.encoded:
            each_bytes = len(memoryview(each))
            if batch and batch_bytes + each_bytes > size_bytes:
                yield tuple(map(self._decoded, batch)), False
                batch, batch_bytes = [], 0
            batch.append(each)
            batch_bytes += each_bytes
        yield tuple(map(self._decoded, batch)), True

    def versions(self) -> Iterator[tuple[Key, int]]:
        """Address and resourceVersion of each object; nothing else of it is decoded."""
        for each in self.encoded:
            try:
                metadata = _VERSION_ONLY.decode(each).metadata
                version = int(metadata.resource_version)
            except (ValueError, msgspec.DecodeError) as error:
                raise UndecodableError(_NO_LIST, kind=self.kind) from error
            yield Key(metadata.namespace, metadata.name), version

    def _decoded(self, encoded: msgspec.Raw) -> Object:
        """One item. Those of built-in lists come without ``apiVersion`` and ``kind``; here every object has them."""
        try:
            item: Object = msgspec.json.decode(encoded, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UndecodableError(_NO_LIST, kind=self.kind) from error
        return item | {"apiVersion": self.kind.api_version, "kind": self.kind.kind}


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One line of a watch. A BOOKMARK's object has only ``metadata`` with the resourceVersion that was reached."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object

    @property
    def resource_version(self) -> str:
        """Where a watch resumes after this event."""
        version: str = self.object["metadata"]["resourceVersion"]
        return version


class _Line(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _MetadataOnly(msgspec.Struct):
    metadata: dict[str, Any]


class _Version(msgspec.Struct, rename="camel"):
    name: str
    resource_version: str
    namespace: str = ""


class _VersionOnly(msgspec.Struct):
    metadata: _Version


_LIST_METADATA: Final = {
    "resource_version": "resourceVersion",
    "continue_token": "continue",
    "shard_info": "shardInfo",
}


class _ListMetadata(msgspec.Struct, rename=_LIST_METADATA):
    resource_version: str
    continue_token: str = ""
    shard_info: dict[str, Any] | None = None


class _Page(msgspec.Struct):
    metadata: _ListMetadata
    items: list[msgspec.Raw] | None


class _Cause(msgspec.Struct):
    reason: str | None = None
    message: str | None = None
    field: str | None = None


class _Details(msgspec.Struct, rename="camel"):
    name: str | None = None
    kind: str | None = None
    causes: list[_Cause] | None = None
    retry_after_seconds: float | None = None


class _Status(msgspec.Struct):
    """``metav1.Status``, as far as decisions need it; every part may be missing or null."""

    kind: str | None = None
    code: int | None = None
    reason: str | None = None
    message: str | None = None
    details: _Details | None = None


_STATUS: Final = msgspec.json.Decoder(_Status)
_LINE: Final = msgspec.json.Decoder(_Line)
_METADATA_ONLY: Final = msgspec.json.Decoder(_MetadataOnly)
_VERSION_ONLY: Final = msgspec.json.Decoder(_VersionOnly)
_PAGE: Final = msgspec.json.Decoder(_Page)

_NO_LIST: Final = "the API server's answer is no list"


def object_in(body: bytes, kind: Kind, key: Key | None) -> Object:
    """The object in a response. Raises ``UndecodableError`` when it is not one."""
    decoded = _decoded(body, kind, key)
    if not _is_object(decoded):
        raise UndecodableError("the API server's answer is no Kubernetes object", kind=kind, key=key)
    return decoded


def page_in(body: bytes, kind: Kind) -> Page:
    """The page in a response. Raises ``UndecodableError`` when it is not one."""
    try:
        page = _PAGE.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UndecodableError(_NO_LIST, kind=kind) from error
    metadata = page.metadata
    is_filtered = metadata.shard_info is not None
    return Page(kind, tuple(page.items or ()), metadata.resource_version, metadata.continue_token, is_filtered)


def watch_event(line: bytes, kind: Kind) -> WatchEvent:
    """The event in one line of a watch.

    Raises what a ``Status`` in an ERROR event stands for (a 500 if it has no code), and ``UndecodableError`` for
    anything that is no event: cut JSON, an unknown type, an object without a resourceVersion.
    https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
    """
    try:
        event = _LINE.decode(line)
        match event.type:
            case "ERROR":
                raise refusal(_status(bytes(event.object)).code or 500, {}, bytes(event.object), kind=kind)
            case "BOOKMARK":
                metadata = _METADATA_ONLY.decode(event.object).metadata
                obj: Any = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
            case _:
                obj = msgspec.json.decode(event.object)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UndecodableError("a line of the watch is not JSON of an event", kind=kind) from error
    match event.type:
        case "ADDED" | "MODIFIED" | "DELETED" | "BOOKMARK" if _is_object(obj):
            return WatchEvent(event.type, obj)
        case _:
            raise UndecodableError(f"a line of the watch is no event known here (type {event.type})", kind=kind)


def _decoded(body: bytes, kind: Kind, key: Key | None) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UndecodableError("the API server's answer is not a JSON object", kind=kind, key=key) from error


def _is_object(decoded: object) -> bool:
    """Whether it has metadata with a resourceVersion."""
    match decoded:
        case {"metadata": {"resourceVersion": str()}}:
            return True
        case _:
            return False


def refusal(  # noqa: PLR0911 - one return per class of refusal
    status_code: int, headers: Mapping[str, str], body: bytes, *, kind: Kind, key: Key | None = None
) -> OperatorError:
    """The error that a response other than 2xx stands for; it is returned, and nothing is raised.

    ``headers`` must look names up without regard to case, or hold lower-case names.

    Classified by status code, ``Status.reason`` and ``Status.details`` alone:
    https://github.com/kubernetes/community/blob/master/contributors/devel/sig-architecture/api-conventions.md#response-status-kind
    """
    status = _status(body)
    details = status.details or _Details()
    causes = tuple(
        Cause(field=cause.field or "", reason=cause.reason or "", message=cause.message or "")
        for cause in details.causes or ()
    )
    sentence = _sentence(status_code, status, headers)
    reason = status.reason or _phrase(status_code)
    if any(cause.reason == "ResourceVersionTooLarge" for cause in causes):
        # etcd went back to an older state (a restored backup); as after 410, only a new list helps.
        return GoneError(sentence, kind=kind, key=key)
    if status_code in (400, 403, 422) and _is_of_admission(status, causes):
        return PolicyError(sentence, kind=kind, key=key)
    match status_code:
        case 401 | 403:
            terminating = any(cause.reason == "NamespaceTerminating" for cause in causes)
            return ForbiddenError("NamespaceTerminating" if terminating else reason, sentence, kind=kind, key=key)
        case 404:
            return NotFoundError(_absent(details, key), sentence, kind=kind, key=key)
        case 409:
            return ConflictError(sentence, kind=kind, key=key, reason=reason, causes=causes)
        case 410:
            return GoneError(sentence, kind=kind, key=key)
        case 429:
            return ThrottledError(sentence, kind=kind, key=key, retry_after_s=_retry_after_s(headers, details))
        case code if code < 400 or code == 408 or code >= 500:
            return TransientError(sentence, kind=kind, key=key, retry_after_s=_retry_after_s(headers, details))
        case _:
            return InvalidError(reason, sentence, kind=kind, key=key, causes=causes)


def _is_of_admission(status: _Status, causes: tuple[Cause, ...]) -> bool:
    """Whether an admission webhook or a ValidatingAdmissionPolicy refused the request.

    A webhook's answer has no ``details`` unless the webhook sets them (apiserver
    ``pkg/admission/plugin/webhook/errors``); a policy's has causes without field and reason. Validation names fields,
    and RBAC and quotas name the kind.
    """
    if status.kind is None:
        return False
    if causes:
        return not any(cause.field or cause.reason for cause in causes)
    return status.details is None or not status.details.kind


def _status(body: bytes) -> _Status:
    try:
        status = _STATUS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Status()
    return status if status.kind == "Status" else _Status()


def _absent(details: _Details, key: Key | None) -> str:
    """The reason of a 404: for a kind that is not served, the router sends a plain 404 without details."""
    if not details.name:
        return "KindNotServed"
    if details.kind == "namespaces" and key is not None and details.name == key.namespace != key.name:
        return "NamespaceNotFound"
    return "NotFound"


def _retry_after_s(headers: Mapping[str, str], details: _Details) -> float | None:
    """Seconds to wait, from ``Retry-After`` (RFC 9110 section 10.2.3) or else ``details.retryAfterSeconds``.

    A date counts from the response's own ``Date``, so the clocks of server and operator need not agree.
    """
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    until, sent = parsedate_tz(value), parsedate_tz(headers.get("date", ""))
    if until is not None and sent is not None:
        return max(0.0, float(mktime_tz(until) - mktime_tz(sent)))
    return details.retry_after_seconds or None


def _sentence(status_code: int, status: _Status, headers: Mapping[str, str]) -> str:
    if status.message:
        return f"the API server answered {status_code}: {status.message[:_MAX_SENTENCE]}"
    content_type = headers.get("content-type", "no content type")
    return f"the API server answered {status_code} without a Status ({content_type})"


def _phrase(status_code: int) -> str:
    """A CamelCase reason for a refusal without one."""
    try:
        return "".join(word.capitalize() for word in HTTPStatus(status_code).phrase.replace("-", " ").split())
    except ValueError:
        return f"Http{status_code}"
