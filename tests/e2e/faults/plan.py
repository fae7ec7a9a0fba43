"""The vocabulary of fault injection: which fault, at which request or event, about which proxy. Pure.

A fault is data. A plan is a tuple of faults in one JSON file, and means the same to both carriers (the transport in the
operator's process and the proxy in front of the API server). Carrying faults out does not belong here.

A *point* is the n-th request of one sort (verb, kind, subresource), or the n-th event of a kind in watch streams, that
is about one namespace. Everything about a proxy is about its namespace: the proxy, its children, and its record in the
registry and its claims on hostnames, which are in another namespace but name the proxy. Lists and watches are about no
namespace, so theirs is empty.
"""

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec

from operator_app.api.kinds import (
    ALL_CHILD_KINDS,
    ENVOY_PROXY,
    EVENT,
    HOSTNAME_CLAIM,
    HOSTNAME_POLICY,
    LEASE,
    NAMESPACE,
    POD,
    PROXY_REGISTRATION,
)

EVENT_VERB: Final = "event"
"""The verb of a point that is an event in a watch stream; the other verbs are those of ``operator_app.kube.client``."""

WRITES: Final = frozenset({"apply", "create", "update", "patch", "delete"})

_KINDS: Final = {
    each.plural: each.kind
    for each in (
        ENVOY_PROXY,
        PROXY_REGISTRATION,
        HOSTNAME_CLAIM,
        HOSTNAME_POLICY,
        *ALL_CHILD_KINDS,
        EVENT,
        LEASE,
        NAMESPACE,
        POD,
    )
}


class FaultKind(StrEnum):
    """What goes wrong. The value is what people read in tables."""

    RESET = "connection reset before sending"
    LOST_ANSWER = "carried out, answer lost"
    DELAY = "delayed"
    HANG = "carried out, no answer until the bound"
    UNAUTHORIZED = "401"
    FORBIDDEN = "403"
    NOT_FOUND = "404"
    CONFLICT = "409"
    INVALID = "422"
    THROTTLED = "429 with Retry-After"
    BROKEN = "500"
    UNAVAILABLE = "503"
    GONE = "410"
    OLD_LIST = "old list data"
    KILL_BEFORE = "kill -9 before"
    KILL_BEHIND = "kill -9 behind"
    CUT = "stream cut inside the object"
    HALF_OPEN = "half-open stream"
    GONE_IN_STREAM = "410 in the stream"
    REPLAY = "stale events replayed"
    HIDE = "event hidden"


KILLS: Final = frozenset({FaultKind.KILL_BEFORE, FaultKind.KILL_BEHIND})
BREAKING: Final = frozenset({FaultKind.CUT, FaultKind.HALF_OPEN, FaultKind.GONE_IN_STREAM})
"""Faults that end a stream, also for all other namespaces whose events it carries."""

ON_THE_WIRE: Final = frozenset(
    {
        FaultKind.RESET,
        FaultKind.LOST_ANSWER,
        FaultKind.DELAY,
        FaultKind.HANG,
        FaultKind.CUT,
        FaultKind.HALF_OPEN,
        FaultKind.OLD_LIST,
    }
)
"""Faults that the proxy carries; all others are carried inside the operator's process."""

_CONNECTION_FAULTS: Final = (FaultKind.RESET, FaultKind.LOST_ANSWER, FaultKind.DELAY, FaultKind.HANG)
_SERVER_FAULTS: Final = (
    FaultKind.UNAUTHORIZED,
    FaultKind.FORBIDDEN,
    FaultKind.NOT_FOUND,
    FaultKind.THROTTLED,
    FaultKind.BROKEN,
    FaultKind.UNAVAILABLE,
)


class Point(NamedTuple):
    """One place where a fault can be injected; ``n`` counts from 1."""

    verb: str
    kind: str
    subresource: str = ""
    n: int = 1

    def __str__(self) -> str:
        subresource = f"/{self.subresource}" if self.subresource else ""
        return f"{self.verb} {self.kind}{subresource} #{self.n}"


class Fault(msgspec.Struct, frozen=True):
    """One thing that goes wrong once. By its ``id`` a carrier reports that it was injected.

    ``then`` goes wrong at the next request about the same namespace, which is the first one of the recovery; it is
    reported as the ``id`` with ``SECOND`` behind it.
    """

    id: str
    kind: FaultKind
    point: Point
    about: str = ""
    then: FaultKind | None = None


SECOND: Final = " and then"


class Plan(msgspec.Struct, frozen=True):
    """What a carrier has to do: inject ``faults``, and report every request and event about ``recorded`` namespaces."""

    faults: tuple[Fault, ...] = ()
    recorded: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Store the plan as JSON."""
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """The plan in a file. Raises ``msgspec.ValidationError`` when it is none."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


class Asked(NamedTuple):
    """One request as far as plans care. ``name`` is empty for collections."""

    verb: str
    kind: str
    subresource: str
    namespace: str
    name: str


def applicable(point: Point) -> tuple[FaultKind, ...]:
    """Every fault that an API server, a network or a kernel can cause at a point."""
    match point.verb:
        case "event":
            return (
                FaultKind.CUT,
                FaultKind.HALF_OPEN,
                FaultKind.GONE_IN_STREAM,
                FaultKind.REPLAY,
                FaultKind.HIDE,
            )
        case "get":
            return (*_CONNECTION_FAULTS, *_SERVER_FAULTS)
        case "list":
            return (*_CONNECTION_FAULTS, *_SERVER_FAULTS, FaultKind.GONE, FaultKind.OLD_LIST)
        case "watch":
            return (*_CONNECTION_FAULTS, *_SERVER_FAULTS, FaultKind.GONE)
        case _:
            kills = (FaultKind.KILL_BEFORE, FaultKind.KILL_BEHIND)
            return (*_CONNECTION_FAULTS, FaultKind.CONFLICT, FaultKind.INVALID, *_SERVER_FAULTS, *kills)


def pairs(point: Point, number: int) -> tuple[tuple[FaultKind, FaultKind], ...]:
    """Two faults in one run, the second at the next request: one pair for each carrier, another one for each number."""
    alone = [kind for kind in applicable(point) if kind not in KILLS]
    carried = [each for each in alone if each in ON_THE_WIRE], [each for each in alone if each not in ON_THE_WIRE]
    return tuple(
        (kinds[number % len(kinds)], kinds[(number + number // len(kinds)) % len(kinds)])
        for kinds in carried
        if kinds and point.verb not in (EVENT_VERB, "list", "watch")
    )


def points_in_all(recordings: Iterable[Iterable[Point]]) -> tuple[Point, ...]:
    """The points that every recording has reached, in the order of the first one."""
    first, *others = [list(each) for each in recordings]
    reached = [set(each) for each in others]
    return tuple(point for point in first if all(point in each for each in reached))


def asked(method: str, target: str, content_type: str) -> Asked:
    """What an HTTP request asks of the API server, in the verbs of ``operator_app.kube.client``.

    https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-uris
    """
    url = urlsplit(target)
    parts = url.path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]  # /api/v1/..., /apis/group/version/...
    namespace = ""
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    plural, name, subresource, *_ = [*parts, "", "", ""]
    return Asked(_verb(method, url.query, name, content_type), _KINDS.get(plural, plural), subresource, namespace, name)


def _verb(method: str, query: str, name: str, content_type: str) -> str:
    match method:
        case "GET" if name:
            return "get"
        case "GET":
            return "watch" if parse_qs(query).get("watch") == ["true"] else "list"
        case "PATCH":
            return "apply" if "apply-patch" in content_type else "patch"
        case "POST":
            return "create"
        case "PUT":
            return "update"
        case _:
            return method.lower()
