"""Faults have their effect, since one that does not happen proves nothing; ``make faults`` tries every point.

Tested are the two carriers, and faults of which a campaign can't tell enough. A fixed selection of runs of the campaign
is in ``test_selected_requests`` and ``test_selected_events``.
"""

import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from operator_app.api.kinds import CONFIG_MAP, ENVOY_PROXY, LEASE, Key, Object
from operator_app.errors import (
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    OperatorError,
    ThrottledError,
    TransientError,
    UndecodableError,
)
from operator_app.kube.client import Cluster
from operator_app.kube.responses import Page, WatchEvent
from tests.e2e.controlplane import AuditLog
from tests.e2e.failover import epochs_out_of_order, out_of_order
from tests.e2e.faults.campaign import SHARDS, Campaign, Run
from tests.e2e.faults.injector import Injector
from tests.e2e.faults.plan import Fault, FaultKind, Plan, Point
from tests.e2e.faults.proxy import FaultProxy
from tests.e2e.faults.responses import DELAY_S, RETRY_AFTER_S
from tests.e2e.faults.scenarios import SCENARIOS
from tests.e2e.faults.transport import FaultyTransport
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, a_proxy, wait_reconciled

pytestmark = pytest.mark.anyio

Carrier = Callable[[Plan], AbstractAsyncContextManager[Cluster]]

DELETION: Final = next(each for each in SCENARIOS if each.ends_gone)
QUIET_S: Final = 3.0
IDLE_S: Final = 1.0
HANGS_S: Final = 8.0
"""The bound of a write; an answer that is only delayed comes earlier."""

LEASE_FAULTS: Final = (
    (FaultKind.OLD_LIST, "list"),
    (FaultKind.GONE, "list"),
    (FaultKind.LOST_ANSWER, "watch"),
    (FaultKind.GONE, "watch"),
)


@pytest.fixture(params=["transport", "proxy"])
def carrier(request: pytest.FixtureRequest, operator_kubeconfig: Path, tmp_path: Path) -> Carrier:
    """A way to be connected as the operator while a plan is carried out."""

    @asynccontextmanager
    async def inside(plan: Plan) -> AsyncGenerator[Cluster]:
        wrapper = partial(FaultyTransport, injector=Injector(plan, lambda _: None))
        async with Cluster.connect(
            user_agent="test", kubeconfig=operator_kubeconfig, transport_wrapper=wrapper, write_timeout_s=HANGS_S
        ) as cluster:
            yield cluster

    @asynccontextmanager
    async def outside(plan: Plan) -> AsyncGenerator[Cluster]:
        proxy = await anyio.to_thread.run_sync(FaultProxy(operator_kubeconfig, tmp_path).__enter__)
        try:
            proxy.use(plan, lambda _: None)
            async with Cluster.connect(
                user_agent="test", kubeconfig=proxy.kubeconfig, write_timeout_s=HANGS_S
            ) as cluster:
                yield cluster
        finally:
            await anyio.to_thread.run_sync(proxy.__exit__, None, None, None)

    return inside if request.param == "transport" else outside


def a_config_map(namespace: str, text: str = "one") -> Object:
    """An object that the operator's identity may write."""
    metadata = {"namespace": namespace, "name": "thing"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"text": text}}


def plan_of(kind: FaultKind, point: Point, about: str = "") -> Plan:
    """A plan of one fault."""
    return Plan((Fault("it", kind, point, about),))


@pytest.mark.parametrize(
    ("kind", "error", "is_done"),
    [
        (FaultKind.RESET, TransientError, False),
        (FaultKind.LOST_ANSWER, TransientError, True),
        (FaultKind.DELAY, None, True),
        (FaultKind.HANG, TransientError, True),
        (FaultKind.UNAUTHORIZED, ForbiddenError, False),
        (FaultKind.FORBIDDEN, ForbiddenError, False),
        (FaultKind.NOT_FOUND, NotFoundError, False),
        (FaultKind.CONFLICT, ConflictError, False),
        (FaultKind.INVALID, InvalidError, False),
        (FaultKind.THROTTLED, ThrottledError, False),
        (FaultKind.BROKEN, TransientError, False),
        (FaultKind.UNAVAILABLE, TransientError, False),
    ],
)
async def test_a_fault_of_a_write_happens_once_before_or_after_the_write(
    carrier: Carrier, namespace: str, kind: FaultKind, error: type[OperatorError] | None, *, is_done: bool
) -> None:
    """The n-th matching write, and only that one, fails as the plan says, before or after it is stored."""
    begun_mono = anyio.current_time()
    async with carrier(plan_of(kind, Point("apply", "ConfigMap", n=2), namespace)) as cluster:
        await cluster.apply(CONFIG_MAP, a_config_map(namespace), force=False)
        failed: OperatorError | None = None
        try:
            await cluster.apply(CONFIG_MAP, a_config_map(namespace, "two"), force=False)
        except OperatorError as caught:
            failed = caught
        live = await cluster.get(CONFIG_MAP, Key(namespace, "thing"))
        await cluster.apply(CONFIG_MAP, a_config_map(namespace, "three"), force=False)

    assert type(failed) is (error or type(None))
    assert live is not None
    assert live["data"] == {"text": "two" if is_done else "one"}
    if isinstance(failed, ThrottledError):
        assert failed.retry_after_s == RETRY_AFTER_S
    if kind is FaultKind.DELAY:
        assert anyio.current_time() - begun_mono >= 2 * DELAY_S


async def test_a_second_fault_strikes_at_the_next_request(carrier: Carrier, namespace: str) -> None:
    """Whatever that request is about: it is the first one of the recovery, and the one after it is spared."""
    first = Fault("it", FaultKind.LOST_ANSWER, Point("apply", "ConfigMap"), namespace, FaultKind.RESET)
    async with carrier(Plan((first,))) as cluster:
        with pytest.raises(TransientError):
            await cluster.apply(CONFIG_MAP, a_config_map(namespace), force=False)
        with pytest.raises(TransientError):
            await cluster.get(CONFIG_MAP, Key(namespace, "thing"))
        assert await cluster.get(CONFIG_MAP, Key(namespace, "thing")) is not None


async def listed(cluster: Cluster, namespace: str) -> Page:
    """The only page of the ConfigMaps that have our label."""
    async with aclosing(cluster.list(CONFIG_MAP, namespace=namespace)) as pages:
        return await anext(pages)


async def test_a_list_can_be_refused_as_gone_and_answered_with_old_data(
    carrier: Carrier, admin: Kube, namespace: str
) -> None:
    """410 comes once; an old list is the first one of this client, complete and with its resourceVersion."""
    gone = Fault("gone", FaultKind.GONE, Point("list", "ConfigMap", n=2))
    old = Fault("old", FaultKind.OLD_LIST, Point("list", "ConfigMap", n=3))
    async with carrier(Plan((gone, old))) as cluster:
        first = await listed(cluster, namespace)
        await anyio.to_thread.run_sync(admin.create, CONFIG_MAP, a_config_map(namespace))
        with pytest.raises(GoneError):
            await listed(cluster, namespace)
        assert await listed(cluster, namespace) == first
        now = await listed(cluster, namespace)
    assert len(now.items) == len(first.items) + 1


@pytest.mark.parametrize(
    ("kind", "texts", "errors"),
    [
        (FaultKind.HIDE, ["one", "three"], ()),
        (FaultKind.REPLAY, ["one", "two", "one", "two", "three"], ()),
        (FaultKind.CUT, ["one"], (UndecodableError, TransientError)),
        (FaultKind.HALF_OPEN, ["one"], (TransientError,)),
        (FaultKind.GONE_IN_STREAM, ["one"], (GoneError,)),
    ],
)
async def test_a_fault_of_an_event_happens(
    carrier: Carrier,
    admin: Kube,
    namespace: str,
    kind: FaultKind,
    texts: list[str],
    errors: tuple[type[OperatorError], ...],
) -> None:
    """The second event about the namespace is hidden, repeated with all before it, or the last one of the stream."""
    seen: list[WatchEvent] = []
    failed: OperatorError | None = None
    # Every namespace gets this one by itself, a moment after it was made; its event must not be one of those counted.
    admin.wait_until(CONFIG_MAP, Key(namespace, "kube-root-ca.crt"), bool)
    async with carrier(plan_of(kind, Point("event", "ConfigMap", n=2), namespace)) as cluster:
        version = (await listed(cluster, namespace)).resource_version
        stored = await anyio.to_thread.run_sync(admin.create, CONFIG_MAP, a_config_map(namespace))
        for text in ("two", "three"):
            change: Any = {"data": {"text": text}}
            await anyio.to_thread.run_sync(admin.patch, CONFIG_MAP, Key(namespace, stored["metadata"]["name"]), change)
        try:
            async with cluster.watch(
                CONFIG_MAP, resource_version=version, timeout_s=1, idle_timeout_s=3 * IDLE_S, namespace=namespace
            ) as events:
                async for event in events:
                    if event.object["metadata"].get("name") == "thing":
                        seen.append(event)  # noqa: PERF401 - what was seen before an error counts
        except OperatorError as caught:
            failed = caught

    assert type(failed) in (errors or (type(None),))
    assert [event.object["data"]["text"] for event in seen] == texts


def test_a_deletion_that_no_watch_delivers_ends_the_writes(campaign: Campaign) -> None:
    """After a deletion whose event was hidden, the first refused write ends the writes: that takes no resync."""
    runs = [
        Run(DELETION, FaultKind.HIDE, Point("event", "EnvoyProxy", n=2)),
        Run(DELETION, FaultKind.HIDE, Point("event", "ProxyRegistration")),
        Run(DELETION, FaultKind.HIDE, Point("event", "HostnameClaim")),
    ]
    with campaign:
        campaign.start_operator()
        campaign.prepare(runs)
        campaign.start_operator(Plan(tuple(run.fault for run in runs)))
        for run in runs:
            campaign.act(run)
        campaign.wait_settled(runs)
        campaign.wait(QUIET_S, runs)
        campaign.check_all()
    assert all(run.is_injected for run in runs)
    assert {str(run): run.problems for run in runs if not run.has_survived} == {}


@pytest.mark.timeout(240)
def test_wrong_reads_of_leases_make_no_second_holder(
    admin: Kube, namespace: str, operator_kubeconfig: Path, audit: AuditLog, tmp_path: Path
) -> None:
    """A replica that starts with such a fault, or an old list that names itself, writes only after the other stops."""
    key, since, replicas = Key(namespace, "web"), audit.mark(), itertools.count(1)
    notices: list[object] = []

    def edit_is_served() -> None:
        admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": next(replicas)}})
        wait_reconciled(admin, key)

    with FaultProxy(operator_kubeconfig, tmp_path) as proxy, ExitStack() as processes:
        faulty, other = (
            OperatorProcess(kubeconfig, tmp_path / f"{number}.log")
            for number, kubeconfig in enumerate((proxy.kubeconfig, operator_kubeconfig))
        )
        for each in (faulty, other):
            processes.callback(each.kill)
            each.start()
        admin.create(ENVOY_PROXY, a_proxy(*key))
        wait_reconciled(admin, key)
        faulty.kill()
        proxy.reset_lists()
        faulty.start()  # what it lists now, and gets again later, names it as the holder
        edit_is_served()
        for kind, verb in LEASE_FAULTS:
            notices.clear()
            faulty.stop()
            edit_is_served()
            proxy.use(plan_of(kind, Point(verb, LEASE.kind)), notices.append)
            faulty.start()
            wait_until(lambda: bool(notices), what=f"{kind} at {verb}")
            edit_is_served()
            other.stop()
            edit_is_served()
            other.start()

    writes = audit.writes(OPERATOR_USER, since)
    assert len({each.user_agent for each in writes}) == 2
    assert out_of_order(writes, SHARDS, [namespace]) == []
    assert epochs_out_of_order(writes, SHARDS) == []
