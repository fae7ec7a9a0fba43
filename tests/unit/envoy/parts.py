"""Parts of a rendered Envoy configuration, for the tests of ``operator_app.envoy``."""

import json
import re
from collections.abc import Mapping
from typing import Any

from operator_app.api.models import EnvoyProxySpec
from operator_app.envoy.files import rendered
from operator_app.envoy.messages import CONFIG_DIRECTORY

JsonObject = dict[str, Any]


def documents(texts: Mapping[str, str]) -> dict[str, JsonObject]:
    """Files of one revision as data; those that have it in their names are called ``envoy.json`` and ``lds.json``."""
    return {re.sub("^(envoy|lds)-[0-9a-f]{16}", r"\1", name): json.loads(text) for name, text in texts.items()}


def static_configuration(spec: EnvoyProxySpec) -> JsonObject:
    """The proxy that ``spec`` declares as one configuration without files."""
    return joined(rendered(spec).texts)


def joined(texts: Mapping[str, str]) -> JsonObject:
    """Files of one revision as one configuration without files: the same messages, each in its place."""
    found = documents(texts)
    config = found["envoy.json"]
    clusters = _file_of(config.pop("dynamic_resources")["cds_config"])
    listeners = [_without_type(each) for each in found["lds.json"]["resources"]]
    for listener in listeners:
        typed = listener["filter_chains"][0]["filters"][-1]["typed_config"]
        if "rds" in typed:
            (routes,) = found[_file_of(typed.pop("rds")["config_source"])]["resources"]
            typed["route_config"] = _without_type(routes)
    resources = config["static_resources"]
    resources["listeners"] += listeners
    resources["clusters"] += [_without_type(each) for each in found[clusters]["resources"]]
    return config


def _file_of(source: JsonObject) -> str:
    """The name of the file that a source of resources names."""
    path: str = source["path_config_source"]["path"]
    return path.removeprefix(f"{CONFIG_DIRECTORY}/..data/")


def _without_type(resource: JsonObject) -> JsonObject:
    return {name: value for name, value in resource.items() if name != "@type"}


def listener_config(config: JsonObject, name: str) -> JsonObject:
    """The listener called ``name`` in ``config``."""
    found: JsonObject = next(each for each in config["static_resources"]["listeners"] if each["name"] == name)
    return found


def last_filter(config: JsonObject, name: str) -> JsonObject:
    """The last network filter of the listener called ``name``, which serves its connections."""
    typed: JsonObject = listener_config(config, name)["filter_chains"][0]["filters"][-1]["typed_config"]
    return typed
