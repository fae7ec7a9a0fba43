"""Fixtures of the end-to-end tests: a cluster for the session, an administrator, a namespace for each test.

Under pytest-xdist each worker has a control plane of its own, so tests in different workers never meet.
"""

import os
import re
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from lightkube.core.exceptions import ConfigError

from tests.e2e.budget import avoidable
from tests.e2e.controlplane import (
    AuditLog,
    AuditUnavailableError,
    BuildError,
    Cluster,
    ControlPlane,
    ExternalCluster,
    Report,
    StartError,
    ToolchainError,
)
from tests.e2e.kube import Kube
from tests.e2e.node.fixture import Nodes
from tests.e2e.node.fixture import nodes as nodes  # noqa: PLC0414  # a fixture is found by its import
from tests.e2e.node.fixture import nodes_or_why_not as nodes_or_why_not  # noqa: PLC0414  # as above
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, leave_nothing
from tests.e2e.shipped import CRDS, operator_identity

HERE = Path(__file__).parent
LONG_S: Final = 900
"""A test that is allowed more than this takes minutes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test below this directory needs an API server, and says so by its marker.

    Files with the longest tests come first, then those with the most: begun last, one would keep a worker alone.
    """
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)
    tests = Counter(item.path for item in items)
    limits = ((item.path, item.get_closest_marker("timeout")) for item in items)
    long = {path for path, limit in limits if limit is not None and limit.args[0] > LONG_S}
    items.sort(key=lambda item: (item.path not in long, -tests[item.path]))


@pytest.fixture(scope="session")
def control_plane(report: Report) -> Iterator[Cluster]:
    """The cluster with the operator's CRDs: one started here, or the one that ``E2E_KUBECONFIG`` names."""
    external = os.environ.get("E2E_KUBECONFIG")
    log = os.environ.get("E2E_AUDIT_LOG")
    cluster: ExternalCluster | ControlPlane = (
        ExternalCluster(Path(external), crds=CRDS, audit_log=Path(log) if log else None)
        if external
        else ControlPlane(crds=CRDS, report=report)
    )
    with ExitStack() as resources:
        try:
            resources.enter_context(cluster)
        except (BuildError, ConfigError, StartError, ToolchainError) as error:
            pytest.fail(f"no cluster to test on: {error}", pytrace=False)
        yield cluster


@pytest.fixture(scope="session")
def crds(control_plane: Cluster) -> tuple[Path, ...]:  # noqa: ARG001  # starting it is what establishes them
    """The files of the operator's CRDs, which are established."""
    return CRDS


@pytest.fixture(scope="session")
def admin(control_plane: Cluster) -> Iterator[Kube]:
    """A client that may do everything."""
    with Kube(control_plane.kubeconfig) as kube:
        yield kube


@pytest.fixture
def audit(control_plane: Cluster) -> AuditLog:
    """The API server's audit log; without one the test is skipped."""
    try:
        return control_plane.audit()
    except AuditUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def namespace(admin: Kube, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new namespace, named after the test; afterwards nothing is left in it that would wait for an operator.

    A node that other tests have started takes its Pods only if the test has asked for one.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_"))[:30].strip("-")
    name = f"{slug}-{uuid.uuid4().hex[:8]}"
    admin.create_namespace(name, takes_nodes=not {"nodes", "nodes_or_why_not"}.isdisjoint(request.fixturenames))
    yield name
    leave_nothing(admin, name)


@pytest.fixture(scope="session")
def operator_kubeconfig(control_plane: Cluster, admin: Kube) -> Path:
    """The operator's own identity: its ServiceAccount with the RBAC that is shipped, and nothing more."""
    return operator_identity(control_plane, admin)


@pytest.fixture
def budget(control_plane: Cluster) -> Iterator[None]:
    """Fails the test when one of the operator's writes left its object as it was, by the API server's account."""
    try:
        audit = control_plane.audit()
    except AuditUnavailableError:
        yield
        return
    mark = audit.mark()
    yield
    assert avoidable(audit.writes(OPERATOR_USER, mark)) == []


@pytest.fixture
def operator(
    operator_kubeconfig: Path,
    tmp_path: Path,
    budget: None,  # noqa: ARG001
    request: pytest.FixtureRequest,
) -> Iterator[OperatorProcess]:
    """An operator that is not running yet; whatever runs at the end of the test is stopped.

    It is where Pods can be reached, if the test has a node.

    A round that crashed, or a write that changed nothing, fails the test whatever else it saw.
    """
    nodes: Nodes | None = request.getfixturevalue("nodes") if "nodes" in request.fixturenames else None
    process = OperatorProcess(operator_kubeconfig, tmp_path / "operator.log", nodes.local if nodes else None)
    yield process
    avoidable = process.metric("operator_app_writes_total", outcome="unchanged") if process.is_running else 0
    process.stop()
    assert avoidable == 0, process.log_text()
    assert not any(line.get("event") == "reconcile_crashed" for line in process.log()), process.log_text()


@pytest.fixture
def running_operator(operator: OperatorProcess) -> OperatorProcess:
    """An operator with its stores in sync."""
    operator.start()
    return operator
