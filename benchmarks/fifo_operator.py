"""The operator with one lane for everybody and no priorities, to compare with: ``-m benchmarks.fifo_operator run``."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from operator_app.__main__ import main
from operator_app.controller import triggers
from operator_app.controller.workqueue import Priority


@contextmanager
def one_fifo() -> Iterator[None]:
    """One queue for everybody, first come first served, for as long as the block lasts."""
    with (
        mock.patch.object(triggers.Triggers, "tenant_of", return_value="everybody"),
        mock.patch.object(triggers, "priority_of", return_value=Priority.REPAIR),
    ):
        yield


if __name__ == "__main__":
    with one_fifo():
        sys.exit(main())
