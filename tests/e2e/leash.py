"""Ends this process once the process that started it has ended, however: ``kill -9`` included."""

import os
import signal
import threading
import time
from typing import Final

PARENT_VARIABLE: Final = "E2E_PARENT"
"""The process id of whoever starts a process that calls ``hold``: it may have ended before that process can look."""

CHECK_INTERVAL_S: Final = 1.0
GRACE_S: Final = 20.0
"""The API server may have gone with the parent, and then whoever ends in order waits for answers."""


def environment() -> dict[str, str]:
    """This process's environment, for a child that it starts and that calls ``hold``."""
    return os.environ | {PARENT_VARIABLE: str(os.getpid())}


def hold() -> None:
    """From now on, SIGTERM is sent to this process within about a second of its parent's end, and SIGKILL later."""
    threading.Thread(
        target=_end_after, args=(int(os.environ.get(PARENT_VARIABLE) or os.getppid()),), daemon=True
    ).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
