"""Fixtures of the tests of registration: a registry outside of the cluster."""

from pathlib import Path

import pytest

from tests.e2e.outside import FOLDER_VARIABLE, Outside


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outside:
    """A registry of files that every operator and every command of this test finds installed."""
    found = Outside(tmp_path / "outside")
    monkeypatch.setenv("PYTHONPATH", found.install(tmp_path / "site"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(found.folder))
    return found
