"""A round that knows an old world does no harm in the new one: nothing comes back, nobody gets another's status.

The rooms run in this process, over stores that hold what was true before; the API server is the real one.
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
from operator_app.apply import Outcome, child_check
from operator_app.desired import child_key
from operator_app.errors import ConflictError
from operator_app.ssa.fields import fields_of
from operator_app.status import Observation, next_status
from tests.e2e.components import Components, components
from tests.e2e.controlplane import Cluster as ControlPlane
from tests.e2e.kube import Kube
from tests.e2e.proxies import a_proxy, condition, declared_children, is_refused, objects_of, record_key

pytestmark = pytest.mark.anyio

OTHER_FINALIZER: Final = "example.com/other"
LATER: Final = datetime(2040, 1, 1, tzinfo=UTC)
"""A clock that would show in a status if it got there."""


@pytest.fixture
async def parts(control_plane: ControlPlane, crds: object) -> AsyncIterator[Components]:  # noqa: ARG001  # needed to serve
    """The rooms, with an empty store."""
    async with components(control_plane.kubeconfig) as found:
        yield found


@pytest.fixture
def proxy(admin: Kube, key: Key, operator_kubeconfig: object) -> Object:  # noqa: ARG001  # makes the registry's namespace
    """A proxy that no operator has seen yet."""
    return admin.create(ENVOY_PROXY, a_proxy(key.namespace, key.name))


def reborn(admin: Kube, old: Object) -> Object:
    """Another life of the same name: the old one is gone, whatever held it, and its children are collected."""
    key = Key(old["metadata"]["namespace"], old["metadata"]["name"])
    admin.patch(ENVOY_PROXY, key, {"metadata": {"finalizers": None}})
    admin.delete(ENVOY_PROXY, key)
    admin.wait_gone(ENVOY_PROXY, key)
    for kind in CHILD_KINDS:
        admin.wait_gone(kind, child_key(key), timeout_s=20)
    return admin.create(ENVOY_PROXY, a_proxy(key.namespace, key.name))


def dying(admin: Kube, proxy: Object) -> Object:
    """The proxy after its deletion has begun, held by somebody else's finalizer."""
    key = Key(proxy["metadata"]["namespace"], proxy["metadata"]["name"])
    admin.patch(ENVOY_PROXY, key, {"metadata": {"finalizers": [OTHER_FINALIZER]}})
    admin.delete(ENVOY_PROXY, key)
    return admin.get(ENVOY_PROXY, key)


def children_of(admin: Kube, key: Key) -> list[Object | None]:
    """What is stored under the children's names."""
    return [admin.find(kind, child_key(key)) for kind in CHILD_KINDS]


async def converged(admin: Kube, parts: Components, key: Key, proxy: Object) -> Object:
    """The proxy after a first round, which its store knows of."""
    parts.deliver(ENVOY_PROXY, proxy)
    await parts.reconciler.reconcile(key)
    assert None not in children_of(admin, key)
    return admin.get(ENVOY_PROXY, key)


async def test_a_proxy_deleted_before_the_finalizer_stays_deleted(
    admin: Kube, parts: Components, key: Key, proxy: Object
) -> None:
    """Between the read and the finalizer's write the proxy goes: it is not created anew, and neither is anything."""
    parts.deliver(ENVOY_PROXY, proxy)
    admin.delete(ENVOY_PROXY, key)

    with pytest.raises(ConflictError):
        await parts.finalizer.add(proxy)
    verdict = await parts.reconciler.reconcile(key)

    assert isinstance(verdict.failure, ConflictError)
    assert admin.find(ENVOY_PROXY, key) is None
    assert children_of(admin, key) == [None] * len(CHILD_KINDS)
    assert admin.find(PROXY_REGISTRATION, record_key(proxy)) is None
    assert parts.writes == []


async def test_a_dying_proxy_gets_no_finalizer(admin: Kube, parts: Components, key: Key, proxy: Object) -> None:
    """Once its deletion has begun it is too late to hold a proxy, and a round that did not know makes nothing."""
    parts.deliver(ENVOY_PROXY, proxy)
    now = dying(admin, proxy)

    with pytest.raises(ConflictError):
        await parts.finalizer.add(proxy)
    verdict = await parts.reconciler.reconcile(key)

    assert isinstance(verdict.failure, ConflictError)
    assert admin.get(ENVOY_PROXY, key) == now
    assert children_of(admin, key) == [None] * len(CHILD_KINDS)
    # The conflict made it look again, so the next round knows better, and has nothing to take back.
    assert (await parts.reconciler.reconcile(key)).failure is None
    assert admin.get(ENVOY_PROXY, key) == now


async def test_a_reborn_proxy_gets_no_finalizer_of_its_former_life(
    admin: Kube, parts: Components, key: Key, proxy: Object
) -> None:
    """The UID in the write tells the lives apart."""
    now = reborn(admin, proxy)

    with pytest.raises(ConflictError):
        await parts.finalizer.add(proxy)

    assert admin.get(ENVOY_PROXY, key) == now


@pytest.mark.parametrize("held", [True, False], ids=["held by both", "held by the new one only"])
async def test_a_reborn_proxy_keeps_its_own_finalizer(
    admin: Kube, parts: Components, key: Key, proxy: Object, *, held: bool
) -> None:
    """The burial of the former life does not take the finalizer off the new one."""
    old = (
        await parts.finalizer.add(proxy)
        if held
        else proxy | {"metadata": proxy["metadata"] | {"finalizers": [FINALIZER]}}
    )
    now = await parts.finalizer.add(reborn(admin, proxy))

    with pytest.raises(ConflictError):
        await parts.finalizer.remove(old)

    assert admin.get(ENVOY_PROXY, key) == now


async def test_a_reborn_proxy_never_gets_the_status_of_its_former_life(
    admin: Kube, control_plane: ControlPlane, parts: Components, key: Key, proxy: Object
) -> None:
    """A late status write is refused, although the API server does not look at the UID of a status."""
    old = await converged(admin, parts, key, proxy)
    now = reborn(admin, old)

    with pytest.raises(ConflictError):
        await parts.statuses.write(old, next_status(Observation(old), now=LATER))
    async with components(control_plane.kubeconfig) as behind:
        behind.deliver(ENVOY_PROXY, old | {"status": now["status"]})
        verdict = await behind.reconciler.reconcile(key)
        assert isinstance(verdict.failure, ConflictError)
        assert admin.get(ENVOY_PROXY, key) == now
        # Once its watch tells of the new life, the record that it had confirmed for the former one is buried.
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
    """A second operator that is behind by one generation leaves the record of the newer one as it is."""
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
    CONFIG_MAP: {"data": {"envoy.json": "{}"}},
    DEPLOYMENT: {"spec": {"replicas": 7}},
    SERVICE: {"spec": {"selector": {"app": "other"}}},
}


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
async def test_a_late_repair_recreates_a_deleted_child_only_behind_a_read(
    admin: Kube, parts: Components, key: Key, proxy: Object, kind: Kind
) -> None:
    """A repair of a child that has gone meanwhile fails by its UID; the child is then made as a new object."""
    await converged(admin, parts, key, proxy)
    broken = admin.patch(kind, child_key(key), DRIFT[kind])
    parts.deliver(kind, broken)
    admin.delete(kind, child_key(key))
    admin.wait_gone(kind, child_key(key))

    await parts.reconciler.reconcile(key)

    found = admin.get(kind, child_key(key))
    assert found["metadata"]["uid"] != broken["metadata"]["uid"]
    assert (kind, Outcome.CREATED) in parts.writes
    assert (kind, Outcome.CONFIGURED) not in parts.writes


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
async def test_a_late_repair_does_not_touch_a_stranger(
    admin: Kube, parts: Components, key: Key, proxy: Object, kind: Kind
) -> None:
    """A stranger that took the name of a broken child is left as it is, although the store still knows the child."""
    await converged(admin, parts, key, proxy)
    broken = admin.patch(kind, child_key(key), DRIFT[kind])
    parts.deliver(kind, broken)
    admin.delete(kind, child_key(key))
    admin.wait_gone(kind, child_key(key))
    stranger = admin.create(kind, a_copy(broken))

    await parts.reconciler.reconcile(key)

    found = admin.get(kind, child_key(key))
    assert without_status(found) == without_status(stranger)
    assert fields_of(found) == {}
    assert is_refused("Reconciled", "NameConflict")(admin.get(ENVOY_PROXY, key))


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
async def test_a_former_life_does_not_touch_the_children_of_the_new_one(
    admin: Kube, control_plane: ControlPlane, parts: Components, key: Key, proxy: Object, kind: Kind
) -> None:
    """An operator that still believes in the former life repairs, re-owns and registers nothing of the new one."""
    old = await converged(admin, parts, key, proxy)
    broken = admin.patch(kind, child_key(key), DRIFT[kind])
    new = reborn(admin, old)
    async with components(control_plane.kubeconfig) as current:
        await converged(admin, current, key, new)
    before = objects_of(admin, key)

    async with components(control_plane.kubeconfig) as behind:
        behind.deliver(ENVOY_PROXY, old)
        behind.deliver(kind, broken)
        await behind.reconciler.reconcile(key)
        claim = child_check(old)
        plan = await behind.applier.plan(kind, declared_children(old)[kind], claim)
        result = await behind.applier.execute(plan, claim)

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
    """What somebody creates who exported an object and changed hands: without identity and owner."""
    metadata = {name: obj["metadata"][name] for name in ("namespace", "name", "labels")}
    spec = {name: value for name, value in obj.get("spec", {}).items() if not name.startswith("clusterIP")}
    contents = {"data": obj["data"]} if "data" in obj else {"spec": spec}
    return {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": metadata} | contents


def without_status(obj: Object) -> Object:
    """An object as its writers left it: controllers may report on it meanwhile."""
    volatile = ("resourceVersion", "annotations")
    metadata = {name: value for name, value in obj["metadata"].items() if name not in volatile}
    metadata["managedFields"] = [
        each for each in metadata["managedFields"] if each["manager"] != "kube-controller-manager"
    ]
    return {name: value for name, value in obj.items() if name != "status"} | {"metadata": metadata}
