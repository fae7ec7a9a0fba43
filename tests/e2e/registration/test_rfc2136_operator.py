"""The whole operator with DNS updates as its registry: conditions of EnvoyProxies, and answers of a resolver."""

from pathlib import Path

from operator_app.api.kinds import ENVOY_PROXY, NAMESPACE, Key
from operator_app.registration.dns import Ownership
from operator_app.registration.identity import Installation
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.powerdns.fixture import started
from tests.e2e.powerdns.recursor import Recursor
from tests.e2e.proxies import CONVERGE_TIMEOUT_S, a_proxy, condition, give_addresses, holds, is_refused
from tests.e2e.rfc2136.fixture import bind as bind  # noqa: PLC0414  # a fixture is found by its import
from tests.e2e.rfc2136.server import Bind

ADDRESS = "203.0.113.7"
OPERATOR_ID = "tests"


def flags(server: Bind, zone: str, key_file: Path | None = None) -> tuple[str, ...]:
    """The flags of an operator that writes this zone."""
    return (
        "--registry=rfc2136",
        f"--operator-id={OPERATOR_ID}",
        f"--rfc2136-server={server.address}",
        f"--rfc2136-zones={zone}",
        f"--rfc2136-key-file={key_file or server.key_file}",
        "--rfc2136-timeout-s=10",
    )


def test_a_resolver_finds_a_proxy_that_rfc2136_publishes(
    admin: Kube, namespace: str, operator: OperatorProcess, bind: Bind, tmp_path: Path
) -> None:
    """From its first address to its deletion; a wrong key is told, and the right one is read without a restart."""
    zone = bind.make_zone("operator.example")
    foreign, hostname, key = zone.rows(), "shop.operator.example", Key(namespace, "web")
    key_file = tmp_path / "tsig.key"
    key_file.write_text(bind.key_statement("operator").replace(bind.secret, "d3Jvbmcgd3Jvbmcgd3Jvbmc="))
    with started(lambda: Recursor(tmp_path, bind.dns_port)) as recursor:
        operator.start(*flags(bind, zone.name, key_file))
        spec = {"registration": {"hostname": hostname}, "service": {"type": "LoadBalancer"}}
        admin.create(ENVOY_PROXY, a_proxy(*key) | {"spec": a_proxy(*key)["spec"] | spec})
        give_addresses(admin, key, ADDRESS, "2001:db8::7")
        told = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "RegistryUnauthorized"), CONVERGE_TIMEOUT_S)
        assert "see the key, and both clocks" in condition(told, "Registered")["message"]
        assert zone.rows() == foreign

        key_file.write_text(bind.key_statement("operator"))
        live = admin.wait_until(ENVOY_PROXY, key, holds("Registered"), CONVERGE_TIMEOUT_S)
        wait_until(lambda: recursor.addresses(hostname) == {ADDRESS, "2001:db8::7"}, what="both addresses")
        cluster_uid = admin.get(NAMESPACE, Key("", "kube-system"))["metadata"]["uid"]
        owner = Ownership(Installation.of(cluster_uid, OPERATOR_ID), live["metadata"]["uid"], 1).content
        assert (f"_edge-owner.{hostname}", "TXT", 300, owner, False) in zone.rows()
        assert bind.secret not in operator.log_text()

        admin.delete(ENVOY_PROXY, key)
        admin.wait_gone(ENVOY_PROXY, key, timeout_s=CONVERGE_TIMEOUT_S)
        assert zone.rows() == foreign
        wait_until(lambda: recursor.addresses(hostname) == set(), what="the resolver to forget it")
