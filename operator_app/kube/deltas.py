"""What a watch tells the store: the vocabulary between them, and nothing else."""

from dataclasses import dataclass

from operator_app.api.kinds import Kind, Object


@dataclass(frozen=True, slots=True)
class Listed:
    """One page of a complete, consistent list of a kind.

    A list is a run of pages of one ``resource_version``; ``first`` opens it, ``last`` closes it, and one page may be
    both. A ``first`` page discards whatever an unfinished list left behind. What the store knew of this ``kind`` and
    ``namespace`` (None: all namespaces) and no page has named is gone once ``last`` arrives; before that, nothing may
    be taken for deleted. The first ``last`` page is the moment from which the kind is in sync.
    """

    kind: Kind
    namespace: str | None
    objects: tuple[Object, ...]
    resource_version: str
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Changed:
    """An object appeared or changed; this is its newest state that the watch knows."""

    kind: Kind
    object: Object


@dataclass(frozen=True, slots=True)
class Deleted:
    """An object is gone, or has left the label selector; ``object`` is its last state."""

    kind: Kind
    object: Object


Delta = Listed | Changed | Deleted
