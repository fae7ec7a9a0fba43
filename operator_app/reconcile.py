"""One reconcile of one EnvoyProxy: from what is known to what is declared.

The steps, in order: parse the spec, prune children that are not declared any more, add the finalizer, apply every
child, register the proxy outside, write the status. Each step may be repeated, and a crash behind any single write
leaves what the next reconcile completes: names are derived, creates are atomic, the finalizer precedes the first
outside write, and no step depends on memory of an earlier one.

A reconcile never waits and never retries; its result says how it ended, and the workqueue decides when to try again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import structlog
from pydantic import ValidationError

from operator_app.api.kinds import (
    ALL_CHILD_KINDS,
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    OPERATOR_NAMESPACE,
    OPTIONAL_CHILD_KINDS,
    POD,
    SERVICE,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.api.models import EnvoyProxySpec, parse_spec, sentence
from operator_app.apply import (
    CONTENDED,
    NAME_CONFLICT,
    POLICY_RETRY_S,
    Action,
    Applier,
    Plan,
    Result,
    child_check,
    skipped,
)
from operator_app.cleanup import Cleanup
from operator_app.dataplane.plane import DataPlane
from operator_app.desired import child_key, children
from operator_app.envoy.files import Files, rendered
from operator_app.errors import ConflictError, OperatorError, PolicyError, TerminalError, TransientError
from operator_app.finalizer import Finalizer, has_finalizer
from operator_app.kube.client import Cluster
from operator_app.kube.events import Occurrence
from operator_app.kube.store import Store, version_of
from operator_app.pods import trouble
from operator_app.registration.addresses import Addresses
from operator_app.registration.registrar import Registrar
from operator_app.registration.registry import Port, Record, Registration
from operator_app.registration.withdrawal import State
from operator_app.results import Outcome, Problem, Programming, ReconcileResult
from operator_app.ssa.fields import fields_of
from operator_app.status import (
    RECONCILED,
    REGISTERED,
    Observation,
    StatusWriter,
    condition_of,
    next_status,
    observed_current_generation,
)
from operator_app.tenant_policy import TenantPolicy

log = structlog.get_logger(__name__)

PERSISTENT_AFTER: Final = 3
"""After so many failed reconciles in a row, a transient error is told in the status."""

LARGE_SPEC_BYTES: Final = 16_384
"""A spec whose JSON is larger is parsed and rendered in a thread; smaller ones take some milliseconds."""

_FINALIZER_CONTENDED: Final = Problem(
    CONTENDED, "another writer keeps removing the finalizer; the record waits until it stays", ends_with_event=True
)
_NOT_WHILE_PAUSED: Final = Problem("Paused", "spec.paused is set; the record waits", ends_with_event=True)

ORPHANED_RECORDS_RETRY_S: Final = 60.0
"""Seconds until an existing proxy tries again to remove the records of a previous incarnation of its name."""

_PREREQUISITES: Final = {DEPLOYMENT: CONFIG_MAP}
"""Which child waits for which other one: a Deployment must not mount a foreign ConfigMap, nor one of another
configuration than it declares."""


class Reconciler:
    """Reconciles proxies. One instance for the operator; different proxies may be reconciled at the same time.

    ``report`` is called with the result of every child, ``record_event`` with what becomes an Event. A proxy whose
    deletion began ``abandon_after_s`` seconds ago loses its finalizer although its record could not be removed;
    ``None``: never. ``now`` gives aware UTC.
    """

    def __init__(  # noqa: PLR0913 - one for each step of a reconcile
        self,
        cluster: Cluster,
        store: Store,
        applier: Applier,
        finalizer: Finalizer,
        registrar: Registrar,
        statuses: StatusWriter,
        data_plane: DataPlane,
        *,
        report: Callable[[Object, Result], None],
        record_event: Callable[[Occurrence], None],
        default_image: str,
        node_port_addresses: str = "none",
        tenant_policy: TenantPolicy | None = None,
        installation: str = OPERATOR_NAMESPACE,
        run_as_user: bool = True,
        abandon_after_s: float | None,
        now: Callable[[], datetime],
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._applier = applier
        self._finalizer = finalizer
        self._registrar = registrar
        self._statuses = statuses
        self._data_plane = data_plane
        self._report = report
        self._record_event = record_event
        self._default_image = default_image
        self._addresses = Addresses(store, node_ports=node_port_addresses)
        self._tenant_policy = tenant_policy or TenantPolicy()
        self._installation = installation
        self._run_as_user = run_as_user
        self._large_specs = anyio.CapacityLimiter(1)
        self._now = now
        self._cleanup = Cleanup(
            cluster, finalizer, registrar, statuses, record_event=record_event, abandon_after_s=abandon_after_s, now=now
        )

    async def reconcile(self, key: Key, *, failures: int = 0, is_resync: bool = False) -> ReconcileResult:
        """Bring one proxy to its declaration. ``failures`` counts the failed reconciles directly before this one.

        With ``is_resync`` the outside record is read too, although nothing has changed. Raises nothing of
        ``operator_app.errors``: whatever went wrong is in the result.
        """
        proxy = self._store.get(ENVOY_PROXY, key)
        if proxy is None:
            return await self._forget(key)
        try:
            if "deletionTimestamp" in proxy["metadata"]:
                result = await self._cleanup.clean_up(proxy)
                if self._store.get(ENVOY_PROXY, key) is None:
                    # It went with its finalizer. The watch event will be no news, so nothing else comes back to it.
                    return await self._forget(key)
            else:
                result = await self._converge(proxy, failures, is_resync=is_resync)
        except ConflictError as error:
            # Another writer was faster than our watch; the next reconcile starts from what is stored now.
            await self._refresh(proxy, error)
            result = ReconcileResult(failure=error)
        except OperatorError as error:
            result = ReconcileResult(failure=error)
        remaining = await self._remove_orphaned_records(key, proxy)
        return result if remaining is None else _requeued(result, remaining)

    async def _forget(self, key: Key) -> ReconcileResult:
        """Drop what is remembered of a proxy that is gone, and remove what is left of it outside."""
        self._statuses.forget(key)
        self._data_plane.forget(key)
        remaining = await self._remove_orphaned_records(key, None)
        return ReconcileResult(self._registrar.next_rested_s(key), remaining)

    async def _remove_orphaned_records(self, key: Key, proxy: Object | None) -> OperatorError | None:
        """Runs last, so a slow registry can't delay existing proxies.

        A hostname that a previous incarnation still has is free for the next reconcile.
        """
        try:
            return await self._cleanup.remove_orphaned_records(key, proxy)
        except OperatorError as error:
            return error

    async def _converge(self, proxy: Object, failures: int, *, is_resync: bool) -> ReconcileResult:
        try:
            declared = await self._declared(proxy)
        except ValidationError as error:
            return await self._refuse(proxy, Problem("InvalidSpec", sentence(error), needs_user_action=True))
        except TerminalError as error:
            return await self._refuse(proxy, Problem(error.reason, error.message, needs_user_action=True))
        spec, desired = declared.spec, declared.children
        steps = await self._take_steps(proxy, spec, desired, is_resync=is_resync)
        if steps.conflict is not None:
            raise steps.conflict
        if steps.proxy["metadata"]["generation"] != proxy["metadata"]["generation"]:
            # The finalizer's answer has an edit that no watch has delivered yet: the status must be about that one.
            return await self._converge(steps.proxy, failures, is_resync=is_resync)
        steps.programming = programming = await self._program(steps, declared, is_resync=is_resync)
        transient = steps.transient
        if transient is not None and failures < PERSISTENT_AFTER:
            # One lost connection says nothing about the proxy.
            return ReconcileResult(failure=transient)
        written = await self._write_status(self._observation(steps))
        children_s = (each.requeue_after_s for each in steps.results.values())
        registered_s = (steps.registration.requeue_after_s, self._registrar.next_rested_s(key_of(steps.proxy)))
        times_s = [written.requeue_after_s, *registered_s, *steps.requeue_times_s, *children_s]
        times_s.append(programming.requeue_after_s)
        requeue_after_s = min((each for each in times_s if each is not None), default=None)
        return ReconcileResult(requeue_after_s, transient or _unfinished(steps))

    async def _program(self, steps: "_Steps", declared: "_Declared", *, is_resync: bool) -> Programming:
        """Bring the files of the ConfigMap, if it has them, into the Pods that serve, and ask these what they have."""
        files, target = declared.files, declared.target
        return await self._data_plane.program(
            steps.proxy, files, target, steps.results[CONFIG_MAP], is_resync=is_resync
        )

    async def _declared(self, proxy: Object) -> "_Declared":
        """What ``proxy`` declares; of a large one in a thread.

        A spec at its bounds takes some hundred milliseconds, for which no other task could run. One at a time is in a
        thread, since each takes some megabytes.
        """

        def declared() -> _Declared:
            spec = parse_spec(proxy)
            self._tenant_policy.check(spec)
            files = rendered(spec)
            target = next_step(files)
            desired = children(
                proxy,
                spec,
                default_image=self._default_image,
                installation=self._installation,
                run_as_user=self._run_as_user,
                live=live,
                files=target,
            )
            return _Declared(spec, desired, files, target)

        live = self._live_children(proxy)
        next_step = self._data_plane.next_step(proxy, live)

        if len(msgspec.json.encode(proxy.get("spec"))) <= LARGE_SPEC_BYTES:
            return declared()
        return await anyio.to_thread.run_sync(declared, limiter=self._large_specs)

    def _live_children(self, proxy: Object) -> dict[Kind, Object | None]:
        """The children of ``proxy`` as the store knows them."""
        return {kind: self._store.get(kind, child_key(key_of(proxy))) for kind in CHILD_KINDS}

    async def _take_steps(
        self, proxy: Object, spec: EnvoyProxySpec, desired: Mapping[Kind, Object], *, is_resync: bool
    ) -> "_Steps":
        """Prune; then finalizer, children and record at the same time, each after what it depends on.

        A Deployment waits for its ConfigMap, the record for the finalizer and the Service. A step that fails does not
        keep the others from being taken.
        """
        steps = _Steps(proxy)
        if not spec.paused:
            # First, so that an autoscaler that is not declared any more does not scale what its removal takes back.
            await self._prune(steps, desired)
        is_over = {kind: anyio.Event() for kind in (*desired, ENVOY_PROXY)}

        async def finalize() -> None:
            if not spec.paused:
                await self._finalize(steps)
            is_over[ENVOY_PROXY].set()

        async def apply_child(kind: Kind, child: Object) -> None:
            prerequisite = _PREREQUISITES.get(kind)
            if prerequisite is not None:
                await is_over[prerequisite].wait()
            steps.results[kind] = await self._apply_child(kind, child, steps, is_paused=spec.paused)
            is_over[kind].set()

        async def register() -> None:
            await is_over[ENVOY_PROXY].wait()
            await is_over[SERVICE].wait()
            # An edit that the finalizer's answer has brought is registered by the reconcile of that generation.
            is_current = steps.proxy["metadata"]["generation"] == proxy["metadata"]["generation"]
            if steps.conflict is None and is_current:
                await self._register(steps, spec, is_resync=is_resync)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(finalize)
            for kind, child in desired.items():
                tasks.start_soon(apply_child, kind, child)
            tasks.start_soon(register)
        steps.results = {kind: steps.results[kind] for kind in desired}
        return steps

    async def _finalize(self, steps: "_Steps") -> None:
        """Add the finalizer; without it nothing is registered outside."""
        try:
            steps.proxy = await self._finalizer.add(steps.proxy)
        except ConflictError as error:
            steps.conflict = error
        except TransientError as error:
            steps.transients.append(error)
            steps.hindrance = Problem("Retrying", str(error))
        except TerminalError as error:
            steps.hindrance = _terminal(error)
            steps.problems.append(steps.hindrance)
            steps.requeue_times_s.append(POLICY_RETRY_S)
        else:
            if not has_finalizer(steps.proxy):
                steps.hindrance = _FINALIZER_CONTENDED
                steps.requeue_times_s.append(self._finalizer.pause_s(steps.proxy))

    async def _apply_child(self, kind: Kind, child: Object, steps: "_Steps", *, is_paused: bool) -> Result:
        proxy = steps.proxy
        is_next = kind == CONFIG_MAP and self._data_plane.is_next(proxy, child)
        check = child_check(proxy, was_reported=observed_current_generation(proxy) and not is_next)
        try:
            # A paused proxy creates nothing, so nothing else tells whether a name is free; where somebody else had one
            # before this operator started, a read tells it as well as a create that is refused.
            plan = await self._applier.plan(kind, child, check, ask_server=is_paused or _had_conflict(proxy))
            hindrance = _paused(plan) if is_paused else _missing_prerequisite(kind, steps.results)
            result = skipped(plan, hindrance) if hindrance is not None else await self._applier.execute(plan, check)
        except TransientError as error:
            steps.transients.append(error)
            result = self._failed(kind, proxy, Problem("Retrying", str(error)))
        except TerminalError as error:
            result = self._failed(kind, proxy, _terminal(error))
        if kind == CONFIG_MAP and result.problem is None:
            self._data_plane.hold(proxy, child)
        self._report(proxy, result)
        return result

    def _failed(self, kind: Kind, proxy: Object, problem: Problem) -> Result:
        """The result of a child that could not be written: its last known version goes on serving and being counted."""
        key = child_key(key_of(proxy))
        return Result(kind, key, Outcome.SKIPPED, self._store.get(kind, key), problem=problem)

    async def _register(self, steps: "_Steps", spec: EnvoyProxySpec, *, is_resync: bool) -> None:
        """Register the proxy outside, once its Service has an address.

        While the Service is not as declared or the finalizer is not there, the outside record stays as it is and is
        only compared; without an address it is withdrawn. A hostname that is not declared any more is withdrawn in
        both cases.
        """
        service = steps.results[SERVICE]
        record = _record(steps.proxy, spec, self._addresses.of(steps.proxy, service.live))
        registry = spec.registration.registry if spec.registration else None
        hindrance = _NOT_WHILE_PAUSED if spec.paused else steps.hindrance
        if hindrance is None and _is_broken(service):
            hindrance = service.problem
        try:
            steps.registration = await self._registered(record, registry, hindrance, service.live, is_resync=is_resync)
        except ConflictError as error:
            steps.conflict = error
        except TransientError as error:
            steps.transients.append(error)
            steps.registration = _unregistered(Problem("Retrying", str(error)))
        except TerminalError as error:
            steps.registration = _unregistered(_terminal(error))
        else:
            if steps.registration.outcome in (Outcome.CREATED, Outcome.CONFIGURED):
                self._report_registered(steps.proxy, record, steps.registration)

    async def _registered(
        self,
        record: Record,
        registry: str | None,
        hindrance: Problem | None,
        service: Object | None,
        *,
        is_resync: bool,
    ) -> Registration:
        """Write the record, or where something hinders that withdraw what it no longer declares and compare the rest.

        Raises what the registrar raises.
        """
        if hindrance is not _NOT_WHILE_PAUSED and (hindrance is not None or not record.address):
            state = State.SERVICE_IN_TROUBLE if record.address else State.NO_ADDRESS
            withdrawn = await self._registrar.withdraw(record, registry, state)
            if withdrawn is not None:
                return withdrawn
        if not record.address:
            return _unregistered(self._addresses.missing(service))
        if hindrance is not None:
            problem = await self._registrar.observe(record, registry, hindrance, is_resync=is_resync)
            return Registration(Outcome.UNCHANGED, problem)
        return await self._registrar.register(record, registry, is_resync=is_resync)

    def _report_registered(self, proxy: Object, record: Record, registration: Registration) -> None:
        log.info("record", proxy=str(record.proxy), generation=record.generation, outcome=registration.outcome.value)
        known = condition_of(proxy, REGISTERED)
        if registration.problem is not None or known is None:
            return
        if known["status"] == "True" and known["observedGeneration"] == record.generation:
            note = f"the record of {record.hostname or record.address} was not as declared"
            self._record_event(Occurrence(proxy, "Normal", "DriftRepaired", "Repair", "record", note))

    async def _refuse(self, proxy: Object, refusal: Problem) -> ReconcileResult:
        """Write why a declaration can't be acted on into the status; children stay as they are.

        Of what it does declare, only a hostname that is not there any more is acted on.
        """
        key = child_key(key_of(proxy))
        children = {
            kind: Result(kind, key, Outcome.SKIPPED, self._store.get(kind, key), problem=refusal)
            for kind in CHILD_KINDS
        }
        withdrawn, failure = None, None
        try:
            withdrawn = await self._withdraw_undeclared(proxy)
        except OperatorError as error:
            failure = error
        address = next(iter(self._addresses.of(proxy, self._store.get(SERVICE, key))), None)
        written = await self._write_status(Observation(proxy, children, refusal=refusal, address=address))
        again_s = (written.requeue_after_s, withdrawn.requeue_after_s if withdrawn is not None else None)
        return ReconcileResult(min((each for each in again_s if each is not None), default=None), failure)

    async def _withdraw_undeclared(self, proxy: Object) -> Registration | None:
        """Withdraw a published hostname that a refused spec does not declare any more, as far as that can be read."""
        spec, metadata = proxy["spec"], proxy["metadata"]
        declared = spec.get("registration") or {}
        is_readable = isinstance(declared, dict) and all(
            isinstance(declared.get(name), str | None) for name in ("hostname", "registry")
        )
        if not is_readable or spec.get("paused"):
            return None
        hostname, registry = declared.get("hostname"), declared.get("registry")
        record = Record(metadata["uid"], metadata["generation"], key_of(proxy), hostname, "", ())
        return await self._registrar.withdraw(record, registry, State.REFUSED)

    async def _write_status(self, observation: Observation) -> ReconcileResult:
        status = next_status(observation, now=self._now())
        return ReconcileResult(requeue_after_s=await self._statuses.write(observation.proxy, status))

    def _observation(self, steps: "_Steps") -> Observation:
        """What this reconcile has observed, and who contends for the EnvoyProxy itself."""
        proxy = steps.proxy
        contentions = (self._finalizer.contention(proxy), self._statuses.contention(proxy))
        known = tuple(each for each in contentions if each is not None)
        steps.requeue_times_s += [each.forgotten_in_s for each in known]
        return Observation(
            proxy,
            steps.results,
            steps.registration.problem,
            address=next(iter(self._addresses.of(proxy, steps.results[SERVICE].live)), None),
            problems=tuple(steps.problems),
            programming=steps.programming,
            contentions=known,
            pods=trouble(self._store.indexed(POD, proxy["metadata"]["uid"])),
        )

    async def _prune(self, steps: "_Steps", wanted: Mapping[Kind, Object]) -> None:
        """Delete children of *this* proxy, by UID and by our own field ownership, that are declared no longer.

        The other kinds are declared by every proxy, and go with it by garbage collection.
        """
        for kind in OPTIONAL_CHILD_KINDS:
            for live in self._store.indexed(kind, steps.proxy["metadata"]["uid"]):
                is_wanted = kind in wanted and key_of(live) == key_of(wanted[kind])
                if is_wanted or not fields_of(live) or "deletionTimestamp" in live["metadata"]:
                    continue
                try:
                    await self._applier.delete(kind, live)
                except TransientError as error:
                    steps.transients.append(error)
                except TerminalError as error:
                    message = f"{kind} {key_of(live)} is not declared any more and can't be deleted: {error.message}"
                    steps.problems.append(Problem(error.reason, message, needs_user_action=True, ends_with_event=True))
                    steps.requeue_times_s.append(POLICY_RETRY_S)

    async def _refresh(self, proxy: Object, conflict: ConflictError) -> None:
        """Read what is known of ``proxy`` again; where only an edit of it was faster, no more than that.

        Not even that, if a watch has delivered another version since: who edits often would cost reads each time.
        """
        key = key_of(proxy)
        is_edit = (conflict.kind, conflict.key) == (ENVOY_PROXY, key)
        if is_edit and _is_newer(self._store.get(ENVOY_PROXY, key), proxy):
            return
        if await self._read_again(ENVOY_PROXY, key) and is_edit:
            return
        for kind in ALL_CHILD_KINDS:
            await self._read_again(kind, child_key(key))

    async def _read_again(self, kind: Kind, key: Key) -> bool:
        """Read a known object; whether it is still the one that was known."""
        known = self._store.get(kind, key)
        if known is None:
            return False
        try:
            live = await self._cluster.get(kind, key)
        except OperatorError:
            return False
        if live is None or live["metadata"]["uid"] != known["metadata"]["uid"]:
            # This incarnation is gone, though no watch has delivered it. What has its name now may be foreign, and no
            # watch would deliver its deletion: the store does not learn it.
            self._store.forget(kind, known)
            return False
        self._store.learn(kind, live)
        return True


def _is_newer(known: Object | None, proxy: Object) -> bool:
    """Whether ``known`` is a later version of the same object."""
    if known is None or known["metadata"]["uid"] != proxy["metadata"]["uid"]:
        return False
    return version_of(known) > version_of(proxy)


@dataclass(frozen=True, slots=True)
class _Declared:
    """What a proxy declares: its children with the files ``target``, which are on the way to ``files``."""

    spec: EnvoyProxySpec
    children: Mapping[Kind, Object]
    files: Files
    target: Files


@dataclass(slots=True)
class _Steps:
    """What the steps of one reconcile have come to so far.

    ``proxy`` is its latest known version. ``hindrance`` keeps the record from being written, ``problems`` are those of
    steps other than children and record, and ``conflict`` says that the whole reconcile rests on an outdated proxy.
    """

    proxy: Object
    results: dict[Kind, Result] = field(default_factory=dict)
    registration: Registration = field(default_factory=lambda: Registration(Outcome.SKIPPED))
    hindrance: Problem | None = None
    problems: list[Problem] = field(default_factory=list)
    transients: list[TransientError] = field(default_factory=list)
    requeue_times_s: list[float] = field(default_factory=list)
    conflict: ConflictError | None = None
    programming: Programming | None = None

    @property
    def transient(self) -> TransientError | None:
        """The transient error that decides when to try again: the one with the longest Retry-After."""
        return max(self.transients, key=lambda each: each.retry_after_s or 0.0, default=None)


def _record(proxy: Object, spec: EnvoyProxySpec, addresses: tuple[str, ...]) -> Record:
    """What is to be said of the proxy outside."""
    metadata, declared = proxy["metadata"], spec.registration
    return Record(
        uid=metadata["uid"],
        generation=metadata["generation"],
        proxy=key_of(proxy),
        hostname=declared.hostname if declared else None,
        address=next(iter(addresses), ""),
        more_addresses=addresses[1:],
        ports=tuple(Port(each.name, each.port, each.protocol) for each in spec.listeners),
        ttl_s=declared.ttl if declared else None,
    )


def _had_conflict(proxy: Object) -> bool:
    """Whether the stored status says that somebody else has a child's name."""
    known = condition_of(proxy, RECONCILED)
    return known is not None and bool(known["reason"] == NAME_CONFLICT)


def _terminal(error: TerminalError) -> Problem:
    is_policy = isinstance(error, PolicyError)
    return Problem(error.reason, str(error), needs_user_action=True, ends_with_event=is_policy)


def _paused(plan: Plan) -> Problem | None:
    """What a paused proxy reports of an object that it would write; nothing where everything holds anyway."""
    if plan.action not in (Action.CREATE, Action.REPAIR):
        return plan.problem
    fields = ", ".join(str(each) for each in plan.differences) or "all of it"
    message = f"spec.paused is set; {plan.kind} {plan.key} waits to be written: {fields}"
    return Problem("Paused", message, ends_with_event=True)


def _missing_prerequisite(kind: Kind, results: Mapping[Kind, Result]) -> Problem | None:
    """What keeps a child from being written although nothing is wrong with it."""
    prerequisite = results[_PREREQUISITES[kind]] if kind in _PREREQUISITES else None
    if prerequisite is None or not _is_broken(prerequisite):
        return None
    return Problem(
        "ConfigMapNotReady", f"the {kind} waits for {prerequisite.kind} {prerequisite.key}", ends_with_event=True
    )


def _is_broken(result: Result) -> bool:
    """Whether other steps can't build on it. A contended object is ours and held what is declared, again and again."""
    if result.problem is None:
        return False
    return result.problem.reason != CONTENDED or result.live is None


def _unregistered(problem: Problem) -> Registration:
    return Registration(Outcome.SKIPPED, problem)


def _unfinished(steps: _Steps) -> Problem | None:
    """The first problem that may end without an event that the operator watches for."""
    # A registration that says when to come back has a backoff of its own.
    registered = steps.registration.problem if steps.registration.requeue_after_s is None else None
    problems = (*(each.problem for each in steps.results.values()), registered, *steps.problems)
    return next((each for each in problems if each is not None and not each.ends_with_event), None)


def _requeued(result: ReconcileResult, remaining: OperatorError) -> ReconcileResult:
    """The result of an existing proxy while a record of a previous incarnation remains: no failure of its own."""
    asked_s = remaining.retry_after_s if isinstance(remaining, TransientError) else None
    times_s = (result.requeue_after_s, max(ORPHANED_RECORDS_RETRY_S, asked_s or 0.0))
    return replace(result, requeue_after_s=min(each for each in times_s if each is not None))
