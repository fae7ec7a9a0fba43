"""Messages of Envoy's v3 API that several parts of a configuration use. Pure."""

from typing import Any, Final

Message = dict[str, Any]
"""One protobuf message in its JSON form."""

BUFFER_BYTES: Final = 32 * 1024
"""Soft limit of the read and write buffers of one connection. Envoy's default is 1 MiB, too much at 10,000 of them."""

_TYPE: Final = "type.googleapis.com/envoy.extensions."


def address(host: str, port: int) -> Message:
    """A TCP address. ``host`` is an IP address, or in a DNS cluster also a DNS name."""
    return {"socket_address": {"address": host, "port_value": port}}


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
    """An extension with its typed configuration.

    ``message`` is the protobuf type without ``envoy.extensions.``, ``fields`` are its fields.
    """
    return {"name": name, "typed_config": {"@type": _TYPE + message} | fields}
