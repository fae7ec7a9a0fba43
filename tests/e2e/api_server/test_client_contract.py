"""What the operator assumes about the API server and about lightkube, tested on a real API server.

Each test states one claim that ``cluster.py``, ``apply.py``, ``status.py`` or ``watch.py`` rests on. When one fails
after an upgrade, the code that quotes it has to change.
"""

import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from operator_app.api.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    FIELD_MANAGER,
    LEASE,
    NAMESPACE,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.errors import (
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    TransientError,
)
from operator_app.kube.client import Cluster, Request
from operator_app.kube.deltas import Changed, Deleted, Delta, Listed
from operator_app.kube.watch import Restart, WatchTimes, follow
from tests.e2e.controlplane import Cluster as ControlPlane
from tests.e2e.kube import Kube

pytestmark = pytest.mark.anyio

NO_SUCH_VERSION = "1"
"""A resourceVersion that no object can have: etcd's first write, before any object, has revision 2."""


@pytest.fixture
async def cluster(control_plane: ControlPlane) -> AsyncIterator[Cluster]:
    """The client, as administrator."""
    async with Cluster.connect(kubeconfig=control_plane.kubeconfig, user_agent="contract-test") as found:
        yield found


def config_map(
    namespace: str, name: str = "subject", *, data: dict[str, str] | None = None, **metadata: object
) -> Object:
    """A ConfigMap configuration to apply."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "data": {"key": "value"} if data is None else data,
    }


def deployment(namespace: str, *, replicas: int = 0) -> Object:
    """A Deployment that runs nothing."""
    labels = {"app": "subject"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "subject", "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "main", "image": "none.invalid/none:1"}]},
            },
        },
    }


def envoy_proxy(namespace: str) -> Object:
    """A small valid EnvoyProxy; no operator runs here, so nothing becomes of it."""
    return {
        "apiVersion": ENVOY_PROXY.api_version,
        "kind": ENVOY_PROXY.kind,
        "metadata": {"name": "subject", "namespace": namespace},
        "spec": {
            "listeners": [{"name": "http", "port": 80, "routes": [{"backend": "app"}]}],
            "backends": [{"name": "app", "endpoints": [{"host": "app.example.org", "port": 8080}]}],
        },
    }


def status_of(obj: Object, generation: int, **metadata: object) -> Object:
    """A status configuration for an EnvoyProxy."""
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "metadata": {"name": obj["metadata"]["name"], "namespace": obj["metadata"]["namespace"], **metadata},
        "status": {"observedGeneration": generation},
    }


# --- server-side apply: created, merged, conditional ---------------------------------------------------------------


async def test_apply_tells_created_from_merged(cluster: Cluster, namespace: str) -> None:
    """The first apply answers 201 and every later one 200, and the operator is the object's field manager."""
    first = await cluster.apply(CONFIG_MAP, config_map(namespace), force=False)
    second = await cluster.apply(CONFIG_MAP, config_map(namespace, data={"key": "other"}), force=False)
    assert (first.created, second.created) == (True, False)
    managers = [(entry["manager"], entry["operation"]) for entry in second.object["metadata"]["managedFields"]]
    assert managers == [(FIELD_MANAGER, "Apply")]


async def test_a_repeated_apply_writes_nothing(cluster: Cluster, namespace: str) -> None:
    """Applying the same configuration again leaves the resourceVersion as it is."""
    versions = {
        (await cluster.apply(CONFIG_MAP, config_map(namespace), force=True)).object["metadata"]["resourceVersion"]
        for _ in range(3)
    }
    assert len(versions) == 1


async def test_apply_with_an_impossible_version_creates_an_absent_object(cluster: Cluster, namespace: str) -> None:
    """With metadata.resourceVersion "1", an absent object is created as without it."""
    applied = await cluster.apply(CONFIG_MAP, config_map(namespace, resourceVersion=NO_SUCH_VERSION), force=True)
    assert applied.created
    assert applied.object["metadata"]["resourceVersion"] != NO_SUCH_VERSION


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("same", [False, True])
async def test_apply_with_an_impossible_version_never_touches_an_existing_object(
    cluster: Cluster, admin: Kube, namespace: str, *, force: bool, same: bool
) -> None:
    """With metadata.resourceVersion "1", an existing object answers 409 even with force: apply as atomic create."""
    data = {"key": "value"} if same else {"key": "stranger's"}
    before = admin.apply(CONFIG_MAP, config_map(namespace, data=data), field_manager="stranger")
    with pytest.raises(ConflictError) as conflict:
        await cluster.apply(CONFIG_MAP, config_map(namespace, resourceVersion=NO_SUCH_VERSION), force=force)
    assert conflict.value.reason == "Conflict"
    assert admin.get(CONFIG_MAP, Key(namespace, "subject")) == before


@pytest.mark.parametrize("kind", [DEPLOYMENT, SERVICE], ids=str)
async def test_atomic_create_holds_for_every_child_kind(
    cluster: Cluster, admin: Kube, namespace: str, kind: Kind
) -> None:
    """The impossible version creates and refuses Deployments and Services in the same way as ConfigMaps."""
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "subject", "namespace": namespace},
        "spec": {"ports": [{"name": "http", "port": 80, "protocol": "TCP"}], "selector": {"app": "subject"}},
    }
    obj = service if kind == SERVICE else deployment(namespace)
    conditional = {**obj, "metadata": {**obj["metadata"], "resourceVersion": NO_SUCH_VERSION}}
    assert (await cluster.apply(kind, conditional, force=False)).created
    before = admin.get(kind, Key(namespace, "subject"))
    with pytest.raises(ConflictError):
        await cluster.apply(kind, conditional, force=True)
    assert admin.get(kind, Key(namespace, "subject"))["metadata"]["uid"] == before["metadata"]["uid"]


async def test_racing_atomic_creates_have_one_winner(cluster: Cluster, namespace: str) -> None:
    """Of many conditional applies at once, one creates and all others get 409: none is merged."""
    outcomes: list[str] = []

    async def racer(number: int) -> None:
        obj = config_map(namespace, data={"racer": str(number)}, resourceVersion=NO_SUCH_VERSION)
        try:
            applied = await cluster.apply(CONFIG_MAP, obj, force=True)
            outcomes.append("created" if applied.created else "merged")
        except ConflictError as error:
            outcomes.append(error.reason)

    async with anyio.create_task_group() as racers:
        for number in range(12):
            racers.start_soon(racer, number)
    assert outcomes.count("created") == 1
    assert "merged" not in outcomes
    assert set(outcomes) <= {"created", "Conflict", "AlreadyExists"}


async def test_a_stale_version_is_refused_and_the_current_one_accepted(
    cluster: Cluster, admin: Kube, namespace: str
) -> None:
    """metadata.resourceVersion makes an apply on an existing object conditional."""
    stale = (await cluster.apply(CONFIG_MAP, config_map(namespace), force=True)).object["metadata"]["resourceVersion"]
    moved = admin.patch(CONFIG_MAP, Key(namespace, "subject"), {"metadata": {"labels": {"moved": "on"}}})
    current = moved["metadata"]["resourceVersion"]
    with pytest.raises(ConflictError):
        await cluster.apply(CONFIG_MAP, config_map(namespace, data={"k": "2"}, resourceVersion=stale), force=True)
    await cluster.apply(CONFIG_MAP, config_map(namespace, data={"k": "2"}, resourceVersion=current), force=True)


async def test_a_conflict_names_field_and_manager(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """Without force, another manager's field is a 409 whose causes name the field and, in the message, the manager."""
    admin.apply(CONFIG_MAP, config_map(namespace, data={"key": "theirs", "free": "x"}), field_manager="stranger")
    with pytest.raises(ConflictError) as conflict:
        await cluster.apply(CONFIG_MAP, config_map(namespace), force=False)
    (cause,) = conflict.value.causes
    assert (cause.field, cause.reason) == (".data.key", "FieldManagerConflict")
    assert "stranger" in cause.message
    taken = await cluster.apply(CONFIG_MAP, config_map(namespace), force=True)
    assert taken.object["data"] == {"key": "value", "free": "x"}


async def test_apply_with_a_uid_creates_nothing(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """metadata.uid on an absent object is a 409, and nothing is created."""
    with pytest.raises(ConflictError) as conflict:
        await cluster.apply(CONFIG_MAP, config_map(namespace, uid=str(uuid.uuid4())), force=True)
    assert conflict.value.causes == ()
    assert admin.find(CONFIG_MAP, Key(namespace, "subject")) is None


async def test_apply_with_another_uid_touches_nothing(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """metadata.uid of another incarnation is refused with 422 on metadata.uid; the right one is accepted."""
    live = admin.create(CONFIG_MAP, config_map(namespace))
    with pytest.raises(InvalidError) as invalid:
        await cluster.apply(CONFIG_MAP, config_map(namespace, data={"k": "2"}, uid=str(uuid.uuid4())), force=True)
    assert {cause.field for cause in invalid.value.causes} == {"metadata.uid"}
    assert admin.get(CONFIG_MAP, Key(namespace, "subject")) == live
    right = config_map(namespace, data={"k": "2"}, uid=live["metadata"]["uid"])
    assert not (await cluster.apply(CONFIG_MAP, right, force=True)).created


async def test_the_empty_configuration_releases_what_we_own_and_nothing_else(
    cluster: Cluster, admin: Kube, namespace: str
) -> None:
    """Applying only the name removes the operator's fields and leaves the fields, and the entry, of others."""
    admin.apply(CONFIG_MAP, config_map(namespace, data={"theirs": "x"}), field_manager="stranger")
    await cluster.apply(CONFIG_MAP, config_map(namespace, data={"ours": "y"}), force=False)
    empty: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "subject", "namespace": namespace}}
    released = (await cluster.apply(CONFIG_MAP, empty, force=False)).object
    assert released["data"] == {"theirs": "x"}
    assert [entry["manager"] for entry in released["metadata"]["managedFields"]] == ["stranger"]


async def test_a_foreign_update_takes_over_the_fields_that_it_changes(
    cluster: Cluster, admin: Kube, namespace: str
) -> None:
    """A changed field moves from the operator's managedFields entry to the other's, and only that field."""
    await cluster.apply(CONFIG_MAP, config_map(namespace, data={"a": "1", "b": "1"}), force=False)
    drifted = admin.patch(CONFIG_MAP, Key(namespace, "subject"), {"data": {"a": "2"}}, field_manager="stranger")
    owned = {entry["manager"]: entry["fieldsV1"]["f:data"] for entry in drifted["metadata"]["managedFields"]}
    assert "f:a" not in owned[FIELD_MANAGER]
    assert "f:b" in owned[FIELD_MANAGER]
    assert owned["stranger"] == {"f:a": {}}


@pytest.mark.parametrize("kind", [CONFIG_MAP, ENVOY_PROXY], ids=str)
async def test_unknown_fields_are_refused(cluster: Cluster, admin: Kube, namespace: str, kind: Kind) -> None:
    """A misspelt field is never dropped; but the refusal is a 500 without a reason, so it looks transient."""
    obj = config_map(namespace) if kind == CONFIG_MAP else envoy_proxy(namespace)
    with pytest.raises(TransientError) as refused:
        await cluster.apply(kind, obj | {"misspelt": {}}, force=True)
    assert type(refused.value) is TransientError
    assert admin.find(kind, Key(namespace, "subject")) is None


async def test_an_immutable_field_is_named(cluster: Cluster, namespace: str) -> None:
    """Changing a Deployment's selector is a 422 whose cause names spec.selector."""
    await cluster.apply(DEPLOYMENT, deployment(namespace), force=False)
    changed = deployment(namespace)
    changed["spec"]["selector"]["matchLabels"] = {"app": "other"}
    changed["spec"]["template"]["metadata"]["labels"] = {"app": "other"}
    with pytest.raises(InvalidError) as invalid:
        await cluster.apply(DEPLOYMENT, changed, force=True)
    assert invalid.value.reason == "Invalid"
    assert "spec.selector" in [cause.field for cause in invalid.value.causes]


async def test_apply_into_a_missing_namespace_creates_nothing(cluster: Cluster) -> None:
    """A namespace that does not exist is NotFoundError, with another reason than a missing object."""
    with pytest.raises(NotFoundError) as absent:
        await cluster.apply(CONFIG_MAP, config_map("no-such-namespace"), force=True)
    assert absent.value.reason == "NamespaceNotFound"


async def test_apply_into_a_dying_namespace_is_forbidden(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """A namespace that is being deleted refuses new objects, with a reason of its own."""
    held = config_map(namespace, "held", finalizers=["example.org/held"])
    admin.create(CONFIG_MAP, held)
    admin.delete(NAMESPACE, Key("", namespace))
    try:
        with pytest.raises(ForbiddenError) as forbidden:
            await cluster.apply(CONFIG_MAP, config_map(namespace), force=True)
        assert forbidden.value.reason == "NamespaceTerminating"
    finally:
        admin.patch(CONFIG_MAP, Key(namespace, "held"), {"metadata": {"finalizers": None}})


# --- status and finalizers -----------------------------------------------------------------------------------------


async def test_a_status_apply_is_protected_by_the_version(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """A status apply with a stale resourceVersion is a 409, and one with the current resourceVersion goes through."""
    subject = envoy_proxy(namespace)
    stale = (await cluster.apply(ENVOY_PROXY, subject, force=False)).object["metadata"]["resourceVersion"]
    moved = admin.patch(ENVOY_PROXY, Key(namespace, "subject"), {"metadata": {"labels": {"moved": "on"}}})
    current = moved["metadata"]["resourceVersion"]
    for version in (stale, NO_SUCH_VERSION):
        with pytest.raises(ConflictError):
            await cluster.apply(
                ENVOY_PROXY, status_of(subject, 1, resourceVersion=version), force=True, subresource="status"
            )
    applied = await cluster.apply(
        ENVOY_PROXY, status_of(subject, 2, resourceVersion=current), force=True, subresource="status"
    )
    assert applied.object["status"]["observedGeneration"] == 2


async def test_a_status_apply_is_not_protected_by_the_uid(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """A custom resource's status apply does not check metadata.uid; the main resource's does."""
    subject = envoy_proxy(namespace)
    live = (await cluster.apply(ENVOY_PROXY, subject, force=False)).object
    other = str(uuid.uuid4())
    applied = await cluster.apply(ENVOY_PROXY, status_of(subject, 1, uid=other), force=True, subresource="status")
    assert applied.object["status"]["observedGeneration"] == 1
    with pytest.raises(InvalidError):
        await cluster.apply(ENVOY_PROXY, {**subject, "metadata": {**subject["metadata"], "uid": other}}, force=True)
    assert admin.get(ENVOY_PROXY, Key(namespace, "subject"))["metadata"]["uid"] == live["metadata"]["uid"]


async def test_a_status_apply_creates_nothing(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """A status apply on an absent object is NotFoundError."""
    with pytest.raises(NotFoundError) as absent:
        await cluster.apply(ENVOY_PROXY, status_of(envoy_proxy(namespace), 1), force=True, subresource="status")
    assert absent.value.reason == "NotFound"
    assert admin.find(ENVOY_PROXY, Key(namespace, "subject")) is None


async def test_a_finalizer_is_applied_and_released_alone(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """One finalizer can be owned by uid-conditional apply and released by the empty one; other finalizers stay."""
    live = admin.create(CONFIG_MAP, config_map(namespace, finalizers=["example.org/theirs"]))
    identity = {"name": "subject", "namespace": namespace, "uid": live["metadata"]["uid"]}
    base: Object = {"apiVersion": "v1", "kind": "ConfigMap"}
    with_ours = {**base, "metadata": {**identity, "finalizers": ["example.org/ours"]}}
    added = (await cluster.apply(CONFIG_MAP, with_ours, force=False)).object
    assert sorted(added["metadata"]["finalizers"]) == ["example.org/ours", "example.org/theirs"]
    released = (await cluster.apply(CONFIG_MAP, {**base, "metadata": identity}, force=False)).object
    assert released["metadata"]["finalizers"] == ["example.org/theirs"]
    admin.patch(CONFIG_MAP, Key(namespace, "subject"), {"metadata": {"finalizers": None}})


async def test_a_finalizer_with_uid_does_not_resurrect(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """On an object just deleted, the finalizer's apply with metadata.uid is a 409 and creates nothing."""
    live = admin.create(CONFIG_MAP, config_map(namespace))
    admin.delete(CONFIG_MAP, Key(namespace, "subject"))
    obj: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "subject",
            "namespace": namespace,
            "uid": live["metadata"]["uid"],
            "finalizers": ["example.org/ours"],
        },
    }
    with pytest.raises(ConflictError):
        await cluster.apply(CONFIG_MAP, obj, force=True)
    assert admin.find(CONFIG_MAP, Key(namespace, "subject")) is None


async def test_a_finalizer_is_refused_on_a_dying_object(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """Adding a finalizer while the object is being deleted is InvalidError."""
    live = admin.create(CONFIG_MAP, config_map(namespace, finalizers=["example.org/theirs"]))
    admin.delete(CONFIG_MAP, Key(namespace, "subject"))
    obj: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "subject",
            "namespace": namespace,
            "uid": live["metadata"]["uid"],
            "finalizers": ["example.org/ours"],
        },
    }
    with pytest.raises(InvalidError):
        await cluster.apply(CONFIG_MAP, obj, force=True)
    admin.patch(CONFIG_MAP, Key(namespace, "subject"), {"metadata": {"finalizers": None}})


# --- reads, plain writes, deletes ----------------------------------------------------------------------------------


async def test_get_tells_absent_objects_from_unserved_kinds(cluster: Cluster, namespace: str) -> None:
    """An absent object is None; a kind without a CRD is NotFoundError, for get and for list."""
    assert await cluster.get(CONFIG_MAP, Key(namespace, "absent")) is None
    assert await cluster.get(CONFIG_MAP, Key("no-such-namespace", "absent")) is None
    unserved = Kind("no-such-group.example.org", "v1", "Nothing", "nothings")
    with pytest.raises(NotFoundError) as absent:
        await cluster.get(unserved, Key(namespace, "absent"))
    assert absent.value.reason == "KindNotServed"
    with pytest.raises(NotFoundError) as absent:
        _ = [page async for page in cluster.list(unserved)]
    assert absent.value.reason == "KindNotServed"


async def test_create_replace_and_merge_patch(cluster: Cluster, namespace: str) -> None:
    """Create refuses a taken name; replace is a compare-and-set; a merge patch changes what it names."""
    lease: Object = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "subject", "namespace": namespace},
        "spec": {"holderIdentity": "one", "renewTime": "2026-01-01T00:00:00.000001Z"},
    }
    created = await cluster.create(LEASE, lease)
    with pytest.raises(ConflictError) as taken:
        await cluster.create(LEASE, lease)
    assert taken.value.reason == "AlreadyExists"
    replaced = await cluster.replace(LEASE, {**created, "spec": {**created["spec"], "holderIdentity": "two"}})
    with pytest.raises(ConflictError) as lost:
        await cluster.replace(LEASE, {**created, "spec": {**created["spec"], "holderIdentity": "three"}})
    assert lost.value.reason == "Conflict"
    patched = await cluster.merge_patch(LEASE, Key(namespace, "subject"), {"spec": {"leaseDurationSeconds": 15}})
    assert replaced["spec"]["holderIdentity"] == patched["spec"]["holderIdentity"] == "two"
    generated = {**lease, "metadata": {"generateName": "subject-", "namespace": namespace}}
    assert (await cluster.create(LEASE, generated))["metadata"]["name"].startswith("subject-")


async def test_delete_is_held_by_its_preconditions(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """A wrong UID or a stale resourceVersion is a 409 and deletes nothing; deleting an absent object returns False."""
    key = Key(namespace, "subject")
    live = admin.create(CONFIG_MAP, config_map(namespace))
    uid, version = live["metadata"]["uid"], live["metadata"]["resourceVersion"]
    moved = admin.patch(CONFIG_MAP, key, {"metadata": {"labels": {"moved": "on"}}})
    with pytest.raises(ConflictError):
        await cluster.delete(CONFIG_MAP, key, uid=str(uuid.uuid4()))
    with pytest.raises(ConflictError):
        await cluster.delete(CONFIG_MAP, key, uid=uid, resource_version=version)
    assert admin.find(CONFIG_MAP, key) is not None
    assert await cluster.delete(CONFIG_MAP, key, uid=uid, resource_version=moved["metadata"]["resourceVersion"])
    assert admin.find(CONFIG_MAP, key) is None
    assert not await cluster.delete(CONFIG_MAP, key, uid=uid)


async def test_cluster_scoped_kinds(cluster: Cluster, namespace: str) -> None:
    """A kind without namespaces is read and listed like the others."""
    live = await cluster.get(NAMESPACE, Key("", namespace))
    assert live is not None
    names = {item["metadata"]["name"] async for page in cluster.list(NAMESPACE) for item in page.items}
    assert namespace in names


async def test_requests_are_observed(control_plane: ControlPlane, namespace: str) -> None:
    """Each request is observed with verb and kind, its status and its duration in seconds."""
    seen: list[tuple[Request, int | None, float]] = []
    async with Cluster.connect(
        kubeconfig=control_plane.kubeconfig, user_agent="contract-test", observe=lambda *told: seen.append(told)
    ) as cluster:
        await cluster.apply(CONFIG_MAP, config_map(namespace), force=False)
        await cluster.get(CONFIG_MAP, Key(namespace, "absent"))
    assert [(request.verb, str(request.key), status) for request, status, _ in seen] == [
        ("apply", f"{namespace}/subject", 201),
        ("get", f"{namespace}/absent", 404),
    ]
    assert all(0 < seconds < 10 for _, _, seconds in seen)


# --- lists and watches ---------------------------------------------------------------------------------------------


async def test_a_list_comes_in_pages_of_one_snapshot(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """All pages have one resourceVersion, every object has apiVersion and kind, and labels select."""
    for number in range(7):
        admin.create(CONFIG_MAP, config_map(namespace, f"subject-{number}", labels={"mine": "yes"}))
    pages = [page async for page in cluster.list(CONFIG_MAP, namespace=namespace, labels="mine=yes", page_size=3)]
    assert [len(page.items) for page in pages] == [3, 3, 1]
    assert [page.last for page in pages] == [False, False, True]
    assert len({page.resource_version for page in pages}) == 1
    assert all(item["kind"] == "ConfigMap" and item["apiVersion"] == "v1" for page in pages for item in page.items)


async def test_an_empty_list_is_one_page(cluster: Cluster, namespace: str) -> None:
    """Nothing to list is one empty page, with a resourceVersion to watch from; a version given is a lower bound."""
    (page,) = [page async for page in cluster.list(DEPLOYMENT, namespace=namespace)]
    assert (page.items, page.last) == ([], True)
    (fresher,) = [
        page async for page in cluster.list(DEPLOYMENT, namespace=namespace, resource_version=page.resource_version)
    ]
    assert int(fresher.resource_version) >= int(page.resource_version)


async def test_a_watch_tells_every_change_and_ends_by_itself(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """ADDED, MODIFIED and DELETED arrive in order, a bookmark comes before the end, and the end is no error."""
    (page,) = [page async for page in cluster.list(CONFIG_MAP, namespace=namespace, labels="mine=yes")]
    events: list[tuple[str, str]] = []
    versions: list[int] = []
    async with cluster.watch(
        CONFIG_MAP,
        resource_version=page.resource_version,
        namespace=namespace,
        labels="mine=yes",
        timeout_s=4,
        idle_timeout_s=10,
    ) as stream:
        admin.create(CONFIG_MAP, config_map(namespace, labels={"mine": "yes"}))
        admin.patch(CONFIG_MAP, Key(namespace, "subject"), {"data": {"key": "2"}})
        admin.delete(CONFIG_MAP, Key(namespace, "subject"))
        async for event in stream:
            events.append((event.type, event.object["metadata"].get("name", "")))
            versions.append(int(event.resource_version))
    assert events[:3] == [("ADDED", "subject"), ("MODIFIED", "subject"), ("DELETED", "subject")]
    assert {type_ for type_, _ in events[3:]} == {"BOOKMARK"}
    assert versions == sorted(versions)


async def test_a_watch_from_an_ancient_version_is_gone(cluster: Cluster, namespace: str) -> None:
    """A resourceVersion older than what the server remembers of a kind is GoneError."""
    async with cluster.watch(
        PROXY_REGISTRATION, resource_version="1", namespace=namespace, timeout_s=5, idle_timeout_s=10
    ) as stream:
        with pytest.raises(GoneError):
            await anext(stream)


async def test_a_version_of_the_future_is_gone_for_a_list_and_silent_for_a_watch(
    cluster: Cluster, admin: Kube, namespace: str
) -> None:
    """As after a restored etcd: a list from the future is refused at once, a watch gets nothing at all, not even
    a bookmark before its end, while a watch from the present does.
    """  # noqa: D205
    (page,) = [page async for page in cluster.list(PROXY_REGISTRATION, namespace=namespace)]
    future = str(int(page.resource_version) + 1_000_000)
    received: dict[str, int] = {}
    for version in (page.resource_version, future):
        async with cluster.watch(
            PROXY_REGISTRATION, resource_version=version, namespace=namespace, timeout_s=8, idle_timeout_s=20
        ) as stream:
            admin.create(CONFIG_MAP, config_map(namespace, f"subject-{version}"))
            received[version] = len([event async for event in stream])
    assert received[page.resource_version] >= 1
    assert received[future] == 0
    with pytest.raises(GoneError):
        _ = [page async for page in cluster.list(CONFIG_MAP, resource_version=future)]


async def test_a_cancelled_watch_closes_its_connection(cluster: Cluster, namespace: str) -> None:
    """After cancellation inside a stream the pool of watches holds no connection in use."""
    (page,) = [page async for page in cluster.list(CONFIG_MAP, namespace=namespace)]
    with anyio.move_on_after(0.5) as scope:
        async with cluster.watch(
            CONFIG_MAP,
            resource_version=page.resource_version,
            namespace=namespace,
            timeout_s=60,
            idle_timeout_s=60,
        ) as stream:
            async for _ in stream:
                pass
    assert scope.cancelled_caught
    pool: Any = cluster._watches._client._transport
    pool = getattr(pool._pool, "_inner", pool._pool)._pool
    assert [connection for connection in pool.connections if not connection.is_idle()] == []


class Mirror:
    """Names and data of ConfigMaps, as the deltas deliver them."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self._moved = anyio.Event()

    def take(self, delta: Delta) -> None:
        """One delta."""
        match delta:
            case Listed(objects=objects):
                self.known |= {obj["metadata"]["name"]: obj["data"]["key"] for obj in objects}
            case Changed(object=obj):
                self.known[obj["metadata"]["name"]] = obj["data"]["key"]
            case Deleted(object=obj):
                del self.known[obj["metadata"]["name"]]
        self._moved.set()
        self._moved = anyio.Event()

    async def becomes(self, expected: dict[str, str]) -> None:
        """Wait until this is what is known."""
        while self.known != expected:
            await self._moved.wait()


async def test_nothing_is_lost_between_streams(cluster: Cluster, admin: Kube, namespace: str) -> None:
    """Following over many short streams, while objects come, change and go, ends with the server's state."""
    mirror = Mirror()
    restarts: list[Restart] = []

    def churn() -> dict[str, str]:
        for number in range(40):
            admin.create(CONFIG_MAP, config_map(namespace, f"subject-{number}", labels={"mine": "yes"}))
            admin.patch(CONFIG_MAP, Key(namespace, f"subject-{number}"), {"data": {"key": f"value-{number}"}})
            if number % 3 == 0:
                admin.delete(CONFIG_MAP, Key(namespace, f"subject-{number}"))
            time.sleep(0.1)
        live = admin.list(CONFIG_MAP, namespace, label_selector="mine=yes")
        return {obj["metadata"]["name"]: obj["data"]["key"] for obj in live}

    async with anyio.create_task_group() as tasks:

        async def following() -> None:
            await follow(
                cluster,
                CONFIG_MAP,
                sink=mirror.take,
                times=WatchTimes(timeout_s=1, healthy_after_s=0.5),
                rand=lambda: 0.0,
                on_error=lambda _, error: pytest.fail(str(error)),
                on_restart=restarts.append,
                namespace=namespace,
                labels="mine=yes",
            )

        tasks.start_soon(following)
        expected = await anyio.to_thread.run_sync(churn)
        with anyio.fail_after(10):
            await mirror.becomes(expected)
        tasks.cancel_scope.cancel()
    assert len(expected) == 26
    assert restarts.count("reconnect") >= 3
    assert "relist" not in restarts


# --- identity ------------------------------------------------------------------------------------------------------


async def test_a_service_account_is_who_it_is(control_plane: ControlPlane, namespace: str) -> None:
    """A kubeconfig with a service account's token authenticates, and what RBAC does not grant is ForbiddenError."""
    kubeconfig = control_plane.kubeconfig_for(namespace, "default")
    async with Cluster.connect(kubeconfig=kubeconfig, user_agent="contract-test") as cluster:
        with pytest.raises(ForbiddenError) as forbidden:
            await cluster.get(CONFIG_MAP, Key(namespace, "subject"))
    assert forbidden.value.reason == "Forbidden"
    assert f"system:serviceaccount:{namespace}:default" in str(forbidden.value)


async def test_a_wrong_token_is_refused(control_plane: ControlPlane, tmp_path: Path, namespace: str) -> None:
    """401 is ForbiddenError (Unauthorized); a CA that did not sign the server is a TransientError, never a request."""
    text = control_plane.kubeconfig_for(namespace, "default").read_text()
    content = yaml.safe_load(text)
    content["users"][0]["user"] = {"token": "not.a.token"}
    wrong = tmp_path / "wrong"
    wrong.write_text(yaml.safe_dump(content))
    async with Cluster.connect(kubeconfig=wrong, user_agent="contract-test") as cluster:
        with pytest.raises(ForbiddenError) as forbidden:
            await cluster.get(CONFIG_MAP, Key(namespace, "subject"))
    assert forbidden.value.reason == "Unauthorized"
    for entry in content["clusters"]:
        entry["cluster"] = {"server": entry["cluster"]["server"]}
    wrong.write_text(yaml.safe_dump(content))
    async with Cluster.connect(kubeconfig=wrong, user_agent="contract-test") as cluster:
        with pytest.raises(TransientError):
            await cluster.get(CONFIG_MAP, Key(namespace, "subject"))
