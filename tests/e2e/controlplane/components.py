"""The command lines of the four components. Pure: paths and a port go in, arguments come out.

Flags are those of etcd 3.6 and Kubernetes 1.36. Whatever differs from a production cluster is here to make a cluster of
one test run private, fast and small; what a client of the API can notice stays as it is in production.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from operator_app.api.kinds import Object
from tests.e2e.controlplane.credentials import Authority

SERVICE_NETWORK: Final = "10.96.0.0/16"
SECOND_SERVICE_NETWORK: Final = "fd00:10:96::/112"
"""Where a Service gets its address of the other family, if it asks for two."""
KUBERNETES_SERVICE_ADDRESS: Final = "10.96.0.1"
NODE_ADDRESS: Final = "10.244.255.1"
"""Of a node, in its own network: kubelet, CoreDNS, and the way to the API server."""

ADDRESSES_INSIDE: Final = (KUBERNETES_SERVICE_ADDRESS, NODE_ADDRESS)
"""At which a node's Pods and the node itself find the API server."""

CONTROLLERS: Final = (
    "clusterrole-aggregation-controller",
    "deployment-controller",
    "disruption-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "horizontal-pod-autoscaler-controller",
    "namespace-controller",
    "node-lifecycle-controller",
    "pod-garbage-collector-controller",
    "replicaset-controller",
    "resourcequota-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "taint-eviction-controller",
)
"""What acts on the objects of a proxy, its Pods, their nodes and its namespace; not storage, jobs and the like."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where one control plane keeps its files, all below one private directory."""

    state: Path

    @property
    def etcd_socket(self) -> Path:
        """A Unix socket: no port to race for, and no way in for other users of the machine."""
        return self.state / "etcd.sock"

    @property
    def audit_log(self) -> Path:
        """What ``AuditLog`` reads."""
        return self.state / "audit.log"

    @property
    def audit_policy(self) -> Path:
        """What is recorded."""
        return self.state / "audit-policy.yaml"

    @property
    def egress(self) -> Path:
        """By which way the API server reaches kubelets and Pods."""
        return self.state / "egress.yaml"

    @property
    def proxy_socket(self) -> Path:
        """Where that way begins, once there is a node."""
        return self.state / "egress.sock"

    def kubeconfig(self, name: str) -> Path:
        """The kubeconfig of one identity."""
        return self.state / f"{name}.kubeconfig"


def etcd(layout: Layout) -> list[str]:
    """One member that trusts its file system and syncs nothing: its data need not survive the machine."""
    # Flags insist on addresses with a port for what would be told to other members; nothing ever listens there.
    never_used = "http://localhost:1"
    return [
        "etcd",
        "--name=e2e",
        f"--data-dir={layout.state / 'etcd'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls=unix://{layout.etcd_socket}",
        f"--advertise-client-urls={never_used}",
        f"--listen-peer-urls=unix://{layout.state / 'etcd-peer.sock'}",
        f"--initial-advertise-peer-urls={never_used}",
        f"--initial-cluster=e2e={never_used}",
        "--log-level=warn",
    ]


def kube_apiserver(layout: Layout, authority: Authority, port: int, gates: Sequence[str] = ()) -> list[str]:
    """Authentication by certificate and token, RBAC, and the audit log written before an answer is complete."""
    return [
        "kube-apiserver",
        f"--etcd-servers=unix://{layout.etcd_socket}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        # A node publishes the address at which its Pods find the API server; this loopback one would be refused.
        "--advertise-address=127.0.0.1",
        "--endpoint-reconciler-type=none",
        f"--service-cluster-ip-range={SERVICE_NETWORK},{SECOND_SERVICE_NETWORK}",
        f"--tls-cert-file={authority.serving_certificate_file}",
        f"--tls-private-key-file={authority.serving_key_file}",
        f"--client-ca-file={authority.ca_file}",
        f"--egress-selector-config-file={layout.egress}",
        f"--kubelet-certificate-authority={authority.ca_file}",
        f"--kubelet-client-certificate={authority.kubelet_client_certificate_file}",
        f"--kubelet-client-key={authority.kubelet_client_key_file}",
        "--kubelet-preferred-address-types=InternalIP",
        "--authorization-mode=Node,RBAC",
        # The first: a Pod's owner reference may block its owner's deletion only if its author could do so, too.
        # The second: namespaces of tests without a node keep their Pods off one that another test has started.
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement,PodNodeSelector",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={authority.service_account_key_file}",
        f"--service-account-signing-key-file={authority.service_account_key_file}",
        f"--audit-policy-file={layout.audit_policy}",
        f"--audit-log-path={layout.audit_log}",
        "--audit-log-mode=blocking",
        "--audit-log-maxsize=0",
        "--profiling=false",
        *(f"--feature-gates={gate}=true" for gate in gates),
    ]


def egress_selector(layout: Layout) -> Object:
    """Kubelets, Pods and Services are reached by the proxy that a node's keeper serves, in a network of their own."""
    proxy = {"proxyProtocol": "HTTPConnect", "transport": {"uds": {"udsName": str(layout.proxy_socket)}}}
    return {
        "apiVersion": "apiserver.k8s.io/v1beta1",
        "kind": "EgressSelectorConfiguration",
        "egressSelections": [{"name": "cluster", "connection": proxy}],
    }


def kube_controller_manager(layout: Layout, authority: Authority) -> list[str]:
    """Each controller under its own ServiceAccount, as fast as the API server lets it."""
    return [
        "kube-controller-manager",
        f"--kubeconfig={layout.kubeconfig('controller-manager')}",
        "--secure-port=0",
        f"--controllers={','.join(CONTROLLERS)}",
        "--leader-elect=false",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={authority.service_account_key_file}",
        f"--root-ca-file={authority.ca_file}",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        # Every test leaves a namespace to be deleted, and each waits for its Pods to drain.
        "--concurrent-namespace-syncs=30",
        "--controller-start-interval=0",
        "--horizontal-pod-autoscaler-sync-period=2s",
        "--profiling=false",
    ]


def kube_scheduler(layout: Layout) -> list[str]:
    """The default profile."""
    return [
        "kube-scheduler",
        f"--kubeconfig={layout.kubeconfig('scheduler')}",
        "--secure-port=0",
        "--leader-elect=false",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
    ]
