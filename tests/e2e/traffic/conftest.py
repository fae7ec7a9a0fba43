"""Fixtures of the tests by traffic."""

from collections.abc import Iterator

import pytest

from tests.e2e.traffic.servers import Server, serving


@pytest.fixture
def app() -> Iterator[Server]:
    """A backend called app."""
    with serving("app") as server:
        yield server
