"""Two writers of one object at the same time: what Leases leave open between a check and the arrival of a write.

Two appliers, each with a store of its own as in two processes, work on the same children at the same moment, without
Leases between them (``docs/adr/0014-leases-and-shards.md``).
"""

import random
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import pytest

from operator_app.api.kinds import CHILD_KINDS, CONFIG_MAP, ENVOY_PROXY, SERVICE, Key, Kind, Object, key_of
from operator_app.api.models import parse_spec
from operator_app.apply import Applier, Result, child_check
from operator_app.desired import child_key, children
from operator_app.errors import ConflictError, OperatorError
from operator_app.kube.client import Cluster
from operator_app.kube.store import Store
from operator_app.results import Outcome
from operator_app.ssa.contention import ContentionTimes, ContentionTracker
from tests.e2e.apply.foreign_bytes import foreign_bytes
from tests.e2e.kube import Kube
from tests.e2e.proxies import a_proxy, not_as_declared

pytestmark = pytest.mark.anyio

ROUNDS: Final = 12
PATIENT: Final = ContentionTimes(threshold=1000)
"""What the writers do to each other is no contention with a third one."""


class Writer:
    """One applier with a store of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self.store = Store(dict.fromkeys(CHILD_KINDS, lambda _: None))
        self.written: list[tuple[Kind, Outcome]] = []
        self._applier = Applier(
            cluster,
            self.store,
            ContentionTracker(PATIENT),
            on_write=lambda kind, outcome: self.written.append((kind, outcome)),
            mono=time.monotonic,
        )

    async def apply(self, kind: Kind, desired: Object, proxy: Object) -> Result | OperatorError:
        """Bring one child to a declaration, at some moment of the next hundredth of a second."""
        check = child_check(proxy)
        await anyio.sleep(random.uniform(0, 0.01))  # noqa: S311 - chance is what is tried
        try:
            plan = await self._applier.plan(kind, desired, check, ask_server=False)
            return await self._applier.execute(plan, check)
        except ConflictError as error:
            return error


@asynccontextmanager
async def two_writers(kubeconfig: Path) -> AsyncGenerator[tuple[Writer, Writer]]:
    """Both with connections of their own."""
    async with (
        Cluster.connect(user_agent="one", kubeconfig=kubeconfig) as one,
        Cluster.connect(user_agent="two", kubeconfig=kubeconfig) as two,
    ):
        yield Writer(one), Writer(two)


@pytest.fixture
def proxy(admin: Kube, namespace: str) -> Object:
    """A proxy that no operator reconciles: none runs."""
    return admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=0))


def declared(proxy: Object, generation: int) -> dict[Kind, Object]:
    """The children of a generation, each of which declares another listener and another annotation."""
    spec = proxy["spec"] | {"service": {"annotations": {"example.com/generation": str(generation)}}}
    spec["listeners"] = [spec["listeners"][0] | {"port": 8000 + generation}]
    edited = proxy | {"spec": spec}
    return children(edited, parse_spec(edited), default_image=f"envoy:{generation}")


async def both(
    writers: tuple[Writer, Writer], kind: Kind, desired: tuple[Object, Object], proxy: Object
) -> list[object]:
    """Let both write at the same time; what became of it."""
    results: list[object] = []

    async def write(writer: Writer, wanted: Object) -> None:
        results.append(await writer.apply(kind, wanted, proxy))

    async with anyio.create_task_group() as tasks:
        for writer, wanted in zip(writers, desired, strict=True):
            tasks.start_soon(write, writer, wanted)
    return results


async def test_two_creates_of_one_child_make_one(admin: Kube, operator_kubeconfig: Path, proxy: Object) -> None:
    """Of two creates at the same moment one makes the object; the other one finds it, and writes nothing to it."""
    async with two_writers(operator_kubeconfig) as writers:
        for kind, child in declared(proxy, 1).items():
            results = await both(writers, kind, (child, child), proxy)
            assert all(isinstance(each, Result) and each.problem is None for each in results), results
            live = admin.get(kind, key_of(child))
            assert not_as_declared(admin, kind, child) == ()
            assert {each.live["metadata"]["uid"] for each in results if isinstance(each, Result) and each.live} == {
                live["metadata"]["uid"]
            }
        created = [kind for writer in writers for kind, outcome in writer.written if outcome is Outcome.CREATED]
        assert sorted(map(str, created)) == sorted(map(str, CHILD_KINDS))
        assert not any(outcome is Outcome.UNCHANGED for writer in writers for _, outcome in writer.written)


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
async def test_two_repairs_of_one_child_lose_nothing_of_others(
    admin: Kube, operator_kubeconfig: Path, proxy: Object, kind: Kind
) -> None:
    """Whoever is last, foreign fields stay, there is one object, and the next look of the newer one finds its own."""
    key = child_key(Key(proxy["metadata"]["namespace"], proxy["metadata"]["name"]))
    async with two_writers(operator_kubeconfig) as writers:
        for each, child in declared(proxy, 0).items():
            await writers[0].apply(each, child, proxy)
        note = {"metadata": {"annotations": {"example.com/note": "keep"}, "labels": {"team": "red"}}}
        before = admin.patch(kind, key, note, field_manager="platform")
        for writer in writers:
            writer.store.learn(kind, before)
        for round_ in range(1, ROUNDS):
            older, newer = declared(proxy, round_)[kind], declared(proxy, round_ + ROUNDS)[kind]
            await both(writers, kind, (older, newer), proxy)
            live = admin.get(kind, key)
            assert live["metadata"]["uid"] == before["metadata"]["uid"]
            found = foreign_bytes(live, newer)
            assert found[".metadata.annotations.example.com/note"] == "keep"
            assert found[".metadata.labels.team"] == "red"
            # The older one stops, as one that lost its Lease; the newer one's watch delivers what is stored.
            writers[1].store.learn(kind, live)
            await writers[1].apply(kind, newer, proxy)
            assert not_as_declared(admin, kind, newer) == ()


@pytest.mark.parametrize("kind", [CONFIG_MAP, SERVICE], ids=str)
async def test_a_repair_that_arrives_late_undoes_nothing(
    admin: Kube, operator_kubeconfig: Path, proxy: Object, kind: Kind
) -> None:
    """A replica that was suspended before its write was sent: its plan is pinned to the version that it saw."""
    async with two_writers(operator_kubeconfig) as (late, holder):
        first = declared(proxy, 1)[kind]
        await late.apply(kind, first, proxy)
        live = admin.get(kind, key_of(first))
        late.store.learn(kind, live)
        holder.store.learn(kind, live)
        check = child_check(proxy)
        planned = await late._applier.plan(kind, declared(proxy, 2)[kind], check)
        assert isinstance(await holder.apply(kind, declared(proxy, 3)[kind], proxy), Result)
        with pytest.raises(ConflictError):
            await late._applier._repair(planned, live, check)
        assert not_as_declared(admin, kind, declared(proxy, 3)[kind]) == ()
