"""A campaign of faults for a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from operator_app.api.kinds import NAMESPACE
from tests.e2e.controlplane import AuditLog
from tests.e2e.faults.campaign import Campaign
from tests.e2e.kube import Kube
from tests.e2e.proxies import leave_nothing


@pytest.fixture(autouse=True)
def nothing_left(admin: Kube, operator_kubeconfig: Path) -> Iterator[None]:  # noqa: ARG001  # its namespace stays
    """No proxy of a test here is left for the operators of other tests, which would serve it."""

    def namespaces() -> set[str]:
        return {each["metadata"]["name"] for each in admin.list(NAMESPACE)}

    before = namespaces()
    yield
    for name in namespaces() - before:
        leave_nothing(admin, name)


@pytest.fixture
def campaign(admin: Kube, operator_kubeconfig: Path, audit: AuditLog, tmp_path: Path) -> Campaign:
    """A campaign that has not begun."""
    return Campaign(admin, operator_kubeconfig, audit, tmp_path)
