"""How soon is a child there again after ``kubectl delete --cascade=foreground``?

Run as ``python -m benchmarks.recreate [EACH]`` (60 by default), or ``make bench-recreate``. Of as many proxies each
child is deleted in the foreground once. The latency goes from the event of the end of the old child to the event of the
new one, both seen by one watch of somebody else; how long the garbage collector takes for the end is told beside it.
Exits with 1 if a new child took longer than ``MOST_S``.
"""

import json
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import httpx2

from benchmarks.situation import AS_SHIPPED, make_namespace, reconciled
from operator_app.api.kinds import CHILD_KINDS, ENVOY_PROXY, Key, Kind
from operator_app.desired import child_key
from tests.e2e.controlplane import ControlPlane
from tests.e2e.kube import Kube, path_of
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import a_proxy
from tests.e2e.shipped import CRDS, operator_identity

TENANTS: Final = 10
PAUSE_S: Final = 0.2
TIMEOUT_S: Final = 120.0
MOST_S: Final = 5.0


class Seen:
    """When children of one kind ended and came again, on this process's monotonic clock."""

    def __init__(self, admin: Kube, kind: Kind) -> None:
        self._admin = admin
        self._kind = kind
        self._is_over = threading.Event()
        self.ended_mono: dict[Key, float] = {}
        self.latency_s: dict[Key, float] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the kind for as long as the block lasts."""
        thread = threading.Thread(target=self._follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _follow(self) -> None:
        path = path_of(self._kind, Key("", ""))
        version = self._admin.request("GET", path).json()["metadata"]["resourceVersion"]
        http = self._admin._http  # noqa: SLF001 - no other user of the client watches
        while not self._is_over.is_set():
            params = {"watch": "true", "timeoutSeconds": "5", "resourceVersion": version}
            with suppress(httpx2.TransportError), http.stream("GET", path, params=params) as lines:
                for line in lines.iter_lines():
                    now_mono, event = time.monotonic(), json.loads(line)
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._note(event["type"], event["object"]["metadata"], now_mono)

    def _note(self, what: str, metadata: dict[str, str], now_mono: float) -> None:
        key = Key(metadata["namespace"], metadata["name"])
        if what == "DELETED":
            self.ended_mono[key] = now_mono
        elif what == "ADDED" and key in self.ended_mono:
            self.latency_s.setdefault(key, now_mono - self.ended_mono[key])


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    return sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]


def recreated(admin: Kube, kind: Kind, keys: list[Key]) -> tuple[list[float], list[float]]:
    """Seconds from the end of each child to the new one, and from each request to the end, after all deletions."""
    seen, asked_mono = Seen(admin, kind), defaultdict[Key, float](float)
    with seen.watching():
        time.sleep(1)
        for key in map(child_key, keys):
            asked_mono[key] = time.monotonic()
            admin.delete(kind, key, propagation="Foreground")
            time.sleep(PAUSE_S)
        deadline_mono = time.monotonic() + TIMEOUT_S
        while len(seen.latency_s) < len(keys):
            assert time.monotonic() < deadline_mono, f"{len(keys) - len(seen.latency_s)} of {kind} are not back"
            time.sleep(0.1)
    return list(seen.latency_s.values()), [seen.ended_mono[key] - at for key, at in asked_mono.items()]


def main(arguments: list[str]) -> int:
    """Print the table; returns the exit code."""
    count = int(arguments[0]) if arguments else 60
    keys = [Key(f"tenant-{number % TENANTS}", f"p{number}") for number in range(count)]
    with (
        ControlPlane(crds=CRDS, audit_bodies=False) as cluster,
        Kube(cluster.kubeconfig) as admin,
        tempfile.TemporaryDirectory() as scratch,
    ):
        operator = OperatorProcess(operator_identity(cluster, admin), Path(scratch, "operator.log"))
        for name in dict.fromkeys(key.namespace for key in keys):
            make_namespace(admin, name)
        for key in keys:
            admin.create(ENVOY_PROXY, a_proxy(*key, replicas=1))
        try:
            operator.start(*AS_SHIPPED)
            deadline_mono = time.monotonic() + TIMEOUT_S
            while reconciled(admin, "") < count:
                assert time.monotonic() < deadline_mono, "they do not converge"
                time.sleep(0.5)
            print(f"{count} deletions in the foreground of each kind; seconds")
            print("| child | end until new, p50 | p99 | longest | request until end, p50 |\n|---|---|---|---|---|")
            longest_s = 0.0
            for kind in CHILD_KINDS:
                found, ends = recreated(admin, kind, keys)
                longest_s = max(longest_s, *found)
                cells = statistics.median(found), percentile(found, 0.99), max(found), statistics.median(ends)
                print(f"| {kind} | {' | '.join(f'{cell:.3f}' for cell in cells)} |", flush=True)
        finally:
            operator.kill()
    return int(longest_s > MOST_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
