"""Messages of Envoy's v3 API that every part of a configuration is made of. Pure."""

from typing import Any, Final

Message = dict[str, Any]

BUFFER_BYTES: Final = 32 * 1024

_TYPE: Final = "type.googleapis.com/envoy.extensions."


def address(host: str, port: int) -> Message:
    """A TCP address; ``host`` is an IP address, or a name that a DNS cluster resolves."""
    return {"socket_address": {"address": host, "port_value": port}}


def router() -> Message:
    """The HTTP filter that sends a request where its route says; the last filter of every chain."""
    return extension("envoy.filters.http.router", "filters.http.router.v3.Router")


def http_connection_manager(**fields: Any) -> Message:
    """The network filter that decodes HTTP, with ``fields`` of its message."""
    return extension(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        **fields,
    )


def extension(name: str, message: str, **fields: Any) -> Message:
    """An extension with its typed configuration: ``message`` below ``envoy.extensions.``, and its ``fields``."""
    return {"name": name, "typed_config": {"@type": _TYPE + message} | fields}
