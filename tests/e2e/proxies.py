"""EnvoyProxies for tests: creating them, waiting for them, and reading everything that belongs to one."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from operator_app.api.kinds import (
    ALL_CHILD_KINDS,
    CHILD_KINDS,
    ENVOY_PROXY,
    FIELD_MANAGER,
    HOSTNAME_CLAIM,
    NAMESPACE,
    OPTIONAL_CHILD_KINDS,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
    Value,
    key_of,
)
from operator_app.api.models import parse_spec
from operator_app.desired import child_key, children
from operator_app.settings import Settings
from tests.e2e.controlplane import AuditEntry, AuditLog
from tests.e2e.controlplane.audit import Mark, service_account_user
from tests.e2e.kube import POD, Kube, KubeError, NotThere, path_of, wait_until
from tests.e2e.operator_process import OPERATOR_NAMESPACE, SERVICE_ACCOUNT

OPERATOR_USER = service_account_user(OPERATOR_NAMESPACE, SERVICE_ACCOUNT)
CONVERGE_TIMEOUT_S = 90.0
SETTLED_S = 2.0
"""Longer than it takes counters to settle (1 s in tests)."""

CONTAINER = "/spec/template/spec/containers/0"
"""The JSON pointer of Envoy's container in a Deployment."""


def a_proxy(namespace: str, name: str = "web", **spec: Any) -> Object:
    """The smallest useful EnvoyProxy; keywords replace fields of its spec."""
    return {
        "apiVersion": ENVOY_PROXY.api_version,
        "kind": ENVOY_PROXY.kind,
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "listeners": [{"name": "http", "port": 80, "routes": [{"backend": "app"}]}],
            "backends": [{"name": "app", "endpoints": [{"host": "app.example.com", "port": 8080}]}],
        }
        | spec,
    }


def condition(proxy: Object, kind: str) -> Object:
    """One condition of a proxy's status; an empty object where there is none."""
    conditions = (proxy.get("status") or {}).get("conditions") or ()
    found: Object = next((each for each in conditions if each["type"] == kind), {})
    return found


def holds(kind: str, *, generation: int | None = None) -> Callable[[Object], bool]:
    """A predicate: the condition is True, and for that generation (by default for the object's own)."""

    def predicate(proxy: Object) -> bool:
        wanted = proxy["metadata"]["generation"] if generation is None else generation
        found = condition(proxy, kind)
        return found.get("status") == "True" and found["observedGeneration"] >= wanted

    return predicate


def is_refused(kind: str, reason: str) -> Callable[[Object], bool]:
    """A predicate: the condition is False for that reason."""
    return lambda proxy: (
        (condition(proxy, kind).get("status"), condition(proxy, kind).get("reason"))
        == (
            "False",
            reason,
        )
    )


def wait_reconciled(admin: Kube, key: Key, timeout_s: float = CONVERGE_TIMEOUT_S) -> Object:
    """The proxy once every declared field of every child was verified for its generation."""
    return admin.wait_until(ENVOY_PROXY, key, holds("Reconciled"), timeout_s)


def wait_ready(admin: Kube, key: Key, timeout_s: float = CONVERGE_TIMEOUT_S) -> Object:
    """The proxy once it is ready for its generation, which takes a node."""
    return admin.wait_until(ENVOY_PROXY, key, holds("Ready"), timeout_s)


def give_addresses(admin: Kube, key: Key, *addresses: str) -> None:
    """Give the proxy's Service these addresses, as a cluster's load balancers do; none takes them away."""
    admin.wait_until(SERVICE, child_key(key), lambda each: each["spec"]["type"] == "LoadBalancer", CONVERGE_TIMEOUT_S)
    ingress = [{"ip": each} for each in addresses]
    admin.patch(SERVICE, child_key(key), {"status": {"loadBalancer": {"ingress": ingress}}}, subresource="status")


@dataclass(frozen=True, slots=True)
class ProxyObjects:
    """A proxy with everything that belongs to it, as stored at one moment."""

    proxy: Object
    children: dict[Kind, Object]
    record: Object
    optional: dict[Kind, Object] = field(default_factory=dict)
    """The children that not every proxy has."""

    @property
    def uids(self) -> dict[str, str]:
        """UID of the proxy, of each child and of the record, by kind."""
        everything = [self.proxy, *self.children.values(), self.record]
        return {each["kind"]: each["metadata"]["uid"] for each in everything}

    @property
    def versions(self) -> dict[str, str]:
        """ResourceVersion by kind."""
        everything = [self.proxy, *self.children.values(), self.record]
        return {each["kind"]: each["metadata"]["resourceVersion"] for each in everything}


def record_key(proxy: Object) -> Key:
    """The address of a proxy's record in the in-cluster registry."""
    return Key(OPERATOR_NAMESPACE, f"proxy-{proxy['metadata']['uid']}")


def objects_of(admin: Kube, key: Key) -> ProxyObjects:
    """Everything that belongs to a proxy. Raises ``KubeError`` where a part is missing."""
    proxy = admin.get(ENVOY_PROXY, key)
    children = {kind: admin.get(kind, child_key(key)) for kind in CHILD_KINDS}
    found = ((kind, admin.find(kind, child_key(key))) for kind in OPTIONAL_CHILD_KINDS)
    optional = {kind: child for kind, child in found if child is not None}
    return ProxyObjects(proxy, children, admin.get(PROXY_REGISTRATION, record_key(proxy)), optional)


def settled_objects_of(admin: Kube, key: Key) -> ProxyObjects:
    """Everything that belongs to a proxy, once nothing of it has changed for ``SETTLED_S``, whoever wrote."""
    deadline_mono = time.monotonic() + CONVERGE_TIMEOUT_S
    seen = objects_of(admin, key)
    while time.monotonic() < deadline_mono:
        time.sleep(SETTLED_S)
        before, seen = seen, objects_of(admin, key)
        if seen.versions == before.versions:
            return seen
    raise TimeoutError(f"{key} did not settle within {CONVERGE_TIMEOUT_S} s: {seen.versions}")


def declared_children(proxy: Object, live: Mapping[Kind, Object | None] | None = None) -> dict[Kind, Object]:
    """What a stored proxy declares, as the operator computes it where these children are there."""
    return children(proxy, parse_spec(proxy), default_image=Settings().image, live=live or {})


def not_as_declared(admin: Kube, kind: Kind, declared: Object, live: Object | None = None) -> tuple[str, ...]:
    """What an apply of ``declared`` by the operator's manager would change now, by the API server's own judgement.

    The apply is a dry run, so neither a difference nor a field that should have been released is repaired by looking at
    it, and the operator's own comparison takes no part. An apply that is refused is told as one path. ``live`` is the
    object where it was read just now; another version is read where somebody has written meanwhile.
    """
    live = live or admin.get(kind, key_of(declared))
    pinned = declared | {"metadata": declared["metadata"] | {"uid": live["metadata"]["uid"]}}
    try:
        applied = admin.apply(kind, pinned, field_manager=FIELD_MANAGER, force=True, dry_run=True)
    except KubeError as error:
        return (f"refused: {error}",)
    if applied["metadata"]["resourceVersion"] != live["metadata"]["resourceVersion"]:
        return not_as_declared(admin, kind, declared)
    found = [*_changed_paths("", content_of(live), content_of(applied))]
    found += [f"ownership{path}" for path in _changed_paths("", _applied_fields(live), _applied_fields(applied))]
    return tuple(found)


class DeclaredCheck:
    """Compares children with their declarations as :func:`not_as_declared` does.

    A version of a child that is as declared is asked for once: the answer follows from both.
    """

    def __init__(self, admin: Kube) -> None:
        self._admin = admin
        self._equal: dict[Kind, tuple[str, Object]] = {}

    def differences(self, kind: Kind, declared: Object, live: Object) -> tuple[str, ...]:
        """What an apply of ``declared`` would change of ``live``, which was read just now."""
        known = live["metadata"]["uid"] + live["metadata"]["resourceVersion"], declared
        if self._equal.get(kind) == known:
            return ()
        found = not_as_declared(self._admin, kind, declared, live)
        if not found:
            self._equal[kind] = known
        return found


def _applied_fields(obj: Object) -> Object:
    """What the operator's manager owns by its apply, in the spelling of ``fieldsV1``."""
    for entry in obj["metadata"].get("managedFields", ()):
        if (entry["manager"], entry["operation"], entry.get("subresource", "")) == (FIELD_MANAGER, "Apply", ""):
            fields: Object = entry["fieldsV1"]
            return fields
    return {}


def _changed_paths(path: str, before: Value, after: Value) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from _changed_paths(f"{path}.{name}", before.get(name), after.get(name))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _changed_paths(f"{path}[{index}]", one, other)
    elif before != after:
        yield path


def drift_of(admin: Kube, key: Key) -> dict[Kind, tuple[str, ...]]:
    """What is not as the proxy declares, by child; empty when all is. Raises ``NotThere`` for a missing child."""
    live = {kind: admin.get(kind, child_key(key)) for kind in CHILD_KINDS}
    declared = declared_children(admin.get(ENVOY_PROXY, key), live)
    found = {kind: not_as_declared(admin, kind, child) for kind, child in declared.items()}
    return {kind: left for kind, left in found.items() if left}


def writes_to_children(audit: AuditLog, key: Key, since: Mark) -> list[AuditEntry]:
    """The operator's writes to the children of one proxy, in their order, the refused ones included."""
    plurals = {kind.plural for kind in ALL_CHILD_KINDS}
    return [
        each
        for each in audit.writes(OPERATOR_USER, since)
        if each.resource in plurals and (each.namespace, each.name) == child_key(key)
    ]


def history(admin: Kube, key: Key, since: Object) -> list[Object]:
    """Every version of a proxy that was stored after ``since`` (an older version of it), oldest first."""
    params = {
        "watch": "true",
        "resourceVersion": since["metadata"]["resourceVersion"],
        "fieldSelector": f"metadata.name={key.name}",
        "timeoutSeconds": "1",
    }
    lines = admin.request("GET", path_of(ENVOY_PROXY, Key(key.namespace, "")), params=params).text.splitlines()
    return [json.loads(line)["object"] for line in lines]


def content_of(obj: Object) -> Object:
    """What writers have put into an object: all but its status, its versions and field owners.

    The annotations that the Deployment controller writes are left out as well, so that two readings of an object that
    nobody wrote to are equal. The UID stays: an object that was deleted and created again has another content.
    """
    content = {name: value for name, value in obj.items() if name != "status"}
    volatile = ("resourceVersion", "managedFields", "generation", "annotations")
    annotations = {
        name: value
        for name, value in obj["metadata"].get("annotations", {}).items()
        if not name.startswith("deployment.kubernetes.io/")
    }
    kept = {name: value for name, value in obj["metadata"].items() if name not in volatile}
    return deepcopy(content | {"metadata": kept | {"annotations": annotations}})


def kstatus(obj: Object) -> str:
    """What tools that follow kstatus (sigs.k8s.io/cli-utils, ``pkg/kstatus/status``) make of an object of any kind."""
    if "deletionTimestamp" in obj["metadata"]:
        return "Terminating"
    if obj.get("status", {}).get("observedGeneration") != obj["metadata"]["generation"]:
        return "InProgress"
    if condition(obj, "Reconciling").get("status") == "True":
        return "InProgress"
    if condition(obj, "Stalled").get("status") == "True":
        return "Failed"
    return "Current" if condition(obj, "Ready").get("status") == "True" else "InProgress"


def version(obj: Object) -> int:
    """The resourceVersion, which orders all writes to a cluster's objects."""
    return int(obj["metadata"]["resourceVersion"])


def assert_one_of_everything(admin: Kube, key: Key) -> ProxyObjects:
    """The proxy's objects, after checking that none exists twice or is left from a previous incarnation."""
    found = objects_of(admin, key)
    uid = found.proxy["metadata"]["uid"]
    for kind, child in found.children.items():
        owners = [each["uid"] for each in child["metadata"]["ownerReferences"]]
        assert owners == [uid], f"{kind} is owned by {owners}, the proxy is {uid}"
        labelled = admin.list(kind, key.namespace, label_selector="app.kubernetes.io/managed-by=operator-app")
        mine = [each["metadata"]["name"] for each in labelled if instance(each) == key.name]
        assert mine == [child_key(key).name], f"{kind}: {mine}"
    records = [
        each
        for each in admin.list(PROXY_REGISTRATION, OPERATOR_NAMESPACE)
        if (each["spec"]["proxy"]["namespace"], each["spec"]["proxy"]["name"]) == key
    ]
    assert [each["spec"]["proxy"]["uid"] for each in records] == [uid]
    return found


def instance(child: Object) -> str | None:
    """Which proxy a child says it belongs to."""
    name: str | None = child["metadata"].get("labels", {}).get("app.kubernetes.io/instance")
    return name


def wait_all_gone(admin: Kube, proxy: Object, timeout_s: float = CONVERGE_TIMEOUT_S) -> None:
    """Wait until the proxy, its children and its record are gone."""
    key = Key(proxy["metadata"]["namespace"], proxy["metadata"]["name"])
    uid = proxy["metadata"]["uid"]
    admin.wait_gone(ENVOY_PROXY, key, uid=uid, timeout_s=timeout_s)
    wait_until(lambda: admin.find(PROXY_REGISTRATION, record_key(proxy)) is None, timeout_s, "the record to be gone")


def serve(admin: Kube, pod: Key, ip: str) -> None:
    """Say of a Pod without a node what a kubelet says once it serves at this address."""
    conditions = [{"type": name, "status": "True"} for name in ("ContainersReady", "Ready")]
    status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions}
    admin.patch(POD, pod, {"status": status}, subresource="status")


def leave_nothing(admin: Kube, namespace: str) -> None:
    """Delete a namespace, and remove what would delay its end.

    A proxy keeps its finalizer until an operator removes its record. The operator of the next test may have another
    registry or other rights, and every namespace that can't end slows down the namespace controller for all tests.
    """
    with contextlib.suppress(NotThere):
        admin.delete(NAMESPACE, Key("", namespace))
    for proxy in admin.list(ENVOY_PROXY, namespace):
        with contextlib.suppress(NotThere):
            admin.delete(ENVOY_PROXY, key_of(proxy))
            admin.patch(ENVOY_PROXY, key_of(proxy), {"metadata": {"finalizers": None}})
    for kind in (PROXY_REGISTRATION, HOSTNAME_CLAIM):
        for record in admin.list(kind, OPERATOR_NAMESPACE):
            if record["spec"]["proxy"]["namespace"] == namespace:
                with contextlib.suppress(NotThere):
                    admin.delete(kind, key_of(record))
