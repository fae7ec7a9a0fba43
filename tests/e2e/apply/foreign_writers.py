"""One proxy in a crowd: what other writers may do to its children, and what must hold after each of their steps.

A step is a value whose ``repr`` reads as a sentence, so that a failing history is its own example. The expectation is
taken from the API server's answers to the other writers and never from the operator: what was in a child beside our
declaration right after their write is there for ever, until they remove it themselves.
"""

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, Literal

from operator_app.api.kinds import CHILD_KINDS, CONFIG_MAP, DEPLOYMENT, ENVOY_PROXY, SERVICE, Key, Kind, Object, Value
from operator_app.desired import child_key
from tests.e2e.apply.admission import ANNOTATION
from tests.e2e.apply.foreign_bytes import Bytes, declared_leaves, declared_parts, foreign_bytes, pointer, value_at
from tests.e2e.kube import Kube, KubeError, NotThere, PatchType
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import (
    DeclaredCheck,
    a_proxy,
    condition,
    content_of,
    declared_children,
    holds,
    wait_reconciled,
)

SETTLE_TIMEOUT_S: Final = 60.0
REFUSED_TIMEOUT_S: Final = 20.0
BYSTANDER: Final = "bystander"
POLL_S: Final = 0.1
MAX_RENDERINGS: Final = 20
FLAGS: Final = ("--contention-window-s=1", "--contention-base-s=0.2", "--contention-cap-s=1")
"""Contention is forgotten within 2 s, so that settling does not take minutes."""

_ABSENT: Final = object()

How = Literal["apply", "strategic-merge"]
MANAGERS: Final = ("platform", "helm", "kubectl-client-side-apply", "before-first-apply", "operator-app", "")
"""Names of other writers, ours among them. An apply needs a name, and one by ours would be ours."""

_POD: Final = ("spec", "template", "spec")


def _within(*path: str, value: Value) -> Object:
    *around, last = path
    found: Object = {last: value}
    for name in reversed(around):
        found = {name: found}
    return found


def _of_envoy(**fields: Any) -> Object:
    return _within(*_POD, "containers", value=[{"name": "envoy"} | fields])


def _label(number: int) -> str:
    return f"v{number}"


Maker = Callable[[int, str], Object]
"""Makes what is declared, from a number and a text that tell one declaration from another."""

FIELDS: Final[dict[Kind, dict[str, Maker]]] = {
    CONFIG_MAP: {
        "data": lambda n, text: _within("data", f"k{n}.txt", value=text),
        "binary data": lambda n, _: _within("binaryData", f"b{n}", value="AAEC"),
    },
    SERVICE: {
        "source ranges": lambda n, _: _within("spec", "loadBalancerSourceRanges", value=[f"192.0.{n}.0/24"]),
        "affinity": lambda n, _: {
            "spec": {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 100 + n}}}
        },
        "traffic policy": lambda n, _: _within("spec", "externalTrafficPolicy", value=("Local", "Cluster")[n % 2]),
        "unready addresses": lambda n, _: _within("spec", "publishNotReadyAddresses", value=n % 2 == 0),
        "another port": lambda n, _: _within(
            "spec", "ports", value=[{"name": f"x{n}", "port": 9000 + n, "protocol": "TCP", "targetPort": 7000 + n}]
        ),
        "our port's protocol": lambda n, _: _within(
            "spec", "ports", value=[{"port": 80, "protocol": "TCP", "appProtocol": f"example.com/p{n}"}]
        ),
    },
    DEPLOYMENT: {
        "min ready": lambda n, _: _within("spec", "minReadySeconds", value=n + 1),
        "template annotation": lambda n, text: _within(
            "spec", "template", "metadata", "annotations", f"example.com/t{n}", value=text
        ),
        "template label": lambda n, _: _within(
            "spec", "template", "metadata", "labels", f"example.com/t{n}", value=_label(n)
        ),
        "host alias": lambda n, _: _within(
            *_POD, "hostAliases", value=[{"ip": f"192.0.2.{n + 1}", "hostnames": [f"h{n}.example.com"]}]
        ),
        "toleration": lambda n, _: _within(*_POD, "tolerations", value=[{"key": f"k{n}", "operator": "Exists"}]),
        "node selector": lambda n, _: _within(*_POD, "nodeSelector", f"example.com/n{n}", value=_label(n)),
        "environment": lambda n, text: _of_envoy(env=[{"name": f"E{n}", "value": text}]),
        "volume and mount": lambda n, _: _within(
            *_POD,
            value={
                "containers": [{"name": "envoy", "volumeMounts": [{"name": f"v{n}", "mountPath": f"/v{n}"}]}],
                "volumes": [{"name": f"v{n}", "emptyDir": {}}],
            },
        ),
        "sidecar": lambda n, text: _within(
            *_POD,
            "containers",
            value=[{"name": f"s{n}", "image": f"example.com/s:{n}", "env": [{"name": "TEXT", "value": text}]}],
        ),
        "init container": lambda n, _: _within(
            *_POD, "initContainers", value=[{"name": f"i{n}", "image": f"example.com/i:{n}"}]
        ),
        "memory": lambda n, _: _of_envoy(resources={"limits": {"memory": f"{n + 1}Gi"}}),
        "probe delay": lambda n, _: _of_envoy(readinessProbe={"initialDelaySeconds": n + 1}),
        "liveness": lambda n, _: _of_envoy(livenessProbe={"tcpSocket": {"port": 7000 + n}}),
        "hook": lambda _, text: _of_envoy(lifecycle={"postStart": {"exec": {"command": ["echo", text]}}}),
        "group of files": lambda n, _: _within(*_POD, "securityContext", "fsGroup", value=1000 + n),
    },
}
"""What others may declare on a child of each kind, beside the metadata that all kinds share."""

METADATA: Final[dict[str, Maker]] = {
    "annotation": lambda n, text: _within("metadata", "annotations", f"example.com/a{n}", value=text),
    "label": lambda n, _: _within("metadata", "labels", f"example.com/l{n}", value=_label(n)),
    "finalizer": lambda n, _: _within("metadata", "finalizers", value=[f"example.com/f{n}"]),
}


@dataclass(frozen=True)
class Member:
    """An edit of one member of a map in a child; ``op`` is that of a JSON patch, ``place`` the path of the map."""

    op: Literal["add", "remove", "replace"]
    place: str
    name: str
    value: Value = None

    def patch(self, live: Object) -> Object | None:
        """The JSON patch's operation; ``None`` where the map is not there."""
        found = pointer(live, self.place)
        if found is None:
            return None
        return {"op": self.op, "path": f"{found}/{self.name}"} | ({} if self.op == "remove" else {"value": self.value})


_ENVOY: Final = ".spec.template.spec.containers[envoy]"


def _swapped(place: str, ours: str, theirs: str, value: Value) -> tuple[Member, ...]:
    """The edit that puts another member of a union in the place of ours, and leaves everything beside it."""
    return (Member("remove", place, ours), Member("add", place, theirs, value))


REPLACED: Final[Mapping[Kind, Mapping[str, tuple[Member, ...]]]] = {
    SERVICE: {
        "port renumbered": (Member("replace", ".spec.ports[80,TCP]", "port", 81),),
        "port by UDP": (Member("replace", ".spec.ports[80,TCP]", "protocol", "UDP"),),
    },
    DEPLOYMENT: {
        "env by value": _swapped(f"{_ENVOY}.env[POD_NAME]", "valueFrom", "value", "me"),
        "probe by command": _swapped(f"{_ENVOY}.readinessProbe", "httpGet", "exec", {"command": ["true"]}),
        "hook by sleep": _swapped(f"{_ENVOY}.lifecycle.preStop", "exec", "sleep", {"seconds": 1}),
        "volume by another": _swapped(".spec.template.spec.volumes[config]", "configMap", "emptyDir", {}),
        "port renumbered": (Member("replace", f"{_ENVOY}.ports[10080,TCP]", "containerPort", 10081),),
    },
    CONFIG_MAP: {"all data": (Member("replace", "", "data", {"theirs.json": "{}"}),)},
}
"""Edits that put something foreign where it excludes a declared field, so that the API server refuses our apply."""


@dataclass(frozen=True)
class Declare:
    """Another writer puts fields of its own on a child."""

    kind: Kind
    what: str
    number: int
    text: str
    manager: str
    how: How


@dataclass(frozen=True)
class Withdraw:
    """Another writer gives up everything that it has applied to a child."""

    kind: Kind
    manager: str


@dataclass(frozen=True)
class Change:
    """Another writer changes or removes a field of ours; ``drop`` removes it."""

    kind: Kind
    path: str
    drop: bool
    manager: str


@dataclass(frozen=True)
class Replace:
    """Another writer puts something in the place of a field of ours that excludes it.

    The same edit removes the field of ours at ``beside``, if that names one: what a repair restores there is no reason
    to remove what others have around it.
    """

    kind: Kind
    what: str
    manager: str
    beside: str = ""


@dataclass(frozen=True)
class WipeOwnership:
    """Another writer removes all managedFields of a child."""

    kind: Kind


@dataclass(frozen=True)
class Delete:
    """Another writer deletes a child."""

    kind: Kind
    propagation: str


@dataclass(frozen=True)
class Refuse:
    """From now on the operator's writes of a child are refused in this way."""

    kind: Kind
    how: str


@dataclass(frozen=True)
class Allow:
    """They are not refused any more."""

    kind: Kind


@dataclass(frozen=True)
class Edit:
    """The proxy's author changes its spec."""

    what: str


@dataclass(frozen=True)
class Restart:
    """The operator is killed and started again."""


Step = Declare | Withdraw | Change | Replace | WipeOwnership | Delete | Refuse | Allow | Edit | Restart

SPECS: Final[Mapping[str, Object]] = {
    "plain": {},
    "three": {"replicas": 3},
    "routed": {
        "listeners": [{"name": "http", "port": 80, "routes": [{"match": {"pathPrefix": "/x"}, "backend": "app"}]}]
    },
    "second port": {
        "listeners": [
            {"name": "http", "port": 80, "routes": [{"backend": "app"}]},
            {"name": "tcp", "port": 5432, "protocol": "TCP", "routes": [{"backend": "app"}]},
        ]
    },
    "limited": {"resources": {"limits": {"cpu": "1"}}},
    "annotated": {"service": {"type": "LoadBalancer", "annotations": {"example.com/ours": "1"}}},
}


def paths_of(kind: Kind) -> tuple[str, ...]:
    """The paths of every leaf that the plain proxy declares on a child."""
    return tuple(sorted(declared_leaves(_plain_child(kind))))


def parts_of(kind: Kind) -> tuple[str, ...]:
    """The paths of every part of the spec that the plain proxy declares on a child."""
    return declared_parts(_plain_child(kind))


def _plain_child(kind: Kind) -> Object:
    proxy = _proxy("namespace", "web", "plain")
    proxy["metadata"] |= {"uid": "uid", "generation": 1}
    return declared_children(proxy)[kind]


def _proxy(namespace: str, name: str, spec: str) -> Object:
    return a_proxy(namespace, name, **({"service": {"type": "LoadBalancer"}} | deepcopy(SPECS[spec])))


class Crowd:
    """One proxy, its children, and other writers. Not safe for threads.

    ``check`` after every step: no foreign byte is lost at any moment, and what is ours is restored, but for children
    whose writes are refused. Raises ``AssertionError`` that names the step and the bytes.
    """

    def __init__(self, admin: Kube, namespace: str, name: str, operator: OperatorProcess) -> None:
        self._admin = admin
        self._operator = operator
        self._key = Key(namespace, name)
        self._child = child_key(self._key)
        self._applied: dict[tuple[Kind, str], Object] = {}
        self._foreign: dict[Kind, Bytes] = {}
        self._uids: dict[Kind, str] = {}
        self._refused: set[Kind] = set()
        self._thaws = 0
        self._as_declared = DeclaredCheck(admin)
        self._renderings: dict[tuple[Any, ...], dict[Kind, Object]] = {}
        self.refused: list[tuple[Step, str]] = []
        """The steps of other writers that the API server refused, so that they changed nothing, and its words."""
        self._step: Step = Allow(CONFIG_MAP)
        admin.create(ENVOY_PROXY, _proxy(namespace, name, "plain"))
        wait_reconciled(admin, self._key)
        for kind in CHILD_KINDS:
            self._remember(kind, admin.get(kind, self._child))
        self._bystanders = {kind: content_of(admin.get(kind, Key(namespace, BYSTANDER))) for kind in CHILD_KINDS}

    def close(self) -> None:
        """Remove the proxy and what would hold up its children."""
        self._admin.delete(ENVOY_PROXY, self._key)
        for kind in CHILD_KINDS:
            self._tolerant_patch(kind, {"metadata": {"finalizers": None}})

    def take(self, step: Step, *, is_checked: bool = True) -> None:
        """Let one step happen, and check what must hold after it, unless that is left to the next one."""
        self._step = step
        match step:
            case Edit() | Restart():
                self._act(step)
            case Declare():
                self._declare(step)
            case Withdraw():
                self._withdraw(step)
            case Change():
                self._change(step)
            case Replace():
                self._replace(step)
            case WipeOwnership():
                self._tolerant_patch(step.kind, {"metadata": {"managedFields": [{}]}})
            case Delete():
                self._delete(step)
            case Refuse() | Allow():
                self._judge(step)
        if is_checked:
            self._check(step)

    def _act(self, step: Edit | Restart) -> None:
        """What the proxy's author and the operator's process do."""
        if isinstance(step, Restart):
            self._operator.kill()
            self._operator.start(*FLAGS)
        elif not self._refused:  # what a refused child still has of an older declaration would look foreign
            spec = _proxy(self._key.namespace, self._key.name, step.what)["spec"]
            edit = [{"op": "replace", "path": "/spec", "value": spec}]
            self._admin.patch(ENVOY_PROXY, self._key, edit, patch_type="json", field_manager="author")

    def _judge(self, step: Refuse | Allow) -> None:
        """What the platform's policies do."""
        if isinstance(step, Refuse):
            self._refuse(step)
        else:
            self._allow(step.kind)

    def _declare(self, step: Declare) -> None:
        live = self._admin.find(step.kind, self._child)
        if live is None:
            return
        makers = FIELDS[step.kind] | METADATA
        fragment = makers[step.what](step.number, step.text)
        if step.how == "apply":
            applied = _merged(self._applied.get((step.kind, step.manager), {}), fragment)
            stored = self._try(
                lambda: self._admin.apply(step.kind, _pinned(applied, live), field_manager=step.manager, force=True)
            )
            if stored is not None:
                self._applied[step.kind, step.manager] = applied
        else:
            stored = self._tolerant_patch(step.kind, fragment, "strategic-merge", step.manager)
        if stored is not None:
            self._note(step.kind, live, stored)

    def _withdraw(self, step: Withdraw) -> None:
        live = self._admin.find(step.kind, self._child)
        if live is None or self._applied.pop((step.kind, step.manager), None) is None:
            return
        stored = self._try(lambda: self._admin.apply(step.kind, _pinned({}, live), field_manager=step.manager))
        if stored is not None:
            self._note(step.kind, live, stored)

    def _change(self, step: Change) -> None:
        live = self._admin.find(step.kind, self._child)
        if live is None:
            return
        path = pointer(live, step.path)
        if path is None:
            return
        edit: Object = {"op": "remove", "path": path}
        if not step.drop:
            edit = {"op": "replace", "path": path, "value": _other(value_at(live, step.path))}
        self._drift(step.kind, [edit], step.manager)

    def _replace(self, step: Replace) -> None:
        live = self._admin.find(step.kind, self._child)
        if live is None:
            return
        edit = [each.patch(live) for each in REPLACED[step.kind][step.what]]
        beside = pointer(live, step.beside) if step.beside else None
        if beside is not None:
            # First, since what is replaced may be around it, and then the API server refuses the whole edit.
            edit.insert(0, {"op": "remove", "path": beside})
        if None not in edit:
            self._drift(step.kind, [each for each in edit if each is not None], step.manager)

    def _drift(self, kind: Kind, edit: list[Object], manager: str) -> None:
        """Change what is ours: foreign bytes are from now on those that were there before and are still there."""
        stored = self._tolerant_patch(kind, edit, "json", manager)
        if stored is None:
            return
        left = self._foreign_in(kind, stored)
        known = self._foreign[kind] if stored["metadata"]["uid"] == self._uids[kind] else {}
        self._foreign[kind] = {path: value for path, value in known.items() if left.get(path, _ABSENT) == value}

    def _delete(self, step: Delete) -> None:
        before = self._admin.find(step.kind, self._child)
        if before is None or step.kind in self._refused:
            return
        self._tolerant_patch(step.kind, {"metadata": {"finalizers": None}})
        self._foreign[step.kind] = {}
        for each in [each for each in self._applied if each[0] == step.kind]:
            del self._applied[each]
        try:
            self._admin.delete(step.kind, self._child, propagation=step.propagation)
        except NotThere:
            return
        self._admin.wait_gone(step.kind, self._child, uid=before["metadata"]["uid"], timeout_s=SETTLE_TIMEOUT_S)

    def _refuse(self, step: Refuse) -> None:
        """The annotation is a foreign byte as well. A drift makes the operator write, and be refused."""
        live = self._admin.find(step.kind, self._child)
        stored = self._tolerant_patch(step.kind, {"metadata": {"annotations": {ANNOTATION: step.how}}})
        if live is None or stored is None:
            return
        self._refused.add(step.kind)
        self._note(step.kind, live, stored)
        self._touch_ours(step.kind)
        deadline_mono = time.monotonic() + REFUSED_TIMEOUT_S
        while condition(self._admin.get(ENVOY_PROXY, self._key), "Reconciled").get("status") == "True":
            assert time.monotonic() < deadline_mono, f"{step} is not told: {self._admin.get(ENVOY_PROXY, self._key)}"
            time.sleep(POLL_S)

    def _allow(self, kind: Kind) -> None:
        """Another drift makes the next apply another one; else a refusal by a policy is tried again in a minute."""
        if kind not in self._refused:
            return
        live = self._admin.find(kind, self._child)
        stored = self._tolerant_patch(kind, {"metadata": {"annotations": {ANNOTATION: None}}})
        self._refused.discard(kind)
        if live is not None and stored is not None:
            self._note(kind, live, stored)
        self._touch_ours(kind)

    def _touch_ours(self, kind: Kind) -> None:
        self._thaws += 1
        self._tolerant_patch(kind, {"metadata": {"labels": {"app.kubernetes.io/component": f"drift-{self._thaws}"}}})

    # --- checks

    def _check(self, step: Step) -> None:
        deadline_mono = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            proxy = self._admin.get(ENVOY_PROXY, self._key)
            live = {kind: self._admin.find(kind, self._child) for kind in CHILD_KINDS}
            self._check_foreign(step, proxy, live)
            wrong = self._wrong(proxy, live)
            if not wrong:
                break
            assert time.monotonic() < deadline_mono, f"after {step} not restored: {wrong}\n{self._told()}"
            time.sleep(POLL_S)
        for kind, child in live.items():
            # A child that replaced a deleted one begins anew.
            if child is not None and child["metadata"]["uid"] != self._uids[kind]:
                self._remember(kind, child)
        for kind, before in self._bystanders.items():
            assert content_of(self._admin.get(kind, Key(self._key.namespace, BYSTANDER))) == before, (step, kind)

    def _check_foreign(self, step: Step, proxy: Object, live: Mapping[Kind, Object | None]) -> None:
        for kind, child in live.items():
            if child is None or child["metadata"]["uid"] != self._uids[kind]:
                # Only whoever deletes a child may be rid of it, and a child anew has nothing foreign yet.
                assert isinstance(step, Delete), f"{kind} is gone after {step}"
                continue
            found = foreign_bytes(child, self._declared(proxy)[kind])
            lost = {path: value for path, value in self._foreign[kind].items() if found.get(path, _ABSENT) != value}
            assert not lost, f"after {step} foreign bytes of the {kind} are lost: {lost}\n{self._told()}"

    def _wrong(self, proxy: Object, live: Mapping[Kind, Object | None]) -> list[str]:
        """What of ours is not restored; refused children may hold anything."""
        missing = [str(kind) for kind, child in live.items() if child is None]
        if missing:
            return [f"no {kind}" for kind in missing]
        waiting = self._refused | ({DEPLOYMENT} if CONFIG_MAP in self._refused else set())
        wrong = []
        for kind, declared in self._declared(proxy, live).items():
            child = live[kind] if kind in live else self._admin.find(kind, self._child)
            if child is None:
                wrong.append(f"no {kind}")
            elif kind not in waiting:
                wrong += [f"{kind}: {path}" for path in self._as_declared.differences(kind, declared, child)]
        if not waiting and not holds("Reconciled")(proxy):
            wrong.append(f"status: {condition(proxy, 'Reconciled')}")
        return wrong

    def _declared(self, proxy: Object, live: Mapping[Kind, Object | None] | None = None) -> dict[Kind, Object]:
        """What a version of the proxy declares, rendered once for the same objects."""
        versions = [child and child["metadata"]["resourceVersion"] for child in (live or {}).values()]
        key = (proxy["metadata"]["generation"], *versions)
        if key not in self._renderings:
            if len(self._renderings) > MAX_RENDERINGS:
                self._renderings.clear()
            self._renderings[key] = declared_children(proxy, live)
        return self._renderings[key]

    def _told(self) -> str:
        return f"{self._admin.get(ENVOY_PROXY, self._key).get('status')}\n{self._operator.log_text()[-4000:]}"

    def _remember(self, kind: Kind, stored: Object) -> None:
        self._uids[kind] = stored["metadata"]["uid"]
        self._foreign[kind] = self._foreign_in(kind, stored)

    def _note(self, kind: Kind, before: Object, stored: Object) -> None:
        """Take what a write has added for foreign from now on, beside what was and still is.

        Not all that is there: while the operator's writes are refused, a child also holds what others have put in the
        place of ours, and that is to go.
        """
        if stored["metadata"]["uid"] != self._uids[kind]:
            self._remember(kind, stored)
            return
        known, was = self._foreign[kind], self._foreign_in(kind, before)
        self._foreign[kind] = {
            path: value
            for path, value in self._foreign_in(kind, stored).items()
            if known.get(path, _ABSENT) == value or was.get(path, _ABSENT) != value
        }

    def _foreign_in(self, kind: Kind, live: Object) -> Bytes:
        return foreign_bytes(live, self._declared(self._admin.get(ENVOY_PROXY, self._key))[kind])

    # --- requests that may be refused, because the step before has left something else than the step expects

    def _try(self, send: Callable[[], Object]) -> Object | None:
        try:
            return send()
        except KubeError as error:
            if error.code not in {404, 409, 422}:
                raise
            self.refused.append((self._step, str(error)))
            return None

    def _tolerant_patch(
        self, kind: Kind, patch: Object | list[Object], patch_type: PatchType = "merge", manager: str = "somebody"
    ) -> Object | None:
        return self._try(
            lambda: self._admin.patch(kind, self._child, patch, patch_type=patch_type, field_manager=manager)
        )


def _pinned(applied: Object, live: Object) -> Object:
    """``applied`` as the whole configuration of a manager, for exactly this object."""
    identity = {name: live["metadata"][name] for name in ("name", "namespace", "uid")}
    metadata = applied.get("metadata", {}) | identity
    return {"apiVersion": live["apiVersion"], "kind": live["kind"]} | applied | {"metadata": metadata}


def _merged(before: Value, more: Value) -> Value:
    """Both configurations as one; where they exclude each other, the second."""
    if isinstance(before, dict) and isinstance(more, dict):
        return before | {name: _merged(before.get(name), value) for name, value in more.items()}
    if isinstance(before, list) and isinstance(more, list) and before and isinstance(before[0], dict):
        items = {_key(item): item for item in before}
        items |= {_key(item): _merged(items.get(_key(item)), item) for item in more}
        return list(items.values())
    return deepcopy(more)


def _key(item: Object) -> tuple[Any, ...]:
    names = ("mountPath",) if "mountPath" in item else ("port", "name", "ip", "key")
    return tuple(item.get(name) for name in names)[: 1 if "port" in item else None]


def _other(value: Value) -> Value:
    """Another value of the same type, which the API server need not accept."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return _OTHER.get(value, f"{value}-x")
        case _:
            return [*value, "x"]


_OTHER: Final = {
    "LoadBalancer": "NodePort",
    "TCP": "UDP",
    "25%": "26%",
    "HTTP": "HTTPS",
    "RuntimeDefault": "Unconfined",
}
