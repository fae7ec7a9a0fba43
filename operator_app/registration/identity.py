"""Who a record in an outside registry belongs to: one installation of the operator in one cluster. Pure.

A cluster is known by the UID of its namespace ``kube-system``, which nobody can delete; a cluster restored from a
backup of its objects, or cloned, has another one. An installation is known by its cluster and the id that its installer
chose (``operator_id``). Records outside are public, so they carry digests: whoever reads them learns no name.

Which proxy of an installation a record belongs to is its UID, which is no part of this.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Self

DIGEST_LENGTH: Final = 32
"""Characters of a digest: 128 bits in hexadecimal digits, so that no two clusters or installations share one."""

_TEXT: Final = re.compile(r"([0-9a-f]{32})[.]([0-9a-f]{32})")


@dataclass(frozen=True, slots=True, order=True)
class Installation:
    """One installation of the operator. ``cluster`` is the digest of its cluster, ``name`` of cluster and id."""

    cluster: str
    name: str

    @classmethod
    def of(cls, cluster_uid: str, operator_id: str) -> Self:
        """The installation with this id in the cluster whose namespace ``kube-system`` has this UID.

        The UID is random, so neither digest can be found by trying likely ids.
        """
        return cls(_digest(f"cluster {cluster_uid}"), _digest(f"installation {cluster_uid} {operator_id}"))

    @classmethod
    def parsed(cls, text: str) -> Self | None:
        """Parse what ``str`` returns; ``None`` for any other text."""
        found = _TEXT.fullmatch(text)
        return None if found is None else cls(*found.groups())

    def __str__(self) -> str:
        return f"{self.cluster}.{self.name}"

    def is_same_cluster(self, other: "Installation") -> bool:
        """Whether both are installations in one cluster."""
        return self.cluster == other.cluster

    def former(self, listed: Iterable[str]) -> frozenset["Installation"]:
        """Those of ``listed`` that this installation may have been before its id was changed.

        ``listed`` are the installations that an entry of this installation's own ledger names. One of another cluster
        is in it when the entry was restored or copied from there, and stays somebody else.
        """
        parsed = filter(None, map(Installation.parsed, listed))
        return frozenset(each for each in parsed if each != self and each.is_same_cluster(self))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
