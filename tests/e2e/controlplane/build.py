"""Building Go programs of this project, once per content of their sources, outside the working tree.

The cache is ``$XDG_CACHE_HOME/operator-app/<module>/<digest>/bin``; the digest covers sources, module files, flags and
platform. A module's programs appear there all at once or not at all, and only one process builds them.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tests.e2e.controlplane.toolchain import go_command

Report = Callable[[str], None]
"""Takes one line about what is going on."""

KUBERNETES_VERSION: Final = "v1.36.3"
PROGRESS_INTERVAL_S: Final = 10.0

FLAGS: Final = ("-trimpath", "-buildvcs=false", "-mod=readonly")


class BuildError(RuntimeError):
    """``go build`` failed; the message ends with what it said."""


@dataclass(frozen=True, slots=True)
class GoModule:
    """A Go module in ``directory`` and the ``programs`` (package paths) to build from it.

    ``name`` begins each line of progress and is the folder in the cache; ``contents`` says what is built.
    """

    name: str
    directory: Path
    programs: tuple[str, ...]
    contents: str
    ldflags: str = "-s -w"

    def digest(self) -> str:
        """Of everything that decides what the programs are."""
        decisive = (FLAGS, self.ldflags, self.programs, platform.system(), platform.machine())
        digest = hashlib.sha256(repr(decisive).encode())
        for file in sorted([*self.directory.rglob("*.go"), self.directory / "go.mod", self.directory / "go.sum"]):
            content = file.read_bytes()
            digest.update(f"{file.relative_to(self.directory)} {len(content)}\n".encode() + content)
        return digest.hexdigest()


CONTROL_PLANE: Final = GoModule(
    name="control plane",
    directory=Path(__file__).parent,
    programs=(".",),
    contents=f"Kubernetes {KUBERNETES_VERSION} and etcd",
    ldflags=f"-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}",
)


def cache_directory() -> Path:
    """Where this project keeps what is expensive to make and safe to delete."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "operator-app"


def built_binary(report: Report) -> Path:
    """The binary of all Kubernetes components and etcd, built if it is not cached; see ``built_programs``."""
    return built_programs(CONTROL_PLANE, report) / "controlplane"


def built_programs(module: GoModule, report: Report) -> Path:
    """The directory with a module's programs, each named like its package; built if not cached: minutes the first time.

    ``report`` is called at each step and every ``PROGRESS_INTERVAL_S`` seconds in between. Raises ``BuildError``, and
    ``ToolchainError`` where no Go toolchain can be had.
    """
    directory = cache_directory() / module.name.replace(" ", "") / module.digest()
    programs = directory / "bin"
    if programs.exists():
        return programs
    directory.mkdir(parents=True, exist_ok=True)
    with _exclusive(directory / "lock", module, report):
        if not programs.exists():
            unfinished = directory / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            _build(module, go_command(cache_directory() / "go", report), unfinished, report)
            unfinished.rename(programs)
    return programs


def _build(module: GoModule, go: Path, output: Path, report: Report) -> None:
    report(f"{module.name}: building {module.contents} with {go}; minutes, the first time")
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
            [go, "build", "-v", *FLAGS, f"-ldflags={module.ldflags}", "-o", f"{output}/", *module.programs],
            cwd=module.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _await_build(module, process, log_file, started_mono, report)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise BuildError("\n".join(["go build failed:", *_lines(log_file)[-25:]]))
    report(f"{module.name}: built in {time.monotonic() - started_mono:.0f} s")


def _await_build(
    module: GoModule, process: subprocess.Popen[bytes], log_file: Path, started_mono: float, report: Report
) -> None:
    while True:
        try:
            process.wait(timeout=PROGRESS_INTERVAL_S)
        except subprocess.TimeoutExpired:
            lines = _lines(log_file)
            modules = sum(line.startswith("go: downloading ") for line in lines)
            elapsed_s = time.monotonic() - started_mono
            report(
                f"{module.name}: {elapsed_s:.0f} s: {modules} modules fetched, {len(lines) - modules} packages compiled"
            )
        else:
            return


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines()


@contextmanager
def _exclusive(lock_file: Path, module: GoModule, report: Report) -> Iterator[IO[bytes]]:
    """Hold the lock, which ends with the process that holds it; says so while another build has it."""
    with lock_file.open("ab") as lock:
        waited_s = 0.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waited_s % PROGRESS_INTERVAL_S == 0:
                    report(f"{module.name}: another process is building it; waiting for {waited_s:.0f} s")
                time.sleep(1.0)
                waited_s += 1.0
            else:
                break
        yield lock
