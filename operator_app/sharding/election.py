"""Which replica holds which shard, and until when: leader election for each shard, with one heartbeat a replica.

Every replica rewrites its *heartbeat*, a Lease that names the shards that it holds, and every shard has a Lease that is
written when it changes hands (``leases``). All are written by compare-and-set only (a create, a replace with
resourceVersion, a delete with preconditions), so of two replicas that request the same shard one gets it. The
:class:`ElectionState` of a replica stores all Leases as observed, returns the requests to send (``due``), and is given
their results (``done``, ``failed``). ``elector`` sends them; nothing here does I/O, and clock and randomness are
parameters.

The one watch of all Leases delivers changes in the order in which they were committed. So when it delivers a
heartbeat's own resourceVersion, it has delivered everything that was committed before. The heartbeat is *confirmed*
then, and the time at which it was sent is the replica's *horizon*: what others had committed by then has been observed.

All deadlines are in the time of the replica that uses them; clocks of two machines are never compared::

    a heartbeat that names a shard is sent at S, and observed by another replica at V > S

    holder:   S ---- may write, once confirmed ----> S + renew_deadline_s
    others:     V ---- must not acquire, as long as the horizon is here ---> V + duration_s

Guarantees
    - *One holder.* A shard is *claimed* by the writes of its Lease (whoever wrote it) and by its holder's heartbeats
      that name it. A fencing token begins and is extended with a confirmed heartbeat that names the shard, and expires
      ``renew_deadline_s`` after that was sent. Another replica acquires the shard once nothing up to its horizon has
      claimed it for ``duration_s``. Claims up to the horizon then give no valid token any more. A claim after the
      horizon gives none either: the holder's token has expired before that is confirmed. And of acquisitions one gets
      the Lease, which all others observe before their next heartbeat is confirmed. So valid tokens of one shard never
      overlap, unless a clock runs faster than another by a factor of ``duration_s / renew_deadline_s``.
    - *A token never becomes valid again.* A shard whose token has expired is acquired anew, even by the same replica:
      with a compare-and-set, and ``leaseTransitions + 1`` as the epoch of a new token.
    - *No heartbeat without sight.* The next heartbeat is sent only when the one before is confirmed, by the watch or by
      a list. A replica whose view of the Leases stands still is silent for others, too.
    - *No wait for one's own Lease.* A Lease that is provably this replica's (held under its own name at the start, when
      the previous process of that name has ended; or last written by it) is acquired before it expires.
    - *Even shares.* With M members, each gets ``floor(N / M)`` or ``ceil(N / M)`` shards, and as few as possible move
      (``targets``). A replica with more than its share releases shards once no reconcile of them is in progress.
    - *No shard is left over.* Members that send heartbeats but can't acquire their share are not waited for: a shard
      that has been free for ``duration_s`` is acquired by any replica, and those that had fewer shards than their share
      then do not count as members until they acquire one, or for twice ``duration_s``, each further time twice as long.
      So no shard stays free for twice ``duration_s`` while any replica reaches the API server.
    - *Edits by hand cost one Lease at most.* Whatever is written into a Lease, its holder stops or corrects it when it
      observes that, and others wait no longer than their own ``duration_s``, or the one that a replica wrote.
    - *One number of shards.* Replicas with different values of ``--shards`` never hold shards at the same time: each
      Lease has its writer's number of shards, and no token begins while a shard of another number is claimed.

Assumes that a replica's name is used by one process at a time.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from operator_app.api.kinds import Object
from operator_app.kube.fencing import FencingToken
from operator_app.sharding.hashing import bid
from operator_app.sharding.leases import (
    ANNOTATION_DIVISION,
    ANNOTATION_HOLDS,
    ANNOTATION_RELEASED,
    ANNOTATION_SHARDS,
    MAX_EPOCH,
    Lease,
    LeaseTimes,
    Role,
    heartbeat_lease_name,
    lease_object,
    lease_of,
    shard_lease_name,
)

MOST_UNABLE_LEASES: Final = 64
"""A member that leaves shards free again and again does not count for this many Leases at most."""

MOST_AT_ONCE: Final = 32
"""Requests about Leases of shards that one replica has in flight; heartbeats do not count."""

JITTER: Final = 0.2
"""A heartbeat is sent up to this part of the period early, so that replicas that began together do not stay in step."""

ALL: Final = ""
"""The name that a request to list all Leases has."""


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A Lease and when its last change was observed.

    A deleted Lease of a shard is kept, with the resourceVersion of its deletion: it still says who may hold the shard.
    """

    lease: Lease
    object: Object
    observed_mono: float
    deleted_version: int | None = None

    @property
    def is_deleted(self) -> bool:
        """Whether there is no such Lease, or none with the label, any more."""
        return self.deleted_version is not None

    @property
    def expires_mono(self) -> float:
        """When a heartbeat expires, unless another change is observed before."""
        return self.observed_mono + self.lease.duration_s


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat that was stored and is not confirmed yet: its resourceVersion, and the epochs of its shards."""

    sent_mono: float
    stored_mono: float
    version: int
    epochs: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Acquired:
    """A shard whose token has not begun yet: the epoch that was written, and when that was known."""

    epoch: int
    at_mono: float


@dataclass(frozen=True, slots=True)
class UnableMember:
    """A member that is there but acquires nothing: until when it does not count, and for how many Leases in all."""

    until_mono: float
    leases: int


def targets(counts: Mapping[str, int], shards: int) -> dict[str, int]:
    """How many shards each member should have, given how many it has.

    Each gets ``shards // members``; the remainder goes to those with the most shards, so that as few as possible move.
    Ties are broken by name, so all members compute the same result.
    """
    share, extra = divmod(shards, len(counts))
    order = sorted(counts, key=lambda name: (-counts[name], name))
    return {name: share + (rank < extra) for rank, name in enumerate(order)}


class ShardTransition(StrEnum):
    """What happened to a shard of this replica; values of a metric label and of log event names."""

    TAKEN = "taken"
    RELEASED = "released"
    LOST = "lost"
    """Its Lease was written or deleted by somebody else."""
    LAPSED = "lapsed"
    """The fencing token expired before a heartbeat was confirmed."""


class LeaseAction(StrEnum):
    """The purpose of a request."""

    BEAT = "beat"
    """Create or rewrite the heartbeat."""
    LEAVE = "leave"
    """Delete the heartbeat."""
    LIST = "list"
    """Observe all Leases, and the absence of those that are not listed, and call ``delivered`` before ``done``."""
    ACQUIRE = "acquire"
    CORRECT = "correct"
    """Rewrite the Lease of a shard that is held here, after somebody has edited it."""
    RELEASE = "release"
    REMOVE = "remove"
    """Delete a Lease of a replica that has ended, or of a shard that does not exist any more."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """One request about one Lease.

    With a ``body`` it is a replace, or a create if the body has no resourceVersion; with a ``lease`` it is a delete of
    exactly that version. ``epochs`` has the shards that a heartbeat names.
    """

    action: LeaseAction
    name: str
    sent_mono: float
    shard: int = -1
    epoch: int = 0
    body: Object | None = None
    lease: Lease | None = None
    epochs: Mapping[int, int] = field(default_factory=dict)

    @property
    def version(self) -> int | None:
        """The resourceVersion that the request is conditional on; None for a create."""
        if self.body is None:
            return None if self.lease is None else self.lease.version
        version = self.body["metadata"].get("resourceVersion")
        return None if version is None else int(version)


class ElectionState:
    """All Leases in ``namespace`` as one replica has observed them, and its own shards. No method does any I/O.

    ``on_change`` is called with shard, transition and epoch for every transition of a shard. Fencing tokens expire by
    ``clock``; every ``now_mono`` is a value of it. ``rand`` gives numbers in [0, 1).
    """

    def __init__(
        self,
        identity: str,
        shards: int,
        times: LeaseTimes,
        *,
        namespace: str,
        on_change: Callable[[int, ShardTransition, int], None],
        clock: Callable[[], float],
        rand: Callable[[], float],
    ) -> None:
        self.identity = identity
        self.shards = shards
        self.times = times
        self._own_name = heartbeat_lease_name(identity)
        self._namespace = namespace
        self._on_change = on_change
        self._clock = clock
        self._rand = rand
        self._observed: dict[str, ObservedLease] = {}
        self._claimed_mono: dict[int, float] = {}
        """When the last claim of each shard was observed, this replica's own included."""
        self._delivered = 0
        """The resourceVersion up to which the watch, or a list, has delivered everything."""
        self._horizon_mono = -math.inf
        self._beat: Heartbeat | None = None
        self._last_beat_mono = -math.inf
        """When the last heartbeat was sent, whether it arrived or not."""
        self._next_beat_mono = -math.inf
        self._tokens: dict[int, FencingToken] = {}
        self._acquired: dict[int, Acquired] = {}
        """Shards whose Lease this replica has written, and whose token waits for a heartbeat."""
        self._is_acquired_unsent = False
        """Whether a shard was acquired since the last heartbeat was sent."""
        self._not_again_before_mono: dict[int, float] = {}
        """Until when a shard is not acquired again, because no token could begin the last time."""
        self._draining: set[int] = set()
        """Shards that are held, start no new reconciles, and are released once those in progress have ended."""
        self._releasing: set[int] = set()
        """Shards whose token was ended here, while the stored Lease still has this replica as its holder."""
        self._epochs: dict[int, int] = {}
        """The epoch that was observed last, by shard."""
        self._written_epochs: dict[int, tuple[int, ...]] = {}
        """The last two epochs that this replica wrote, or tried to write, by shard."""
        self._in_flight: dict[str, LeaseRequest] = {}
        self._not_before_mono: dict[str, float] = {}
        self._free_since_mono: dict[int, float] = {}
        """Since when each shard has been free that could be acquired."""
        self._unable: dict[str, UnableMember] = {}
        """Members, by the names of their heartbeats, that left a shard free since they last acquired one."""
        self._has_begun = False
        self._is_leaving = False
        self._is_suspended = False

    # --- observed Leases ----------------------------------------------------------------------------------------

    def observe(self, obj: Object, *, now_mono: float) -> None:
        """Store a Lease from a list, a watch or an answer, unless a newer version of it is stored.

        Ends this replica's token (``LOST``) if the Lease of its shard has another holder or epoch.
        """
        known = self._observed.get(obj["metadata"]["name"])
        lease = lease_of(obj, self.times, known=None if known is None else known.lease)
        if lease is None or (known is not None and known.lease.version >= lease.version):
            return
        self._observed[lease.name] = ObservedLease(lease, obj, now_mono)
        if lease.role == Role.HEARTBEAT:
            self._observe_heartbeat(lease, now_mono)
        elif lease.shard is not None:
            self._observe_shard(lease, lease.shard, known, now_mono)

    def _observe_heartbeat(self, lease: Lease, now_mono: float) -> None:
        for observed in self._observed.values():
            shard, holder = observed.lease.shard, observed.lease.holder
            if shard is not None and holder is not None and lease.holds(shard):  # noqa: SIM102 - the cheap test first
                if heartbeat_lease_name(holder) == lease.name:
                    self._claimed_mono[shard] = now_mono

    def _observe_shard(self, lease: Lease, shard: int, known: ObservedLease | None, now_mono: float) -> None:
        self._epochs[shard] = lease.epoch
        if lease.is_released:
            self._claimed_mono.pop(shard, None)
        elif known is None or known.deleted_version is None or known.deleted_version < lease.version:
            # Otherwise it has only lost its label, which was observed as its deletion, and claims nothing anew.
            self._claimed_mono[shard] = now_mono
        if lease.holder is not None and (known is None or lease.holder != known.lease.holder):
            self._unable.pop(heartbeat_lease_name(lease.holder), None)
        acquired = self._acquired.get(shard)
        if acquired is not None and (lease.holder, lease.epoch) != (self.identity, acquired.epoch):
            del self._acquired[shard]
        token = self._tokens.get(shard)
        if token is not None and (lease.holder, lease.epoch) != (self.identity, token.epoch):
            self._end_token(shard, ShardTransition.LOST)

    def observe_deletion(self, obj: Object, *, now_mono: float) -> None:
        """Store that a Lease was deleted; ``obj`` is its last state.

        The deletion of a shard's Lease counts as a claim: its holder may not have observed it yet.
        """
        lease = lease_of(obj, self.times)
        known = None if lease is None else self._observed.get(lease.name)
        if known is None or lease is None or known.lease.version > lease.version:
            return
        if lease.shard is None:
            del self._observed[lease.name]
            self._not_before_mono.pop(lease.name, None)
            self._unable.pop(lease.name, None)
            if lease.name == self._own_name:
                self._next_beat_mono = -math.inf
            return
        self._acquired.pop(lease.shard, None)
        if lease.shard in self._tokens:
            self._end_token(lease.shard, ShardTransition.LOST)
        if lease.is_released:
            del self._observed[lease.name]
            return
        self._observed[lease.name] = replace(known, deleted_version=lease.version)
        self._claimed_mono[lease.shard] = now_mono

    def delivered(self, version: int, *, now_mono: float) -> None:
        """Everything up to resourceVersion ``version`` was observed: by the watch in its order, or by a whole list."""
        self._delivered = max(self._delivered, version)
        self._confirm(now_mono)

    def known(self, *, up_to: int | None = None) -> list[Object]:
        """The stored Leases that exist; with ``up_to`` only those of that resourceVersion or an older one."""
        return [
            observed.object
            for observed in self._observed.values()
            if not observed.is_deleted and (up_to is None or observed.lease.version <= up_to)
        ]

    def token(self, shard: int) -> FencingToken | None:
        """The token to start a reconcile in a shard; None if the shard is not held here, or is draining."""
        token = self._tokens.get(shard)
        return token if token is not None and shard not in self._draining and token.is_valid else None

    @property
    def held(self) -> tuple[int, ...]:
        """The shards that this replica holds, in the order in which it acquired them."""
        return tuple(self._tokens)

    @property
    def draining(self) -> tuple[int, ...]:
        """The shards that are held, start no new reconciles, and are released once those in progress have ended."""
        return tuple(self._draining)

    def is_idle(self, shard: int) -> bool:
        """Whether a draining shard has no reconciles in progress any more."""
        token = self._tokens.get(shard)
        return token is not None and shard in self._draining and token.users == 0

    # --- joining, leaving and requests --------------------------------------------------------------------------

    def begin(self) -> None:
        """Join, once all Leases are observed and this replica can reconcile.

        Shards that are held under its name at this moment were held by the previous process of that name, which has
        ended; they are acquired without waiting.
        """
        self._has_begun = True
        for observed in self._observed.values():
            if observed.lease.shard is not None and observed.lease.holder == self.identity:
                self._written_epochs[observed.lease.shard] = (observed.lease.epoch,)

    def leave(self) -> None:
        """Release every shard as its reconciles end, delete the heartbeat, and acquire nothing any more."""
        self._is_leaving = True
        self._stand_back()

    def suspend(self) -> None:
        """Release every shard as its reconciles end, delete the heartbeat, and acquire nothing until ``resume``."""
        self._is_suspended = True
        self._stand_back()

    def _stand_back(self) -> None:
        self._draining |= set(self._tokens)
        for shard in tuple(self._acquired):
            self._give_back(shard)
        self._not_before_mono.pop(self._own_name, None)
        self._next_beat_mono = -math.inf

    def resume(self) -> None:
        """Take part again after ``suspend``; without effect once ``leave`` was called."""
        self._is_suspended = False
        self._next_beat_mono = -math.inf

    @property
    def _is_standing_back(self) -> bool:
        return self._is_leaving or self._is_suspended

    @property
    def has_left(self) -> bool:
        """Whether, after ``leave``, all shards are released and the heartbeat is deleted."""
        is_member = self._has_begun and self._own_name in self._observed
        return self._is_leaving and not (self._tokens or self._releasing or self._in_flight or is_member)

    def due(self, *, now_mono: float, stamp: str) -> list[LeaseRequest]:
        """The requests to send at ``now_mono``; each is to be followed by a call of ``done`` or ``failed``.

        ``stamp`` is the time of day as a ``MicroTime``; it is written into Leases for people and never read.
        """
        for shard in [shard for shard, token in self._tokens.items() if token.until <= now_mono]:
            self._end_token(shard, ShardTransition.LAPSED)
        for shard, acquired in tuple(self._acquired.items()):
            if acquired.at_mono + self.times.renew_deadline_s <= now_mono:
                # Others wait for as long as heartbeats name it; by then they acquire it, whatever their share.
                self._give_back(shard)
                self._not_again_before_mono[shard] = now_mono + 2 * self.times.duration_s
        if not self._has_begun:
            return []
        requests = []
        for request in self._requests_due(now_mono, stamp):
            # Stored at once: the requests that follow depend on it.
            self._in_flight[request.name] = request
            requests.append(request)
        return requests

    def next_due_mono(self, now_mono: float) -> float | None:
        """When ``due`` has to be called again at the latest; None if only another event can change anything."""
        moments = [at for name, at in self._not_before_mono.items() if name not in self._in_flight]
        moments += [token.until for token in self._tokens.values()]
        moments += [since + self.times.duration_s for since in self._free_since_mono.values()]
        moments += [unable.until_mono for unable in self._unable.values()]
        moments += [each.at_mono + self.times.renew_deadline_s for each in self._acquired.values()]
        moments += self._not_again_before_mono.values()
        moments += self._expiries()
        moments.append(self._next_beat_mono)
        if self._beat is not None:
            moments.append(self._list_due_mono(self._beat))
        return min((at for at in moments if at > now_mono), default=None)

    def done(self, request: LeaseRequest, *, now_mono: float) -> None:
        """A request succeeded, and the Lease that the API server stored was observed."""
        del self._in_flight[request.name]
        self._not_before_mono.pop(request.name, None)
        match request.action:
            case LeaseAction.BEAT:
                self._stored_beat(request, now_mono)
            case LeaseAction.ACQUIRE:
                self._written(request.shard, now_mono)
                self._not_before_mono[request.name] = request.sent_mono + self.times.retry_period_s
            case LeaseAction.CORRECT:
                self._not_before_mono[request.name] = request.sent_mono + self.times.retry_period_s
            case LeaseAction.RELEASE:
                self._releasing.discard(request.shard)
                # Replicas with different numbers of shards that release for each other must not retry in step.
                self._not_before_mono[request.name] = now_mono + self.times.retry_period_s * self._rand()
            case LeaseAction.LEAVE | LeaseAction.REMOVE:
                self._observed.pop(request.name, None)
                self._unable.pop(request.name, None)
                if request.action == LeaseAction.LEAVE:
                    self._beat = None
            case LeaseAction.LIST:
                pass

    def failed(self, request: LeaseRequest, *, now_mono: float, retry_after_s: float = 0.0) -> None:
        """A request failed, or its answer was lost. After a conflict, observe the stored Lease before this call.

        ``retry_after_s`` is what the API server requested, in seconds. Only ``ACQUIRE`` waits that long, up to
        ``duration_s``: no token depends on it yet.
        """
        del self._in_flight[request.name]
        is_outdated = self._version(request.name) != request.version
        if request.action == LeaseAction.ACQUIRE:
            now_mono += min(retry_after_s, self.times.duration_s)
            if self._epochs.get(request.shard) == request.epoch:
                self._written(request.shard, now_mono)
        self._not_before_mono[request.name] = (
            now_mono if is_outdated else max(now_mono, request.sent_mono + self.times.retry_period_s)
        )
        if request.action == LeaseAction.BEAT:
            self._next_beat_mono = self._not_before_mono[request.name]

    # --- heartbeats ----------------------------------------------------------------------------------------------

    def _stored_beat(self, request: LeaseRequest, now_mono: float) -> None:
        self._next_beat_mono = request.sent_mono + self.times.retry_period_s * (1 - JITTER * self._rand())
        version = self._version(request.name)
        if version is not None:
            self._beat = Heartbeat(request.sent_mono, now_mono, version, request.epochs)
            self._confirm(now_mono)

    def _confirm(self, now_mono: float) -> None:
        """Extend and begin tokens if everything that was committed before the stored heartbeat was observed."""
        beat = self._beat
        if beat is None or self._delivered < beat.version:
            return
        self._beat = None
        self._horizon_mono = max(self._horizon_mono, beat.sent_mono)
        until = beat.sent_mono + self.times.renew_deadline_s
        for shard, epoch in beat.epochs.items():
            token = self._tokens.get(shard)
            if token is not None:
                # After the deadline nothing is extended: the token has expired, reported as LAPSED or not yet.
                if token.epoch == epoch and now_mono < token.until:
                    token.extend(until)
            elif shard in self._acquired and self._acquired[shard].epoch == epoch and now_mono < until:
                self._begin_token(shard, epoch, until)

    def _begin_token(self, shard: int, epoch: int, until: float) -> None:
        if self._is_another_division_in_use():
            self._give_back(shard)
            return
        del self._acquired[shard]
        self._tokens[shard] = FencingToken(shard, epoch, until=until, clock=self._clock)
        self._on_change(shard, ShardTransition.TAKEN, epoch)

    def _heartbeat(self, now_mono: float, stamp: str) -> Iterator[LeaseRequest]:
        name = self._own_name
        if not self._may_send(name, now_mono):
            return
        if self._is_standing_back and not self._tokens:
            if name in self._observed:
                yield LeaseRequest(LeaseAction.LEAVE, name, now_mono, lease=self._observed[name].lease)
        elif self._beat is None and self._is_beat_due(now_mono):
            self._last_beat_mono, self._is_acquired_unsent = now_mono, False
            yield self._beat_request(now_mono, stamp)

    def _is_beat_due(self, now_mono: float) -> bool:
        """Whether the period is over, an acquisition waits for a heartbeat, or the horizon is short of an expiry.

        Without a token to extend, it waits until acquisitions in flight have been answered, in order to name them.
        """
        is_acquiring = any(each.action == LeaseAction.ACQUIRE for each in self._in_flight.values())
        if is_acquiring and not self._tokens:
            return False
        if self._next_beat_mono <= now_mono or (self._is_acquired_unsent and not is_acquiring):
            return True
        return not self._is_standing_back and any(self._last_beat_mono < at <= now_mono for at in self._expiries())

    def _expiries(self) -> Iterator[float]:
        """When the claims of shards that others hold, and the heartbeats of others, expire."""
        for name, observed in self._observed.items():
            if observed.lease.shard is None:
                if name != self._own_name:
                    yield observed.expires_mono
            elif not self._is_ours(observed.lease.shard) and (at := self._claim_expires_mono(observed)) is not None:
                yield at

    def _is_ours(self, shard: int) -> bool:
        return shard in self._tokens or shard in self._acquired or shard in self._releasing

    def _beat_request(self, now_mono: float, stamp: str) -> LeaseRequest:
        epochs = {shard: each.epoch for shard, each in (self._tokens | self._acquired).items()}
        annotations = {
            ANNOTATION_SHARDS: "0",
            ANNOTATION_DIVISION: "0" if self._is_standing_back else str(self.shards),
            ANNOTATION_HOLDS: f"{sum(1 << shard for shard in epochs):x}",
        }
        body = self._body(self._own_name, stamp, annotations, holder=self.identity, epoch=0, is_new=False)
        return LeaseRequest(LeaseAction.BEAT, self._own_name, now_mono, body=body, epochs=epochs)

    def _lists(self, now_mono: float) -> Iterator[LeaseRequest]:
        """A list, where the watch does not confirm a heartbeat in time."""
        if self._beat is not None and self._list_due_mono(self._beat) <= now_mono and self._may_send(ALL, now_mono):
            yield LeaseRequest(LeaseAction.LIST, ALL, now_mono)

    def _list_due_mono(self, beat: Heartbeat) -> float:
        return beat.stored_mono + self.times.retry_period_s / 2

    # --- requests by purpose -------------------------------------------------------------------------------------

    def _requests_due(self, now_mono: float, stamp: str) -> Iterator[LeaseRequest]:
        yield from self._lists(now_mono)
        yield from self._corrections(now_mono, stamp)
        yield from self._releases(now_mono, stamp)
        # A replica whose horizon is older could begin no token by what it acquires now.
        if not self._is_standing_back and now_mono < self._horizon_mono + self.times.renew_deadline_s:
            yield from self._acquisitions(now_mono, stamp)
            yield from self._removals(now_mono)
        yield from self._heartbeat(now_mono, stamp)

    def _may_send(self, name: str, now_mono: float) -> bool:
        return name not in self._in_flight and self._not_before_mono.get(name, now_mono) <= now_mono

    def _has_room(self) -> bool:
        return len(self._in_flight) < MOST_AT_ONCE

    def _corrections(self, now_mono: float, stamp: str) -> Iterator[LeaseRequest]:
        for shard, token in self._tokens.items():
            observed = self._observed.get(shard_lease_name(shard))
            if observed is None or self.is_idle(shard):
                continue
            written = (observed.object.get("spec") or {}).get("leaseDurationSeconds"), observed.lease.shards
            is_right = written == (self.times.duration_s, self.shards)
            if not is_right and self._may_send(observed.lease.name, now_mono):
                yield self._shard_request(LeaseAction.CORRECT, shard, token.epoch, now_mono, stamp)

    def _releases(self, now_mono: float, stamp: str) -> Iterator[LeaseRequest]:
        for shard in [each for each in self._draining if self.is_idle(each)]:
            self._end_token(shard, ShardTransition.RELEASED)
            self._releasing.add(shard)
            self._not_before_mono.pop(shard_lease_name(shard), None)
        for shard in sorted(self._releasing):
            name = shard_lease_name(shard)
            if name in self._in_flight:
                continue
            if not self._is_written_by_us(shard):
                self._releasing.discard(shard)
            elif self._may_send(name, now_mono) and self._has_room():
                yield self._shard_request(LeaseAction.RELEASE, shard, self._epochs[shard], now_mono, stamp)

    def _acquisitions(self, now_mono: float, stamp: str) -> Iterator[LeaseRequest]:
        counts = dict.fromkeys(self._members(now_mono), 0)
        is_allowed = not self._is_another_division_in_use()
        free = self._free(counts)
        overdue = self._overdue(free, now_mono) if is_allowed else []
        if overdue:
            counts = self._without_unable(counts, now_mono)
        surplus = counts[self._own_name] - targets(counts, self.shards)[self._own_name]
        if surplus > 0:
            # The shards with this replica's lowest bids: those with its highest are the ones it would acquire again.
            lowest_bids = sorted(set(self._tokens) - self._draining, key=lambda shard: bid(self.identity, shard))
            self._draining.update(lowest_bids[:surplus])
            yield from self._releases(now_mono, stamp)
        elif is_allowed:
            free.sort(key=lambda shard: (shard in overdue, bid(self.identity, shard)), reverse=True)
            for shard in free[: max(-surplus, len(overdue))]:
                is_awaited = self._not_again_before_mono.get(shard, now_mono) <= now_mono
                if is_awaited and self._may_send(shard_lease_name(shard), now_mono) and self._has_room():
                    yield self._acquire(shard, now_mono, stamp)

    def _free(self, counts: dict[str, int]) -> list[int]:
        """The shards that may be acquired; adds all others to the counts of the members that hold them."""
        free = []
        for shard in range(self.shards):
            name = shard_lease_name(shard)
            observed = self._observed.get(name)
            if self._is_ours(shard) or name in self._in_flight:
                counts[self._own_name] += shard not in self._draining and shard not in self._releasing
            elif observed is None or not self._is_claimed(observed) or self._is_written_by_us(shard):
                free.append(shard)
                continue
            elif observed.lease.holder is not None:
                holder = heartbeat_lease_name(observed.lease.holder)
                if holder in counts and holder != self._own_name:
                    counts[holder] += 1
            self._free_since_mono.pop(shard, None)
        return free

    def _overdue(self, free: Collection[int], now_mono: float) -> list[int]:
        """The shards that have been free for the duration of a Lease."""
        for shard in free:
            observed = self._observed.get(shard_lease_name(shard))
            since_mono = now_mono
            if observed is not None:
                expires_mono = self._claim_expires_mono(observed)
                since_mono = observed.observed_mono if expires_mono is None else expires_mono
            self._free_since_mono.setdefault(shard, min(since_mono, now_mono))
        return [shard for shard in free if self._free_since_mono[shard] + self.times.duration_s <= now_mono]

    def _without_unable(self, counts: Mapping[str, int], now_mono: float) -> dict[str, int]:
        """``counts`` without the other members that have less than their share while shards are overdue."""
        shares = targets(counts, self.shards)
        unable = {each for each in counts if counts[each] < shares[each] and each != self._own_name}
        for each in unable:
            leases = min(2 * self._unable[each].leases, MOST_UNABLE_LEASES) if each in self._unable else 2
            self._unable[each] = UnableMember(now_mono + leases * self.times.duration_s, leases)
        return {each: count for each, count in counts.items() if each not in unable}

    def _acquire(self, shard: int, now_mono: float, stamp: str) -> LeaseRequest:
        epoch = self._epochs.get(shard, -1) + 1
        if epoch > MAX_EPOCH:
            epoch = 0
        self._written_epochs[shard] = (*self._written_epochs.get(shard, ())[-1:], epoch)
        return self._shard_request(LeaseAction.ACQUIRE, shard, epoch, now_mono, stamp)

    def _written(self, shard: int, now_mono: float) -> None:
        """The Lease of a shard has this replica as its holder: a token begins with the next heartbeat."""
        if not self._is_written_by_us(shard):
            return
        self._acquired[shard] = Acquired(self._epochs[shard], now_mono)
        self._is_acquired_unsent = True
        if self._is_standing_back:
            self._give_back(shard)

    def _give_back(self, shard: int) -> None:
        """Release a shard whose token has not begun."""
        del self._acquired[shard]
        self._releasing.add(shard)
        self._not_before_mono.pop(shard_lease_name(shard), None)

    def _removals(self, now_mono: float) -> Iterator[LeaseRequest]:
        """The holder of shard 0 deletes expired heartbeats, and Leases of shards that do not exist any more."""
        if self.token(0) is None:
            return
        for name, observed in list(self._observed.items()):
            lease = observed.lease
            if lease.shard is None:
                is_obsolete = name != self._own_name and observed.expires_mono <= self._horizon_mono
            else:
                is_obsolete = lease.shard >= self.shards and not (self._is_claimed(observed) or observed.is_deleted)
            if is_obsolete and self._may_send(name, now_mono) and self._has_room():
                yield LeaseRequest(LeaseAction.REMOVE, name, now_mono, lease=lease)

    def _shard_request(self, action: LeaseAction, shard: int, epoch: int, now_mono: float, stamp: str) -> LeaseRequest:
        name, is_release = shard_lease_name(shard), action == LeaseAction.RELEASE
        annotations = {ANNOTATION_SHARDS: str(self.shards), ANNOTATION_RELEASED: "true" if is_release else "false"}
        holder = None if is_release else self.identity
        is_new = action == LeaseAction.ACQUIRE
        body = self._body(name, stamp, annotations, holder=holder, epoch=epoch, is_new=is_new)
        return LeaseRequest(action, name, now_mono, shard, epoch, body)

    def _body(
        self, name: str, stamp: str, annotations: dict[str, str], *, holder: str | None, epoch: int, is_new: bool
    ) -> Object:
        observed = self._observed.get(name)
        known = None if observed is None or observed.is_deleted else observed.object
        spec: Object = {
            "leaseDurationSeconds": self.times.duration_s,
            "leaseTransitions": epoch,
            "renewTime": stamp,
        }
        if holder is not None:
            spec["holderIdentity"] = holder
        if is_new or known is None or "acquireTime" not in (known.get("spec") or {}):
            spec["acquireTime"] = stamp
        return lease_object(name, self._namespace, spec, annotations, known=known)

    # --- what follows from the observed Leases ------------------------------------------------------------------

    def _end_token(self, shard: int, transition: ShardTransition) -> None:
        token = self._tokens.pop(shard)
        token.end()
        self._draining.discard(shard)
        self._on_change(shard, transition, token.epoch)

    def _claim_expires_mono(self, observed: ObservedLease) -> float | None:
        """When the last claim of a shard expires; None if its holder has released it."""
        at = self._claimed_mono.get(-1 if observed.lease.shard is None else observed.lease.shard)
        return None if at is None else at + observed.lease.duration_s

    def _is_claimed(self, observed: ObservedLease) -> bool:
        """Whether another replica may hold the shard, or begin to, as far as is known at the horizon."""
        expires_mono = self._claim_expires_mono(observed)
        return expires_mono is not None and self._horizon_mono < expires_mono

    def _members(self, now_mono: float) -> Collection[str]:
        """The names of the heartbeats of every able replica with the same number of shards, and of this one."""
        return {self._own_name} | {
            name
            for name, observed in self._observed.items()
            if observed.lease.role == Role.HEARTBEAT
            and observed.lease.shards == self.shards
            and not self._is_unable(name, now_mono)
            and self._horizon_mono < observed.expires_mono
        }

    def _is_unable(self, member: str, now_mono: float) -> bool:
        return member in self._unable and now_mono < self._unable[member].until_mono

    def _is_written_by_us(self, shard: int) -> bool:
        """Whether the Lease of a shard has the holder and an epoch that only this replica can have written."""
        observed = self._observed.get(shard_lease_name(shard))
        is_ours = observed is not None and observed.lease.holder == self.identity
        return is_ours and self._epochs.get(shard) in self._written_epochs.get(shard, ())

    def _is_another_division_in_use(self) -> bool:
        """Whether a shard is claimed that is one of another number of shards."""
        return any(
            observed.lease.shard is not None
            and observed.lease.holder != self.identity
            and self._division(observed.lease) != self.shards
            and self._is_claimed(observed)
            for observed in self._observed.values()
        )

    def _division(self, lease: Lease) -> int:
        """The number of shards that a shard is one of: as its holder's heartbeat says, or else the Lease itself."""
        beat = None if lease.holder is None else self._observed.get(heartbeat_lease_name(lease.holder))
        return lease.shards if beat is None else beat.lease.shards or lease.shards

    def _version(self, name: str) -> int | None:
        """The observed resourceVersion of a Lease; None if there is no such Lease."""
        observed = self._observed.get(name)
        return None if observed is None or observed.is_deleted else observed.lease.version
