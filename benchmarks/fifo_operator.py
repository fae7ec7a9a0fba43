"""The operator with one lane for everybody and no priorities, to compare with: ``-m benchmarks.fifo_operator run``."""

import sys
from unittest import mock

from operator_app.__main__ import main
from operator_app.controller import triggers
from operator_app.controller.workqueue import Priority

if __name__ == "__main__":
    with (
        mock.patch.object(triggers.Triggers, "tenant_of", return_value="everybody"),
        mock.patch.object(triggers, "priority_of", return_value=Priority.REPAIR),
    ):
        sys.exit(main())
