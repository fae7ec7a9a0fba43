"""The files of one proxy: an EnvoyProxy's spec rendered as what Envoy reads. Pure.

Kubernetes objects do not belong here (``desired.py`` mounts the files), nor does the validation of a spec (``api``).
Every string of a spec is rendered as a JSON value, never as a key, a type, a regular expression or a format string.
Names that are derived from a spec carry the prefix ``listener/`` or ``backend/``, so they can't collide with internal
ones.

=========================  =============================================  ==========================================
file                       content                                        read by Envoy
=========================  =============================================  ==========================================
``envoy-<revision>.json``  bootstrap                                      once, when it starts
``lds-<revision>.json``    listeners, without a route                     after each change; replaces a listener that
                                                                          has changed, with its connections
``rds-<listener>.json``    routes of one HTTP listener                    after each change; touches no connection
``sds-….json``             where one Secret is mounted                    never changes; the Secret itself is read from
                                                                          the mount, after each change
``cds.json``               clusters, one for each backend and for each    after each change; replaces a cluster that
                           TCP listener                                   has changed, running requests finish
=========================  =============================================  ==========================================

The *revision* names what a running Pod can't follow: the bootstrap, the ports that its container and the Service know,
and the Secrets that are mounted. Pods of two revisions run beside each other during a rollout, each with its own
listeners and the same routes and clusters.

But where the Secrets with authorities of backends differ: an older Pod does not have the new ones, so it could not
reach a backend that is verified by them. Files of clusters and routes have a digest of those Secrets in their names,
``cds-<digest>.json`` and ``rds-<listener>.<digest>.json``, so an older Pod keeps the clusters and routes that it can
serve until it is replaced. The first half of a revision is that digest: what tells which Pods follow which files.

Equal specs render to equal texts: they depend on no clock, host or random number, and not on the order of listeners and
backends, which are maps keyed by name. Each resource file carries the hash of its content as its version, and Envoy
says which version it has loaded.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

from operator_app.api.models import EnvoyProxySpec, Listener, Protocol
from operator_app.envoy import internal, secrets, tls
from operator_app.envoy.bootstrap import bootstrap
from operator_app.envoy.clusters import cluster
from operator_app.envoy.listeners import listener, listener_name, route_configuration, virtual_hosts_bytes
from operator_app.envoy.messages import Message
from operator_app.errors import TerminalError

CLUSTERS_FILE: Final = "cds.json"
"""The clusters of a proxy whose backends need no Secret."""

MAX_BYTES: Final = 1_000_000
"""Upper bound of all texts together. The API server accepts ConfigMaps up to 1 MiB with keys (``MaxSecretSize``)."""

READABLE_BYTES: Final = 100_000
"""Compact texts up to this size are indented, which triples it and takes the encoder several times as long."""

_API: Final = "type.googleapis.com/envoy.config."
_LISTENER: Final = _API + "listener.v3.Listener"
_CLUSTER: Final = _API + "cluster.v3.Cluster"
_ROUTES: Final = _API + "route.v3.RouteConfiguration"

_VERSION: Final = re.compile(r'"version_info": ?"([^"\\]*)"')
"""Inside a string of a spec the quotes are escaped, so it can't look like this."""

_DIGEST_LENGTH: Final = 8

_FILE_NAME: Final = re.compile(
    r"envoy\.json|(envoy|lds)-[0-9a-f]{16}\.json|rds-.+\.json|sds-(tls|ca)-[0-9a-f]{12}\.json|cds(-[0-9a-f]{8})?\.json"
)
"""Every name that a file has or had; ``envoy.json`` is the whole configuration of older versions of the operator."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one proxy by their names, with what tells which of them an Envoy has loaded.

    ``versions`` has the version of each resource file by the prefix of Envoy's statistics about it, and ``names`` its
    name by the same. ``secrets`` are the names of the Secrets that are mounted, by Envoy's names for them.
    """

    revision: str
    texts: Mapping[str, str]
    versions: Mapping[str, str]
    names: Mapping[str, str]
    secrets: Mapping[str, str]

    @property
    def clusters_file(self) -> str:
        """The file with the clusters."""
        return self.names[internal.CLUSTERS_STAT]

    def are_read_by(self, revision: str) -> bool:
        """Whether a Pod of ``revision`` reads the files of clusters and routes, and not some of its own."""
        return revision[:_DIGEST_LENGTH] == self.revision[:_DIGEST_LENGTH]

    @property
    def digest(self) -> str:
        """What tells these files from others."""
        return text_hash(_json([self.revision, sorted(self.versions.items())]))

    @property
    def bootstrap_file(self) -> str:
        """The file that Envoy is started with."""
        return _bootstrap_file(self.revision)


def version_of(text: str) -> str:
    """The version that a resource file carries, empty where it carries none."""
    found = _VERSION.findall(text)
    return found[-1] if found else ""


def clusters_of(text: str) -> dict[str, Message] | None:
    """The clusters in the text of a file of clusters by name; ``None`` where it is no such text."""
    try:
        return {each["name"]: each for each in json.loads(text)["resources"]}
    except (KeyError, TypeError, ValueError):
        return None


def with_texts(files: Files, texts: Mapping[str, str]) -> Files:
    """``files`` with other texts of resource files that they have, and the versions that these carry."""
    stats = {name: stat for stat, name in files.names.items()}
    replaced = {name: text for name, text in texts.items() if name in stats}
    versions = {stats[name]: version_of(text) for name, text in replaced.items()}
    return replace(files, texts={**files.texts, **replaced}, versions={**files.versions, **versions})


def with_clusters(files: Files, clusters: Mapping[str, Message], generation: int) -> Files:
    """``files`` with these clusters in place of their own, in a version that no other generation has."""
    resources = [clusters[name] for name in sorted(clusters)]
    version = internal.VERSION_PREFIX + text_hash(_json([generation, resources]))
    text = _json({"resources": resources, "version_info": version}) + "\n"
    return with_texts(files, {files.clusters_file: text})


def is_file(name: str) -> bool:
    """Whether a key of a ConfigMap is the name of a file that this module renders, or did once."""
    return _FILE_NAME.fullmatch(name) is not None


def rendered(spec: EnvoyProxySpec) -> Files:
    """All files of the proxy that ``spec`` declares: JSON with sorted keys in ASCII, indented up to ``READABLE_BYTES``.

    Their size is linear in that of ``spec`` but for the routes, which stand in the virtual host of every domain that
    they serve. Raises ``TerminalError`` if the texts are larger than ``MAX_BYTES`` together; if the routes alone are,
    before any of them is built.
    """
    virtual_hosts = sum(virtual_hosts_bytes(each) for each in spec.listeners)
    if virtual_hosts > MAX_BYTES:
        raise _too_large(virtual_hosts)
    revision = _revision(spec)
    static = bootstrap(spec, listeners_file=_listeners_file(revision), clusters_file=_clusters_file(spec))
    resources = _resources(spec, revision)
    compact = {name: _json(listed) for name, (_, listed) in resources.items()}
    versions = {name: internal.VERSION_PREFIX + text_hash(text) for name, text in compact.items()}
    if sum(map(len, compact.values())) + len(_json(static)) <= READABLE_BYTES:
        documents: dict[str, Message] = {_bootstrap_file(revision): static}
        for name, (_, listed) in resources.items():
            documents[name] = {"resources": listed, "version_info": versions[name]}
        texts = {name: json.dumps(document, indent=2, sort_keys=True) + "\n" for name, document in documents.items()}
    else:
        texts = {_bootstrap_file(revision): _json(static) + "\n"}
        for name, text in compact.items():
            # What is encoded already is not encoded again, which takes long for large texts.
            texts[name] = f'{{"resources":{text},"version_info":"{versions[name]}"}}\n'
    mounted = _mounted(spec)
    for name, document in secrets.secret_files(*mounted).items():
        texts[name] = json.dumps(document, indent=2, sort_keys=True) + "\n"
    size_bytes = sum(map(len, texts.values()))
    if size_bytes > MAX_BYTES:
        raise _too_large(size_bytes)
    names = {stat: name for name, (stat, _) in resources.items()}
    prefixes = secrets.CERTIFICATE_PREFIX, secrets.AUTHORITIES_PREFIX
    by_name = {f"{prefix}{each}": each for prefix, found in zip(prefixes, mounted, strict=True) for each in found}
    return Files(revision, texts, {stat: versions[name] for stat, name in names.items()}, names, by_name)


def text_hash(text: str) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a text."""
    return sha256(text.encode()).hexdigest()[:16]


def _resources(spec: EnvoyProxySpec, revision: str) -> dict[str, tuple[str, list[Message]]]:
    """The resources of each file, with the prefix of Envoy's statistics about it."""
    listeners = sorted(spec.listeners, key=lambda each: each.name)
    bound = (listener(each, _routes_file(spec, each), is_dual_stack=spec.service.is_dual_stack) for each in listeners)
    found = {
        _listeners_file(revision): (
            internal.LISTENERS_STAT,
            _typed(_LISTENER, bound),
        ),
        _clusters_file(spec): (internal.CLUSTERS_STAT, _typed(_CLUSTER, _clusters(spec))),
    }
    for each in listeners:
        if each.protocol is Protocol.HTTP:
            stat = internal.routes_stat(listener_name(each))
            found[_routes_file(spec, each)] = stat, _typed(_ROUTES, [route_configuration(each)])
    return found


def _clusters(spec: EnvoyProxySpec) -> list[Message]:
    """One cluster for each backend, and one for each TCP listener, whose name is all that the listener says of it."""
    backends = {each.name: each for each in spec.backends}
    tcp = (each for each in spec.listeners if each.protocol is Protocol.TCP)
    clusters = [cluster(each) for each in backends.values()]
    clusters += [cluster(backends[each.routes[0].backend or ""], listener_name(each)) for each in tcp]
    return sorted(clusters, key=lambda each: str(each["name"]))


def _typed(kind: str, messages: Iterable[Message]) -> list[Message]:
    return [{"@type": kind} | each for each in messages]


def _revision(spec: EnvoyProxySpec) -> str:
    """The hash of what a running Pod can't follow; its first half is that of the Secrets that clusters need."""
    static = bootstrap(spec, listeners_file=_listeners_file(""), clusters_file=CLUSTERS_FILE)
    ports = sorted((each.name, each.container_port, each.protocol.value) for each in spec.listeners)
    mounted = [tls.certificate_secrets(spec.listeners), tls.client_ca_secrets(spec.listeners)]
    rest = text_hash(_json({"bootstrap": static, "ports": ports, "secrets": mounted}))
    return _authorities_digest(spec) + rest[_DIGEST_LENGTH:]


def _authorities_digest(spec: EnvoyProxySpec) -> str:
    """What tells the Secrets with authorities of backends from others."""
    return text_hash(_json(tls.backend_ca_secrets(spec.backends)))[:_DIGEST_LENGTH]


def _mounted(spec: EnvoyProxySpec) -> tuple[list[str], list[str]]:
    """The Secrets with certificates, and those with authorities."""
    authorities = {*tls.client_ca_secrets(spec.listeners), *tls.backend_ca_secrets(spec.backends)}
    return tls.certificate_secrets(spec.listeners), sorted(authorities)


def _clusters_file(spec: EnvoyProxySpec) -> str:
    return f"cds-{_authorities_digest(spec)}.json" if tls.backend_ca_secrets(spec.backends) else CLUSTERS_FILE


def _routes_file(spec: EnvoyProxySpec, declared: Listener) -> str:
    digest = f".{_authorities_digest(spec)}" if tls.backend_ca_secrets(spec.backends) else ""
    return f"rds-{declared.name}{digest}.json"


def _bootstrap_file(revision: str) -> str:
    return f"envoy-{revision}.json"


def _listeners_file(revision: str) -> str:
    return f"lds-{revision}.json"


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _too_large(size_bytes: int) -> TerminalError:
    return TerminalError(
        "ConfigurationTooLarge",
        f"the Envoy configuration takes {size_bytes} bytes, and a ConfigMap holds {MAX_BYTES}: declare fewer routes "
        "and hosts, above all fewer routes for wildcards or for every host, which count once for each host, or divide "
        "them between several EnvoyProxies",
    )
