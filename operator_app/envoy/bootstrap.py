"""EnvoyProxy spec in, Envoy out: the bootstrap of one tenant's proxy, and how that proxy is drained. Pure.

Kubernetes objects do not belong here (``desired.py`` mounts what this room renders), nor do rules about what a tenant
may write (``api.py``). Whatever a tenant writes becomes a value: never a key, a type, a regular expression or a format
string. Names of things made from tenants' names carry a prefix, so they cannot meet the proxy's own.

Equal specs give equal text: nothing here depends on a clock, a host or chance, and the order of listeners and backends,
which are maps by name, does not matter. Field names and meanings are those of Envoy's v3 API; the choices for an
untrusted network follow "Configuring Envoy as an edge proxy" in its documentation.
"""

import json
from hashlib import sha256
from typing import Final

from operator_app.api.models import ADMIN_PORT, EnvoyProxySpec
from operator_app.envoy.clusters import cluster
from operator_app.envoy.listeners import listener, readiness_listener
from operator_app.envoy.messages import Message, address, extension
from operator_app.errors import TerminalError

CONFIG_FILE: Final = "envoy.json"
"""Key in the ConfigMap, and so the file's name."""

CONFIG_DIRECTORY: Final = "/etc/envoy"
"""Where the ConfigMap is mounted; hides the sample configuration of the official images."""

MAX_BYTES: Final = 1_000_000
"""Upper bound of the rendered text. The API server takes ConfigMaps up to 1 MiB, keys included (``MaxSecretSize``)."""

READABLE_BYTES: Final = 100_000
"""Up to this size the text is then indented, which triples it and takes Python's encoder several times as long."""

MAX_DOWNSTREAM_CONNECTIONS: Final = 10_000
"""Client connections of one proxy, over all its listeners; more are closed at once. Bounds memory and descriptors."""


def bootstrap(spec: EnvoyProxySpec) -> Message:
    """The complete static configuration of the proxy that ``spec`` declares."""
    return {
        # No port of the Pod's own address: only a process inside the Pod can reach the admin interface.
        "admin": {"address": address("127.0.0.1", ADMIN_PORT), "ignore_global_conn_limit": True},
        "overload_manager": {
            "resource_monitors": [
                extension(
                    "envoy.resource_monitors.global_downstream_max_connections",
                    "resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                    max_active_downstream_connections=MAX_DOWNSTREAM_CONNECTIONS,
                )
            ]
        },
        "static_resources": {
            "listeners": [
                readiness_listener(),
                *(listener(each) for each in sorted(spec.listeners, key=lambda each: each.name)),
            ],
            "clusters": [cluster(each) for each in sorted(spec.backends, key=lambda each: each.name)],
        },
    }


def render(config: Message) -> str:
    """``config`` as the text of ``CONFIG_FILE``: sorted, ASCII, indented if people can be expected to read it.

    Raises ``TerminalError`` if it does not fit into a ConfigMap, which takes thousands of hosts or long paths: every
    list of the API may be full.
    """
    text = json.dumps(config, separators=(",", ":"), sort_keys=True) + "\n"
    if len(text) <= READABLE_BYTES:
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    if len(text) > MAX_BYTES:
        raise TerminalError(
            "ConfigurationTooLarge",
            f"the Envoy configuration takes {len(text)} bytes, and a ConfigMap holds {MAX_BYTES}: "
            "declare fewer routes and hosts, or divide them between several EnvoyProxies",
        )
    return text


def config_hash(text: str) -> str:
    """16 hexadecimal digits that change with the rendered text."""
    return sha256(text.encode()).hexdigest()[:16]
