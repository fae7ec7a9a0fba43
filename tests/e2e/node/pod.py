"""One Pod on this node, from its binding to its removal from the API server.

Volumes first, then the network, then all containers at once; on deletion hooks, signals and the grace period; then the
Pod object is deleted with its UID as precondition. Init containers are not run, so a Pod that has some never starts.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import anyio
import httpx2

from operator_app.api.kinds import Object
from tests.e2e.node.client import STRATEGIC_MERGE, request
from tests.e2e.node.container import Place
from tests.e2e.node.names import DOMAIN
from tests.e2e.node.network import PodNamespace, PodNetwork
from tests.e2e.node.references import MissingError, Source, UnsupportedError
from tests.e2e.node.status import WAITING_TO_START, ContainerRecord, pod_status
from tests.e2e.node.supervisor import Supervisor, Surroundings
from tests.e2e.node.volumes import PodVolumes

log = logging.getLogger(__name__)

RETRY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What all Pods of the node share. ``network`` is None where Envoy only validates.

    ``free_address`` gives the address to report for a Pod without a network.
    """

    api: httpx2.AsyncClient
    probes: httpx2.AsyncClient
    network: PodNetwork | None
    host_ip: str
    directory: Path
    logs: Path
    free_address: Callable[[], str]


class PodWorker:
    """Runs one Pod, identified by its UID, until it is deleted or :meth:`discard` is called."""

    def __init__(self, pod: Object, node: NodeParts, source: Source) -> None:
        self._pod = pod
        self._node = node
        self._source = source
        metadata = pod["metadata"]
        self._path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        self._directory = node.directory / metadata["uid"]
        self._records = [ContainerRecord(item["name"], item["image"]) for item in pod["spec"]["containers"]]
        self._supervisors: list[Supervisor] = []
        self._volumes = PodVolumes(self._directory / "volumes", source, self._token)
        self._namespace: PodNamespace | None = None
        self._pod_ip = ""
        self._started_at = datetime.now(UTC)
        self._changed = anyio.Event()
        self._sources_changed = anyio.Event()
        self._deleted = anyio.Event()
        self._whole = anyio.CancelScope()
        self._grace = anyio.CancelScope()
        self.update(pod)

    def update(self, pod: Object) -> None:
        """Take a newer version of the Pod; a deletion begins here, and a shorter grace period cuts the longer."""
        self._pod = pod
        if "deletionTimestamp" in pod["metadata"]:
            if self._deleted.is_set():
                self._grace.deadline = min(self._grace.deadline, anyio.current_time() + self._grace_s())
            self._deleted.set()

    def refresh(self) -> None:
        """ConfigMaps or Secrets of the Pod's namespace have changed."""
        self._sources_changed.set()

    def discard(self) -> None:
        """The Pod object is gone: end everything at once."""
        self._whole.cancel()

    async def run(self) -> None:
        """The Pod's whole life. However it ends, no process, namespace or directory of it is left."""
        try:
            with self._whole:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._report)
                    tasks.start_soon(self._live)
                    await self._deleted.wait()
                    await self._terminate()
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                if self._namespace is not None and self._node.network is not None:
                    await self._node.network.remove(self._namespace)
                shutil.rmtree(self._directory, ignore_errors=True)
        if self._deleted.is_set() and not self._whole.cancel_called:
            await self._confirm_deletion()

    def _grace_s(self) -> float:
        return float(self._pod["metadata"].get("deletionGracePeriodSeconds") or 0)

    def _mark_changed(self) -> None:
        self._changed.set()

    async def _live(self) -> None:
        if self._pod["spec"].get("initContainers"):
            self._wait("PodInitializing", "init containers are not run by the stand-in node")
            return
        try:
            await self._mount()
            place = await self._join_network()
            await self._run_containers(place)
        except UnsupportedError as error:
            self._wait("CreateContainerConfigError", str(error))
        except Exception as error:  # a Pod that the node can't cope with must not end the others, nor look ready
            log.exception("%s", self._path)
            self._wait("StandInNodeError", repr(error))

    async def _run_containers(self, place: Place | None) -> None:
        around = Surroundings(
            pod=self._pod,
            http=self._node.probes,
            source=self._source,
            paths=self._volumes.paths,
            place=place,
            pod_ip=self._pod_ip,
            host_ip=self._node.host_ip,
            directory=self._directory,
            logs=self._node.logs,
        )
        async with anyio.create_task_group() as tasks:
            for item, record in zip(self._pod["spec"]["containers"], self._records, strict=True):
                supervisor = Supervisor(item, around, record, self._mark_changed)
                self._supervisors.append(supervisor)
                tasks.start_soon(supervisor.run)
            tasks.start_soon(self._keep_volumes)

    async def _mount(self) -> None:
        """Wait until everything that the volumes come from exists."""
        while True:
            self._sources_changed = anyio.Event()
            try:
                await self._volumes.refresh(self._pod, "", self._node.host_ip)
            except MissingError as error:
                self._wait("ContainerCreating", str(error))
                await self._sources_changed.wait()
            except httpx2.HTTPError as error:
                self._wait("ContainerCreating", f"service account token: {error}")
                await anyio.sleep(RETRY_S)
            else:
                self._wait("ContainerCreating", "")
                return

    async def _keep_volumes(self) -> None:
        while True:
            await self._sources_changed.wait()
            self._sources_changed = anyio.Event()
            try:
                await self._volumes.refresh(self._pod, self._pod_ip, self._node.host_ip)
            except MissingError as error:
                log.info("%s: a volume keeps its old contents: %s", self._path, error)

    async def _join_network(self) -> Place | None:
        if self._node.network is None:
            self._pod_ip = self._node.free_address()
            return None
        # Cut off half-way, nobody would know of the namespace.
        with anyio.CancelScope(shield=True):
            self._namespace = joined = await self._node.network.add()
        self._pod_ip = joined.ip
        etc = self._directory / "etc"
        etc.mkdir(parents=True, exist_ok=True)
        name, namespace = self._pod["metadata"]["name"], self._pod["metadata"]["namespace"]
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{self._pod_ip} {name}\n")
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
        (etc / "passwd").write_text("root:x:0:0::/root:/sbin/nologin\nnonroot:x:65532:65532::/:/sbin/nologin\n")
        (etc / "group").write_text("root:x:0:\nnonroot:x:65532:\n")
        (etc / "resolv.conf").write_text(
            f"nameserver {self._node.host_ip}\n"
            f"search {namespace}.{DOMAIN} {DOMAIN} {DOMAIN.partition('.')[2]}\n"
            "options ndots:5\n"
        )
        return Place(joined.name, etc, self._directory / "root")

    async def _terminate(self) -> None:
        with anyio.CancelScope(deadline=anyio.current_time() + self._grace_s()) as self._grace:
            async with anyio.create_task_group() as tasks:
                for supervisor in self._supervisors:
                    tasks.start_soon(supervisor.stop)

    async def _report(self) -> None:
        """Tell the API server every change of the status, the first at once, several in a row as one."""
        reported: Object = {}
        self._changed.set()
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            status = pod_status(
                self._records,
                reported,
                pod_ip=self._pod_ip,
                host_ip=self._node.host_ip,
                started_at=self._started_at,
                now=datetime.now(UTC),
            )
            if status == reported:
                continue
            # The UID makes it a conflict to write to a later Pod of the same name.
            body = {"metadata": {"uid": self._pod["metadata"]["uid"]}, "status": status}
            try:
                await request(self._node.api, "PATCH", f"{self._path}/status", body, STRATEGIC_MERGE)
                reported = status
            except httpx2.HTTPError as error:
                log.info("%s: status not written: %r", self._path, error)
                self._changed.set()
                await anyio.sleep(RETRY_S)

    async def _confirm_deletion(self) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": self._pod["metadata"]["uid"]},
        }
        while True:
            try:
                await request(self._node.api, "DELETE", self._path, body)
            except httpx2.HTTPStatusError as error:
                # Not there, or another Pod by now: either way, this one is gone.
                if error.response.status_code in {httpx2.codes.NOT_FOUND, httpx2.codes.CONFLICT}:
                    return
                log.info("%s: not deleted: %r", self._path, error)
            except httpx2.HTTPError as error:
                log.info("%s: not deleted: %r", self._path, error)
            else:
                return
            await anyio.sleep(RETRY_S)

    async def _token(self, audience: str | None, expiration_s: int) -> str:
        metadata, spec = self._pod["metadata"], self._pod["spec"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        body: Object = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": [audience] if audience else [],
                "expirationSeconds": expiration_s,
                "boundObjectRef": bound,
            },
        }
        account = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{spec['serviceAccountName']}/token"
        answer = await request(self._node.api, "POST", account, body)
        return str(answer["status"]["token"])

    def _wait(self, reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, "message": message}} if message else WAITING_TO_START
        for record in self._records:
            record.state = state
            record.ready = record.started = False
        self._mark_changed()
