"""What the operator knows of the cluster: the latest seen version of every watched object. Pure, one writer per kind.

Guarantees

* Monotonic per object: an older resourceVersion never replaces a newer one, whichever path it came by (watch, list,
  the answer to one of our own writes).
* A list that is older than what the watch has already shown neither removes nor resurrects anything.
* Every change is reported once: a caller that gets ``False`` has nothing to do.

Assumption: resourceVersions of one kind are integers that grow with every write. The API conventions promise that
order since Kubernetes 1.35 (KEP-5504), and etcd has always provided it.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from operator_app.deltas import Changed, Deleted, Delta, Listed
from operator_app.kinds import Key, Kind, Object, key_of


def version_of(obj: Object) -> int:
    """The object's resourceVersion as a number."""
    return int(obj["metadata"]["resourceVersion"])


Index = Callable[[Object], Hashable | None]
"""What the objects of one kind are looked up by besides their address; ``None`` leaves an object out."""


@dataclass(slots=True)
class _Shelf:
    """The objects of one kind.

    ``index`` gives the second key of an object and ``by_index`` the addresses under each. ``seen`` is the newest
    version that the watch has shown; ``listing`` holds the addresses that the pages of an unfinished list have named
    so far, for each scope that is being listed.
    """

    index: Index
    objects: dict[Key, Object] = field(default_factory=dict)
    by_index: dict[Hashable, set[Key]] = field(default_factory=dict)
    seen: int = 0
    listing: dict[str | None, set[Key]] = field(default_factory=dict)
    is_synced: bool = False

    def set(self, obj: Object) -> None:
        """Put ``obj`` in the place of whatever has its address."""
        key = key_of(obj)
        self.drop(key)
        self.objects[key] = obj
        value = self.index(obj)
        if value is not None:
            self.by_index.setdefault(value, set()).add(key)

    def drop(self, key: Key) -> None:
        """Forget the object at ``key``, if there is one."""
        known = self.objects.pop(key, None)
        if known is None:
            return
        value = self.index(known)
        if value is not None:
            self.by_index[value].discard(key)
            if not self.by_index[value]:
                del self.by_index[value]


class Store:
    """Latest objects by kind, by address and by one index for each kind.

    Not safe for threads; every method returns at once.
    """

    def __init__(self, indexes: Mapping[Kind, Index]) -> None:
        self._shelves = {kind: _Shelf(index) for kind, index in indexes.items()}

    @property
    def is_synced(self) -> bool:
        """Whether every kind has been listed completely at least once."""
        return all(shelf.is_synced for shelf in self._shelves.values())

    def get(self, kind: Kind, key: Key) -> Object | None:
        """The latest known version, or ``None`` where none is known. The object must not be changed by the caller."""
        return self._shelves[kind].objects.get(key)

    def keys(self, kind: Kind) -> tuple[Key, ...]:
        """Addresses of all known objects of a kind."""
        return tuple(self._shelves[kind].objects)

    def indexed(self, kind: Kind, value: Hashable) -> tuple[Object, ...]:
        """All known objects of a kind whose index is ``value``, in the order of their addresses."""
        shelf = self._shelves[kind]
        return tuple(shelf.objects[key] for key in sorted(shelf.by_index.get(value, ())))

    def learn(self, kind: Kind, obj: Object) -> bool:
        """Take over the answer to one of our own requests, so that the next round sees it before the watch tells.

        Returns whether it was news.
        """
        return _put(self._shelves[kind], obj)

    def take(self, delta: Delta) -> tuple[Object, ...]:
        """Take over what a watch has to say, and return what was news: objects as they are now, or last were."""
        shelf = self._shelves[delta.kind]
        match delta:
            case Changed():
                shelf.seen = max(shelf.seen, version_of(delta.object))
                return (delta.object,) if _put(shelf, delta.object) else ()
            case Deleted():
                shelf.seen = max(shelf.seen, version_of(delta.object))
                return (delta.object,) if _remove(shelf, delta.object) else ()
            case Listed():
                return _take_page(shelf, delta)


def _put(shelf: _Shelf, obj: Object) -> bool:
    known = shelf.objects.get(key_of(obj))
    if known is not None and version_of(known) >= version_of(obj):
        return False
    shelf.set(obj)
    return True


def _remove(shelf: _Shelf, obj: Object) -> bool:
    """Take over a deletion. ``obj`` has the version of the deletion, so a newer object of that name is a new life."""
    known = shelf.objects.get(key_of(obj))
    if known is None or version_of(known) > version_of(obj):
        return False
    shelf.drop(key_of(obj))
    return True


def _take_page(shelf: _Shelf, page: Listed) -> tuple[Object, ...]:
    as_of = int(page.resource_version)
    if page.first:
        shelf.listing[page.namespace] = set()
    named = shelf.listing[page.namespace]
    named.update(map(key_of, page.objects))
    # What a list older than the watch shows and the store does not know was deleted in between, and stays away.
    believed = [obj for obj in page.objects if as_of >= shelf.seen or key_of(obj) in shelf.objects]
    news = [obj for obj in believed if _put(shelf, obj)]
    if page.last:
        news += _forget_unnamed(shelf, page.namespace, as_of)
        del shelf.listing[page.namespace]
        shelf.seen = max(shelf.seen, as_of)
        shelf.is_synced = True
    return tuple(news)


def _forget_unnamed(shelf: _Shelf, namespace: str | None, as_of: int) -> list[Object]:
    """Drop what a complete list did not name, unless it is newer than the list."""
    named = shelf.listing[namespace]
    gone = [
        known
        for key, known in shelf.objects.items()
        if key not in named and namespace in (None, key.namespace) and version_of(known) <= as_of
    ]
    for known in gone:
        shelf.drop(key_of(known))
    return gone
