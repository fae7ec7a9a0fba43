"""``python -m tests.cluster.kind DIRECTORY``: the configuration of a kind cluster that ``make test-cluster`` can test.

It writes ``kind.yaml`` there, for ``kind create cluster --config``, and beside it the audit policy, and makes the
directory ``audit``, in which the cluster's API server writes ``audit.log``. There are two workers, so that one can be
drained. The patch names no version of kubeadm's API: kind translates the arguments for the one that it uses
(https://github.com/kubernetes-sigs/kind/pull/4173).
"""

import sys
from pathlib import Path
from typing import Final

import yaml

from operator_app.api.kinds import Object
from tests.e2e.controlplane.audit import policy
from tests.e2e.operator_process import OPERATOR_NAMESPACE

POLICY: Final = "/etc/kubernetes/audit-policy.yaml"
LOGS: Final = "/var/log/kubernetes"


def main() -> None:
    """Write the files."""
    directory = Path(sys.argv[1]).resolve()
    (directory / "audit").mkdir(parents=True)
    (directory / "audit-policy.yaml").write_text(yaml.safe_dump(policy(OPERATOR_NAMESPACE)), encoding="utf-8")
    (directory / "kind.yaml").write_text(yaml.safe_dump(configuration(directory)), encoding="utf-8")


def configuration(directory: Path) -> Object:
    """A control plane with an audit log as the tests read it, and two workers. Pure."""
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [
            {
                "role": "control-plane",
                "kubeadmConfigPatches": [yaml.safe_dump(_api_server())],
                "extraMounts": [
                    {"hostPath": str(directory / "audit-policy.yaml"), "containerPath": POLICY, "readOnly": True},
                    {"hostPath": str(directory / "audit"), "containerPath": LOGS},
                ],
            },
            {"role": "worker"},
            {"role": "worker"},
        ],
    }


def _api_server() -> Object:
    volumes = [("audit-policy", POLICY, "File", True), ("audit-log", LOGS, "Directory", False)]
    return {
        "kind": "ClusterConfiguration",
        "apiServer": {
            "extraArgs": {
                "audit-policy-file": POLICY,
                "audit-log-path": f"{LOGS}/audit.log",
                "audit-log-mode": "blocking",
                "audit-log-maxsize": "0",
                "enable-admission-plugins": "NodeRestriction,OwnerReferencesPermissionEnforcement",
            },
            "extraVolumes": [
                {"name": name, "hostPath": path, "mountPath": path, "pathType": kind, "readOnly": is_read_only}
                for name, path, kind, is_read_only in volumes
            ],
        },
    }


if __name__ == "__main__":
    main()
