"""Applying: what is sent for every ownership of an object, and that a stranger's object is never written."""

import contextlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from operator_app.api.kinds import CONFIG_MAP, DEPLOYMENT, SERVICE, Key, Object, key_of
from operator_app.apply import (
    IMPOSSIBLE_VERSION,
    POLICY_RETRY_S,
    Action,
    Ownership,
    OwnershipCheck,
    Plan,
    Result,
    child_check,
    plan,
)
from operator_app.errors import ConflictError, TerminalError, TransientError
from operator_app.kube.deltas import Changed
from operator_app.results import Outcome
from tests.unit.scripted_api import (
    CONFLICT,
    NOT_FOUND,
    UNAVAILABLE,
    Answer,
    Components,
    ScriptedApi,
    components,
    created,
    ok,
    proxy_of_team,
    refused,
    repaired,
)
from tests.unit.ssa.field_sets import entry, stored

pytestmark = pytest.mark.anyio

CHECK = child_check(proxy_of_team())
KEY = Key("team-a", "checkout-envoy")
OWNER = {
    "apiVersion": "edge.operator-app.dev/v1alpha1",
    "kind": "EnvoyProxy",
    "name": "checkout",
    "uid": "proxy-uid",
    "controller": True,
}


def wanted(text: str = "new", **owner: Any) -> Object:
    """A child that we want; ``owner`` changes its controller reference."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": KEY.name, "namespace": KEY.namespace, "ownerReferences": [OWNER | owner]},
        "data": {"file": text},
    }


def living(text: str = "new", version: int = 20, uid: str = "child-uid", **metadata: Any) -> Object:
    """Our child as it is stored."""
    return stored(wanted(text), version=version, uid=uid, **metadata)


def strangers() -> Object:
    """Somebody else's object under our child's name, in which we own nothing."""
    metadata = {"name": KEY.name, "namespace": KEY.namespace, "uid": "stranger-uid", "resourceVersion": "30"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"file": "theirs"}}


# --- planning, pure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("references", "ownership"),
    [
        ([OWNER], Ownership.OURS),
        ([{**OWNER, "controller": False}, {**OWNER, "kind": "Other", "uid": "x"}], Ownership.FOREIGN),
        ([], Ownership.FOREIGN),
        ([{**OWNER, "uid": "former-uid"}], Ownership.PREVIOUS_INCARNATION),
        ([{**OWNER, "uid": "former-uid", "name": "other"}], Ownership.FOREIGN),
        ([{**OWNER, "uid": "former-uid", "apiVersion": "example.com/v1"}], Ownership.FOREIGN),
        ([{**OWNER, "controller": False}], Ownership.FOREIGN),
        ([{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "n"}, OWNER], Ownership.OURS),
        # Another version of our API would still be the very same proxy: only the UID counts.
        ([{**OWNER, "apiVersion": "edge.operator-app.dev/v2"}], Ownership.OURS),
    ],
)
def test_only_a_controller_reference_with_our_uid_makes_an_object_ours(
    references: list[Object], ownership: Ownership
) -> None:
    """Names, labels and references without ``controller`` prove nothing."""
    live = living(ownerReferences=references)
    assert CHECK.ownership(live) is ownership


@pytest.mark.parametrize(
    ("live", "action", "reason"),
    [
        (None, Action.CREATE, None),
        (living(), Action.NOTHING, None),
        (living("old"), Action.REPAIR, None),
        (strangers(), Action.LEAVE, "NameConflict"),
        (living(ownerReferences=[OWNER | {"uid": "former-uid"}]), Action.WAIT, "PreviousIncarnation"),
        (living("old", deletionTimestamp="2026-07-01T00:00:00Z"), Action.WAIT, "Terminating"),
    ],
    ids=["absent", "as declared", "changed", "foreign", "previous incarnation", "dying"],
)
def test_what_an_object_needs(live: Object | None, action: Action, reason: str | None) -> None:
    """Nothing that is not ours is planned to be written, and nothing that is on its way out."""
    made = plan(CONFIG_MAP, wanted(), live, CHECK)
    assert made.action is action
    assert (made.problem.reason if made.problem else None) == reason
    assert bool(made.differences) == (action is Action.REPAIR)
    assert made.key == KEY


def test_a_name_conflict_names_the_object_and_says_what_to_do() -> None:
    """A tenant can act on the sentence, and nothing but the tenant can solve it."""
    problem = plan(CONFIG_MAP, wanted(), strangers(), CHECK).problem
    assert problem is not None
    assert "ConfigMap team-a/checkout-envoy" in problem.message
    assert "rename or delete it" in problem.message
    assert problem.needs_user_action


# --- looking -------------------------------------------------------------------------------------------------------


async def test_what_the_store_knows_is_not_asked_for(tmp_path: Path) -> None:
    """A child that holds costs no request at all."""
    api = ScriptedApi()
    async with components(api, tmp_path, (CONFIG_MAP, living())) as own:
        result = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
    assert (result.outcome, result.problem) == (Outcome.UNCHANGED, None)
    assert own.writes == []


async def test_a_name_that_a_foreign_object_has_is_read_before_the_next_create(tmp_path: Path) -> None:
    """A first create needs no read, since it is atomic; a name that is known to be taken is not applied to again."""
    api = ScriptedApi(
        ("apply ConfigMap", CONFLICT), ("get ConfigMap", ok(strangers())), ("get ConfigMap", ok(strangers()))
    )
    async with components(api, tmp_path) as own:
        first = await own.applier.plan(CONFIG_MAP, wanted(), CHECK, ask_server=False)
        assert first.action is Action.CREATE
        result = await own.applier.execute(first, CHECK)
        assert result.problem is not None
        assert result.problem.reason == "NameConflict"
        assert (await own.applier.plan(CONFIG_MAP, wanted(), CHECK, ask_server=False)).action is Action.LEAVE


# --- creating ------------------------------------------------------------------------------------------------------


async def test_a_create_can_only_create(tmp_path: Path) -> None:
    """It carries the impossible version and no force, and the answer is known at once."""
    api = ScriptedApi(("get ConfigMap", NOT_FOUND), ("apply ConfigMap", created()))
    async with components(api, tmp_path) as own:
        result = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
        again = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
    request = api.sent[1]
    assert not request.is_forced
    assert request.body == wanted() | {"metadata": wanted()["metadata"] | {"resourceVersion": IMPOSSIBLE_VERSION}}
    assert (result.outcome, result.problem) == (Outcome.CREATED, None)
    assert again.outcome is Outcome.UNCHANGED
    assert own.writes == [("ConfigMap", Outcome.CREATED)]


async def test_a_create_that_met_a_foreign_object_is_taken_back(tmp_path: Path) -> None:
    """Should a server ever merge it, the empty configuration with the stranger's UID releases what we set."""
    merged = strangers() | {"data": {"file": "new"}}
    api = ScriptedApi(
        ("apply ConfigMap", ok(merged)), ("apply ConfigMap", ok(strangers())), ("get ConfigMap", ok(strangers()))
    )
    async with components(api, tmp_path) as own:
        result = await own.applier.execute(Plan(CONFIG_MAP, wanted(), None, Action.CREATE), CHECK)
    assert result.problem is not None
    assert result.problem.reason == "NameConflict"
    assert api.sent[1].body == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": KEY.name, "namespace": KEY.namespace, "uid": "stranger-uid"},
    }
    assert not api.sent[1].is_forced
    assert own.writes == []
    assert own.store.get(CONFIG_MAP, KEY) is None, "no watch would ever tell that it has gone"


async def test_a_name_taken_meanwhile_is_looked_at_again(tmp_path: Path) -> None:
    """A lost race for a name against ourselves (a lost answer) ends with the object that is there, and no write."""
    api = ScriptedApi(("apply ConfigMap", CONFLICT), ("get ConfigMap", ok(living())))
    async with components(api, tmp_path) as own:
        result = await own.applier.execute(Plan(CONFIG_MAP, wanted(), None, Action.CREATE), CHECK)
        assert own.store.get(CONFIG_MAP, KEY) == living()
    assert (result.outcome, result.problem, own.writes) == (Outcome.UNCHANGED, None, [])


# --- repairing -----------------------------------------------------------------------------------------------------


async def test_a_repair_proves_which_object_it_means(tmp_path: Path) -> None:
    """It forces, and carries the UID and the resourceVersion that were looked at."""
    api = ScriptedApi(("apply ConfigMap", repaired()))
    async with components(api, tmp_path, (CONFIG_MAP, living("old"))) as own:
        result = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
    (request,) = api.sent
    assert request.is_forced
    assert request.body == wanted() | {"metadata": wanted()["metadata"] | {"uid": "child-uid", "resourceVersion": "20"}}
    assert result.outcome is Outcome.CONFIGURED
    assert [each.field for each in result.changes] == [".data.file"]
    assert own.writes == [("ConfigMap", Outcome.CONFIGURED)]


async def test_an_avoidable_write_is_called_by_its_name(tmp_path: Path) -> None:
    """An apply that left the resourceVersion alone is counted as unchanged."""
    live = living("old")
    api = ScriptedApi(("apply ConfigMap", ok(living(version=int(live["metadata"]["resourceVersion"])))))
    async with components(api, tmp_path, (CONFIG_MAP, live)) as own:
        await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
    assert own.writes == [("ConfigMap", Outcome.UNCHANGED)]


@pytest.mark.parametrize(
    "refusal",
    [CONFLICT, refused(422, "Invalid", "metadata.uid"), refused(422, "Invalid", "spec.x", "metadata.uid")],
    ids=["the object has gone", "another has its name", "another that ours would not fit into"],
)
async def test_a_repair_of_an_object_that_is_another_now_reads_again(tmp_path: Path, refusal: Any) -> None:  # noqa: ANN401
    """409 and 422 for ``metadata.uid`` both mean: look again, and decide anew about what is there."""
    api = ScriptedApi(("apply ConfigMap", refusal), ("get ConfigMap", ok(strangers())))
    async with components(api, tmp_path, (CONFIG_MAP, living("old"))) as own:
        result = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
    assert result.problem is not None
    assert result.problem.reason == "NameConflict"
    assert own.writes == []


async def test_a_deleted_child_is_created_in_the_same_reconcile(tmp_path: Path) -> None:
    """A repair that finds its object gone ends with a create."""
    api = ScriptedApi(("apply ConfigMap", CONFLICT), ("get ConfigMap", NOT_FOUND), ("apply ConfigMap", created()))
    async with components(api, tmp_path, (CONFIG_MAP, living("old"))) as own:
        result = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
    assert result.outcome is Outcome.CREATED
    assert api.sent[2].body["metadata"]["resourceVersion"] == IMPOSSIBLE_VERSION


async def test_a_repair_is_reported_although_its_tidying_up_lost_a_race(tmp_path: Path) -> None:
    """The fields are ours again before a second ownership is given up; who is faster then takes no reason away."""
    shadowed = living(version=21)
    shadow = entry(shadowed, {"f:data": {"f:file": {}}}, manager="before-first-apply", operation="Update")
    shadowed["metadata"]["managedFields"].append(shadow)
    api = ScriptedApi(("apply ConfigMap", ok(shadowed)), ("patch ConfigMap", CONFLICT))
    async with components(api, tmp_path, (CONFIG_MAP, living("old"))) as own:
        result = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
    assert result.outcome is Outcome.CONFIGURED
    assert result.problem is None
    assert [each.field for each in result.changes] == [".data.file"]
    assert api.body("patch ConfigMap")["metadata"].keys() == {"uid", "resourceVersion", "managedFields"}


async def test_a_second_try_pins_the_object_and_not_its_version(tmp_path: Path) -> None:
    """A Deployment's own controller writes so often that a pinned version would lose to it again and again."""
    api = ScriptedApi(
        ("apply ConfigMap", CONFLICT), ("get ConfigMap", ok(living("old"))), ("apply ConfigMap", repaired())
    )
    async with components(api, tmp_path, (CONFIG_MAP, living("older"))) as own:
        result = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
    assert result.outcome is Outcome.CONFIGURED
    first, _, second = (each.body for each in api.sent)
    assert {"uid", "resourceVersion"} <= first["metadata"].keys()
    assert "uid" in second["metadata"]
    assert "resourceVersion" not in second["metadata"]


async def test_a_second_conflict_is_left_to_the_next_reconcile(tmp_path: Path) -> None:
    """One new look, never a loop."""
    api = ScriptedApi(
        ("apply ConfigMap", CONFLICT), ("get ConfigMap", ok(living("old"))), ("apply ConfigMap", CONFLICT)
    )
    async with components(api, tmp_path, (CONFIG_MAP, living("older"))) as own:
        look = await own.applier.plan(CONFIG_MAP, wanted(), CHECK)
        with pytest.raises(ConflictError):
            await own.applier.execute(look, CHECK)
    assert own.writes == []


async def test_transient_errors_pass_through(tmp_path: Path) -> None:
    """Retrying is the workqueue's."""
    api = ScriptedApi(("apply ConfigMap", UNAVAILABLE))
    async with components(api, tmp_path, (CONFIG_MAP, living("old"))) as own:
        look = await own.applier.plan(CONFIG_MAP, wanted(), CHECK)
        with pytest.raises(TransientError):
            await own.applier.execute(look, CHECK)


async def test_a_name_that_an_older_object_of_ours_has_is_brought_up_to_date(tmp_path: Path) -> None:
    """A create that meets our own object with an older declaration repairs it: "ours" is not "as declared"."""
    api = ScriptedApi(
        ("apply ConfigMap", CONFLICT), ("get ConfigMap", ok(living("old"))), ("apply ConfigMap", repaired())
    )
    async with components(api, tmp_path) as own:
        result = await own.applier.execute(Plan(CONFIG_MAP, wanted(), None, Action.CREATE), CHECK)
    assert (result.outcome, result.problem) == (Outcome.CONFIGURED, None)
    assert api.sent[2].body["data"] == {"file": "new"}
    assert api.sent[2].body["metadata"]["uid"] == "child-uid"


PORT = {"name": "http", "port": 80, "protocol": "TCP", "targetPort": "http"}


def wanted_service(*ports: Object) -> Object:
    """A Service that we want."""
    metadata = {"name": KEY.name, "namespace": KEY.namespace, "ownerReferences": [OWNER]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": list(ports)}}


def service(*ports: Object, version: int = 20) -> Object:
    """Our Service as it is stored, with these ports."""
    return stored(wanted_service(*ports), version=version)


async def test_what_unblocks_a_repair_and_the_repair_after_it_mean_exactly_what_was_read(tmp_path: Path) -> None:
    """The patch is pinned to the version that was examined, the second apply to the version that the patch made."""
    live, cleared = service(PORT | {"port": 81}), service(PORT, version=21)
    # Another writer has taken the item with our name, so our field set has nothing of it.
    live["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]["f:ports"] = {}
    api = ScriptedApi(
        ("apply Service", refused(422, "Invalid", "spec.ports[1].name")),
        ("patch Service", ok(cleared)),
        ("apply Service", repaired()),
    )
    desired = wanted_service(PORT)
    async with components(api, tmp_path, (SERVICE, live)) as own:
        result = await own.applier.execute(await own.applier.plan(SERVICE, desired, CHECK), CHECK)
        assert own.store.get(SERVICE, KEY) == result.live
    assert (result.outcome, result.problem) == (Outcome.CONFIGURED, None)
    pins = [{name: each.body["metadata"][name] for name in ("uid", "resourceVersion")} for each in api.sent]
    assert pins == [{"uid": "child-uid", "resourceVersion": version} for version in ("20", "20", "21")]
    assert [each.is_forced for each in api.sent] == [True, False, True]
    assert api.body("patch Service")["spec"] == {"ports": [PORT]}, "what unblocks, and nothing beside it"


async def test_what_unblocks_a_repair_of_an_object_that_moved_on_is_not_sent_again(tmp_path: Path) -> None:
    """A conflict of the patch is a conflict of the repair: what is there is read, and planned anew."""
    live = service(PORT | {"port": 81})
    api = ScriptedApi(
        ("apply Service", refused(422, "Invalid", "spec.ports[1].name")),
        ("patch Service", CONFLICT),
        ("get Service", ok(service(PORT, version=22))),
    )
    desired = wanted_service(PORT)
    async with components(api, tmp_path, (SERVICE, live)) as own:
        result = await own.applier.execute(await own.applier.plan(SERVICE, desired, CHECK), CHECK)
    assert (result.outcome, result.problem) == (Outcome.UNCHANGED, None)


async def test_a_deployment_is_pinned_by_its_uid_alone(tmp_path: Path) -> None:
    """Its controller writes its status all the time, and a repair need not lose to that."""
    live = living("old") | {"apiVersion": "apps/v1", "kind": "Deployment"}
    live["metadata"]["managedFields"][0]["apiVersion"] = "apps/v1"
    api = ScriptedApi(("apply Deployment", repaired()))
    desired = wanted() | {"apiVersion": "apps/v1", "kind": "Deployment"}
    async with components(api, tmp_path, (DEPLOYMENT, live)) as own:
        await own.applier.execute(await own.applier.plan(DEPLOYMENT, desired, CHECK), CHECK)
    metadata = api.body("apply Deployment")["metadata"]
    assert metadata["uid"] == "child-uid"
    assert "resourceVersion" not in metadata


# --- writes of unknown fate ----------------------------------------------------------------------------------------


async def try_to_write(own: Components, api: ScriptedApi, answer: Answer, text: str = "new") -> None:
    """One write that fails."""
    api.add(("apply ConfigMap", answer))
    with pytest.raises(TransientError):
        await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(text), CHECK, ask_server=False), CHECK)


@pytest.mark.parametrize(
    "answer",
    [UNAVAILABLE, refused(500, "InternalError"), refused(504, "Timeout"), lambda _: (200, {"half": "an answer"})],
    ids=["503", "500", "504", "undecodable"],
)
async def test_a_write_of_unknown_fate_is_followed_by_a_live_read(tmp_path: Path, answer: Answer) -> None:
    """It was carried out, and its event is lost; then the declaration goes back to what the store shows."""
    api = ScriptedApi()
    async with components(api, tmp_path, (CONFIG_MAP, living("old"))) as own:
        await try_to_write(own, api, answer)
        api.add(("get ConfigMap", ok(living(version=21))), ("apply ConfigMap", repaired()))
        back = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted("old"), CHECK), CHECK)
        assert back.outcome is Outcome.CONFIGURED
        assert api.sent[-1].body["metadata"]["resourceVersion"] == "21"
        # What was read is known from then on, and nothing is read again.
        again = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted("old"), CHECK), CHECK)
        assert again.outcome is Outcome.UNCHANGED


async def test_a_write_that_was_cancelled_is_followed_by_a_live_read(tmp_path: Path) -> None:
    """Who stops waiting does not know what became of the request."""
    api = ScriptedApi()
    async with components(api, tmp_path, (CONFIG_MAP, living("old"))) as own:
        look = await own.applier.plan(CONFIG_MAP, wanted(), CHECK)
        with anyio.CancelScope() as scope:

            def cancel(_: Object) -> tuple[int, Object]:
                scope.cancel()
                return 200, living(version=21)

            api.add(("apply ConfigMap", cancel))
            await own.applier.execute(look, CHECK)
        assert scope.cancelled_caught
        api.add(("get ConfigMap", ok(living(version=21))))
        result = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
        assert result.outcome is Outcome.UNCHANGED


async def test_a_create_of_unknown_fate_is_read_even_where_creates_ask_nobody(tmp_path: Path) -> None:
    """The object is there: no second create, and the store knows it."""
    api = ScriptedApi()
    async with components(api, tmp_path) as own:
        await try_to_write(own, api, UNAVAILABLE)
        api.add(("get ConfigMap", ok(living())))
        look = await own.applier.plan(CONFIG_MAP, wanted(), CHECK, ask_server=False)
        assert look.action is Action.NOTHING
        assert own.store.get(CONFIG_MAP, KEY) == living()


async def test_what_is_gone_after_a_write_of_unknown_fate_is_not_known_any_more(tmp_path: Path) -> None:
    """And a stranger that has its name is not learned, since no watch would tell when it goes."""
    api = ScriptedApi()
    async with components(api, tmp_path, (CONFIG_MAP, living("old"))) as own:
        await try_to_write(own, api, UNAVAILABLE)
        api.add(("get ConfigMap", NOT_FOUND))
        assert (await own.applier.plan(CONFIG_MAP, wanted(), CHECK)).action is Action.CREATE
        assert own.store.get(CONFIG_MAP, KEY) is None
        await try_to_write(own, api, UNAVAILABLE)
        api.add(("get ConfigMap", ok(strangers())))
        assert (await own.applier.plan(CONFIG_MAP, wanted(), CHECK)).action is Action.LEAVE
        assert own.store.get(CONFIG_MAP, KEY) is None


async def test_a_read_that_fails_is_tried_again_and_a_resync_makes_it_needless(tmp_path: Path) -> None:
    """The fate stays unknown until somebody has looked: this read, or the list of a resync."""
    api = ScriptedApi()
    async with components(api, tmp_path, (CONFIG_MAP, living("old"))) as own:
        await try_to_write(own, api, UNAVAILABLE)
        for _ in range(2):
            api.add(("get ConfigMap", UNAVAILABLE))
            with pytest.raises(TransientError):
                await own.applier.plan(CONFIG_MAP, wanted(), CHECK)
        own.applier.reset_rejected()
        assert (await own.applier.plan(CONFIG_MAP, wanted(), CHECK)).action is Action.REPAIR


@pytest.mark.parametrize(
    "answer",
    [refused(429, "TooManyRequests"), CONFLICT, refused(403, "Forbidden"), refused(422, "Invalid", "spec.x")],
    ids=["429", "409", "403", "422"],
)
async def test_what_was_certainly_refused_is_not_read_again(tmp_path: Path, answer: Answer) -> None:
    """These answers say that nothing was written."""
    api = ScriptedApi(("apply ConfigMap", answer))
    if answer is CONFLICT:
        api.add(("get ConfigMap", ok(living("old"))), ("apply ConfigMap", CONFLICT))
    async with components(api, tmp_path, (CONFIG_MAP, living("old"))) as own:
        with contextlib.suppress(TransientError, TerminalError):
            await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
        assert (await own.applier.plan(CONFIG_MAP, wanted(), CHECK)).action is Action.REPAIR


@pytest.mark.parametrize(
    "live", [strangers(), living("old", deletionTimestamp="2026-07-01T00:00:00Z")], ids=["foreign", "dying"]
)
async def test_what_has_to_be_left_or_waited_for_is_not_written(tmp_path: Path, live: Object) -> None:
    """No request, and the problem is the result."""
    api = ScriptedApi()
    async with components(api, tmp_path, (CONFIG_MAP, live)) as own:
        look = await own.applier.plan(CONFIG_MAP, wanted(), CHECK)
        result = await own.applier.execute(look, CHECK)
    assert (result.outcome, result.problem) == (Outcome.SKIPPED, look.problem)


# --- no hot loop ---------------------------------------------------------------------------------------------------


async def test_a_refusal_names_the_field_and_is_not_repeated(tmp_path: Path) -> None:
    """An immutable field stays terminal, without another request, until what is wanted changes."""
    api = ScriptedApi(("apply ConfigMap", refused(422, "Invalid", "spec.selector", message="field is immutable")))
    async with components(api, tmp_path, (CONFIG_MAP, living("old"))) as own:
        for _ in range(3):
            result = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
            assert result.problem is not None
            assert result.problem.needs_user_action
            assert result.problem.reason == "Invalid"
            assert "spec.selector" in result.problem.message
            assert "immutable" in result.problem.message
        api.add(("apply ConfigMap", repaired()))
        other = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted("newer"), CHECK), CHECK)
    assert other.problem is None


async def test_a_node_port_that_is_taken_is_asked_for_again(tmp_path: Path) -> None:
    """Another Service may give it back, of which no event tells: the same write is sent once a minute."""
    taken = refused(422, "Invalid", "spec.ports[0].nodePort", message="provided port is already allocated")
    desired = wanted_service(PORT | {"nodePort": 30080})
    api = ScriptedApi(("apply Service", taken))
    async with components(api, tmp_path, (SERVICE, service(PORT))) as own:
        for _ in range(3):
            waiting = await own.applier.execute(await own.applier.plan(SERVICE, desired, CHECK), CHECK)
            assert waiting.problem is not None
            assert waiting.problem.needs_user_action
            assert waiting.requeue_after_s == POLICY_RETRY_S
        own.clock.mono += POLICY_RETRY_S
        api.add(("apply Service", repaired()))
        result = await own.applier.execute(await own.applier.plan(SERVICE, desired, CHECK), CHECK)
    assert result.problem is None


async def test_a_refused_release_names_who_keeps_the_field(tmp_path: Path) -> None:
    """What a co-owner keeps of a part that we give up may be invalid alone; a field that nobody keeps is not named."""
    live = stored(wanted() | {"data": {"file": "new", "kept": "x", "gone": "x"}})
    live["metadata"]["managedFields"].append(entry(live, {"f:data": {"f:kept": {}}}, manager="helm"))
    api = ScriptedApi(("apply ConfigMap", refused(422, "Invalid", "data")))
    async with components(api, tmp_path, (CONFIG_MAP, live)) as own:
        result = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
    assert result.problem is not None
    assert result.problem.message.endswith(": a sentence; .data.kept is kept by helm")


def test_a_deletion_that_hangs_says_what_it_waits_for() -> None:
    """The finalizers are named, and without any the sentence ends before."""
    waiting: Object = {"deletionTimestamp": "2026-07-01T00:00:00Z"}
    held = waiting | {"finalizers": ["example.com/a", "example.com/b"]}
    told = [plan(CONFIG_MAP, wanted(), living(**each), CHECK).problem for each in (held, waiting)]
    messages = [each.message for each in told if each is not None]
    assert messages[0] == f"{messages[1]}; its deletion waits for example.com/a, example.com/b"


def changing(text: str) -> Any:  # noqa: ANN401
    """A server that stores another text than was applied, and still records the field as ours."""
    return repaired(data={"file": text})


async def test_a_difference_that_an_apply_did_not_settle_is_reported_once_and_not_sent_again(tmp_path: Path) -> None:
    """Another spelling on the server costs one write and one log line; a new difference is worth another write."""
    api = ScriptedApi(("apply ConfigMap", changing("NEW")))
    async with components(api, tmp_path, (CONFIG_MAP, living("old"))) as own:
        with capture_logs() as logs:
            for _ in range(3):
                result = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
                assert result.problem is not None
                assert result.problem.reason == "FieldsNotHeld"
                assert ".data.file" in result.problem.message
        assert [each["event"] for each in logs] == ["noncanonical"]
        assert len(api.sent) == 1
        api.add(("apply ConfigMap", changing("NEWER")), ("apply ConfigMap", changing("NEW")))
        await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted("newer"), CHECK), CHECK)
        own.applier.reset_rejected()
        await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted("newer"), CHECK), CHECK)


async def test_a_created_object_is_held_against_the_declaration_too(tmp_path: Path) -> None:
    """A webhook that changes the object as it is created is noticed at once: exists is not done."""

    def answer(body: Object) -> tuple[int, Object]:
        code, live = created()(body)
        return code, live | {"data": {"file": "webhook"}}

    api = ScriptedApi(("get ConfigMap", NOT_FOUND), ("apply ConfigMap", answer))
    async with components(api, tmp_path) as own:
        for outcome in (Outcome.CREATED, Outcome.SKIPPED):
            result = await own.applier.execute(await own.applier.plan(CONFIG_MAP, wanted(), CHECK), CHECK)
            assert result.outcome is outcome
            assert result.problem is not None
            assert result.problem.reason == "FieldsNotHeld"


async def test_a_field_that_is_taken_again_and_again_is_taken_back_ever_more_slowly(tmp_path: Path) -> None:
    """The fourth repair in a row waits, and says who the rival is; after the pause it is tried again."""
    rival = living("theirs")
    fields = rival["metadata"]["managedFields"][0]["fieldsV1"]
    del fields["f:data"]
    rival["metadata"]["managedFields"].append(
        entry(rival, {"f:data": {"f:file": {}}}, manager="rival", operation="Update")
    )
    api = ScriptedApi(*[("apply ConfigMap", repaired())] * 4)
    async with components(api, tmp_path) as own:

        async def fight() -> Any:  # noqa: ANN401
            return await own.applier.execute(plan(CONFIG_MAP, wanted(), deepcopy(rival), CHECK), CHECK)

        assert [(await fight()).outcome for _ in range(3)] == [Outcome.CONFIGURED] * 3
        waiting = await fight()
        assert waiting.outcome is Outcome.SKIPPED
        assert waiting.problem.reason == "Contended"
        assert "rival" in waiting.problem.message
        assert 0 < waiting.requeue_after_s <= 300
        own.clock.mono += waiting.requeue_after_s
        assert (await fight()).outcome is Outcome.CONFIGURED


async def test_a_child_that_is_deleted_again_and_again_is_made_again_ever_more_slowly(tmp_path: Path) -> None:
    """The fourth time waits and says so; who has never been complete is not held up, nor is another proxy's life."""
    restores = child_check({"metadata": {"uid": "proxy-uid", "name": "checkout"}}, was_reported=True)
    api = ScriptedApi(*[("apply ConfigMap", created())] * 6)
    async with components(api, tmp_path) as own:

        async def restore(check: OwnershipCheck = restores, **owner: str) -> Result:
            return await own.applier.execute(plan(CONFIG_MAP, wanted(**owner), None, check), check)

        first = [await restore() for _ in range(3)]
        assert [each.outcome for each in first] == [Outcome.CREATED] * 3
        assert [each.contention is not None for each in first] == [False, False, True]
        waiting = await restore()
        assert waiting.outcome is Outcome.SKIPPED
        assert waiting.problem is not None
        assert waiting.problem.reason == "Contended"
        assert "another writer keeps taking the whole object" in waiting.problem.message
        assert waiting.requeue_after_s is not None
        assert (await restore(CHECK)).outcome is Outcome.CREATED
        assert (await restore(uid="next-life")).outcome is Outcome.CREATED
        own.clock.mono += waiting.requeue_after_s
        assert (await restore()).outcome is Outcome.CREATED


# --- deleting ------------------------------------------------------------------------------------------------------


async def test_a_delete_is_of_the_object_that_was_looked_at(tmp_path: Path) -> None:
    """It carries the UID, and an object that is gone already counts for nothing; the store knows before the watch."""
    api = ScriptedApi(("delete ConfigMap", ok(living())), ("delete ConfigMap", NOT_FOUND))
    async with components(api, tmp_path, (CONFIG_MAP, living())) as own:
        assert await own.applier.delete(CONFIG_MAP, living())
        assert own.store.get(CONFIG_MAP, key_of(living())) is None
        kept = living()
        kept["metadata"] |= {"deletionTimestamp": "2026-07-01T00:00:00Z", "resourceVersion": "99"}
        own.store.apply_delta(Changed(CONFIG_MAP, kept))
        assert own.store.get(CONFIG_MAP, key_of(kept)) is not None, "its finalizers keep it"
        assert not await own.applier.delete(CONFIG_MAP, living())
    assert api.sent[0].body["preconditions"] == {"uid": "child-uid"}
    assert own.writes == [("ConfigMap", Outcome.DELETED)]
