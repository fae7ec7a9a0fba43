"""Messages of Envoy's v3 API that several parts of a configuration use. Pure."""

from typing import Any, Final

Message = dict[str, Any]
"""One protobuf message in its JSON form."""

BUFFER_BYTES: Final = 32 * 1024
"""Soft limit of the read and write buffers of one connection. Envoy's default is 1 MiB, too much at 10,000 of them."""

CONFIG_DIRECTORY: Final = "/etc/envoy"
"""Mount point of the ConfigMap; it covers the sample configuration of the official images."""

_TYPE: Final = "type.googleapis.com/envoy.extensions."


def address(host: str, port: int) -> Message:
    """A TCP address. ``host`` is an IP address, or in a DNS cluster also a DNS name."""
    return {"socket_address": {"address": host, "port_value": port}}


def pipe(path: str) -> Message:
    """A Unix socket; with a leading ``@`` an abstract one, in the Pod's network namespace and in no file."""
    return {"pipe": {"path": path}}


def mounted_file(name: str, *, watched: str = CONFIG_DIRECTORY) -> Message:
    """The source of resources that Envoy reads from a key of the mounted ConfigMap, again after each change.

    ``watched`` is the mount whose changes count, by default the ConfigMap's.

    A kubelet replaces all files of a mount at once, by renaming a link called ``..data``, and only afterwards makes the
    visible names of new keys. So the path leads through that link, and what is watched is the directory that has it.
    """
    return {
        "path_config_source": {
            "path": f"{CONFIG_DIRECTORY}/..data/{name}",
            "watched_directory": {"path": watched},
        },
        "resource_api_version": "V3",
    }


def tcp_listener(name: str, port: int, filters: list[Message], *, is_dual_stack: bool = False) -> Message:
    """A listener on every IPv4 address, with ``is_dual_stack`` on every IPv6 address too, served by ``filters``.

    Not on both in any case: a node whose kernel has no IPv6 could not bind them.
    """
    v4 = address("0.0.0.0", port)  # noqa: S104  (the Pod's address is unknown at this time)
    both = {"socket_address": {"address": "::", "ipv4_compat": True, "port_value": port}}
    return {
        "name": name,
        "address": both if is_dual_stack else v4,
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [{"filters": filters}],
    }


def static_cluster(name: str, address: Message) -> Message:
    """A cluster of one address that is not resolved."""
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
    }


def router() -> Message:
    """The HTTP filter that forwards a request to the cluster of its route. It has to be the last HTTP filter."""
    return extension("envoy.filters.http.router", "filters.http.router.v3.Router")


def http_connection_manager(**fields: Any) -> Message:
    """The network filter that decodes HTTP; ``fields`` are the fields of ``HttpConnectionManager``."""
    return extension(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        **fields,
    )


def extension(name: str, message: str, **fields: Any) -> Message:
    """An extension with its typed configuration, whose type and fields are as in :func:`typed`."""
    return {"name": name, "typed_config": typed(message, **fields)}


def typed(message: str, **fields: Any) -> Message:
    """A typed configuration: ``message`` is the protobuf type without ``envoy.extensions.``, with these ``fields``."""
    return {"@type": _TYPE + message} | fields
