"""A real node for the local control plane: kubelet, kube-proxy, containerd and CoreDNS, without a container engine.

    with ControlPlane() as cluster, Node(cluster) as node: ...

``node.py`` is the handle. It starts ``keeper.py``, a process outside that the node lives and dies with, which starts
``init.py``, the node's process 1, in mount, network and process namespaces of the node's own::

    tests ──stdin──► keeper (cgroup, relay) ──stdin──► unshare ► init ► containerd, kubelet, kube-proxy, coredns
                                                                          └► shims ► Pods

Each ends when its standard input does, and the kernel ends all of a process namespace with its process 1, so that
nothing survives whoever started it. Nothing here knows the operator: it is to the tests what any cluster's node is.
"""

from tests.e2e.node.node import Node, NodeError
from tests.e2e.node.requirements import NodeUnavailableError

__all__ = ["Node", "NodeError", "NodeUnavailableError"]
