"""The CRDs are what the models say, in the form that the API server takes."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from operator_app.api.crd import crds, to_yaml
from operator_app.api.kinds import ENVOY_PROXY, GROUP, PROXY_REGISTRATION, Object
from operator_app.api.models import EnvoyProxySpec, EnvoyProxyStatus, parse_spec
from tests.api_cases import CASES, NAME_CASE, proxy
from tests.paths import MANIFESTS

ENVOY_PROXY_CRD, HOSTNAME_CLAIM_CRD, PROXY_REGISTRATION_CRD = crds()


def schema_of(crd: Object) -> Object:
    """The schema of the one version of ``crd``."""
    (version,) = crd["spec"]["versions"]
    schema: Object = version["schema"]["openAPIV3Schema"]
    return schema


def nodes(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """Every schema inside ``schema`` with its path, itself included."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for member in ("items", "additionalProperties"):
        if member in schema:
            yield from nodes(schema[member], f"{path}[]")


def keywords(value: Any) -> Iterator[str]:  # noqa: ANN401  # any part of a schema
    """Every keyword of a schema, but not the names of its properties."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield key
            yield from keywords(list(member.values()) if key == "properties" else member)
    elif isinstance(value, list):
        for member in value:
            yield from keywords(member)


def defaulted(schema: Object, value: Any) -> Any:  # noqa: ANN401  # any JSON value
    """``value`` after what the API server does with a schema's defaults."""
    if isinstance(value, list):
        return [defaulted(schema["items"], entry) for entry in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    filled = {name: member["default"] for name, member in properties.items() if "default" in member} | value
    return {name: defaulted(properties.get(name, {}), member) for name, member in filled.items()}


@pytest.mark.parametrize("crd", crds(), ids=lambda crd: crd["metadata"]["name"])
def test_the_checked_in_file_is_current(crd: Object) -> None:
    """manifests/crd holds exactly what the models say; `make manifests` writes it anew."""
    file = MANIFESTS / "crd" / f"{crd['metadata']['name']}.yaml"
    assert file.read_text(encoding="utf-8") == to_yaml((crd,))


def test_the_files_one_after_the_other_are_what_is_printed() -> None:
    """`operator-app crd` and `cat` of the files in the shell's order are the same bytes."""
    files = sorted((MANIFESTS / "crd").glob(f"*.{GROUP}.yaml"))
    assert "".join(file.read_text(encoding="utf-8") for file in files) == to_yaml(crds())


def test_no_other_file_is_checked_in() -> None:
    """A CRD that the models no longer have leaves no file behind."""
    assert {file.stem for file in (MANIFESTS / "crd").iterdir()} == {
        "kustomization",
        *(crd["metadata"]["name"] for crd in crds()),
    }


def test_the_yaml_is_the_objects() -> None:
    """What is printed reads back as what was meant, and is the same each time."""
    assert tuple(yaml.safe_load_all(to_yaml(crds()))) == crds()
    assert to_yaml(crds()) == to_yaml(crds())


@pytest.mark.parametrize("crd", crds(), ids=lambda crd: crd["metadata"]["name"])
def test_the_schema_is_structural(crd: Object) -> None:
    """No reference, title or null is left, every node says its type, and every list says how it merges."""
    schema = schema_of(crd)
    assert not {"$ref", "$defs", "title", "allOf", "oneOf", "nullable", "const"} & set(keywords(schema))
    for path, node in nodes(schema):
        assert node.get("type") in {"object", "array", "string", "integer", "boolean"} or node.get(
            "x-kubernetes-int-or-string"
        ), path
        assert ("x-kubernetes-list-type" in node) == (node.get("type") == "array"), path


@pytest.mark.parametrize("crd", crds(), ids=lambda crd: crd["metadata"]["name"])
def test_every_field_explains_itself(crd: Object) -> None:
    """Every field has a text of whole sentences for `kubectl explain`."""
    for path, node in nodes(schema_of(crd)):
        if not path.endswith("[]") and path != ".metadata":
            assert node.get("description", "").endswith("."), path


@pytest.mark.parametrize("crd", crds(), ids=lambda crd: crd["metadata"]["name"])
def test_everything_a_user_may_write_is_bounded(crd: Object) -> None:
    """Each list, map, text and number of the spec has an upper bound: that is what keeps the rules affordable."""
    bound = {"array": "maxItems", "string": "maxLength", "integer": "maximum"}
    for path, node in nodes(schema_of(crd)):
        if not path.startswith(".spec") or "enum" in node or path == ".spec.generation":
            continue
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        if node.get("type") in bound:
            assert bound[node["type"]] in node, path


def test_every_message_has_a_case() -> None:
    """A rule without a refused case and an accepted neighbour is not tested, so there is none."""
    advice = [case.advice for case in (*CASES, NAME_CASE)]
    rules = [rule for _, node in nodes(schema_of(ENVOY_PROXY_CRD)) for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) > 20
    for rule in rules:
        assert any(text in rule["message"] for text in advice), rule["message"]


def test_list_maps() -> None:
    """Named things merge by name and conditions by type; every other list is replaced as a whole."""
    maps = {
        path: node["x-kubernetes-list-map-keys"]
        for path, node in nodes(schema_of(ENVOY_PROXY_CRD))
        if node.get("x-kubernetes-list-type") == "map"
    }
    assert maps == {".spec.listeners": ["name"], ".spec.backends": ["name"], ".status.conditions": ["type"]}


def test_defaults() -> None:
    """The defaults that users meet are these and no others."""
    defaults = {path: node["default"] for path, node in nodes(schema_of(ENVOY_PROXY_CRD)) if "default" in node}
    assert defaults == {
        ".spec.replicas": 1,
        ".spec.listeners[].protocol": "HTTP",
        ".spec.backends[].connectTimeout": "5s",
        ".spec.backends[].endpoints[].weight": 1,
        ".spec.service": {"type": "ClusterIP"},
        ".spec.service.type": "ClusterIP",
        ".spec.deletionPolicy": "Delete",
        ".spec.paused": False,
        ".status": {"observedGeneration": -1},
        ".status.observedGeneration": -1,
    }


def test_required_fields() -> None:
    """What has no default and no meaning when absent must be written."""
    required = {path: node["required"] for path, node in nodes(schema_of(ENVOY_PROXY_CRD)) if "required" in node}
    assert required == {
        "": ["spec"],
        ".spec": ["listeners", "backends"],
        ".spec.listeners[]": ["name", "port", "routes"],
        ".spec.listeners[].routes[]": ["backend"],
        ".spec.backends[]": ["name", "endpoints"],
        ".spec.backends[].endpoints[]": ["host", "port"],
        ".status.conditions[]": ["type", "status", "observedGeneration", "lastTransitionTime", "reason", "message"],
    }


def test_names_and_subresources_of_envoy_proxy() -> None:
    """The names that users type, and the paths that `kubectl scale` and autoscalers follow, are contract."""
    spec = ENVOY_PROXY_CRD["spec"]
    (version,) = spec["versions"]
    assert ENVOY_PROXY_CRD["metadata"]["name"] == "envoyproxies.edge.operator-app.dev"
    assert spec["scope"] == "Namespaced"
    assert spec["names"] == {
        "kind": ENVOY_PROXY.kind,
        "listKind": "EnvoyProxyList",
        "plural": "envoyproxies",
        "singular": "envoyproxy",
        "shortNames": ["eproxy"],
        "categories": ["all", "edge"],
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
    """A record says what is registered in its spec and what was confirmed in its status."""
    spec = PROXY_REGISTRATION_CRD["spec"]
    (version,) = spec["versions"]
    assert PROXY_REGISTRATION_CRD["metadata"]["name"] == "proxyregistrations.edge.operator-app.dev"
    assert (spec["names"]["kind"], spec["names"]["shortNames"]) == (PROXY_REGISTRATION.kind, ["eproxyreg"])
    assert version["subresources"] == {"status": {}}
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    assert columns == ["Proxy", "Namespace", "Hostname", "Address", "State", "Age", "Registry"]


def test_names_of_hostname_claim() -> None:
    """A claim is a hostname and its holder, and nothing else."""
    spec = HOSTNAME_CLAIM_CRD["spec"]
    (version,) = spec["versions"]
    assert HOSTNAME_CLAIM_CRD["metadata"]["name"] == "hostnameclaims.edge.operator-app.dev"
    assert spec["names"]["shortNames"] == ["ehost"]
    assert "subresources" not in version
    assert set(schema_of(HOSTNAME_CLAIM_CRD)["properties"]["spec"]["properties"]) == {"hostname", "proxy"}


def test_the_schemas_fields_are_the_models_fields() -> None:
    """No field of the models is lost on the way into the schema, and none is added."""
    properties = schema_of(ENVOY_PROXY_CRD)["properties"]
    for member, model in (("spec", EnvoyProxySpec), ("status", EnvoyProxyStatus)):
        assert set(properties[member]["properties"]) == {field.alias for field in model.model_fields.values()}


@pytest.mark.parametrize("name", ["minimal", "checkout"])
def test_a_sample_is_accepted(name: str) -> None:
    """The samples are valid objects, and what the server adds to them is what the models assume."""
    documents = yaml.safe_load_all((MANIFESTS / "samples" / f"{name}.yaml").read_text(encoding="utf-8"))
    (sample,) = (document for document in documents if document["kind"] == ENVOY_PROXY.kind)
    stored = defaulted(schema_of(ENVOY_PROXY_CRD), sample)
    assert stored != sample
    assert parse_spec(stored) == parse_spec(sample)


def test_defaulting_changes_nothing_that_is_written() -> None:
    """An object that says everything is stored as it is."""
    stored = defaulted(schema_of(ENVOY_PROXY_CRD)["properties"]["spec"], proxy()["spec"])
    assert parse_spec({"spec": stored}) == parse_spec(proxy())
    assert stored["backends"][1] == proxy()["spec"]["backends"][1] | {"connectTimeout": "5s"}
