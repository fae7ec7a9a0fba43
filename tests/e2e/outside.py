"""An outside registry of files, which an operator in another process can use and a test can read.

It implements ``operator_app.registration.registry.Registry`` and is installed like any plugin: by an entry point on
``PYTHONPATH``. Each record is a file named like its hostname. The contents of the file ``fault`` decide how calls fail,
and every call is a line of the file ``calls``.
"""

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio

from operator_app.api.kinds import Key
from operator_app.errors import ForbiddenError, ThrottledError, TransientError
from operator_app.registration.identity import Installation
from operator_app.registration.registry import Comparison, OutsideRecord, Record, Registration
from operator_app.results import Outcome, Problem
from operator_app.settings import Settings

NAME: Final = "files"
ENTRY_POINT: Final = f"[operator_app.registries]\n{NAME} = tests.e2e.outside:connect\n"
OPERATOR_ID: Final = "tests"
CHOSEN: Final = (f"--registry={NAME}", f"--operator-id={OPERATOR_ID}")
"""The flags of an operator that uses this registry."""

FLAGS: Final = (*CHOSEN, "--sweep-interval-s=86400")
"""The same, and its sweeps hide nothing from a test."""

FOLDER_VARIABLE: Final = "OUTSIDE_FOLDER"
TIMEOUT_S: Final = 3.0
"""A call that hangs fails after this time."""


class Outside:
    """The folder of the registry, for tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records = folder / "records"
        self._records.mkdir(parents=True, exist_ok=True)
        self._calls = folder / "calls"
        self._calls.touch()
        self._fault = folder / "fault"

    def install(self, site: Path) -> str:
        """Write the entry point into the folder ``site``, and return a ``PYTHONPATH`` with it."""
        info = site / "outside_files-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-files\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINT)
        return os.pathsep.join((str(site), str(Path(__file__).parents[2])))

    def fail(self, fault: str | None) -> None:
        """Make calls fail: ``down``, ``hangs``, ``throttled`` or ``forbidden``; ``None`` ends the fault."""
        if fault is None:
            self._fault.unlink(missing_ok=True)
        else:
            self._fault.write_text(fault)

    def put(self, hostname: str, record: dict[str, Any] | None) -> None:
        """Replace a record, or remove it (``None``)."""
        file = self._records / hostname
        if record is None:
            file.unlink(missing_ok=True)
        else:
            scratch = self.folder / "scratch"
            scratch.write_text(json.dumps(record))
            scratch.replace(file)

    def get(self, hostname: str) -> dict[str, Any] | None:
        """The record of a hostname, if there is one."""
        return self.records().get(hostname)

    def records(self) -> dict[str, dict[str, Any]]:
        """All records by hostname."""
        return {file.name: json.loads(file.read_text()) for file in sorted(self._records.iterdir())}

    def calls(self, about: str) -> list[str]:
        """The calls so far whose line contains ``about``, such as ``register shop.example.com``."""
        return [each for each in self._calls.read_text().splitlines() if about in each]

    async def called(self, call: str, hostname: str) -> None:
        """Record a call, and raise the error of the present fault."""
        with self._calls.open("a") as calls:
            calls.write(f"{call} {hostname}\n")
        match self._fault.read_text() if self._fault.exists() else "":
            case "down":
                raise TransientError("the registry does not answer")
            case "hangs":
                await anyio.sleep(TIMEOUT_S)
                raise TransientError("the registry did not answer in time")
            case "throttled":
                raise ThrottledError("the registry has enough", retry_after_s=3.0)
            case "forbidden":
                raise ForbiddenError("Forbidden", "the registry refuses our credentials")
            case _:
                return


class FileRegistry:
    """See :class:`operator_app.registration.registry.Registry`."""

    def __init__(self, outside: Outside, installation: Installation) -> None:
        self._outside = outside
        self._installation = installation

    async def observe(self, record: Record) -> Comparison:
        """Compare the stored record with ``record``."""
        await self._outside.called("observe", record.hostname or "")
        return self._comparison(record)

    async def register(self, record: Record) -> Registration:
        """Write the record, unless it is another owner's or newer."""
        hostname = record.hostname or ""
        await self._outside.called("register", hostname)
        match self._comparison(record):
            case Comparison.FOREIGN:
                message = f"{hostname} has a record that is not this proxy's"
                return Registration(Outcome.SKIPPED, Problem("NameConflict", message, needs_user_action=True))
            case Comparison.NEWER:
                return Registration(Outcome.SKIPPED, Problem("RecordConflict", "a newer generation is registered"))
            case Comparison.MATCHING:
                return Registration(Outcome.UNCHANGED)
            case comparison:
                self._outside.put(hostname, self._wanted(record))
                return Registration(Outcome.CREATED if comparison is Comparison.ABSENT else Outcome.CONFIGURED)

    async def deregister(self, uid: str, hostname: str, *, former: frozenset[Installation] = frozenset()) -> Outcome:
        """Remove the record, if it has this UID and is of this installation, or of what it was before."""
        await self._outside.called("deregister", hostname)
        found = self._outside.get(hostname)
        if found is None:
            return Outcome.UNCHANGED
        if found.get("uid") != uid or not self._is_ours(found, former):
            return Outcome.SKIPPED
        self._outside.put(hostname, None)
        return Outcome.DELETED

    async def entries(self) -> AsyncIterator[OutsideRecord]:
        """The records that this operator wrote."""
        await self._outside.called("entries", "")
        for hostname, found in self._outside.records().items():
            if found.get("operator") == str(self._installation):
                yield OutsideRecord(found["uid"], hostname, Key(*found["proxy"]))

    def _is_ours(self, found: dict[str, Any], former: frozenset[Installation]) -> bool:
        return found.get("operator") in {str(each) for each in former | {self._installation}}

    def _wanted(self, record: Record) -> dict[str, Any]:
        return {
            "operator": str(self._installation),
            "uid": record.uid,
            "proxy": list(record.proxy),
            "generation": record.generation,
            "address": record.address,
            "ttl": record.ttl_s,
        }

    def _comparison(self, record: Record) -> Comparison:
        found = self._outside.get(record.hostname or "")
        if found is None:
            return Comparison.ABSENT
        if found.get("uid") != record.uid or not self._is_ours(found, record.former):
            return Comparison.FOREIGN
        if found["generation"] > record.generation:
            return Comparison.NEWER
        return Comparison.MATCHING if found == self._wanted(record) else Comparison.DIFFERENT


@asynccontextmanager
async def connect(_settings: Settings, installation: Installation) -> AsyncGenerator[FileRegistry]:
    """The factory that the entry point names."""
    yield FileRegistry(Outside(Path(os.environ[FOLDER_VARIABLE])), installation)
