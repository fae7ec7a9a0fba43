"""The bootstrap configuration of one proxy: an EnvoyProxy's spec rendered as the file that Envoy reads. Pure.

Kubernetes objects do not belong here (``desired.py`` mounts the rendered file), nor does the validation of a spec
(``api``). Every string of a spec is rendered as a JSON value, never as a key, a type, a regular expression or a format
string. Names that are derived from a spec carry the prefix ``listener/`` or ``backend/``, so they can't collide with
the names of internal listeners.

Equal specs render to equal text: the output depends on no clock, host or random number, and not on the order of
listeners and backends, which are maps keyed by name. Field names and semantics are those of Envoy's v3 API; the
settings for an untrusted network follow "Configuring Envoy as an edge proxy" in Envoy's documentation.
"""

import json
from hashlib import sha256
from typing import Final

from operator_app.api.models import ADMIN_PORT, EnvoyProxySpec
from operator_app.envoy.clusters import cluster
from operator_app.envoy.listeners import listener, readiness_listener, virtual_hosts_bytes
from operator_app.envoy.messages import Message, address, extension
from operator_app.errors import TerminalError

CONFIG_FILE: Final = "envoy.json"
"""Key in the ConfigMap's data, which is also the name of the mounted file."""

CONFIG_DIRECTORY: Final = "/etc/envoy"
"""Mount point of the ConfigMap; it covers the sample configuration of the official images."""

MAX_BYTES: Final = 1_000_000
"""Upper bound of the rendered text. The API server accepts ConfigMaps up to 1 MiB with keys (``MaxSecretSize``)."""

READABLE_BYTES: Final = 100_000
"""Compact text up to this size is indented, which triples it and takes the encoder several times as long."""

MAX_DOWNSTREAM_CONNECTIONS: Final = 10_000
"""Client connections of one proxy over all listeners; more are closed at once. Bounds memory and file descriptors."""


def bootstrap(spec: EnvoyProxySpec) -> Message:
    """The complete bootstrap configuration of the proxy that ``spec`` declares.

    Its size is linear in that of ``spec`` but for the routes, which stand in the virtual host of every domain that they
    serve. Raises ``TerminalError`` if these alone are larger than ``MAX_BYTES``, before any of them is built.
    """
    virtual_hosts = sum(virtual_hosts_bytes(each) for each in spec.listeners)
    if virtual_hosts > MAX_BYTES:
        raise _too_large(virtual_hosts)
    return {
        # Loopback, so that only a process inside the Pod can reach the admin interface.
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
    """The text of ``CONFIG_FILE``: JSON with sorted keys in ASCII, indented up to ``READABLE_BYTES``.

    Raises ``TerminalError`` if the text is larger than ``MAX_BYTES``. A spec within the API's bounds reaches that only
    with long paths that many hosts share, or with thousands of endpoints.
    """
    text = json.dumps(config, separators=(",", ":"), sort_keys=True) + "\n"
    if len(text) <= READABLE_BYTES:
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    if len(text) > MAX_BYTES:
        raise _too_large(len(text))
    return text


def config_hash(text: str) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the rendered text."""
    return sha256(text.encode()).hexdigest()[:16]


def _too_large(size_bytes: int) -> TerminalError:
    return TerminalError(
        "ConfigurationTooLarge",
        f"the Envoy configuration takes {size_bytes} bytes, and a ConfigMap holds {MAX_BYTES}: declare fewer routes "
        "and hosts, above all fewer routes for wildcards or for every host, which count once for each host, or divide "
        "them between several EnvoyProxies",
    )
