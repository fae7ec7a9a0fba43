"""Being in another network namespace: for the sockets that are made there, not for anything else.

A namespace is named by a file such as ``/proc/PID/ns/net``. A socket stays for good in the namespace of the thread that
made it (setns(2), network_namespaces(7)), so a client that connects inside the block may be used after it.
"""

import ctypes
import http.client
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

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


def _enter(namespace_fd: int) -> None:
    if _libc.setns(namespace_fd, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"can't enter the network namespace: {os.strerror(number)}")
