"""The desired children of an EnvoyProxy: ConfigMap, Deployment, Service and what the spec asks for beside. Pure.

The children are *canonical*: they contain exactly the values that the API server stores, because the operator compares
them field by field with the fields that it owns. Defaults of key fields are explicit (protocols, apiVersions), there
are no empty values, quantities have their canonical form, and every item of a keyed list has all key fields. The
children depend on no clock, host or previous object, so equal EnvoyProxies have equal children.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from math import ceil
from types import MappingProxyType
from typing import Any, Final

from operator_app import optional_children
from operator_app.api.kinds import (
    ANNOTATION_INSTALLATION,
    ANNOTATION_REVISION,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    FIELD_MANAGER,
    HORIZONTAL_POD_AUTOSCALER,
    LABEL_MANAGED_BY,
    LABEL_OWNER_UID,
    NETWORK_POLICY,
    OPERATOR_NAMESPACE,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.api.models import METRICS_PORT, READINESS_PORT, EnvoyProxySpec, Listener, Resources
from operator_app.api.quantity import canonical, value_of
from operator_app.envoy import drain, internal, secrets, tls
from operator_app.envoy.files import MAX_BYTES, Files, is_file, rendered
from operator_app.envoy.messages import CONFIG_DIRECTORY
from operator_app.pod_placement import pod_placement
from operator_app.ssa.fields import fields_of

CONTAINER_NAME: Final = "envoy"
READINESS_PORT_NAME: Final = "readiness"
METRICS_PORT_NAME: Final = "proxy-metrics"
_RESERVED_PORT_NAMES: Final = (READINESS_PORT_NAME, METRICS_PORT_NAME)
_DIGEST_PREFIX: Final = "l-"

SUFFIX: Final = "-envoy"
DEFAULT_CONCURRENCY: Final = 2
"""Envoy's worker threads without a CPU limit. Envoy's own default is one for every core of the node."""
MAX_CONCURRENCY: Final = 256
"""Upper bound of Envoy's worker threads. Each has its own memory and connections, so more than a node has cores are of
no use, and a CPU limit of ``5G`` (a mistake for memory) must not start five billion.
"""

_USER_IDS: Final = range(10_000, 60_000)
"""Linux user ids of proxies: above those of systems, below 65,536, which a user namespace has at least.

A kernel bounds some things for each user id of a node, whatever the namespaces: 128 inotify instances by default, of
which an Envoy takes one for each file that it watches.
"""


def child_key(proxy: Key) -> Key:
    """The key of every child of ``proxy``; its children differ by kind only."""
    return Key(proxy.namespace, proxy.name + SUFFIX)


def proxy_key(child: Key) -> Key | None:
    """The proxy whose children have the key ``child``, or ``None`` if no proxy has such children."""
    name = child.name.removesuffix(SUFFIX)
    return Key(child.namespace, name) if name and name != child.name else None


def selector_labels(name: str) -> dict[str, str]:
    """The labels that select the Pods of a proxy. They must never change: a Deployment's selector is immutable."""
    return {"app.kubernetes.io/name": "envoy", "app.kubernetes.io/instance": name}


def children(
    proxy: Object,
    spec: EnvoyProxySpec,
    *,
    default_image: str,
    installation: str = OPERATOR_NAMESPACE,
    run_as_user: bool = True,
    live: Mapping[Kind, Object | None] = MappingProxyType({}),
    files: Files | None = None,
) -> dict[Kind, Object]:
    """The desired children of ``proxy``, in the order in which they are applied.

    ``files`` are what the ConfigMap should have now, by default what ``spec`` declares. ``live`` are the children as
    they are known: as long as Pods of an older revision run, the ConfigMap keeps the files that these read, so that one
    of them that is started again runs what it was rolled out with; nothing else of ``live`` is used. Without
    ``run_as_user`` the platform says as which Linux user the Pods run. Raises ``TerminalError`` if the Envoy
    configuration does not fit into a ConfigMap.
    """
    files = files or rendered(spec)
    bodies: dict[Kind, Object] = {
        CONFIG_MAP: {"data": _files_in_use(proxy, files, live) | dict(files.texts)},
        DEPLOYMENT: {"spec": _deployment_spec(proxy, spec, files, default_image, run_as_user=run_as_user)},
        SERVICE: {"spec": _service_spec(proxy, spec)},
        **_optional_bodies(proxy, spec),
    }
    annotations = {kind: {ANNOTATION_INSTALLATION: installation} for kind in bodies}
    annotations[SERVICE] |= spec.service.annotations
    return {kind: _child(kind, proxy, body, annotations[kind]) for kind, body in bodies.items()}


def _optional_bodies(proxy: Object, spec: EnvoyProxySpec) -> dict[Kind, Object]:
    """The bodies of the children that ``spec`` asks for."""
    selector = _own_selector(proxy)
    namespace = proxy["metadata"]["namespace"]
    bodies = {
        POD_DISRUPTION_BUDGET: optional_children.disruption_budget(spec, selector),
        HORIZONTAL_POD_AUTOSCALER: optional_children.autoscaler(spec, proxy["metadata"]["name"] + SUFFIX),
        NETWORK_POLICY: optional_children.network_policy(spec, namespace, selector),
    }
    return {kind: body for kind, body in bodies.items() if body is not None}


def _own_selector(proxy: Object) -> dict[str, str]:
    """The labels of this proxy's Pods alone: the UID is on nobody else's, whatever labels they carry."""
    return selector_labels(proxy["metadata"]["name"]) | {LABEL_OWNER_UID: proxy["metadata"]["uid"]}


def _files_in_use(proxy: Object, files: Files, live: Mapping[Kind, Object | None]) -> dict[str, str]:
    """Files of older revisions that Pods of this proxy still read, as they are in its ConfigMap.

    Only those that we own, so a key of another writer is neither taken nor removed later. None, if they do not fit into
    one ConfigMap together with the new ones: a Pod of the old revision that is started again then waits for the end of
    the rollout.
    """
    config_map, deployment = (live.get(kind) for kind in (CONFIG_MAP, DEPLOYMENT))
    uid = proxy["metadata"]["uid"]
    if config_map is None or deployment is None or {controller_uid(config_map), controller_uid(deployment)} != {uid}:
        return {}
    if not _has_older_pods(deployment, files.revision):
        return {}
    owned = fields_of(config_map).get("f:data", {})
    older = {
        name: text
        for name, text in (config_map.get("data") or {}).items()
        if name not in files.texts and f"f:{name}" in owned and is_file(name)
    }
    is_small = sum(map(len, (*older.values(), *files.texts.values()))) <= MAX_BYTES
    return older if is_small else {}


def _has_older_pods(deployment: Object, revision: str) -> bool:
    """Whether a Deployment has Pods of another revision, or may still make some.

    Until all Pods of the new template are available, its controller keeps older ones and replaces those that die; in
    between it counts none of them for a moment.
    """
    reported = deployment.get("status") or {}
    total = reported.get("replicas", 0)
    template = deployment["spec"]["template"]["metadata"].get("annotations") or {}
    if template.get(ANNOTATION_REVISION) != revision:
        return bool(total)
    is_observed = reported.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    is_complete = is_observed and all(
        reported.get(name, 0) == deployment["spec"].get("replicas", 1)
        for name in ("replicas", "updatedReplicas", "availableReplicas")
    )
    return bool(total) and not is_complete


def owner_reference(proxy: Object) -> Object:
    """The controller reference of a child of ``proxy``, with every field, since an apply owns the item as a whole."""
    return {
        "apiVersion": ENVOY_PROXY.api_version,
        "kind": ENVOY_PROXY.kind,
        "name": proxy["metadata"]["name"],
        "uid": proxy["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def controller_uid(obj: Object) -> str | None:
    """The UID of the object's controller, or ``None``. Children are indexed by it."""
    references = obj["metadata"].get("ownerReferences", ())
    return next((each["uid"] for each in references if each.get("controller")), None)


def _child(kind: Kind, proxy: Object, body: Object, annotations: dict[str, str]) -> Object:
    metadata = proxy["metadata"]
    key = child_key(Key(metadata["namespace"], metadata["name"]))
    labels = _labels(metadata["name"]) | {LABEL_OWNER_UID: metadata["uid"]}
    child_metadata: Object = {
        "name": key.name,
        "namespace": key.namespace,
        "labels": labels,
        "annotations": annotations,
        "ownerReferences": [owner_reference(proxy)],
    }
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": child_metadata} | body


def _labels(name: str) -> dict[str, str]:
    return selector_labels(name) | {"app.kubernetes.io/component": "proxy", LABEL_MANAGED_BY: FIELD_MANAGER}


def _deployment_spec(
    proxy: Object, spec: EnvoyProxySpec, files: Files, default_image: str, *, run_as_user: bool
) -> Object:
    name = proxy["metadata"]["name"]
    # With an autoscaler the number of Pods is its alone: an apply that had it would undo what the load asked for.
    replicas = {} if spec.autoscaling else {"replicas": spec.replicas}
    return replicas | {
        "selector": {"matchLabels": selector_labels(name)},
        # A new Pod must be ready before an old one is deleted, so a rollout does not reduce capacity.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0}},
        "template": {
            "metadata": {
                "labels": spec.pod_labels | _labels(name) | {LABEL_OWNER_UID: proxy["metadata"]["uid"]},
                "annotations": spec.pod_annotations | {ANNOTATION_REVISION: files.revision},
            },
            "spec": _pod_spec(proxy, spec, files, default_image, run_as_user=run_as_user),
        },
    }


def _pod_spec(proxy: Object, spec: EnvoyProxySpec, files: Files, default_image: str, *, run_as_user: bool) -> Object:
    metadata = proxy["metadata"]
    user = user_id(metadata["uid"])
    runs_as = {"runAsUser": user, "runAsGroup": user} if run_as_user else {}
    return {
        "automountServiceAccountToken": False,
        # Else each Pod gets environment variables of the Services that exist when it starts, which nothing reads.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": drain.TERMINATION_GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            **runs_as,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(f"{metadata['namespace']}/{metadata['name']}", spec, files, default_image)],
        "volumes": [
            {"name": "config", "configMap": {"name": metadata["name"] + SUFFIX}},
            *(_secret_volume(_ca_volume(each), each, secrets.CA_KEY) for each in _ca_secrets(spec)),
            *(
                _secret_volume(_tls_volume(each), each, secrets.CERTIFICATE_KEY, secrets.PRIVATE_KEY_KEY)
                for each in tls.certificate_secrets(spec.listeners)
            ),
        ],
        **pod_placement(spec, _own_selector(proxy)),
    }


def user_id(uid: str) -> int:
    """The Linux user id as which the Pods of a proxy run, of ``_USER_IDS``: nearly always another for another proxy."""
    return _USER_IDS[int(sha256(uid.encode()).hexdigest(), 16) % len(_USER_IDS)]


def _container(cluster_name: str, spec: EnvoyProxySpec, files: Files, default_image: str) -> Object:
    container: Object = {
        "name": CONTAINER_NAME,
        "image": spec.image or default_image,
        "args": [
            "--config-path",
            f"{CONFIG_DIRECTORY}/{files.bootstrap_file}",
            "--service-cluster",
            cluster_name,
            "--service-node",
            "$(POD_NAME)",
            "--concurrency",
            str(_concurrency(spec.resources)),
            # Hot restart needs shared memory, which a read-only container lacks, and Pods are replaced anyway.
            "--disable-hot-restart",
            # Unknown fields of files are only counted otherwise, and an older image would ignore a rule that it does
            # not know.
            "--reject-unknown-dynamic-fields",
        ],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}}],
        "ports": [
            *(
                {"name": port_name(listener.name), "containerPort": listener.container_port, "protocol": "TCP"}
                for listener in spec.listeners
            ),
            {"name": READINESS_PORT_NAME, "containerPort": READINESS_PORT, "protocol": "TCP"},
            *(
                [{"name": METRICS_PORT_NAME, "containerPort": METRICS_PORT, "protocol": "TCP"}]
                if spec.has_metrics
                else []
            ),
        ],
        # Without it the kubelet asks once before Envoy listens, and then not for five seconds. It never gives up within
        # the Deployment's own deadline: a backend's name that resolves late is no reason to restart Envoy.
        "startupProbe": _probe(period_s=1, failures=600),
        "readinessProbe": _probe(period_s=5, failures=3),
        "lifecycle": {"preStop": drain.pre_stop()},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True},
            *(
                {"name": _ca_volume(each), "mountPath": secrets.ca_directory(each), "readOnly": True}
                for each in _ca_secrets(spec)
            ),
            *(
                {"name": _tls_volume(each), "mountPath": secrets.tls_directory(each), "readOnly": True}
                for each in tls.certificate_secrets(spec.listeners)
            ),
        ],
    }
    resources = _resources(spec.resources)
    if resources:
        container["resources"] = resources
    return container


def _ca_secrets(spec: EnvoyProxySpec) -> list[str]:
    """The Secrets with the authorities of backends and of clients."""
    return sorted({*tls.backend_ca_secrets(spec.backends), *tls.client_ca_secrets(spec.listeners)})


def _secret_volume(name: str, secret: str, *keys: str) -> Object:
    # Optional, since a Pod without it serves all that does not need it; the kubelet brings it once it is there.
    items = [{"key": key, "path": key} for key in keys]
    return {"name": name, "secret": {"secretName": secret, "items": items, "optional": True}}


def _tls_volume(secret: str) -> str:
    return f"tls-{secrets.tls_directory(secret).rpartition('/')[2]}"


def _ca_volume(secret: str) -> str:
    return f"ca-{secrets.ca_directory(secret).rpartition('/')[2]}"


def _probe(*, period_s: int, failures: int) -> Object:
    return {
        "httpGet": {"path": internal.READINESS_PATH, "port": READINESS_PORT, "scheme": "HTTP"},
        "periodSeconds": period_s,
        "timeoutSeconds": 1,
        "failureThreshold": failures,
    }


def _resources(resources: Resources | None) -> Object:
    if resources is None:
        return {}
    stanzas = {
        "requests": {name: canonical(quantity) for name, quantity in resources.requests.items()},
        "limits": {name: canonical(quantity) for name, quantity in resources.limits.items()},
    }
    return {name: stanza for name, stanza in stanzas.items() if stanza}


def _concurrency(resources: Resources | None) -> int:
    """Envoy's worker threads: the CPU limit rounded up, from 1 to ``MAX_CONCURRENCY``."""
    limit = resources.limits.get("cpu") if resources else None
    return DEFAULT_CONCURRENCY if limit is None else min(max(1, ceil(value_of(limit))), MAX_CONCURRENCY)


def _service_spec(proxy: Object, spec: EnvoyProxySpec) -> dict[str, Any]:
    declared = spec.service
    optional = {
        "loadBalancerClass": declared.load_balancer_class,
        "loadBalancerSourceRanges": list(declared.load_balancer_source_ranges),
        "externalTrafficPolicy": declared.external_traffic_policy and declared.external_traffic_policy.value,
        "ipFamilyPolicy": declared.ip_family_policy and declared.ip_family_policy.value,
    }
    return {
        "type": declared.type.value,
        "selector": _own_selector(proxy),
        "ports": [_service_port(each) for each in spec.listeners],
    } | {name: value for name, value in optional.items() if value}


def _service_port(listener: Listener) -> Object:
    # Named, so that each Pod is reached at the port on which it listens, an old one at the old port.
    port = {"name": listener.name, "port": listener.port, "targetPort": port_name(listener.name), "protocol": "TCP"}
    return port if listener.node_port is None else port | {"nodePort": listener.node_port}


def port_name(listener: str) -> str:
    """The container port's name for a listener: its own name where that is a port name, else a digest of it.

    A port name has at most 15 characters with a letter among them, and no two hyphens in a row (RFC 6335 section 5.1).
    """
    is_port_name = len(listener) <= 15 and "--" not in listener and re.search("[a-z]", listener) is not None
    if is_port_name and listener not in _RESERVED_PORT_NAMES and not listener.startswith(_DIGEST_PREFIX):
        return listener
    return _DIGEST_PREFIX + sha256(listener.encode()).hexdigest()[:12]
