"""Ranges of the API server's own hash of namespaces, by which it can filter lists and watches (KEP-5866). Pure.

The hash is FNV-1a with 64 bits (RFC 9923), as ``k8s.io/apimachinery/pkg/sharding`` computes it. Names that differ in
their last character only have neighbouring hashes. Who holds which range belongs to ``sharding``.
"""

import functools
from dataclasses import dataclass
from typing import Final

HASHES: Final = 2**64
"""Hashes are below this."""

_OFFSET: Final = 0xCBF29CE484222325
_PRIME: Final = 0x100000001B3


@functools.lru_cache(maxsize=65_536)
def hash_of(namespace: str) -> int:
    """The API server's hash of a namespace's name, from 0 to ``HASHES - 1``."""
    value = _OFFSET
    for byte in namespace.encode():
        value = (value ^ byte) * _PRIME % HASHES
    return value


@dataclass(frozen=True, slots=True)
class HashRange:
    """The namespaces with hashes from ``begin`` up to and without ``end``; both are from 0 to ``HASHES``."""

    begin: int
    end: int

    def __contains__(self, namespace: str) -> bool:
        return self.begin <= hash_of(namespace) < self.end

    @property
    def is_empty(self) -> bool:
        """Whether no namespace can be in it."""
        return self.begin >= self.end

    @property
    def selector(self) -> str:
        """The value of ``shardSelector`` in the query of a list or watch."""
        return f"shardRange(object.metadata.namespace, '0x{self.begin:016x}', '0x{self.end:016x}')"


ALL_HASHES: Final = HashRange(0, HASHES)

Coverage = str | HashRange | None
"""What one watch covers: a namespace, a range of them, or ``None`` for all of them."""


def is_covered(namespace: str, by: Coverage) -> bool:
    """Whether a watch that covers ``by`` delivers the objects of a namespace."""
    if isinstance(by, HashRange):
        return namespace in by
    return by in (None, namespace)
