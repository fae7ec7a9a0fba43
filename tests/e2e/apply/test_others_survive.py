"""What others have declared on our children survives every repair and every refusal."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import DEPLOYMENT, ENVOY_PROXY, SERVICE, Key, Kind, Object
from operator_app.desired import child_key
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import a_proxy, drift_of, wait_reconciled

CONTAINER: Final = "/spec/template/spec/containers/0"


@pytest.fixture(scope="module")
def one_operator(operator_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """One operator for all tests here."""
    process = OperatorProcess(operator_kubeconfig, tmp_path_factory.mktemp("others") / "operator.log")
    process.start()
    yield process
    process.stop()


@pytest.fixture
def key(admin: Kube, namespace: str, one_operator: OperatorProcess) -> Key:  # noqa: ARG001  # it works in the background
    """A converged proxy with a Service of type LoadBalancer."""
    key = Key(namespace, "web")
    admin.create(ENVOY_PROXY, a_proxy(namespace, service={"type": "LoadBalancer"}))
    wait_reconciled(admin, key)
    return key


@dataclass(frozen=True, slots=True)
class Case:
    """Somebody declares ``foreign`` on a child, and then changes it by ``edit``, which the operator has to repair."""

    name: str
    kind: Kind
    edit: list[Object]
    foreign: Object = field(default_factory=dict)


def op(name: str, path: str, value: object = None) -> Object:
    """One operation of a JSON patch."""
    return {"op": name, "path": path} | ({} if name == "remove" else {"value": value})


SERVICE_OF_OTHERS: Final = {
    "spec": {
        "loadBalancerSourceRanges": ["192.0.2.0/24"],
        "externalTrafficPolicy": "Local",
        "sessionAffinity": "ClientIP",
    },
    "metadata": {"annotations": {"example.com/note": "keep"}},
}
POD_OF_OTHERS: Final = {
    "spec": {
        "minReadySeconds": 3,
        "template": {
            "metadata": {"annotations": {"example.com/note": "keep"}},
            "spec": {
                "hostAliases": [{"ip": "192.0.2.1", "hostnames": ["a.example.com"]}],
                "tolerations": [{"key": "dedicated", "operator": "Exists"}],
                "containers": [
                    {
                        "name": "envoy",
                        "env": [{"name": "EXTRA", "value": "keep"}],
                        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                        "lifecycle": {"postStart": {"exec": {"command": ["true"]}}},
                    },
                    {"name": "sidecar", "image": "example.com/sidecar:v1"},
                ],
                "volumes": [{"name": "cache", "emptyDir": {}}],
            },
        },
    }
}
CASES: Final = (
    Case(
        "port renumbered and selector removed",
        SERVICE,
        [op("replace", "/spec/ports/0/port", 81), op("remove", "/spec/selector")],
        SERVICE_OF_OTHERS,
    ),
    Case(
        "protocol changed and type too",
        SERVICE,
        [op("replace", "/spec/ports/0/protocol", "UDP"), op("replace", "/spec/selector", {"a": "b"})],
        SERVICE_OF_OTHERS,
    ),
    Case(
        "env by value",
        DEPLOYMENT,
        [op("replace", f"{CONTAINER}/env/0", {"name": "POD_NAME", "value": "me"})],
        POD_OF_OTHERS,
    ),
    Case(
        "probe by command",
        DEPLOYMENT,
        [op("replace", f"{CONTAINER}/readinessProbe", {"exec": {"command": ["true"]}, "timeoutSeconds": 7})],
        POD_OF_OTHERS,
    ),
    Case(
        "hook by sleep",
        DEPLOYMENT,
        [op("replace", f"{CONTAINER}/lifecycle/preStop", {"sleep": {"seconds": 1}})],
        POD_OF_OTHERS,
    ),
    Case(
        "volume by another source",
        DEPLOYMENT,
        [op("replace", "/spec/template/spec/volumes/0", {"name": "config", "emptyDir": {}})],
        POD_OF_OTHERS,
    ),
    Case(
        "pod securityContext and a port removed with the environment changed",
        DEPLOYMENT,
        [
            op("remove", "/spec/template/spec/securityContext"),
            op("remove", f"{CONTAINER}/ports/0"),
            op("replace", f"{CONTAINER}/env/0", {"name": "POD_NAME", "value": "me"}),
        ],
        POD_OF_OTHERS,
    ),
)


def declare(admin: Kube, kind: Kind, child: Key, foreign: Object) -> Object:
    """Apply ``foreign`` as another manager, and give the stored child."""
    metadata = {"name": child.name, "namespace": child.namespace} | foreign.get("metadata", {})
    body = {"apiVersion": kind.api_version, "kind": kind.kind} | foreign | {"metadata": metadata}
    return admin.apply(kind, body, field_manager="platform")


def is_within(declared: object, stored: object) -> bool:
    """Whether everything that is declared is stored; items of lists of maps are found by their name."""
    if isinstance(declared, dict):
        return isinstance(stored, dict) and all(is_within(value, stored.get(name)) for name, value in declared.items())
    if isinstance(declared, list) and all(isinstance(each, dict) and "name" in each for each in declared):
        items = {each["name"]: each for each in stored} if isinstance(stored, list) else {}
        return all(is_within(each, items.get(each["name"])) for each in declared)
    return declared == stored


@pytest.mark.parametrize("wiped", [False, True], ids=["owned", "managedFields wiped"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_repair_removes_nothing_that_others_declared(admin: Kube, key: Key, case: Case, *, wiped: bool) -> None:
    """Whatever a foreign edit makes the API server refuse, the repair leaves every other foreign field where it was."""
    child = child_key(key)
    declare(admin, case.kind, child, case.foreign)
    if wiped:
        admin.patch(case.kind, child, {"metadata": {"managedFields": [{}]}})
        wait_until(lambda: not drift_of(admin, key), what="our fields to be ours again")
    before = admin.get(case.kind, child)
    assert is_within({name: case.foreign[name] for name in case.foreign if name != "metadata"}, before)

    admin.patch(case.kind, child, case.edit, patch_type="json", field_manager="editor")
    wait_until(lambda: not drift_of(admin, key), what=f"the repair of {case.name}")

    after = admin.get(case.kind, child)
    assert is_within(case.foreign, after)
    if case.kind == SERVICE:
        assert after["spec"] == before["spec"]
