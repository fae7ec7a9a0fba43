"""Find the programs of PowerDNS and of its databases, or install Debian's packages of them, as root."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PACKAGES: Final = ("pdns-server", "pdns-backend-sqlite3", "pdns-recursor", "pdns-backend-pgsql", "postgresql")
SQLITE_SCHEMA: Final = Path("/usr/share/pdns-backend-sqlite3/schema/schema.sqlite3.sql")
POSTGRESQL_SCHEMA: Final = Path("/usr/share/pdns-backend-pgsql/schema/schema.pgsql.sql")
INSTALL_TIMEOUT_S: Final = 240
_POLICY: Final = Path("/usr/sbin/policy-rc.d")
_POSTGRESQL: Final = Path("/usr/lib/postgresql")
"""Where Debian has the programs of a PostgreSQL server, which are on no path, by version."""


class NotInstalledError(Exception):
    """A server is not installed and could not be installed; the message is one line."""


def installed(name: str = "pdns_server") -> Path:
    """The path of the program, which is installed first if it is missing. Raises ``NotInstalledError``."""
    return found_or_installed(lambda: _found(name), name, PACKAGES, "PowerDNS")


def found_or_installed(found: Callable[[], Path | None], name: str, packages: Sequence[str], of: str) -> Path:
    """What ``found`` returns for the program ``name`` of a server, called ``of``, after an installation if need be.

    Raises ``NotInstalledError``.
    """
    program = found()
    if program is not None:
        return program
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NotInstalledError(f"needs {of}: apt-get install {' '.join(packages)} (as root, on Debian)")
    with (Path(tempfile.gettempdir()) / "operator-app-dns-servers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (program := found()) is None:
            _install(packages, of)
            program = found()
    if program is None:
        raise NotInstalledError(f"the packages {' '.join(packages)} brought no {name}, or no database for it")
    return program


def _found(name: str) -> Path | None:
    folders = [os.environ.get("PATH", os.defpath), "/usr/sbin", *map(str, _POSTGRESQL.glob("*/bin"))]
    program = shutil.which(name, path=":".join(folders))
    return Path(program) if program and SQLITE_SCHEMA.is_file() and POSTGRESQL_SCHEMA.is_file() else None


def _install(packages: Sequence[str], of: str) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ("apt-get", "install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=60", *packages)
    with _services_disabled():
        for command in (("apt-get", "update"), install):
            try:
                subprocess.run(command, env=environment, capture_output=True, timeout=INSTALL_TIMEOUT_S, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                raise NotInstalledError(f"{' '.join(command[:2])} for {of} failed: {error}") from error


@contextmanager
def _services_disabled() -> Iterator[None]:
    """Keep the installation from starting a server on port 53, by Debian's ``policy-rc.d``."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()
