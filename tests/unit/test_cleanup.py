"""The end of a proxy: what is released, from exactly what was read, and what is said while something holds it up."""

from copy import deepcopy
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from operator_app.api.kinds import (
    ANNOTATION_INSTALLATION,
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    FINALIZER,
    LABEL_INSTANCE,
    LABEL_MANAGED_BY,
    LABEL_OWNER_UID,
    OPTIONAL_CHILD_KINDS,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.api.models import parse_spec
from operator_app.cleanup import (
    DEREGISTRATION_FAILED,
    FINALIZER_NOT_REMOVED,
    ORPHANING_FAILED,
    Cleanup,
    orphan_child,
)
from operator_app.desired import children
from operator_app.errors import ConflictError, OperatorError, PolicyError, TerminalError, ThrottledError, TransientError
from operator_app.kube.events import Occurrence
from operator_app.results import DONE, ReconcileResult
from tests.unit.scripted_api import (
    CONFLICT,
    NOT_FOUND,
    Components,
    ScriptedApi,
    components,
    ok,
    proxy_of_team,
    refused_by_policy,
    stored_status,
    with_finalizer,
)
from tests.unit.ssa.field_sets import entry, stored

pytestmark = pytest.mark.anyio

KEY = Key("team-a", "checkout")
DELETED = "2026-07-01T00:00:00Z"
DELETED_AT = datetime(2026, 7, 1, tzinfo=UTC)
NO_OTHERS = [(f"get {kind}", NOT_FOUND) for kind in OPTIONAL_CHILD_KINDS]
OTHER_OWNER = {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "n"}


class Records:
    """A registrar that notes what it is asked for, and fails when it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.error: OperatorError | None = None
        self.failing: set[str] = set()
        self.too_many: TerminalError | None = None
        self.orphans: tuple[str, ...] = ()

    async def deregister(self, proxy: Key, uid: str) -> None:
        """Remove a record."""
        self.calls.append(f"deregister {proxy} {uid}")
        if self.error is not None and (not self.failing or uid in self.failing):
            raise self.error

    async def orphan(self, uid: str) -> None:
        """Keep a record."""
        self.calls.append(f"orphan {uid}")

    async def abandon(self, uid: str) -> None:
        """Note that a record is left."""
        self.calls.append(f"abandon {uid}")
        if self.too_many is not None:
            raise self.too_many

    def orphaned_uids(self, proxy: Key, live_uid: str | None) -> tuple[str, ...]:
        """UIDs of previous incarnations."""
        self.calls.append(f"orphaned {proxy} {live_uid}")
        return self.orphans


class World:
    """A cleanup around a registrar of the test, at a moment that the test chooses."""

    def __init__(self, own: Components, *, abandon_after_s: float | None = None, age_s: float = 0.0) -> None:
        self.records = Records()
        self.events: list[Occurrence] = []
        registrar: Any = self.records
        self.cleanup = Cleanup(
            own.cluster,
            own.finalizer,
            registrar,
            own.statuses,
            record_event=self.events.append,
            abandon_after_s=abandon_after_s,
            now=lambda: DELETED_AT + timedelta(seconds=age_s),
        )


def dying(spec: Object | None = None, **metadata: Any) -> Object:
    """A proxy whose deletion has begun, with our finalizer."""
    proxy = proxy_of_team(spec, finalizers=[FINALIZER], deletionTimestamp=DELETED, **metadata)
    fields: Object = {"f:metadata": {"f:finalizers": {f'v:"{FINALIZER}"': {}}}}
    proxy["metadata"]["managedFields"] = [entry(proxy, fields)]
    return proxy


def child(kind: Kind, proxy: Object, **metadata: Any) -> Object:
    """A child as it is stored, at version 20."""
    desired = children(proxy, parse_spec(proxy), default_image="i")[kind]
    return stored(desired, version=20, uid=f"{kind.kind}-uid", **metadata)


def ready_of(api: ScriptedApi) -> Object:
    """The condition ``Ready`` of the one status that was written."""
    conditions: list[Object] = api.body("apply EnvoyProxy/status")["status"]["conditions"]
    return next(each for each in conditions if each["type"] == "Ready")


# --- orphaning -----------------------------------------------------------------------------------------------------


async def test_an_orphaned_child_loses_what_says_that_it_is_ours_and_nothing_else(tmp_path: Path) -> None:
    """Exactly the version that was read; another owner and other labels stay."""
    live = child(SERVICE, dying())
    live["metadata"]["ownerReferences"].append(OTHER_OWNER)
    live["metadata"]["labels"]["team"] = "red"
    api = ScriptedApi(("patch Service", ok(live)))
    async with components(api, tmp_path) as own:
        await orphan_child(own.cluster, SERVICE, live)
    assert api.body("patch Service") == {
        "metadata": {
            "uid": "Service-uid",
            "resourceVersion": "20",
            "ownerReferences": [OTHER_OWNER],
            "labels": dict.fromkeys((LABEL_MANAGED_BY, LABEL_OWNER_UID, LABEL_INSTANCE)),
            "annotations": {ANNOTATION_INSTALLATION: None},
        }
    }


async def test_an_orphaned_child_without_labels_and_other_owners_gets_no_empty_ones(tmp_path: Path) -> None:
    """What is not there is not removed."""
    live = child(SERVICE, dying())
    del live["metadata"]["labels"], live["metadata"]["annotations"]
    api = ScriptedApi(("patch Service", ok(live)))
    async with components(api, tmp_path) as own:
        await orphan_child(own.cluster, SERVICE, live)
    pinned = {"uid": "Service-uid", "resourceVersion": "20"}
    assert api.body("patch Service") == {"metadata": pinned | {"ownerReferences": None}}


async def test_every_child_of_this_proxy_is_orphaned_before_its_record(tmp_path: Path) -> None:
    """Each is read live; one that is gone, or another's, is left; then the finalizer goes."""
    proxy = dying({"deletionPolicy": "Orphan"})
    theirs = child(DEPLOYMENT, proxy_of_team(uid="other-uid"))
    api = ScriptedApi(
        ("get ConfigMap", NOT_FOUND),
        ("get Deployment", ok(theirs)),
        ("get Service", ok(child(SERVICE, proxy))),
        ("patch Service", ok(child(SERVICE, proxy))),
        *NO_OTHERS,
        ("apply EnvoyProxy", with_finalizer(proxy)),
    )
    async with components(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        world = World(own)
        assert await world.cleanup.clean_up(proxy) == DONE
    assert world.records.calls == ["orphan proxy-uid"]


async def test_a_child_that_can_not_be_orphaned_keeps_the_finalizer_and_not_the_others(tmp_path: Path) -> None:
    """All are tried, the first refusal is told, and the deletion waits."""
    proxy = dying({"deletionPolicy": "Orphan"})
    script = [
        [(f"get {kind}", ok(child(kind, proxy))), (f"patch {kind}", refused_by_policy(403, f"no {kind}"))]
        for kind in CHILD_KINDS
    ]
    lines = [line for lines in script for line in lines]
    api = ScriptedApi(*lines, *NO_OTHERS, ("apply EnvoyProxy/status", stored_status(proxy)))
    async with components(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        world = World(own)
        result = await world.cleanup.clean_up(proxy)
    assert isinstance(result.failure, PolicyError)
    assert f"no {CONFIG_MAP}" in str(result.failure)
    assert ready_of(api)["reason"] == ORPHANING_FAILED
    assert [each.reason for each in world.events] == [ORPHANING_FAILED]


# --- the record and the finalizer ------------------------------------------------------------------------------------


async def test_a_proxy_without_our_finalizer_has_nothing_outside(tmp_path: Path) -> None:
    """No request and no call."""
    async with components(ScriptedApi(), tmp_path) as own:
        world = World(own)
        assert await world.cleanup.clean_up(proxy_of_team(deletionTimestamp=DELETED)) == DONE
    assert world.records.calls == []


@pytest.mark.parametrize(
    "error",
    [TransientError("down"), ThrottledError("enough", retry_after_s=30), TerminalError("Refused", "no")],
    ids=["transient", "throttled", "terminal"],
)
async def test_a_record_that_stays_is_told_and_keeps_the_finalizer(tmp_path: Path, error: OperatorError) -> None:
    """``Ready`` and ``Registered`` become False with the reason; an Event says so once."""
    proxy = dying()
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with components(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        world = World(own)
        world.records.error = error
        ended = await world.cleanup.clean_up(proxy)
        assert (ended.failure, ended.requeue_after_s) == (error, None)
        told = own.store.get(ENVOY_PROXY, KEY)
        assert told is not None
        assert (await world.cleanup.clean_up(told)).failure is error
    conditions = {each["type"]: each for each in api.body("apply EnvoyProxy/status")["status"]["conditions"]}
    assert set(conditions) == {"Ready", "Registered"}
    assert {each["reason"] for each in conditions.values()} == {DEREGISTRATION_FAILED}
    assert {each["status"] for each in conditions.values()} == {"False"}
    assert [each.reason for each in world.events] == [DEREGISTRATION_FAILED], "the second time it is no news"


@pytest.mark.parametrize(("asked_s", "wait_s"), [(30.0, 30.0), (500.0, 100.0)])
async def test_a_requested_wait_ends_with_the_abandonment(tmp_path: Path, asked_s: float, wait_s: float) -> None:
    """``Retry-After`` counts, but not beyond the moment at which the proxy goes in any case."""
    proxy = dying()
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with components(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        world = World(own, abandon_after_s=400, age_s=300)
        world.records.error = ThrottledError("enough", retry_after_s=asked_s)
        assert await world.cleanup.clean_up(proxy) == ReconcileResult(requeue_after_s=wait_s)


@pytest.mark.parametrize(("age_s", "is_abandoned"), [(399.0, False), (400.0, True), (401.0, True)])
async def test_a_proxy_is_abandoned_once_its_time_is_over(tmp_path: Path, age_s: float, *, is_abandoned: bool) -> None:
    """Not a second earlier; then the record is noted and the finalizer goes."""
    proxy = dying()
    last = ("apply EnvoyProxy", with_finalizer(proxy)), ("apply EnvoyProxy/status", stored_status(proxy))
    api = ScriptedApi(last[not is_abandoned])
    async with components(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        world = World(own, abandon_after_s=400, age_s=age_s)
        world.records.error = TransientError("down")
        result = await world.cleanup.clean_up(proxy)
    assert ("abandon proxy-uid" in world.records.calls) is is_abandoned
    assert (result == DONE) is is_abandoned
    assert [each.reason for each in world.events] == ["RemovalAbandoned" if is_abandoned else DEREGISTRATION_FAILED]


async def test_a_tenant_with_too_many_abandoned_records_waits_for_the_registry(tmp_path: Path) -> None:
    """Although its time is over; the status says what there is too much of."""
    proxy = dying()
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with components(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        world = World(own, abandon_after_s=1, age_s=100)
        world.records.error = TransientError("down")
        world.records.too_many = TerminalError("TooManyAbandoned", "enough are pending")
        result = await world.cleanup.clean_up(proxy)
    assert result.failure is world.records.too_many
    assert "enough are pending" in ready_of(api)["message"]
    assert ready_of(api)["reason"] == DEREGISTRATION_FAILED


async def test_a_conflict_over_the_record_is_no_reason_to_abandon_it(tmp_path: Path) -> None:
    """The caller reads again and decides anew."""
    proxy = dying()
    async with components(ScriptedApi(), tmp_path, (ENVOY_PROXY, proxy)) as own:
        world = World(own, abandon_after_s=1, age_s=100)
        world.records.error = ConflictError("it moved on")
        with pytest.raises(ConflictError):
            await world.cleanup.clean_up(proxy)
    assert world.records.calls == ["deregister team-a/checkout proxy-uid"]


async def test_a_finalizer_that_a_policy_keeps_is_told(tmp_path: Path) -> None:
    """The record is removed; the condition ``Registered`` is left as it was."""
    proxy = dying()
    api = ScriptedApi(("apply EnvoyProxy", refused_by_policy(403)), ("apply EnvoyProxy/status", stored_status(proxy)))
    async with components(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        world = World(own)
        result = await world.cleanup.clean_up(proxy)
    assert isinstance(result.failure, PolicyError)
    conditions = api.body("apply EnvoyProxy/status")["status"]["conditions"]
    assert [(each["type"], each["reason"]) for each in conditions] == [("Ready", FINALIZER_NOT_REMOVED)]


async def test_a_finalizer_of_a_proxy_that_has_moved_on_is_decided_anew(tmp_path: Path) -> None:
    """A conflict is the caller's."""
    proxy = dying()
    async with components(ScriptedApi(("apply EnvoyProxy", CONFLICT)), tmp_path, (ENVOY_PROXY, proxy)) as own:
        with pytest.raises(ConflictError):
            await World(own).cleanup.clean_up(proxy)


# --- records of previous incarnations --------------------------------------------------------------------------------


async def test_no_orphaned_record_costs_no_request(tmp_path: Path) -> None:
    """The store alone shows that there is nothing to do."""
    async with components(ScriptedApi(), tmp_path) as own:
        world = World(own)
        assert await world.cleanup.remove_orphaned_records(KEY, proxy_of_team()) is None
        assert await world.cleanup.remove_orphaned_records(KEY, None) is None
    assert world.records.calls == ["orphaned team-a/checkout proxy-uid", "orphaned team-a/checkout None"]


async def test_all_orphaned_records_are_tried_and_the_first_error_is_told(tmp_path: Path) -> None:
    """But not that of the proxy which the API server shows to exist, whatever the store says."""
    api = ScriptedApi(("get EnvoyProxy", ok(proxy_of_team())))
    async with components(api, tmp_path) as own:
        world = World(own)
        world.records.orphans = ("a", "b", "proxy-uid", "z")
        world.records.error, world.records.failing = TransientError("down"), {"a", "z"}
        failed = await world.cleanup.remove_orphaned_records(KEY, None)
    assert failed is world.records.error
    assert world.records.calls[1:] == [f"deregister {KEY} {uid}" for uid in ("a", "b", "z")]


async def test_a_status_that_can_not_be_written_for_a_proxy_that_moved_on_is_a_conflict(tmp_path: Path) -> None:
    """What the deletion waits for is written to the version that was read, or not at all."""
    proxy = dying()
    api = ScriptedApi(("apply EnvoyProxy/status", CONFLICT))
    async with components(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        world = World(own)
        world.records.error = TransientError("down")
        with pytest.raises(ConflictError):
            await world.cleanup.clean_up(deepcopy(proxy))
