"""Building the control plane's binary, once per content of its sources, outside the working tree.

The cache is ``$XDG_CACHE_HOME/operator-app/controlplane/<digest>/controlplane``; the digest covers sources, module
files, flags and platform. A binary appears there whole or not at all, and only one process builds it.
"""

import fcntl
import hashlib
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from tests.e2e.controlplane.toolchain import go_command

Report = Callable[[str], None]
"""Takes one line about what is going on."""

KUBERNETES_VERSION: Final = "v1.36.3"
PROGRESS_INTERVAL_S: Final = 10.0

MODULE: Final = Path(__file__).parent
FLAGS: Final = (
    "-trimpath",
    "-buildvcs=false",
    "-mod=readonly",
    f"-ldflags=-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}",
)


class BuildError(RuntimeError):
    """``go build`` failed; the message ends with what it said."""


def cache_directory() -> Path:
    """Where this project keeps what is expensive to make and safe to delete."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "operator-app"


def built_binary(report: Report) -> Path:
    """The control plane's binary, built if it is not cached: minutes the first time.

    ``report`` is called at each step and every ``PROGRESS_INTERVAL_S`` seconds in between. Raises ``BuildError``, and
    ``ToolchainError`` where no Go toolchain can be had.
    """
    directory = cache_directory() / "controlplane" / _digest()
    binary = directory / "controlplane"
    if binary.exists():
        return binary
    directory.mkdir(parents=True, exist_ok=True)
    with _exclusive(directory / "lock", report):
        if not binary.exists():
            unfinished = directory / "controlplane.unfinished"
            _build(go_command(cache_directory() / "go", report), unfinished, report)
            unfinished.replace(binary)
    return binary


def _digest() -> str:
    """Of everything that decides what the binary is."""
    digest = hashlib.sha256(repr((FLAGS, platform.system(), platform.machine())).encode())
    for file in sorted([*MODULE.glob("*.go"), MODULE / "go.mod", MODULE / "go.sum"]):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _build(go: Path, output: Path, report: Report) -> None:
    report(f"control plane: building Kubernetes {KUBERNETES_VERSION} and etcd with {go}; minutes, the first time")
    environment = os.environ | {
        # Neither a C compiler nor another toolchain may be needed, and nobody's own flags may slip in.
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "",
        "GOWORK": "off",
    }
    log_file = output.with_suffix(".log")
    started_mono = time.monotonic()
    with log_file.open("wb") as log:
        # -v names each package when it is compiled and each module when it is downloaded: a measure of progress.
        process = subprocess.Popen(
            [go, "build", "-v", *FLAGS, "-o", output, "."],
            cwd=MODULE,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _await_build(process, log_file, started_mono, report)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise BuildError("\n".join(["go build failed:", *_lines(log_file)[-25:]]))
    report(f"control plane: built in {time.monotonic() - started_mono:.0f} s")


def _await_build(process: subprocess.Popen[bytes], log_file: Path, started_mono: float, report: Report) -> None:
    while True:
        try:
            process.wait(timeout=PROGRESS_INTERVAL_S)
        except subprocess.TimeoutExpired:
            lines = _lines(log_file)
            modules = sum(line.startswith("go: downloading ") for line in lines)
            elapsed_s = time.monotonic() - started_mono
            report(
                f"control plane: {elapsed_s:.0f} s: {modules} modules fetched, {len(lines) - modules} packages compiled"
            )
        else:
            return


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines()


@contextmanager
def _exclusive(lock_file: Path, report: Report) -> Iterator[IO[bytes]]:
    """Hold the lock, which ends with the process that holds it; says so while another build has it."""
    with lock_file.open("ab") as lock:
        waited_s = 0.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waited_s % PROGRESS_INTERVAL_S == 0:
                    report(f"control plane: another process is building it; waiting for {waited_s:.0f} s")
                time.sleep(1.0)
                waited_s += 1.0
            else:
                break
        yield lock
