"""Scenarios: what an administrator does to a proxy, in one action each, while a fault is injected.

A scenario begins without a proxy, or with one that has converged (``is_prepared``), and says what must exist in the
end. It knows nothing of faults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from operator_app.api.kinds import (
    ALL_CHILD_KINDS,
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    HORIZONTAL_POD_AUTOSCALER,
    HOSTNAME_CLAIM,
    NETWORK_POLICY,
    OPTIONAL_CHILD_KINDS,
    POD,
    POD_DISRUPTION_BUDGET,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.desired import child_key
from operator_app.envoy.files import CLUSTERS_FILE
from tests.e2e.kube import Kube
from tests.e2e.proxies import a_proxy

NAME: Final = "web"
FOREIGN_ANNOTATION: Final = "stranger.example.com/keep"
"""An annotation that another writer puts on prepared children, and that has to survive every repair."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """``act`` is called once. ``uids`` is how many UIDs each kind has had in the end, where that is unusual.

    Of a child or a proxy these are the UIDs under its name, of records and claims all that ever named the proxy.
    ``is_recreated``: once the proxy is gone, it is created again. ``is_repair``: the operator emits an Event about it.
    ``has_stranger``: somebody else's Service has the name of the proxy's. ``rival_edits``: what another writer does to
    children, one edit after each repair. ``start`` are fields of the spec that a prepared proxy has beside those of
    ``fresh_proxy``. ``has_serving_pod``: its Pod serves, as far as the API server knows. ``only`` are the kinds at
    whose requests and events faults are injected, where the others are tried by other scenarios.
    """

    name: str
    act: Callable[[Kube, str], None]
    is_prepared: bool = True
    ends_gone: bool = False
    is_recreated: bool = False
    is_repair: bool = False
    has_stranger: bool = False
    rival_edits: tuple[tuple[Kind, list[Object]], ...] = ()
    uids: Mapping[str, int] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    has_serving_pod: bool = False
    only: tuple[Kind, ...] = ()

    def uids_of(self, kind: str) -> int:
        """How many UIDs a kind has had in the end: usually none of an optional child, and one of all else."""
        usual = 0 if kind in {each.kind for each in OPTIONAL_CHILD_KINDS} else 1
        return self.uids.get(kind, usual)

    @property
    def children_at_start(self) -> tuple[Kind, ...]:
        """The kinds of children that a prepared proxy has."""
        return ALL_CHILD_KINDS if OPTIONS.items() <= self.start.items() else CHILD_KINDS

    def proxy(self, namespace: str) -> Object:
        """The proxy that the scenario begins with."""
        return fresh_proxy(namespace, **self.start)


def hostnames(namespace: str) -> tuple[str, str]:
    """The hostname that the proxy in a namespace begins with, and the one that an edit gives it; both are its own."""
    return f"{namespace}.example.com", f"edited.{namespace}.example.com"


def fresh_proxy(namespace: str, **spec: Any) -> Object:
    """The proxy that scenarios begin with; keywords are fields of its spec.

    It has no replicas unless they are given. No Pod of it ever runs, whether the cluster has a node or not: a Pod that
    serves is touched, and writes a status of its own at moments that no scenario knows.
    """
    registration = {"hostname": hostnames(namespace)[0]}
    nowhere = {"scenarios.example.com/pool": "nowhere"}
    return a_proxy(namespace, NAME, **{"replicas": 0, "registration": registration, "nodeSelector": nowhere} | spec)


def _create(admin: Kube, namespace: str) -> None:
    admin.create(ENVOY_PROXY, fresh_proxy(namespace, replicas=1))


def _edit(admin: Kube, namespace: str) -> None:
    listener = {"name": "http", "port": 8081, "routes": [{"match": {"pathPrefix": "/v2"}, "backend": "app"}]}
    registration = {"hostname": hostnames(namespace)[1]}
    change = {"replicas": 1, "listeners": [listener], "registration": registration}
    admin.patch(ENVOY_PROXY, Key(namespace, NAME), {"spec": change})


def _delete_children(admin: Kube, namespace: str) -> None:
    for kind in CHILD_KINDS:
        admin.delete(kind, child_key(Key(namespace, NAME)))


def _drift(admin: Kube, namespace: str) -> None:
    key = child_key(Key(namespace, NAME))
    admin.patch(CONFIG_MAP, key, {"data": {CLUSTERS_FILE: "{}"}})
    admin.patch(SERVICE, key, [{"op": "replace", "path": "/spec/ports/0/targetPort", "value": 1}], patch_type="json")
    image = {"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "stranger:latest"}
    admin.patch(DEPLOYMENT, key, [image], patch_type="json")


def _delete(admin: Kube, namespace: str) -> None:
    admin.delete(ENVOY_PROXY, Key(namespace, NAME))


def _add_options(admin: Kube, namespace: str) -> None:
    admin.patch(ENVOY_PROXY, Key(namespace, NAME), {"spec": OPTIONS})


def _remove_options(admin: Kube, namespace: str) -> None:
    admin.patch(ENVOY_PROXY, Key(namespace, NAME), {"spec": dict.fromkeys(OPTIONS)})


def _drift_of_options(admin: Kube, namespace: str) -> None:
    key = child_key(Key(namespace, NAME))
    admin.patch(POD_DISRUPTION_BUDGET, key, {"spec": {"maxUnavailable": "100%"}})
    admin.patch(HORIZONTAL_POD_AUTOSCALER, key, {"spec": {"maxReplicas": 99}})
    admin.patch(NETWORK_POLICY, key, {"spec": {"egress": []}})


def _edit_routes(admin: Kube, namespace: str) -> None:
    listener = {"name": "http", "port": 80, "routes": [{"match": {"pathPrefix": "/v2"}, "backend": "app"}]}
    admin.patch(ENVOY_PROXY, Key(namespace, NAME), {"spec": {"listeners": [listener]}})


_SCALABLE: Final[Mapping[str, Any]] = {"replicas": 1, "resources": {"requests": {"cpu": "10m"}}}
"""What an autoscaler needs to be declared. It is there from the start, since a change of it would replace the Pod."""

OPTIONS: Final[Mapping[str, Any]] = {
    "disruption": {"maxUnavailable": 1},
    "autoscaling": {"maxReplicas": 2},
    "networkPolicy": {"from": [{"cidr": "192.0.2.0/24"}]},
}
"""What asks for every optional child."""

_OPTIONS_ONCE: Final = {kind.kind: 1 for kind in OPTIONAL_CHILD_KINDS}

_EVERYTHING_TWICE: Final = {kind.kind: 2 for kind in (ENVOY_PROXY, *CHILD_KINDS, PROXY_REGISTRATION, HOSTNAME_CLAIM)}

_RIVAL_EDITS: Final = (
    (SERVICE, [{"op": "replace", "path": "/spec/selector", "value": {"app": "rival"}}]),
    (DEPLOYMENT, [{"op": "replace", "path": "/spec/template/spec/terminationGracePeriodSeconds", "value": 1}]),
    (CONFIG_MAP, [{"op": "remove", "path": f"/data/{CLUSTERS_FILE}"}]),
)
"""Each takes another field, so that no repair has to wait for the one before it."""

SCENARIOS: Final = (
    Scenario("first reconcile", _create, is_prepared=False),
    Scenario("edit of the spec", _edit, uids={HOSTNAME_CLAIM.kind: 2}),
    Scenario("loss of the children", _delete_children, is_repair=True, uids={kind.kind: 2 for kind in CHILD_KINDS}),
    Scenario("drift of the children", _drift, is_repair=True),
    Scenario("deletion", _delete, ends_gone=True),
    Scenario("re-creation", _delete, is_recreated=True, uids=_EVERYTHING_TWICE),
    Scenario(
        "first reconcile beside a stranger",
        _create,
        is_prepared=False,
        has_stranger=True,
        uids={PROXY_REGISTRATION.kind: 0, HOSTNAME_CLAIM.kind: 0},
    ),
    Scenario("drift with a rival", _drift, is_repair=True, rival_edits=_RIVAL_EDITS),
    Scenario(
        "optional children added",
        _add_options,
        start=_SCALABLE,
        uids=_OPTIONS_ONCE,
        only=(*OPTIONAL_CHILD_KINDS, DEPLOYMENT),
    ),
    Scenario(
        "optional children removed",
        _remove_options,
        start={**_SCALABLE, **OPTIONS},
        uids=_OPTIONS_ONCE,
        only=(*OPTIONAL_CHILD_KINDS, DEPLOYMENT),
    ),
    Scenario(
        "drift of the optional children",
        _drift_of_options,
        is_repair=True,
        start={**_SCALABLE, **OPTIONS},
        uids=_OPTIONS_ONCE,
        only=OPTIONAL_CHILD_KINDS,
    ),
    Scenario(
        "edit of the routes under a Pod that serves",
        _edit_routes,
        start={"replicas": 1},
        has_serving_pod=True,
        only=(CONFIG_MAP, POD),
    ),
)
