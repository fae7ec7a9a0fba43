"""Making objects hold what we declare, by server-side apply and nothing else: *ownership replaces diffing*.

Every object takes two steps, and each can be repeated or interrupted anywhere:

1. **Plan.** The latest known version comes from the store, or from the API server where the store has none. Pure from
   there on: who owns the object, and which fields that we own differ from what we declare? An object that is not ours
   is left alone, and one without differences needs no request. The only record of what was applied last is the object's
   own ``managedFields``, so the plan is the same before and after a restart.
2. **Execute.** At most one apply for each object. A patch precedes it where something foreign makes the API server
   refuse it (``ssa.unblock``) or where another writer takes a field over (``ssa.handover``), and follows it where a
   stale manager co-owns our fields (``ssa.comanagers``).

Guarantees

* *A foreign object is never written.* A create carries a resourceVersion that no object can have: the API server
  creates when the name is free and answers 409 when it is not, atomically and even with ``force``. A repair carries the
  UID and the resourceVersion that were examined: 409 when that object has gone or moved on.
* *Only what is ours is forced.* ``force`` is used for objects whose controller is this very EnvoyProxy, by UID.
* *No hot loop.* An apply that the API server refuses, or after which the same differences remain, is counted, logged
  once, and not sent again until the declaration or the object changes; where the reason may lie outside of both, once a
  minute. What another writer keeps taking, a field or the whole object, is taken back at once a few times and then ever
  more slowly (``ssa.contention``).
* *No write is built on a guess.* A write whose fate is unknown (a 5xx, a timeout, a lost connection, a cancellation) is
  followed by a live read: the store may never learn of it, if its event is lost as well.
* *No write without a reason.* Each result says which fields were written and who had them (``ssa.changes``).

What does not belong here: what the objects contain (``desired``), and when to try again (``controller.workqueue``).
"""

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import structlog

from operator_app.api.kinds import (
    ANNOTATION_ADOPTABLE_BY,
    ANNOTATION_INSTALLATION,
    DEPLOYMENT,
    ENVOY_PROXY,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.errors import (
    ConflictError,
    FencedError,
    InvalidError,
    PolicyError,
    TerminalError,
    ThrottledError,
)
from operator_app.kube.client import Cluster
from operator_app.kube.preconditions import identity, pinned_uid, pinned_version
from operator_app.kube.store import Store
from operator_app.results import Outcome, Problem
from operator_app.ssa.changes import FieldChange, field_changes
from operator_app.ssa.comanagers import has_stale_managers, patch_of_stale_managers
from operator_app.ssa.contention import WHOLE_OBJECT, Contention, ContentionTracker, RestoredField, digest_of
from operator_app.ssa.fields import Difference, Drift, Path, differences, owners_of
from operator_app.ssa.handover import patch_of_hand_over, set_back
from operator_app.ssa.unblock import unblocking_patch

log = structlog.get_logger(__name__)

_MANAGED_FIELDS: Final[Path] = ("f:metadata", "f:managedFields")

IMPOSSIBLE_VERSION: Final = "1"
"""A resourceVersion that no stored object has: etcd's own first revision precedes every write.

An apply that carries it is an atomic create-only. The API server checks a resourceVersion against an existing object
before anything else and ignores it where there is none (``tests/e2e/api_server/test_client_contract.py`` holds it to
that).
"""


NAME_CONFLICT: Final = "NameConflict"
"""The reason of a problem with a foreign object under the name of ours."""

CONTENDED: Final = "Contended"
"""The reason of a problem with an object of ours that another writer keeps deleting, or in which it keeps taking fields
while all other fields hold."""


POLICY_RETRY_S: Final = 60.0
"""Seconds until an apply is sent again that was refused for something else than its object: by a policy of the cluster,
or for a node port. No event tells that the policy is gone, or that the port is free."""

_NODE_PORT: Final = re.compile(r"spec\.ports\[\d+\]\.nodePort")
"""A field that is refused where another Service has its value, or where the cluster has none left to choose."""

RECHECK_S: Final = 60.0
"""Seconds until an object that is on its way out is looked at again, in case that no event tells of its end."""


class Ownership(StrEnum):
    """Whose object it is."""

    OURS = "ours"
    PREVIOUS_INCARNATION = "previous incarnation"
    FOREIGN = "foreign"


class Action(StrEnum):
    """What a plan wants to do."""

    NOTHING = "nothing"
    CREATE = "create"
    REPAIR = "repair"
    WAIT = "wait"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class OwnershipCheck:
    """How to tell whose an object is, and what a repair must prove about the object that it repairs.

    ``ownership`` classifies a live object. ``precondition`` gives the metadata that makes an apply fail on anything but
    the object that was examined; ``retry_precondition`` is that of a second try, which directly follows a live read.
    ``was_reported``: the status already covers this generation, so a create restores what was deleted since.
    """

    ownership: Callable[[Object], Ownership]
    precondition: Callable[[Object], Mapping[str, str]]
    retry_precondition: Callable[[Object], Mapping[str, str]]
    was_reported: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What has to be done for one object, decided without writing. ``live`` is the version that was examined."""

    kind: Kind
    desired: Object
    live: Object | None
    action: Action
    differences: tuple[Difference, ...] = ()
    problem: Problem | None = None

    @property
    def key(self) -> Key:
        """The address of the object."""
        return key_of(self.desired)


@dataclass(frozen=True, slots=True)
class Result:
    """What was done for one object.

    ``live`` is its latest known version; no ``problem`` means: every declared field was verified. ``changes`` are the
    fields that were written, or should have been. ``requeue_after_s``: reconcile again after so many seconds.
    """

    kind: Kind
    key: Key
    outcome: Outcome
    live: Object | None
    changes: tuple[FieldChange, ...] = ()
    problem: Problem | None = None
    contention: Contention | None = None
    requeue_after_s: float | None = None


def child_check(proxy: Object, *, was_reported: bool = False) -> OwnershipCheck:
    """A child of ``proxy`` has a controller reference with *this* proxy's UID.

    An object without any controller that carries ``ANNOTATION_ADOPTABLE_BY`` with the proxy's name is adopted: whoever
    may write the object has consented.
    """
    uid, name = proxy["metadata"]["uid"], proxy["metadata"]["name"]

    def ownership(live: Object) -> Ownership:
        for reference in live["metadata"].get("ownerReferences", ()):
            if reference.get("controller"):
                if reference["uid"] == uid:
                    return Ownership.OURS
                if (reference["apiVersion"], reference["kind"], reference["name"]) == (
                    ENVOY_PROXY.api_version,
                    ENVOY_PROXY.kind,
                    name,
                ):
                    return Ownership.PREVIOUS_INCARNATION
                return Ownership.FOREIGN
        consent = live["metadata"].get("annotations", {}).get(ANNOTATION_ADOPTABLE_BY)
        return Ownership.OURS if consent == name else Ownership.FOREIGN

    def precondition(live: Object) -> dict[str, str]:
        # The Deployment controller writes status all the time, and a repair that pinned the version would conflict with
        # it. What is left unprotected is the time between the check of the fencing token and the arrival of the write.
        return pinned_uid(live) if live["kind"] == DEPLOYMENT.kind else pinned_version(live)

    return OwnershipCheck(ownership, precondition, pinned_uid, was_reported)


def plan(kind: Kind, desired: Object, live: Object | None, check: OwnershipCheck) -> Plan:
    """Decide what one object needs. Pure."""
    if live is None:
        return Plan(kind, desired, None, Action.CREATE)
    key = key_of(live)
    match check.ownership(live):
        case Ownership.FOREIGN:
            message = f"{kind} {key} exists and belongs to somebody else; rename or delete it to go on"
            return Plan(
                kind, desired, live, Action.LEAVE, problem=Problem(NAME_CONFLICT, message, needs_user_action=True)
            )
        case Ownership.PREVIOUS_INCARNATION:
            message = f"{kind} {key} of a deleted EnvoyProxy with this name is still being collected"
            problem = Problem("PreviousIncarnation", message, ends_with_event=True)
            return Plan(kind, desired, live, Action.WAIT, problem=problem)
        case Ownership.OURS if "deletionTimestamp" in live["metadata"]:
            message = f"{kind} {key} is being deleted and will be created anew{_held_by(live)}"
            problem = Problem("Terminating", message, ends_with_event=True)
            return Plan(kind, desired, live, Action.WAIT, problem=problem)
        case Ownership.OURS:
            found = differences(desired, live)
            return Plan(kind, desired, live, Action.REPAIR if found else Action.NOTHING, found)


def _held_by(live: Object) -> str:
    """Which finalizers a deletion waits for."""
    finalizers = live["metadata"].get("finalizers")
    return f"; its deletion waits for {', '.join(finalizers)}" if finalizers else ""


class Applier:
    """Plans objects against the store and executes the plans. One instance for the operator.

    ``on_write`` is called with every write and its outcome; ``UNCHANGED`` there means an avoidable write, and a bug.
    ``mono`` is a monotonic clock in seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        tracker: ContentionTracker,
        *,
        on_write: Callable[[Kind, Outcome], None],
        mono: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._contention = tracker
        self._on_write = on_write
        self._mono = mono
        self._rejected: dict[tuple[Kind, Key], _RejectedApply] = {}
        self._unwatched: set[tuple[Kind, Key]] = set()
        self._of_unknown_fate: set[tuple[Kind, Key]] = set()

    async def plan(self, kind: Kind, desired: Object, check: OwnershipCheck, *, ask_server: bool = True) -> Plan:
        """Decide what one object needs. Writes nothing, and reads live only what the store does not know.

        Without ``ask_server`` only a name is read under which a create met an object: the create is atomic, so it needs
        no read before it, but one that is refused again and again would be worse than a read. An object that the latest
        write may or may not have reached is read in any case.
        """
        key = key_of(desired)
        if (kind, key) in self._of_unknown_fate:
            live = await self._read(kind, key, check)
            self._of_unknown_fate.discard((kind, key))
            return plan(kind, desired, live, check)
        live = self._store.get(kind, key)
        if live is None and (ask_server or (kind, key) in self._unwatched):
            live = await self._cluster.get(kind, key)
            if live is None:
                self._unwatched.discard((kind, key))
        return plan(kind, desired, live, check)

    async def _read(self, kind: Kind, key: Key, check: OwnershipCheck) -> Object | None:
        """The object as stored now. The store does not learn a foreign one, of which no watch tells."""
        with self._store.reading(kind, key) as reading:
            live = await self._cluster.get(kind, key)
            if live is None or check.ownership(live) is Ownership.OURS:
                reading.learn(live)
        return live

    async def execute(self, plan: Plan, check: OwnershipCheck) -> Result:
        """Carry out ``plan`` by at most one successful apply.

        A conflict means that the store was behind: the object is read and planned again, once. Raises
        ``ConflictError`` when another writer is faster a second time, and the cluster's other errors as they come.
        """
        try:
            return await self._execute(plan, check)
        except ConflictError:
            replanned = await self._replan(plan, check)
            return await self._execute(replanned, replace(check, precondition=check.retry_precondition))

    async def _replan(self, outdated: Plan, check: OwnershipCheck) -> Plan:
        live = await self._cluster.get(outdated.kind, outdated.key)
        # No watch delivers the deletion of a foreign object, so the store must not have it.
        if live is not None and check.ownership(live) is Ownership.OURS:
            self._store.learn(outdated.kind, live)
        if live is not None and outdated.live is None:
            # A foreign object, or one of ours whose label somebody has taken, which no watch delivers.
            self._unwatched.add((outdated.kind, outdated.key))
        return plan(outdated.kind, outdated.desired, live, check)

    async def _execute(self, plan: Plan, check: OwnershipCheck) -> Result:
        match plan:
            case Plan(action=Action.CREATE | Action.REPAIR):
                return await self._write(plan, check)
            case Plan(action=Action.NOTHING, live=dict(live)):
                # The object holds, so what was rejected before does not matter any more.
                self._rejected.pop((plan.kind, plan.key), None)
                return await self._unshared(plan, live)
            case Plan(action=Action.WAIT):
                result = Result(plan.kind, plan.key, Outcome.SKIPPED, plan.live, problem=plan.problem)
                return replace(result, requeue_after_s=RECHECK_S)
            case _:
                return Result(plan.kind, plan.key, Outcome.SKIPPED, plan.live, problem=plan.problem)

    async def _unshared(self, plan: Plan, live: Object) -> Result:
        """The result of an object that holds; stale managers lose our fields first, which is a write of its own."""
        if has_stale_managers(live):
            subject, now_mono = _subject(plan), self._mono()
            shared = RestoredField(_MANAGED_FIELDS, ".metadata.managedFields", "", ())
            if self._contention.pause_s(subject, {shared.path: ""}, is_repair=True, now_mono=now_mono) <= 0:
                live = await self._remove_stale_managers(plan.kind, live)
                self._contention.record(subject, [shared], is_repair=True, now_mono=now_mono)
        return self._with_contention(plan, Result(plan.kind, plan.key, Outcome.UNCHANGED, live))

    async def _write(self, plan: Plan, check: OwnershipCheck) -> Result:
        rejected = self._rejected.get((plan.kind, plan.key))
        if rejected is not None and rejected.is_same(plan, now_mono=self._mono()):
            return rejected.result(plan, now_mono=self._mono())
        pause_s = self._contention.pause_s(
            _subject(plan), _restored(plan, check), is_repair=check.was_reported, now_mono=self._mono()
        )
        if pause_s > 0:
            return self._paused(plan, pause_s)
        try:
            with self._fate_of(plan):
                if plan.live is None:
                    return await self._create(plan, check)
                return await self._repair(plan, plan.live, check)
        except (InvalidError, PolicyError) as error:
            # A rival that changes the object each time would make every refused apply look like a new one.
            self._count(plan, check)
            retry_after_s = POLICY_RETRY_S if _may_pass_later(error) else None
            problem = _refused(error, plan)
            return self._reject(plan, plan.live, plan.differences, problem, retry_after_s=retry_after_s)

    @contextmanager
    def _fate_of(self, plan: Plan) -> Generator[None]:
        """Remember, until it is read, an object whose write was neither answered nor certainly refused."""
        written = (plan.kind, plan.key)
        self._of_unknown_fate.add(written)
        try:
            yield
        except (ConflictError, ThrottledError, FencedError, TerminalError):
            self._of_unknown_fate.discard(written)
            raise
        self._of_unknown_fate.discard(written)

    def _reject(
        self,
        plan: Plan,
        live: Object | None,
        left: tuple[Difference, ...],
        problem: Problem,
        *,
        outcome: Outcome = Outcome.SKIPPED,
        retry_after_s: float | None = None,
    ) -> Result:
        """Remember that this write has no effect, for so long or until something of it changes, and give the result."""
        retry_at_mono = None if retry_after_s is None else self._mono() + retry_after_s
        rejected = _RejectedApply(plan.desired, live, left, problem, retry_at_mono)
        self._rejected[plan.kind, plan.key] = rejected
        return replace(rejected.result(plan, now_mono=self._mono()), outcome=outcome, live=live)

    def _count(self, plan: Plan, check: OwnershipCheck) -> None:
        """Tell the tracker what a write of ``plan`` restores."""
        changes = field_changes(plan.differences, plan.live)
        installation = _other_installation(plan)
        rivals = () if installation is None else (f"the operator in namespace {installation}",)
        restored = [
            RestoredField(
                each.path,
                change.field,
                digest_of(each.desired),
                (*rivals, *change.managers),
                known_rival=installation is not None,
            )
            for each, change in zip(plan.differences, changes, strict=True)
            if each.drift is not Drift.TO_RELEASE or check.was_reported
        ]
        if installation is not None:
            log.warning("other_installation", kind=plan.kind.kind, key=str(plan.key), installation=installation)
        if plan.live is None:
            restored = [RestoredField(path, "the whole object", "", ()) for path in _restored(plan, check)]
        released = [each.path for each in plan.differences if each.drift is Drift.TO_RELEASE]
        self._contention.record(
            _subject(plan), restored, released=released, is_repair=check.was_reported, now_mono=self._mono()
        )

    def reset_rejected(self) -> None:
        """Allow refused applies again, and those that did not hold: the cause may lie outside of what is watched.

        The resync that calls this has compared every object with a list, so no fate is unknown any more.
        """
        self._rejected.clear()
        self._of_unknown_fate.clear()

    async def delete(self, kind: Kind, live: Object, *, at_this_version: bool = False) -> bool:
        """Delete exactly the object that was examined. Returns whether it was there.

        The store forgets it before the watch delivers the deletion, so no reconcile in between deletes it again. With
        ``at_this_version`` only this version: ``ConflictError`` when it was written to since.
        """
        version = live["metadata"]["resourceVersion"] if at_this_version else None
        was_there = await self._cluster.delete(
            kind, key_of(live), uid=live["metadata"]["uid"], resource_version=version
        )
        if was_there:
            self._on_write(kind, Outcome.DELETED)
        self._store.forget(kind, live, is_certain=not was_there)
        return was_there

    def record_write(self, kind: Kind, outcome: Outcome) -> None:
        """Count a write that was made beside :meth:`execute`."""
        self._on_write(kind, outcome)

    def _paused(self, plan: Plan, pause_s: float) -> Result:
        contention = self._contention.contention(_subject(plan), now_mono=self._mono())
        result = skipped(plan, Problem(CONTENDED, _contended(plan, contention), ends_with_event=True))
        return replace(result, contention=contention, requeue_after_s=pause_s)

    def _with_contention(self, plan: Plan, result: Result) -> Result:
        """The result with the contention over its object, to be looked at again when the first of it is forgotten."""
        contention = self._contention.contention(_subject(plan), now_mono=self._mono())
        return replace(result, contention=contention, requeue_after_s=contention.forgotten_in_s if contention else None)

    async def _create(self, plan: Plan, check: OwnershipCheck) -> Result:
        body = _with_metadata(plan.desired, {"resourceVersion": IMPOSSIBLE_VERSION})
        applied = await self._cluster.apply(plan.kind, body, force=False)
        if not applied.created:
            await self._undo_merge(plan.kind, applied.object)
        result = self._verified(plan, applied.object, Outcome.CREATED)
        self._count(plan, check)
        return self._with_contention(plan, result)

    async def _undo_merge(self, kind: Kind, merged: Object) -> None:
        """Release what a create has merged into an object that was there after all.

        The create-only precondition makes this impossible; a server that did not honour it must still not change a
        foreign object. Applying an empty configuration releases what we set and nothing else.
        """
        body = {"apiVersion": merged["apiVersion"], "kind": merged["kind"], "metadata": identity(merged)}
        await self._cluster.apply(kind, body, force=False)
        message = "another writer created it first; what we had merged into it was taken back"
        raise ConflictError(message, kind=kind, key=key_of(merged))

    async def _repair(self, plan: Plan, live: Object, check: OwnershipCheck) -> Result:
        handed_over = patch_of_hand_over(plan.kind, live, plan.differences)
        if handed_over is not None:
            live = await self._patch(plan.kind, live, handed_over)
            if not differences(plan.desired, live):
                # The patch was all there was to write, and has been counted as such.
                return self._with_contention(plan, Result(plan.kind, plan.key, Outcome.CONFIGURED, live))
        before = set_back(plan.kind, plan.desired, live, plan.differences)
        if before is not None:
            body = _with_metadata(before, check.precondition(live))
            live = (await self._cluster.apply(plan.kind, body, force=True)).object
            self._on_write(plan.kind, Outcome.CONFIGURED)
        body = _with_metadata(plan.desired, check.precondition(live))
        try:
            applied = await self._cluster.apply(plan.kind, body, force=True)
        except InvalidError as error:
            if any(cause.field == "metadata.uid" for cause in error.causes):
                raise ConflictError("another object took its name", kind=plan.kind, key=plan.key) from error
            cleared = await self._clear(plan, live, error)
            body = _with_metadata(plan.desired, check.precondition(cleared))
            applied = await self._cluster.apply(plan.kind, body, force=True)
        is_same = applied.object["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"]
        result = self._verified(plan, applied.object, Outcome.UNCHANGED if is_same else Outcome.CONFIGURED)
        self._count(plan, check)
        stored = applied.object
        if has_stale_managers(stored):
            stored = await self._remove_stale_managers(plan.kind, stored)
        return self._with_contention(plan, replace(result, live=stored))

    async def _clear(self, plan: Plan, live: Object, error: InvalidError) -> Object:
        """``live`` without the foreign parts for which a repair was refused; raises ``error`` if there are none."""
        patch = unblocking_patch(plan.desired, live, [cause.field for cause in error.causes])
        if patch is None:
            raise error
        return await self._patch(plan.kind, live, patch)

    async def _remove_stale_managers(self, kind: Kind, live: Object) -> Object:
        """Become the only owner of our fields again, so that a field which we release is removed.

        The declaration holds either way, so a conflict costs nothing: the event of the other write triggers the next
        reconcile, and the repair before this patch is reported all the same.
        """
        try:
            return await self._patch(kind, live, patch_of_stale_managers(live))
        except ConflictError:
            return live

    async def _patch(self, kind: Kind, live: Object, patch: Object) -> Object:
        return await merge_at_version(self._cluster, self._store, kind, live, patch, on_write=self._on_write)

    def _verified(self, plan: Plan, stored: Object, outcome: Outcome) -> Result:
        """Compare the server's answer with the declaration; "exists" is not "done"."""
        self._on_write(plan.kind, outcome)
        self._store.learn(plan.kind, stored)
        why = field_changes(plan.differences, plan.live)
        left = differences(plan.desired, stored)
        if not left:
            self._rejected.pop((plan.kind, plan.key), None)
            return Result(plan.kind, plan.key, outcome, stored, why)
        log.warning(
            "noncanonical",
            kind=plan.kind.kind,
            key=str(plan.key),
            changes=[each.as_dict() for each in field_changes(left, stored)],
        )
        rejected = self._reject(plan, stored, left, _not_held(left), outcome=outcome)
        return replace(rejected, changes=why)


@dataclass(frozen=True, slots=True)
class _RejectedApply:
    """An apply that is known to have no effect: what was declared, on which object, and what the server made of it."""

    desired: Object
    live: Object | None
    differences: tuple[Difference, ...]
    problem: Problem
    retry_at_mono: float | None = None

    def is_same(self, plan: Plan, *, now_mono: float) -> bool:
        """Whether ``plan`` would send the same write to the same object for the same differences, before its time."""
        if self.retry_at_mono is not None and now_mono >= self.retry_at_mono:
            return False
        is_same_write = plan.desired == self.desired and plan.differences == self.differences
        return is_same_write and _uid(plan.live) == _uid(self.live)

    def result(self, plan: Plan, *, now_mono: float) -> Result:
        """What ``plan`` comes to without being sent."""
        requeue_after_s = None if self.retry_at_mono is None else self.retry_at_mono - now_mono
        return replace(skipped(plan, self.problem), requeue_after_s=requeue_after_s)


def skipped(plan: Plan, problem: Problem) -> Result:
    """The result of a plan that is not executed because of ``problem``."""
    why = field_changes(plan.differences, plan.live)
    return Result(plan.kind, plan.key, Outcome.SKIPPED, plan.live, why, problem)


def _subject(plan: Plan) -> str:
    """What contention is tracked by: kind, name and the owner's UID, so that a re-created object is the same."""
    owners = plan.desired["metadata"].get("ownerReferences", ())
    return " ".join((plan.kind.kind, str(plan.key), *(each["uid"] for each in owners)))


def _restored(plan: Plan, check: OwnershipCheck) -> dict[Path, str]:
    """What executing ``plan`` restores: the declared value as text, by path."""
    if plan.live is None:
        return {WHOLE_OBJECT: ""} if check.was_reported else {}
    return {each.path: digest_of(each.desired) for each in plan.differences}


def _other_installation(plan: Plan) -> str | None:
    """The namespace of another operator that applied the live object, if its annotation names one."""
    ours, found = (
        (each or {}).get("metadata", {}).get("annotations", {}).get(ANNOTATION_INSTALLATION)
        for each in (plan.desired, plan.live)
    )
    return found if ours is not None and found not in (None, ours) else None


def _uid(obj: Object | None) -> str | None:
    return None if obj is None else obj["metadata"]["uid"]


def _with_metadata(obj: Object, extra: Mapping[str, str]) -> Object:
    return obj | {"metadata": obj["metadata"] | extra}


def _not_held(left: tuple[Difference, ...]) -> Problem:
    fields = ", ".join(str(each) for each in left)
    message = f"the API server stores something else than was applied for {fields}; look for an admission webhook"
    return Problem("FieldsNotHeld", message, needs_user_action=True, ends_with_event=True)


def _may_pass_later(error: InvalidError | PolicyError) -> bool:
    """Whether what is wrong may lie outside of the object and end without any event about it."""
    return isinstance(error, PolicyError) or any(_NODE_PORT.fullmatch(cause.field) for cause in error.causes)


def _refused(error: InvalidError | PolicyError, plan: Plan) -> Problem:
    if isinstance(error, PolicyError):
        message = f"{plan.kind} {plan.key} is refused by a policy of the cluster: {error.message}"
        return Problem(error.reason, message, needs_user_action=True, ends_with_event=True)
    fields = ", ".join(cause.field for cause in error.causes) or "the object"
    message = f"{error.kind} {error.key}: {fields} was refused: {error.message}{_co_owners(plan)}"
    return Problem(error.reason, message, needs_user_action=True, ends_with_event=True)


def _co_owners(plan: Plan) -> str:
    """Who keeps parts of what this plan releases: a part alone may be invalid (kubernetes#108081)."""
    released = (each for each in plan.differences if each.drift is Drift.TO_RELEASE)
    kept = {str(each): owners_of(each.path, plan.live) for each in released} if plan.live is not None else {}
    told = [f"{field} is kept by {', '.join(owners)}" for field, owners in kept.items() if owners]
    return f"; {'; '.join(told)}" if told else ""


def _contended(plan: Plan, contention: Contention | None) -> str:
    return f"{plan.kind} {plan.key}: {contention}; make one of the two writers give it up"


async def merge_at_version(
    cluster: Cluster,
    store: Store,
    kind: Kind,
    live: Object,
    patch: Object,
    *,
    on_write: Callable[[Kind, Outcome], None],
) -> Object:
    """Merge ``patch`` into exactly the version that was examined, and return what is stored then.

    Raises ``ConflictError`` when ``live`` is not the stored version any more: no change of another writer is
    overwritten.
    """
    pinned = patch | {"metadata": patch.get("metadata", {}) | pinned_version(live)}
    stored = await cluster.merge_patch(kind, key_of(live), pinned)
    on_write(kind, Outcome.CONFIGURED)
    store.learn(kind, stored)
    return stored
