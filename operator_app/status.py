"""The status of one proxy: computed whole, compared with what is stored, written only on a real transition.

:func:`next_status` is the specification, as an ordered list of pure condition specs over one observation. It decides
what is true; :class:`StatusWriter` decides whether that is news.

Guarantees

* ``lastTransitionTime`` moves only when the ``status`` of that condition flips; nothing else depends on the clock.
* ``observedGeneration`` follows the spec and nothing else, and never goes back: a write carries the resourceVersion
  that the observation started from, so it fails (409) on anything newer and on a reborn object of the same name. The
  API server does *not* check ``metadata.uid`` on a status apply, only the resourceVersion.
* ``Reconciled=True`` for a generation only after every owned field of every child was verified for it.
* ``Reconciling`` and ``Stalled`` exist only while they are true, as kstatus asks
  (sigs.k8s.io/cli-utils, pkg/kstatus), and so does ``Contended``.
* Conditions and fields of other writers survive: only what this operator owns is compared and sent.
* Conditions of this operator can be removed even after somebody wiped ``managedFields``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from operator_app.api.kinds import DEPLOYMENT, ENVOY_PROXY, Key, Kind, Object, key_of
from operator_app.apply import Result, merge_at_version
from operator_app.desired import controller_uid, selector_labels
from operator_app.errors import ConflictError, NotFoundError
from operator_app.kube.client import Cluster
from operator_app.kube.store import Store
from operator_app.pods import PodTrouble
from operator_app.results import NOT_ASKED, Outcome, Problem, Programming
from operator_app.ssa.comanagers import has_stale_managers, patch_of_stale_managers
from operator_app.ssa.contention import Contention, ContentionTracker, RestoredField, digest_of
from operator_app.ssa.fields import Difference, differences, fields_of, foreign_fields

RECONCILED: Final = "Reconciled"
AVAILABLE: Final = "Available"
REGISTERED: Final = "Registered"
PROGRAMMED: Final = "Programmed"
READY: Final = "Ready"
RECONCILING: Final = "Reconciling"
STALLED: Final = "Stalled"
CONTENDED: Final = "Contended"

_TYPES: Final = frozenset({RECONCILED, AVAILABLE, REGISTERED, PROGRAMMED, READY, RECONCILING, STALLED, CONTENDED})
LONGEST_MESSAGE: Final = 1024
"""Characters of a condition's message; the API allows 32,768, and no tenant reads more than a few sentences."""

_REASON: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,1022}[A-Za-z0-9_])?")
"""What the API allows as a condition's reason (metav1.Condition)."""

_ABOUT_PODS: Final = frozenset({AVAILABLE, PROGRAMMED})
_POD_SPEC: Final = ("f:spec", "f:template", "f:spec")
_STATUS: Final = ("f:status",)
_SUBRESOURCE: Final = "status"
_COUNTERS: Final = frozenset({("f:status", "f:replicas"), ("f:status", "f:readyReplicas")})


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that one reconcile has observed of one proxy.

    ``children`` are the results of applying them; ``registration`` is what keeps the outside record from being
    confirmed, ``None`` when it is confirmed; ``refusal`` is what keeps the spec from being acted on at all;
    ``problems`` are those of other steps. ``contentions`` are those of the EnvoyProxy itself: its status and its
    finalizer. ``pods`` is what keeps Pods from serving, by their own status, and ``programming`` what the Envoys of
    serving ones have said, ``None`` where they were not looked at.
    """

    proxy: Object
    children: Mapping[Kind, Result] = field(default_factory=dict)
    registration: Problem | None = None
    refusal: Problem | None = None
    address: str | None = None
    problems: tuple[Problem, ...] = ()
    contentions: tuple[Contention, ...] = ()
    programming: Programming | None = None
    pods: PodTrouble | None = None


@dataclass(frozen=True, slots=True)
class ConditionSpec:
    """One condition without its times; ``is_true`` is ``None`` where it is unknown."""

    type: str
    is_true: bool | None
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """The numbers that the Deployment controller reports, zero where it has reported none yet."""

    wanted: int = 0
    total: int = 0
    updated: int = 0
    ready: int = 0
    available: int = 0
    is_observed: bool = False
    failure: tuple[str, str] | None = None
    """Reason and message of the condition by which the Deployment says that it can't make Pods."""
    deadline: str | None = None
    """What the Deployment says once it has made no progress for its deadline."""

    @property
    def is_complete(self) -> bool:
        """Whether all Pods are of the current template, none of an older one."""
        return self.is_observed and self.updated >= self.wanted and self.total == self.updated

    @property
    def has_enough(self) -> bool:
        """Whether enough Pods serve: all but a quarter, rounded down, as a Deployment tolerates by default."""
        return self.available >= self.wanted - self.wanted // 4


def next_status(observation: Observation, *, now: datetime) -> Object:
    """The whole status that ``observation`` calls for. ``now`` is aware UTC and used only for conditions that flip."""
    proxy = observation.proxy
    generation: int = proxy["metadata"]["generation"]
    rollout = rollout_of(observation)
    stored = {each["type"]: each for each in (proxy.get("status") or {}).get("conditions", ())}
    status: Object = {
        "observedGeneration": generation,
        "replicas": rollout.total,
        "readyReplicas": rollout.ready,
        "selector": ",".join(f"{k}={v}" for k, v in sorted(selector_labels(proxy["metadata"]["name"]).items())),
        "conditions": [
            _condition(spec, generation, stored.get(spec.type), now) for spec in condition_specs(observation, rollout)
        ],
    }
    if observation.address is not None:
        status["address"] = observation.address
    return status


def deletion_status(proxy: Object, problem: Problem, *, of_record: bool, now: datetime) -> Object:
    """The status of a proxy whose deletion waits because of ``problem``; what was verified of its children stays.

    ``of_record``: it is the outside record that can't be removed.
    """
    generation: int = proxy["metadata"]["generation"]
    stored: Object = proxy.get("status") or {}
    false = (READY, REGISTERED) if of_record else (READY,)
    waiting = [ConditionSpec(kind, is_true=False, reason=problem.reason, message=problem.message) for kind in false]
    kept = {RECONCILED, AVAILABLE, REGISTERED, PROGRAMMED} - set(false)
    known = [each for each in stored.get("conditions", ()) if each["type"] in kept]
    conditions = [_condition(each, generation, condition_of(proxy, each.type), now) for each in waiting]
    fields: Object = {
        name: stored[name] for name in ("replicas", "readyReplicas", "selector", "address") if name in stored
    }
    return {"observedGeneration": generation, **fields, "conditions": [*conditions, *known]}


def condition_specs(observation: Observation, rollout: Rollout) -> tuple[ConditionSpec, ...]:
    """What holds and what does not, in the order in which people read it."""
    reconciled = _reconciled(observation)
    available = _available(observation, rollout)
    registered = _registered(observation)
    programmed = _programmed(observation, rollout)
    # Where nobody is asked, it is not waited for an answer.
    parts = (reconciled, available, registered) + (() if programmed.reason == NOT_ASKED else (programmed,))
    progress = _progress(observation, rollout, *parts)
    ready = _ready(observation, rollout, *parts)
    return (ready, reconciled, available, registered, programmed, *progress, *_contended(observation))


def _reconciled(observation: Observation) -> ConditionSpec:
    problem = _first_problem(observation)
    if problem is not None:
        return ConditionSpec(RECONCILED, is_true=False, reason=problem.reason, message=problem.message)
    kinds = ", ".join(result.kind.kind for result in observation.children.values())
    return ConditionSpec(RECONCILED, is_true=True, reason="Verified", message=f"every declared field holds of: {kinds}")


def _available(observation: Observation, rollout: Rollout) -> ConditionSpec:
    if _deployment(observation) is None:
        return ConditionSpec(
            AVAILABLE, is_true=False, reason="NoDeployment", message="the Deployment does not exist yet"
        )
    if not rollout.has_enough:
        message = "fewer proxies are ready than the spec asks for; readyReplicas has the number"
        return ConditionSpec(AVAILABLE, is_true=False, reason="NotEnoughReady", message=message)
    if rollout.wanted == 0:
        return ConditionSpec(AVAILABLE, is_true=True, reason="ScaledToZero", message="the spec asks for no proxies")
    return ConditionSpec(AVAILABLE, is_true=True, reason="EnoughReady", message="enough proxies are ready")


def _registered(observation: Observation) -> ConditionSpec:
    problem = observation.refusal or observation.registration
    if problem is not None:
        return ConditionSpec(REGISTERED, is_true=False, reason=problem.reason, message=problem.message)
    return ConditionSpec(REGISTERED, is_true=True, reason="Confirmed", message="the registry confirms the record")


def _programmed(observation: Observation, rollout: Rollout) -> ConditionSpec:
    refusal, found = observation.refusal, observation.programming
    if refusal is not None:
        return ConditionSpec(PROGRAMMED, is_true=False, reason=refusal.reason, message=refusal.message)
    if found is None:
        return ConditionSpec(PROGRAMMED, is_true=None, reason=NOT_ASKED, message="no Envoy was asked")
    if _deployment(observation) is not None and rollout.wanted == 0:
        return ConditionSpec(PROGRAMMED, is_true=True, reason="ScaledToZero", message="the spec asks for no proxies")
    return ConditionSpec(PROGRAMMED, is_true=found.is_true, reason=found.reason, message=found.message)


def _ready(observation: Observation, rollout: Rollout, *parts: ConditionSpec) -> ConditionSpec:
    """All of them together, once nothing but Pods of the current template is left to answer.

    Why Pods are missing is said rather than that they are, where the Deployment or a Pod says why. Unknown only if
    nothing is known to be wrong.
    """
    pods = observation.pods
    for part in sorted(parts, key=lambda part: part.is_true is None):
        if not part.is_true and not (part.type in _ABOUT_PODS and (rollout.failure or pods)):
            return ConditionSpec(READY, is_true=part.is_true, reason=part.reason, message=part.message)
    if rollout.failure is not None:
        reason, message = rollout.failure
        return ConditionSpec(READY, is_true=False, reason=reason, message=message)
    is_short = not rollout.is_complete or not all(part.is_true for part in parts)
    if pods is not None and is_short:
        return ConditionSpec(READY, is_true=False, reason=pods.reason, message=pods.message)
    if not rollout.is_complete:
        message = "proxies with an older configuration are still being replaced"
        return ConditionSpec(READY, is_true=False, reason="RollingOut", message=message)
    return ConditionSpec(
        READY, is_true=True, reason="Ready", message="reconciled, available, registered and programmed"
    )


def _progress(observation: Observation, rollout: Rollout, *parts: ConditionSpec) -> tuple[ConditionSpec, ...]:
    """kstatus: at most one of ``Stalled`` (somebody has to act) and ``Reconciling`` (wait)."""
    problems = (
        observation.refusal,
        *(result.problem for result in observation.children.values()),
        observation.registration,
        *observation.problems,
    )
    for problem in problems:
        if problem is not None and problem.needs_user_action:
            return (ConditionSpec(STALLED, is_true=True, reason=problem.reason, message=problem.message),)
    found = observation.programming
    if found is not None and found.needs_user_action:
        return (ConditionSpec(STALLED, is_true=True, reason=found.reason, message=found.message),)
    if rollout.failure is not None:
        reason, message = rollout.failure
        return (ConditionSpec(STALLED, is_true=True, reason=reason, message=message),)
    if rollout.deadline is not None:
        message = f"{rollout.deadline}; {observation.pods.message}" if observation.pods else rollout.deadline
        return (ConditionSpec(STALLED, is_true=True, reason="ProgressDeadlineExceeded", message=message),)
    if not rollout.is_complete or not all(part.is_true for part in parts):
        message = "the declared state is on its way"
        pods = observation.pods or PodTrouble("Progressing", message)
        return (ConditionSpec(RECONCILING, is_true=True, reason=pods.reason, message=pods.message),)
    return ()


def _contended(observation: Observation) -> tuple[ConditionSpec, ...]:
    """Which writer takes which fields again and again, as long as the tracker remembers it."""
    contended = [
        f"{result.contention} of the {result.kind}"
        for result in observation.children.values()
        if result.contention is not None
    ]
    contended += [f"{each} of the EnvoyProxy" for each in observation.contentions]
    if not contended:
        return ()
    message = "; ".join(contended)
    if "the operator in namespace" in message:
        message += "; two operators reconcile this EnvoyProxy: give each its own by --namespaces, or uninstall one"
    return (ConditionSpec(CONTENDED, is_true=True, reason="FieldsTaken", message=message),)


def rollout_of(observation: Observation) -> Rollout:
    """The Deployment's numbers, from our own Deployment only."""
    deployment = _deployment(observation)
    if deployment is None:
        return Rollout()
    reported = deployment.get("status") or {}
    # Numbers for an older generation describe Pods of an older template, and so does a deadline that these missed.
    is_observed = reported.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    return Rollout(
        wanted=deployment["spec"].get("replicas", 1),
        total=reported.get("replicas", 0),
        updated=reported.get("updatedReplicas", 0),
        ready=reported.get("readyReplicas", 0),
        available=reported.get("availableReplicas", 0),
        is_observed=is_observed,
        failure=_failure(reported),
        deadline=_deadline(deployment, reported) if is_observed else None,
    )


def _failure(reported: Object) -> tuple[str, str] | None:
    """Why the Deployment can't make Pods: a quota, an admission policy, a Pod that is not valid."""
    for each in reported.get("conditions", ()):
        if each["type"] == "ReplicaFailure" and each["status"] == "True":
            return each.get("reason") or "ReplicaFailure", f"the Deployment can't make Pods: {each.get('message', '')}"
    return None


def _deadline(deployment: Object, reported: Object) -> str | None:
    for each in reported.get("conditions", ()):
        if each["type"] == "Progressing" and each.get("reason") == "ProgressDeadlineExceeded":
            foreign = foreign_fields(deployment, _POD_SPEC)
            added = f"; others have set {', '.join(foreign)}" if foreign else ""
            return f"the Deployment makes no progress: {each.get('message', '')}; look at its Pods{added}"
    return None


def _deployment(observation: Observation) -> Object | None:
    """The live Deployment, if it is this proxy's."""
    result = observation.children.get(DEPLOYMENT)
    if result is None or result.live is None:
        return None
    return result.live if controller_uid(result.live) == observation.proxy["metadata"]["uid"] else None


def _first_problem(observation: Observation) -> Problem | None:
    children = (result.problem for result in observation.children.values())
    problems = (observation.refusal, *children, *observation.problems)
    return next((problem for problem in problems if problem is not None), None)


def _condition(spec: ConditionSpec, generation: int, stored: Object | None, now: datetime) -> Object:
    status = "Unknown" if spec.is_true is None else "True" if spec.is_true else "False"
    since = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    if stored is not None and stored["status"] == status:
        since = stored["lastTransitionTime"]
    return {
        "type": spec.type,
        "status": status,
        "observedGeneration": generation,
        "lastTransitionTime": since,
        "reason": spec.reason if _REASON.fullmatch(spec.reason) else "Failed",
        "message": shortened(spec.message),
    }


def shortened(message: str) -> str:
    """A message of at most ``LONGEST_MESSAGE`` characters, whoever wrote it: a webhook, a registry, another writer."""
    if len(message) <= LONGEST_MESSAGE:
        return message
    return f"{message[:LONGEST_MESSAGE]} ... ({len(message) - LONGEST_MESSAGE} characters more)"


def condition_of(proxy: Object, kind: str) -> Object | None:
    """The stored condition of that type."""
    stored = (proxy.get("status") or {}).get("conditions", ())
    return next((each for each in stored if each["type"] == kind), None)


def observed_current_generation(proxy: Object) -> bool:
    """Whether the stored status already covers the proxy's current generation, whatever it says."""
    known = condition_of(proxy, RECONCILED)
    return known is not None and bool(known["observedGeneration"] == proxy["metadata"]["generation"])


def is_verified(proxy: Object) -> bool:
    """Whether the stored status already confirms the proxy's current generation, so that a write now is a repair.

    A contended child was verified before it became contended.
    """
    return any(
        each["type"] == RECONCILED
        and (each["status"] == "True" or each["reason"] == CONTENDED)
        and each["observedGeneration"] == proxy["metadata"]["generation"]
        for each in (proxy.get("status") or {}).get("conditions", ())
    )


class StatusWriter:
    """Writes a status when, and only when, it differs from what is stored.

    Counters alone (``replicas``, ``readyReplicas``) change with every Pod during a rollout, so their write is debounced
    by ``settle_s`` seconds. A condition that flips takes them along at once. A status that another writer keeps
    changing is restored ever more slowly (``ssa.contention``).
    """

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        tracker: ContentionTracker,
        *,
        on_write: Callable[[Kind, Outcome], None],
        mono: Callable[[], float],
        settle_s: float,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._contention = tracker
        self._on_write = on_write
        self._mono = mono
        self._settle_s = settle_s
        self._due_mono: dict[Key, float] = {}
        self._written: dict[Key, str] = {}

    def contention(self, proxy: Object) -> Contention | None:
        """Who keeps changing the status of ``proxy``, if somebody does."""
        return self._contention.contention(_subject(proxy), now_mono=self._mono())

    async def write(self, proxy: Object, status: Object) -> float | None:
        """Bring the stored status of ``proxy`` to ``status``. Returns in how many seconds to look again, if at all.

        Raises ``ConflictError`` when the proxy is not at the observed version any more, or gone: observe anew.
        """
        try:
            return await self._write(proxy, status)
        except NotFoundError as error:
            # Deleted, though no watch has delivered it yet: the next reconcile starts from what is stored now.
            raise ConflictError(error.message, kind=error.kind, key=error.key) from error

    async def _write(self, proxy: Object, status: Object) -> float | None:
        key = key_of(proxy)
        if has_stale_managers(proxy, subresource=_SUBRESOURCE) and self._pause_s(proxy, _digest(status)) <= 0:
            patch = patch_of_stale_managers(proxy, subresource=_SUBRESOURCE)
            proxy = await merge_at_version(
                self._cluster, self._store, ENVOY_PROXY, proxy, patch, on_write=self._on_write
            )
        declared = status
        if not fields_of(proxy, subresource=_SUBRESOURCE):
            status = _reclaim_previous_conditions(status, proxy)
        metadata = {name: proxy["metadata"][name] for name in ("name", "namespace", "resourceVersion")}
        desired = {"apiVersion": proxy["apiVersion"], "kind": proxy["kind"], "metadata": metadata, "status": status}
        changed = differences(desired, proxy, subresource=_SUBRESOURCE)
        if not changed:
            self._due_mono.pop(key, None)
            return None
        if _only_counters(changed):
            due = self._due_mono.setdefault(key, self._mono() + self._settle_s)
            if due > self._mono():
                return due - self._mono()
        digest = _digest(declared)
        is_repeated = self._written.get(key) == digest
        pause_s = self._pause_s(proxy, digest) if is_repeated else 0.0
        if pause_s > 0:
            return pause_s
        self._due_mono.pop(key, None)
        applied = await self._cluster.apply(ENVOY_PROXY, desired, force=True, subresource=_SUBRESOURCE)
        is_same = applied.object["metadata"]["resourceVersion"] == metadata["resourceVersion"]
        self._on_write(ENVOY_PROXY, Outcome.UNCHANGED if is_same else Outcome.CONFIGURED)
        self._store.learn(ENVOY_PROXY, applied.object)
        if is_repeated:
            # This very status was written before, so somebody else has changed it since.
            restored = RestoredField(_STATUS, "the status", digest, ())
            self._contention.record(_subject(proxy), [restored], is_repair=True, now_mono=self._mono())
        self._written[key] = digest
        is_unfinished = status != declared or has_stale_managers(applied.object, subresource=_SUBRESOURCE)
        return 0.0 if is_unfinished else None

    def _pause_s(self, proxy: Object, digest: str) -> float:
        """How long a status with this digest has to wait, in seconds."""
        return self._contention.pause_s(_subject(proxy), {_STATUS: digest}, is_repair=True, now_mono=self._mono())

    def forget(self, key: Key) -> None:
        """Drop what is kept for a proxy that is gone."""
        self._due_mono.pop(key, None)
        self._written.pop(key, None)


def _subject(proxy: Object) -> str:
    return f"EnvoyProxy {key_of(proxy)} {proxy['metadata']['uid']} status"


def _digest(status: Object) -> str:
    """What tells one status from another, without the times of its conditions."""
    conditions = [{**each, "lastTransitionTime": None} for each in status["conditions"]]
    return digest_of(status | {"conditions": conditions})


def _reclaim_previous_conditions(status: Object, proxy: Object) -> Object:
    """``status`` with the conditions of ours that are stored: what we do not own again can't be removed by an apply."""
    stored: Object = proxy.get("status") or {}
    previous = {each["type"]: each for each in stored.get("conditions", ()) if each["type"] in _TYPES}
    known = {each["type"]: each for each in status["conditions"]}
    address = {name: stored[name] for name in ("address",) if name in stored}
    return address | status | {"conditions": list((previous | known).values())}


def _only_counters(changed: tuple[Difference, ...]) -> bool:
    """Whether nothing differs but counters that were reported before."""
    return all(each.path in _COUNTERS and each.live is not None for each in changed)
