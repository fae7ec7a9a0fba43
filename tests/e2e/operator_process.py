"""The operator as a process of its own under its own ServiceAccount, as in a cluster.

Tests start it, stop it with a signal, kill it, and read its log and its metrics. What it does to objects, tests read
from the API server.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from operator_app.api.kinds import Object
from tests.e2e import leash
from tests.e2e.module_process import ModuleProcess
from tests.e2e.node import Node, network
from tests.paths import ROOT

SERVICE_ACCOUNT: Final = "operator-app"
OPERATOR_NAMESPACE: Final = "edge-system"
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 60.0

OPERATOR: Final = ("tests.e2e.leashed_operator", "run")
"""The operator's own command line; it ends with the tests, however they end."""

QUICK: Final = (
    "--backoff-base-s=0.1",
    "--backoff-cap-s=2",
    "--status-settle-s=1",
    "--lease-duration-s=6",
    "--renew-deadline-s=4",
    "--retry-period-s=1",
    "--hostname-rest-s=0",
)
"""Waits short enough for tests; what they wait for is the same."""


_replicas: dict[str, "OperatorProcess"] = {}
"""The latest user of each name. A name whose process has ended is used again, so its Leases are acquired at once."""


class OperatorProcess:
    """One operator process after another, never two at a time. Whoever starts it has to stop or kill it.

    Two objects whose processes run at the same time are two replicas. With a ``node`` they run in its network, where
    the addresses of Pods are. ``network`` may be set to another namespace, for the processes that start after it.
    """

    def __init__(self, kubeconfig: Path, log: Path, node: Node | None = None) -> None:
        self.replica = ""
        self._kubeconfig = kubeconfig if node is None else node.kubeconfig_inside(kubeconfig)
        self.network = None if node is None else node.network
        self._log = log
        self._process: subprocess.Popen[bytes] | ModuleProcess | None = None
        self._log_from = 0
        self._port: int | None = None

    def start(self, *flags: str, module: Sequence[str] = OPERATOR, wait: bool = True) -> None:
        """Start it and wait until its stores are in sync. ``module`` may name another way to run the same operator.

        Raises ``AssertionError`` with the log when it does not come up.
        """
        assert not self.is_running, "an operator is running already"
        self._log_from = self._log.stat().st_size if self._log.exists() else 0
        self._port = None
        self.replica = self._free_name()
        _replicas[self.replica] = self
        identity = (f"--kubeconfig={self._kubeconfig}", f"--replica-name={self.replica}", "--http-port=0")
        # Elsewhere no address of a Pod leads anywhere.
        asking = "--ask-pods=false" if self.network is None else "--ask-pods=true"
        name = module[0]
        arguments = (*module[1:], *identity, *QUICK, asking, *flags)
        if self.network is None:
            self._process = ModuleProcess(name, arguments, self._log, os.environ)
        else:
            self._process = self._inside(self.network, [sys.executable, "-m", name, *arguments])
        if wait:
            self.wait_for("synced")

    def _inside(self, namespace: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                ["nsenter", f"--net={namespace}", "--", *command],
                cwd=ROOT,
                env=leash.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _free_name(self) -> str:
        """The name used before, or else the first that no running process has."""
        names = (self.replica, *(f"replica-{number}" for number in range(len(_replicas) + 1)))
        return next(each for each in names if each and (each not in _replicas or not _replicas[each].is_running))

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the latest run."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """End it the way a kubelet does and wait. Raises ``AssertionError`` when its exit code is not 0."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(STOP_TIMEOUT_S)
        assert code == 0, f"the operator ended with {code}:\n{self.log_text()}"

    def kill(self) -> None:
        """``kill -9`` and wait."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def suspend(self) -> None:
        """SIGSTOP: the process is suspended, and its clocks go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def wait_dead(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """Wait until it has ended by itself and return the exit code, negative for a signal."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def wait_for(self, event: str, timeout_s: float = START_TIMEOUT_S) -> Object:
        """Wait for a log line of this run with that event and return it."""
        deadline_mono = time.monotonic() + timeout_s
        while True:
            found = next((line for line in self.log() if line.get("event") == event), None)
            if found is not None:
                return found
            assert self.is_running, f"the operator ended before {event!r}:\n{self.log_text()}"
            assert time.monotonic() < deadline_mono, f"no {event!r} in {timeout_s} s:\n{self.log_text()}"
            time.sleep(0.02)

    def log(self) -> list[Object]:
        """The log lines of the latest run."""
        lines = []
        for line in self.log_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue  # a traceback of the interpreter, or a line that is being written
        return lines

    def log_text(self) -> str:
        """The log of the latest run as it stands."""
        with self._log.open("rb") as log:
            log.seek(self._log_from)
            return log.read().decode(errors="replace")

    def get(self, path: str) -> tuple[int, str]:
        """The status and the text of an answer on its HTTP port."""
        if self._port is None:
            self._port = self.wait_for("started")["http_port"]
        inside = nullcontext() if self.network is None else network.inside(self.network)
        try:
            with inside, urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all series that carry ``labels``."""
        return sum(value for found, value in self.series(name) if labels.items() <= found.items())

    def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Every series of a metric at one moment: its labels and its value."""
        pattern = re.compile(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)")
        matches = filter(None, map(pattern.fullmatch, self.get("/metrics")[1].splitlines()))
        return [(dict(re.findall(r'(\w+)="([^"]*)"', match[1] or "")), float(match[2])) for match in matches]
