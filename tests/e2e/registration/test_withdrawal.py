"""What PowerDNS shows of a hostname in each state of a proxy, with reconciles on a real API server.

Each cell of the table is one test: a state, and whether the hostname stays, changes or is removed at the same time.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import (
    ENVOY_PROXY,
    HOSTNAME_CLAIM,
    SERVICE,
    Object,
)
from operator_app.desired import child_key
from operator_app.registration.registrar import Registries
from operator_app.registration.withdrawal import Declared, Shown, State, shown
from tests.e2e.kube import wait_until
from tests.e2e.powerdns.fixture import powerdns as powerdns  # noqa: PLC0414  # fixtures are found by their import
from tests.e2e.powerdns.fixture import recursor as recursor  # noqa: PLC0414
from tests.e2e.powerdns.fixture import zone as zone  # noqa: PLC0414
from tests.e2e.powerdns.recursor import Recursor
from tests.e2e.registration.published_proxy import INSTALLATION, World
from tests.e2e.registration.published_proxy import world as world  # noqa: PLC0414

pytestmark = pytest.mark.anyio

LOST: Final = {"metadata": {"finalizers": ["tests.example/wait"]}}
REGISTRY_LOST: Final = "registry not configured any more"
REGISTRY_DOWN: Final = "registry down"
CIRCUIT_OPEN: Final = "circuit of the registry open"
OPEN_S: Final = 60.0
CLAIM_LOST: Final = "claim lost"
CLAIM_FORBIDDEN: Final = "claim lost, and the operator may not write it"


def _lose_claim(world: World) -> None:
    world.admin.delete(HOSTNAME_CLAIM, world.claim)


def _give_claim_away(world: World) -> None:
    claim = world.admin.get(HOSTNAME_CLAIM, world.claim)
    _lose_claim(world)
    owner = claim["spec"]["proxy"] | {"name": "another", "uid": "another"}
    labels = claim["metadata"]["labels"]
    metadata = {"name": world.old, "labels": labels}
    world.admin.create(HOSTNAME_CLAIM, claim | {"metadata": metadata, "spec": claim["spec"] | {"proxy": owner}})


def _give_claim_and_record_away(world: World) -> None:
    _give_claim_away(world)
    world.zone.remove(f"_edge-owner.{world.old}", "TXT")
    world.zone.remove(world.old, "A")


def _terminate_claim(world: World) -> None:
    world.admin.patch(HOSTNAME_CLAIM, world.claim, LOST)
    _lose_claim(world)


def _forbid_claim(world: World) -> None:
    _lose_claim(world)
    world.are_claims_forbidden = True


def _break_service(world: World) -> None:
    world.admin.patch(SERVICE, child_key(world.key), {"spec": {"selector": {"app.kubernetes.io/name": "other"}}})
    world.is_service_cut = True


def _orphan(world: World) -> None:
    world.spec(deletionPolicy="Orphan")
    world.admin.delete(ENVOY_PROXY, world.key)


def _refuse(world: World) -> None:
    world.is_refused = True


ENTER: Final[dict[str, Callable[[World], None]]] = {
    State.SERVED: lambda _: None,
    State.PAUSED: lambda world: world.spec(paused=True),
    State.REFUSED: _refuse,
    State.NO_ADDRESS: lambda world: world.give_addresses(),
    State.ADDRESS_UNUSABLE: lambda world: world.give_addresses("127.0.0.1"),
    State.SERVICE_IN_TROUBLE: _break_service,
    State.REGISTRY_UNKNOWN: lambda world: world.spec(registration={"registry": "nowhere"}),
    State.REGISTRY_FAILS: lambda _: None,
    REGISTRY_LOST: lambda _: None,
    REGISTRY_DOWN: lambda _: None,
    CIRCUIT_OPEN: lambda world: world.open_circuit(OPEN_S),
    State.ZONE_GONE: lambda _: None,
    State.CLAIM_LOST: _give_claim_away,
    State.CLAIM_TAKEN: _give_claim_and_record_away,
    State.CLAIM_UNCERTAIN: _terminate_claim,
    CLAIM_LOST: _lose_claim,
    CLAIM_FORBIDDEN: _forbid_claim,
    State.DELETING: lambda world: world.admin.delete(ENVOY_PROXY, world.key),
    State.ABANDONED: lambda world: world.admin.delete(ENVOY_PROXY, world.key),
    State.ORPHANED: _orphan,
}
"""How a registered proxy gets into each state."""

EXCEPTIONS: Final = {
    **{
        (state, declared): shown(State.REGISTRY_FAILS, declared)
        for state in (REGISTRY_DOWN, CIRCUIT_OPEN)
        for declared in Declared
    },
    **{(CLAIM_FORBIDDEN, declared): shown(State.CLAIM_UNCERTAIN, declared) for declared in Declared},
    (REGISTRY_LOST, Declared.UNCHANGED): Shown.KEPT,
    (REGISTRY_LOST, Declared.CHANGED): Shown.PENDING,
    (REGISTRY_LOST, Declared.REMOVED): Shown.PENDING,
    # The registry is part of what is declared, so the name in the one before is not declared any more.
    (State.REGISTRY_UNKNOWN, Declared.UNCHANGED): Shown.WITHDRAWN,
    (CLAIM_LOST, Declared.UNCHANGED): Shown.KEPT,
    (CLAIM_LOST, Declared.CHANGED): Shown.WITHDRAWN,
    (CLAIM_LOST, Declared.REMOVED): Shown.WITHDRAWN,
}
PUBLISHES: Final = {State.SERVED, CLAIM_LOST, State.CLAIM_LOST, State.CLAIM_TAKEN, State.CLAIM_UNCERTAIN}
"""States in which another hostname is published at once: nothing is wrong with that one."""


# A registry without a hostname is refused by the CRD: tests/e2e/commands/test_bad_input.py.
CELLS: Final = [
    (state, declared)
    for state in ENTER
    for declared in Declared
    if (state, declared) != (State.REGISTRY_UNKNOWN, Declared.REMOVED)
]


@pytest.mark.parametrize(("state", "declared"), CELLS)
async def test_powerdns_and_a_resolver_show_what_the_table_says(
    world: World, recursor: Recursor, tmp_path: Path, state: State | str, declared: Declared
) -> None:
    """The old hostname is kept or withdrawn as the table says, and its claim is freed with it unless it is declared.

    What could not be withdrawn because of the registry is withdrawn once that answers.
    """
    wrong = tmp_path / "wrong-key"
    wrong.write_text("wrong")
    registries = await world.registries(wrong if state in (State.REGISTRY_FAILS, State.ABANDONED) else None)
    if state == REGISTRY_LOST:
        registries = Registries({}, "powerdns", INSTALLATION)
    if state == REGISTRY_DOWN:
        registries = await world.registries(url="http://127.0.0.1:1")
    if state == State.ZONE_GONE:
        registries = await world.registries(zone="elsewhere.example")
    if declared is not Declared.UNCHANGED or state == State.REFUSED:
        world.declare(declared)
    ENTER[state](world)
    # A write of the status brings the stored proxy back into the store, and that is not refused.
    parts = await world.parts(registries)
    await world.reconcile(parts, 1 if state == State.REFUSED else 3)

    expected = EXCEPTIONS[state, declared] if (state, declared) in EXCEPTIONS else shown(State(state), declared)
    if state == State.ABANDONED:
        assert world.published == {world.old}
        assert world.admin.find(ENVOY_PROXY, world.key) is None
    elif expected is Shown.WITHDRAWN:
        is_published = declared is Declared.CHANGED and state in PUBLISHES
        assert world.published == ({world.new} if is_published else set())
    else:
        assert world.published == {world.old}
    _resolves_what_is_published(recursor, world)
    if state == State.ABANDONED or expected is Shown.PENDING:
        world.now_mono += OPEN_S
        await world.reconcile(parts if state == CIRCUIT_OPEN else await world.parts(await world.registries()))
        assert world.old not in world.published
        _resolves_what_is_published(recursor, world)
    is_gone = state in (State.DELETING, State.ABANDONED)
    if world.old not in world.published and (declared is not Declared.UNCHANGED or is_gone):
        claim = world.admin.find(HOSTNAME_CLAIM, world.claim)
        assert claim is None or "deletionTimestamp" in claim["metadata"] or _owner(claim) == "another"


def _resolves_what_is_published(recursor: Recursor, world: World) -> None:
    for hostname in (world.old, world.new):
        expected = {"203.0.113.7"} if hostname in world.published else set()
        wait_until(partial(_is_resolved, recursor, hostname, expected), what=f"{hostname} to resolve to {expected}")


def _is_resolved(recursor: Recursor, hostname: str, expected: set[str]) -> bool:
    return recursor.addresses(hostname) == expected


def _owner(claim: Object) -> str:
    uid: str = claim["spec"]["proxy"]["uid"]
    return uid
