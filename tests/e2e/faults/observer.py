"""The latest objects of the cluster and their history, by the administrator's watches and not by the operator's.

One thread for each kind lists, watches and keeps the latest objects, grouped by the namespace that they are about,
every UID that an address ever had, and every transition of a status that is wrong by itself. What the objects should
be does not belong here.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

import httpx2

from operator_app.api.kinds import (
    ALL_CHILD_KINDS,
    ENVOY_PROXY,
    HOSTNAME_CLAIM,
    POD,
    PROXY_REGISTRATION,
    Key,
    Kind,
    Object,
    key_of,
)
from tests.e2e.kube import Kube, KubeError, path_of

REGISTRY_KINDS: Final = (PROXY_REGISTRATION, HOSTNAME_CLAIM)
"""Kinds whose objects are not in a tenant's namespace, and about the namespace of the proxy that they name."""

KINDS: Final = (ENVOY_PROXY, *ALL_CHILD_KINDS, *REGISTRY_KINDS, POD)

_STREAM_S: Final = 5
"""How long one watch lasts, and so how long it takes to stop."""

_PAUSE_S: Final = 0.1
"""The pause after a request that failed."""

Address = tuple[Kind, Key]
View = dict[Address, Object]
"""Objects by address; those about one namespace, unless something else is said."""


class Observer:
    """Follows the cluster for as long as the block lasts. Safe for threads; objects must not be changed."""

    def __init__(self, admin: Kube) -> None:
        self._admin = admin
        self._views: defaultdict[str, View] = defaultdict(dict)
        self._uids: defaultdict[Address, dict[str, None]] = defaultdict(dict)
        self._uids_about: defaultdict[tuple[Kind, str], dict[str, None]] = defaultdict(dict)
        self._bad_transitions: defaultdict[str, list[str]] = defaultdict(list)
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._threads = [threading.Thread(target=self._follow, args=(kind,), daemon=True) for kind in KINDS]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopping.set()
        for thread in self._threads:
            thread.join()

    def view(self, namespace: str) -> View:
        """The latest objects about a namespace: those in it, and the records and claims that name it."""
        with self._lock:
            return dict(self._views[namespace])

    def uids(self, kind: Kind, key: Key) -> tuple[str, ...]:
        """The UIDs that an address had, in their order."""
        with self._lock:
            return tuple(self._uids[kind, key])

    def uids_about(self, kind: Kind, namespace: str) -> tuple[str, ...]:
        """The UIDs of all objects of a kind that ever were about a namespace, under whatever name."""
        with self._lock:
            return tuple(self._uids_about[kind, namespace])

    def bad_transitions(self, namespace: str) -> tuple[str, ...]:
        """Every transition of a status in a namespace that is wrong, as sentences."""
        with self._lock:
            return tuple(self._bad_transitions[namespace])

    def _follow(self, kind: Kind) -> None:
        """List, then watch. A new API server refuses lists for a moment (429, its storage is initializing)."""
        version = ""
        while not self._is_stopping.is_set():
            try:
                version = self._watch(kind, version) if version else self._list(kind)
            except (httpx2.TransportError, KubeError):
                self._is_stopping.wait(_PAUSE_S)

    def _list(self, kind: Kind) -> str:
        answer = self._admin.request("GET", path_of(kind, Key("", ""))).json()
        with self._lock:
            for view in self._views.values():
                for address in [each for each in view if each[0] == kind]:
                    del view[address]
            for item in answer["items"]:
                self._put(kind, item)
        version: str = answer["metadata"]["resourceVersion"]
        return version

    def _watch(self, kind: Kind, version: str) -> str:
        """Follow one stream to its end; returns the version to go on from, empty for a new list."""
        params = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(_STREAM_S)}
        with self._admin._http.stream("GET", path_of(kind, Key("", "")), params=params) as response:
            if response.is_error:
                return ""
            for line in response.iter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return ""
                version = event["object"]["metadata"]["resourceVersion"]
                with self._lock:
                    if event["type"] == "DELETED":
                        self._views[about(kind, event["object"])].pop((kind, key_of(event["object"])), None)
                    else:
                        self._put(kind, event["object"])
        return version

    def _put(self, kind: Kind, obj: Object) -> None:
        obj |= {"apiVersion": kind.api_version, "kind": kind.kind}
        view = self._views[about(kind, obj)]
        before = view.get((kind, key_of(obj)))
        if kind == ENVOY_PROXY and before is not None and before["metadata"]["uid"] == obj["metadata"]["uid"]:
            self._bad_transitions[about(kind, obj)] += _bad_transitions(
                before.get("status") or {}, obj.get("status") or {}
            )
        view[kind, key_of(obj)] = obj
        self._uids[kind, key_of(obj)][obj["metadata"]["uid"]] = None
        self._uids_about[kind, about(kind, obj)][obj["metadata"]["uid"]] = None


def _bad_transitions(before: Object, after: Object) -> Iterator[str]:
    """What is wrong about the transition from one status of an object to its next one."""
    generations = [each.get("observedGeneration", 0) for each in (before, after)]
    if generations != sorted(generations):
        yield f"observedGeneration went from {generations[0]} to {generations[1]}"
    earlier = {each["type"]: each for each in before.get("conditions", ())}
    for each in after.get("conditions", ()):
        old = earlier.get(each["type"], each)
        is_flip = old["status"] != each["status"]
        if not is_flip and old["lastTransitionTime"] != each["lastTransitionTime"]:
            yield f"{each['type']} has another lastTransitionTime without another status"


def about(kind: Kind, obj: Object) -> str:
    """The namespace that an object is about."""
    place = obj["spec"].get("proxy", {}) if kind in REGISTRY_KINDS else obj["metadata"]
    namespace: str = place["namespace"]
    return namespace
