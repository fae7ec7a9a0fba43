"""The children that a proxy has only where its spec asks for them, in canonical form. Pure.

Each function gives the body of one child, or ``None`` where the spec does not ask for it; ``desired`` adds metadata.
"""

from collections.abc import Iterator
from ipaddress import ip_address
from typing import Final

from operator_app.api.availability import Disruption
from operator_app.api.kinds import DEPLOYMENT, Object
from operator_app.api.models import METRICS_PORT, READINESS_PORT, EnvoyProxySpec
from operator_app.api.network import NetworkPeer

NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"
"""The label that the API server gives every Namespace, with its name."""

DNS_PORTS: Final = (53, 5353)
"""Ports of DNS servers. A NetworkPolicy sees the port of a server's Pod, which in some clusters is 5353."""

_EVERYWHERE: Final = ("0.0.0.0/0", "::/0")

_NEVER: Final = {"0.0.0.0/0": ["169.254.0.0/16"], "::/0": ["fd00:ec2::254/128", "fe80::/10"]}
"""Of everywhere, what a name must not lead to: the metadata services of clouds."""


def disruption_budget(spec: EnvoyProxySpec, selector: dict[str, str]) -> Object | None:
    """The PodDisruptionBudget: declared, or of one Pod where there are two or more."""
    most = spec.autoscaling.max_replicas if spec.autoscaling else spec.replicas
    declared = spec.disruption or (Disruption() if most > 1 else None)
    if declared is None:
        return None
    return {
        "spec": {
            "maxUnavailable": declared.max_unavailable,
            "selector": {"matchLabels": selector},
            # Else a proxy that never gets ready would keep its node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
    }


def autoscaler(spec: EnvoyProxySpec, deployment: str) -> Object | None:
    """The HorizontalPodAutoscaler of the Deployment called ``deployment``."""
    declared = spec.autoscaling
    if declared is None:
        return None
    target = {"type": "Utilization", "averageUtilization": declared.target_cpu_utilization_percentage}
    return {
        "spec": {
            "scaleTargetRef": {"apiVersion": DEPLOYMENT.api_version, "kind": DEPLOYMENT.kind, "name": deployment},
            "minReplicas": declared.min_replicas,
            "maxReplicas": declared.max_replicas,
            "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
        }
    }


def network_policy(spec: EnvoyProxySpec, namespace: str, selector: dict[str, str]) -> Object | None:
    """The NetworkPolicy of a proxy in ``namespace``.

    In: the listeners' ports from the declared clients, and from everybody the readiness port, which answers whether the
    proxy serves and what it has loaded, and the port for metrics where the spec asks for it. Out: DNS everywhere, and
    what the backends name.
    """
    declared = spec.network_policy
    if declared is None:
        return None
    internal = [_port(METRICS_PORT)] if spec.has_metrics else []
    internal.append(_port(READINESS_PORT))
    listeners: Object = {"ports": [_port(each) for each in sorted({each.container_port for each in spec.listeners})]}
    if declared.from_:
        listeners["from"] = [_peer(each) for each in declared.from_]
    dns = [_port(port, protocol) for port in DNS_PORTS for protocol in ("TCP", "UDP")]
    return {
        "spec": {
            "podSelector": {"matchLabels": selector},
            "policyTypes": ["Egress", "Ingress"],
            "ingress": [listeners, {"ports": internal}],
            "egress": [{"ports": dns}, *_egress(spec, namespace)],
        }
    }


def _egress(spec: EnvoyProxySpec, namespace: str) -> Iterator[Object]:
    """The rules for the backends: one for all namespaces, then one for each port outside of them.

    A policy sees the port of a Pod, not that of the Service in front of it, so a namespace is allowed with all ports.
    It knows no names: one that is not a Service's is allowed by its port.
    """
    namespaces: set[str] = set()
    ranges: dict[int, set[str]] = {}
    for endpoint in (each for backend in spec.backends for each in backend.addresses):
        here = ranges.setdefault(endpoint.port, set())
        try:
            address = ip_address(endpoint.host)
        except ValueError:
            found, is_service = _namespace_of(endpoint.host, namespace)
            namespaces.update(found)
            here.update(() if is_service else _EVERYWHERE)
        else:
            here.add(f"{address}/{address.max_prefixlen}")
    if namespaces:
        yield {"to": [{"namespaceSelector": _namespace(each)} for each in sorted(namespaces)]}
    for port, blocks in sorted(ranges.items()):
        left = _EVERYWHERE if blocks.issuperset(_EVERYWHERE) else sorted(blocks)
        if left:
            yield {"to": [{"ipBlock": _block(each)} for each in left], "ports": [_port(port)]}


def _namespace_of(host: str, own: str) -> tuple[tuple[str, ...], bool]:
    """The namespaces that a Service called ``host`` can be in, and whether the name can be nothing but a Service's.

    Pods resolve ``app``, ``app.team-a``, ``app.team-a.svc`` and the same with the cluster's domain; the second may as
    well be a name of two labels outside. One Pod of a headless Service is ``app-0.app.team-a.svc``.
    """
    labels = host.split(".")
    if len(labels) == 1:
        return (own,), True
    if "svc" in labels[2:4]:
        return (labels[labels.index("svc", 2) - 1],), True
    return ((labels[1],), False) if len(labels) == 2 else ((), False)


def _block(cidr: str) -> Object:
    return {"cidr": cidr, "except": _NEVER[cidr]} if cidr in _NEVER else {"cidr": cidr}


def _peer(peer: NetworkPeer) -> Object:
    if peer.cidr is not None:
        return {"ipBlock": {"cidr": peer.cidr}}
    selectors: Object = {}
    if peer.namespace is not None:
        selectors["namespaceSelector"] = _namespace(peer.namespace)
    if peer.pod_labels:
        selectors["podSelector"] = {"matchLabels": peer.pod_labels}
    return selectors


def _namespace(name: str) -> Object:
    return {"matchLabels": {NAMESPACE_LABEL: name}}


def _port(port: int, protocol: str = "TCP") -> Object:
    return {"port": port, "protocol": protocol}
