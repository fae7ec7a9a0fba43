"""The stand-in node: a kubelet for tests, on machines that have no container engine.

It registers a Node, and runs every Envoy of every Pod that the real scheduler binds to it: the real ``envoy`` binary,
with the Pod's own command line, environment, volumes, probes, hooks and grace period, and in a network namespace of
its own where the machine allows it. Where it does not, Envoy only validates each configuration, and the Node's label
``standin`` says so.

Nothing here knows the operator: it is to the tests what any cluster's node is. Not a kubelet either: no image is
pulled, no resource limit is enforced, no log is served, a Service's virtual IP is not routed (names of Services
resolve to ready Pods instead, so that a Service's port is reached where it equals the target port).
"""

from tests.e2e.node.standin import StandInNode

__all__ = ["StandInNode"]
