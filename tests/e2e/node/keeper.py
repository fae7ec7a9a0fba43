"""``python -m tests.e2e.node.keeper PLAN``: the process that a node lives and dies with, outside of the node.

It makes the cgroup, starts the node's first process in namespaces of its own, and carries the two ways through them.
It prints the process id whose namespaces are the node's once the network is there, and a second line once all images
are. When its standard input ends, which
it does when whoever started it ends, however, it kills the whole node, removes the cgroup and ends. If it is killed
itself, the node dies all the same (``init.py`` reads a pipe from here), and the next keeper removes the empty cgroup.
"""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.e2e.node import cgroups, relay
from tests.e2e.node.addresses import API_SERVER_PORT, NODE_ADDRESS
from tests.e2e.node.configuration import NAMESPACES
from tests.e2e.node.plan import Plan

END_TIMEOUT_S: Final = 20.0


def main() -> int:
    """Keep one node; the exit code is 1 if it ended by itself."""
    # Whoever started this ends it by closing its standard input; a signal to a whole group is not meant for it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    plan = Plan.read(Path(sys.argv[1]))
    cgroups.sweep()
    cgroup = cgroups.create(*(member.name for member in plan.members))
    try:
        for member in plan.members:
            plan.files(member).write(Path(plan.client_ca), cgroup)
        node = subprocess.Popen(
            [*NAMESPACES, sys.executable, "-m", "tests.e2e.node.init", str(plan.file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            return asyncio.run(_keep(plan, node))
        finally:
            _end(node)
    finally:
        cgroups.remove(cgroup)


async def _keep(plan: Plan, node: subprocess.Popen[bytes]) -> int:
    assert node.stdout is not None
    if not await asyncio.to_thread(node.stdout.readline):
        return 1
    # unshare itself has entered all of them but the process namespace, which only its child is in.
    namespace = Path(f"/proc/{node.pid}/ns/net")
    outwards = await relay.serve_outwards(namespace, (NODE_ADDRESS, API_SERVER_PORT), plan.api_server_port)
    inwards = await relay.serve_inwards(namespace, Path(plan.proxy_socket))
    async with outwards, inwards:
        print(node.pid, flush=True)
        if not await asyncio.to_thread(node.stdout.readline):
            return 1
        print("images", flush=True)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin, _read_until_end, ended)
        loop.add_reader(node.stdout, _read_until_end_of, node.stdout.fileno(), ended)
        await ended.wait()
    return 0 if node.poll() is None else 1


def _read_until_end(ended: asyncio.Event) -> None:
    _read_until_end_of(sys.stdin.fileno(), ended)


def _read_until_end_of(descriptor: int, ended: asyncio.Event) -> None:
    if not os.read(descriptor, 4096):
        asyncio.get_running_loop().remove_reader(descriptor)
        ended.set()


def _end(node: subprocess.Popen[bytes]) -> None:
    """End the first process, with which the kernel ends all others of its process namespace."""
    assert node.stdin is not None
    node.stdin.close()
    try:
        # unshare ends when its child has, and the child when all others are gone (pid_namespaces(7)).
        node.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()


if __name__ == "__main__":
    sys.exit(main())
