"""What proxies in front of a test's server have in common: they count what arrives, and each fault strikes once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

F = TypeVar("F")


class Counting(Generic[F]):
    """Counts requests by method. ``no_fault`` is the fault of a request that has none.

    ``requests`` has the method of each request that arrived, in their order.
    """

    def __init__(self, no_fault: F) -> None:
        self._no_fault = no_fault
        self._faults: dict[tuple[str, int], F] = {}
        self._lock = threading.Lock()
        self.requests: list[str] = []

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
