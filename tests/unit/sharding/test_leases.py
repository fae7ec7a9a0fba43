"""Leases in virtual time: one holder at any moment, even shares, and no unnecessary wait."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operator_app.__main__ import main
from operator_app.api.kinds import Object
from operator_app.errors import FencedError
from operator_app.kube import fencing
from operator_app.kube.fencing import FencingToken
from operator_app.sharding.election import (
    MOST_AT_ONCE,
    MOST_UNABLE_LEASES,
    ElectionState,
    LeaseAction,
    LeaseRequest,
    ShardTransition,
    targets,
)
from operator_app.sharding.hashing import shard_of
from operator_app.sharding.leases import (
    ANNOTATION_DIVISION,
    ANNOTATION_HOLDS,
    ANNOTATION_RELEASED,
    ANNOTATION_SHARDS,
    LABEL_ROLE,
    MAX_EPOCH,
    LeaseTimes,
    Role,
    heartbeat_lease_name,
    lease_of,
    shard_lease_name,
)
from tests.unit.sharding import former_format
from tests.unit.sharding.lease_world import NAMESPACE, TIMES, Replica, World

STAMP = "2026-01-01T00:00:00.000000Z"


# --- times and reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [(10, 10, 2), (15, 2, 2), (15, 16, 2), (15, 10, 0), (15, 10, 11)])
def test_times_that_are_out_of_order_are_refused(times: tuple[int, float, float]) -> None:
    """With a deadline after the expiry of the Lease a shard could have two holders; the error names the flags."""
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
def test_bad_settings_are_refused_at_the_start_in_one_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started, the exit code is 2, and one line on standard error names the flag."""
    assert main(["run", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_two_attempts_to_renew_fit_before_the_deadline() -> None:
    """One request without an answer must not lose the shard."""
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


def test_foreign_leases_are_ignored_and_missing_fields_get_safe_defaults() -> None:
    """Other Leases in the namespace are ignored; a field removed by hand gets the default that is safe."""
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
    """Targets add up to all shards, differ by at most one, and give larger shares to members that have more already."""
    aims = targets(counts, shards)
    assert sum(aims.values()) == shards
    assert max(aims.values()) - min(aims.values()) <= 1
    assert all(counts[a] >= counts[b] for a in aims for b in aims if aims[a] > aims[b])


def test_targets_do_not_depend_on_who_computes_them() -> None:
    """Members with the same counts compute the same targets, in whatever order the counts come."""
    assert targets({"a": 2, "b": 2, "c": 0}, 4) == targets({"c": 0, "b": 2, "a": 2}, 4) == {"a": 2, "b": 1, "c": 1}


@given(st.integers(1, 32))
@settings(max_examples=10)
def test_a_new_shard_takes_tenants_from_others_and_moves_no_other(shards: int) -> None:
    """With one more shard, a tenant stays where it was or goes to the new one."""
    tenants = [f"team-{number}" for number in range(300)]
    before, after = [[shard_of(each, count) for each in tenants] for count in (shards, shards + 1)]
    assert all(new in (old, shards) for old, new in zip(before, after, strict=True))


def test_tenants_are_spread_evenly_and_the_same_in_every_version() -> None:
    """Each of 8 shards gets an eighth of 8,000 tenants within 10 %, and the shards of some names are fixed here."""
    counts = Counter(shard_of(f"team-{number}", 8) for number in range(8_000))
    assert all(900 <= counts[shard] <= 1_100 for shard in range(8))
    assert [shard_of(name, 8) for name in ("team-a", "team-b", "default", "kube-system")] == [7, 1, 0, 3]


# --- fencing tokens ------------------------------------------------------------------------------------------------


def test_a_write_at_or_after_the_deadline_is_refused() -> None:
    """The deadline itself is too late, and so is any time after it; before it, writes are allowed."""
    moments = iter((9.999, 10.0, 1e9))
    with fencing.holding(FencingToken(2, 7, until=10.0, clock=lambda: next(moments))):
        fencing.check()
        for _ in range(2):
            with pytest.raises(FencedError, match="shard 2 in epoch 7"):
                fencing.check()


def test_code_with_no_shard_cannot_write_and_commands_can() -> None:
    """``NO_TOKEN`` refuses every write; code that carries no token at all, such as a command, is not checked."""
    fencing.check()
    with fencing.holding(fencing.NO_TOKEN), pytest.raises(FencedError, match="work without a shard"):
        fencing.check()
    with fencing.holding(fencing.NO_TOKEN), fencing.holding(FencingToken(0, 0, until=1.0, clock=lambda: 0.0)):
        fencing.check()


def test_a_token_is_current_only_within_its_context() -> None:
    """Also after an exception; being the current token alone does not keep a shard from being released."""
    token = FencingToken(0, 0, until=1.0, clock=lambda: 0.0)

    def crash() -> None:
        with fencing.holding(token), fencing.holding(token):
            assert (fencing.current_token(), token.users) == (token, 0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    assert fencing.current_token() is None


# --- one replica ---------------------------------------------------------------------------------------------------


class OneReplica:
    """An election state without a simulation: the test is the API server and the clock."""

    def __init__(self, identity: str = "me", shards: int = 1) -> None:
        self.now = 100.0
        self.transitions: list[tuple[int, ShardTransition, int]] = []
        self.version = 10
        self._due: list[LeaseRequest] = []
        self.state = ElectionState(
            identity,
            shards,
            TIMES,
            namespace=NAMESPACE,
            on_change=lambda *transition: self.transitions.append(transition),
            clock=lambda: self.now,
            rand=lambda: 0.5,
        )

    def due(self, *actions: LeaseAction) -> list[LeaseRequest]:
        """The requests due so far that have one of these actions; each is returned once."""
        self._due += self.state.due(now_mono=self.now, stamp=STAMP)
        wanted = [each for each in self._due if each.action in actions]
        self._due = [each for each in self._due if each.action not in actions]
        return wanted

    def store(self, request: LeaseRequest) -> Object:
        """Commit a request; the stored Lease, which the state has not observed."""
        assert request.body is not None
        self.version += 1
        obj = copy.deepcopy(request.body)
        obj["metadata"] |= {"uid": f"uid-{request.name}", "resourceVersion": str(self.version)}
        return obj

    def succeed(self, request: LeaseRequest) -> None:
        """Commit a request, and let the state observe the Lease and the success."""
        self.state.observe(self.store(request), now_mono=self.now)
        self.state.done(request, now_mono=self.now)

    def deliver(self) -> None:
        """Let the watch have delivered everything that is stored."""
        self.state.delivered(self.version, now_mono=self.now)

    def beat(self) -> None:
        """Send the heartbeat that is due, and confirm it."""
        (request,) = self.due(LeaseAction.BEAT)
        self.succeed(request)
        self.deliver()

    def join(self) -> None:
        """Begin, with a confirmed heartbeat."""
        self.state.begin()
        self.beat()

    def wait(self, seconds: float) -> None:
        """Let time pass with a heartbeat every second."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 1, until)
            for request in self.due(LeaseAction.BEAT):
                self.succeed(request)
                self.deliver()

    def acquire(self) -> FencingToken:
        """Join and acquire the one shard; its token."""
        self.join()
        (acquisition,) = self.due(LeaseAction.ACQUIRE)
        self.succeed(acquisition)
        self.beat()
        token = self.state.token(0)
        assert token is not None
        return token


def test_no_request_is_due_before_begin() -> None:
    """A replica whose caches are not synced does not join: it would be allotted shards that it can't serve."""
    replica = OneReplica()
    assert replica.state.due(now_mono=replica.now, stamp=STAMP) == []


def test_a_deadline_counts_from_when_the_heartbeat_was_sent() -> None:
    """An answer that took its time, or a watch that did, does not prolong the right to write."""
    replica = OneReplica()
    replica.join()
    (acquisition,) = replica.due(LeaseAction.ACQUIRE)
    replica.now += 1
    replica.succeed(acquisition)
    (beat,) = replica.due(LeaseAction.BEAT)
    replica.now += 1
    replica.succeed(beat)
    assert replica.state.token(0) is None
    replica.now += 1
    replica.deliver()
    token = replica.state.token(0)
    assert token is not None
    assert token.until == 101 + TIMES.renew_deadline_s


def test_a_heartbeat_is_sent_every_retry_period_and_not_more_often() -> None:
    """Between two heartbeats no request is due; the next is due at the latest after the period, or 20 % earlier."""
    replica = OneReplica()
    replica.acquire()
    assert replica.state.due(now_mono=replica.now, stamp=STAMP) == []
    next_due_mono = replica.state.next_due_mono(replica.now)
    assert next_due_mono == 100 + 0.9 * TIMES.retry_period_s  # the random number is 0.5
    replica.now = next_due_mono
    assert [each.action for each in replica.state.due(now_mono=replica.now, stamp=STAMP)] == [LeaseAction.BEAT]


def test_a_heartbeat_that_is_not_confirmed_is_followed_by_a_list_and_by_no_other() -> None:
    """While the watch stands still, the next heartbeat waits; a whole list confirms the one before as well."""
    replica = OneReplica()
    token = replica.acquire()
    replica.now += TIMES.retry_period_s
    (beat,) = replica.due(LeaseAction.BEAT)
    replica.succeed(beat)
    replica.now += TIMES.retry_period_s / 2
    (listing,) = replica.state.due(now_mono=replica.now, stamp=STAMP)
    assert listing.action == LeaseAction.LIST
    replica.now += TIMES.retry_period_s
    assert replica.state.due(now_mono=replica.now, stamp=STAMP) == []
    replica.deliver()
    replica.state.done(listing, now_mono=replica.now)
    assert token.until == beat.sent_mono + TIMES.renew_deadline_s
    assert [each.action for each in replica.state.due(now_mono=replica.now, stamp=STAMP)] == [LeaseAction.BEAT]


def test_a_heartbeat_names_the_shards_and_looks_like_a_lease_of_another_division() -> None:
    """What others read in it, and what keeps replicas of the former format from acquiring anything."""
    replica = OneReplica(shards=6)
    replica.join()
    for request in replica.due(LeaseAction.ACQUIRE):
        if request.shard in (1, 5):
            replica.succeed(request)
        else:
            replica.state.failed(request, now_mono=replica.now, retry_after_s=60)
    (beat,) = replica.due(LeaseAction.BEAT)
    assert beat.body is not None
    assert beat.body["metadata"]["annotations"] == {
        ANNOTATION_SHARDS: "0",
        ANNOTATION_DIVISION: "6",
        ANNOTATION_HOLDS: f"{1 << 1 | 1 << 5:x}",
    }
    assert former_format.lease_of(replica.store(beat), TIMES) is not None
    lease = lease_of(replica.store(beat), TIMES)
    assert lease is not None
    assert (lease.role, lease.shard, lease.shards) == (Role.HEARTBEAT, None, 6)
    assert [shard for shard in range(6) if lease.holds(shard)] == [1, 5]


def test_an_expired_token_never_becomes_valid_again() -> None:
    """A heartbeat confirmed after the deadline changes nothing; the shard is acquired anew, with the next epoch."""
    replica = OneReplica()
    token = replica.acquire()
    replica.now += TIMES.retry_period_s
    (beat,) = replica.due(LeaseAction.BEAT)
    replica.now = 100 + TIMES.renew_deadline_s
    replica.succeed(beat)
    replica.deliver()
    assert not token.is_valid
    (acquisition,) = replica.due(LeaseAction.BEAT, LeaseAction.ACQUIRE)
    assert acquisition.epoch == token.epoch + 1
    replica.succeed(acquisition)
    replica.beat()
    assert replica.transitions == [
        (0, ShardTransition.TAKEN, 0),
        (0, ShardTransition.LAPSED, 0),
        (0, ShardTransition.TAKEN, 1),
    ]
    assert not token.is_valid


def test_another_holder_in_the_lease_ends_the_token_at_once() -> None:
    """Whether a watch or a conflict shows it."""
    replica = OneReplica()
    token = replica.acquire()
    taken = a_lease(shard_lease_name(0), version=50, shards=1, holderIdentity="you", leaseTransitions=1)
    replica.state.observe(taken, now_mono=replica.now)
    assert not token.is_valid
    assert replica.transitions[-1] == (0, ShardTransition.LOST, 0)


def test_a_heartbeat_whose_answer_was_lost_extends_nothing_and_is_sent_again() -> None:
    """The new version is our own, and the next heartbeat is based on it."""
    replica = OneReplica()
    token = replica.acquire()
    replica.now += TIMES.retry_period_s
    (beat,) = replica.due(LeaseAction.BEAT)
    committed = replica.store(beat)
    replica.now += TIMES.request_timeout_s
    replica.state.observe(committed, now_mono=replica.now)
    replica.deliver()
    replica.state.failed(beat, now_mono=replica.now)
    assert token.until == 100 + TIMES.renew_deadline_s
    (again,) = replica.due(LeaseAction.BEAT)
    assert again.version == int(committed["metadata"]["resourceVersion"])
    replica.succeed(again)
    replica.deliver()
    assert token.until == again.sent_mono + TIMES.renew_deadline_s


def test_an_acquisition_whose_answer_was_lost_is_recognised() -> None:
    """The Lease that the watch shows is our own: the token begins with the next heartbeat, and nothing is rewritten."""
    replica = OneReplica()
    replica.join()
    (acquisition,) = replica.due(LeaseAction.ACQUIRE)
    replica.state.observe(replica.store(acquisition), now_mono=replica.now)
    replica.state.failed(acquisition, now_mono=replica.now)
    assert replica.due(LeaseAction.ACQUIRE) == []
    replica.now += TIMES.retry_period_s
    replica.beat()
    assert replica.state.held == (0,)


def test_an_acquisition_that_failed_is_retried_after_the_requested_time() -> None:
    """It waits a retry period, or as long as the API server requests, up to the duration of a Lease."""
    for retry_after_s, pause_s in ((0.0, TIMES.retry_period_s), (5.0, 5.0), (1e300, TIMES.duration_s)):
        replica = OneReplica()
        replica.join()
        (acquisition,) = replica.due(LeaseAction.ACQUIRE)
        replica.state.failed(acquisition, now_mono=replica.now, retry_after_s=retry_after_s)
        replica.wait(pause_s - 0.001)
        assert replica.due(LeaseAction.ACQUIRE) == []
        replica.wait(0.001)
        assert len(replica.due(LeaseAction.ACQUIRE)) == 1


def test_a_shard_whose_token_can_not_begin_is_given_back() -> None:
    """Its heartbeats are confirmed too late: it is released after the deadline, and not acquired for two Leases."""
    replica = OneReplica()
    replica.join()
    (acquisition,) = replica.due(LeaseAction.ACQUIRE)
    replica.succeed(acquisition)
    (beat,) = replica.due(LeaseAction.BEAT)
    replica.succeed(beat)
    replica.now += TIMES.renew_deadline_s
    (release,) = replica.due(LeaseAction.RELEASE)
    replica.succeed(release)
    replica.deliver()
    replica.wait(2 * TIMES.duration_s - 0.1)
    assert replica.due(LeaseAction.ACQUIRE) == []
    replica.wait(0.1)
    assert len(replica.due(LeaseAction.ACQUIRE)) == 1


def test_a_shard_that_another_division_claims_meanwhile_is_given_back() -> None:
    """Before the heartbeat that would begin its token is confirmed: it begins none, and the shard is released."""
    replica = OneReplica()
    replica.join()
    (acquisition,) = replica.due(LeaseAction.ACQUIRE)
    replica.succeed(acquisition)
    (beat,) = replica.due(LeaseAction.BEAT)
    replica.succeed(beat)
    replica.version += 1
    other = a_lease(shard_lease_name(3), shards=5, holderIdentity="other")
    other["metadata"]["resourceVersion"] = str(replica.version)
    replica.state.observe(other, now_mono=replica.now)
    replica.deliver()
    assert replica.state.held == ()
    assert [each.shard for each in replica.due(LeaseAction.RELEASE)] == [0]


def test_a_lease_expires_by_the_observers_own_clock() -> None:
    """Times written in a Lease are ignored; it expires its duration after its last change was observed."""
    replica = OneReplica()
    theirs = a_lease(shard_lease_name(0), version=1, shards=1, holderIdentity="you", renewTime="1970-01-01T00:00:00Z")
    replica.state.observe(theirs, now_mono=replica.now)
    replica.join()
    assert replica.due(LeaseAction.ACQUIRE) == []
    replica.wait(14)
    replica.state.observe(theirs | {"metadata": theirs["metadata"] | {"resourceVersion": "2"}}, now_mono=replica.now)
    replica.wait(14.9)
    assert replica.due(LeaseAction.ACQUIRE) == []
    replica.wait(0.1)
    (acquisition,) = replica.due(LeaseAction.ACQUIRE)
    assert (acquisition.epoch, acquisition.version) == (1, 2)


def test_heartbeats_that_name_a_shard_claim_it() -> None:
    """The Lease of the shard stands still; it is free one duration after the last heartbeat that names it."""
    replica = OneReplica()
    theirs = a_lease(shard_lease_name(0), version=1, shards=1, holderIdentity="you")
    replica.state.observe(theirs, now_mono=replica.now)
    replica.join()
    for version, holds in ((100, "1"), (200, "1"), (300, "0")):
        replica.wait(14)
        beat = a_lease(heartbeat_lease_name("you"), version=version, shards=0, holderIdentity="you")
        beat["metadata"]["annotations"] |= {ANNOTATION_DIVISION: "1", ANNOTATION_HOLDS: holds}
        replica.state.observe(beat, now_mono=replica.now)
        assert replica.due(LeaseAction.ACQUIRE) == []
    replica.wait(0.9)
    assert replica.due(LeaseAction.ACQUIRE) == []
    replica.wait(0.1)
    assert replica.state.next_due_mono(replica.now) is not None
    # Free by now, but the one that holds nothing is a member, too, and has the share of one shard for itself or us.
    replica.wait(TIMES.duration_s)
    assert len(replica.due(LeaseAction.ACQUIRE)) == 1


def test_nothing_is_acquired_before_the_horizon_reaches_the_expiry() -> None:
    """A replica whose watch stands still can't know that the holder is silent."""
    replica = OneReplica()
    theirs = a_lease(shard_lease_name(0), version=1, shards=1, holderIdentity="you")
    replica.state.observe(theirs, now_mono=replica.now)
    replica.join()
    replica.wait(14.5)
    replica.now += 0.5
    (beat,) = replica.due(LeaseAction.BEAT, LeaseAction.ACQUIRE)
    assert beat.action == LeaseAction.BEAT  # ahead of its time, for the horizon
    replica.succeed(beat)
    assert replica.due(LeaseAction.ACQUIRE) == []
    replica.deliver()
    assert len(replica.due(LeaseAction.ACQUIRE)) == 1


def test_the_holders_own_duration_is_respected() -> None:
    """During a rollout replicas may have different settings: a Lease expires by the duration that its holder wrote."""
    replica = OneReplica()
    theirs = a_lease(shard_lease_name(0), shards=1, holderIdentity="you", leaseDurationSeconds=60)
    replica.state.observe(theirs, now_mono=replica.now)
    replica.join()
    replica.wait(59)
    assert replica.due(LeaseAction.ACQUIRE) == []
    replica.wait(1)
    assert len(replica.due(LeaseAction.ACQUIRE)) == 1


def test_shards_of_the_previous_process_of_the_same_name_are_acquired_at_once() -> None:
    """A process that was killed and restarted under its name does not wait for its own Leases."""
    replica = OneReplica()
    left = a_lease(shard_lease_name(0), version=5, shards=1, holderIdentity="me", leaseTransitions=3)
    replica.state.observe(left, now_mono=replica.now)
    replica.join()
    (acquisition,) = replica.due(LeaseAction.ACQUIRE)
    assert (acquisition.epoch, acquisition.version) == (4, 5)


def test_a_lease_written_by_another_process_of_the_same_name_is_respected() -> None:
    """A Lease under our own name that we have not written is waited for like any other."""
    replica = OneReplica()
    replica.acquire()
    replica.version = 50
    twin = a_lease(shard_lease_name(0), version=50, shards=1, holderIdentity="me", leaseTransitions=1)
    replica.state.observe(twin, now_mono=replica.now)
    assert replica.transitions[-1] == (0, ShardTransition.LOST, 0)
    replica.wait(14.9)
    assert replica.due(LeaseAction.ACQUIRE) == []
    replica.wait(0.1)
    assert len(replica.due(LeaseAction.ACQUIRE)) == 1


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_lease_without_its_holder_is_acquired_only_when_the_holder_must_have_observed_that(
    *, is_deleted: bool
) -> None:
    """``kubectl delete lease`` or ``edit`` must not lead to two holders: others wait for one duration from then on."""
    replica = OneReplica()
    theirs = a_lease(shard_lease_name(0), shards=1, holderIdentity="you", leaseTransitions=8)
    theirs["metadata"]["annotations"][ANNOTATION_RELEASED] = "false"
    replica.state.observe(theirs, now_mono=replica.now)
    replica.join()
    replica.wait(10)
    metadata = theirs["metadata"] | {"resourceVersion": "900"}
    if is_deleted:
        replica.state.observe_deletion(theirs | {"metadata": metadata}, now_mono=replica.now)
    else:
        replica.state.observe({"metadata": metadata, "spec": {"leaseTransitions": 8}}, now_mono=replica.now)
    replica.wait(14.9)
    assert replica.due(LeaseAction.ACQUIRE) == []
    replica.wait(0.1)
    (acquisition,) = replica.due(LeaseAction.ACQUIRE)
    assert acquisition.version == (None if is_deleted else 900)
    assert acquisition.epoch == 9


def test_fields_that_others_added_to_a_lease_stay() -> None:
    """A write is a replace, and still keeps foreign annotations and fields of the spec."""
    replica = OneReplica()
    free = a_lease(shard_lease_name(0), shards=1)
    free["metadata"]["annotations"]["note"] = "keep"
    free["metadata"]["managedFields"] = [{"manager": "somebody"}]
    free["spec"]["preferredHolder"] = "you"
    replica.state.observe(free, now_mono=replica.now)
    replica.join()
    (acquisition,) = replica.due(LeaseAction.ACQUIRE)
    assert acquisition.body is not None
    assert acquisition.body["metadata"]["annotations"] == {
        "note": "keep",
        ANNOTATION_SHARDS: "1",
        ANNOTATION_RELEASED: "false",
    }
    assert "managedFields" not in acquisition.body["metadata"]
    assert acquisition.body["spec"]["preferredHolder"] == "you"


def test_a_shard_is_released_when_its_reconciles_have_ended() -> None:
    """After ``leave`` none starts; heartbeats go on while one is in progress, and the release follows right after."""
    replica = OneReplica()
    token = replica.acquire()
    token.users += 1
    replica.state.leave()
    assert replica.state.token(0) is None
    (beat,) = replica.state.due(now_mono=replica.now, stamp=STAMP)
    assert beat.body is not None
    assert beat.body["metadata"]["annotations"][ANNOTATION_DIVISION] == "0"
    assert beat.epochs == {0: token.epoch}
    replica.succeed(beat)
    replica.deliver()
    replica.now += TIMES.retry_period_s
    replica.beat()
    assert token.until == replica.now + TIMES.renew_deadline_s
    token.users -= 1
    (release,) = replica.due(LeaseAction.RELEASE)
    with fencing.holding(token), pytest.raises(FencedError):
        fencing.check()  # no write may follow once the release is on its way
    assert release.body is not None
    assert "holderIdentity" not in release.body["spec"]
    assert release.body["metadata"]["annotations"][ANNOTATION_RELEASED] == "true"
    (departure,) = replica.due(LeaseAction.LEAVE)
    assert departure.name == heartbeat_lease_name("me")
    replica.state.done(departure, now_mono=replica.now)
    had_left = replica.state.has_left
    replica.succeed(release)
    assert (had_left, replica.state.has_left) == (False, True)
    assert replica.transitions[-1] == (0, ShardTransition.RELEASED, 0)


def test_the_lease_of_a_shard_is_written_when_it_changes_hands_and_after_an_edit() -> None:
    """Minutes of heartbeats leave it alone; an edited number of shards or duration is corrected once."""
    replica = OneReplica()
    replica.acquire()
    assert replica.due(*LeaseAction) == []
    replica.wait(100)
    (known,) = [each for each in replica.state.known() if each["metadata"]["name"] == shard_lease_name(0)]
    for edited in (
        known | {"metadata": known["metadata"] | {"annotations": {ANNOTATION_SHARDS: "99"}}},
        known | {"spec": known["spec"] | {"leaseDurationSeconds": 3600}},
    ):
        replica.version += 1
        edited["metadata"] = edited["metadata"] | {"resourceVersion": str(replica.version)}
        replica.state.observe(edited, now_mono=replica.now)
        replica.wait(TIMES.retry_period_s)
        (correction,) = replica.due(LeaseAction.CORRECT)
        replica.succeed(correction)
        assert replica.due(LeaseAction.CORRECT) == []
        assert replica.state.held == (0,)


def test_at_most_a_number_of_requests_about_shards_are_in_flight() -> None:
    """A replica that takes over hundreds of shards does not send hundreds of requests at once."""
    replica = OneReplica(shards=256)
    replica.join()
    first = replica.due(LeaseAction.ACQUIRE)
    assert len(first) == MOST_AT_ONCE
    replica.succeed(first[0])
    assert len(replica.due(LeaseAction.ACQUIRE)) == 1


# --- many replicas -------------------------------------------------------------------------------------------------


def test_one_replica_of_two_leads_and_the_other_takes_over_after_its_crash() -> None:
    """The default is plain leader election; the standby acquires the shard as soon as the Lease has expired."""
    world = World(1)
    first = world.join("a", 1)
    world.run(1)
    world.join("b", 1)
    world.run(20)
    assert world.holders() == {0: "a"}
    world.crash(first)
    crashed_at = world.now
    world.run(TIMES.duration_s + 0.5)
    assert world.holders() == {0: "b"}
    acquired_at = next(at for at, _, transition in world.replicas[1].transitions if transition == ShardTransition.TAKEN)
    assert acquired_at - crashed_at <= TIMES.duration_s + 0.2


def test_a_replica_that_joins_gets_its_share_without_waiting_for_a_lease_to_expire() -> None:
    """Shares are even within a second of joining, and only as many shards move as needed."""
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
    transitions = [transition for each in world.replicas for _, _, transition in each.transitions]
    assert transitions.count(ShardTransition.RELEASED) == 4 + 2


def test_a_replica_that_leaves_hands_over_within_a_second() -> None:
    """Other replicas hold all its shards, and its membership is deleted."""
    world = World(3)
    first, _, _ = world.join("a"), world.join("b"), world.join("c")
    world.run(5)
    first.state.leave()
    first.step()
    world.run(1)
    assert first.state.has_left
    assert "a" not in world.holders().values()
    assert len(world.holders()) == 4
    assert heartbeat_lease_name("a") not in world.server.leases


def test_a_replica_that_can_not_see_hands_over_and_takes_part_again() -> None:
    """Suspended, it is no member and holds nothing; resumed, it gets its share."""
    world = World(31)
    first, _ = world.join("a"), world.join("b")
    world.run(5)
    first.state.suspend()
    first.step()
    world.run(1)
    assert set(world.holders().values()) == {"b"}
    assert len(world.holders()) == 4
    assert heartbeat_lease_name("a") not in world.server.leases
    assert not first.state.has_left
    first.state.resume()
    first.step()
    world.run(3)
    assert world.shares() == [2, 2]


def test_a_restart_under_the_same_name_does_not_wait() -> None:
    """After ``kill -9`` a new process holds the same shards within a second, with higher epochs."""
    world = World(4)
    first = world.join("a", 2)
    world.run(5)
    epochs = [world.lease(shard)["spec"]["leaseTransitions"] for shard in (0, 1)]
    world.crash(first)
    world.join("a", 2)
    world.run(1)
    assert world.holders() == {0: "a", 1: "a"}
    assert [world.lease(shard)["spec"]["leaseTransitions"] for shard in (0, 1)] == [each + 1 for each in epochs]


def test_expired_memberships_are_deleted() -> None:
    """Every Pod has a new name; the Leases of ended ones do not accumulate."""
    world = World(5)
    world.join("elector", 1)
    for number in range(5):
        pod = world.join(f"pod-{number}", 1)
        world.run(3)
        world.crash(pod)
    world.run(20)
    assert set(world.server.leases) == {shard_lease_name(0), heartbeat_lease_name("elector")}


def test_replicas_with_different_numbers_of_shards_never_hold_shards_together() -> None:
    """In a rollout that changes ``--shards`` new replicas wait until no old one holds a shard, then acquire all."""
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


def test_leases_of_removed_shards_are_deleted() -> None:
    """With fewer shards than before, the Leases of the others are deleted."""
    world = World(7)
    first = world.join("a", 4)
    world.run(3)
    first.state.leave()
    first.step()
    world.run(1)
    world.join("b", 2)
    world.run(5)
    assert set(world.server.leases) == {shard_lease_name(0), shard_lease_name(1), heartbeat_lease_name("b")}


def longest_free_s(world: World, shards: int, seconds: float) -> float:
    """Let time pass; for how long some shard was without a holder at most, in steps of half a second."""
    free_since = dict.fromkeys(range(shards), world.now)
    longest_s = 0.0
    until = world.now + seconds
    while world.now < until:
        world.run(0.5)
        for shard in range(shards):
            if shard in world.holders():
                free_since[shard] = world.now
            longest_s = max(longest_s, world.now - free_since[shard])
    return longest_s


@pytest.mark.parametrize("seed", range(6))
def test_no_shard_waits_for_a_member_that_can_not_acquire(seed: int) -> None:
    """Members that renew but whose every acquisition is refused, dropped or slow: the others take all shards.

    No shard stays free for longer than twice a Lease; and once the members have recovered, shares become even.
    """
    world = World(2_000 + seed)
    unable = [world.join(f"unable-{each}", 8, refused=["acquire"]) for each in "ab"]
    world.run(1)
    world.join("able", 8)
    assert longest_free_s(world, 8, 400) <= 2 * TIMES.duration_s
    assert world.shares() == [0, 0, 8]
    for each in unable:
        each.refused.clear()
    world.run(MOST_UNABLE_LEASES * TIMES.duration_s)
    assert world.shares() == [2, 3, 3]


@pytest.mark.parametrize(
    ("refused", "is_watch_dead"),
    [
        (["beat"], False),
        (["release"], False),
        (["acquire", "release"], False),
        (["correct"], False),
        ([], True),
        (["list"], True),
        (["list", "release"], True),
        (["list", "acquire"], True),
    ],
)
def test_no_shard_waits_for_a_member_of_which_a_part_fails(refused: list[str], *, is_watch_dead: bool) -> None:
    """Some of its requests, its watch, or both: no shard stays free for longer than twice a Lease.

    Whatever the member does then, its shards are with the healthy one, or with itself if it can go on.
    """
    world = World(17)
    failing = world.join("failing", 4)
    world.run(1)
    world.join("healthy", 4)
    world.run(5)
    assert world.shares() == [2, 2]
    failing.refused.update(refused)
    failing.is_watch_dead = is_watch_dead
    world.edit(shard_lease_name(min(shard for shard, name in world.holders().items() if name == "failing")), dict.copy)
    assert longest_free_s(world, 4, 200) <= 2 * TIMES.duration_s


@pytest.mark.parametrize("seed", range(4))
def test_a_holder_that_can_not_see_an_edit_never_writes_beside_another(seed: int) -> None:
    """Its Lease loses its holder, or gets another one, while its watch stands still: others wait until it has ended.

    The check after every event is what this is about.
    """
    world = World(4_000 + seed, longest_delay_s=0.3)
    for name in "ab":
        world.join(name, 2)
    world.run(5)
    for edit in (
        lambda obj: obj["spec"].pop("holderIdentity", None),
        lambda obj: obj["spec"].update(holderIdentity="ghost"),
        lambda obj: obj["metadata"]["labels"].clear(),
    ):
        holder = next(each for each in world.replicas if each.name == world.holders()[0])
        holder.is_watch_dead = True
        holder.refused = {"list"} if seed % 2 else set()
        world.edit(shard_lease_name(0), edit)
        assert longest_free_s(world, 2, 40) <= 2 * TIMES.duration_s
        holder.is_watch_dead, holder.refused = False, set()
        world.run(20)
        assert sorted(world.holders()) == [0, 1]


# --- beside the former format --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_former_first", [True, False], ids=["upgrade", "rollback"])
def test_a_rolling_change_of_the_format_never_makes_two_holders(seed: int, *, is_former_first: bool) -> None:
    """Replica by replica, forward or back: one holder at every moment, and no shard is free for long.

    With crashes in between instead of graceful ends, at most two Leases.
    """
    world = World(5_000 + seed, longest_delay_s=0.3, loss=0.01 * (seed % 3))
    old = [world.join(f"old-{each}", 4, is_former=is_former_first) for each in "ab"]
    world.run(10)
    for each in old:
        world.join(f"new-{each.name}", 4, is_former=not is_former_first)
        longest_s = longest_free_s(world, 4, world.random.uniform(1, 20))
        if seed % 2:
            world.crash(each)
        else:
            each.state.leave()
            each.step()
            longest_s = max(longest_s, longest_free_s(world, 4, 2))
            world.crash(each)
        longest_s = max(longest_s, longest_free_s(world, 4, world.random.uniform(1, 30)))
        assert longest_s <= 2 * TIMES.duration_s
    assert longest_free_s(world, 4, 40) <= 2 * TIMES.duration_s
    assert world.shares() == [2, 2] or not is_former_first
    assert all(holder.startswith("new") for holder in world.holders().values())


@pytest.mark.parametrize("seed", range(8))
def test_both_formats_in_chaos_never_make_two_holders(seed: int) -> None:
    """Delays, losses, crashes, pauses and dead watches, with replicas of both formats that come and go."""
    world = World(6_000 + seed, longest_delay_s=0.5, loss=0.05)
    replicas = [world.join(f"r{number}", 3, is_former=bool(number % 2)) for number in range(4)]
    chaos(world, replicas, 150)


def writes_a_second(*, is_former: bool, shards: int) -> float:
    """Writes of Leases by three replicas, in a second in which nothing happens."""
    world = World(12)
    for name in "abc":
        world.join(name, shards, is_former=is_former)
        world.run(1)
    world.run(3)
    assert len(world.holders()) == shards
    before = world.server.writes.total()
    world.run(6)
    return (world.server.writes.total() - before) / 6


def test_lease_traffic_grows_with_replicas_and_not_with_shards() -> None:
    """Three replicas send a heartbeat every 1.6 to 2 s, however many shards there are; it was one a shard before."""
    few, many = (writes_a_second(is_former=False, shards=shards) for shards in (3, 64))
    assert few <= 3 / (TIMES.retry_period_s * 0.8) + 0.5
    assert many <= 3 / (TIMES.retry_period_s * 0.8) + 0.5
    assert writes_a_second(is_former=True, shards=32) > 16


@pytest.mark.parametrize("seed", range(6))
def test_no_shard_stays_free_for_long_while_servers_are_slow_and_replicas_fail(seed: int) -> None:
    """One replica is healthy and two fail in every way; no shard is ever free for longer than twice a Lease."""
    world = World(3_000 + seed, longest_delay_s=0.5, loss=0.02)
    healthy = world.join("healthy", 4)
    others = [world.join("b", 4), world.join("c", 4)]
    world.run(5)
    for _ in range(25):
        victim = world.random.choice(others)
        match world.random.randrange(4):
            case 0:
                victim.refused ^= {world.random.choice(["acquire", "release", "beat", "list"])}
            case 1:
                victim.paused_until = world.now + world.random.choice((1.0, 9.0, 11.0, 30.0))
            case 2:
                victim.is_disconnected = not victim.is_disconnected
            case _:
                world.longest_delay_s = world.random.choice((0.05, 0.5, 1.5))
        assert longest_free_s(world, 4, world.random.uniform(1, 40)) <= 2 * TIMES.duration_s
    assert healthy.name in world.holders().values()


@pytest.mark.parametrize("victim", ["shard", "replica"])
def test_leases_edited_by_hand_harm_nobody_for_longer_than_one_lease(victim: str) -> None:
    """Another holder or none, an hour's duration, the highest epoch, other annotations or none, no label, no Lease."""
    world = World(9)
    replicas = [world.join("a", 2), world.join("b", 2)]
    world.run(5)
    holder = world.holders()[0]
    name = shard_lease_name(0) if victim == "shard" else heartbeat_lease_name(holder)
    edits: list[Callable[[Object], object]] = [
        lambda obj: obj["spec"].update(holderIdentity="ghost"),
        lambda obj: obj["spec"].pop("holderIdentity", None),
        lambda obj: obj["spec"].update(leaseDurationSeconds=3600),
        lambda obj: obj["spec"].update(leaseTransitions=MAX_EPOCH),
        lambda obj: obj["metadata"]["annotations"].update({ANNOTATION_SHARDS: "99"}),
        lambda obj: obj["spec"].clear(),
        lambda obj: obj["metadata"]["annotations"].clear(),
        lambda obj: obj["metadata"]["annotations"].update({ANNOTATION_HOLDS: "0", ANNOTATION_DIVISION: "0"}),
        lambda obj: obj["metadata"]["labels"].clear(),
    ]
    for edit in edits:
        world.edit(name, edit)
        world.run(TIMES.duration_s + 3)
        assert sorted(world.holders()) == [0, 1]
        assert world.lease(0)["spec"]["leaseDurationSeconds"] == TIMES.duration_s
    world.notify_watchers(*world.server.delete(name))
    world.run(TIMES.duration_s + 3)
    assert sorted(world.holders()) == [0, 1]
    world.edit(shard_lease_name(0), edits[2])
    world.crash(replicas[0])
    world.crash(replicas[1])
    world.join("c", 2)
    world.run(2 * TIMES.duration_s)
    assert world.holders() == {0: "c", 1: "c"}


def chaos(world: World, replicas: list[Replica], seconds: float) -> None:
    """Crashes, restarts, pauses, lost connections and departures, one every few seconds."""
    until = world.now + seconds
    names = iter(f"late-{number}" for number in range(1_000))
    shards = replicas[0].state.shards
    while world.now < until:
        world.run(world.random.uniform(0.1, 6.0))
        running = [each for each in world.replicas if each.is_running]
        victim = world.random.choice(running)
        match world.random.randrange(7):
            case 0 if len(running) > 1:
                world.crash(victim)
                offset = world.random.uniform(-1e6, 1e6)
                world.join(next(names), shards, rate=victim.rate, offset=offset, is_former=victim.is_former)
            case 1:
                world.crash(victim)
                world.join(victim.name, shards, rate=victim.rate, is_former=victim.is_former)
            case 2:
                victim.paused_until = world.now + world.random.choice((0.5, 4.0, 9.9, 10.1, 15.0, 40.0))
            case 3:
                victim.is_disconnected = not victim.is_disconnected
            case 4 if len(running) > 1:
                victim.state.leave()
                victim.step()
                world.run(0.5)
                world.crash(victim)
                world.join(next(names), shards, rate=victim.rate, is_former=victim.is_former)
            case 5:
                victim.is_watch_dead = not victim.is_watch_dead
            case _:
                world.longest_delay_s = world.random.choice((0.02, 0.5, 5.0, 20.0))


@pytest.mark.parametrize("seed", range(12))
def test_a_shard_never_has_two_holders(seed: int) -> None:
    """Under delays, losses, crashes, pauses and clocks of different speed; afterwards shares become even again."""
    world = World(seed, longest_delay_s=0.5, loss=0.05)
    shards = world.random.choice((1, 3, 4, 8))
    # 15 s against 10 s allow for clocks that differ by half; real ones differ by parts per million.
    rates = [world.random.uniform(0.85, 1.15) for _ in range(3)]
    replicas = [world.join(f"r{number}", shards, rate=rate) for number, rate in enumerate(rates)]
    chaos(world, replicas, 200)

    world.loss, world.longest_delay_s = 0.0, 0.05
    for each in world.replicas:
        if each.is_running:
            each.is_disconnected = each.is_watch_dead = False
    world.run(120)
    assert sorted(world.holders()) == list(range(shards))
    assert max(world.shares()) - min(world.shares()) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_different_numbers_of_shards_never_have_holders_together(seed: int) -> None:
    """With replicas of two numbers of shards and the same faults, the check after every event passes."""
    world = World(1_000 + seed, longest_delay_s=0.5, loss=0.05)
    replicas = [world.join("a", 2), world.join("b", 2)]
    world.join("c", 5)
    chaos(world, replicas, 200)


def test_the_simulation_detects_a_second_holder() -> None:
    """The check that every simulation relies on can fail: it detects a forged token."""
    world = World(8)
    world.join("a", 1)
    second = world.join("b", 1)
    world.run(3)
    second.tokens.append(FencingToken(0, 99, until=second.clock() + 5, clock=second.clock))
    with pytest.raises(AssertionError):
        world.run(1)
