"""Ends this process once the process that started it has ended, however: ``kill -9`` included."""

import os
import signal
import threading
import time
from typing import Final

CHECK_INTERVAL_S: Final = 1.0
GRACE_S: Final = 20.0
"""The API server may have gone with the parent, and then whoever ends in order waits for answers."""


def hold() -> None:
    """From now on, SIGTERM is sent to this process within about a second of its parent's end, and SIGKILL later."""
    threading.Thread(target=_terminate_after, args=(os.getppid(),), daemon=True).start()


def _terminate_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
