"""Comparing the store with complete lists, over a scripted server: what counts as missed, and what it costs."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx2
import pytest

from operator_app.api.kinds import CONFIG_MAP, Key, Object, key_of
from operator_app.controller.resync import MissedChange, resync
from operator_app.errors import TransientError
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Changed, Deleted
from operator_app.kube.hash_ranges import HashRange, hash_of
from operator_app.kube.store import Store
from tests.unit.kube.scripted_client import cluster_over

pytestmark = pytest.mark.anyio

A, B, C = (Key("team-a", name) for name in "abc")
UP_TO: Final = 100
"""The version of every list."""


def config_map(key: Key, version: int) -> Object:
    """One version of an object."""
    metadata = {"namespace": key.namespace, "name": key.name, "uid": f"u-{key.name}", "resourceVersion": str(version)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


class Server(httpx2.AsyncBaseTransport):
    """Lists ``listed`` and answers reads from ``living``; keeps the paths that were asked for."""

    def __init__(self, *listed: Object) -> None:
        self.listed = listed
        self.living = {key_of(each): each for each in listed}
        self.asked: list[str] = []
        self.is_down = False
        self.while_reading: Callable[[], object] = lambda: None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The answer."""
        self.asked.append(request.url.path)
        if self.is_down:
            return httpx2.Response(503, text="down")
        name = request.url.path.rpartition("/configmaps")[2].lstrip("/")
        if not name:
            meta = {"resourceVersion": str(UP_TO)}
            body = {"kind": "ConfigMapList", "apiVersion": "v1", "metadata": meta, "items": list(self.listed)}
            return httpx2.Response(200, content=json.dumps(body), headers={"content-type": "application/json"})
        self.while_reading()
        found = self.living.get(Key("team-a", name))
        if found is None:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound"}
            return httpx2.Response(404, json=status | {"message": "gone", "details": {"name": name}})
        return httpx2.Response(200, json=found)

    @property
    def reads(self) -> list[str]:
        """Names of the objects that were read, one entry each time."""
        return [path.rpartition("/")[2] for path in self.asked if not path.endswith("/configmaps")]


def knowing(*objects: Object) -> Store:
    """A store to which a watch has delivered these."""
    store = Store({CONFIG_MAP: lambda _: None})
    for each in objects:
        store.apply_delta(Changed(CONFIG_MAP, each))
    return store


@asynccontextmanager
async def cluster_of(server: Server, folder: Path) -> AsyncGenerator[Cluster]:
    """A client of the scripted server."""
    async with cluster_over(server, folder) as cluster:
        yield cluster


async def resynced(
    folder: Path,
    server: Server,
    store: Store,
    meanwhile: Callable[[], object] = lambda: None,
    *,
    namespace: str | None = None,
    hashes: HashRange | None = None,
    is_watched: Callable[[], bool] = lambda: True,
) -> tuple[MissedChange, ...]:
    """One resync; ``meanwhile`` happens in its grace time."""

    async def sleep(_seconds: float) -> None:
        meanwhile()

    wait: Callable[[float], Awaitable[None]] = sleep
    async with cluster_of(server, folder) as cluster:
        return await resync(
            cluster,
            store,
            CONFIG_MAP,
            namespace=namespace,
            labels=None,
            hashes=hashes,
            is_watched=is_watched,
            sleep=wait,
        )


async def test_where_all_agree_nothing_is_read(tmp_path: Path) -> None:
    """Objects that the store has as new as the list, or newer, cost the list and no read, and there is no waiting."""
    server = Server(config_map(A, 5), config_map(B, 6))
    store = knowing(config_map(A, 5), config_map(B, 7))
    assert await resynced(tmp_path, server, store, meanwhile=lambda: pytest.fail("no need to wait")) == ()
    assert len(server.asked) == 1


async def test_a_missed_change_is_found_by_one_read(tmp_path: Path) -> None:
    """A newer version, or an object that is not in the store, is read once, stored and reported."""
    server = Server(config_map(A, 9), config_map(B, 6), config_map(C, 7))
    store = knowing(config_map(A, 5), config_map(B, 6))
    missed = await resynced(tmp_path, server, store)
    assert missed == (
        MissedChange(CONFIG_MAP, config_map(A, 9), is_deleted=False),
        MissedChange(CONFIG_MAP, config_map(C, 7), is_deleted=False),
    )
    assert (store.get(CONFIG_MAP, A), store.get(CONFIG_MAP, C)) == (config_map(A, 9), config_map(C, 7))
    assert server.reads == ["a", "c"]
    assert await resynced(tmp_path, server, store) == (), "and reported once"


async def test_a_missed_deletion_is_found_by_one_read(tmp_path: Path) -> None:
    """What is neither in the list nor found by a read is removed, and reported in its last known state."""
    server = Server(config_map(B, 6))
    store = knowing(config_map(A, 5), config_map(B, 6))
    assert await resynced(tmp_path, server, store) == (MissedChange(CONFIG_MAP, config_map(A, 5), is_deleted=True),)
    assert store.get(CONFIG_MAP, A) is None
    assert server.reads == ["a"]


async def test_what_the_watch_delivers_in_the_grace_time_was_not_missed(tmp_path: Path) -> None:
    """Late is not lost: a change, a creation and a deletion that still arrive are not read and not reported."""
    server = Server(config_map(A, 9), config_map(C, 7))
    store = knowing(config_map(A, 5), config_map(B, 6))

    def deliver() -> None:
        store.apply_delta(Changed(CONFIG_MAP, config_map(C, 7)))
        store.apply_delta(Deleted(CONFIG_MAP, config_map(B, 8)))
        store.apply_delta(Changed(CONFIG_MAP, config_map(A, 9)))

    assert await resynced(tmp_path, server, store, deliver) == ()
    assert server.reads == []


async def test_what_is_newer_than_the_list_is_not_read(tmp_path: Path) -> None:
    """An object that was created after the list is rightly missing from it."""
    assert await resynced(tmp_path, Server(), knowing(config_map(A, UP_TO + 1))) == ()


async def test_an_object_that_is_recreated_in_the_grace_time_is_a_change(tmp_path: Path) -> None:
    """The read decides, not the list: what is missing from the list and exists again is a change."""
    server = Server()
    store = knowing(config_map(A, 5))
    missed = await resynced(tmp_path, server, store, lambda: server.living.update({A: config_map(A, UP_TO + 5)}))
    assert missed == (MissedChange(CONFIG_MAP, config_map(A, UP_TO + 5), is_deleted=False),)


async def test_an_object_that_comes_and_goes_during_the_read_stays_away(tmp_path: Path) -> None:
    """The read shows it, and the watch has delivered its creation and its deletion before the answer arrives."""
    server = Server(config_map(A, 5))
    store = knowing()

    def come_and_go() -> None:
        store.apply_delta(Changed(CONFIG_MAP, config_map(A, 5)))
        store.apply_delta(Deleted(CONFIG_MAP, config_map(A, UP_TO + 1)))

    server.while_reading = come_and_go
    assert await resynced(tmp_path, server, store) == ()
    assert store.get(CONFIG_MAP, A) is None


async def test_an_object_that_is_recreated_during_the_read_stays(tmp_path: Path) -> None:
    """A read that found nothing says nothing about what the watch has delivered since."""
    server = Server()
    store = knowing(config_map(A, 5))
    server.while_reading = lambda: store.apply_delta(Changed(CONFIG_MAP, config_map(A, UP_TO + 5)))
    assert await resynced(tmp_path, server, store) == ()
    assert store.get(CONFIG_MAP, A) == config_map(A, UP_TO + 5)


async def test_other_namespaces_are_not_read(tmp_path: Path) -> None:
    """The list of one namespace says nothing about another: nothing of that is read, which may be forbidden."""
    server = Server(config_map(A, 5))
    store = knowing(config_map(A, 5), config_map(Key("team-b", "x"), 6))
    assert await resynced(tmp_path, server, store, namespace="team-a") == ()
    assert server.reads == []


async def test_an_object_that_no_longer_matches_the_selector_is_not_reported(tmp_path: Path) -> None:
    """Not in the list, but unchanged when read: it is as the store knows it, and nothing was missed."""
    server = Server()
    server.living[A] = config_map(A, 5)
    store = knowing(config_map(A, 5))
    assert await resynced(tmp_path, server, store) == ()
    assert store.get(CONFIG_MAP, A) == config_map(A, 5)


async def test_a_failed_list_changes_nothing(tmp_path: Path) -> None:
    """A resync whose list fails changes nothing in the store."""
    server = Server()
    server.is_down = True
    store = knowing(config_map(A, 5))
    with pytest.raises(TransientError):
        await resynced(tmp_path, server, store)
    assert store.get(CONFIG_MAP, A) == config_map(A, 5)


async def test_only_the_namespaces_of_a_range_are_compared(tmp_path: Path) -> None:
    """On a server that ignores the range, too: what others hold is neither missed nor taken for deleted."""
    elsewhere = Key("team-b", "x")
    own = HashRange(hash_of("team-a"), hash_of("team-a") + 1)
    server = Server(config_map(A, 9), config_map(elsewhere, 8))
    store = knowing(config_map(B, 6), config_map(Key("team-c", "y"), 7))
    missed = await resynced(tmp_path, server, store, hashes=own)
    assert [(key_of(each.object), each.is_deleted) for each in missed] == [(A, False), (B, True)]
    assert sorted(store.keys(CONFIG_MAP)) == [A, Key("team-c", "y")]


async def test_what_is_not_watched_any_more_is_not_read(tmp_path: Path) -> None:
    """A shard that was given up during a resync: its store is empty, which is no reason to fill it again."""
    server, store = Server(config_map(A, 9), config_map(B, 8)), knowing(config_map(A, 5))
    watched = [True]

    def given_up() -> None:
        watched[0] = False

    assert await resynced(tmp_path, server, store, given_up, is_watched=lambda: watched[0]) == ()
    assert server.reads == []
