"""Credentials on their way to the API server, and TLS against a real TLS server on loopback."""

import asyncio
import json
import ssl
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from operator_app.errors import ConfigurationError
from operator_app.kube import transport
from operator_app.kube.kubeconfig import Endpoint, ExecPlugin, endpoint
from operator_app.kube.sockets import QuickBackend
from operator_app.kube.transport import (
    AuthorizedTransport,
    ExecToken,
    RenewedTransport,
    TokenFile,
    credentials,
    tls_context,
)
from tests.unit.kube.scripted_client import kubeconfig_in

pytestmark = pytest.mark.anyio
SERVER = "https://api.example.org"
TOKEN = "t"


async def asked(inner: httpx2.MockTransport, source: transport.Credentials) -> int:
    """The status of one POST with a body."""
    async with httpx2.AsyncClient(transport=AuthorizedTransport(inner, source)) as client:
        return (await client.post(SERVER, content=b"body")).status_code


async def test_a_token_file_is_read_at_most_once_a_minute(tmp_path: Path) -> None:
    """A renewed token is used within a minute, and the file is not read for each request."""
    file = tmp_path / "token"
    file.write_text("one\n")
    now = [1000.0]
    source = TokenFile(file, clock=lambda: now[0])
    assert await source.authorization() == "Bearer one"
    file.write_text("two\n")
    now[0] += 59
    assert await source.authorization() == "Bearer one"
    now[0] += 1
    assert await source.authorization() == "Bearer two"


async def test_an_unreadable_token_file_leaves_the_last_token(tmp_path: Path) -> None:
    """While a file is being replaced the old token serves; without any token there is no request."""
    file = tmp_path / "token"
    with pytest.raises(httpx2.ConnectError, match="cannot be read"):
        await TokenFile(file).authorization()
    file.write_text("one")
    now = [1000.0]
    source = TokenFile(file, clock=lambda: now[0])
    await source.authorization()
    file.unlink()
    now[0] += 60
    assert await source.authorization() == "Bearer one"


@pytest.mark.parametrize(
    "content", [b"s3cret\nline", b"s3cret\x00", "s3crét".encode(), b"s3cret\xff", b" \n"], ids=repr
)
async def test_an_error_about_a_token_file_shows_nothing_of_it(tmp_path: Path, content: bytes) -> None:
    """The sentence names the file and shows nothing of it; a token that was read before stays in use."""
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(httpx2.ConnectError, match=str(file)) as refused:
        await TokenFile(file).authorization()
    assert "s3cr" not in str(refused.value)
    file.write_text("one")
    now = [1000.0]
    source = TokenFile(file, clock=lambda: now[0])
    await source.authorization()
    file.write_bytes(content)
    now[0] += 60
    assert await source.authorization() == "Bearer one"


async def test_a_401_reads_the_token_again_and_resends_once(tmp_path: Path) -> None:
    """A token renewed less than a minute ago is found through the 401; the same body goes out again, once."""
    file = tmp_path / "token"
    file.write_text("old")
    seen: list[tuple[str, bytes]] = []

    def server(request: httpx2.Request) -> httpx2.Response:
        seen.append((request.headers["Authorization"], request.content))
        return httpx2.Response(200 if request.headers["Authorization"] == "Bearer new" else 401)

    source = TokenFile(file)
    await source.authorization()
    assert await asked(httpx2.MockTransport(server), source) == 401
    file.write_text("new")
    assert await asked(httpx2.MockTransport(server), source) == 200
    assert seen == [("Bearer old", b"body"), ("Bearer old", b"body"), ("Bearer new", b"body")]


def plugin(folder: Path, answer: str, *, delay_s: float = 0) -> ExecPlugin:
    """A credential plugin that counts its runs in a file and prints ``answer``."""
    script = folder / "plugin"
    script.write_text(
        f"#!/bin/sh\nsleep {delay_s}\n"
        f'echo run >> {folder}/runs\necho "$KUBERNETES_EXEC_INFO" > {folder}/info\necho "$SECRET" '
        f"> {folder}/env\ncat <<'END'\n{answer}\nEND\n"
    )
    script.chmod(0o700)
    return ExecPlugin("client.authentication.k8s.io/v1", str(script), env=(("SECRET", "told"),))


def runs(folder: Path) -> int:
    """How often the plugin ran."""
    return len((folder / "runs").read_text().splitlines())


async def test_a_plugin_runs_once_for_many_callers_and_again_when_refused(tmp_path: Path) -> None:
    """Concurrent requests share one run; a refused token is requested again; the plugin gets its environment."""
    source = ExecToken(plugin(tmp_path, '{"kind":"ExecCredential","status":{"token":"t"}}'))
    async with anyio.create_task_group() as callers:
        for _ in range(5):
            callers.start_soon(source.authorization)
    assert runs(tmp_path) == 1
    assert await source.authorization(rejected="Bearer t") == "Bearer t"
    assert runs(tmp_path) == 2
    assert json.loads((tmp_path / "info").read_text())["spec"] == {"interactive": False}
    assert (tmp_path / "env").read_text() == "told\n"


async def test_an_expired_token_is_requested_again(tmp_path: Path) -> None:
    """A token past its expirationTimestamp is never sent."""
    past = '{"status":{"token":"t","expirationTimestamp":"2020-01-01T00:00:00Z"}}'
    source = ExecToken(plugin(tmp_path, past))
    await source.authorization()
    await source.authorization()
    assert runs(tmp_path) == 2


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("nonsense", "no ExecCredential"),
        ('{"status":{}}', "no token"),
        ('{"status":{"clientKeyData":"k"}}', "no token"),
        ('{"status":{"token":"s3cret\\nline"}}', "cannot be sent"),
        ('{"status":{"token":"s3crét"}}', "cannot be sent"),
    ],
)
async def test_a_plugin_without_a_token_is_a_sentence(tmp_path: Path, answer: str, says: str) -> None:
    """What a plugin printed is never shown, only what was wrong with it."""
    with pytest.raises(httpx2.ConnectError, match=says) as refused:
        await ExecToken(plugin(tmp_path, answer)).authorization()
    assert "s3cr" not in str(refused.value)


async def test_a_plugin_that_fails_is_a_sentence(tmp_path: Path) -> None:
    """A missing program and a failing one have different messages."""
    with pytest.raises(httpx2.ConnectError, match="cannot run"):
        await ExecToken(ExecPlugin("v", str(tmp_path / "absent"))).authorization()
    with pytest.raises(httpx2.ConnectError, match="ended with 1"):
        await ExecToken(ExecPlugin("v", "false")).authorization()


async def test_the_first_kind_of_credentials_wins() -> None:
    """Token file before token before plugin before user and password; a certificate alone needs no header."""
    plugin = ExecPlugin("v", "x")
    found = {
        "file": credentials(Endpoint(SERVER, token_file=Path("f"), token=TOKEN, exec_plugin=plugin, basic=("u", "p"))),
        "token": credentials(Endpoint(SERVER, token=TOKEN, exec_plugin=plugin, basic=("u", "p"))),
        "plugin": credentials(Endpoint(SERVER, exec_plugin=plugin, basic=("u", "p"))),
        "basic": credentials(Endpoint(SERVER, basic=("u", "p"))),
    }
    assert isinstance(found["file"], TokenFile)
    assert isinstance(found["plugin"], ExecToken)
    assert found["token"] is not None
    assert found["basic"] is not None
    assert await found["token"].authorization() == "Bearer t"
    assert await found["basic"].authorization() == "Basic dTpw"
    assert credentials(Endpoint(SERVER)) is None


async def test_tls_trusts_the_configured_authority_only_and_shows_its_certificate() -> None:
    """A handshake with a real TLS server: right CA and client certificate in, wrong CA or no certificate out."""
    authority, stranger = trustme.CA(), trustme.CA()
    certificate, own = authority.issue_cert("localhost"), authority.issue_cert("operator")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(server)
    authority.configure_trust(server)
    server.verify_mode = ssl.CERT_REQUIRED
    right, wrong = authority.cert_pem.bytes().decode(), stranger.cert_pem.bytes().decode()
    chain = "".join(blob.bytes().decode() for blob in own.cert_chain_pems)
    operator = Endpoint(SERVER, client_certificate=chain, client_key=own.private_key_pem.bytes().decode())
    assert shakes_hands(server, tls_context(replace(operator, ca=right)))
    assert shakes_hands(server, tls_context(replace(operator, insecure=True)))
    assert not shakes_hands(server, tls_context(replace(operator, ca=wrong)))
    assert not shakes_hands(server, tls_context(operator))
    assert not shakes_hands(server, tls_context(Endpoint(SERVER, ca=right)))


def shakes_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> bool:
    """Whether a TLS handshake between the two succeeds, in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return True


@pytest.mark.parametrize(
    "unusable",
    [Endpoint(SERVER, ca="no PEM"), Endpoint(SERVER, client_certificate="no PEM", client_key="no PEM")],
    ids=["ca", "certificate"],
)
def test_unusable_certificates_are_refused_in_a_sentence(
    unusable: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no PEM is an error at the start, and no key is left in a file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigurationError, match="cannot be used"):
        tls_context(unusable)
    assert list(tmp_path.iterdir()) == []


def certificate(
    name: str, issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate and its key, of ``issuer`` or of its own, without any key identifiers."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    )
    return builder.sign(key if issuer is None else issuer[1], hashes.SHA256()), key


def test_authorities_without_key_identifiers_are_accepted(tmp_path: Path) -> None:
    """As client-go does, on every Python: 3.13 alone would refuse them. Other authorities are refused all the same."""
    authority = certificate("authority.example", None)
    own, key = certificate("localhost", authority)
    pem = own.public_bytes(Encoding.PEM) + key.private_bytes(
        Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
    )
    (tmp_path / "server.pem").write_bytes(pem)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.pem")
    stranger, _ = certificate("authority.example", None)
    right, wrong = (each.public_bytes(Encoding.PEM).decode() for each in (authority[0], stranger))
    assert shakes_hands(server, tls_context(Endpoint(SERVER, ca=right)))
    assert not shakes_hands(server, tls_context(Endpoint(SERVER, ca=wrong)))


@asynccontextmanager
async def http_proxy(asked_for: list[str]) -> AsyncGenerator[int]:
    """An HTTP proxy on loopback, which notes the targets of ``CONNECT`` and leads to the port that each names."""

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(65_536):
                sink.write(chunk)
                await sink.drain()
        sink.close()
        with suppress(OSError):
            await sink.wait_closed()

    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked_for.append(head.split()[1])
        to_server, from_server = await asyncio.open_connection("127.0.0.1", int(asked_for[-1].rpartition(":")[2]))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(pump(reader, from_server), pump(to_server, writer))

    server = await asyncio.start_server(serve, "127.0.0.1")
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*filter(None, serving))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_proxy_and_another_name_of_the_server_are_used(tmp_path: Path) -> None:
    """The proxy is asked for the host in the URL; the certificate is checked against ``tls-server-name``."""
    authority, asked_for = Authority(), list[str]()
    authority.write(tmp_path)
    async with https_server(authority) as port, http_proxy(asked_for) as proxy_port:
        server = {"server": f"https://api.invalid:{port}", "certificate-authority": "ca.pem"}
        user = {"client-certificate": "client.pem", "client-key": "client.key"}
        ways = {"proxy-url": f"http://127.0.0.1:{proxy_port}", "tls-server-name": "localhost"}
        for way, is_right in ((ways, True), (ways | {"tls-server-name": "other.invalid"}, False)):
            found = endpoint(kubeconfig_in(tmp_path, server | way, user), None, environ={})
            pool = transport.transport(found, tls_context(found), max_connections=None)
            request = httpx2.Request("GET", found.server)
            if is_right:
                assert (await pool.handle_async_request(request)).status_code == 200
            else:
                with pytest.raises(httpx2.ConnectError, match="certificate"):
                    await pool.handle_async_request(request)
            await pool.aclose()
    assert asked_for == [f"api.invalid:{port}"] * 2


async def test_a_plugin_that_is_slower_than_a_request_is_not_started_again(tmp_path: Path) -> None:
    """The request that began the run gives up; a later one gets the token of the same run."""
    source = ExecToken(plugin(tmp_path, '{"status":{"token":"t"}}', delay_s=0.5))
    with anyio.move_on_after(0.05):
        await source.authorization()
    assert await source.authorization() == "Bearer t"
    assert runs(tmp_path) == 1


class Authority:
    """A CA, and a server on loopback with a certificate of it that asks for the client's."""

    def __init__(self) -> None:
        self.ca = trustme.CA()
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert("localhost").configure_cert(self.tls)
        self.ca.configure_trust(self.tls)
        self.tls.verify_mode = ssl.CERT_REQUIRED

    def write(self, folder: Path) -> None:
        """Write the CA and a client's certificate and key of it to the files that a kubeconfig names."""
        own = self.ca.issue_cert("operator")
        self.ca.cert_pem.write_to_path(folder / "ca.pem")
        own.cert_chain_pems[0].write_to_path(folder / "client.pem")
        own.private_key_pem.write_to_path(folder / "client.key")


@asynccontextmanager
async def https_server(authority: Authority, port: int = 0) -> AsyncGenerator[int]:
    """A server that answers 200 to every connection and closes it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "localhost", port, ssl=authority.tls, reuse_address=True)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def status_of(pool: RenewedTransport, server: str) -> int:
    """The status of one request."""
    response = await pool.handle_async_request(httpx2.Request("GET", server))
    await response.aread()
    return response.status_code


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_connection_is_used_again_unless_its_server_has_closed_it(tmp_path: Path) -> None:
    """Then the request goes over another one, and not into an error after which a write's fate would be unknown."""
    authority, may_close, is_closed, requests = Authority(), anyio.Event(), anyio.Event(), list[int]()
    authority.write(tmp_path)
    connections = count(1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(connections)
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            requests.append(number)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await may_close.wait()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        is_closed.set()

    # The client does not read while it is idle, so it does not answer TLS's farewell either.
    server = await asyncio.start_server(answer, "localhost", ssl=authority.tls, ssl_shutdown_timeout=0.2)
    address = {"server": f"https://localhost:{server.sockets[0].getsockname()[1]}", "certificate-authority": "ca.pem"}
    user = {"client-certificate": "client.pem", "client-key": "client.key"}
    found = endpoint(kubeconfig_in(tmp_path, address, user), None, environ={})
    pool = RenewedTransport(found, tls_context(found), load=lambda: found, max_connections=None)
    try:
        assert [await status_of(pool, found.server) for _ in range(2)] == [200, 200]
        may_close.set()
        await is_closed.wait()
        assert [await status_of(pool, found.server) for _ in range(2)] == [200, 200]
    finally:
        await pool.aclose()
        server.close()
    assert requests == [1, 1, 2, 2]


async def test_an_idle_stream_tells_what_the_librarys_own_tells() -> None:
    """Nothing to read, a byte to read, closed by the server, and closed here: as the library says, but sooner."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        quick = await QuickBackend().connect_tcp("127.0.0.1", port)
        server: Any = listener.listeners[0]
        accepted = await server.accept()
        own = quick._inner
        said = [quick.get_extra_info("is_readable")]
        await accepted.send(b"x")
        with anyio.fail_after(10):
            while not own.get_extra_info("is_readable"):
                await anyio.lowlevel.checkpoint()
        said.append(quick.get_extra_info("is_readable"))
        assert await quick.read(1) == b"x"
        said.append(quick.get_extra_info("is_readable"))
        await accepted.aclose()
        with anyio.fail_after(10):
            while not own.get_extra_info("is_readable"):
                await anyio.lowlevel.checkpoint()
        said.append(quick.get_extra_info("is_readable"))
        assert quick.get_extra_info("server_addr") == own.get_extra_info("server_addr")
        await quick.aclose()
        said.append(quick.get_extra_info("is_readable"))
    assert said == [False, True, False, True, True]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_rotated_authority_and_certificate_are_used_without_a_restart(tmp_path: Path) -> None:
    """The server comes back with another CA, and refuses until the files follow; then requests succeed again."""
    old, new = Authority(), Authority()
    old.write(tmp_path)
    async with https_server(old) as port:
        kubeconfig = kubeconfig_in(
            tmp_path,
            {"server": f"https://localhost:{port}", "certificate-authority": "ca.pem"},
            {"client-certificate": "client.pem", "client-key": "client.key"},
        )
        load = partial(endpoint, kubeconfig, None, environ={})
        now = [0.0]
        loaded = load()
        pool = RenewedTransport(loaded, tls_context(loaded), load=load, max_connections=None, clock=lambda: now[0])
        assert await status_of(pool, loaded.server) == 200
    async with https_server(new, port):
        now[0] += 2
        with pytest.raises(httpx2.ConnectError):
            await status_of(pool, loaded.server)
        (tmp_path / "ca.pem").write_text("half a f")
        now[0] += 2
        with pytest.raises(httpx2.ConnectError):
            await status_of(pool, loaded.server)
        new.write(tmp_path)
        now[0] += 2
        assert await status_of(pool, loaded.server) == 200
        await pool.aclose()
