"""The settings: bounds that say what is wrong, and one meaning whichever way a value comes in."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from operator_app.settings import ENV_PREFIX, Settings

CANDIDATES = (
    "7",
    "0.25",
    "31",
    "debug",
    "console",
    "team-b",
    "https://dns.example.com",
    "b.example.com",
    "true",
    "team-a=3",
)
"""Texts of which every setting takes at least one."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests are not those of the tests."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"{ENV_PREFIX}{name.upper()}", raising=False)


def given(name: str, value: Any) -> Settings:  # noqa: ANN401
    """Settings of which one was given directly, as a flag gives it."""
    values: dict[str, Any] = {name: value}
    return Settings(**values)


def another(name: str) -> str:
    """A text that gives the setting a value other than its default."""
    for text in CANDIDATES:
        try:
            if getattr(given(name, text), name) != Settings.model_fields[name].default:
                return text
        except ValidationError:
            continue
    raise AssertionError(f"no candidate fits {name}: add one")


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_comes_from_the_environment_and_is_outdone_by_a_flag(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Default, then environment, then what is given directly."""
    text, default = another(name), Settings.model_fields[name].default
    assert getattr(Settings(), name) == default
    monkeypatch.setenv(f"{ENV_PREFIX}{name.upper()}", text)
    assert getattr(Settings(), name) == getattr(given(name, text), name) != default
    assert getattr(given(name, default), name) == default


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_documented(name: str) -> None:
    """A description for ``--help``, and the unit in the name of every time."""
    field = Settings.model_fields[name]
    assert field.description
    if "Seconds" in repr(field.annotation) or field.annotation is float:
        assert re.search(r"_s$", name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("http_port", "65536"),
        ("http_port", "-1"),
        ("http_port", "eighty"),
        ("workers", "0"),
        ("in_flight_per_tenant", "0"),
        ("max_connections", "1001"),
        ("request_timeout_s", "0"),
        ("request_timeout_s", "nan"),
        ("request_timeout_s", "inf"),
        ("sweep_interval_s", "-5"),
        ("shutdown_grace_s", "86401"),
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("namespace", ""),
        ("namespace", "Edge System"),
        ("image", ""),
        ("namespaces", "team-a,Team_B"),
        ("namespaces", ","),
        ("namespaces", " "),
        ("registries", ","),
        ("tenant_weights", "team-a"),
        ("tenant_weights", "team-a=0"),
        ("tenant_weights", "team-a=101"),
        ("tenant_weights", "=2"),
        ("tenant_weights", "team-a=2=3"),
        ("powerdns_zones", " , "),
    ],
)
def test_bad_values_are_refused(name: str, value: str) -> None:
    """Out of bounds, of another type, or empty: the error names the setting."""
    with pytest.raises(ValidationError) as caught:
        given(name, value)
    assert [error["loc"] for error in caught.value.errors()] == [(name,)]


def test_a_backoff_that_shrinks_is_refused() -> None:
    """Two values that contradict each other are named, with both values."""
    with pytest.raises(ValidationError, match=r"--backoff-base-s \(90\) must not exceed --backoff-cap-s \(60\)"):
        given("backoff_base_s", "90")


def test_a_tenant_counts_for_one_unless_told_otherwise() -> None:
    """Weights are by tenant: a namespace's name, or the value of its label."""
    given_weights = given("tenant_weights", "team-a=3, Gold_1=100")
    assert [given_weights.weight_of(each) for each in ("team-a", "Gold_1", "team-b")] == [3, 100, 1]


def test_namespaces_are_a_list_with_commas() -> None:
    """Blanks and repetitions do not count."""
    assert given("namespaces", "b, a,,b").namespaces == ("b", "a")


def test_nothing_means_all_namespaces_only_where_nothing_is_written() -> None:
    """A list whose names got lost on the way must not widen what is served."""
    assert given("namespaces", "").namespaces == ()
    with pytest.raises(ValidationError, match=r"',' names nothing; leave it empty, or write names separated by commas"):
        given("namespaces", ",")


def test_settings_do_not_change() -> None:
    """What was read at the start holds until the end."""
    with pytest.raises(ValidationError):
        Settings().workers = 3  # type: ignore[misc]
