"""A test that lacks something is skipped on anybody's machine and fails where all is given."""

import pytest

from tests.e2e.prerequisites import lacking


def test_what_lacks_is_skipped_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked for more than they have."""
    monkeypatch.delenv("E2E_NOTHING_LACKS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs PowerDNS"):
        lacking("needs PowerDNS")


def test_nothing_is_lost_unnoticed_where_all_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped test looks green."""
    monkeypatch.setenv("E2E_NOTHING_LACKS", "1")
    with pytest.raises(pytest.fail.Exception, match="needs PowerDNS"):
        lacking("needs PowerDNS")
