"""Pods as the API server gives them, for the tests of ``operator_app.dataplane``."""

from typing import Any

from operator_app.api.kinds import Object


def pod(
    name: str = "web-1",
    *,
    ip: str = "10.0.0.1",
    ready: str = "True",
    revision: str = "r",
    configuration: str = "",
    **metadata: Any,
) -> Object:
    """A Pod of the proxy ``web`` in ``team-a``."""
    annotations = {"edge.operator-app.dev/revision": revision}
    if configuration:
        annotations["edge.operator-app.dev/configuration"] = configuration
    labels = {"app.kubernetes.io/instance": "web", "edge.operator-app.dev/owner-uid": "proxy-uid"}
    given: Object = {
        "namespace": "team-a",
        "name": name,
        "uid": name,
        "resourceVersion": "7",
        "labels": labels | {"app.kubernetes.io/managed-by": "operator-app"},
        "annotations": annotations,
    }
    conditions = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": ready}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": given | metadata,
        "spec": {"containers": [{"name": "envoy"}]},
        "status": {"podIP": ip, "conditions": conditions},
    }
