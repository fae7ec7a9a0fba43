"""Making a proxy known outside its namespace: what a registry is, whichever one it is.

A record is keyed by the UID of its EnvoyProxy and carries the generation that it was made from. Both are the fence: a
registry never lets an older generation replace a newer one, and never touches a record of another UID.
"""

from dataclasses import dataclass
from typing import Protocol

from operator_app.api import Protocol as ListenerProtocol
from operator_app.apply import Outcome, Problem
from operator_app.kinds import Key


@dataclass(frozen=True, slots=True)
class Port:
    """One reachable port of a proxy."""

    name: str
    port: int
    protocol: ListenerProtocol


@dataclass(frozen=True, slots=True)
class Record:
    """What the outside world is told about one proxy."""

    uid: str
    generation: int
    proxy: Key
    hostname: str | None
    address: str
    ports: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class Registration:
    """What became of a record in one round; no ``problem`` means: the registry confirms exactly this record."""

    outcome: Outcome
    problem: Problem | None = None


class Registry(Protocol):
    """An outside system that keeps one record for each proxy. Every method can be repeated and interrupted anywhere.

    Errors are those of ``operator_app.errors``.
    """

    async def observe(self, record: Record) -> bool:
        """Whether the outside holds exactly ``record``. Writes nothing."""
        ...

    async def register(self, record: Record) -> Registration:
        """Bring the outside to ``record``; without a write where it holds already."""
        ...

    async def deregister(self, uid: str) -> None:
        """Remove the record of ``uid`` if there is one; when this returns, the removal is confirmed."""
        ...

    def known_lives(self, proxy: Key) -> tuple[str, ...]:
        """UIDs of the records that name ``proxy``, as far as known without asking."""
        ...
