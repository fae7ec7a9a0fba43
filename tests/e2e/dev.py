"""``make dev``: a cluster with the operator that stays, until ``make dev-stop``.

``start`` (the default) returns once the cluster can be used, or finds the one that runs already; ``stop`` ends it;
``serve`` is the background process itself and can be run in the foreground. There is one for each checkout and user,
with its kubeconfig and logs below the user's cache directory. A lock that ends with the background process tells
whether there is one, so that nothing left behind by a crash is ever taken for a cluster.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from tests.e2e.controlplane.build import KUBERNETES_VERSION, cache_directory
from tests.e2e.stage import EXPECTED_ERRORS, StageError, local_stage, sentence
from tests.paths import ROOT

STOP_TIMEOUT_S: Final = 60.0
NO_NODE: Final = "no Pods run, for the reason above"
POLL_INTERVAL_S: Final = 0.1


def main() -> int:
    """Run one command; the exit code is 0, 1 when something went wrong, or 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.dev", description=__doc__)
    parser.add_argument("command", nargs="?", default="start", choices=("start", "stop", "serve"))
    command = parser.parse_args().command
    place = Place(ROOT)
    try:
        {"start": start, "stop": stop, "serve": serve}[command](place)
    except KeyboardInterrupt:
        print("dev: stopped" if command == "serve" else "dev: interrupted", file=sys.stderr)
        return 0 if command == "serve" else 130
    except EXPECTED_ERRORS as error:
        print(f"dev: {sentence(error)}", file=sys.stderr)
        return 1
    return 0


class Place:
    """Where the cluster of one checkout keeps its files, and whether it runs."""

    def __init__(self, repository: Path) -> None:
        digest = hashlib.sha256(bytes(repository.resolve())).hexdigest()[:8]
        self.directory = cache_directory() / f"dev-{digest}"
        self.kubeconfig = self.directory / "kubeconfig"
        """There only while the cluster can be used."""
        self.node = self.directory / "node"
        """The command that leads into the node's network; absent where no node runs."""
        self.log = self.directory / "serve.log"
        self._exclusive = self.directory / "lock"
        self._pid = self.directory / "pid"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the background process of this place. Raises ``StageError`` when there is one already."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._exclusive.open("wb") as exclusive, self._pid.with_suffix(".new").open("wb") as pid:
            try:
                fcntl.flock(exclusive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StageError(f"a cluster runs already or is starting; see {self.log}") from None
            self.kubeconfig.unlink(missing_ok=True)
            # The file gets its name when it is complete and locked: whoever finds it locked may trust the number.
            fcntl.flock(pid, fcntl.LOCK_EX)
            pid.write(str(os.getpid()).encode())
            pid.flush()
            self._pid.with_suffix(".new").rename(self._pid)
            try:
                yield
            finally:
                self.kubeconfig.unlink(missing_ok=True)

    def is_up(self) -> bool:
        """Whether the cluster can be used."""
        return self.pid() is not None and self.kubeconfig.exists()

    def pid(self) -> int | None:
        """The background process, or None where there is none."""
        try:
            with self._pid.open("rb") as pid:
                fcntl.flock(pid, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            return int(self._pid.read_bytes())
        return None


def start(place: Place) -> None:
    """Start the cluster in the background, show how that goes, and say how to use it.

    Returns when it can be used, at once if it runs already. An interrupt ends what was started.
    """
    if not place.is_up():
        _start(place)
    print(_directions(place), flush=True)


def _start(place: Place) -> None:
    place.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    child = None if place.pid() else _background_process(place)
    shown = _Tail(place.log)
    try:
        while not place.is_up():
            shown.show()
            if child is None or child.poll() is not None:
                _check_that_somebody_starts_it(place)
            time.sleep(POLL_INTERVAL_S)
    except BaseException:
        shown.show()
        if child is not None:
            child.terminate()
            child.wait()
        raise
    shown.show()


def _background_process(place: Place) -> subprocess.Popen[bytes]:
    with place.log.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.dev", "serve"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _check_that_somebody_starts_it(place: Place) -> None:
    if place.pid() is None:
        raise StageError(f"the cluster did not start; its logs are in {place.directory}")


def stop(place: Place) -> None:
    """End the cluster and wait until it is gone; where none runs, say so. Raises ``StageError`` if it does not end."""
    if place.pid() is None:
        print("dev: no cluster is running")
        return
    deadline_mono = time.monotonic() + STOP_TIMEOUT_S
    asked: int | None = None
    while (pid := place.pid()) is not None:
        if pid != asked:
            os.kill(pid, signal.SIGTERM)
            asked = pid
        if time.monotonic() > deadline_mono:
            raise StageError(f"process {pid} did not end within {STOP_TIMEOUT_S:g} s; see {place.log}")
        time.sleep(POLL_INTERVAL_S)
    print("dev: stopped")


def serve(place: Place) -> None:
    """Be the cluster until a signal comes, which ends in ``KeyboardInterrupt``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    with place.held(), local_stage(place.directory, lambda line: print(line, flush=True)) as stage:
        place.node.unlink(missing_ok=True)
        if stage.node is not None:
            place.node.write_text(f"nsenter --net={stage.node.network}", encoding="utf-8")
        unfinished = place.directory / "kubeconfig.unfinished"
        shutil.copy(stage.cluster.kubeconfig, unfinished)
        unfinished.replace(place.kubeconfig)
        while True:
            signal.pause()


def _directions(place: Place) -> str:
    return f"""
Kubernetes {KUBERNETES_VERSION} and the operator are running in the background{_node(place)}.

KUBECONFIG={place.kubeconfig}

Next:
  export KUBECONFIG={place.kubeconfig}
  kubectl apply -f manifests/samples/checkout.yaml
  kubectl get envoyproxies.edge.operator-app.dev -n team-a --watch
  kubectl explain envoyproxy.spec.listeners
{_way_in(place)}
Logs: {place.directory}
Stop: make dev-stop"""


def _node(place: Place) -> str:
    return ", with a node that runs Pods" if place.node.exists() else f"; {NO_NODE}"


def _way_in(place: Place) -> str:
    """Where the addresses of Pods and Services are known."""
    if not place.node.exists():
        return ""
    way_in = place.node.read_text(encoding="utf-8")
    return f"  {way_in} curl http://CLUSTER-IP  # Pods' and Services' addresses are known there only\n"


class _Tail:
    """Shows what is added to a log file. A new background process begins the file anew."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._position = 0

    def show(self) -> None:
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._position)
            text = log.read()
        self._position += len(text)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """End once: cleaning up is not to be interrupted again."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
