"""Where Envoy finds the content of Secrets: one small file of the ConfigMap for each, and the mount it leads to. Pure.

The operator never reads a Secret. A kubelet mounts it, and Envoy reads it from there, again whenever the kubelet
replaces the mounted files. Envoy follows only what is delivered by secret discovery, so each Secret has a file that
says nothing but where it is mounted, and whose content never changes.

A Secret may be missing or broken, at the start of a Pod and later. What uses it then serves nobody and harms nothing
else, or goes on with the content before. Two things let Envoy 1.40 follow it from there:

* all paths lead through ``..data``, which a kubelet swaps; the visible names are made only afterwards;
* the mount is what the subscription watches, too: authorities that could not be read the first time are looked for
  again when the file that leads to them is read again, and not otherwise.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Final

from operator_app.envoy.messages import Message, mounted_file

TLS_DIRECTORY: Final = "/etc/envoy-tls"
"""Below it, every Secret with a certificate has a directory of its own."""

CERTIFICATE_KEY: Final = "tls.crt"
PRIVATE_KEY_KEY: Final = "tls.key"
"""The keys of such a Secret, those of the type kubernetes.io/tls."""

CA_DIRECTORY: Final = "/etc/envoy-ca"
"""Below it, every Secret with authorities, of backends or of clients, has a directory of its own."""

CA_KEY: Final = "ca.crt"
"""The key of such a Secret."""

CERTIFICATE_PREFIX: Final = "certificate/"
AUTHORITIES_PREFIX: Final = "authorities/"
"""With which Envoy's names for Secrets begin; the name of the Secret follows."""

_SECRET: Final = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"  # noqa: S105


def tls_directory(secret: str) -> str:
    """Where the Secret called ``secret`` is mounted for its certificate."""
    return f"{TLS_DIRECTORY}/{_digest(secret)}"


def ca_directory(secret: str) -> str:
    """Where the Secret called ``secret`` is mounted for its authorities."""
    return f"{CA_DIRECTORY}/{_digest(secret)}"


def certificate(secret: str) -> Message:
    """The reference to the certificate in the Secret called ``secret``."""
    return {
        "name": f"{CERTIFICATE_PREFIX}{secret}",
        "sds_config": mounted_file(_certificate_file(secret), watched=tls_directory(secret)),
    }


def authorities(secret: str) -> Message:
    """The reference to the authorities in the Secret called ``secret``."""
    return {
        "name": f"{AUTHORITIES_PREFIX}{secret}",
        "sds_config": mounted_file(_authorities_file(secret), watched=ca_directory(secret)),
    }


def secret_files(certificates: Iterable[str], authorities: Iterable[str]) -> dict[str, Message]:
    """The files that the references lead to, by name; the parameters are names of Secrets."""
    files: dict[str, Message] = {}
    for secret in certificates:
        directory = tls_directory(secret)
        content = {
            "certificate_chain": _data(directory, CERTIFICATE_KEY),
            "private_key": _data(directory, PRIVATE_KEY_KEY),
            "watched_directory": {"path": directory},
        }
        files[_certificate_file(secret)] = _file(f"{CERTIFICATE_PREFIX}{secret}", "tls_certificate", content)
    for secret in authorities:
        directory = ca_directory(secret)
        content = {"trusted_ca": _data(directory, CA_KEY), "watched_directory": {"path": directory}}
        files[_authorities_file(secret)] = _file(f"{AUTHORITIES_PREFIX}{secret}", "validation_context", content)
    return files


def _data(directory: str, key: str) -> Message:
    return {"filename": f"{directory}/..data/{key}"}


def _file(name: str, kind: str, content: Message) -> Message:
    # The version moves with the name of the Secret alone: what is in it, Envoy reads from the mount.
    return {"resources": [{"@type": _SECRET, "name": name, kind: content}], "version_info": "1"}


def _certificate_file(secret: str) -> str:
    return f"sds-tls-{_digest(secret)}.json"


def _authorities_file(secret: str) -> str:
    return f"sds-ca-{_digest(secret)}.json"


def _digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()[:12]
