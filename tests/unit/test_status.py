"""The status: what follows from an observation, when its times move, and when it is worth a write."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_app.api.kinds import CONFIG_MAP, DEPLOYMENT, ENVOY_PROXY, SERVICE, Key, Kind, Object
from operator_app.apply import Result
from operator_app.errors import ConflictError
from operator_app.pods import PodTrouble
from operator_app.results import Outcome, Problem, Programming
from operator_app.ssa.contention import Contention, ContentionTimes
from operator_app.status import Observation, Rollout, is_verified, next_status, observed_current_generation, rollout_of
from tests.unit.scripted_api import (
    CONFLICT,
    SETTLE_S,
    ScriptedApi,
    components,
    ok,
    proxy_of_team,
    stored_status,
    with_status,
)
from tests.unit.ssa.field_sets import entry, field_set

NOW = datetime(2026, 7, 2, 3, 4, 5, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
TIMES = ContentionTimes()
KEY = Key("team-a", "checkout-envoy")
WAIT = Problem("Retrying", "wait")
ACT = Problem("NameConflict", "act", needs_user_action=True)
LOADED = Programming(is_true=True, reason="Loaded", message="all")


def deployment(
    *,
    wanted: int = 2,
    total: int = 2,
    updated: int = 2,
    ready: int = 2,
    observed: int = 3,
    conditions: Sequence[Object] = (),
) -> Object:
    """Our Deployment at generation 3, with these numbers; without replicas it reports nothing at all."""
    metadata = {
        "name": KEY.name,
        "namespace": KEY.namespace,
        "generation": 3,
        "ownerReferences": [{"uid": "proxy-uid", "controller": True}],
    }
    status = {
        "replicas": total,
        "updatedReplicas": updated,
        "readyReplicas": ready,
        "availableReplicas": ready,
        "observedGeneration": observed,
        "conditions": list(conditions),
    }
    return {"metadata": metadata, "spec": {"replicas": wanted}, "status": status}


def result(kind: Kind, live: Object | None = None, problem: Problem | None = None, **rest: Any) -> Result:
    """What became of a child."""
    return Result(kind, KEY, Outcome.SKIPPED if problem else Outcome.UNCHANGED, live or {}, problem=problem, **rest)


def by_kind(*results: Result) -> dict[Kind, Result]:
    """Results as a reconcile has them."""
    return {each.kind: each for each in results}


def observed(proxy: Object | None = None, live: Object | None = None, **rest: Any) -> Observation:
    """Everything is fine, unless told otherwise."""
    children = by_kind(result(CONFIG_MAP), result(DEPLOYMENT, live or deployment()), result(SERVICE))
    fine: dict[str, Any] = {"children": children, "address": "checkout-envoy.team-a.svc", "programming": LOADED}
    return Observation(proxy or proxy_of_team(), **fine | rest)


def conditions(observation: Observation) -> dict[str, str]:
    """Type to status and reason, in the order in which they stand."""
    return {
        each["type"]: f"{each['status']} {each['reason']}" for each in next_status(observation, now=NOW)["conditions"]
    }


def with_problem(kind: Kind, problem: Problem, **rest: Any) -> Observation:
    """One child has a problem."""
    lives = {DEPLOYMENT: deployment()}
    children = {
        each: result(each, lives.get(each), problem if each == kind else None)
        for each in (CONFIG_MAP, DEPLOYMENT, SERVICE)
    }
    return observed(children=children, **rest)


FINE = {
    "Ready": "True Ready",
    "Reconciled": "True Verified",
    "Available": "True EnoughReady",
    "Registered": "True Confirmed",
    "Programmed": "True Loaded",
}
GOING_ON = {"Reconciling": "True Progressing"}
NO_IMAGE = PodTrouble("ImagePullBackOff", "the image can't be pulled")
DEADLINE = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        pytest.param(observed(), FINE, id="all is well"),
        pytest.param(
            observed(live=deployment(wanted=0, total=0, updated=0, ready=0)),
            FINE | {"Available": "True ScaledToZero", "Programmed": "True ScaledToZero"},
            id="scaled to zero",
        ),
        pytest.param(
            observed(live=deployment(observed=2)),
            FINE | {"Ready": "False RollingOut"} | GOING_ON,
            id="the Deployment controller has not seen the newest template",
        ),
        pytest.param(
            observed(live=deployment(total=3, updated=2)),
            FINE | {"Ready": "False RollingOut"} | GOING_ON,
            id="an old Pod still answers",
        ),
        pytest.param(
            observed(live=deployment(total=3, updated=1), pods=NO_IMAGE),
            FINE | {"Ready": "False ImagePullBackOff", "Reconciling": "True ImagePullBackOff"},
            id="a new Pod says why it does not serve",
        ),
        pytest.param(
            observed(live=deployment(ready=0), pods=NO_IMAGE),
            FINE
            | {"Available": "False NotEnoughReady"}
            | {"Ready": "False ImagePullBackOff", "Reconciling": "True ImagePullBackOff"},
            id="no Pod serves, and one says why",
        ),
        pytest.param(
            observed(live=deployment(ready=0, conditions=DEADLINE), pods=NO_IMAGE),
            FINE
            | {"Available": "False NotEnoughReady"}
            | {"Ready": "False ImagePullBackOff", "Stalled": "True ProgressDeadlineExceeded"},
            id="it has not served for long",
        ),
        pytest.param(observed(pods=NO_IMAGE), FINE, id="all that is asked for serves, whatever one Pod says"),
        pytest.param(
            observed(live=deployment(updated=1, total=2)),
            FINE | {"Ready": "False RollingOut"} | GOING_ON,
            id="not all Pods are new",
        ),
        pytest.param(
            observed(live=deployment(ready=1)),
            FINE | {"Ready": "False NotEnoughReady", "Available": "False NotEnoughReady"} | GOING_ON,
            id="one of two is ready",
        ),
        pytest.param(
            observed(live=deployment(wanted=4, total=4, updated=4, ready=3)), FINE, id="three of four are enough"
        ),
        pytest.param(
            observed(live=deployment(ready=0, conditions=DEADLINE)),
            FINE
            | {"Ready": "False NotEnoughReady", "Available": "False NotEnoughReady"}
            | {"Stalled": "True ProgressDeadlineExceeded"},
            id="the rollout is past its deadline",
        ),
        pytest.param(
            observed(live=deployment(ready=0, observed=2, conditions=DEADLINE)),
            FINE | {"Ready": "False NotEnoughReady", "Available": "False NotEnoughReady"} | GOING_ON,
            id="the rollout before this one was past its deadline",
        ),
        pytest.param(
            observed(children=by_kind(result(CONFIG_MAP), result(SERVICE))),
            FINE | {"Ready": "False NoDeployment", "Available": "False NoDeployment"} | GOING_ON,
            id="no Deployment",
        ),
        pytest.param(
            observed(
                live=deployment()
                | {"metadata": {"generation": 3, "ownerReferences": [{"uid": "other", "controller": True}]}}
            ),
            FINE | {"Ready": "False NoDeployment", "Available": "False NoDeployment"} | GOING_ON,
            id="a stranger's Deployment counts for nothing",
        ),
        pytest.param(
            with_problem(SERVICE, WAIT),
            FINE | {"Ready": "False Retrying", "Reconciled": "False Retrying"} | GOING_ON,
            id="a child has to wait",
        ),
        pytest.param(
            with_problem(CONFIG_MAP, ACT),
            FINE | {"Ready": "False NameConflict", "Reconciled": "False NameConflict", "Stalled": "True NameConflict"},
            id="a child needs somebody to act",
        ),
        pytest.param(
            with_problem(CONFIG_MAP, WAIT, registration=ACT),
            FINE
            | {"Ready": "False Retrying", "Reconciled": "False Retrying", "Registered": "False NameConflict"}
            | {"Stalled": "True NameConflict"},
            id="what needs somebody to act goes before what needs time",
        ),
        pytest.param(
            observed(registration=WAIT),
            FINE | {"Ready": "False Retrying", "Registered": "False Retrying"} | GOING_ON,
            id="the record is not confirmed",
        ),
        pytest.param(
            observed(refusal=Problem("InvalidSpec", "no", needs_user_action=True)),
            {
                "Ready": "False InvalidSpec",
                "Reconciled": "False InvalidSpec",
                "Available": "True EnoughReady",
                "Registered": "False InvalidSpec",
                "Programmed": "False InvalidSpec",
                "Stalled": "True InvalidSpec",
            },
            id="a declaration that can't be acted on; what runs goes on running",
        ),
        pytest.param(
            Observation(proxy_of_team(), refusal=Problem("InvalidSpec", "no", needs_user_action=True)),
            {
                "Ready": "False InvalidSpec",
                "Reconciled": "False InvalidSpec",
                "Available": "False NoDeployment",
                "Registered": "False InvalidSpec",
                "Programmed": "False InvalidSpec",
                "Stalled": "True InvalidSpec",
            },
            id="a declaration that never could be acted on",
        ),
        pytest.param(
            observed(
                children=by_kind(
                    result(CONFIG_MAP),
                    result(DEPLOYMENT, deployment()),
                    result(SERVICE, contention=Contention(("rival",), (".spec.type",), 60.0)),
                )
            ),
            FINE | {"Contended": "True FieldsTaken"},
            id="a rival that is kept at bay",
        ),
        pytest.param(
            observed(programming=Programming(is_true=False, reason="Loading", message="a Pod")),
            FINE | {"Ready": "False Loading", "Programmed": "False Loading"} | GOING_ON,
            id="a Pod has not loaded it yet",
        ),
        pytest.param(
            observed(programming=Programming(is_true=None, reason="PodUnreachable", message="a Pod")),
            FINE | {"Ready": "Unknown PodUnreachable", "Programmed": "Unknown PodUnreachable"} | GOING_ON,
            id="a Pod can't be asked",
        ),
        pytest.param(
            observed(
                registration=WAIT, programming=Programming(is_true=None, reason="PodUnreachable", message="a Pod")
            ),
            FINE
            | {"Ready": "False Retrying", "Registered": "False Retrying", "Programmed": "Unknown PodUnreachable"}
            | GOING_ON,
            id="what is known to be wrong goes before what is unknown",
        ),
        pytest.param(
            observed(
                programming=Programming(
                    is_true=False, reason="ConfigurationRefused", message="a Pod", needs_user_action=True
                )
            ),
            FINE
            | {"Ready": "False ConfigurationRefused", "Programmed": "False ConfigurationRefused"}
            | {"Stalled": "True ConfigurationRefused"},
            id="Envoy refuses the configuration",
        ),
        pytest.param(observed(programming=None), FINE | {"Programmed": "Unknown NotAsked"}, id="nobody is asked"),
    ],
)
def test_what_an_observation_means(observation: Observation, expected: dict[str, str]) -> None:
    """These conditions with these reasons, and no others."""
    assert conditions(observation) == expected


def test_people_read_ready_first() -> None:
    """The summary comes first, what it sums up next, what is only there while true last."""
    assert list(conditions(with_problem(SERVICE, ACT))) == [
        "Ready",
        "Reconciled",
        "Available",
        "Registered",
        "Programmed",
        "Stalled",
    ]


def test_the_rest_of_the_status() -> None:
    """The generation that was acted on, the numbers and selector for ``scale``, and the address where there is one."""
    status = next_status(observed(live=deployment(total=3, ready=1)), now=NOW)
    del status["conditions"]
    assert status == {
        "observedGeneration": 1,
        "replicas": 3,
        "readyReplicas": 1,
        "selector": "app.kubernetes.io/instance=checkout,app.kubernetes.io/name=envoy",
        "address": "checkout-envoy.team-a.svc",
    }
    assert "address" not in next_status(observed(address=None), now=NOW)


def test_numbers_that_were_never_reported_are_zero() -> None:
    """A Deployment that its controller has not touched yet is neither complete nor available."""
    live = deployment()
    del live["status"]
    rollout = rollout_of(observed(live=live))
    assert rollout == Rollout(wanted=2)
    assert not rollout.is_complete
    assert not rollout.has_enough


# --- times ---------------------------------------------------------------------------------------------------------


def test_a_transition_time_moves_only_when_the_status_flips() -> None:
    """Another reason, message or generation leaves it; a flip sets it, to the second, in UTC."""
    first = next_status(with_problem(SERVICE, WAIT), now=NOW)
    proxy = with_status(proxy_of_team(generation=2), first)
    second = next_status(with_problem(SERVICE, ACT, proxy=proxy), now=LATER)
    times = {each["type"]: each["lastTransitionTime"] for each in second["conditions"]}
    early, late = "2026-07-02T03:04:05Z", "2026-07-02T04:04:05Z"
    assert times == dict.fromkeys(["Ready", "Reconciled", "Available", "Registered", "Programmed"], early) | {
        "Stalled": late
    }
    third = next_status(observed(with_status(proxy, second)), now=LATER)
    times = {each["type"]: each["lastTransitionTime"] for each in third["conditions"]}
    assert times == {
        "Ready": late,
        "Reconciled": late,
        "Available": early,
        "Registered": early,
        "Programmed": early,
    }
    assert {each["observedGeneration"] for each in third["conditions"]} == {2}
    assert third["observedGeneration"] == 2


PROBLEMS = st.sampled_from(
    [None, WAIT, ACT, Problem("Invalid", "no", needs_user_action=True), Problem("Paused", "wait")]
)
NUMBERS = st.integers(0, 5)
OBSERVATIONS = st.builds(
    lambda problems, numbers, deadline, observed_at, refusal, registration: Observation(
        proxy_of_team(),
        by_kind(
            *(
                result(
                    kind,
                    deployment(
                        wanted=numbers[0],
                        total=numbers[1],
                        updated=numbers[2],
                        ready=numbers[3],
                        observed=observed_at,
                        conditions=deadline,
                    )
                    if kind == DEPLOYMENT
                    else None,
                    problem,
                )
                for kind, problem in zip((CONFIG_MAP, DEPLOYMENT, SERVICE), problems, strict=True)
            )
        ),
        registration=registration,
        refusal=refusal,
    ),
    st.tuples(PROBLEMS, PROBLEMS, PROBLEMS),
    st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.sampled_from([(), DEADLINE]),
    st.integers(2, 3),
    st.sampled_from([None, ACT]),
    PROBLEMS,
)


@given(OBSERVATIONS)
def test_conditions_never_contradict_each_other(observation: Observation) -> None:
    """At most one of Stalled and Reconciling, none while Ready; Ready is the three together and a finished rollout."""
    found = conditions(observation)
    is_true = {type_ for type_, words in found.items() if words.startswith("True")}
    assert not {"Stalled", "Reconciling"} <= found.keys()
    assert {"Stalled", "Reconciling"} & found.keys() <= is_true, "they exist only while true"
    parts = {"Reconciled", "Available", "Registered"} <= is_true
    assert ("Ready" in is_true) == (parts and rollout_of(observation).is_complete)
    problems = [
        observation.refusal,
        observation.registration,
        *(each.problem for each in observation.children.values()),
    ]
    is_stalled = (
        any(each is not None and each.needs_user_action for each in problems)
        or rollout_of(observation).deadline is not None
    )
    assert ("Stalled" in found) == is_stalled
    assert ("Ready" in is_true) or ({"Stalled", "Reconciling"} & found.keys())
    if any(each.problem for each in observation.children.values()) or observation.refusal:
        assert "Reconciled" not in is_true


@given(OBSERVATIONS)
def test_nothing_but_flips_depends_on_the_clock(observation: Observation) -> None:
    """What was stored once is the same an hour later: a status without news is never written."""
    stored = next_status(observation, now=NOW)
    proxy = with_status(observation.proxy, stored)
    again = Observation(proxy, observation.children, observation.registration, observation.refusal, observation.address)
    assert next_status(again, now=LATER) == stored


@pytest.mark.parametrize(
    ("condition", "verified", "told"),
    [
        ({}, True, True),
        ({"status": "False"}, False, True),
        ({"status": "False", "reason": "Contended"}, True, True),
        ({"observedGeneration": 0}, False, False),
        ({"type": "Ready"}, False, False),
    ],
    ids=str,
)
def test_verified_is_what_the_stored_status_says_of_this_generation(
    condition: Object, *, verified: bool, told: bool
) -> None:
    """Only ``Reconciled`` counts, and only for the generation that is declared now."""
    reconciled = {"type": "Reconciled", "status": "True", "reason": "Verified", "observedGeneration": 1}
    assert is_verified(proxy_of_team() | {"status": {"conditions": [reconciled | condition]}}) is verified
    assert observed_current_generation(proxy_of_team() | {"status": {"conditions": [reconciled | condition]}}) is told
    assert not is_verified(proxy_of_team())
    assert not observed_current_generation(proxy_of_team())


# --- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_first_status_is_written_whole_and_pinned_to_the_version(tmp_path: Path) -> None:
    """Name, namespace, resourceVersion, status: no more; the answer is known at once."""
    proxy = proxy_of_team()
    status = next_status(observed(proxy), now=NOW)
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with components(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        assert await own.statuses.write(proxy, status) is None
        known = own.store.get(ENVOY_PROXY, Key("team-a", "checkout"))
    assert api.sent[0].body == {
        "apiVersion": proxy["apiVersion"],
        "kind": "EnvoyProxy",
        "metadata": {"name": "checkout", "namespace": "team-a", "resourceVersion": "10"},
        "status": status,
    }
    assert api.sent[0].is_forced
    assert known is not None
    assert known["status"] == status
    assert own.writes == [("EnvoyProxy", Outcome.CONFIGURED)]


@pytest.mark.anyio
async def test_a_status_that_says_the_same_is_not_written(tmp_path: Path) -> None:
    """Whatever others put beside it: a condition of theirs, or conditions in another order."""
    status = next_status(observed(), now=NOW)
    proxy = with_status(proxy_of_team(), status)
    proxy["status"]["conditions"] = [{"type": "Theirs", "status": "True"}, *reversed(proxy["status"]["conditions"])]
    async with components(ScriptedApi(), tmp_path) as own:
        assert await own.statuses.write(proxy, next_status(observed(proxy), now=LATER)) is None


@pytest.mark.anyio
async def test_a_condition_that_has_become_untrue_is_released(tmp_path: Path) -> None:
    """Stalled leaves with the first status that does not have it."""
    proxy = with_status(proxy_of_team(), next_status(with_problem(SERVICE, ACT), now=NOW))
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with components(api, tmp_path) as own:
        await own.statuses.write(proxy, next_status(observed(proxy), now=LATER))
    assert [each["type"] for each in api.sent[0].body["status"]["conditions"]] == list(FINE)


@pytest.mark.anyio
async def test_an_edit_by_somebody_else_is_undone(tmp_path: Path) -> None:
    """A status that we own is ours to say."""
    status = next_status(observed(), now=NOW)
    proxy = with_status(proxy_of_team(), status)
    proxy["status"]["address"] = "somewhere.else"
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with components(api, tmp_path) as own:
        await own.statuses.write(proxy, status)


def wiped(proxy: Object, *entries: Object) -> Object:
    """``proxy`` after somebody replaced its ``managedFields`` by ``entries``."""
    return proxy | {"metadata": proxy["metadata"] | {"managedFields": list(entries)}}


@pytest.mark.anyio
async def test_what_was_said_is_owned_again_before_it_is_taken_back(tmp_path: Path) -> None:
    """Once ownership was wiped, a condition and an address that hold no more are applied once more, and only ours."""
    said = next_status(with_problem(SERVICE, ACT), now=NOW) | {"address": "somewhere.else"}
    proxy = wiped(with_status(proxy_of_team(), said))
    proxy["status"]["conditions"].append({"type": "Theirs", "status": "True"})
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with components(api, tmp_path) as own:
        requeue_after_s = await own.statuses.write(proxy, next_status(observed(proxy, address=None), now=LATER))
    assert requeue_after_s == 0, "our own write is no news, and nothing else brings the round that takes it back"
    sent = api.sent[0].body["status"]
    stalled = {"Stalled": "True NameConflict"}
    assert {each["type"]: f"{each['status']} {each['reason']}" for each in sent["conditions"]} == FINE | stalled
    assert sent["address"] == "somewhere.else"


@pytest.mark.anyio
async def test_the_api_servers_stand_in_is_cast_off_before_anything_is_taken_back(tmp_path: Path) -> None:
    """The answer that shows it asks for another round; that one makes our fields ours alone, and then gives up."""
    said = next_status(with_problem(SERVICE, ACT), now=NOW)
    proxy = with_status(proxy_of_team(), said)
    mine = proxy["metadata"]["managedFields"]
    fields: Object = {"f:status": {"f:conditions": {'k:{"type":"Theirs"}': {}} | field_set(said)["f:conditions"]}}
    shadow = entry(proxy, fields, manager="before-first-apply", operation="Update", subresource="status")
    left: Object = {"f:status": {"f:conditions": {'k:{"type":"Theirs"}': {}}}}
    shadowed, free = wiped(proxy, *mine, shadow), wiped(proxy, *mine, shadow | {"fieldsV1": left})
    free["metadata"]["resourceVersion"] = "9999"
    api = ScriptedApi(("apply EnvoyProxy/status", ok(shadowed)))
    async with components(api, tmp_path) as own:
        assert await own.statuses.write(wiped(proxy), said) == 0
        api.add(("patch EnvoyProxy", ok(free)), ("apply EnvoyProxy/status", stored_status(free)))
        assert await own.statuses.write(shadowed, next_status(observed(shadowed), now=LATER)) is None
    pinned = {"uid": "proxy-uid", "resourceVersion": shadowed["metadata"]["resourceVersion"]}
    assert api.sent[1].body == {"metadata": pinned | {"managedFields": free["metadata"]["managedFields"]}}
    assert api.sent[2].body["metadata"]["resourceVersion"] == "9999"
    assert [each["type"] for each in api.sent[2].body["status"]["conditions"]] == list(FINE)


@pytest.mark.anyio
async def test_counters_alone_are_given_time_to_settle(tmp_path: Path) -> None:
    """They are written once after the time has passed, however often they move meanwhile."""
    proxy = with_status(proxy_of_team(), next_status(observed(), now=NOW))

    def counting(ready: int) -> Object:
        return next_status(observed(proxy, live=deployment(wanted=8, total=8, updated=8, ready=ready)), now=NOW)

    proxy = with_status(proxy_of_team(), counting(6))
    api = ScriptedApi()
    async with components(api, tmp_path) as own:
        assert await own.statuses.write(proxy, counting(7)) == SETTLE_S
        own.clock.mono += 1.5
        assert await own.statuses.write(proxy, counting(8)) == SETTLE_S - 1.5
        own.clock.mono += 0.5
        api.add(("apply EnvoyProxy/status", stored_status(proxy)))
        assert await own.statuses.write(proxy, counting(8)) is None
        own.clock.mono += 10
        assert await own.statuses.write(proxy, counting(7)) == SETTLE_S, "the next change has a time of its own"
    assert api.sent[0].body["status"]["readyReplicas"] == 8


@pytest.mark.anyio
async def test_counters_that_come_back_are_no_news(tmp_path: Path) -> None:
    """A dip that is over before it was written is forgotten, and so is its time."""
    proxy = with_status(proxy_of_team(), next_status(observed(), now=NOW))
    dip = next_status(observed(proxy, live=deployment(wanted=2, total=3, updated=3, ready=2)), now=NOW)
    async with components(ScriptedApi(), tmp_path) as own:
        assert await own.statuses.write(proxy, dip) == SETTLE_S
        own.clock.mono += 1
        assert await own.statuses.write(proxy, proxy["status"]) is None
        own.clock.mono += 1.5
        assert await own.statuses.write(proxy, dip) == SETTLE_S


@pytest.mark.anyio
async def test_a_flip_takes_the_counters_along_at_once(tmp_path: Path) -> None:
    """What is more than counting does not wait."""
    proxy = with_status(proxy_of_team(), next_status(observed(), now=NOW))
    down = next_status(observed(proxy, live=deployment(ready=0)), now=NOW)
    api = ScriptedApi(("apply EnvoyProxy/status", stored_status(proxy)))
    async with components(api, tmp_path) as own:
        assert await own.statuses.write(proxy, down) is None
    assert api.sent[0].body["status"]["readyReplicas"] == 0


@pytest.mark.anyio
async def test_a_status_that_another_keeps_undoing_is_written_ever_more_slowly(tmp_path: Path) -> None:
    """Once, and again after three undoings; then the caller is told when to come back, and twice as late each time."""
    proxy = with_status(proxy_of_team(), next_status(observed(), now=NOW))
    down = next_status(observed(proxy, live=deployment(ready=0)), now=NOW)
    api = ScriptedApi()
    async with components(api, tmp_path) as own:
        for _ in range(1 + TIMES.threshold):
            api.add(("apply EnvoyProxy/status", stored_status(proxy)))
            assert await own.statuses.write(proxy, down) is None
        pauses = []
        for _ in range(3):
            pause_s = await own.statuses.write(proxy, down)
            assert pause_s is not None
            pauses.append(pause_s)
            own.clock.mono += pause_s
            api.add(("apply EnvoyProxy/status", stored_status(proxy)))
            assert await own.statuses.write(proxy, down) is None
    assert pauses == [TIMES.base_s, 2 * TIMES.base_s, 4 * TIMES.base_s]


@pytest.mark.anyio
async def test_a_proxy_that_has_moved_on_is_observed_anew(tmp_path: Path) -> None:
    """The conflict is the caller's: a status about an older version is never written over a newer one."""
    api = ScriptedApi(("apply EnvoyProxy/status", CONFLICT))
    async with components(api, tmp_path) as own:
        with pytest.raises(ConflictError):
            await own.statuses.write(proxy_of_team(), next_status(observed(), now=NOW))
    assert own.writes == []
