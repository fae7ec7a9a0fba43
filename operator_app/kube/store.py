"""The latest known version of every watched object, by address and by one index for each kind. Pure.

Guarantees

* Monotonic for each object: an older resourceVersion never replaces a newer one, whether it comes from a watch, from a
  list, or from the response to one of the operator's own writes.
* A list that is older than what the watch has already delivered neither removes an object nor restores a deleted one.
* Every change is returned once: a caller that gets ``False`` or nothing has nothing to do.
* Small: objects of one kind are much alike, so each is stored as its compressed difference from the first one of its
  kind (a preset dictionary, RFC 1950 section 2.2) and decompressed when it is read. Of some kinds
  only what the operator reads is stored.

Assumption: resourceVersions of one kind are integers that grow with every write. The API conventions promise that
order since Kubernetes 1.35 (KEP-5504), and etcd has always provided it.
"""

import lzma
import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from operator_app.api.kinds import Key, Kind, Object, key_of
from operator_app.kube.deltas import Changed, Deleted, Delta, Listed

_WINDOW_BYTES: Final = 32_768
"""The format can refer to this much of the end of a preset dictionary (RFC 1951 section 2)."""

_LEVEL: Final = 3
"""Compression level: with a similar object as dictionary, a higher level saves nothing (``benchmarks/memory.py``)."""


_LARGE_BYTES: Final = 262_144
"""Text of more bytes is compressed by an algorithm whose window is the whole text, if that takes little."""

_FAR_BYTES: Final = 65_536
"""What that algorithm may make of a text before it is given up."""

_SLICE_BYTES: Final = 16_384
_FAR_MAGIC: Final = b"\xfd7zXZ\x00"
_FAR_FILTERS: Final = ({"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**20},)


def version_of(obj: Object) -> int:
    """The object's resourceVersion as a number."""
    return int(obj["metadata"]["resourceVersion"])


Keep = Callable[[Object], Object]
"""What of an object is stored: a new object, or the same one. Its metadata must have all that identifies it."""


Index = Callable[[Object], Hashable | None]
"""The value that an object is looked up by besides its address; ``None``: it is not indexed."""


def _compressed(text: bytes, dictionary: bytes) -> bytes:
    """``text`` compressed with ``dictionary``, or without it where it is large and repeats at long distances."""
    far = _compressed_far(text) if len(text) > _LARGE_BYTES else None
    if far is not None:
        return far
    compressor = zlib.compressobj(level=_LEVEL, zdict=dictionary)
    return compressor.compress(text) + compressor.flush()


def _compressed_far(text: bytes) -> bytes | None:
    """``text`` compressed so that repetitions at any distance count; ``None`` if it takes more than ``_FAR_BYTES``.

    The routes of a large Envoy configuration repeat at distances beyond the window of zlib. Text that does not repeat
    is given up after a part of it, since this takes ten times as long as zlib.
    """
    compressor = lzma.LZMACompressor(format=lzma.FORMAT_XZ, check=lzma.CHECK_NONE, filters=_FAR_FILTERS)
    parts: list[bytes] = []
    for begin in range(0, len(text), _SLICE_BYTES):
        parts.append(compressor.compress(text[begin : begin + _SLICE_BYTES]))
        if sum(map(len, parts)) > _FAR_BYTES:
            return None
    return b"".join((*parts, compressor.flush()))


def _decompressed(compressed: bytes, dictionary: bytes) -> bytes:
    if compressed.startswith(_FAR_MAGIC):
        return lzma.decompress(compressed, format=lzma.FORMAT_XZ)
    decompressor = zlib.decompressobj(zlib.MAX_WBITS, dictionary)
    return decompressor.decompress(compressed) + decompressor.flush()


@dataclass(frozen=True, slots=True)
class _Stored:
    """One object: its resourceVersion, the value it is indexed by, and its compressed JSON."""

    version: int
    index_value: Hashable | None
    compressed: bytes


@dataclass(slots=True)
class _KindStore:
    """The objects of one kind.

    ``index`` gives the value by which an object is looked up besides its address, ``by_index`` the addresses for each
    value. ``dictionary`` is the JSON of the first object, with which all others are compressed.

    A *scope* is what one watch covers: a namespace, or ``None`` for all of them. ``high_water_marks`` has for each
    scope, and for each namespace within it, the newest resourceVersion that its watch or a complete list has shown;
    each watch progresses by itself, so a single mark for all would be wrong. ``listing`` has the addresses on the pages
    so far, for each scope whose list is unfinished, and ``synced`` the scopes that were listed completely.
    """

    index: Index
    keep: Keep | None = None
    objects: dict[Key, _Stored] = field(default_factory=dict)
    by_index: dict[Hashable, set[Key]] = field(default_factory=dict)
    dictionary: bytes = b""
    high_water_marks: dict[str | None, int] = field(default_factory=dict)
    listing: dict[str | None, set[Key]] = field(default_factory=dict)
    synced: set[str | None] = field(default_factory=set)

    def advance_high_water_mark(self, scope: str | None, version: int) -> None:
        """Record that everything in ``scope`` up to resourceVersion ``version`` was delivered."""
        self.high_water_marks[scope] = max(self.high_water_marks.get(scope, 0), version)

    def is_tombstoned(self, key: Key, as_of: int) -> bool:
        """Whether an object that a list or a response shows as of ``as_of`` has certainly been deleted since.

        That is so if it is unknown although everything up to a later version was delivered. This takes the place of a
        tombstone for each deleted object.
        """
        mark = max(self.high_water_marks.get(None, 0), self.high_water_marks.get(key.namespace, 0))
        return key not in self.objects and as_of < mark

    def version(self, key: Key) -> int | None:
        """The resourceVersion of the object at ``key``; ``None`` where there is none."""
        stored = self.objects.get(key)
        return None if stored is None else stored.version

    def get(self, key: Key) -> Object | None:
        """The object at ``key``, decompressed; ``None`` where there is none."""
        stored = self.objects.get(key)
        if stored is None:
            return None
        obj: Object = msgspec.json.decode(_decompressed(stored.compressed, self.dictionary))
        return obj

    def put(self, obj: Object) -> bool:
        """Store ``obj``, unless the same or a newer version of it is stored. Returns whether it was stored."""
        key, version = key_of(obj), version_of(obj)
        known = self.version(key)
        if known is not None and known >= version:
            return False
        self.remove(key)
        text = msgspec.json.encode(obj if self.keep is None else self.keep(obj))
        if not self.dictionary:
            self.dictionary = text[-_WINDOW_BYTES:]
        value = self.index(obj)
        self.objects[key] = _Stored(version, value, _compressed(text, self.dictionary))
        if value is not None:
            self.by_index.setdefault(value, set()).add(key)
        return True

    def remove(self, key: Key) -> None:
        """Remove the object at ``key``, if there is one."""
        stored = self.objects.pop(key, None)
        if stored is None or stored.index_value is None:
            return
        self.by_index[stored.index_value].discard(key)
        if not self.by_index[stored.index_value]:
            del self.by_index[stored.index_value]

    def remove_deleted(self, obj: Object) -> bool:
        """Apply the deletion of ``obj``, which has the deletion's resourceVersion. Returns whether it was stored.

        A newer object of the same name was created after that deletion, and stays.
        """
        known = self.version(key_of(obj))
        if known is None or known > version_of(obj):
            return False
        self.remove(key_of(obj))
        return True

    def apply_page(self, page: Listed) -> tuple[Object, ...]:
        """Apply one page of a list; returns the objects that changed, or with the last page were removed."""
        as_of = int(page.resource_version)
        if page.first:
            self.listing[page.namespace] = set()
        self.listing[page.namespace].update(map(key_of, page.objects))
        changed = [obj for obj in page.objects if not self.is_tombstoned(key_of(obj), as_of) and self.put(obj)]
        if page.last:
            changed += self._remove_unlisted(page.namespace, as_of)
            del self.listing[page.namespace]
            self.advance_high_water_mark(page.namespace, as_of)
            self.synced.add(page.namespace)
        return tuple(changed)

    def _remove_unlisted(self, namespace: str | None, as_of: int) -> list[Object]:
        """Remove and return what a complete list does not contain, unless it is newer than the list."""
        listed = self.listing[namespace]
        unlisted = [
            key
            for key, stored in self.objects.items()
            if key not in listed and namespace in (None, key.namespace) and stored.version <= as_of
        ]
        removed = []
        for key in unlisted:
            obj = self.get(key)
            if obj is not None:
                removed.append(obj)
            self.remove(key)
        return removed


class Store:
    """The latest known objects. ``indexes`` names the kinds to keep, and the index of each; ``kept`` what is stored.

    Not safe for threads; no method waits. Each kind is filled by its own watches and by the operator's own writes.
    """

    def __init__(self, indexes: Mapping[Kind, Index], kept: Mapping[Kind, Keep] | None = None) -> None:
        kept = kept or {}
        self._kinds = {kind: _KindStore(index, kept.get(kind)) for kind, index in indexes.items()}

    def is_synced(self, kind: Kind, namespace: str | None) -> bool:
        """Whether a kind has been listed completely at least once, in ``namespace`` or in all of them."""
        return not self._kinds[kind].synced.isdisjoint((None, namespace))

    def get(self, kind: Kind, key: Key) -> Object | None:
        """The latest known version, or ``None`` where none is known; a copy that the caller may modify."""
        return self._kinds[kind].get(key)

    def version(self, kind: Kind, key: Key) -> int | None:
        """The latest known resourceVersion, or ``None`` where none is known; cheaper than :meth:`get`."""
        return self._kinds[kind].version(key)

    def keys(self, kind: Kind) -> tuple[Key, ...]:
        """The addresses of all known objects of a kind."""
        return tuple(self._kinds[kind].objects)

    def indexed(self, kind: Kind, value: Hashable) -> tuple[Object, ...]:
        """All known objects of a kind whose index has ``value``, in the order of their addresses."""
        objects = self._kinds[kind]
        found = (objects.get(key) for key in sorted(objects.by_index.get(value, ())))
        return tuple(obj for obj in found if obj is not None)

    def index_values(self, kind: Kind) -> tuple[Any, ...]:
        """Every value that the index of some known object of a kind has."""
        return tuple(self._kinds[kind].by_index)

    def learn(self, kind: Kind, obj: Object) -> bool:
        """Apply the response to one of the operator's own requests, before the watch delivers the same version.

        A response that arrives after the watch has delivered the object's deletion does not restore the object.
        Returns whether the response was newer than what was known.
        """
        objects = self._kinds[kind]
        # A response with the very version of the deletion is that deletion itself.
        return not objects.is_tombstoned(key_of(obj), version_of(obj) - 1) and objects.put(obj)

    def apply_delta(self, delta: Delta) -> tuple[Object, ...]:
        """Apply what a watch delivered. Returns the objects that changed: as they are now, or as they were last."""
        objects = self._kinds[delta.kind]
        match delta:
            case Changed():
                objects.advance_high_water_mark(key_of(delta.object).namespace, version_of(delta.object))
                return (delta.object,) if objects.put(delta.object) else ()
            case Deleted():
                objects.advance_high_water_mark(key_of(delta.object).namespace, version_of(delta.object))
                return (delta.object,) if objects.remove_deleted(delta.object) else ()
            case Listed():
                return objects.apply_page(delta)
