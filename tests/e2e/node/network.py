"""The network of a cluster's Pods, and being in it: for the sockets that are made there, not for anything else.

A namespace is named by a file such as ``/proc/PID/ns/net``. A socket stays for good in the namespace of the thread that
made it (setns(2), network_namespaces(7)), so a client that connects inside the block may be used after it.
"""

import ctypes
import http.client
import os
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

_CLONE_NEWNET: Final = 0x40000000
_OWN: Final = Path("/proc/thread-self/ns/net")

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def inside(namespace: Path) -> Iterator[None]:
    """This thread's new sockets belong to ``namespace`` until the block ends; other threads' do not.

    Raises ``OSError``: the namespace is gone, or this process is not root.
    """
    with _OWN.open("rb") as before, namespace.open("rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def own_address(namespace: Path, candidates: Iterable[str]) -> str:
    """The first of these addresses that is one of the namespace itself. Raises ``LookupError``: none is."""
    with inside(namespace):
        for each in candidates:
            with socket.socket() as probe, suppress(OSError):
                probe.bind((each, 0))
                return each
    raise LookupError(f"none of the nodes' addresses is one of {namespace}")


def get(address: str, port: int, path: str = "/", *, host: str = "", timeout_s: float = 5.0) -> tuple[int, str]:
    """Status and text of the answer to one HTTP request, on a connection of its own, from where this thread is.

    Raises ``OSError`` where there is no whole answer.
    """
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers={"Host": host or address})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"no whole answer from {address}:{port}: {error!r}") from error
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class PodNetwork:
    """Where Pods and Services have their addresses: a network namespace, and the API server's URL in it.

    ``address`` is one of that namespace, at which Pods reach what listens there. ``directory`` is a private one, for
    kubeconfigs.
    """

    namespace: Path
    api_server: str
    address: str
    directory: Path

    def inside(self) -> AbstractContextManager[None]:
        """In this block, what this thread connects to is looked for there."""
        return inside(self.namespace)

    def command(self, *command: str) -> list[str]:
        """The words that run a command there, with everything else as it is here."""
        return ["nsenter", f"--net={self.namespace}", "--", *command]

    def kubeconfig_inside(self, kubeconfig: Path) -> Path:
        """A copy of a kubeconfig of this cluster for processes that run there."""
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        for each in config["clusters"]:
            each["cluster"]["server"] = self.api_server
        copy = self.directory / f"{kubeconfig.name}.inside"
        copy.touch(0o600)
        copy.write_text(yaml.safe_dump(config), encoding="utf-8")
        return copy

    @contextmanager
    def unreachable(self, address: str) -> Iterator[None]:
        """In this block no way leads from there to a Pod."""
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


def _enter(namespace_fd: int) -> None:
    if _libc.setns(namespace_fd, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"can't enter the network namespace: {os.strerror(number)}")
