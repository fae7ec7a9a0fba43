"""One round: what is sent and in which order, what one trouble does not keep from being done, what is told."""

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from operator_app import reconcile
from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    FINALIZER,
    POD_DISRUPTION_BUDGET,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.api.models import parse_spec
from operator_app.apply import POLICY_RETRY_S, OwnershipCheck, Plan, Result
from operator_app.dataplane.plane import DataPlane
from operator_app.desired import children
from operator_app.errors import ConflictError, TransientError
from operator_app.kube.deltas import Changed
from operator_app.kube.events import Occurrence
from operator_app.reconcile import PERSISTENT_AFTER, Reconciler
from operator_app.registration.backoff import Backoff
from operator_app.registration.circuit import CircuitBreaker
from operator_app.registration.claims import Claims
from operator_app.registration.ledger import Ledger
from operator_app.registration.registrar import Registrar, Registries
from operator_app.results import DONE, Outcome, Problem
from operator_app.tenant_policy import TenantPolicy
from tests.unit.scripted_api import (
    CONFLICT,
    NOT_FOUND,
    UNAVAILABLE,
    Components,
    Line,
    ScriptedApi,
    Step,
    components,
    created,
    ok,
    proxy_of_team,
    refused,
    refused_by_policy,
    repaired,
    stored_status,
    with_finalizer,
    with_status,
)
from tests.unit.ssa.field_sets import entry, stored

pytestmark = pytest.mark.anyio

KEY = Key("team-a", "checkout")
ADDRESS = "checkout-envoy.team-a.svc"
NOW = datetime(2026, 7, 2, tzinfo=UTC)
Known = tuple[Kind, Object]


class ReconcilerComponents(Components):
    """The rooms, with the reconciler that goes through them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.results: list[Result] = []
        self.events: list[Occurrence] = []
        ledger = Ledger(
            self.applier,
            self.cluster,
            self.store,
            namespace="edge-system",
            on_write=self.on_write,
            sink=self.store.apply_delta,
        )
        self.reconciler = Reconciler(
            self.cluster,
            self.store,
            self.applier,
            self.finalizer,
            Registrar(
                ledger,
                Claims(
                    self.applier,
                    self.cluster,
                    self.store,
                    namespace="edge-system",
                    sink=self.store.apply_delta,
                    now=lambda: NOW,
                ),
                Registries({}),
                Backoff(base_s=1, cap_s=10, rand=lambda: 0.5),
                CircuitBreaker(rand=lambda: 0.5),
                mono=self.clock,
            ),
            self.statuses,
            DataPlane(self.cluster, self.store, None, on_write=self.on_write, mono=self.clock),
            report=lambda _, result: self.results.append(result),
            record_event=self.events.append,
            default_image="envoy:default",
            abandon_after_s=None,
            now=lambda: NOW,
        )


@asynccontextmanager
async def reconciling(api: ScriptedApi, folder: Path, *known: Known) -> AsyncGenerator[ReconcilerComponents]:
    """A reconciler whose store knows these objects."""
    async with components(api, folder, *known) as own:
        yield ReconcilerComponents(own.cluster, own.store)


def finalized_proxy(spec: Object | None = None, **metadata: Any) -> Object:
    """A proxy with our finalizer on it."""
    proxy = proxy_of_team(spec, finalizers=[FINALIZER], **metadata)
    fields: Object = {"f:metadata": {"f:finalizers": {f'v:"{FINALIZER}"': {}}}}
    proxy["metadata"]["managedFields"] = [entry(proxy, fields)]
    return proxy


def child(kind: Kind, proxy: Object, **changes: Any) -> Object:
    """A child as it stands when all is well, at version 20."""
    desired = children(proxy, parse_spec(proxy), default_image="envoy:default")[kind]
    return stored(desired, version=20, uid=f"{kind.kind}-uid") | changes


def rolled_out(proxy: Object) -> Object:
    """The Deployment with all its Pods ready."""
    numbers = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), 1)
    return child(DEPLOYMENT, proxy, status=numbers | {"observedGeneration": 1})


def children_are_created(*beside: Line) -> list[Line]:
    """Every child is created, without a read before it; ``beside`` comes at the same time."""
    return [*((f"apply {kind}", created()) for kind in CHILD_KINDS), *beside]


def record(uid: str = "proxy-uid", generation: int = 1) -> Object:
    """The entry of a proxy in the ledger."""
    desired: Object = {
        "apiVersion": PROXY_REGISTRATION.api_version,
        "kind": "ProxyRegistration",
        "metadata": {
            "name": f"proxy-{uid}",
            "namespace": "edge-system",
            "labels": {"app.kubernetes.io/managed-by": "operator-app"},
        },
        "spec": {
            "proxy": {"namespace": "team-a", "name": "checkout", "uid": uid},
            "generation": generation,
            "registry": "in-cluster",
            "state": "Registered",
            "address": "checkout-envoy.team-a.svc",
            "ports": [{"name": "http", "port": 80, "protocol": "HTTP"}],
        },
    }
    return stored(desired, version=20, uid=f"record-of-{uid}")


def family(proxy: Object) -> list[Known]:
    """A proxy and everything of it, as it is when nothing is left to do but to tell."""
    return [
        (ENVOY_PROXY, proxy),
        (CONFIG_MAP, child(CONFIG_MAP, proxy)),
        (DEPLOYMENT, rolled_out(proxy)),
        (SERVICE, child(SERVICE, proxy)),
        (PROXY_REGISTRATION, record(generation=proxy["metadata"]["generation"])),
    ]


def strangers(kind: Kind) -> Object:
    """Somebody else's object under a child's name."""
    metadata = {"name": "checkout-envoy", "namespace": "team-a", "uid": "stranger", "resourceVersion": "30"}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}


def condition(api: ScriptedApi, type_: str) -> Object:
    """A condition of the one status that was written."""
    found: list[Object] = api.body("apply EnvoyProxy/status")["status"]["conditions"]
    return next(each for each in found if each["type"] == type_)


@pytest.mark.parametrize("routes", [1, 64], ids=["small", "large"])
async def test_a_large_spec_is_rendered_beside_the_event_loop(
    routes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spec above ``LARGE_SPEC_BYTES`` is parsed and rendered in another thread, a smaller one on the loop."""
    route = {"match": {"pathPrefix": f"/{'p' * 500}"}, "backend": "app"}
    proxy = finalized_proxy({"listeners": [{"name": "http", "port": 80, "routes": [route] * routes}]})
    rendered_on: list[int] = []

    def rendered(*args: Any, **kwargs: Any) -> dict[Kind, Object]:
        rendered_on.append(threading.get_ident())
        return children(*args, **kwargs)

    monkeypatch.setattr(reconcile, "children", rendered)
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with reconciling(api, tmp_path, *family(proxy)) as own:
        await own.reconciler.reconcile(KEY)
    assert [each == threading.get_ident() for each in rendered_on] == [routes == 1]


# --- the way -------------------------------------------------------------------------------------------------------


async def test_a_first_reconcile_makes_everything_in_order(tmp_path: Path) -> None:
    """Finalizer, ConfigMap, Deployment, Service, record, status: six writes and no read."""
    proxy = proxy_of_team()
    api = ScriptedApi(
        children_are_created(("apply EnvoyProxy", with_finalizer(proxy)), ("apply ProxyRegistration", created())),
        ("apply EnvoyProxy/status", stored_status(finalized_proxy())),
    )
    async with reconciling(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        assert await own.reconciler.reconcile(KEY) == DONE
        assert [result.outcome for result in own.results] == [Outcome.CREATED] * 3
    sent = [each.line for each in api.sent]
    assert sent.index("apply ConfigMap") < sent.index("apply Deployment"), "it mounts the ConfigMap"
    assert sent.index("apply EnvoyProxy") < sent.index("apply ProxyRegistration"), "the finalizer removes it again"
    assert sent.index("apply Service") < sent.index("apply ProxyRegistration"), "it has the Service's address"
    assert condition(api, "Reconciled")["status"] == "True"
    assert condition(api, "Registered")["status"] == "True"
    assert condition(api, "Ready")["reason"] == "NotEnoughReady"
    assert api.body("apply EnvoyProxy/status")["status"]["address"] == "checkout-envoy.team-a.svc"
    assert [each.is_forced for each in api.sent if each.line == "apply ProxyRegistration"] == [False]


async def test_the_first_writes_are_under_way_at_the_same_time(tmp_path: Path) -> None:
    """Finalizer, ConfigMap and Service wait for nothing: none is answered before all three are asked for."""
    first = {"apply EnvoyProxy", "apply ConfigMap", "apply Service"}

    class Together(ScriptedApi):
        """Answers none of the first writes before all of them have arrived."""

        def __init__(self, *script: Step) -> None:
            super().__init__(*script)
            self.all_are_there = anyio.Event()

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            answer = await super().handle_async_request(request)
            if first <= {each.line for each in self.sent}:
                self.all_are_there.set()
            await self.all_are_there.wait()
            return answer

    proxy = proxy_of_team()
    api = Together(
        children_are_created(("apply EnvoyProxy", with_finalizer(proxy)), ("apply ProxyRegistration", created())),
        ("apply EnvoyProxy/status", stored_status(finalized_proxy())),
    )
    async with reconciling(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        with anyio.fail_after(60):
            assert await own.reconciler.reconcile(KEY) == DONE


async def test_an_edit_that_the_finalizer_brings_to_light_is_what_the_reconcile_is_about(tmp_path: Path) -> None:
    """Else the status would say of the newer generation what was done for the older one, and no event would follow."""
    proxy = proxy_of_team()
    edited = proxy_of_team({"image": "envoy:edited"}, generation=2)
    api = ScriptedApi(
        children_are_created(("apply EnvoyProxy", with_finalizer(edited))),
        [("apply Deployment", repaired()), ("apply ProxyRegistration", created())],
        ("apply EnvoyProxy/status", stored_status(edited)),
    )
    async with reconciling(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        assert await own.reconciler.reconcile(KEY) == DONE
    deployments = [each.body for each in api.sent if each.line == "apply Deployment"]
    images = [each["spec"]["template"]["spec"]["containers"][0]["image"] for each in deployments]
    assert images == ["envoy:default", "envoy:edited"]
    assert api.body("apply ProxyRegistration")["spec"]["generation"] == 2
    assert condition(api, "Reconciled")["observedGeneration"] == 2


@pytest.mark.parametrize(("code", "reason"), [(403, "Forbidden"), (422, "Invalid"), (422, "RefusedByPolicy")])
async def test_a_refused_finalizer_is_reported_and_nothing_is_registered(
    tmp_path: Path, code: int, reason: str
) -> None:
    """The children are made, the record waits, and the finalizer is tried again after a minute at the latest."""
    proxy = proxy_of_team()
    refusal = (
        refused_by_policy(code)
        if reason == "RefusedByPolicy"
        else refused(code, reason, "metadata.finalizers[0]", message="a policy says no")
    )
    api = ScriptedApi(
        children_are_created(("apply EnvoyProxy", refusal), ("get ProxyRegistration", NOT_FOUND)),
        ("apply EnvoyProxy/status", stored_status(proxy)),
    )
    async with reconciling(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        result = await own.reconciler.reconcile(KEY)
    assert result.failure is not None or result.requeue_after_s == POLICY_RETRY_S
    assert condition(api, "Stalled")["reason"] == reason
    assert "a policy says no" in condition(api, "Stalled")["message"]
    assert condition(api, "Registered")["reason"] == reason


async def test_a_quiet_reconcile_asks_for_nothing(tmp_path: Path) -> None:
    """Once told, everything holds, and a second round sends not one request."""
    proxy = finalized_proxy()
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with reconciling(api, tmp_path, *family(proxy)) as own:
        for _ in range(3):
            assert await own.reconciler.reconcile(KEY) == DONE
    assert condition(api, "Ready")["status"] == "True"


async def test_a_drift_is_one_write(tmp_path: Path) -> None:
    """A taken field of one child costs one apply to that child."""
    proxy = finalized_proxy()
    drifted = child(SERVICE, proxy)
    drifted["spec"]["selector"] = {"app": "other"}
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)), ("apply Service", repaired()))
    async with reconciling(api, tmp_path, *family(proxy)) as own:
        await own.reconciler.reconcile(KEY)
        drifted["metadata"]["resourceVersion"] = "21"
        own.store.apply_delta(Changed(SERVICE, drifted))
        assert await own.reconciler.reconcile(KEY) == DONE
    assert api.body("apply Service")["spec"]["selector"]["app.kubernetes.io/instance"] == "checkout"


async def test_an_unknown_proxy_costs_nothing(tmp_path: Path) -> None:
    """A key whose object has gone is done."""
    async with reconciling(ScriptedApi(), tmp_path) as own:
        assert await own.reconciler.reconcile(KEY) == DONE


# --- trouble -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [0, PERSISTENT_AFTER - 1, PERSISTENT_AFTER])
async def test_trouble_with_one_child_does_not_stop_the_others(tmp_path: Path, failures: int) -> None:
    """The rest of the round goes on; the trouble is told in the status once it has lasted some rounds."""
    proxy = finalized_proxy()
    known = [(kind, obj) for kind, obj in family(proxy) if kind not in (DEPLOYMENT, SERVICE)]
    script: list[Step] = [
        [("apply Deployment", UNAVAILABLE), ("apply Service", created())],
    ]
    if failures >= PERSISTENT_AFTER:
        script.append(("apply EnvoyProxy/status", stored_status(proxy)))
    api = ScriptedApi(*script)
    async with reconciling(api, tmp_path, *known) as own:
        verdict = await own.reconciler.reconcile(KEY, failures=failures)
    assert isinstance(verdict.failure, TransientError)
    if failures >= PERSISTENT_AFTER:
        assert condition(api, "Reconciled")["reason"] == "Retrying"
        assert "503" in condition(api, "Reconciled")["message"]


async def test_what_cannot_be_repaired_is_not_called_absent(tmp_path: Path) -> None:
    """A Deployment that serves goes on being counted while, say, a webhook refuses every write to it."""
    proxy = finalized_proxy({"image": "envoy:edited"})
    live = rolled_out(finalized_proxy())
    known = [(kind, live if kind == DEPLOYMENT else obj) for kind, obj in family(proxy)]
    api = ScriptedApi(("apply Deployment", UNAVAILABLE), ("apply EnvoyProxy/status", stored_status(proxy)))
    async with reconciling(api, tmp_path, *known) as own:
        await own.reconciler.reconcile(KEY, failures=PERSISTENT_AFTER)
    assert condition(api, "Reconciled")["status"] == "False"
    assert condition(api, "Available")["reason"] == "EnoughReady"
    assert api.body("apply EnvoyProxy/status")["status"]["readyReplicas"] == 1


async def test_a_refused_child_is_reported_at_once_and_the_others_are_made(tmp_path: Path) -> None:
    """An immutable field names itself in the status, which is Stalled; nothing is deleted."""
    proxy = finalized_proxy()
    live = rolled_out(proxy)
    live["spec"]["selector"] = {"matchLabels": {"app": "other"}}
    known = [(kind, live if kind == DEPLOYMENT else obj) for kind, obj in family(proxy) if kind != SERVICE]
    api = ScriptedApi(
        [
            ("apply Deployment", refused(422, "Invalid", "spec.selector", message="field is immutable")),
            ("apply Service", created()),
        ],
        ("apply EnvoyProxy/status", stored_status(proxy)),
    )
    async with reconciling(api, tmp_path, *known) as own:
        assert (await own.reconciler.reconcile(KEY)).failure is None, "nothing comes of trying again"
    assert condition(api, "Stalled")["reason"] == "Invalid"
    assert "spec.selector" in condition(api, "Stalled")["message"]


async def test_a_foreign_config_map_keeps_the_deployment_from_being_made(tmp_path: Path) -> None:
    """A Deployment must never mount what somebody else wrote; the Service is made all the same."""
    proxy = finalized_proxy()
    api = ScriptedApi(
        [
            ("apply ConfigMap", CONFLICT),
            ("get ConfigMap", ok(strangers(CONFIG_MAP))),
            ("apply Service", created()),
            ("apply ProxyRegistration", created()),
        ],
        ("apply EnvoyProxy/status", stored_status(proxy)),
    )
    async with reconciling(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        verdict = await own.reconciler.reconcile(KEY)
    assert {each.kind: each.problem.reason if each.problem else None for each in own.results} == {
        CONFIG_MAP: "NameConflict",
        DEPLOYMENT: "ConfigMapNotReady",
        SERVICE: None,
    }
    assert isinstance(verdict.failure, Problem), "no watch tells that a stranger's object has gone"
    assert condition(api, "Stalled")["reason"] == "NameConflict"


async def test_after_a_restart_a_strangers_name_is_read_and_not_written(tmp_path: Path) -> None:
    """The status already says whose the name is, so a new operator does not try to create what would be refused."""
    proxy = finalized_proxy()
    known = [(kind, obj) for kind, obj in family(proxy) if kind not in (SERVICE, PROXY_REGISTRATION)]
    api = ScriptedApi(
        ("apply Service", CONFLICT),
        ("get Service", ok(strangers(SERVICE))),
        ("apply EnvoyProxy/status", stored_status(proxy)),
    )
    async with reconciling(api, tmp_path, *known) as own:
        await own.reconciler.reconcile(KEY)
    told = with_status(proxy, api.body("apply EnvoyProxy/status")["status"])
    restarted = ScriptedApi(("get Service", ok(strangers(SERVICE))))
    async with reconciling(restarted, tmp_path, (ENVOY_PROXY, told), *known[1:]) as own:
        result = await own.reconciler.reconcile(KEY)
    assert [each.line for each in restarted.sent] == ["get Service"]
    assert result.failure is not None, "it is looked at again"


async def test_a_foreign_service_is_not_registered(tmp_path: Path) -> None:
    """An address that is not ours is not made known."""
    proxy = finalized_proxy()
    known = [(kind, obj) for kind, obj in family(proxy) if kind not in (SERVICE, PROXY_REGISTRATION)]
    api = ScriptedApi(
        ("apply Service", CONFLICT),
        ("get Service", ok(strangers(SERVICE))),
        ("apply EnvoyProxy/status", stored_status(proxy)),
    )
    async with reconciling(api, tmp_path, *known) as own:
        await own.reconciler.reconcile(KEY)
    assert condition(api, "Registered")["reason"] == "NoAddress"
    assert "address" not in api.body("apply EnvoyProxy/status")["status"]


@pytest.mark.parametrize("has_record", [True, False])
async def test_a_service_that_cannot_be_repaired_keeps_its_record_and_gets_no_other(
    tmp_path: Path, *, has_record: bool
) -> None:
    """What the outside was told still leads to the proxy; what it was not told waits for the Service."""
    proxy = finalized_proxy()
    refused_service = child(SERVICE, proxy)
    refused_service["spec"]["type"] = "NodePort"
    known = [(kind, refused_service if kind == SERVICE else obj) for kind, obj in family(proxy)]
    known = [each for each in known if has_record or each[0] != PROXY_REGISTRATION]
    lookups = [] if has_record else [("get ProxyRegistration", NOT_FOUND)]
    refusal = refused(422, "Invalid", "spec.type", message="not in this cluster")
    api = ScriptedApi(("apply Service", refusal), *lookups, ("apply EnvoyProxy/status", stored_status(proxy)))
    async with reconciling(api, tmp_path, *known) as own:
        await own.reconciler.reconcile(KEY)
    assert condition(api, "Reconciled")["reason"] == "Invalid"
    assert condition(api, "Registered")["status"] == str(has_record)
    assert api.body("apply EnvoyProxy/status")["status"]["address"] == ADDRESS


async def test_a_proxy_that_has_moved_on_is_read_again(tmp_path: Path) -> None:
    """A conflict over the proxy keeps record and status from being written, and the proxy alone is read again."""
    proxy = proxy_of_team()
    newer = proxy_of_team(resourceVersion="11", generation=2)
    api = ScriptedApi(children_are_created(("apply EnvoyProxy", CONFLICT)), [("get EnvoyProxy", ok(newer))])
    async with reconciling(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        verdict = await own.reconciler.reconcile(KEY)
        assert own.store.get(ENVOY_PROXY, KEY) == newer
    assert isinstance(verdict.failure, ConflictError)


async def test_a_proxy_whose_edit_the_watch_has_delivered_is_not_read(tmp_path: Path) -> None:
    """Its edits come faster than reconciles end: each conflict would cost reads of what is known already."""
    proxy = finalized_proxy()
    newer = finalized_proxy(resourceVersion="11", generation=2)
    api = ScriptedApi()
    async with reconciling(api, tmp_path, *family(proxy)) as own:

        def delivered(body: Object) -> tuple[int, Object]:
            own.store.learn(ENVOY_PROXY, newer)
            return CONFLICT(body)

        api.add(("apply EnvoyProxy/status", delivered))
        verdict = await own.reconciler.reconcile(KEY)
    assert isinstance(verdict.failure, ConflictError)


@pytest.mark.parametrize("is_next", [True, False])
async def test_a_next_step_of_the_config_map_is_no_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_next: bool
) -> None:
    """Everything else of a generation that was reported is, so that another writer of it is met ever more slowly."""
    proxy = finalized_proxy()
    reported = {"type": "Reconciled", "status": "True", "reason": "Verified", "observedGeneration": 1}
    proxy["status"] = {"conditions": [reported]}
    repairs: dict[Kind, bool] = {}
    async with reconciling(ScriptedApi(), tmp_path, *family(proxy)) as own:
        plan = own.applier.plan

        async def planned(kind: Kind, desired: Object, check: OwnershipCheck, *, ask_server: bool) -> Plan:
            repairs[kind] = check.was_reported
            return await plan(kind, desired, check, ask_server=ask_server)

        monkeypatch.setattr(own.applier, "plan", planned)
        monkeypatch.setattr(own.reconciler._data_plane, "is_next", lambda _proxy, _config_map: is_next)
        await own.reconciler._take_steps(
            proxy,
            parse_spec(proxy),
            children(proxy, parse_spec(proxy), default_image="envoy:default"),
            is_resync=False,
        )
    assert {kind: repairs[kind] for kind in CHILD_KINDS} == {CONFIG_MAP: not is_next, DEPLOYMENT: True, SERVICE: True}


async def test_a_conflict_makes_known_what_is_gone_and_learns_nobody_elses_object(tmp_path: Path) -> None:
    """Another incarnation or a stranger under a name ends what is known there, and takes no place in the store."""
    proxy = proxy_of_team()
    reborn = proxy_of_team(uid="reborn-uid", resourceVersion="40")
    newer = child(SERVICE, proxy)
    newer["metadata"]["resourceVersion"] = "21"
    stored_children = {CONFIG_MAP: strangers(CONFIG_MAP), DEPLOYMENT: child(DEPLOYMENT, proxy), SERVICE: newer}
    api = ScriptedApi(
        ("apply EnvoyProxy", CONFLICT),
        ("get EnvoyProxy", ok(reborn)),
        *((f"get {kind}", ok(live)) for kind, live in stored_children.items()),
    )
    known = [each for each in family(proxy) if each[0] != PROXY_REGISTRATION]
    async with reconciling(api, tmp_path, *known) as own:
        verdict = await own.reconciler.reconcile(KEY)
        assert isinstance(verdict.failure, ConflictError)
        assert own.store.get(ENVOY_PROXY, KEY) is None
        assert own.store.get(CONFIG_MAP, Key("team-a", "checkout-envoy")) is None
        assert own.store.version(SERVICE, Key("team-a", "checkout-envoy")) == 21
        assert own.store.version(DEPLOYMENT, Key("team-a", "checkout-envoy")) == 20


@pytest.mark.parametrize(
    ("spec", "words"),
    [({"replicas": -1}, "spec.replicas"), ({"backends": []}, "spec.backends")],
    ids=["replicas", "backends"],
)
async def test_a_declaration_that_cannot_be_acted_on_writes_nothing_but_the_status(
    tmp_path: Path, spec: Object, words: str
) -> None:
    """Not even the finalizer; the sentence names the field, and what runs is still counted."""
    proxy = proxy_of_team(spec)
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    known = [(kind, obj) for kind, obj in family(finalized_proxy()) if kind in (DEPLOYMENT, SERVICE)]
    async with reconciling(api, tmp_path, (ENVOY_PROXY, proxy), *known) as own:
        assert await own.reconciler.reconcile(KEY) == DONE
    assert condition(api, "Stalled")["reason"] == "InvalidSpec"
    assert words in condition(api, "Stalled")["message"]
    assert condition(api, "Available")["status"] == "True"
    assert api.body("apply EnvoyProxy/status")["status"]["address"] == ADDRESS


async def test_what_the_platform_does_not_allow_writes_nothing_but_the_status(tmp_path: Path) -> None:
    """A valid spec that the settings forbid is refused as one that is not valid, with the reason NotAllowed."""
    proxy = proxy_of_team({"service": {"type": "NodePort"}})
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with reconciling(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        own.reconciler._tenant_policy = TenantPolicy(service_types=("ClusterIP",))
        assert await own.reconciler.reconcile(KEY) == DONE
    assert condition(api, "Stalled")["reason"] == "NotAllowed"
    assert "use ClusterIP" in condition(api, "Stalled")["message"]


# --- paused --------------------------------------------------------------------------------------------------------


async def test_a_paused_proxy_reports_what_waits(tmp_path: Path) -> None:
    """Nothing is written but the status: no finalizer, no child, no record, no pruning."""
    proxy = proxy_of_team({"paused": True})
    reads: list[Line] = [(f"get {kind}", NOT_FOUND) for kind in CHILD_KINDS]
    api = ScriptedApi(reads, ("apply EnvoyProxy/status", stored_status(proxy)))
    async with reconciling(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        assert await own.reconciler.reconcile(KEY) == DONE
    assert condition(api, "Reconciled")["reason"] == "Paused"
    assert own.writes == [("EnvoyProxy", Outcome.CONFIGURED)]


async def test_a_paused_proxy_where_all_holds_is_ready(tmp_path: Path) -> None:
    """Being paused is no fault."""
    proxy = finalized_proxy({"paused": True})
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with reconciling(api, tmp_path, *family(proxy)) as own:
        assert await own.reconciler.reconcile(KEY) == DONE
    assert condition(api, "Ready")["status"] == "True"


async def test_a_drift_of_a_paused_proxy_is_named_and_left(tmp_path: Path) -> None:
    """The field is in the message, so that somebody who paused it can see what resuming would do."""
    proxy = finalized_proxy({"paused": True})
    drifted = child(SERVICE, proxy)
    drifted["spec"]["type"] = "NodePort"
    known = [(kind, drifted if kind == SERVICE else obj) for kind, obj in family(proxy)]
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with reconciling(api, tmp_path, *known) as own:
        await own.reconciler.reconcile(KEY)
    assert ".spec.type" in condition(api, "Reconciled")["message"]
    assert condition(api, "Registered")["status"] == "True", "the record is as declared all the same"
    assert api.body("apply EnvoyProxy/status")["status"]["address"] == ADDRESS


# --- pruning -------------------------------------------------------------------------------------------------------


async def test_only_our_own_children_that_are_not_declared_are_pruned(tmp_path: Path) -> None:
    """By controller UID and by our own fields in them; what is not ours by both, or is dying already, stays."""
    proxy = finalized_proxy()

    def other(name: str, **changes: Any) -> Known:
        declared = children(proxy, parse_spec(proxy), default_image="envoy:default")[SERVICE]
        kind = {"apiVersion": POD_DISRUPTION_BUDGET.api_version, "kind": POD_DISRUPTION_BUDGET.kind}
        obj = stored(declared | kind, version=20, uid=f"uid-of-{name}")
        obj["metadata"] |= {"name": name} | changes
        return POD_DISRUPTION_BUDGET, obj

    known = [
        *family(proxy),
        other("former-name"),
        other("not-applied", managedFields=[]),
        other("dying", deletionTimestamp="2026-07-01T00:00:00Z"),
        other(
            "of-another",
            ownerReferences=[{"uid": "other", "controller": True, "apiVersion": "v1", "kind": "x", "name": "y"}],
        ),
    ]
    api = ScriptedApi(
        ("delete PodDisruptionBudget", ok({"metadata": {"resourceVersion": "40"}})),
        ("apply EnvoyProxy/status", stored_status(proxy)),
    )
    async with reconciling(api, tmp_path, *known) as own:
        await own.reconciler.reconcile(KEY)
    assert api.body("delete PodDisruptionBudget")["preconditions"] == {"uid": "uid-of-former-name"}


# --- parting -------------------------------------------------------------------------------------------------------

DELETED = "2026-07-01T00:00:00Z"


async def test_a_deleted_proxy_goes_after_its_record(tmp_path: Path) -> None:
    """The record first, by UID, then the finalizer; no child is touched, and no status written."""
    proxy = finalized_proxy(deletionTimestamp=DELETED)
    api = ScriptedApi(
        ("delete ProxyRegistration", ok({"metadata": {"resourceVersion": "40"}})),
        ("apply EnvoyProxy", with_finalizer(proxy)),
    )
    async with reconciling(api, tmp_path, *family(proxy)) as own:
        assert await own.reconciler.reconcile(KEY) == DONE
        assert own.store.get(PROXY_REGISTRATION, Key("edge-system", "proxy-proxy-uid")) is None
    assert api.sent[0].body["preconditions"] == {"uid": "record-of-proxy-uid", "resourceVersion": "20"}


async def test_a_proxy_that_went_with_its_finalizer_is_not_written_to_again(tmp_path: Path) -> None:
    """The response that deletes it has the version before; a reconcile may come before the watch delivers the end."""
    proxy = finalized_proxy(deletionTimestamp=DELETED)
    metadata = {name: value for name, value in proxy["metadata"].items() if name != "finalizers"}
    api = ScriptedApi(
        ("delete ProxyRegistration", ok({"metadata": {"resourceVersion": "40"}})),
        ("apply EnvoyProxy", ok(proxy | {"metadata": metadata})),
    )
    async with reconciling(api, tmp_path, *family(proxy)) as own:
        assert await own.reconciler.reconcile(KEY) == DONE
        assert own.store.get(ENVOY_PROXY, KEY) is None
        assert await own.reconciler.reconcile(KEY) == DONE


async def test_a_proxy_whose_record_cannot_be_removed_stays(tmp_path: Path) -> None:
    """The finalizer holds until the removal is confirmed."""
    proxy = finalized_proxy(deletionTimestamp=DELETED)
    api = ScriptedApi(("delete ProxyRegistration", UNAVAILABLE), ("apply EnvoyProxy/status", stored_status(proxy)))
    async with reconciling(api, tmp_path, *family(proxy)) as own:
        assert isinstance((await own.reconciler.reconcile(KEY)).failure, TransientError)
    assert ("EnvoyProxy", Outcome.DELETED) not in own.writes


# --- former lives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reborn", [False, True])
async def test_a_record_without_a_proxy_is_removed_after_a_live_read(tmp_path: Path, *, reborn: bool) -> None:
    """Only a record whose proxy the API server does not have under that UID any more."""
    proxy = finalized_proxy()
    orphan = record("former-uid")
    api = ScriptedApi(
        *([("apply EnvoyProxy/status", stored_status(proxy))] if reborn else []),
        ("get EnvoyProxy", ok(proxy) if reborn else NOT_FOUND),
        ("delete ProxyRegistration", ok({"metadata": {"resourceVersion": "40"}})),
    )
    known = family(proxy) if reborn else []
    async with reconciling(api, tmp_path, *known, (PROXY_REGISTRATION, orphan)) as own:
        assert (await own.reconciler.reconcile(KEY)).failure is None
    preconditions = {"uid": "record-of-former-uid", "resourceVersion": "20"}
    assert api.body("delete ProxyRegistration")["preconditions"] == preconditions, "it may name more by now"


async def test_a_record_of_a_proxy_that_the_store_does_not_know_yet_stays(tmp_path: Path) -> None:
    """A store that is behind is no proof of death."""
    api = ScriptedApi(("get EnvoyProxy", ok(finalized_proxy())))
    async with reconciling(api, tmp_path, (PROXY_REGISTRATION, record())) as own:
        assert (await own.reconciler.reconcile(KEY)).failure is None


# --- the record's fence --------------------------------------------------------------------------------------------


async def test_a_newer_generation_replaces_the_record_pinned_to_what_was_read(tmp_path: Path) -> None:
    """A compare-and-set: the UID and resourceVersion of the record that was looked at."""
    proxy = finalized_proxy(generation=2)
    known = [(kind, record() if kind == PROXY_REGISTRATION else obj) for kind, obj in family(proxy)]
    api = ScriptedApi(("apply ProxyRegistration", repaired()), ("apply EnvoyProxy/status", stored_status(proxy)))
    async with reconciling(api, tmp_path, *known) as own:
        assert await own.reconciler.reconcile(KEY) == DONE
    metadata = api.body("apply ProxyRegistration")["metadata"]
    assert (metadata["uid"], metadata["resourceVersion"]) == ("record-of-proxy-uid", "20")
    assert api.body("apply ProxyRegistration")["spec"]["generation"] == 2


async def test_an_older_generation_never_replaces_a_newer_record(tmp_path: Path) -> None:
    """A stale round leaves it alone, whether it knows of it or learns of it by a conflict."""
    proxy = finalized_proxy()
    newer = record(generation=2)
    known = [each for each in family(proxy) if each[0] != PROXY_REGISTRATION]
    api = ScriptedApi(
        ("apply ProxyRegistration", CONFLICT),
        ("get ProxyRegistration", ok(newer)),
        ("apply EnvoyProxy/status", stored_status(proxy)),
    )
    async with reconciling(api, tmp_path, *known) as own:
        await own.reconciler.reconcile(KEY)
    assert condition(api, "Registered")["reason"] == "RecordConflict"
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with reconciling(api, tmp_path, *known, (PROXY_REGISTRATION, newer)) as own:
        await own.reconciler.reconcile(KEY)
    assert condition(api, "Registered")["reason"] == "RecordConflict"


async def test_a_record_that_names_another_uid_is_not_touched(tmp_path: Path) -> None:
    """Even under the very name that ours would have."""
    proxy = finalized_proxy()
    theirs = record()
    theirs["spec"] = deepcopy(theirs["spec"])
    theirs["spec"]["proxy"]["uid"] = "other-uid"
    theirs["spec"]["proxy"]["name"] = "other"
    known = [(kind, theirs if kind == PROXY_REGISTRATION else obj) for kind, obj in family(proxy)]
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with reconciling(api, tmp_path, *known) as own:
        await own.reconciler.reconcile(KEY)
    assert condition(api, "Registered")["reason"] == "RecordConflict"
    gone = finalized_proxy(deletionTimestamp=DELETED)
    api = ScriptedApi(("apply EnvoyProxy", with_finalizer(gone)))
    async with reconciling(api, tmp_path, (ENVOY_PROXY, gone), (PROXY_REGISTRATION, theirs)) as own:
        assert await own.reconciler.reconcile(KEY) == DONE
