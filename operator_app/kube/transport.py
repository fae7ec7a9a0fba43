"""The HTTP transport to the API server: TLS, the connection pool, and the Authorization header.

Requests and their errors belong to ``client``; which server and which identity, to ``kubeconfig``. HTTP/1.1 only: on
one HTTP/2 connection, idle watches were seen to starve a request past all its timeouts.
"""

import base64
import os
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

import anyio
import httpx2
import msgspec

from operator_app.errors import ConfigurationError
from operator_app.kube.kubeconfig import Endpoint, ExecPlugin, is_token
from operator_app.kube.sockets import QuickBackend

TOKEN_MAX_AGE_S: Final = 60.0
"""A token file is read again after this; the kubelet renews a token at 80 % of its lifetime of ten minutes or more.
https://kubernetes.io/docs/tasks/configure-pod-container/configure-service-account/#launch-a-pod-using-service-account-token-projection
"""

RELOAD_AFTER_S: Final = 30.0
"""The kubeconfig, or the service account's CA, and all files that it names are read again after this."""

RELOAD_AT_MOST_EVERY_S: Final = 1.0
"""After a connection or a request that was refused they are read again at once, but not more often than this."""

PLUGIN_TIMEOUT_S: Final = 60.0
"""A credential plugin may run for this long, whatever the bound of the request that waits for it."""

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
        self._running: Future[subprocess.CompletedProcess[bytes]] | None = None

    async def authorization(self, *, rejected: str | None = None) -> str:
        """The plugin's token; concurrent callers share one run of it.

        A run does not end with the request that began it: the next request uses its result.
        """
        async with self._one_at_a_time:
            if not self._value or rejected == self._value or time.time() >= self._expires_at:
                await self._run()
            return self._value

    def _start(self) -> "Future[subprocess.CompletedProcess[bytes]]":
        """Run the plugin in a thread of its own, which ends with the process."""
        plugin = self._plugin
        info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": {"interactive": False}}
        environment = os.environ | dict(plugin.env) | {"KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode()}
        result: Future[subprocess.CompletedProcess[bytes]] = Future()

        def run() -> None:
            command = [plugin.command, *plugin.args]
            try:
                done = subprocess.run(  # noqa: S603 - the command is the one that the kubeconfig names
                    command,
                    env=environment,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    timeout=PLUGIN_TIMEOUT_S,
                )
            except Exception as error:  # noqa: BLE001 - raised again where the result is read
                result.set_exception(error)
            else:
                result.set_result(done)

        threading.Thread(target=run, name="credential-plugin", daemon=True).start()
        return result

    async def _run(self) -> None:
        plugin = self._plugin
        running = self._running = self._running or self._start()
        while not running.done():  # noqa: ASYNC110 - it ends in a thread that knows no event loop
            await anyio.sleep(0.02)
        self._running = None
        try:
            done = running.result()
            if done.returncode != 0:
                raise httpx2.ConnectError(f"the credential plugin {plugin.command} ended with {done.returncode}")
            status = msgspec.json.decode(done.stdout, type=_ExecCredential).status
        except OSError as error:
            raise httpx2.ConnectError(f"the credential plugin {plugin.command} cannot run: {error}") from error
        except subprocess.TimeoutExpired:
            message = f"the credential plugin {plugin.command} did not end within {PLUGIN_TIMEOUT_S:g} s"
            raise httpx2.ConnectError(message) from None
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
        # Python 3.13 refuses CAs without key identifiers (RFC 5280 section 4.2.1.1), which clusters have and client-go
        # accepts. The chain, the dates and the host name are verified all the same.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
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
    """One pool of connections to the endpoint, by way of its proxy; ``max_connections`` of None sets no limit."""
    connections = httpx2.AsyncHTTPTransport(
        verify=tls,
        trust_env=False,
        proxy=endpoint.proxy,
        http2=False,
        limits=httpx2.Limits(
            max_connections=max_connections,
            max_keepalive_connections=max_connections,
            keepalive_expiry=KEEPALIVE_EXPIRY_S,
        ),
    )
    connections._pool._network_backend = QuickBackend()  # noqa: SLF001 - the transport has no parameter for it
    pool: httpx2.AsyncBaseTransport = connections
    if endpoint.tls_server_name is not None:
        pool = NamedServerTransport(pool, endpoint.tls_server_name)
    found = credentials(endpoint)
    return pool if found is None else AuthorizedTransport(pool, found)


class NamedServerTransport(httpx2.AsyncBaseTransport):
    """Asks for, and checks, the certificate of another name than the host in the URL (``tls-server-name``)."""

    def __init__(self, pool: httpx2.AsyncBaseTransport, name: str) -> None:
        self._pool = pool
        self._name = name

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request; https://www.encode.io/httpcore/extensions/#sni_hostname."""
        request.extensions = request.extensions | {"sni_hostname": self._name}
        return await self._pool.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()


class RenewedTransport(httpx2.AsyncBaseTransport):
    """One pool of connections whose certificates and credentials follow the files that they come from.

    Open streams stay on the connections on which they began; every new connection uses the current files. A file that
    is missing or half written changes nothing, and neither does a kubeconfig that names another server: that is for a
    restart.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tls: ssl.SSLContext,
        *,
        load: Callable[[], Endpoint],
        max_connections: int | None,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._endpoint = endpoint
        self._load = load
        self._max_connections = max_connections
        self._clock = clock
        self._pool = transport(endpoint, tls, max_connections=max_connections)
        self._former: httpx2.AsyncBaseTransport | None = None
        self._loaded_mono: float | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send with the current credentials; once more where the files have changed and nothing was carried out."""
        await self._reload(RELOAD_AFTER_S)
        try:
            response = await self._pool.handle_async_request(request)
        except httpx2.ConnectError:
            if not await self._reload(RELOAD_AT_MOST_EVERY_S):
                raise
            return await self._pool.handle_async_request(request)
        except (httpx2.TransportError, ssl.SSLError):
            # TLS 1.3 refuses a client's certificate after the handshake; the request may have been carried out.
            await self._reload(RELOAD_AT_MOST_EVERY_S)
            raise
        if response.status_code == 401 and await self._reload(RELOAD_AT_MOST_EVERY_S):
            await response.aclose()
            return await self._pool.handle_async_request(request)
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        for pool in filter(None, (self._former, self._pool)):
            await pool.aclose()

    async def _reload(self, after_s: float) -> bool:
        """Read the files if that is ``after_s`` seconds ago; returns whether the pool is a new one."""
        now_mono = self._clock()
        if self._loaded_mono is None:
            self._loaded_mono = now_mono
        if now_mono - self._loaded_mono < after_s:
            return False
        self._loaded_mono = now_mono
        try:
            found = await anyio.to_thread.run_sync(self._load)
            if found == self._endpoint or found.server != self._endpoint.server:
                return False
            tls = await anyio.to_thread.run_sync(tls_context, found)
        except ConfigurationError:
            return False
        oldest, self._former = self._former, self._pool
        self._endpoint, self._pool = found, transport(found, tls, max_connections=self._max_connections)
        if oldest is not None:
            await oldest.aclose()
        return True
