"""A test that lacks something is skipped on anybody's machine and fails where all is given."""

import os

import pytest

from tests.e2e.prerequisites import lacking


@pytest.mark.parametrize(
    ("environment", "user", "outcome"),
    [
        pytest.param({"CI": "true"}, 0, pytest.fail.Exception, id="continuous integration"),
        pytest.param({"CI": "true"}, 1000, pytest.skip.Exception, id="not root"),
        pytest.param({"CI": "true", "E2E_KUBECONFIG": "config"}, 0, pytest.skip.Exception, id="another cluster"),
        pytest.param({}, 0, pytest.skip.Exception, id="anybody's machine"),
    ],
)
def test_only_continuous_integration_fails(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], user: int, outcome: type[BaseException]
) -> None:
    """Nothing is lost unnoticed in continuous integration, and nobody else is asked for more than they have."""
    for name in ("CI", "E2E_KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(outcome, match="PowerDNS"):
        lacking("needs PowerDNS")
