"""The memory of one EnvoyProxy: the store against a plain dictionary of decoded objects, in the same run.

Run as ``python -m benchmarks.memory [PROXIES ...]`` (1,000 and 10,000 by default). One proxy is made by the operator on
the local control plane, so that the objects, with their managedFields, are what an API server stores; the others are
copies of it with names, UIDs, hosts and versions of their own. Bytes are those that the interpreter has allocated.
"""

import copy
import gc
import json
import sys
import tempfile
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from operator_app.api.kinds import CHILD_KINDS, ENVOY_PROXY, NAMESPACE, PROXY_REGISTRATION, Key, Kind, Object, key_of
from operator_app.kube.deltas import Changed
from operator_app.kube.store import Store
from tests.e2e.controlplane import ControlPlane
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import a_proxy, objects_of, wait_reconciled
from tests.e2e.shipped import CRDS, operator_identity

KINDS = (ENVOY_PROXY, *CHILD_KINDS, PROXY_REGISTRATION)


def one_proxy() -> dict[Kind, Object]:
    """A proxy with its children and its record, as a real API server stores them."""
    with (
        ControlPlane(crds=CRDS) as cluster,
        Kube(cluster.kubeconfig) as admin,
        tempfile.TemporaryDirectory() as scratch,
    ):
        admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tenant-model"}})
        operator = OperatorProcess(operator_identity(cluster, admin), Path(scratch, "log"))
        operator.start()
        admin.create(ENVOY_PROXY, a_proxy("tenant-model", "proxy-model"))
        wait_reconciled(admin, Key("tenant-model", "proxy-model"))
        found = objects_of(admin, Key("tenant-model", "proxy-model"))
        operator.stop()
    return {ENVOY_PROXY: found.proxy, **found.children, PROXY_REGISTRATION: found.record}


def copies(model: dict[Kind, Object], proxies: int) -> Iterator[tuple[Kind, Object]]:
    """The objects of that many proxies, each decoded anew as it would come from a watch."""
    uids = [each["metadata"]["uid"] for each in model.values()]
    texts = {kind: json.dumps(each) for kind, each in model.items()}
    version = 1000
    for number in range(proxies):
        swaps = {uid: str(uuid.uuid4()) for uid in uids} | {
            "tenant-model": f"tenant-{number % 100}",
            "proxy-model": f"proxy-{number}",
            "app.example.com": f"app-{number}.example.com",
        }
        for kind, text in texts.items():
            swapped = text
            for old, new in swaps.items():
                swapped = swapped.replace(old, new)
            obj = json.loads(swapped)
            version += 1
            obj["metadata"]["resourceVersion"] = str(version)
            yield kind, obj


def fill_store(model: dict[Kind, Object], proxies: int) -> object:
    """That many proxies in the operator's store."""
    store = Store({kind: lambda _: None for kind in KINDS})
    for kind, obj in copies(model, proxies):
        store.apply_delta(Changed(kind, obj))
    return store


def fill_dictionary(model: dict[Kind, Object], proxies: int) -> object:
    """The same, decoded, in a dictionary."""
    return {(kind, key_of(obj)): obj for kind, obj in copies(model, proxies)}


def cost(
    fill: Callable[[dict[Kind, Object], int], object], model: dict[Kind, Object], proxies: int
) -> tuple[int, float]:
    """Bytes that what ``fill`` returns keeps allocated, and the CPU seconds of filling it (in a pass of its own)."""
    begun_s = time.process_time()
    fill(model, proxies)
    took_s = time.process_time() - begun_s
    tracemalloc.start()
    kept = fill(model, proxies)
    gc.collect()
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return allocated, took_s


def seconds_per_read(model: dict[Kind, Object], reads: int = 2000) -> tuple[float, float]:
    """Seconds for reading the objects of one proxy from the store, and for copying them from decoded objects."""
    store = Store({kind: lambda _: None for kind in KINDS})
    for kind, obj in copies(model, 1):
        store.apply_delta(Changed(kind, obj))
    addresses = [(kind, store.keys(kind)[0]) for kind in KINDS]
    begun = time.perf_counter()
    for _ in range(reads):
        for kind, key in addresses:
            store.get(kind, key)
    packed_s = time.perf_counter() - begun
    begun = time.perf_counter()
    for _ in range(reads // 10):
        for obj in model.values():
            copy.deepcopy(obj)
    return packed_s / reads, (time.perf_counter() - begun) / (reads // 10)


def main() -> None:
    """Print the table."""
    counts = [int(each) for each in sys.argv[1:]] or [1_000, 10_000]
    model = one_proxy()
    json_bytes = sum(len(json.dumps(each, separators=(",", ":"))) for each in model.values())
    print(f"one proxy: {len(model)} objects, {json_bytes:,} bytes of JSON")
    print(" proxies  store B/proxy  dict B/proxy  ratio  fill store  fill dict")
    for count in counts:
        packed, packed_s = cost(fill_store, model, count)
        plain, plain_s = cost(fill_dictionary, model, count)
        print(
            f"{count:>8,}  {packed / count:>13,.0f}  {plain / count:>12,.0f}  {plain / packed:>5.1f}"
            f"  {packed_s:>9.1f}s  {plain_s:>8.1f}s"
        )
    packed_s, copied_s = seconds_per_read(model)
    print(
        f"reading one proxy's objects: {packed_s * 1e6:,.0f} us from the store, {copied_s * 1e6:,.0f} us as deep copies"
    )


if __name__ == "__main__":
    main()
