"""Records of one proxy for tests of DNS registries, and the rows of a zone that they become."""

from dataclasses import replace
from typing import Any, Final, Protocol

from operator_app.api.kinds import Key
from operator_app.registration.dns import Ownership
from operator_app.registration.identity import Installation
from operator_app.registration.registry import Record, Registration, Registry
from operator_app.results import Outcome
from tests.e2e.powerdns.server import Row


class NamedZone(Protocol):
    """A zone of a test's server."""

    @property
    def name(self) -> str:
        """Its name, without the dot at the end."""
        ...


CLUSTER: Final = "0f0f0f0f-1111-2222-3333-444444444444"
OPERATOR: Final = "edge"
TTL_S: Final = 300
TIMEOUT_S: Final = 10.0
ADDRESSES: Final = [("203.0.113.7", "A"), ("2001:db8::7", "AAAA"), ("lb.example.net", "CNAME")]


def a_record(zone: NamedZone, **changes: Any) -> Record:
    """A record for ``shop`` in the zone; keywords replace its fields."""
    record = Record(
        uid="11111111-2222-3333-4444-555555555555",
        generation=3,
        proxy=Key("team-a", "checkout"),
        hostname=f"shop.{zone.name}",
        address="203.0.113.7",
        ports=(),
    )
    return replace(record, **changes)


def installed(name: str) -> Installation:
    """The installation with this id in the cluster of the tests."""
    return Installation.of(CLUSTER, name)


def more(record: Record, *addresses: str) -> Record:
    """The record with these addresses."""
    return replace(record, address=addresses[0], more_addresses=addresses[1:])


def kind_of(address: str) -> str:
    """The type of record that an address needs."""
    if ":" in address:
        return "AAAA"
    return "CNAME" if address[-1].isalpha() else "A"


def pair(record: Record, *, operator: str = OPERATOR, ttl_s: int = TTL_S) -> set[Row]:
    """The two DNS records of a registered record."""
    assert record.hostname is not None
    kind = kind_of(record.address)
    content = f"{record.address}." if kind == "CNAME" else record.address
    owner = Ownership(installed(operator), record.uid, record.generation).content
    return {
        (record.hostname, kind, ttl_s, content, False),
        (f"_edge-owner.{record.hostname}", "TXT", ttl_s, owner, False),
    }


def reason(registration: Registration) -> str | None:
    """The reason of a registration's problem; None if it succeeded."""
    assert (registration.outcome is Outcome.SKIPPED) == (registration.problem is not None)
    return registration.problem.reason if registration.problem else None


async def remove(registry: Registry, record: Record) -> Outcome:
    """Deregister a record."""
    assert record.hostname is not None
    return await registry.deregister(record.uid, record.hostname)
