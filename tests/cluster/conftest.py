"""Fixtures: a cluster with the operator installed as its manifests say, the sample on it, and the suite beside it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import DEPLOYMENT, ENVOY_PROXY, NAMESPACE, PROXY_REGISTRATION, Object
from tests.cluster.installed import (
    INSTALL_TIMEOUT_S,
    OPERATOR,
    PROXY,
    READY_TIMEOUT_S,
    RESTRICTED,
    SAMPLE,
    Installed,
    available,
    install,
)
from tests.cluster.rotation import Rotation
from tests.cluster.suite import Suite
from tests.delivery.images import ImageError, operator_archive
from tests.e2e.controlplane import ControlPlane, ExternalCluster, Report
from tests.e2e.kube import Kube
from tests.e2e.node import Node, NodeUnavailableError, packages
from tests.e2e.node.fixture import Nodes
from tests.e2e.prerequisites import lacking
from tests.e2e.proxies import holds

HERE: Final = Path(__file__).parent
ORDER: Final = ("killed", "installed", "disruptions", "traffic", "pods", "tokens", "suite", "rights")
"""Of the files. The suite takes the operator's place on a cluster that is not made here, and the rights are about all
that was done before."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test below this directory needs the operator in a cluster, and says so by its marker."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)
    items.sort(key=lambda item: _place(item.path))


def _place(file: Path) -> int:
    name = file.stem.removeprefix("test_")
    return ORDER.index(name) if file.parent == HERE and name in ORDER else -1


@pytest.fixture(scope="session")
def image(report: Report) -> Path:
    """The operator's image as an archive, built from the working tree."""
    if os.geteuid() != 0:
        lacking("building an image in a chroot needs root")
    try:
        return operator_archive(report)
    except packages.PackagesError as error:
        lacking(str(error))
    except ImageError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def installed(request: pytest.FixtureRequest, report: Report) -> Iterator[Installed]:
    """The operator as ``kubectl apply -k manifests`` installs it, both replicas ready, on two nodes that start here.

    The suite starts then, on a cluster of its own, so that it runs while everything else does. With ``E2E_KUBECONFIG``
    there is only the cluster that it names, which has the image already.
    """
    if shutil.which("kubectl") is None:
        lacking("needs kubectl on the path")
    with ExitStack() as resources:
        cluster = _external(resources) or _local(resources, request, report)
        install(cluster)
        cluster.admin.wait_until(DEPLOYMENT, OPERATOR, available(2), INSTALL_TIMEOUT_S)
        report("cluster: the operator is installed, two replicas are ready")
        if cluster.nodes.local is not None and any(item.path.stem == "test_suite" for item in request.session.items):
            request.getfixturevalue("suite").start()
        yield cluster


def _external(resources: ExitStack) -> Installed | None:
    kubeconfig, log = os.environ.get("E2E_KUBECONFIG"), os.environ.get("E2E_AUDIT_LOG")
    if not kubeconfig:
        return None
    if not log:
        lacking("needs the audit log of the cluster of E2E_KUBECONFIG; E2E_AUDIT_LOG names its file")
    cluster = resources.enter_context(ExternalCluster(Path(kubeconfig), audit_log=Path(log)))
    admin = resources.enter_context(Kube(cluster.kubeconfig))
    return Installed(cluster.kubeconfig, admin, cluster.audit(), Nodes(None), log=Path(log))


def _local(resources: ExitStack, request: pytest.FixtureRequest, report: Report) -> Installed:
    image: Path = request.getfixturevalue("image")
    logs: Path = request.getfixturevalue("tmp_path_factory").mktemp("nodes")
    plane = resources.enter_context(ControlPlane(report=report))
    return _on(plane, Node(plane, report, logs, [image], nodes=2), resources)


def _on(plane: ControlPlane, node: Node, resources: ExitStack) -> Installed:
    """A cluster with ``node``, which is started here and stopped with ``resources``; nothing is installed on it yet."""
    try:
        node.start()
    except NodeUnavailableError as error:
        lacking(str(error))
    resources.callback(node.stop)
    admin = resources.enter_context(Kube(plane.kubeconfig))
    return Installed(plane.kubeconfig, admin, plane.audit(), Nodes(node), log=plane.audit_log)


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest, report: Report, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """The end-to-end suite: on a cluster of its own, or on that of ``E2E_KUBECONFIG``, whose operator it replaces."""
    with ExitStack() as resources:
        if os.environ.get("E2E_KUBECONFIG"):
            installed: Installed = request.getfixturevalue("installed")
        else:
            plane = resources.enter_context(ControlPlane())
            installed = _on(plane, Node(plane, logs=tmp_path_factory.mktemp("suite-node")), resources)
            install(installed)
        suite = Suite(installed, tmp_path_factory.mktemp("suite"), report)
        resources.callback(suite.stop)
        yield suite


@pytest.fixture(scope="session")
def sample(installed: Installed) -> Iterator[Object]:
    """The sample in a namespace that enforces the restricted Pod Security Standard, once it is ready."""
    metadata = {"name": PROXY.namespace, "labels": {RESTRICTED: "restricted"}}
    installed.admin.apply(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    installed.kubectl("apply", "--server-side", "-f", str(SAMPLE))
    yield installed.admin.wait_until(ENVOY_PROXY, PROXY, holds("Ready"), READY_TIMEOUT_S)
    installed.kubectl("delete", "--timeout=120s", "-f", str(SAMPLE))
    left = [each for each in installed.admin.list(PROXY_REGISTRATION, OPERATOR.namespace) if _is_of_sample(each)]
    assert left == []


def _is_of_sample(record: Object) -> bool:
    proxy = record["spec"]["proxy"]
    return (proxy["namespace"], proxy["name"]) == tuple(PROXY)


@pytest.fixture(scope="session")
def rotation(installed: Installed, report: Report) -> Iterator[Rotation]:
    """From here on the operator's tokens last as short as Kubernetes allows, while somebody edits all the time."""
    with Rotation(installed, report) as started:
        yield started
