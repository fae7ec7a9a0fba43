"""One round for one EnvoyProxy, from what is known to what is declared.

A round reads like the promise: look at everything, hold the proxy for clean removal, bring every child to its
declaration, tell the registry, tell the truth. Each step may be repeated, and a crash behind any single write leaves
what the next round completes: names are derived, creates are atomic, the finalizer precedes the first outside write,
and no step depends on memory of an earlier one.

A round never waits and never retries; it returns how it ended, and the workqueue decides when to try again.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import structlog
from pydantic import ValidationError

from operator_app.api import EnvoyProxySpec, ServiceType, parse_spec
from operator_app.apply import CONTENDED, Action, Applier, Claim, Outcome, Plan, Problem, Result, child_of, skipped
from operator_app.cluster import Cluster
from operator_app.deltas import Deleted
from operator_app.desired import child_key, children
from operator_app.errors import ConflictError, OperatorError, TerminalError, TransientError
from operator_app.finalizer import Finalizer
from operator_app.kinds import CHILD_KINDS, CONFIG_MAP, DEPLOYMENT, ENVOY_PROXY, SERVICE, Key, Kind, Object, key_of
from operator_app.ownership import fields_of
from operator_app.registration import Change, Finding, Port, Record, Registration
from operator_app.registration.in_cluster import InClusterRegistry
from operator_app.status import Observation, StatusWriter, next_status
from operator_app.store import Store

log = structlog.get_logger(__name__)

PERSISTENT_AFTER: Final = 3
"""From this many failed rounds on, a transient error is part of the truth and goes into the status."""

_SEEN_BY_WATCH: Final = frozenset({"Paused", "FieldsNotHeld", "Invalid", "NoAddress", "ConfigMapNotReady", CONTENDED})
"""Problems that end with an event that the operator watches for, so that coming back earlier is of no use."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a round ended. ``again_after_s``: come back then. ``failure``: not done, come back with backoff."""

    again_after_s: float | None = None
    failure: OperatorError | Problem | None = None


DONE = Verdict()


class Reconciler:
    """Runs rounds. One instance for the operator; rounds of different proxies may run at the same time.

    ``report`` is told what became of every child. ``now`` gives aware UTC for ``lastTransitionTime``.
    """

    def __init__(  # noqa: PLR0913 - one for each room that a round goes through
        self,
        cluster: Cluster,
        store: Store,
        applier: Applier,
        finalizer: Finalizer,
        registry: InClusterRegistry,
        statuses: StatusWriter,
        *,
        report: Callable[[Object, Result], None],
        default_image: str,
        now: Callable[[], datetime],
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._applier = applier
        self._finalizer = finalizer
        self._registry = registry
        self._statuses = statuses
        self._report = report
        self._default_image = default_image
        self._now = now

    async def round(self, key: Key, *, failures: int = 0) -> Verdict:
        """Bring one proxy closer to its declaration. ``failures`` counts the failed rounds directly before this one.

        Raises nothing of ``operator_app.errors``: whatever went wrong is in the verdict.
        """
        try:
            proxy = self._store.get(ENVOY_PROXY, key)
            await self._bury_former_lives(key, proxy)
            if proxy is None:
                return DONE
            if "deletionTimestamp" in proxy["metadata"]:
                await self._part_with(proxy)
                return DONE
            return await self._converge(proxy, failures)
        except ConflictError as error:
            # Somebody was faster than our watch; the next round starts from what is there now.
            await self._refresh(key)
            return Verdict(failure=error)
        except OperatorError as error:
            return Verdict(failure=error)

    async def _converge(self, proxy: Object, failures: int) -> Verdict:
        try:
            spec = parse_spec(proxy)
            desired = children(proxy, spec, default_image=self._default_image)
        except ValidationError as error:
            return await self._refuse(proxy, Problem("InvalidSpec", _sentence(error), is_terminal=True))
        except TerminalError as error:
            return await self._refuse(proxy, Problem(error.reason, error.message, is_terminal=True))
        claim = child_of(proxy)
        if not spec.paused:
            proxy = await self._finalizer.hold(proxy)
        results, trouble = await self._bring_up(proxy, desired, claim, is_paused=spec.paused)
        if not spec.paused:
            await self._prune(proxy, desired)
        registration = await self._register(proxy, spec, results)
        if trouble is not None and failures < PERSISTENT_AFTER:
            # One lost connection is no news about the proxy.
            return Verdict(failure=trouble)
        told = await self._tell(Observation(proxy, results, registration.problem, address=_address(proxy, results)))
        wishes = [told.again_after_s, registration.again_after_s, *(each.again_after_s for each in results)]
        again_after_s = min((each for each in wishes if each is not None), default=None)
        return Verdict(again_after_s, trouble or _waiting(results, registration.problem))

    async def _bring_up(
        self, proxy: Object, desired: Mapping[Kind, Object], claim: Claim, *, is_paused: bool
    ) -> tuple[tuple[Result, ...], TransientError | None]:
        """Every child in order. What fails for one does not keep the others from being repaired."""
        results: list[Result] = []
        trouble: TransientError | None = None
        for kind, child in desired.items():
            try:
                plan = await self._applier.look(kind, child, claim)
                obstacle = _paused(plan) if is_paused else _missing_foundation(kind, results)
                if obstacle is None:
                    result = await self._applier.carry_out(plan, claim)
                else:
                    result = skipped(plan, obstacle)
            except TransientError as error:
                trouble = trouble or error
                result = _failed(kind, proxy, Problem("Retrying", str(error)))
            except TerminalError as error:
                result = _failed(kind, proxy, Problem(error.reason, str(error), is_terminal=True))
            self._report(proxy, result)
            results.append(result)
        return tuple(results), trouble

    async def _register(self, proxy: Object, spec: EnvoyProxySpec, results: tuple[Result, ...]) -> Registration:
        """Tell the registry, once there is a Service to tell of."""
        address = _address(proxy, results)
        if address is None:
            return _unregistered(Problem("NoAddress", "the Service has no address to register yet"))
        metadata = proxy["metadata"]
        record = Record(
            uid=metadata["uid"],
            generation=metadata["generation"],
            proxy=key_of(proxy),
            hostname=spec.registration.hostname if spec.registration else None,
            address=address,
            ports=tuple(Port(each.name, each.port, each.protocol) for each in spec.listeners),
        )
        try:
            return await self._confirm(record, is_paused=spec.paused)
        except OperatorError as error:
            return _unregistered(Problem("RegistryError", str(error)))

    async def _confirm(self, record: Record, *, is_paused: bool) -> Registration:
        if is_paused:
            if await self._registry.observe(record) is Finding.MATCHING:
                return Registration(Change.UNCHANGED)
            return _unregistered(Problem("Paused", "spec.paused is set; the record waits"))
        registration = await self._registry.register(record)
        if registration.change in (Change.CREATED, Change.CONFIGURED):
            log.info("record", proxy=str(record.proxy), generation=record.generation, change=registration.change.value)
        return registration

    async def _refuse(self, proxy: Object, refusal: Problem) -> Verdict:
        """Say why a declaration can't be acted on; nothing else is written, and what runs goes on running."""
        key = child_key(key_of(proxy))
        children = tuple(
            Result(kind, key, Outcome.SKIPPED, self._store.get(kind, key), problem=refusal) for kind in CHILD_KINDS
        )
        return await self._tell(Observation(proxy, children, refusal=refusal))

    async def _tell(self, observation: Observation) -> Verdict:
        status = next_status(observation, now=self._now())
        return Verdict(again_after_s=await self._statuses.write(observation.proxy, status))

    async def _part_with(self, proxy: Object) -> None:
        """The proxy is being deleted: take back what the world was told, then let it go.

        The children carry its UID as their controller, so the garbage collector takes them.
        """
        await self._registry.deregister(proxy["metadata"]["uid"])
        await self._finalizer.release(proxy)

    async def _bury_former_lives(self, key: Key, proxy: Object | None) -> None:
        """Remove records under this name whose proxy is gone, which takes somebody removing our finalizer by hand.

        The store alone is no proof of death, so the API server is asked before anything is removed.
        """
        lives = self._registry.known_lives(key)
        if all(proxy is not None and uid == proxy["metadata"]["uid"] for uid in lives):
            return
        live = await self._cluster.get(ENVOY_PROXY, key)
        living = live["metadata"]["uid"] if live is not None else None
        for uid in lives:
            if uid != living:
                log.warning("orphaned_record_removed", proxy=str(key), uid=uid)
                await self._registry.deregister(uid)

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
                        self._store.take(Deleted(kind, known))


def controller_uid(obj: Object) -> str | None:
    """The UID of the object's controller, the index by which children are found."""
    references = obj["metadata"].get("ownerReferences", ())
    return next((each["uid"] for each in references if each.get("controller")), None)


def _paused(plan: Plan) -> Problem | None:
    """What a paused proxy reports of an object that it would write; nothing where everything holds anyway."""
    if plan.action not in (Action.CREATE, Action.REPAIR):
        return plan.problem
    fields = ", ".join(str(each) for each in plan.differences) or "all of it"
    return Problem("Paused", f"spec.paused is set; {plan.kind} {plan.key} waits to be written: {fields}")


def _missing_foundation(kind: Kind, results: list[Result]) -> Problem | None:
    """A Deployment must not mount a ConfigMap that is a stranger's, or of another configuration than it declares."""
    if kind != DEPLOYMENT:
        return None
    broken = next((each for each in results if each.kind == CONFIG_MAP and _is_broken(each)), None)
    if broken is None:
        return None
    return Problem("ConfigMapNotReady", f"the Deployment waits for {broken.kind} {broken.key}")


def _is_broken(result: Result) -> bool:
    """Whether other steps can't build on it. A contended object is ours and held what is declared, again and again."""
    return result.problem is not None and result.problem.reason != CONTENDED


def _unregistered(problem: Problem) -> Registration:
    return Registration(Change.SKIPPED, problem)


def _failed(kind: Kind, proxy: Object, problem: Problem) -> Result:
    return Result(kind, child_key(key_of(proxy)), Outcome.SKIPPED, None, problem=problem)


def _waiting(results: tuple[Result, ...], registration: Problem | None) -> Problem | None:
    """The first problem that time or somebody else may solve without an event that we would see."""
    problems = (*(each.problem for each in results), registration)
    return next((each for each in problems if each is not None and each.reason not in _SEEN_BY_WATCH), None)


def _address(proxy: Object, results: tuple[Result, ...]) -> str | None:
    """Where the proxy is reached: what the load balancer gave, or the Service's name in the cluster."""
    service = next((each for each in results if each.kind == SERVICE), None)
    if service is None or service.live is None or _is_broken(service):
        return None
    if service.live["spec"].get("type") != ServiceType.LOAD_BALANCER:
        key = child_key(key_of(proxy))
        return f"{key.name}.{key.namespace}.svc"
    given = service.live.get("status", {}).get("loadBalancer", {}).get("ingress", ())
    return next((each.get("hostname") or each.get("ip") for each in given), None)


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"spec.{'.'.join(map(str, first['loc']))}: {first['msg']}"
