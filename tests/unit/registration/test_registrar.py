"""Registration while a registry fails: one timeout for each open period of its circuit, whichever proxies need it."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import anyio
import pytest
from anyio.abc import TaskGroup

from operator_app.api.kinds import HOSTNAME_CLAIM, PROXY_REGISTRATION, Key, Object
from operator_app.api.records import RecordState
from operator_app.errors import ConflictError, FencedError, OperatorError, TerminalError, ThrottledError, TransientError
from operator_app.registration import audit, registrar
from operator_app.registration.audit import outside_entries
from operator_app.registration.backoff import Backoff
from operator_app.registration.circuit import CircuitBreaker
from operator_app.registration.claims import HOSTNAME_TAKEN, Claims
from operator_app.registration.identity import Installation
from operator_app.registration.ledger import Ledger, Name
from operator_app.registration.registrar import RETIRING_LIMIT, Registrar, Registries
from operator_app.registration.registry import Comparison, OutsideRecord, Record, Registration
from operator_app.results import Outcome, Problem
from tests.unit.scripted_api import CONFLICT, Clock, Components, ScriptedApi, components, created, ok
from tests.unit.ssa.field_sets import stored

pytestmark = pytest.mark.anyio

DOWN: Final = TransientError("DNS did not answer within 5 s")
TIMEOUT_S: Final = 5.0
PAUSED: Final = Problem("Paused", "it waits")
NAMESPACE: Final = "edge-system"
NOW: Final = datetime(2026, 7, 1, 12, tzinfo=UTC)


class Dns:
    """A registry in virtual time: each call that fails takes as long as the timeout."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.error: OperatorError | None = None
        self.calls = 0
        self.answering: anyio.Event | None = None
        self.requeue_after_s: float | None = None
        self.former: frozenset[Installation] = frozenset()

    async def observe(self, record: Record) -> Comparison:
        """Every record matches."""
        await self._answer(record.uid)
        return Comparison.MATCHING

    async def register(self, record: Record) -> Registration:
        """Every record is created."""
        await self._answer(record.uid)
        return Registration(Outcome.CREATED, requeue_after_s=self.requeue_after_s)

    async def deregister(self, uid: str, hostname: str, *, former: frozenset[Installation] = frozenset()) -> Outcome:
        """Every record is removed."""
        self.former = former
        await self._answer(uid + hostname)
        return Outcome.DELETED

    async def entries(self) -> AsyncIterator[OutsideRecord]:
        """No records."""
        none: tuple[OutsideRecord, ...] = ()
        for each in none:
            yield each

    async def _answer(self, _: str) -> None:
        self.calls += 1
        if self.answering is not None:
            await self.answering.wait()
        if self.error is not None:
            self.clock.mono += TIMEOUT_S
            raise self.error


class World:
    """A registrar whose store has proxies, each with a hostname that is confirmed or not."""

    def __init__(self, own: Components) -> None:
        self.clock = own.clock
        self.store = own.store
        self.dns = Dns(own.clock)
        self.backoff = Backoff(base_s=0.5, cap_s=60, rand=lambda: 1.0)
        self.claims = Claims(
            own.applier, own.cluster, own.store, namespace=NAMESPACE, sink=own.store.apply_delta, now=lambda: NOW
        )
        self.ledger = Ledger(
            own.applier, own.cluster, own.store, namespace=NAMESPACE, on_write=own.on_write, sink=own.store.apply_delta
        )
        self.registrar = Registrar(
            self.ledger,
            self.claims,
            Registries({"dns": self.dns}, "dns"),
            self.backoff,
            CircuitBreaker(rand=lambda: 1.0),
            mono=own.clock,
        )

    def proxy(self, name: str, *, is_confirmed: bool) -> Record:
        """Store claim and entry of a proxy; its record."""
        record = Record(f"uid-{name}", 1, Key("team-a", name), f"{name}.example.com", "192.0.2.1", ())
        claim = self.claims._desired(f"{name}.example.com", record.proxy, record.uid)
        self.store.learn(HOSTNAME_CLAIM, stored(claim, uid=f"claim-{name}"))
        self.store.learn(PROXY_REGISTRATION, self.entry(record, is_confirmed=is_confirmed))
        return record

    def entry(self, record: Record, *, is_confirmed: bool) -> Object:
        """The stored entry of a proxy."""
        status = {"status": {"confirmedGeneration": int(is_confirmed)}}
        return stored(self.ledger._desired(record, "dns", frozenset()), uid=f"entry-{record.uid}") | status

    async def observation(self, record: Record) -> Problem | None:
        """Observe a paused proxy in a resync; its problem."""
        return await self.registrar.observe(record, None, PAUSED, is_resync=True)

    async def start_probe(self, tasks: TaskGroup) -> anyio.Event:
        """Open the circuit, wait its time and start a probe, which is answered when the returned event is set."""
        record = self.proxy("one", is_confirmed=True)
        self.dns.error = DOWN
        await self.removal(record)
        self.clock.mono += 0.5
        self.dns.answering = anyio.Event()
        tasks.start_soon(self.removal, record)
        await anyio.wait_all_tasks_blocked()
        return self.dns.answering

    async def removal(self, record: Record) -> str:
        """Try a removal that fails; its error message."""
        with pytest.raises(TransientError) as failed:
            await self.registrar.deregister(record.proxy, record.uid)
        return str(failed.value)


@asynccontextmanager
async def a_world(folder: Path, api: ScriptedApi | None = None) -> AsyncGenerator[World]:
    """A world whose API server fails the test on any request that is not in the script."""
    async with components(api or ScriptedApi(), folder) as own:
        yield World(own)


async def test_a_resync_against_a_registry_that_hangs_costs_one_timeout(tmp_path: Path) -> None:
    """A hundred confirmed hostnames: one read hangs, the others fail at once, and no proxy gets a problem."""
    async with a_world(tmp_path) as world:
        records = [world.proxy(f"p{number}", is_confirmed=True) for number in range(100)]
        world.dns.error = DOWN
        begun = world.clock()
        answers = [await world.registrar.register(each, is_resync=True) for each in records[:50]]
        assert [await world.observation(each) for each in records[50:]] == [None] * 50
        assert {(each.outcome, each.problem) for each in answers} == {(Outcome.UNCHANGED, None)}
        assert (world.dns.calls, world.clock() - begun) == (1, TIMEOUT_S)


async def test_deletions_against_a_registry_that_hangs_cost_one_timeout_for_each_open_period(tmp_path: Path) -> None:
    """Each fails with the registry's own message; then one of them probes, and the next open period is longer."""
    async with a_world(tmp_path) as world:
        records = [world.proxy(f"p{number}", is_confirmed=True) for number in range(20)]
        world.dns.error = DOWN
        assert {await world.removal(each) for each in records} == {DOWN.message}
        assert world.dns.calls == 1
        world.clock.mono += 0.5
        assert {await world.removal(each) for each in records} == {DOWN.message}
        assert world.dns.calls == 2
        world.clock.mono += 0.5
        await world.removal(records[0])
        assert world.dns.calls == 2


async def test_a_record_that_was_not_tried_waits_for_the_next_probe_and_then_backs_off(tmp_path: Path) -> None:
    """A new record, such as an edit, waits for the open period only; in a longer outage it is tried ever less often."""
    async with a_world(tmp_path) as world:
        one, two = (world.proxy(name, is_confirmed=False) for name in ("one", "two"))
        world.dns.error = DOWN
        failed = await world.registrar.register(one)
        assert (failed.problem, failed.requeue_after_s) == (Problem("RegistryError", DOWN.message), 0.5)
        waits: list[float] = []
        for _ in range(9):
            deferred = await world.registrar.register(two)
            assert deferred.problem == failed.problem
            assert deferred.requeue_after_s is not None
            waits.append(deferred.requeue_after_s)
            world.clock.mono += deferred.requeue_after_s
            with pytest.raises(TransientError):
                await world.registrar.deregister(one.proxy, one.uid)
        assert waits[0] == failed.requeue_after_s
        assert waits[-1] == 60
        assert waits == sorted(waits)


async def test_the_first_success_closes_the_circuit(tmp_path: Path) -> None:
    """After an outage every proxy is registered at once, and the next failure counts as a first one."""
    api = ScriptedApi()
    async with a_world(tmp_path, api) as world:
        one, two = (world.proxy(name, is_confirmed=False) for name in ("one", "two"))
        world.dns.error = DOWN
        await world.registrar.register(one)
        world.dns.error = None
        world.clock.mono += 0.5
        for each in (two, one):
            entry = world.entry(each, is_confirmed=True)
            entry["metadata"]["resourceVersion"] = "2"
            api.add(("apply ProxyRegistration/status", ok(entry)))
        assert await world.registrar.register(two) == Registration(Outcome.CREATED)
        assert await world.registrar.register(one) == Registration(Outcome.CREATED)
        world.dns.error = DOWN
        await world.removal(one)
        world.clock.mono += 0.5
        await world.removal(one)
        assert world.dns.calls == 5, "the open period was that of a first failure"


async def test_other_calls_do_not_wait_for_a_probe(tmp_path: Path) -> None:
    """While a probe is in flight all other calls fail at once: none joins it, and none hangs with it."""
    async with a_world(tmp_path) as world:
        two = world.proxy("two", is_confirmed=True)
        async with anyio.create_task_group() as tasks:
            answering = await world.start_probe(tasks)
            assert await world.removal(two) == DOWN.message
            assert world.dns.calls == 2
            answering.set()


async def test_a_registry_that_never_answers_fails_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reconcile waits for ever, whether or not the registry bounds its own calls."""
    monkeypatch.setattr(registrar, "CALL_TIMEOUT_S", 0.01)
    async with a_world(tmp_path) as world:
        one, two = (world.proxy(name, is_confirmed=True) for name in ("one", "two"))
        world.dns.answering = anyio.Event()
        assert await world.removal(one) == "the registry did not answer within 0.01 s"
        await world.removal(two)
        assert world.dns.calls == 1


async def test_a_list_that_stops_is_an_error_of_that_registry_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not end the resyncs; the lists of other registries are read all the same."""

    class Stuck(Dns):
        """Lists one record and then hangs."""

        async def entries(self) -> AsyncIterator[OutsideRecord]:
            yield OutsideRecord("uid", "one.example.com", Key("team-a", "one"))
            await anyio.sleep_forever()

    monkeypatch.setattr(audit, "CALL_TIMEOUT_S", 0.01)
    read, failed = await outside_entries(Registries({"stuck": Stuck(Clock()), "dns": Dns(Clock())}))
    assert read == {"dns": ()}
    assert {name: str(error) for name, error in failed.items()} == {"stuck": "its list did not go on for 0.01 s"}


@pytest.mark.parametrize(
    ("requested_s", "expected_s"), [(-1, 1), (0, 1), (7, 7), (float("inf"), 3600), (float("nan"), 3600)]
)
async def test_a_delay_that_a_registry_requests_is_bounded(
    tmp_path: Path, requested_s: float, expected_s: float
) -> None:
    """A registry may be a plugin: the delay is at least a second and at most an hour, whatever it requests."""
    api = ScriptedApi()
    async with a_world(tmp_path, api) as world:
        record = world.proxy("one", is_confirmed=False)
        api.add(("apply ProxyRegistration/status", ok(world.entry(record, is_confirmed=True))))
        world.dns.requeue_after_s = requested_s
        assert await world.registrar.register(record) == Registration(Outcome.CREATED, requeue_after_s=expected_s)


async def test_a_cancelled_probe_does_not_keep_the_circuit_open(tmp_path: Path) -> None:
    """A cancelled reconcile releases its permit, so the next call probes."""
    async with a_world(tmp_path) as world:
        two = world.proxy("two", is_confirmed=True)
        async with anyio.create_task_group() as tasks:
            await world.start_probe(tasks)
            tasks.cancel_scope.cancel()
        world.dns.answering = None
        await world.removal(two)
        assert world.dns.calls == 3


@pytest.mark.parametrize(
    "error",
    [
        TerminalError("ZoneNotConfigured", "in no zone"),
        ConflictError("somebody else changed it at the same time"),
        FencedError("the shard has gone"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_about_one_name_does_not_open_the_circuit(tmp_path: Path, error: OperatorError) -> None:
    """An invalid name, a concurrent change or our own expired token neither opens the circuit nor closes it."""
    async with a_world(tmp_path) as world:
        bad, good = (world.proxy(name, is_confirmed=True) for name in ("bad", "good"))
        world.dns.error = error
        for _ in range(2):
            with pytest.raises(OperatorError, match=error.message) as failed:
                await world.registrar.deregister(bad.proxy, bad.uid)
            assert not isinstance(failed.value, ConflictError), "that would be the API server's"
        assert world.dns.calls == 2
        world.dns.error = DOWN
        await world.removal(good)
        world.clock.mono += 0.5
        world.dns.error = error
        assert await world.observation(bad) is None
        world.dns.error = DOWN
        await world.removal(good)
        await world.removal(good)
        assert world.dns.calls == 5, "the next one probed at once, and opened the circuit for longer"


async def test_a_circuit_is_open_for_as_long_as_the_registry_requests(tmp_path: Path) -> None:
    """``Retry-After`` in the answer for one proxy applies to all of them."""
    async with a_world(tmp_path) as world:
        one, two = (world.proxy(name, is_confirmed=True) for name in ("one", "two"))
        world.dns.error = ThrottledError("enough", retry_after_s=30)
        await world.removal(one)
        world.clock.mono += 29
        assert await world.removal(two) == "enough"
        assert world.dns.calls == 1
        world.clock.mono += 1
        await world.removal(two)
        assert world.dns.calls == 2


async def test_a_removal_refused_by_an_open_circuit_can_be_abandoned(tmp_path: Path) -> None:
    """Abandoning a removal needs no call to the registry."""
    api = ScriptedApi()
    async with a_world(tmp_path, api) as world:
        one = world.proxy("one", is_confirmed=True)
        world.dns.error = DOWN
        await world.removal(one)
        await world.removal(one)
        marked = world.entry(one, is_confirmed=True)
        marked["metadata"]["resourceVersion"] = "2"
        marked["spec"]["state"] = RecordState.ABANDONED.value
        api.add(("apply ProxyRegistration", ok(marked)))
        await world.registrar.abandon(one.uid)
        assert world.registrar.orphaned_uids(one.proxy, None) == (one.uid,)


async def test_a_confirmation_is_of_exactly_the_version_that_was_read(tmp_path: Path) -> None:
    """Another writer's newer entry is never called confirmed by an older reconcile."""
    api = ScriptedApi()
    async with a_world(tmp_path, api) as world:
        one = world.proxy("one", is_confirmed=False)
        api.add(("apply ProxyRegistration/status", CONFLICT))
        with pytest.raises(ConflictError):
            await world.registrar.register(one)
    metadata = api.body("apply ProxyRegistration/status")["metadata"]
    assert metadata["resourceVersion"] == "1"
    assert api.body("apply ProxyRegistration/status")["status"] == {
        "confirmedGeneration": 1,
        "confirmedHostname": "one.example.com",
    }


async def test_a_hostname_that_another_proxy_has_is_not_published(tmp_path: Path) -> None:
    """Whether the store shows the claim or the API server does: no call of the registry, and the entry has no name."""
    api = ScriptedApi()
    async with a_world(tmp_path, api) as world:
        holder = world.proxy("holder", is_confirmed=True)
        late = Record("uid-late", 1, Key("team-b", "late"), holder.hostname, "192.0.2.2", ())
        api.add(("apply ProxyRegistration", created()))
        result = await world.registrar.register(late)
        assert result.problem is not None
        assert result.problem.reason == HOSTNAME_TAKEN
        assert "hostname" not in api.body("apply ProxyRegistration")["spec"]
        assert world.dns.calls == 0
        # The same where only the API server knows the claim.
        unknown = Record("uid-other", 1, Key("team-c", "other"), "unknown.example.com", "192.0.2.3", ())
        theirs = stored(world.claims._desired("unknown.example.com", late.proxy, late.uid), uid="claim-of-late")
        api.add(("apply HostnameClaim", CONFLICT), ("get HostnameClaim", ok(theirs)))
        api.add(("apply ProxyRegistration", created()))
        result = await world.registrar.register(unknown)
        assert result.problem is not None
        assert result.problem.reason == HOSTNAME_TAKEN
        assert world.dns.calls == 0


@pytest.mark.parametrize(("count", "calls"), [(RETIRING_LIMIT - 1, 0), (RETIRING_LIMIT, RETIRING_LIMIT)])
async def test_many_retiring_names_are_removed_before_another_one_is_published(
    tmp_path: Path, count: int, calls: int
) -> None:
    """An entry can list 64 names: with a registry that is down, 32 are the most that may be added to."""
    api = ScriptedApi()
    async with a_world(tmp_path, api) as world:
        record = world.proxy("one", is_confirmed=True)
        known = world.store.get(PROXY_REGISTRATION, Key(NAMESPACE, f"proxy-{record.uid}"))
        assert known is not None
        retiring = [{"registry": "dns", "hostname": f"h{number}.example.com"} for number in range(count)]
        known["metadata"]["resourceVersion"] = "2"
        known["spec"]["retiring"] = retiring
        world.store.learn(PROXY_REGISTRATION, known)
        moved = replace(record, generation=2)
        removed = await world.registrar._remove_excess_retiring(moved, "dns")
        assert len(removed) == calls
        assert world.dns.calls == calls
        assert removed <= {Name("dns", each["hostname"]) for each in retiring}
