"""A proxy that a DNS server publishes, and reconciles of it by call, with a store that has what the API server has."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import httpx2
import pytest

from operator_app.api.kinds import (
    CHILD_KINDS,
    ENVOY_PROXY,
    HOSTNAME_CLAIM,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    key_of,
)
from operator_app.desired import child_key
from operator_app.registration.circuit import CircuitBreaker
from operator_app.registration.identity import Installation
from operator_app.registration.powerdns.registry import connect as connect_powerdns
from operator_app.registration.registrar import Registries
from operator_app.registration.registry import Registry
from operator_app.registration.rfc2136.registry import connect as connect_rfc2136
from operator_app.registration.withdrawal import Declared
from operator_app.settings import Settings
from tests.e2e.components import Components, components
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OPERATOR_NAMESPACE
from tests.e2e.proxies import a_proxy, condition
from tests.e2e.registration.dns_servers import AnyZone
from tests.e2e.rfc2136.server import Bind

INSTALLATION: Final = Installation.of("a cluster", "tests")


class World:
    """One registered proxy, and reconciles of it. ``old`` is its hostname, ``new`` the one it may change to."""

    def __init__(self, admin: Kube, kubeconfig: Path, namespace: str, zone: AnyZone, stack: AsyncExitStack) -> None:
        self.admin = admin
        self.key = Key(namespace, "web")
        self.zone = zone
        self.registry = "rfc2136" if isinstance(zone.server, Bind) else "powerdns"
        self.old, self.new = f"old.{zone.name}", f"new.{zone.name}"
        self.is_service_cut = False
        self.is_refused = False
        self.are_claims_forbidden = False
        self.now_mono = 0.0
        self._circuit = CircuitBreaker(base_s=0.0, cap_s=0.0, rand=lambda: 0.0)
        self._kubeconfig = kubeconfig
        self._stack = stack
        self._foreign = zone.rows()

    async def registries(
        self, key_file: Path | None = None, zone: str | None = None, url: str | None = None
    ) -> Registries:
        """The server with this key, zone and address; without one, with the right one."""
        server, zones = self.zone.server, (zone or self.zone.name,)
        connecting: AbstractAsyncContextManager[Registry]
        if isinstance(server, Bind):
            settings = Settings(
                rfc2136_server=url or server.address,
                rfc2136_zones=zones,
                rfc2136_key_file=key_file or server.key_file,
            )
            connecting = connect_rfc2136(settings, INSTALLATION)
        else:
            settings = Settings(
                powerdns_url=url or server.url,
                powerdns_zones=zones,
                powerdns_api_key_file=key_file or server.key_file,
            )
            connecting = connect_powerdns(settings, INSTALLATION)
        registry: Registry = await self._stack.enter_async_context(connecting)
        return Registries({self.registry: registry}, self.registry, INSTALLATION)

    async def parts(self, registries: Registries) -> Components:
        """An operator's components with these registries; a deleted proxy whose registry fails goes at once."""

        async def before(request: httpx2.Request) -> None:
            if self.is_service_cut and request.method == "PATCH" and "/services/" in request.url.path:
                raise httpx2.ConnectError("cut")
            if self.are_claims_forbidden and request.method == "PATCH" and "/hostnameclaims/" in request.url.path:
                request.headers["Impersonate-User"] = "nobody"  # what the operator may not do, so the server refuses

        made = components(
            self._kubeconfig,
            before=before,
            registries=registries,
            circuit=self._circuit,
            abandon_after_s=1e-6,
            mono=lambda: self.now_mono,
        )
        return await self._stack.enter_async_context(made)

    def open_circuit(self, open_s: float) -> None:
        """Open the circuit of the registry for so many seconds, as a failure for another proxy does."""
        permit = self._circuit.acquire(self.registry, now_mono=self.now_mono)
        self._circuit.failed(permit, "no answer", now_mono=self.now_mono, retry_after_s=open_s)

    async def reconcile(self, parts: Components, times: int = 3, *, key: Key | None = None) -> None:
        """Reconcile the proxy, or another one, several times, each time with a store that has all their objects."""
        for _ in range(times):
            self._fill(parts, key or self.key)
            await parts.reconciler.reconcile(key or self.key)

    def _fill(self, parts: Components, key: Key) -> None:
        for live in self.admin.list(ENVOY_PROXY, self.key.namespace):
            if self.is_refused:
                live["spec"]["replicas"] = -1
            parts.deliver(ENVOY_PROXY, live)
        for kind in (PROXY_REGISTRATION, HOSTNAME_CLAIM):
            for each in self.admin.list(kind, OPERATOR_NAMESPACE):
                if each["spec"]["proxy"]["namespace"] == self.key.namespace:
                    parts.deliver(kind, each)
        for kind in CHILD_KINDS:
            child = self.admin.find(kind, child_key(key))
            if child is not None:
                parts.deliver(kind, child)

    def give_addresses(self, *addresses: str, key: Key | None = None) -> None:
        """Make these the addresses of the load balancer of the proxy's Service, or of another one's."""
        ingress = [{"ip": each} for each in addresses]
        patch = {"status": {"loadBalancer": {"ingress": ingress}}}
        self.admin.patch(SERVICE, child_key(key or self.key), patch, subresource="status")

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
        return Key("", self.old)


@pytest.fixture
async def world(admin: Kube, namespace: str, operator_kubeconfig: Path, zone: AnyZone) -> AsyncIterator[World]:
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
                    admin.delete(kind, key_of(each))
