"""``standin_node``: the session's stand-in node, to be imported by ``conftest.py``.

It is None on a cluster that was not started here: its own nodes run the Pods.
"""

import os
from collections.abc import Iterator

import pytest

from tests.e2e.controlplane import Cluster
from tests.e2e.node.standin import StandInNode


@pytest.fixture(scope="session")
def standin_node(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInNode | None]:
    """A node that runs Envoy Pods on the local control plane; None where ``E2E_KUBECONFIG`` names another cluster."""
    if os.environ.get("E2E_KUBECONFIG"):
        yield None
        return
    with StandInNode(control_plane.kubeconfig, log_file=tmp_path_factory.mktemp("standin") / "node.log") as node:
        yield node
