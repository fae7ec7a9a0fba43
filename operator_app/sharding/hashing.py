"""Which shard a tenant belongs to: rendezvous hashing. Pure, and the same on every replica, version and machine.

Each shard bids for each tenant with a hash of the two, and the highest bid wins. A tenant moves only if a new shard
outbids its old one or its old shard goes: of T tenants over N shards, about T / (N + 1) move when a shard is added, all
of them to the new one. (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.)
"""

import functools
import hashlib


def bid(name: str, shard: int) -> int:
    """How much ``shard`` bids for ``name``: 64 bits, uniform, independent for every pair."""
    return int.from_bytes(hashlib.blake2b(f"{name}/{shard}".encode(), digest_size=8).digest(), "big")


@functools.lru_cache(maxsize=65_536)
def shard_of(tenant: str, shards: int) -> int:
    """The shard of a tenant, from 0 to ``shards - 1``. ``shards`` is at least 1."""
    return max(range(shards), key=lambda shard: bid(tenant, shard))
