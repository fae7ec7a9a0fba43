"""One reconcile of one EnvoyProxy: from what is known to what is declared.

The steps, in order: parse the spec, add the finalizer, apply every child, prune children that are not declared any
more, register the proxy outside, write the status. Each step may be repeated, and a crash behind any single write
leaves what the next reconcile completes: names are derived, creates are atomic, the finalizer precedes the first
outside write, and no step depends on memory of an earlier one.

A reconcile never waits and never retries; its result says how it ended, and the workqueue decides when to try again.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Final

import anyio
import structlog
from pydantic import ValidationError

from operator_app.api.kinds import CHILD_KINDS, CONFIG_MAP, DEPLOYMENT, ENVOY_PROXY, SERVICE, Key, Kind, Object, key_of
from operator_app.api.models import EnvoyProxySpec, ServiceType, parse_spec, sentence
from operator_app.apply import CONTENDED, Action, Applier, OwnershipCheck, Plan, Result, child_check, skipped
from operator_app.cleanup import Cleanup
from operator_app.desired import child_key, children, controller_uid
from operator_app.errors import ConflictError, OperatorError, TerminalError, TransientError
from operator_app.finalizer import Finalizer
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Deleted
from operator_app.kube.events import Occurrence
from operator_app.kube.store import Store
from operator_app.registration.registrar import Registrar
from operator_app.registration.registry import Port, Record, Registration
from operator_app.registration.withdrawal import State
from operator_app.results import Outcome, Problem, ReconcileResult
from operator_app.ssa.fields import fields_of
from operator_app.status import (
    REGISTERED,
    Observation,
    StatusWriter,
    condition_of,
    next_status,
    observed_current_generation,
)

log = structlog.get_logger(__name__)

PERSISTENT_AFTER: Final = 3
"""After so many failed reconciles in a row, a transient error is told in the status."""

_NO_ADDRESS: Final = Problem("NoAddress", "the Service has no address to register yet", ends_with_event=True)
_NOT_WHILE_PAUSED: Final = Problem("Paused", "spec.paused is set; the record waits", ends_with_event=True)

ORPHANED_RECORDS_RETRY_S: Final = 60.0
"""Seconds until an existing proxy tries again to remove the records of a previous incarnation of its name."""

MAX_ADDRESSES: Final = 16
"""Addresses of one load balancer that are registered; the ledger's entry has room for no more."""

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
        *,
        report: Callable[[Object, Result], None],
        record_event: Callable[[Occurrence], None],
        default_image: str,
        abandon_after_s: float | None,
        now: Callable[[], datetime],
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._applier = applier
        self._finalizer = finalizer
        self._registrar = registrar
        self._statuses = statuses
        self._report = report
        self._record_event = record_event
        self._default_image = default_image
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
            self._statuses.forget(key)
            return ReconcileResult(failure=await self._remove_orphaned_records(key, None))
        try:
            if "deletionTimestamp" in proxy["metadata"]:
                result = await self._cleanup.clean_up(proxy)
            else:
                result = await self._converge(proxy, failures, is_resync=is_resync)
        except ConflictError as error:
            # Another writer was faster than our watch; the next reconcile starts from what is stored now.
            await self._refresh(key)
            result = ReconcileResult(failure=error)
        except OperatorError as error:
            result = ReconcileResult(failure=error)
        remaining = await self._remove_orphaned_records(key, proxy)
        return result if remaining is None else _requeued(result, remaining)

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
            spec = parse_spec(proxy)
            desired = children(proxy, spec, default_image=self._default_image)
        except ValidationError as error:
            return await self._refuse(proxy, Problem("InvalidSpec", sentence(error), needs_user_action=True))
        except TerminalError as error:
            return await self._refuse(proxy, Problem(error.reason, error.message, needs_user_action=True))
        if not spec.paused:
            try:
                finalized = await self._finalizer.add(proxy)
            except TerminalError as error:
                refused = await self._refuse(proxy, Problem(error.reason, str(error), needs_user_action=True))
                return replace(refused, failure=error)
            if finalized["metadata"]["generation"] != proxy["metadata"]["generation"]:
                # The answer has an edit that no watch has delivered yet: what follows must be about that generation.
                return await self._converge(finalized, failures, is_resync=is_resync)
            proxy = finalized
        check = child_check(proxy, was_reported=observed_current_generation(proxy))
        results, transient = await self._apply_children(proxy, desired, check, is_paused=spec.paused)
        if not spec.paused:
            await self._prune(proxy, desired)
        try:
            registration = await self._register(proxy, spec, results, is_resync=is_resync)
        except TransientError as error:
            if isinstance(error, ConflictError):
                raise
            transient = transient or error
            registration = _unregistered(Problem("Retrying", str(error)))
        if transient is not None and failures < PERSISTENT_AFTER:
            # One lost connection says nothing about the proxy.
            return ReconcileResult(failure=transient)
        address = next(iter(_addresses(proxy, results[SERVICE].live)), None)
        written = await self._write_status(Observation(proxy, results, registration.problem, address=address))
        children_s = (each.requeue_after_s for each in results.values())
        times_s = [written.requeue_after_s, registration.requeue_after_s, *children_s]
        requeue_after_s = min((each for each in times_s if each is not None), default=None)
        return ReconcileResult(requeue_after_s, transient or _unfinished(results, registration))

    async def _apply_children(
        self, proxy: Object, desired: Mapping[Kind, Object], check: OwnershipCheck, *, is_paused: bool
    ) -> tuple[Mapping[Kind, Result], TransientError | None]:
        """Apply all children at the same time, each after its prerequisite.

        A child that fails does not keep the others from being repaired. The results are in the order of ``desired``.
        """
        results: dict[Kind, Result] = {}
        transients: list[TransientError] = []
        is_over = {kind: anyio.Event() for kind in desired}

        async def apply_child(kind: Kind, child: Object) -> None:
            try:
                plan = await self._applier.plan(kind, child, check)
                prerequisite = _PREREQUISITES.get(kind)
                if prerequisite is not None:
                    await is_over[prerequisite].wait()
                obstacle = _paused(plan) if is_paused else _missing_prerequisite(kind, results)
                if obstacle is None:
                    result = await self._applier.execute(plan, check)
                else:
                    result = skipped(plan, obstacle)
            except TransientError as error:
                transients.append(error)
                result = self._failed(kind, proxy, Problem("Retrying", str(error)))
            except TerminalError as error:
                result = self._failed(kind, proxy, Problem(error.reason, str(error), needs_user_action=True))
            self._report(proxy, result)
            results[kind] = result
            is_over[kind].set()

        async with anyio.create_task_group() as steps:
            for kind, child in desired.items():
                steps.start_soon(apply_child, kind, child)
        # Of several transient errors, the one with the longest Retry-After decides when to try again.
        transient = max(transients, key=lambda each: each.retry_after_s or 0.0, default=None)
        return {kind: results[kind] for kind in desired}, transient

    def _failed(self, kind: Kind, proxy: Object, problem: Problem) -> Result:
        """The result of a child that could not be written: its last known version goes on serving and being counted."""
        key = child_key(key_of(proxy))
        return Result(kind, key, Outcome.SKIPPED, self._store.get(kind, key), problem=problem)

    async def _register(
        self, proxy: Object, spec: EnvoyProxySpec, results: Mapping[Kind, Result], *, is_resync: bool
    ) -> Registration:
        """Register the proxy outside, once its Service has an address. Raises transient errors.

        While the Service is not as declared, the outside record stays as it is and is only compared; without an
        address it is withdrawn. A hostname that is not declared any more is withdrawn in both cases.
        """
        service = results[SERVICE]
        addresses = _addresses(proxy, service.live)
        metadata, declared = proxy["metadata"], spec.registration
        record = Record(
            uid=metadata["uid"],
            generation=metadata["generation"],
            proxy=key_of(proxy),
            hostname=declared.hostname if declared else None,
            address=next(iter(addresses), ""),
            more_addresses=addresses[1:],
            ports=tuple(Port(each.name, each.port, each.protocol) for each in spec.listeners),
            ttl_s=declared.ttl if declared else None,
        )
        registry = declared.registry if declared else None
        try:
            hindrance = _NOT_WHILE_PAUSED if spec.paused else service.problem if _is_broken(service) else None
            if not spec.paused and (hindrance is not None or not addresses):
                state = State.SERVICE_IN_TROUBLE if addresses else State.NO_ADDRESS
                withdrawn = await self._registrar.withdraw(record, registry, state)
                if withdrawn is not None:
                    return withdrawn
            if not addresses:
                return _unregistered(_NO_ADDRESS)
            if hindrance is not None:
                problem = await self._registrar.observe(record, registry, hindrance, is_resync=is_resync)
                return Registration(Outcome.UNCHANGED, problem)
            registration = await self._registrar.register(record, registry, is_resync=is_resync)
        except TerminalError as error:
            return _unregistered(Problem(error.reason, str(error), needs_user_action=True))
        if registration.outcome in (Outcome.CREATED, Outcome.CONFIGURED):
            self._report_registered(proxy, record, registration)
        return registration

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
        address = next(iter(_addresses(proxy, self._store.get(SERVICE, key))), None)
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

    async def _prune(self, proxy: Object, wanted: Mapping[Kind, Object]) -> None:
        """Delete children of *this* proxy, by UID and by our own field ownership, that are declared no longer."""
        for kind in CHILD_KINDS:
            for live in self._store.indexed(kind, proxy["metadata"]["uid"]):
                is_wanted = kind in wanted and key_of(live) == key_of(wanted[kind])
                if not is_wanted and fields_of(live) and "deletionTimestamp" not in live["metadata"]:
                    await self._applier.delete(kind, live)

    async def _refresh(self, key: Key) -> None:
        for kind, address in ((ENVOY_PROXY, key), *((kind, child_key(key)) for kind in CHILD_KINDS)):
            known = self._store.get(kind, address)
            if known is not None:
                with contextlib.suppress(OperatorError):
                    live = await self._cluster.get(kind, address)
                    if live is not None and live["metadata"]["uid"] == known["metadata"]["uid"]:
                        self._store.learn(kind, live)
                    else:
                        # This incarnation is gone, though no watch has delivered it. What has its name now may be
                        # foreign, and no watch would deliver its deletion: the store does not learn it.
                        self._store.apply_delta(Deleted(kind, known))


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


def _unfinished(results: Mapping[Kind, Result], registration: Registration) -> Problem | None:
    """The first problem that may end without an event that the operator watches for."""
    # A registration that says when to come back has a backoff of its own.
    registered = registration.problem if registration.requeue_after_s is None else None
    problems = (*(each.problem for each in results.values()), registered)
    return next((each for each in problems if each is not None and not each.ends_with_event), None)


def _requeued(result: ReconcileResult, remaining: OperatorError) -> ReconcileResult:
    """The result of an existing proxy while a record of a previous incarnation remains: no failure of its own."""
    asked_s = remaining.retry_after_s if isinstance(remaining, TransientError) else None
    times_s = (result.requeue_after_s, max(ORPHANED_RECORDS_RETRY_S, asked_s or 0.0))
    return replace(result, requeue_after_s=min(each for each in times_s if each is not None))


def _addresses(proxy: Object, service: Object | None) -> tuple[str, ...]:
    """Where the proxy is reached by a Service of its own: what the load balancer gave, or its name in the cluster.

    Of a load balancer, all IP addresses, IPv4 before IPv6, or else the first of its names in alphabetical order; the
    order in which it gives them means nothing. An entry with both a name and an address counts as a name.
    """
    if service is None or controller_uid(service) != proxy["metadata"]["uid"]:
        return ()
    if "deletionTimestamp" in service["metadata"]:
        return ()
    if service["spec"].get("type") != ServiceType.LOAD_BALANCER:
        key = key_of(service)
        return (f"{key.name}.{key.namespace}.svc",)
    given = service.get("status", {}).get("loadBalancer", {}).get("ingress", ())
    names = sorted(each["hostname"] for each in given if each.get("hostname"))
    ips = {each["ip"] for each in given if each.get("ip") and not each.get("hostname")}
    return tuple(sorted(ips, key=lambda ip: (":" in ip, ip))[:MAX_ADDRESSES]) or tuple(names[:1])
