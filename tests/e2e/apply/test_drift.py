"""Drift of children is repaired in place, by one write each, and fields of other writers stay."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pytest

from operator_app.api.kinds import (
    ANNOTATION_INSTALLATION,
    ANNOTATION_REVISION,
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    LABEL_MANAGED_BY,
    LABEL_OWNER_UID,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.desired import child_key
from operator_app.envoy.files import CLUSTERS_FILE
from operator_app.ssa.comanagers import has_stale_managers
from tests.e2e.controlplane import AuditLog
from tests.e2e.kube import Kube, PatchType, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import (
    CONTAINER,
    a_proxy,
    assert_one_of_everything,
    content_of,
    drift_of,
    objects_of,
    record_key,
    wait_reconciled,
    writes_to_children,
)

WAIT_S: Final = 0.5
"""Long enough for a second write to follow the first, if there were one."""

FOREIGN_LABEL: Final = "team"
FOREIGN_ANNOTATION: Final = "example.com/note"
FOREIGN_DATA: Final = "notes.txt"


@pytest.fixture
def key(admin: Kube, namespace: str, one_operator: OperatorProcess) -> Key:  # noqa: ARG001  # it has to run
    """A converged proxy whose children carry foreign labels, annotations and data."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace))
    wait_reconciled(admin, key)
    foreign: Object = {"metadata": {"labels": {FOREIGN_LABEL: "red"}, "annotations": {FOREIGN_ANNOTATION: "keep"}}}
    for kind in CHILD_KINDS:
        admin.patch(kind, child_key(key), foreign | ({"data": {FOREIGN_DATA: "keep"}} if kind == CONFIG_MAP else {}))
    return key


def json_patch(op: str, path: str, value: object = None) -> list[Object]:
    """A JSON patch of one operation."""
    return [{"op": op, "path": path} | ({} if op == "remove" else {"value": value})]


AFTER_CONFLICT: Final = 3
"""The apply is refused; the foreign field is removed, the apply repeated, and the stale manager removed."""
WITH_STALE_MANAGER: Final = 2
"""The apply, after which the API server gives our fields a second owner, which is removed."""


@dataclass(frozen=True, slots=True)
class Drift:
    """An edit of a child by another writer, and how many writes its repair takes."""

    name: str
    kind: Kind
    patch: Object | Sequence[Object]
    writes: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def edited(admin: Kube, drift: Drift, child: Key) -> Object:
    """The child right after the edit."""
    patch_type: PatchType = "merge" if isinstance(drift.patch, dict) else "json"
    return admin.patch(drift.kind, child, drift.patch, patch_type=patch_type, field_manager="editor")


def label_path(label: str) -> str:
    """The JSON pointer of a label or of a selector's key."""
    return label.replace("/", "~1")


DRIFTS: Final = (
    Drift("selector", SERVICE, json_patch("replace", "/spec/selector", {"app": "other"})),
    Drift("selector extended", SERVICE, json_patch("add", "/spec/selector/more", "yes")),
    Drift("target port", SERVICE, json_patch("replace", "/spec/ports/0/targetPort", 9999)),
    Drift("port name", SERVICE, json_patch("replace", "/spec/ports/0/name", "renamed")),
    Drift("port", SERVICE, json_patch("replace", "/spec/ports/0/port", 81), AFTER_CONFLICT),
    Drift("protocol", SERVICE, json_patch("replace", "/spec/ports/0/protocol", "UDP"), AFTER_CONFLICT),
    Drift("type", SERVICE, {"spec": {"type": "NodePort"}}),
    Drift("args", DEPLOYMENT, json_patch("replace", f"{CONTAINER}/args", ["--mode", "validate"])),
    Drift("argument appended", DEPLOYMENT, json_patch("add", f"{CONTAINER}/args/-", "--log-level=trace")),
    Drift("image", DEPLOYMENT, json_patch("replace", f"{CONTAINER}/image", "example.com/other/envoy:v1")),
    Drift("replicas", DEPLOYMENT, {"spec": {"replicas": 3}}),
    Drift("probe removed", DEPLOYMENT, json_patch("remove", f"{CONTAINER}/readinessProbe")),
    Drift(
        "environment",
        DEPLOYMENT,
        json_patch("replace", f"{CONTAINER}/env/0", {"name": "POD_NAME", "value": "me"}),
        AFTER_CONFLICT,
    ),
    Drift(
        "probe replaced",
        DEPLOYMENT,
        json_patch("replace", f"{CONTAINER}/readinessProbe", {"exec": {"command": ["true"]}}),
        AFTER_CONFLICT,
    ),
    Drift(
        "volume replaced",
        DEPLOYMENT,
        json_patch("replace", "/spec/template/spec/volumes/0", {"name": "config", "emptyDir": {}}),
        AFTER_CONFLICT,
    ),
    Drift("volume", DEPLOYMENT, json_patch("replace", "/spec/template/spec/volumes/0/configMap/name", "other")),
    Drift(
        "readiness port",
        DEPLOYMENT,
        json_patch("replace", f"{CONTAINER}/ports/1/containerPort", 19002),
        AFTER_CONFLICT,
    ),
    Drift(
        "template label removed",
        DEPLOYMENT,
        json_patch("remove", f"/spec/template/metadata/labels/{label_path(LABEL_MANAGED_BY)}"),
    ),
    Drift(
        "template label",
        DEPLOYMENT,
        json_patch("replace", f"/spec/template/metadata/labels/{label_path(LABEL_MANAGED_BY)}", "somebody"),
    ),
    Drift(
        "revision",
        DEPLOYMENT,
        {"spec": {"template": {"metadata": {"annotations": {ANNOTATION_REVISION: "0" * 16}}}}},
    ),
    Drift("data", CONFIG_MAP, {"data": {CLUSTERS_FILE: "{}"}}),
    Drift("data key removed", CONFIG_MAP, {"data": {CLUSTERS_FILE: None}}),
    *(Drift("owner label", kind, {"metadata": {"labels": {LABEL_OWNER_UID: "nobody"}}}) for kind in CHILD_KINDS),
    *(Drift("managed-by removed", kind, {"metadata": {"labels": {LABEL_MANAGED_BY: None}}}) for kind in CHILD_KINDS),
    *(
        Drift("field ownership wiped", kind, {"metadata": {"managedFields": [{}]}}, WITH_STALE_MANAGER)
        for kind in CHILD_KINDS
    ),
)


@pytest.mark.parametrize("drift", DRIFTS, ids=str)
def test_drift_is_repaired_in_place_by_one_write(admin: Kube, audit: AuditLog, key: Key, drift: Drift) -> None:
    """Every declared field that another writer changes is repaired by one write; all else stays, the UIDs included.

    More than one write is needed only where the API server refuses the declared fields beside the foreign ones, or has
    given our fields a second owner, because the list of field owners was wiped.
    """
    before = objects_of(admin, key)
    mark = audit.mark()

    broken = edited(admin, drift, child_key(key))
    wait_until(lambda: not drift_of(admin, key), what=f"the repair of {drift}")
    time.sleep(WAIT_S)

    after = objects_of(admin, key)
    for kind, child in after.children.items():
        assert content_of(child) == content_of(before.children[kind])
    writes = writes_to_children(audit, key, mark)
    assert {each.resource for each in writes} == {drift.kind.plural}
    # A write is pinned to a version, so a controller's report on a Deployment makes it start again.
    codes = Counter(each.code for each in writes)
    assert set(codes) <= ({200, 409} if drift.writes == 1 else {200, 409, 422})
    assert drift.writes <= codes[200] <= (1 if drift.writes == 1 else drift.writes + codes[409])
    assert not has_stale_managers(after.children[drift.kind])
    if drift.kind == DEPLOYMENT:
        was = before.children[DEPLOYMENT]["metadata"]["generation"]
        by_drift = broken["metadata"]["generation"] - was
        assert after.children[DEPLOYMENT]["metadata"]["generation"] == was + 2 * by_drift
    assert after.uids == before.uids


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
def test_a_field_taken_by_a_forced_apply_is_taken_back(admin: Kube, audit: AuditLog, key: Key, kind: Kind) -> None:
    """Another applier that forces its value on one of our fields loses it again, and keeps its other fields."""
    before = objects_of(admin, key)
    mark = audit.mark()
    taken: dict[Kind, Object] = {
        CONFIG_MAP: {"data": {CLUSTERS_FILE: "{}"}},
        DEPLOYMENT: {"spec": {"replicas": 7}},
        SERVICE: {"spec": {"selector": {"app": "other"}}},
    }
    child = child_key(key)
    metadata = {"name": child.name, "namespace": child.namespace, "labels": {"applied-by": "rival"}}
    theirs = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata} | taken[kind]

    admin.apply(kind, theirs, field_manager="rival", force=True)
    wait_until(lambda: not drift_of(admin, key), what="the field to be ours again")
    time.sleep(WAIT_S)

    after = admin.get(kind, child)
    assert after["metadata"]["labels"].pop("applied-by") == "rival"
    assert content_of(after) == content_of(before.children[kind])
    done = [each for each in writes_to_children(audit, key, mark) if each.code != 409]
    assert [(each.resource, each.code) for each in done] == [(kind.plural, 200)]


def test_what_others_add_stays_without_a_write(admin: Kube, audit: AuditLog, key: Key) -> None:
    """A foreign port, sidecar, annotation of the Pod template and data key are not written."""
    mark = audit.mark()
    child = child_key(key)

    admin.patch(SERVICE, child, json_patch("add", "/spec/ports/-", {"name": "extra", "port": 9090}), patch_type="json")
    sidecar = {"name": "sidecar", "image": "example.com/sidecar:v1"}
    admin.patch(DEPLOYMENT, child, json_patch("add", "/spec/template/spec/containers/-", sidecar), patch_type="json")
    restarted = {"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}}}
    admin.patch(DEPLOYMENT, child, restarted)
    added = admin.patch(CONFIG_MAP, child, {"data": {"more.txt": "more"}})
    time.sleep(WAIT_S)

    assert writes_to_children(audit, key, mark) == []
    # A repair of the same objects leaves the additions as they are as well.
    admin.patch(SERVICE, child, {"spec": {"selector": {"app": "other"}}})
    admin.patch(DEPLOYMENT, child, {"spec": {"replicas": 5}})
    admin.patch(CONFIG_MAP, child, {"data": {CLUSTERS_FILE: None}})
    wait_until(lambda: not drift_of(admin, key), what="the repair")
    after = objects_of(admin, key).children
    assert [each["name"] for each in after[SERVICE]["spec"]["ports"]] == ["http", "extra"]
    template = after[DEPLOYMENT]["spec"]["template"]
    assert [each["name"] for each in template["spec"]["containers"]] == ["envoy", "sidecar"]
    assert template["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] == "now"
    assert after[CONFIG_MAP]["data"] == added["data"]


@pytest.mark.parametrize("what", ["ports moved", "field ownership wiped"])
def test_repaired_fields_can_still_be_removed(admin: Kube, key: Key, what: str) -> None:
    """After repairs of several writes our fields have one owner: what the next edit declares no longer is removed."""
    listeners = [
        {"name": name, "port": port, "routes": [{"backend": "app"}]} for name, port in (("http", 80), ("more", 8080))
    ]
    spec = {"listeners": listeners, "service": {"annotations": {"example.com/ours": "yes"}}}
    admin.patch(ENVOY_PROXY, key, {"spec": spec | {"resources": {"requests": {"cpu": "1"}}}})
    wait_reconciled(admin, key)
    if what == "ports moved":
        for index in range(2):
            moved = json_patch("replace", f"/spec/ports/{index}/port", 7000 + index)
            admin.patch(SERVICE, child_key(key), moved, patch_type="json")
    else:
        for kind in CHILD_KINDS:
            admin.patch(kind, child_key(key), {"metadata": {"managedFields": [{}]}})
    wait_until(lambda: not drift_of(admin, key), what="the repair")

    fewer = {"listeners": listeners[:1], "service": {"annotations": None}, "resources": None}
    admin.patch(ENVOY_PROXY, key, {"spec": fewer})
    wait_reconciled(admin, key)
    after = objects_of(admin, key).children
    assert [(each["name"], each["port"]) for each in after[SERVICE]["spec"]["ports"]] == [("http", 80)]
    assert set(after[SERVICE]["metadata"]["annotations"]) == {FOREIGN_ANNOTATION, ANNOTATION_INSTALLATION}
    container = after[DEPLOYMENT]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {}
    assert len(container["ports"]) == 2, "the listener's and the probe's"


def test_a_repair_cut_by_a_crash_is_completed(admin: Kube, audit: AuditLog, key: Key) -> None:
    """What a crash between the writes of a repair leaves is found and removed by the next round."""
    before = objects_of(admin, key)
    mark = audit.mark()
    # The state after a crash before the last write: the fields are as declared and have a second owner.
    second = {"spec": {"selector": before.children[SERVICE]["spec"]["selector"] | {"x": "y"}}}
    admin.patch(SERVICE, child_key(key), second, field_manager="operator-app")
    wait_until(lambda: not drift_of(admin, key), what="the repair")
    entry = {
        "manager": "operator-app",
        "operation": "Update",
        "apiVersion": "v1",
        "fieldsType": "FieldsV1",
        "fieldsV1": {"f:spec": {"f:selector": {}}},
    }
    live = admin.get(SERVICE, child_key(key))
    admin.patch(SERVICE, child_key(key), {"metadata": {"managedFields": [*live["metadata"]["managedFields"], entry]}})
    admin.wait_until(SERVICE, child_key(key), lambda live: not has_stale_managers(live))
    time.sleep(WAIT_S)

    assert content_of(admin.get(SERVICE, child_key(key))) == content_of(before.children[SERVICE])
    assert [each.code for each in writes_to_children(audit, key, mark)] == [200, 200]


def test_everything_broken_at_once_takes_one_write_for_each_child(admin: Kube, audit: AuditLog, key: Key) -> None:
    """Several changes of all children, by several writers, are repaired by three writes."""
    before = objects_of(admin, key)
    mark = audit.mark()
    child = child_key(key)

    admin.patch(CONFIG_MAP, child, {"data": {CLUSTERS_FILE: "broken"}}, field_manager="one")
    wait_until(lambda: not drift_of(admin, key), what="the repair of the ConfigMap")
    admin.patch(DEPLOYMENT, child, {"spec": {"replicas": 4, "minReadySeconds": 1}}, field_manager="two")
    wait_until(lambda: not drift_of(admin, key), what="the repair of the Deployment")
    admin.patch(SERVICE, child, {"spec": {"selector": {"a": "b"}, "type": "NodePort"}}, field_manager="three")
    wait_until(lambda: not drift_of(admin, key), what="the repair of the Service")
    time.sleep(WAIT_S)

    after = objects_of(admin, key)
    assert after.uids == before.uids
    assert after.children[DEPLOYMENT]["spec"].pop("minReadySeconds") == 1
    assert [content_of(each) for each in after.children.values()] == [
        content_of(each) for each in before.children.values()
    ]
    done = [each.resource for each in writes_to_children(audit, key, mark) if each.code != 409]
    assert done == [kind.plural for kind in CHILD_KINDS]


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
def test_a_deleted_child_is_created_again(admin: Kube, audit: AuditLog, key: Key, kind: Kind) -> None:
    """A deleted child is created again, as a new object; the others stay as they are."""
    before = objects_of(admin, key)
    mark = audit.mark()

    admin.delete(kind, child_key(key))
    admin.wait_until(kind, child_key(key), lambda live: live["metadata"]["uid"] != before.uids[kind.kind])
    wait_reconciled(admin, key)
    time.sleep(WAIT_S)

    after = assert_one_of_everything(admin, key)
    assert {name for name, uid in after.uids.items() if uid != before.uids[name]} == {kind.kind}
    assert not drift_of(admin, key)
    assert [(each.resource, each.code) for each in writes_to_children(audit, key, mark)] == [(kind.plural, 201)]


def test_a_broken_record_is_repaired(admin: Kube, key: Key) -> None:
    """The record outside the tenant's namespace is repaired like a child: after an edit, and after a deletion."""
    before = objects_of(admin, key)
    record = record_key(before.proxy)

    admin.patch(PROXY_REGISTRATION, record, {"spec": {"address": "elsewhere.example.com"}})
    admin.wait_until(PROXY_REGISTRATION, record, lambda live: live["spec"] == before.record["spec"])
    admin.delete(PROXY_REGISTRATION, record)
    found = admin.wait_until(
        PROXY_REGISTRATION, record, lambda live: live["metadata"]["uid"] != before.uids["ProxyRegistration"]
    )
    assert found["spec"] == before.record["spec"]
