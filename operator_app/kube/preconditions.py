"""Metadata that ties a write to one object, or to one version of it. Pure.

The API server compares ``metadata.uid`` and ``metadata.resourceVersion`` of an apply, a replace or a patch with the
stored object, and answers 409 (a version that has moved on, an object that is gone) or 422 (another object has the
name). A status apply compares the resourceVersion only. ``tests/e2e/api_server/test_client_contract.py`` holds it to
that.
"""

from operator_app.api.kinds import Object


def identity(obj: Object) -> Object:
    """The metadata that names exactly this object: name, namespace and UID, no field of it."""
    metadata = obj["metadata"]
    return {name: metadata[name] for name in ("name", "namespace", "uid") if name in metadata}


def pinned_uid(live: Object) -> dict[str, str]:
    """Makes a write fail on any other object, whatever its name."""
    return {"uid": live["metadata"]["uid"]}


def pinned_version(live: Object) -> dict[str, str]:
    """Makes a write fail on anything but this version of this object.

    So a write that is sent late, by a process that was suspended in between, can't undo what came after: neither
    another replica's work nor a newer declaration's.
    """
    return {name: live["metadata"][name] for name in ("uid", "resourceVersion")}
