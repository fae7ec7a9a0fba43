"""Runs scenarios with faults, many at a time, and checks every run.

A *run* is one scenario in a namespace of its own with one fault at one point. Runs share one control plane and one
operator at a time: the operator serves all namespaces, and the plan has a fault for each of them. So the operator
always has other work as well, as in a cluster, and hundreds of runs cost minutes. Which runs there are is decided in
``catalogue``; what must hold for each is in ``checks``.
"""

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from operator_app.api.kinds import (
    ALL_CHILD_KINDS,
    CONFIG_MAP,
    ENVOY_PROXY,
    POD,
    SERVICE,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.desired import child_key
from operator_app.settings import Settings
from tests.e2e.controlplane import AuditEntry, AuditLog
from tests.e2e.controlplane.audit import Mark
from tests.e2e.failover import epochs_out_of_order, out_of_order
from tests.e2e.faults import checks
from tests.e2e.faults.observer import KINDS, REGISTRY_KINDS, Observer, View, about
from tests.e2e.faults.plan import ON_THE_WIRE, SECOND, Fault, FaultKind, Plan, Point, points_in_all
from tests.e2e.faults.proxy import FaultProxy
from tests.e2e.faults.scenarios import FOREIGN_ANNOTATION, NAME, Scenario, hostnames
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, declared_children, not_as_declared, serve

SHARDS: Final[int] = Settings.model_fields["shards"].default

SETTLED_S: Final = 1.5
"""A run is over when nothing is wrong and nothing has changed for this long; counters settle within 1 s."""

CONVERGE_TIMEOUT_S: Final = 180.0
"""Nothing waits for so long but what has failed: a batch takes half a minute, and several times that beside a load."""
INJECT_TIMEOUT_S: Final = 30.0
KILL_TIMEOUT_S: Final = 90.0
"""Longer than for other faults: the operator has to start first."""
NOBODYS_ADDRESS: Final = "192.0.2.1"
"""Of a Pod that serves as far as the API server knows (RFC 5737)."""

POLL_S: Final = 0.05

BOUNDS: Final = ("--request-timeout-s=20", "--write-timeout-s=20")
"""How long a request may hang in a campaign. On a busy machine answers take seconds without any fault: a request that
is given up for that leaves a write of unknown fate, whose repetition would count as avoidable."""

REPEATING: Final = frozenset({FaultKind.LOST_ANSWER, FaultKind.HANG})
"""Faults after which the operator can't know that its write was carried out, and may ask again."""


@dataclass(eq=False, slots=True)
class Run:
    """One scenario under one fault, or under none while points are recorded."""

    scenario: Scenario
    kind: FaultKind | None = None
    point: Point | None = None
    then: FaultKind | None = None
    namespace: str = field(default_factory=lambda: f"f-{uuid.uuid4().hex[:10]}")
    uid: str = ""
    foreign: View = field(default_factory=dict)
    is_awaiting_recreation: bool = False
    rival_edits_left: int = 0
    acted_mono: float = 0.0
    is_injected: bool = False
    settled_at: datetime | None = None
    problems: list[str] = field(default_factory=list)
    versions: frozenset[tuple[object, str]] = frozenset()
    changed_mono: float = 0.0

    @property
    def fault(self) -> Fault:
        """The run's fault; a list or a watch as such is about no namespace."""
        assert self.kind is not None
        assert self.point is not None
        is_about_none = self.point.verb in ("list", "watch")
        return Fault(self.namespace, self.kind, self.point, "" if is_about_none else self.namespace, self.then)

    @property
    def fault_ids(self) -> set[str]:
        """What carriers report once everything has gone wrong that is to."""
        return {self.namespace} if self.then is None else {self.namespace, self.namespace + SECOND}

    @property
    def may_repeat(self) -> bool:
        """Whether one of its faults leaves the fate of a write unknown."""
        return not REPEATING.isdisjoint((self.kind, self.then))

    @property
    def has_survived(self) -> bool:
        """Whether the run settled and nothing was wrong then or later."""
        return self.settled_at is not None and not self.problems

    def __str__(self) -> str:
        then = f", then {self.then}" if self.then is not None else ""
        return f"{self.scenario.name}, {self.kind} at {self.point}{then}, {self.namespace}"


class Campaign:
    """Everything that runs need, for as long as the block lasts. Not safe for threads."""

    def __init__(
        self,
        admin: Kube,
        kubeconfig: Path,
        audit: AuditLog,
        directory: Path,
    ) -> None:
        self._admin = admin
        self._audit = audit
        self._directory = directory
        self._observer = Observer(admin)
        self._proxy = FaultProxy(kubeconfig, directory)
        self._operator = OperatorProcess(self._proxy.kubeconfig, directory / "operator.log")
        self._notices: list[Mapping[str, Any]] = []
        self._starts = 0
        self._since: Mark | None = None
        self._runs: list[Run] = []
        self.complaints: list[str] = []
        """What was wrong with the operators themselves: crashed rounds, avoidable writes, writes without a Lease."""
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            resources.enter_context(self._observer)
            resources.enter_context(self._proxy)
            resources.callback(self._operator.kill)
            self._since = self._audit.mark()
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @property
    def log(self) -> str:
        """The log of the latest operator."""
        return self._operator.log_text()

    def start_operator(self, plan: Plan = Plan(), *flags: str, wait: bool = True) -> None:  # noqa: B008 - immutable
        """Stop the operator that runs, if one does, and start another one with a plan."""
        self.stop()
        self._starts += 1
        self._notices.clear()
        inside = Plan(tuple(each for each in plan.faults if each.kind not in ON_THE_WIRE), plan.recorded)
        outside = Plan(tuple(each for each in plan.faults if each.kind in ON_THE_WIRE))
        plan_file = self._directory / f"plan-{self._starts}.json"
        inside.write(plan_file)
        self._proxy.use(outside, self._notices.append)
        module = ("tests.e2e.faults.operator", str(plan_file), str(self._notices_file), "run")
        self._operator.start(*BOUNDS, *flags, module=module, wait=wait)

    def stop(self) -> None:
        """Stop the operator, and record crashed rounds and writes that changed nothing as complaints."""
        if self._operator.is_running:
            avoidable = self._operator.metric("operator_app_writes_total", outcome="unchanged")
            if avoidable:
                self.complaints.append(f"operator {self._starts} counts {avoidable:g} avoidable writes")
        self._operator.stop()
        self._note_crashes()

    def _note_crashes(self) -> None:
        if self._starts:
            crashes = [line for line in self._operator.log() if line.get("event") == "reconcile_crashed"]
            self.complaints += [f"operator {self._starts}: {line.get('exception')}" for line in crashes]

    def notices(self) -> list[Mapping[str, Any]]:
        """What both carriers have reported since the latest start."""
        inside = self._notices_file.read_bytes().splitlines() if self._notices_file.exists() else []
        return [*map(json.loads, inside), *self._notices]

    @property
    def _notices_file(self) -> Path:
        return self._directory / f"notices-{self._starts}.jsonl"

    def prepare(self, runs: Sequence[Run]) -> None:
        """Create the namespaces, foreign objects in them, and converged proxies where the scenario wants one.

        An operator must be running whose plan is not about these namespaces. Runs that are prepared are left out.
        """
        runs = [run for run in runs if not run.foreign]
        self._runs += runs
        for run in runs:
            self._admin.create_namespace(run.namespace)
            for kind, foreign in foreign_objects(run.scenario, run.namespace):
                live = self._admin.create(kind, foreign)
                run.foreign[kind, Key(run.namespace, live["metadata"]["name"])] = live
            if run.scenario.is_prepared:
                run.uid = self._admin.create(ENVOY_PROXY, run.scenario.proxy(run.namespace))["metadata"]["uid"]
                run.acted_mono = time.monotonic()
        prepared = [run for run in runs if run.scenario.is_prepared]
        self._wait_prepared(prepared, _PREPARED)
        serving = [run for run in prepared if run.scenario.has_serving_pod]
        for run in serving:
            serve(self._admin, key_of(self._pod_of(run)), NOBODYS_ADDRESS)
        self._wait_prepared(serving, replace(_PREPARED, has_serving_pod=True))
        for run in prepared:
            for kind in run.scenario.children_at_start:
                patch = {"metadata": {"annotations": {FOREIGN_ANNOTATION: "yes"}}}
                self._admin.patch(kind, child_key(Key(run.namespace, NAME)), patch, field_manager="stranger")

    def _wait_prepared(self, runs: Iterable[Run], scenario: Scenario) -> None:
        fresh = [Run(scenario, namespace=each.namespace, uid=each.uid, foreign=each.foreign) for each in runs]
        self._wait(fresh, CONVERGE_TIMEOUT_S)
        unprepared = [run for run in fresh if not run.has_survived]
        assert not unprepared, f"no undisturbed start for {unprepared[0]}: {unprepared[0].problems}\n{self.log}"

    def _pod_of(self, run: Run) -> Object:
        """The Pod of a run's proxy, once its ReplicaSet has made it."""
        return wait_until(lambda: next((each for each in self._pods(run)), None), what=f"a Pod in {run.namespace}")

    def _pods(self, run: Run) -> list[Object]:
        return [obj for (kind, _), obj in self._observer.view(run.namespace).items() if kind == POD]

    def act(self, run: Run) -> None:
        """Perform the action of the scenario."""
        run.scenario.act(self._admin, run.namespace)
        run.acted_mono = run.changed_mono = time.monotonic()
        run.is_awaiting_recreation = run.scenario.is_recreated
        run.rival_edits_left = len(run.scenario.rival_edits)
        if not run.scenario.is_prepared:
            run.uid = self._admin.get(ENVOY_PROXY, Key(run.namespace, NAME))["metadata"]["uid"]

    def wait_settled(self, runs: Iterable[Run], timeout_s: float = CONVERGE_TIMEOUT_S) -> None:
        """Wait until every run has settled, or for ``timeout_s``; what is wrong then stays in its ``problems``."""
        runs = list(runs)
        self._wait(runs, timeout_s)
        self.note_injected(runs)

    def note_injected(self, runs: Iterable[Run]) -> None:
        """Mark the runs whose fault was injected since the latest start."""
        injected = {each["injected"] for each in self.notices() if "injected" in each}
        for run in runs:
            run.is_injected |= run.fault_ids <= injected

    def wait_injected(self, runs: Sequence[Run], timeout_s: float = INJECT_TIMEOUT_S) -> None:
        """Wait until the faults of all runs were injected, or for ``timeout_s``."""
        deadline_mono = time.monotonic() + timeout_s
        while time.monotonic() < deadline_mono and not all(run.is_injected for run in runs):
            self._recreate(runs)
            time.sleep(POLL_S)
            self.note_injected(runs)

    def wait_killed(self, runs: Sequence[Run], timeout_s: float = KILL_TIMEOUT_S) -> None:
        """Wait until the plan has killed the operator; one that still runs after ``timeout_s`` is killed from here."""
        deadline_mono = time.monotonic() + timeout_s
        while self._operator.is_running and time.monotonic() < deadline_mono:
            self._recreate(runs)
            time.sleep(POLL_S)
        self._operator.kill()
        self._note_crashes()
        self.note_injected(runs)

    def wait(self, seconds: float, runs: Sequence[Run]) -> None:
        """Wait; proxies of ``runs`` that are to be created again meanwhile are."""
        deadline_mono = time.monotonic() + seconds
        while time.monotonic() < deadline_mono:
            self._recreate(runs)
            time.sleep(POLL_S)

    def reset_lists(self) -> None:
        """The lists that the next operator gets are from now on the old ones."""
        self._proxy.reset_lists()

    def record(self, scenarios: Iterable[Scenario], *, times: int) -> dict[str, tuple[Point, ...]]:
        """The points of undisturbed runs, by the scenario's name: those that all of ``times`` runs reached."""
        runs = [Run(scenario) for scenario in scenarios for _ in range(times)]
        self.start_operator()
        self.prepare(runs)
        self.start_operator(Plan(recorded=tuple(run.namespace for run in runs)))
        for run in runs:
            self.act(run)
        self.wait_settled(runs)
        failed = [run for run in runs if not run.has_survived]
        assert not failed, f"an undisturbed run failed: {failed[0]}: {failed[0].problems}\n{self.log}"
        reached: defaultdict[str, list[Point]] = defaultdict(list)
        for each in self.notices():
            reached[each["about"]].append(Point(*each["point"]))
        by_scenario: defaultdict[str, list[list[Point]]] = defaultdict(list)
        for run in runs:
            by_scenario[run.scenario.name].append(reached[run.namespace])
        return {name: points_in_all(recordings) for name, recordings in by_scenario.items()}

    def check_all(self) -> None:
        """Check every run once more, by new lists and by the whole audit log; call it after the quiet time."""
        views = self._listed()
        writes: defaultdict[str, list[AuditEntry]] = defaultdict(list)
        owners = {f"proxy-{uid}": run.namespace for run in self._runs for uid in self._observer.uids(*_proxy_of(run))}
        owners |= {name: run.namespace for run in self._runs for name in hostnames(run.namespace)}
        assert self._since is not None
        written = self._audit.writes(OPERATOR_USER, self._since)
        for each in written:
            writes[_about(each, owners)].append(each)
        # The version in the response to a release may be older than the release, so it does not order it.
        datable = [each for each in written if not checks.is_release(each)]
        self.complaints += out_of_order(datable, SHARDS, [run.namespace for run in self._runs])
        self.complaints += epochs_out_of_order(written, SHARDS)
        settled = [run for run in self._runs if run.settled_at is not None]
        found = {
            run.namespace: self._final_problems(run, views[run.namespace], writes[run.namespace]) for run in settled
        }
        if any(found.values()):
            # Deployments without a node pass their deadline at their own time, and the status follows.
            time.sleep(SETTLED_S)
            views = self._listed()
        for run in settled:
            if found[run.namespace]:
                run.problems += self._final_problems(run, views[run.namespace], writes[run.namespace])

    def _listed(self) -> Mapping[str, View]:
        """Everything there is, by the namespace that it is about."""
        views: defaultdict[str, View] = defaultdict(dict)
        for kind in KINDS:
            for obj in self._admin.list(kind):
                views[about(kind, obj)][kind, key_of(obj)] = obj
        return views

    def undisturbed_failures(self) -> list[str]:
        """Runs that went wrong although their fault never struck; call it after ``check_all``."""
        return [
            f"without any fault: {run}: {'; '.join(run.problems) or 'it never settled'}"
            for run in self._runs
            if run.kind is not None and not run.is_injected and run.acted_mono and not run.has_survived
        ]

    def _final_problems(self, run: Run, view: View, writes: Sequence[AuditEntry]) -> list[str]:
        key = Key(run.namespace, NAME)
        uids = {kind.kind: self._observer.uids(kind, child_key(key)) for kind in ALL_CHILD_KINDS}
        uids[ENVOY_PROXY.kind] = self._observer.uids(ENVOY_PROXY, key)
        uids |= {kind.kind: self._observer.uids_about(kind, run.namespace) for kind in REGISTRY_KINDS}
        elsewhere = {*hostnames(run.namespace), *(f"proxy-{uid}" for uid in uids[ENVOY_PROXY.kind])}
        assert run.settled_at is not None
        return [
            *self._inexact(run, view),
            *checks.problems(run.scenario, run.namespace, view, run.foreign, run.uid),
            *checks.uid_problems(run.scenario, uids),
            *self._observer.bad_transitions(run.namespace),
            *checks.write_problems(
                writes,
                names=frozenset({NAME, child_key(key).name} | elsewhere),
                pods=frozenset(each["metadata"]["name"] for each in self._pods(run) if run.scenario.has_serving_pod),
                may_repeat=run.may_repeat,
            ),
            *checks.late_writes(writes, run.settled_at, may_emit_events=_may_emit_events(run)),
        ]

    def _inexact(self, run: Run, view: View) -> Iterator[str]:
        """What an apply of the declaration would still change, by the API server's dry run: unreleased fields, too."""
        proxy = view.get(_proxy_of(run))
        if proxy is None or run.scenario.ends_gone:
            return
        known = {kind: view.get((kind, child_key(key_of(proxy)))) for kind in ALL_CHILD_KINDS}
        for kind, child in declared_children(proxy, known).items():
            address = kind, key_of(child)
            paths = not_as_declared(self._admin, kind, child) if address in view.keys() - run.foreign.keys() else ()
            yield from (f"{kind}{path} is not exactly as declared" for path in paths)

    def _wait(self, runs: Sequence[Run], timeout_s: float) -> None:
        deadline_mono = time.monotonic() + timeout_s
        left = [run for run in runs if run.settled_at is None]
        while left:
            self._recreate(left)
            for run in left:
                self._check(run)
            left = [run for run in left if run.settled_at is None]
            if time.monotonic() > deadline_mono:
                return
            time.sleep(POLL_S)

    def _check(self, run: Run) -> None:
        """Check a run, and mark it as settled once nothing is wrong and nothing has changed for ``SETTLED_S``."""
        view = self._observer.view(run.namespace)
        versions = frozenset((address, obj["metadata"]["resourceVersion"]) for address, obj in view.items())
        if versions != run.versions or run.changed_mono == 0.0:
            run.versions, run.changed_mono = versions, time.monotonic()
            run.problems = list(checks.problems(run.scenario, run.namespace, view, run.foreign, run.uid))
        unchanged_s = time.monotonic() - max(run.changed_mono, run.acted_mono)
        is_over = not run.is_awaiting_recreation and not run.rival_edits_left
        if not run.problems and is_over and unchanged_s >= SETTLED_S:
            run.settled_at = datetime.now(UTC)

    def _recreate(self, runs: Iterable[Run]) -> None:
        """Do what scenarios want done later: create a proxy again, and let a rival undo each repair once."""
        for run in runs:
            if run.rival_edits_left:
                self._let_rival_write(run)
            if run.is_awaiting_recreation and (ENVOY_PROXY, Key(run.namespace, NAME)) not in self._observer.view(
                run.namespace
            ):
                run.uid = self._admin.create(ENVOY_PROXY, run.scenario.proxy(run.namespace))["metadata"]["uid"]
                run.is_awaiting_recreation = False
                run.acted_mono = time.monotonic()

    def _let_rival_write(self, run: Run) -> None:
        """Make the next edit of the scenario's rival, once the operator has repaired what came before it."""
        if list(checks.child_problems(run.namespace, self._observer.view(run.namespace))):
            return
        kind, edit = run.scenario.rival_edits[-run.rival_edits_left]
        key = child_key(Key(run.namespace, NAME))
        self._admin.patch(kind, key, edit, patch_type="json", field_manager="rival")
        run.rival_edits_left -= 1
        run.acted_mono = time.monotonic()
        run.changed_mono = 0.0


_PREPARED: Final = Scenario("preparation", lambda _admin, _namespace: None, is_prepared=False)


def _may_emit_events(run: Run) -> bool:
    """Whether a run causes Events, which may be written late: of repairs, and of a removal that can't be done yet."""
    return run.scenario.is_repair or run.point in [Point("delete", kind.kind) for kind in REGISTRY_KINDS]


_REGISTRY_PLURALS: Final = frozenset(kind.plural for kind in REGISTRY_KINDS)


def _about(write: AuditEntry, owners: Mapping[str, str]) -> str:
    """The namespace that a write is about; of an unknown record or claim it is the one that its content names."""
    if write.resource not in _REGISTRY_PLURALS:
        return write.namespace
    named: str = (write.request or {}).get("spec", {}).get("proxy", {}).get("namespace", "")
    return owners.get(write.name, named)


def _proxy_of(run: Run) -> tuple[Any, Key]:
    return ENVOY_PROXY, Key(run.namespace, NAME)


def foreign_objects(scenario: Scenario, namespace: str) -> list[tuple[Kind, Object]]:
    """Objects of others in a run's namespace; in some scenarios one has a child's name."""
    metadata = {"namespace": namespace, "name": "bystander", "labels": {"app.kubernetes.io/name": "envoy"}}
    service = {"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"name": "keep", "port": 80}]}}
    found = [
        (CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"keep": "me"}}),
        (SERVICE, service | {"metadata": metadata}),
    ]
    if scenario.has_stranger:
        found.append((SERVICE, service | {"metadata": metadata | {"name": child_key(Key(namespace, NAME)).name}}))
    return found
