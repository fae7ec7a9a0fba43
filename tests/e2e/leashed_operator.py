"""``python -m tests.e2e.leashed_operator run ...``: the operator, which ends when its parent process ends.

For the demo and ``make dev``, which people may kill in any way; no operator that they started may then go on.
"""

import os
import signal
import sys
import threading
import time
from typing import Final

from operator_app.__main__ import main

CHECK_INTERVAL_S: Final = 1.0


def end_with(parent: int) -> None:
    """Send SIGTERM to this process once it is not a child of ``parent`` any more: only a parent's death does that."""
    while os.getppid() == parent:
        time.sleep(CHECK_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    sys.exit(main())
