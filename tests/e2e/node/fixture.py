"""``node``: the session's node, started when the first test asks for it; to be imported by ``conftest.py``."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import SERVICE, Key
from tests.e2e.controlplane import BuildError, Cluster, ControlPlane, ToolchainError
from tests.e2e.kube import NODE, Kube
from tests.e2e.node.network import PodNetwork, own_address
from tests.e2e.node.node import Node, NodeError
from tests.e2e.node.requirements import NodeUnavailableError
from tests.e2e.prerequisites import lacking

NETWORK_VARIABLE: Final = "E2E_NETWORK"
"""A network namespace from which the Pods of the cluster of ``E2E_KUBECONFIG`` are reached, as a file."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """What tests need to know of whatever runs the Pods: the node started here, or those of somebody's cluster.

    ``network`` is where the Pods are; ``None`` where only this machine's own network may lead to them.
    """

    local: Node | None
    network: PodNetwork | None

    def inside(self) -> AbstractContextManager[None]:
        """In this block, what this thread connects to is looked for where the Pods are."""
        return nullcontext() if self.network is None else self.network.inside()


def nodes_of(kubeconfig: Path, directory: Path) -> Nodes:
    """Those of somebody's cluster, whose network ``E2E_NETWORK`` may name; ``directory`` is an existing one."""
    named = os.environ.get(NETWORK_VARIABLE)
    if not named:
        return Nodes(None, None)
    with Kube(kubeconfig) as admin:
        api_server = admin.get(SERVICE, Key("default", "kubernetes"))["spec"]["clusterIP"]
        addresses = [each for node in admin.list(NODE) for each in node["status"]["addresses"]]
    internal = [each["address"] for each in addresses if each["type"] == "InternalIP"]
    address = own_address(Path(named), internal)
    return Nodes(None, PodNetwork(Path(named), f"https://{api_server}", address, directory))


@pytest.fixture(scope="session")
def nodes_or_why_not(
    control_plane: Cluster, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes | str]:
    """What runs the Pods; a sentence where nothing can."""
    if not isinstance(control_plane, ControlPlane):
        yield nodes_of(control_plane.kubeconfig, tmp_path_factory.mktemp("network"))
        return
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def report(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, file=sys.stderr, flush=True)

    node = Node(control_plane, report)
    try:
        node.start()
    except NodeUnavailableError as error:
        yield str(error)
        return
    except (BuildError, NodeError, ToolchainError) as error:
        pytest.fail(f"no node to run Pods: {error}", pytrace=False)
    try:
        yield Nodes(node, node.pod_network)
    finally:
        node.stop()


@pytest.fixture
def nodes(nodes_or_why_not: Nodes | str) -> Nodes:
    """What runs the Pods; elsewhere the test is skipped, and says why."""
    if isinstance(nodes_or_why_not, str):
        lacking(nodes_or_why_not)
    return nodes_or_why_not


@pytest.fixture
def pod_network(nodes: Nodes) -> PodNetwork:
    """Where the Pods are; the test is skipped where that is not known."""
    if nodes.network is None:
        pytest.skip(f"takes the network of the cluster's Pods, which {NETWORK_VARIABLE} does not name")
    return nodes.network
