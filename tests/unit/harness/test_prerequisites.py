"""A test that lacks a prerequisite is skipped, and fails where ``E2E_NOTHING_LACKS`` says that all are there."""

import pytest

from tests.e2e.prerequisites import lacking


def test_a_missing_prerequisite_skips_the_test_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite runs on a machine without optional programs."""
    monkeypatch.delenv("E2E_NOTHING_LACKS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs PowerDNS"):
        lacking("needs PowerDNS")


def test_a_missing_prerequisite_fails_where_all_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a test that is skipped by mistake would look like a success."""
    monkeypatch.setenv("E2E_NOTHING_LACKS", "1")
    with pytest.raises(pytest.fail.Exception, match="needs PowerDNS"):
        lacking("needs PowerDNS")
