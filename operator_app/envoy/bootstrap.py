"""The bootstrap of one proxy: what Envoy reads once, when it starts, and can't reload. Pure.

Listeners, routes and clusters of the spec are in files of their own (``files``), which Envoy watches. Field names and
semantics are those of Envoy's v3 API; the settings for an untrusted network follow "Configuring Envoy as an edge proxy"
in Envoy's documentation.
"""

from typing import Final

from operator_app.api.models import EnvoyProxySpec, Protocol
from operator_app.envoy import internal
from operator_app.envoy.listeners import listener_name
from operator_app.envoy.messages import Message, extension, mounted_file

MAX_DOWNSTREAM_CONNECTIONS: Final = 10_000
"""Client connections of one proxy over all listeners; more are closed at once. Bounds memory and file descriptors."""


def bootstrap(spec: EnvoyProxySpec, *, listeners_file: str, clusters_file: str) -> Message:
    """The bootstrap of the proxy that ``spec`` declares; the two files are keys of its ConfigMap.

    Of ``spec`` it depends on the names of HTTP listeners, since the proxy is ready once the routes of each are loaded,
    on its IP families, and on whether it serves metrics.
    """
    listeners = [internal.readiness_listener(is_dual_stack=spec.service.is_dual_stack)]
    if spec.has_metrics:
        listeners.append(internal.metrics_listener(is_dual_stack=spec.service.is_dual_stack))
    http = sorted(listener_name(each) for each in spec.listeners if each.protocol is Protocol.HTTP)
    return {
        "admin": internal.admin_interface(),
        "overload_manager": {
            "resource_monitors": [
                extension(
                    "envoy.resource_monitors.global_downstream_max_connections",
                    "resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                    max_active_downstream_connections=MAX_DOWNSTREAM_CONNECTIONS,
                )
            ]
        },
        "dynamic_resources": {
            "lds_config": mounted_file(listeners_file),
            "cds_config": mounted_file(clusters_file),
        },
        "static_resources": {
            "listeners": listeners,
            "clusters": internal.clusters(http),
        },
    }
