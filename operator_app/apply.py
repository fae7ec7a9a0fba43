"""Making objects hold what we declare, by server-side apply and nothing else: *ownership replaces diffing*.

Every object takes the same three steps, and each step can be repeated or interrupted anywhere:

1. **Look.** The latest known version comes from the store; when the store knows none, the API server is asked, so that
   no create rests on a cache alone.
2. **Plan.** Pure: whose object is it, and which fields that we own differ from what we declare? An object that is not
   ours is left alone. An object without differences needs no request. There is no record of "last applied" anywhere
   but in the object's own ``managedFields``, so the plan is the same before and after a restart.
3. **Carry out.** At most one apply for each object.

Guarantees

* *A stranger's object is never written.* A create carries a resourceVersion that no object can have: the API server
  creates when the name is free and answers 409 when it is not, atomically and even with ``force``. A repair carries the
  UID that was examined: 409 when that object has gone, 422 when another one took its name.
* *Only what is ours is forced.* ``force`` is used for objects whose controller is this very EnvoyProxy, by UID.
* *No hot loop.* An apply after which the same differences remain is counted, logged once, and not sent again until the
  differences change.

What does not belong here: what the objects contain (``desired``), and when to try again (``workqueue``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import structlog

from operator_app.cluster import Cluster
from operator_app.errors import ConflictError, InvalidError
from operator_app.kinds import ENVOY_PROXY, Key, Kind, Object, key_of
from operator_app.ownership import Difference, differences
from operator_app.store import Store

log = structlog.get_logger(__name__)

IMPOSSIBLE_VERSION: Final = "1"
"""A resourceVersion that no stored object has: etcd's own first revision precedes every write.

An apply that carries it is an atomic create-only. The API server checks a resourceVersion against an existing object
before anything else and ignores it where there is none (``tests/e2e/test_cluster_contract.py`` holds it to that).
"""


NAME_CONFLICT: Final = "NameConflict"
"""The reason of a problem with an object that is somebody else's."""


class Standing(StrEnum):
    """Whose object it is."""

    OURS = "ours"
    PREVIOUS_LIFE = "previous life"
    FOREIGN = "foreign"


class Outcome(StrEnum):
    """What became of one object in one round."""

    CREATED = "created"
    CONFIGURED = "configured"
    UNCHANGED = "unchanged"
    DELETED = "deleted"
    SKIPPED = "skipped"


class Action(StrEnum):
    """What a plan wants to do."""

    NOTHING = "nothing"
    CREATE = "create"
    REPAIR = "repair"
    WAIT = "wait"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an object does not hold what we declare. ``reason`` is CamelCase and fit for a condition.

    ``is_terminal`` means that waiting does not help: the declaration or the cluster has to change.
    """

    reason: str
    message: str
    is_terminal: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """How to tell whose an object is, and what a repair must prove about the object that it repairs.

    ``standing`` looks at a live object; ``precondition`` gives the metadata that makes an apply fail on any other
    object than the one that was looked at.
    """

    standing: Callable[[Object], Standing]
    precondition: Callable[[Object], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What has to be done for one object, decided without writing. ``live`` is what the decision rests on."""

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
    """What was done for one object. ``live`` is its latest known version; no ``problem`` means: verified."""

    kind: Kind
    key: Key
    outcome: Outcome
    live: Object | None
    differences: tuple[Difference, ...] = ()
    problem: Problem | None = None


def child_of(proxy: Object) -> Claim:
    """The claim of ``proxy`` on its children: a controller reference with *this* proxy's UID, and nothing less."""
    uid, name = proxy["metadata"]["uid"], proxy["metadata"]["name"]

    def standing(live: Object) -> Standing:
        for reference in live["metadata"].get("ownerReferences", ()):
            if reference.get("controller"):
                if reference["uid"] == uid:
                    return Standing.OURS
                if (reference["apiVersion"], reference["kind"], reference["name"]) == (
                    ENVOY_PROXY.api_version,
                    ENVOY_PROXY.kind,
                    name,
                ):
                    return Standing.PREVIOUS_LIFE
        return Standing.FOREIGN

    return Claim(standing, lambda live: {"uid": live["metadata"]["uid"]})


def plan(kind: Kind, desired: Object, live: Object | None, claim: Claim) -> Plan:
    """Decide what one object needs. Pure."""
    if live is None:
        return Plan(kind, desired, None, Action.CREATE)
    key = key_of(live)
    match claim.standing(live):
        case Standing.FOREIGN:
            message = f"{kind} {key} exists and belongs to somebody else; rename or delete it to go on"
            return Plan(kind, desired, live, Action.LEAVE, problem=Problem(NAME_CONFLICT, message, is_terminal=True))
        case Standing.PREVIOUS_LIFE:
            message = f"{kind} {key} of a deleted EnvoyProxy with this name is still being collected"
            return Plan(kind, desired, live, Action.WAIT, problem=Problem("PreviousLife", message))
        case Standing.OURS if "deletionTimestamp" in live["metadata"]:
            problem = Problem("Terminating", f"{kind} {key} is being deleted and will be created anew")
            return Plan(kind, desired, live, Action.WAIT, problem=problem)
        case Standing.OURS:
            found = differences(desired, live)
            return Plan(kind, desired, live, Action.REPAIR if found else Action.NOTHING, found)


class Applier:
    """Plans objects against the store and carries the plans out. One instance for the operator.

    ``on_write`` is told of every write with its outcome; ``UNCHANGED`` there means an avoidable write, and a bug.
    """

    def __init__(self, cluster: Cluster, store: Store, *, on_write: Callable[[Kind, Outcome], None]) -> None:
        self._cluster = cluster
        self._store = store
        self._on_write = on_write
        # Differences that an apply did not settle, by UID: the API server spells something differently, or an
        # admission webhook insists. One small entry for each misbehaving object, until it settles.
        self._futile: dict[str, tuple[Difference, ...]] = {}

    async def look(self, kind: Kind, desired: Object, claim: Claim, *, ask_server: bool = True) -> Plan:
        """Steps 1 and 2 for one object. Writes nothing, and reads live only what the store does not know.

        Without ``ask_server`` there is no read at all. That is for names that no stranger can want: the atomic create
        is protection enough.
        """
        live = self._store.get(kind, key_of(desired))
        if live is None and ask_server:
            live = await self._cluster.get(kind, key_of(desired))
        return plan(kind, desired, live, claim)

    async def carry_out(self, plan: Plan, claim: Claim) -> Result:
        """Step 3: at most one successful write.

        A conflict means that the store was behind: the object is read and planned again, once. Raises
        ``ConflictError`` when somebody is faster a second time, and the cluster's other errors as they come.
        """
        try:
            return await self._act(plan, claim)
        except ConflictError:
            return await self._act(await self._look_afresh(plan, claim), claim)

    async def _look_afresh(self, outdated: Plan, claim: Claim) -> Plan:
        live = await self._cluster.get(outdated.kind, outdated.key)
        if live is not None:
            self._store.learn(outdated.kind, live)
        return plan(outdated.kind, outdated.desired, live, claim)

    async def _act(self, plan: Plan, claim: Claim) -> Result:
        try:
            match plan:
                case Plan(action=Action.CREATE):
                    return await self._create(plan)
                case Plan(action=Action.REPAIR, live=dict(live)):
                    return await self._repair(plan, live, claim)
                case Plan(action=Action.NOTHING):
                    return Result(plan.kind, plan.key, Outcome.UNCHANGED, plan.live)
                case _:
                    return Result(plan.kind, plan.key, Outcome.SKIPPED, plan.live, problem=plan.problem)
        except InvalidError as error:
            return Result(plan.kind, plan.key, Outcome.SKIPPED, plan.live, plan.differences, _refused(error))

    async def delete(self, kind: Kind, live: Object) -> bool:
        """Delete exactly the object that was looked at. Returns whether it was there."""
        was_there = await self._cluster.delete(kind, key_of(live), uid=live["metadata"]["uid"])
        if was_there:
            self._on_write(kind, Outcome.DELETED)
        return was_there

    async def _create(self, plan: Plan) -> Result:
        body = _with_metadata(plan.desired, {"resourceVersion": IMPOSSIBLE_VERSION})
        applied = await self._cluster.apply(plan.kind, body, force=False)
        if not applied.created:
            await self._undo_merge(plan.kind, applied.object)
        return self._verified(plan, applied.object, Outcome.CREATED)

    async def _undo_merge(self, kind: Kind, merged: Object) -> None:
        """Leave an object that was there after all exactly as it was.

        The create-only precondition makes this impossible; a server that did not honour it must still not cost a
        stranger anything. Applying an empty configuration releases what we set and nothing else.
        """
        body = {"apiVersion": merged["apiVersion"], "kind": merged["kind"], "metadata": identity(merged)}
        await self._cluster.apply(kind, body, force=False)
        message = "another writer created it first; what we had merged into it was taken back"
        raise ConflictError(message, kind=kind, key=key_of(merged))

    async def _repair(self, plan: Plan, live: Object, claim: Claim) -> Result:
        if self._futile.get(live["metadata"]["uid"]) == plan.differences:
            return Result(plan.kind, plan.key, Outcome.SKIPPED, live, plan.differences, _not_held(plan.differences))
        body = _with_metadata(plan.desired, claim.precondition(live))
        try:
            applied = await self._cluster.apply(plan.kind, body, force=True)
        except InvalidError as error:
            if any(cause.field == "metadata.uid" for cause in error.causes):
                raise ConflictError("another object took its name", kind=plan.kind, key=plan.key) from error
            raise
        outcome = Outcome.CONFIGURED
        if applied.object["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"]:
            outcome = Outcome.UNCHANGED
        return self._verified(plan, applied.object, outcome)

    def _verified(self, plan: Plan, stored: Object, outcome: Outcome) -> Result:
        """Hold the server's answer against the declaration; "exists" is not "done"."""
        self._on_write(plan.kind, outcome)
        self._store.learn(plan.kind, stored)
        uid = stored["metadata"]["uid"]
        left = differences(plan.desired, stored)
        if not left:
            self._futile.pop(uid, None)
            return Result(plan.kind, plan.key, outcome, stored, plan.differences)
        self._futile[uid] = left
        log.warning(
            "noncanonical",
            kind=plan.kind.kind,
            key=str(plan.key),
            fields=[{"field": str(each), "desired": each.desired, "stored": each.live} for each in left],
        )
        return Result(plan.kind, plan.key, outcome, stored, plan.differences, _not_held(left))


def identity(obj: Object) -> Object:
    """The metadata that names exactly this object, and no field of it."""
    metadata = obj["metadata"]
    return {name: metadata[name] for name in ("name", "namespace", "uid") if name in metadata}


def _with_metadata(obj: Object, extra: Mapping[str, str]) -> Object:
    return obj | {"metadata": obj["metadata"] | extra}


def _not_held(left: tuple[Difference, ...]) -> Problem:
    fields = ", ".join(str(each) for each in left)
    message = f"the API server stores something else than was applied for {fields}; look for an admission webhook"
    return Problem("FieldsNotHeld", message, is_terminal=True)


def _refused(error: InvalidError) -> Problem:
    fields = ", ".join(cause.field for cause in error.causes) or "the object"
    return Problem(error.reason, f"{error.kind} {error.key}: {fields} was refused: {error.message}", is_terminal=True)
