"""A server that a test starts on this machine: it ends with the test's process, and is waited for until it answers."""

import pwd
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def as_user(user: str | None, *options: str) -> tuple[str, ...]:
    """What to put before a command so that another user runs it (``None``: the same one).

    ``options`` of ``setpriv`` are in the same call, since a change of the user takes back others, such as a signal at
    the death of the parent.
    """
    if user is not None:
        group = pwd.getpwnam(user).pw_gid
        options = (*options, f"--reuid={user}", f"--regid={group}", "--clear-groups")
    return ("setpriv", *options) if options else ()


class ServerProcess:
    """One server, started by ``command`` with its output in ``log``. It may be started again after ``stop``.

    ``name`` is what an error calls it. It runs as ``user``, and with the test's process it ends by ``end_signal``.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        *,
        user: str | None = None,
        end_signal: str = "KILL",
    ) -> None:
        self._name = name
        self._command = (*as_user(user, f"--pdeathsig={end_signal}"), *command)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, ask: Callable[[], object], not_yet: type[Exception] | tuple[type[Exception], ...], timeout_s: float
    ) -> None:
        """Start it and call ``ask`` until that raises none of ``not_yet`` any more.

        Raises ``RuntimeError`` with the end of the log if the server ends first, or after ``timeout_s`` seconds.
        """
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline_mono = time.monotonic() + timeout_s
        while time.monotonic() < deadline_mono and self._process.poll() is None:
            try:
                ask()
            except not_yet:
                time.sleep(0.05)
            else:
                return
        self.stop()
        raise RuntimeError(f"{self._name} did not start: {self._log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
