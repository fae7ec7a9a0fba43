"""What the benchmarks of hostile and of many tenants share: proxies of varied specs, edits, and what was measured."""

import json
import multiprocessing
import random
import string
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import httpx2

from operator_app.api.kinds import ENVOY_PROXY, NAMESPACE, Key, Object
from tests.e2e.kube import Kube, KubeError, path_of
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import a_proxy, holds

MODULE: Final = ("benchmarks.measured_operator", "run")
AS_SHIPPED: Final = (
    "--backoff-base-s=0.5",
    "--backoff-cap-s=60",
    "--status-settle-s=2",
    "--lease-duration-s=15",
    "--renew-deadline-s=10",
    "--retry-period-s=2",
)
"""The waits of a cluster, where tests have shorter ones."""

MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Measured:
    """What an operator has reported of itself over some time."""

    peak_bytes: int
    rss_bytes: int
    block_s: float
    block_cpu_s: float
    block: str
    cpu_s: float


def measured(operator: OperatorProcess, since: int = 0) -> Measured:
    """The reports of the latest run from the ``since``-th on (``reports_of``)."""
    lines = reports_of(operator)
    longest = max(lines[since:], key=lambda line: float(line["block_cpu_s"]))
    return Measured(
        peak_bytes=lines[-1]["peak_bytes"],
        rss_bytes=lines[-1]["rss_bytes"],
        block_s=max(line["block_s"] for line in lines[since:]),
        block_cpu_s=longest["block_cpu_s"],
        block=longest["block"],
        cpu_s=lines[-1]["cpu_s"] - lines[since]["cpu_s"],
    )


def reports_of(operator: OperatorProcess) -> list[Object]:
    """The reports of the latest run."""
    return [line for line in operator.log() if line.get("event") == "measured"]


def make_namespace(admin: Kube, name: str) -> None:
    """Create a namespace."""
    admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})


def random_text(chance: random.Random, length: int) -> str:
    """Letters and digits that no compression makes much smaller."""
    return "".join(chance.choices(string.ascii_lowercase + string.digits, k=length))


def small(namespace: str, number: int) -> Object:
    """A proxy with a spec of its own: one to three listeners, hosts, paths, and endpoints."""
    chance = random.Random(f"{namespace}/{number}")
    backends = [
        {
            "name": f"b{each}",
            "endpoints": [
                {"host": f"{random_text(chance, 8)}.example.com", "port": chance.randrange(1, 65536)}
                for _ in range(chance.randrange(1, 4))
            ],
        }
        for each in range(chance.randrange(1, 4))
    ]
    listeners = [
        {
            "name": f"l{each}",
            "port": 8000 + each,
            "routes": [
                {
                    "match": {
                        "hosts": [f"{random_text(chance, 6)}.example.com"],
                        "pathPrefix": f"/{random_text(chance, 10)}",
                    },
                    "backend": chance.choice(backends)["name"],
                }
                for _ in range(chance.randrange(1, 6))
            ],
        }
        for each in range(chance.randrange(1, 4))
    ]
    return a_proxy(namespace, f"p{number}", replicas=0, listeners=listeners, backends=backends)


def create_all(
    kubeconfig: Path, make: Callable[[str, int], Object], namespaces: Sequence[str], count: int, connections: int = 4
) -> None:
    """Create that many proxies, one namespace after the other in turn, as fast as the connections can.

    An API server that is busy with large objects may take longer than a request may; it is asked again then.
    """

    def create(number: int) -> None:
        proxy = make(namespaces[number % len(namespaces)], number)
        while True:
            try:
                admin.create(ENVOY_PROXY, proxy)
            except httpx2.TransportError:
                continue
            except KubeError as error:
                if error.code < httpx2.codes.INTERNAL_SERVER_ERROR and error.code != httpx2.codes.CONFLICT:
                    raise
                if error.code != httpx2.codes.CONFLICT:
                    continue
            return

    with Kube(kubeconfig) as admin, ThreadPoolExecutor(connections) as pool:
        list(pool.map(create, range(count)))


@contextmanager
def in_background(target: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    """Run a function in a process of its own, since threads would share the interpreter lock with whoever measures."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join()


def edit_of(number: object) -> Object:
    """A patch of a proxy that changes its Service and makes no Pods, of which no node would run any."""
    return {"spec": {"service": {"annotations": {"example.com/edit": str(number)}}}}


def edit_latency_s(admin: Kube, key: Key, edit: int) -> float:
    """Seconds from an edit of a proxy until a watch shows its status with all of it verified."""
    begun = time.monotonic()
    edited = admin.patch(ENVOY_PROXY, key, edit_of(edit))
    is_done = holds("Reconciled", generation=edited["metadata"]["generation"])
    params = {
        "watch": "true",
        "timeoutSeconds": "5",
        "fieldSelector": f"metadata.name={key.name}",
        "resourceVersion": edited["metadata"]["resourceVersion"],
    }
    http = admin._http  # noqa: SLF001 - no other user of the client watches
    while True:
        with http.stream("GET", path_of(ENVOY_PROXY, Key(key.namespace, "")), params=params) as lines:
            for line in lines.iter_lines():
                obj = json.loads(line)["object"]
                if obj.get("kind") == ENVOY_PROXY.kind and is_done(obj):
                    return time.monotonic() - begun


def reconciled(admin: Kube, namespace: str) -> int:
    """How many proxies of a namespace are verified or refused for their generation, read in pages."""
    done = 0
    params = {"limit": "50"}
    path = path_of(ENVOY_PROXY, Key(namespace, ""))
    while True:
        answer = admin.request("GET", path, params=params).json()
        done += sum(
            bool((each.get("status") or {}).get("observedGeneration") == each["metadata"]["generation"])
            for each in answer["items"]
        )
        if not answer["metadata"].get("continue"):
            return done
        params["continue"] = answer["metadata"]["continue"]
