"""A round over an old store does no harm: nothing deleted is created again, and no status goes to another incarnation.

The components run in this process, over stores with old versions; the API server is the real one.
"""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Final

import pytest

from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    FINALIZER,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.apply import child_check
from operator_app.desired import child_key
from operator_app.errors import ConflictError
from operator_app.results import Outcome
from operator_app.ssa.fields import fields_of
from operator_app.status import Observation, next_status
from tests.e2e.components import Components, components
from tests.e2e.controlplane import Cluster as ControlPlane
from tests.e2e.kube import Kube, wait_until
from tests.e2e.proxies import a_proxy, condition, declared_children, is_refused, objects_of, record_key

pytestmark = pytest.mark.anyio

OTHER_FINALIZER: Final = "example.com/other"
LATER: Final = datetime(2040, 1, 1, tzinfo=UTC)
"""The clock of late status writes: it would be visible in a status that they changed."""


@pytest.fixture
async def parts(control_plane: ControlPlane, crds: object) -> AsyncIterator[Components]:  # noqa: ARG001  # needed to serve
    """The operator's components, with an empty store."""
    async with components(control_plane.kubeconfig) as found:
        yield found


@pytest.fixture
def proxy(admin: Kube, key: Key, operator_kubeconfig: object) -> Object:  # noqa: ARG001  # makes the registry's namespace
    """A proxy that no operator has seen yet."""
    return admin.create(ENVOY_PROXY, a_proxy(key.namespace, key.name))


def recreated(admin: Kube, old: Object) -> Object:
    """A new proxy of the same name, after the old one and its children are gone; no finalizer is waited for."""
    key = Key(old["metadata"]["namespace"], old["metadata"]["name"])
    admin.patch(ENVOY_PROXY, key, {"metadata": {"finalizers": None}})
    admin.delete(ENVOY_PROXY, key)
    admin.wait_gone(ENVOY_PROXY, key)
    for kind in CHILD_KINDS:
        admin.wait_gone(kind, child_key(key), timeout_s=20)
    return admin.create(ENVOY_PROXY, a_proxy(key.namespace, key.name))


def being_deleted(admin: Kube, proxy: Object) -> Object:
    """The proxy after its deletion has begun, kept by another writer's finalizer."""
    key = Key(proxy["metadata"]["namespace"], proxy["metadata"]["name"])
    admin.patch(ENVOY_PROXY, key, {"metadata": {"finalizers": [OTHER_FINALIZER]}})
    admin.delete(ENVOY_PROXY, key)
    return admin.get(ENVOY_PROXY, key)


def children_of(admin: Kube, key: Key) -> list[Object | None]:
    """What is stored under the children's names."""
    return [admin.find(kind, child_key(key)) for kind in CHILD_KINDS]


async def converged(admin: Kube, parts: Components, key: Key, proxy: Object) -> Object:
    """The proxy after a first round; the store has it as it was before that round."""
    parts.deliver(ENVOY_PROXY, proxy)
    await parts.reconciler.reconcile(key)
    assert None not in children_of(admin, key)
    return admin.get(ENVOY_PROXY, key)


async def test_a_proxy_deleted_before_the_finalizer_stays_deleted(
    admin: Kube, parts: Components, key: Key, proxy: Object
) -> None:
    """A proxy that is deleted before the finalizer is written is not created again, and its children do not stay."""
    parts.deliver(ENVOY_PROXY, proxy)
    admin.delete(ENVOY_PROXY, key)

    with pytest.raises(ConflictError):
        await parts.finalizer.add(proxy)
    result = await parts.reconciler.reconcile(key)

    assert isinstance(result.failure, ConflictError)
    assert admin.find(ENVOY_PROXY, key) is None
    assert admin.find(PROXY_REGISTRATION, record_key(proxy)) is None
    assert {kind for kind, _ in parts.writes} <= set(CHILD_KINDS)
    # Children are written beside the finalizer; their owner is gone, so the garbage collector deletes them.
    wait_until(lambda: children_of(admin, key) == [None] * len(CHILD_KINDS), 90, "the children to be collected")


async def test_a_proxy_being_deleted_gets_no_finalizer(admin: Kube, parts: Components, key: Key, proxy: Object) -> None:
    """After its deletion has begun a proxy gets no finalizer, and a reconcile with an old store registers nothing."""
    parts.deliver(ENVOY_PROXY, proxy)
    now = being_deleted(admin, proxy)

    with pytest.raises(ConflictError):
        await parts.finalizer.add(proxy)
    result = await parts.reconciler.reconcile(key)

    assert isinstance(result.failure, ConflictError)
    assert admin.get(ENVOY_PROXY, key) == now
    assert admin.find(PROXY_REGISTRATION, record_key(proxy)) is None
    # After the conflict it has read the proxy, so the next round has the current version and nothing to undo.
    assert (await parts.reconciler.reconcile(key)).failure is None
    assert admin.get(ENVOY_PROXY, key) == now


async def test_a_new_incarnation_gets_no_finalizer_of_the_previous_one(
    admin: Kube, parts: Components, key: Key, proxy: Object
) -> None:
    """The write is refused by its UID."""
    now = recreated(admin, proxy)

    with pytest.raises(ConflictError):
        await parts.finalizer.add(proxy)

    assert admin.get(ENVOY_PROXY, key) == now


@pytest.mark.parametrize("has_old_one", [True, False], ids=["held by both", "held by the new one only"])
async def test_a_new_incarnation_keeps_its_own_finalizer(
    admin: Kube, parts: Components, key: Key, proxy: Object, *, has_old_one: bool
) -> None:
    """A late removal of the previous incarnation's finalizer does not remove that of the new one."""
    old = (
        await parts.finalizer.add(proxy)
        if has_old_one
        else proxy | {"metadata": proxy["metadata"] | {"finalizers": [FINALIZER]}}
    )
    now = await parts.finalizer.add(recreated(admin, proxy))

    with pytest.raises(ConflictError):
        await parts.finalizer.remove(old)

    assert admin.get(ENVOY_PROXY, key) == now


async def test_a_new_incarnation_never_gets_the_status_of_the_previous_one(
    admin: Kube, control_plane: ControlPlane, parts: Components, key: Key, proxy: Object
) -> None:
    """A late status write is refused, although the API server does not check the UID of a status write."""
    old = await converged(admin, parts, key, proxy)
    now = recreated(admin, old)

    with pytest.raises(ConflictError):
        await parts.statuses.write(old, next_status(Observation(old), now=LATER))
    async with components(control_plane.kubeconfig) as behind:
        behind.deliver(ENVOY_PROXY, old | {"status": now["status"]})
        result = await behind.reconciler.reconcile(key)
        assert isinstance(result.failure, ConflictError)
        assert admin.get(ENVOY_PROXY, key) == now
        # Once its watch delivers the new incarnation, the record of the previous one is removed.
        behind.deliver(ENVOY_PROXY, now)
        await behind.reconciler.reconcile(key)

    assert now["status"] == {"observedGeneration": -1}
    assert admin.find(PROXY_REGISTRATION, record_key(old)) is None


async def test_observed_generation_never_goes_back(admin: Kube, parts: Components, key: Key, proxy: Object) -> None:
    """A round that began with an older generation can't write behind one that saw the newer."""
    old = await converged(admin, parts, key, proxy)
    newer = admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": 2}})
    parts.deliver(ENVOY_PROXY, newer)
    await parts.reconciler.reconcile(key)
    now = admin.get(ENVOY_PROXY, key)
    assert now["status"]["observedGeneration"] == newer["metadata"]["generation"] == 2

    with pytest.raises(ConflictError):
        await parts.statuses.write(old, next_status(Observation(old), now=LATER))

    assert admin.get(ENVOY_PROXY, key) == now


async def test_an_old_generation_does_not_replace_a_newer_record(
    admin: Kube, control_plane: ControlPlane, parts: Components, key: Key, proxy: Object
) -> None:
    """An operator that is behind by one generation leaves the record of the newer generation as it is."""
    old = await converged(admin, parts, key, proxy)
    hostname = f"{key.namespace}.example.com"
    parts.deliver(ENVOY_PROXY, admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"hostname": hostname}}}))
    await parts.reconciler.reconcile(key)
    now = admin.get(PROXY_REGISTRATION, record_key(old))
    assert (now["spec"]["generation"], now["spec"]["hostname"]) == (2, hostname)

    async with components(control_plane.kubeconfig) as behind:
        behind.deliver(ENVOY_PROXY, old)
        await behind.reconciler.reconcile(key)

    assert admin.get(PROXY_REGISTRATION, record_key(old)) == now
    assert admin.get(ENVOY_PROXY, key)["status"]["observedGeneration"] == 2


DRIFT: dict[Kind, Object] = {
    CONFIG_MAP: {"data": {"cds.json": "{}"}},
    DEPLOYMENT: {"spec": {"replicas": 7}},
    SERVICE: {"spec": {"selector": {"app": "other"}}},
}


def broken_and_deleted(admin: Kube, parts: Components, key: Key, kind: Kind) -> Object:
    """A child with drift that the store has, after it was deleted without the store's knowing."""
    broken = admin.patch(kind, child_key(key), DRIFT[kind])
    parts.deliver(kind, broken)
    admin.delete(kind, child_key(key))
    admin.wait_gone(kind, child_key(key))
    return broken


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
async def test_a_late_repair_recreates_a_deleted_child_only_behind_a_read(
    admin: Kube, parts: Components, key: Key, proxy: Object, kind: Kind
) -> None:
    """A repair of a child that has gone meanwhile is refused by its UID; the child is then created as a new object."""
    await converged(admin, parts, key, proxy)
    broken = broken_and_deleted(admin, parts, key, kind)

    await parts.reconciler.reconcile(key)

    found = admin.get(kind, child_key(key))
    assert found["metadata"]["uid"] != broken["metadata"]["uid"]
    assert (kind, Outcome.CREATED) in parts.writes
    assert (kind, Outcome.CONFIGURED) not in parts.writes


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
async def test_a_late_repair_does_not_touch_a_foreign_object(
    admin: Kube, parts: Components, key: Key, proxy: Object, kind: Kind
) -> None:
    """A foreign object under the name of a deleted child stays as it is, although the store still has the child."""
    await converged(admin, parts, key, proxy)
    broken = broken_and_deleted(admin, parts, key, kind)
    foreign = admin.create(kind, a_copy(broken))

    await parts.reconciler.reconcile(key)

    found = admin.get(kind, child_key(key))
    assert without_status(found) == without_status(foreign)
    assert fields_of(found) == {}
    assert is_refused("Reconciled", "NameConflict")(admin.get(ENVOY_PROXY, key))


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
async def test_a_reconcile_of_the_previous_incarnation_does_not_touch_the_new_ones_children(
    admin: Kube, control_plane: ControlPlane, parts: Components, key: Key, proxy: Object, kind: Kind
) -> None:
    """An operator whose store has the previous incarnation repairs, adopts and registers nothing of the new one."""
    old = await converged(admin, parts, key, proxy)
    broken = admin.patch(kind, child_key(key), DRIFT[kind])
    new = recreated(admin, old)
    async with components(control_plane.kubeconfig) as current:
        await converged(admin, current, key, new)
    before = objects_of(admin, key)

    async with components(control_plane.kubeconfig) as behind:
        behind.deliver(ENVOY_PROXY, old)
        behind.deliver(kind, broken)
        await behind.reconciler.reconcile(key)
        check = child_check(old)
        plan = await behind.applier.plan(kind, declared_children(old)[kind], check)
        result = await behind.applier.execute(plan, check)

    assert result.outcome is Outcome.SKIPPED
    after = objects_of(admin, key)
    assert after.uids == before.uids
    assert [without_status(each) for each in after.children.values()] == [
        without_status(each) for each in before.children.values()
    ]
    assert after.proxy == before.proxy
    assert after.record == before.record
    assert condition(after.proxy, "Reconciled")["status"] == "True"


def a_copy(obj: Object) -> Object:
    """The object without its UID and owner, as somebody would create it from an export."""
    metadata = {name: obj["metadata"][name] for name in ("namespace", "name", "labels")}
    spec = {name: value for name, value in obj.get("spec", {}).items() if not name.startswith("clusterIP")}
    contents = {"data": obj["data"]} if "data" in obj else {"spec": spec}
    return {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": metadata} | contents


def without_status(obj: Object) -> Object:
    """An object with its field owners, without what controllers write about it meanwhile."""
    volatile = ("resourceVersion", "annotations")
    metadata = {name: value for name, value in obj["metadata"].items() if name not in volatile}
    metadata["managedFields"] = [
        each for each in metadata["managedFields"] if each["manager"] != "kube-controller-manager"
    ]
    return {name: value for name, value in obj.items() if name != "status"} | {"metadata": metadata}
