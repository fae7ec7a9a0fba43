"""What happens to Pods of a proxy, and what the proxy's status says of it within seconds."""

import time
import uuid
from collections.abc import Iterator
from typing import Any, Final

import pytest

from operator_app.api.kinds import CONFIG_MAP, ENVOY_PROXY, NAMESPACE, Key, Object
from tests.cluster.installed import READY_TIMEOUT_S, Installed
from tests.e2e.controlplane import Report
from tests.e2e.kube import POD, SERVICE_ACCOUNT, wait_until
from tests.e2e.proxies import a_proxy, condition, holds

SOON_S: Final = 5.0
"""From what a Pod's status says until the proxy's says it."""

TROUBLE_TIMEOUT_S: Final = 60.0

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("rotation")]


@pytest.fixture
def namespace(installed: Installed) -> Iterator[str]:
    """A namespace in which Pods may be created."""
    name = f"pods-{uuid.uuid4().hex[:8]}"
    installed.admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    installed.admin.wait_until(SERVICE_ACCOUNT, Key(name, "default"), bool)
    yield name
    installed.admin.delete(NAMESPACE, Key("", name))


def pod_says(installed: Installed, namespace: str, *reasons: str) -> str:
    """Wait until the status of a container of some Pod has one of these reasons, and return it."""

    def said() -> str:
        for pod in installed.admin.list(POD, namespace):
            for container in pod["status"].get("containerStatuses", ()):
                states = (container.get("state") or {}, container.get("lastState") or {})
                for reason in (each.get("reason", "") for state in states for each in state.values()):
                    if reason in reasons:
                        return str(reason)
        return ""

    return wait_until(said, TROUBLE_TIMEOUT_S, f"a Pod that says {', '.join(reasons)}")


@pytest.mark.parametrize(
    ("spec", "in_pod", "in_status"),
    [
        pytest.param(
            {"image": "image.invalid/envoy:v1"}, ("ErrImagePull", "ImagePullBackOff"), "ImagePullBackOff", id="image"
        ),
        pytest.param({"resources": {"limits": {"memory": "12Mi"}}}, ("OOMKilled",), "OOMKilled", id="memory"),
    ],
)
def test_the_status_says_why_pods_do_not_serve(
    installed: Installed, namespace: str, report: Report, spec: Object, in_pod: tuple[str, ...], in_status: str
) -> None:
    """An image that can't be pulled, and a limit that is too low: ``Ready`` says so within 5 s of the Pod's status.

    What served before serves on, and once the spec is right the proxy is ready again.
    """
    key = Key(namespace, "web")
    good = dict.fromkeys(spec)
    installed.admin.create(ENVOY_PROXY, a_proxy(namespace, replicas=1))
    installed.admin.wait_until(ENVOY_PROXY, key, holds("Ready"), READY_TIMEOUT_S)

    installed.admin.patch(ENVOY_PROXY, key, {"spec": spec})
    reason = pod_says(installed, namespace, *in_pod)
    said_mono = time.monotonic()

    def is_told(proxy: Object) -> bool:
        ready = condition(proxy, "Ready")
        return (ready.get("status"), ready.get("reason")) == ("False", in_status)

    told = installed.admin.wait_until(ENVOY_PROXY, key, is_told, TROUBLE_TIMEOUT_S)
    took_s = time.monotonic() - said_mono
    report(f"pods: {reason} is in the proxy's status after {took_s:.2f} s: {condition(told, 'Ready')['message']}")
    assert took_s < SOON_S
    assert condition(told, "Available")["status"] == "True", "the Pod of before serves on"

    installed.admin.patch(ENVOY_PROXY, key, {"spec": good})
    installed.admin.wait_until(ENVOY_PROXY, key, holds("Ready"), READY_TIMEOUT_S)


WATCHER: Final = """
import pathlib, time
seen = None
while True:
    text = pathlib.Path('/watched/key').read_text()
    if text != seen:
        print(time.time(), text, flush=True)
        seen = text
    time.sleep(0.02)
"""
CHANGE_TIMEOUT_S: Final = 150.0


class Watcher:
    """A Pod that prints what a mounted ConfigMap holds, with the time, whenever that changes."""

    def __init__(self, installed: Installed, namespace: str) -> None:
        self._installed = installed
        self._at = {"namespace": namespace, "name": "watched"}
        self._key = Key(namespace, "watched")
        self._set("before")
        image = installed.pods()[0]["spec"]["containers"][0]["image"]
        container = {
            "name": "main",
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["python", "-c", WATCHER],
            "volumeMounts": [{"name": "watched", "mountPath": "/watched", "readOnly": True}],
        }
        spec = {
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": [{"name": "watched", "configMap": {"name": "watched"}}],
        }
        installed.admin.create(POD, {"apiVersion": "v1", "kind": "Pod", "metadata": self._at, "spec": spec})
        self.arrival("before")

    def change(self, text: str, *, touching: bool = False) -> float:
        """Change the ConfigMap, and touch the Pod directly after; the time of the change, in seconds of the epoch."""
        changed_at = time.time()
        self._set(text)
        if touching:
            annotations = {"metadata": {"annotations": {"example.com/touched": text}}}
            self._installed.admin.patch(POD, self._key, annotations)
        return changed_at

    def arrival(self, text: str) -> float:
        """When the container first saw this text, in seconds of the epoch."""

        def seen() -> float | None:
            done = self._installed.tried("-n", self._key.namespace, "logs", self._key.name)
            found = (line.split(" ") for line in done.stdout.splitlines() if done.returncode == 0)
            return next((float(at) for at, what in found if what == text), None)

        return wait_until(seen, CHANGE_TIMEOUT_S, f"{text!r} in the container")

    def _set(self, text: str) -> None:
        config: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": self._at, "data": {"key": text}}
        self._installed.admin.apply(CONFIG_MAP, config, force=True)


def test_a_changed_config_map_arrives_soon_where_the_pod_is_touched(
    installed: Installed, namespace: str, report: Report
) -> None:
    """The kubelet writes a changed ConfigMap within about a minute, and at once where the Pod changes as well."""
    watcher = Watcher(installed, namespace)
    waits_s = {}
    for text, is_touched in (("touched", True), ("alone", False)):
        changed_at = watcher.change(text, touching=is_touched)
        waits_s[text] = watcher.arrival(text) - changed_at
    report(f"pods: a changed ConfigMap arrives after {waits_s['alone']:.0f} s, touched {waits_s['touched']:.2f} s")
    assert waits_s["touched"] < SOON_S
    assert waits_s["alone"] < CHANGE_TIMEOUT_S
