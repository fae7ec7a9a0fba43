"""Servers of each kind that a DNS registry writes to, and their zones."""

import uuid
from pathlib import Path

from tests.e2e.powerdns.databases import PostgreSql
from tests.e2e.powerdns.server import PowerDns, Zone
from tests.e2e.rfc2136.server import Bind, BindZone

AnyServer = PowerDns | Bind
AnyZone = Zone | BindZone


def a_server(kind: str, folder: Path) -> AnyServer:
    """A server that is not started: ``powerdns-sqlite``, ``powerdns-postgresql`` or ``rfc2136-bind9``."""
    if kind == "rfc2136-bind9":
        return Bind(folder)
    return PowerDns(folder, PostgreSql() if kind == "powerdns-postgresql" else None)


def a_zone(server: AnyServer) -> AnyZone:
    """A new zone with foreign records in it."""
    zone = server.make_zone(f"z{uuid.uuid4().hex[:8]}.example")
    zone.put(f"mail.{zone.name}", "A", "192.0.2.25")
    zone.put(f"www.{zone.name}", "CNAME", f"mail.{zone.name}.")
    zone.put(zone.name, "MX", f"10 mail.{zone.name}.")
    return zone
