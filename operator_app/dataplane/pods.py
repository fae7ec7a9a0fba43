"""The Pods of a proxy, as far as asking and touching them needs. Pure."""

from dataclasses import dataclass

from operator_app.api.kinds import (
    ANNOTATION_CONFIGURATION,
    ANNOTATION_REVISION,
    LABEL_INSTANCE,
    LABEL_OWNER_UID,
    Key,
    Object,
    key_of,
)


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
    """A stored Pod, whole or as ``kept_of_pod`` keeps it."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    annotations = metadata.get("annotations") or {}
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", ()))
    ip = status.get("podIP") or ""
    return Pod(
        key=key_of(obj),
        uid=metadata["uid"],
        ip=ip,
        revision=annotations.get(ANNOTATION_REVISION, ""),
        configuration=annotations.get(ANNOTATION_CONFIGURATION, ""),
        is_serving=is_ready and bool(ip) and "deletionTimestamp" not in metadata,
    )


def owner_uid(obj: Object) -> str | None:
    """The UID of the proxy that a Pod belongs to by its label, by which Pods are indexed."""
    uid: str | None = (obj["metadata"].get("labels") or {}).get(LABEL_OWNER_UID)
    return uid


def owner(obj: Object) -> Key | None:
    """The key of the proxy that a Pod belongs to by its labels."""
    name: str | None = (obj["metadata"].get("labels") or {}).get(LABEL_INSTANCE)
    return Key(obj["metadata"]["namespace"], name) if name else None


def kept_of_pod(obj: Object) -> Object:
    """What the store keeps of a Pod: some hundred bytes of several thousand."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    kept = {
        name: metadata[name]
        for name in ("name", "namespace", "uid", "resourceVersion", "deletionTimestamp")
        if name in metadata
    }
    for name, keys in (
        ("labels", (LABEL_INSTANCE, LABEL_OWNER_UID)),
        ("annotations", (ANNOTATION_REVISION, ANNOTATION_CONFIGURATION)),
    ):
        given = metadata.get(name) or {}
        kept[name] = {key: given[key] for key in keys if key in given}
    ready = [
        {"type": "Ready", "status": each["status"]}
        for each in status.get("conditions") or ()
        if each["type"] == "Ready"
    ]
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "metadata": kept,
        "status": {"podIP": status.get("podIP") or "", "conditions": ready},
    }
