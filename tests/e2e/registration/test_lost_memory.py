"""Claims and entries that were lost, versions that went back, proofs that were removed: who keeps the name.

Reconciles by call on a real API server, PowerDNS and BIND 9, so that a test decides who comes first.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from operator_app.api.kinds import ENVOY_PROXY, HOSTNAME_CLAIM, PROXY_REGISTRATION, Key, Object
from operator_app.api.records import RecordState
from operator_app.kube.client import Cluster
from operator_app.registration.audit import FindingKind, findings, fix, outside_entries, survey
from operator_app.registration.claims import owner_uid
from operator_app.registration.dns import Ownership
from operator_app.registration.registrar import Registries
from tests.e2e.operator_process import OPERATOR_NAMESPACE
from tests.e2e.powerdns.fixture import started
from tests.e2e.proxies import a_proxy, condition
from tests.e2e.registration.dns_servers import AnyServer, AnyZone, a_server, a_zone
from tests.e2e.registration.published_proxy import INSTALLATION, World
from tests.e2e.registration.published_proxy import world as world  # noqa: PLC0414  # a fixture is found by its import

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=["powerdns-sqlite", "rfc2136-bind9"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyServer]:
    """A running server of each protocol; without its programs the test is skipped."""
    with started(lambda: a_server(request.param, tmp_path_factory.mktemp("dns"))) as server:
        yield server


@pytest.fixture
def zone(server: AnyServer) -> AnyZone:
    """A new zone with foreign records in it."""
    return a_zone(server)


def entry_of(world: World) -> Key:
    """The ledger's entry of the world's proxy."""
    return Key(OPERATOR_NAMESPACE, f"proxy-{uid_of(world, world.key)}")


def uid_of(world: World, key: Key) -> str:
    """The UID of a proxy."""
    uid: str = world.admin.get(ENVOY_PROXY, key)["metadata"]["uid"]
    return uid


def registered(world: World, key: Key) -> Object:
    """The condition ``Registered`` of a proxy."""
    return condition(world.admin.get(ENVOY_PROXY, key), "Registered")


async def a_rival(world: World) -> Key:
    """Another proxy that declares the same hostname, whose load balancer has an address."""
    key = Key(world.key.namespace, "rival")
    rival = a_proxy(*key, registration={"hostname": world.old}, service={"type": "LoadBalancer"})
    world.admin.create(ENVOY_PROXY, rival)
    await world.reconcile(await world.parts(await world.registries()), 1, key=key)
    world.give_addresses("203.0.113.9", key=key)
    return key


async def audited(world: World, cluster: Cluster, registries: Registries) -> list[tuple[FindingKind, str]]:
    """The findings about the world's proxy, each repaired where that is possible."""
    outside, failed = await outside_entries(registries)
    assert failed == {}
    namespaces = (world.key.namespace,)
    seen = await survey(cluster, outside, namespace=OPERATOR_NAMESPACE, namespaces=namespaces)
    found = findings(seen)
    for each in found:
        await fix(cluster, registries, each, namespace=OPERATOR_NAMESPACE)
    return [(each.kind, each.name) for each in found]


async def test_whoever_has_the_record_outside_keeps_a_name_whose_claim_was_deleted(world: World) -> None:
    """A rival that comes first does not get it, and the claim is made again."""
    rows = world.zone.rows()
    rival = await a_rival(world)
    world.admin.delete(HOSTNAME_CLAIM, world.claim)
    parts = await world.parts(await world.registries())
    await world.reconcile(parts, key=rival)
    assert registered(world, rival)["reason"] == "HostnameTaken"
    assert world.admin.find(HOSTNAME_CLAIM, world.claim) is None
    await world.reconcile(parts)
    assert registered(world, world.key)["status"] == "True"
    assert owner_uid(world.admin.get(HOSTNAME_CLAIM, world.claim)) == uid_of(world, world.key)
    assert world.zone.rows() == rows


async def test_an_entry_that_was_deleted_is_written_again(world: World) -> None:
    """The record outside says whose it is, so it is confirmed again without a write there."""
    serial = world.zone.serial
    world.admin.delete(PROXY_REGISTRATION, entry_of(world))
    await world.reconcile(await world.parts(await world.registries()))
    assert registered(world, world.key)["status"] == "True"
    assert world.admin.get(PROXY_REGISTRATION, entry_of(world))["status"]["confirmedHostname"] == world.old
    assert world.zone.serial == serial


async def test_whoever_has_the_record_outside_gets_the_name_back_when_all_is_lost(world: World) -> None:
    """Claim and entry are gone and a rival takes the claim: it gives way to the proxy that the record names."""
    rows = world.zone.rows()
    rival = await a_rival(world)
    world.admin.delete(HOSTNAME_CLAIM, world.claim)
    world.admin.delete(PROXY_REGISTRATION, entry_of(world))
    parts = await world.parts(await world.registries())
    await world.reconcile(parts, 1, key=rival)
    assert world.admin.find(HOSTNAME_CLAIM, world.claim) is None, "it was taken, and given back"
    await world.reconcile(parts, 1, key=rival)
    assert world.admin.find(HOSTNAME_CLAIM, world.claim) is None
    await world.reconcile(parts)
    assert registered(world, world.key)["status"] == "True"
    await world.reconcile(parts, key=rival)
    assert registered(world, rival)["reason"] == "HostnameTaken"
    assert owner_uid(world.admin.get(HOSTNAME_CLAIM, world.claim)) == uid_of(world, world.key)
    assert world.zone.rows() == rows


async def test_versions_that_went_back_are_told_and_repaired_by_the_audit(world: World) -> None:
    """The record is of a newer generation than the restored proxy: NewerRecord, until the audit rewrites it."""
    uid = uid_of(world, world.key)
    world.zone.put(f"_edge-owner.{world.old}", "TXT", Ownership(INSTALLATION, uid, 99).content, ttl_s=300)
    world.admin.patch(PROXY_REGISTRATION, entry_of(world), {"status": {"confirmedGeneration": 0}}, subresource="status")
    registries = await world.registries()
    parts = await world.parts(registries)
    await world.reconcile(parts)
    assert registered(world, world.key)["reason"] == "NewerRecord"
    assert await audited(world, parts.cluster, registries) == [(FindingKind.NEWER_RECORD, world.old)]
    assert world.published == {world.old}, "it was never away"
    await world.reconcile(await world.parts(registries))
    assert registered(world, world.key)["status"] == "True"
    assert await audited(world, parts.cluster, registries) == []


async def test_a_name_that_was_lost_with_the_entry_is_removed_by_the_audit(world: World) -> None:
    """The hostname changed and the entry was lost at the same time, so nothing in the cluster names the old one."""
    world.admin.delete(PROXY_REGISTRATION, entry_of(world))
    world.spec(registration={"hostname": world.new})
    registries = await world.registries()
    parts = await world.parts(registries)
    await world.reconcile(parts)
    assert world.published == {world.old, world.new}
    assert await audited(world, parts.cluster, registries) == [(FindingKind.WRONG_OWNER, world.old)]
    assert world.published == {world.new}
    assert await audited(world, parts.cluster, registries) == []


async def test_an_address_whose_proof_was_removed_is_told_and_found(world: World) -> None:
    """By the condition while the proxy exists, by an Event when it goes, then by audits until the address is gone."""
    world.zone.remove(f"_edge-owner.{world.old}", "TXT")
    registries = await world.registries()
    parts = await world.parts(registries)
    world._fill(parts, world.key)
    await parts.reconciler.reconcile(world.key, is_resync=True)
    said = registered(world, world.key)
    assert said["reason"] == "HostnameTaken"
    assert f"put the TXT record _edge-owner.{world.old} back" in said["message"]
    entry = entry_of(world)
    world.admin.delete(ENVOY_PROXY, world.key)
    await world.reconcile(parts, 1)
    assert world.admin.find(ENVOY_PROXY, world.key) is None
    assert "AddressLeft" in [each.reason for each in parts.occurrences]
    assert world.admin.get(PROXY_REGISTRATION, entry)["spec"]["state"] == RecordState.LEFT
    assert world.published == {world.old}, "nothing proves any more that it is ours to remove"
    assert await audited(world, parts.cluster, registries) == [(FindingKind.DANGLING_ADDRESS, world.old)]
    world.zone.remove(world.old, "A")
    await world.reconcile(await world.parts(registries))
    assert world.admin.find(PROXY_REGISTRATION, entry) is None
    assert await audited(world, parts.cluster, registries) == []


async def test_the_records_that_a_tenant_orphans_are_bounded(world: World) -> None:
    """Beyond the limit the deletion waits and says so, and nothing was orphaned; without Orphan the proxy goes."""
    parts = await world.parts(await world.registries())
    parts.registrar._kept_limit = 0
    world.spec(deletionPolicy="Orphan")
    world.admin.delete(ENVOY_PROXY, world.key)
    await world.reconcile(parts, 1)
    waiting = condition(world.admin.get(ENVOY_PROXY, world.key), "Ready")
    assert waiting["reason"] == "OrphaningFailed"
    assert "OPERATOR_APP_KEPT_PER_TENANT" in waiting["message"]
    assert world.admin.get(PROXY_REGISTRATION, entry_of(world))["spec"]["state"] == RecordState.REGISTERED
    world.spec(deletionPolicy="Delete")
    await world.reconcile(parts, 2)
    assert world.admin.find(ENVOY_PROXY, world.key) is None
    assert world.published == set()


@pytest.mark.parametrize(
    "registration", [{"hostname": None}, {"registry": "in-cluster"}], ids=["no name", "in-cluster"]
)
async def test_orphan_keeps_no_entry_and_no_claim_of_what_is_not_outside(world: World, registration: Object) -> None:
    """Without a name in an outside registry both go with the proxy, however often one is made and deleted."""
    parts = await world.parts(await world.registries())
    world.spec(registration=registration, deletionPolicy="Orphan")
    await world.reconcile(parts)
    assert world.published == set()
    entry = entry_of(world)
    assert world.admin.find(PROXY_REGISTRATION, entry) is not None
    world.admin.delete(ENVOY_PROXY, world.key)
    await world.reconcile(parts)
    assert world.admin.find(ENVOY_PROXY, world.key) is None
    assert world.admin.find(PROXY_REGISTRATION, entry) is None
    assert world.admin.find(HOSTNAME_CLAIM, world.claim) is None


async def test_the_removals_that_are_pending_for_a_tenant_are_bounded(world: World, tmp_path: Path) -> None:
    """Beyond the limit a deletion waits for its registry whatever the setting says, and tells; then it goes."""
    wrong = tmp_path / "wrong-key"
    wrong.write_text("wrong")
    parts = await world.parts(await world.registries(wrong))
    parts.registrar._kept_limit = 0
    world.admin.delete(ENVOY_PROXY, world.key)
    await world.reconcile(parts, 2)
    waiting = condition(world.admin.get(ENVOY_PROXY, world.key), "Ready")
    assert waiting["reason"] == "DeregistrationFailed"
    assert "OPERATOR_APP_KEPT_PER_TENANT" in waiting["message"]
    assert world.admin.get(PROXY_REGISTRATION, entry_of(world))["spec"]["state"] == RecordState.REGISTERED
    await world.reconcile(await world.parts(await world.registries()), 1)
    assert world.admin.find(ENVOY_PROXY, world.key) is None
    assert world.published == set()
