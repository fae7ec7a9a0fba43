"""What proxies in front of a test's server have in common: they count what arrives, and each fault strikes once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

F = TypeVar("F")

POLL_S: Final = 0.05
"""How often a proxy looks whether it is to end."""


class Counting(Generic[F]):
    """Counts requests by method while ``server`` serves, which is for as long as the context lasts.

    ``no_fault`` is the fault of a request that has none. ``requests`` has the method of each request that arrived, in
    their order.
    """

    def __init__(self, no_fault: F, server: BaseServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": POLL_S})
        self._no_fault = no_fault
        self._faults: dict[tuple[str, int], F] = {}
        self._lock = threading.Lock()
        self.requests: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def inject(self, method: str, fault: F, *, nth: int = 1) -> None:
        """Inject a fault into the ``nth`` request of a method from now on."""
        with self._lock:
            self._faults[method, self.requests.count(method) + nth] = fault

    def withdraw(self) -> bool:
        """Take back every fault that has not struck; returns whether there was one."""
        with self._lock:
            is_any = bool(self._faults)
            self._faults.clear()
            return is_any

    @contextmanager
    def counted(self) -> Iterator[list[str]]:
        """The methods of the requests that arrive in the context, complete at its end."""
        start, inside = len(self.requests), list[str]()
        yield inside
        inside += self.requests[start:]

    def arrived(self, method: str) -> F:
        """Count one request; its fault."""
        with self._lock:
            self.requests.append(method)
            return self._faults.pop((method, self.requests.count(method)), self._no_fault)
