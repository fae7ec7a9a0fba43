"""The Pods of a proxy, as far as asking and touching them needs. Pure."""

from dataclasses import dataclass

from operator_app.api.kinds import ANNOTATION_CONFIGURATION, ANNOTATION_REVISION, Key, Object, key_of
from operator_app.pods import is_ready


@dataclass(frozen=True, slots=True)
class Pod:
    """One Pod. ``revision`` and ``configuration`` are its annotations, empty where it has none."""

    key: Key
    uid: str
    ip: str
    revision: str
    configuration: str
    is_serving: bool
    """Whether it is ready and is not being deleted, so that it gets traffic."""


def pod_of(obj: Object) -> Pod:
    """A stored Pod, whole or as ``pods.kept_of_pod`` keeps it."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    annotations = metadata.get("annotations") or {}
    ip = status.get("podIP") or ""
    return Pod(
        key=key_of(obj),
        uid=metadata["uid"],
        ip=ip,
        revision=annotations.get(ANNOTATION_REVISION, ""),
        configuration=annotations.get(ANNOTATION_CONFIGURATION, ""),
        is_serving=is_ready(obj) and bool(ip) and "deletionTimestamp" not in metadata,
    )
