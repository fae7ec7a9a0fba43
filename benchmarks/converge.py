"""How near does the operator come to the fewest writes that a first reconcile takes, sent by a bare script?

Run as ``python -m benchmarks.converge [--profile] [OBJECTS [ROUNDS]]``, or ``make bench-converge``. In each round, on a
control plane of its own, 300 new proxies of ten tenants wait for an operator that starts; the time goes from its first
write to its last, and so does its CPU time. Then the operator ends, and a script sends the same writes (their bodies
are those in the audit log) about 300 other proxies: with the same client and the same identity, one proxy of each
tenant at a time, what depends on nothing at the same time, and without watching, comparing or deciding anything. That
is the floor.

With ``--profile`` the operator's stack is sampled while it converges, and the shares of its CPU time are printed. The
exit code is 1 if the operator read anything, wrote more than seven times for a proxy, reached less than 85 % of the
floor, or took more than 12 ms of CPU a proxy.
"""

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Final, NamedTuple, Self

import anyio

from benchmarks.situation import create_all, make_namespace, reconciled, small
from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    ENVOY_PROXY,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.apply import IMPOSSIBLE_VERSION
from operator_app.desired import child_key
from operator_app.kube.client import Cluster
from operator_app.settings import Settings
from tests.e2e.controlplane import AuditEntry, AuditLog, ControlPlane
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OPERATOR, OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, record_key
from tests.e2e.shipped import CRDS, operator_identity

TENANTS: Final = 10
ENOUGH: Final = 0.85
MOST_CPU_MS: Final = 12.0
WRITES: Final = 7
CONVERGE_TIMEOUT_S: Final = 300.0
QUIET_S: Final = 3.0
FLAGS: Final = ("--status-settle-s=0.2", "--lease-duration-s=15", "--renew-deadline-s=10", "--retry-period-s=2")
"""The operator's own wait before it tells counters is no work, so it is short."""

PROFILED: Final = ("benchmarks.profiled_operator", "run")
"""The operator whose stack is sampled."""

_KINDS: Final = {kind.plural: kind for kind in (ENVOY_PROXY, *CHILD_KINDS, PROXY_REGISTRATION)}
_FIRST: Final = frozenset({ENVOY_PROXY.plural, CONFIG_MAP.plural, SERVICE.plural})
"""What is written at the same time; the other objects come after these, and the status after all of them."""


class Write(NamedTuple):
    """One apply, as the operator has sent it."""

    plural: str
    subresource: str
    body: Object


Writes = tuple[Write, ...]
"""All writes about one proxy, in their order."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one side took for all proxies."""

    wall_s: float
    cpu_s: float
    writes: int
    reads: int = 0


@dataclass
class CpuSamples:
    """The CPU time of a process, again and again, while the block lasts."""

    pid: int
    interval_s: float = 0.05
    found: list[tuple[float, float]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(self.interval_s):
            self.found.append((time.time(), cpu_s(self.pid)))

    def spent_s(self, begun_at: float, ended_at: float) -> float:
        """The CPU time between two moments, in seconds since the epoch."""
        before = max(spent_s for at, spent_s in self.found if at <= begun_at)
        after = min(spent_s for at, spent_s in self.found if at >= ended_at)
        return after - before


def cpu_s(pid: int) -> float:
    """The CPU time of a process so far: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def namespaces(side: str) -> list[str]:
    """The tenants of one side; none of their names is a part of another one."""
    return [f"{side}-tenant-{number}" for number in range(TENANTS)]


def converge(admin: Kube, audit: AuditLog, operator: OperatorProcess, *, count: int, is_profiled: bool) -> Taken:
    """Start the operator where proxies wait, until all have converged and nothing more is written."""
    mark = audit.mark()
    operator.start(*FLAGS, module=PROFILED if is_profiled else OPERATOR)
    with CpuSamples(operator.pid) as samples:
        deadline_mono = time.monotonic() + CONVERGE_TIMEOUT_S
        while reconciled(admin, "") < count:
            assert time.monotonic() < deadline_mono, "it does not end"
            time.sleep(0.5)
        time.sleep(QUIET_S)
    entries = [each for each in audit.entries(mark) if each.user == OPERATOR_USER and is_about_proxies(each)]
    writes = [each for each in entries if each.is_write]
    begun_at, ended_at = (pick(each.received_at.timestamp() for each in writes) for pick in (min, max))
    reads = [each for each in entries if not each.is_write and each.name]
    return Taken(ended_at - begun_at, samples.spent_s(begun_at, ended_at), len(writes), len(reads))


def is_about_proxies(entry: AuditEntry) -> bool:
    """Whether a request is about a proxy, a child or a record, and not about the operator itself."""
    return entry.resource in _KINDS


def writes_by_proxy(admin: Kube, audit: AuditLog, side: str) -> dict[Key, Writes]:
    """What the operator has written for each proxy of a side."""
    proxies = [proxy for name in namespaces(side) for proxy in admin.list(ENVOY_PROXY, name)]
    about: dict[tuple[str, str, str], Key] = {}
    for proxy in proxies:
        key = Key(proxy["metadata"]["namespace"], proxy["metadata"]["name"])
        about |= {(kind.plural, *child_key(key)): key for kind in CHILD_KINDS}
        about |= {(ENVOY_PROXY.plural, *key): key, (PROXY_REGISTRATION.plural, *record_key(proxy)): key}
    found: defaultdict[Key, list[Write]] = defaultdict(list)
    for each in audit.writes(OPERATOR_USER):
        key = about.get((each.resource, each.namespace, each.name))
        if key is not None and each.verb == "patch" and each.request is not None:
            found[key].append(Write(each.resource, each.subresource, each.request))
    return {key: tuple(writes) for key, writes in found.items()}


def about_others(admin: Kube, writes: dict[Key, Writes], ours: str, bare: str) -> list[list[Writes]]:
    """The same writes about the proxies of the same names of another side, by tenant."""
    text_of = dict(zip(namespaces(ours), namespaces(bare), strict=True))
    uids = {
        Key(proxy["metadata"]["namespace"], proxy["metadata"]["name"]): proxy["metadata"]["uid"]
        for name in (*text_of, *text_of.values())
        for proxy in admin.list(ENVOY_PROXY, name)
    }
    tenants: defaultdict[str, list[Writes]] = defaultdict(list)
    for key, each in writes.items():
        other = Key(text_of[key.namespace], key.name)
        text = json.dumps(each).replace(uids[key], uids[other]).replace(key.namespace, other.namespace)
        tenants[other.namespace].append(tuple(Write(*fields) for fields in json.loads(text)))
    return list(tenants.values())


def bare_script(kubeconfig: Path, tenants: Sequence[Sequence[Writes]]) -> Taken:
    """Send all writes, one proxy of each tenant at a time; runs in a process of its own."""
    return anyio.run(_send_all, kubeconfig, tenants)


async def _send_all(kubeconfig: Path, tenants: Sequence[Sequence[Writes]]) -> Taken:
    connections = Settings.model_fields["max_connections"].default
    async with Cluster.connect(user_agent="bare", kubeconfig=kubeconfig, max_connections=connections) as cluster:

        async def send(write: Write) -> None:
            kind: Kind = _KINDS[write.plural]
            is_create = write.body["metadata"].get("resourceVersion") == IMPOSSIBLE_VERSION
            status = "status" if write.subresource else None
            await cluster.apply(kind, write.body, force=not is_create, subresource=status)

        async def send_tenant(proxies: Sequence[Writes]) -> None:
            for writes in proxies:
                statuses = [each for each in writes if each.subresource]
                first = [each for each in writes if not each.subresource and each.plural in _FIRST]
                then = [each for each in writes if not each.subresource and each.plural not in _FIRST]
                for together in (first, then, *([each] for each in statuses)):
                    async with anyio.create_task_group() as tasks:
                        for write in together:
                            tasks.start_soon(send, write)

        begun_mono, begun_cpu_s = time.monotonic(), time.process_time()
        async with anyio.create_task_group() as tasks:
            for proxies in tenants:
                tasks.start_soon(send_tenant, proxies)
        wall_s, spent_s = time.monotonic() - begun_mono, time.process_time() - begun_cpu_s
    return Taken(wall_s, spent_s, sum(map(len, chain.from_iterable(tenants))))


def one_round(count: int, *, is_profiled: bool) -> tuple[Taken, Taken]:
    """The operator, and then the bare script, on a new control plane."""
    with (
        ControlPlane(crds=CRDS) as cluster,
        Kube(cluster.kubeconfig) as admin,
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes,
    ):
        identity, audit = operator_identity(cluster, admin), cluster.audit()
        operator = OperatorProcess(identity, Path(scratch, "operator.log"))
        for name in (*namespaces("ours"), *namespaces("bare")):
            make_namespace(admin, name)
        create = partial(create_all, cluster.kubeconfig, small_of_number)
        create(namespaces("ours"), count)
        try:
            ours = converge(admin, audit, operator, count=count, is_profiled=is_profiled)
            operator.stop()
        finally:
            operator.kill()
        if is_profiled:
            print(next(line["text"] for line in operator.log() if line.get("event") == "profile"))
        create(namespaces("bare"), count)
        tenants = about_others(admin, writes_by_proxy(admin, audit, "ours"), "ours", "bare")
        return ours, processes.submit(bare_script, identity, tenants).result()


def small_of_number(namespace: str, number: int) -> Object:
    """A proxy whose spec is the same on both sides."""
    made = small("any", number)
    return made | {"metadata": made["metadata"] | {"namespace": namespace}}


def main(arguments: list[str]) -> int:
    """Print what was measured; returns the exit code."""
    numbers = [int(each) for each in arguments if each.isdecimal()]
    count, rounds = (*numbers, *(300, 3)[len(numbers) :])
    print(f"{count} proxies of {TENANTS} tenants, {rounds} rounds")
    shares, cpu_ms, needless = [], [], 0
    for number in range(1, rounds + 1):
        ours, bare = one_round(count, is_profiled="--profile" in arguments)
        for side, each in (("operator", ours), ("floor", bare)):
            cost = f"{1000 * each.cpu_s / count:.1f} ms of CPU, {each.writes / count:.2f} writes"
            cost += f" and {each.reads / count:.2f} reads"
            print(f"{number}. {side:<9}{count / each.wall_s:6.1f} proxies a second; for each {cost}", flush=True)
        shares.append(bare.wall_s / ours.wall_s)
        cpu_ms.append(1000 * ours.cpu_s / count)
        needless += ours.reads + max(0, ours.writes - WRITES * count)
    share, median_ms = statistics.median(shares), statistics.median(cpu_ms)
    print(f"operator / floor: {share:.0%} (at least {ENOUGH:.0%}); {median_ms:.1f} ms of CPU (at most {MOST_CPU_MS:g})")
    return int(share < ENOUGH or median_ms > MOST_CPU_MS or needless > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
