"""The operator with a plan of faults: ``python -m tests.e2e.faults.operator PLAN NOTICES run ...``.

``PLAN`` is the JSON file of a ``Plan``. The file ``NOTICES`` gets one JSON line for every fault and for everything that
the plan wants recorded. A line is written before its fault happens, so the one of a kill is there as well. Everything
behind these two is the operator's own command line.
"""

import functools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from operator_app import app
from operator_app.__main__ import main
from operator_app.kube.client import Cluster
from tests.e2e.faults.injector import Injector
from tests.e2e.faults.plan import Plan
from tests.e2e.faults.transport import FaultyTransport


def run(plan: Path, notices: Path, arguments: list[str]) -> int:
    """Run the operator with a plan; returns its exit code, unless the plan kills it."""
    descriptor = os.open(notices, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def notify(what: Mapping[str, Any]) -> None:
        os.write(descriptor, json.dumps(what).encode() + b"\n")

    injector = Injector(Plan.read(plan), notify)
    connect = functools.partial(
        Cluster.connect, transport_wrapper=functools.partial(FaultyTransport, injector=injector)
    )
    with mock.patch.object(app, "run", functools.partial(app.run, connect=connect)):
        return main(arguments)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
