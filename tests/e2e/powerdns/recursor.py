"""PowerDNS's recursive resolver on loopback: what a client outside of the cluster gets for a hostname."""

from pathlib import Path
from typing import Final

from tests.e2e.powerdns.install import installed
from tests.e2e.powerdns.query import resolve
from tests.e2e.powerdns.server import free_port
from tests.e2e.server_process import ServerProcess

START_TIMEOUT_S: Final = 60.0
FORWARDED: Final = "example"
"""The domain that the resolver asks the test's server for; every zone of the tests is below it."""


class Recursor:
    """A resolver that keeps no answer for longer than a second. Its files are in ``folder``.

    It asks the server at ``dns_port`` on loopback.
    """

    def __init__(self, folder: Path, dns_port: int) -> None:
        command = (installed("pdns_recursor"), f"--config-dir={folder}")
        self._process = ServerProcess("the resolver", command, folder / "recursor.log")
        self.port = free_port()
        (folder / "recursor.conf").write_text(
            f"local-address=127.0.0.1\nlocal-port={self.port}\nforward-zones={FORWARDED}=127.0.0.1:{dns_port}\n"
            f"socket-dir={folder}\nquery-local-address=127.0.0.1\ndont-query=\ndaemon=no\ndisable-syslog=yes\n"
            "disable-packetcache=yes\nmax-cache-ttl=1\nmax-negative-ttl=1\nsecurity-poll-suffix=\ndnssec=off\nthreads=1\n"
        )

    def start(self) -> None:
        """Start it and wait until it answers. Raises ``RuntimeError`` with its log otherwise."""
        self._process.start(lambda: self.resolve(f"nothing.{FORWARDED}", "A"), OSError, START_TIMEOUT_S)

    def close(self) -> None:
        """Kill it."""
        self._process.stop()

    def resolve(self, name: str, kind: str) -> list[tuple[str, str]]:
        """What a client gets that asks for this name, as (type, content); empty for a failure, too."""
        try:
            return resolve(self.port, name, kind, is_recursive=True)
        except TimeoutError:
            return []

    def addresses(self, name: str) -> set[str]:
        """Every IPv4 and IPv6 address that a client gets for a name, through aliases, too."""
        found = [*self.resolve(name, "A"), *self.resolve(name, "AAAA")]
        return {content for kind, content in found if kind in ("A", "AAAA")}
