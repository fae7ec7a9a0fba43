"""PowerDNS on loopback, and its zones as an administrator reads and changes them."""

import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from operator_app.api.kinds import Value
from tests.e2e.powerdns.databases import Database, Sqlite
from tests.e2e.powerdns.install import installed
from tests.e2e.powerdns.query import resolve
from tests.e2e.server_process import ServerProcess

START_TIMEOUT_S: Final = 60.0

Row = tuple[str, str, int, str, bool]
"""One record: name without the dot at the end, type, TTL in seconds, content, whether it is disabled."""


class PowerDns:
    """One server with its files in ``folder``. It keeps its ports and zones when it is stopped and started.

    Without a ``database`` it has a SQLite file.
    """

    def __init__(self, folder: Path, database: Database | None = None) -> None:
        self._process = ServerProcess("PowerDNS", (installed(), f"--config-dir={folder}"), folder / "pdns.log")
        self._folder = folder
        self.database = database or Sqlite(folder)
        self._api_key = secrets.token_urlsafe(24)
        self.key_file = folder / "api-key"
        self.key_file.write_text(f"{self._api_key}\n")
        self.port, self.dns_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        headers = {"X-API-Key": self._api_key}
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=10, trust_env=False, verify=False)  # noqa: S501 - no TLS here
        (folder / "pdns.conf").write_text(self._configuration())

    def close(self) -> None:
        """Stop the server for good."""
        self.stop()
        self._client.close()
        self.database.close()

    @property
    def api_key(self) -> str:
        """The API key, for tests that it must not leak."""
        return self._api_key

    def start(self) -> None:
        """Start the server and wait until its API answers. Raises ``RuntimeError`` with its log otherwise."""
        self._process.start(lambda: self.api("GET", ""), httpx.TransportError, START_TIMEOUT_S)

    def stop(self) -> None:
        """Kill the server."""
        self._process.stop()

    def api(self, method: str, path: str, body: object = None) -> Value:
        """One call of the API below the server's path; the decoded answer, or None for an empty one."""
        answer = self._client.request(method, f"/api/v1/servers/localhost{path}", json=body)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def resolve(self, name: str, kind: str) -> list[tuple[str, str]]:
        """The server's answers over DNS, as (type, content)."""
        return resolve(self.dns_port, name, kind)

    def make_zone(self, name: str) -> "Zone":
        """A new zone with its SOA and one NS."""
        body = {"name": f"{name}.", "kind": "Native", "nameservers": ["ns1.example.net."]}
        self.api("POST", "/zones", body)
        return Zone(self, name)

    def _configuration(self) -> str:
        settings = {
            **self.database.settings,
            "socket-dir": self._folder,
            "local-address": "127.0.0.1",
            "local-port": self.dns_port,
            "webserver": "yes",
            "webserver-address": "127.0.0.1",
            "webserver-port": self.port,
            "webserver-allow-from": "127.0.0.0/8",
            "api": "yes",
            "api-key": self._api_key,
            "cache-ttl": 0,
            "query-cache-ttl": 0,
            "negquery-cache-ttl": 0,
            "zone-cache-refresh-interval": 0,
            "security-poll-suffix": "",
            "daemon": "no",
            "guardian": "no",
            "disable-syslog": "yes",
        }
        return "".join(f"{name}={value}\n" for name, value in settings.items())


@dataclass(frozen=True, slots=True)
class Zone:
    """One zone, as an administrator reads and changes it."""

    server: PowerDns
    name: str

    def put(self, name: str, kind: str, *contents: str, ttl_s: int = 60, is_disabled: bool = False) -> None:
        """Make these the only records of a name and type."""
        records = [{"content": content, "disabled": is_disabled} for content in contents]
        change = {"name": f"{name}.", "type": kind, "ttl": ttl_s, "changetype": "REPLACE", "records": records}
        self.server.api("PATCH", f"/zones/{self.name}.", {"rrsets": [change]})

    def remove(self, name: str, kind: str) -> None:
        """Remove the records of a name and type."""
        change = {"name": f"{name}.", "type": kind, "changetype": "DELETE"}
        self.server.api("PATCH", f"/zones/{self.name}.", {"rrsets": [change]})

    def rows(self) -> set[Row]:
        """Every record except the SOA, whose serial changes with each write."""
        return {
            (each["name"].removesuffix("."), each["type"], each["ttl"], record["content"], record["disabled"])
            for each in self._all()["rrsets"]
            for record in each["records"]
            if each["type"] != "SOA"
        }

    def count(self) -> int:
        """The number of records except the SOA, duplicates included."""
        return sum(len(each["records"]) for each in self._all()["rrsets"]) - 1

    @property
    def serial(self) -> int:
        """The serial of the SOA, which every write increases."""
        serial: int = self._all()["serial"]
        return serial

    def _all(self) -> Value:
        return self.server.api("GET", f"/zones/{self.name}.")


def free_port() -> int:
    """A port that is free for TCP and UDP at the moment."""
    with socket.socket() as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        tcp.bind(("127.0.0.1", 0))
        port: int = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        return port
