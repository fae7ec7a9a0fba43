"""What a test does on a machine that lacks something it needs."""

import os
from typing import NoReturn

import pytest


def lacking(what: str) -> NoReturn:
    """Skip the test and say why. In continuous integration, as root and on a cluster of its own, fail it.

    There everything is given, so a test that is skipped is a test that is lost.
    """
    if os.environ.get("CI") == "true" and os.geteuid() == 0 and not os.environ.get("E2E_KUBECONFIG"):
        pytest.fail(f"continuous integration lacks what this test needs: {what}", pytrace=False)
    pytest.skip(what)
