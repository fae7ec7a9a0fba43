"""What a real API server does with valid and invalid EnvoyProxies, without the operator.

Requests are dry runs where nothing has to be stored: the validation is the same, and no object is left.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from operator_app.api.kinds import ENVOY_PROXY, PROXY_REGISTRATION, Key, Object, key_of
from operator_app.api.models import MAX_ENDPOINTS, MAX_HOSTS, MAX_ROUTES, parse_spec
from tests import api_cases
from tests.api_cases import BOUNDS, CASES, HOSTILE, NAME_CASE, TEXT_MEMBERS, Case, edited, proxy, with_fragment
from tests.e2e.controlplane import Cluster
from tests.e2e.kube import Kube, KubeError, path_of
from tests.paths import MANIFESTS

SAMPLES = MANIFESTS / "samples"


@pytest.fixture
def create(admin: Kube) -> Callable[[Object], Object]:
    """Create an object as a strict dry run and return what would be stored."""

    def dry_run(obj: Object) -> Object:
        kind = {kind.kind: kind for kind in (ENVOY_PROXY, PROXY_REGISTRATION)}[obj["kind"]]
        path = path_of(kind, Key(obj["metadata"]["namespace"], ""))
        answer: Object = admin.request(
            "POST", path, body=obj, params={"dryRun": "All", "fieldValidation": "Strict"}
        ).json()
        return answer

    return dry_run


@pytest.fixture
def refusal(create: Callable[[Object], Object]) -> Callable[[Object], str]:
    """The sentences with which the API server refuses an object, or an empty text."""

    def message(obj: Object) -> str:
        try:
            create(obj)
        except KubeError as error:
            if error.code not in {400, 422}:
                raise
            text: str = error.status["message"]
            return text
        return ""

    return message


@pytest.fixture
def kubectl(control_plane: Cluster) -> Callable[..., str]:
    """Run kubectl as the administrator and return what it prints; a test without it is skipped, but fails in CI."""
    program = shutil.which("kubectl")
    if program is None:
        message = "there is no kubectl on PATH, and this test is about what it prints"
        if "CI" in os.environ:
            pytest.fail(message)
        pytest.skip(message)

    def run(*args: str) -> str:
        environment = {**os.environ, "KUBECONFIG": str(control_plane.kubeconfig)}
        return subprocess.run([program, *args], env=environment, check=True, capture_output=True, text=True).stdout

    return run


Refusal = Callable[[Object], str]


@pytest.mark.parametrize("case", [*CASES, NAME_CASE], ids=str)
def test_a_rule_refuses_its_case_with_its_advice_and_accepts_the_neighbour(
    case: Case, namespace: str, refusal: Refusal
) -> None:
    """Each rule refuses what breaks it, says what to write instead, and accepts the nearest valid value."""
    good = proxy(namespace=namespace)
    assert refusal(edited(good, case.at, case.accepted)) == ""
    for value in case.refused:
        assert case.advice in refusal(edited(good, case.at, value)), value


@pytest.mark.parametrize(("at", "inside", "outside"), BOUNDS, ids=[".".join(map(str, at)) for at, _, _ in BOUNDS])
def test_a_bound_is_exact(
    at: api_cases.Path, inside: Sequence[Any], outside: Sequence[Any], namespace: str, refusal: Refusal
) -> None:
    """Every size and range is accepted up to its bound and refused one beyond."""
    good = proxy(namespace=namespace)
    for value in inside:
        assert refusal(edited(good, at, value)) == "", value
    for value in outside:
        assert refusal(edited(good, at, value)) != "", value


@pytest.mark.parametrize("at", TEXT_MEMBERS, ids=lambda at: ".".join(map(str, at)))
def test_no_text_carries_another_languages_structure(at: api_cases.Path, namespace: str, refusal: Refusal) -> None:
    """No member that reaches a child accepts a line break, quote, brace, format directive or look-alike character."""
    good = proxy(namespace=namespace)
    value: Any = good
    for step in at:
        value = value[step]
    for fragment in HOSTILE:
        for text in with_fragment(value, fragment):
            assert refusal(edited(good, at, text)) != "", text


def test_the_largest_object_is_accepted(namespace: str, refusal: Refusal) -> None:
    """An object with all the routes, hosts and endpoints there may be, and nearly all the text, is accepted.

    The API server refuses a CRD whose rules could cost too much, and stops an evaluation that does.
    """
    big = proxy(namespace=namespace)
    big["spec"]["listeners"] = [
        {
            "name": f"l{listener}",
            "port": 8000 + listener,
            "routes": [
                {
                    "match": {
                        "hosts": [f"h{host}.abc.example.com" for host in range(MAX_HOSTS // MAX_ROUTES)],
                        "pathPrefix": "/",
                    },
                    "backend": f"backend-{route}",
                }
                for route in range(64)
            ],
        }
        for listener in range(MAX_ROUTES // 64)
    ]
    big["spec"]["backends"] = [
        {
            "name": f"backend-{backend}",
            "endpoints": [{"host": f"app{n:02}.another-namespace.svc", "port": 80} for n in range(MAX_ENDPOINTS // 64)],
        }
        for backend in range(64)
    ]
    assert refusal(big) == ""


@pytest.mark.parametrize(
    "at", [("spec", "listener"), ("spec", "listeners", 0, "routes", 0, "match", "path"), ("spec", "Paused"), ("typo",)]
)
def test_a_misspelt_field_is_named(at: api_cases.Path, namespace: str, refusal: Refusal) -> None:
    """A field that would have no effect is refused by strict validation, which is kubectl's default."""
    assert f'unknown field "{at[0]}' in refusal(edited(proxy(namespace=namespace), at, "x"))


@pytest.mark.parametrize("member", ["listeners", "backends"])
def test_a_missing_field_is_named(member: str, namespace: str, refusal: Refusal) -> None:
    """A spec without listeners or backends is refused with the name of the missing field."""
    bare = proxy(namespace=namespace)
    del bare["spec"][member]
    assert f"spec.{member}: Required value" in refusal(bare)


@pytest.mark.parametrize("sample", ["minimal", "everything"])
def test_applying_the_same_file_again_changes_nothing(
    sample: str, namespace: str, tmp_path: Path, admin: Kube, kubectl: Callable[..., str]
) -> None:
    """The second `kubectl apply` of a file says "unchanged": the API server has added nothing to items of a list."""
    obj = yaml.safe_load((SAMPLES / "minimal.yaml").read_text(encoding="utf-8")) if sample == "minimal" else proxy()
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump(edited(obj, ("metadata", "namespace"), namespace)), encoding="utf-8")
    name = f"envoyproxy.edge.operator-app.dev/{obj['metadata']['name']}"
    assert kubectl("apply", "-f", str(file)).strip() == f"{name} created"
    before = admin.get(ENVOY_PROXY, Key(namespace, obj["metadata"]["name"]))
    assert kubectl("apply", "-f", str(file)).strip() == f"{name} unchanged"
    assert admin.get(ENVOY_PROXY, Key(namespace, obj["metadata"]["name"])) == before


def test_kubectl_delete_all_leaves_proxies(namespace: str, admin: Kube, kubectl: Callable[..., str]) -> None:
    """`kubectl delete all --all` takes no EnvoyProxy along, and the category `edge` shows it."""
    admin.create(ENVOY_PROXY, proxy(namespace=namespace))
    kubectl("delete", "all", "--all", "--namespace", namespace)
    assert "deletionTimestamp" not in admin.get(ENVOY_PROXY, Key(namespace, "checkout"))["metadata"]
    assert kubectl("get", "edge", "--namespace", namespace, "--output", "name").split() == [
        "envoyproxy.edge.operator-app.dev/checkout"
    ]


def test_null_is_absence(namespace: str, create: Callable[[Object], Object], refusal: Refusal) -> None:
    """Null is never stored: it means the default, or nothing, and what is required may not be null."""
    good = proxy(namespace=namespace)
    assert create(edited(good, ("spec", "replicas"), None))["spec"]["replicas"] == 1
    assert "image" not in create(edited(good, ("spec", "image"), None))["spec"]
    routes = [{"match": None, "backend": "app"}]
    unmatched = create(edited(good, (*api_cases.LISTENER, "routes"), routes))
    assert unmatched["spec"]["listeners"][0]["routes"] == [{"backend": "app"}]
    assert "Required value" in refusal(edited(good, (*api_cases.LISTENER, "port"), None))


def test_defaults_are_the_models(namespace: str, create: Callable[[Object], Object]) -> None:
    """The API server fills in exactly what the models assume, and a fresh object looks in progress to kstatus."""
    smallest = yaml.safe_load((SAMPLES / "minimal.yaml").read_text(encoding="utf-8"))
    stored = create(edited(smallest, ("metadata", "namespace"), namespace))
    assert stored["spec"] == {
        "replicas": 1,
        "paused": False,
        "deletionPolicy": "Delete",
        "service": {"type": "ClusterIP"},
        "listeners": [{"name": "http", "port": 80, "routes": [{"backend": "app"}]}],
        "backends": [{"name": "app", "service": {"name": "app", "port": 8080}}],
    }
    assert stored["status"] == {"observedGeneration": -1}
    assert parse_spec(stored) == parse_spec(smallest)


@pytest.mark.parametrize("file", sorted(SAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_sample_is_accepted(file: Path, namespace: str, create: Callable[[Object], Object]) -> None:
    """What the README tells users to apply is accepted."""
    for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
        if document["kind"] == ENVOY_PROXY.kind:
            stored = create(edited(document, ("metadata", "namespace"), namespace))
            assert parse_spec(stored) == parse_spec(document)


def test_scale(namespace: str, admin: Kube) -> None:
    """The scale subresource reads and writes replicas, and answers with the status that the operator wrote."""
    admin.create(ENVOY_PROXY, proxy(namespace=namespace))
    key = Key(namespace, "checkout")
    status = {"observedGeneration": 1, "replicas": 2, "selector": "app.kubernetes.io/instance=checkout"}
    admin.patch(ENVOY_PROXY, key, {"status": status}, subresource="status")
    admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": 5}}, subresource="scale")
    scale = admin.request("GET", path_of(ENVOY_PROXY, key, "scale")).json()
    assert (scale["spec"], scale["status"]) == (
        {"replicas": 5},
        {"replicas": 2, "selector": "app.kubernetes.io/instance=checkout"},
    )
    assert admin.get(ENVOY_PROXY, key)["spec"]["replicas"] == 5


def test_scale_has_the_bounds_of_the_spec(namespace: str, admin: Kube) -> None:
    """The scale subresource refuses what the spec refuses."""
    admin.create(ENVOY_PROXY, proxy(namespace=namespace))
    with pytest.raises(KubeError, match="less than or equal to 100"):
        admin.patch(ENVOY_PROXY, Key(namespace, "checkout"), {"spec": {"replicas": 101}}, subresource="scale")


def test_kubectl_shows_conditions_counters_and_reason(namespace: str, admin: Kube, kubectl: Callable[..., str]) -> None:
    """`kubectl get edgeproxy` shows the conditions, ready proxies and address, and -o wide the reason."""
    admin.create(ENVOY_PROXY, proxy(namespace=namespace))
    at = {"observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z", "message": ""}
    conditions = [
        {"type": "Ready", "status": "False", "reason": "TooFewReady", **at},
        {"type": "Available", "status": "Unknown", "reason": "x", **at},
    ]
    status = {"observedGeneration": 1, "conditions": conditions, "readyReplicas": 1, "address": "10.96.0.9"}
    admin.patch(ENVOY_PROXY, Key(namespace, "checkout"), {"status": status}, subresource="status")
    header, row = kubectl("get", "edgeproxy", "--namespace", namespace, "--output", "wide").splitlines()
    assert header.split() == ["NAME", "READY", "AVAILABLE", "REPLICAS", "ADDRESS", "AGE", "REASON"]
    assert row.split()[:5] == ["checkout", "False", "Unknown", "1", "10.96.0.9"]
    assert row.split()[-1] == "TooFewReady"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("envoyproxy", "An Envoy of a tenant's own."),
        ("envoyproxy.spec.listeners", "Ports on which the proxy takes traffic"),
        ("envoyproxy.spec.backends.endpoints.host", "DNS name in lower case"),
        ("eproxyreg.spec.proxy", "Its uid never changes."),
    ],
)
def test_kubectl_explains(path: str, text: str, kubectl: Callable[..., str]) -> None:
    """`kubectl explain` shows the models' own texts."""
    assert text in " ".join(kubectl("explain", path).split())


def registration(namespace: str) -> Object:
    """A record as the operator writes it."""
    return {
        "apiVersion": PROXY_REGISTRATION.api_version,
        "kind": PROXY_REGISTRATION.kind,
        "metadata": {"name": "proxy-0b1c", "namespace": namespace},
        "spec": {
            "proxy": {"namespace": "team-a", "name": "checkout", "uid": "0b1c"},
            "generation": 3,
            "address": "10.96.0.9",
            "ports": [{"name": "http", "port": 80, "protocol": "HTTP"}],
        },
    }


def test_a_record_keeps_its_owner_and_its_newest_generation(namespace: str, admin: Kube) -> None:
    """The API server itself refuses a record's change of its UID, and a lower generation."""
    record = registration(namespace)
    admin.create(PROXY_REGISTRATION, record)
    admin.patch(PROXY_REGISTRATION, key_of(record), {"spec": {"generation": 4}})
    with pytest.raises(KubeError, match="must not replace a newer one"):
        admin.patch(PROXY_REGISTRATION, key_of(record), {"spec": {"generation": 3}})
    with pytest.raises(KubeError, match="keeps its owner"):
        admin.patch(PROXY_REGISTRATION, key_of(record), {"spec": {"proxy": {"uid": "0b1d"}}})


def test_a_record_is_named_by_its_proxy(namespace: str, refusal: Refusal) -> None:
    """One proxy can't have two records, because a record's name is made from the proxy's UID."""
    assert refusal(registration(namespace)) == ""
    second = edited(registration(namespace), ("metadata", "name"), "proxy-0b1d")
    assert "one proxy has one record" in refusal(second)
