"""The whole operator with PowerDNS as its registry: conditions of EnvoyProxies, and answers of DNS."""

import logging
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from operator_app.api.kinds import (
    ENVOY_PROXY,
    FIELD_MANAGER,
    HOSTNAME_CLAIM,
    LABEL_MANAGED_BY,
    NAMESPACE,
    PROXY_REGISTRATION,
    Key,
    Kind,
    Object,
)
from operator_app.cleanup import DEREGISTRATION_FAILED
from operator_app.registration.claims import owner_uid
from operator_app.registration.dns import Ownership
from operator_app.registration.identity import Installation
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.powerdns.fixture import powerdns as powerdns  # noqa: PLC0414  # fixtures are found by their import
from tests.e2e.powerdns.fixture import proxy as proxy  # noqa: PLC0414
from tests.e2e.powerdns.fixture import recursor as recursor  # noqa: PLC0414
from tests.e2e.powerdns.fixture import zone as zone  # noqa: PLC0414
from tests.e2e.powerdns.proxy import FaultyProxy, HttpFault
from tests.e2e.powerdns.recursor import Recursor
from tests.e2e.powerdns.server import PowerDns, Row, Zone
from tests.e2e.proxies import CONVERGE_TIMEOUT_S, a_proxy, condition, give_addresses, holds, is_refused, record_key

OPERATOR_ID = "tests"
ADDRESS = "203.0.113.7"
TTL_S = 300
QUIET_S = 1.5

Start = Callable[..., None]


@pytest.fixture
def start(operator: OperatorProcess, proxy: FaultyProxy, zone: Zone) -> Start:
    """A function that starts the operator with the test's zone, behind the faulty proxy, with further flags."""

    def run(*flags: str) -> None:
        operator.start(*powerdns_flags(proxy.url, zone), *flags)

    return run


def powerdns_flags(url: str, zone: Zone) -> tuple[str, ...]:
    """The flags of an operator that writes this zone."""
    return (
        "--registry=powerdns",
        f"--operator-id={OPERATOR_ID}",
        f"--powerdns-url={url}",
        f"--powerdns-zones={zone.name}",
        f"--powerdns-api-key-file={zone.server.key_file}",
        f"--powerdns-default-ttl-s={TTL_S}",
        "--powerdns-timeout-s=3",
    )


def a_named_proxy(namespace: str, hostname: str, name: str = "web", **registration: object) -> Object:
    """An EnvoyProxy with a hostname and a load balancer; keywords are further fields of its registration."""
    service = {"type": "LoadBalancer"}
    return a_proxy(namespace, name, registration={"hostname": hostname, **registration}, service=service)


def registered(admin: Kube, key: Key) -> Object:
    """Give the EnvoyProxy an address and wait until it is registered; the object."""
    give_addresses(admin, key, ADDRESS)
    return admin.wait_until(ENVOY_PROXY, key, holds("Registered"), CONVERGE_TIMEOUT_S)


def refused(admin: Kube, key: Key, reason: str) -> Object:
    """Give the EnvoyProxy an address and wait until it is refused for this reason; the object."""
    give_addresses(admin, key, ADDRESS)
    return admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", reason), CONVERGE_TIMEOUT_S)


def with_spec(proxy: Object, **spec: object) -> Object:
    """The EnvoyProxy with further fields in its spec."""
    return proxy | {"spec": proxy["spec"] | spec}


def installation(admin: Kube, operator_id: str = OPERATOR_ID) -> Installation:
    """The installation of the operator under test in the cluster of the tests."""
    return Installation.of(admin.get(NAMESPACE, Key("", "kube-system"))["metadata"]["uid"], operator_id)


def pair(
    admin: Kube,
    proxy: Object,
    hostname: str,
    *,
    kind: str = "A",
    content: str = ADDRESS,
    ttl_s: int = TTL_S,
    operator_id: str = OPERATOR_ID,
) -> set[Row]:
    """The two DNS records of a registered proxy."""
    metadata = proxy["metadata"]
    owner = Ownership(installation(admin, operator_id), metadata["uid"], metadata["generation"]).content
    return {(hostname, kind, ttl_s, content, False), (f"_edge-owner.{hostname}", "TXT", ttl_s, owner, False)}


def wait_rows(zone: Zone, rows: set[Row], timeout_s: float = CONVERGE_TIMEOUT_S) -> None:
    """Wait until the zone has exactly these records."""
    wait_until(lambda: zone.rows() == rows, timeout_s, f"{rows} in {zone.name}, which has {zone.rows()}")


def test_dns_follows_a_proxy_from_creation_to_deletion(
    admin: Kube, namespace: str, start: Start, proxy: FaultyProxy, recursor: Recursor, zone: Zone
) -> None:
    """Records follow address, TTL and hostname, cost no request while nothing changes, and are removed in the end."""
    foreign = zone.rows()
    first, second = f"shop.{zone.name}", f"store.{zone.name}"
    key = Key(namespace, "web")
    start()
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, first))
    live = registered(admin, key)
    assert zone.rows() == foreign | pair(admin, live, first)
    assert recursor.addresses(first) == {ADDRESS}
    assert proxy.requests.count("PATCH") == 1

    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"ttl": 20}}})
    give_addresses(admin, key, "2001:db8::7")
    live = admin.wait_until(ENVOY_PROXY, key, lambda each: each["metadata"]["generation"] > 1, CONVERGE_TIMEOUT_S)
    wait_rows(zone, foreign | pair(admin, live, first, kind="AAAA", content="2001:db8::7", ttl_s=20))

    live = admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"hostname": second}}})
    wait_rows(zone, foreign | pair(admin, live, second, kind="AAAA", content="2001:db8::7", ttl_s=20))
    wait_until(lambda: recursor.addresses(first) == set(), CONVERGE_TIMEOUT_S)
    assert recursor.addresses(second) == {"2001:db8::7"}

    time.sleep(QUIET_S)
    with proxy.counted() as requests:
        time.sleep(QUIET_S)
    assert requests == [], "no request while nothing has changed"

    admin.delete(ENVOY_PROXY, key)
    admin.wait_gone(ENVOY_PROXY, key)
    assert zone.rows() == foreign


def test_a_resolver_gets_what_the_load_balancer_gave(
    admin: Kube, namespace: str, start: Start, proxy: FaultyProxy, recursor: Recursor, zone: Zone
) -> None:
    """IPv4 and IPv6, in whatever order; a Service without a load balancer has no address for anybody outside."""
    foreign, hostname, key = zone.rows(), f"shop.{zone.name}", Key(namespace, "web")
    start()
    admin.create(ENVOY_PROXY, with_spec(a_named_proxy(namespace, hostname), service={"type": "ClusterIP"}))
    local = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "AddressUnusable"), CONVERGE_TIMEOUT_S)
    assert "LoadBalancer" in condition(local, "Registered")["message"]
    assert zone.rows() == foreign
    admin.patch(ENVOY_PROXY, key, {"spec": {"service": {"type": "LoadBalancer"}}})
    give_addresses(admin, key, "2001:db8::7", ADDRESS)
    live = admin.wait_until(ENVOY_PROXY, key, holds("Registered"), CONVERGE_TIMEOUT_S)
    assert recursor.addresses(hostname) == {ADDRESS, "2001:db8::7"}
    assert live["status"]["address"] == ADDRESS
    with proxy.counted() as requests:
        give_addresses(admin, key, ADDRESS, "2001:db8::7")
        time.sleep(QUIET_S)
    assert requests == [], "another order is no change"
    give_addresses(admin, key, "2001:db8::7")
    wait_rows(zone, foreign | pair(admin, live, hostname, kind="AAAA", content="2001:db8::7"))


def test_a_restart_sends_no_request(
    admin: Kube, namespace: str, start: Start, operator: OperatorProcess, proxy: FaultyProxy, zone: Zone
) -> None:
    """The confirmation is stored in the ledger entry, so after a restart no request is sent to the server."""
    key = Key(namespace, "web")
    start()
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, f"shop.{zone.name}"))
    live = registered(admin, key)
    rows = zone.rows()
    operator.stop()
    with proxy.counted() as requests:
        start()
        time.sleep(QUIET_S)
    assert requests == []
    assert zone.rows() == rows
    assert condition(admin.get(ENVOY_PROXY, key), "Registered") == condition(live, "Registered")


def test_a_crash_during_the_write_leaves_one_pair(
    admin: Kube, namespace: str, start: Start, operator: OperatorProcess, proxy: FaultyProxy, zone: Zone
) -> None:
    """Killed while the server writes, the operator finds its own pair after the restart and confirms it."""
    foreign = zone.rows()
    start()
    proxy.inject("PATCH", HttpFault(before=operator.kill))
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, f"shop.{zone.name}"))
    give_addresses(admin, Key(namespace, "web"), ADDRESS)
    operator.wait_dead(CONVERGE_TIMEOUT_S)
    start()
    live = registered(admin, Key(namespace, "web"))
    assert zone.rows() == foreign | pair(admin, live, f"shop.{zone.name}")
    assert zone.count() == len(zone.rows())


def test_drift_in_dns_is_repaired_by_the_resync(admin: Kube, namespace: str, start: Start, zone: Zone) -> None:
    """There are no watch events for edits in DNS; the resync reads the records and reverts the edits."""
    start("--sweep-interval-s=2")
    hostname = f"shop.{zone.name}"
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, hostname))
    registered(admin, Key(namespace, "web"))
    rows = zone.rows()
    zone.put(hostname, "A", "192.0.2.66")
    wait_rows(zone, rows)
    zone.remove(hostname, "A")
    wait_rows(zone, rows)


def test_two_tenants_can_not_have_one_hostname(
    admin: Kube, namespace: str, start: Start, proxy: FaultyProxy, zone: Zone
) -> None:
    """The second proxy gets ``HostnameTaken`` without a request to the server, and later the name of the first."""
    foreign = zone.rows()
    hostname = f"shop.{zone.name}"
    start()
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, hostname, "first"))
    first = registered(admin, Key(namespace, "first"))
    with proxy.counted() as requests:
        admin.create(ENVOY_PROXY, a_named_proxy(namespace, hostname, "second"))
        key = Key(namespace, "second")
        second = refused(admin, key, "HostnameTaken")
    assert requests == []
    assert "first" not in condition(second, "Registered")["message"]
    assert zone.rows() == foreign | pair(admin, first, hostname)
    admin.delete(ENVOY_PROXY, Key(namespace, "first"))
    second = registered(admin, key)
    wait_rows(zone, foreign | pair(admin, second, hostname))


def test_a_proxy_waits_for_a_foreign_name(admin: Kube, namespace: str, start: Start, zone: Zone) -> None:
    """A name with a foreign record is refused and not written, and registered once it is free."""
    hostname = f"shop.{zone.name}"
    foreign = zone.rows()
    zone.put(hostname, "A", "192.0.2.1")
    taken = zone.rows()
    start()
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, hostname))
    refused(admin, key, "HostnameTaken")
    time.sleep(QUIET_S)
    assert zone.rows() == taken
    zone.remove(hostname, "A")
    live = registered(admin, key)
    assert zone.rows() == foreign | pair(admin, live, hostname)


def test_a_name_outside_of_every_zone_blocks_nothing(admin: Kube, namespace: str, start: Start, zone: Zone) -> None:
    """It is refused with its reason, another proxy is registered, and its own deletion does not wait."""
    start()
    bad, good = Key(namespace, "bad"), Key(namespace, "good")
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, f"{namespace}.example.net", "bad"))
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, f"good.{zone.name}", "good"))
    refused(admin, bad, "ZoneNotConfigured")
    registered(admin, good)
    admin.delete(ENVOY_PROXY, bad)
    admin.wait_gone(ENVOY_PROXY, bad)


def test_a_deletion_waits_for_a_registry_that_is_down(
    admin: Kube, namespace: str, start: Start, powerdns: PowerDns, zone: Zone
) -> None:
    """While the server is down the proxy stays and its condition says why; then record and proxy are removed."""
    foreign = zone.rows()
    start()
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, f"shop.{zone.name}"))
    registered(admin, key)
    powerdns.stop()
    try:
        admin.delete(ENVOY_PROXY, key)
        admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", DEREGISTRATION_FAILED), CONVERGE_TIMEOUT_S)
        time.sleep(QUIET_S)
        assert admin.find(ENVOY_PROXY, key) is not None
    finally:
        powerdns.start()
    admin.wait_gone(ENVOY_PROXY, key, timeout_s=CONVERGE_TIMEOUT_S)
    assert zone.rows() == foreign


def test_an_abandoned_removal_is_completed_later(
    admin: Kube, namespace: str, start: Start, operator: OperatorProcess, powerdns: PowerDns, zone: Zone
) -> None:
    """With ``--abandon-after-s`` the proxy goes while the server is down, its record afterwards, despite a restart."""
    foreign = zone.rows()
    start("--abandon-after-s=2")
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, f"shop.{zone.name}"))
    live = registered(admin, key)
    powerdns.stop()
    try:
        admin.delete(ENVOY_PROXY, key)
        admin.wait_gone(ENVOY_PROXY, key, timeout_s=CONVERGE_TIMEOUT_S)
        operator.kill()
    finally:
        powerdns.start()
    assert zone.rows() == foreign | pair(admin, live, f"shop.{zone.name}")
    start()
    wait_rows(zone, foreign)


def test_a_record_is_orphaned_on_request(admin: Kube, namespace: str, start: Start, zone: Zone) -> None:
    """With ``deletionPolicy: Orphan`` the proxy is deleted and its record stays."""
    start()
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, with_spec(a_named_proxy(namespace, f"shop.{zone.name}"), deletionPolicy="Orphan"))
    registered(admin, key)
    rows = zone.rows()
    admin.delete(ENVOY_PROXY, key)
    admin.wait_gone(ENVOY_PROXY, key)
    time.sleep(QUIET_S)
    assert zone.rows() == rows


def test_the_key_is_never_logged(
    admin: Kube, namespace: str, start: Start, operator: OperatorProcess, proxy: FaultyProxy, zone: Zone
) -> None:
    """At the lowest level, after refused and failed requests, the log does not contain the key."""
    for nth, fault in enumerate((HttpFault(status=401), HttpFault(status=500), HttpFault(is_dropped=True)), 1):
        proxy.inject("GET", fault, nth=nth)
    start(f"--log-level={logging.getLevelName(logging.DEBUG).lower()}")
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, f"shop.{zone.name}"))
    registered(admin, Key(namespace, "web"))
    assert proxy.requests.count("GET") > 4
    assert zone.server.api_key not in operator.log_text()


@pytest.mark.parametrize("is_deleted", [False, True], ids=["kept", "deleted meanwhile"])
def test_another_operator_id_at_a_restart_keeps_the_names(
    admin: Kube, namespace: str, start: Start, operator: OperatorProcess, zone: Zone, *, is_deleted: bool
) -> None:
    """Records of the id before are rewritten, as the ledger knows them, and removed with their proxies."""
    foreign, hostname, key = zone.rows(), f"shop.{zone.name}", Key(namespace, "web")
    start()
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, hostname))
    live = registered(admin, key)
    operator.stop()
    if is_deleted:
        admin.delete(ENVOY_PROXY, key)
    start("--operator-id=renamed")
    if not is_deleted:
        wait_rows(zone, foreign | pair(admin, live, hostname, operator_id="renamed"))
        wait_until(
            lambda: (
                admin.get(PROXY_REGISTRATION, record_key(live))["spec"]["installations"]
                == [str(installation(admin, "renamed"))]
            ),
            CONVERGE_TIMEOUT_S,
            "the entry to forget the id before",
        )
        assert holds("Registered")(admin.get(ENVOY_PROXY, key))
        admin.delete(ENVOY_PROXY, key)
    admin.wait_gone(ENVOY_PROXY, key, timeout_s=CONVERGE_TIMEOUT_S)
    assert zone.rows() == foreign


def test_a_restored_cluster_leaves_the_records_of_the_cluster_it_came_from(
    admin: Kube, namespace: str, start: Start, operator: OperatorProcess, operator_kubeconfig: Path, zone: Zone
) -> None:
    """With its claims, entries and id, in another cluster: production's record stays, and status and log say so.

    The audit removes nothing of it either, and the restored objects do not stay in the way of their successors.
    """
    hostname, key, uid = f"shop.{zone.name}", Key(namespace, "web"), str(uuid.uuid4())
    production = Installation.of("the UID of kube-system there", OPERATOR_ID)
    zone.put(hostname, "A", "203.0.113.7")
    zone.put(f"_edge-owner.{hostname}", "TXT", Ownership(production, uid, 1).content)
    rows = zone.rows()
    reference = {"proxy": {"namespace": namespace, "name": "web", "uid": uid}}
    spec = reference | {"generation": 1, "address": "203.0.113.7", "ports": [], "hostname": hostname}
    spec |= {"registry": "powerdns", "installations": [str(production)]}
    admin.create(PROXY_REGISTRATION, restored(PROXY_REGISTRATION, f"proxy-{uid}", spec))
    admin.create(
        HOSTNAME_CLAIM,
        restored(HOSTNAME_CLAIM, hostname, reference | {"hostname": hostname, "installation": OPERATOR_NAMESPACE}),
    )
    flags = (f"--namespaces={namespace}",)
    start(*flags)
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, hostname))
    taken = refused(admin, key, "HostnameTaken")
    assert "in another cluster" in condition(taken, "Registered")["message"]
    assert operator.wait_for("records_left_to_another_cluster")["uid"] == uid
    wait_until(lambda: admin.find(PROXY_REGISTRATION, Key(OPERATOR_NAMESPACE, f"proxy-{uid}")) is None, what="no entry")
    assert owner_uid(admin.get(HOSTNAME_CLAIM, Key("", hostname))) == taken["metadata"]["uid"]
    assert zone.rows() == rows

    admin.delete(ENVOY_PROXY, key)
    admin.wait_gone(ENVOY_PROXY, key, timeout_s=CONVERGE_TIMEOUT_S)
    command = (sys.executable, "-m", "operator_app", "audit", "--fix", f"--kubeconfig={operator_kubeconfig}")
    powerdns = (*flags, *powerdns_flags(zone.server.url, zone))
    audited = subprocess.run((*command, *powerdns), capture_output=True, text=True, check=False, timeout=60)
    assert "removed" not in audited.stdout
    assert zone.rows() == rows


def restored(kind: Kind, name: str, spec: Object) -> Object:
    """An object of another cluster's operator, as a restore creates it."""
    metadata = {"name": name, "labels": {LABEL_MANAGED_BY: FIELD_MANAGER}}
    metadata |= {"namespace": OPERATOR_NAMESPACE} if kind.namespaced else {}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec}


def test_an_operator_without_an_id_does_not_start(operator: OperatorProcess, powerdns: PowerDns, zone: Zone) -> None:
    """A registry outside the cluster needs an id that somebody chose; the sentence says where to set it."""
    flags = (each for each in powerdns_flags(powerdns.url, zone) if not each.startswith("--operator-id"))
    operator.start(*flags, wait=False)
    assert operator.wait_dead() == 2
    assert (
        operator.log_text()
        .splitlines()[-1]
        .startswith("operator_app: the registry powerdns is outside the cluster and needs an id of this installation")
    )


def test_missing_settings_are_reported_in_one_sentence(operator: OperatorProcess) -> None:
    """Without the server's address the operator does not start, names the settings it needs, and exits with 2."""
    operator.start("--registry=powerdns", f"--operator-id={OPERATOR_ID}", wait=False)
    assert operator.wait_dead() == 2
    assert operator.log_text().splitlines()[-1] == (
        "operator_app: the powerdns registry needs powerdns_url, powerdns_zones and powerdns_api_key_file"
    )
