"""Which HTTP proxy leads to a server, by the environment: as Go's programs, and so kubectl, read it. Pure.

``HTTPS_PROXY`` (``HTTP_PROXY`` for servers of ``http://``) names the proxy, and ``NO_PROXY`` the servers that are
reached directly; lower-case names count where there is no upper-case one.
https://pkg.go.dev/golang.org/x/net/http/httpproxy
"""

from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit


def proxy_for(server: str, environ: Mapping[str, str]) -> str | None:
    """The URL of the proxy that leads to ``server``, the URL of a server; None if it is reached directly.

    The URL is as the environment has it, with ``http://`` where no scheme is written; it may hold credentials.
    """
    scheme = "https" if server.startswith("https://") else "http"
    proxy = _variable(environ, f"{scheme}_proxy")
    if not proxy or _is_direct(server, _variable(environ, "no_proxy")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def fault_of_proxy(proxy: str) -> str | None:
    """Why ``proxy`` can't be used, without any credentials in it; None if it can."""
    try:
        parts = urlsplit(proxy)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if host is None or port == 0 or not proxy.isprintable() or not proxy.isascii() or " " in proxy:
        return "is no URL with a host; write one such as http://proxy.example.org:3128"
    if scheme not in ("http", "https"):
        return f"has the scheme {scheme}, which is not supported; use a proxy of http:// or https://"
    return None


def _variable(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name.upper()) or environ.get(name) or ""


def _is_direct(server: str, no_proxy: str) -> bool:
    """Whether ``no_proxy`` names the server; one of this machine is always reached directly."""
    parts = urlsplit(server)
    host = (parts.hostname or "").removesuffix(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        address = ip_address(host)
    except ValueError:
        address = None
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    for entry in filter(None, map(str.strip, no_proxy.lower().split(","))):
        name, only_port = _split_port(entry)
        if only_port is not None and only_port != port:
            continue
        if name == "*" or _names_address(name, host) or (address is None and _names_host(name, host)):
            return True
    return False


def _split_port(entry: str) -> tuple[str, int | None]:
    """An entry without its port, and the port; brackets around an IPv6 address are removed."""
    name, colon, port = entry.rpartition(":")
    if colon and port.isascii() and port.isdigit() and (":" not in name or name.endswith("]")):
        return name.strip("[]"), int(port)
    return entry.strip("[]"), None


def _names_address(name: str, host: str) -> bool:
    """Whether ``name`` is an address or a network (``10.0.0.0/8``), and ``host`` an address in it."""
    try:
        return ip_address(host) in ip_network(name, strict=False)
    except ValueError:
        return False


def _names_host(name: str, host: str) -> bool:
    """``example.com`` names itself and what is below it, ``.example.com`` and ``*.example.com`` only what is below."""
    name = name.removeprefix("*")
    return host.endswith(name) if name.startswith(".") else host == name or host.endswith(f".{name}")
