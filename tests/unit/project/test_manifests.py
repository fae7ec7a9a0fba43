"""The shipped manifests: what the operator may do, how its Pod is locked down, and that kustomize renders them."""

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from operator_app.api import kinds
from operator_app.app import RELEASE_TIMEOUT_S
from operator_app.preflight import CLUSTER_NAMESPACE
from operator_app.settings import Settings
from tests.paths import MANIFESTS

Manifest = dict[str, Any]

EDGE: Final = kinds.GROUP

OPERATOR_CLUSTER: Final = {
    (EDGE, "envoyproxies", "get"): "read the object again, live, before the finalizer or a status is written",
    (EDGE, "envoyproxies", "list"): "start of a watch",
    (EDGE, "envoyproxies", "watch"): "learn of user edits",
    (EDGE, "envoyproxies", "patch"): "apply and release the one finalizer entry",
    (EDGE, "envoyproxies/status", "patch"): "apply the status",
    (EDGE, "envoyproxies/finalizers", "update"): "ownerReferences with blockOwnerDeletion, where admission checks it",
    ("", "configmaps", "get"): "the live read before a create",
    ("", "configmaps", "list"): "start of a watch",
    ("", "configmaps", "watch"): "learn of drift",
    ("", "configmaps", "create"): "apply where it is absent",
    ("", "configmaps", "patch"): "apply",
    ("", "configmaps", "delete"): "change owner references, when a child is adopted or orphaned",
    ("", "services", "get"): "the live read before a create",
    ("", "services", "list"): "start of a watch",
    ("", "services", "watch"): "learn of drift and of the address",
    ("", "services", "create"): "apply where it is absent",
    ("", "services", "patch"): "apply",
    ("", "services", "delete"): "change owner references, when a child is adopted or orphaned",
    ("apps", "deployments", "get"): "the live read before a create",
    ("apps", "deployments", "list"): "start of a watch",
    ("apps", "deployments", "watch"): "learn of drift and of ready replicas",
    ("apps", "deployments", "create"): "apply where it is absent",
    ("apps", "deployments", "patch"): "apply",
    ("apps", "deployments", "delete"): "change owner references, when a child is adopted or orphaned",
    **{
        (group, resource, verb): reason
        for group, resource in (
            ("policy", "poddisruptionbudgets"),
            ("autoscaling", "horizontalpodautoscalers"),
            ("networking.k8s.io", "networkpolicies"),
        )
        for verb, reason in {
            "get": "the live read before a create",
            "list": "start of a watch",
            "watch": "learn of drift",
            "create": "apply where it is absent",
            "patch": "apply",
            "delete": "prune where the spec does not ask for it any more",
        }.items()
    },
    ("", "pods", "list"): "start of a watch",
    ("", "pods", "watch"): "learn which proxies serve, where they can be asked, and why others do not",
    ("", "pods/status", "patch"): "one annotation, which makes the kubelet fetch a changed ConfigMap at once",
    ("", "pods/log", "get"): "why an Envoy has refused a file, in its own words, once for each refusal",
    ("", "namespaces", "get"): "the tenant label of one namespace; the UID of kube-system, the cluster's identity",
    ("", "namespaces", "list"): "start of a watch",
    ("", "namespaces", "watch"): "learn of a changed tenant label",
    ("events.k8s.io", "events", "get"): "how often a repeated event was counted already, by an earlier life too",
    ("events.k8s.io", "events", "create"): "tell the tenant",
    ("events.k8s.io", "events", "patch"): "count a repeated event instead of creating another",
}
"""Every right that the operator has in the whole cluster, and what it is for."""

OPERATOR_NAMESPACE: Final = {
    (EDGE, "proxyregistrations", "get"): "the live read before a create",
    (EDGE, "proxyregistrations", "list"): "start of a watch",
    (EDGE, "proxyregistrations", "watch"): "learn of drift in the records",
    (EDGE, "proxyregistrations", "create"): "register",
    (EDGE, "proxyregistrations", "patch"): "bring a record up to date",
    (EDGE, "proxyregistrations", "delete"): "deregister",
    (EDGE, "proxyregistrations/status", "patch"): "remember what an outside registry has confirmed",
    ("coordination.k8s.io", "leases", "get"): "who won a lost race",
    ("coordination.k8s.io", "leases", "list"): "start of a watch, and the look around after a shard was taken",
    ("coordination.k8s.io", "leases", "watch"): "see who is there and what is free, without polling",
    ("coordination.k8s.io", "leases", "create"): "the first holder of a shard, the membership of a replica",
    ("coordination.k8s.io", "leases", "update"): "renew and release by compare-and-set",
    ("coordination.k8s.io", "leases", "delete"): "memberships of the dead, shards that no longer exist",
}
"""Every right that the operator has in its own namespace alone."""

READS: Final = frozenset({"get", "list", "watch"})

HOSTNAMES: Final = {
    (EDGE, "hostnameclaims", "get"): "whose claim it is, after a lost race",
    (EDGE, "hostnameclaims", "list"): "start of a watch",
    (EDGE, "hostnameclaims", "watch"): "learn that a hostname is free again",
    (EDGE, "hostnameclaims", "create"): "take a hostname",
    (EDGE, "hostnameclaims", "patch"): "restore a claim that was edited",
    (EDGE, "hostnameclaims", "delete"): "give a hostname back",
    (EDGE, "hostnamepolicies", "list"): "start of a watch",
    (EDGE, "hostnamepolicies", "watch"): "learn who may have which hostnames",
}
"""Every right about hostnames, which belong to the whole cluster."""

TENANT_VIEW: Final = {
    (EDGE, resource, verb): "see one's proxies"
    for resource in ("envoyproxies", "envoyproxies/status", "envoyproxies/scale")
    for verb in ("get", "list", "watch")
}
TENANT_EDIT: Final = {
    **{
        (EDGE, "envoyproxies", verb): "own one's proxies"
        for verb in ("create", "update", "patch", "delete", "deletecollection")
    },
    **{(EDGE, "envoyproxies/scale", verb): "kubectl scale" for verb in ("update", "patch")},
}


def manifests() -> list[Manifest]:
    """Every object below manifests/base, as written (kustomize adds only labels and the image's tag)."""
    paths = (path for path in sorted((MANIFESTS / "base").glob("*.yaml")) if path.name != "kustomization.yaml")
    return [obj for path in paths for obj in yaml.safe_load_all(path.read_text())]


def manifest(kind: str, name: str = "operator-app") -> Manifest:
    """The one object of that kind and name."""
    (found,) = (obj for obj in manifests() if obj["kind"] == kind and obj["metadata"]["name"] == name)
    return found


def rights(role: Manifest) -> set[tuple[str, str, str]]:
    """A role's rules, multiplied out to (group, resource, verb)."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        pytest.param("ClusterRole", "operator-app", OPERATOR_CLUSTER, id="operator-cluster"),
        pytest.param("ClusterRole", "operator-app-hostnames", HOSTNAMES, id="hostnames"),
        pytest.param("Role", "operator-app", OPERATOR_NAMESPACE, id="operator-namespace"),
        pytest.param("ClusterRole", "edge-envoyproxy-view", TENANT_VIEW, id="tenant-view"),
        pytest.param("ClusterRole", "edge-envoyproxy-edit", TENANT_EDIT, id="tenant-edit"),
    ],
)
def test_every_right_has_a_reason(kind: str, name: str, expected: dict[tuple[str, str, str], str]) -> None:
    """A role grants exactly the rights that the table gives a reason for: none more, none forgotten."""
    assert rights(manifest(kind, name)) == set(expected)


def test_an_operator_of_chosen_namespaces_can_read_the_clusters_identity_and_no_other_namespace() -> None:
    """The overlay grants to get ``kube-system``, whose UID records outside carry, by its name alone."""
    text = (MANIFESTS / "overlays" / "namespaced" / "cluster-role-identity.yaml").read_text()
    role, binding = yaml.safe_load_all(text)
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["namespaces"], "resourceNames": [CLUSTER_NAMESPACE], "verbs": ["get"]}
    ]
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": role["metadata"]["name"],
    }
    assert binding["subjects"] == manifest("ClusterRoleBinding")["subjects"]


def test_nodes_can_be_watched_only_where_a_component_says_so() -> None:
    """The component grants to list and watch nodes, no more, and sets what makes the operator watch them."""
    component = MANIFESTS / "components" / "node-addresses"
    role, binding = yaml.safe_load_all((component / "cluster-role-nodes.yaml").read_text())
    assert rights(role) == {("", "nodes", "list"), ("", "nodes", "watch")}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == manifest("ClusterRoleBinding")["subjects"]
    everywhere = [right for each in manifests() if each["kind"] == "ClusterRole" for right in rights(each)]
    assert "nodes" not in {resource for _, resource, _ in everywhere}
    assert not Settings().are_nodes_watched
    (patch,) = yaml.safe_load((component / "kustomization.yaml").read_text())["patches"]
    (container,) = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["name"] == "OPERATOR_APP_NODE_PORT_ADDRESSES"
    assert Settings(node_port_addresses=variable["value"]).are_nodes_watched


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", ["namespaced", "powerdns", "rfc2136"])
def test_kustomize_adds_the_component_to_each_overlay(tmp_path: Path, overlay: str) -> None:
    """The role is there, and the operator's variable beside those of the overlay."""
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    own = {"resources": [f"manifests/overlays/{overlay}"], "components": ["manifests/components/node-addresses"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(own))
    rendered = subprocess.run(("kubectl", "kustomize", str(tmp_path)), capture_output=True, text=True, check=True)
    objects = list(yaml.safe_load_all(rendered.stdout))
    assert ("ClusterRole", "operator-app-nodes") in {(obj["kind"], obj["metadata"]["name"]) for obj in objects}
    (deployment,) = (obj for obj in objects if obj["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    names = {each["name"] for each in container["env"]}
    assert {"OPERATOR_APP_NODE_PORT_ADDRESSES", "OPERATOR_APP_REPLICA_NAME"} < names


def test_no_role_has_a_wildcard_or_touches_secrets_and_roles() -> None:
    """No rule says ``*``, and none reaches Secrets or RBAC itself; Pods are only looked at, and touched."""
    for role in (obj for obj in manifests() if obj["kind"] in {"ClusterRole", "Role"}):
        for group, resource, verb in rights(role):
            assert "*" not in {group, resource, verb}
            assert group != "rbac.authorization.k8s.io"
            assert resource.partition("/")[0] not in {"secrets", "serviceaccounts"}
            assert resource.partition("/")[0] != "pods" or (resource, verb) == ("pods/status", "patch") or verb in READS


def test_the_operator_cannot_create_an_envoy_proxy() -> None:
    """A late apply on a deleted EnvoyProxy is refused by RBAC too: server-side apply creates only with ``create``."""
    assert (EDGE, "envoyproxies", "create") not in rights(manifest("ClusterRole"))


def test_all_kinds_of_children_can_be_written() -> None:
    """The roles keep up with the code: each child kind can be listed, watched, applied, and pruned or given away."""
    granted = rights(manifest("ClusterRole"))
    for kind in kinds.ALL_CHILD_KINDS:
        verbs = {verb for group, resource, verb in granted if (group, resource) == (kind.group, kind.plural)}
        assert verbs == {"get", "list", "watch", "create", "patch", "delete"}


def test_roles_are_bound_to_the_operators_account_alone() -> None:
    """Each binding names the role of its own name and exactly the one ServiceAccount."""
    account = manifest("ServiceAccount")["metadata"]
    for binding in (obj for obj in manifests() if obj["kind"] in {"ClusterRoleBinding", "RoleBinding"}):
        assert binding["roleRef"]["name"] == binding["metadata"]["name"]
        assert binding["roleRef"]["kind"] == binding["kind"].removesuffix("Binding")
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
        ]


def test_the_right_to_touch_pods_is_limited_by_a_policy() -> None:
    """It is about the one account and the one annotation that the code writes, on Pods with the code's label."""
    (policy,) = (obj for obj in manifests() if obj["kind"] == "ValidatingAdmissionPolicy")
    (binding,) = (obj for obj in manifests() if obj["kind"] == "ValidatingAdmissionPolicyBinding")
    assert (binding["spec"]["policyName"], binding["spec"]["validationActions"]) == (
        policy["metadata"]["name"],
        ["Deny"],
    )
    account = manifest("ServiceAccount")["metadata"]
    (condition,) = policy["spec"]["matchConditions"]
    assert f"'system:serviceaccount:{account['namespace']}:{account['name']}'" in condition["expression"]
    text = str(policy["spec"])
    assert kinds.ANNOTATION_CONFIGURATION in text
    assert f"['{kinds.LABEL_MANAGED_BY}'] == '{kinds.FIELD_MANAGER}'" in text


def test_tenant_roles_flow_into_the_built_in_ones() -> None:
    """``view`` is aggregated from the one and ``edit`` from the other; the rest follows from these two."""
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    assert manifest("ClusterRole", "edge-envoyproxy-view")["metadata"]["labels"] == {f"{prefix}view": "true"}
    assert manifest("ClusterRole", "edge-envoyproxy-edit")["metadata"]["labels"] == {f"{prefix}edit": "true"}


def test_the_namespace_enforces_the_restricted_profile() -> None:
    """Pod Security Admission refuses anything weaker than ``restricted`` beside the operator."""
    labels = manifest("Namespace", "edge-system")["metadata"]["labels"]
    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "audit", "warn")} == {"restricted"}


def test_everything_namespaced_is_in_the_operators_namespace() -> None:
    """One namespace holds the operator, the same that its settings default to."""
    namespaced = [obj for obj in manifests() if not obj["kind"].startswith(("Cluster", "Namespace", "Validating"))]
    assert {obj["metadata"]["namespace"] for obj in namespaced} == {"edge-system"}


def pod_spec() -> Manifest:
    """The Pod template's spec of the operator's Deployment."""
    spec: Manifest = manifest("Deployment")["spec"]["template"]["spec"]
    return spec


def test_the_pod_meets_the_restricted_profile_and_more() -> None:
    """Non-root with a numeric user, the runtime's seccomp profile, no capability, no escalation, read-only root."""
    assert pod_spec()["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for container in pod_spec()["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert not {"hostNetwork", "hostPID", "hostIPC", "volumes", "initContainers"} & set(pod_spec())


def test_the_token_is_mounted_where_it_is_used_and_nowhere_else() -> None:
    """The account hands out no token by default; the operator's Pod asks for it."""
    assert manifest("ServiceAccount")["automountServiceAccountToken"] is False
    assert pod_spec()["automountServiceAccountToken"] is True
    assert pod_spec()["serviceAccountName"] == "operator-app"


def test_no_service_can_set_the_operators_settings() -> None:
    """Service links would put OPERATOR_APP_* variables into the Pod if a Service were called operator-app."""
    assert pod_spec()["enableServiceLinks"] is False


def test_a_standby_is_there_and_a_rollout_leaves_no_gap() -> None:
    """Two replicas, each known by its Pod's name; a new one is ready before an old one is asked to go."""
    spec = manifest("Deployment")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    (container,) = pod_spec()["containers"]
    (name,) = (each for each in container["env"] if each["name"] == "OPERATOR_APP_REPLICA_NAME")
    assert name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


def test_a_pod_gets_time_to_finish_and_to_give_back_its_shards() -> None:
    """The kubelet waits longer than rounds may take after SIGTERM and shards may take to be given back."""
    assert pod_spec()["terminationGracePeriodSeconds"] >= Settings().shutdown_grace_s + RELEASE_TIMEOUT_S


def test_probes_ask_the_declared_port() -> None:
    """Alive and ready are different questions, asked on the one port that the operator serves."""
    (container,) = pod_spec()["containers"]
    assert [(port["name"], port["containerPort"]) for port in container["ports"]] == [("http", 8080)]
    probes = {probe: container[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe: asked["path"] for probe, asked in probes.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert {asked["port"] for asked in probes.values()} == {"http"}


def test_resources_are_bounded() -> None:
    """Requests are stated, memory is limited."""
    (container,) = pod_spec()["containers"]
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]


def test_the_disruption_budget_selects_the_operator_and_never_blocks_a_drain() -> None:
    """The budget's selector is the Deployment's, and it always lets one Pod go."""
    budget = manifest("PodDisruptionBudget")["spec"]
    assert budget["selector"] == manifest("Deployment")["spec"]["selector"]
    assert budget["maxUnavailable"] == 1
    assert "minAvailable" not in budget


def test_the_standby_is_on_another_node_where_there_is_one() -> None:
    """Replicas are spread over nodes, but one that can't be spread runs all the same."""
    (spread,) = pod_spec()["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert spread["labelSelector"] == manifest("Deployment")["spec"]["selector"]


@pytest.mark.parametrize("part", ["base", "crd"])
def test_every_manifest_is_listed(part: str) -> None:
    """A file that no kustomization names would never reach a cluster, and a name without a file breaks the build."""
    listed = yaml.safe_load((MANIFESTS / part / "kustomization.yaml").read_text())["resources"]
    assert set(listed) == {path.name for path in (MANIFESTS / part).glob("*.yaml")} - {"kustomization.yaml"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize(
    ("directory", "left_out"),
    [
        (".", set()),
        ("overlays/namespaced", {("ClusterRoleBinding", "operator-app")}),
        ("overlays/powerdns", set()),
        ("overlays/rfc2136", set()),
    ],
)
def test_kustomize_renders_a_whole_installation(directory: str, left_out: set[tuple[str, str]]) -> None:
    """Each directory to apply gives the CRDs, the base but for what it takes away, and the one image by its tag."""
    rendered = subprocess.run(
        ("kubectl", "kustomize", str(MANIFESTS / directory)), capture_output=True, text=True, check=True
    )
    objects = list(yaml.safe_load_all(rendered.stdout))
    names = {(obj["kind"], obj["metadata"]["name"]) for obj in objects}
    base = {(obj["kind"], obj["metadata"]["name"]) for obj in manifests()}
    assert base - names == left_out
    for kind in (kinds.ENVOY_PROXY, kinds.PROXY_REGISTRATION, kinds.HOSTNAME_CLAIM, kinds.HOSTNAME_POLICY):
        assert ("CustomResourceDefinition", f"{kind.plural}.{kind.group}") in names
    (deployment,) = (obj for obj in objects if obj["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "operator-app:dev"
