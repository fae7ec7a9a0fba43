"""What holds for every unit test: it leaves nothing in the temporary directory."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The temporary directory of this process and of those that it starts, in place of the machine's."""
    directory = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(directory))
        patch.setattr(tempfile, "tempdir", str(directory))
        yield directory


@pytest.fixture(autouse=True)
def leaves_no_litter(temporary_directory: Path) -> Iterator[None]:
    """Fails the test that leaves a file or a directory behind, and removes it."""
    yield
    left = sorted(temporary_directory.iterdir())
    for each in left:
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    assert left == []
