"""The manifests that the project ships: the CRDs, and the operator's identity."""

from pathlib import Path
from typing import Final

from tests.e2e.controlplane import Cluster
from tests.e2e.kube import Kube, apply_manifest
from tests.e2e.operator_process import OPERATOR_NAMESPACE, SERVICE_ACCOUNT
from tests.paths import MANIFESTS

CRDS: Final = tuple(sorted((MANIFESTS / "crd").glob("*.operator-app.dev.yaml")))
IDENTITY: Final = tuple(
    MANIFESTS / "base" / f"{name}.yaml" for name in ("namespace", "service-account", "rbac", "admission-policy")
)


def operator_identity(cluster: Cluster, admin: Kube) -> Path:
    """A kubeconfig of the operator's ServiceAccount, with the RBAC that is shipped and nothing more."""
    for file in IDENTITY:
        apply_manifest(admin, file)
    return cluster.kubeconfig_for(OPERATOR_NAMESPACE, SERVICE_ACCOUNT)
