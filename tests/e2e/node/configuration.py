"""The configuration files and command lines of the node's programs. Pure: paths go in, texts and arguments come out.

Versions: kubelet and kube-proxy 1.36, containerd 2.2 (configuration version 3), CNI 1.0, CoreDNS 1.13. Paths below
``/run``, ``/var/lib`` and ``/var/log`` are of the node's own mount namespace, where each begins empty.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from operator_app.api.kinds import Object
from tests.e2e.controlplane.components import SERVICE_NETWORK
from tests.e2e.node.addresses import FIRST, NODE_ADDRESS, POD_NETWORK, Member

CNI_PROGRAMS: Final = Path("/usr/lib/cni")
"""Where Debian's containernetworking-plugins has them."""

NAMESPACES: Final = ("unshare", "--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Runs what follows as process 1 of a node's own namespaces."""

EMPTY: Final = ("/run", "/var/lib", "/var/log")
"""Directories of the machine that the node's programs write to; inside, each is an empty one in memory."""

PAUSE_IMAGE: Final = "localhost/pause:1"
MAX_PODS: Final = 250
EVICTION_SIGNALS: Final = ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available")
ROUTED_TO_THE_NODE: Final = SERVICE_NETWORK
"""No interface has the addresses of Services: kube-proxy rewrites packets to them, which takes a route to there."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one node, all in one private directory. What serves all nodes of a run is the first one's."""

    directory: Path
    member: Member = FIRST

    def kubeconfig(self, name: str) -> Path:
        """The kubeconfig of one program."""
        return self.directory / f"{name}.kubeconfig"

    @property
    def kubelet(self) -> Path:
        """The kubelet's configuration."""
        return self.directory / "kubelet.yaml"

    @property
    def kubelet_certificate(self) -> Path:
        """What the kubelet shows to those who ask it for logs, or to run something."""
        return self.directory / "kubelet.crt"

    @property
    def kubelet_key(self) -> Path:
        """The private key of that certificate."""
        return self.directory / "kubelet.key"

    @property
    def kube_proxy(self) -> Path:
        """kube-proxy's configuration."""
        return self.directory / "kube-proxy.yaml"

    @property
    def containerd(self) -> Path:
        """Containerd's configuration."""
        return self.directory / "containerd.toml"

    @property
    def cni(self) -> Path:
        """The directory with the CNI network list."""
        return self.directory / "cni"

    @property
    def corefile(self) -> Path:
        """CoreDNS's configuration."""
        return self.directory / "Corefile"

    def of(self, member: Member) -> "Files":
        """The files of another node of the same run."""
        return Files(self.directory / member.name, member)

    def write(self, client_ca: Path, cgroup: str) -> None:
        """Write all but credentials. ``cgroup`` is the cgroup of the run, as ``/name``."""
        self.kubelet.write_text(yaml.safe_dump(kubelet_configuration(self, client_ca, cgroup)), encoding="utf-8")
        self.kube_proxy.write_text(yaml.safe_dump(kube_proxy_configuration(self)), encoding="utf-8")
        self.containerd.write_text(containerd_configuration(self), encoding="utf-8")
        self.corefile.write_text(corefile(self), encoding="utf-8")
        self.cni.mkdir()
        (self.cni / "10-pods.conflist").write_text(json.dumps(cni_network(self.member)), encoding="utf-8")


def kubelet_configuration(files: Files, client_ca: Path, cgroup: str) -> Object:
    """Authenticated and authorized as in production; what it would do to the machine itself is off."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": files.member.address,
        # One of several kubelets in a network namespace; whether it is ready, its Node says.
        "healthzPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(client_ca)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(files.kubelet_certificate),
        "tlsPrivateKeyFile": str(files.kubelet_key),
        "containerRuntimeEndpoint": f"unix://{files.member.containerd_socket}",
        "podLogsDir": f"/var/log/pods{files.member.suffix}",
        "clusterDNS": [NODE_ADDRESS],
        "clusterDomain": "cluster.local",
        # Nothing of the machine's own names: none of its servers can be reached from here.
        "resolvConf": "",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": files.member.cgroup(cgroup),
        # The node's own programs run in the cgroup of whoever started the tests.
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "makeIPTablesUtilChains": False,
        # A machine that is short of disk or memory is its user's business, not the tests'.
        "evictionHard": dict.fromkeys(EVICTION_SIGNALS, "0%"),
        "imageGCHighThresholdPercent": 100,
        "maxPods": MAX_PODS,
        "serializeImagePulls": False,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "volumePluginDir": str(files.member.kubelet_directory / "volume-plugins"),
    }


def kube_proxy_configuration(files: Files) -> Object:
    """Virtual addresses of Services by nftables."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(files.kubeconfig("kube-proxy"))},
        "hostnameOverride": FIRST.name,
        "mode": "nftables",
        "clusterCIDR": POD_NETWORK,
        "detectLocalMode": "ClusterCIDR",
        "healthzBindAddress": f"{NODE_ADDRESS}:10256",
        "metricsBindAddress": f"{NODE_ADDRESS}:10249",
        # The limits of connection tracking are the machine's, and can't be set from a network namespace.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def containerd_configuration(files: Files) -> str:
    """Version 3."""
    return f"""\
version = 3
root = "{files.member.containerd_directory}"
state = "{files.member.containerd_run}"

[grpc]
address = "{files.member.containerd_socket}"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
# Without CAP_SYS_RESOURCE no process may be made less likely to be killed than its parent.
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{CNI_PROGRAMS}"]
conf_dir = "{files.cni}"

[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = false
"""


def cni_network(member: Member) -> Object:
    """Each Pod at the end of a wire to the node, so that every packet is routed and passes kube-proxy's rules.

    On a bridge, the answer of one Pod to another would not.
    """
    ipam = {
        "type": "host-local",
        "dataDir": f"/run/cni{member.suffix}",
        "ranges": [[{"subnet": member.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "ptp", "ipMasq": False, "ipam": ipam}]}


def corefile(files: Files) -> str:
    """The cluster's names; every other name does not exist, at once, as there is nobody to ask."""
    return f"""\
cluster.local in-addr.arpa {{
    bind {NODE_ADDRESS}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {files.kubeconfig("coredns")}
    }}
}}
. {{
    bind {NODE_ADDRESS}
    errors
    template ANY ANY . {{
        rcode NXDOMAIN
    }}
}}
"""


def containerd(files: Files) -> list[str]:
    """Containerd's arguments."""
    return ["--config", str(files.containerd)]


def kubelet(files: Files) -> list[str]:
    """The kubelet's arguments; the first names the component."""
    return [
        "kubelet",
        f"--config={files.kubelet}",
        f"--kubeconfig={files.kubeconfig('kubelet')}",
        f"--root-dir={files.member.kubelet_directory}",
        f"--hostname-override={files.member.name}",
        f"--node-ip={files.member.address}",
    ]


def kube_proxy(files: Files) -> list[str]:
    """kube-proxy's arguments; the first names the component."""
    return ["kube-proxy", f"--config={files.kube_proxy}"]


def coredns(files: Files) -> list[str]:
    """CoreDNS's arguments."""
    return ["-conf", str(files.corefile)]
