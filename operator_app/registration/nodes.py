"""The nodes of the cluster as far as clients are led to them: by the NodePort Services of proxies. Pure.

Only an operator whose setting ``node_port_addresses`` says so watches nodes. Which nodes a proxy publishes does not
belong here, but to ``addresses``.
"""

from collections.abc import Iterator
from ipaddress import ip_address
from typing import Final, NamedTuple

from operator_app.api.kinds import Object

ADDRESS_TYPES: Final = {
    "none": (),
    "external": ("ExternalIP",),
    "internal": ("InternalIP",),
    "external-or-internal": ("ExternalIP", "InternalIP"),
}
"""Values of the setting, and the types of node addresses that each publishes: the first that any node has."""

_EXCLUDED: Final = "node.kubernetes.io/exclude-from-external-load-balancers"
"""The label of nodes that no load balancer leads to (Kubernetes' well-known labels)."""


class UsableNode(NamedTuple):
    """A node that clients may be led to. ``addresses`` are its IP addresses as (type, address)."""

    name: str
    is_ready: bool
    addresses: tuple[tuple[str, str], ...]

    def of_type(self, kind: str) -> tuple[str, ...]:
        """Its addresses of one type, such as ``ExternalIP``."""
        return tuple(address for type_, address in self.addresses if type_ == kind)


def usable_node(node: Object) -> UsableNode | None:
    """The index of nodes: what is published of one. ``None`` where it is cordoned, being deleted, or excluded.

    A node that is not ready is usable as far as this goes: whether readiness counts depends on the other nodes.
    """
    metadata, status = node["metadata"], node.get("status") or {}
    is_excluded = _EXCLUDED in (metadata.get("labels") or {})
    if is_excluded or "deletionTimestamp" in metadata or (node.get("spec") or {}).get("unschedulable"):
        return None
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions") or ())
    return UsableNode(metadata["name"], is_ready, tuple(sorted(_addresses(status))))


def kept_of_node(node: Object) -> Object:
    """What the store keeps of a node besides its index, which has all that is read: what identifies it."""
    metadata = node["metadata"]
    return {"metadata": {name: metadata[name] for name in ("name", "uid", "resourceVersion")}}


def _addresses(status: Object) -> Iterator[tuple[str, str]]:
    """The IP addresses in a node's status; the API server does not validate them, and names are among them."""
    for each in status.get("addresses") or ():
        try:
            yield each["type"], ip_address(each["address"]).compressed
        except ValueError:
            continue
