"""What a reload must not lose, counted: edits every second, and backends that move, under traffic on a real node."""

import os
import time
from collections.abc import Iterator
from typing import Final

import pytest

from operator_app.api.kinds import ENVOY_PROXY, Key, Object
from tests.e2e.envoy.test_traffic import READY_TIMEOUT_S, proxy_pods
from tests.e2e.kube import SERVICE_ACCOUNT, Kube, wait_until
from tests.e2e.node.addresses import NODE_ADDRESS
from tests.e2e.node.fixture import Nodes
from tests.e2e.proxies import a_proxy, holds, wait_ready
from tests.e2e.reload.test_reload import ARRIVAL_S, PORT, edit
from tests.e2e.reload.traffic import Tally, Traffic

EDITS: Final = int(os.environ.get("RELOAD_EDITS", "20"))
"""Edits that come once a second; 120 are what the promise is about."""

MOVES: Final = 8

pytestmark = [pytest.mark.reload, pytest.mark.usefixtures("running_operator"), pytest.mark.timeout(600)]


@pytest.fixture
def namespace(admin: Kube, namespace: str, nodes: Nodes) -> str:
    """A namespace in which Pods may be created."""
    if nodes.local is None:
        pytest.skip("the backends of this test are where Pods can be reached, which takes the local node")
    admin.wait_until(SERVICE_ACCOUNT, Key(namespace, "default"), bool)
    return namespace


@pytest.fixture
def traffic(nodes: Nodes) -> Iterator[Traffic]:
    """Backends and clients in the node's network."""
    with Traffic(nodes.inside(), NODE_ADDRESS) as found:
        yield found


def routed(namespace: str, ports: dict[str, int], *routes: Object, replicas: int = 1) -> Object:
    """A proxy with these routes, and with backends of these names at these ports of the node."""
    return a_proxy(
        namespace,
        replicas=replicas,
        listeners=[{"name": "http", "port": 80, "routes": list(routes)}],
        backends=[
            {"name": name, "endpoints": [{"host": NODE_ADDRESS, "port": port}], "connectTimeout": "1s"}
            for name, port in ports.items()
        ],
    )


def serving(admin: Kube, key: Key, replicas: int) -> tuple[dict[str, Object], list[tuple[str, int]]]:
    """The Pods of a proxy that is ready, by UID, and where they serve."""
    wait_ready(admin, key, READY_TIMEOUT_S)
    pods = {pod["metadata"]["uid"]: pod for pod in proxy_pods(admin, key)}
    assert len(pods) == replicas
    return pods, [(pod["status"]["podIP"], PORT) for pod in pods.values()]


def settled(admin: Kube, key: Key, generation: int, tally: Tally, kept: int, answer: str) -> None:
    """Wait until a generation is programmed, and its answer comes on every kept connection."""
    admin.wait_until(ENVOY_PROXY, key, holds("Programmed", generation=generation), ARRIVAL_S)
    wait_until(
        lambda: len(tally.latest) == kept and set(tally.latest.values()) == {answer}, ARRIVAL_S, f"{answer} everywhere"
    )


def assert_same(admin: Kube, key: Key, pods: dict[str, Object]) -> None:
    """No Pod was replaced, and no container started again."""
    after = {each["metadata"]["uid"]: each for each in proxy_pods(admin, key)}
    assert after.keys() == pods.keys()
    assert {each["status"]["containerStatuses"][0]["restartCount"] for each in after.values()} == {0}


def test_edits_every_second_lose_nothing(admin: Kube, namespace: str, traffic: Traffic) -> None:
    """50 kept connections, one WebSocket and one long download at two Pods, while every second brings another edit.

    The edits change a route, its order, and the only backend. ``RELOAD_EDITS=120`` takes two minutes.
    """
    key, kept = Key(namespace, "web"), 50
    ports = {name: traffic.serve(name) for name in ("one", "two", "three")}
    other = {"match": {"pathPrefix": "/other"}, "backend": "one"}
    last = {"match": {"pathPrefix": "/other/last"}, "backend": "two"}
    both = {name: ports[name] for name in ("one", "two")}
    specs = [
        ("two", routed(namespace, both, other, last, {"backend": "two"}, replicas=2)),
        ("one", routed(namespace, both, {"backend": "one"}, last, other, replicas=2)),
        ("three", routed(namespace, {"three": ports["three"]}, {"backend": "three"}, replicas=2)),
        ("one", routed(namespace, both, other, last, {"backend": "one"}, replicas=2)),
    ]
    admin.create(ENVOY_PROXY, specs[-1][1])
    pods, targets = serving(admin, key, replicas=2)
    with traffic.flowing(targets, kept=kept, every_s=0.2) as tally:
        wait_until(lambda: tally.messages > 1 and tally.chunks > 1, ARRIVAL_S, "a WebSocket and a download")
        started_mono = time.monotonic()
        for number in range(EDITS):
            time.sleep(max(0.0, started_mono + number - time.monotonic()))
            edit(admin, key, specs[number % len(specs)][1])
        answer, spec = specs[0]
        generation = edit(admin, key, spec)
        settled(admin, key, generation, tally, kept, answer)
        messages, chunks = tally.messages, tally.chunks
        wait_until(lambda: tally.messages > messages and tally.chunks > chunks, ARRIVAL_S, "both go on")
    print(f"{EDITS + 1} edits, one a second: {tally}")
    assert tally.lost == []
    # An edit that takes three steps may be overtaken by the next one.
    assert tally.answers.keys() >= {"one", "two"}
    assert_same(admin, key, pods)


def test_a_backend_moves_under_five_hundred_requests_a_second(admin: Kube, namespace: str, traffic: Traffic) -> None:
    """Its only endpoint is another one again and again, and the routes change their order: nothing is lost."""
    key, kept = Key(namespace, "web"), 50
    ports = {name: traffic.serve(name) for name in ("here", "there")}
    assets = {"match": {"pathPrefix": "/assets"}, "backend": "app"}
    api = {"match": {"pathPrefix": "/api"}, "backend": "app"}
    admin.create(ENVOY_PROXY, routed(namespace, {"app": ports["here"]}, assets, api, {"backend": "app"}))
    pods, targets = serving(admin, key, replicas=1)
    with traffic.flowing(targets, kept=kept, every_s=0.1) as tally:
        started_mono = time.monotonic()
        for number in range(MOVES):
            to = ("there", "here")[number % 2]
            routes: list[Object] = (
                [assets, {"backend": "app"}, api] if number % 2 else [{"backend": "app"}, api, assets]
            )
            generation = edit(admin, key, routed(namespace, {"app": ports[to]}, *routes))
            settled(admin, key, generation, tally, kept, to)
        took_s = time.monotonic() - started_mono
    print(f"{MOVES} moves in {took_s:.1f} s: {tally}, {tally.tried / took_s:.0f} a second")
    assert tally.lost == []
    assert_same(admin, key, pods)
