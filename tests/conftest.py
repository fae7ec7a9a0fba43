"""Fixtures of all tests, in any folder."""

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio, as the operator does."""
    return "asyncio"
