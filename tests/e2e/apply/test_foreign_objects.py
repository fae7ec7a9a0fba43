"""Foreign objects under a child's name: never written, named in the status, and replaced once they are gone."""

import time
from typing import Final

import anyio
import httpx2
import pytest

from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    LABEL_MANAGED_BY,
    LABEL_OWNER_UID,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.desired import child_key
from operator_app.results import Outcome
from operator_app.ssa.fields import fields_of
from tests.e2e.components import components
from tests.e2e.controlplane import AuditLog
from tests.e2e.controlplane import Cluster as ControlPlane
from tests.e2e.kube import Kube, path_of
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import (
    a_proxy,
    assert_one_of_everything,
    condition,
    is_refused,
    kstatus,
    wait_reconciled,
    writes_to_children,
)

WAIT_S: Final = 1.0
"""Several rounds long: the backoff of tests begins at 0.1 s."""

KEY_NAMES: Final = {kind: f"{kind.kind.lower()}-case" for kind in CHILD_KINDS}


def foreign_object(kind: Kind, namespace: str, **metadata: object) -> Object:
    """A valid object of another writer under the name of a child of the proxy ``web``."""
    contents: dict[Kind, Object] = {
        CONFIG_MAP: {"data": {"mine": "yes"}},
        SERVICE: {"spec": {"ports": [{"name": "theirs", "port": 5432}], "selector": {"app": "database"}}},
        DEPLOYMENT: {
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": {"app": "theirs"}},
                "template": {
                    "metadata": {"labels": {"app": "theirs"}},
                    "spec": {"containers": [{"name": "main", "image": "example.com/theirs:v1"}]},
                },
            }
        },
    }
    child = child_key(Key(namespace, "web"))
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"namespace": child.namespace, "name": child.name, **metadata},
        **contents[kind],
    }


def stored(admin: Kube, kind: Kind, obj: Object) -> Object:
    """Create an object and return it as it stays: a Deployment after its controller has written its status."""
    created = admin.create(kind, obj)
    if kind != DEPLOYMENT:
        return created

    def is_settled(live: Object) -> bool:
        status = live.get("status", {})
        types = {each["type"] for each in status.get("conditions", ())}
        return status.get("observedGeneration") == live["metadata"]["generation"] and len(types) == 2

    return admin.wait_until(kind, Key(obj["metadata"]["namespace"], obj["metadata"]["name"]), is_settled)


def test_a_foreign_object_is_left_byte_for_byte_and_named(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess
) -> None:
    """For each kind: no write, ``NameConflict`` and ``Stalled`` name it, the others are created; later the child is.

    Without its ConfigMap a Deployment would run a foreign configuration, so it is the one that waits.
    """
    foreign, proxies = {}, {}
    for kind in CHILD_KINDS:
        proxies[kind] = Key(namespace, KEY_NAMES[kind])
        obj = foreign_object(kind, namespace)
        obj["metadata"]["name"] = child_key(proxies[kind]).name
        foreign[kind] = stored(admin, kind, obj)
    mark = audit.mark()
    for key in proxies.values():
        admin.create(ENVOY_PROXY, a_proxy(namespace, key.name))

    for kind, key in proxies.items():
        proxy = admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "NameConflict"))
        assert f"{kind} {child_key(key)}" in condition(proxy, "Reconciled")["message"]
        assert condition(proxy, "Stalled")["reason"] == "NameConflict"
        assert kstatus(proxy) == "Failed"
    time.sleep(WAIT_S)

    for kind, key in proxies.items():
        assert admin.get(kind, child_key(key)) == foreign[kind]
        answers = sorted((each.resource, each.code) for each in writes_to_children(audit, key, mark))
        assert answers.count((kind.plural, 409)) <= 1, "a create that met it is not sent again"
        writes = [each for each in answers if each != (kind.plural, 409)]
        others = [each for each in CHILD_KINDS if each != kind and (kind, each) != (CONFIG_MAP, DEPLOYMENT)]
        assert writes == sorted((each.plural, 201) for each in others), (
            "the others are created, and the foreign object is not written"
        )
    assert running_operator.metric("operator_app_rounds_total") > len(proxies), "there were several rounds"

    for kind, key in proxies.items():
        admin.delete(kind, child_key(key))
    for key in proxies.values():
        assert condition(wait_reconciled(admin, key), "Stalled") == {}
        assert_one_of_everything(admin, key)


@pytest.mark.usefixtures("running_operator")
def test_a_deleted_proxy_leaves_foreign_objects(admin: Kube, namespace: str) -> None:
    """A proxy all of whose names are taken is deleted completely, and the foreign objects stay as they are."""
    key = Key(namespace, "web")
    foreign = [stored(admin, kind, foreign_object(kind, namespace)) for kind in CHILD_KINDS]
    proxy = admin.create(ENVOY_PROXY, a_proxy(namespace))
    admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "NameConflict"))

    admin.delete(ENVOY_PROXY, key)
    admin.wait_gone(ENVOY_PROXY, key, uid=proxy["metadata"]["uid"])
    time.sleep(WAIT_S)

    assert [admin.get(kind, child_key(key)) for kind in CHILD_KINDS] == foreign


@pytest.mark.usefixtures("running_operator")
@pytest.mark.parametrize("disguise", ["our labels", "another controller", "our reference, not as controller"])
def test_only_the_controller_reference_makes_an_object_ours(
    admin: Kube, audit: AuditLog, namespace: str, disguise: str
) -> None:
    """Our labels, another controller, or a reference to the proxy that is no controller's do not make it a child."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, paused=True))
    proxy = admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "Paused"))
    owner = admin.create(
        CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": namespace, "name": "owner"}}
    )
    uid = proxy["metadata"]["uid"]
    labels = {LABEL_MANAGED_BY: "operator-app", LABEL_OWNER_UID: uid, "app.kubernetes.io/instance": "web"}
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    ours = {"apiVersion": proxy["apiVersion"], "kind": proxy["kind"], "name": "web", "uid": uid}
    metadata: dict[str, Object] = {
        "our labels": {"labels": labels},
        "another controller": {"labels": labels, "ownerReferences": [reference | {"controller": True}]},
        "our reference, not as controller": {"labels": labels, "ownerReferences": [ours]},
    }
    foreign = [stored(admin, kind, foreign_object(kind, namespace, **metadata[disguise])) for kind in CHILD_KINDS]
    mark = audit.mark()

    admin.patch(ENVOY_PROXY, key, {"spec": {"paused": False}})
    admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "NameConflict"))
    time.sleep(WAIT_S)

    assert [admin.get(kind, child_key(key)) for kind in CHILD_KINDS] == foreign
    assert writes_to_children(audit, key, mark) == []


@pytest.mark.usefixtures("running_operator")
def test_a_child_whose_reference_was_removed_is_foreign(admin: Kube, audit: AuditLog, namespace: str) -> None:
    """A child without its owner reference is not the proxy's any more: it is reported and not written."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    mark = audit.mark()

    for kind in CHILD_KINDS:
        admin.patch(kind, child_key(key), {"metadata": {"ownerReferences": None}})
    admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "NameConflict"))
    admin.patch(SERVICE, child_key(key), {"spec": {"selector": {"app": "theirs-now"}}})
    admin.patch(CONFIG_MAP, child_key(key), {"data": {"mine": "yes"}})
    before = {kind: admin.get(kind, child_key(key)) for kind in (CONFIG_MAP, SERVICE)}
    time.sleep(WAIT_S)

    assert {kind: admin.get(kind, child_key(key)) for kind in (CONFIG_MAP, SERVICE)} == before
    assert writes_to_children(audit, key, mark) == []
    for kind in CHILD_KINDS:
        admin.delete(kind, child_key(key))
    wait_reconciled(admin, key)
    assert_one_of_everything(admin, key)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
async def test_another_writer_who_is_faster_by_one_request_is_untouched(
    admin: Kube, control_plane: ControlPlane, namespace: str, kind: Kind
) -> None:
    """An object created between the operator's read and its create stays as it is, without fields of the operator."""
    key = Key(namespace, "web")
    proxy = admin.create(ENVOY_PROXY, a_proxy(namespace))
    foreign: list[Object] = []

    async def before(request: httpx2.Request) -> None:
        if request.method == "PATCH" and request.url.path == path_of(kind, child_key(key)) and not foreign:
            foreign.append(await anyio.to_thread.run_sync(stored, admin, kind, foreign_object(kind, namespace)))

    async with components(control_plane.kubeconfig, before=before) as parts:
        parts.deliver(ENVOY_PROXY, proxy)
        await parts.reconciler.reconcile(key)

    assert [admin.get(kind, child_key(key))] == foreign
    assert fields_of(foreign[0]) == {}
    assert is_refused("Reconciled", "NameConflict")(admin.get(ENVOY_PROXY, key))
    assert (kind, Outcome.CREATED) not in parts.writes
