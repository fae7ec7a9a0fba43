"""Where a proxy is reached: at its load balancer, at nodes of the cluster, or by a name inside the cluster. Pure.

What becomes of an address, and whether it is of use outside, is for the registrar and its registries to say.
"""

from hashlib import blake2b
from typing import Final

from operator_app.api.kinds import NODE, POD, Object, key_of
from operator_app.api.models import ServiceType
from operator_app.desired import controller_uid
from operator_app.kube.store import Store
from operator_app.pods import is_ready
from operator_app.registration.nodes import ADDRESS_TYPES, UsableNode
from operator_app.results import Problem

MAX_ADDRESSES: Final = 16
"""Addresses of one proxy that are registered; the ledger's entry has room for no more."""


class Addresses:
    """The addresses of proxies, by what the store has of Services, nodes and Pods.

    ``node_ports`` is the setting ``node_port_addresses``; unless it is ``none``, the store has the cluster's nodes.
    """

    def __init__(self, store: Store, *, node_ports: str = "none") -> None:
        self._store = store
        self._types = ADDRESS_TYPES[node_ports]

    def of(self, proxy: Object, service: Object | None) -> tuple[str, ...]:
        """Where the proxy is reached by a Service of its own; IPv4 before IPv6, and never in an order that means much.

        Of a load balancer, all IP addresses that it gave, or else the first of its names in alphabetical order; an
        entry with both a name and an address counts as a name. Of a NodePort, the addresses of nodes, if the setting
        says so. Of anything else, the Service's name in the cluster.
        """
        if service is None or controller_uid(service) != proxy["metadata"]["uid"]:
            return ()
        if "deletionTimestamp" in service["metadata"]:
            return ()
        kind = service["spec"].get("type")
        if kind == ServiceType.LOAD_BALANCER:
            return _of_load_balancer(service)
        if kind == ServiceType.NODE_PORT and self._types:
            return self._of_nodes(proxy["metadata"]["uid"], service)
        key = key_of(service)
        return (f"{key.name}.{key.namespace}.svc",)

    def missing(self, service: Object | None) -> Problem:
        """The problem of a proxy that :meth:`of` finds no address of."""
        message = "the Service has no address to register yet"
        declared = (service or {}).get("spec", {})
        if declared.get("type") == ServiceType.NODE_PORT and self._types:
            message = (
                f"no schedulable node that serves the proxy has an address of the type {' or '.join(self._types)} "
                "(OPERATOR_APP_NODE_PORT_ADDRESSES)"
            )
        return Problem("NoAddress", message, ends_with_event=True)

    def _of_nodes(self, uid: str, service: Object) -> tuple[str, ...]:
        """Addresses of one type, since resolvers hand out any of them: the first type that a node has.

        With more nodes than there is room for, each proxy has others, and keeps them when nodes come and go.
        """
        nodes: list[UsableNode] = list(self._store.index_values(NODE))
        if service["spec"].get("externalTrafficPolicy") == "Local":
            serving = self._nodes_of_pods(uid)
            nodes = [each for each in nodes if each.name in serving]
        # Where not one is ready, that is news of the control plane and not of nodes: all of them stay.
        nodes = [each for each in nodes if each.is_ready] or nodes
        nodes.sort(key=lambda each: blake2b(f"{uid} {each.name}".encode(), digest_size=8).digest())
        for kind in self._types:
            found = list(dict.fromkeys(address for each in nodes for address in each.of_type(kind)))
            if found:
                return tuple(sorted(found[:MAX_ADDRESSES], key=_ipv4_first))
        return ()

    def _nodes_of_pods(self, uid: str) -> frozenset[str]:
        """The nodes of the proxy's ready Pods, or of all of its Pods where none is ready."""
        pods = [each for each in self._store.indexed(POD, uid) if "deletionTimestamp" not in each["metadata"]]
        pods = [each for each in pods if is_ready(each)] or pods
        return frozenset(name for each in pods if (name := each["spec"].get("nodeName")))


def _of_load_balancer(service: Object) -> tuple[str, ...]:
    given = service.get("status", {}).get("loadBalancer", {}).get("ingress", ())
    names = sorted(each["hostname"] for each in given if each.get("hostname"))
    ips = {each["ip"] for each in given if each.get("ip") and not each.get("hostname")}
    return tuple(sorted(ips, key=_ipv4_first)[:MAX_ADDRESSES]) or tuple(names[:1])


def _ipv4_first(ip: str) -> tuple[bool, str]:
    return (":" in ip, ip)
