"""One round for one EnvoyProxy, from what is known to what is declared.

A round reads like the promise: look at everything, hold the proxy for clean removal, bring every child to its
declaration, tell the registry, tell the truth. Each step may be repeated, and a crash behind any single write leaves
what the next round completes: names are derived, creates are atomic, the finalizer precedes the first outside write,
and no step depends on memory of an earlier one.

A round never waits and never retries; it returns how it ended, and the workqueue decides when to try again.
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
from operator_app.apply import (
    CONTENDED,
    Action,
    Applier,
    Outcome,
    OwnershipCheck,
    Plan,
    Problem,
    Result,
    child_check,
    skipped,
)
from operator_app.cleanup import Cleanup
from operator_app.desired import child_key, children, controller_uid
from operator_app.errors import ConflictError, OperatorError, TerminalError, TransientError
from operator_app.finalizer import Finalizer
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Deleted
from operator_app.kube.events import Occurrence
from operator_app.kube.store import Store
from operator_app.registration.claims import HOSTNAME_ORPHANED, HOSTNAME_TAKEN
from operator_app.registration.registrar import Registrar
from operator_app.registration.registry import Port, Record, Registration
from operator_app.results import ReconcileResult
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
"""From this many failed rounds on, a transient error is part of the truth and goes into the status."""

_NOT_WHILE_PAUSED: Final = Problem("Paused", "spec.paused is set; the record waits")

ORPHANED_RECORDS_RETRY_S: Final = 60.0
"""A proxy that lives comes back after this to remove what is left of a former life of its name."""

_FOUNDATIONS: Final = {DEPLOYMENT: CONFIG_MAP}
"""Which child stands on which other one: a Deployment must not mount a ConfigMap that is a stranger's, or of another
configuration than it declares."""

_SEEN_BY_WATCH: Final = frozenset(
    {
        "Paused",
        "FieldsNotHeld",
        "Invalid",
        "NoAddress",
        "ConfigMapNotReady",
        "RegistryUnknown",
        HOSTNAME_ORPHANED,
        HOSTNAME_TAKEN,
        CONTENDED,
    }
)
"""Problems that end with an event that the operator watches for, so that coming back earlier is of no use."""


class Reconciler:
    """Runs rounds. One instance for the operator; rounds of different proxies may run at the same time.

    ``report`` is told what became of every child, ``record_event`` of what is worth an Event. A proxy whose deletion
    began ``abandon_after_s`` seconds ago is let go although its record could not be removed; ``None``: never. ``now``
    gives aware UTC.
    """

    def __init__(  # noqa: PLR0913 - one for each room that a round goes through
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
        """Bring one proxy closer to its declaration. ``failures`` counts the failed rounds directly before this one.

        With ``is_resync`` it looks at the outside too, where otherwise nothing would ask for a look. Raises nothing of
        ``operator_app.errors``: whatever went wrong is in the verdict.
        """
        proxy = self._store.get(ENVOY_PROXY, key)
        if proxy is None:
            self._statuses.forget(key)
            return ReconcileResult(failure=await self._remove_orphaned_records(key, None))
        try:
            if "deletionTimestamp" in proxy["metadata"]:
                verdict = await self._cleanup.clean_up(proxy)
            else:
                verdict = await self._converge(proxy, failures, is_resync=is_resync)
        except ConflictError as error:
            # Somebody was faster than our watch; the next round starts from what is there now.
            await self._refresh(key)
            verdict = ReconcileResult(failure=error)
        except OperatorError as error:
            verdict = ReconcileResult(failure=error)
        left = await self._remove_orphaned_records(key, proxy)
        return verdict if left is None else _coming_back(verdict, left)

    async def _remove_orphaned_records(self, key: Key, proxy: Object | None) -> OperatorError | None:
        """Behind everything else, since a registry that is slow to forget the dead must not hold up the living.

        A hostname that a former life still has is free for the round after this one.
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
                held = await self._finalizer.add(proxy)
            except TerminalError as error:
                told = await self._refuse(proxy, Problem(error.reason, str(error), needs_user_action=True))
                return replace(told, failure=error)
            if held["metadata"]["generation"] != proxy["metadata"]["generation"]:
                # The answer shows an edit of which no watch has told: all that follows must be about that one.
                return await self._converge(held, failures, is_resync=is_resync)
            proxy = held
        check = child_check(proxy, was_reported=observed_current_generation(proxy))
        results, trouble = await self._apply_children(proxy, desired, check, is_paused=spec.paused)
        if not spec.paused:
            await self._prune(proxy, desired)
        try:
            registration = await self._register(proxy, spec, results, is_resync=is_resync)
        except TransientError as error:
            if isinstance(error, ConflictError):
                raise
            trouble = trouble or error
            registration = _unregistered(Problem("Retrying", str(error)))
        if trouble is not None and failures < PERSISTENT_AFTER:
            # One lost connection is no news about the proxy.
            return ReconcileResult(failure=trouble)
        address = _address(proxy, _service(results).live)
        told = await self._write_status(Observation(proxy, results, registration.problem, address=address))
        wishes = [told.requeue_after_s, registration.requeue_after_s, *(each.requeue_after_s for each in results)]
        requeue_after_s = min((each for each in wishes if each is not None), default=None)
        return ReconcileResult(requeue_after_s, trouble or _waiting(results, registration))

    async def _apply_children(
        self, proxy: Object, desired: Mapping[Kind, Object], check: OwnershipCheck, *, is_paused: bool
    ) -> tuple[tuple[Result, ...], TransientError | None]:
        """All children at the same time, but what stands on another one behind it.

        What fails for one does not keep the others from being repaired. The results come in the order of ``desired``.
        """
        results: dict[Kind, Result] = {}
        troubles: list[TransientError] = []
        is_over = {kind: anyio.Event() for kind in desired}

        async def apply_child(kind: Kind, child: Object) -> None:
            try:
                plan = await self._applier.plan(kind, child, check)
                foundation = _FOUNDATIONS.get(kind)
                if foundation is not None:
                    await is_over[foundation].wait()
                obstacle = _paused(plan) if is_paused else _missing_foundation(kind, results)
                if obstacle is None:
                    result = await self._applier.execute(plan, check)
                else:
                    result = skipped(plan, obstacle)
            except TransientError as error:
                troubles.append(error)
                result = self._failed(kind, proxy, Problem("Retrying", str(error)))
            except TerminalError as error:
                result = self._failed(kind, proxy, Problem(error.reason, str(error), needs_user_action=True))
            self._report(proxy, result)
            results[kind] = result
            is_over[kind].set()

        async with anyio.create_task_group() as steps:
            for kind, child in desired.items():
                steps.start_soon(apply_child, kind, child)
        # Where several children met trouble, the one that asked for the most time decides when to come back.
        trouble = max(troubles, key=lambda each: each.retry_after_s or 0.0, default=None)
        return tuple(results[kind] for kind in desired), trouble

    def _failed(self, kind: Kind, proxy: Object, problem: Problem) -> Result:
        """A child that could not be written is still what it was: it goes on serving and being counted."""
        key = child_key(key_of(proxy))
        return Result(kind, key, Outcome.SKIPPED, self._store.get(kind, key), problem=problem)

    async def _register(
        self, proxy: Object, spec: EnvoyProxySpec, results: tuple[Result, ...], *, is_resync: bool
    ) -> Registration:
        """Make the proxy known, once there is a Service to tell of. Raises what passes by itself.

        While the Service is not as declared, what the outside has been told of it stands, and is looked at.
        """
        service = _service(results)
        address = _address(proxy, service.live)
        if address is None:
            return _unregistered(Problem("NoAddress", "the Service has no address to register yet"))
        metadata, wish = proxy["metadata"], spec.registration
        record = Record(
            uid=metadata["uid"],
            generation=metadata["generation"],
            proxy=key_of(proxy),
            hostname=wish.hostname if wish else None,
            address=address,
            ports=tuple(Port(each.name, each.port, each.protocol) for each in spec.listeners),
            ttl_s=wish.ttl if wish else None,
        )
        registry = wish.registry if wish else None
        try:
            hindrance = _NOT_WHILE_PAUSED if spec.paused else service.problem if _is_broken(service) else None
            if hindrance is not None:
                problem = await self._registrar.observe(record, registry, hindrance, is_resync=is_resync)
                return Registration(Outcome.UNCHANGED, problem)
            registration = await self._registrar.register(record, registry, is_resync=is_resync)
        except TerminalError as error:
            return _unregistered(Problem(error.reason, str(error), needs_user_action=True))
        if registration.outcome in (Outcome.CREATED, Outcome.CONFIGURED):
            self._tell_registered(proxy, record, registration)
        return registration

    def _tell_registered(self, proxy: Object, record: Record, registration: Registration) -> None:
        log.info("record", proxy=str(record.proxy), generation=record.generation, outcome=registration.outcome.value)
        known = condition_of(proxy, REGISTERED)
        if registration.problem is not None or known is None:
            return
        if known["status"] == "True" and known["observedGeneration"] == record.generation:
            note = f"the record of {record.hostname or record.address} was not as declared"
            self._record_event(Occurrence(proxy, "Normal", "DriftRepaired", "Repair", "record", note))

    async def _refuse(self, proxy: Object, refusal: Problem) -> ReconcileResult:
        """Say why a declaration can't be acted on; nothing else is written, and what runs goes on running."""
        key = child_key(key_of(proxy))
        children = tuple(
            Result(kind, key, Outcome.SKIPPED, self._store.get(kind, key), problem=refusal) for kind in CHILD_KINDS
        )
        return await self._write_status(
            Observation(proxy, children, refusal=refusal, address=_address(proxy, self._store.get(SERVICE, key)))
        )

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
                        # That life is over, though the watch has not said so. What has its name now may be a
                        # stranger's, and no watch would tell that it has gone again: it is not learnt.
                        self._store.apply_delta(Deleted(kind, known))


def _paused(plan: Plan) -> Problem | None:
    """What a paused proxy reports of an object that it would write; nothing where everything holds anyway."""
    if plan.action not in (Action.CREATE, Action.REPAIR):
        return plan.problem
    fields = ", ".join(str(each) for each in plan.differences) or "all of it"
    return Problem("Paused", f"spec.paused is set; {plan.kind} {plan.key} waits to be written: {fields}")


def _missing_foundation(kind: Kind, results: Mapping[Kind, Result]) -> Problem | None:
    """What keeps a child from being written although nothing is wrong with it."""
    foundation = results[_FOUNDATIONS[kind]] if kind in _FOUNDATIONS else None
    if foundation is None or not _is_broken(foundation):
        return None
    return Problem("ConfigMapNotReady", f"the {kind} waits for {foundation.kind} {foundation.key}")


def _is_broken(result: Result) -> bool:
    """Whether other steps can't build on it. A contended object is ours and held what is declared, again and again."""
    if result.problem is None:
        return False
    return result.problem.reason != CONTENDED or result.live is None


def _unregistered(problem: Problem) -> Registration:
    return Registration(Outcome.SKIPPED, problem)


def _waiting(results: tuple[Result, ...], registration: Registration) -> Problem | None:
    """The first problem that time or somebody else may solve without an event that we would see."""
    # A registration that says when to come back has a backoff of its own.
    registered = registration.problem if registration.requeue_after_s is None else None
    problems = (*(each.problem for each in results), registered)
    return next((each for each in problems if each is not None and each.reason not in _SEEN_BY_WATCH), None)


def _coming_back(verdict: ReconcileResult, left: OperatorError) -> ReconcileResult:
    """The verdict on a living proxy while something of a former life is left: no failure of its own."""
    asked_s = left.retry_after_s if isinstance(left, TransientError) else None
    wishes = (verdict.requeue_after_s, max(ORPHANED_RECORDS_RETRY_S, asked_s or 0.0))
    return replace(verdict, requeue_after_s=min(each for each in wishes if each is not None))


def _service(results: tuple[Result, ...]) -> Result:
    return next(each for each in results if each.kind == SERVICE)


def _address(proxy: Object, service: Object | None) -> str | None:
    """Where the proxy is reached by a Service of its own: what the load balancer gave, or its name in the cluster."""
    if service is None or controller_uid(service) != proxy["metadata"]["uid"]:
        return None
    if "deletionTimestamp" in service["metadata"]:
        return None
    if service["spec"].get("type") != ServiceType.LOAD_BALANCER:
        key = key_of(service)
        return f"{key.name}.{key.namespace}.svc"
    given = service.get("status", {}).get("loadBalancer", {}).get("ingress", ())
    return next((each.get("hostname") or each.get("ip") for each in given), None)
