"""The store: monotonic whatever arrives late, twice or out of order, and equal to the server after a list."""

from random import Random
from string import ascii_lowercase
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from operator_app.api.kinds import CONFIG_MAP, SERVICE, Key, Object, key_of
from operator_app.kube.deltas import Changed, Deleted, Listed
from operator_app.kube.store import Store, version_of

A, B = Key("n", "a"), Key("n", "b")


def obj(version: int, *, key: Key = A, owner: str | None = None) -> Object:
    """An object at a version."""
    metadata = {"namespace": key.namespace, "name": key.name, "resourceVersion": str(version)}
    return {"metadata": metadata, "owner": owner}


def store_of(*known: Object) -> Store:
    """A store that knows some objects by their changes; the index is ``owner``."""
    store = Store({CONFIG_MAP: lambda each: each["owner"]})
    for each in known:
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


class Deliveries(RuleBasedStateMachine):
    """A server with a history, and a store that gets it late, twice, out of order, by lists, responses and a watch."""

    stale_lists = Bundle("stale_lists")
    late_answers = Bundle("late_answers")

    def __init__(self) -> None:
        super().__init__()
        self.store = store_of()
        self.version = 10
        self.server: dict[Key, Object] = {}
        self.history: list[Changed | Deleted] = []
        self.watched = 0
        self.highest: dict[Key, int] = {}
        self.dead_until: dict[Key, int] = {}

    @rule(target=late_answers, key=st.sampled_from([A, B]), owner=st.sampled_from(["x", "y", None]))
    def write(self, key: Key, owner: str | None) -> Object:
        """Somebody creates or changes an object; the response may arrive at any time."""
        self.version += 1
        self.server[key] = obj(self.version, key=key, owner=owner)
        self.history.append(Changed(CONFIG_MAP, self.server[key]))
        return self.server[key]

    @precondition(lambda self: self.server)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Somebody deletes an object."""
        key = data.draw(st.sampled_from(sorted(self.server)))
        self.version += 1
        gone = self.server.pop(key)
        self.history.append(Deleted(CONFIG_MAP, obj(self.version, key=key, owner=gone["owner"])))

    @rule(target=stale_lists)
    def list_begins(self) -> Listed:
        """A list shows the server as it is now, and may be delivered at any time."""
        return page(self.version, *self.server.values())

    @rule(answer=consumes(late_answers))
    def answer_arrives(self, answer: Object) -> None:
        """The response to a write arrives, in any order."""
        self.store.learn(CONFIG_MAP, answer)

    @rule(answer=late_answers)
    def answer_arrives_again(self, answer: Object) -> None:
        """A live read may show the same version any number of times."""
        self.store.learn(CONFIG_MAP, answer)

    @rule(listed=stale_lists)
    def list_arrives(self, listed: Listed) -> None:
        """A list of any time arrives, even one older than what the watch delivered."""
        self.store.apply_delta(listed)

    @precondition(lambda self: self.watched < len(self.history))
    @rule()
    def watch_tells(self) -> None:
        """The watch delivers the next event; a watch keeps the order."""
        self.store.apply_delta(self.history[self.watched])
        self.watched += 1

    @rule()
    def everything_arrives(self) -> None:
        """After the rest of the watch and a fresh list, the store holds exactly what the server holds."""
        while self.watched < len(self.history):
            self.watch_tells()
        self.store.apply_delta(page(self.version, *self.server.values()))
        assert {key: self.store.get(CONFIG_MAP, key) for key in self.store.keys(CONFIG_MAP)} == self.server

    @invariant()
    def nothing_goes_back(self) -> None:
        """No object is ever in an older version than before, nor there after a deletion that the watch delivered."""
        for event in self.history[: self.watched]:
            if isinstance(event, Deleted):
                self.dead_until[key_of(event.object)] = version_of(event.object)
        for key in (A, B):
            seen = self.store.get(CONFIG_MAP, key)
            if seen is not None:
                assert version_of(seen) >= self.highest.get(key, 0)
                assert version_of(seen) > self.dead_until.get(key, 0)
                self.highest[key] = version_of(seen)

    @invariant()
    def the_index_is_exact(self) -> None:
        """An object is found by its owner, and by nothing else."""
        objects = [self.store.get(CONFIG_MAP, key) for key in sorted(self.store.keys(CONFIG_MAP))]
        for owner in ("x", "y"):
            expected = [each for each in objects if each is not None and each["owner"] == owner]
            assert list(self.store.indexed(CONFIG_MAP, owner)) == expected


TestDeliveries = Deliveries.TestCase
TestDeliveries.settings = settings(deadline=None, stateful_step_count=30)


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
