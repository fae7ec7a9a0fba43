"""A slot: the number that tells side-by-side runs apart, and proves which leftovers belong to nobody.

A slot is held by a lock on a file, which the kernel releases when its holder dies, however it dies. So whoever can
take the lock may remove whatever carries the slot's number. What carries it is for others to know.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

SLOTS: Final = 200


class Slot:
    """A held slot. ``directory`` is empty at first, private to this user, and removed by :meth:`release`."""

    def __init__(self, number: int, lock_fd: int, directory: Path) -> None:
        self.number = number
        self.directory = directory
        self._lock_fd = lock_fd

    def release(self) -> None:
        """Remove the directory and let others take the slot; the empty lock file stays."""
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock_fd)


def claim(number: int) -> Slot | None:
    """The slot ``number`` (below :data:`SLOTS`) with an empty directory; None if a living process holds it.

    Raises PermissionError if the directory of the locks belongs to another user.
    """
    base = _base()
    lock_fd = os.open(base / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        return None
    directory = base / str(number)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    return Slot(number, lock_fd, directory)


def used_numbers() -> set[int]:
    """Slots that have a directory: held, or left behind by a run that was killed."""
    return {int(entry.name) for entry in _base().iterdir() if entry.name.isdigit()}


def _base() -> Path:
    base = Path(tempfile.gettempdir()) / f"operator-app-standin-{os.geteuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.lstat().st_uid != os.geteuid():
        raise PermissionError(f"{base} belongs to another user")
    return base
