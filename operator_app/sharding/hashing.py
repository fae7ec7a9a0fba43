"""Which shard a tenant belongs to: rendezvous hashing. Pure, and the same on every replica, version and machine.

A hash of shard and tenant is the shard's bid for the tenant, and the highest bid wins. A tenant moves only if a new
shard has a higher bid, or its own shard is removed: of T tenants over N shards, about T / (N + 1) move when a shard is
added, all of them to the new one. (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.)
"""

import functools
import hashlib


def bid(name: str, shard: int) -> int:
    """The bid of ``shard`` for ``name``: 64 bits, uniformly distributed, independent for every pair."""
    return int.from_bytes(hashlib.blake2b(f"{name}/{shard}".encode(), digest_size=8).digest(), "big")


@functools.lru_cache(maxsize=65_536)
def shard_of(tenant: str, shards: int) -> int:
    """The shard of a tenant, from 0 to ``shards - 1``. ``shards`` is at least 1."""
    return max(range(shards), key=lambda shard: bid(tenant, shard))
