"""What keeps the containers of a proxy's Pods from serving, in the words of the kubelet. Pure.

A Deployment says how many Pods are missing and never why: that an image can't be pulled, or that a container needs more
memory than its limit, stands in the status of the Pods alone. What is said here depends on nothing that changes while
the same is wrong: no count of attempts, no time, no name of one Pod among many. A Pod that waits for a node is no
trouble: where nodes come when they are needed, that is how they are asked for.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from operator_app.api.kinds import (
    ANNOTATION_CONFIGURATION,
    ANNOTATION_REVISION,
    LABEL_INSTANCE,
    LABEL_OWNER_UID,
    Key,
    Object,
)

OOM_KILLED: Final = "OOMKilled"
IMAGE_PULL: Final = "ImagePullBackOff"
CRASHES: Final = "CrashLoopBackOff"

_NOT_PULLED: Final = frozenset({"ErrImagePull", IMAGE_PULL, "InvalidImageName", "ErrImageNeverPull"})
"""Reasons of a waiting container; the first two take turns for as long as the image can't be pulled."""

_NOT_STARTED: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


_KEPT_METADATA: Final = ("namespace", "name", "uid", "resourceVersion", "deletionTimestamp")
_KEPT_ANNOTATIONS: Final = (ANNOTATION_REVISION, ANNOTATION_CONFIGURATION)
_KEPT_CONTAINER: Final = ("name", "image", "state", "lastState")


@dataclass(frozen=True, slots=True)
class PodTrouble:
    """Why some Pods of a proxy do not serve: a reason for a condition, and a sentence."""

    reason: str
    message: str


def owner_uid(pod: Object) -> str | None:
    """The UID of the proxy that a Pod was made for, by its label; the index of Pods."""
    uid: str | None = (pod["metadata"].get("labels") or {}).get(LABEL_OWNER_UID)
    return uid


def proxy_of_pod(pod: Object) -> Key | None:
    """The proxy that a Pod belongs to, by its labels; None for a Pod without them."""
    metadata = pod["metadata"]
    name = (metadata.get("labels") or {}).get(LABEL_INSTANCE)
    return Key(metadata["namespace"], name) if name else None


def kept_of_pod(pod: Object) -> Object:
    """What this module and ``dataplane`` read of a Pod, and by what it is found: about a tenth of it."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    return {
        "apiVersion": pod.get("apiVersion"),
        "kind": pod.get("kind"),
        "metadata": {name: metadata[name] for name in _KEPT_METADATA if name in metadata}
        | {"labels": {name: labels[name] for name in (LABEL_INSTANCE, LABEL_OWNER_UID) if name in labels}}
        | {"annotations": {name: annotations[name] for name in _KEPT_ANNOTATIONS if name in annotations}},
        "spec": {
            "containers": [
                {"name": each["name"], "resources": {"limits": _memory(each)}} for each in pod["spec"]["containers"]
            ],
            "nodeName": pod["spec"].get("nodeName") or "",
        },
        "status": {
            "podIP": status.get("podIP") or "",
            "conditions": [each for each in status.get("conditions") or () if each["type"] == "Ready"],
            "containerStatuses": [
                {name: each[name] for name in _KEPT_CONTAINER if name in each}
                for each in status.get("containerStatuses") or ()
            ],
        },
    }


def _memory(container: Object) -> Object:
    limits = (container.get("resources") or {}).get("limits") or {}
    return {name: limits[name] for name in ("memory",) if name in limits}


def trouble(pods: Iterable[Object]) -> PodTrouble | None:
    """What is wrong with the first of ``pods`` that is not ready and says why, by name; None where none says so.

    Pods that are being deleted are left out. A Pod that merely starts says nothing.
    """
    waiting = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and not is_ready(pod)]
    for pod in sorted(waiting, key=lambda each: str(each["metadata"]["name"])):
        found = next(_troubles(pod), None)
        if found is not None:
            return found
    return None


def _troubles(pod: Object) -> Iterator[PodTrouble]:
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        yield from _of_container(container, _limits(pod, container["name"]))


def _of_container(container: Object, limits: Object) -> Iterator[PodTrouble]:
    name, image = container["name"], container.get("image", "")
    state = container.get("state") or {}
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason", "")
    if reason in _NOT_PULLED:
        kept = reason if reason not in {"ErrImagePull", IMAGE_PULL} else IMAGE_PULL
        yield PodTrouble(kept, f"the image {image} of container {name} can't be pulled")
    elif reason in _NOT_STARTED:
        yield PodTrouble(reason, f"container {name} can't be started: {waiting.get('message', '')}")
    elif ended.get("reason") == OOM_KILLED:
        limit = limits.get("memory")
        than = f"its limit of {limit}" if limit else "there is"
        yield PodTrouble(OOM_KILLED, f"container {name} was killed, because it needs more memory than {than}")
    elif reason == CRASHES:
        yield PodTrouble(CRASHES, f"container {name} ends again and again, with exit code {ended.get('exitCode')}")


def _limits(pod: Object, container: str) -> Object:
    """The limits of a container, by its name."""
    for each in pod["spec"]["containers"]:
        if each["name"] == container:
            limits: Object = (each.get("resources") or {}).get("limits") or {}
            return limits
    return {}


def is_ready(pod: Object) -> bool:
    """Whether a Pod has the condition Ready."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
