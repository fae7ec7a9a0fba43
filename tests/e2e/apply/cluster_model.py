"""The model of the random histories: two proxies in a namespace, up to two operators, users and other writers.

``ClusterModel`` offers their actions, keeps the state that must follow from them, and compares the cluster with it in
``check_settled``. It uses no inner state of the operator. The order of the actions is up to the tests.
"""

import time
import uuid
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Final, Literal

from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    FIELD_MANAGER,
    LABEL_MANAGED_BY,
    NAMESPACE,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.desired import child_key
from operator_app.ssa.fields import fields_of
from tests.e2e.budget import avoidable
from tests.e2e.controlplane import AuditEntry, AuditLog
from tests.e2e.kube import Kube, KubeError, NotThere, PatchType
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.proxies import (
    CONTAINER,
    OPERATOR_USER,
    a_proxy,
    condition,
    content_of,
    declared_children,
    not_as_declared,
    record_key,
)

NAMES: Final = ("a", "b")
FOREIGN_NAME: Final = "example.com/mark"
"""The label and the annotation that another writer puts on objects."""

SETTLE_TIMEOUT_S: Final = 120.0
QUIET_S: Final = 2.0
"""Without any write for this long the state is final; counters in a status settle within 1 s."""

SHORT_CONTENTION: Final = (
    "--contention-window-s=1",
    "--contention-base-s=0.2",
    "--contention-cap-s=1",
)
"""Contention is forgotten within 2 s, so that settling does not take a minute."""

SPECS: Final[dict[str, Object]] = {
    "plain": {},
    "scaled": {"replicas": 2},
    "stopped": {"replicas": 0},
    "rerouted": {
        "listeners": [{"name": "http", "port": 80, "routes": [{"match": {"pathPrefix": "/x"}, "backend": "app"}]}]
    },
    "two ports": {
        "listeners": [
            {"name": "http", "port": 80, "routes": [{"backend": "app"}]},
            {"name": "tcp", "port": 5432, "protocol": "TCP", "routes": [{"backend": "app"}]},
        ]
    },
    "dressed": {
        "service": {"type": "NodePort", "annotations": {"example.com/a": "1"}},
        "resources": {"limits": {"cpu": "1", "memory": "256Mi"}},
        "registration": {"hostname": "example.com"},
    },
}
"""Specs by name, each of them complete with what ``a_proxy`` adds. No two proxies may have one hostname."""

EDITS: Final[dict[str, tuple[Kind, PatchType, Object | list[Object]]]] = {
    "selector": (SERVICE, "json", [{"op": "replace", "path": "/spec/selector", "value": {"app": "other"}}]),
    "port": (SERVICE, "json", [{"op": "replace", "path": "/spec/ports/0/targetPort", "value": 9999}]),
    "type": (SERVICE, "merge", {"spec": {"type": "NodePort"}}),
    "image": (DEPLOYMENT, "json", [{"op": "replace", "path": f"{CONTAINER}/image", "value": "example.com/x:v1"}]),
    "args": (DEPLOYMENT, "json", [{"op": "add", "path": f"{CONTAINER}/args/-", "value": "--log-level=trace"}]),
    "scale": (DEPLOYMENT, "merge", {"spec": {"replicas": 3}}),
    "data": (CONFIG_MAP, "merge", {"data": {"cds.json": "{}"}}),
    "data gone": (CONFIG_MAP, "merge", {"data": {"cds.json": None}}),
    "label": (SERVICE, "merge", {"metadata": {"labels": {LABEL_MANAGED_BY: "nobody"}}}),
    "label gone": (DEPLOYMENT, "merge", {"metadata": {"labels": {LABEL_MANAGED_BY: None}}}),
    "ownership wiped": (CONFIG_MAP, "merge", {"metadata": {"managedFields": [{}]}}),
}
"""What other writers do to children, by name."""

Propagation = Literal["Background", "Foreground", "Orphan"]


class ClusterModel:
    """The expected state of one namespace, and actions that change it. Not safe for threads; to be closed."""

    def __init__(self, admin: Kube, audit: AuditLog, kubeconfig: Path, directory: Path) -> None:
        self._admin = admin
        self._audit = audit
        tag = uuid.uuid4().hex[:8]
        self._operators = tuple(OperatorProcess(kubeconfig, directory / f"operator-{tag}-{n}.log") for n in (0, 1))
        self._since = audit.mark()
        self._had_one_operator = True
        self._declared: dict[str, Object] = {}
        self._foreign: dict[tuple[Kind, str], Object] = {}
        self._foreign_values: dict[tuple[Kind, str], tuple[str, str]] = {}
        self._last_value = 0
        self.history: list[str] = []
        self._namespace = ""
        self._create_namespace()

    # --- actions of users

    def declare(self, name: str, spec: str) -> None:
        """Create a proxy, or change its whole spec; one that is being deleted stays as it is."""
        self.history.append(f"declare({name!r}, {spec!r})")
        wanted = a_proxy(self._namespace, name, **deepcopy(SPECS[spec]))
        if "registration" in wanted["spec"]:
            wanted["spec"]["registration"]["hostname"] = f"{name}.{self._namespace}.example.com"
        live = self._admin.find(ENVOY_PROXY, key_of(wanted))
        if live is None:
            self._admin.create(ENVOY_PROXY, wanted)
        elif "deletionTimestamp" in live["metadata"]:
            return
        else:
            replaced = [{"op": "replace", "path": "/spec", "value": wanted["spec"]}]
            self._admin.patch(ENVOY_PROXY, key_of(wanted), replaced, patch_type="json", field_manager="user")
        self._declared[name] = wanted

    def delete(self, name: str, propagation: Propagation = "Background") -> None:
        """Delete a proxy."""
        self.history.append(f"delete({name!r}, {propagation!r})")
        self._delete(ENVOY_PROXY, Key(self._namespace, name), propagation)
        self._declared.pop(name, None)

    def replace_namespace(self) -> None:
        """Delete the namespace with everything in it, and go on in another one."""
        self.history.append("replace_namespace()")
        old = Key("", self._namespace)
        self._admin.delete(NAMESPACE, old)
        self._declared.clear()
        self._foreign.clear()
        self._foreign_values.clear()
        self._ensure_operator()
        self._admin.wait_gone(NAMESPACE, old, timeout_s=SETTLE_TIMEOUT_S)
        self._create_namespace()

    # --- actions of other writers

    def edit(self, name: str, what: str) -> None:
        """Change a field of a child that the operator owns; a foreign object under its name stays as it is."""
        self.history.append(f"edit({name!r}, {what!r})")
        kind, patch_type, patch = EDITS[what]
        if (kind, name) not in self._foreign:
            self._patch(kind, name, patch, patch_type)

    def annotate(self, name: str, kind: Kind) -> None:
        """Put a label and an annotation on a child, and a label on the proxy."""
        self.history.append(f"annotate({name!r}, {kind.plural})")
        self._last_value += 1
        value = str(self._last_value)
        patch = {"metadata": {"labels": {FOREIGN_NAME: value}, "annotations": {FOREIGN_NAME: value}}}
        self._patch_proxy(name, {"metadata": {"labels": {FOREIGN_NAME: value}}})
        if (kind, name) not in self._foreign:
            live = self._patch(kind, name, patch, "merge")
            if live is not None:
                self._foreign_values[kind, name] = live["metadata"]["uid"], value

    def delete_child(self, name: str, kind: Kind) -> None:
        """Delete a child."""
        self.history.append(f"delete_child({name!r}, {kind.plural})")
        if (kind, name) not in self._foreign:
            self._delete(kind, self._child(name), "Background")

    def create_foreign(self, name: str, kind: Kind, *, is_labelled: bool = False) -> None:
        """Create a foreign object under a child's name, if that is free; it may have the operator's label."""
        self.history.append(f"create_foreign({name!r}, {kind.plural}, is_labelled={is_labelled})")
        foreign = _foreign_object(kind, self._child(name), is_labelled=is_labelled)
        try:
            self._foreign[kind, name] = self._admin.create(kind, foreign)
        except KubeError as error:
            if error.reason != "AlreadyExists":
                raise

    def delete_foreign(self, name: str, kind: Kind) -> None:
        """Delete the foreign object, if there is one."""
        self.history.append(f"delete_foreign({name!r}, {kind.plural})")
        if self._foreign.pop((kind, name), None) is not None:
            self._delete(kind, self._child(name), "Background")

    # --- actions on operators

    def start(self, which: int) -> None:
        """Start an operator, if it does not run; the other one may run as well."""
        self.history.append(f"start({which})")
        if not self._operators[which].is_running:
            self._operators[which].start(*SHORT_CONTENTION)
            self._had_one_operator = self._had_one_operator and self._running == [self._operators[which]]

    def kill(self, which: int) -> None:
        """``kill -9``."""
        self.history.append(f"kill({which})")
        self._operators[which].kill()

    def stop(self, which: int) -> None:
        """SIGTERM."""
        self.history.append(f"stop({which})")
        self._operators[which].stop()

    # --- checks

    def check_settled(self) -> None:
        """Wait, with an operator running, until all is as expected and stays so for a time without any write."""
        self.history.append("check_settled()")
        self._ensure_operator()
        deadline_mono = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            quiet = self._audit.mark()
            problems = list(self._problems())
            time.sleep(0.1 if problems else QUIET_S)
            writes = [each for each in self._audit.writes(OPERATOR_USER, quiet) if self._is_here(each)]
            if not problems and not writes:
                break
            complaints = [*problems, *(f"written although settled: {each}" for each in writes)]
            assert time.monotonic() < deadline_mono, self._complaint(complaints)
        if self._had_one_operator:
            wasted = avoidable(self._audit.writes(OPERATOR_USER, self._since))
            assert wasted == [], self._complaint([f"avoidable: {each}" for each in wasted])
        for each in self._running:
            assert each.metric("operator_app_writes_total", outcome="unchanged") == 0, self._complaint([])
        self._since = quiet
        self._had_one_operator = len(self._running) == 1

    def close(self) -> None:
        """Stop all operators and delete the namespace, without waiting for it."""
        for each in self._operators:
            if each.is_running:
                each.stop()
        for key in (Key(self._namespace, name) for name in NAMES):
            self._delete(ENVOY_PROXY, key, "Background")
            self._patch_proxy(key.name, {"metadata": {"finalizers": None}})
        self._admin.delete(NAMESPACE, Key("", self._namespace))

    def _problems(self) -> Iterator[str]:
        """Every difference from the expected state, as sentences."""
        records = [
            each
            for each in self._admin.list(PROXY_REGISTRATION, OPERATOR_NAMESPACE)
            if each["spec"]["proxy"]["namespace"] == self._namespace
        ]
        expected_records = set()
        for name in NAMES:
            proxy = self._admin.find(ENVOY_PROXY, Key(self._namespace, name))
            if name not in self._declared:
                if proxy is not None:
                    yield f"{name} is not gone"
                yield from self._problems_of_absence(name)
            elif proxy is None:
                yield f"{name} is not there"
            else:
                expected_records.add(record_key(proxy).name)
                yield from self._problems_of(name, proxy, records)
        yield from (
            f"a record of no proxy: {key_of(each)}" for each in records if key_of(each).name not in expected_records
        )
        yield from self._problems_of_foreign()
        yield from self._problems_of_foreign_values()

    def _problems_of_absence(self, name: str) -> Iterator[str]:
        for kind in CHILD_KINDS:
            if (kind, name) not in self._foreign and self._admin.find(kind, self._child(name)) is not None:
                yield f"{kind} of {name} is an orphan"

    def _problems_of(self, name: str, proxy: Object, records: list[Object]) -> Iterator[str]:
        if proxy["spec"]["listeners"][0]["routes"] != self._declared[name]["spec"]["listeners"][0]["routes"]:
            yield f"{name} has another spec than was declared"
        foreign_kinds = [kind for kind in CHILD_KINDS if (kind, name) in self._foreign]
        uid = proxy["metadata"]["uid"]
        known = {kind: self._admin.find(kind, self._child(name)) for kind in CHILD_KINDS}
        for kind, declared in declared_children(proxy, known).items():
            if kind in foreign_kinds or (kind == DEPLOYMENT and CONFIG_MAP in foreign_kinds):
                continue
            live = known[kind]
            if live is None:
                yield f"{kind} of {name} is missing"
                continue
            if [each["uid"] for each in live["metadata"].get("ownerReferences", ())] != [uid]:
                yield f"{kind} of {name} is not owned by it"
            yield from (f"{kind} of {name}: {each}" for each in self._not_as_declared(kind, declared))
        yield from self._problems_of_status(name, proxy, has_foreign=bool(foreign_kinds))
        if not foreign_kinds:
            mine = [each for each in records if each["metadata"]["name"] == record_key(proxy).name]
            if [each["spec"]["generation"] for each in mine] != [proxy["metadata"]["generation"]]:
                yield f"the record of {name} is not of its generation"

    def _not_as_declared(self, kind: Kind, declared: Object) -> tuple[str, ...]:
        try:
            return not_as_declared(self._admin, kind, declared)
        except NotThere:
            return ("it is gone",)

    def _problems_of_status(self, name: str, proxy: Object, *, has_foreign: bool) -> Iterator[str]:
        status = proxy.get("status") or {}
        generation = proxy["metadata"]["generation"]
        conditions = {each["type"]: each["status"] == "True" for each in status.get("conditions", ())}
        if status.get("observedGeneration") != generation or any(
            each["observedGeneration"] != generation for each in status.get("conditions", ())
        ):
            yield f"the status of {name} is not of generation {generation}"
        if conditions.get("Reconciled") is has_foreign:
            yield f"{name} has Reconciled={conditions.get('Reconciled')}"
        if has_foreign and condition(proxy, "Reconciled").get("reason") != "NameConflict":
            yield f"{name} does not name the foreign object: {condition(proxy, 'Reconciled')}"
        if conditions.get("Stalled", False) is not has_foreign:
            yield f"{name} has Stalled={conditions.get('Stalled')}"
        if not has_foreign and conditions.get("Registered") is not True:
            yield f"{name} is not registered"
        if "Contended" in conditions:
            yield f"{name} is contended"
        deployment = self._admin.find(DEPLOYMENT, self._child(name))
        if deployment is not None and (DEPLOYMENT, name) not in self._foreign:
            total = deployment.get("status", {}).get("replicas", 0)
            if status.get("replicas") != total:
                yield f"{name} has replicas={status.get('replicas')}, the Deployment {total}"

    def _problems_of_foreign(self) -> Iterator[str]:
        for (kind, name), before in self._foreign.items():
            live = self._admin.find(kind, self._child(name))
            if live is None:
                yield f"the foreign {kind} {name} is gone"
            elif content_of(live) != content_of(before) or fields_of(live):
                yield f"the foreign {kind} {name} was changed"

    def _problems_of_foreign_values(self) -> Iterator[str]:
        for (kind, name), (uid, value) in self._foreign_values.items():
            live = self._admin.find(kind, self._child(name))
            if live is None or live["metadata"]["uid"] != uid:
                continue
            metadata = live["metadata"]
            if (metadata["labels"].get(FOREIGN_NAME), metadata.get("annotations", {}).get(FOREIGN_NAME)) != (
                value,
                value,
            ):
                yield f"another writer's label or annotation of {kind} of {name} is lost"

    def _complaint(self, problems: list[str]) -> str:
        logs = "\n".join(each.log_text()[-6000:] for each in self._running)
        steps = "\n".join(f"    model.{step}" for step in self.history)
        return "\n".join(["wrong after settling:", *problems, "after", steps, logs])

    # --- internals

    @property
    def _running(self) -> list[OperatorProcess]:
        return [each for each in self._operators if each.is_running]

    def _ensure_operator(self) -> None:
        if not self._running:
            self._operators[0].start(*SHORT_CONTENTION)

    def _create_namespace(self) -> None:
        self._namespace = f"model-{uuid.uuid4().hex[:8]}"
        self._admin.create_namespace(self._namespace)

    def _child(self, name: str) -> Key:
        return child_key(Key(self._namespace, name))

    def _is_here(self, entry: AuditEntry) -> bool:
        """Whether a request is about this namespace; those about the operator's Leases are not."""
        if entry.resource != PROXY_REGISTRATION.plural:
            return entry.namespace == self._namespace
        live = self._admin.find(PROXY_REGISTRATION, Key(entry.namespace, entry.name))
        return live is None or live["spec"]["proxy"]["namespace"] == self._namespace

    def _delete(self, kind: Kind, key: Key, propagation: Propagation) -> None:
        try:
            self._admin.delete(kind, key, propagation=propagation)
        except KubeError as error:
            if error.reason != "NotFound":
                raise

    def _patch(self, kind: Kind, name: str, patch: Object | list[Object], patch_type: PatchType) -> Object | None:
        """Patch a child; returns ``None`` when there is none, or nothing to patch in it."""
        live = self._admin.find(kind, self._child(name))
        if live is None:
            return None
        try:
            return self._admin.patch(kind, self._child(name), patch, patch_type=patch_type, field_manager="editor")
        except KubeError as error:
            if error.code not in {404, 409, 422}:
                raise
            return None

    def _patch_proxy(self, name: str, patch: Object) -> None:
        try:
            self._admin.patch(ENVOY_PROXY, Key(self._namespace, name), patch, field_manager="editor")
        except KubeError as error:
            if error.code != 404:
                raise


def _foreign_object(kind: Kind, key: Key, *, is_labelled: bool) -> Object:
    labels = {"app": "foreign"} | ({LABEL_MANAGED_BY: FIELD_MANAGER} if is_labelled else {})
    pod: Object = {
        "metadata": {"labels": {"app": "foreign"}},
        "spec": {"containers": [{"name": "c", "image": "example.com/foreign:v1"}]},
    }
    bodies: dict[Kind, Object] = {
        CONFIG_MAP: {"data": {"theirs": "yes"}},
        SERVICE: {"spec": {"selector": {"app": "foreign"}, "ports": [{"port": 1}]}},
        DEPLOYMENT: {"spec": {"replicas": 0, "selector": {"matchLabels": {"app": "foreign"}}, "template": pod}},
    }
    metadata = {"namespace": key.namespace, "name": key.name, "labels": labels}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata} | bodies[kind]
