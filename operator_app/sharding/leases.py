"""Who works which shard, and until when: the rules of the Leases, in virtual time and without a network.

Every replica has a *membership* Lease, so that all see who is there, and every shard has a Lease of its own. Both are
written by compare-and-set alone (a create, a replace with resourceVersion, a delete with preconditions), so of two
replicas that want the same shard one gets it. One replica's :class:`ElectionState` keeps what it has seen of all
Leases, says what to send (``due``), and is told how that went (``done``, ``failed``). ``shards.py`` does the sending.

All deadlines count on the clock of the replica that uses them; clocks of two machines are never compared::

    a renewal is sent at S, and seen by another replica at V > S

    holder:   S ---- may write ----> S + renew_deadline_s
    others:     V ---- must not take ------------------------> V + duration_s

Guarantees
    - *One holder.* A token ends ``renew_deadline_s`` after the last successful renewal was *sent*. Another replica
      takes the shard ``duration_s`` after it *saw* that renewal at the earliest, and only if the Lease is still at the
      version that it saw. So two holds of one shard never overlap while no clock runs faster than another by
      ``duration_s / renew_deadline_s``.
    - *A token never revives.* One that lapsed, even if nobody wanted it, is won again like any other: with a
      compare-and-set, and ``leaseTransitions + 1`` as its epoch.
    - *Back at once.* A Lease that provably is this replica's (found under its own name at the start, when the former
      process of that name is dead; or last written by it) is taken without waiting for its end.
    - *Even shares.* With M members, each gets ``floor(N / M)`` or ``ceil(N / M)`` shards, and as few as possible move
      (``targets``). Whoever has more than its share gives back, when no work of the shard is in progress any more.
    - *One number of shards.* Replicas that divide the tenants differently never hold shards at the same time: a Lease
      says of how many shards it is one, and nobody takes a shard while a Lease of another division is alive.

Assumes that a replica's name is used by one process at a time.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from operator_app.api.kinds import GROUP, LEASE, Object
from operator_app.kube.fencing import FencingToken
from operator_app.sharding.hashing import bid

LABEL_ROLE: Final = f"{GROUP}/lease"
"""Label of every Lease of this operator; its value is a ``Role``."""

ANNOTATION_SHARDS: Final = f"{GROUP}/shards"
"""Into how many shards the writer of a Lease divides the tenants."""

PREFIX: Final = "operator-app"


class Role(StrEnum):
    """What a Lease stands for."""

    SHARD = "shard"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """The three times, in seconds; raises ``ValueError``, which names their flags, where they do not fit together.

    A holder renews every ``retry_period_s``. At least two attempts fit between a renewal and the deadline, for each is
    given ``request_timeout_s``.
    """

    duration_s: int = 15
    renew_deadline_s: float = 10
    retry_period_s: float = 2

    def __post_init__(self) -> None:
        if not 0 < self.retry_period_s < self.renew_deadline_s < self.duration_s:
            raise ValueError(
                f"--retry-period-s ({self.retry_period_s:g}), --renew-deadline-s ({self.renew_deadline_s:g}) and "
                f"--lease-duration-s ({self.duration_s:g}) must grow in this order"
            )
        if self.renew_deadline_s - self.retry_period_s < 1:
            raise ValueError(
                f"--renew-deadline-s ({self.renew_deadline_s:g}) must exceed --retry-period-s "
                f"({self.retry_period_s:g}) by 1 s or more: two requests have to fit in between"
            )

    @property
    def request_timeout_s(self) -> float:
        """Bound on each request about a Lease."""
        return (self.renew_deadline_s - self.retry_period_s) / 2


@dataclass(frozen=True, slots=True)
class Lease:
    """What one of our Leases says. ``shard`` is None for a membership, ``holder`` None for a Lease that is free."""

    name: str
    role: Role
    shard: int | None
    holder: str | None
    epoch: int
    duration_s: float
    shards: int
    uid: str
    version: int


def shard_lease_name(shard: int) -> str:
    """The name of a shard's Lease."""
    return f"{PREFIX}-shard-{shard}"


def replica_lease_name(replica: str) -> str:
    """The name of a replica's membership Lease."""
    return f"{PREFIX}-replica-{replica}"


def lease_of(obj: Object, times: LeaseTimes) -> Lease | None:
    """Read a stored Lease; None where it is not one of ours.

    Whatever somebody has removed from it by hand is taken for what does least harm.
    """
    metadata, spec = obj["metadata"], obj.get("spec") or {}
    name = metadata["name"]
    role, number = metadata.get("labels", {}).get(LABEL_ROLE), name.removeprefix(f"{PREFIX}-shard-")
    if role == Role.SHARD and number.isascii() and number.isdigit() and name == shard_lease_name(int(number)):
        shard = int(number)
    elif role == Role.REPLICA:
        shard = None
    else:
        return None
    shards = metadata.get("annotations", {}).get(ANNOTATION_SHARDS, "")
    return Lease(
        name=name,
        role=Role(role),
        shard=shard,
        holder=spec.get("holderIdentity") or None,
        epoch=spec.get("leaseTransitions") or 0,
        duration_s=spec.get("leaseDurationSeconds") or times.duration_s,
        shards=int(shards) if shards.isascii() and shards.isdigit() else 0,
        uid=metadata["uid"],
        version=int(metadata["resourceVersion"]),
    )


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A Lease as it was last seen to change, at ``seen_at``. One that was deleted counts on until its time is over."""

    lease: Lease
    object: Object
    seen_at: float
    is_gone: bool = False

    @property
    def ends_at(self) -> float:
        """From when on its holder counts as dead, unless it changes before."""
        return self.seen_at + self.lease.duration_s

    def is_alive(self, now: float) -> bool:
        """Whether its holder may still count on it."""
        return self.lease.holder is not None and now < self.ends_at


def targets(counts: Mapping[str, int], shards: int) -> dict[str, int]:
    """How many shards each member should have, given how many it has.

    All get ``shards // members``; one more goes to those who have most already, so that as few shards as possible move.
    Equal counts are told apart by name, so all members come to the same result.
    """
    share, extra = divmod(shards, len(counts))
    order = sorted(counts, key=lambda name: (-counts[name], name))
    return {name: share + (rank < extra) for rank, name in enumerate(order)}


class ShardTransition(StrEnum):
    """What happened to a shard, seen from one replica."""

    TAKEN = "taken"
    RELEASED = "released"
    LOST = "lost"
    """Somebody else has its Lease."""
    LAPSED = "lapsed"
    """The deadline passed before a renewal succeeded."""


class LeaseAction(StrEnum):
    """What a request is for."""

    JOIN = "join"
    """Create or renew the membership."""
    LEAVE = "leave"
    """Remove the membership."""
    ACQUIRE = "take"
    """Win a shard. Whoever carries this out reads all Leases afterwards, before it is ``done``."""
    RENEW = "renew"
    RELEASE = "release"
    REMOVE = "clear"
    """Remove a Lease that nobody needs any more."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """One request about one Lease.

    With a ``body`` it is a replace, or a create where the body has no resourceVersion; without one it is a delete of
    exactly the version of ``of``.
    """

    action: LeaseAction
    name: str
    sent_at: float
    shard: int = -1
    epoch: int = 0
    body: Object | None = None
    of: Lease | None = None

    @property
    def version(self) -> int | None:
        """The version of the Lease that this is about; None for one that is to be created."""
        if self.body is None:
            return None if self.of is None else self.of.version
        version = self.body["metadata"].get("resourceVersion")
        return None if version is None else int(version)

    @property
    def role(self) -> Role:
        """The role of the Lease that this is about."""
        return Role.SHARD if self.name.startswith(f"{PREFIX}-{Role.SHARD}-") else Role.REPLICA


class ElectionState:
    """One replica's view of all Leases in ``namespace``, and what follows from it. Every method returns at once.

    ``tell`` hears of every change of a shard. ``clock`` is what holds are checked against; every ``now`` comes from it.
    ``rand`` yields numbers in [0, 1).
    """

    def __init__(
        self,
        me: str,
        shards: int,
        times: LeaseTimes,
        *,
        namespace: str,
        tell: Callable[[int, ShardTransition, int], None],
        clock: Callable[[], float],
        rand: Callable[[], float],
    ) -> None:
        self.me = me
        self.shards = shards
        self.times = times
        self._namespace = namespace
        self._notify = tell
        self._clock = clock
        self._rand = rand
        self._seen: dict[str, ObservedLease] = {}
        self._tokens: dict[int, FencingToken] = {}
        self._ending: set[int] = set()
        """Shards that are held, get no new work, and are given back once the work in progress is over."""
        self._returning: set[int] = set()
        """Shards that are not held any more, whose Lease still says so."""
        self._epochs: dict[int, int] = {}
        """The highest epoch that was seen, by shard."""
        self._written: dict[int, int] = {}
        """The last epoch that this replica has written, or tried to, by shard."""
        self._underway: dict[str, LeaseRequest] = {}
        self._not_before: dict[str, float] = {}
        self._has_begun = False
        self._is_leaving = False

    # --- what is known -------------------------------------------------------------------------------------------

    def observe(self, obj: Object, *, now: float) -> None:
        """Take over a Lease as stored, from a list, a watch, or an answer; older versions are no news."""
        lease = lease_of(obj, self.times)
        if lease is None:
            return
        known = self._seen.get(lease.name)
        if known is not None and known.lease.version >= lease.version:
            return
        self._seen[lease.name] = ObservedLease(lease, obj, now)
        if lease.shard is None:
            return
        self._epochs[lease.shard] = max(lease.epoch, self._epochs.get(lease.shard, 0))
        token = self._tokens.get(lease.shard)
        if token is not None and (lease.holder, lease.epoch) != (self.me, token.epoch):
            self._end(token.shard, ShardTransition.LOST)

    def forget(self, obj: Object, *, now: float) -> None:
        """Take over that a Lease is gone; ``obj`` is its last state.

        A shard whose Lease was deleted under its holder is not free before that holder's time is over.
        """
        lease = lease_of(obj, self.times)
        known = None if lease is None else self._seen.get(lease.name)
        if known is None or lease is None or known.lease.version > lease.version:
            return
        if lease.shard is None:
            del self._seen[lease.name]
            self._not_before.pop(lease.name, None)
            return
        self._seen[lease.name] = replace(known, is_gone=True)
        if lease.shard in self._tokens:
            self._end(lease.shard, ShardTransition.LOST)
        elif not known.is_alive(now):
            del self._seen[lease.name]

    def known(self, *, up_to: int | None = None) -> list[Object]:
        """The Leases that exist, for all that is known; with ``up_to`` only those of that version or an older one."""
        return [
            observed.object
            for observed in self._seen.values()
            if not observed.is_gone and (up_to is None or observed.lease.version <= up_to)
        ]

    def token(self, shard: int) -> FencingToken | None:
        """The right to begin work of a shard, where this replica has it."""
        token = self._tokens.get(shard)
        return token if token is not None and shard not in self._ending and token.is_valid else None

    @property
    def held(self) -> tuple[int, ...]:
        """The shards that this replica holds, in the order in which it took them."""
        return tuple(self._tokens)

    @property
    def ending(self) -> tuple[int, ...]:
        """The shards that are held, get no new work, and are given back once the work in progress is over."""
        return tuple(self._ending)

    def is_idle(self, shard: int) -> bool:
        """Whether a shard is to be given back and nothing keeps it any more."""
        token = self._tokens.get(shard)
        return token is not None and shard in self._ending and token.users == 0

    # --- what to do ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """All Leases are known for the first time, and this replica is able to work.

        What stands under its own name now is of its former life, which is over.
        """
        self._has_begun = True
        for observed in self._seen.values():
            if observed.lease.shard is not None and observed.lease.holder == self.me:
                self._written[observed.lease.shard] = observed.lease.epoch

    def leave(self) -> None:
        """Give back everything, in order, and take nothing any more."""
        self._is_leaving = True
        self._ending |= set(self._tokens)
        self._not_before.pop(replica_lease_name(self.me), None)

    @property
    def has_left(self) -> bool:
        """Whether everything was given back after ``leave``."""
        is_member = self._has_begun and replica_lease_name(self.me) in self._seen
        return self._is_leaving and not (self._tokens or self._returning or self._underway or is_member)

    def due(self, *, now: float, stamp: str) -> list[LeaseRequest]:
        """What is to be sent now; each request is to be answered by ``done`` or ``failed``.

        ``stamp`` is the time of day as a ``MicroTime``; it is written for people and never read.
        """
        for shard in [shard for shard, token in self._tokens.items() if token.until <= now]:
            self._end(shard, ShardTransition.LAPSED)
        if not self._has_begun:
            return []
        requests = []
        for request in self._wanted(now, stamp):
            # Entered at once: what comes next must know that this Lease is being written.
            self._underway[request.name] = request
            requests.append(request)
        return requests

    def next_at(self, now: float) -> float | None:
        """When ``due`` is to be asked again at the latest, if nothing happens before."""
        moments = [at for name, at in self._not_before.items() if name not in self._underway]
        moments += [token.until for token in self._tokens.values()]
        moments += [observed.ends_at for observed in self._seen.values() if observed.lease.holder is not None]
        return min((at for at in moments if at > now), default=None)

    def done(self, request: LeaseRequest, *, now: float) -> None:
        """An request succeeded, and what the API server stored was observed."""
        del self._underway[request.name]
        self._not_before[request.name] = request.sent_at + self.times.retry_period_s
        match request.action:
            case LeaseAction.ACQUIRE:
                self._taken(request, now)
            case LeaseAction.RENEW:
                token = self._tokens.get(request.shard)
                # An answer that comes too late changes nothing: the token has lapsed, whether or not that was told yet.
                if token is not None and token.epoch == request.epoch and now < token.until:
                    token.extend(request.sent_at + self.times.renew_deadline_s)
            case LeaseAction.RELEASE:
                self._returning.discard(request.shard)
                # Two divisions that make way for each other must not meet again at the same moment.
                self._not_before[request.name] = now + self.times.retry_period_s * self._rand()
            case LeaseAction.LEAVE | LeaseAction.REMOVE:
                self._seen.pop(request.name, None)
                del self._not_before[request.name]
            case LeaseAction.JOIN if self._is_leaving:
                del self._not_before[request.name]
            case LeaseAction.JOIN:
                pass

    def failed(self, request: LeaseRequest, *, now: float, asked_s: float = 0.0) -> None:
        """An request failed, or its answer was lost. A Lease that had moved on is to be observed before this is told.

        ``asked_s`` is how long the API server asked us to wait. Nothing depends on a take yet, so it waits that long.
        """
        del self._underway[request.name]
        is_outdated = self._version(request.name) != request.version
        if request.action == LeaseAction.ACQUIRE:
            now += min(asked_s, self.times.duration_s)
            # Where the write went well and the list behind it did not, the version was moved by our own hand.
            is_outdated = is_outdated and not self._is_provably_mine(request.shard)
        self._not_before[request.name] = now if is_outdated else max(now, request.sent_at + self.times.retry_period_s)

    # --- requests -------------------------------------------------------------------------------------------------

    def _wanted(self, now: float, stamp: str) -> Iterator[LeaseRequest]:
        yield from self._membership(now, stamp)
        yield from self._renewals(now, stamp)
        yield from self._returns(now, stamp)
        if not self._is_leaving:
            yield from self._acquisitions(now, stamp)
            yield from self._removals(now)

    def _is_free_to_send(self, name: str, now: float) -> bool:
        return name not in self._underway and self._not_before.get(name, now) <= now

    def _membership(self, now: float, stamp: str) -> Iterator[LeaseRequest]:
        name = replica_lease_name(self.me)
        if not self._is_free_to_send(name, now):
            return
        if not self._is_leaving:
            yield LeaseRequest(LeaseAction.JOIN, name, now, body=self._body(name, Role.REPLICA, stamp, holder=self.me))
        elif name in self._seen:
            yield LeaseRequest(LeaseAction.LEAVE, name, now, of=self._seen[name].lease)

    def _renewals(self, now: float, stamp: str) -> Iterator[LeaseRequest]:
        for shard, token in self._tokens.items():
            name = shard_lease_name(shard)
            if self._is_free_to_send(name, now) and not self.is_idle(shard):
                yield self._shard_request(LeaseAction.RENEW, shard, token.epoch, now, stamp)

    def _returns(self, now: float, stamp: str) -> Iterator[LeaseRequest]:
        for shard in [each for each in self._ending if self.is_idle(each)]:
            self._end(shard, ShardTransition.RELEASED)
            self._returning.add(shard)
            self._not_before.pop(shard_lease_name(shard), None)
        for shard in sorted(self._returning):
            name = shard_lease_name(shard)
            if name in self._underway:
                continue
            if not self._is_provably_mine(shard):
                self._returning.discard(shard)
            elif self._is_free_to_send(name, now):
                yield self._shard_request(LeaseAction.RELEASE, shard, self._written[shard], now, stamp)

    def _acquisitions(self, now: float, stamp: str) -> Iterator[LeaseRequest]:
        counts = dict.fromkeys(self._members(now), 0)
        free = []
        for shard in range(self.shards):
            name = shard_lease_name(shard)
            observed = self._seen.get(name)
            if shard in self._tokens or name in self._underway or shard in self._returning:
                counts[self.me] += shard not in self._ending and shard not in self._returning
            elif observed is None or not observed.is_alive(now) or self._is_provably_mine(shard):
                free.append(shard)
            elif observed.lease.holder in counts and observed.lease.holder != self.me:
                counts[observed.lease.holder] += 1
        spare = counts[self.me] - targets(counts, self.shards)[self.me]
        if spare > 0:
            # The shards that this replica bids least for: the others are the ones it would take again.
            kept = sorted(set(self._tokens) - self._ending, key=lambda shard: bid(self.me, shard))
            self._ending.update(kept[:spare])
            yield from self._returns(now, stamp)
        elif spare < 0 and not self._is_another_division_alive(now):
            free.sort(key=lambda shard: bid(self.me, shard), reverse=True)
            for shard in free[:-spare]:
                if self._is_free_to_send(shard_lease_name(shard), now):
                    yield self._acquire(shard, now, stamp)

    def _acquire(self, shard: int, now: float, stamp: str) -> LeaseRequest:
        epoch = self._epochs.get(shard, -1) + 1
        self._written[shard] = epoch
        return self._shard_request(LeaseAction.ACQUIRE, shard, epoch, now, stamp)

    def _taken(self, request: LeaseRequest, now: float) -> None:
        until = request.sent_at + self.times.renew_deadline_s
        if not self._is_provably_mine(request.shard) or until <= now:
            return
        if self._is_leaving or self._is_another_division_alive(now):
            self._returning.add(request.shard)
            self._not_before[request.name] = now
            return
        self._tokens[request.shard] = FencingToken(request.shard, request.epoch, until=until, clock=self._clock)
        self._notify(request.shard, ShardTransition.TAKEN, request.epoch)

    def _removals(self, now: float) -> Iterator[LeaseRequest]:
        """Whoever holds the first shard removes Leases of the dead and of shards that are no more."""
        if self.token(0) is None:
            return
        for observed in list(self._seen.values()):
            lease = observed.lease
            is_needed = lease.shard is not None and lease.shard < self.shards
            if not (is_needed or observed.is_alive(now) or observed.is_gone) and self._is_free_to_send(lease.name, now):
                yield LeaseRequest(LeaseAction.REMOVE, lease.name, now, of=lease)

    def _shard_request(self, action: LeaseAction, shard: int, epoch: int, now: float, stamp: str) -> LeaseRequest:
        holder = None if action == LeaseAction.RELEASE else self.me
        body = self._body(
            shard_lease_name(shard), Role.SHARD, stamp, holder=holder, epoch=epoch, is_new=action == LeaseAction.ACQUIRE
        )
        return LeaseRequest(action, shard_lease_name(shard), now, shard, epoch, body)

    def _body(
        self, name: str, role: Role, stamp: str, *, holder: str | None, epoch: int = 0, is_new: bool = False
    ) -> Object:
        """A whole Lease; what others have added to the stored one stays."""
        observed = self._seen.get(name)
        known: Object = {} if observed is None or observed.is_gone else observed.object
        metadata = {key: value for key, value in known.get("metadata", {}).items() if key != "managedFields"}
        spec = {key: value for key, value in known.get("spec", {}).items() if key != "holderIdentity"}
        metadata |= {
            "name": name,
            "namespace": self._namespace,
            "labels": metadata.get("labels", {}) | {LABEL_ROLE: role.value},
            "annotations": metadata.get("annotations", {}) | {ANNOTATION_SHARDS: str(self.shards)},
        }
        spec |= {"leaseDurationSeconds": self.times.duration_s, "leaseTransitions": epoch, "renewTime": stamp}
        if holder is not None:
            spec["holderIdentity"] = holder
        if is_new or "acquireTime" not in spec:
            spec["acquireTime"] = stamp
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}

    # --- condition_specs ----------------------------------------------------------------------------------------------

    def _end(self, shard: int, change: ShardTransition) -> None:
        token = self._tokens.pop(shard)
        token.end()
        self._ending.discard(shard)
        self._notify(shard, change, token.epoch)

    def _members(self, now: float) -> Collection[str]:
        """Every replica that is alive and divides the tenants as this one does."""
        return {self.me} | {
            observed.lease.holder
            for observed in self._seen.values()
            if observed.lease.role == Role.REPLICA
            and observed.lease.holder is not None
            and observed.lease.shards == self.shards
            and observed.is_alive(now)
        }

    def _is_provably_mine(self, shard: int) -> bool:
        """Whether the Lease of a shard says what only this very replica can have written."""
        observed = self._seen.get(shard_lease_name(shard))
        return observed is not None and (observed.lease.holder, observed.lease.epoch) == (
            self.me,
            self._written.get(shard),
        )

    def _is_another_division_alive(self, now: float) -> bool:
        return any(
            observed.lease.role == Role.SHARD
            and observed.lease.shards != self.shards
            and observed.lease.holder != self.me
            and observed.is_alive(now)
            for observed in self._seen.values()
        )

    def _version(self, name: str) -> int | None:
        """The version of a Lease as stored, for all that is known; None where there is none."""
        observed = self._seen.get(name)
        return None if observed is None or observed.is_gone else observed.lease.version
