"""One component as a child process that can't outlive its parent.

The child holds the reading end of a pipe as its standard input and ends when that does (``main.go``), so it is gone
after the parent's exit, crash or ``kill -9`` alike, on any platform and from whichever thread it was started.
"""

import os
import subprocess
from pathlib import Path
from typing import Final

LOG_TAIL_LINES: Final = 25

GARBAGE_COLLECTION: Final = {"GOGC": "400", "GOMEMLIMIT": "1500MiB"}
"""Go's runtime collects less often than by default, where there is memory: these components allocate much and keep
little, and in a burst of requests a quarter of the API server's processor time went into collecting."""


class Component:
    """A running component; ``name`` names its log file, and is its first argument unless another is given."""

    def __init__(self, binary: Path, arguments: list[str], logs: Path, *, name: str = "") -> None:
        self.name = name or arguments[0]
        self._log = logs / f"{self.name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [binary, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=GARBAGE_COLLECTION | os.environ,
                # Ctrl-C at a terminal goes to the whole foreground group; tests still need the API server to clean up.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, for measuring; never signal it, use ``kill``."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    def log(self) -> str:
        """Everything that it has written."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def log_tail(self) -> str:
        """The last lines that it has written, under a heading."""
        return "\n".join([f"--- {self._log}", *self.log().splitlines()[-LOG_TAIL_LINES:]])

    def kill(self) -> None:
        """End it at once and wait until it is gone. Nothing that it holds is worth an orderly shutdown."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
