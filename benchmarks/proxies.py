"""How many proxies fit on a node, and what an idle one takes of it.

Run as ``python -m benchmarks.proxies [PROXIES]`` (100 by default), or ``make bench-proxies``; root, as for the node. So
many EnvoyProxies with one Pod and one HTTP listener each, and one with four listeners of which two speak TLS, are made
on one node; once all are Ready, each Envoy's process is looked at: inotify instances, which a kernel bounds for each
user id, open files, threads, and memory of its own. With ``--processes`` the same files are read by so many Envoys
outside of any node, each as another user.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from operator_app.api.kinds import ENVOY_PROXY, NAMESPACE, Key, Object
from operator_app.api.models import parse_spec
from tests.e2e.controlplane import ControlPlane
from tests.e2e.envoy.envoy_process import EnvoyProcess
from tests.e2e.kube import SERVICE_ACCOUNT, Kube, wait_until
from tests.e2e.node import Node
from tests.e2e.node.envoy import ENVOY
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.process_tree import family_of
from tests.e2e.proxies import a_proxy, holds
from tests.e2e.shipped import CRDS, operator_identity

PROXIES: Final = 100
NAMESPACE_NAME: Final = "proxies"
TIMEOUT_S: Final = 900.0
MIB: Final = 2**20
FIRST_USER: Final = 20_000
BACKENDS: Final = [{"name": "app", "endpoints": [{"host": "10.96.0.9", "port": 80}]}]
INSTANCES: Final = Path("/proc/sys/fs/inotify/max_user_instances")


@dataclass(frozen=True, slots=True)
class Use:
    """What one Envoy takes."""

    user: int
    inotify_instances: int
    open_files: int
    threads: int
    own_bytes: int

    @classmethod
    def of(cls, process: int) -> Self:
        """What a process takes now; ``own_bytes`` is what it has written, since its program is there once for all."""
        proc = Path(f"/proc/{process}")
        links = [str(each.readlink()) for each in (proc / "fd").iterdir()]
        memory = dict(line.split(":", 1) for line in (proc / "smaps_rollup").read_text().splitlines()[1:])
        own_kib = int(memory["Private_Dirty"].split()[0])
        return cls(
            user=proc.stat().st_uid,
            inotify_instances=links.count("anon_inode:inotify"),
            open_files=len(links),
            threads=len(list((proc / "task").iterdir())),
            own_bytes=own_kib * 1024,
        )


def envoys(node: Node) -> Iterator[int]:
    """The processes of the proxies on a node."""
    for process in family_of(node.keeper_pid):
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if words[0].rpartition(b"/")[2] == b"envoy" and b"--config-path" in words:
            yield process


def larger() -> Object:
    """A proxy with four HTTP listeners, of which two speak TLS with Secrets of their own (which need not exist)."""
    listeners = [{"name": f"l{n}", "port": 8080 + n, "routes": [{"backend": "app"}]} for n in range(4)]
    for each in listeners[:2]:
        each["tls"] = {"secretName": f"tls-{each['name']}"}
    return a_proxy(NAMESPACE_NAME, "larger", listeners=listeners)


def create(admin: Kube, proxies: int) -> None:
    """Make so many proxies, and the larger one."""
    admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE_NAME}})
    admin.wait_until(SERVICE_ACCOUNT, Key(NAMESPACE_NAME, "default"), bool)
    for number in range(proxies):
        admin.create(ENVOY_PROXY, a_proxy(NAMESPACE_NAME, f"p{number}", backends=BACKENDS))
    admin.create(ENVOY_PROXY, larger() | {"spec": larger()["spec"] | {"backends": BACKENDS}})


def tell(name: str, found: list[Use]) -> None:
    """One row of the table."""
    instances = sorted({each.inotify_instances for each in found})
    files = statistics.median(each.open_files for each in found)
    threads = statistics.median(each.threads for each in found)
    own = sorted(each.own_bytes / MIB for each in found)
    middle = own[len(own) // 2]
    print(f"| {name} | {len(found)} | {instances} | {files:.0f} | {threads:.0f} | {middle:.1f} | {own[-1]:.1f} |")


def measure(admin: Kube, node: Node, proxies: int) -> None:
    """Make the proxies, wait, and print what they take."""
    before_kib = available_kib()
    begun_mono = time.monotonic()
    create(admin, proxies)
    is_ready = holds("Ready")

    def ready() -> int:
        return sum(map(is_ready, admin.list(ENVOY_PROXY, NAMESPACE_NAME)))

    wait_until(lambda: ready() == proxies, TIMEOUT_S, f"{proxies} proxies to be Ready")
    wait_until(lambda: len(list(envoys(node))) == proxies + 1, TIMEOUT_S, "all Envoys")
    print(f"{proxies} of {proxies} proxies were Ready after {time.monotonic() - begun_mono:.0f} s")
    tell_all([Use.of(each) for each in envoys(node)], before_kib)


def tell_all(uses: list[Use], before_kib: int) -> None:
    """Print what these take together, of a machine that had so much memory before."""
    print("| proxy | Envoys | inotify instances | open files | threads | own MiB p50 | own MiB max |")
    print("|---|---|---|---|---|---|---|")
    alike = Counter(each.inotify_instances for each in uses)
    for instances in sorted(alike):
        name = "one HTTP listener" if instances == min(alike) else "four, of which two speak TLS"
        tell(name, [each for each in uses if each.inotify_instances == instances])
    by_user = Counter[int]()
    for each in uses:
        by_user[each.user] += each.inotify_instances
    limit = INSTANCES.read_text().strip()
    print(f"user ids: {len(by_user)}; most inotify instances of one: {max(by_user.values())} of {limit}")
    whole = (before_kib - available_kib()) / 1024 / len(uses)
    print(f"memory of the machine for each, with whatever else was started for it: {whole:.0f} MiB")


def available_kib() -> int:
    """Memory that this machine has left."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def processes(count: int) -> None:
    """Start so many Envoys without a node, and print what they take."""
    before_kib = available_kib()
    with ExitStack() as stack:
        running = []
        program = Path(stack.enter_context(tempfile.TemporaryDirectory()), "envoy")
        program.parent.chmod(0o755)
        shutil.copy(ENVOY, program)
        for number in range(count):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            directory.chmod(0o755)
            spec = parse_spec(a_proxy(NAMESPACE_NAME, backends=BACKENDS))
            running.append(
                stack.enter_context(EnvoyProcess(spec, directory, user=FIRST_USER + number, program=program))
            )
        time.sleep(5)
        tell_all([Use.of(each.process.pid) for each in running], before_kib)


def main(arguments: list[str]) -> None:
    """Start everything, and measure."""
    if arguments[:1] == ["--processes"]:
        processes(int(arguments[1]) if arguments[1:] else PROXIES)
        return
    proxies = int(arguments[0]) if arguments else PROXIES
    with (
        ControlPlane(crds=CRDS, report=lambda line: print(f"== {line}", flush=True)) as cluster,
        Node(cluster) as node,
        Kube(cluster.kubeconfig) as admin,
        tempfile.TemporaryDirectory() as logs,
    ):
        operator = OperatorProcess(operator_identity(cluster, admin), Path(logs, "operator.log"), node)
        operator.start()
        try:
            measure(admin, node, proxies)
        finally:
            operator.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
