"""What an EnvoyProxy's spec says of who may connect to the proxy. Pure."""

from typing import Annotated, ClassVar

from pydantic import Field

from operator_app.api.fields import Cidr, LabelValue, NamespaceName
from operator_app.api.placement import keys_are_qualified
from operator_app.api.rules import ApiModel, Rule


class NetworkPeer(ApiModel):
    """Some clients: a range of addresses, or Pods of a namespace."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.cidr) != (has(self.namespace) || has(self.podLabels))",
            message="must have either cidr, or namespace and podLabels or one of them: write two entries for both",
            is_valid=lambda peer: (peer.cidr is not None) != (peer.namespace is not None or bool(peer.pod_labels)),
        ),
    )

    cidr: Cidr | None = None
    """Clients with these addresses, for example 203.0.113.0/24. A client outside of the cluster may appear with the
    address of a node or of a load balancer."""

    namespace: NamespaceName | None = None
    """Pods of this namespace, for example team-b. Left out beside podLabels: of the proxy's own namespace."""

    pod_labels: Annotated[dict[str, LabelValue], Field(min_length=1, max_length=16), keys_are_qualified()] | None = None
    """Pods with these labels. Left out beside namespace: all of its Pods."""


class NetworkPolicy(ApiModel):
    """Limits the proxy's connections: in to its listeners, out to its backends and to DNS.

    A cluster whose network does not enforce policies ignores it.
    """

    from_: Annotated[tuple[NetworkPeer, ...], Field(max_length=64, alias="from")] = ()
    """Who may connect to the listeners, at most 64 entries. Left out: everybody."""
