"""Registration of one proxy: its HostnameClaim, its ledger entry and its record in an outside registry, in this order.

Every step may be repeated and interrupted anywhere:

* *To register*: acquire the claim on the hostname; write the ledger entry, with every name that it replaces listed as
  retiring; publish the hostname in the registry; remove the records of the retiring names; remove those names from the
  entry; release the claims on them; store that the registry has confirmed the entry.
* *To deregister*: remove every record that the entry names; delete the entry; release the claims.

So a hostname that is published is always in the ledger, and a hostname in the ledger is always claimed; both hold after
a crash at any point. Once a registry has confirmed an entry it is not called again, neither by later reconciles nor
after a restart, but only by resyncs, which look for drift. A registry that does not answer opens its circuit breaker:
until it closes, every call to that registry fails at once with the same message, whichever proxy it is for.

How a registry stores a record does not belong here, nor does the time of the next reconcile.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import anyio
import structlog

from operator_app.api.kinds import Key
from operator_app.api.records import RecordState
from operator_app.errors import (
    ConflictError,
    FencedError,
    OperatorError,
    TerminalError,
    TransientError,
    bounded_s,
)
from operator_app.registration.backoff import Backoff
from operator_app.registration.circuit import CircuitBreaker, CircuitOpenError
from operator_app.registration.claims import HOSTNAME_ORPHANED, HOSTNAME_RESTING, HOSTNAME_TAKEN, Claims
from operator_app.registration.identity import Installation
from operator_app.registration.ledger import IN_CLUSTER, Ledger, LedgerEntry, Name
from operator_app.registration.policy import HOSTNAME_NOT_ALLOWED, Policies
from operator_app.registration.registry import Comparison, Record, Registration, Registry
from operator_app.registration.withdrawal import Declared, Shown, State, shown
from operator_app.results import Outcome, Problem

log = structlog.get_logger(__name__)

T = TypeVar("T")

CALL_TIMEOUT_S: Final = 60.0
"""A call to a registry that takes longer has failed, whether or not the registry bounds its own calls."""

MIN_REQUEUE_S: Final = 1.0
"""Lower bound on any delay that a registry requests with a registration."""

ADDRESS_UNUSABLE: Final = "AddressUnusable"
"""The reason of a registry that can't publish an address; what it published of another one before is removed."""

TAKEN: Final = frozenset(
    {HOSTNAME_TAKEN, HOSTNAME_ORPHANED, HOSTNAME_RESTING, HOSTNAME_NOT_ALLOWED, "PreviousIncarnation"}
)
"""Reasons of a hostname that the proxy does not have. Any other problem with a claim does not tell who has it."""

ADDRESS_LEFT: Final = "AddressLeft"
"""The reason of an address that stays outside, because nothing says any more that the operator wrote it."""

TOO_MANY_ORPHANS: Final = "TooManyOrphans"
"""The reason of a deletion that would leave more records outside than one tenant may."""

TOO_MANY_ABANDONED: Final = "TooManyAbandoned"
"""The reason of a deletion that waits, because as many others of the tenant did not wait for their registry."""

LEFT_RETRY_S: Final = 300.0
"""An address that is left outside is looked at again after this time at the earliest."""

POLICY_RETRY_S: Final = 60.0
"""After this time a refused hostname is held against the policies again: a namespace's labels are not watched."""

NOT_TO_PUBLISH: Final = frozenset({"ZoneNotConfigured", "HostnameTooLong"})
"""Reasons of a registry that has no place for a hostname. What it never confirmed was never published there."""

RETIRING_LIMIT: Final = 32
"""With this many retiring names, their records are removed before another name is published: an entry can list 64."""


@dataclass(frozen=True, slots=True)
class Registries:
    """The outside registries by name, and the one for proxies that name none. ``in-cluster`` always exists.

    ``installation`` is the one whose records are written; it is ``None`` only where there is no outside registry.
    """

    outside: Mapping[str, Registry]
    default: str = IN_CLUSTER
    installation: Installation | None = None

    def unknown(self, name: str) -> Problem | None:
        """The problem with a registry's name that is not configured; ``None`` for a known one."""
        if name == IN_CLUSTER or name in self.outside:
            return None
        message = f"there is no registry {name}; there are: {', '.join(sorted({IN_CLUSTER, *self.outside}))}"
        return Problem("RegistryUnknown", message, needs_user_action=True, ends_with_event=True)


class Registrar:
    """Registers and deregisters proxies. One instance for the operator; one call at a time for each proxy.

    ``mono`` is a monotonic clock in seconds. For proxies of one tenant that are gone, at most ``kept_limit`` records
    are orphaned, and as many removals are pending; ``tenant_of`` gives the tenant of a namespace.
    """

    def __init__(  # noqa: PLR0913 - one for each step of a registration
        self,
        ledger: Ledger,
        claims: Claims,
        registries: Registries,
        backoff: Backoff,
        circuit: CircuitBreaker,
        *,
        policies: Policies | None = None,
        kept_limit: int = 100,
        tenant_of: Callable[[str], str] = lambda namespace: namespace,
        mono: Callable[[], float],
    ) -> None:
        self._policies = policies
        self._kept_limit = kept_limit
        self._tenant_of = tenant_of
        self._given_way: dict[str, tuple[str, str]] = {}
        self._left_at_mono: dict[str, float] = {}
        self._ledger = ledger
        self._claims = claims
        self._registries = registries
        self._backoff = backoff
        self._circuit = circuit
        self._mono = mono

    async def register(self, record: Record, registry: str | None = None, *, is_resync: bool = False) -> Registration:
        """Bring claim, ledger entry and ``registry`` (by default the operator's) to ``record``.

        With ``is_resync``, a confirmed record is compared with the registry, and written again where it differs. A
        failure of the registry is returned as a problem with the time of the next try. Raises the API server's errors.
        """
        name = registry or self._registries.default
        unknown = self._registries.unknown(name)
        if unknown is not None:
            withdrawn = await self.withdraw(record, name, State.REGISTRY_UNKNOWN)
            return withdrawn or Registration(Outcome.SKIPPED, unknown)
        try:
            claim = await self._acquire_claim(record)
        except TerminalError:
            # Such as a right that the operator lacks: it lasts, and the name that was given up must not wait for it.
            await self.withdraw(record, name, State.CLAIM_UNCERTAIN)
            raise
        if claim.problem is not None and claim.problem.reason not in TAKEN:
            return await self.withdraw(record, name, State.CLAIM_UNCERTAIN) or claim
        if claim.problem is not None and await self._has_outside(record, name):
            return await self.withdraw(record, name, State.CLAIM_LOST) or claim
        if claim.problem is not None:
            # The old hostname is released all the same: otherwise two proxies that swap names wait for ever.
            record = replace(record, hostname=None)
        await self._forget_removed(record)
        written = await self._ledger.write(record, name, removed=await self._remove_excess_retiring(record, name))
        if written.entry is None:
            return written.registration
        published = await self._sync_registry(written.entry, record, name, is_resync=is_resync)
        return _combined(claim, published, written.registration)

    async def withdraw(self, record: Record, registry: str | None, state: State) -> Registration | None:
        """Withdraw what must not be outside while the proxy can't be registered because of ``state``.

        That is decided by :func:`operator_app.registration.withdrawal.shown`. The claim on a hostname that is still
        declared stays. Sends nothing when there is nothing to withdraw. Returns what keeps a record from being removed,
        or ``None``. Raises the API server's errors. Of ``record``, the address is not used.
        """
        entry = self._ledger.known(record.proxy, record.uid)
        if entry is not None:
            declared = _declared(entry, record.hostname, registry or self._registries.default)
            if entry.hostname is not None and shown(state, declared) is Shown.WITHDRAWN:
                entry = await self._ledger.retire(entry)
            if entry.retiring:
                pause = self._backoff.pause(record, now_mono=self._mono())
                failed = pause or await self._removal_failure(entry, record)
                if failed is not None:
                    return failed
                await self._ledger.remove_retired(entry)
                self._backoff.forget(record.uid)
        await self._claims.release(record.proxy, record.uid, keep=record.hostname)
        return None

    async def observe(
        self, record: Record, registry: str | None, hindrance: Problem, *, is_resync: bool = False
    ) -> Problem | None:
        """``None`` if exactly ``record`` is registered and confirmed, else ``hindrance``. Writes nothing.

        ``hindrance`` is why the caller can't register now. With ``is_resync``, the registry is read as well.
        """
        name = registry or self._registries.default
        unknown = self._registries.unknown(name)
        if unknown is not None:
            return unknown
        if record.hostname is not None and not self._claims.is_owner(record.hostname, record.uid):
            return hindrance
        entry = await self._ledger.matching(record, name)
        if entry is None:
            return hindrance
        if entry.published is None:
            return None
        if not entry.is_confirmed or (is_resync and await self._has_drifted(entry.published, record)):
            return hindrance
        return None

    async def deregister(self, proxy: Key, uid: str) -> str | None:
        """Remove records, entry and claims of the proxy with this UID; when this returns, the removal is confirmed.

        Of an orphaned entry (``deletionPolicy: Orphan``) only the retiring names are removed. What an entry names that
        another cluster wrote is left to that cluster. Raises the registry's and the API server's errors; the records
        that could be removed before that are removed.

        Returns a sentence where an address stays outside, because the proof that the operator wrote it was removed: the
        entry is kept then, for audits, and looked at again by each resync.
        """
        self._backoff.forget(uid)
        self._given_way.pop(uid, None)
        entry = await self._ledger.find(uid)
        if entry is not None and self._ledger.is_of_another_cluster(entry):
            names = [each._asdict() for each in sorted(entry.names)]
            log.warning("records_left_to_another_cluster", proxy=str(proxy), uid=uid, names=names)
            await self._ledger.delete(entry)
            await self._claims.remove(proxy, uid)
        elif entry is not None and entry.state is RecordState.ORPHANED:
            await self._remove_records(entry, entry.retiring)
            if entry.published is not None:
                await self._ledger.remove_retired(entry)
                return None
            await self._ledger.delete(entry)
        elif entry is not None:
            left = await self._left_of(entry)
            if left is not None:
                self._left_at_mono[uid] = self._mono()
                await self._ledger.set_state(entry, RecordState.LEFT)
                await self._claims.release(proxy, uid)
                return left
            await self._ledger.delete(entry)
        self._left_at_mono.pop(uid, None)
        await self._claims.release(proxy, uid)
        return None

    async def _left_of(self, entry: LedgerEntry) -> str | None:
        """Remove every record that the entry names; a sentence where an address stays. Raises any other error."""
        try:
            await self._remove_records(entry, entry.names)
        except TerminalError as error:
            if error.reason != ADDRESS_LEFT:
                raise
            return error.message
        return None

    async def orphan(self, uid: str) -> None:
        """Mark the entry as orphaned: it, its record outside and its claim stay after the proxy is deleted.

        An entry that has no name outside is deleted with its claim instead. Raises ``TerminalError``
        (``TooManyOrphans``) where the proxy's tenant has as many as it may.
        """
        advice = "have some of their ProxyRegistrations deleted, or set spec.deletionPolicy to Delete"
        await self._refuse_too_many(uid, RecordState.ORPHANED, TOO_MANY_ORPHANS, advice)
        await self._keep_entry(uid, RecordState.ORPHANED)

    async def _refuse_too_many(self, uid: str, state: RecordState, reason: str, advice: str) -> None:
        """Raise ``TerminalError`` for this reason where the tenant has as many entries in this state as it may."""
        entry = await self._ledger.find(uid)
        if entry is None or not entry.names:
            return
        tenant = self._tenant_of(entry.proxy.namespace)
        kept = self._ledger.entries_in(state, lambda namespace: self._tenant_of(namespace) == tenant)
        if sum(each.uid != uid for each in kept) >= self._kept_limit:
            message = (
                f"the tenant {tenant} has {self._kept_limit} records outside of proxies that are gone, and no more are "
                f"kept (OPERATOR_APP_KEPT_PER_TENANT): {advice}"
            )
            raise TerminalError(reason, message)

    async def abandon(self, uid: str) -> None:
        """Mark the entry as abandoned: the proxy goes before its record is removed, and removal is retried later.

        Raises ``TerminalError`` (``TooManyAbandoned``) where as many removals are pending for the proxy's tenant as may
        be: somebody who makes and deletes proxies while a registry is down must not fill the ledger.
        """
        advice = "the deletion waits for the registry, as it would without OPERATOR_APP_ABANDON_AFTER_S"
        await self._refuse_too_many(uid, RecordState.ABANDONED, TOO_MANY_ABANDONED, advice)
        await self._keep_entry(uid, RecordState.ABANDONED)

    def orphaned_uids(self, proxy: Key, live_uid: str | None) -> tuple[str, ...]:
        """UIDs of previous incarnations of ``proxy`` of which a record or a claim has yet to be removed.

        ``live_uid`` is that of the present incarnation, if there is one. An orphaned entry counts only while it has
        retiring names, or where it was restored from another cluster, and one whose address is left outside only once
        in ``LEFT_RETRY_S`` seconds.
        """
        entries = self._ledger.entries_of(proxy)
        ours = [each for each in entries if not self._ledger.is_of_another_cluster(each)]
        orphaned = {each.uid for each in ours if each.state is RecordState.ORPHANED}
        now_mono = self._mono()
        orphaned |= {
            each.uid
            for each in ours
            if each.state is RecordState.LEFT and now_mono - self._left_at_mono.get(each.uid, -math.inf) < LEFT_RETRY_S
        }
        pending = {each.uid for each in entries if each.uid not in orphaned or each.retiring}
        return tuple(sorted((pending | (self._claims.owner_uids(proxy) - orphaned)) - {live_uid}))

    async def _keep_entry(self, uid: str, state: RecordState) -> None:
        self._backoff.forget(uid)
        entry = await self._ledger.find(uid)
        if entry is not None and not entry.names and state is RecordState.ORPHANED:
            # Nothing of it is outside, so it would keep a hostname for nobody.
            await self._ledger.delete(entry)
            await self._claims.release(entry.proxy, uid)
        elif entry is not None:
            await self._ledger.set_state(entry, state)

    async def _acquire_claim(self, record: Record) -> Registration:
        if record.hostname is None:
            return Registration(Outcome.UNCHANGED)
        if self._policies is not None and not self._has(record.hostname, record):
            refused = await self._policies.problem(record.hostname, record.proxy.namespace)
            if refused is not None:
                return Registration(Outcome.SKIPPED, refused, requeue_after_s=POLICY_RETRY_S)
        if self._is_held_by_another(record.hostname, record):
            # Its claim was lost, and this proxy's came first: whoever has the record outside keeps the name.
            await self._claims.remove(record.proxy, record.uid, record.hostname)
            message = f"another proxy has the hostname {record.hostname} outside: choose another one, or wait"
            taken = Problem(HOSTNAME_TAKEN, message, needs_user_action=True, ends_with_event=True)
            return Registration(Outcome.SKIPPED, taken)
        claim = await self._claims.acquire(record.hostname, record.proxy, record.uid)
        orphans = (each for each in self._ledger.entries_of(record.proxy) if each.state is RecordState.ORPHANED)
        orphan = next((each for each in orphans if each.hostname == record.hostname), None)
        if claim.problem is None or orphan is None:
            return claim
        message = (
            f"an earlier proxy of this name was deleted with deletionPolicy Orphan and keeps the hostname "
            f"{record.hostname}: choose another one, or have its ProxyRegistration proxy-{orphan.uid} deleted"
        )
        return replace(claim, problem=Problem(HOSTNAME_ORPHANED, message, needs_user_action=True, ends_with_event=True))

    def _has(self, hostname: str, record: Record) -> bool:
        """Whether the proxy has this hostname already: by its claim, or by its entry where the claim was lost."""
        entry = self._ledger.known(record.proxy, record.uid)
        return self._claims.is_owner(hostname, record.uid) or (entry is not None and entry.hostname == hostname)

    def _is_held_by_another(self, hostname: str, record: Record) -> bool:
        """Whether another existing proxy that declares ``hostname`` provably has its record outside.

        By its confirmed entry, or because the registry named it when this proxy tried.
        """
        entry = self._ledger.known(record.proxy, record.uid)
        if entry is not None and entry.hostname == entry.confirmed_hostname == hostname:
            return False
        given_way = self._given_way.get(record.uid)
        if given_way is not None and given_way[0] == hostname and self._ledger.is_declared_by(*given_way):
            return True
        self._given_way.pop(record.uid, None)
        return self._ledger.holder_of(hostname, except_uid=record.uid) is not None

    async def _has_outside(self, record: Record, registry: str) -> bool:
        """Whether the record of a hostname that was confirmed is outside, although another proxy has the claim now.

        True as well where the registry can't tell at the moment: nothing is withdrawn on a guess.
        """
        entry = self._ledger.known(record.proxy, record.uid)
        name = Name(registry, record.hostname or "")
        if entry is None or entry.published != name or not entry.may_be_published(name):
            return False
        record = replace(record, former=self._ledger.former(entry), is_held=True)
        try:
            comparison = await self._call(registry, lambda outside: outside.observe(record))
        except OperatorError:
            return True
        return comparison in (Comparison.MATCHING, Comparison.DIFFERENT, Comparison.NEWER)

    def next_rested_s(self, proxy: Key) -> float | None:
        """Seconds until a hostname that ``proxy`` has given back has rested, and its claim is to be deleted."""
        return self._claims.next_rested_s(proxy)

    async def _forget_removed(self, record: Record) -> None:
        """Forget the confirmation of a hostname that was removed since: publishing it again is a first claim."""
        entry = self._ledger.known(record.proxy, record.uid)
        confirmed = entry.confirmed_hostname if entry is not None else None
        if entry is not None and confirmed is not None and confirmed not in {each.hostname for each in entry.names}:
            await self._ledger.forget_confirmed(entry)

    async def _remove_excess_retiring(self, record: Record, registry: str) -> frozenset[Name]:
        """Remove the records of retiring names where there are many, and return those names.

        So an entry never exceeds its limit, however often a hostname changes while its registry is down.
        """
        wanted = Name(registry, record.hostname or "")
        entry = self._ledger.known(record.proxy, record.uid)
        retiring = frozenset() if entry is None else entry.retiring - {wanted}
        if entry is None or len(retiring) < RETIRING_LIMIT:
            return frozenset()
        await self._remove_records(entry, retiring)
        return retiring

    async def _sync_registry(
        self, entry: LedgerEntry, record: Record, registry: str, *, is_resync: bool
    ) -> Registration:
        """Bring the registry to the entry, and store what it has confirmed.

        A failure of the registry starts a pause of this record and is returned as a problem.
        """
        published = Registration(Outcome.UNCHANGED)
        is_finished = not entry.retiring and self._ledger.is_migrated(entry)
        if not is_finished or not self._is_up_to_date(entry) or is_resync:
            pause = self._backoff.pause(record, now_mono=self._mono())
            if pause is not None:
                return pause
            published, are_retired_removed = await self._publish_and_retire(entry, record, is_resync=is_resync)
            if published.problem is not None and entry.is_confirmed:
                await self._ledger.unconfirm(entry)
            if not are_retired_removed:
                return published
        if not is_finished:
            is_migrated = published.problem is None
            written = await self._ledger.write(record, registry, removed=entry.retiring, is_migrated=is_migrated)
            entry = written.entry or entry
        await self._claims.release(record.proxy, record.uid, keep=record.hostname)
        if published.problem is None and not self._is_up_to_date(entry):
            await self._ledger.confirm(entry)
        return published

    def _is_up_to_date(self, entry: LedgerEntry) -> bool:
        """Whether the entry publishes nothing, or the registry has confirmed exactly what it publishes."""
        return entry.published is None or entry.is_confirmed

    async def _publish_and_retire(
        self, entry: LedgerEntry, record: Record, *, is_resync: bool
    ) -> tuple[Registration, bool]:
        """Publish the hostname, then remove the records of retiring names.

        Returns the result for the hostname, and whether the records of all retiring names are removed.
        """
        published, refusal = Registration(Outcome.SKIPPED), None
        try:
            published = await self._register_outside(entry, record, is_resync=is_resync)
        except TerminalError as error:
            refusal = error
        except OperatorError as error:
            return self._failure(record, error), False
        # With an address that can't be published, what is outside leads to one that the proxy had before.
        is_stale = refusal is not None and refusal.reason == ADDRESS_UNUSABLE
        try:
            await self._remove_records(entry, entry.names if is_stale else entry.retiring)
        except OperatorError as error:
            return self._failure(record, refusal or error), False
        if refusal is not None:
            return self._failure(record, refusal), True
        if published.owner_uid is not None and record.hostname is not None:
            await self._give_way(record, record.hostname, published.owner_uid)
        if published.problem is not None:
            problem, retry_after_s = published.problem, published.requeue_after_s
            return self._backoff.failed(record, problem, now_mono=self._mono(), retry_after_s=retry_after_s), True
        self._backoff.forget(record.uid)
        return published, True

    async def _give_way(self, record: Record, hostname: str, owner_uid: str) -> None:
        """Free the claim for the proxy that the registry names, where claims and entries were lost and this one won."""
        if owner_uid != record.uid and self._ledger.is_declared_by(hostname, owner_uid):
            self._given_way[record.uid] = (hostname, owner_uid)
            log.warning("claim_given_to_owner_outside", hostname=hostname, uid=record.uid, owner_uid=owner_uid)
            await self._claims.remove(record.proxy, record.uid, hostname)

    async def _removal_failure(self, entry: LedgerEntry, record: Record) -> Registration | None:
        """Remove the records of retiring names; what keeps one of them, with the time of the next try."""
        try:
            await self._remove_records(entry, entry.retiring)
        except OperatorError as error:
            return self._failure(record, error)
        return None

    def _failure(self, record: Record, error: OperatorError) -> Registration:
        """The problem of a record because of ``error``, with the time of the next try, which starts a pause."""
        if isinstance(error, CircuitOpenError):
            problem = Problem("RegistryError", str(error))
            return self._backoff.defer(record, problem, now_mono=self._mono(), open_s=error.open_s)
        if isinstance(error, TransientError):
            problem, retry_after_s = Problem("RegistryError", str(error)), error.retry_after_s
            return self._backoff.failed(record, problem, now_mono=self._mono(), retry_after_s=retry_after_s)
        reason = error.reason if isinstance(error, TerminalError) else "RegistryError"
        problem = Problem(reason, str(error), needs_user_action=True)
        return self._backoff.failed(record, problem, now_mono=self._mono())

    async def _register_outside(self, entry: LedgerEntry, record: Record, *, is_resync: bool) -> Registration:
        name = entry.published
        is_held = name is not None and entry.may_be_published(name)
        record = replace(record, former=self._ledger.former(entry), is_held=is_held)
        if name is None or (entry.is_confirmed and not (is_resync and await self._has_drifted(name, record))):
            return Registration(Outcome.UNCHANGED)
        published = await self._call(name.registry, lambda outside: outside.register(record))
        if published.requeue_after_s is None:
            return published
        # A registry may be a plugin: a delay that it requests must be neither infinite nor zero.
        return replace(published, requeue_after_s=max(MIN_REQUEUE_S, bounded_s(published.requeue_after_s)))

    async def _has_drifted(self, name: Name, record: Record) -> bool:
        """Whether the registry has something else than it had confirmed; ``False`` if it can't be read."""
        try:
            comparison = await self._call(name.registry, lambda outside: outside.observe(record))
        except CircuitOpenError:
            return False  # logged when the circuit opened
        except OperatorError as error:
            log.warning("observation_failed", proxy=str(record.proxy), registry=name.registry, error=str(error))
            return False
        if comparison is not Comparison.MATCHING:
            log.warning("record_drifted", proxy=str(record.proxy), registry=name.registry, comparison=comparison.value)
        return comparison is not Comparison.MATCHING

    async def _remove_records(self, entry: LedgerEntry, names: Iterable[Name]) -> None:
        """Remove the records of all ``names`` that can be removed, then raise the first error, if there was one."""
        uid, former = entry.uid, self._ledger.former(entry)
        first_error: OperatorError | None = None
        for name in sorted(names):
            try:
                unknown = self._registries.unknown(name.registry)
                if unknown is not None:
                    message = f"{name.hostname} may still be published, and {unknown.message}"
                    raise TerminalError(unknown.reason, message)
                outcome = await self._deregister_outside(uid, name, former)
                log.info("record_removed", uid=uid, **name._asdict(), outcome=outcome.value)
                if outcome is Outcome.SKIPPED and await self._is_left(entry, name):
                    message = (
                        f"the address of {name.hostname} stays in the registry {name.registry}, because what says that "
                        "the operator wrote it was removed: remove the address by hand"
                    )
                    raise TerminalError(ADDRESS_LEFT, message)
            except OperatorError as error:
                if was_never_published(error, entry, name):
                    log.warning("hostname_not_ours_to_remove", uid=uid, **name._asdict(), error=str(error))
                elif isinstance(error, TerminalError) and error.reason in NOT_TO_PUBLISH:
                    message = f"{error.message}, and may still be published: have its zone configured again"
                    first_error = first_error or TerminalError(error.reason, message)
                else:
                    first_error = first_error or error
        if first_error is not None:
            raise first_error

    async def _is_left(self, entry: LedgerEntry, name: Name) -> bool:
        """Whether the registry still has the addresses that it confirmed, without a proof of who wrote them."""
        if not entry.may_be_published(name):
            return False
        record = entry.record_of(name)
        return await self._call(name.registry, lambda outside: outside.observe(record)) is Comparison.UNOWNED

    async def _deregister_outside(self, uid: str, name: Name, former: frozenset[Installation]) -> Outcome:
        return await self._call(name.registry, lambda outside: outside.deregister(uid, name.hostname, former=former))

    async def _call(self, registry: str, call: Callable[[Registry], Awaitable[T]]) -> T:
        """Call an outside registry through its circuit breaker, which a failure opens.

        Raises ``CircuitOpenError`` while it is open.
        """
        permit = self._circuit.acquire(registry, now_mono=self._mono())
        try:
            answer = await _with_timeout(CALL_TIMEOUT_S, call(self._registries.outside[registry]))
            self._circuit.succeeded(permit)
        except ConflictError as error:
            # The registry did answer, about one name. To callers a ConflictError means one with the API server.
            raise TransientError(error.message) from error
        except FencedError:
            raise
        except TransientError as error:
            open_s = self._circuit.failed(permit, str(error), now_mono=self._mono(), retry_after_s=error.retry_after_s)
            log.warning("registry_circuit_opened", registry=registry, open_s=round(open_s, 3), error=str(error))
            raise
        finally:
            self._circuit.release(permit)
        return answer


def was_never_published(error: OperatorError, entry: LedgerEntry, name: Name) -> bool:
    """Whether a record that can't be removed was never there: a tenant's typing error must not block a deletion."""
    return isinstance(error, TerminalError) and error.reason in NOT_TO_PUBLISH and not entry.may_be_published(name)


async def _with_timeout(timeout_s: float, answer: Awaitable[T]) -> T:
    try:
        with anyio.fail_after(timeout_s):
            return await answer
    except TimeoutError as error:
        raise TransientError(f"the registry did not answer within {timeout_s:g} s") from error


def _declared(entry: LedgerEntry, hostname: str | None, registry: str) -> Declared:
    """What the spec declares, compared with what the entry has as published."""
    if hostname is None:
        return Declared.REMOVED
    is_same = (entry.hostname, entry.object["spec"]["registry"]) == (hostname, registry)
    return Declared.UNCHANGED if is_same else Declared.CHANGED


def _combined(*steps: Registration) -> Registration:
    """The first outcome other than ``UNCHANGED``, the first problem and the shortest delay of all ``steps``."""
    delays_s = [each.requeue_after_s for each in steps if each.requeue_after_s is not None]
    problem = next((each.problem for each in steps if each.problem is not None), None)
    outcome = next((each.outcome for each in steps if each.outcome is not Outcome.UNCHANGED), Outcome.UNCHANGED)
    return Registration(outcome, problem, min(delays_s, default=None))
