"""Fixture: one BIND for the session."""

from collections.abc import Iterator

import pytest

from tests.e2e.powerdns.fixture import started
from tests.e2e.rfc2136.server import Bind


@pytest.fixture(scope="session")
def bind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bind]:
    """A running server."""
    with started(lambda: Bind(tmp_path_factory.mktemp("bind"))) as server:
        yield server
