"""An operator for chosen namespaces: permissions granted one by one, and a deleted namespace affects no other."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from operator_app.api.kinds import ENVOY_PROXY, NAMESPACE, Key, Kind, Object
from tests.e2e.controlplane import Cluster
from tests.e2e.kube import SERVICE_ACCOUNT, Kube, kind_of
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.proxies import a_proxy, condition, leave_nothing, wait_reconciled
from tests.paths import ROOT

ROLE_BINDING = Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
IDENTITY = "operator-namespaced"


def manifests(path: str) -> list[Object]:
    """The objects of a shipped file."""
    return list(yaml.safe_load_all((ROOT / "manifests" / path).read_text(encoding="utf-8")))


@pytest.fixture
def namespaces(admin: Kube) -> Iterator[tuple[str, str, str]]:
    """Three namespaces with random names; the operator below may serve the first two."""
    names = tuple(f"scoped-{letter}-{uuid.uuid4().hex[:8]}" for letter in "abc")
    for name in names:
        admin.create_namespace(name)
    yield names[0], names[1], names[2]
    for name in names:
        leave_nothing(admin, name)


@pytest.fixture
def scoped(
    admin: Kube,
    control_plane: Cluster,
    operator_kubeconfig: Path,  # noqa: ARG001  # it brings the ClusterRole and the operator's own namespace
    namespaces: tuple[str, str, str],
    tmp_path: Path,
) -> Iterator[OperatorProcess]:
    """An operator whose identity has the shipped rules in two namespaces, as the overlay grants them."""
    account = {"metadata": {"name": IDENTITY, "namespace": OPERATOR_NAMESPACE}}
    admin.apply(SERVICE_ACCOUNT, {"apiVersion": "v1", "kind": "ServiceAccount"} | account, force=True)
    (binding,) = manifests("overlays/namespaced/role-binding.yaml")
    binding["subjects"][0]["name"] = IDENTITY
    for name in namespaces[:2]:
        binding["metadata"]["namespace"] = name
        admin.apply(ROLE_BINDING, binding)
    role, release = manifests("overlays/namespaced/cluster-role-release.yaml")
    base = manifests("base/rbac.yaml")
    own = next(each for each in base if each["kind"] == "RoleBinding")
    hostnames = next(each for each in base if each.get("roleRef", {}).get("name") == "operator-app-hostnames")
    for bound in (release, own, hostnames):
        bound["metadata"]["name"] = bound["subjects"][0]["name"] = IDENTITY
    hostnames["metadata"]["name"] = f"{IDENTITY}-hostnames"
    for each in (role, release, own, hostnames):
        admin.apply(kind_of(each), each, force=True)
    operator = OperatorProcess(control_plane.kubeconfig_for(OPERATOR_NAMESPACE, IDENTITY), tmp_path / "operator.log")
    yield operator
    operator.kill()


@pytest.mark.timeout(900)
def test_each_namespace_is_served_for_itself(
    admin: Kube, scoped: OperatorProcess, namespaces: tuple[str, str, str]
) -> None:
    """Served namespaces converge, a forbidden one is logged and retried, and a deleted one affects no other."""
    allowed, leaving, forbidden = namespaces
    scoped.start(f"--namespaces={','.join(namespaces)}", wait=False)
    for name in namespaces:
        admin.create(ENVOY_PROXY, a_proxy(name))
    wait_reconciled(admin, Key(allowed, "web"))
    wait_reconciled(admin, Key(leaving, "web"))

    assert scoped.get("/readyz")[0] == 200
    troubled = {(line["kind"], line["namespace"]) for line in scoped.log() if line.get("event") == "watch_failed"}
    assert {("ConfigMap", forbidden), ("Deployment", forbidden), ("Service", forbidden)} <= troubled
    assert condition(admin.get(ENVOY_PROXY, Key(forbidden, "web")), "Ready") == {}

    admin.delete(NAMESPACE, Key("", leaving))
    # The namespace controller takes its time when many namespaces go at once.
    admin.wait_gone(NAMESPACE, Key("", leaving), timeout_s=90)
    admin.create(ENVOY_PROXY, a_proxy(allowed, "second"))
    wait_reconciled(admin, Key(allowed, "second"))


def test_an_unknown_namespace_is_refused_at_start(operator_kubeconfig: Path, tmp_path: Path) -> None:
    """A namespace that does not exist is an error at the start, reported in one sentence."""
    operator = OperatorProcess(operator_kubeconfig, tmp_path / "operator.log")
    operator.start("--namespaces=no-such-team", wait=False)
    assert operator.wait_dead() == 2
    last = operator.log_text().splitlines()[-1]
    assert last == "operator_app: there is no namespace 'no-such-team'; create it, or name another"


def test_a_namespace_that_cannot_exist_is_refused_at_start(operator_kubeconfig: Path, tmp_path: Path) -> None:
    """A list that is not separated by commas is refused with an example of one that is."""
    operator = OperatorProcess(operator_kubeconfig, tmp_path / "operator.log")
    operator.start("--namespaces=team-a team-b", wait=False)
    assert operator.wait_dead() == 2
    assert "write DNS labels separated by commas" in operator.log_text()
