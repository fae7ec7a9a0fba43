"""Validation rules, each stated once and enforced by both the API server (as CEL) and the models (in Python). Pure."""

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
    """One validation rule of a field or of a model.

    ``cel`` is the expression that the API server evaluates (``x-kubernetes-validations``), ``is_valid`` the same
    predicate for the models. ``is_valid`` is ``None`` if only the API server enforces the rule: rules about the
    object's name or old value, rules that a child's own validation repeats, and rules whose violation renders to valid
    children. ``message`` says what to write instead. ``field`` is the member at which the API server reports the error
    of a model's rule (``fieldPath``), for example ``.listeners``.
    """

    cel: str
    message: str
    is_valid: Callable[[Any], bool] | None = None
    field: str | None = None

    @property
    def validation(self) -> dict[str, str]:
        """The rule as one entry of ``x-kubernetes-validations``."""
        entry = {"rule": self.cel, "message": self.message}
        return entry | {"fieldPath": self.field} if self.field else entry

    def check(self, value: T) -> T:
        """Return ``value``. Raises ``ValueError`` with the rule's message if ``value`` is not valid."""
        if self.is_valid is not None and not self.is_valid(value):
            raise ValueError(self.message)
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        rendered = handler(schema)
        rendered.setdefault("x-kubernetes-validations", []).append(self.validation)
        return rendered


def matches(expression: str, message: str) -> Rule:
    """A rule that ``expression`` matches the whole string.

    ``expression`` is in RE2 syntax without quotes, anchors and Unicode classes. For that subset Go's engine and
    Python's agree. No text may match an expression in two ways, which keeps Python's backtracking linear.
    """
    compiled = re.compile(expression)
    return Rule(
        cel=f"self.matches(r'^({expression})$')",
        message=message,
        is_valid=lambda value: compiled.fullmatch(value) is not None,
    )


def lacks(expression: str, message: str) -> Rule:
    """A rule that ``expression`` matches no part of the string; its syntax as for :func:`matches`, with anchors."""
    compiled = re.compile(expression.replace("$", r"\Z"))
    return Rule(
        cel=f"!self.matches(r'{expression}')",
        message=message,
        is_valid=lambda value: compiled.search(value) is None,
    )


def all_distinct(values: Iterable[object]) -> bool:
    """Whether no two of ``values``, which are hashable, are equal."""
    values = list(values)
    return len(values) == len(set(values))


@dataclass(frozen=True, slots=True)
class MapBy:
    """Makes a list a map keyed by ``key``: the API server refuses duplicate keys and merges the items by key."""

    key: str

    def check(self, entries: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``entries``. Raises ``ValueError`` if two of them have the same key."""
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
    """Base of the API's models: camelCase in JSON, immutable, unknown fields ignored (a newer CRD may have more)."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
        json_schema_extra=_add_rules,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules about several fields of one object of this model."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.rules:
            rule.check(self)
        return self
