"""What holds for every unit test: it leaves nothing in the temporary directory."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this process for what its unit tests keep for a moment."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(autouse=True)
def leaves_no_litter(temporary_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test that leaves a file or a directory behind, and removes it.

    Only while the test runs: a cluster of end-to-end tests in the same process keeps its files in the machine's own
    temporary directory.
    """
    monkeypatch.setenv("TMPDIR", str(temporary_directory))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary_directory))
    yield
    left = sorted(temporary_directory.iterdir())
    for each in left:
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    assert left == []
