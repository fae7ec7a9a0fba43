"""Making a proxy known outside its namespace: what a registry is, whichever one it is.

A record is keyed by the UID of its EnvoyProxy and carries the generation that it was made from. Both are the fence: a
registry never lets an older generation replace a newer one, and never touches a record of another UID.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from operator_app.api.kinds import Key
from operator_app.api.models import Protocol as ListenerProtocol
from operator_app.results import Outcome, Problem


@dataclass(frozen=True, slots=True)
class Port:
    """One reachable port of a proxy."""

    name: str
    port: int
    protocol: ListenerProtocol


@dataclass(frozen=True, slots=True)
class Record:
    """What the outside world is told about one proxy.

    ``address`` is an IPv4 or IPv6 address or a DNS name; ``ttl_s`` is ``None`` where the proxy leaves it to the
    registry. Without a ``hostname`` nothing is published, and no outside registry is asked about it.
    """

    uid: str
    generation: int
    proxy: Key
    hostname: str | None
    address: str
    ports: tuple[Port, ...]
    ttl_s: int | None = None


class Comparison(StrEnum):
    """What a registry holds for a record."""

    ABSENT = "absent"
    MATCHING = "matching"
    DIFFERENT = "different"
    """Ours, by UID, but not what the record says: an older generation, or changed by hand."""
    NEWER = "newer"
    """Ours, by UID, and made from a newer generation than the record's."""
    FOREIGN = "foreign"
    """Somebody else's, or nobody's that can be proved."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What became of a record; no ``problem`` means: the registry confirms exactly this record.

    ``requeue_after_s`` asks for another look after so many seconds.
    """

    outcome: Outcome
    problem: Problem | None = None
    requeue_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class OutsideRecord:
    """One record as a registry lists it, for an audit. ``proxy`` is for people; only ``uid`` counts."""

    uid: str
    proxy: Key
    name: str


class Registry(Protocol):
    """An outside system that keeps one record for each hostname. Every method may be repeated and interrupted anywhere.

    Assumes one caller at a time for each proxy. Raises the errors of ``operator_app.errors``: ``TransientError`` for
    what passes (down, slow, 5xx, 429 with its ``retry_after_s``), after which nobody calls for some seconds;
    ``ConflictError`` for what passes and is about one record only (somebody else changed it at the same time);
    ``TerminalError`` for what does not pass (credentials, no such zone).
    """

    async def observe(self, record: Record) -> Comparison:
        """What the outside holds for ``record``. Writes nothing."""
        ...

    async def register(self, record: Record) -> Registration:
        """Bring the outside to ``record``, without a write where it holds already, and confirm it by a read after."""
        ...

    async def deregister(self, uid: str, hostname: str) -> Outcome:
        """Remove what is ours, by UID, under ``hostname``; when this returns, the removal is confirmed.

        ``UNCHANGED``: there was nothing. ``SKIPPED``: there is a record, and it is somebody else's.
        """
        ...

    def entries(self) -> AsyncIterator[OutsideRecord]:
        """Every record that names this operator as its maker."""
        ...
