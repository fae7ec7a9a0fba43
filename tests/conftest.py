"""Fixtures and settings of all tests, in any folder."""

import sys
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing about what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio, as the operator does."""
    return "asyncio"


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Prints a line past pytest's capturing: what is built for tests takes minutes, the first time."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def print_line(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, file=sys.stderr, flush=True)

    return print_line
