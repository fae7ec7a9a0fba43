"""``node``: the session's node, started when the first test asks for it; to be imported by ``conftest.py``."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.controlplane import BuildError, Cluster, ControlPlane, ToolchainError
from tests.e2e.node import network
from tests.e2e.node.node import Node, NodeError
from tests.e2e.node.requirements import NodeUnavailableError
from tests.e2e.prerequisites import lacking

NETWORK_VARIABLE: Final = "E2E_NETWORK"
"""A network namespace from which the Pods of the cluster of ``E2E_KUBECONFIG`` are reached, as a file."""


class Nodes:
    """What tests need to know of whatever runs the Pods: the node started here, or those of somebody's cluster."""

    def __init__(self, local: Node | None) -> None:
        self.local = local

    def inside(self) -> AbstractContextManager[None]:
        """In this block, what this thread connects to is looked for where the Pods are."""
        if self.local is not None:
            return self.local.inside()
        named = os.environ.get(NETWORK_VARIABLE)
        return network.inside(Path(named)) if named else nullcontext()


@pytest.fixture(scope="session")
def nodes_or_why_not(control_plane: Cluster, pytestconfig: pytest.Config) -> Iterator[Nodes | str]:
    """What runs the Pods; a sentence where nothing can."""
    if not isinstance(control_plane, ControlPlane):
        yield Nodes(None)
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
        yield Nodes(node)
    finally:
        node.stop()


@pytest.fixture
def nodes(nodes_or_why_not: Nodes | str) -> Nodes:
    """What runs the Pods; elsewhere the test is skipped, and says why."""
    if isinstance(nodes_or_why_not, str):
        lacking(nodes_or_why_not)
    return nodes_or_why_not
