"""Leases, in virtual time: one holder at any moment, even shares, and nothing waited for that need not be."""

import copy
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operator_app.__main__ import main
from operator_app.api.kinds import Object
from operator_app.errors import FencedError
from operator_app.kube import fencing
from operator_app.kube.fencing import FencingToken
from operator_app.sharding.hashing import shard_of
from operator_app.sharding.leases import (
    ANNOTATION_SHARDS,
    LABEL_ROLE,
    ElectionState,
    LeaseAction,
    LeaseRequest,
    LeaseTimes,
    Role,
    ShardTransition,
    lease_of,
    replica_lease_name,
    shard_lease_name,
    targets,
)
from tests.unit.sharding.lease_world import NAMESPACE, TIMES, Replica, World

STAMP = "2026-01-01T00:00:00.000000Z"


# --- times and reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [(10, 10, 2), (15, 2, 2), (15, 16, 2), (15, 10, 0), (15, 10, 11)])
def test_times_that_are_out_of_order_are_refused(times: tuple[int, float, float]) -> None:
    """A deadline that is not before the Lease's end would let two work; one sentence says so."""
    with pytest.raises(ValueError, match="must grow in this order"):
        LeaseTimes(*times)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--shards=-1"], "OPERATOR_APP_SHARDS (--shards): Input should be greater than or equal to 1"),
        (
            ["--lease-duration-s=8"],
            "--retry-period-s (2), --renew-deadline-s (10) and --lease-duration-s (8) must grow in this order",
        ),
        (["--retry-period-s=11"], "--retry-period-s (11), --renew-deadline-s (10) and"),
        (["--retry-period-s=9.99"], "--renew-deadline-s (10) must exceed --retry-period-s (9.99) by 1 s or more"),
        (["--lease-duration-s=2.5"], "OPERATOR_APP_LEASE_DURATION_S (--lease-duration-s): "),
        (["--replica-name=Bad_Name"], "OPERATOR_APP_REPLICA_NAME (--replica-name): "),
    ],
)
def test_bad_settings_are_refused_at_the_start_by_one_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started, the exit code says that it was the user's input, and the sentence says which."""
    assert main(["run", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_two_attempts_to_renew_fit_before_the_deadline() -> None:
    """One request that gets no answer must not cost the shard."""
    assert TIMES.retry_period_s + 2 * TIMES.request_timeout_s <= TIMES.renew_deadline_s


def a_lease(name: str, role: Role = Role.SHARD, *, version: int = 1, shards: int = 4, **spec: Any) -> Object:
    """A stored Lease."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": {LABEL_ROLE: role.value},
            "annotations": {ANNOTATION_SHARDS: str(shards)},
        },
        "spec": {"leaseDurationSeconds": 15, "leaseTransitions": 0, **spec},
    }


def test_a_lease_that_is_not_ours_or_was_edited_by_hand_is_read_with_care() -> None:
    """Other Leases in the namespace mean nothing; what is missing in one of ours is taken for the least harmful."""
    assert lease_of({"metadata": {"name": "kube-scheduler", "uid": "u", "resourceVersion": "1"}}, TIMES) is None
    assert lease_of(a_lease("operator-app-shard-01"), TIMES) is None
    assert lease_of(a_lease("operator-app-shard-²"), TIMES) is None
    bare = {"metadata": a_lease("operator-app-shard-3")["metadata"] | {"annotations": {}}, "spec": {}}
    lease = lease_of(bare, TIMES)
    assert lease is not None
    assert (lease.shard, lease.holder, lease.epoch, lease.duration_s, lease.shards) == (3, None, 0, 15, 0)


# --- shares --------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, 9), min_size=1), st.integers(1, 64))
def test_targets_are_even_complete_and_move_as_little_as_possible(counts: dict[str, int], shards: int) -> None:
    """Targets add up to all shards, differ by one at most, and give the larger share to who has more already."""
    aims = targets(counts, shards)
    assert sum(aims.values()) == shards
    assert max(aims.values()) - min(aims.values()) <= 1
    assert all(counts[a] >= counts[b] for a in aims for b in aims if aims[a] > aims[b])


def test_targets_do_not_depend_on_who_computes_them() -> None:
    """Members that see the same come to the same, whatever order they see it in."""
    assert targets({"a": 2, "b": 2, "c": 0}, 4) == targets({"c": 0, "b": 2, "a": 2}, 4) == {"a": 2, "b": 1, "c": 1}


@given(st.integers(1, 32))
@settings(max_examples=10)
def test_a_new_shard_takes_tenants_from_others_and_moves_no_other(shards: int) -> None:
    """With one more shard, a tenant stays where it was or goes to the new one."""
    tenants = [f"team-{number}" for number in range(300)]
    before, after = [[shard_of(each, count) for each in tenants] for count in (shards, shards + 1)]
    assert all(new in (old, shards) for old, new in zip(before, after, strict=True))


def test_tenants_are_spread_evenly_and_for_ever_the_same() -> None:
    """Each of 8 shards gets an eighth of 8,000 tenants within 10 %, and a version of this code can't change whose."""
    counts = Counter(shard_of(f"team-{number}", 8) for number in range(8_000))
    assert all(900 <= counts[shard] <= 1_100 for shard in range(8))
    assert [shard_of(name, 8) for name in ("team-a", "team-b", "default", "kube-system")] == [7, 1, 0, 3]


# --- the fence -----------------------------------------------------------------------------------------------------


def test_a_write_after_the_deadline_is_refused_however_late() -> None:
    """The deadline itself is too late, and so is any time after; before it, nothing is in the way."""
    moments = iter((9.999, 10.0, 1e9))
    with fencing.holding(FencingToken(2, 7, until=10.0, clock=lambda: next(moments))):
        fencing.check()
        for _ in range(2):
            with pytest.raises(FencedError, match="shard 2 in epoch 7"):
                fencing.check()


def test_work_without_a_shard_cannot_write_and_tools_can() -> None:
    """Inside the operator a right is needed; a command that nobody promised to be alone needs none."""
    fencing.check()
    with fencing.holding(fencing.NO_TOKEN), pytest.raises(FencedError, match="work without a shard"):
        fencing.check()
    with fencing.holding(fencing.NO_TOKEN), fencing.holding(FencingToken(0, 0, until=1.0, clock=lambda: 0.0)):
        fencing.check()


def test_a_right_is_carried_only_as_long_as_its_work_lasts() -> None:
    """What comes after a crash carries nothing; carrying alone does not keep a shard from being given back."""
    token = FencingToken(0, 0, until=1.0, clock=lambda: 0.0)

    def crash() -> None:
        with fencing.holding(token), fencing.holding(token):
            assert (fencing.current_token(), token.users) == (token, 0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    assert fencing.current_token() is None


# --- one replica ---------------------------------------------------------------------------------------------------


class Alone:
    """A state without a world: the test plays the API server and the clock."""

    def __init__(self, me: str = "me", shards: int = 1) -> None:
        self.now = 100.0
        self.changes: list[tuple[int, ShardTransition, int]] = []
        self.version = 10
        self.state = ElectionState(
            me,
            shards,
            TIMES,
            namespace=NAMESPACE,
            tell=lambda *change: self.changes.append(change),
            clock=lambda: self.now,
            rand=lambda: 0.5,
        )

    def due(self, *deeds: LeaseAction) -> list[LeaseRequest]:
        """What is due now, of these deeds."""
        return [each for each in self.state.due(now=self.now, stamp=STAMP) if each.action in deeds]

    def store(self, request: LeaseRequest) -> Object:
        """Commit an request, without telling."""
        assert request.body is not None
        self.version += 1
        obj = copy.deepcopy(request.body)
        obj["metadata"] |= {"uid": f"uid-{request.name}", "resourceVersion": str(self.version)}
        return obj

    def succeed(self, request: LeaseRequest) -> None:
        """Commit an request and answer."""
        self.state.observe(self.store(request), now=self.now)
        self.state.done(request, now=self.now)

    def holding(self) -> FencingToken:
        """Join, take the one shard, and return the token."""
        self.state.begin()
        for request in self.due(LeaseAction.JOIN, LeaseAction.ACQUIRE):
            self.succeed(request)
        token = self.state.token(0)
        assert token is not None
        return token


def test_nothing_is_sent_before_the_replica_can_work() -> None:
    """A replica that is not in sync yet is no member: others would leave shards to it in vain."""
    alone = Alone()
    assert alone.state.due(now=alone.now, stamp=STAMP) == []


def test_a_deadline_counts_from_when_the_renewal_was_sent() -> None:
    """An answer that took its time does not prolong the right to write."""
    alone = Alone()
    alone.state.begin()
    (take,) = alone.due(LeaseAction.ACQUIRE)
    alone.now += 3
    alone.succeed(take)
    token = alone.state.token(0)
    assert token is not None
    assert token.until == 100 + TIMES.renew_deadline_s


def test_renewals_come_every_retry_period_and_not_more_often() -> None:
    """Between two renewals nothing is sent, and the next moment to look is exactly the next renewal."""
    alone = Alone()
    alone.holding()
    assert alone.state.due(now=alone.now, stamp=STAMP) == []
    assert alone.state.next_at(alone.now) == 100 + TIMES.retry_period_s
    alone.now += TIMES.retry_period_s
    assert {each.action for each in alone.state.due(now=alone.now, stamp=STAMP)} == {
        LeaseAction.JOIN,
        LeaseAction.RENEW,
    }


def test_a_hold_that_lapsed_never_revives() -> None:
    """A renewal whose answer comes after the deadline changes nothing; the shard is won anew, with the next epoch."""
    alone = Alone()
    token = alone.holding()
    alone.now += TIMES.retry_period_s
    (renewal,) = alone.due(LeaseAction.RENEW)
    alone.now = 100 + TIMES.renew_deadline_s
    alone.succeed(renewal)
    assert not token.is_valid
    (take,) = alone.due(LeaseAction.ACQUIRE)
    assert take.epoch == token.epoch + 1
    alone.succeed(take)
    assert alone.changes == [
        (0, ShardTransition.TAKEN, 0),
        (0, ShardTransition.LAPSED, 0),
        (0, ShardTransition.TAKEN, 1),
    ]
    assert not token.is_valid


def test_somebody_elses_hand_on_the_lease_ends_the_hold_at_once() -> None:
    """Seen by the watch or by a lost race, the new holder is believed."""
    alone = Alone()
    token = alone.holding()
    taken = a_lease(shard_lease_name(0), version=50, shards=1, holderIdentity="you", leaseTransitions=1)
    alone.state.observe(taken, now=alone.now)
    assert not token.is_valid
    assert alone.changes[-1] == (0, ShardTransition.LOST, 0)


def test_a_renewal_whose_answer_was_lost_is_recognised() -> None:
    """The version moved on by our own hand: the token stays, and the next renewal starts from there."""
    alone = Alone()
    token = alone.holding()
    alone.now += TIMES.retry_period_s
    (renewal,) = alone.due(LeaseAction.RENEW)
    committed = alone.store(renewal)
    alone.now += TIMES.request_timeout_s
    alone.state.observe(committed, now=alone.now)
    alone.state.failed(renewal, now=alone.now)
    (again,) = alone.due(LeaseAction.RENEW)
    assert again.version == int(committed["metadata"]["resourceVersion"])
    alone.succeed(again)
    assert token.is_valid
    assert token.until == again.sent_at + TIMES.renew_deadline_s


def test_a_take_that_failed_behind_its_own_write_is_not_repeated_at_once() -> None:
    """Our own hand on the Lease is no news; the period counts, or what the API server asked for, at most a Lease's."""
    alone = Alone()
    alone.state.begin()
    for asked_s, pause_s in ((0.0, TIMES.retry_period_s), (5.0, 5.0), (1e300, TIMES.duration_s)):
        (take,) = alone.due(LeaseAction.ACQUIRE)
        alone.state.observe(alone.store(take), now=alone.now)
        alone.state.failed(take, now=alone.now, asked_s=asked_s)
        alone.now += pause_s - 0.001
        assert alone.due(LeaseAction.ACQUIRE) == []
        alone.now += 0.001


def test_another_holder_is_waited_out_on_our_own_clock() -> None:
    """Times written in a Lease mean nothing; its end is counted from when we saw it change, each time anew."""
    alone = Alone()
    theirs = a_lease(shard_lease_name(0), version=1, shards=1, holderIdentity="you", renewTime="1970-01-01T00:00:00Z")
    alone.state.observe(theirs, now=alone.now)
    alone.state.begin()
    assert alone.due(LeaseAction.ACQUIRE) == []
    alone.now += 14
    alone.state.observe(theirs | {"metadata": theirs["metadata"] | {"resourceVersion": "2"}}, now=alone.now)
    alone.now += 14.9
    assert alone.due(LeaseAction.ACQUIRE) == []
    alone.now = 100 + 14 + 15
    (take,) = alone.due(LeaseAction.ACQUIRE)
    assert (take.epoch, take.version) == (1, 2)


def test_the_holders_own_duration_is_respected() -> None:
    """Replicas with other settings, as during a rollout, are given the time that they count on."""
    alone = Alone()
    theirs = a_lease(shard_lease_name(0), shards=1, holderIdentity="you", leaseDurationSeconds=60)
    alone.state.observe(theirs, now=alone.now)
    alone.state.begin()
    alone.now += 59
    assert alone.due(LeaseAction.ACQUIRE) == []
    alone.now += 1
    assert len(alone.due(LeaseAction.ACQUIRE)) == 1


def test_what_a_former_life_held_is_taken_at_once() -> None:
    """A process that was killed and started again under its name does not wait for its own Lease."""
    alone = Alone()
    left = a_lease(shard_lease_name(0), version=5, shards=1, holderIdentity="me", leaseTransitions=3)
    alone.state.observe(left, now=alone.now)
    alone.state.begin()
    (take,) = alone.due(LeaseAction.ACQUIRE)
    assert (take.epoch, take.version) == (4, 5)


def test_a_twin_under_our_name_is_not_fought() -> None:
    """Who finds a Lease under its own name that it has not written waits for its end, as for anybody's."""
    alone = Alone()
    alone.holding()
    twin = a_lease(shard_lease_name(0), version=50, shards=1, holderIdentity="me", leaseTransitions=1)
    alone.state.observe(twin, now=alone.now)
    assert alone.changes[-1] == (0, ShardTransition.LOST, 0)
    alone.now += 14.9
    assert alone.due(LeaseAction.ACQUIRE) == []
    alone.now += 0.1
    assert len(alone.due(LeaseAction.ACQUIRE)) == 1


def test_a_lease_deleted_under_its_holder_is_not_free_before_its_time() -> None:
    """``kubectl delete lease`` must not make two holders: who saw the Lease waits as if it were still there."""
    alone = Alone()
    theirs = a_lease(shard_lease_name(0), shards=1, holderIdentity="you", leaseTransitions=8)
    alone.state.observe(theirs, now=alone.now)
    alone.state.begin()
    alone.now += 1
    alone.state.forget(theirs | {"metadata": theirs["metadata"] | {"resourceVersion": "9"}}, now=alone.now)
    assert alone.due(LeaseAction.ACQUIRE) == []
    alone.now += 14
    (take,) = alone.due(LeaseAction.ACQUIRE)
    assert take.version is None
    assert take.epoch == 9


def test_what_others_wrote_on_a_lease_stays() -> None:
    """A renewal is a replace, and still takes nothing away that is not its own."""
    alone = Alone()
    free = a_lease(shard_lease_name(0), shards=1)
    free["metadata"]["annotations"]["note"] = "keep"
    free["metadata"]["managedFields"] = [{"manager": "somebody"}]
    free["spec"]["preferredHolder"] = "you"
    alone.state.observe(free, now=alone.now)
    alone.state.begin()
    (take,) = alone.due(LeaseAction.ACQUIRE)
    assert take.body is not None
    assert take.body["metadata"]["annotations"] == {"note": "keep", ANNOTATION_SHARDS: "1"}
    assert "managedFields" not in take.body["metadata"]
    assert take.body["spec"]["preferredHolder"] == "you"


def test_a_shard_is_given_back_when_its_work_is_over() -> None:
    """From ``leave`` on there is no new work; the Lease is renewed while a round runs, and freed right after."""
    alone = Alone()
    token = alone.holding()
    token.users += 1
    alone.state.leave()
    assert alone.state.token(0) is None
    (gone,) = alone.state.due(now=alone.now, stamp=STAMP)
    assert (gone.action, gone.name) == (LeaseAction.LEAVE, replica_lease_name("me"))
    alone.now += TIMES.retry_period_s
    (renewal,) = alone.due(LeaseAction.RENEW)
    alone.succeed(renewal)
    assert token.is_valid
    token.users -= 1
    (release,) = alone.due(LeaseAction.RELEASE)
    with fencing.holding(token), pytest.raises(FencedError):
        fencing.check()  # no write may follow once the release is on its way
    assert release.body is not None
    assert "holderIdentity" not in release.body["spec"]
    had_left = alone.state.has_left
    alone.succeed(release)
    alone.state.done(gone, now=alone.now)
    assert (had_left, alone.state.has_left) == (False, True)
    assert alone.changes[-1] == (0, ShardTransition.RELEASED, 0)


# --- many replicas -------------------------------------------------------------------------------------------------


def test_one_replica_of_two_leads_and_the_other_takes_over_when_it_dies() -> None:
    """The default is plain leader election; the standby leads at the very end of the dead one's time."""
    world = World(1)
    first, _ = world.join("a", 1), world.join("b", 1)
    world.run(20)
    assert world.holders() == {0: "a"}
    world.crash(first)
    died_at = world.now
    world.run(TIMES.duration_s + 0.5)
    assert world.holders() == {0: "b"}
    took_at = next(at for at, _, change in world.replicas[1].changes if change == ShardTransition.TAKEN)
    assert took_at - died_at <= TIMES.duration_s + 0.2


def test_a_replica_that_joins_gets_its_share_and_nobody_waits_for_a_lease_to_end() -> None:
    """Shares even out within a second of joining, moving only as many shards as needed."""
    world = World(2)
    world.join("a", 8)
    world.run(1)
    assert world.shares() == [8]
    world.join("b", 8)
    world.run(1)
    assert world.shares() == [4, 4]
    world.join("c", 8)
    world.run(1)
    assert world.shares() == [2, 3, 3]
    moves = [change for each in world.replicas for _, _, change in each.changes if change == ShardTransition.RELEASED]
    assert len(moves) == 4 + 2


def test_a_replica_that_leaves_hands_over_within_a_second() -> None:
    """Everything it held is held by others, and its membership is gone."""
    world = World(3)
    first, _, _ = world.join("a"), world.join("b"), world.join("c")
    world.run(5)
    first.state.leave()
    first.step()
    world.run(1)
    assert first.state.has_left
    assert "a" not in world.holders().values()
    assert len(world.holders()) == 4
    assert replica_lease_name("a") not in world.server.leases


def test_a_restart_under_the_same_name_waits_for_nothing() -> None:
    """``kill -9`` and a new process: the same shards within a second, with a higher epoch."""
    world = World(4)
    first = world.join("a", 2)
    world.run(5)
    epochs = [world.lease(shard)["spec"]["leaseTransitions"] for shard in (0, 1)]
    world.crash(first)
    world.join("a", 2)
    world.run(1)
    assert world.holders() == {0: "a", 1: "a"}
    assert [world.lease(shard)["spec"]["leaseTransitions"] for shard in (0, 1)] == [each + 1 for each in epochs]


def test_memberships_of_the_dead_are_removed() -> None:
    """Pods come and go under ever new names; their Leases do not pile up."""
    world = World(5)
    world.join("elector", 1)
    for number in range(5):
        pod = world.join(f"pod-{number}", 1)
        world.run(3)
        world.crash(pod)
    world.run(20)
    assert set(world.server.leases) == {shard_lease_name(0), replica_lease_name("elector")}


def test_replicas_that_divide_differently_never_work_at_the_same_time() -> None:
    """A rollout that changes ``--shards`` waits until the old division is gone, then takes over whole."""
    world = World(6)
    old = [world.join("old-a", 1), world.join("old-b", 1)]
    world.run(5)
    world.join("new-a", 4)
    world.join("new-b", 4)
    world.run(30)
    assert set(world.holders().values()) <= {"old-a", "old-b"}
    for each in old:
        each.state.leave()
        each.step()
    world.run(10)
    assert sorted(world.holders()) == [0, 1, 2, 3]
    assert set(world.holders().values()) == {"new-a", "new-b"}


def test_shards_that_are_no_more_leave_no_lease() -> None:
    """With fewer shards than before, the Leases beyond are removed."""
    world = World(7)
    first = world.join("a", 4)
    world.run(3)
    first.state.leave()
    first.step()
    world.run(1)
    world.join("b", 2)
    world.run(5)
    assert {name for name in world.server.leases if "shard" in name} == {shard_lease_name(0), shard_lease_name(1)}


def chaos(world: World, replicas: list[Replica], seconds: float) -> None:
    """Crashes, restarts, pauses, cuts and departures, one every few seconds."""
    until = world.now + seconds
    names = iter(f"late-{number}" for number in range(1_000))
    shards = replicas[0].state.shards
    while world.now < until:
        world.run(world.random.uniform(0.1, 6.0))
        living = [each for each in world.replicas if each.is_alive]
        victim = world.random.choice(living)
        match world.random.randrange(6):
            case 0 if len(living) > 1:
                world.crash(victim)
                world.join(next(names), shards, rate=victim.rate, offset=world.random.uniform(-1e6, 1e6))
            case 1:
                world.crash(victim)
                world.join(victim.name, shards, rate=victim.rate)
            case 2:
                victim.paused_until = world.now + world.random.choice((0.5, 4.0, 9.9, 10.1, 15.0, 40.0))
            case 3:
                victim.is_cut_off = not victim.is_cut_off
            case 4 if len(living) > 1:
                victim.state.leave()
                victim.step()
                world.run(0.5)
                world.crash(victim)
                world.join(next(names), shards, rate=victim.rate)
            case _:
                world.longest_delay_s = world.random.choice((0.02, 0.5, 5.0, 20.0))


@pytest.mark.parametrize("seed", range(12))
def test_two_never_hold_one_shard_whatever_happens(seed: int) -> None:
    """Under delays, losses, crashes, pauses, cuts and clocks of different speed; in the end shares are even again."""
    world = World(seed, longest_delay_s=0.5, loss=0.05)
    shards = world.random.choice((1, 3, 4, 8))
    # 15 s against 10 s leave room for clocks that differ by half; real ones differ by parts of a million.
    rates = [world.random.uniform(0.85, 1.15) for _ in range(3)]
    replicas = [world.join(f"r{number}", shards, rate=rate) for number, rate in enumerate(rates)]
    chaos(world, replicas, 200)

    world.loss, world.longest_delay_s = 0.0, 0.05
    for each in world.replicas:
        if each.is_alive and each.is_cut_off:
            each.is_cut_off = False
            for obj in copy.deepcopy(list(world.server.leases.values())):
                each.hear("MODIFIED", obj)  # the watch lists anew
    world.run(120)
    assert sorted(world.holders()) == list(range(shards))
    assert max(world.shares()) - min(world.shares()) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_two_divisions_never_mix_whatever_happens(seed: int) -> None:
    """With replicas of two divisions and the same mishaps, the world's check of every event holds."""
    world = World(1_000 + seed, longest_delay_s=0.5, loss=0.05)
    replicas = [world.join("a", 2), world.join("b", 2)]
    world.join("c", 5)
    chaos(world, replicas, 200)


def test_the_world_notices_a_second_holder() -> None:
    """The check that every simulation rests on can fail: a forged token trips it."""
    world = World(8)
    world.join("a", 1)
    second = world.join("b", 1)
    world.run(3)
    second.holds.append(FencingToken(0, 99, until=second.clock() + 5, clock=second.clock))
    with pytest.raises(AssertionError):
        world.run(1)
