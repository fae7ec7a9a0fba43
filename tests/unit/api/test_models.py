"""The models judge an object as the CRD's schema does, sentence by sentence."""

import re
from typing import Annotated, Any, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator, core_schema

from operator_app.api import fields
from operator_app.api.fields import duration_s
from operator_app.api.kinds import Object
from operator_app.api.models import Listener, parse_spec, sentence
from operator_app.api.rules import Rule
from tests.api_cases import BOUNDS, CASES, HOSTILE, TEXT_MEMBERS, Case, Path, edited, proxy, with_fragment

# Rules that the models leave to the API server, by what their message advises.
SERVER_ONLY = ("reachable from other Pods", "raise the limit or lower the request")

STRING_TYPES = {
    name: annotation
    for name, annotation in vars(fields).items()
    if get_origin(annotation) is Annotated and get_args(annotation)[0] is str
}


def refusal(obj: Object) -> str:
    """The sentences with which the models refuse ``obj``, or nothing."""
    try:
        parse_spec(obj)
    except ValidationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_refusal_is_one_sentence_that_begins_with_where(case: Case) -> None:
    """For people: a path without an empty end, and no name of a Python exception."""
    for value in () if case.advice in SERVER_ONLY else case.refused:
        with pytest.raises(ValidationError) as refused:
            parse_spec(edited(proxy(), case.at, value))
        assert re.match(r"spec(\.\w+)*: (?!Value error)\S", sentence(refused.value))
        assert "\n" not in sentence(refused.value)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_refuses_its_case_with_its_advice_and_accepts_the_neighbour(case: Case) -> None:
    """Each rule refuses what breaks it, says what to write instead, and leaves the nearest good value alone."""
    assert refusal(edited(proxy(), case.at, case.accepted)) == ""
    for value in case.refused:
        message = refusal(edited(proxy(), case.at, value))
        if case.advice in SERVER_ONLY:
            assert message == "", value
        else:
            assert case.advice in message, value


@pytest.mark.parametrize(("at", "inside", "outside"), BOUNDS, ids=[".".join(map(str, at)) for at, _, _ in BOUNDS])
def test_a_bound_is_exact(at: Path, inside: list[Any], outside: list[Any]) -> None:
    """Every size and range is accepted up to its bound and refused one beyond."""
    for value in inside:
        assert refusal(edited(proxy(), at, value)) == "", value
    for value in outside:
        assert refusal(edited(proxy(), at, value)) != "", value


@pytest.mark.parametrize("at", TEXT_MEMBERS, ids=lambda at: ".".join(map(str, at)))
def test_no_text_carries_another_languages_structure(at: Path) -> None:
    """No member that reaches a child accepts a line break, quote, brace, format directive or look-alike character."""
    value: Any = proxy()
    for step in at:
        value = value[step]
    for fragment in HOSTILE:
        for text in with_fragment(value, fragment):
            assert refusal(edited(proxy(), at, text)) != "", text


def test_unknown_fields_are_ignored() -> None:
    """An object stored under a newer CRD is read as far as this version understands it."""
    newer = edited(proxy(), ("spec", "topology"), {"zones": 3})
    assert parse_spec(newer) == parse_spec(proxy())


def test_models_are_immutable() -> None:
    """A parsed spec can be shared between rounds, because nobody can change it."""
    spec = parse_spec(proxy())
    with pytest.raises(ValidationError):
        spec.replicas = 3  # type: ignore[misc]


def test_a_numeric_quantity_is_its_text() -> None:
    """``cpu: 2`` in YAML means what ``cpu: "2"`` means, as on a Pod."""
    spec = parse_spec(edited(proxy(), ("spec", "resources"), {"limits": {"cpu": 2}}))
    assert spec.resources is not None
    assert spec.resources.limits == {"cpu": "2"}


@pytest.mark.parametrize(
    ("port", "target_port", "expected"), [(80, None, 10080), (1023, None, 11023), (1024, None, 1024), (80, 8080, 8080)]
)
def test_container_port(port: int, target_port: int | None, expected: int) -> None:
    """The field targetPort goes first; a port that needs privileges is raised by 10000; any other is taken as it is."""
    listener = {"name": "http", "port": port, "targetPort": target_port, "routes": [{"backend": "app"}]}
    assert Listener.model_validate(listener).container_port == expected


@pytest.mark.parametrize(("text", "seconds"), [("1ms", 0.001), ("250ms", 0.25), ("5s", 5.0), ("60s", 60.0)])
def test_duration_s(text: str, seconds: float) -> None:
    """A duration is read in its own unit."""
    assert duration_s(text) == seconds


def _is_accepted(annotation: Any, text: str) -> bool:  # noqa: ANN401  # a type, as Annotated makes it
    try:
        TypeAdapter(annotation).validate_python(text)
    except ValidationError:
        return False
    return True


HOST_LIKE = st.text("ab0.-*", min_size=1, max_size=12) | st.from_regex(r"[*a][*.][a-z0-9.-]{1,70}", fullmatch=True)


@given(HOST_LIKE)
def test_the_short_host_rules_together_are_the_exact_expression(host: str) -> None:
    """The rules that fit the API server's cost budget accept what one exact expression for a host would accept."""
    exact = re.fullmatch(rf"([*][.])?{fields.DNS_NAME_EXPRESSION}", host) is not None
    assert _is_accepted(fields.RequestHost, host) == exact


def _expressions() -> list[tuple[str, bool, Rule]]:
    """Every rule that is one regular expression: the expression, and whether a match is what is wanted."""
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
    """The CEL form, run by a linear-time engine of RE2's kind, judges every text as the models' own form does."""
    engine = SchemaValidator(core_schema.str_schema(pattern=expression))
    assert rule.is_valid is not None
    assert (engine.isinstance_python(text) == wanted) == rule.is_valid(text)


def test_the_expressions_are_found() -> None:
    """The test above is about every regular expression there is: nine of them, in seven kinds of text."""
    assert len(_expressions()) >= 9
    assert len(STRING_TYPES) >= 7
