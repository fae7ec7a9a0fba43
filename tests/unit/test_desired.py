"""The children of an EnvoyProxy are canonical and depend on the EnvoyProxy only."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_app import desired
from operator_app.api.kinds import CHILD_KINDS, CONFIG_MAP, DEPLOYMENT, SERVICE, Key, Kind, Object
from operator_app.api.models import parse_spec
from operator_app.api.quantity import canonical
from operator_app.desired import child_key, children, owner_reference, port_name, proxy_key, selector_labels, user_id
from operator_app.envoy.files import rendered
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
        "runAsUser": user_id(UID),
        "runAsGroup": user_id(UID),
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


def test_the_user_can_be_left_to_the_platform() -> None:
    """Without ``run_as_user`` neither user nor group is set, so that a platform that gives each namespace one can."""
    obj = proxy()
    found = children(obj, parse_spec(obj), default_image="envoy:default", run_as_user=False)[DEPLOYMENT]
    assert found["spec"]["template"]["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_each_proxy_has_a_user_of_its_own() -> None:
    """A node's bound on inotify instances of one user is one proxy's alone; the user stays while the proxy does."""
    users = [user_id(f"5d1b2f1e-0000-4000-8000-{number:012}") for number in range(1000)]
    assert len(set(users)) > 980
    assert all(10_000 <= each < 60_000 for each in users)
    assert user_id(UID) == user_id(UID)


def test_the_configuration_is_mounted_where_envoy_reads_it() -> None:
    """ConfigMap, volume, mount and ``--config-path`` refer to the same file."""
    config_map = made()[CONFIG_MAP]
    file = f"envoy-{revision()}.json"
    (volume,), (mount,) = pod()["volumes"], container()["volumeMounts"]
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    assert volume["name"] == mount["name"]
    assert container()["args"][:2] == ["--config-path", f"{mount['mountPath']}/{file}"]
    config = json.loads(config_map["data"][file])
    for name in ("lds_config", "cds_config"):
        source = config["dynamic_resources"][name]["path_config_source"]
        assert source["watched_directory"] == {"path": mount["mountPath"]}
        directory, _, read = source["path"].rpartition("/")
        assert directory == f"{mount['mountPath']}/..data"
        assert read in config_map["data"]


def test_each_secret_is_mounted_once_where_envoy_reads_it() -> None:
    """Two listeners and a backend that name the same Secrets share the mounts, and only the named keys are there."""
    spec = deepcopy(SPEC)
    for each in spec["listeners"]:
        each["tls"] = {"secretName": "shop-tls", "clientCASecretName": "partners"}
    spec["backends"][0]["tls"] = {"serverName": "app.internal", "caSecretName": "partners"}
    mounts = {each["name"]: each["mountPath"] for each in container(spec)["volumeMounts"]}
    volumes = {each["name"]: each["secret"] for each in pod(spec)["volumes"] if "secret" in each}
    keys = {secret["secretName"]: [each["key"] for each in secret["items"]] for secret in volumes.values()}
    assert keys == {"shop-tls": ["tls.crt", "tls.key"], "partners": ["ca.crt"]}
    texts = "".join(made(spec)[CONFIG_MAP]["data"].values())
    for name, secret in volumes.items():
        assert all(f'"{mounts[name]}/..data/{each["key"]}"' in texts for each in secret["items"])
        assert secret["optional"], "a Pod without it serves all that does not need it"


def revision(spec: Object = SPEC) -> str:
    """The revision of the Pods of a proxy with this spec."""
    return rendered(parse_spec({"spec": spec})).revision


def test_an_edit_of_routes_and_backends_replaces_no_pod() -> None:
    """Only the ConfigMap differs afterwards, in the files of routes and clusters; the Deployment is the same."""
    edited = deepcopy(SPEC)
    edited["backends"].append({"name": "new", "endpoints": [{"host": "new.team-a.svc", "port": 8081}]})
    edited["listeners"][0]["routes"] = [{"backend": "new"}]
    edited["listeners"][1]["routes"] = [{"backend": "new"}]
    before, after = made(SPEC), made(edited)
    assert [kind for kind in CHILD_KINDS if before[kind] != after[kind]] == [CONFIG_MAP]
    texts = before[CONFIG_MAP]["data"], after[CONFIG_MAP]["data"]
    assert texts[0].keys() == texts[1].keys()
    assert {name for name in texts[0] if texts[0][name] != texts[1][name]} == {"cds.json", "rds-http.json"}


@pytest.mark.parametrize("change", [{"targetPort": 8081}, {"name": "web"}], ids=str)
def test_an_edit_that_no_running_pod_can_follow_replaces_all(change: Object) -> None:
    """Another container port or listener makes Pods of another revision, which read files of their own."""
    edited = deepcopy(SPEC)
    edited["listeners"][0] |= change
    before, after = made(SPEC), made(edited)
    revisions = [
        each[DEPLOYMENT]["spec"]["template"]["metadata"]["annotations"]["edge.operator-app.dev/revision"]
        for each in (before, after)
    ]
    assert revisions == [revision(SPEC), revision(edited)]
    assert revisions[0] != revisions[1]
    for kind in ("envoy", "lds"):
        names = [f"{kind}-{each}.json" for each in revisions]
        assert [name in data for name, data in zip(names, (before[CONFIG_MAP]["data"],) * 2, strict=True)] == [
            True,
            False,
        ]
        assert [name in data for name, data in zip(names, (after[CONFIG_MAP]["data"],) * 2, strict=True)] == [
            False,
            True,
        ]


# --- files of Pods of an older revision -------------------------------------------------------------------------------

RENAMED: Object = SPEC | {"listeners": [SPEC["listeners"][0] | {"name": "web"}, SPEC["listeners"][1]]}


def live(spec: Object, status: Object, *, of: Object, foreign: Object | None = None) -> dict[Kind, Object | None]:
    """Children as they are known: the ConfigMap of ``spec``, and a Deployment with the template of ``of``."""
    config_map, deployment = deepcopy(made(spec)[CONFIG_MAP]), deepcopy(made(of)[DEPLOYMENT])
    owned: Object = {"f:data": {f"f:{name}": {} for name in config_map["data"]}}
    entry = {"manager": "operator-app", "operation": "Apply", "apiVersion": "v1", "fieldsV1": owned}
    config_map["metadata"]["managedFields"] = [entry]
    config_map["data"] |= foreign or {}
    deployment["metadata"]["generation"] = 2
    return {CONFIG_MAP: config_map, DEPLOYMENT: deployment | {"status": status}, SERVICE: None}


def files_with(known: dict[Kind, Object | None], **metadata: Json) -> set[str]:
    """The names of the files that a proxy with ``RENAMED`` keeps from before."""
    obj = proxy(RENAMED, **metadata)
    found = children(obj, parse_spec(obj), default_image="envoy:default", live=known)
    assert found[DEPLOYMENT] == made(RENAMED, **metadata)[DEPLOYMENT]
    new = made(RENAMED)[CONFIG_MAP]["data"]
    assert new.items() <= found[CONFIG_MAP]["data"].items()
    return set(found[CONFIG_MAP]["data"]) - set(new)


OLD_FILES = {f"envoy-{revision(SPEC)}.json", f"lds-{revision(SPEC)}.json", "rds-http.json"}
SERVING: Object = {"observedGeneration": 2, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}


@pytest.mark.parametrize(
    ("status", "of", "kept"),
    [
        (SERVING, SPEC, OLD_FILES),
        (SERVING, RENAMED, set()),
        (SERVING | {"replicas": 2}, RENAMED, OLD_FILES),
        (SERVING | {"updatedReplicas": 0}, RENAMED, OLD_FILES),
        (SERVING | {"availableReplicas": 0}, RENAMED, OLD_FILES),
        (SERVING | {"observedGeneration": 1}, RENAMED, OLD_FILES),
        ({"observedGeneration": 2}, SPEC, set()),
        ({}, RENAMED, set()),
    ],
    ids=[
        "before the edit",
        "rolled out",
        "one is left",
        "one is missing",
        "between two",
        "not seen yet",
        "scaled to zero",
        "no status",
    ],
)
def test_files_of_an_older_revision_stay_while_its_pods_run(status: Object, of: Object, kept: set[str]) -> None:
    """A Pod of the old template that is started again finds what it was rolled out with; afterwards its files go."""
    assert files_with(live(SPEC, status, of=of)) == kept


def test_clusters_and_routes_stay_for_pods_that_lack_a_secret() -> None:
    """An older Pod that does not have the authorities of a backend keeps the files before, all of them."""
    verified = deepcopy(SPEC)
    verified["backends"][0]["tls"] = {"serverName": "app.internal", "caSecretName": "internal-ca"}
    before = made(SPEC)[CONFIG_MAP]["data"]
    obj = proxy(verified)
    found = children(obj, parse_spec(obj), default_image="x", live=live(SPEC, SERVING, of=SPEC))
    data = found[CONFIG_MAP]["data"]
    assert before.items() <= data.items()
    assert len(data) > len(before)


def test_what_others_have_in_the_config_map_is_not_taken() -> None:
    """Neither keys of another writer, whatever their names, nor those of a ConfigMap or Deployment of another owner."""
    foreign = {"rds-theirs.json": "{}", "notes": "x"}
    assert files_with(live(SPEC, SERVING, of=SPEC, foreign=foreign)) == OLD_FILES
    assert files_with(live(SPEC, SERVING, of=SPEC), uid="another") == set()


def test_files_that_do_not_fit_beside_the_new_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ConfigMap that is too large would be refused, and the edit with it."""
    known = live(SPEC, SERVING, of=SPEC)
    total = sum(len(text) for kept in (SPEC, RENAMED) for text in made(kept)[CONFIG_MAP]["data"].values())
    shared = sum(len(made(RENAMED)[CONFIG_MAP]["data"][name]) for name in ("cds.json",))
    monkeypatch.setattr(desired, "MAX_BYTES", total - shared)
    assert files_with(known) == OLD_FILES
    monkeypatch.setattr(desired, "MAX_BYTES", total - shared - 1)
    assert files_with(known) == set()


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
        ("proxy-metrics", False),
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
