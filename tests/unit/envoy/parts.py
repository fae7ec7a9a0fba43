"""Parts of a rendered Envoy configuration, for the tests of ``operator_app.envoy``."""

from typing import Any


def listener_config(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The listener called ``name`` in ``config``."""
    found: dict[str, Any] = next(each for each in config["static_resources"]["listeners"] if each["name"] == name)
    return found


def last_filter(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The last network filter of the listener called ``name``, which serves its connections."""
    typed: dict[str, Any] = listener_config(config, name)["filter_chains"][0]["filters"][-1]["typed_config"]
    return typed
