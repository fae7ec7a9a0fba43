"""The EnvoyProxies of ``manifests/samples``, as tenants apply them. Reads the working tree only."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Final

import yaml

from operator_app.api.kinds import ENVOY_PROXY, Object
from operator_app.api.models import EnvoyProxySpec, parse_spec
from tests.paths import MANIFESTS

DIRECTORY: Final = MANIFESTS / "samples"


def samples() -> dict[str, Object]:
    """The EnvoyProxy of each sample, by the name of its file without the suffix."""
    found = {}
    for file in sorted(DIRECTORY.glob("*.yaml")):
        documents = yaml.safe_load_all(file.read_text(encoding="utf-8"))
        (found[file.stem],) = (each for each in documents if each["kind"] == ENVOY_PROXY.kind)
    return found


def with_backends_at(proxy: Object, ports: Mapping[str, Sequence[int]]) -> EnvoyProxySpec:
    """The spec of ``proxy``, each of whose backends has these ports of loopback for its endpoints, by its name."""
    spec = deepcopy(proxy["spec"])
    for backend in spec["backends"]:
        backend.pop("service", None)
        backend["endpoints"] = [{"host": "127.0.0.1", "port": port} for port in ports[backend["name"]]]
    return parse_spec({"spec": spec})


def unknown_fields(schema: Object, value: object, path: str = "") -> Iterator[str]:
    """The members of ``value`` that ``schema`` does not have, which a strict API server refuses."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from unknown_fields(schema.get("items", {}), each, f"{path}[{number}]")
    if not isinstance(value, dict) or "properties" not in schema:
        return
    for name, member in value.items():
        if name in schema["properties"]:
            inner = schema["properties"][name]
            # Of an object's metadata the schema says nothing; the API server knows it.
            yield from () if f"{path}.{name}" == ".metadata" else unknown_fields(inner, member, f"{path}.{name}")
        else:
            yield f"{path}.{name}"
