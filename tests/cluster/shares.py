"""A pytest plugin of the suite: each worker of pytest-xdist has a cluster of its own.

``SUITE_CLUSTERS`` is a JSON list with the environment variables of each worker, by its number.
"""

import json
import os
from typing import Final

from tests.e2e import leash

CLUSTERS_VARIABLE: Final = "SUITE_CLUSTERS"


def pytest_configure() -> None:
    """Name this worker's cluster to its tests, and end the worker with the process that hands out the tests."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    clusters = json.loads(os.environ[CLUSTERS_VARIABLE])
    os.environ.update(clusters[int(worker.removeprefix("gw"))])
    os.environ.pop(leash.PARENT_VARIABLE, None)  # it names the parent of this worker's parent
    leash.hold()
