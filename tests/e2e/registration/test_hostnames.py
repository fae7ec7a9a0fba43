"""Who may have a hostname: policies of the platform, two operators in one cluster, and names that rest."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from operator_app.api.kinds import (
    ENVOY_PROXY,
    HOSTNAME_CLAIM,
    HOSTNAME_POLICY,
    PROXY_REGISTRATION,
    Key,
    Object,
    key_of,
)
from tests.e2e.controlplane import Cluster
from tests.e2e.kube import Kube, KubeError, wait_until
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.outside import FLAGS, Outside
from tests.e2e.proxies import CONVERGE_TIMEOUT_S, a_proxy, condition, holds, is_refused, leave_nothing


@pytest.fixture
def second(admin: Kube, namespace: str) -> Iterator[str]:
    """Another namespace, of another tenant."""
    name = f"{namespace[:50]}-second"
    admin.create_namespace(name)
    yield name
    leave_nothing(admin, name)


@pytest.fixture
def policies(admin: Kube) -> Iterator[None]:
    """Removes every policy at the end of a test."""
    yield
    for each in admin.list(HOSTNAME_POLICY):
        admin.delete(HOSTNAME_POLICY, key_of(each))


def named(namespace: str, name: str, hostname: str | None) -> Object:
    """An EnvoyProxy with a hostname."""
    return a_proxy(namespace, name, registration={"hostname": hostname})


def a_policy(name: str, selector: Object, **spec: object) -> Object:
    """A HostnamePolicy."""
    return {
        "apiVersion": HOSTNAME_POLICY.api_version,
        "kind": HOSTNAME_POLICY.kind,
        "metadata": {"name": name},
        "spec": {"namespaceSelector": selector, **spec},
    }


def registered(admin: Kube, key: Key) -> Object:
    """Wait until a proxy is registered; the object."""
    return admin.wait_until(ENVOY_PROXY, key, holds("Registered"), CONVERGE_TIMEOUT_S)


def refused(admin: Kube, key: Key, reason: str) -> str:
    """Wait until a proxy is not registered for this reason; the message."""
    proxy = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", reason), CONVERGE_TIMEOUT_S)
    return str(condition(proxy, "Registered")["message"])


@pytest.mark.usefixtures("policies")
def test_a_policy_says_which_namespaces_may_have_which_hostnames(
    admin: Kube, namespace: str, second: str, operator: OperatorProcess, operator_kubeconfig: Path, outside: Outside
) -> None:
    """Refused before it is claimed, with a sentence; allowed as soon as a policy says so; and kept afterwards."""
    operator.start(*FLAGS)
    free, wanted = f"free.{namespace}.example.com", f"shop.{namespace}.example.com"
    admin.create(ENVOY_PROXY, named(namespace, "before", free))
    registered(admin, Key(namespace, "before"))
    mine = {"matchLabels": {"kubernetes.io/metadata.name": second}}
    admin.create(HOSTNAME_POLICY, a_policy("mine", mine, hostnames=[f"*.{namespace}.example.com"]))

    admin.create(ENVOY_PROXY, named(namespace, "web", wanted))
    assert f"no HostnamePolicy is for the namespace {namespace}" in refused(
        admin, Key(namespace, "web"), "HostnameNotAllowed"
    )
    assert admin.find(HOSTNAME_CLAIM, Key("", wanted)) is None
    assert outside.get(wanted) is None
    admin.patch(ENVOY_PROXY, Key(namespace, "before"), {"spec": {"registration": {"ttl": 60}}})
    wait_until(lambda: (outside.get(free) or {}).get("ttl") == 60, CONVERGE_TIMEOUT_S, "the edit outside")
    assert holds("Registered")(registered(admin, Key(namespace, "before"))), "what a proxy has it keeps"
    command = (sys.executable, "-m", "operator_app", "audit", f"--kubeconfig={operator_kubeconfig}", *FLAGS)
    audited = subprocess.run(
        (*command, f"--namespaces={namespace}"), capture_output=True, text=True, check=False, timeout=60
    )
    assert "hostname-not-allowed" in audited.stdout
    assert free in audited.stdout

    admin.create(ENVOY_PROXY, named(second, "web", wanted))
    registered(admin, Key(second, "web"))
    admin.delete(ENVOY_PROXY, Key(second, "web"))
    admin.wait_gone(ENVOY_PROXY, Key(second, "web"))
    admin.patch(HOSTNAME_POLICY, Key("", "mine"), {"spec": {"namespaceSelector": {"matchLabels": None}}})
    registered(admin, Key(namespace, "web"))
    assert outside.get(wanted) is not None


@pytest.mark.usefixtures("policies")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"hostnames": ["Shop.example.com"]}, "must be a DNS name in lower case"),
        ({"hostnames": ["a.*.example.com"]}, "must be a DNS name in lower case"),
        ({"suffixes": [".example.com"]}, "must be a DNS name"),
        (
            {"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
            "In and NotIn need values",
        ),
    ],
)
def test_a_policy_that_means_nothing_is_refused(admin: Kube, spec: Object, message: str) -> None:
    """The API server itself says what to write instead."""
    with pytest.raises(KubeError, match=message):
        admin.create(HOSTNAME_POLICY, a_policy("wrong", {}) | {"spec": {"namespaceSelector": {}} | spec})


@pytest.mark.timeout(900)
def test_two_operators_of_one_cluster_share_its_hostnames(
    admin: Kube,
    namespace: str,
    second: str,
    operator: OperatorProcess,
    control_plane: Cluster,
    tmp_path: Path,
) -> None:
    """Each serves its namespace with a ledger of its own; a hostname is one proxy's, and is freed for the other's."""
    hostname = f"shop.{namespace}.example.com"
    other = OperatorProcess(control_plane.kubeconfig, tmp_path / "other.log")
    operator.start(f"--namespaces={namespace}")
    other.start(f"--namespaces={second}", f"--namespace={second}")
    try:
        admin.create(ENVOY_PROXY, named(namespace, "web", hostname))
        first = registered(admin, Key(namespace, "web"))
        admin.create(ENVOY_PROXY, named(second, "web", hostname))
        refused(admin, Key(second, "web"), "HostnameTaken")
        assert admin.get(HOSTNAME_CLAIM, Key("", hostname))["spec"]["installation"] == OPERATOR_NAMESPACE

        command = (sys.executable, "-m", "operator_app", "audit", "--fix", f"--kubeconfig={control_plane.kubeconfig}")
        flags = (f"--namespace={second}", f"--namespaces={second}")
        audited = subprocess.run((*command, *flags), capture_output=True, text=True, check=False, timeout=60)
        assert audited.returncode == 0, audited.stdout + audited.stderr
        claim = admin.get(HOSTNAME_CLAIM, Key("", hostname))
        assert claim["spec"]["proxy"]["uid"] == first["metadata"]["uid"], "another operator's claim is left alone"

        admin.delete(ENVOY_PROXY, Key(namespace, "web"))
        registered(admin, Key(second, "web"))
        claim = admin.get(HOSTNAME_CLAIM, Key("", hostname))
        assert claim["spec"]["installation"] == second
        operator.stop()
        operator.start(f"--namespaces={namespace}")
        assert admin.get(HOSTNAME_CLAIM, Key("", hostname))["metadata"]["uid"] == claim["metadata"]["uid"]
        admin.delete(ENVOY_PROXY, Key(second, "web"))
        admin.wait_gone(HOSTNAME_CLAIM, Key("", hostname))
    finally:
        other.kill()


def test_a_hostname_that_was_given_back_rests_for_its_tenant(
    admin: Kube, namespace: str, second: str, operator: OperatorProcess
) -> None:
    """Another tenant waits and is told; the same one has it at once, deleted and made anew; in the end it is free.

    The claim stays the same object: if it were gone for a moment, the other tenant's proxy could take it.
    """
    hostname, other = f"shop.{namespace}.example.com", f"cart.{namespace}.example.com"
    operator.start("--hostname-rest-s=600")
    admin.create(ENVOY_PROXY, named(namespace, "web", hostname))
    first = registered(admin, Key(namespace, "web"))
    claimed = admin.get(HOSTNAME_CLAIM, Key("", hostname))
    admin.create(ENVOY_PROXY, named(second, "web", hostname))
    refused(admin, Key(second, "web"), "HostnameTaken")
    admin.patch(ENVOY_PROXY, Key(namespace, "web"), {"spec": {"registration": {"hostname": other}}})
    assert "another tenant has given the hostname" in refused(admin, Key(second, "web"), "HostnameResting")
    admin.create(ENVOY_PROXY, named(namespace, "again", hostname))
    registered(admin, Key(namespace, "again"))
    refused(admin, Key(second, "web"), "HostnameTaken")

    admin.delete(ENVOY_PROXY, Key(namespace, "again"))
    refused(admin, Key(second, "web"), "HostnameResting")
    operator.stop()
    operator.start("--hostname-rest-s=1")
    live = registered(admin, Key(second, "web"))
    claim = admin.get(HOSTNAME_CLAIM, Key("", hostname))
    assert claim["spec"]["proxy"]["uid"] == live["metadata"]["uid"]
    assert "releasedAt" not in claim["spec"]
    assert claim["metadata"]["uid"] == claimed["metadata"]["uid"]
    admin.delete(ENVOY_PROXY, Key(namespace, "web"))
    admin.wait_gone(ENVOY_PROXY, Key(namespace, "web"))
    assert admin.find(PROXY_REGISTRATION, Key(OPERATOR_NAMESPACE, f"proxy-{first['metadata']['uid']}")) is None
    admin.wait_gone(HOSTNAME_CLAIM, Key("", other))
