"""The operator as a child process that ends with its parent: ``python -m tests.e2e.leashed_operator run ...``.

For tests, the demo and ``make dev``, which people may end in any way: no operator that they started may then go on
writing to a cluster.
"""

import os
import signal
import sys
import threading
import time
from typing import Final

from operator_app.__main__ import main

CHECK_INTERVAL_S: Final = 1.0


def terminate_after(parent: int) -> None:
    """Send SIGTERM to this process once ``parent``, the process that started it, has ended."""
    while os.getppid() == parent:
        time.sleep(CHECK_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=terminate_after, args=(os.getppid(),), daemon=True).start()
    sys.exit(main())
