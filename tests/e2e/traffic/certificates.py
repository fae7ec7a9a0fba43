"""Secrets with certificates, mounted as a kubelet mounts them."""

from pathlib import Path

import trustme

from operator_app.envoy.secrets import CERTIFICATE_KEY, PRIVATE_KEY_KEY, TLS_DIRECTORY, tls_directory
from tests.e2e.envoy.envoy_process import Mount


class Secret:
    """A mounted Secret with a certificate, that is replaced as a kubelet replaces one.

    ``directory`` is that of the Envoy that reads it.
    """

    def __init__(self, directory: Path, name: str) -> None:
        mounted = Path(tls_directory(name).replace(TLS_DIRECTORY, f"{directory}/mount-tls"))
        mounted.parent.mkdir(exist_ok=True)
        self.mount = Mount(mounted)

    def store(self, certificate: trustme.LeafCert, key: trustme.LeafCert | None = None) -> None:
        """Replace certificate and key; ``key`` is the certificate whose key is stored, if it is another one."""
        chain = b"".join(each.bytes() for each in certificate.cert_chain_pems)
        private = (key or certificate).private_key_pem.bytes()
        self.mount.swap({CERTIFICATE_KEY: chain.decode(), PRIVATE_KEY_KEY: private.decode()})
