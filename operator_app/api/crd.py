"""The CustomResourceDefinitions, derived from the models of ``operator_app.api``. Pure.

This module converts a pydantic model to a *structural schema* (without ``$ref``, ``title`` and ``null``) and adds what
only a CRD has: names, printer columns, subresources. Fields and rules do not belong here.

``python -m operator_app crd`` prints what :func:`crds` returns; ``manifests/crd`` contains the same, one CRD per file.
"""

from collections.abc import Iterable
from typing import Final

import yaml

from operator_app.api.kinds import ENVOY_PROXY, HOSTNAME_CLAIM, HOSTNAME_POLICY, PROXY_REGISTRATION, Kind, Object
from operator_app.api.models import EnvoyProxy
from operator_app.api.policies import HostnamePolicy
from operator_app.api.records import HostnameClaim, ProxyRegistration
from operator_app.api.rules import ApiModel

_ABSENT: Final[tuple[object, ...]] = (None, [], {})


def crds() -> tuple[Object, ...]:
    """Every CustomResourceDefinition of the operator, sorted by name; equal on every call."""
    return (
        _crd(
            ENVOY_PROXY,
            EnvoyProxy,
            # Envoy Gateway has an EnvoyProxy as well, of the same plural and with the short name eproxy. Not in the
            # category all: "kubectl delete all --all" would take tenants' proxies along.
            short_name="edgeproxy",
            categories=["edge"],
            subresources={
                "status": {},
                "scale": {
                    "specReplicasPath": ".spec.replicas",
                    "statusReplicasPath": ".status.replicas",
                    "labelSelectorPath": ".status.selector",
                },
            },
            columns=[
                _condition_column("Ready", "status", "Whether the proxy is as declared, available and registered."),
                _condition_column("Available", "status", "Whether enough proxies are ready."),
                _column("Replicas", ".status.readyReplicas", "Proxies that are ready.", type_="integer"),
                _column("Address", ".status.address", "Where clients reach the proxy."),
                _column("Age", ".metadata.creationTimestamp", "Time since the object was created.", type_="date"),
                _condition_column("Reason", "reason", "Why Ready is what it is.") | {"priority": 1},
            ],
        ),
        _crd(
            HOSTNAME_CLAIM,
            HostnameClaim,
            short_name="ehost",
            categories=["edge"],
            subresources={},
            columns=[
                _column("Namespace", ".spec.proxy.namespace", "Namespace of the EnvoyProxy that has the hostname."),
                _column("Proxy", ".spec.proxy.name", "The EnvoyProxy that has the hostname."),
                _column("Age", ".metadata.creationTimestamp", "Time since the hostname was taken.", type_="date"),
                _column("Released", ".spec.releasedAt", "Since when the hostname rests.", type_="date"),
            ],
        ),
        _crd(
            HOSTNAME_POLICY,
            HostnamePolicy,
            short_name="ehostpol",
            categories=["edge"],
            subresources={},
            columns=[
                _column("Suffixes", ".spec.suffixes", "What hostnames may be below of."),
                _column("Hostnames", ".spec.hostnames", "Hostnames that may be taken."),
                _column("Apex", ".spec.allowApex", "Whether zones' own names may be taken.", type_="boolean"),
                _column("Age", ".metadata.creationTimestamp", "Time since the object was created.", type_="date"),
            ],
        ),
        _crd(
            PROXY_REGISTRATION,
            ProxyRegistration,
            short_name="eproxyreg",
            categories=["edge"],
            subresources={"status": {}},
            columns=[
                _column("Proxy", ".spec.proxy.name", "The EnvoyProxy that is registered."),
                _column("Namespace", ".spec.proxy.namespace", "Namespace of the EnvoyProxy."),
                _column("Hostname", ".spec.hostname", "Name under which the proxy is registered."),
                _column("Address", ".spec.address", "Where clients reach the proxy."),
                _column("State", ".spec.state", "Why there is a record."),
                _column("Age", ".metadata.creationTimestamp", "Time since the record was created.", type_="date"),
                _column("Registry", ".spec.registry", "Who publishes the hostname.") | {"priority": 1},
            ],
        ),
    )


def to_yaml(objects: Iterable[Object]) -> str:
    """``objects`` as one YAML stream; equal input gives equal bytes."""
    return yaml.safe_dump_all(objects, explicit_start=True, sort_keys=False, width=110, allow_unicode=True)


def structural_schema(model: type[ApiModel]) -> Object:
    """The structural schema of ``model``, as ``apiextensions.k8s.io/v1`` requires it.

    Every node has a type, no node is a reference, and null is not a value. The model's defaults are kept, except
    ``None`` and empty collections, which both mean that the field is absent, and those inside lists: kubectl's
    client-side apply compares a list as a whole, so a default that the API server has added to an item would be a
    difference each time. There the model applies the default, and the field's description names it.
    """
    schema = model.model_json_schema()
    return _structural(schema, schema.pop("$defs", {}))


def _crd(
    kind: Kind,
    model: type[ApiModel],
    *,
    short_name: str,
    categories: list[str],
    subresources: Object,
    columns: list[Object],
) -> Object:
    version: Object = {
        "name": kind.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _object_schema(kind, model)},
        "additionalPrinterColumns": columns,
    }
    if subresources:
        version["subresources"] = subresources
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{kind.group}"},
        "spec": {
            "group": kind.group,
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": [short_name],
                "categories": categories,
            },
            "versions": [version],
        },
    }


def _object_schema(kind: Kind, model: type[ApiModel]) -> Object:
    schema = structural_schema(model)
    schema["properties"] = {
        "apiVersion": {"type": "string", "description": f"Group and version of the object: {kind.api_version}."},
        "kind": {"type": "string", "description": f"Kind of the object: {kind.kind}."},
        "metadata": {"type": "object"},
        **schema["properties"],
    }
    return schema


def _column(name: str, path: str, description: str, *, type_: str = "string") -> Object:
    return {"name": name, "type": type_, "description": description, "jsonPath": path}


def _condition_column(name: str, member: str, description: str) -> Object:
    condition = "Ready" if name == "Reason" else name
    return _column(name, f'.status.conditions[?(@.type=="{condition}")].{member}', description)


def _structural(node: Object, definitions: Object) -> Object:
    node = _resolved(node, definitions)
    node.pop("title", None)
    default = _without_absent(node.pop("default", None))
    if default not in _ABSENT:
        node["default"] = default
    if "description" in node:
        node = {"description": " ".join(node.pop("description").split()), **node}
    if "properties" in node:
        node["properties"] = {name: _structural(value, definitions) for name, value in node["properties"].items()}
    for member in ("items", "additionalProperties"):
        if member in node:
            node[member] = _without_defaults(_structural(node[member], definitions))
    if node.get("type") == "array":
        # A list is replaced as a whole, unless the model declares it as a map (``MapBy``).
        node.setdefault("x-kubernetes-list-type", "atomic")
    if node.get("x-kubernetes-int-or-string"):
        del node["type"]
        node["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return node


def _without_defaults(node: Object) -> Object:
    """``node`` without its default and those of its properties; items of lists have none already."""
    node = {name: member for name, member in node.items() if name != "default"}
    if "properties" in node:
        node["properties"] = {name: _without_defaults(member) for name, member in node["properties"].items()}
    return node


def _resolved(node: Object, definitions: Object) -> Object:
    """``node`` with its reference, or its one alternative other than null, replaced by the target.

    Keywords of the node itself take precedence over those of the target.
    """
    node = dict(node)
    while "$ref" in node or "anyOf" in node:
        if "$ref" in node:
            target = definitions[node.pop("$ref").removeprefix("#/$defs/")]
        else:
            (target,) = (option for option in node.pop("anyOf") if option.get("type") != "null")
        node = target | node
    return node


def _without_absent(value: object) -> object:
    if not isinstance(value, dict):
        return value
    members = ((name, _without_absent(member)) for name, member in value.items())
    return {name: member for name, member in members if member not in _ABSENT}
