"""The HTTP transport to the API server: TLS, the connection pool, and the Authorization header.

Requests and their errors belong to ``client``; which server and which identity, to ``kubeconfig``. HTTP/1.1 only: on
one HTTP/2 connection, idle watches were seen to starve a request past all its timeouts.
"""

import base64
import os
import ssl
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

import anyio
import httpx2
import msgspec

from operator_app.errors import ConfigurationError
from operator_app.kube.kubeconfig import Endpoint, ExecPlugin, is_token

TOKEN_MAX_AGE_S: Final = 60.0
"""A token file is read again after this; the kubelet renews a token at 80 % of its lifetime of ten minutes or more.
https://kubernetes.io/docs/tasks/configure-pod-container/configure-service-account/#launch-a-pod-using-service-account-token-projection
"""

KEEPALIVE_EXPIRY_S: Final = 60.0
"""Idle connections are closed before the server's idle timeout (90 s), so that it closes none during a request."""


class Credentials(Protocol):
    """A source of the Authorization header."""

    async def authorization(self, *, rejected: str | None = None) -> str:
        """The header's value; ``rejected`` is a value to which the server has just responded with 401.

        Raises ``httpx2.ConnectError``, whose message contains no secret, when there are no credentials.
        """


class FixedCredentials:
    """A value that does not change."""

    def __init__(self, value: str) -> None:
        self._value = value

    async def authorization(self, *, rejected: str | None = None) -> str:  # noqa: ARG002
        """The same value, even after it was rejected."""
        return self._value


class TokenFile:
    """A bearer token in a file that another process renews; read at most once a minute, and after a 401."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = anyio.current_time) -> None:
        self._path = anyio.Path(path)
        self._clock = clock
        self._value = ""
        self._read_at_mono = float("-inf")

    async def authorization(self, *, rejected: str | None = None) -> str:
        """The file's token; where the file has no valid one, the last token that it had."""
        if rejected == self._value or self._clock() - self._read_at_mono >= TOKEN_MAX_AGE_S:
            try:
                self._value = f"Bearer {await self._read()}"
            except OSError as error:
                if not self._value:
                    raise httpx2.ConnectError(f"the token file {self._path} cannot be read: {error}") from error
            except ValueError as error:
                if not self._value:
                    raise httpx2.ConnectError(str(error)) from None
            self._read_at_mono = self._clock()
        return self._value

    async def _read(self) -> str:
        """The token. Raises ``OSError``, or ``ValueError`` with a message that shows nothing of the file."""
        token = (await self._path.read_text(errors="replace")).strip()
        if not is_token(token):
            raise ValueError(f"the token file {self._path} must hold one token on one line, and nothing else")
        return token


class _ExecStatus(msgspec.Struct, rename="camel"):
    token: str | None = None
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct):
    status: _ExecStatus


class ExecToken:
    """A bearer token from a credential plugin, run again when the token expires or is refused.

    https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
    """

    def __init__(self, plugin: ExecPlugin) -> None:
        self._plugin = plugin
        self._value = ""
        self._expires_at = float("inf")
        self._one_at_a_time = anyio.Lock()

    async def authorization(self, *, rejected: str | None = None) -> str:
        """The plugin's token; concurrent callers share one run of it."""
        async with self._one_at_a_time:
            if not self._value or rejected == self._value or time.time() >= self._expires_at:
                await self._run()
            return self._value

    async def _run(self) -> None:
        plugin = self._plugin
        info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": {"interactive": False}}
        environment = os.environ | dict(plugin.env) | {"KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode()}
        try:
            done = await anyio.run_process([plugin.command, *plugin.args], env=environment, check=False)
            if done.returncode != 0:
                raise httpx2.ConnectError(f"the credential plugin {plugin.command} ended with {done.returncode}")
            status = msgspec.json.decode(done.stdout, type=_ExecCredential).status
        except OSError as error:
            raise httpx2.ConnectError(f"the credential plugin {plugin.command} cannot run: {error}") from error
        except msgspec.DecodeError as error:
            raise httpx2.ConnectError(f"the credential plugin {plugin.command} printed no ExecCredential") from error
        token = (status.token or "").strip()
        if not token:
            raise httpx2.ConnectError(
                f"the credential plugin {plugin.command} gave no token; certificates are not used"
            )
        if not is_token(token):
            raise httpx2.ConnectError(f"the credential plugin {plugin.command} gave a token that cannot be sent")
        self._value = f"Bearer {token}"
        self._expires_at = status.expiration_timestamp.timestamp() if status.expiration_timestamp else float("inf")


class AuthorizedTransport(httpx2.AsyncBaseTransport):
    """Adds the Authorization header. A request that got a 401 is sent once more if they have changed."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, credentials: Credentials) -> None:
        self._inner = inner
        self._credentials = credentials

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send with the current credentials. A request that got a 401 was not carried out, so it may be sent again."""
        value = await self._credentials.authorization()
        request.headers["Authorization"] = value
        response = await self._inner.handle_async_request(request)
        if response.status_code != 401:
            return response
        renewed = await self._credentials.authorization(rejected=value)
        if renewed == value:
            return response
        await response.aclose()
        request.headers["Authorization"] = renewed
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


def credentials(endpoint: Endpoint) -> Credentials | None:
    """The endpoint's credentials; None where a client certificate alone, or nothing, identifies the operator."""
    if endpoint.token_file is not None:
        return TokenFile(endpoint.token_file)
    if endpoint.token is not None:
        return FixedCredentials(f"Bearer {endpoint.token}")
    if endpoint.exec_plugin is not None:
        return ExecToken(endpoint.exec_plugin)
    if endpoint.basic is not None:
        return FixedCredentials("Basic " + base64.b64encode(":".join(endpoint.basic).encode()).decode())
    return None


def tls_context(endpoint: Endpoint) -> ssl.SSLContext:
    """TLS with the kubeconfig's CA (else the system's) and client certificate. Raises ``ConfigurationError``."""
    if endpoint.server.startswith("http://"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts no certificate, and is not used
    try:
        context = ssl.create_default_context(cadata=endpoint.ca)
        if endpoint.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if endpoint.client_certificate and endpoint.client_key:
            # OpenSSL loads certificate chains from files only; this one is readable by this user alone and removed at
            # once.
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
                file.write(f"{endpoint.client_certificate}\n{endpoint.client_key}\n")
                file.flush()
                context.load_cert_chain(file.name, password="")  # never ask a terminal
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(f"The certificates for {endpoint.server} cannot be used: {error}.") from error
    return context


def transport(endpoint: Endpoint, tls: ssl.SSLContext, *, max_connections: int | None) -> httpx2.AsyncBaseTransport:
    """One pool of connections to the endpoint; ``max_connections`` of None sets no limit."""
    pool = httpx2.AsyncHTTPTransport(
        verify=tls,
        trust_env=False,
        http2=False,
        limits=httpx2.Limits(
            max_connections=max_connections,
            max_keepalive_connections=max_connections,
            keepalive_expiry=KEEPALIVE_EXPIRY_S,
        ),
    )
    found = credentials(endpoint)
    return pool if found is None else AuthorizedTransport(pool, found)
