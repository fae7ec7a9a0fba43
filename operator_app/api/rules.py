"""The grammar of the API's rules: each is written once and judged by the API server as by the models."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule:
    """One sentence of the API's grammar, in the two languages that judge it.

    ``cel`` is what the API server evaluates (``x-kubernetes-validations``), ``holds`` the same spec for the
    models. ``holds`` is None where the API server alone judges: the object's name or history, what the child's own
    validation refuses as well, and what is unwise but harmless to render. ``field`` is the member that an error of a
    model's rule is reported at (``fieldPath``), as ``.listeners``.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None
    field: str | None = None

    @property
    def validation(self) -> dict[str, str]:
        """The rule as one entry of ``x-kubernetes-validations``."""
        entry = {"rule": self.cel, "message": self.message}
        return entry | {"fieldPath": self.field} if self.field else entry

    def check(self, value: T) -> T:
        """``value`` itself. Raises ``ValueError`` with the rule's message if the rule is broken."""
        if self.holds is not None and not self.holds(value):
            raise ValueError(self.message)
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        rendered = handler(schema)
        rendered.setdefault("x-kubernetes-validations", []).append(self.validation)
        return rendered


def matches(expression: str, message: str) -> Rule:
    """A rule for a whole string. ``expression`` is RE2 without quotes, anchors and Unicode classes.

    Within that subset Go's engine and Python's agree, and no expression here can be matched in two ways, so that
    Python's backtracking stays linear.
    """
    return Rule(
        cel=f"self.matches(r'^({expression})$')",
        message=message,
        holds=lambda value: re.fullmatch(expression, value) is not None,
    )


def lacks(expression: str, message: str) -> Rule:
    """A rule for what occurs nowhere in a string. ``expression`` is as for :func:`matches`, anchors allowed."""
    python_expression = expression.replace("$", r"\Z")
    return Rule(
        cel=f"!self.matches(r'{expression}')",
        message=message,
        holds=lambda value: re.search(python_expression, value) is None,
    )


def all_distinct(values: Iterable[object]) -> bool:
    """Whether no two of ``values``, which are hashable, are equal."""
    values = list(values)
    return len(values) == len(set(values))


@dataclass(frozen=True, slots=True)
class MapBy:
    """The list is a map by ``key`` for the API server, which then refuses an equal key and merges entry by entry."""

    key: str

    def check(self, entries: tuple[Any, ...]) -> tuple[Any, ...]:
        """``entries`` themselves. Raises ``ValueError`` if two of them have the same key."""
        if not all_distinct(getattr(entry, self.key) for entry in entries):
            raise ValueError(f"every entry must have a {self.key} of its own")
        return entries

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [self.key]}


def _add_rules(schema: dict[str, Any], model: type[Any]) -> None:
    if model.rules:
        schema["x-kubernetes-validations"] = [rule.validation for rule in model.rules]


class ApiModel(BaseModel):
    """Common settings: camelCase on the wire, immutable, unknown fields ignored (a newer CRD may have more)."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
        json_schema_extra=_add_rules,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    """What must hold between the fields of one object of this model."""

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        for rule in self.rules:
            rule.check(self)
        return self
