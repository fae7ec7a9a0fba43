"""What a watch delivers to its sink: pages of a list, changes and deletions."""

from dataclasses import dataclass

from operator_app.api.kinds import Kind, Object
from operator_app.kube.hash_ranges import Coverage, HashRange


@dataclass(frozen=True, slots=True)
class Listed:
    """One page, or a part of one, of a complete, consistent list of a kind.

    A list is a run of pages of one ``resource_version``; ``first`` opens it, ``last`` closes it, and one page may be
    both. A ``first`` page discards the pages of an unfinished list. An object of this ``kind`` and ``namespace`` (None:
    all namespaces, or those in ``hashes``) that is on no page is deleted once ``last`` arrives; before that, no object
    may be taken for deleted. With the first ``last`` page, the kind is synced.
    """

    kind: Kind
    namespace: str | None
    objects: tuple[Object, ...]
    resource_version: str
    first: bool
    last: bool
    hashes: HashRange | None = None

    @property
    def coverage(self) -> Coverage:
        """What the list covers."""
        return self.namespace if self.hashes is None else self.hashes


@dataclass(frozen=True, slots=True)
class Changed:
    """An object was created or changed; ``object`` is its state after that."""

    kind: Kind
    object: Object


@dataclass(frozen=True, slots=True)
class Deleted:
    """An object was deleted, or no longer matches the label selector; ``object`` is its last state."""

    kind: Kind
    object: Object


Delta = Listed | Changed | Deleted
