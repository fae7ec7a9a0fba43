"""The node itself: mirrors of what it needs to know, a worker for each Pod bound to it, the Node it claims to be."""

import itertools
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

import anyio
import httpx2
from anyio.abc import TaskGroup

from operator_app.api.kinds import Key, Object
from tests.e2e.node import names
from tests.e2e.node.client import Mirror, open_client
from tests.e2e.node.network import NetworkUnavailableError, PodNetwork, SubnetInUseError
from tests.e2e.node.pod import NodeParts, PodWorker
from tests.e2e.node.registration import RUNS_ENVOY, VALIDATES_ONLY, keep_lease, node_object, register, unregister
from tests.e2e.node.slot import SLOTS, Slot, claim, used_numbers

log = logging.getLogger(__name__)

# For Pods without a network: RFC 2544 sets 198.18.0.0/15 aside, so nobody answers there.
# EndpointSlices refuse loopback addresses.
_NOWHERE: Final = IPv4Address("198.18.0.1")


class Kubelet:
    """The node ``name`` of the cluster behind ``api``. ``network`` is None where Envoy only validates."""

    def __init__(
        self, api: httpx2.AsyncClient, probes: httpx2.AsyncClient, name: str, slot: Slot, network: PodNetwork | None
    ) -> None:
        numbers = itertools.count(2)
        self.name = name
        self.mode = VALIDATES_ONLY if network is None else RUNS_ENVOY
        self._network = network
        self._node = NodeParts(
            api=api,
            probes=probes,
            network=network,
            host_ip=network.gateway if network else str(_NOWHERE),
            directory=slot.directory / "pods",
            logs=slot.directory / "logs",
            free_address=lambda: str(_NOWHERE + next(numbers)),
        )
        self._workers: dict[str, PodWorker] = {}
        self._workers_of: dict[str, set[str]] = {}
        self._config_maps = Mirror(api, "/api/v1/configmaps", self._source_changed)
        self._secrets = Mirror(api, "/api/v1/secrets", self._source_changed)
        self._slices = Mirror(api, "/apis/discovery.k8s.io/v1/endpointslices", lambda _obj, _deleted: None)

    @property
    def logs(self) -> Path:
        """The directory of ``<namespace>_<pod>_<container>.log`` files, there until the node ends."""
        return self._node.logs

    async def run(self, ready: Callable[[], None]) -> None:
        """Be the node until cancelled; then no Pod runs any more, and the Node object is gone if the API server lives.

        ``ready`` is called once the scheduler may use the node.
        """
        self._node.logs.mkdir()
        try:
            async with anyio.create_task_group() as tasks:
                for mirror in (self._config_maps, self._secrets, self._slices):
                    await tasks.start(mirror.run)
                if self._network is not None:
                    tasks.start_soon(names.serve, self._network.gateway, self._addresses)
                bound = {"fieldSelector": f"spec.nodeName={self.name}"}
                pods = Mirror(
                    self._node.api,
                    "/api/v1/pods",
                    lambda pod, deleted: self._pod_changed(tasks, pod, deleted=deleted),
                    bound,
                )
                await tasks.start(pods.run)
                await register(self._node.api, node_object(self.name, self.mode, self._node.host_ip, datetime.now(UTC)))
                tasks.start_soon(keep_lease, self._node.api, self.name)
                ready()
        finally:
            with anyio.CancelScope(shield=True):
                await unregister(self._node.api, self.name)

    def _addresses(self, name: str) -> list[str] | None:
        return names.service_addresses(name, self._slices.objects.values())

    def _source_changed(self, obj: Object, _deleted: bool) -> None:  # noqa: FBT001 - positional by the callback's type
        for uid in self._workers_of.get(obj["metadata"]["namespace"], ()):
            self._workers[uid].refresh()

    def _pod_changed(self, tasks: TaskGroup, pod: Object, *, deleted: bool) -> None:
        uid, namespace = pod["metadata"]["uid"], pod["metadata"]["namespace"]
        worker = self._workers.get(uid)
        if deleted:
            if worker is not None:
                worker.discard()
                del self._workers[uid]
                self._workers_of[namespace].discard(uid)
        elif worker is not None:
            worker.update(pod)
        elif (
            pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"} or "deletionTimestamp" in pod["metadata"]
        ):

            def source(kind: str, name: str) -> Object | None:
                mirror = self._secrets if kind == "Secret" else self._config_maps
                found = mirror.objects.get(Key(namespace, name))
                # Items of a list carry no kind.
                return None if found is None else {**found, "kind": kind}

            self._workers[uid] = PodWorker(pod, self._node, source)
            self._workers_of.setdefault(namespace, set()).add(uid)
            tasks.start_soon(self._workers[uid].run)


async def take_slot(*, validate_only: bool) -> tuple[Slot, PodNetwork | None]:
    """A slot and its network; no network where the machine gives none. What killed runs left behind is removed first.

    Raises RuntimeError if too many nodes run on this machine.
    """
    for number in used_numbers():
        if left := claim(number):
            await PodNetwork(left).close()
            left.release()
    for number in range(SLOTS):
        slot = claim(number)
        if slot is None:
            continue
        if validate_only:
            return slot, None
        network = PodNetwork(slot)
        try:
            await network.open()
        except SubnetInUseError as error:
            log.info("%s", error)
            slot.release()
        except NetworkUnavailableError as error:
            log.warning("no Pod network (%s): Envoy only validates each configuration here", error)
            return slot, None
        else:
            return slot, network
    raise RuntimeError(f"all {SLOTS} slots for stand-in nodes are in use")


async def serve(kubeconfig: Path, name: str, *, validate_only: bool) -> None:
    """Run a node until cancelled. One line of JSON on stdout says that it is ready: ``name``, ``mode`` and ``logs``."""
    slot, network = await take_slot(validate_only=validate_only)
    try:
        # Each probe is a connection of its own, as in the kubelet, so that it proves that the port is open.
        single_use = httpx2.Limits(max_keepalive_connections=0)
        async with (
            open_client(kubeconfig) as api,
            httpx2.AsyncClient(verify=False, trust_env=False, limits=single_use, timeout=30) as probes,
        ):
            kubelet = Kubelet(api, probes, name, slot, network)
            facts = {"name": name, "mode": kubelet.mode, "logs": str(kubelet.logs)}
            await kubelet.run(lambda: print(json.dumps(facts), flush=True))
    finally:
        with anyio.CancelScope(shield=True):
            if network is not None:
                await network.close()
            slot.release()
