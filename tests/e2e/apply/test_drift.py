"""Broken children are repaired in place, by one write each, around what is somebody else's."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import (
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
from operator_app.desired import ANNOTATION_CONFIG_HASH, child_key
from operator_app.envoy import bootstrap
from operator_app.ssa.unblock import has_stale_managers
from tests.e2e.controlplane import AuditLog
from tests.e2e.kube import Kube, PatchType, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import (
    a_proxy,
    assert_one_of_everything,
    drift_of,
    family,
    record_key,
    wait_reconciled,
    writes_to_children,
)

REST_S: Final = 0.5
"""Long enough for a second write to follow the first, if there were one."""

FOREIGN_LABEL: Final = "team"
FOREIGN_ANNOTATION: Final = "example.com/note"
FOREIGN_DATA: Final = "notes.txt"
CONTAINER: Final = "/spec/template/spec/containers/0"


@pytest.fixture(scope="module")
def one_operator(operator_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """One operator for all tests here, in which no round crashed and no write was avoidable."""
    process = OperatorProcess(operator_kubeconfig, tmp_path_factory.mktemp("drift") / "operator.log")
    process.start()
    yield process
    avoidable = process.metric("operator_app_writes_total", outcome="unchanged")
    process.stop()
    assert avoidable == 0, process.log_text()
    assert not any(line.get("event") in {"reconcile_crashed", "noncanonical"} for line in process.log())


@pytest.fixture
def key(admin: Kube, namespace: str, one_operator: OperatorProcess) -> Key:  # noqa: ARG001  # it works in the background
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


PAST_AN_OBSTACLE: Final = 3
"""The apply is refused; the obstacle is removed, the apply repeated, and the ownership left over is given up."""
PAST_A_SHADOW: Final = 2
"""The apply, after which the API server gives our fields a second owner, which is removed."""


@dataclass(frozen=True, slots=True)
class Drift:
    """What somebody does to a child, and how many writes it takes to repair it."""

    name: str
    kind: Kind
    patch: Object | Sequence[Object]
    writes: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def edited(admin: Kube, drift: Drift, child: Key) -> Object:
    """The child right after somebody's edit."""
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
    Drift("port", SERVICE, json_patch("replace", "/spec/ports/0/port", 81), PAST_AN_OBSTACLE),
    Drift("protocol", SERVICE, json_patch("replace", "/spec/ports/0/protocol", "UDP"), PAST_AN_OBSTACLE),
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
        PAST_AN_OBSTACLE,
    ),
    Drift(
        "probe replaced",
        DEPLOYMENT,
        json_patch("replace", f"{CONTAINER}/readinessProbe", {"exec": {"command": ["true"]}}),
        PAST_AN_OBSTACLE,
    ),
    Drift(
        "volume replaced",
        DEPLOYMENT,
        json_patch("replace", "/spec/template/spec/volumes/0", {"name": "config", "emptyDir": {}}),
        PAST_AN_OBSTACLE,
    ),
    Drift("volume", DEPLOYMENT, json_patch("replace", "/spec/template/spec/volumes/0/configMap/name", "other")),
    Drift(
        "readiness port",
        DEPLOYMENT,
        json_patch("replace", f"{CONTAINER}/ports/1/containerPort", 19002),
        PAST_AN_OBSTACLE,
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
        "configuration hash",
        DEPLOYMENT,
        {"spec": {"template": {"metadata": {"annotations": {ANNOTATION_CONFIG_HASH: "0" * 16}}}}},
    ),
    Drift("data", CONFIG_MAP, {"data": {bootstrap.CONFIG_FILE: "{}"}}),
    Drift("data key removed", CONFIG_MAP, {"data": {bootstrap.CONFIG_FILE: None}}),
    *(Drift("owner label", kind, {"metadata": {"labels": {LABEL_OWNER_UID: "nobody"}}}) for kind in CHILD_KINDS),
    *(Drift("managed-by removed", kind, {"metadata": {"labels": {LABEL_MANAGED_BY: None}}}) for kind in CHILD_KINDS),
    *(
        Drift("field ownership wiped", kind, {"metadata": {"managedFields": [{}]}}, PAST_A_SHADOW)
        for kind in CHILD_KINDS
    ),
)


def substance(child: Object) -> Object:
    """All of a child that writers put there: no status, no versions, and no bookkeeping of controllers."""
    metadata = child["metadata"]
    annotations = {
        name: value
        for name, value in metadata["annotations"].items()
        if not name.startswith("deployment.kubernetes.io")
    }
    kept = {name: metadata[name] for name in ("name", "uid", "labels", "ownerReferences")}
    return {name: child.get(name) for name in ("spec", "data")} | {"metadata": kept | {"annotations": annotations}}


@pytest.mark.parametrize("drift", DRIFTS, ids=str)
def test_drift_is_repaired_in_place_by_one_write(admin: Kube, audit: AuditLog, key: Key, drift: Drift) -> None:
    """Whatever somebody changes of what is ours comes back in one write; all the rest stays, and so do the UIDs.

    More than one write is needed only where the API server refuses what is declared beside what was put there, or where
    it gave our fields a second owner, because somebody wiped the list of owners.
    """
    before = family(admin, key)
    mark = audit.mark()

    broken = edited(admin, drift, child_key(key))
    wait_until(lambda: not drift_of(admin, key), what=f"the repair of {drift}")
    time.sleep(REST_S)

    after = family(admin, key)
    for kind, child in after.children.items():
        assert substance(child) == substance(before.children[kind])
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
    before = family(admin, key)
    mark = audit.mark()
    taken: dict[Kind, Object] = {
        CONFIG_MAP: {"data": {bootstrap.CONFIG_FILE: "{}"}},
        DEPLOYMENT: {"spec": {"replicas": 7}},
        SERVICE: {"spec": {"selector": {"app": "other"}}},
    }
    child = child_key(key)
    metadata = {"name": child.name, "namespace": child.namespace, "labels": {"applied-by": "rival"}}
    theirs = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata} | taken[kind]

    admin.apply(kind, theirs, field_manager="rival", force=True)
    wait_until(lambda: not drift_of(admin, key), what="the field to be ours again")
    time.sleep(REST_S)

    after = admin.get(kind, child)
    assert after["metadata"]["labels"].pop("applied-by") == "rival"
    assert substance(after) == substance(before.children[kind])
    done = [each for each in writes_to_children(audit, key, mark) if each.code != 409]
    assert [(each.resource, each.code) for each in done] == [(kind.plural, 200)]


def test_what_others_add_stays_without_a_write(admin: Kube, audit: AuditLog, key: Key) -> None:
    """A foreign port, sidecar, annotation of the Pod template and data key are none of our business."""
    mark = audit.mark()
    child = child_key(key)

    admin.patch(SERVICE, child, json_patch("add", "/spec/ports/-", {"name": "extra", "port": 9090}), patch_type="json")
    sidecar = {"name": "sidecar", "image": "example.com/sidecar:v1"}
    admin.patch(DEPLOYMENT, child, json_patch("add", "/spec/template/spec/containers/-", sidecar), patch_type="json")
    restarted = {"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}}}
    admin.patch(DEPLOYMENT, child, restarted)
    added = admin.patch(CONFIG_MAP, child, {"data": {"more.txt": "more"}})
    time.sleep(REST_S)

    assert writes_to_children(audit, key, mark) == []
    # A repair of the same objects leaves the additions alone, too.
    admin.patch(SERVICE, child, {"spec": {"selector": {"app": "other"}}})
    admin.patch(DEPLOYMENT, child, {"spec": {"replicas": 5}})
    admin.patch(CONFIG_MAP, child, {"data": {bootstrap.CONFIG_FILE: None}})
    wait_until(lambda: not drift_of(admin, key), what="the repair")
    after = family(admin, key).children
    assert [each["name"] for each in after[SERVICE]["spec"]["ports"]] == ["http", "extra"]
    template = after[DEPLOYMENT]["spec"]["template"]
    assert [each["name"] for each in template["spec"]["containers"]] == ["envoy", "sidecar"]
    assert template["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] == "now"
    assert after[CONFIG_MAP]["data"] == added["data"]


@pytest.mark.parametrize("trouble", ["ports moved", "field ownership wiped"])
def test_what_was_repaired_can_still_be_given_up(admin: Kube, key: Key, trouble: str) -> None:
    """After the awkward repairs our fields are ours alone: what the next edit declares no longer is gone."""
    listeners = [
        {"name": name, "port": port, "routes": [{"backend": "app"}]} for name, port in (("http", 80), ("more", 8080))
    ]
    spec = {"listeners": listeners, "service": {"annotations": {"example.com/ours": "yes"}}}
    admin.patch(ENVOY_PROXY, key, {"spec": spec | {"resources": {"requests": {"cpu": "1"}}}})
    wait_reconciled(admin, key)
    if trouble == "ports moved":
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
    after = family(admin, key).children
    assert [(each["name"], each["port"]) for each in after[SERVICE]["spec"]["ports"]] == [("http", 80)]
    assert set(after[SERVICE]["metadata"]["annotations"]) == {FOREIGN_ANNOTATION}
    container = after[DEPLOYMENT]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {}
    assert len(container["ports"]) == 2, "the listener's and the probe's"


def test_a_crash_between_the_writes_of_a_repair_is_made_good(admin: Kube, audit: AuditLog, key: Key) -> None:
    """What a repair that needs several writes leaves behind when it is cut is nothing that the next round can't see."""
    before = family(admin, key)
    mark = audit.mark()
    # As it stands when the operator dies before the last write: its fields have a second owner, and all of them hold.
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
    time.sleep(REST_S)

    assert substance(admin.get(SERVICE, child_key(key))) == substance(before.children[SERVICE])
    assert [each.code for each in writes_to_children(audit, key, mark)] == [200, 200]


def test_everything_broken_at_once_takes_one_write_for_each_child(admin: Kube, audit: AuditLog, key: Key) -> None:
    """Several changes of all children, by several people, are repaired by three writes."""
    before = family(admin, key)
    mark = audit.mark()
    child = child_key(key)

    admin.patch(CONFIG_MAP, child, {"data": {bootstrap.CONFIG_FILE: "broken"}}, field_manager="one")
    wait_until(lambda: not drift_of(admin, key), what="the repair of the ConfigMap")
    admin.patch(DEPLOYMENT, child, {"spec": {"replicas": 4, "minReadySeconds": 1}}, field_manager="two")
    wait_until(lambda: not drift_of(admin, key), what="the repair of the Deployment")
    admin.patch(SERVICE, child, {"spec": {"selector": {"a": "b"}, "type": "NodePort"}}, field_manager="three")
    wait_until(lambda: not drift_of(admin, key), what="the repair of the Service")
    time.sleep(REST_S)

    after = family(admin, key)
    assert after.uids == before.uids
    assert after.children[DEPLOYMENT]["spec"].pop("minReadySeconds") == 1
    assert [substance(each) for each in after.children.values()] == [
        substance(each) for each in before.children.values()
    ]
    done = [each.resource for each in writes_to_children(audit, key, mark) if each.code != 409]
    assert done == [kind.plural for kind in CHILD_KINDS]


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
def test_a_deleted_child_comes_back(admin: Kube, audit: AuditLog, key: Key, kind: Kind) -> None:
    """A child that somebody deletes is made anew, as a new object; the others are left as they are."""
    before = family(admin, key)
    mark = audit.mark()

    admin.delete(kind, child_key(key))
    admin.wait_until(kind, child_key(key), lambda live: live["metadata"]["uid"] != before.uids[kind.kind])
    wait_reconciled(admin, key)
    time.sleep(REST_S)

    after = assert_one_of_everything(admin, key)
    assert {name for name, uid in after.uids.items() if uid != before.uids[name]} == {kind.kind}
    assert not drift_of(admin, key)
    assert [(each.resource, each.code) for each in writes_to_children(audit, key, mark)] == [(kind.plural, 201)]


def test_a_broken_record_is_repaired(admin: Kube, key: Key) -> None:
    """The record outside the tenant's namespace heals like a child: an edit is undone, a deletion too."""
    before = family(admin, key)
    record = record_key(before.proxy)

    admin.patch(PROXY_REGISTRATION, record, {"spec": {"address": "elsewhere.example.com"}})
    admin.wait_until(PROXY_REGISTRATION, record, lambda live: live["spec"] == before.record["spec"])
    admin.delete(PROXY_REGISTRATION, record)
    found = admin.wait_until(
        PROXY_REGISTRATION, record, lambda live: live["metadata"]["uid"] != before.uids["ProxyRegistration"]
    )
    assert found["spec"] == before.record["spec"]
