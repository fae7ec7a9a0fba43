"""The Pods' network: a bridge with a /24 of its own, and for each Pod a network namespace joined to it.

Everything made here carries the slot's number in its name (bridge ``oasn7``, veth ``oasn7v12``, namespace
``oasn7-12``), so that what a killed run left behind is found and removed by the next holder of the slot. The host
reaches every Pod and Pods reach each other; nothing is routed to the outside.
"""

import ipaddress
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass

import anyio

from tests.e2e.node.slot import Slot


class NetworkUnavailableError(Exception):
    """This machine gives no network namespaces; the message says what was missing."""


class SubnetInUseError(NetworkUnavailableError):
    """The slot's /24 is reached by some route already; another slot may do."""


@dataclass(frozen=True, slots=True)
class PodNamespace:
    """The network namespace ``name`` (below ``/run/netns``) of one Pod, and its only address besides loopback."""

    name: str
    ip: str


async def _ip(*arguments: str, batch: str | None = None) -> bytes:
    command = ["ip", *arguments] if batch is None else ["ip", *arguments, "-batch", "-"]
    done = await anyio.run_process(command, input=None if batch is None else batch.encode(), check=False)
    if done.returncode:
        raise NetworkUnavailableError(f"{' '.join(command)}: {done.stderr.decode().strip()}")
    return done.stdout


class PodNetwork:
    """The bridge of one slot. ``gateway`` is the host's own address on it."""

    def __init__(self, slot: Slot) -> None:
        self._prefix = f"oasn{slot.number}"
        self._subnet = ipaddress.IPv4Network((f"10.231.{slot.number}.0", 24))
        self._last = 1
        self._taken: set[int] = set()
        self.gateway = str(self._subnet[1])

    async def open(self) -> None:
        """Make the bridge, and prove that a namespace can be joined to it.

        Raises NetworkUnavailableError where that is impossible or the /24 is in use; nothing of the slot is left then.
        """
        if os.geteuid() != 0:
            raise NetworkUnavailableError("network namespaces need root")
        if missing := [
            tool for tool in ("ip", "nsenter", "unshare", "setpriv", "chroot") if shutil.which(tool) is None
        ]:
            raise NetworkUnavailableError(f"not on this machine: {', '.join(missing)}")
        await self.close()
        routes = json.loads(await _ip("-4", "-json", "route", "show", "table", "all"))
        for route in routes:
            destination = route["dst"]
            if destination != "default" and self._subnet.overlaps(ipaddress.IPv4Network(destination, strict=False)):
                raise SubnetInUseError(f"{self._subnet} is in use: there is a route to {destination}")
        try:
            await _ip(
                batch=f"link add {self._prefix} type bridge\n"
                f"addr add {self.gateway}/24 dev {self._prefix}\n"
                f"link set {self._prefix} up\n"
            )
            await self.remove(await self.add())
        except NetworkUnavailableError:
            await self.close()
            raise

    async def add(self) -> PodNamespace:
        """A namespace with an address that was not in use lately, so that no neighbour remembers another Pod's.

        Raises NetworkUnavailableError if all 253 addresses are in use, or if the kernel refuses.
        """
        candidates = (2 + (self._last - 1 + step) % 253 for step in range(253))
        number = next((candidate for candidate in candidates if candidate not in self._taken), None)
        if number is None:
            raise NetworkUnavailableError(f"all addresses of {self._subnet} are in use")
        self._last = number
        self._taken.add(number)
        pod = PodNamespace(f"{self._prefix}-{number}", str(self._subnet[number]))
        host_end = f"{self._prefix}v{number}"
        await _ip("netns", "add", pod.name)
        await _ip(
            batch=f"link add {host_end} type veth peer name eth0 netns {pod.name}\n"
            f"link set {host_end} master {self._prefix} up\n"
        )
        await _ip(
            "-n",
            pod.name,
            batch="link set lo up\n"
            f"addr add {pod.ip}/24 dev eth0\n"
            "link set eth0 up\n"
            f"route add default via {self.gateway}\n",
        )
        return pod

    async def remove(self, pod: PodNamespace) -> None:
        """Remove the namespace; its processes must have ended."""
        number = int(pod.name.rpartition("-")[2])
        await anyio.run_process(["ip", "link", "del", f"{self._prefix}v{number}"], check=False)
        await anyio.run_process(["ip", "netns", "del", pod.name], check=False)
        self._taken.discard(number)

    async def close(self) -> None:
        """Remove everything that carries the slot's number, and end what runs inside; without root there is nothing."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            return
        namespaces = (await anyio.run_process(["ip", "netns", "list"], check=False)).stdout.decode()
        for name in re.findall(rf"^({self._prefix}-\d+)\b", namespaces, re.MULTILINE):
            pids = (await anyio.run_process(["ip", "netns", "pids", name], check=False)).stdout.split()
            if pids:
                await anyio.run_process(["kill", "-KILL", *(pid.decode() for pid in pids)], check=False)
            await anyio.run_process(["ip", "netns", "del", name], check=False)
        links = json.loads(await _ip("-json", "link", "show"))
        for link in links:
            if re.fullmatch(rf"{self._prefix}(v\d+)?", link["ifname"]):
                # A veth goes with its namespace, possibly before this line.
                await anyio.run_process(["ip", "link", "del", link["ifname"]], check=False, stderr=subprocess.DEVNULL)
