"""EnvoyProxies for tests: making them, waiting for them, and looking at everything that belongs to one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from operator_app.desired import child_key
from operator_app.kinds import CHILD_KINDS, ENVOY_PROXY, PROXY_REGISTRATION, Key, Kind, Object
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OPERATOR_NAMESPACE

CONVERGE_TIMEOUT_S = 30.0


def a_proxy(namespace: str, name: str = "web", **spec: Any) -> Object:
    """The smallest useful EnvoyProxy; keywords replace fields of its spec."""
    return {
        "apiVersion": ENVOY_PROXY.api_version,
        "kind": ENVOY_PROXY.kind,
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "listeners": [{"name": "http", "port": 80, "routes": [{"backend": "app"}]}],
            "backends": [{"name": "app", "endpoints": [{"host": "app.example.com", "port": 8080}]}],
        }
        | spec,
    }


def condition(proxy: Object, kind: str) -> Object:
    """One condition of a proxy's status; an empty object where there is none."""
    conditions = (proxy.get("status") or {}).get("conditions") or ()
    found: Object = next((each for each in conditions if each["type"] == kind), {})
    return found


def holds(kind: str, *, generation: int | None = None) -> Callable[[Object], bool]:
    """A predicate: the condition is True, and for that generation (by default for the object's own)."""

    def predicate(proxy: Object) -> bool:
        wanted = proxy["metadata"]["generation"] if generation is None else generation
        found = condition(proxy, kind)
        return found.get("status") == "True" and found["observedGeneration"] >= wanted

    return predicate


def is_refused(kind: str, reason: str) -> Callable[[Object], bool]:
    """A predicate: the condition is False for that reason."""
    return lambda proxy: (
        (condition(proxy, kind).get("status"), condition(proxy, kind).get("reason"))
        == (
            "False",
            reason,
        )
    )


def wait_reconciled(admin: Kube, key: Key, timeout_s: float = CONVERGE_TIMEOUT_S) -> Object:
    """The proxy once every declared field of every child was verified for its generation."""
    return admin.wait_until(ENVOY_PROXY, key, holds("Reconciled"), timeout_s)


def wait_ready(admin: Kube, key: Key, timeout_s: float = CONVERGE_TIMEOUT_S) -> Object:
    """The proxy once it is ready for its generation, which takes a node."""
    return admin.wait_until(ENVOY_PROXY, key, holds("Ready"), timeout_s)


@dataclass(frozen=True, slots=True)
class Family:
    """A proxy with everything that belongs to it, as stored at one moment."""

    proxy: Object
    children: dict[Kind, Object]
    record: Object

    @property
    def uids(self) -> dict[str, str]:
        """UID of the proxy, of each child and of the record, by kind."""
        everything = [self.proxy, *self.children.values(), self.record]
        return {each["kind"]: each["metadata"]["uid"] for each in everything}

    @property
    def versions(self) -> dict[str, str]:
        """ResourceVersion by kind."""
        everything = [self.proxy, *self.children.values(), self.record]
        return {each["kind"]: each["metadata"]["resourceVersion"] for each in everything}


def record_key(proxy: Object) -> Key:
    """The address of a proxy's record in the in-cluster registry."""
    return Key(OPERATOR_NAMESPACE, f"proxy-{proxy['metadata']['uid']}")


def family(admin: Kube, key: Key) -> Family:
    """Everything that belongs to a proxy. Raises ``KubeError`` where a part is missing."""
    proxy = admin.get(ENVOY_PROXY, key)
    children = {kind: admin.get(kind, child_key(key)) for kind in CHILD_KINDS}
    return Family(proxy, children, admin.get(PROXY_REGISTRATION, record_key(proxy)))


def assert_one_of_everything(admin: Kube, key: Key) -> Family:
    """The family, after checking that nothing of it exists twice or is left from another life."""
    found = family(admin, key)
    uid = found.proxy["metadata"]["uid"]
    for kind, child in found.children.items():
        owners = [each["uid"] for each in child["metadata"]["ownerReferences"]]
        assert owners == [uid], f"{kind} is owned by {owners}, the proxy is {uid}"
        labelled = admin.list(kind, key.namespace, label_selector="app.kubernetes.io/managed-by=operator-app")
        mine = [each["metadata"]["name"] for each in labelled if instance(each) == key.name]
        assert mine == [child_key(key).name], f"{kind}: {mine}"
    records = [
        each
        for each in admin.list(PROXY_REGISTRATION, OPERATOR_NAMESPACE)
        if (each["spec"]["proxy"]["namespace"], each["spec"]["proxy"]["name"]) == key
    ]
    assert [each["spec"]["proxy"]["uid"] for each in records] == [uid]
    return found


def instance(child: Object) -> str | None:
    """Which proxy a child says it belongs to."""
    name: str | None = child["metadata"].get("labels", {}).get("app.kubernetes.io/instance")
    return name


def wait_all_gone(admin: Kube, proxy: Object, timeout_s: float = CONVERGE_TIMEOUT_S) -> None:
    """Wait until the proxy, its children and its record are gone."""
    key = Key(proxy["metadata"]["namespace"], proxy["metadata"]["name"])
    uid = proxy["metadata"]["uid"]
    admin.wait_gone(ENVOY_PROXY, key, uid=uid, timeout_s=timeout_s)
    wait_until(lambda: admin.find(PROXY_REGISTRATION, record_key(proxy)) is None, timeout_s, "the record to be gone")
