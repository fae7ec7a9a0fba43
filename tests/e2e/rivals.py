"""Rivals: other writers that want fields of ours, each a thread that answers as fast as it can.

What a rival does, it does until it is stopped, whatever anybody else writes. What comes of it, tests see elsewhere.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from operator_app.api.kinds import Key, Kind, Object
from tests.e2e.kube import Kube, KubeError, PatchType

PERIOD_S = 0.05
"""How often a rival looks whether it still has its way."""


@dataclass(frozen=True, slots=True)
class Want:
    """What a rival wants of an object: ``has`` tells whether it has it, ``patch`` takes it.

    Without a ``patch`` it wants the object gone and deletes it with this ``propagation``.
    """

    kind: Kind
    key: Key
    has: Callable[[Object], bool]
    patch: Object | Sequence[Object] | None
    propagation: str = "Background"


class Rival:
    """Takes one want after the other, by turns, each whenever it was lost; counts how often that was."""

    def __init__(self, admin: Kube, wants: Sequence[Want], manager: str) -> None:
        self._admin = admin
        self._wants = wants
        self._manager = manager
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=manager)
        self.takings = 0
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End and wait; raises what went wrong meanwhile."""
        self._over.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._over.wait(PERIOD_S):
                for want in self._wants:
                    self._take(want)
        except BaseException as error:  # noqa: BLE001  # told by stop()
            self.failure = error

    def _take(self, want: Want) -> None:
        live = self._admin.find(want.kind, want.key)
        if live is None or want.has(live):
            return
        patch_type: PatchType = "merge" if isinstance(want.patch, dict) else "json"
        try:
            if want.patch is None:
                self._admin.delete(want.kind, want.key, propagation=want.propagation)
            else:
                self._admin.patch(want.kind, want.key, want.patch, patch_type=patch_type, field_manager=self._manager)
        except KubeError as error:
            if error.code not in {404, 409, 422}:
                raise
            return
        self.takings += 1


@contextmanager
def rivalry(admin: Kube, *wants: Want, manager: str = "rival") -> Iterator[Rival]:
    """A rival that is stopped at the end of the block."""
    rival = Rival(admin, wants, manager)
    rival.start()
    try:
        yield rival
    finally:
        rival.stop()
