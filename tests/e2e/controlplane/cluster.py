"""A cluster for tests: the local control plane, or somebody else's named by ``E2E_KUBECONFIG``, with one surface.

It owns starting order, ports, the state directory and the end of all of it. It knows nothing of the operator but its
namespace, whose ServiceAccounts get the closer look in the audit log.
"""

import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

import httpx2
import yaml

from operator_app.api.kinds import Key, Object, key_of
from tests.e2e.controlplane import components
from tests.e2e.controlplane.audit import AuditLog, AuditUnavailableError, policy
from tests.e2e.controlplane.build import Report, built_binary
from tests.e2e.controlplane.components import Layout
from tests.e2e.controlplane.credentials import (
    ADMIN,
    CONTROLLER_MANAGER,
    SCHEDULER,
    Authority,
    write_service_account_kubeconfig,
)
from tests.e2e.controlplane.processes import Component
from tests.e2e.kube import CUSTOM_RESOURCE_DEFINITION, POLL_INTERVAL_S, SERVICE_ACCOUNT, Kube, KubeError

OPERATOR_NAMESPACE: Final = "edge-system"
START_TIMEOUT_S: Final = 60.0
PORT_ATTEMPTS: Final = 10

_STATE_PREFIX: Final = "operator-app-cp-"


class StartError(RuntimeError):
    """A component did not come up; the message ends with the tail of its log."""


class Cluster(Protocol):
    """What tests may ask of any cluster."""

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""

    def kubeconfig_for(self, namespace: str, service_account: str) -> Path:
        """A kubeconfig that authenticates as an existing ServiceAccount; valid for days."""

    def audit(self) -> AuditLog:
        """The audit log. Raises ``AuditUnavailableError`` where it can't be read."""


class ControlPlane:
    """etcd, kube-apiserver, kube-controller-manager and kube-scheduler on this machine, for as long as the block lasts.

    Guarantees on entry: the API server is ready, the CRDs in ``crds`` are established, and the controllers work. After
    exit no process and no file of it is left; after a crash of this process no process is, and the next start removes
    the files. Several can run side by side.

    ``crds`` are files that are applied before the controllers start: the garbage collector looks for new kinds only
    every 30 s, and until then does not notice that an owner of such a kind is gone. Without ``audit_bodies`` the audit
    log does not say what the operator wrote. ``gates`` are feature gates of the API server to turn on.

    Raises ``StartError`` on entry.
    """

    def __init__(
        self,
        *,
        crds: Sequence[Path] = (),
        report: Report = lambda _line: None,
        audit_bodies: bool = True,
        gates: Sequence[str] = (),
    ) -> None:
        self._crds = crds
        self._gates = gates
        self._audit_bodies = audit_bodies
        self._report = report
        self._resources = ExitStack()
        self._components: list[Component] = []

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            self._start(resources)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all components and remove all state; to call it again does nothing."""
        self._resources.close()

    @property
    def state(self) -> Path:
        """The private directory with the components' logs, keys and data."""
        return self._layout.state

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig (group ``system:masters``)."""
        return self._layout.kubeconfig(ADMIN)

    @property
    def authority(self) -> Authority:
        """The certificate authority, for what joins this cluster."""
        return self._authority

    @property
    def port(self) -> int:
        """The API server's, on 127.0.0.1."""
        return self._port

    @property
    def audit_log(self) -> Path:
        """The file of the audit log."""
        return self._layout.audit_log

    @property
    def proxy_socket(self) -> Path:
        """Where the API server expects the way to kubelets, Pods and Services (HTTP CONNECT), once there is a node."""
        return self._layout.proxy_socket

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by component name, for measuring."""
        return {component.name: component.pid for component in self._components}

    def kubeconfig_for(self, namespace: str, service_account: str) -> Path:
        """A kubeconfig that authenticates as an existing ServiceAccount; valid for days."""
        path = self._layout.kubeconfig(f"{namespace}.{service_account}")
        write_service_account_kubeconfig(self._admin, self.kubeconfig, path, namespace, service_account)
        return path

    def audit(self) -> AuditLog:
        """The audit log since the start."""
        return AuditLog(self._layout.audit_log, lambda path: self._admin.request("GET", path))

    def _start(self, resources: ExitStack) -> None:
        binary = built_binary(self._report)
        started_mono = time.monotonic()
        self._layout = Layout(resources.enter_context(_state_directory()))
        names = ("127.0.0.1", "localhost", "kubernetes.default.svc", *components.ADDRESSES_INSIDE)
        self._authority = authority = Authority.create(self.state / "pki", *names)
        self._layout.egress.write_text(yaml.safe_dump(components.egress_selector(self._layout)), encoding="utf-8")
        self._layout.audit_policy.write_text(
            yaml.safe_dump(policy(OPERATOR_NAMESPACE, with_bodies=self._audit_bodies)), encoding="utf-8"
        )

        def start(arguments: list[str]) -> Component:
            component = Component(binary, arguments, self.state)
            resources.callback(component.kill)
            self._components.append(component)
            return component

        etcd = start(components.etcd(self._layout))
        _wait(self._layout.etcd_socket.exists, etcd)
        server = self._start_api_server(authority, start)
        self._admin = resources.enter_context(Kube(self.kubeconfig))
        apply_crds(self._admin, self._crds)
        authority.write_kubeconfig(self._layout.kubeconfig("controller-manager"), server, CONTROLLER_MANAGER)
        authority.write_kubeconfig(self._layout.kubeconfig("scheduler"), server, SCHEDULER)
        controller_manager = start(components.kube_controller_manager(self._layout, authority))
        scheduler = start(components.kube_scheduler(self._layout))
        # The first visible work of a controller: each namespace gets its default ServiceAccount.
        default = Key("default", "default")
        _wait(lambda: self._admin.find(SERVICE_ACCOUNT, default) is not None, controller_manager, scheduler)
        self._report(f"control plane: {server} is ready after {time.monotonic() - started_mono:.1f} s")

    def _start_api_server(self, authority: Authority, start: Callable[[list[str]], Component]) -> str:
        """Start kube-apiserver on a free port and wait until it is ready; returns its URL.

        It can't be handed an open socket, so between choosing a port and binding it somebody else may take it. The
        component then ends with an error and another port is tried. A stranger on the port is never mistaken for the
        API server: it has no certificate of this authority.
        """
        for _ in range(PORT_ATTEMPTS):
            port = _free_port()
            server = f"https://127.0.0.1:{port}"
            authority.write_kubeconfig(self.kubeconfig, server, ADMIN, "system:masters")
            component = start(components.kube_apiserver(self._layout, authority, port, self._gates))
            with Kube(self.kubeconfig) as admin:
                try:
                    _wait(lambda: _is_ready(admin), component)  # called before the next round
                except StartError:
                    if "address already in use" in component.log():
                        continue
                    raise
            self._port = port
            return server
        msg = f"kube-apiserver lost the race for a port {PORT_ATTEMPTS} times"
        raise StartError(msg)


class ExternalCluster:
    """A running cluster, used as its administrator; nothing of it is started or stopped here.

    ``audit_log`` is its API server's, written as ``audit`` describes, where that file can be read from here.
    """

    def __init__(self, kubeconfig: Path, *, crds: Sequence[Path] = (), audit_log: Path | None = None) -> None:
        self._kubeconfig = kubeconfig
        self._crds = crds
        self._audit_log = audit_log
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            self._directory = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix=_STATE_PREFIX)))
            self._admin = resources.enter_context(Kube(self._kubeconfig))
            apply_crds(self._admin, self._crds)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig that was given."""
        return self._kubeconfig

    def kubeconfig_for(self, namespace: str, service_account: str) -> Path:
        """A kubeconfig that authenticates as an existing ServiceAccount; the cluster may cap its lifetime."""
        path = self._directory / f"{namespace}.{service_account}.kubeconfig"
        write_service_account_kubeconfig(self._admin, self.kubeconfig, path, namespace, service_account)
        return path

    def audit(self) -> AuditLog:
        """Available where its file was named: how to reach a cluster's audit log differs from one to the next."""
        if self._audit_log is None:
            msg = "the cluster of E2E_KUBECONFIG has no audit log that tests can read (E2E_AUDIT_LOG names its file)"
            raise AuditUnavailableError(msg)
        return AuditLog(self._audit_log, lambda path: self._admin.request("GET", path))


def apply_crds(admin: Kube, files: Sequence[Path]) -> None:
    """Apply the CustomResourceDefinitions in ``files`` and wait until each is established."""
    crds = [crd for file in files for crd in yaml.safe_load_all(file.read_text(encoding="utf-8")) if crd]
    for crd in crds:
        admin.apply(CUSTOM_RESOURCE_DEFINITION, crd, force=True)
    for crd in crds:
        admin.wait_until(CUSTOM_RESOURCE_DEFINITION, key_of(crd), _is_established)


def _is_established(crd: Object) -> bool:
    conditions = crd.get("status", {}).get("conditions") or []
    return any(condition["type"] == "Established" and condition["status"] == "True" for condition in conditions)


def _is_ready(admin: Kube) -> bool:
    try:
        admin.request("GET", "/readyz")
    except (KubeError, httpx2.TransportError):
        return False
    return True


def _wait(probe: Callable[[], bool], *needed: Component) -> None:
    """Wait for ``probe`` while the components that it ``needed`` run. Raises ``StartError`` with their logs' tails."""
    deadline_mono = time.monotonic() + START_TIMEOUT_S
    while not probe():
        ended = [component for component in needed if not component.is_running]
        if ended:
            raise StartError("\n".join([f"{ended[0].name} ended while starting", *(c.log_tail() for c in ended)]))
        if time.monotonic() > deadline_mono:
            names = ", ".join(component.name for component in needed)
            raise StartError(
                "\n".join([f"{names}: not ready within {START_TIMEOUT_S} s", *(c.log_tail() for c in needed)])
            )
        time.sleep(POLL_INTERVAL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _state_directory() -> Iterator[Path]:
    """A private directory, locked while it is in use; those of crashed predecessors are removed first."""
    for abandoned in _abandoned_directories():
        shutil.rmtree(abandoned, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=_STATE_PREFIX))
    with (directory / "lock.new").open("wb") as lock:
        # It gets its name once it is held, so that nobody can find it free in between.
        fcntl.flock(lock, fcntl.LOCK_EX)
        (directory / "lock.new").rename(directory / "lock")
        try:
            yield directory
        finally:
            shutil.rmtree(directory)


def _abandoned_directories() -> Iterator[Path]:
    """State directories of this user whose lock nobody holds any more."""
    for lock_file in Path(tempfile.gettempdir()).glob(f"{_STATE_PREFIX}*/lock"):
        try:
            if lock_file.stat().st_uid != os.getuid():
                continue
            with lock_file.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield lock_file.parent
        except (FileNotFoundError, BlockingIOError):
            continue
