"""The operator with ServiceAccount tokens of the shortest life that Kubernetes allows, while somebody edits.

600 s is what the API server accepts at least, of a projected volume and of a TokenRequest alike
(https://kubernetes.io/docs/reference/kubernetes-api/authentication-resources/token-request-v1/). The kubelet writes a
new token once 80 % of that have passed. A token that a Pod mounts without a volume of its own would be of no use here:
it is extended to a year (``--service-account-extend-token-expiration``), unless it is asked for with another life.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Final, Self

from operator_app.api.kinds import DEPLOYMENT, ENVOY_PROXY, NAMESPACE, Key, Object
from tests.cluster.installed import OPERATOR, READY_TIMEOUT_S, Installed, available
from tests.e2e.controlplane import Report
from tests.e2e.failover import Load
from tests.e2e.proxies import a_proxy, wait_reconciled

LIFETIME_S: Final = 600
MARGIN_S: Final = 45
"""The kubelet looks every minute or so, and a connection that was made with the old token may be told so late."""

EDIT_INTERVAL_S: Final = 2.0
MOUNTED_AT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"


class Rotation:
    """From entering on, the operator's Pods have such tokens and an EnvoyProxy is edited every two seconds."""

    def __init__(self, installed: Installed, report: Report) -> None:
        self._installed = installed
        self._report = report
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            key = resources.enter_context(self._edited_proxy())
            template = {"spec": _pod_with_short_tokens()}
            patch = {"spec": {"template": template}}
            admin = self._installed.admin
            admin.patch(DEPLOYMENT, OPERATOR, patch, patch_type="strategic-merge")
            admin.wait_until(DEPLOYMENT, OPERATOR, available(2), READY_TIMEOUT_S)
            self.pods = [pod["metadata"]["name"] for pod in self._installed.pods()]
            self.since = datetime.now(UTC)
            self._report(f"tokens: each lasts {LIFETIME_S} s from now on")
            self.load = Load(admin, [key], EDIT_INTERVAL_S)
            resources.enter_context(self.load.running())
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @property
    def longest_life(self) -> timedelta:
        """No token that was issued before ``since`` is valid this long after it."""
        return timedelta(seconds=LIFETIME_S + MARGIN_S)

    def wait_for_the_end_of_the_first_tokens(self) -> None:
        """Return once every token that the Pods began with has expired."""
        left = self.since + self.longest_life - datetime.now(UTC)
        if left > timedelta():
            self._report(f"tokens: waiting for {left.total_seconds():.0f} s until the first ones have expired")
            time.sleep(left.total_seconds())

    def stop_editing(self) -> None:
        """End the edits, and wait until the last one is confirmed."""
        self.load.stop()
        for key in self.load.keys:
            wait_reconciled(self._installed.admin, key, READY_TIMEOUT_S)

    @contextmanager
    def _edited_proxy(self) -> Iterator[Key]:
        admin, name = self._installed.admin, f"rotation-{uuid.uuid4().hex[:8]}"
        admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        admin.create(ENVOY_PROXY, a_proxy(name, replicas=0))
        try:
            wait_reconciled(admin, Key(name, "web"), READY_TIMEOUT_S)
            yield Key(name, "web")
        finally:
            admin.delete(NAMESPACE, Key("", name))


def _pod_with_short_tokens() -> Object:
    """What changes in the operator's Pod: the token's volume, as the API server would add it, but for its life."""
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": LIFETIME_S}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]
    mount = {"name": "token", "mountPath": MOUNTED_AT, "readOnly": True}
    return {
        "automountServiceAccountToken": False,
        "containers": [{"name": "operator", "volumeMounts": [mount]}],
        "volumes": [{"name": "token", "projected": {"sources": sources}}],
    }
