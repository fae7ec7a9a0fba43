"""Rivals: other writers that keep changing fields of the operator, each in a thread of its own.

A rival repeats its edits until it is stopped. What the operator does about it, tests see at the API server.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from operator_app.api.kinds import Key, Kind, Object
from tests.e2e.kube import Kube, KubeError, PatchType

PERIOD_S = 0.05
"""How often a rival checks whether its edits are still there."""


@dataclass(frozen=True, slots=True)
class RivalEdit:
    """An edit that a rival repeats: ``is_done`` says whether an object still has it, ``patch`` makes it.

    Without a ``patch`` the rival deletes the object, with this ``propagation``.
    """

    kind: Kind
    key: Key
    is_done: Callable[[Object], bool]
    patch: Object | Sequence[Object] | None
    propagation: str = "Background"


class Rival:
    """Makes its edits in turn, each one whenever it was undone; ``edits_made`` counts them."""

    def __init__(self, admin: Kube, edits: Sequence[RivalEdit], manager: str) -> None:
        self._admin = admin
        self._edits = edits
        self._manager = manager
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=manager)
        self.edits_made = 0
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it; raises the error that ended it, if one did."""
        self._is_stopping.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._is_stopping.wait(PERIOD_S):
                for edit in self._edits:
                    self._make(edit)
        except BaseException as error:  # noqa: BLE001  # raised by stop()
            self.failure = error

    def _make(self, edit: RivalEdit) -> None:
        live = self._admin.find(edit.kind, edit.key)
        if live is None or edit.is_done(live):
            return
        patch_type: PatchType = "merge" if isinstance(edit.patch, dict) else "json"
        try:
            if edit.patch is None:
                self._admin.delete(edit.kind, edit.key, propagation=edit.propagation)
            else:
                self._admin.patch(edit.kind, edit.key, edit.patch, patch_type=patch_type, field_manager=self._manager)
        except KubeError as error:
            if error.code not in {404, 409, 422}:
                raise
            return
        self.edits_made += 1


@contextmanager
def rival_writing(admin: Kube, *edits: RivalEdit, manager: str = "rival") -> Iterator[Rival]:
    """A rival that is stopped at the end of the block."""
    rival = Rival(admin, edits, manager)
    rival.start()
    try:
        yield rival
    finally:
        rival.stop()
