"""Claims that are given back: how long they rest, for whom, and how many."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import FIELD_MANAGER, HOSTNAME_CLAIM, LABEL_MANAGED_BY, Key, Object
from operator_app.registration.claims import HOSTNAME_RESTING, Claims, released_at
from operator_app.results import Outcome
from tests.unit.scripted_api import ScriptedApi, components, ok, repaired
from tests.unit.ssa.field_sets import stored

pytestmark = pytest.mark.anyio

HOSTNAME: Final = "shop.example.com"
SHOP: Final = Key("team-a", "shop")
REST_S: Final = 300.0
GONE: Final = {"kind": "Status", "apiVersion": "v1", "status": "Success"}


@dataclass
class Clock:
    """A clock that a test sets."""

    at: datetime = datetime(2026, 7, 1, 12, tzinfo=UTC)

    def __call__(self) -> datetime:
        """The time now."""
        return self.at


@dataclass
class World:
    """Claims with a clock. ``team-a`` and ``team-a2`` are one tenant."""

    claims: Claims
    clock: Clock
    changed: list[Object]
    deleted: list[object]

    def a_claim(self, hostname: str = HOSTNAME, *, uid: str = "uid-1", released_s: float | None = None) -> Object:
        """A stored claim of the shop; one that was given back some seconds ago, if ``released_s`` says so."""
        desired = self.claims._desired(hostname, SHOP, uid)
        if released_s is not None:
            since = self.clock.at - timedelta(seconds=released_s)
            desired["spec"]["releasedAt"] = since.isoformat().replace("+00:00", "Z")
        return stored(desired, uid=f"claim-{hostname}")


@asynccontextmanager
async def a_world(folder: Path, api: ScriptedApi | None = None, *, limit: int = 10) -> AsyncGenerator[World]:
    """A world whose requests go to ``api``."""
    async with components(api or ScriptedApi(), folder) as own:
        deleted: list[object] = []
        changed: list[Object] = []
        clock = Clock()
        claims = Claims(
            own.applier,
            own.cluster,
            own.store,
            namespace="edge-system",
            sink=deleted.append,
            on_change=changed.append,
            rest_s=REST_S,
            resting_limit=limit,
            tenant_of=lambda namespace: namespace.removesuffix("2"),
            now=clock,
        )
        yield World(claims, clock, changed, deleted)


async def test_a_claim_that_rests_is_nobodys(tmp_path: Path) -> None:
    """Its proxy does not have the hostname any more, nothing is left to remove, and the end of the rest is known."""
    async with a_world(tmp_path) as world:
        world.claims._store.learn(HOSTNAME_CLAIM, world.a_claim(released_s=100))
        assert not world.claims.is_owner(HOSTNAME, "uid-1")
        assert world.claims.owner_uids(SHOP) == set()
        assert world.claims.next_rested_s(SHOP) == REST_S - 100
        world.clock.at += timedelta(seconds=REST_S)
        assert world.claims.owner_uids(SHOP) == {"uid-1"}, "to be deleted"
        assert world.claims.next_rested_s(SHOP) is None


async def test_another_tenant_waits_until_it_has_rested(tmp_path: Path) -> None:
    """The status says for how long, and no request is sent."""
    async with a_world(tmp_path) as world:
        world.claims._store.learn(HOSTNAME_CLAIM, world.a_claim(released_s=100))
        waiting = await world.claims.acquire(HOSTNAME, Key("team-b", "shop"), "uid-2")
        assert waiting.problem is not None
        assert waiting.problem.reason == HOSTNAME_RESTING
        assert "free in 3 min" in waiting.problem.message
        assert waiting.requeue_after_s == pytest.approx(REST_S - 100, abs=1)


@pytest.mark.parametrize(("namespace", "later_s"), [("team-a2", 0), ("team-a", 0), ("team-b", REST_S)])
async def test_the_same_tenant_at_once_and_then_anybody_takes_it(
    tmp_path: Path, namespace: str, later_s: float
) -> None:
    """One write gives it the version that was seen: without a claim in between, another tenant would be first."""
    proxy = Key(namespace, "other")
    api = ScriptedApi(("apply HostnameClaim", repaired()))
    async with a_world(tmp_path, api) as world:
        world.claims._store.learn(HOSTNAME_CLAIM, world.a_claim(released_s=1))
        world.clock.at += timedelta(seconds=later_s)
        assert (await world.claims.acquire(HOSTNAME, proxy, "uid-2")).outcome is Outcome.CONFIGURED
        metadata = api.sent[0].body["metadata"]
        assert {"uid", "resourceVersion"} <= metadata.keys()
        assert "releasedAt" not in api.sent[0].body["spec"]
        assert world.claims.is_owner(HOSTNAME, "uid-2")
        assert [each["spec"]["proxy"]["uid"] for each in world.changed] == ["uid-2"], "who waits is told whose it is"


async def test_a_proxy_takes_its_own_claim_back_at_the_version_that_was_seen(tmp_path: Path) -> None:
    """Another proxy of the tenant may have taken it since, and have given it back as well."""
    api = ScriptedApi(("apply HostnameClaim", repaired()))
    async with a_world(tmp_path, api) as world:
        world.claims._store.learn(HOSTNAME_CLAIM, world.a_claim(released_s=1))
        assert (await world.claims.acquire(HOSTNAME, SHOP, "uid-1")).outcome is Outcome.CONFIGURED
        assert {"uid", "resourceVersion"} <= api.sent[0].body["metadata"].keys()
        assert "releasedAt" not in api.sent[0].body["spec"]


async def test_what_has_rested_is_deleted_at_the_version_that_was_seen(tmp_path: Path) -> None:
    """Another proxy may have taken it since, and it still is the same object."""
    api = ScriptedApi(("delete HostnameClaim", ok(GONE)))
    async with a_world(tmp_path, api) as world:
        world.claims._store.learn(HOSTNAME_CLAIM, world.a_claim(released_s=REST_S))
        await world.claims.release(SHOP, "uid-1")
        assert {"uid", "resourceVersion"} <= api.sent[0].body["preconditions"].keys()


async def test_giving_back_keeps_the_claim_with_the_time(tmp_path: Path) -> None:
    """Exactly the version that was read is changed; who waits for the hostname is told."""
    api = ScriptedApi(("apply HostnameClaim", repaired()))
    async with a_world(tmp_path, api) as world:
        world.claims._store.learn(HOSTNAME_CLAIM, world.a_claim())
        await world.claims.release(SHOP, "uid-1")
        assert [each["metadata"]["name"] for each in world.changed] == [HOSTNAME]
        assert released_at(world.changed[0]) == world.clock.at
        metadata = api.sent[0].body["metadata"]
        assert "resourceVersion" in metadata
        assert metadata["labels"] == {LABEL_MANAGED_BY: FIELD_MANAGER}, "it stays in the operator's watch"
        await world.claims.release(SHOP, "uid-1")
        assert len(api.sent) == 1, "it rests already"


@pytest.mark.parametrize("limit", [0, 2])
async def test_what_rests_for_one_tenant_is_bounded(tmp_path: Path, limit: int) -> None:
    """Beyond the limit a claim is deleted at once; the limit counts the releases of the last ``rest_s`` seconds."""
    names = [f"h{n}.example.com" for n in range(limit + 1)]
    api = ScriptedApi(*[("apply HostnameClaim", repaired())] * limit, ("delete HostnameClaim", ok(GONE)))
    async with a_world(tmp_path, api, limit=limit) as world:
        for name in names:
            world.claims._store.learn(HOSTNAME_CLAIM, world.a_claim(name))
        await world.claims.release(SHOP, "uid-1")
        assert len(world.deleted) == 1
        assert world.claims._may_rest("team-b") == (limit > 0), "another tenant has a limit of its own"
        world.clock.at += timedelta(seconds=REST_S)
        assert world.claims._may_rest("team-a") == (limit > 0)
