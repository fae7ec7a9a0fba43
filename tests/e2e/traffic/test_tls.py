"""TLS of listeners, by handshakes with a running Envoy. No Kubernetes is needed."""

import itertools
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509

from operator_app.dataplane.answers import parsed
from operator_app.envoy.internal import LOADED_PATH, READINESS_PATH
from operator_app.envoy.secrets import CA_DIRECTORY, ca_directory
from tests.e2e.envoy.envoy_process import DEADLINE_S, NEEDS_ENVOY, EnvoyProcess, Mount, eventually
from tests.e2e.traffic.certificates import Secret
from tests.e2e.traffic.servers import Server, ask
from tests.unit.envoy import cases

pytestmark = [NEEDS_ENVOY, pytest.mark.traffic, pytest.mark.reload]

NAME = "shop.test"


@contextmanager
def listening(
    app: Server,
    certificate: trustme.LeafCert | None,
    client_authority: trustme.CA | None = None,
    key: trustme.LeafCert | None = None,
    **listener: Any,
) -> Iterator[tuple[EnvoyProcess, Secret]]:
    """A running Envoy with a listener that speaks TLS beside one that does not, and the first one's Secret.

    Without a certificate its mount is empty, as that of an optional Secret which does not exist. ``key`` is the
    certificate whose key it has, if it is another one.
    """
    tls = {"secretName": "shop-tls"} | ({"clientCASecretName": "partners"} if client_authority else {})
    declared = [
        cases.http({"backend": "app"}) | {"name": "https", "port": 443, "tls": tls} | listener,
        cases.http({"backend": "app"}),
    ]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "mount-ca").mkdir()
        secret = Secret(Path(directory), "shop-tls")
        if certificate is None:
            secret.mount.swap({})
        else:
            secret.store(certificate, key)
        if client_authority is not None:
            mounted = Mount(Path(ca_directory("partners").replace(CA_DIRECTORY, f"{directory}/mount-ca")))
            mounted.swap({"ca.crt": client_authority.cert_pem.bytes().decode()})
        with EnvoyProcess(cases.spec(declared, [app.declared()]), Path(directory)) as proxy:
            yield proxy, secret


@contextmanager
def connected(
    proxy: EnvoyProcess, authority: trustme.CA, *, client: trustme.LeafCert | None = None, **limits: Any
) -> Iterator[ssl.SSLSocket]:
    """A connection whose certificate was verified; ``limits`` are attributes of the client's context."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols(limits.pop("alpn", ["http/1.1"]))
    if client is not None:
        client.configure_cert(context)
    for name, value in limits.items():
        setattr(context, name, value)
    with (
        socket.create_connection(("127.0.0.1", proxy.port("https")), DEADLINE_S) as plain,
        context.wrap_socket(plain, server_hostname=NAME) as encrypted,
    ):
        yield encrypted


def get(connection: ssl.SSLSocket, path: str = "/") -> bytes:
    """The first bytes of the response to one request."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: {NAME}\r\n\r\n".encode())
    return connection.recv(4096)


def serial(proxy: EnvoyProcess, authority: trustme.CA) -> str:
    """The serial number of the certificate that a new connection gets."""
    with connected(proxy, authority) as connection:
        found = connection.getpeercert()
        assert found is not None
        return str(found["serialNumber"])


def is_refused(proxy: EnvoyProcess, authority: trustme.CA, client: trustme.LeafCert | None) -> bool:
    """Whether a client gets no response. With TLS 1.3 the proxy's refusal arrives with the first bytes."""
    try:
        with connected(proxy, authority, client=client) as connection:
            return get(connection) == b""
    except OSError:
        return True


def test_tls_is_spoken_with_the_certificate_of_the_secret(app: Server) -> None:
    """Requests are served, the backend is told that they came by HTTPS, and the other listener speaks plain text."""
    authority = trustme.CA()
    with listening(app, authority.issue_cert(NAME), httpsRedirect=True) as (proxy, _):
        with connected(proxy, authority) as connection:
            assert get(connection).startswith(b"HTTP/1.1 200")
        assert app.requests[-1].values("x-forwarded-proto") == ["https"]
        assert ask(proxy, "http", "/").status == 200


@pytest.mark.parametrize(("offered", "chosen"), [(["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1")])
def test_http_2_is_offered(app: Server, offered: list[str], chosen: str) -> None:
    """A client that knows HTTP/2 gets it, others get HTTP/1.1."""
    authority = trustme.CA()
    with (
        listening(app, authority.issue_cert(NAME)) as (proxy, _),
        connected(proxy, authority, alpn=offered) as connection,
    ):
        assert connection.selected_alpn_protocol() == chosen


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_current_versions_are_spoken(app: Server, version: ssl.TLSVersion) -> None:
    """TLS 1.2 and 1.3, with ciphers of the intermediate profile."""
    authority = trustme.CA()
    with (
        listening(app, authority.issue_cert(NAME)) as (proxy, _),
        connected(proxy, authority, minimum_version=version, maximum_version=version) as connection,
    ):
        assert get(connection).startswith(b"HTTP/1.1 200")


def test_old_versions_are_refused(app: Server) -> None:
    """TLS 1.1 ends with an alert of the proxy."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with (
        listening(app, authority.issue_cert(NAME)) as (proxy, _),
        socket.create_connection(("127.0.0.1", proxy.port("https")), DEADLINE_S) as plain,
        pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
    ):
        context.wrap_socket(plain)


def test_a_renewed_certificate_is_served_without_a_lost_request(app: Server) -> None:
    """New connections get the new certificate; an open one goes on."""
    authority = trustme.CA()
    with listening(app, authority.issue_cert(NAME)) as (proxy, secret), connected(proxy, authority) as kept:
        before = serial(proxy, authority)
        assert get(kept).startswith(b"HTTP/1.1 200")
        for _ in range(3):  # three renewals in a row
            secret.store(authority.issue_cert(NAME))
        latest = authority.issue_cert(NAME)
        secret.store(latest)
        eventually(lambda: True if serial(proxy, authority) != before else None, "the new certificate")
        for _ in range(20):
            assert get(kept).startswith(b"HTTP/1.1 200")


def serial_of(certificate: bytes) -> str:
    """The serial number of a certificate."""
    return f"{x509.load_pem_x509_certificate(certificate).serial_number:X}"


def test_three_renewals_within_ten_seconds_lose_nothing(app: Server) -> None:
    """An open connection and handshakes all the time: each is served, and from the last renewal on with the latest."""
    authority = trustme.CA()
    with listening(app, authority.issue_cert(NAME)) as (proxy, secret), connected(proxy, authority) as kept:
        serials: list[str] = []
        tried = 0
        for _ in range(3):
            latest = authority.issue_cert(NAME)
            secret.store(latest)
            expected = serial_of(latest.cert_chain_pems[0].bytes())
            stored_mono = time.monotonic()
            while serials[-1:] != [expected] or time.monotonic() < stored_mono + 1:
                assert time.monotonic() < stored_mono + DEADLINE_S, "not served"
                with connected(proxy, authority) as connection:
                    assert get(connection).startswith(b"HTTP/1.1 200")
                    served = ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"")
                    serials.append(serial_of(served.encode()))
                assert get(kept).startswith(b"HTTP/1.1 200")
                tried += 2
        print(f"3 renewals: {tried} requests tried, 0 lost")
        # Each of the three, and the one before where Envoy had not read the first one yet: never one from before again.
        assert len([name for name, _ in itertools.groupby(serials)]) == len(set(serials))


def test_a_key_that_does_not_fit_leaves_the_certificate_in_place(app: Server) -> None:
    """A broken Secret changes nothing, no other listener is harmed, and once it is right again it is served."""
    authority = trustme.CA()
    with listening(app, authority.issue_cert(NAME)) as (proxy, secret):
        before = serial(proxy, authority)
        secret.store(authority.issue_cert(NAME), key=authority.issue_cert(NAME))
        failed = "sds.certificate/shop-tls.key_rotation_failed"
        eventually(lambda: True if f"{failed}: 0" not in proxy.admin(f"/stats?filter={failed}") else None, "a refusal")
        assert serial(proxy, authority) == before
        assert ask(proxy, "http", "/").status == 200
        secret.store(authority.issue_cert(NAME))
        eventually(lambda: True if serial(proxy, authority) != before else None, "the right certificate")


def unusable(proxy: EnvoyProcess) -> list[str]:
    """The Secrets with which nothing can serve, as the operator reads it off the answer at the readiness port."""
    return parsed(proxy.get("internal/readiness", LOADED_PATH)[1]).unusable(proxy.files.secrets)


@pytest.mark.parametrize("is_broken", [False, True], ids=["missing", "mismatched"])
def test_a_certificate_that_comes_late_is_served(app: Server, *, is_broken: bool) -> None:
    """A Secret that is missing or broken at the start is told and harms nothing else; once right, it is served."""
    authority = trustme.CA()
    first = authority.issue_cert(NAME) if is_broken else None
    with listening(app, first, key=authority.issue_cert(NAME)) as (proxy, secret):
        eventually(lambda: True if proxy.get("internal/readiness", READINESS_PATH)[0] == 200 else None, "ready")
        assert ask(proxy, "http", "/").status == 200
        assert unusable(proxy) == ["certificate/shop-tls"]
        assert is_refused(proxy, authority, None)
        secret.store(authority.issue_cert(NAME))
        eventually(lambda: True if unusable(proxy) == [] else None, "the certificate")
        with connected(proxy, authority) as connection:
            assert get(connection).startswith(b"HTTP/1.1 200")


def test_clients_need_a_certificate_of_the_named_authority(app: Server) -> None:
    """With an authority of clients, who has no certificate of it is not served."""
    authority, partners, strangers = trustme.CA(), trustme.CA(), trustme.CA()
    with listening(app, authority.issue_cert(NAME), partners) as (proxy, _):
        with connected(proxy, authority, client=partners.issue_cert("partner.test")) as connection:
            assert get(connection).startswith(b"HTTP/1.1 200")
        for client in (None, strangers.issue_cert("partner.test")):
            assert is_refused(proxy, authority, client)


def test_a_session_is_worth_no_more_than_its_certificate(app: Server) -> None:
    """Who resumes a session of an authority of clients that is no longer trusted is refused as everybody else."""
    authority, partners, successors = trustme.CA(), trustme.CA(), trustme.CA()
    with listening(app, authority.issue_cert(NAME), partners) as (proxy, secret):
        context = ssl.create_default_context()
        authority.configure_trust(context)
        partners.issue_cert("partner.test").configure_cert(context)
        resumed: list[bool | None] = []

        def served(session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
            """The session of a connection that was served; ``None`` where it was refused."""
            with socket.create_connection(("127.0.0.1", proxy.port("https")), DEADLINE_S) as plain:
                try:
                    with context.wrap_socket(plain, server_hostname=NAME, session=session) as encrypted:
                        resumed.append(encrypted.session_reused)
                        return encrypted.session if get(encrypted).startswith(b"HTTP/1.1 200") else None
                except OSError:
                    return None

        session = served()
        assert session is not None
        assert session.has_ticket
        assert served(session) is not None, "as long as the authority is trusted"
        assert resumed == [False, True]
        directory = secret.mount.path.parent.parent
        trusted = Mount.existing(Path(ca_directory("partners").replace(CA_DIRECTORY, f"{directory}/mount-ca")))
        trusted.swap({"ca.crt": successors.cert_pem.bytes().decode()})
        eventually(lambda: True if is_refused(proxy, authority, partners.issue_cert("b.test")) else None, "the new one")
        assert served(session) is None
