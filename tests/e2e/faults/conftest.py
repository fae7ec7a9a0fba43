"""A campaign of faults for a test."""

from pathlib import Path

import pytest

from tests.e2e.controlplane import AuditLog
from tests.e2e.faults.campaign import Campaign
from tests.e2e.kube import Kube


@pytest.fixture
def campaign(admin: Kube, operator_kubeconfig: Path, audit: AuditLog, tmp_path: Path) -> Campaign:
    """A campaign that has not begun."""
    return Campaign(admin, operator_kubeconfig, audit, tmp_path)
