"""The election as it was before heartbeats: the holder of a shard rewrites the shard's Lease every ``retry_period_s``.

Kept to model replicas of both formats beside each other, as in a rolling upgrade, and to compare how much they write.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from operator_app.api.kinds import FIELD_MANAGER, GROUP, LEASE, Object
from operator_app.kube.fencing import FencingToken
from operator_app.sharding.election import ShardTransition, targets
from operator_app.sharding.hashing import bid
from operator_app.sharding.leases import LeaseTimes

LABEL_ROLE: Final = f"{GROUP}/lease"
"""Label of every Lease of this operator; its value is a ``Role``."""

ANNOTATION_SHARDS: Final = f"{GROUP}/shards"
"""The number of shards that the writer of a Lease is set up with."""

PREFIX: Final = "operator-app"

MOST_UNABLE_LEASES: Final = 64
"""A member that leaves shards free again and again does not count for this many Leases at most."""

MAX_EPOCH: Final = 2**31 - 1
"""``leaseTransitions`` is an int32; after this comes 0."""


class Role(StrEnum):
    """The two kinds of Lease: of a shard, or of a replica's membership."""

    SHARD = "shard"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Lease:
    """The fields of a Lease. ``shard`` is None for a membership, ``holder`` None for a Lease that is released."""

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


def lease_of(obj: Object, times: LeaseTimes, *, known: Lease | None = None) -> Lease | None:
    """The fields of a stored Lease; None for a Lease that is not one of this operator's.

    A field that somebody has removed by hand gets the default that can't lead to two holders. A duration that no
    replica has written does not count: the one of ``known``, the Lease as observed before, or the own one is used.
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
        duration_s=_duration_s(obj, times, known),
        shards=int(shards) if shards.isascii() and shards.isdigit() else 0,
        uid=metadata["uid"],
        version=int(metadata["resourceVersion"]),
    )


def _duration_s(obj: Object, times: LeaseTimes, known: Lease | None) -> float:
    written: float | None = (obj.get("spec") or {}).get("leaseDurationSeconds")
    foreign = (
        "f:leaseDurationSeconds" in (entry.get("fieldsV1") or {}).get("f:spec", {})
        for entry in obj["metadata"].get("managedFields", ())
        if entry.get("manager") != FIELD_MANAGER
    )
    if written is not None and not any(foreign):
        return written
    return times.duration_s if known is None else max(known.duration_s, times.duration_s)


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A Lease and when its last change was observed. A deleted Lease of a shard stays valid until it expires."""

    lease: Lease
    object: Object
    observed_mono: float
    is_deleted: bool = False

    @property
    def expires_mono(self) -> float:
        """When the Lease expires, unless another change is observed before."""
        return self.observed_mono + self.lease.duration_s

    def is_valid(self, now_mono: float) -> bool:
        """Whether the Lease has a holder and has not expired."""
        return self.lease.holder is not None and now_mono < self.expires_mono


@dataclass(frozen=True, slots=True)
class UnableMember:
    """A member that renews but acquires nothing: until when it does not count, and for how many Leases in all."""

    until_mono: float
    leases: int


class LeaseAction(StrEnum):
    """The purpose of a request."""

    JOIN = "join"
    """Create or renew the membership Lease."""
    LEAVE = "leave"
    """Delete the membership Lease."""
    ACQUIRE = "acquire"
    """Acquire a shard. Whoever sends this lists all Leases afterwards, before it calls ``done``."""
    RENEW = "renew"
    RELEASE = "release"
    REMOVE = "remove"
    """Delete a Lease of a replica that has ended, or of a shard that does not exist any more."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """One request about one Lease.

    With a ``body`` it is a replace, or a create if the body has no resourceVersion; without one it is a delete of
    exactly the version of ``lease``.
    """

    action: LeaseAction
    name: str
    sent_mono: float
    shard: int = -1
    epoch: int = 0
    body: Object | None = None
    lease: Lease | None = None

    @property
    def version(self) -> int | None:
        """The resourceVersion that the request is conditional on; None for a create."""
        if self.body is None:
            return None if self.lease is None else self.lease.version
        version = self.body["metadata"].get("resourceVersion")
        return None if version is None else int(version)

    @property
    def role(self) -> Role:
        """The role of the request's Lease."""
        return Role.SHARD if self.name.startswith(f"{PREFIX}-{Role.SHARD}-") else Role.REPLICA


class FormerElectionState:
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
        self._namespace = namespace
        self._on_change = on_change
        self._clock = clock
        self._rand = rand
        self._observed: dict[str, ObservedLease] = {}
        self._tokens: dict[int, FencingToken] = {}
        self._draining: set[int] = set()
        """Shards that are held, start no new reconciles, and are released once those in progress have ended."""
        self._releasing: set[int] = set()
        """Shards whose token was ended here, while the stored Lease still has this replica as its holder."""
        self._epochs: dict[int, int] = {}
        """The epoch that was observed last, by shard."""
        self._written_epochs: dict[int, int] = {}
        """The epoch that this replica wrote last, or tried to write, by shard."""
        self._in_flight: dict[str, LeaseRequest] = {}
        self._not_before_mono: dict[str, float] = {}
        self._free_since_mono: dict[int, float] = {}
        """Since when each shard has been free that could be acquired."""
        self._unable: dict[str, UnableMember] = {}
        """Members that left a shard free for a whole Lease, since they last acquired one."""
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
        if lease is None:
            return
        if known is not None and known.lease.version >= lease.version:
            return
        self._observed[lease.name] = ObservedLease(lease, obj, now_mono)
        if lease.shard is None:
            return
        self._epochs[lease.shard] = lease.epoch
        if lease.holder is not None and (known is None or known.lease.holder != lease.holder):
            self._unable.pop(lease.holder, None)
        token = self._tokens.get(lease.shard)
        if token is not None and (lease.holder, lease.epoch) != (self.identity, token.epoch):
            self._end_token(token.shard, ShardTransition.LOST)

    def observe_deletion(self, obj: Object, *, now_mono: float) -> None:
        """Store that a Lease was deleted; ``obj`` is its last state.

        If a valid Lease of a shard is deleted, nobody acquires the shard before that Lease would have expired.
        """
        lease = lease_of(obj, self.times)
        known = None if lease is None else self._observed.get(lease.name)
        if known is None or lease is None or known.lease.version > lease.version:
            return
        if lease.shard is None:
            del self._observed[lease.name]
            self._not_before_mono.pop(lease.name, None)
            self._unable.pop(lease.holder or "", None)
            return
        self._observed[lease.name] = replace(known, is_deleted=True)
        if lease.shard in self._tokens:
            self._end_token(lease.shard, ShardTransition.LOST)
        elif not known.is_valid(now_mono):
            del self._observed[lease.name]

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
                self._written_epochs[observed.lease.shard] = observed.lease.epoch

    def leave(self) -> None:
        """Release every shard as its reconciles end, delete the membership, and acquire nothing any more."""
        self._is_leaving = True
        self._draining |= set(self._tokens)
        self._not_before_mono.pop(replica_lease_name(self.identity), None)

    def suspend(self) -> None:
        """Release every shard as its reconciles end, delete the membership, and acquire nothing until ``resume``."""
        self._is_suspended = True
        self._draining |= set(self._tokens)
        self._not_before_mono.pop(replica_lease_name(self.identity), None)

    def resume(self) -> None:
        """Join again after ``suspend``, and keep the shards that were not released yet."""
        self._is_suspended = False
        if not self._is_leaving:
            self._draining.clear()

    @property
    def _is_standing_back(self) -> bool:
        return self._is_leaving or self._is_suspended

    @property
    def has_left(self) -> bool:
        """Whether, after ``leave``, all shards are released and the membership is deleted."""
        is_member = self._has_begun and replica_lease_name(self.identity) in self._observed
        return self._is_leaving and not (self._tokens or self._releasing or self._in_flight or is_member)

    def due(self, *, now_mono: float, stamp: str) -> list[LeaseRequest]:
        """The requests to send at ``now_mono``; each is to be followed by a call of ``done`` or ``failed``.

        ``stamp`` is the time of day as a ``MicroTime``; it is written into Leases for people and never read.
        """
        for shard in [shard for shard, token in self._tokens.items() if token.until <= now_mono]:
            self._end_token(shard, ShardTransition.LAPSED)
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
        moments += [observed.expires_mono for observed in self._observed.values() if observed.lease.holder is not None]
        return min((at for at in moments if at > now_mono), default=None)

    def done(self, request: LeaseRequest, *, now_mono: float) -> None:
        """A request succeeded, and the Lease that the API server stored was observed."""
        del self._in_flight[request.name]
        self._not_before_mono[request.name] = request.sent_mono + self.times.retry_period_s
        match request.action:
            case LeaseAction.ACQUIRE:
                self._acquired(request, now_mono)
            case LeaseAction.RENEW:
                token = self._tokens.get(request.shard)
                # An answer after the deadline changes nothing: the token has expired, reported as LAPSED or not yet.
                if token is not None and token.epoch == request.epoch and now_mono < token.until:
                    token.extend(request.sent_mono + self.times.renew_deadline_s)
            case LeaseAction.RELEASE:
                self._releasing.discard(request.shard)
                # Replicas with different numbers of shards that release for each other must not retry in step.
                self._not_before_mono[request.name] = now_mono + self.times.retry_period_s * self._rand()
            case LeaseAction.LEAVE | LeaseAction.REMOVE:
                self._observed.pop(request.name, None)
                self._unable.pop((request.lease and request.lease.holder) or "", None)
                del self._not_before_mono[request.name]
            case LeaseAction.JOIN if self._is_standing_back:
                del self._not_before_mono[request.name]
            case LeaseAction.JOIN:
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
            # If the write succeeded and the list after it failed, the new version is our own.
            is_outdated = is_outdated and not self._is_written_by_us(request.shard)
        self._not_before_mono[request.name] = (
            now_mono if is_outdated else max(now_mono, request.sent_mono + self.times.retry_period_s)
        )

    # --- requests by purpose -------------------------------------------------------------------------------------

    def _requests_due(self, now_mono: float, stamp: str) -> Iterator[LeaseRequest]:
        yield from self._membership(now_mono, stamp)
        yield from self._renewals(now_mono, stamp)
        yield from self._releases(now_mono, stamp)
        if not self._is_standing_back:
            yield from self._acquisitions(now_mono, stamp)
            yield from self._removals(now_mono)

    def _may_send(self, name: str, now_mono: float) -> bool:
        return name not in self._in_flight and self._not_before_mono.get(name, now_mono) <= now_mono

    def _membership(self, now_mono: float, stamp: str) -> Iterator[LeaseRequest]:
        name = replica_lease_name(self.identity)
        if not self._may_send(name, now_mono):
            return
        if not self._is_standing_back:
            yield LeaseRequest(
                LeaseAction.JOIN, name, now_mono, body=self._body(name, Role.REPLICA, stamp, holder=self.identity)
            )
        elif name in self._observed:
            yield LeaseRequest(LeaseAction.LEAVE, name, now_mono, lease=self._observed[name].lease)

    def _renewals(self, now_mono: float, stamp: str) -> Iterator[LeaseRequest]:
        for shard, token in self._tokens.items():
            name = shard_lease_name(shard)
            if self._may_send(name, now_mono) and not self.is_idle(shard):
                yield self._shard_request(LeaseAction.RENEW, shard, token.epoch, now_mono, stamp)

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
            elif self._may_send(name, now_mono):
                yield self._shard_request(LeaseAction.RELEASE, shard, self._written_epochs[shard], now_mono, stamp)

    def _acquisitions(self, now_mono: float, stamp: str) -> Iterator[LeaseRequest]:
        counts = dict.fromkeys(self._members(now_mono), 0)
        free = []
        is_allowed = not self._is_another_shard_count_in_use(now_mono)
        for shard in range(self.shards):
            name = shard_lease_name(shard)
            observed = self._observed.get(name)
            if shard in self._tokens or name in self._in_flight or shard in self._releasing:
                counts[self.identity] += shard not in self._draining and shard not in self._releasing
            elif observed is None or not observed.is_valid(now_mono) or self._is_written_by_us(shard):
                free.append(shard)
                continue
            elif observed.lease.holder in counts and observed.lease.holder != self.identity:
                counts[observed.lease.holder] += 1
            self._free_since_mono.pop(shard, None)
        overdue = self._overdue(free, now_mono) if is_allowed else []
        if overdue:
            counts = self._without_unable(counts, now_mono)
        surplus = counts[self.identity] - targets(counts, self.shards)[self.identity]
        if surplus > 0:
            # The shards with this replica's lowest bids: those with its highest are the ones it would acquire again.
            lowest_bids = sorted(set(self._tokens) - self._draining, key=lambda shard: bid(self.identity, shard))
            self._draining.update(lowest_bids[:surplus])
            yield from self._releases(now_mono, stamp)
        elif is_allowed:
            free.sort(key=lambda shard: (shard in overdue, bid(self.identity, shard)), reverse=True)
            for shard in free[: max(-surplus, len(overdue))]:
                if self._may_send(shard_lease_name(shard), now_mono):
                    yield self._acquire(shard, now_mono, stamp)

    def _overdue(self, free: Collection[int], now_mono: float) -> list[int]:
        """The shards that have been free for the duration of a Lease."""
        for shard in free:
            observed = self._observed.get(shard_lease_name(shard))
            since_mono = now_mono
            if observed is not None:
                since_mono = observed.observed_mono if observed.lease.holder is None else observed.expires_mono
            self._free_since_mono.setdefault(shard, min(since_mono, now_mono))
        return [shard for shard in free if self._free_since_mono[shard] + self.times.duration_s <= now_mono]

    def _without_unable(self, counts: Mapping[str, int], now_mono: float) -> dict[str, int]:
        """``counts`` without the other members that have less than their share while shards are overdue."""
        shares = targets(counts, self.shards)
        unable = {each for each in counts if counts[each] < shares[each] and each != self.identity}
        for each in unable:
            leases = min(2 * self._unable[each].leases, MOST_UNABLE_LEASES) if each in self._unable else 2
            self._unable[each] = UnableMember(now_mono + leases * self.times.duration_s, leases)
        return {each: count for each, count in counts.items() if each not in unable}

    def _acquire(self, shard: int, now_mono: float, stamp: str) -> LeaseRequest:
        epoch = self._epochs.get(shard, -1) + 1
        if epoch > MAX_EPOCH:
            epoch = 0
        self._written_epochs[shard] = epoch
        return self._shard_request(LeaseAction.ACQUIRE, shard, epoch, now_mono, stamp)

    def _acquired(self, request: LeaseRequest, now_mono: float) -> None:
        until = request.sent_mono + self.times.renew_deadline_s
        if not self._is_written_by_us(request.shard) or until <= now_mono:
            return
        if self._is_standing_back or self._is_another_shard_count_in_use(now_mono):
            self._releasing.add(request.shard)
            self._not_before_mono[request.name] = now_mono
            return
        self._tokens[request.shard] = FencingToken(request.shard, request.epoch, until=until, clock=self._clock)
        self._on_change(request.shard, ShardTransition.TAKEN, request.epoch)

    def _removals(self, now_mono: float) -> Iterator[LeaseRequest]:
        """The holder of shard 0 deletes expired memberships, and Leases of shards that do not exist any more."""
        if self.token(0) is None:
            return
        for observed in list(self._observed.values()):
            lease = observed.lease
            is_needed = lease.shard is not None and lease.shard < self.shards
            is_obsolete = not (is_needed or observed.is_valid(now_mono) or observed.is_deleted)
            if is_obsolete and self._may_send(lease.name, now_mono):
                yield LeaseRequest(LeaseAction.REMOVE, lease.name, now_mono, lease=lease)

    def _shard_request(self, action: LeaseAction, shard: int, epoch: int, now_mono: float, stamp: str) -> LeaseRequest:
        holder = None if action == LeaseAction.RELEASE else self.identity
        body = self._body(
            shard_lease_name(shard), Role.SHARD, stamp, holder=holder, epoch=epoch, is_new=action == LeaseAction.ACQUIRE
        )
        return LeaseRequest(action, shard_lease_name(shard), now_mono, shard, epoch, body)

    def _body(
        self, name: str, role: Role, stamp: str, *, holder: str | None, epoch: int = 0, is_new: bool = False
    ) -> Object:
        """A whole Lease; fields that others have added to the stored one stay."""
        observed = self._observed.get(name)
        known: Object = {} if observed is None or observed.is_deleted else observed.object
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

    # --- what follows from the observed Leases ------------------------------------------------------------------

    def _end_token(self, shard: int, transition: ShardTransition) -> None:
        token = self._tokens.pop(shard)
        token.end()
        self._draining.discard(shard)
        self._on_change(shard, transition, token.epoch)

    def _members(self, now_mono: float) -> Collection[str]:
        """Every able replica with a valid membership and the same number of shards, and this one."""
        return {self.identity} | {
            observed.lease.holder
            for observed in self._observed.values()
            if observed.lease.role == Role.REPLICA
            and observed.lease.holder is not None
            and observed.lease.shards == self.shards
            and not self._is_unable(observed.lease.holder, now_mono)
            and observed.is_valid(now_mono)
        }

    def _is_unable(self, member: str, now_mono: float) -> bool:
        return member in self._unable and now_mono < self._unable[member].until_mono

    def _is_written_by_us(self, shard: int) -> bool:
        """Whether the Lease of a shard has the holder and epoch that only this replica can have written."""
        observed = self._observed.get(shard_lease_name(shard))
        return observed is not None and (observed.lease.holder, observed.lease.epoch) == (
            self.identity,
            self._written_epochs.get(shard),
        )

    def _is_another_shard_count_in_use(self, now_mono: float) -> bool:
        return any(
            observed.lease.role == Role.SHARD
            and observed.lease.shards != self.shards
            and observed.lease.holder != self.identity
            and observed.is_valid(now_mono)
            for observed in self._observed.values()
        )

    def _version(self, name: str) -> int | None:
        """The observed resourceVersion of a Lease; None if there is no such Lease."""
        observed = self._observed.get(name)
        return None if observed is None or observed.is_deleted else observed.lease.version
