"""The handle of a stand-in node: a process of its own, for as long as a ``with`` block or a fixture lasts."""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.e2e.node.registration import RUNS_ENVOY

REPOSITORY: Final = Path(__file__).parents[3]
STOP_TIMEOUT_S: Final = 30


class StandInNode:
    """A running node of the cluster that ``kubeconfig`` points to.

    Entering the block returns when the scheduler may use the node; leaving it ends every Envoy and removes every
    network namespace. The same happens if this process dies: the node's standard input is a pipe from here. If the node
    itself is killed its Envoys die with it, and its namespaces are removed when the next one starts.

    ``log_file`` takes what the node has to say; without it that goes to stderr.
    """

    def __init__(
        self, kubeconfig: Path, name: str = "standin-0", *, validate_only: bool = False, log_file: Path | None = None
    ) -> None:
        self.name = name
        self._log_file = log_file
        self._command = [
            *(sys.executable, "-m", "tests.e2e.node", "--lifeline"),
            *("--kubeconfig", str(kubeconfig.absolute()), "--name", name),
            *(["--validate-only"] if validate_only else []),
        ]
        self._process: subprocess.Popen[str] | None = None
        self._facts: dict[str, str] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def runs_envoy(self) -> bool:
        """True if Pods really run here; False if Envoy only validates their configuration."""
        return self._facts["mode"] == RUNS_ENVOY

    @property
    def pid(self) -> int:
        """Process id of the node; its Envoys are other processes."""
        assert self._process is not None
        return self._process.pid

    def log(self, namespace: str, pod: str, container: str) -> str:
        """What a container (and its exec hooks) wrote so far; empty if it never ran. Kept after the Pod's end."""
        file = Path(self._facts["logs"]) / f"{namespace}_{pod}_{container}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def start(self) -> None:
        """Start the node. Raises RuntimeError if it ends before it is ready."""
        log = None if self._log_file is None else self._log_file.open("ab")
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
                # Ctrl-C at a terminal is for the tests, which then end the node in their own order.
                start_new_session=True,
            )
        finally:
            if log is not None:
                log.close()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.stop()
            raise RuntimeError(
                f"the stand-in node {self.name} ended before it was ready; see {self._log_file or 'above'}"
            )
        self._facts = json.loads(line)

    def stop(self) -> None:
        """End the node, all that it runs and its Node object. Harmless if it has ended already."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
