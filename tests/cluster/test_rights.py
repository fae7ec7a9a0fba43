"""The operator's rights are the ones that it needs: none was missing and none was left over, by the audit log."""

import json
import uuid
from collections.abc import Iterator
from typing import Final

import pytest
import yaml

from operator_app.api.kinds import CONFIG_MAP, DEPLOYMENT, NAMESPACE, SERVICE, Key, Kind
from tests.cluster.installed import Installed
from tests.cluster.rights import denied, granted, used
from tests.cluster.suite import Suite
from tests.e2e.controlplane import AuditEntry, Report
from tests.e2e.kube import wait_until
from tests.e2e.proxies import OPERATOR_USER
from tests.paths import MANIFESTS

ROLES: Final = MANIFESTS / "base" / "rbac.yaml"
RIGHTS_TIMEOUT_S: Final = 30.0
"""Until the API server knows of a new role."""

NEVER_DELETED: Final[dict[Kind, tuple[str, ...]]] = {
    CONFIG_MAP: ("configmap", "child"),
    DEPLOYMENT: ("deployment", "child", "--image=example.invalid/none", "--replicas=0"),
    SERVICE: ("service", "clusterip", "child", "--tcp=80"),
}
"""Children that the operator leaves to the garbage collector, and how ``kubectl create`` makes some."""


def of_the_operator(*clusters: Installed) -> list[AuditEntry]:
    """Every request of the operator's ServiceAccount on these clusters; each cluster counts once."""
    apart = {str(each.kubeconfig): each for each in clusters}.values()
    return [entry for cluster in apart for entry in cluster.audit.entries() if entry.user == OPERATOR_USER]


@pytest.mark.timeout(3600)
def test_it_was_never_denied_anything(installed: Installed, suite: Suite) -> None:
    """No request of the operator was refused for want of a right, neither here nor in the suite."""
    suite.wait()
    entries = of_the_operator(installed, *suite.clusters)
    assert entries
    assert denied(entries) == []


@pytest.mark.timeout(3600)
def test_every_right_was_used(installed: Installed, suite: Suite, report: Report) -> None:
    """Each verb on each resource in each scope that the manifests grant was needed, by the suite or by tests here."""
    suite.wait()
    entries = of_the_operator(installed, *suite.clusters)
    rights = granted(yaml.safe_load_all(ROLES.read_text(encoding="utf-8")), "operator-app")
    found = used(entries, rights)
    report(f"rights: {len(found)} of {len(rights)} were used, by {len(entries)} requests")
    assert sorted(map(str, rights - found)) == []


@pytest.fixture
def namespace(installed: Installed) -> Iterator[str]:
    """A namespace of its own."""
    name = f"owners-{uuid.uuid4().hex[:8]}"
    installed.admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    installed.admin.delete(NAMESPACE, Key("", name))


@pytest.mark.timeout(300)
def test_the_right_to_delete_is_what_changing_owners_takes(installed: Installed, namespace: str) -> None:
    """Whoever may write a child but not delete it can't change its owners; with the right to delete it, they can.

    That is why the operator has this right for kinds that it never deletes: nothing else shows in the log.
    """

    def allow(name: str, verbs: str) -> None:
        resources = ",".join(f"{kind.plural}.{kind.group}" if kind.group else kind.plural for kind in NEVER_DELETED)
        installed.kubectl("-n", namespace, "create", "role", name, f"--verb={verbs}", f"--resource={resources}")
        account = f"--serviceaccount={namespace}:default"
        installed.kubectl("-n", namespace, "create", "rolebinding", name, f"--role={name}", account)

    def change_owner(kind: Kind) -> str:
        done = installed.tried(
            *("-n", namespace, "patch", kind.plural, "child", "--type=merge", "--patch", json.dumps(patch)),
            f"--as=system:serviceaccount:{namespace}:default",
        )
        return f"{done.returncode} {done.stderr}"

    installed.kubectl("-n", namespace, "create", "configmap", "owner")
    uid = installed.admin.get(CONFIG_MAP, Key(namespace, "owner"))["metadata"]["uid"]
    patch = {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}]}}
    for command in NEVER_DELETED.values():
        installed.kubectl("-n", namespace, "create", *command)
    allow("write", "get,patch")
    for kind in NEVER_DELETED:
        refusal = f"cannot set an ownerRef on a resource you can't delete: {kind.plural}"
        wait_until(lambda kind=kind, said=refusal: said in change_owner(kind), RIGHTS_TIMEOUT_S, refusal)  # type: ignore[misc]
    allow("delete", "delete")
    for kind in NEVER_DELETED:
        wait_until(lambda kind=kind: change_owner(kind).startswith("0 "), RIGHTS_TIMEOUT_S, f"another owner of {kind}")  # type: ignore[misc]
