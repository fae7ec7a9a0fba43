"""What the operator knows of the cluster: the latest seen version of every watched object. Pure, one writer per kind.

Guarantees

* Monotonic per object: an older resourceVersion never replaces a newer one, whichever path it came by (watch, list,
  the answer to one of our own writes).
* A list that is older than what the watch has already shown neither removes nor resurrects anything.
* Every change is reported once: a caller that gets ``False`` has nothing to do.
* Small: objects of one kind are much alike, so each is kept as its compressed difference from the first one seen
  (a preset dictionary, RFC 1950 section 2.2), and unpacked when a decision needs it.

Assumption: resourceVersions of one kind are integers that grow with every write. The API conventions promise that
order since Kubernetes 1.35 (KEP-5504), and etcd has always provided it.
"""

import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from operator_app.api.kinds import Key, Kind, Object, key_of
from operator_app.kube.deltas import Changed, Deleted, Delta, Listed

_WINDOW_BYTES: Final = 32_768
"""The end of a preset dictionary that the format can refer to (RFC 1951 section 2)."""

_LEVEL: Final = 3
"""Compression level: against a near twin, more effort finds nothing more (``benchmarks/memory.py``)."""


def version_of(obj: Object) -> int:
    """The object's resourceVersion as a number."""
    return int(obj["metadata"]["resourceVersion"])


Index = Callable[[Object], Hashable | None]
"""What the objects of one kind are looked up by besides their address; ``None`` leaves an object out."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """One object: its version, what it is indexed by, and its JSON, compressed."""

    version: int
    index: Hashable | None
    blob: bytes


@dataclass(slots=True)
class _Shelf:
    """The objects of one kind.

    ``index`` gives the second key of an object and ``by_index`` the addresses under each. ``model`` is the JSON of the
    first object, against which all are compressed. ``seen`` is the newest version that the watch has shown of each
    namespace, and a complete list of each scope (a namespace, or ``None`` for all); one for all of them would not do,
    since each scope has a watch of its own. ``listing`` holds the addresses that the pages of an unfinished list have
    named so far, for each scope that is being listed, and ``synced`` the scopes that were listed completely.
    """

    index: Index
    packed: dict[Key, _Packed] = field(default_factory=dict)
    by_index: dict[Hashable, set[Key]] = field(default_factory=dict)
    model: bytes = b""
    high_water_marks: dict[str | None, int] = field(default_factory=dict)
    listing: dict[str | None, set[Key]] = field(default_factory=dict)
    synced: set[str | None] = field(default_factory=set)

    def advance_high_water_mark(self, scope: str | None, version: int) -> None:
        """Take note that everything of ``scope`` up to ``version`` was shown."""
        self.high_water_marks[scope] = max(self.high_water_marks.get(scope, 0), version)

    def may_exist(self, key: Key, as_of: int) -> bool:
        """Whether an object that something other than the watch shows as of ``as_of`` can be there still.

        What is unknown although everything up to then was shown was deleted in between, and stays away.
        """
        shown = max(self.high_water_marks.get(None, 0), self.high_water_marks.get(key.namespace, 0))
        return key in self.packed or as_of >= shown

    def version(self, key: Key) -> int | None:
        """The version of the object at ``key``; ``None`` where there is none."""
        known = self.packed.get(key)
        return None if known is None else known.version

    def get(self, key: Key) -> Object | None:
        """The object at ``key``, unpacked."""
        known = self.packed.get(key)
        if known is None:
            return None
        unpacker = zlib.decompressobj(zlib.MAX_WBITS, self.model)
        obj: Object = msgspec.json.decode(unpacker.decompress(known.blob) + unpacker.flush())
        return obj

    def put(self, obj: Object) -> bool:
        """Take ``obj`` over, unless the shelf has it as new or newer. Returns whether it did."""
        key, version = key_of(obj), version_of(obj)
        known = self.version(key)
        if known is not None and known >= version:
            return False
        self.drop(key)
        text = msgspec.json.encode(obj)
        if not self.model:
            self.model = text[-_WINDOW_BYTES:]
        packer = zlib.compressobj(level=_LEVEL, zdict=self.model)
        value = self.index(obj)
        self.packed[key] = _Packed(version, value, packer.compress(text) + packer.flush())
        if value is not None:
            self.by_index.setdefault(value, set()).add(key)
        return True

    def drop(self, key: Key) -> None:
        """Forget the object at ``key``, if there is one."""
        known = self.packed.pop(key, None)
        if known is None or known.index is None:
            return
        self.by_index[known.index].discard(key)
        if not self.by_index[known.index]:
            del self.by_index[known.index]

    def forget(self, obj: Object) -> bool:
        """Take over a deletion. ``obj`` has its version, so a newer object of that name is a new life and stays."""
        known = self.version(key_of(obj))
        if known is None or known > version_of(obj):
            return False
        self.drop(key_of(obj))
        return True


class Store:
    """Latest objects by kind, by address and by one index for each kind.

    Not safe for threads; every method returns at once.
    """

    def __init__(self, indexes: Mapping[Kind, Index]) -> None:
        self._shelves = {kind: _Shelf(index) for kind, index in indexes.items()}

    def is_synced(self, kind: Kind, namespace: str | None) -> bool:
        """Whether a kind has been listed completely at least once, in ``namespace`` or in all of them."""
        return not self._shelves[kind].synced.isdisjoint((None, namespace))

    def get(self, kind: Kind, key: Key) -> Object | None:
        """The latest known version, or ``None`` where none is known; a copy that the caller may keep."""
        return self._shelves[kind].get(key)

    def version(self, kind: Kind, key: Key) -> int | None:
        """The latest known resourceVersion, or ``None`` where none is known; cheaper than :meth:`get`."""
        return self._shelves[kind].version(key)

    def keys(self, kind: Kind) -> tuple[Key, ...]:
        """Addresses of all known objects of a kind."""
        return tuple(self._shelves[kind].packed)

    def indexed(self, kind: Kind, value: Hashable) -> tuple[Object, ...]:
        """All known objects of a kind whose index is ``value``, in the order of their addresses."""
        shelf = self._shelves[kind]
        found = (shelf.get(key) for key in sorted(shelf.by_index.get(value, ())))
        return tuple(obj for obj in found if obj is not None)

    def index_values(self, kind: Kind) -> tuple[Any, ...]:
        """Every value that some known object of a kind is indexed by."""
        return tuple(self._shelves[kind].by_index)

    def learn(self, kind: Kind, obj: Object) -> bool:
        """Take over the answer to one of our own requests, so that the next round sees it before the watch tells.

        An answer that comes so late that the watch has told of the object's deletion does not bring it back. Returns
        whether it was news.
        """
        shelf = self._shelves[kind]
        # At the very version of the deletion the answer is that deletion itself.
        return shelf.may_exist(key_of(obj), version_of(obj) - 1) and shelf.put(obj)

    def apply_delta(self, delta: Delta) -> tuple[Object, ...]:
        """Take over what a watch has to say, and return what was news: objects as they are now, or last were."""
        shelf = self._shelves[delta.kind]
        match delta:
            case Changed():
                shelf.advance_high_water_mark(key_of(delta.object).namespace, version_of(delta.object))
                return (delta.object,) if shelf.put(delta.object) else ()
            case Deleted():
                shelf.advance_high_water_mark(key_of(delta.object).namespace, version_of(delta.object))
                return (delta.object,) if shelf.forget(delta.object) else ()
            case Listed():
                return _take_page(shelf, delta)


def _take_page(shelf: _Shelf, page: Listed) -> tuple[Object, ...]:
    as_of = int(page.resource_version)
    if page.first:
        shelf.listing[page.namespace] = set()
    named = shelf.listing[page.namespace]
    named.update(map(key_of, page.objects))
    believed = [obj for obj in page.objects if shelf.may_exist(key_of(obj), as_of)]
    news = [obj for obj in believed if shelf.put(obj)]
    if page.last:
        news += _forget_unnamed(shelf, page.namespace, as_of)
        del shelf.listing[page.namespace]
        shelf.advance_high_water_mark(page.namespace, as_of)
        shelf.synced.add(page.namespace)
    return tuple(news)


def _forget_unnamed(shelf: _Shelf, namespace: str | None, as_of: int) -> list[Object]:
    """Drop what a complete list did not name, unless it is newer than the list."""
    named = shelf.listing[namespace]
    unnamed = [
        key
        for key, known in shelf.packed.items()
        if key not in named and namespace in (None, key.namespace) and known.version <= as_of
    ]
    gone = []
    for key in unnamed:
        known = shelf.get(key)
        if known is not None:
            gone.append(known)
        shelf.drop(key)
    return gone
