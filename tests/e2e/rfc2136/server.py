"""BIND 9 on loopback, and its zones as an administrator reads and changes them: the same as PowerDNS's for tests."""

import os
import secrets
import shutil
import subprocess
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import dns.message
import dns.name
import dns.query
import dns.rdataset
import dns.rdatatype
import dns.rrset
import dns.tsig
import dns.update
import dns.xfr
import dns.zone

from tests.e2e.powerdns.install import found_or_installed
from tests.e2e.powerdns.query import resolve
from tests.e2e.powerdns.server import Row, free_port
from tests.e2e.server_process import ServerProcess

PACKAGES: Final = ("bind9",)
START_TIMEOUT_S: Final = 60.0
TIMEOUT_S: Final = 10.0
OPERATOR_KEY: Final = "operator"
ADMIN_KEY: Final = "admin"


def installed(name: str) -> Path:
    """The path of a program of BIND, which is installed first if it is missing. Raises ``PackagesError``."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"

    def found() -> Path | None:
        program = shutil.which(name, path=path)
        return Path(program) if program else None

    return found_or_installed(found, name, PACKAGES)


class Bind:
    """One server with its files in ``folder``. The operator's key may read, transfer and update every zone."""

    def __init__(self, folder: Path) -> None:
        command = (installed("named"), "-g", "-n", "1", "-c", folder / "named.conf")
        self._process = ServerProcess("BIND", command, folder / "named.log")
        self._rndc = installed("rndc")
        self._folder = folder
        self.dns_port, self._control_port = free_port(), free_port()
        self._secrets = {name: b64encode(secrets.token_bytes(32)).decode() for name in (OPERATOR_KEY, ADMIN_KEY)}
        self.key_file = folder / "operator.key"
        self.key_file.write_text(self.key_statement(OPERATOR_KEY))
        self._admin_key = folder / "admin.key"
        self._admin_key.write_text(self.key_statement(ADMIN_KEY))
        (folder / "named.conf").write_text(self._configuration())

    @property
    def address(self) -> str:
        """Host and port, as the setting takes it."""
        return f"127.0.0.1:{self.dns_port}"

    @property
    def secret(self) -> str:
        """The secret of the operator's key, for tests that it must not leak."""
        return self._secrets[OPERATOR_KEY]

    def key_statement(self, name: str) -> str:
        """A key as ``tsig-keygen`` writes it."""
        return f'key "{name}" {{\n\talgorithm hmac-sha256;\n\tsecret "{self._secrets[name]}";\n}};\n'

    def start(self) -> None:
        """Start it and wait until it answers. Raises ``RuntimeError`` with its log otherwise."""
        self._process.start(lambda: self._control("status"), subprocess.SubprocessError, START_TIMEOUT_S)

    def stop(self) -> None:
        """Kill the server; what it was told of its zones is in their journals."""
        self._process.stop()

    def close(self) -> None:
        """Stop the server for good."""
        self.stop()

    def make_zone(self, name: str) -> "BindZone":
        """A new zone with its SOA and one NS."""
        file = self._folder / f"{name}.zone"
        file.write_text(
            "$TTL 3600\n@ SOA ns1.example.net. admin.example.net. 1 3600 600 86400 60\n@ NS ns1.example.net.\n"
        )
        keys = f"{{ key {OPERATOR_KEY}; key {ADMIN_KEY}; }}"
        zone = f'{{ type primary; file "{file}"; allow-update {keys}; allow-transfer {keys}; }};'
        self._control("addzone", name, zone)
        return BindZone(self, name)

    def resolve(self, name: str, kind: str) -> list[tuple[str, str]]:
        """The server's answers over DNS, as (type, content)."""
        return resolve(self.dns_port, name, kind)

    def sent(self, message: dns.message.Message) -> dns.message.Message:
        """The answer to a message that the administrator has signed."""
        message.use_tsig(self.admin_key)
        return dns.query.tcp(message, "127.0.0.1", port=self.dns_port, timeout=TIMEOUT_S)

    @property
    def operator_key(self) -> dns.tsig.Key:
        """The operator's key."""
        return dns.tsig.Key(OPERATOR_KEY, self.secret, "hmac-sha256")

    @property
    def admin_key(self) -> dns.tsig.Key:
        """The administrator's key."""
        return dns.tsig.Key(ADMIN_KEY, self._secrets[ADMIN_KEY], "hmac-sha256")

    def _control(self, *command: str) -> None:
        target = (self._rndc, "-s", "127.0.0.1", "-p", str(self._control_port), "-k", self._admin_key)
        subprocess.run((*target, *command), capture_output=True, check=True, timeout=TIMEOUT_S)

    def _configuration(self) -> str:
        return (
            f'include "{self._admin_key}";\ninclude "{self.key_file}";\n'
            f'options {{\n  directory "{self._folder}";\n  pid-file none;\n  session-keyfile none;\n'
            f"  listen-on port {self.dns_port} {{ 127.0.0.1; }};\n  listen-on-v6 {{ none; }};\n"
            "  recursion no;\n  allow-new-zones yes;\n  notify no;\n  dnssec-validation no;\n  empty-zones-enable no;\n"
            # Otherwise a resolver learns from an answer who the zone's server is said to be, and asks that one.
            # Tests read whole zones, many at a time; beyond ten transfers the server would answer SERVFAIL.
            "  tcp-clients 100;\n  transfers-out 100;\n  minimal-responses yes;\n};\n"
            f"controls {{ inet 127.0.0.1 port {self._control_port} allow {{ 127.0.0.1; }} "
            f"keys {{ {ADMIN_KEY}; }}; }};\n"
        )


@dataclass(frozen=True, slots=True)
class BindZone:
    """One zone, as an administrator reads and changes it."""

    server: Bind
    name: str

    def put(self, name: str, kind: str, *contents: str, ttl_s: int = 60) -> None:
        """Make these the only records of a name and type, whatever else is at the name."""
        update = dns.update.UpdateMessage(self.name)
        update.delete(f"{name}.", kind)
        for content in contents:
            update.add(f"{name}.", ttl_s, kind, content)
        self._update(update)

    def remove(self, name: str, kind: str) -> None:
        """Remove the records of a name and type."""
        update = dns.update.UpdateMessage(self.name)
        update.delete(f"{name}.", kind)
        self._update(update)

    def rows(self) -> set[Row]:
        """Every record except the SOA, whose serial changes with each write."""
        return {
            (name.to_text(omit_final_dot=True), dns.rdatatype.to_text(each.rdtype), each.ttl, record.to_text(), False)
            for name, each in self._sets()
            for record in each
            if each.rdtype != dns.rdatatype.SOA
        }

    def count(self) -> int:
        """The number of records except the SOA."""
        return len(self.rows())

    @property
    def serial(self) -> int:
        """The serial of the SOA, which every write increases."""
        (soa,) = (each for _, rdataset in self._sets() if rdataset.rdtype == dns.rdatatype.SOA for each in rdataset)
        serial: int = soa.serial
        return serial

    def _sets(self) -> list[tuple[dns.name.Name, dns.rdataset.Rdataset]]:
        zone = dns.zone.Zone(f"{self.name}.", relativize=False)
        query, _ = dns.xfr.make_query(zone, keyring=self.server.admin_key)
        dns.query.inbound_xfr("127.0.0.1", zone, query, port=self.server.dns_port, lifetime=TIMEOUT_S)
        return [(name, rdataset) for name, node in zone.nodes.items() for rdataset in node]

    def _update(self, update: dns.update.UpdateMessage) -> None:
        code = self.server.sent(update).rcode()
        assert code == 0, dns.rcode.to_text(code)
