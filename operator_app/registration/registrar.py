"""Registration as a round sees it: a claim on the hostname, an entry in the ledger, a record outside, in this order.

Every step may be repeated and interrupted anywhere:

* *To register*: claim the hostname; note it in the ledger, with whatever it replaces as retiring; publish it outside;
  take back what is retiring; strike that out; free the claims on it; remember that the outside has confirmed.
* *To deregister*: take back every name outside that the ledger knows; delete the entry; free the claims.

So a name that stands outside is always in the ledger, a name in the ledger is always claimed, and both hold behind
any crash. Once the outside has confirmed an entry it is not asked again, neither by later rounds nor after a restart,
but by sweeps, which look for drift. A registry that gives no answer rests, for all proxies: meanwhile every call to it
fails at once with the same sentence.

What one registry does with a record does not belong here, nor does the time of the next round.
"""

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
from operator_app.registration.backoff import Backoff, CircuitBreaker, CircuitOpenError
from operator_app.registration.claims import HOSTNAME_ORPHANED, Claims
from operator_app.registration.ledger import IN_CLUSTER, Ledger, LedgerEntry, Name
from operator_app.registration.registry import Comparison, Record, Registration, Registry
from operator_app.results import Outcome, Problem

log = structlog.get_logger(__name__)

T = TypeVar("T")

LONGEST_CALL_S: Final = 60.0
"""A call to a registry that takes longer has failed, whether or not the registry bounds its own calls."""

SOONEST_AGAIN_S: Final = 1.0
"""A registry is not asked again sooner than this because it wants to be."""

MANY_RETIRING: Final = 32
"""From this many names on, the old ones are taken back before another is published: an entry holds 64."""


@dataclass(frozen=True, slots=True)
class Registries:
    """The outside registries by name, and the one for proxies that name none. ``in-cluster`` is always there."""

    outside: Mapping[str, Registry]
    default: str = IN_CLUSTER

    def unknown(self, name: str) -> Problem | None:
        """What is wrong with the name of a registry, if anything."""
        if name == IN_CLUSTER or name in self.outside:
            return None
        message = f"there is no registry {name}; there are: {', '.join(sorted({IN_CLUSTER, *self.outside}))}"
        return Problem("RegistryUnknown", message, needs_user_action=True, ends_with_event=True)


class Registrar:
    """Keeps proxies known. One instance for the operator; one call at a time for each proxy.

    ``mono`` is a monotonic clock in seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        claims: Claims,
        registries: Registries,
        backoff: Backoff,
        circuit: CircuitBreaker,
        *,
        mono: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._claims = claims
        self._registries = registries
        self._backoff = backoff
        self._circuit = circuit
        self._mono = mono

    async def register(self, record: Record, registry: str | None = None, *, is_resync: bool = False) -> Registration:
        """Make ``record`` true in ``registry`` (by default the operator's). With ``is_resync``, look for drift outside.

        A failure of an outside registry is in the answer, with the time to come back. Raises the API server's errors.
        """
        name = registry or self._registries.default
        unknown = self._registries.unknown(name)
        if unknown is not None:
            return Registration(Outcome.SKIPPED, unknown)
        claim = await self._claim(record)
        if claim.problem is not None:
            # A name that is somebody else's is no reason to keep one that is declared no longer.
            record = replace(record, hostname=None)
        noted = await self._ledger.note(record, name, gone=await self._taken_back_early(record, name))
        if noted.entry is None:
            return noted.registration
        published = await self._publish(noted.entry, record, name, is_resync=is_resync)
        return _first_problem(claim, published, noted.registration)

    async def observe(
        self, record: Record, registry: str | None, hindrance: Problem, *, is_resync: bool = False
    ) -> Problem | None:
        """``None`` if ``record`` is registered exactly so, else the ``hindrance`` to make it so. Writes nothing."""
        name = registry or self._registries.default
        unknown = self._registries.unknown(name)
        if unknown is not None:
            return unknown
        if record.hostname is not None and not self._claims.holds(record.hostname, record.uid):
            return hindrance
        entry = await self._ledger.holding(record, name)
        if entry is None:
            return hindrance
        if entry.published is None:
            return None
        if not entry.is_confirmed or (is_resync and await self._has_drifted(entry.published, record)):
            return hindrance
        return None

    async def deregister(self, proxy: Key, uid: str) -> None:
        """Take back everything that this life of ``proxy`` has made known; when this returns, that is confirmed.

        Of an orphaned record only what it had retired. Raises the registry's and the API server's errors; what could
        be done before is done.
        """
        self._backoff.forget(uid)
        entry = await self._ledger.find(uid)
        if entry is not None and entry.state is RecordState.ORPHANED:
            await self._take_back(uid, entry.retiring)
            await self._ledger.remove_retired(entry)
            return
        if entry is not None:
            await self._take_back(uid, entry.names)
            await self._ledger.forget(entry)
        await self._claims.release(proxy, uid)

    async def orphan(self, uid: str) -> None:
        """Leave record and claim where they are, for good, although the proxy goes."""
        await self._outlive(uid, RecordState.ORPHANED)

    async def abandon(self, uid: str) -> None:
        """Let the proxy go although its record could not be removed: the entry is kept, and worked off later."""
        await self._outlive(uid, RecordState.ABANDONED)

    def orphaned_uids(self, proxy: Key, living: str | None) -> tuple[str, ...]:
        """UIDs under the name of ``proxy``, other than ``living``, of which something is left to be removed."""
        entries = self._ledger.of(proxy)
        kept = {each.uid for each in entries if each.state is RecordState.ORPHANED}
        unsettled = {each.uid for each in entries if each.uid not in kept or each.retiring}
        return tuple(sorted((unsettled | (self._claims.holders(proxy) - kept)) - {living}))

    async def _outlive(self, uid: str, state: RecordState) -> None:
        self._backoff.forget(uid)
        entry = await self._ledger.find(uid)
        if entry is not None:
            await self._ledger.mark(entry, state)

    async def _claim(self, record: Record) -> Registration:
        if record.hostname is None:
            return Registration(Outcome.UNCHANGED)
        claim = await self._claims.acquire(record.hostname, record.proxy, record.uid)
        orphans = (each for each in self._ledger.of(record.proxy) if each.state is RecordState.ORPHANED)
        orphan = next((each for each in orphans if each.hostname == record.hostname), None)
        if claim.problem is None or orphan is None:
            return claim
        message = (
            f"an earlier proxy of this name was deleted with deletionPolicy Orphan and keeps the hostname "
            f"{record.hostname}: choose another one, or have its ProxyRegistration proxy-{orphan.uid} deleted"
        )
        return replace(claim, problem=Problem(HOSTNAME_ORPHANED, message, needs_user_action=True, ends_with_event=True))

    async def _taken_back_early(self, record: Record, registry: str) -> frozenset[Name]:
        """So that an entry never overflows, however often a hostname changes while its registry is down."""
        wanted = Name(registry, record.hostname or "")
        entry = next((each for each in self._ledger.of(record.proxy) if each.uid == record.uid), None)
        left = frozenset() if entry is None else entry.retiring - {wanted}
        if len(left) < MANY_RETIRING:
            return frozenset()
        await self._take_back(record.uid, left)
        return left

    async def _publish(self, entry: LedgerEntry, record: Record, registry: str, *, is_resync: bool) -> Registration:
        """Bring the outside to the entry. Its own failures become an answer, and a pause."""
        published = Registration(Outcome.UNCHANGED)
        if entry.retiring or not self._is_settled(entry) or is_resync:
            pause = self._backoff.pause(record, now_mono=self._mono())
            if pause is not None:
                return pause
            published, is_taken_back = await self._bring_outside(entry, record, is_resync=is_resync)
            if published.problem is not None and entry.is_confirmed:
                await self._ledger.doubt(entry)
            if not is_taken_back:
                return published
        if entry.retiring:
            entry = (await self._ledger.note(record, registry, gone=entry.retiring)).entry or entry
        await self._claims.release(record.proxy, record.uid, keep=record.hostname)
        if published.problem is None and not self._is_settled(entry):
            await self._ledger.confirm(entry)
        return published

    def _is_settled(self, entry: LedgerEntry) -> bool:
        """Whether nothing is to stand outside, or just that is confirmed."""
        return entry.published is None or entry.is_confirmed

    async def _bring_outside(self, entry: LedgerEntry, record: Record, *, is_resync: bool) -> tuple[Registration, bool]:
        """Publish, then take back what is retiring. Returns what became of the name, and whether the rest is gone."""
        try:
            published = await self._register_outside(entry, record, is_resync=is_resync)
            await self._take_back(record.uid, entry.retiring)
        except CircuitOpenError as error:
            problem = Problem("RegistryError", str(error))
            return self._backoff.defer(record, problem, now_mono=self._mono(), open_s=error.open_s), False
        except TransientError as error:
            problem = Problem("RegistryError", str(error))
            return self._backoff.failed(record, problem, now_mono=self._mono(), asked_s=error.retry_after_s), False
        except OperatorError as error:
            reason = error.reason if isinstance(error, TerminalError) else "RegistryError"
            problem = Problem(reason, str(error), needs_user_action=True)
            return self._backoff.failed(record, problem, now_mono=self._mono()), False
        if published.problem is not None:
            asked_s = published.requeue_after_s
            return self._backoff.failed(record, published.problem, now_mono=self._mono(), asked_s=asked_s), True
        self._backoff.forget(record.uid)
        return published, True

    async def _register_outside(self, entry: LedgerEntry, record: Record, *, is_resync: bool) -> Registration:
        name = entry.published
        if name is None or (entry.is_confirmed and not (is_resync and await self._has_drifted(name, record))):
            return Registration(Outcome.UNCHANGED)
        published = await self._ask(name.registry, lambda outside: outside.register(record))
        if published.requeue_after_s is None:
            return published
        # A registry is often somebody else's code: what it wants must be neither for ever nor at once and again.
        return replace(published, requeue_after_s=max(SOONEST_AGAIN_S, bounded_s(published.requeue_after_s)))

    async def _has_drifted(self, name: Name, record: Record) -> bool:
        """Whether the outside shows something else than it had confirmed. A look that fails is no news."""
        try:
            comparison = await self._ask(name.registry, lambda outside: outside.observe(record))
        except CircuitOpenError:
            return False  # said once, when the rest began
        except OperatorError as error:
            log.warning("observation_failed", proxy=str(record.proxy), registry=name.registry, error=str(error))
            return False
        if comparison is not Comparison.MATCHING:
            log.warning("record_drifted", proxy=str(record.proxy), registry=name.registry, comparison=comparison.value)
        return comparison is not Comparison.MATCHING

    async def _take_back(self, uid: str, names: Iterable[Name]) -> None:
        """Remove every name that can be removed; raise for the first that can't."""
        trouble: OperatorError | None = None
        for name in sorted(names):
            try:
                unknown = self._registries.unknown(name.registry)
                if unknown is not None:
                    sentence = f"{name.hostname} may still be published, and {unknown.message}"
                    raise TerminalError(unknown.reason, sentence)
                outcome = await self._deregister_outside(uid, name)
                log.info("record_removed", uid=uid, **name._asdict(), outcome=outcome.value)
            except OperatorError as error:
                trouble = trouble or error
        if trouble is not None:
            raise trouble

    async def _deregister_outside(self, uid: str, name: Name) -> Outcome:
        return await self._ask(name.registry, lambda outside: outside.deregister(uid, name.hostname))

    async def _ask(self, registry: str, call: Callable[[Registry], Awaitable[T]]) -> T:
        """Call an outside registry through its circuit breaker, which a failure opens.

        Raises ``CircuitOpenError`` while it is open.
        """
        turn = self._circuit.acquire(registry, now_mono=self._mono())
        try:
            answer = await _within(LONGEST_CALL_S, call(self._registries.outside[registry]))
            self._circuit.succeeded(turn)
        except ConflictError as error:
            # It answered, about one name. A conflict with the API server is something else to those who catch this.
            raise TransientError(error.message) from error
        except FencedError:
            raise
        except TransientError as error:
            asked_s = error.retry_after_s
            open_s = self._circuit.failed(turn, str(error), now_mono=self._mono(), asked_s=asked_s)
            log.warning("registry_circuit_opened", registry=registry, open_s=round(open_s, 3), error=str(error))
            raise
        finally:
            self._circuit.release(turn)
        return answer


async def _within(seconds: float, answer: Awaitable[T]) -> T:
    try:
        with anyio.fail_after(seconds):
            return await answer
    except TimeoutError as error:
        raise TransientError(f"the registry did not answer within {seconds:g} s") from error


def _first_problem(*steps: Registration) -> Registration:
    """The first problem of several steps, the earliest wish to come back, and else the first change that was one."""
    wishes = [each.requeue_after_s for each in steps if each.requeue_after_s is not None]
    problem = next((each.problem for each in steps if each.problem is not None), None)
    outcome = next((each.outcome for each in steps if each.outcome is not Outcome.UNCHANGED), Outcome.UNCHANGED)
    return Registration(outcome, problem, min(wishes, default=None))
