"""The databases that PowerDNS keeps its zones in, as the tests start them: a SQLite file, or a PostgreSQL server."""

import os
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
from pathlib import Path
from typing import Final, Protocol

from tests.e2e.powerdns.install import POSTGRESQL_SCHEMA, SQLITE_SCHEMA, installed
from tests.e2e.server_process import ServerProcess, as_user

START_TIMEOUT_S: Final = 60.0
_USERS: Final = ("postgres", "nobody")
"""Who runs PostgreSQL where the tests run as root, which it refuses."""


class Database(Protocol):
    """A database with PowerDNS's tables in it."""

    @property
    def settings(self) -> dict[str, object]:
        """What PowerDNS's configuration says of it."""
        ...

    def sql(self, statement: str) -> None:
        """Run a statement, for states that can't be made by PowerDNS's API."""
        ...

    def close(self) -> None:
        """Stop it and remove its files."""
        ...


class Sqlite:
    """A SQLite file in ``folder``: one writer at a time."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "zones.sqlite3"
        with sqlite3.connect(self._file) as database:
            database.executescript(SQLITE_SCHEMA.read_text())
        database.close()

    @property
    def settings(self) -> dict[str, object]:
        """See :class:`Database`."""
        return {"launch": "gsqlite3", "gsqlite3-database": self._file, "gsqlite3-pragma-synchronous": 0}

    def sql(self, statement: str) -> None:
        """See :class:`Database`."""
        with sqlite3.connect(self._file) as database:
            database.execute(statement)
        database.close()

    def close(self) -> None:
        """See :class:`Database`."""


class PostgreSql:
    """A PostgreSQL server of its own, on a Unix socket: as many writers as there are, in READ COMMITTED.

    Its files are not below the tests' own folder, into which no other user may look.
    """

    def __init__(self) -> None:
        self._psql = installed("psql")
        self._user = next((each for each in _USERS if _exists(each)), _USERS[-1]) if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="operator-app-postgresql-"))
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        data = self._folder / "data"
        options = "-U pdns --auth=trust --no-sync --no-locale -E UTF8"
        command = (*as_user(self._user), *map(str, (installed("initdb"), "-D", data)), *options.split())
        subprocess.run(command, cwd="/", capture_output=True, check=True, timeout=START_TIMEOUT_S)
        options = f"-D {data} -k {self._folder} -c listen_addresses= -c fsync=off -c shared_buffers=16MB"
        server = (str(installed("postgres")), *options.split(), "-c", "max_connections=40")
        log = self._folder / "log"
        self._process = ServerProcess("PostgreSQL", server, log, user=self._user, end_signal="INT")
        self._process.start(lambda: self._query("postgres", "SELECT 1"), subprocess.CalledProcessError, START_TIMEOUT_S)
        self._query("postgres", "CREATE DATABASE pdns")
        self.sql(POSTGRESQL_SCHEMA.read_text())

    @property
    def settings(self) -> dict[str, object]:
        """See :class:`Database`."""
        return {"launch": "gpgsql", "gpgsql-host": self._folder, "gpgsql-dbname": "pdns", "gpgsql-user": "pdns"}

    def sql(self, statement: str) -> None:
        """See :class:`Database`."""
        self._query("pdns", statement)

    def close(self) -> None:
        """See :class:`Database`."""
        self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _query(self, database: str, statement: str) -> None:
        command = (self._psql, "-h", self._folder, "-U", "pdns", "-d", database, "-qXv", "ON_ERROR_STOP=1")
        subprocess.run(command, input=statement, text=True, capture_output=True, check=True, timeout=30)


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
