"""How long a full garbage collection holds the process beside a filled store: as Python does it, and as shipped.

Run as ``python -m benchmarks.pauses [PROXIES ...]`` (1,000 and 10,000 by default), or ``make bench-pauses``. Each proxy
has a spec of its own and a record. Nothing but this process runs; the times are CPU time, so a busy machine changes
them little.
"""

import gc
import sys
import time
from contextlib import nullcontext
from typing import Any

import operator_app.app
from benchmarks.situation import small
from operator_app.api.kinds import ENVOY_PROXY, PROXY_REGISTRATION
from operator_app.controller.garbage import COLLECT_EVERY, short_pauses
from operator_app.controller.scopes import KEPT, SECOND_INDEXES, indexes_of
from operator_app.kube.deltas import Changed
from operator_app.kube.store import Store

PROXIES_A_STEP = 500
"""About what a list delivers in a second, after which the operator's heartbeat comes."""


class Pauses:
    """The longest collection since the last call of ``taken``, in seconds of CPU time."""

    def __init__(self) -> None:
        self._begun_s = self._longest_s = 0.0
        gc.callbacks.append(self._notice)

    def _notice(self, phase: str, _info: dict[str, Any]) -> None:
        if phase == "start":
            self._begun_s = time.thread_time()
        else:
            self._longest_s = max(self._longest_s, time.thread_time() - self._begun_s)

    def taken(self) -> float:
        """The longest one."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


def longest_s(count: int, pauses: Pauses, *, is_shipped: bool) -> float:
    """The longest pause while so many proxies with their records become known, and in the next full collection."""
    store, version = Store(indexes_of(operator_app.app.__name__), KEPT, SECOND_INDEXES), 0
    with short_pauses() if is_shipped else nullcontext() as garbage:
        pauses.taken()
        for number in range(count):
            proxy = small(f"tenant-{number // 10}", number)
            reference = {"namespace": proxy["metadata"]["namespace"], "name": f"p{number}", "uid": f"uid-{number}"}
            record = {
                "metadata": {"namespace": "edge-system", "name": f"proxy-uid-{number}", "generation": 1},
                "spec": {"proxy": reference, "generation": 1, "state": "Registered", "registry": "in-cluster"},
            }
            for kind, obj in ((ENVOY_PROXY, proxy), (PROXY_REGISTRATION, record)):
                version += 1
                obj["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": str(version), "generation": 1}
                store.apply_delta(Changed(kind, obj))
            if garbage is not None and number % PROXIES_A_STEP == 0:
                garbage.step()
        # Python does so when a quarter of what it has looked at is new; as shipped, it is done once a minute.
        if garbage is None:
            gc.collect()
        else:
            for _ in range(COLLECT_EVERY):
                garbage.step()
        return pauses.taken()


def main() -> None:
    """Print the table."""
    pauses = Pauses()
    print(f"{'proxies':>8}  {'as Python does, ms':>18}  {'as shipped, ms':>14}")
    for count in [int(each) for each in sys.argv[1:]] or [1_000, 10_000]:
        plain_s, shipped_s = (longest_s(count, pauses, is_shipped=each) for each in (False, True))
        print(f"{count:>8,}  {plain_s * 1000:>18.0f}  {shipped_s * 1000:>14.0f}", flush=True)


if __name__ == "__main__":
    main()
