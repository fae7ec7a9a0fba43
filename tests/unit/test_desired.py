"""The children of an EnvoyProxy are canonical and depend on the EnvoyProxy only."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from operator_app.api.kinds import CHILD_KINDS, CONFIG_MAP, DEPLOYMENT, SERVICE, Key, Kind, Object
from operator_app.api.models import parse_spec
from operator_app.api.quantity import canonical
from operator_app.desired import child_key, children, owner_reference, port_name, proxy_key, selector_labels
from operator_app.envoy import bootstrap
from tests.unit.ssa.field_sets import kubernetes

UID = "5d1b2f1e-0000-4000-8000-000000000001"
SPEC: Object = {
    "listeners": [
        {"name": "http", "port": 80, "routes": [{"backend": "app"}]},
        {"name": "db", "port": 5432, "protocol": "TCP", "targetPort": 15432, "routes": [{"backend": "app"}]},
    ],
    "backends": [{"name": "app", "endpoints": [{"host": "app.team-a.svc", "port": 8080}]}],
}
FULL: Object = SPEC | {
    "replicas": 3,
    "image": "example.com/envoy:v1",
    "service": {"type": "LoadBalancer", "annotations": {"example.com/a": "b"}},
    "resources": {"requests": {"cpu": "0.5", "memory": "0.25Gi"}, "limits": {"cpu": "1500m", "memory": "1024Mi"}},
    "registration": {"hostname": "shop.example.com"},
}
Json = Any


def proxy(spec: Object = SPEC, **metadata: Json) -> Object:
    """A stored EnvoyProxy."""
    return {
        "apiVersion": "edge.operator-app.dev/v1alpha1",
        "kind": "EnvoyProxy",
        "metadata": {"name": "checkout", "namespace": "team-a", "uid": UID, "generation": 1} | metadata,
        "spec": spec,
    }


def made(spec: Object = SPEC, **metadata: Json) -> dict[Kind, Object]:
    """The children of a proxy with this spec."""
    obj = proxy(spec, **metadata)
    return children(obj, parse_spec(obj), default_image="envoy:default")


def pod(spec: Object = SPEC) -> Object:
    """The Pod's spec of a proxy with this spec."""
    found: Object = made(spec)[DEPLOYMENT]["spec"]["template"]["spec"]
    return found


def container(spec: Object = SPEC) -> Object:
    """The one container of a proxy with this spec."""
    (found,) = pod(spec)["containers"]
    return dict(found)


def values(value: Json, name: str = "") -> Iterator[tuple[str, Json]]:
    """Every value within ``value``, with the name of its field."""
    yield name, value
    if isinstance(value, dict):
        for inner, each in value.items():
            yield from values(each, inner)
    elif isinstance(value, list):
        for each in value:
            yield from values(each, name)


# --- canonical -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, FULL], ids=["smallest", "full"])
@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
def test_children_are_canonical(kind: Kind, spec: Object) -> None:
    """A child has no null or empty value, canonical quantities, and complete, unique keys in every keyed list."""
    child = made(spec)[kind]
    assert json.loads(json.dumps(child)) == child
    for name, value in values(child):
        assert value is not None, name
        assert value != {}, name
        assert value != [], name
        assert value != "", name
        if name in ("ports", "containers", "env", "volumes", "volumeMounts", "ownerReferences") and isinstance(
            value, list
        ):
            keys = kubernetes(name, value)
            assert isinstance(keys, tuple), f"{name} needs every key field in every item"
            assert len({tuple(item[key] for key in keys) for item in value}) == len(value)
        if name in ("cpu", "memory"):
            assert value == canonical(value)
        if name == "fieldRef":
            assert value["apiVersion"] == "v1"
        if name == "httpGet":
            assert value["scheme"] == "HTTP"


def test_an_owner_reference_is_complete() -> None:
    """An owner reference has all fields, because an apply owns the item as a whole."""
    assert owner_reference(proxy()) == {
        "apiVersion": "edge.operator-app.dev/v1alpha1",
        "kind": "EnvoyProxy",
        "name": "checkout",
        "uid": UID,
        "controller": True,
        "blockOwnerDeletion": True,
    }


@pytest.mark.parametrize("amounts", [{}, {"requests": {}}, {"limits": {}, "requests": {}}], ids=str)
def test_empty_resources_are_omitted(amounts: Object) -> None:
    """Empty requests and limits are rendered to no field, not to an empty map."""
    assert "resources" not in container(SPEC | {"resources": amounts})


def test_resources_are_canonical() -> None:
    """``0.5`` is rendered as ``500m`` and ``0.25Gi`` as ``256Mi``."""
    assert container(FULL)["resources"] == {
        "requests": {"cpu": "500m", "memory": "256Mi"},
        "limits": {"cpu": "1500m", "memory": "1Gi"},
    }


# --- deterministic ---------------------------------------------------------------------------------------------------


def shuffled(value: Json, chance: Any) -> Json:  # noqa: ANN401
    """``value`` with every map's fields in a random order."""
    if isinstance(value, dict):
        names = list(value)
        chance.shuffle(names)
        return {name: shuffled(value[name], chance) for name in names}
    return [shuffled(each, chance) for each in value] if isinstance(value, list) else value


@given(st.randoms(use_true_random=False))
def test_the_order_of_fields_does_not_matter(chance: Any) -> None:  # noqa: ANN401
    """Children are equal, to the byte of the configuration, for any order of the fields of a spec."""
    assert made(shuffled(FULL, chance)) == made(FULL)


def test_children_depend_on_the_spec_only() -> None:
    """Generation, resourceVersion, timestamps, labels and managedFields of an EnvoyProxy do not change its children."""
    noisy = made(
        generation=7,
        resourceVersion="9",
        creationTimestamp="2026-07-01T00:00:00Z",
        labels={"a": "b"},
        managedFields=[{}],
    )
    assert noisy == made()


def test_children_share_no_data_with_the_spec() -> None:
    """``children`` does not change the spec, and a change of its result changes neither spec nor later results."""
    before = deepcopy(FULL)
    first = made(FULL)
    assert before == FULL
    first[SERVICE]["metadata"]["annotations"]["x"] = "y"
    first[SERVICE]["spec"]["selector"]["x"] = "y"
    first[DEPLOYMENT]["spec"]["selector"]["matchLabels"]["x"] = "y"
    assert "x" not in made(FULL)[SERVICE]["metadata"]["annotations"]
    assert first[DEPLOYMENT]["spec"]["template"]["metadata"]["labels"].get("x") is None


# --- names and labels ------------------------------------------------------------------------------------------------


def test_children_come_in_the_order_of_applying() -> None:
    """Children are returned in the order in which they are applied, the ConfigMap first."""
    assert tuple(made()) == CHILD_KINDS


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
def test_every_child_has_name_owner_and_labels(kind: Kind) -> None:
    """Metadata of a child is exactly its name, namespace, labels, installation and owner reference."""
    child = made()[kind]
    assert (child["apiVersion"], child["kind"]) == (kind.api_version, kind.kind)
    assert child["metadata"] == {
        "name": "checkout-envoy",
        "namespace": "team-a",
        "labels": {
            "app.kubernetes.io/name": "envoy",
            "app.kubernetes.io/instance": "checkout",
            "app.kubernetes.io/component": "proxy",
            "app.kubernetes.io/managed-by": "operator-app",
            "edge.operator-app.dev/owner-uid": UID,
        },
        "annotations": {"edge.operator-app.dev/installation": "edge-system"},
        "ownerReferences": [owner_reference(proxy())],
    }


def test_selectors_are_fixed_and_match_the_pods() -> None:
    """The Deployment's is immutable: name and instance. The Service's has the UID, too: no foreign Pod has it."""
    both = {"app.kubernetes.io/name": "envoy", "app.kubernetes.io/instance": "checkout"}
    found = made(FULL)
    labels = found[DEPLOYMENT]["spec"]["template"]["metadata"]["labels"]
    assert selector_labels("checkout") == both
    assert found[DEPLOYMENT]["spec"]["selector"] == {"matchLabels": both}
    assert found[SERVICE]["spec"]["selector"] == both | {"edge.operator-app.dev/owner-uid": UID}
    assert found[SERVICE]["spec"]["selector"].items() <= labels.items()


def test_only_the_service_has_declared_annotations() -> None:
    """``spec.service.annotations`` are the Service's; all children say which installation has applied them."""
    obj = proxy(FULL)
    found = children(obj, parse_spec(obj), default_image="envoy:default", installation="edge-b")
    ours = {"edge.operator-app.dev/installation": "edge-b"}
    assert found[SERVICE]["metadata"]["annotations"] == ours | {"example.com/a": "b"}
    assert found[CONFIG_MAP]["metadata"]["annotations"] == ours
    assert found[DEPLOYMENT]["metadata"]["annotations"] == ours


NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)


@given(NAMES, NAMES)
def test_proxy_key_is_the_inverse_of_child_key(namespace: str, name: str) -> None:
    """``proxy_key`` inverts ``child_key``, also for an EnvoyProxy whose own name ends with the suffix."""
    for key in (Key(namespace, name), Key(namespace, f"{name}-envoy")):
        assert proxy_key(child_key(key)) == key


@pytest.mark.parametrize("name", ["checkout", "-envoy", "checkout-envoy-2", "envoy", ""])
def test_other_names_have_no_proxy(name: str) -> None:
    """A name without the suffix, or of the suffix only, is no name of a child."""
    assert proxy_key(Key("team-a", name)) is None


# --- containers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resources", "threads"),
    [
        (None, 2),
        ({"requests": {"cpu": "4"}}, 2),
        ({"limits": {"memory": "1Gi"}}, 2),
        ({"limits": {"cpu": "1"}}, 1),
        ({"limits": {"cpu": "1001m"}}, 2),
        ({"limits": {"cpu": "4"}}, 4),
        ({"limits": {"cpu": 3}}, 3),
        ({"limits": {"cpu": "1m"}}, 1),
        ({"limits": {"cpu": "0"}}, 1),
        ({"limits": {"cpu": "256"}}, 256),
        ({"limits": {"cpu": "5G"}}, 256),
    ],
    ids=str,
)
def test_worker_threads_follow_the_cpu_limit(resources: Object | None, threads: int) -> None:
    """Envoy has one worker thread for each CPU of the limit, rounded up, from 1 to 256, and two without a limit."""
    args = container(SPEC | ({"resources": resources} if resources else {}))["args"]
    assert args[args.index("--concurrency") + 1] == str(threads)


def test_the_image_is_the_specs_or_the_default() -> None:
    """An EnvoyProxy without an image gets the operator's default image."""
    assert container()["image"] == "envoy:default"
    assert container(FULL)["image"] == "example.com/envoy:v1"


def test_the_pod_is_restricted() -> None:
    """The Pod runs unprivileged, with a read-only file system and without token or Service environment variables."""
    assert pod()["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 101,
        "runAsGroup": 101,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert pod()["automountServiceAccountToken"] is False
    assert pod()["enableServiceLinks"] is False
    assert all(mount["readOnly"] for mount in container()["volumeMounts"])


def test_the_configuration_is_mounted_where_envoy_reads_it() -> None:
    """ConfigMap, volume, mount and ``--config-path`` refer to the same file."""
    config_map = made()[CONFIG_MAP]
    (file,) = config_map["data"]
    (volume,), (mount,) = pod()["volumes"], container()["volumeMounts"]
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    assert volume["name"] == mount["name"]
    assert container()["args"][:2] == ["--config-path", f"{mount['mountPath']}/{file}"]
    assert yaml.safe_load(config_map["data"][file])["static_resources"]["listeners"]


def test_an_edit_of_the_configuration_rolls_out_new_pods() -> None:
    """The Pod template has the hash of the ConfigMap's text as an annotation."""
    edited = deepcopy(SPEC)
    edited["backends"][0]["endpoints"][0]["port"] = 8081
    before, after = made(SPEC), made(edited)
    templates = [each[DEPLOYMENT]["spec"]["template"] for each in (before, after)]
    assert templates[0]["spec"] == templates[1]["spec"]
    for each, template in zip((before, after), templates, strict=True):
        (text,) = each[CONFIG_MAP]["data"].values()
        assert template["metadata"]["annotations"] == {"edge.operator-app.dev/config-hash": bootstrap.config_hash(text)}
    assert templates[0] != templates[1]


def test_scaling_keeps_the_pod_template() -> None:
    """Another number of replicas changes ``spec.replicas`` of the Deployment, not its template."""
    one, five = (made(SPEC | {"replicas": replicas})[DEPLOYMENT]["spec"] for replicas in (1, 5))
    assert one["template"] == five["template"]
    assert (one["replicas"], five["replicas"]) == (1, 5)


def test_ports_of_service_and_container_match() -> None:
    """The Service's target ports are names of the container's, whose numbers are 10000 higher if below 1024."""
    service = made()[SERVICE]["spec"]
    assert service["ports"] == [
        {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"},
        {"name": "db", "port": 5432, "targetPort": "db", "protocol": "TCP"},
    ]
    assert service["type"] == "ClusterIP"
    probe = container()["readinessProbe"]["httpGet"]["port"]
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"http": 10080, "db": 15432, "readiness": probe}


@pytest.mark.parametrize(
    ("listener", "is_kept"),
    [
        ("http", True),
        ("a" * 15, True),
        ("a" * 16, False),
        ("a--b", False),
        ("123", False),
        ("readiness", False),
        ("l-0123456789ab", False),
        ("1a", True),
    ],
)
def test_a_port_has_its_listeners_name_where_that_is_a_port_name(listener: str, *, is_kept: bool) -> None:
    """Else it has a digest of it, so two listeners never share a port name, and none is refused by the API server."""
    name = port_name(listener)
    assert (name == listener) is is_kept
    assert re.fullmatch(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?", name)
    assert "--" not in name
