"""The API server and the identity to use: the Pod's service account or one kubeconfig file, as an ``Endpoint``.

A part of a kubeconfig that this operator does not support is refused in one sentence, never ignored: otherwise
credentials could be sent to a server, or for a user, that was not meant. No message contains a secret. Connections do
not belong here.

Meaning of the fields: https://kubernetes.io/docs/reference/config-api/kubeconfig.v1/
"""

import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from operator_app.errors import ConfigurationError
from operator_app.kube.proxies import fault_of_proxy, proxy_for

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
EXEC_API_VERSIONS: Final = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")

_REFUSED_USER: Final = {
    "as": "the operator acts as itself; give it credentials of its own",
    "as-uid": "the operator acts as itself; give it credentials of its own",
    "as-groups": "the operator acts as itself; give it credentials of its own",
    "as-user-extra": "the operator acts as itself; give it credentials of its own",
    "auth-provider": "Kubernetes removed it in v1.26; use an `exec` credential plugin",
}

_HOST_LABEL: Final = re.compile(r"[a-z0-9_]([-a-z0-9_]{0,61}[a-z0-9_])?")


@dataclass(frozen=True, slots=True)
class ExecPlugin:
    """A credential plugin: a program that prints an ``ExecCredential`` with a token."""

    api_version: str
    command: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One API server and one identity.

    ``proxy`` is the URL of the HTTP proxy that leads to the server, and ``tls_server_name`` what its certificate is
    checked against instead of the host in ``server``. ``ca``, ``client_certificate`` and ``client_key`` are PEM; at
    most one of ``token_file``, ``token``, ``exec_plugin`` and ``basic`` (user, password) is used, in this order.
    """

    server: str
    proxy: str | None = field(default=None, repr=False)
    tls_server_name: str | None = None
    ca: str | None = None
    insecure: bool = False
    client_certificate: str | None = field(default=None, repr=False)
    client_key: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    token: str | None = field(default=None, repr=False)
    exec_plugin: ExecPlugin | None = field(default=None, repr=False)
    basic: tuple[str, str] | None = field(default=None, repr=False)


def endpoint(
    kubeconfig: Path | None,
    context: str | None,
    *,
    environ: Mapping[str, str],
    service_account: Path = SERVICE_ACCOUNT,
) -> Endpoint:
    """The endpoint to use: ``kubeconfig`` if given, else in-cluster, else ``$KUBECONFIG``, else ``~/.kube/config``.

    A ``context`` asks for a kubeconfig, so the in-cluster identity is passed over. Reads files, blocking; meant for
    the start of the program. Raises ``ConfigurationError``.
    """
    if kubeconfig is None and context is None:
        in_cluster = _in_cluster(environ, service_account)
        if in_cluster is not None:
            return in_cluster
    path = kubeconfig or _path_from_environment(environ)
    return _Kubeconfig(path).endpoint(context, environ)


def is_token(text: str) -> bool:
    """Whether an Authorization header can carry ``text`` as a token: visible ASCII without blanks."""
    return text.isascii() and text.isprintable() and " " not in text and text != ""


def _fault_of_server(server: str) -> str | None:
    """Why ``server`` can't be the URL of an API server, without any credentials in it; None if it can."""
    if not server.startswith(("https://", "http://")):
        return f"names the server {server!r}; it must begin with https:// or http://"
    if "@" in server:
        return "names a server with credentials in its URL, where they would be shown; give them under `user`"
    wrong = f"names the server {server!r}; write a host and a port up to 65535, such as https://api.example.org:6443"
    if not server.isprintable() or not server.isascii() or re.search(r"[ ?#\\]", server):
        return wrong
    try:
        parts = urlsplit(server)
        host, port = parts.hostname or "", parts.port
        if ":" in host:
            IPv6Address(host)
    except ValueError:
        return wrong
    is_host = ":" in host or (len(host) <= 253 and all(map(_HOST_LABEL.fullmatch, host.removesuffix(".").split("."))))
    return None if is_host and port != 0 else wrong


def _in_cluster(environ: Mapping[str, str], service_account: Path) -> Endpoint | None:
    """The Pod's own service account: https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    token_file = service_account / "token"
    if not host or not port or not token_file.is_file():
        return None
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    if fault := _fault_of_server(server):
        raise ConfigurationError(f"The environment (KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT) {fault}.")
    return Endpoint(
        server=server,
        proxy=_proxy_of_environment(server, environ),
        ca=_read(service_account / "ca.crt", "the service account's CA"),
        token_file=token_file,
    )


def _proxy_of_environment(server: str, environ: Mapping[str, str]) -> str | None:
    proxy = proxy_for(server, environ)
    if proxy is not None and (fault := fault_of_proxy(proxy)):
        raise ConfigurationError(f"The proxy that the environment (HTTPS_PROXY) names for {server} {fault}.")
    return proxy


def _path_from_environment(environ: Mapping[str, str]) -> Path:
    value = environ.get("KUBECONFIG", "")
    if os.pathsep in value:
        raise ConfigurationError(
            f"KUBECONFIG={value} lists several files, which is not supported; name one file, for example the output "
            "of `kubectl config view --flatten`."
        )
    return Path(value or "~/.kube/config")


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what} at {path} cannot be read: {error}.") from error


class _Kubeconfig:
    """One kubeconfig file; relative paths in it count from its folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._path = path.expanduser()
            is_there = self._path.is_file()
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(f"The kubeconfig at {path} cannot be read: {error}.") from error
        if not is_there:
            raise ConfigurationError(
                f"There is no kubeconfig at {self._path}, and this is not a Pod with a service account; set KUBECONFIG."
            )
        try:
            content = yaml.safe_load(_read(self._path, "The kubeconfig"))
        except (yaml.YAMLError, ValueError, RecursionError):
            # The parser also raises errors of dates and numbers. Their messages may quote a secret.
            raise ConfigurationError(f"The kubeconfig {self._path} is not YAML.") from None
        if not isinstance(content, dict):
            raise self._fault("is not a mapping")
        self._content: dict[str, Any] = content

    def endpoint(self, context: str | None, environ: Mapping[str, str]) -> Endpoint:
        name = context or self._content.get("current-context")
        if not name:
            raise self._fault("has no current-context; name a context")
        chosen = self._entry("context", name)
        cluster = self._entry("cluster", chosen.get("cluster"))
        user = self._entry("user", chosen["user"]) if chosen.get("user") else {}
        self._refuse(user, _REFUSED_USER)
        server = (self._text(cluster, "server") or "").strip()
        if fault := _fault_of_server(server):
            raise self._fault(fault)
        ca = self._pem(cluster, "certificate-authority")
        insecure = cluster.get("insecure-skip-tls-verify") or False
        if not isinstance(insecure, bool):
            raise self._fault(
                "has an `insecure-skip-tls-verify` that is neither true nor false; write it without quotes"
            )
        if insecure and ca:
            raise self._fault("has both a certificate authority and insecure-skip-tls-verify; keep one of them")
        certificate, key = self._pem(user, "client-certificate"), self._pem(user, "client-key")
        if (certificate is None) != (key is None):
            raise self._fault("has a client certificate without its key, or the reverse")
        token_file = self._text(user, "tokenFile")
        return Endpoint(
            server=server,
            proxy=self._proxy(cluster) or _proxy_of_environment(server, environ),
            tls_server_name=self._tls_server_name(cluster),
            ca=ca,
            insecure=insecure,
            client_certificate=certificate,
            client_key=key,
            token_file=self._relative(token_file) if token_file else None,
            token=self._token(user),
            exec_plugin=self._exec_plugin(user["exec"]) if user.get("exec") else None,
            basic=self._basic(user),
        )

    def _proxy(self, cluster: Mapping[str, Any]) -> str | None:
        proxy = (self._text(cluster, "proxy-url") or "").strip() or None
        if proxy is not None and (fault := fault_of_proxy(proxy)):
            raise self._fault(f"has a `proxy-url` that {fault}")
        return proxy

    def _tls_server_name(self, cluster: Mapping[str, Any]) -> str | None:
        name = self._text(cluster, "tls-server-name") or None
        if name is not None and not (len(name) <= 253 and all(map(_HOST_LABEL.fullmatch, name.split(".")))):
            raise self._fault("has a `tls-server-name` that is no host name")
        return name

    def _entry(self, what: str, name: object) -> dict[str, Any]:
        """The named cluster, context or user."""
        for item in self._list(self._content, f"{what}s"):
            if isinstance(item, dict) and item.get("name") == name and isinstance(item.get(what), dict):
                return dict(item[what])
        raise self._fault(f"has no {what} named {name!r}")

    def _text(self, entry: Mapping[str, Any], name: str) -> str | None:
        """A text; the error about another type does not show the value, which may be a secret."""
        value = entry.get(name)
        if value is not None and not (isinstance(value, str) and "\0" not in value):
            raise self._fault(f"has a `{name}` that is not text; put it in quotes")
        return value

    def _list(self, entry: Mapping[str, Any], name: str) -> list[Any]:
        value = entry.get(name) or []
        if not isinstance(value, list):
            raise self._fault(f"has `{name}` that is not a list; begin each of its entries with a dash")
        return value

    def _token(self, user: Mapping[str, Any]) -> str | None:
        token = (self._text(user, "token") or "").strip()
        if token and not is_token(token):
            raise self._fault("has a `token` that cannot be sent; write it on one line, without blanks in it")
        return token or None

    def _basic(self, user: Mapping[str, Any]) -> tuple[str, str] | None:
        """User and password; neither may contain a control character, nor the user a colon (RFC 7617, section 2)."""
        username, password = self._text(user, "username"), self._text(user, "password") or ""
        if not username:
            return None
        if not (username + password).isprintable() or ":" in username:
            raise self._fault(
                "has a `username` or a `password` with a line break or another character not allowed there"
            )
        return username, password

    def _refuse(self, entry: Mapping[str, Any], refused: Mapping[str, str]) -> None:
        for name, instead in refused.items():
            if entry.get(name):
                raise self._fault(f"sets `{name}`, which is not supported: {instead}")

    def _pem(self, entry: Mapping[str, Any], name: str) -> str | None:
        """Inline data wins over a file, as in kubectl."""
        if data := entry.get(f"{name}-data"):
            try:
                return base64.b64decode(data, validate=True).decode()
            except (binascii.Error, TypeError, ValueError) as error:
                raise self._fault(f"holds `{name}-data` that is not base64 of PEM") from error
        path = self._text(entry, name)
        return _read(self._relative(path), f"`{name}`") if path else None

    def _exec_plugin(self, entry: object) -> ExecPlugin:
        if not isinstance(entry, dict):
            raise self._fault("has an `exec` that is not a mapping")
        api_version, command = entry.get("apiVersion"), self._text(entry, "command") or ""
        if api_version not in EXEC_API_VERSIONS:
            raise self._fault(
                f"has an exec plugin of version {api_version!r}; supported are {', '.join(EXEC_API_VERSIONS)}"
            )
        if entry.get("interactiveMode") == "Always":
            raise self._fault("has an exec plugin that insists on a terminal, which an operator does not have")
        if entry.get("provideClusterInfo"):
            raise self._fault("has an exec plugin with `provideClusterInfo`, which is not supported")
        if not command:
            raise self._fault("has an exec plugin without a command")
        args = tuple(str(argument) for argument in self._list(entry, "args"))
        if any("\0" in argument for argument in args):
            raise self._fault("has an exec plugin whose `args` hold a character that no program can be given")
        return ExecPlugin(
            api_version=api_version,
            # As in kubectl: a command with a slash is a path, any other is looked up on PATH.
            command=str(self._relative(command)) if os.sep in command else command,
            args=args,
            env=tuple(self._variable(item) for item in self._list(entry, "env")),
        )

    def _variable(self, item: object) -> tuple[str, str]:
        match item:
            case {"name": str(name), "value": str(value)} if name and "=" not in name and "\0" not in name + value:
                return name, value
        raise self._fault("has an entry of `env` that is not a name and a value, both text; put the value in quotes")

    def _relative(self, path: str) -> Path:
        return self._path.parent / path

    def _fault(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"The kubeconfig {self._path} {what}.")
