"""Settings have bounds with clear errors, and the same meaning from flags and environment."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from operator_app.settings import ENV_PREFIX, Settings

CANDIDATES = (
    "400",
    "7",
    "0.25",
    "31",
    "debug",
    "console",
    "team-b",
    "https://dns.example.com",
    "b.example.com",
    "true",
    "false",
    "team-a=3",
    "affinity",
    "ClusterIP",
    "10.0.0.0/8",
    "ns1.example.com:53",
    "external",
)
"""Texts, of which every setting accepts at least one that differs from its default."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings of the process that runs the tests from the environment."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"{ENV_PREFIX}{name.upper()}", raising=False)


def given(name: str, value: Any) -> Settings:  # noqa: ANN401
    """Settings with one value passed as an argument, as a flag does."""
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
def test_a_flag_takes_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """For every setting a flag takes precedence over the environment, and the environment over the default."""
    text, default = another(name), Settings.model_fields[name].default
    assert getattr(Settings(), name) == default
    monkeypatch.setenv(f"{ENV_PREFIX}{name.upper()}", text)
    assert getattr(Settings(), name) == getattr(given(name, text), name) != default
    assert getattr(given(name, default), name) == default


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_documented(name: str) -> None:
    """Every setting has a description for ``--help``, and every duration its unit in its name."""
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
        ("tenant_service_types", ","),
        ("forbidden_networks", "10.0.0.7/8"),
        ("forbidden_networks", "metadata"),
        ("tenant_forbidden_fields", "listeners"),
    ],
)
def test_bad_values_are_refused(name: str, value: str) -> None:
    """A value out of bounds, of another type or empty is refused with an error that names the setting."""
    with pytest.raises(ValidationError) as caught:
        given(name, value)
    assert [error["loc"] for error in caught.value.errors()] == [(name,)]


def test_a_backoff_base_above_its_cap_is_refused() -> None:
    """The error names both settings with their values."""
    with pytest.raises(ValidationError, match=r"--backoff-base-s \(90\) must not exceed --backoff-cap-s \(60\)"):
        given("backoff_base_s", "90")


def test_a_tenant_has_weight_one_by_default() -> None:
    """``weight_of`` returns the tenant's weight, and 1 for a tenant that no setting names."""
    given_weights = given("tenant_weights", "team-a=3, Gold_1=100")
    assert [given_weights.weight_of(each) for each in ("team-a", "Gold_1", "team-b")] == [3, 100, 1]


def test_namespaces_are_separated_by_commas() -> None:
    """Blanks, empty names and duplicates are ignored."""
    assert given("namespaces", "b, a,,b").namespaces == ("b", "a")


def test_only_an_empty_list_means_all_namespaces() -> None:
    """A list that contains only separators is refused, so that a broken list never serves all namespaces."""
    assert given("namespaces", "").namespaces == ()
    with pytest.raises(ValidationError, match=r"',' names nothing; leave it empty, or write names separated by commas"):
        given("namespaces", ",")


def test_settings_are_immutable() -> None:
    """A setting can't be changed after it was read."""
    with pytest.raises(ValidationError):
        Settings().workers = 3  # type: ignore[misc]
