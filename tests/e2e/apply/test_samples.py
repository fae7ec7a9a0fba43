"""The samples on a real API server: every one reconciled, and then nothing is written any more."""

import time
from copy import deepcopy

import pytest

from operator_app.api.kinds import ENVOY_PROXY, Key
from tests.e2e.controlplane import AuditLog
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import (
    CONVERGE_TIMEOUT_S,
    OPERATOR_USER,
    SETTLED_S,
    drift_of,
    give_addresses,
    holds,
    settled_objects_of,
    wait_reconciled,
)
from tests.samples import samples


@pytest.mark.usefixtures("budget")
def test_every_sample_is_reconciled_and_then_quiet(
    admin: Kube, audit: AuditLog, namespace: str, running_operator: OperatorProcess
) -> None:
    """All samples in one namespace: children as declared, registered, and no write once nothing is wrong."""
    proxies = {name: deepcopy(each) for name, each in samples().items()}
    for each in proxies.values():
        each["metadata"]["namespace"] = namespace
        admin.create(ENVOY_PROXY, each)
    keys = [Key(namespace, each["metadata"]["name"]) for each in proxies.values()]
    for key in keys:
        proxy = wait_reconciled(admin, key)
        if proxy["spec"]["service"]["type"] == "LoadBalancer":
            give_addresses(admin, key, "203.0.113.80")
        admin.wait_until(ENVOY_PROXY, key, holds("Registered"), CONVERGE_TIMEOUT_S)
        assert drift_of(admin, key) == {}
    settled_objects_of(admin, keys[-1])

    mark = audit.mark()
    rounds = running_operator.metric("operator_app_rounds_total")
    for key in keys:
        admin.patch(ENVOY_PROXY, key, {"metadata": {"labels": {"noise": "one"}}})
    wait_until(
        lambda: running_operator.metric("operator_app_rounds_total") >= rounds + len(keys), what="a round of each"
    )
    time.sleep(SETTLED_S)  # what a round still has to write is written by then
    assert [each for each in audit.writes(OPERATOR_USER, mark) if each.namespace == namespace] == []
