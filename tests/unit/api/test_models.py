"""The models accept and refuse the same objects as the CRD's schema, with the same messages."""

import re
from typing import Annotated, Any, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator, core_schema

from benchmarks.hostile import big
from operator_app.api import fields
from operator_app.api.fields import duration_s
from operator_app.api.kinds import Object
from operator_app.api.models import EnvoyProxySpec, Listener, parse_spec, sentence
from operator_app.api.rules import Rule
from tests.api_cases import BOUNDS, CASES, HOSTILE, TEXT_MEMBERS, Case, Path, edited, proxy, with_fragment

# Rules that only the API server enforces, by a part of their message.
SERVER_ONLY = (
    "reachable from other Pods",
    "raise the limit or lower the request",
    "timeout must not be above interval",
)

STRING_TYPES = {
    name: annotation
    for name, annotation in vars(fields).items()
    if get_origin(annotation) is Annotated and get_args(annotation)[0] is str
}


def refusal(obj: Object) -> str:
    """The models' errors about ``obj``, empty if it is valid."""
    try:
        parse_spec(obj)
    except ValidationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_error_is_one_sentence_that_begins_with_the_field(case: Case) -> None:
    """An error is one line that begins with the field's path and contains no name of a Python exception."""
    for value in () if case.advice in SERVER_ONLY else case.refused:
        with pytest.raises(ValidationError) as refused:
            parse_spec(edited(proxy(), case.at, value))
        assert re.match(r"spec(\.\w+)*: (?!Value error)\S", sentence(refused.value))
        assert "\n" not in sentence(refused.value)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_refuses_its_case_with_its_advice_and_accepts_the_neighbour(case: Case) -> None:
    """Each rule refuses an invalid value with advice on what to write, and accepts the nearest valid value."""
    assert refusal(edited(proxy(), case.at, case.accepted)) == ""
    for value in case.refused:
        message = refusal(edited(proxy(), case.at, value))
        if case.advice in SERVER_ONLY:
            assert message == "", value
        else:
            assert case.advice in message, value


@pytest.mark.parametrize(("at", "inside", "outside"), BOUNDS, ids=[".".join(map(str, at)) for at, _, _ in BOUNDS])
def test_a_bound_is_exact(at: Path, inside: list[Any], outside: list[Any]) -> None:
    """Every size and range is accepted up to its bound and refused beyond it."""
    for value in inside:
        assert refusal(edited(proxy(), at, value)) == "", value
    for value in outside:
        assert refusal(edited(proxy(), at, value)) != "", value


@pytest.mark.parametrize("at", TEXT_MEMBERS, ids=lambda at: ".".join(map(str, at)))
def test_no_text_carries_another_languages_structure(at: Path) -> None:
    """No field that is rendered into a child accepts line breaks, quotes, braces, format strings or look-alikes."""
    value: Any = proxy()
    for step in at:
        value = value[step]
    for fragment in HOSTILE:
        for text in with_fragment(value, fragment):
            assert refusal(edited(proxy(), at, text)) != "", text


def test_unknown_fields_are_ignored() -> None:
    """Unknown fields of an object that was stored under a newer CRD are ignored."""
    newer = edited(proxy(), ("spec", "topology"), {"zones": 3})
    assert parse_spec(newer) == parse_spec(proxy())


def test_models_are_immutable() -> None:
    """A parsed spec can't be changed, so it can be shared."""
    spec = parse_spec(proxy())
    with pytest.raises(ValidationError):
        spec.replicas = 3  # type: ignore[misc]


def test_an_integer_quantity_is_read_as_text() -> None:
    """``cpu: 2`` in YAML is the same as ``cpu: "2"``, as on a Pod."""
    spec = parse_spec(edited(proxy(), ("spec", "resources"), {"limits": {"cpu": 2}}))
    assert spec.resources is not None
    assert spec.resources.limits == {"cpu": "2"}


@pytest.mark.parametrize(
    ("port", "target_port", "expected"), [(80, None, 10080), (1023, None, 11023), (1024, None, 1024), (80, 8080, 8080)]
)
def test_container_port(port: int, target_port: int | None, expected: int) -> None:
    """The container port is ``targetPort``, else ``port``, plus 10000 if ``port`` is below 1024."""
    listener = {"name": "http", "port": port, "targetPort": target_port, "routes": [{"backend": "app"}]}
    assert Listener.model_validate(listener).container_port == expected


@pytest.mark.parametrize(("text", "seconds"), [("1ms", 0.001), ("250ms", 0.25), ("5s", 5.0), ("60s", 60.0)])
def test_duration_s(text: str, seconds: float) -> None:
    """A duration in ``ms`` or ``s`` is converted to seconds."""
    assert duration_s(text) == seconds


def _is_accepted(annotation: Any, text: str) -> bool:  # noqa: ANN401  # a type, as Annotated makes it
    try:
        TypeAdapter(annotation).validate_python(text)
    except ValidationError:
        return False
    return True


HOST_LIKE = st.text("ab0.-*", min_size=1, max_size=12) | st.from_regex(r"[*a][*.][a-z0-9.-]{1,70}", fullmatch=True)


@given(HOST_LIKE)
def test_the_short_host_rules_are_equivalent_to_one_expression(host: str) -> None:
    """The short rules of a route's host accept exactly what one exact expression accepts."""
    exact = re.fullmatch(rf"([*][.])?{fields.DNS_NAME_EXPRESSION}", host) is not None
    assert _is_accepted(fields.RequestHost, host) == exact


def _expressions() -> list[tuple[str, bool, Rule]]:
    """Every rule of one regular expression: the expression, whether a valid value matches it, and the rule."""
    rules = {rule for annotation in STRING_TYPES.values() for rule in get_args(annotation) if isinstance(rule, Rule)}
    found = []
    for rule in sorted(rules, key=lambda rule: rule.cel):
        match = re.fullmatch(r"(!?)self\.matches\(r'([^']*)'\)", rule.cel)
        if match is not None:
            found.append((match[2], not match[1], rule))
    return found


@pytest.mark.parametrize(
    ("expression", "wanted", "rule"), _expressions(), ids=[f"{index}" for index, _ in enumerate(_expressions())]
)
@given(text=st.text("aZ0.-*:/_@%\n\u2028", max_size=20) | HOST_LIKE)
def test_both_regular_expression_engines_agree(expression: str, *, wanted: bool, rule: Rule, text: str) -> None:
    """A rule's CEL expression, in an RE2-like engine, and its Python form accept the same texts."""
    engine = SchemaValidator(core_schema.str_schema(pattern=expression))
    assert rule.is_valid is not None
    assert (engine.isinstance_python(text) == wanted) == rule.is_valid(text)


def test_the_expressions_are_found() -> None:
    """The test above covers at least nine expressions of seven types."""
    assert len(_expressions()) >= 9
    assert len(STRING_TYPES) >= 7


def test_a_spec_in_parts_is_the_same_as_in_one_piece() -> None:
    """Listeners and backends are validated one by one, so that a large spec lets other threads run in between."""
    obj = big("team-a", 1)
    assert parse_spec(obj) == EnvoyProxySpec.model_validate(obj["spec"])
    obj["spec"]["backends"][7]["endpoints"][3]["port"] = 0
    with pytest.raises(ValidationError) as raised:
        parse_spec(obj)
    assert sentence(raised.value).startswith("spec.backends.7.endpoints.3.port: ")
