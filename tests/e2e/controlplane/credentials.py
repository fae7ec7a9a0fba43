"""Who is who at the local API server: its certificate authority, client certificates and kubeconfig files.

Keys live only as long as the state directory. A kubeconfig carries everything inline, so it can be copied anywhere.
"""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trustme
import yaml

from operator_app.api.kinds import Key, Object
from tests.e2e.kube import SERVICE_ACCOUNT, Kube, kubeconfig_context

ADMIN: Final = "admin"
CONTROLLER_MANAGER: Final = "system:kube-controller-manager"
SCHEDULER: Final = "system:kube-scheduler"
KUBELET_CLIENT: Final = "kube-apiserver-kubelet-client"
"""Who the API server is to a kubelet."""

TOKEN_LIFETIME_S: Final = 30 * 24 * 3600
"""Longer than any run; the operator's own handling of rotated tokens is tested with shorter ones."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority with the files that kube-apiserver reads; all in one private directory."""

    directory: Path
    ca: trustme.CA

    @classmethod
    def create(cls, directory: Path, *names: str) -> "Authority":
        """Make the authority, and a serving certificate for the host names and addresses ``names``."""
        directory.mkdir(mode=0o700)
        authority = cls(directory, trustme.CA())
        authority.ca.cert_pem.write_to_path(authority.ca_file)
        authority.write_serving_certificate(authority.serving_certificate_file, authority.serving_key_file, *names)
        _write_pair(
            authority._client(KUBELET_CLIENT, "system:masters"),
            authority.kubelet_client_certificate_file,
            authority.kubelet_client_key_file,
        )
        # Only the key of this pair is used: kube-apiserver signs tokens with it and derives the public half itself.
        authority.ca.issue_cert(common_name="service-accounts").private_key_pem.write_to_path(
            authority.service_account_key_file
        )
        return authority

    @property
    def ca_file(self) -> Path:
        """The certificate that signs all others."""
        return self.directory / "ca.crt"

    @property
    def serving_certificate_file(self) -> Path:
        """What the API server shows to its clients."""
        return self.directory / "apiserver.crt"

    @property
    def serving_key_file(self) -> Path:
        """The private key of the serving certificate."""
        return self.directory / "apiserver.key"

    @property
    def kubelet_client_certificate_file(self) -> Path:
        """What the API server shows to kubelets."""
        return self.directory / "kubelet-client.crt"

    @property
    def kubelet_client_key_file(self) -> Path:
        """The private key of that certificate."""
        return self.directory / "kubelet-client.key"

    @property
    def service_account_key_file(self) -> Path:
        """The private key that signs ServiceAccount tokens."""
        return self.directory / "service-accounts.key"

    def write_kubeconfig(self, path: Path, server: str, user: str, group: str = "operator-app-tests") -> None:
        """Write a kubeconfig that authenticates as ``user`` in ``group`` by certificate (CN and O, RFC 5280)."""
        certificate = self._client(user, group)
        credentials = {
            "client-certificate-data": _base64(b"".join(pem.bytes() for pem in certificate.cert_chain_pems)),
            "client-key-data": _base64(certificate.private_key_pem.bytes()),
        }
        cluster = {"server": server, "certificate-authority-data": _base64(self.ca.cert_pem.bytes())}
        _write(path, cluster, user, credentials)

    def write_serving_certificate(self, certificate_file: Path, key_file: Path, *names: str) -> None:
        """Write a serving certificate for host names and addresses, and its private key."""
        _write_pair(self.ca.issue_cert(*names), certificate_file, key_file)

    def _client(self, user: str, group: str) -> trustme.LeafCert:
        # trustme marks the list of alternative names critical, and Go refuses a critical list that is empty.
        return self.ca.issue_cert("client.invalid", common_name=user, organization_name=group)


def write_service_account_kubeconfig(
    admin: Kube, admin_kubeconfig: Path, path: Path, namespace: str, service_account: str
) -> None:
    """Write a kubeconfig that authenticates as a ServiceAccount, with a token from the TokenRequest API.

    The cluster may cap the token's lifetime below ``TOKEN_LIFETIME_S``. A new namespace gets its ``default`` account
    from a controller, a moment later; raises ``TimeoutError`` if the account does not come.
    """
    admin.wait_until(SERVICE_ACCOUNT, Key(namespace, service_account), lambda found: found)
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": TOKEN_LIFETIME_S},
    }
    path_of_token = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
    token = admin.request("POST", path_of_token, body=request).json()["status"]["token"]
    _write(path, _cluster_of(admin_kubeconfig), service_account, {"token": token}, namespace)


def _write_pair(pair: trustme.LeafCert, certificate_file: Path, key_file: Path) -> None:
    pair.private_key_pem.write_to_path(key_file)
    for certificate in pair.cert_chain_pems:
        certificate.write_to_path(certificate_file, append=True)


def _cluster_of(kubeconfig: Path) -> Object:
    """The cluster entry of a kubeconfig's current context, with its CA inline."""
    context = kubeconfig_context(kubeconfig)
    cluster: Object = {"server": context.cluster.server}
    if context.cluster.certificate_auth_data:
        cluster["certificate-authority-data"] = context.cluster.certificate_auth_data
    elif context.cluster.certificate_auth:
        ca_file = Path(context.abs_file(context.cluster.certificate_auth))
        cluster["certificate-authority-data"] = _base64(ca_file.read_bytes())
    return cluster


def _write(path: Path, cluster: Object, user: str, credentials: Object, namespace: str = "default") -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "e2e", "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": user, "namespace": namespace}}],
        "current-context": "e2e",
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
