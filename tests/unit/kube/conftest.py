"""Fixtures of the tests of the client."""

from pathlib import Path

import pytest

from tests.unit.kube.scripted_client import kubeconfig_in


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    """A kubeconfig of a server that is never reached."""
    return kubeconfig_in(tmp_path)
