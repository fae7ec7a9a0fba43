"""The API kinds that the operator reads or writes, with the address of an object of a kind. Pure.

The contents of objects do not belong here.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

Value = Any
"""Any decoded JSON value."""

Object = dict[str, Any]
"""One Kubernetes object as decoded JSON; always with ``apiVersion``, ``kind`` and ``metadata``."""

GROUP: Final = "edge.operator-app.dev"
FIELD_MANAGER: Final = "operator-app"
FINALIZER: Final = f"{GROUP}/registration"
LABEL_OWNER_UID: Final = f"{GROUP}/owner-uid"
LABEL_TENANT: Final = f"{GROUP}/tenant"
OPERATOR_NAMESPACE: Final = "edge-system"
"""The operator's own namespace, unless its settings name another one."""
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_INSTANCE: Final = "app.kubernetes.io/instance"
ANNOTATION_INSTALLATION: Final = f"{GROUP}/installation"
"""On a child: the namespace of the operator that applied it, by which two installations notice each other."""
ANNOTATION_ADOPTABLE_BY: Final = f"{GROUP}/adoptable-by"
"""On an object without a controller: the name of the EnvoyProxy that may adopt it."""

ANNOTATION_REVISION: Final = f"{GROUP}/revision"
"""On a Pod: which revision of the files that can't be reloaded it was started with."""
ANNOTATION_CONFIGURATION: Final = f"{GROUP}/configuration"
"""On a Pod: the digest of the files that its kubelet was last made to fetch."""


class Key(NamedTuple):
    """Address of one object among those of its kind; ``namespace`` is empty for cluster-scoped kinds."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


@dataclass(frozen=True, slots=True)
class Kind:
    """One API kind. ``group`` is empty for the core group; ``plural`` is the resource's name in the API's URLs."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """``group/version``, or ``version`` alone in the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def __str__(self) -> str:
        return self.kind


ENVOY_PROXY: Final = Kind(GROUP, "v1alpha1", "EnvoyProxy", "envoyproxies")
PROXY_REGISTRATION: Final = Kind(GROUP, "v1alpha1", "ProxyRegistration", "proxyregistrations")
HOSTNAME_CLAIM: Final = Kind(GROUP, "v1alpha1", "HostnameClaim", "hostnameclaims", namespaced=False)
HOSTNAME_POLICY: Final = Kind(GROUP, "v1alpha1", "HostnamePolicy", "hostnamepolicies", namespaced=False)
CONFIG_MAP: Final = Kind("", "v1", "ConfigMap", "configmaps")
SERVICE: Final = Kind("", "v1", "Service", "services")
DEPLOYMENT: Final = Kind("apps", "v1", "Deployment", "deployments")
POD_DISRUPTION_BUDGET: Final = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
HORIZONTAL_POD_AUTOSCALER: Final = Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
NETWORK_POLICY: Final = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
EVENT: Final = Kind("events.k8s.io", "v1", "Event", "events")
LEASE: Final = Kind("coordination.k8s.io", "v1", "Lease", "leases")
POD: Final = Kind("", "v1", "Pod", "pods")
NAMESPACE: Final = Kind("", "v1", "Namespace", "namespaces", namespaced=False)
NODE: Final = Kind("", "v1", "Node", "nodes", namespaced=False)

CHILD_KINDS: Final = (CONFIG_MAP, DEPLOYMENT, SERVICE)
"""The kinds of children that every proxy has, in the order in which they are applied: the ConfigMap before the
Deployment that mounts it.
"""

OPTIONAL_CHILD_KINDS: Final = (POD_DISRUPTION_BUDGET, HORIZONTAL_POD_AUTOSCALER, NETWORK_POLICY)
"""The kinds of children that a proxy has where its spec asks for them."""

ALL_CHILD_KINDS: Final = (*CHILD_KINDS, *OPTIONAL_CHILD_KINDS)


def key_of(obj: Object) -> Key:
    """The address of a decoded object."""
    metadata = obj["metadata"]
    return Key(metadata.get("namespace", ""), metadata["name"])
