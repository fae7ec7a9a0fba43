"""Fixtures and settings of all tests, in any folder."""

from collections import Counter
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

LONG_S: Final = 900
"""A test that is allowed more than this takes minutes."""

# How long an example takes says how busy the machine is, and nothing about what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the longest tests come first, then those with the most: begun last, one would keep a worker alone."""
    tests = Counter(item.path for item in items)
    limits = ((item.path, item.get_closest_marker("timeout")) for item in items)
    long = {path for path, limit in limits if limit is not None and limit.args[0] > LONG_S}
    items.sort(key=lambda item: (item.path not in long, -tests[item.path]))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio, as the operator does."""
    return "asyncio"
