"""Values that a Pod's spec takes from elsewhere: its own fields, ConfigMaps and Secrets. Pure.

``resourceFieldRef`` and ``fileKeyRef`` are not known here and raise :class:`UnsupportedError`.
"""

import base64
import re
from collections.abc import Callable
from typing import Any, Final

from operator_app.api.kinds import Object

Source = Callable[[str, str], Object | None]
"""``(kind, name)`` to the ConfigMap or Secret of that name in the Pod's namespace, or None."""

_KEYED_FIELD: Final = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")
_REFERENCE: Final = re.compile(r"\$\$|\$\(([-._a-zA-Z0-9]+)\)")


class MissingError(Exception):
    """An object or a key that the Pod needs does not exist yet."""


class UnsupportedError(Exception):
    """The Pod asks for something that the stand-in node does not do."""


def data_of(obj: Object) -> dict[str, bytes]:
    """The decoded contents of a ConfigMap or Secret."""
    if obj["kind"] == "Secret":
        return {key: base64.b64decode(value) for key, value in (obj.get("data") or {}).items()}
    text = {key: value.encode() for key, value in (obj.get("data") or {}).items()}
    binary = {key: base64.b64decode(value) for key, value in (obj.get("binaryData") or {}).items()}
    return text | binary


def source_data(source: Source, kind: str, name: str, *, optional: bool) -> dict[str, bytes] | None:
    """The contents of one ConfigMap or Secret; None if it is absent and may be. Raises MissingError if it may not."""
    obj = source(kind, name)
    if obj is not None:
        return data_of(obj)
    if optional:
        return None
    raise MissingError(f'{kind.lower()} "{name}" not found')


def field_value(pod: Object, path: str, pod_ip: str, host_ip: str) -> str:
    """The value of a ``fieldRef``. Absent labels and annotations are empty, as in the kubelet."""
    if match := _KEYED_FIELD.match(path):
        return str((pod["metadata"].get(match[1]) or {}).get(match[2], ""))
    values: dict[str, Any] = {
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"]["namespace"],
        "metadata.uid": pod["metadata"]["uid"],
        "spec.nodeName": pod["spec"]["nodeName"],
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", ""),
        "status.podIP": pod_ip,
        "status.podIPs": pod_ip,
        "status.hostIP": host_ip,
        "status.hostIPs": host_ip,
    }
    if path not in values:
        raise UnsupportedError(f"fieldRef {path} is not known to the stand-in node")
    return str(values[path])


def environment(container: Object, pod: Object, source: Source, pod_ip: str, host_ip: str) -> dict[str, str]:
    """The container's declared environment. Raises MissingError and UnsupportedError."""
    result: dict[str, str] = {}
    for origin in container.get("envFrom") or []:
        for kind, field in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if reference := origin.get(field):
                optional = bool(reference.get("optional"))
                data = source_data(source, kind, reference["name"], optional=optional) or {}
                result |= {origin.get("prefix", "") + key: value.decode() for key, value in data.items()}
    for variable in container.get("env") or []:
        origin = variable.get("valueFrom")
        if origin is None:
            result[variable["name"]] = expanded(variable.get("value", ""), result)
        elif field_ref := origin.get("fieldRef"):
            result[variable["name"]] = field_value(pod, field_ref["fieldPath"], pod_ip, host_ip)
        elif reference := origin.get("configMapKeyRef") or origin.get("secretKeyRef"):
            kind = "ConfigMap" if "configMapKeyRef" in origin else "Secret"
            optional = bool(reference.get("optional"))
            data = source_data(source, kind, reference["name"], optional=optional) or {}
            if reference["key"] in data:
                result[variable["name"]] = data[reference["key"]].decode()
            elif not optional:
                raise MissingError(f"couldn't find key {reference['key']} in {kind} {reference['name']}")
        else:
            raise UnsupportedError(f"env {variable['name']}: {', '.join(origin)} is not known to the stand-in node")
    return result


def expanded(text: str, env: dict[str, str]) -> str:
    """``$(NAME)`` replaced where NAME is set, ``$$`` by one dollar sign, all else left alone (as in core/v1)."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return _REFERENCE.sub(value, text)
