"""Registries of one operator under many names: each with a server, zones and faults of its own.

``life-3`` is installed like a plugin, by an entry point that names ``life_3`` of this module. What each connects to is
in a file of JSON: by its name, the shipped registry that it is, and the settings of that.
"""

import functools
import json
import os
import re
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

from operator_app.registration.identity import Installation
from operator_app.registration.plugins import Factory
from operator_app.registration.powerdns import registry as powerdns
from operator_app.registration.registry import Registry
from operator_app.registration.rfc2136 import registry as rfc2136
from operator_app.settings import Settings

FILE_VARIABLE: Final = "LIVES_FILE"

_SHIPPED: Final[Mapping[str, Factory]] = {"powerdns": powerdns.connect, "rfc2136": rfc2136.connect}


def __getattr__(name: str) -> Factory:
    """The factory of one registry."""
    if re.fullmatch(r"life_\d+", name) is None:
        raise AttributeError(name)
    return functools.partial(_connect, name.replace("_", "-"))


def _connect(name: str, _settings: Settings, installation: Installation) -> AbstractAsyncContextManager[Registry]:
    found: dict[str, Any] = json.loads(Path(os.environ[FILE_VARIABLE]).read_text())[name]
    return _SHIPPED[found["registry"]](Settings(**found["settings"]), installation)


def install(site: Path, connections: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Make registries of these names known to a process, by files in the new folder ``site``; its environment."""
    info = site / "fault_lives-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fault-lives\nVersion: 1.0\n")
    points = "".join(f"{name} = {__name__}:{name.replace('-', '_')}\n" for name in connections)
    (info / "entry_points.txt").write_text(f"[operator_app.registries]\n{points}")
    (site / "connections.json").write_text(json.dumps(connections, default=str))
    root = Path(__file__).parents[3]
    return {"PYTHONPATH": f"{site}{os.pathsep}{root}", FILE_VARIABLE: str(site / "connections.json")}
