"""The latest known version of every watched object, by address and by one index for each kind. Pure.

Guarantees

* Monotonic for each object: an older resourceVersion never replaces a newer one, whether it comes from a watch, from a
  list, or from the response to one of the operator's own writes.
* A deletion that was delivered is final, however it became known (the watch, a complete list, an own delete, a live
  read): no list, response or event that shows an earlier state restores the object. Every other object that a list or
  a live read shows is stored.
* Every change is returned once: a caller that gets ``False`` or nothing has nothing to do.
* Small: objects of one kind are much alike, so each is stored as its compressed difference from the first one of its
  kind (a preset dictionary, RFC 1950 section 2.2) and decompressed when it is read. Of some kinds
  only what the operator reads is stored.

Assumption: resourceVersions of one kind are integers that grow with every write. The API conventions promise that
order since Kubernetes 1.35 (KEP-5504), and etcd has always provided it.
"""

import lzma
import zlib
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from operator_app.api.kinds import Key, Kind, Object, key_of
from operator_app.kube.deltas import Changed, Deleted, Delta, Listed
from operator_app.kube.hash_ranges import Coverage, HashRange, is_covered

_WINDOW_BYTES: Final = 32_768
"""The format can refer to this much of the end of a preset dictionary (RFC 1951 section 2)."""

_LEVEL: Final = 3
"""Compression level: with a similar object as dictionary, a higher level saves nothing (``benchmarks/memory.py``)."""

TOMBSTONES: Final = 4096
"""This many deletions of one kind are kept until the watch delivers them; beyond that, the oldest is discarded."""


_MOST_BYTES: Final = 65_536
"""Where the format makes more of a text, another one is tried, whose window is the whole text.

What that makes of a text is bounded by as much; it is given up at once when it does not save that.
"""

_SLICE_BYTES: Final = 16_384
_FAR_MAGIC: Final = b"\xfd7zXZ\x00"
_FAR_FILTERS: Final = (
    # Without literal and position contexts, which gain nothing for JSON, and with long matches it takes half the time.
    {"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**20, "nice_len": 273, "depth": 1, "lc": 0, "lp": 0, "pb": 0},
)


def version_of(obj: Object) -> int:
    """The object's resourceVersion as a number."""
    return int(obj["metadata"]["resourceVersion"])


Keep = Callable[[Object], Object]
"""What of an object is stored: a new object, or the same one. Its metadata must have all that identifies it."""


Index = Callable[[Object], Hashable | None]
"""The value that an object is looked up by besides its address; ``None``: it is not indexed."""


def _compressed(text: bytes, dictionary: bytes) -> bytes:
    """``text`` compressed with ``dictionary``, or without it where it is large and repeats at long distances."""
    compressor = zlib.compressobj(level=_LEVEL, zdict=dictionary)
    near = compressor.compress(text) + compressor.flush()
    far = _compressed_far(text) if len(near) > _MOST_BYTES else None
    return near if far is None else far


def _compressed_far(text: bytes) -> bytes | None:
    """``text`` compressed so that repetitions at any distance count; ``None`` if it takes more than ``_MOST_BYTES``.

    The routes of a large Envoy configuration may repeat at distances beyond the window of zlib. Text that does not
    repeat is given up after a part of it, since this takes several times as long as zlib.
    """
    compressor = lzma.LZMACompressor(format=lzma.FORMAT_XZ, check=lzma.CHECK_NONE, filters=_FAR_FILTERS)
    parts: list[bytes] = []
    for begin in range(0, len(text), _SLICE_BYTES):
        parts.append(compressor.compress(text[begin : begin + _SLICE_BYTES]))
        if sum(map(len, parts)) > _MOST_BYTES:
            return None
    return b"".join((*parts, compressor.flush()))


def _decompressed(compressed: bytes, dictionary: bytes) -> bytes:
    if compressed.startswith(_FAR_MAGIC):
        return lzma.decompress(compressed, format=lzma.FORMAT_XZ)
    decompressor = zlib.decompressobj(zlib.MAX_WBITS, dictionary)
    return decompressor.decompress(compressed) + decompressor.flush()


class _Stored(msgspec.Struct, frozen=True, gc=False):
    """One object: its resourceVersion, the values it is indexed by, and its compressed JSON.

    It is in no cycle, so the garbage collector need not look at it.
    """

    version: int
    index_value: Hashable | None
    second_value: Hashable | None
    compressed: bytes


@dataclass(frozen=True, slots=True)
class _Tombstone:
    """A deletion that became known before the watch delivered it: UID and last known version of the object.

    The version of the deletion itself is unknown, so the UID tells what belongs to the deleted object. ``is_certain``
    is false for a delete that was only accepted: finalizers may keep the object, which then has a deletionTimestamp.
    """

    uid: str | None
    version: int
    is_certain: bool

    def covers(self, obj: Object) -> bool:
        """Whether ``obj`` is a state of the deleted object, or older than it."""
        metadata = obj["metadata"]
        is_terminating = not self.is_certain and "deletionTimestamp" in metadata
        is_of_deleted = metadata.get("uid") == self.uid and not is_terminating
        return is_of_deleted or version_of(obj) <= self.version


class Reading:
    """A live read in progress, see :meth:`Store.reading`."""

    def __init__(self, kind_store: "_KindStore", key: Key) -> None:
        self._kind_store = kind_store
        self._key = key
        self._known = kind_store.get(key)
        self.deleted_up_to = 0
        """The newest resourceVersion of a deletion at this address that was delivered during the read."""

    def learn(self, live: Object | None) -> bool:
        """Apply the result, ``None`` where there is no object. Returns whether it changed what was known.

        An object that the watch has missed is stored. An object that changed during the read is not removed.
        """
        if live is None:
            known = self._known
            is_unchanged = known is not None and self._kind_store.version(self._key) == version_of(known)
            return known is not None and is_unchanged and self._kind_store.forget(known, is_certain=True)
        tombstone = self._kind_store.tombstones.get(self._key)
        is_deleted = version_of(live) <= self.deleted_up_to or (tombstone is not None and tombstone.covers(live))
        return not is_deleted and self._kind_store.put(live)


@dataclass(slots=True)
class _KindStore:
    """The objects of one kind.

    ``index`` gives the value by which an object is looked up besides its address, ``by_index`` the addresses for each
    value; ``second`` and ``by_second`` are the same for another value. ``dictionary`` is the JSON of the first object,
    with which all others are compressed.

    A *scope* is what one watch covers. ``high_water_marks`` has for each scope, in ``range_marks`` where it is a range,
    and for each namespace within it, the newest resourceVersion that its watch or a complete list has shown;
    each watch progresses by itself, so a single mark for all would be wrong. Nothing else moves a mark, since a
    response says nothing about other objects. ``listing`` has the addresses on the pages so far, for each scope whose
    list is unfinished, and ``synced`` the scopes that were listed completely. ``tombstones`` are in the order in which
    they were added, and ``readings`` are the live reads in progress.
    """

    index: Index
    keep: Keep | None = None
    second: Index | None = None
    objects: dict[Key, _Stored] = field(default_factory=dict)
    by_index: dict[Hashable, set[Key]] = field(default_factory=dict)
    by_second: dict[Hashable, set[Key]] = field(default_factory=dict)
    dictionary: bytes = b""
    high_water_marks: dict[str | None, int] = field(default_factory=dict)
    range_marks: dict[HashRange, int] = field(default_factory=dict)
    listing: dict[Coverage, set[Key]] = field(default_factory=dict)
    synced: set[Coverage] = field(default_factory=set)
    tombstones: dict[Key, _Tombstone] = field(default_factory=dict)
    readings: dict[Key, list[Reading]] = field(default_factory=dict)

    def advance_high_water_mark(self, scope: Coverage, version: int) -> None:
        """Record that everything in ``scope`` up to resourceVersion ``version`` was delivered."""
        if isinstance(scope, HashRange):
            self.range_marks[scope] = max(self.range_marks.get(scope, 0), version)
        else:
            self.high_water_marks[scope] = max(self.high_water_marks.get(scope, 0), version)

    def high_water_mark(self, key: Key) -> int:
        """The resourceVersion up to which everything at ``key`` was delivered."""
        marks = [self.high_water_marks.get(None, 0), self.high_water_marks.get(key.namespace, 0)]
        return max(*marks, *(mark for each, mark in self.range_marks.items() if key.namespace in each))

    def is_deleted(self, obj: Object, *, as_of: int) -> bool:
        """Whether an object that a list, a response or an event shows as of ``as_of`` has certainly been deleted since.

        That is so if it has a tombstone, or is unknown although everything up to a later version was delivered.
        """
        key = key_of(obj)
        tombstone = self.tombstones.get(key)
        if tombstone is not None and tombstone.covers(obj):
            return True
        return key not in self.objects and as_of < self.high_water_mark(key)

    def forget(self, obj: Object, *, is_certain: bool) -> bool:
        """Remove ``obj``, deleted at an unknown version, or its predecessor. Returns whether either was stored.

        A tombstone remains where the watch has not delivered the deletion yet.
        """
        key, uid, version, known = key_of(obj), obj["metadata"].get("uid"), version_of(obj), self.get(key_of(obj))
        if known is None:
            if version > self.high_water_mark(key):
                self._add_tombstone(key, _Tombstone(uid, version, is_certain=is_certain))
            return False
        if known["metadata"].get("uid") != uid and version_of(known) > version:
            return False  # the next object of that name
        self._add_tombstone(key, _Tombstone(uid, max(version, version_of(known)), is_certain=is_certain))
        self.remove(key)
        return True

    def _add_tombstone(self, key: Key, tombstone: _Tombstone) -> None:
        before = self.tombstones.pop(key, None)
        self.tombstones[key] = tombstone if before is None or before.version <= tombstone.version else before
        if len(self.tombstones) > TOMBSTONES:
            del self.tombstones[next(iter(self.tombstones))]

    def _record_deletion(self, key: Key, version: int) -> None:
        """Record that the watch or a complete list has delivered that nothing of ``version`` or older is left."""
        tombstone = self.tombstones.get(key)
        if tombstone is not None and tombstone.version <= version:
            del self.tombstones[key]
        for reading in self.readings.get(key, ()):
            reading.deleted_up_to = max(reading.deleted_up_to, version)

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
        self.tombstones.pop(key, None)
        text = msgspec.json.encode(obj if self.keep is None else self.keep(obj))
        if not self.dictionary:
            self.dictionary = text[-_WINDOW_BYTES:]
        value = self.index(obj)
        second = None if self.second is None else self.second(obj)
        self.objects[key] = _Stored(version, value, second, _compressed(text, self.dictionary))
        for by, each in ((self.by_index, value), (self.by_second, second)):
            if each is not None:
                by.setdefault(each, set()).add(key)
        return True

    def remove(self, key: Key) -> None:
        """Remove the object at ``key``, if there is one."""
        stored = self.objects.pop(key, None)
        if stored is None:
            return
        for by, value in ((self.by_index, stored.index_value), (self.by_second, stored.second_value)):
            if value is not None:
                by[value].discard(key)
                if not by[value]:
                    del by[value]

    def apply_change(self, obj: Object) -> bool:
        """Apply an event of the watch. Returns whether it was news."""
        is_news = not self.is_deleted(obj, as_of=version_of(obj) - 1) and self.put(obj)
        self.advance_high_water_mark(key_of(obj).namespace, version_of(obj))
        return is_news

    def apply_deletion(self, obj: Object) -> bool:
        """Apply the watch's deletion of ``obj``, which has the deletion's resourceVersion. Returns whether it was news.

        A newer object of the same name was created after that deletion, and stays.
        """
        key, version = key_of(obj), version_of(obj)
        self.advance_high_water_mark(key.namespace, version)
        self._record_deletion(key, version)
        known = self.version(key)
        if known is None or known > version:
            return False
        self.remove(key)
        return True

    def apply_page(self, page: Listed) -> tuple[Object, ...]:
        """Apply one page of a list; returns the objects that changed, or with the last page were removed."""
        as_of, scope = int(page.resource_version), page.coverage
        if page.first:
            self.listing[scope] = set()
        self.listing[scope].update(map(key_of, page.objects))
        changed = [obj for obj in page.objects if not self.is_deleted(obj, as_of=as_of) and self.put(obj)]
        if page.last:
            changed += self._remove_unlisted(scope, as_of)
            del self.listing[scope]
            self.advance_high_water_mark(scope, as_of)
            self.synced.add(scope)
        return tuple(changed)

    def discard(self, scope: HashRange) -> None:
        """Forget everything in ``scope``, whose watch has ended: nothing is known of it any more."""
        for key in [each for each in self.objects if each.namespace in scope]:
            self.remove(key)
        for key in [each for each in self.tombstones if each.namespace in scope]:
            del self.tombstones[key]
        for namespace in [each for each in self.high_water_marks if each is not None and each in scope]:
            del self.high_water_marks[namespace]
        self.range_marks.pop(scope, None)
        self.listing.pop(scope, None)
        self.synced.discard(scope)

    def _remove_unlisted(self, scope: Coverage, as_of: int) -> list[Object]:
        """Remove and return what a complete list does not contain, unless it is newer than the list."""
        listed = self.listing[scope]
        unlisted = [
            key
            for key, stored in self.objects.items()
            if key not in listed and is_covered(key.namespace, scope) and stored.version <= as_of
        ]
        removed = []
        for key in unlisted:
            obj = self.get(key)
            if obj is not None:
                removed.append(obj)
            self.remove(key)
        for key in [*self.tombstones, *self.readings]:
            if key not in listed and is_covered(key.namespace, scope):
                self._record_deletion(key, as_of)
        return removed


class Store:
    """The latest known objects. ``indexes`` names the kinds to keep, and the index of each; ``kept`` what is stored.

    ``second`` has another index for some kinds.

    Not safe for threads; no method waits. Each kind is filled by its own watches and by the operator's own writes.
    """

    def __init__(
        self,
        indexes: Mapping[Kind, Index],
        kept: Mapping[Kind, Keep] | None = None,
        second: Mapping[Kind, Index] | None = None,
    ) -> None:
        kept, second = kept or {}, second or {}
        self._kinds = {kind: _KindStore(index, kept.get(kind), second.get(kind)) for kind, index in indexes.items()}

    def is_synced(self, kind: Kind, scope: Coverage) -> bool:
        """Whether a kind has been listed completely at least once, in ``scope`` or in all namespaces."""
        return not self._kinds[kind].synced.isdisjoint((None, scope))

    def discard(self, kind: Kind, scope: HashRange) -> None:
        """Forget every object of a kind in ``scope``, whose watch has ended."""
        self._kinds[kind].discard(scope)

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

    def indexed_keys(self, kind: Kind, value: Hashable) -> tuple[Key, ...]:
        """The addresses of all known objects of a kind whose index has ``value``; none of them is decompressed."""
        return tuple(self._kinds[kind].by_index.get(value, ()))

    def indexed_second(self, kind: Kind, value: Hashable) -> tuple[Object, ...]:
        """All known objects of a kind whose second index has ``value``, in the order of their addresses."""
        objects = self._kinds[kind]
        found = (objects.get(key) for key in sorted(objects.by_second.get(value, ())))
        return tuple(obj for obj in found if obj is not None)

    def index_values(self, kind: Kind) -> tuple[Any, ...]:
        """Every value that the index of some known object of a kind has."""
        return tuple(self._kinds[kind].by_index)

    def learn(self, kind: Kind, obj: Object) -> bool:
        """Apply the response to one of the operator's own requests, before the watch delivers the same version.

        A response that arrives after the object's deletion became known does not restore the object. Returns whether
        the response was newer than what was known.
        """
        objects = self._kinds[kind]
        # A response with the very version of the deletion is that deletion itself.
        return not objects.is_deleted(obj, as_of=version_of(obj) - 1) and objects.put(obj)

    def forget(self, kind: Kind, obj: Object, *, is_certain: bool = True) -> bool:
        """Remove ``obj``, or a predecessor of that name, before the watch delivers its deletion.

        Pass ``is_certain=False`` where a delete was only accepted: then the object is restored when it turns out that
        finalizers keep it. Returns whether it or its predecessor was stored.
        """
        return self._kinds[kind].forget(obj, is_certain=is_certain)

    @contextmanager
    def reading(self, kind: Kind, key: Key) -> Generator[Reading]:
        """Run a live read of one object in this context, and pass its result to :meth:`Reading.learn` within it.

        Other than with :meth:`learn`, an unknown object is stored however old it is: a live read is consistent, so
        the watch has missed it, unless its deletion was delivered during the read.
        """
        readings = self._kinds[kind].readings
        reading = Reading(self._kinds[kind], key)
        readings.setdefault(key, []).append(reading)
        try:
            yield reading
        finally:
            readings[key].remove(reading)
            if not readings[key]:
                del readings[key]

    def apply_delta(self, delta: Delta) -> tuple[Object, ...]:
        """Apply what a watch delivered. Returns the objects that changed: as they are now, or as they were last."""
        objects = self._kinds[delta.kind]
        match delta:
            case Changed():
                return (delta.object,) if objects.apply_change(delta.object) else ()
            case Deleted():
                return (delta.object,) if objects.apply_deletion(delta.object) else ()
            case Listed():
                return objects.apply_page(delta)
