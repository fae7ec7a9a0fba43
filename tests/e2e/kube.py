"""A small synchronous client for any API kind, for tests and for the local control plane.

It owns paths, verbs, errors and waiting. Decoded JSON goes in and comes out; nothing is typed, cached or retried, so
that a test sees what the API server said and nothing else. The operator has its own client and never uses this one.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import httpx2
import yaml
from lightkube.config.client_adapter import Client, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig

from operator_app.api.kinds import ENVOY_PROXY, NAMESPACE, Key, Kind, Object, key_of

POD: Final = Kind("", "v1", "Pod", "pods")
SECRET: Final = Kind("", "v1", "Secret", "secrets")
RESOURCE_QUOTA: Final = Kind("", "v1", "ResourceQuota", "resourcequotas")
SERVICE_ACCOUNT: Final = Kind("", "v1", "ServiceAccount", "serviceaccounts")
NODE: Final = Kind("", "v1", "Node", "nodes", namespaced=False)
REPLICA_SET: Final = Kind("apps", "v1", "ReplicaSet", "replicasets")
CUSTOM_RESOURCE_DEFINITION: Final = Kind(
    "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)

NO_NODE: Final = {"scheduler.alpha.kubernetes.io/node-selector": "tests.operator-app.dev/node=none"}
"""What the admission plugin PodNodeSelector gives to all Pods of a namespace: no node has this label."""

PatchType = Literal["merge", "json", "strategic-merge"]
POLL_INTERVAL_S: Final = 0.05
PATIENCE_S: Final = 60.0
"""How long a test waits for what has to happen. It says nothing about how long that takes: the machine may be busy."""
REQUEST_TIMEOUT_S: Final = 30.0

T = TypeVar("T")


class KubeError(Exception):
    """The API server refused. ``code`` is the HTTP status, ``reason`` and ``status`` are of the ``metav1.Status``."""

    def __init__(self, request: str, code: int, status: Object) -> None:
        self.code = code
        self.reason: str = status.get("reason", "")
        self.status = status
        super().__init__(f"{request}: {code} {self.reason}: {status.get('message', '')}")


class NotThere(KubeError):  # noqa: N818 - often the expected answer
    """404: there is no such object."""


def kubeconfig_context(kubeconfig: Path) -> SingleConfig:
    """The current context of a kubeconfig file. Raises ``ValueError`` when it has none."""
    context = KubeConfig.from_file(kubeconfig).get()
    if context is None:
        msg = f"{kubeconfig} has no current context"
        raise ValueError(msg)
    return context


def wait_until(probe: Callable[[], T | None], timeout_s: float = PATIENCE_S, what: str = "the condition") -> T:
    """Call ``probe`` every ``POLL_INTERVAL_S`` until it returns something truthy, and return that.

    Raises ``TimeoutError`` that shows the last answer, once ``timeout_s`` seconds have passed.
    """
    deadline_mono = time.monotonic() + timeout_s
    while not (answer := probe()):
        if time.monotonic() > deadline_mono:
            msg = f"{what} did not hold within {timeout_s} s; the last answer was {answer!r}"
            raise TimeoutError(msg)
        time.sleep(POLL_INTERVAL_S)
    return answer


class Kube:
    """One identity at one API server; a context manager, safe to share between threads.

    Every method raises ``KubeError`` for an answer of 400 and above, and ``httpx2.TransportError`` where there is none.
    """

    def __init__(self, kubeconfig: Path) -> None:
        # Proxies from the environment would be asked for loopback addresses too.
        parameters = ConnectionParams(timeout=httpx2.Timeout(REQUEST_TIMEOUT_S), trust_env=False)
        self._http = Client(kubeconfig_context(kubeconfig), parameters)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Object | Sequence[Object] | None = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> httpx2.Response:
        """One request to ``path``; the answer is a success."""
        headers = {"Content-Type": content_type} if body is not None else {}
        response = self._http.request(method, path, json=body, params=params, headers=headers)
        if response.is_error:
            try:
                status = response.json()
            except ValueError:
                status = {"message": response.text}
            kind = NotThere if response.status_code == httpx2.codes.NOT_FOUND else KubeError
            raise kind(f"{method} {path}", response.status_code, status)
        return response

    def get(self, kind: Kind, key: Key) -> Object:
        """One object."""
        return self._object("GET", path_of(kind, key))

    def find(self, kind: Kind, key: Key) -> Object | None:
        """One object, or ``None`` where there is none."""
        try:
            return self.get(kind, key)
        except NotThere:
            return None

    def list(self, kind: Kind, namespace: str = "", *, label_selector: str = "") -> list[Object]:
        """All objects of a kind, in one namespace or in all; ``apiVersion`` and ``kind`` are filled in."""
        params = {"labelSelector": label_selector} if label_selector else None
        items: list[Object] = self._object("GET", path_of(kind, Key(namespace, "")), params=params)["items"]
        return [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in items]

    def create(self, kind: Kind, obj: Object) -> Object:
        """Create ``obj``; a name may be left to ``generateName``."""
        namespace = obj["metadata"].get("namespace", "")
        return self._object("POST", path_of(kind, Key(namespace, "")), body=obj)

    def apply(
        self,
        kind: Kind,
        obj: Object,
        *,
        field_manager: str = "test",
        force: bool = False,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Object:
        """Server-side apply; misspelt fields are refused. A dry run stores nothing, and gives what would be stored."""
        params = {"fieldManager": field_manager, "force": str(force).lower(), "fieldValidation": "Strict"}
        if dry_run:
            params["dryRun"] = "All"
        path = path_of(kind, key_of(obj), subresource)
        return self._object("PATCH", path, body=obj, params=params, content_type="application/apply-patch+yaml")

    def patch(
        self,
        kind: Kind,
        key: Key,
        patch: Object | Sequence[Object],
        *,
        patch_type: PatchType = "merge",
        field_manager: str = "test",
        subresource: str = "",
    ) -> Object:
        """Patch one object; a JSON patch is a list, the others are objects."""
        path = path_of(kind, key, subresource)
        params = {"fieldManager": field_manager}
        return self._object(
            "PATCH", path, body=patch, params=params, content_type=f"application/{patch_type}-patch+json"
        )

    def delete(self, kind: Kind, key: Key, *, uid: str | None = None, propagation: str = "Background") -> None:
        """Ask for deletion, which finalizers may delay; with ``uid``, of the object with that UID only."""
        options: Object = {"propagationPolicy": propagation}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        self.request("DELETE", path_of(kind, key), body=options)

    def wait_until(
        self, kind: Kind, key: Key, predicate: Callable[[Object], object], timeout_s: float = PATIENCE_S
    ) -> Object:
        """Wait until the object exists and satisfies ``predicate``; raises ``TimeoutError`` that shows the object."""
        last: Object | None = None

        def probe() -> Object | None:
            nonlocal last
            last = self.find(kind, key)
            return last if last is not None and predicate(last) else None

        try:
            return wait_until(probe, timeout_s)
        except TimeoutError:
            msg = f"{kind} {key} is not as expected after {timeout_s} s: {last}"
            raise TimeoutError(msg) from None

    def create_namespace(self, name: str, *, takes_nodes: bool = False) -> None:
        """Create a namespace, whose Pods no node of the local control plane takes unless it ``takes_nodes``."""
        metadata: Object = {"name": name}
        if not takes_nodes:
            metadata["annotations"] = NO_NODE
        self.create(NAMESPACE, {"apiVersion": NAMESPACE.api_version, "kind": NAMESPACE.kind, "metadata": metadata})

    def wait_gone(self, kind: Kind, key: Key, *, uid: str | None = None, timeout_s: float = PATIENCE_S) -> None:
        """Wait until no such object exists, or only one with another UID."""

        def is_gone() -> bool:
            live = self.find(kind, key)
            return live is None or (uid is not None and live["metadata"]["uid"] != uid)

        wait_until(is_gone, timeout_s, f"{kind} {key} to be gone")

    def _object(self, method: str, path: str, **options: Any) -> Object:  # request() checks them
        answer: Object = self.request(method, path, **options).json()
        return answer


def path_of(kind: Kind, key: Key, subresource: str = "") -> str:
    """The URL path of an object, of a collection (empty name), or of a subresource."""
    root = f"/apis/{kind.api_version}" if kind.group else f"/api/{kind.version}"
    namespace = f"/namespaces/{key.namespace}" if kind.namespaced and key.namespace else ""
    name = f"/{key.name}" if key.name else ""
    return f"{root}{namespace}/{kind.plural}{name}{f'/{subresource}' if subresource else ''}"


def kind_of(obj: Object) -> Kind:
    """The kind of a manifest, for kinds with a regular plural and our own."""
    if obj["kind"] == ENVOY_PROXY.kind:
        return ENVOY_PROXY
    group, _, version = obj["apiVersion"].rpartition("/")
    plural = re.sub("ys$", "ies", obj["kind"].lower() + "s")
    return Kind(group, version, obj["kind"], plural, namespaced="namespace" in obj["metadata"])


def apply_manifest(kube: Kube, file: Path) -> list[Object]:
    """Apply every object of a YAML file, in its order, and return what is stored."""
    manifests = [each for each in yaml.safe_load_all(file.read_text(encoding="utf-8")) if each is not None]
    return [kube.apply(kind_of(each), each, force=True) for each in manifests]
