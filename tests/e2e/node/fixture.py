"""``nodes``: the session's node, started when the first test asks for it; to be imported by ``conftest.py``.

``enforced_policies`` is for the few tests about NetworkPolicies, which import it themselves.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.controlplane import BuildError, Cluster, ControlPlane, Report, ToolchainError
from tests.e2e.node import network, policy_agent
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
def nodes_or_why_not(control_plane: Cluster, report: Report) -> Iterator[Nodes | str]:
    """What runs the Pods; a sentence where nothing can."""
    if not isinstance(control_plane, ControlPlane):
        yield Nodes(None)
        return
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


@pytest.fixture(scope="module")
def enforced_policies(
    nodes_or_why_not: Nodes | str,
    control_plane: Cluster,
    report: Report,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Node]:
    """The node that was started here, on which NetworkPolicies are enforced until the module's last test."""
    if isinstance(nodes_or_why_not, str):
        lacking(nodes_or_why_not)
    node = nodes_or_why_not.local
    if node is None:
        pytest.skip("the agent that enforces policies runs on the local node, and E2E_KUBECONFIG names another cluster")
    log = tmp_path_factory.mktemp("policies") / "policies.log"
    with ExitStack() as resources:
        try:
            resources.enter_context(policy_agent.enforced(node, control_plane.kubeconfig, log, report))
        except policy_agent.PoliciesUnavailableError as error:
            lacking(str(error))
        except (BuildError, NodeError, ToolchainError) as error:
            pytest.fail(str(error), pytrace=False)
        yield node
    assert policy_agent.left_behind(node) == []
