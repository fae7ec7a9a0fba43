"""Why a field is written, read off ``managedFields``: which field, who changed it, when, from what to what. Pure.

Server-side apply keeps on the object itself who set which field last and when, so a drift is explained without a
history of our own.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Final

from operator_app.api.kinds import Object, Value
from operator_app.ssa.fields import Difference, Drift, Path, others_with

SHOWN_CHARACTERS: Final = 120
"""Longer values are shown as length and digest: an Envoy configuration in a log line helps nobody."""

MASKED: Final = "***"


@dataclass(frozen=True, slots=True)
class FieldChange:
    """Why one field is written.

    ``managers`` have the field now, besides us; none means that it was removed, or never was there. ``taken_at`` is the
    newest time (RFC 3339, to the second) at which one of them changed what it has. ``was`` and ``becomes`` are fit to
    be shown.
    """

    field: str
    drift: Drift
    managers: tuple[str, ...]
    taken_at: str | None
    was: Value
    becomes: Value

    def __str__(self) -> str:
        by = f" by {', '.join(self.managers)}" if self.managers else ""
        at = f" at {self.taken_at}" if self.taken_at else ""
        return f"{self.field} {self.drift.value}{by}{at}: {as_text(self.was)} -> {as_text(self.becomes)}"

    def as_dict(self) -> Object:
        """For a structured log line."""
        return asdict(self) | {"drift": self.drift.value, "managers": list(self.managers)}


def field_changes(differences: tuple[Difference, ...], live: Object | None) -> tuple[FieldChange, ...]:
    """One change for each difference of ``live`` (as it was before the write) from what is declared."""
    if live is None:
        return ()
    return tuple(_change(each, live) for each in differences)


def as_json(value: Value) -> str:
    """``value`` as compact JSON, always in the same order."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def shown(path: Path, value: Value) -> Value:
    """``value`` as it may be printed: environment variables masked, long texts as length and digest."""
    if value is None:
        return None
    value = _masked(value, path)
    text = value if isinstance(value, str) else as_json(value)
    if len(text) <= SHOWN_CHARACTERS:
        return value
    return f"{len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _change(difference: Difference, live: Object) -> FieldChange:
    taken_by = others_with(difference.path, live) if difference.drift is Drift.NOT_OWNED else ()
    return FieldChange(
        field=str(difference),
        drift=difference.drift,
        managers=tuple(dict.fromkeys(entry.get("manager", "") for entry in taken_by)),
        taken_at=max((entry["time"] for entry in taken_by if "time" in entry), default=None),
        was=shown(difference.path, difference.live),
        becomes=shown(difference.path, difference.desired),
    )


def _masked(value: Value, path: Path) -> Value:
    """``value`` without literal values of environment variables, which people use for secrets all the same."""
    if "f:env" in path and path[-1] == "f:value":
        return MASKED
    if isinstance(value, dict):
        return {name: _masked(inner, (*path, f"f:{name}")) for name, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner, path) for inner in value]
    return value


def as_text(value: Value) -> str:
    """``value`` as compact JSON, an absent one as ``nothing``."""
    return "nothing" if value is None else as_json(value)
