"""The whole operator with PowerDNS as its registry: conditions of EnvoyProxies, and answers of DNS."""

import logging
import time
from collections.abc import Callable

import pytest

from operator_app.api.kinds import ENVOY_PROXY, SERVICE, Key, Object
from operator_app.cleanup import DEREGISTRATION_FAILED
from operator_app.registration.powerdns.dns import Ownership
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.powerdns.fixture import powerdns as powerdns  # noqa: PLC0414  # fixtures are found by their import
from tests.e2e.powerdns.fixture import proxy as proxy  # noqa: PLC0414
from tests.e2e.powerdns.fixture import zone as zone  # noqa: PLC0414
from tests.e2e.powerdns.proxy import FaultyProxy, HttpFault
from tests.e2e.powerdns.server import PowerDns, Row, Zone
from tests.e2e.proxies import CONVERGE_TIMEOUT_S, a_proxy, condition, holds, is_refused

TTL_S = 300
QUIET_S = 2.5

Start = Callable[..., None]


@pytest.fixture
def start(operator: OperatorProcess, proxy: FaultyProxy, powerdns: PowerDns, zone: Zone) -> Start:
    """A function that starts the operator with the test's zone, behind the faulty proxy, with further flags."""

    def run(*flags: str) -> None:
        operator.start(
            "--registry=powerdns",
            f"--powerdns-url={proxy.url}",
            f"--powerdns-zones={zone.name}",
            f"--powerdns-api-key-file={powerdns.key_file}",
            f"--powerdns-default-ttl-s={TTL_S}",
            "--powerdns-timeout-s=3",
            *flags,
        )

    return run


def a_named_proxy(namespace: str, hostname: str, name: str = "web", **registration: object) -> Object:
    """An EnvoyProxy with a hostname; keywords are further fields of its registration."""
    return a_proxy(namespace, name, registration={"hostname": hostname, **registration})


def registered(admin: Kube, key: Key) -> Object:
    """Wait until the EnvoyProxy is registered; the object."""
    return admin.wait_until(ENVOY_PROXY, key, holds("Registered"), CONVERGE_TIMEOUT_S)


def pair(proxy: Object, hostname: str, *, kind: str = "CNAME", content: str = "", ttl_s: int = TTL_S) -> set[Row]:
    """The two DNS records of a registered proxy; by default its Service's name is the address."""
    metadata = proxy["metadata"]
    key = Key(metadata["namespace"], metadata["name"])
    owner = Ownership("operator-app", metadata["uid"], key, metadata["generation"]).content
    address = content or f"{key.name}-envoy.{key.namespace}.svc."
    return {(hostname, kind, ttl_s, address, False), (f"_edge-owner.{hostname}", "TXT", ttl_s, owner, False)}


def wait_rows(zone: Zone, rows: set[Row], timeout_s: float = CONVERGE_TIMEOUT_S) -> None:
    """Wait until the zone has exactly these records."""
    wait_until(lambda: zone.rows() == rows, timeout_s, f"{rows} in {zone.name}, which has {zone.rows()}")


def test_dns_follows_a_proxy_from_creation_to_deletion(
    admin: Kube, namespace: str, start: Start, proxy: FaultyProxy, zone: Zone
) -> None:
    """Records follow address, TTL and hostname, cost no request while nothing changes, and are removed in the end."""
    foreign = zone.rows()
    first, second = f"shop.{zone.name}", f"store.{zone.name}"
    key = Key(namespace, "web")
    start()
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, first))
    live = registered(admin, key)
    assert zone.rows() == foreign | pair(live, first)
    assert zone.server.resolve(first, "CNAME") == [("CNAME", f"web-envoy.{namespace}.svc")]
    assert proxy.requests.count("PATCH") == 1

    admin.patch(ENVOY_PROXY, key, {"spec": {"service": {"type": "LoadBalancer"}, "registration": {"ttl": 20}}})
    service = Key(namespace, "web-envoy")
    admin.wait_until(SERVICE, service, lambda each: each["spec"]["type"] == "LoadBalancer")
    ingress = {"status": {"loadBalancer": {"ingress": [{"ip": "2001:db8::7"}]}}}
    admin.patch(SERVICE, service, ingress, subresource="status")
    live = registered(admin, key)
    wait_rows(zone, foreign | pair(live, first, kind="AAAA", content="2001:db8::7", ttl_s=20))

    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"hostname": second}}})
    live = registered(admin, key)
    wait_rows(zone, foreign | pair(live, second, kind="AAAA", content="2001:db8::7", ttl_s=20))
    assert zone.server.resolve(first, "AAAA") == []

    time.sleep(QUIET_S)
    with proxy.counted() as requests:
        time.sleep(QUIET_S)
    assert requests == [], "no request while nothing has changed"

    admin.delete(ENVOY_PROXY, key)
    admin.wait_gone(ENVOY_PROXY, key)
    assert zone.rows() == foreign


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
    operator.wait_dead(CONVERGE_TIMEOUT_S)
    start()
    live = registered(admin, Key(namespace, "web"))
    assert zone.rows() == foreign | pair(live, f"shop.{zone.name}")
    assert zone.count() == len(zone.rows())


def test_drift_in_dns_is_repaired_by_the_resync(admin: Kube, namespace: str, start: Start, zone: Zone) -> None:
    """There are no watch events for edits in DNS; the resync reads the records and reverts the edits."""
    start("--sweep-interval-s=2")
    hostname = f"shop.{zone.name}"
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, hostname))
    registered(admin, Key(namespace, "web"))
    rows = zone.rows()
    zone.put(hostname, "CNAME", "elsewhere.example.net.")
    wait_rows(zone, rows)
    zone.remove(hostname, "CNAME")
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
        refused = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "HostnameTaken"), CONVERGE_TIMEOUT_S)
    assert requests == []
    assert "first" not in condition(refused, "Registered")["message"]
    assert zone.rows() == foreign | pair(first, hostname)
    admin.delete(ENVOY_PROXY, Key(namespace, "first"))
    second = registered(admin, key)
    wait_rows(zone, foreign | pair(second, hostname))


def test_a_proxy_waits_for_a_foreign_name(admin: Kube, namespace: str, start: Start, zone: Zone) -> None:
    """A name with a foreign record is refused and not written, and registered once it is free."""
    hostname = f"shop.{zone.name}"
    foreign = zone.rows()
    zone.put(hostname, "A", "192.0.2.1")
    taken = zone.rows()
    start()
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, hostname))
    admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "HostnameTaken"), CONVERGE_TIMEOUT_S)
    time.sleep(QUIET_S)
    assert zone.rows() == taken
    zone.remove(hostname, "A")
    live = registered(admin, key)
    assert zone.rows() == foreign | pair(live, hostname)


def test_a_name_outside_of_every_zone_blocks_nothing(admin: Kube, namespace: str, start: Start, zone: Zone) -> None:
    """It is refused with its reason, another proxy is registered, and its own deletion does not wait."""
    start()
    bad, good = Key(namespace, "bad"), Key(namespace, "good")
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, f"{namespace}.example.net", "bad"))
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, f"good.{zone.name}", "good"))
    admin.wait_until(ENVOY_PROXY, bad, is_refused("Registered", "ZoneNotConfigured"), CONVERGE_TIMEOUT_S)
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
    assert zone.rows() == foreign | pair(live, f"shop.{zone.name}")
    start()
    wait_rows(zone, foreign)


def test_a_record_is_orphaned_on_request(admin: Kube, namespace: str, start: Start, zone: Zone) -> None:
    """With ``deletionPolicy: Orphan`` the proxy is deleted and its record stays."""
    start()
    key = Key(namespace, "web")
    admin.create(
        ENVOY_PROXY, a_proxy(namespace, registration={"hostname": f"shop.{zone.name}"}, deletionPolicy="Orphan")
    )
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
    for fault in (HttpFault(status=401), HttpFault(status=500), HttpFault(is_dropped=True)):
        proxy.inject("GET", fault, nth=len(proxy._faults.get("GET", ())) + 1)
    start(f"--log-level={logging.getLevelName(logging.DEBUG).lower()}")
    admin.create(ENVOY_PROXY, a_named_proxy(namespace, f"shop.{zone.name}"))
    registered(admin, Key(namespace, "web"))
    assert proxy.requests.count("GET") > 4
    assert zone.server.api_key not in operator.log_text()


def test_missing_settings_are_reported_in_one_sentence(operator: OperatorProcess) -> None:
    """Without the server's address the operator does not start, names the settings it needs, and exits with 2."""
    operator.start("--registry=powerdns", wait=False)
    assert operator.wait_dead() == 2
    assert operator.log_text().splitlines()[-1] == (
        "operator_app: the powerdns registry needs powerdns_url, powerdns_zones and powerdns_api_key_file"
    )
