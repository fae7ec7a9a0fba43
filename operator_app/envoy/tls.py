"""TLS to clients: the socket of a listener, and the files that tell Envoy where certificates are. Pure.

The operator never reads a Secret. A kubelet mounts it, and Envoy reads its certificate from there, again whenever the
kubelet replaces the mounted files; a certificate that can't be used leaves the one before it in place. What Envoy reads
of the ConfigMap is one small file for each Secret, which says nothing but where that is mounted: Envoy follows only
certificates that are delivered so (secret discovery).
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Final

from operator_app.api.connections import ListenerTls
from operator_app.api.models import Listener, Protocol
from operator_app.envoy.clusters import CA_KEY, ca_directory
from operator_app.envoy.messages import Message, extension, mounted_file

TLS_DIRECTORY: Final = "/etc/envoy-tls"
"""Below it, every Secret with a certificate has a directory of its own."""

CERTIFICATE_KEY: Final = "tls.crt"
PRIVATE_KEY_KEY: Final = "tls.key"
"""The keys of such a Secret, those of the type kubernetes.io/tls."""

_CIPHERS: Final = (
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-CHACHA20-POLY1305",
    "ECDHE-RSA-CHACHA20-POLY1305",
)
"""Mozilla's intermediate profile, version 5.7, without the DHE ciphers, which Envoy's library does not have. TLS 1.3
chooses its own."""

_SECRET: Final = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"  # noqa: S105


def tls_directory(secret: str) -> str:
    """Where the Secret called ``secret`` is mounted for its certificate."""
    return f"{TLS_DIRECTORY}/{_digest(secret)}"


def certificate_secrets(listeners: Iterable[Listener]) -> list[str]:
    """The names of the Secrets with certificates for clients, each once."""
    return sorted({each.tls.secret_name for each in listeners if each.tls})


def client_ca_secrets(listeners: Iterable[Listener]) -> list[str]:
    """The names of the Secrets with the authorities of clients, each once."""
    found = (each.tls.client_ca_secret_name for each in listeners if each.tls)
    return sorted({each for each in found if each is not None})


def secret_files(listeners: tuple[Listener, ...]) -> dict[str, Message]:
    """The files that say where certificates and authorities are mounted, by name."""
    files: dict[str, Message] = {}
    for secret in certificate_secrets(listeners):
        directory = tls_directory(secret)
        content = {
            "certificate_chain": {"filename": f"{directory}/{CERTIFICATE_KEY}"},
            "private_key": {"filename": f"{directory}/{PRIVATE_KEY_KEY}"},
            "watched_directory": {"path": directory},
        }
        files[_certificate_file(secret)] = _file(_certificate(secret), "tls_certificate", content)
    for secret in client_ca_secrets(listeners):
        directory = ca_directory(secret)
        content = {
            "trusted_ca": {"filename": f"{directory}/{CA_KEY}"},
            "watched_directory": {"path": directory},
        }
        files[_authorities_file(secret)] = _file(_authorities(secret), "validation_context", content)
    return files


def transport_socket(declared: ListenerTls, protocol: Protocol) -> Message:
    """The socket of a listener that speaks TLS to its clients."""
    context: Message = {
        "tls_params": {
            "tls_minimum_protocol_version": "TLSv1_2",
            "tls_maximum_protocol_version": "TLSv1_3",
            "cipher_suites": list(_CIPHERS),
        },
        "tls_certificate_sds_secret_configs": [
            _reference(_certificate(declared.secret_name), _certificate_file(declared.secret_name))
        ],
    }
    if protocol is Protocol.HTTP:
        context["alpn_protocols"] = ["h2", "http/1.1"]
    fields: Message = {"common_tls_context": context}
    authorities = declared.client_ca_secret_name
    if authorities is not None:
        reference = _reference(_authorities(authorities), _authorities_file(authorities))
        context["validation_context_sds_secret_config"] = reference
        fields["require_client_certificate"] = True
    return extension("envoy.transport_sockets.tls", "transport_sockets.tls.v3.DownstreamTlsContext", **fields)


def _reference(name: str, file: str) -> Message:
    return {"name": name, "sds_config": mounted_file(file)}


def _file(name: str, kind: str, content: Message) -> Message:
    # The version moves with the name of the Secret alone: what is in it, Envoy reads from the mount.
    return {"resources": [{"@type": _SECRET, "name": name, kind: content}], "version_info": "1"}


def _certificate(secret: str) -> str:
    return f"certificate/{secret}"


def _authorities(secret: str) -> str:
    return f"authorities/{secret}"


def _certificate_file(secret: str) -> str:
    return f"sds-tls-{_digest(secret)}.json"


def _authorities_file(secret: str) -> str:
    return f"sds-ca-{_digest(secret)}.json"


def _digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()[:12]
