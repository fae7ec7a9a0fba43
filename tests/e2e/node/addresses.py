"""Names and addresses of nodes: the same in every run, because each run has a network namespace of its own.

A second node shares the first one's network namespace, and with it kube-proxy, CoreDNS and the way to the API server.
What a kubelet and a containerd keep to themselves is apart: names, addresses, directories, cgroups.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.e2e.controlplane.components import NODE_ADDRESS as NODE_ADDRESS  # noqa: PLC0414  # in its certificate, too

API_SERVER_PORT: Final = 6443
"""At ``NODE_ADDRESS``, inside the node's network; outside it is another one, on loopback."""

POD_NETWORK: Final = "10.244.0.0/20"
"""Of all nodes together."""


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a run, by its number from 0 to 3."""

    number: int

    @property
    def name(self) -> str:
        """The name of the Node object."""
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        """Where its kubelet is asked."""
        network, _, last = NODE_ADDRESS.rpartition(".")
        return f"{network}.{int(last) + self.number}"

    @property
    def pods(self) -> str:
        """The network of its Pods, a part of ``POD_NETWORK``."""
        return f"10.244.{4 * self.number}.0/22"

    @property
    def suffix(self) -> str:
        """What the names of its directories and programs end with."""
        return f"-{self.number}" if self.number else ""

    @property
    def kubelet_directory(self) -> Path:
        """What its kubelet keeps."""
        return Path(f"/var/lib/kubelet{self.suffix}")

    @property
    def containerd_directory(self) -> Path:
        """What its containerd keeps."""
        return Path(f"/var/lib/containerd{self.suffix}")

    @property
    def containerd_run(self) -> Path:
        """Sockets and state of its containerd."""
        return Path(f"/run/containerd{self.suffix}")

    @property
    def containerd_socket(self) -> Path:
        """Where its containerd is asked."""
        return self.containerd_run / "containerd.sock"

    def cgroup(self, run: str) -> str:
        """The cgroup below which its Pods get theirs, below the ``run``'s own, as ``/name``."""
        return f"{run}/{self.name}"


FIRST: Final = Member(0)
NODE_NAME: Final = FIRST.name
