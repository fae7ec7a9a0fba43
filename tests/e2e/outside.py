"""An outside registry made of files: an operator in another process writes it, and a test reads it.

It implements ``operator_app.registration.registry.Registry`` and is installed as any other one: by an entry point on
the operator's path. Each record is a file named like its hostname. The content of the file ``fault`` decides how calls
fail, and every call is a line of the file ``calls``.
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
from operator_app.registration.registry import Comparison, OutsideRecord, Record, Registration
from operator_app.results import Outcome, Problem
from operator_app.settings import Settings

NAME: Final = "files"
ENTRY_POINT: Final = f"[operator_app.registries]\n{NAME} = tests.e2e.outside:connect\n"
FLAGS: Final = (f"--registry={NAME}", "--sweep-interval-s=86400")
"""Those of an operator that uses this registry, and whose sweeps hide nothing from a test."""

FOLDER_VARIABLE: Final = "OUTSIDE_FOLDER"
TIMEOUT_S: Final = 3.0
"""A call that hangs fails after this."""


class Outside:
    """The folder of the registry, for tests to read and to change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records = folder / "records"
        self._records.mkdir(parents=True, exist_ok=True)
        self._calls = folder / "calls"
        self._calls.touch()
        self._fault = folder / "fault"

    def install(self, site: Path) -> str:
        """Make the entry point in a folder for packages, and return the ``PYTHONPATH`` that has it."""
        info = site / "outside_files-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-files\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINT)
        return os.pathsep.join((str(site), str(Path(__file__).parents[2])))

    def fail(self, how: str | None) -> None:
        """From now on fail like this: ``down``, ``hangs``, ``throttled``, ``forbidden``, or not at all."""
        if how is None:
            self._fault.unlink(missing_ok=True)
        else:
            self._fault.write_text(how)

    def put(self, hostname: str, record: dict[str, Any] | None) -> None:
        """Change a record by hand, or remove it."""
        file = self._records / hostname
        if record is None:
            file.unlink(missing_ok=True)
        else:
            scratch = self.folder / "scratch"
            scratch.write_text(json.dumps(record))
            scratch.replace(file)

    def get(self, hostname: str) -> dict[str, Any] | None:
        """One record."""
        return self.records().get(hostname)

    def records(self) -> dict[str, dict[str, Any]]:
        """Every record by hostname."""
        return {file.name: json.loads(file.read_text()) for file in sorted(self._records.iterdir())}

    def calls(self, about: str) -> list[str]:
        """Every call so far whose hostname contains ``about``, such as ``register shop.example.com``."""
        return [each for each in self._calls.read_text().splitlines() if about in each]

    async def called(self, call: str, hostname: str) -> None:
        """Append a line for a call, and raise the error that ``fail`` has set."""
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

    def __init__(self, outside: Outside, operator: str) -> None:
        self._outside = outside
        self._operator = operator

    async def observe(self, record: Record) -> Comparison:
        """How the record in its file compares."""
        await self._outside.called("observe", record.hostname or "")
        return self._finding(record)

    async def register(self, record: Record) -> Registration:
        """Write the record, where its hostname is free or has an older record of the same proxy."""
        hostname = record.hostname or ""
        await self._outside.called("register", hostname)
        match self._finding(record):
            case Comparison.FOREIGN:
                message = f"{hostname} has a record that is not this proxy's"
                return Registration(Outcome.SKIPPED, Problem("NameConflict", message, needs_user_action=True))
            case Comparison.NEWER:
                return Registration(Outcome.SKIPPED, Problem("RecordConflict", "a newer generation is registered"))
            case Comparison.MATCHING:
                return Registration(Outcome.UNCHANGED)
            case finding:
                self._outside.put(hostname, self._wanted(record))
                return Registration(Outcome.CREATED if finding is Comparison.ABSENT else Outcome.CONFIGURED)

    async def deregister(self, uid: str, hostname: str) -> Outcome:
        """Remove the record, where it is the proxy's."""
        await self._outside.called("deregister", hostname)
        found = self._outside.get(hostname)
        if found is None:
            return Outcome.UNCHANGED
        if found.get("uid") != uid:
            return Outcome.SKIPPED
        self._outside.put(hostname, None)
        return Outcome.DELETED

    async def entries(self) -> AsyncIterator[OutsideRecord]:
        """The records with this operator's id."""
        await self._outside.called("entries", "")
        for hostname, found in self._outside.records().items():
            if found.get("operator") == self._operator:
                yield OutsideRecord(found["uid"], Key(*found["proxy"]), hostname)

    def _wanted(self, record: Record) -> dict[str, Any]:
        return {
            "operator": self._operator,
            "uid": record.uid,
            "proxy": list(record.proxy),
            "generation": record.generation,
            "address": record.address,
            "ttl": record.ttl_s,
        }

    def _finding(self, record: Record) -> Comparison:
        found = self._outside.get(record.hostname or "")
        if found is None:
            return Comparison.ABSENT
        if found.get("uid") != record.uid:
            return Comparison.FOREIGN
        if found["generation"] > record.generation:
            return Comparison.NEWER
        return Comparison.MATCHING if found == self._wanted(record) else Comparison.DIFFERENT


@asynccontextmanager
async def connect(settings: Settings) -> AsyncGenerator[FileRegistry]:
    """The registry, as the entry point opens it."""
    yield FileRegistry(Outside(Path(os.environ[FOLDER_VARIABLE])), settings.operator_id)
