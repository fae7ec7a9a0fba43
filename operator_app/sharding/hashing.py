"""Which shard a tenant belongs to: rendezvous hashing. Pure, and the same on every replica, version and machine.

Another division, by ranges of the API server's hash, is in ``ranges``.

A hash of shard and tenant is the shard's bid for the tenant, and the highest bid wins. A tenant moves only if a new
shard has a higher bid, or its own shard is removed: of T tenants over N shards, about T / (N + 1) move when a shard is
added, all of them to the new one. (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.)
"""

import functools
import hashlib
from dataclasses import dataclass
from typing import Protocol


def bid(name: str, shard: int) -> int:
    """The bid of ``shard`` for ``name``: 64 bits, uniformly distributed, independent for every pair."""
    return int.from_bytes(hashlib.blake2b(f"{name}/{shard}".encode(), digest_size=8).digest(), "big")


@functools.lru_cache(maxsize=65_536)
def shard_of(tenant: str, shards: int) -> int:
    """The shard of a tenant, from 0 to ``shards - 1``. ``shards`` is at least 1."""
    return max(range(shards), key=lambda shard: bid(tenant, shard))


class Division(Protocol):
    """How namespaces are divided into shards."""

    @property
    def shards(self) -> int:
        """How many shards there are."""

    @property
    def number(self) -> int:
        """What Leases have to say which division a shard is one of; the same for equal divisions only. Not 0."""

    def shard_of(self, namespace: str, /) -> int:
        """The shard of a namespace, from 0 to ``shards - 1``."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The division by rendezvous hashing, which follows from the number of shards alone."""

    shards: int

    @property
    def number(self) -> int:
        """The number of shards."""
        return self.shards

    def shard_of(self, namespace: str) -> int:
        """The shard of a namespace."""
        return shard_of(namespace, self.shards)
