"""``python -m tests.e2e.node.init PLAN``: process 1 of a node, inside its namespaces.

It makes the network and the empty directories, starts the node's programs, and takes in orphans. When its standard
input ends, or one of the programs does, it ends, and the kernel with it everything inside: processes, mounts, network.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from tests.e2e.controlplane.processes import Component
from tests.e2e.node import configuration
from tests.e2e.node.addresses import Member
from tests.e2e.node.plan import Plan

START_TIMEOUT_S: Final = 30.0
NETWORK: Final = (
    "ip link set lo up",
    # A bridge without ports carries the nodes' addresses: not every kernel has dummy devices.
    "ip link add node0 type bridge",
    "ip link set node0 up",
    f"ip route add {configuration.ROUTED_TO_THE_NODE} dev node0",
)
IP_FORWARD: Final = Path("/proc/sys/net/ipv4/ip_forward")


def main() -> int:
    """Be process 1; the exit code is 1 if a program ended by itself, whose log tells why."""
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    plan = Plan.read(Path(sys.argv[1]))
    _run("mount", "--make-rshared", "/")
    for directory in configuration.EMPTY:
        _run("mount", "-t", "tmpfs", "-o", "mode=755", "node", directory)
    for command in NETWORK:
        _run(*command.split())
    for member in plan.members:
        _run("ip", "address", "add", f"{member.address}/32", "dev", "node0")
        # Each on a file system of its own: containerd mounts parts of its own for a moment, and a kubelet that takes
        # one of these for the mount point of its directory, on the same device, ends when that is gone.
        for own in (member.kubelet_directory, member.containerd_directory):
            own.mkdir()
            _run("mount", "-t", "tmpfs", "-o", "mode=755", "node", str(own))
    IP_FORWARD.write_text("1")
    print("network", flush=True)
    programs = _started(plan)
    while True:
        pid, _ = os.waitpid(-1, 0)
        for each in programs:
            if each.pid == pid:
                print(f"{each.name} ended by itself", file=sys.stderr, flush=True)
                return 1


def _started(plan: Plan) -> list[Component]:
    """Start all programs, each once what it needs is there."""
    logs, programs = Path(plan.logs), Path(plan.programs)
    first = plan.files(plan.members[0])
    # containerd finds its shim beside itself, and runc on the path.
    os.environ["PATH"] = f"{programs}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    coredns = Component(programs / "coredns", configuration.coredns(first), logs, name="coredns")
    kube_proxy = Component(Path(plan.kubernetes), configuration.kube_proxy(first), logs)
    runtimes = {
        member: Component(
            programs / "containerd",
            configuration.containerd(plan.files(member)),
            logs,
            name=f"containerd{member.suffix}",
        )
        for member in plan.members
    }
    # It takes a kubelet longer to be ready than the images to be there, and nobody is told before both are so.
    kubelets = [_kubelet(plan, member, containerd) for member, containerd in runtimes.items()]
    for image in plan.images:
        for member in plan.members:
            address = f"--address={member.containerd_socket}"
            _run("ctr", address, "--namespace=k8s.io", "images", "import", "--local", image)
    print("images", flush=True)
    return [coredns, kube_proxy, *runtimes.values(), *kubelets]


def _kubelet(plan: Plan, member: Member, containerd: Component) -> Component:
    """Start a node's kubelet once its containerd can be asked."""
    deadline_mono = time.monotonic() + START_TIMEOUT_S
    while not member.containerd_socket.exists():
        if not containerd.is_running or time.monotonic() > deadline_mono:
            raise SystemExit(f"containerd did not start\n{containerd.log_tail()}")
        time.sleep(0.02)
    arguments = configuration.kubelet(plan.files(member))
    return Component(Path(plan.kubernetes), arguments, Path(plan.logs), name=f"kubelet{member.suffix}")


def _run(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _end_with_standard_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
