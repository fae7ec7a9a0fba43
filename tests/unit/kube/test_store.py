"""The store: monotonic whatever arrives late, twice or out of order, and equal to the server after a list."""

from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from operator_app.api.kinds import CONFIG_MAP, SERVICE, Key, Object, key_of
from operator_app.kube.deltas import Changed, Deleted, Listed
from operator_app.kube.store import TOMBSTONES, Reading, Store, version_of

A, B = Key("n", "a"), Key("n", "b")


def obj(version: int, *, key: Key = A, owner: str | None = None, uid: str = "u", **more: Any) -> Object:
    """An object at a version."""
    metadata = {"namespace": key.namespace, "name": key.name, "uid": uid, "resourceVersion": str(version)} | more
    return {"metadata": metadata, "owner": owner}


def store_of(*known: Object) -> Store:
    """A store that knows some objects by their changes; the index is ``owner``."""
    store = Store({CONFIG_MAP: lambda each: each["owner"]})
    for each in sorted(known, key=version_of):
        store.apply_delta(Changed(CONFIG_MAP, each))
    return store


def page(version: int, *objects: Object, **rest: Any) -> Listed:
    """A list of one page, unless told otherwise."""
    shape = {"namespace": None, "first": True, "last": True} | rest
    return Listed(CONFIG_MAP, objects=objects, resource_version=str(version), **shape)


def known(store: Store) -> dict[str, int]:
    """Names and versions of what the store knows."""
    found = {key.name: store.get(CONFIG_MAP, key) for key in store.keys(CONFIG_MAP)}
    return {name: version_of(each) for name, each in found.items() if each is not None}


def test_two_indexes_of_a_kind_are_kept_apart() -> None:
    """Each is looked up by its own values, and neither has objects that were changed, removed or never indexed."""
    store = Store({CONFIG_MAP: lambda each: each["owner"]}, second={CONFIG_MAP: lambda each: each.get("also")})
    for each in (obj(1, owner="x") | {"also": "y"}, obj(2, key=B, owner="y")):
        store.apply_delta(Changed(CONFIG_MAP, each))
    assert [key_of(each) for each in store.indexed_second(CONFIG_MAP, "y")] == [A]
    assert store.indexed_keys(CONFIG_MAP, "y") == (B,)
    store.apply_delta(Changed(CONFIG_MAP, obj(3, owner="y") | {"also": "z"}))
    assert store.indexed_second(CONFIG_MAP, "y") == ()
    assert set(store.indexed_keys(CONFIG_MAP, "y")) == {A, B}
    store.apply_delta(Deleted(CONFIG_MAP, obj(4)))
    assert store.indexed_second(CONFIG_MAP, "z") == ()
    assert set(store.index_values(CONFIG_MAP)) == {"y"}


@pytest.mark.parametrize(("first", "then", "is_news"), [(5, 6, True), (5, 5, False), (5, 4, False), (9, 10, True)])
def test_only_a_newer_version_is_news(first: int, then: int, *, is_news: bool) -> None:
    """By a watch and by responses alike; versions are compared as numbers, not as text."""
    by_watch, by_answer = store_of(obj(first)), store_of(obj(first))
    assert bool(by_watch.apply_delta(Changed(CONFIG_MAP, obj(then)))) is is_news
    assert by_answer.learn(CONFIG_MAP, obj(then)) is is_news
    assert known(by_watch) == known(by_answer) == {"a": max(first, then)}


def test_a_change_is_reported_once() -> None:
    """A version that was learned from a response is no change when the watch delivers it."""
    store = store_of()
    assert store.learn(CONFIG_MAP, obj(5))
    assert store.apply_delta(Changed(CONFIG_MAP, obj(5))) == ()
    assert store.apply_delta(page(5, obj(5))) == ()


def test_only_what_is_to_be_kept_is_stored() -> None:
    """Whether a watch delivers it or an answer."""
    store = Store(
        {CONFIG_MAP: lambda each: each["owner"]}, {CONFIG_MAP: lambda each: {**each, "data": "dropped", "owner": None}}
    )
    store.apply_delta(Changed(CONFIG_MAP, obj(5, owner="x") | {"data": "large"}))
    store.apply_delta(Changed(CONFIG_MAP, obj(6, key=B, owner="x") | {"data": "large"}))
    store.learn(CONFIG_MAP, obj(7, owner="x") | {"data": "large"})
    found = [store.get(CONFIG_MAP, key) for key in (A, B)]
    assert [each["data"] for each in found if each is not None] == ["dropped"] * 2


def test_nothing_is_kept_of_a_read_that_is_over() -> None:
    """Reads of one name at the same time end in any order, and none leaves anything behind."""
    store = store_of()
    with ExitStack() as contexts:
        for key in (A, A, B):
            contexts.enter_context(store.reading(CONFIG_MAP, key))
        assert set(store._kinds[CONFIG_MAP].readings) == {A, B}
    assert store._kinds[CONFIG_MAP].readings == {}


def test_a_deletion_removes_what_is_not_newer() -> None:
    """The event carries the version of the deletion; a newer object of that name was created after it, and stays."""
    store = store_of(obj(5))
    (gone,) = store.apply_delta(Deleted(CONFIG_MAP, obj(7)))
    assert version_of(gone) == 7
    assert known(store) == {}
    assert store.apply_delta(Deleted(CONFIG_MAP, obj(7))) == ()
    store.apply_delta(Changed(CONFIG_MAP, obj(9)))
    assert store.apply_delta(Deleted(CONFIG_MAP, obj(7))) == ()
    assert known(store) == {"a": 9}


def test_a_late_answer_does_not_resurrect() -> None:
    """The response to a write, read after the watch delivered a later deletion, restores nothing."""
    store = store_of(obj(5))
    store.apply_delta(Deleted(CONFIG_MAP, obj(7)))
    assert not store.learn(CONFIG_MAP, obj(6))
    assert not store.learn(CONFIG_MAP, obj(7))
    assert known(store) == {}
    assert store.learn(CONFIG_MAP, obj(8))
    assert known(store) == {"a": 8}


def test_a_list_removes_what_it_does_not_name() -> None:
    """What was deleted while no watch ran is removed with the last page, and returned in its last state."""
    store = store_of(obj(5), obj(6, key=B))
    news = store.apply_delta(page(9, obj(8, key=B)))
    assert [(key_of(each).name, version_of(each)) for each in news] == [("b", 8), ("a", 5)]
    assert known(store) == {"b": 8}


def test_an_object_newer_than_a_list_stays() -> None:
    """A list says nothing about what was created after it."""
    store = store_of(obj(12))
    assert store.apply_delta(page(11)) == ()
    assert known(store) == {"a": 12}


def test_a_stale_list_neither_removes_nor_resurrects() -> None:
    """A list older than what the watch delivered restores nothing, and removes nothing that is newer than itself."""
    store = store_of(obj(5), obj(11, key=B))
    store.apply_delta(Deleted(CONFIG_MAP, obj(12)))
    assert store.apply_delta(page(10, obj(5))) == ()
    assert known(store) == {"b": 11}


def test_a_list_as_new_as_the_watch_is_believed() -> None:
    """A list at exactly the high-water mark of the watch is applied."""
    store = store_of(obj(5))
    assert store.apply_delta(page(5, obj(4, key=B), obj(5))) == (obj(4, key=B),)


def test_nothing_is_gone_before_the_last_page() -> None:
    """Pages add; only the last one removes, and what is on any page stays."""
    store = store_of(obj(1), obj(2, key=B))
    assert store.apply_delta(page(9, obj(1), last=False)) == ()
    assert known(store) == {"a": 1, "b": 2}
    store.apply_delta(page(9, first=False))
    assert known(store) == {"a": 1}


def test_a_first_page_forgets_an_unfinished_list() -> None:
    """A list that failed and starts again does not keep what only its first attempt contained."""
    store = store_of(obj(1), obj(2, key=B))
    store.apply_delta(page(9, obj(1), last=False))
    store.apply_delta(page(10, obj(2, key=B)))
    assert known(store) == {"b": 2}


def test_a_list_of_a_namespace_is_about_that_namespace() -> None:
    """Objects of other namespaces stay."""
    store = store_of(obj(1), obj(2, key=Key("m", "c")))
    assert store.apply_delta(page(9, namespace="n")) == (obj(1),)
    assert known(store) == {"c": 2}


def test_a_watch_of_one_namespace_says_nothing_about_another() -> None:
    """Each namespace has its own list, watch and high-water mark: one that is ahead makes no other look stale."""
    store = store_of()
    store.apply_delta(page(100, obj(40), namespace="n"))
    store.apply_delta(Changed(CONFIG_MAP, obj(120)))
    other = obj(41, key=Key("m", "c"))
    assert store.apply_delta(page(99, other, namespace="m")) == (other,)
    assert store.learn(CONFIG_MAP, obj(110, key=Key("m", "d")))
    assert known(store) == {"a": 120, "c": 41, "d": 110}
    assert store.apply_delta(page(98, obj(42, key=B), namespace="n")) == ()


def test_in_sync_means_listed_to_the_end() -> None:
    """Of each kind by itself, and of a namespace by its own list or by one of all namespaces."""
    store = Store(dict.fromkeys((CONFIG_MAP, SERVICE), lambda _: None))
    store.apply_delta(page(1, namespace="n", last=False))
    assert not store.is_synced(CONFIG_MAP, "n")
    store.apply_delta(page(1, namespace="n", first=False))
    assert store.is_synced(CONFIG_MAP, "n")
    assert not store.is_synced(CONFIG_MAP, "m")
    assert not store.is_synced(CONFIG_MAP, None)
    assert not store.is_synced(SERVICE, "n")
    store.apply_delta(page(1))
    assert store.is_synced(CONFIG_MAP, "m")


def test_what_the_store_gives_is_a_copy() -> None:
    """A caller that changes what it got does not change what the next one gets."""
    store = store_of(obj(5))
    first = store.get(CONFIG_MAP, A)
    assert first == obj(5)
    first["metadata"]["name"] = "changed"
    assert store.get(CONFIG_MAP, A) == obj(5)


@given(st.lists(st.text(max_size=2000), min_size=1, max_size=5))
def test_what_goes_in_comes_out(texts: list[str]) -> None:
    """Compressing one object with another as dictionary loses nothing, whatever they contain."""
    store = store_of()
    for version, text in enumerate(texts, 1):
        store.learn(CONFIG_MAP, obj(version, key=Key("n", f"o{version}")) | {"text": text * 20})
    for version, text in enumerate(texts, 1):
        found = store.get(CONFIG_MAP, Key("n", f"o{version}"))
        assert found is not None
        assert found["text"] == text * 20
        assert store.version(CONFIG_MAP, Key("n", f"o{version}")) == version
    assert store.version(CONFIG_MAP, A) is None


def test_the_index_follows_every_change() -> None:
    """An object is found by the owner that it has now, in the order of addresses, and no longer by an earlier one."""
    store = store_of(obj(2, key=B, owner="x"), obj(1, owner="x"), obj(3, key=Key("n", "c")))
    assert store.indexed(CONFIG_MAP, "x") == (obj(1, owner="x"), obj(2, key=B, owner="x"))
    store.learn(CONFIG_MAP, obj(5, owner="y"))
    assert store.indexed(CONFIG_MAP, "x") == (obj(2, key=B, owner="x"),)
    assert store.indexed(CONFIG_MAP, "y") == (obj(5, owner="y"),)
    store.apply_delta(Deleted(CONFIG_MAP, obj(6)))
    store.learn(CONFIG_MAP, obj(7, key=B))
    assert store.indexed(CONFIG_MAP, "x") == store.indexed(CONFIG_MAP, "y") == ()


def test_an_own_delete_is_final_until_the_watch_has_passed_it() -> None:
    """Neither a list nor an event nor a response from before the deletion restores the object; a new one is stored."""
    store = store_of(obj(5))
    assert store.forget(CONFIG_MAP, obj(5))
    assert store.apply_delta(page(6, obj(5))) == ()
    assert store.apply_delta(Changed(CONFIG_MAP, obj(6))) == ()
    assert not store.learn(CONFIG_MAP, obj(6))
    assert known(store) == {}
    assert store.learn(CONFIG_MAP, obj(9, uid="v"))
    assert store.apply_delta(Deleted(CONFIG_MAP, obj(8))) == ()
    assert known(store) == {"a": 9}


def test_an_own_delete_that_only_marks_an_object_is_not_final() -> None:
    """An object that a finalizer keeps comes back with its deletionTimestamp, and goes with the watch's deletion."""
    store = store_of(obj(5))
    assert store.forget(CONFIG_MAP, obj(5), is_certain=False)
    assert store.apply_delta(Changed(CONFIG_MAP, obj(6))) == ()
    kept = obj(7, deletionTimestamp="2026-01-01T00:00:00Z")
    assert store.apply_delta(Changed(CONFIG_MAP, kept)) == (kept,)
    store.apply_delta(Deleted(CONFIG_MAP, obj(9)))
    assert known(store) == {}


def test_an_own_delete_during_a_list_hides_no_other_object() -> None:
    """A page that shows an object for the first time is applied, whatever own requests did between the pages."""
    store = store_of(obj(5))
    store.apply_delta(page(20, obj(5), last=False))
    store.forget(CONFIG_MAP, obj(5))
    store.learn(CONFIG_MAP, obj(30, key=Key("n", "c")))
    assert store.apply_delta(page(20, obj(7, key=B), first=False)) == (obj(7, key=B),)
    assert known(store) == {"b": 7, "c": 30}


def test_a_live_read_shows_what_the_watch_missed() -> None:
    """An object that the watch has passed without delivering it is stored, however old it is."""
    store = store_of(obj(9, key=B))
    assert not store.learn(CONFIG_MAP, obj(5))
    with store.reading(CONFIG_MAP, A) as reading:
        assert reading.learn(obj(5))
    with store.reading(CONFIG_MAP, B) as reading:
        assert reading.learn(None)
    assert known(store) == {"a": 5}
    assert store.apply_delta(page(9, obj(5), obj(9, key=B))) == ()


@pytest.mark.parametrize("delta", [Deleted(CONFIG_MAP, obj(12)), page(12)])
def test_a_deletion_during_a_live_read_is_final(delta: Deleted | Listed) -> None:
    """The read showed the object before the deletion, which the watch or a list has delivered meanwhile."""
    store = store_of()
    with store.reading(CONFIG_MAP, A) as reading:
        store.apply_delta(Changed(CONFIG_MAP, obj(11)))
        store.apply_delta(delta)
        assert not reading.learn(obj(11))
    assert known(store) == {}


def test_tombstones_are_bounded() -> None:
    """The watch discards each, a complete list discards what it passes, and there are never more than the bound."""
    store = store_of()
    tombstones = store._kinds[CONFIG_MAP].tombstones
    for number in range(TOMBSTONES + 10):
        store.forget(CONFIG_MAP, obj(5, key=Key("n", f"o{number}")))
    assert len(tombstones) == TOMBSTONES
    assert Key("n", "o9") not in tombstones
    store.apply_delta(Deleted(CONFIG_MAP, obj(7, key=Key("n", "o10"))))
    assert len(tombstones) == TOMBSTONES - 1
    store.apply_delta(page(8, obj(5, key=Key("n", "o11"))))
    assert list(tombstones) == [Key("n", "o11")]
    assert known(store) == {}


@dataclass
class ReadInFlight:
    """A live read: what the store is given, and what the server shows at some moment in between."""

    context: ExitStack
    reading: Reading
    key: Key
    known: Object | None
    live: Object | None = None
    was_served: bool = False


class Deliveries(RuleBasedStateMachine):
    """A server with a history, and a store that gets it late, twice and out of order, in every way that there is.

    The oracle knows which objects were shown, up to which version, and the deletions of which were delivered; what the
    store has to hold follows from that alone, and is compared after every step, in both directions.
    """

    stale_lists = Bundle("stale_lists")
    late_answers = Bundle("late_answers")
    deletes = Bundle("deletes")
    reads = Bundle("reads")

    def __init__(self) -> None:
        super().__init__()
        self.store = store_of()
        self.version = 10
        self.server: dict[Key, Object] = {}
        self.history: list[Changed | Deleted] = []
        self.watched = 0
        self.died: dict[str, int] = {}
        """The version of the deletion of each object, by UID."""
        self.shown: dict[tuple[Key, str], Object] = {}
        """The newest state that was delivered of each object."""
        self.told: set[str] = set()
        """UIDs of the objects whose deletion was delivered."""

    def show(self, shown: Object) -> None:
        """Record that a state of an object was delivered: its predecessors of that name are gone."""
        deaths = [each.object for each in self.history if isinstance(each, Deleted)]
        before = [each for each in deaths if version_of(each) < version_of(shown) and key_of(each) == key_of(shown)]
        self.told |= {each["metadata"]["uid"] for each in before}
        key = (key_of(shown), shown["metadata"]["uid"])
        if key not in self.shown or version_of(self.shown[key]) < version_of(shown):
            self.shown[key] = shown

    def tell_deletions(self, up_to: int) -> None:
        """Record that every deletion up to a version was delivered."""
        self.told |= {uid for uid, died in self.died.items() if died <= up_to}

    @rule(target=late_answers, key=st.sampled_from([A, B]), owner=st.sampled_from(["x", "y", None]))
    def write(self, key: Key, owner: str | None) -> Object:
        """Somebody creates or changes an object; the response may arrive at any time."""
        self.version += 1
        uid = self.server[key]["metadata"]["uid"] if key in self.server else f"u{self.version}"
        self.server[key] = obj(self.version, key=key, owner=owner, uid=uid)
        self.history.append(Changed(CONFIG_MAP, self.server[key]))
        return self.server[key]

    @precondition(lambda self: self.server)
    @rule(target=deletes, data=st.data())
    def delete(self, data: st.DataObject) -> Object:
        """An object is deleted; where the operator did it, the response may arrive at any time."""
        key = data.draw(st.sampled_from(sorted(self.server)))
        self.version += 1
        gone = self.server.pop(key)
        uid = gone["metadata"]["uid"]
        self.died[uid] = self.version
        self.history.append(Deleted(CONFIG_MAP, obj(self.version, key=key, owner=gone["owner"], uid=uid)))
        return gone

    @rule(gone=consumes(deletes), is_certain=st.booleans())
    def own_delete_is_answered(self, gone: Object, is_certain: bool) -> None:  # noqa: FBT001 - drawn
        """The operator learns that its delete was carried out."""
        self.store.forget(CONFIG_MAP, gone, is_certain=is_certain)
        self.show(gone)
        self.told.add(gone["metadata"]["uid"])

    @rule(target=stale_lists)
    def list_begins(self) -> tuple[int, tuple[Object, ...]]:
        """A list shows the server as it is now, and may be delivered at any time."""
        return self.version, tuple(self.server.values())

    @rule(answer=consumes(late_answers))
    def answer_arrives(self, answer: Object) -> None:
        """The response to a write arrives, in any order."""
        self.store.learn(CONFIG_MAP, answer)
        self.show(answer)

    @rule(listed=stale_lists, pages=st.integers(1, 2))
    def list_arrives(self, listed: tuple[int, tuple[Object, ...]], pages: int) -> None:
        """A list of any time arrives, even one older than what the watch delivered."""
        version, objects = listed
        if pages == 2:
            self.store.apply_delta(page(version, *objects[:1], last=False))
            objects = objects[1:]
        self.store.apply_delta(page(version, *objects, first=pages == 1))
        for each in listed[1]:
            self.show(each)
        self.tell_deletions(version)

    @rule(listed=stale_lists)
    def list_fails_after_its_first_page(self, listed: tuple[int, tuple[Object, ...]]) -> None:
        """What is on the page is known; nothing else follows."""
        self.store.apply_delta(page(listed[0], *listed[1], last=False))
        for each in listed[1]:
            self.show(each)

    @rule(target=reads, key=st.sampled_from([A, B]))
    def read_begins(self, key: Key) -> ReadInFlight:
        """A resync reads an object live."""
        context = ExitStack()
        reading = context.enter_context(self.store.reading(CONFIG_MAP, key))
        return ReadInFlight(context, reading, key, self.store.get(CONFIG_MAP, key))

    @rule(read=reads)
    def read_is_served(self, read: ReadInFlight) -> None:
        """The server answers a read, once, at any time before the answer arrives."""
        if not read.was_served:
            read.live, read.was_served = self.server.get(read.key), True

    @rule(read=consumes(reads))
    def read_arrives(self, read: ReadInFlight) -> None:
        """The result of a read arrives; absence says something about the object that was known before and since."""
        self.read_is_served(read)
        is_unchanged = self.store.get(CONFIG_MAP, read.key) == read.known
        read.reading.learn(read.live)
        read.context.close()
        if read.live is not None:
            self.show(read.live)
        elif read.known is not None and is_unchanged:
            self.told.add(read.known["metadata"]["uid"])

    @precondition(lambda self: self.watched < len(self.history))
    @rule()
    def watch_tells(self) -> None:
        """The watch delivers the next event, however late; a watch keeps the order."""
        event = self.history[self.watched]
        self.store.apply_delta(event)
        self.watched += 1
        if isinstance(event, Changed):
            self.show(event.object)
        self.tell_deletions(version_of(event.object))

    @rule()
    def everything_arrives(self) -> None:
        """After the rest of the watch and a fresh list, the store holds exactly what the server holds."""
        while self.watched < len(self.history):
            self.watch_tells()
        self.list_arrives(self.list_begins(), 1)
        assert {key: self.store.get(CONFIG_MAP, key) for key in self.store.keys(CONFIG_MAP)} == self.server
        assert not self.store._kinds[CONFIG_MAP].tombstones

    @invariant()
    def the_store_holds_what_was_delivered(self) -> None:
        """The newest state of each object that was shown and whose deletion was not delivered, and nothing else."""
        for key in (A, B):
            living = [each for (at, uid), each in self.shown.items() if at == key and uid not in self.told]
            assert self.store.get(CONFIG_MAP, key) == max(living, key=version_of, default=None)

    @invariant()
    def the_index_is_exact(self) -> None:
        """An object is found by its owner, and by nothing else."""
        objects = [self.store.get(CONFIG_MAP, key) for key in sorted(self.store.keys(CONFIG_MAP))]
        for owner in ("x", "y"):
            expected = [each for each in objects if each is not None and each["owner"] == owner]
            assert list(self.store.indexed(CONFIG_MAP, owner)) == expected


TestDeliveries = Deliveries.TestCase
TestDeliveries.settings = settings(deadline=None, stateful_step_count=40)


def large(number: int, text: str) -> Object:
    """A ConfigMap with that text."""
    metadata = {"namespace": "a", "name": f"n{number}", "resourceVersion": str(number)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"envoy.json": text}}


@pytest.mark.parametrize("repeats", [1, 12])
def test_a_large_object_is_returned_as_it_was(repeats: int) -> None:
    """Whichever way a text of up to a megabyte is compressed, the same object comes back."""
    chance = Random(1)  # noqa: S311 - a fixed text
    text = "".join(chance.choices(ascii_lowercase, k=1_000_000 // repeats)) * repeats
    store = Store({CONFIG_MAP: lambda _: None})
    for number in (1, 2):
        store.apply_delta(Changed(CONFIG_MAP, large(number, text)))
        assert store.get(CONFIG_MAP, Key("a", f"n{number}")) == large(number, text)


def test_what_repeats_beyond_the_window_of_zlib_is_stored_once() -> None:
    """Envoy's configuration repeats long routes for each host, at distances that the window of zlib doesn't reach."""
    text = "".join(Random(1).choices(ascii_lowercase, k=60_000))  # noqa: S311 - a fixed text
    store = Store({CONFIG_MAP: lambda _: None})
    store.apply_delta(Changed(CONFIG_MAP, large(1, text * 16)))
    stored = store._kinds[CONFIG_MAP].objects[Key("a", "n1")]
    assert len(stored.compressed) < 60_000
