"""The handle of a node: a kubelet with all that it takes, for as long as a ``with`` block or a fixture lasts."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import yaml

from operator_app.api.kinds import Key, Kind, Object, key_of
from tests.e2e.controlplane import ControlPlane, Report
from tests.e2e.controlplane.build import GoModule, built_binary, built_programs, cache_directory
from tests.e2e.kube import NODE, POLL_INTERVAL_S, Kube
from tests.e2e.node import images, network, requirements
from tests.e2e.node.addresses import API_SERVER_PORT, NODE_ADDRESS, NODE_NAME, Member
from tests.e2e.node.configuration import Files
from tests.e2e.node.plan import Plan
from tests.paths import ROOT

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 60.0
LOG_TAIL_LINES: Final = 15

PROGRAMS: Final = GoModule(
    name="node",
    directory=Path(__file__).parent / "go",
    programs=(
        "./containerd",
        "./coredns",
        "./pause",
        "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        "github.com/containerd/containerd/v2/cmd/ctr",
    ),
    contents="containerd and CoreDNS",
)

_RBAC: Final = "rbac.authorization.k8s.io"
CLUSTER_ROLE: Final = Kind(_RBAC, "v1", "ClusterRole", "clusterroles", namespaced=False)
CLUSTER_ROLE_BINDING: Final = Kind(_RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False)
ENDPOINT_SLICE: Final = Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")


class NodeError(RuntimeError):
    """The node did not come up, or ended; the message ends with the tails of its logs."""


class Node:
    """A node of a local control plane: kubelet, kube-proxy, containerd and CoreDNS in namespaces of their own.

    Entering the block returns when the node is ready: Pods run, Services have their addresses, names resolve. Leaving
    it kills everything at once; the same happens when this process dies, ``kill -9`` included, and neither process, nor
    mount, nor network is left then. (An empty cgroup is, where even the node's keeper was killed; the next one removes
    it.) The node's addresses exist inside its network only: ``inside`` leads there. ``logs`` is an existing directory
    for the logs of the node's programs; without one they go with the cluster's state. ``more_images`` are archives as
    ``docker save`` writes them, beside Envoy's own image. ``nodes`` may be up to four: each further one has a kubelet
    and a containerd of its own beside the first one's, in the same network.

    Raises ``NodeUnavailableError`` where no node can run, ``NodeError`` where it does not come up, ``BuildError`` and
    ``ToolchainError``. Starting takes minutes when its programs are built for the first time, else seconds.
    """

    def __init__(
        self,
        cluster: ControlPlane,
        report: Report = lambda _line: None,
        logs: Path | None = None,
        more_images: Sequence[Path] = (),
        nodes: int = 1,
    ) -> None:
        self.name = NODE_NAME
        self._cluster = cluster
        self._report = report
        self._files = Files(cluster.state / "node")
        self._logs = logs or self._files.directory
        self._more_images = more_images
        self._nodes = nodes
        self._resources = ExitStack()
        self._keeper: subprocess.Popen[str] | None = None
        self._pid = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """What entering the block does, for those who call ``stop`` themselves."""
        with ExitStack() as resources:
            self._start(resources)
            self._resources = resources.pop_all()

    def stop(self) -> None:
        """End the node and all that it runs; its objects stay as they are. To call it again does nothing."""
        self._resources.close()

    @property
    def pid(self) -> int:
        """A process whose mount and network namespaces are the node's."""
        return self._pid

    @property
    def keeper_pid(self) -> int:
        """The process outside that ends the node."""
        assert self._keeper is not None
        return self._keeper.pid

    @property
    def network(self) -> Path:
        """The network namespace, as a file."""
        return Path(f"/proc/{self._pid}/ns/net")

    def kubeconfig_inside(self, kubeconfig: Path) -> Path:
        """A copy of a kubeconfig of this cluster for processes in the node's network."""
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        for each in config["clusters"]:
            each["cluster"]["server"] = f"https://{NODE_ADDRESS}:{API_SERVER_PORT}"
        copy = self._files.directory / f"{kubeconfig.name}.inside"
        copy.write_text(yaml.safe_dump(config), encoding="utf-8")
        copy.chmod(0o600)
        return copy

    def inside(self) -> AbstractContextManager[None]:
        """In this block, what this thread connects to is looked for in the node's network: Pods, Services, kubelet."""
        return network.inside(self.network)

    def pod_network(self, pod: Object) -> Path:
        """The network namespace of one of its Pods, as a file, as long as the Pod runs.

        Raises ``NodeError`` where none of the Pod's processes runs here.
        """
        # The kubelet names the cgroup of a Pod after its UID.
        cgroup = f"/pod{pod['metadata']['uid']}/"
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(FileNotFoundError, ProcessLookupError):
                if cgroup in (process / "cgroup").read_text(encoding="utf-8"):
                    return process / "ns" / "net"
        raise NodeError(f"no process of the Pod {key_of(pod)} runs on {self.name}")

    @contextmanager
    def unreachable(self, address: str) -> Iterator[None]:
        """In this block there is no way from the node to a Pod; probes fail, too."""
        show = self.command("ip", "route", "show", address)
        before = subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()
        unreachable = ("unreachable", address)
        subprocess.run(self.command("ip", "route", "replace", *unreachable), check=True)
        try:
            yield
        finally:
            subprocess.run(self.command("ip", "route", "delete", *unreachable), check=True)
            if before:
                subprocess.run(self.command("ip", "route", "replace", *before), check=True)

    def command(self, *command: str) -> list[str]:
        """The words that run a command inside the node, for people and for tests that look closely."""
        processes = f"--pid=/proc/{self._pid}/ns/pid_for_children"
        return ["nsenter", f"--target={self._pid}", "--mount", "--net", processes, "--", *command]

    def ctr(self, *arguments: str, node: str = NODE_NAME) -> list[str]:
        """The words that run a node's containerd client, in the kubelet's namespace of containers."""
        (member,) = (each for each in map(Member, range(self._nodes)) if each.name == node)
        address = f"--address={member.containerd_socket}"
        return self.command(str(self._programs / "ctr"), address, "--namespace=k8s.io", *arguments)

    def _start(self, resources: ExitStack) -> None:
        requirements.ensure(self._report, self._cluster.state, cache_directory(), ROOT, Path(sys.prefix))
        kubernetes = built_binary(self._report)
        self._programs = programs = built_programs(PROGRAMS, self._report)
        started_mono = time.monotonic()
        archives = [images.pause_image(programs / "pause").packed(), images.envoy_image().packed(), *self._more_images]
        plan = Plan(
            directory=str(self._files.directory),
            logs=str(self._logs.resolve()),
            programs=str(programs),
            kubernetes=str(kubernetes),
            images=[str(archive) for archive in archives],
            client_ca=str(self._cluster.authority.ca_file),
            api_server_port=self._cluster.port,
            proxy_socket=str(self._cluster.proxy_socket),
            nodes=self._nodes,
        )
        self._write_credentials(plan)
        plan.write()
        with Kube(self._cluster.kubeconfig) as admin:
            for kind, manifest in _objects():
                admin.apply(kind, manifest, force=True)
            self._start_keeper(plan, resources)
            self._wait_for_images()
            for member in plan.members:
                self._wait_ready(admin, member)
        names = " and ".join(member.name for member in plan.members)
        self._report(f"node: {names} ready after {time.monotonic() - started_mono:.1f} s")

    def _write_credentials(self, plan: Plan) -> None:
        """Who the nodes' programs are at the API server, and what each kubelet shows to those who ask it."""
        server = f"https://{NODE_ADDRESS}:{API_SERVER_PORT}"
        authority = self._cluster.authority
        for member in plan.members:
            files = plan.files(member)
            files.directory.mkdir(mode=0o700)
            authority.write_kubeconfig(
                files.kubeconfig("kubelet"), server, f"system:node:{member.name}", "system:nodes"
            )
            authority.write_serving_certificate(
                files.kubelet_certificate, files.kubelet_key, member.address, member.name
            )
        for program in ("kube-proxy", "coredns"):
            file = self._files.kubeconfig(program)
            authority.write_kubeconfig(file, server, f"system:{program}", "operator-app-tests")

    def _start_keeper(self, plan: Plan, resources: ExitStack) -> None:
        with (self._logs / "keeper.log").open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.node.keeper", str(plan.file)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C at a terminal is for the tests, which then end the node in their own order.
                start_new_session=True,
            )
        resources.callback(_end, self._keeper)
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            raise NodeError("\n".join(["the node ended while starting", *self._log_tails()]))
        self._pid = int(line)

    def _wait_ready(self, admin: Kube, member: Member) -> None:
        assert self._keeper is not None
        deadline_mono = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(admin.find(NODE, Key("", member.name))):
            if self._keeper.poll() is not None:
                raise NodeError("\n".join(["the node ended while starting", *self._log_tails()]))
            if time.monotonic() > deadline_mono:
                raise NodeError("\n".join([f"the node was not ready within {START_TIMEOUT_S:g} s", *self._log_tails()]))
            time.sleep(POLL_INTERVAL_S)

    def _wait_for_images(self) -> None:
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        if not self._keeper.stdout.readline():
            raise NodeError("\n".join(["the node ended while starting", *self._log_tails()]))

    def _log_tails(self) -> Iterator[str]:
        for log in sorted(self._logs.glob("*.log")):
            yield f"--- {log}"
            yield from log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]


def _end(keeper: subprocess.Popen[str]) -> None:
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    keeper.stdin.close()
    try:
        keeper.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()
    keeper.stdout.close()


def _is_ready(node: Object | None) -> bool:
    conditions = (node or {}).get("status", {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _objects() -> Iterator[tuple[Kind, Object]]:
    """What CoreDNS may read, and where Pods find the API server, whose own address is on loopback outside."""
    yield (
        CLUSTER_ROLE,
        {
            "apiVersion": CLUSTER_ROLE.api_version,
            "kind": CLUSTER_ROLE.kind,
            "metadata": {"name": "system:coredns"},
            "rules": [
                {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
                {"apiGroups": [ENDPOINT_SLICE.group], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
            ],
        },
    )
    yield (
        CLUSTER_ROLE_BINDING,
        {
            "apiVersion": CLUSTER_ROLE_BINDING.api_version,
            "kind": CLUSTER_ROLE_BINDING.kind,
            "metadata": {"name": "system:coredns"},
            "roleRef": {"apiGroup": _RBAC, "kind": CLUSTER_ROLE.kind, "name": "system:coredns"},
            "subjects": [{"apiGroup": _RBAC, "kind": "User", "name": "system:coredns"}],
        },
    )
    yield (
        ENDPOINT_SLICE,
        {
            "apiVersion": ENDPOINT_SLICE.api_version,
            "kind": ENDPOINT_SLICE.kind,
            "metadata": {
                "namespace": "default",
                "name": "kubernetes",
                "labels": {"kubernetes.io/service-name": "kubernetes"},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [NODE_ADDRESS], "conditions": {"ready": True}}],
            "ports": [{"name": "https", "port": API_SERVER_PORT, "protocol": "TCP"}],
        },
    )
