"""A registry that fails rests as a whole: one timeout for each rest, whoever needs it, and no longer than it has to."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
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
from operator_app.registration.backoff import Backoff, CircuitBreaker, CircuitOpenError, Permit
from operator_app.registration.claims import Claims
from operator_app.registration.ledger import Ledger
from operator_app.registration.registrar import Registrar, Registries
from operator_app.registration.registry import Comparison, OutsideRecord, Record, Registration
from operator_app.results import Outcome, Problem
from tests.unit.scripted_api import Clock, Rooms, ScriptedApi, ok, rooms
from tests.unit.ssa.field_sets import stored

pytestmark = pytest.mark.anyio

DOWN: Final = TransientError("DNS did not answer within 5 s")
TIMEOUT_S: Final = 5.0
BUSY: Final = Problem("Paused", "it waits")
NAMESPACE: Final = "edge-system"


# --- the rest ------------------------------------------------------------------------------------------------------


def a_respite() -> CircuitBreaker:
    """Rests of 1, 2, 4, then 5 seconds, where chance gives the longest."""
    return CircuitBreaker(base_s=1, cap_s=5, rand=lambda: 1.0)


def fail(circuit: CircuitBreaker, turn: Permit, *, now_mono: float, asked_s: float | None = None) -> float:
    """A call that fails, and the rest that follows."""
    open_s = circuit.failed(turn, str(DOWN), now_mono=now_mono, asked_s=asked_s)
    circuit.release(turn)
    return open_s


def test_rests_double_up_to_the_cap() -> None:
    """Each failure of a call that was let through doubles the rest."""
    circuit, now_mono = a_respite(), 0.0
    rests = []
    for _ in range(5):
        rests.append(fail(circuit, circuit.acquire("dns", now_mono=now_mono), now_mono=now_mono))
        now_mono += rests[-1]
    assert rests == [1, 2, 4, 5, 5]


def test_half_of_a_rest_is_chance() -> None:
    """Replicas that saw the same failure do not come back together."""
    circuit = CircuitBreaker(base_s=2, cap_s=5, rand=lambda: 0.0)
    assert fail(circuit, circuit.acquire("dns", now_mono=0), now_mono=0) == 1


def test_in_a_rest_the_sentence_stands_and_another_registry_is_asked() -> None:
    """Every call fails with what the one call said, and is told how long."""
    circuit = a_respite()
    fail(circuit, circuit.acquire("dns", now_mono=0), now_mono=0)
    with pytest.raises(CircuitOpenError, match=DOWN.message) as refused:
        circuit.acquire("dns", now_mono=0.25)
    assert refused.value.open_s == 1 - 0.25
    circuit.acquire("other", now_mono=0.25)


def test_behind_a_rest_one_call_at_a_time_is_let_through() -> None:
    """Whoever comes first tries; when that has decided nothing, the next one does; a success lets everybody through."""
    circuit = a_respite()
    fail(circuit, circuit.acquire("dns", now_mono=0), now_mono=0)
    first = circuit.acquire("dns", now_mono=1)
    with pytest.raises(CircuitOpenError) as refused:
        circuit.acquire("dns", now_mono=1)
    assert refused.value.open_s == 1
    circuit.release(first)
    second = circuit.acquire("dns", now_mono=1)
    circuit.succeeded(second)
    circuit.release(second)
    circuit.acquire("dns", now_mono=1)
    assert fail(circuit, circuit.acquire("dns", now_mono=1), now_mono=1) == 1, "and the next failure is a first one"


def test_failures_of_calls_that_were_under_way_together_count_once() -> None:
    """Sixteen timeouts of one outage are one failure."""
    circuit = a_respite()
    turns = [circuit.acquire("dns", now_mono=0) for _ in range(16)]
    assert [fail(circuit, turn, now_mono=5) for turn in turns] == [1] * 16
    assert fail(circuit, circuit.acquire("dns", now_mono=6), now_mono=6) == 2


def test_a_registry_that_asks_for_time_gets_it() -> None:
    """``Retry-After`` makes a rest longer, whichever of several calls was told it, and never shorter."""
    circuit = a_respite()
    early, late = (circuit.acquire("dns", now_mono=0) for _ in range(2))
    assert fail(circuit, early, now_mono=0, asked_s=0.1) == 1
    assert fail(circuit, late, now_mono=0, asked_s=30) == 30
    with pytest.raises(CircuitOpenError):
        circuit.acquire("dns", now_mono=29)


# --- the registrar -------------------------------------------------------------------------------------------------


class Dns:
    """A registry in virtual time: each call that fails takes as long as a timeout."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.error: OperatorError | None = None
        self.calls = 0
        self.answering: anyio.Event | None = None
        self.requeue_after_s: float | None = None

    async def observe(self, record: Record) -> Comparison:
        """What is confirmed is there."""
        await self._answer(record.uid)
        return Comparison.MATCHING

    async def register(self, record: Record) -> Registration:
        """What is asked for is done."""
        await self._answer(record.uid)
        return Registration(Outcome.CREATED, requeue_after_s=self.requeue_after_s)

    async def deregister(self, uid: str, hostname: str) -> Outcome:
        """Nothing is left."""
        await self._answer(uid + hostname)
        return Outcome.DELETED

    async def entries(self) -> AsyncIterator[OutsideRecord]:
        """Nothing."""
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
    """A registrar whose ledger knows proxies, each with a hostname that is confirmed or not."""

    def __init__(self, own: Rooms) -> None:
        self.clock = own.clock
        self.store = own.store
        self.dns = Dns(own.clock)
        self.backoff = Backoff(base_s=0.5, cap_s=60, rand=lambda: 1.0)
        self.claims = Claims(own.applier, own.store, namespace=NAMESPACE, sink=own.store.apply_delta)
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
        """A proxy that claim and ledger know."""
        record = Record(f"uid-{name}", 1, Key("team-a", name), f"{name}.example.com", "192.0.2.1", ())
        claim = self.claims._desired(f"{name}.example.com", record.proxy, record.uid)
        self.store.learn(HOSTNAME_CLAIM, stored(claim, uid=f"claim-{name}"))
        self.store.learn(PROXY_REGISTRATION, self.entry(record, is_confirmed=is_confirmed))
        return record

    def entry(self, record: Record, *, is_confirmed: bool) -> Object:
        """What the ledger has of a proxy."""
        status = {"status": {"confirmedGeneration": int(is_confirmed)}}
        return stored(self.ledger._desired(record, "dns", frozenset()), uid=f"entry-{record.uid}") | status

    async def looks(self, record: Record) -> Problem | None:
        """A sweep's look, of a proxy that is paused."""
        return await self.registrar.observe(record, None, BUSY, is_resync=True)

    async def one_tries(self, tasks: TaskGroup) -> anyio.Event:
        """The registry failed and has rested; one call tries it now, and is answered when the event is set."""
        record = self.proxy("one", is_confirmed=True)
        self.dns.error = DOWN
        await self.removal(record)
        self.clock.mono += 0.5
        self.dns.answering = anyio.Event()
        tasks.start_soon(self.removal, record)
        await anyio.wait_all_tasks_blocked()
        return self.dns.answering

    async def removal(self, record: Record) -> str:
        """Why a removal fails."""
        with pytest.raises(TransientError) as failed:
            await self.registrar.deregister(record.proxy, record.uid)
        return str(failed.value)


@asynccontextmanager
async def a_world(folder: Path, api: ScriptedApi | None = None) -> AsyncGenerator[World]:
    """Where the API server is asked for nothing that the script does not have."""
    async with rooms(api or ScriptedApi(), folder) as own:
        yield World(own)


async def test_a_sweep_over_a_registry_that_hangs_costs_one_timeout(tmp_path: Path) -> None:
    """A hundred confirmed hostnames: one look hangs, the others fail at once, and none of that is news."""
    async with a_world(tmp_path) as world:
        records = [world.proxy(f"p{number}", is_confirmed=True) for number in range(100)]
        world.dns.error = DOWN
        begun = world.clock()
        answers = [await world.registrar.register(each, is_resync=True) for each in records[:50]]
        assert [await world.looks(each) for each in records[50:]] == [None] * 50
        assert {(each.outcome, each.problem) for each in answers} == {(Outcome.UNCHANGED, None)}
        assert (world.dns.calls, world.clock() - begun) == (1, TIMEOUT_S)


async def test_deletions_behind_a_registry_that_hangs_cost_one_timeout_for_each_rest(tmp_path: Path) -> None:
    """Each says the registry's own sentence; behind the rest one of them tries, and the rest is longer."""
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


async def test_who_was_not_asked_comes_back_behind_the_rest_and_falls_behind_slowly(tmp_path: Path) -> None:
    """A new wish, such as an edit, waits for the rest and no longer; the longer it lasts, the rarer it asks."""
    async with a_world(tmp_path) as world:
        one, two = (world.proxy(name, is_confirmed=False) for name in ("one", "two"))
        world.dns.error = DOWN
        asked = await world.registrar.register(one)
        assert (asked.problem, asked.requeue_after_s) == (Problem("RegistryError", DOWN.message), 0.5)
        waits: list[float] = []
        for _ in range(9):
            put_off = await world.registrar.register(two)
            assert put_off.problem == asked.problem
            assert put_off.requeue_after_s is not None
            waits.append(put_off.requeue_after_s)
            world.clock.mono += put_off.requeue_after_s
            with pytest.raises(TransientError):
                await world.registrar.deregister(one.proxy, one.uid)
        assert waits[0] == asked.requeue_after_s
        assert waits[-1] == 60
        assert waits == sorted(waits)


async def test_the_first_success_lets_everybody_through(tmp_path: Path) -> None:
    """Nothing of the outage is left behind it."""
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
        assert world.dns.calls == 5, "the rest of a first failure was over"


async def test_while_one_call_tries_the_others_do_not_wait_for_it(tmp_path: Path) -> None:
    """No stampede, and no lane that hangs with the one that tries."""
    async with a_world(tmp_path) as world:
        two = world.proxy("two", is_confirmed=True)
        async with anyio.create_task_group() as tasks:
            answering = await world.one_tries(tasks)
            assert await world.removal(two) == DOWN.message
            assert world.dns.calls == 2
            answering.set()


async def test_a_registry_that_never_answers_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it bounds its own calls, no round waits for ever."""
    monkeypatch.setattr(registrar, "LONGEST_CALL_S", 0.01)
    async with a_world(tmp_path) as world:
        one, two = (world.proxy(name, is_confirmed=True) for name in ("one", "two"))
        world.dns.answering = anyio.Event()
        assert await world.removal(one) == "the registry did not answer within 0.01 s"
        await world.removal(two)
        assert world.dns.calls == 1


async def test_a_list_that_does_not_go_on_is_said_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not end the sweeps with it; what the other registries hold is read all the same."""

    class Stuck(Dns):
        """Lists one record, and then says nothing more."""

        async def entries(self) -> AsyncIterator[OutsideRecord]:
            yield OutsideRecord("uid", Key("team-a", "one"), "one.example.com")
            await anyio.sleep_forever()

    monkeypatch.setattr(audit, "LONGEST_CALL_S", 0.01)
    read, failed = await outside_entries(Registries({"stuck": Stuck(Clock()), "dns": Dns(Clock())}))
    assert read == {"dns": ()}
    assert {name: str(error) for name, error in failed.items()} == {"stuck": "its list did not go on for 0.01 s"}


@pytest.mark.parametrize(("wish_s", "becomes_s"), [(-1, 1), (0, 1), (7, 7), (float("inf"), 3600), (float("nan"), 3600)])
async def test_what_a_registry_wants_is_neither_at_once_nor_never(
    tmp_path: Path, wish_s: float, becomes_s: float
) -> None:
    """A registry is often somebody else's code."""
    api = ScriptedApi()
    async with a_world(tmp_path, api) as world:
        record = world.proxy("one", is_confirmed=False)
        api.add(("apply ProxyRegistration/status", ok(world.entry(record, is_confirmed=True))))
        world.dns.requeue_after_s = wish_s
        assert await world.registrar.register(record) == Registration(Outcome.CREATED, requeue_after_s=becomes_s)


async def test_a_call_that_is_cut_off_does_not_keep_the_registry_from_being_tried(tmp_path: Path) -> None:
    """A round that is cancelled gives its turn back."""
    async with a_world(tmp_path) as world:
        two = world.proxy("two", is_confirmed=True)
        async with anyio.create_task_group() as tasks:
            await world.one_tries(tasks)
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
async def test_trouble_with_one_name_is_not_the_registrys(tmp_path: Path, error: OperatorError) -> None:
    """Neither a bad name, nor a contested one, nor our own lost right makes the registry rest, or ends a rest."""
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
        assert await world.looks(bad) is None
        world.dns.error = DOWN
        await world.removal(good)
        await world.removal(good)
        assert world.dns.calls == 5, "the next one was let through at once, and began the longer rest"


async def test_a_registry_that_is_throttled_rests_for_as_long_as_it_asks(tmp_path: Path) -> None:
    """``Retry-After`` that one proxy was told holds for all."""
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


async def test_a_removal_that_was_refused_in_a_rest_can_be_abandoned(tmp_path: Path) -> None:
    """Letting a proxy go needs no registry."""
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
