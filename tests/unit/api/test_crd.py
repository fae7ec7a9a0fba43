"""The CRDs match the models and have the form that the API server requires."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from operator_app.api.crd import crds, to_yaml
from operator_app.api.kinds import ENVOY_PROXY, GROUP, PROXY_REGISTRATION, Object
from operator_app.api.models import EnvoyProxySpec, EnvoyProxyStatus, parse_spec
from tests.api_cases import CASES, NAME_CASE, edited, proxy
from tests.paths import MANIFESTS
from tests.samples import samples, unknown_fields

ENVOY_PROXY_CRD, HOSTNAME_CLAIM_CRD, HOSTNAME_POLICY_CRD, PROXY_REGISTRATION_CRD = crds()


def schema_of(crd: Object) -> Object:
    """The schema of the one version of ``crd``."""
    (version,) = crd["spec"]["versions"]
    schema: Object = version["schema"]["openAPIV3Schema"]
    return schema


def nodes(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """``schema`` and every schema inside it, each with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for member in ("items", "additionalProperties"):
        if member in schema:
            yield from nodes(schema[member], f"{path}[]")


def keywords(value: Any) -> Iterator[str]:  # noqa: ANN401  # any part of a schema
    """Every keyword of a schema, without the names of its properties."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield key
            yield from keywords(list(member.values()) if key == "properties" else member)
    elif isinstance(value, list):
        for member in value:
            yield from keywords(member)


def defaulted(schema: Object, value: Any) -> Any:  # noqa: ANN401  # any JSON value
    """``value`` with the defaults that the API server adds."""
    if isinstance(value, list):
        return [defaulted(schema["items"], entry) for entry in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    filled = {name: member["default"] for name, member in properties.items() if "default" in member} | value
    return {name: defaulted(properties.get(name, {}), member) for name, member in filled.items()}


@pytest.mark.parametrize("crd", crds(), ids=lambda crd: crd["metadata"]["name"])
def test_the_checked_in_file_is_current(crd: Object) -> None:
    """manifests/crd contains exactly the CRDs of the models; `make manifests` writes them."""
    file = MANIFESTS / "crd" / f"{crd['metadata']['name']}.yaml"
    assert file.read_text(encoding="utf-8") == to_yaml((crd,))


def test_the_concatenated_files_are_the_printed_stream() -> None:
    """`operator-app crd` prints the bytes of the files in alphabetical order."""
    files = sorted((MANIFESTS / "crd").glob(f"*.{GROUP}.yaml"))
    assert "".join(file.read_text(encoding="utf-8") for file in files) == to_yaml(crds())


def test_no_other_crd_file_is_checked_in() -> None:
    """manifests/crd has no file without a CRD."""
    assert {file.stem for file in (MANIFESTS / "crd").iterdir()} == {
        "kustomization",
        *(crd["metadata"]["name"] for crd in crds()),
    }


def test_the_yaml_is_parsed_back_to_the_objects() -> None:
    """The printed YAML is parsed back to the same objects, and is the same on every call."""
    assert tuple(yaml.safe_load_all(to_yaml(crds()))) == crds()
    assert to_yaml(crds()) == to_yaml(crds())


@pytest.mark.parametrize("crd", crds(), ids=lambda crd: crd["metadata"]["name"])
def test_the_schema_is_structural(crd: Object) -> None:
    """The schema has no reference, title or null; every node has a type, every list a list type."""
    schema = schema_of(crd)
    assert not {"$ref", "$defs", "title", "allOf", "oneOf", "nullable", "const"} & set(keywords(schema))
    for path, node in nodes(schema):
        assert node.get("type") in {"object", "array", "string", "integer", "boolean"} or node.get(
            "x-kubernetes-int-or-string"
        ), path
        assert ("x-kubernetes-list-type" in node) == (node.get("type") == "array"), path


@pytest.mark.parametrize("crd", crds(), ids=lambda crd: crd["metadata"]["name"])
def test_every_field_has_a_description(crd: Object) -> None:
    """Every field has a description of whole sentences for `kubectl explain`."""
    for path, node in nodes(schema_of(crd)):
        if not path.endswith("[]") and path != ".metadata":
            assert node.get("description", "").endswith("."), path


@pytest.mark.parametrize("crd", crds(), ids=lambda crd: crd["metadata"]["name"])
def test_every_field_of_a_spec_is_bounded(crd: Object) -> None:
    """Each list, map, string and number of a spec has an upper bound, which keeps CEL rules below the cost limit."""
    bound = {"array": "maxItems", "string": "maxLength", "integer": "maximum"}
    for path, node in nodes(schema_of(crd)):
        if not path.startswith(".spec") or "enum" in node or path == ".spec.generation":
            continue
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        if node.get("type") in bound:
            assert bound[node["type"]] in node, path


def test_every_rule_has_a_case() -> None:
    """Every rule of the EnvoyProxy has a case with a refused and an accepted value."""
    advice = [case.advice for case in (*CASES, NAME_CASE)]
    rules = [rule for _, node in nodes(schema_of(ENVOY_PROXY_CRD)) for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) > 20
    for rule in rules:
        assert any(text in rule["message"] for text in advice), rule["message"]


def test_list_maps() -> None:
    """Lists of things that have names merge by name, conditions by type; every other list is replaced as a whole."""
    maps = {
        path: node["x-kubernetes-list-map-keys"]
        for path, node in nodes(schema_of(ENVOY_PROXY_CRD))
        if node.get("x-kubernetes-list-type") == "map"
    }
    assert maps == {
        ".spec.listeners": ["name"],
        ".spec.backends": ["name"],
        ".spec.imagePullSecrets": ["name"],
        ".spec.listeners[].routes[].match.headers": ["name"],
        ".spec.listeners[].routes[].match.queryParams": ["name"],
        ".spec.listeners[].routes[].backends": ["name"],
        ".spec.listeners[].routes[].requestHeaders.set": ["name"],
        ".spec.listeners[].routes[].requestHeaders.add": ["name"],
        ".spec.listeners[].routes[].responseHeaders.set": ["name"],
        ".spec.listeners[].routes[].responseHeaders.add": ["name"],
        ".status.conditions": ["type"],
    }


def test_defaults() -> None:
    """The schema has exactly these defaults, and none inside a list."""
    defaults = {path: node["default"] for path, node in nodes(schema_of(ENVOY_PROXY_CRD)) if "default" in node}
    assert defaults == {
        ".spec.replicas": 1,
        ".spec.service": {"type": "ClusterIP"},
        ".spec.service.type": "ClusterIP",
        ".spec.disruption.maxUnavailable": 1,
        ".spec.autoscaling.minReplicas": 1,
        ".spec.autoscaling.targetCPUUtilizationPercentage": 80,
        ".spec.telemetry.metrics": False,
        ".spec.deletionPolicy": "Delete",
        ".spec.paused": False,
        ".status": {"observedGeneration": -1},
        ".status.observedGeneration": -1,
    }


def test_required_fields() -> None:
    """Exactly the fields without a default, and without a meaning when absent, are required."""
    required = {path: node["required"] for path, node in nodes(schema_of(ENVOY_PROXY_CRD)) if "required" in node}
    assert required == {
        "": ["spec"],
        ".spec": ["listeners", "backends"],
        ".spec.listeners[]": ["name", "port", "routes"],
        ".spec.listeners[].tls": ["secretName"],
        ".spec.listeners[].routes[].match.headers[]": ["name"],
        ".spec.listeners[].routes[].match.queryParams[]": ["name"],
        ".spec.listeners[].routes[].backends[]": ["name"],
        ".spec.listeners[].routes[].response": ["status"],
        ".spec.listeners[].routes[].requestHeaders.set[]": ["name", "value"],
        ".spec.listeners[].routes[].requestHeaders.add[]": ["name", "value"],
        ".spec.listeners[].routes[].responseHeaders.set[]": ["name", "value"],
        ".spec.listeners[].routes[].responseHeaders.add[]": ["name", "value"],
        ".spec.listeners[].routes[].mirror": ["backend"],
        ".spec.listeners[].routes[].rateLimit": ["requests"],
        ".spec.listeners[].routes[].cors": ["origins"],
        ".spec.backends[]": ["name"],
        ".spec.backends[].service": ["name", "port"],
        ".spec.backends[].tls": ["serverName"],
        ".spec.backends[].loadBalancing": ["policy"],
        ".spec.backends[].endpoints[]": ["host", "port"],
        ".spec.autoscaling": ["maxReplicas"],
        ".spec.tolerations[]": ["key"],
        ".spec.affinity.nodes[]": ["key", "operator"],
        ".spec.affinity.pods[]": ["podLabels"],
        ".spec.topologySpread[]": ["topologyKey"],
        ".spec.imagePullSecrets[]": ["name"],
        ".status.conditions[]": ["type", "status", "observedGeneration", "lastTransitionTime", "reason", "message"],
    }


def test_names_and_subresources_of_envoy_proxy() -> None:
    """Names, subresources and printer columns of the EnvoyProxy's CRD."""
    spec = ENVOY_PROXY_CRD["spec"]
    (version,) = spec["versions"]
    assert ENVOY_PROXY_CRD["metadata"]["name"] == "envoyproxies.edge.operator-app.dev"
    assert spec["scope"] == "Namespaced"
    assert spec["names"] == {
        "kind": ENVOY_PROXY.kind,
        "listKind": "EnvoyProxyList",
        "plural": "envoyproxies",
        "singular": "envoyproxy",
        "shortNames": ["edgeproxy"],
        "categories": ["edge"],
    }
    assert version["name"] == "v1alpha1"
    assert version["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }
    columns = [(column["name"], column.get("priority", 0)) for column in version["additionalPrinterColumns"]]
    assert columns == [("Ready", 0), ("Available", 0), ("Replicas", 0), ("Address", 0), ("Age", 0), ("Reason", 1)]


def test_names_and_subresources_of_proxy_registration() -> None:
    """Names, subresources and printer columns of the ProxyRegistration's CRD."""
    spec = PROXY_REGISTRATION_CRD["spec"]
    (version,) = spec["versions"]
    assert PROXY_REGISTRATION_CRD["metadata"]["name"] == "proxyregistrations.edge.operator-app.dev"
    assert (spec["names"]["kind"], spec["names"]["shortNames"]) == (PROXY_REGISTRATION.kind, ["eproxyreg"])
    assert version["subresources"] == {"status": {}}
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    assert columns == ["Proxy", "Namespace", "Hostname", "Address", "State", "Age", "Registry"]


def test_names_of_hostname_claim() -> None:
    """The HostnameClaim's CRD: its names, one for the cluster, no subresource."""
    spec = HOSTNAME_CLAIM_CRD["spec"]
    (version,) = spec["versions"]
    assert HOSTNAME_CLAIM_CRD["metadata"]["name"] == "hostnameclaims.edge.operator-app.dev"
    assert (spec["scope"], spec["names"]["shortNames"]) == ("Cluster", ["ehost"])
    assert "subresources" not in version
    fields = schema_of(HOSTNAME_CLAIM_CRD)["properties"]["spec"]["properties"]
    assert set(fields) == {"hostname", "proxy", "installation", "releasedAt"}


def test_names_of_hostname_policy() -> None:
    """The HostnamePolicy's CRD: its names, one for the cluster, and a spec that chooses namespaces."""
    spec = HOSTNAME_POLICY_CRD["spec"]
    assert HOSTNAME_POLICY_CRD["metadata"]["name"] == "hostnamepolicies.edge.operator-app.dev"
    assert (spec["scope"], spec["names"]["shortNames"]) == ("Cluster", ["ehostpol"])
    assert schema_of(HOSTNAME_POLICY_CRD)["properties"]["spec"]["required"] == ["namespaceSelector"]


def test_the_schemas_fields_are_the_models_fields() -> None:
    """The schema has exactly the fields of the models."""
    properties = schema_of(ENVOY_PROXY_CRD)["properties"]
    for member, model in (("spec", EnvoyProxySpec), ("status", EnvoyProxyStatus)):
        assert set(properties[member]["properties"]) == {field.alias for field in model.model_fields.values()}


@pytest.mark.parametrize(("name", "sample"), samples().items(), ids=samples())
def test_a_sample_is_accepted(name: str, sample: Object) -> None:
    """A sample is valid without a field too many, has the API server's defaults, and says how it is applied."""
    schema = schema_of(ENVOY_PROXY_CRD)
    assert [*unknown_fields(schema, sample)] == []
    stored = defaulted(schema, sample)
    assert stored != sample
    assert parse_spec(stored) == parse_spec(sample)
    text = (MANIFESTS / "samples" / f"{name}.yaml").read_text(encoding="utf-8")
    assert re.search(
        rf"^#     kubectl apply (--namespace team-a )?-f manifests/samples/{name}.yaml$", text, re.MULTILINE
    )


def test_samples_are_for_one_namespace() -> None:
    """All of them can be there at the same time: no two have the same name or hostname."""
    found = list(samples().values())
    names = [each["metadata"]["name"] for each in found]
    assert len(names) >= 10
    assert len(set(names)) == len(names)
    hostnames = [each["spec"]["registration"]["hostname"] for each in found if "registration" in each["spec"]]
    assert len(set(hostnames)) == len(hostnames)


def test_a_field_that_does_not_exist_is_noticed() -> None:
    """The check of samples finds what is misspelt, at any depth, and nothing else."""
    schema = schema_of(ENVOY_PROXY_CRD)
    assert [*unknown_fields(schema, proxy())] == []
    wrong = edited(proxy(), ("spec", "listeners", 0, "routes", 0, "retires"), {})
    assert [*unknown_fields(schema, wrong)] == [".spec.listeners[0].routes[0].retires"]


def test_no_field_is_read_as_something_else_in_yaml() -> None:
    """To YAML 1.1, which kubectl reads, a bare ``on``, ``off``, ``yes`` or ``no`` is a boolean: it would be lost."""
    below = [(path, node) for crd in crds() for path, node in nodes(schema_of(crd)) if path.startswith(".spec")]
    texts = {path.rpartition(".")[2].removesuffix("[]") for path, _ in below}
    texts |= {each for _, node in below for each in node.get("enum", ()) if isinstance(each, str)}
    assert "listeners" in texts
    assert {each for each in texts if each and yaml.safe_load(each) != each} == set()


def test_defaulting_keeps_every_written_value() -> None:
    """Defaulting adds absent fields only; every written value is kept."""
    declared = {name: value for name, value in proxy()["spec"].items() if name not in ("paused", "replicas")}
    stored = defaulted(schema_of(ENVOY_PROXY_CRD)["properties"]["spec"], declared)
    assert stored == declared | {"paused": False, "replicas": 1}


def test_a_default_inside_a_list_is_the_models_and_is_described() -> None:
    """What an item of a list leaves out has the value that `kubectl explain` names."""
    spec = parse_spec({"spec": {"listeners": [LISTENER], "backends": [BACKEND]}})
    backend, listener = spec.backends[0], spec.listeners[0]
    defaults = {
        ".spec.listeners[].protocol": listener.protocol.value,
        ".spec.backends[].connectTimeout": backend.connect_timeout,
        ".spec.backends[].endpoints[].weight": backend.addresses[0].weight,
        ".spec.backends[].protocol": backend.protocol.value,
        ".spec.backends[].maxConnections": backend.max_connections,
        ".spec.backends[].maxPendingRequests": backend.max_pending_requests,
        ".spec.backends[].maxRequests": backend.max_requests,
        ".spec.listeners[].httpsRedirect": str(listener.https_redirect).lower(),
        ".spec.listeners[].proxyProtocol": str(listener.proxy_protocol).lower(),
        ".spec.listeners[].trustedHops": listener.trusted_hops,
        ".spec.listeners[].http10": str(listener.http10).lower(),
    }
    described = {path: node.get("description", "") for path, node in nodes(schema_of(ENVOY_PROXY_CRD))}
    assert all(described[path].endswith(f"Left out: {default}.") for path, default in defaults.items())


LISTENER = {"name": "http", "port": 80, "routes": [{"backend": "app"}]}
BACKEND = {"name": "app", "endpoints": [{"host": "app.team-a.svc", "port": 8080}]}
