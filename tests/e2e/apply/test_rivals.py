"""Every rival is met ever more slowly: whatever it writes, and whatever it is called."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import DEPLOYMENT, ENVOY_PROXY, FIELD_MANAGER, FINALIZER, SERVICE, Key
from operator_app.desired import child_key
from operator_app.ssa.contention import ContentionTimes
from tests.e2e.controlplane import AuditLog, Cluster
from tests.e2e.kube import Kube, KubeError, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, a_proxy, condition, wait_reconciled

RIVALRY_S: Final = 12.0
"""How long a rival writes. Without a bound it would get several answers a second."""

BOUND: Final = ContentionTimes().bound
"""Restorations of one object in any 60 s, so in ``RIVALRY_S``, too: 17 with the default settings."""

AT_MOST: Final = 3 * BOUND
"""Write requests of one object in that time: a refused apply, a patch and an apply for each restoration."""


@contextmanager
def repeating(write: Callable[[], object], period_s: float = 0.2) -> Iterator[list[float]]:
    """A thread that calls ``write`` until the block ends; yields the moments at which it did."""
    is_over, done = threading.Event(), list[float]()

    def run() -> None:
        while not is_over.wait(period_s):
            try:
                write()
                done.append(time.monotonic())
            except KubeError as error:
                if error.code not in {404, 409, 422}:
                    raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield done
    finally:
        is_over.set()
        thread.join()


def other_status(admin: Kube, key: Key) -> None:
    """Write another ``Ready`` than the operator's into the list of conditions."""
    conditions = admin.get(ENVOY_PROXY, key)["status"]["conditions"]
    theirs = [each | ({"reason": "Rival", "message": "mine"} if each["type"] == "Ready" else {}) for each in conditions]
    admin.patch(ENVOY_PROXY, key, {"status": {"conditions": theirs}}, subresource="status", field_manager="rival")


def other_status_by_our_name(admin: Kube, key: Key) -> None:
    """Apply another ``Ready`` as the operator's own field manager."""
    live = admin.get(ENVOY_PROXY, key)
    ready = condition(live, "Ready") | {"reason": "Rival", "message": "mine"}
    body = {"metadata": {"name": key.name, "namespace": key.namespace}, "status": {"conditions": [ready]}}
    typed = {"apiVersion": live["apiVersion"], "kind": live["kind"]} | body
    admin.apply(ENVOY_PROXY, typed, field_manager=FIELD_MANAGER, force=True, subresource="status")


def without_finalizer(admin: Kube, key: Key) -> None:
    """Remove the operator's finalizer."""
    if FINALIZER in admin.get(ENVOY_PROXY, key)["metadata"].get("finalizers", ()):
        admin.patch(ENVOY_PROXY, key, {"metadata": {"finalizers": None}}, field_manager="rival")


def other_service_by_our_name(admin: Kube, key: Key) -> None:
    """Apply the Service with another selector, and without its target port, as the operator's own field manager."""
    live = admin.get(SERVICE, child_key(key))
    kept = ("name", "namespace", "labels", "ownerReferences")
    body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {name: live["metadata"][name] for name in kept},
        "spec": {"selector": {"app": "rival"}, "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]},
    }
    admin.apply(SERVICE, body, field_manager=FIELD_MANAGER, force=True)


def wiped_ownership(admin: Kube, key: Key) -> None:
    """Wipe who owns what in the Service."""
    admin.patch(SERVICE, child_key(key), {"metadata": {"managedFields": [{}]}})


def another_field_each_time() -> Callable[[Kube, Key], None]:
    """Take a field of the Deployment, another one each time."""
    fields = [
        ("/spec/replicas", 3),
        ("/spec/strategy/rollingUpdate/maxSurge", 1),
        ("/spec/template/spec/terminationGracePeriodSeconds", 7),
        ("/spec/template/spec/enableServiceLinks", True),
        ("/spec/template/spec/containers/0/image", "example.com/envoy:rival"),
        ("/spec/template/spec/containers/0/readinessProbe/periodSeconds", 9),
        ("/spec/template/spec/containers/0/startupProbe/periodSeconds", 9),
        ("/spec/template/spec/securityContext/runAsGroup", 7),
    ]
    turn = iter(range(10_000))

    def write(admin: Kube, key: Key) -> None:
        path, value = fields[next(turn) % len(fields)]
        patch = [{"op": "replace", "path": path, "value": value}]
        admin.patch(DEPLOYMENT, child_key(key), patch, patch_type="json", field_manager="rival")

    return write


RIVALS: Final = {
    "status": (other_status, "envoyproxies", "status"),
    "status by our own name": (other_status_by_our_name, "envoyproxies", "status"),
    "finalizer": (without_finalizer, "envoyproxies", ""),
    "child by our own name": (other_service_by_our_name, "services", ""),
    "field ownership": (wiped_ownership, "services", ""),
    "one field after the other": (another_field_each_time(), "deployments", ""),
}


@pytest.mark.parametrize("name", RIVALS)
def test_the_answers_to_a_rival_are_bounded(
    admin: Kube, audit: AuditLog, key: Key, operator: OperatorProcess, name: str
) -> None:
    """A rival that writes five times a second is told of in the status, and gets no more than a few answers."""
    operator.start()
    admin.create(ENVOY_PROXY, a_proxy(key.namespace, key.name))
    wait_reconciled(admin, key)
    write, resource, subresource = RIVALS[name]
    mark = audit.mark()

    with repeating(lambda: write(admin, key)) as written:
        time.sleep(RIVALRY_S)

    answers = [
        each
        for each in audit.writes(OPERATOR_USER, mark)
        if (each.namespace, each.resource, each.subresource) == (key.namespace, resource, subresource)
    ]
    assert len(written) > BOUND, "it was a rival"
    assert 3 <= len(answers) <= AT_MOST
    successes = [each for each in answers if each.code < 400]
    assert len(successes) <= AT_MOST
    admin.wait_until(ENVOY_PROXY, key, lambda live: condition(live, "Contended").get("status") == "True")


def test_two_installations_notice_each_other(
    admin: Kube, control_plane: Cluster, namespace: str, tmp_path: Path
) -> None:
    """Two operators with other settings over one namespace say so in the status, and hardly write any more."""
    key = Key(namespace, "web")
    with ExitStack() as ends:
        for name, image in (("edge-a", "example.com/envoy:a"), ("edge-b", "example.com/envoy:b")):
            own = f"{name}-{namespace[-8:]}"
            admin.create_namespace(own)
            process = OperatorProcess(control_plane.kubeconfig, tmp_path / f"{name}.log")
            ends.callback(process.stop)
            process.start(f"--namespace={own}", f"--namespaces={namespace}", f"--image={image}")
        admin.create(ENVOY_PROXY, a_proxy(namespace))
        deployment = wait_until(lambda: admin.find(DEPLOYMENT, child_key(key)), what="the Deployment")
        told = admin.wait_until(
            ENVOY_PROXY,
            key,
            lambda live: "the operator in namespace edge-" in condition(live, "Contended").get("message", ""),
        )
        assert "--namespaces" in condition(told, "Contended")["message"]
        time.sleep(RIVALRY_S)
        after = admin.get(DEPLOYMENT, child_key(key))
    assert after["metadata"]["uid"] == deployment["metadata"]["uid"]
    assert after["metadata"]["generation"] <= 2 * BOUND
