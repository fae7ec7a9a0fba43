"""TLS to clients: the socket of a listener, and the Secrets that listeners and backends name. Pure."""

from collections.abc import Iterable
from typing import Final

from operator_app.api.connections import ListenerTls
from operator_app.api.models import Backend, Listener, Protocol
from operator_app.envoy import secrets
from operator_app.envoy.messages import Message, extension

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


def certificate_secrets(listeners: Iterable[Listener]) -> list[str]:
    """The names of the Secrets with certificates for clients, each once."""
    return sorted({each.tls.secret_name for each in listeners if each.tls})


def client_ca_secrets(listeners: Iterable[Listener]) -> list[str]:
    """The names of the Secrets with the authorities of clients, each once."""
    found = (each.tls.client_ca_secret_name for each in listeners if each.tls)
    return sorted({each for each in found if each is not None})


def backend_ca_secrets(backends: Iterable[Backend]) -> list[str]:
    """The names of the Secrets with the authorities of backends, each once."""
    found = (each.tls.ca_secret_name for each in backends if each.tls)
    return sorted({each for each in found if each is not None})


def transport_socket(declared: ListenerTls, protocol: Protocol) -> Message:
    """The socket of a listener that speaks TLS to its clients."""
    context: Message = {
        "tls_params": {
            "tls_minimum_protocol_version": "TLSv1_2",
            "tls_maximum_protocol_version": "TLSv1_3",
            "cipher_suites": list(_CIPHERS),
        },
        "tls_certificate_sds_secret_configs": [secrets.certificate(declared.secret_name)],
    }
    if protocol is Protocol.HTTP:
        context["alpn_protocols"] = ["h2", "http/1.1"]
    fields: Message = {"common_tls_context": context}
    if declared.client_ca_secret_name is not None:
        context["validation_context_sds_secret_config"] = secrets.authorities(declared.client_ca_secret_name)
        fields["require_client_certificate"] = True
    return extension("envoy.transport_sockets.tls", "transport_sockets.tls.v3.DownstreamTlsContext", **fields)
