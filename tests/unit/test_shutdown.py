"""SIGTERM while the operator starts, in a process that has no default action for it, as process 1 of a container."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.unit.kube.scripted_client import kubeconfig_in

SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


def handles_sigterm(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) & SIGTERM_BIT)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the handlers of a process from /proc")
@pytest.mark.parametrize("delay_s", [0.0, 0.2, 0.6, 1.2, 2.5])
def test_sigterm_ends_a_start_at_every_moment(tmp_path: Path, delay_s: float) -> None:
    """During the imports, and while the API server leaves requests unanswered: it ends well, at once."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        kubeconfig = kubeconfig_in(tmp_path, {"server": f"http://127.0.0.1:{silent.getsockname()[1]}"})
        process = subprocess.Popen(
            (sys.executable, "-m", "operator_app", "run", "--http-port=0", f"--kubeconfig={kubeconfig}"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),  # noqa: PLW1509 - no other thread forks
        )
        try:
            deadline = time.monotonic() + 60
            while not handles_sigterm(process.pid):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(delay_s)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=40)
        finally:
            process.kill()
    assert process.returncode == 0, said.decode()
    assert b"Traceback" not in said
