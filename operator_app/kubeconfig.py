"""Which API server to talk to and as whom: the Pod's service account or one kubeconfig file, read into an ``Endpoint``.

What a user may expect of a kubeconfig and this operator cannot do is refused in one sentence, never ignored: a setting
that is silently dropped sends credentials somewhere, or as someone, the user did not mean. Connections do not belong
here.

Meaning of the fields: https://kubernetes.io/docs/reference/config-api/kubeconfig.v1/
"""

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from operator_app.errors import ConfigurationError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
EXEC_API_VERSIONS: Final = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")

_REFUSED_CLUSTER: Final = {
    "proxy-url": "the API server is reached directly, never through a proxy",
    "tls-server-name": "the server's certificate is checked against the host name in `server`",
}
_REFUSED_USER: Final = {
    "as": "the operator acts as itself; give it credentials of its own",
    "as-uid": "the operator acts as itself; give it credentials of its own",
    "as-groups": "the operator acts as itself; give it credentials of its own",
    "as-user-extra": "the operator acts as itself; give it credentials of its own",
    "auth-provider": "Kubernetes removed it in v1.26; use an `exec` credential plugin",
}


@dataclass(frozen=True, slots=True)
class ExecPlugin:
    """A credential plugin: a program that prints an ``ExecCredential`` with a token."""

    api_version: str
    command: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One API server and one identity. ``ca``, ``client_certificate`` and ``client_key`` are PEM; at most one of
    ``token_file``, ``token``, ``exec_plugin`` and ``basic`` (user, password) is used, in this order.
    """  # noqa: D205

    server: str
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
    return _Kubeconfig(path).endpoint(context)


def _in_cluster(environ: Mapping[str, str], service_account: Path) -> Endpoint | None:
    """The Pod's own service account: https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    token_file = service_account / "token"
    if not host or not port or not token_file.is_file():
        return None
    return Endpoint(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca=_read(service_account / "ca.crt", "the service account's CA"),
        token_file=token_file,
    )


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
        self._path = path.expanduser()
        if not self._path.is_file():
            raise ConfigurationError(
                f"There is no kubeconfig at {self._path}, and this is not a Pod with a service account; set KUBECONFIG."
            )
        try:
            content = yaml.safe_load(_read(self._path, "The kubeconfig"))
        except yaml.YAMLError as error:
            raise ConfigurationError(f"The kubeconfig {self._path} is not YAML.") from error
        if not isinstance(content, dict):
            raise self._fault("is not a mapping")
        self._content: dict[str, Any] = content

    def endpoint(self, context: str | None) -> Endpoint:
        name = context or self._content.get("current-context")
        if not name:
            raise self._fault("has no current-context; name a context")
        chosen = self._entry("context", name)
        cluster = self._entry("cluster", chosen.get("cluster"))
        user = self._entry("user", chosen["user"]) if chosen.get("user") else {}
        self._refuse(cluster, _REFUSED_CLUSTER)
        self._refuse(user, _REFUSED_USER)
        server = str(cluster.get("server") or "")
        if not server.startswith(("https://", "http://")):
            raise self._fault(f"names the server {server!r}; it must begin with https:// or http://")
        ca = self._pem(cluster, "certificate-authority")
        insecure = bool(cluster.get("insecure-skip-tls-verify"))
        if insecure and ca:
            raise self._fault("has both a certificate authority and insecure-skip-tls-verify; keep one of them")
        certificate, key = self._pem(user, "client-certificate"), self._pem(user, "client-key")
        if (certificate is None) != (key is None):
            raise self._fault("has a client certificate without its key, or the reverse")
        return Endpoint(
            server=server,
            ca=ca,
            insecure=insecure,
            client_certificate=certificate,
            client_key=key,
            token_file=self._relative(user["tokenFile"]) if user.get("tokenFile") else None,
            token=user.get("token"),
            exec_plugin=self._exec_plugin(user["exec"]) if user.get("exec") else None,
            basic=(str(user["username"]), str(user.get("password", ""))) if user.get("username") else None,
        )

    def _entry(self, what: str, name: object) -> dict[str, Any]:
        """The named cluster, context or user."""
        for item in self._content.get(f"{what}s") or ():
            if isinstance(item, dict) and item.get("name") == name and isinstance(item.get(what), dict):
                return dict(item[what])
        raise self._fault(f"has no {what} named {name!r}")

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
        return _read(self._relative(entry[name]), f"`{name}`") if entry.get(name) else None

    def _exec_plugin(self, entry: Mapping[str, Any]) -> ExecPlugin:
        api_version, command = entry.get("apiVersion"), str(entry.get("command") or "")
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
        return ExecPlugin(
            api_version=api_version,
            # As in kubectl: a command with a slash is a path, any other is looked up on PATH.
            command=str(self._relative(command)) if os.sep in command else command,
            args=tuple(str(argument) for argument in entry.get("args") or ()),
            env=tuple((str(item["name"]), str(item["value"])) for item in entry.get("env") or ()),
        )

    def _relative(self, path: str) -> Path:
        return self._path.parent / path

    def _fault(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"The kubeconfig {self._path} {what}.")
