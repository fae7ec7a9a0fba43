"""The interface of an outside registry, a system that maps hostnames to proxies, and the values that it exchanges.

A record is keyed by the UID of its EnvoyProxy and carries the installation that wrote it and the generation that it
was made from. All three guard every write: a registry never lets an older generation replace a newer one, and never
changes a record of another installation, cluster or UID.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from operator_app.api.kinds import Key
from operator_app.api.models import Protocol as ListenerProtocol
from operator_app.registration.identity import Installation
from operator_app.results import Outcome, Problem


@dataclass(frozen=True, slots=True)
class Port:
    """One reachable port of a proxy."""

    name: str
    port: int
    protocol: ListenerProtocol


@dataclass(frozen=True, slots=True)
class Record:
    """What is published about one proxy.

    ``address`` is an IPv4 or IPv6 address or a DNS name, and ``more_addresses`` are further IP addresses, if there are
    any; their order means nothing. ``ttl_s`` is ``None`` where the proxy leaves it to the registry. Without a
    ``hostname`` nothing is published, and no outside registry is called.

    ``former`` are the installations that this one was before its id was changed, as the ledger knows: their record with
    this UID is this proxy's own, and is rewritten.

    ``is_held`` tells that this registry has confirmed the hostname for this proxy before, as the ledger knows. Where a
    registry let two claims of one hostname pass at the same time, the one that is held stays.

    ``replaces_newer``: a record with this UID that was made from a newer generation is replaced, because the cluster
    was restored to an older state. Only whoever repairs a restored cluster asks for that.
    """

    uid: str
    generation: int
    proxy: Key
    hostname: str | None
    address: str
    ports: tuple[Port, ...]
    ttl_s: int | None = None
    former: frozenset[Installation] = frozenset()
    more_addresses: tuple[str, ...] = ()
    is_held: bool = False
    replaces_newer: bool = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses, sorted."""
        return tuple(sorted({self.address, *self.more_addresses}))


class Comparison(StrEnum):
    """What a registry has under the hostname of a record, compared with that record."""

    ABSENT = "absent"
    MATCHING = "matching"
    DIFFERENT = "different"
    """Same UID, other contents: an older generation, or changed by hand."""
    NEWER = "newer"
    """Same UID, made from a newer generation than the record's."""
    FOREIGN = "foreign"
    """Another owner's, or without a proof of who owns it."""
    UNOWNED = "unowned"
    """Exactly this record's addresses, and nothing that says whose they are: what did was removed."""


@dataclass(frozen=True, slots=True)
class Registration:
    """The result of a registration; without a ``problem``, the registry has confirmed exactly this record.

    ``requeue_after_s`` requests another reconcile after so many seconds. With a problem, ``owner_uid`` may name the
    proxy of this installation that has the hostname outside.
    """

    outcome: Outcome
    problem: Problem | None = None
    requeue_after_s: float | None = None
    owner_uid: str | None = None


@dataclass(frozen=True, slots=True)
class OutsideRecord:
    """One record as a registry lists it, for an audit. ``uid`` identifies the proxy.

    ``generation`` is the proxy's that it was made from, where the registry knows it. ``proxy`` is ``None`` where the
    registry does not know namespace and name: what is public should not tell them.
    """

    uid: str
    name: str
    proxy: Key | None = None
    generation: int | None = None


class Registry(Protocol):
    """An outside system that stores one record for each hostname. Every method may be repeated and cancelled anywhere.

    Assumes one caller at a time for each proxy. Raises the errors of ``operator_app.errors``: ``TransientError`` when
    the system as a whole fails for now (down, slow, 5xx, 429 with its ``retry_after_s``), which opens its circuit
    breaker; ``ConflictError`` for a passing failure of one record only (somebody else changed it at the same time);
    ``TerminalError`` for what lasts until somebody acts (credentials, no such zone).
    """

    async def observe(self, record: Record) -> Comparison:
        """Compare what the registry has with ``record``. Writes nothing."""
        ...

    async def register(self, record: Record) -> Registration:
        """Write ``record``, unless the registry has it already, and confirm the write by a read."""
        ...

    async def deregister(self, uid: str, hostname: str, *, former: frozenset[Installation] = frozenset()) -> Outcome:
        """Remove the record of ``hostname`` if it is this installation's and has this UID, and confirm the removal.

        ``former`` is as in :class:`Record`. ``UNCHANGED``: there was no record. ``SKIPPED``: there is a record of
        another owner, which stays.
        """
        ...

    def entries(self) -> AsyncIterator[OutsideRecord]:
        """List every record that was written by this installation, and none of any other."""
        ...
