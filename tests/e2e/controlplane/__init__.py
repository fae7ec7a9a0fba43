"""A Kubernetes control plane for tests, built from source and run on this machine without any container engine.

``ControlPlane`` is the local one; ``ExternalCluster`` is any other, with the same surface (``Cluster``).
``python -m tests.e2e.controlplane`` builds it or runs it in the foreground. Nothing here knows what the tests test.
"""

from tests.e2e.controlplane.audit import AuditEntry, AuditLog, AuditUnavailableError, Mark, service_account_user
from tests.e2e.controlplane.build import BuildError, Report
from tests.e2e.controlplane.cluster import (
    OPERATOR_NAMESPACE,
    Cluster,
    ControlPlane,
    ExternalCluster,
    StartError,
    apply_crds,
)
from tests.e2e.controlplane.toolchain import ToolchainError

__all__ = [
    "OPERATOR_NAMESPACE",
    "AuditEntry",
    "AuditLog",
    "AuditUnavailableError",
    "BuildError",
    "Cluster",
    "ControlPlane",
    "ExternalCluster",
    "Mark",
    "Report",
    "StartError",
    "ToolchainError",
    "apply_crds",
    "service_account_user",
]
