"""Fixtures: the image, a cluster with the operator installed as its manifests say, and the sample on it."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import DEPLOYMENT, Key, Object
from tests.delivery.images import Buildah, build_base, build_operator, missing_tools
from tests.e2e.controlplane import ControlPlane, Report
from tests.e2e.kube import POD, Kube
from tests.e2e.node import Node, NodeUnavailableError, packages
from tests.e2e.operator_process import OPERATOR_NAMESPACE
from tests.e2e.prerequisites import lacking
from tests.paths import ROOT

HERE: Final = Path(__file__).parent
OPERATOR: Final = Key(OPERATOR_NAMESPACE, "operator-app")
IMAGE_NAME: Final = "operator-app:dev"
"""As ``manifests/kustomization.yaml`` names it."""

INSTALL_TIMEOUT_S: Final = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test below this directory needs the operator in a cluster, and says so by its marker."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)


@dataclass(frozen=True, slots=True)
class Installed:
    """A cluster on which the operator runs as it is shipped."""

    plane: ControlPlane
    node: Node
    admin: Kube

    def kubectl(self, *arguments: str) -> str:
        """What kubectl prints, as the administrator. Fails the test where kubectl does."""
        command = ("kubectl", f"--kubeconfig={self.plane.kubeconfig}", *arguments)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode != 0:
            pytest.fail(f"{' '.join(arguments)} failed: {done.stdout[-2000:]}\n{done.stderr[-2000:]}", pytrace=False)
        return done.stdout

    def pods(self) -> list[Object]:
        """The operator's Pods that stay."""
        found = self.admin.list(POD, OPERATOR.namespace, label_selector="app.kubernetes.io/name=operator-app")
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    """Prints a line past pytest's capturing: what is built here takes minutes."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def print_line(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, file=sys.stderr, flush=True)

    return print_line


@pytest.fixture(scope="session")
def image(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The operator's image as an archive, built from the working tree."""
    if os.geteuid() != 0:
        lacking("building an image in a chroot needs root")
    try:
        packages.install(missing_tools, report)
    except packages.PackagesError as error:
        lacking(str(error))
    directory = tmp_path_factory.mktemp("image")
    buildah = Buildah(directory)
    started_mono = time.monotonic()
    report("image: making a base with debootstrap; about a minute")
    base = build_base(buildah, tmp_path_factory.mktemp("base"))
    report(
        f"image: the base is there after {time.monotonic() - started_mono:.0f} s; building the operator's image on it"
    )
    operator = build_operator(buildah, base)
    archive = directory / "operator-app.tar"
    buildah("push", operator, f"docker-archive:{archive}:{IMAGE_NAME}")
    report(f"image: {archive.stat().st_size >> 20} MiB, built in {time.monotonic() - started_mono:.0f} s")
    yield archive
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def installed(image: Path, report: Report, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """A cluster on which ``kubectl apply -k manifests`` has installed the operator, and both replicas are ready."""
    if shutil.which("kubectl") is None:
        lacking("needs kubectl on the path")
    with ControlPlane(report=report) as plane:
        node = Node(plane, report, tmp_path_factory.mktemp("node"), [image])
        try:
            node.start()
        except NodeUnavailableError as error:
            lacking(str(error))
        try:
            with Kube(plane.kubeconfig) as admin:
                cluster = Installed(plane, node, admin)
                cluster.kubectl("apply", "--server-side", "-k", "manifests")
                admin.wait_until(DEPLOYMENT, OPERATOR, available(2), INSTALL_TIMEOUT_S)
                report("cluster: the operator is installed, two replicas are ready")
                yield cluster
        finally:
            node.stop()


def available(replicas: int) -> Callable[[Object], bool]:
    """A predicate: a Deployment has that many Pods, all of its newest template and all available."""

    def predicate(deployment: Object) -> bool:
        status = deployment.get("status") or {}
        counts = {status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")}
        return counts == {replicas} and status.get("observedGeneration") == deployment["metadata"]["generation"]

    return predicate
