"""The operator's rights are the ones that it needs: none was missing and none was left over, by the audit log."""

from typing import Final

import pytest
import yaml

from tests.cluster.installed import Installed
from tests.cluster.rights import denied, granted, used
from tests.cluster.suite import Suite
from tests.e2e.controlplane import AuditEntry, Report
from tests.e2e.proxies import OPERATOR_USER
from tests.paths import MANIFESTS

ROLES: Final = MANIFESTS / "base" / "rbac.yaml"


def of_the_operator(*clusters: Installed) -> list[AuditEntry]:
    """Every request of the operator's ServiceAccount on these clusters; each cluster counts once."""
    apart = {str(each.kubeconfig): each for each in clusters}.values()
    return [entry for cluster in apart for entry in cluster.audit.entries() if entry.user == OPERATOR_USER]


def test_it_was_never_denied_anything(installed: Installed) -> None:
    """No request of the operator as it is shipped was refused for want of a right."""
    entries = of_the_operator(installed)
    assert entries
    assert denied(entries) == []


@pytest.mark.timeout(3600)
def test_every_right_was_used(installed: Installed, suite: Suite, report: Report) -> None:
    """Each verb on each resource in each scope that the manifests grant was needed, by the suite or by tests here."""
    suite.wait()
    entries = of_the_operator(installed, suite.cluster)
    rights = granted(yaml.safe_load_all(ROLES.read_text(encoding="utf-8")), "operator-app")
    found = used(entries, rights)
    report(f"rights: {len(found)} of {len(rights)} were used, by {len(entries)} requests")
    assert sorted(map(str, rights - found)) == []
