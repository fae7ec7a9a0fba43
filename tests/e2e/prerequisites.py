"""Tests on a machine that lacks a prerequisite."""

import os
from typing import NoReturn

import pytest


def lacking(what: str) -> NoReturn:
    """Skip the test and say why; where ``E2E_NOTHING_LACKS`` is set, fail it.

    That is for machines where all prerequisites must be there, such as the workflow's: a test that is skipped there is
    lost.
    """
    if os.environ.get("E2E_NOTHING_LACKS"):
        pytest.fail(f"E2E_NOTHING_LACKS is set, and this machine lacks what this test needs: {what}", pytrace=False)
    pytest.skip(what)
