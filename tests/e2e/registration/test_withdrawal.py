"""What PowerDNS shows of a hostname in each state of a proxy, with reconciles on a real API server.

Each cell of the table is one test: a state, and whether the hostname stays, changes or is removed at the same time.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import httpx2
import pytest

from operator_app.api.kinds import CHILD_KINDS, ENVOY_PROXY, HOSTNAME_CLAIM, PROXY_REGISTRATION, SERVICE, Key, Object
from operator_app.desired import child_key
from operator_app.registration.identity import Installation
from operator_app.registration.powerdns.registry import connect
from operator_app.registration.registrar import Registries
from operator_app.registration.withdrawal import Declared, Shown, State, shown
from operator_app.settings import Settings
from tests.e2e.components import Components, components
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OPERATOR_NAMESPACE
from tests.e2e.powerdns.fixture import powerdns as powerdns  # noqa: PLC0414  # fixtures are found by their import
from tests.e2e.powerdns.fixture import zone as zone  # noqa: PLC0414
from tests.e2e.powerdns.server import Zone
from tests.e2e.proxies import a_proxy, condition

pytestmark = pytest.mark.anyio

INSTALLATION: Final = Installation.of("a cluster", "tests")
LOST: Final = {"metadata": {"finalizers": ["tests.example/wait"]}}
REGISTRY_LOST: Final = "registry not configured any more"


class World:
    """One registered proxy, and reconciles of it. ``old`` is its hostname, ``new`` the one it may change to."""

    def __init__(self, admin: Kube, kubeconfig: Path, namespace: str, zone: Zone, stack: AsyncExitStack) -> None:
        self.admin = admin
        self.key = Key(namespace, "web")
        self.zone = zone
        self.old, self.new = f"old.{zone.name}", f"new.{zone.name}"
        self.is_service_cut = False
        self.is_refused = False
        self._kubeconfig = kubeconfig
        self._stack = stack
        self._foreign = zone.rows()

    async def registries(self, key_file: Path | None = None) -> Registries:
        """PowerDNS with this key; without one, with the right key."""
        settings = Settings(
            powerdns_url=self.zone.server.url,
            powerdns_zones=(self.zone.name,),
            powerdns_api_key_file=key_file or self.zone.server.key_file,
        )
        registry = await self._stack.enter_async_context(connect(settings, INSTALLATION))
        return Registries({"powerdns": registry}, "powerdns", INSTALLATION)

    async def parts(self, registries: Registries) -> Components:
        """An operator's components with these registries; a deleted proxy whose registry fails goes at once."""

        async def before(request: httpx2.Request) -> None:
            if self.is_service_cut and request.method == "PATCH" and "/services/" in request.url.path:
                raise httpx2.ConnectError("cut")

        return await self._stack.enter_async_context(
            components(self._kubeconfig, before=before, registries=registries, abandon_after_s=1e-6)
        )

    async def reconcile(self, parts: Components, times: int = 3) -> None:
        """Reconcile several times, each time with a store that has all objects of the proxy."""
        for _ in range(times):
            self._fill(parts)
            await parts.reconciler.reconcile(self.key)

    def _fill(self, parts: Components) -> None:
        live = self.admin.find(ENVOY_PROXY, self.key)
        if live is not None:
            if self.is_refused:
                live["spec"]["replicas"] = -1
            parts.deliver(ENVOY_PROXY, live)
        for kind in (PROXY_REGISTRATION, HOSTNAME_CLAIM):
            for each in self.admin.list(kind, OPERATOR_NAMESPACE):
                if each["spec"]["proxy"]["namespace"] == self.key.namespace:
                    parts.deliver(kind, each)
        for kind in CHILD_KINDS:
            child = self.admin.find(kind, child_key(self.key))
            if child is not None:
                parts.deliver(kind, child)

    def give_addresses(self, *addresses: str) -> None:
        """Make these the addresses of the Service's load balancer."""
        ingress = [{"ip": each} for each in addresses]
        patch = {"status": {"loadBalancer": {"ingress": ingress}}}
        self.admin.patch(SERVICE, child_key(self.key), patch, subresource="status")

    def spec(self, **fields: object) -> None:
        """Change fields of the proxy's spec."""
        self.admin.patch(ENVOY_PROXY, self.key, {"spec": fields})

    def declare(self, declared: Declared) -> None:
        """Keep, change or remove the hostname in the spec; any change is a new version of the proxy."""
        hostname = {Declared.UNCHANGED: self.old, Declared.CHANGED: self.new, Declared.REMOVED: None}[declared]
        self.admin.patch(
            ENVOY_PROXY,
            self.key,
            {"metadata": {"labels": {"edited": "yes"}}, "spec": {"registration": {"hostname": hostname}}},
        )

    @property
    def published(self) -> set[str]:
        """The names that have an address record that was not there before."""
        return {name for name, kind, *_ in self.zone.rows() - self._foreign if kind != "TXT"}

    @property
    def claim(self) -> Key:
        """The claim on the old hostname."""
        return Key(OPERATOR_NAMESPACE, self.old)


@pytest.fixture
async def world(admin: Kube, namespace: str, operator_kubeconfig: Path, zone: Zone) -> AsyncIterator[World]:
    """A world whose proxy is registered."""
    async with AsyncExitStack() as stack:
        world = World(admin, operator_kubeconfig, namespace, zone, stack)
        admin.create(
            ENVOY_PROXY,
            a_proxy(namespace, registration={"hostname": world.old}, service={"type": "LoadBalancer"}),
        )
        parts = await world.parts(await world.registries())
        await world.reconcile(parts, 1)
        world.give_addresses("203.0.113.7")
        await world.reconcile(parts)
        assert condition(admin.get(ENVOY_PROXY, world.key), "Registered")["status"] == "True"
        assert world.published == {world.old}
        yield world
        with suppress(Exception):
            admin.patch(HOSTNAME_CLAIM, world.claim, {"metadata": {"finalizers": None}})
        for kind in (HOSTNAME_CLAIM, PROXY_REGISTRATION):
            for each in admin.list(kind, OPERATOR_NAMESPACE):
                if each["spec"]["proxy"]["namespace"] == namespace:
                    admin.delete(kind, Key(OPERATOR_NAMESPACE, each["metadata"]["name"]))


def _lose_claim(world: World) -> None:
    world.admin.delete(HOSTNAME_CLAIM, world.claim)


def _give_claim_away(world: World) -> None:
    claim = world.admin.get(HOSTNAME_CLAIM, world.claim)
    _lose_claim(world)
    owner = claim["spec"]["proxy"] | {"name": "another", "uid": "another"}
    labels = claim["metadata"]["labels"]
    metadata = {"name": world.old, "namespace": OPERATOR_NAMESPACE, "labels": labels}
    world.admin.create(HOSTNAME_CLAIM, claim | {"metadata": metadata, "spec": claim["spec"] | {"proxy": owner}})


def _terminate_claim(world: World) -> None:
    world.admin.patch(HOSTNAME_CLAIM, world.claim, LOST)
    _lose_claim(world)


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
    State.CLAIM_TAKEN: _give_claim_away,
    State.CLAIM_UNCERTAIN: _terminate_claim,
    "claim lost": _lose_claim,
    State.DELETING: lambda world: world.admin.delete(ENVOY_PROXY, world.key),
    State.ABANDONED: lambda world: world.admin.delete(ENVOY_PROXY, world.key),
    State.ORPHANED: _orphan,
}
"""How a registered proxy gets into each state."""

EXCEPTIONS: Final = {
    (REGISTRY_LOST, Declared.UNCHANGED): Shown.KEPT,
    (REGISTRY_LOST, Declared.CHANGED): Shown.PENDING,
    (REGISTRY_LOST, Declared.REMOVED): Shown.PENDING,
    # The registry is part of what is declared, so the name in the one before is not declared any more.
    (State.REGISTRY_UNKNOWN, Declared.UNCHANGED): Shown.WITHDRAWN,
    ("claim lost", Declared.UNCHANGED): Shown.KEPT,
    ("claim lost", Declared.CHANGED): Shown.WITHDRAWN,
    ("claim lost", Declared.REMOVED): Shown.WITHDRAWN,
}
PUBLISHES: Final = {State.SERVED, "claim lost", State.CLAIM_TAKEN, State.CLAIM_UNCERTAIN}
"""States in which another hostname is published at once: nothing is wrong with that one."""


# A registry without a hostname is refused by the CRD.
CELLS: Final = [
    (state, declared)
    for state in ENTER
    for declared in Declared
    if (state, declared) != (State.REGISTRY_UNKNOWN, Declared.REMOVED)
]


@pytest.mark.parametrize(("state", "declared"), CELLS)
async def test_powerdns_shows_what_the_table_says(
    world: World, tmp_path: Path, state: State | str, declared: Declared
) -> None:
    """The old hostname is kept or withdrawn as the table says, and its claim is freed with it unless it is declared.

    What could not be withdrawn because of the registry is withdrawn once that answers.
    """
    wrong = tmp_path / "wrong-key"
    wrong.write_text("wrong")
    registries = await world.registries(wrong if state in (State.REGISTRY_FAILS, State.ABANDONED) else None)
    if state == REGISTRY_LOST:
        registries = Registries({}, "powerdns", INSTALLATION)
    if declared is not Declared.UNCHANGED or state == State.REFUSED:
        world.declare(declared)
    ENTER[state](world)
    # A write of the status brings the stored proxy back into the store, and that is not refused.
    await world.reconcile(await world.parts(registries), 1 if state == State.REFUSED else 3)

    expected = EXCEPTIONS[state, declared] if (state, declared) in EXCEPTIONS else shown(State(state), declared)
    if state == State.ABANDONED:
        assert world.published == {world.old}
        assert world.admin.find(ENVOY_PROXY, world.key) is None
    elif expected is Shown.WITHDRAWN:
        is_published = declared is Declared.CHANGED and state in PUBLISHES
        assert world.published == ({world.new} if is_published else set())
    else:
        assert world.published == {world.old}
    if state == State.ABANDONED or expected is Shown.PENDING:
        world.is_refused = False
        await world.reconcile(await world.parts(await world.registries()))
        assert world.old not in world.published
    is_gone = state in (State.DELETING, State.ABANDONED)
    if world.old not in world.published and (declared is not Declared.UNCHANGED or is_gone):
        claim = world.admin.find(HOSTNAME_CLAIM, world.claim)
        assert claim is None or "deletionTimestamp" in claim["metadata"] or _owner(claim) == "another"


def _owner(claim: Object) -> str:
    uid: str = claim["spec"]["proxy"]["uid"]
    return uid
