"""Shards as ranges of the API server's hash of namespaces, and where to cut them so that they are of one size. Pure.

A list or watch can be restricted to ranges of that hash, and to nothing else. It keeps names that are alike together,
so ranges of one length may have all namespaces in one of them: the cuts follow from the namespaces that exist. When
they change, a namespace may belong to another shard; that is as if the number of shards had changed, and ``election``
makes sure that no shard of two divisions is held at the same time. How replicas agree on cuts is in ``agreement``.
"""

import bisect
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

from operator_app.kube.hash_ranges import HASHES, HashRange, hash_of

EVEN_PART: Final = 0.02
"""This part of a shard's size is its length, so that namespaces to come are divided, too, where there are few."""

WORTH_FACTOR: Final = 2.0
WORTH_PROXIES: Final = 10
"""New cuts are worth the pause that they cost where they make the largest shard smaller by both of these."""


@dataclass(frozen=True)
class Ranges:
    """One division of all hashes into shards: shard ``n`` ends, and the next one begins, at the ``n``-th of ``cuts``.

    The cuts do not descend. Between two equal ones is a shard that no namespace belongs to.
    """

    cuts: tuple[int, ...]

    @property
    def shards(self) -> int:
        """How many there are."""
        return len(self.cuts) + 1

    @cached_property
    def number(self) -> int:
        """What identifies this division in Leases, as the number of shards identifies one by rendezvous hashing."""
        digest = int.from_bytes(hashlib.blake2b(self.text.encode(), digest_size=8).digest(), "big")
        return digest * 1_000 + self.shards

    @property
    def text(self) -> str:
        """The cuts as they are written into the Lease."""
        return ",".join(f"{each:016x}" for each in self.cuts)

    @classmethod
    def of_text(cls, text: str, shards: int) -> Self | None:
        """The division into ``shards`` that a replica has written; ``None`` for what none can have written."""
        parts = text.split(",") if text else []
        is_written = all(len(each) in (16, 17) and set(each) <= set("0123456789abcdef") for each in parts)
        if not is_written or len(parts) != shards - 1:
            return None
        cuts = tuple(int(each, 16) for each in parts)
        is_ordered = all(0 <= a <= b <= HASHES for a, b in zip((0, *cuts), (*cuts, HASHES), strict=True))
        return cls(cuts) if is_ordered else None

    def shard_of(self, namespace: str) -> int:
        """The shard of a namespace."""
        return bisect.bisect_right(self.cuts, hash_of(namespace))

    def range_of(self, shard: int) -> HashRange:
        """The hashes of a shard."""
        bounds = (0, *self.cuts, HASHES)
        return HashRange(bounds[shard], bounds[shard + 1])

    def largest(self, proxies: Mapping[str, int]) -> int:
        """How many proxies the largest shard has, given how many are in each namespace."""
        sizes = [0] * self.shards
        for namespace, count in proxies.items():
            sizes[self.shard_of(namespace)] += count
        return max(sizes)


def balanced(proxies: Mapping[str, int], shards: int) -> Ranges:
    """The division whose shards have about the same number of proxies, given how many are in each namespace.

    The ``n``-th cut is where ``n`` of ``shards`` parts of the proxies come before. A namespace is never divided, so a
    large one may leave shards beside it with less, or with nothing.
    """
    points = sorted((hash_of(namespace), count) for namespace, count in proxies.items() if count > 0)
    total = sum(count for _, count in points)
    if not total:
        return Ranges(tuple(HASHES * n // shards for n in range(1, shards)))
    even = total * EVEN_PART / (1 - EVEN_PART)
    cuts: list[int] = []
    before, at = 0.0, 0  # the size of everything below the hash ``at``
    for point, count in (*points, (HASHES, 0)):
        length = even * (point - at) / HASHES
        while len(cuts) < shards - 1 and before + length >= (wanted := (total + even) * (len(cuts) + 1) / shards):
            cuts.append(min(point, at + int((wanted - before) / even * HASHES)))
        before, at = before + length, point
        while len(cuts) < shards - 1 and before + count > (wanted := (total + even) * (len(cuts) + 1) / shards):
            # The cut would be inside of this namespace: it comes before or behind it, where the error is smaller.
            cuts.append(point if wanted - before < count / 2 else min(point + 1, HASHES))
        before, at = before + count, min(point + 1, HASHES)
    return Ranges(tuple(cuts))


def better(current: Ranges, proxies: Mapping[str, int]) -> Ranges | None:
    """Other cuts with which the largest shard is so much smaller that a change is worth it; ``None`` if there are none.

    Shards change as a whole when replicas come and go, so only the sizes of shards count here.
    """
    found = balanced(proxies, current.shards)
    now, then = current.largest(proxies), found.largest(proxies)
    return found if now >= WORTH_FACTOR * then and now - then >= WORTH_PROXIES else None
