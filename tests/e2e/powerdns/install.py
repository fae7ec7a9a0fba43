"""Find the programs of PowerDNS and of its databases, or install Debian's packages of them, as root."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tests.e2e.node.packages import install

PACKAGES: Final = ("pdns-server", "pdns-backend-sqlite3", "pdns-recursor", "pdns-backend-pgsql", "postgresql")
SQLITE_SCHEMA: Final = Path("/usr/share/pdns-backend-sqlite3/schema/schema.sqlite3.sql")
POSTGRESQL_SCHEMA: Final = Path("/usr/share/pdns-backend-pgsql/schema/schema.pgsql.sql")
_POSTGRESQL: Final = Path("/usr/lib/postgresql")
"""Where Debian has the programs of a PostgreSQL server, which are on no path, by version."""


def installed(name: str = "pdns_server") -> Path:
    """The path of the program, which is installed first if it is missing. Raises ``PackagesError``."""
    return found_or_installed(lambda: _found(name), name, PACKAGES)


def found_or_installed(found: Callable[[], Path | None], name: str, packages: Sequence[str]) -> Path:
    """What ``found`` returns for the program ``name`` of a server, after an installation of ``packages`` if need be.

    Raises ``PackagesError``.
    """
    install(lambda: [] if found() else [*packages], lambda _: None)
    program = found()
    assert program is not None, f"{name} was found a moment ago"
    return program


def _found(name: str) -> Path | None:
    folders = [os.environ.get("PATH", os.defpath), "/usr/sbin", *map(str, _POSTGRESQL.glob("*/bin"))]
    program = shutil.which(name, path=":".join(folders))
    return Path(program) if program and SQLITE_SCHEMA.is_file() and POSTGRESQL_SCHEMA.is_file() else None
