"""Fixtures: one server and one resolver for the session; a zone and a faulty HTTP proxy for each test."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

import pytest

from tests.e2e.node.packages import PackagesError
from tests.e2e.powerdns.databases import PostgreSql
from tests.e2e.powerdns.proxy import FaultyProxy
from tests.e2e.powerdns.recursor import Recursor
from tests.e2e.powerdns.server import PowerDns, Zone
from tests.e2e.prerequisites import lacking
from tests.e2e.rfc2136.server import Bind

S = TypeVar("S", bound=Recursor | PowerDns | Bind)


@contextmanager
def started(make: Callable[[], S]) -> Iterator[S]:
    """A running server; the test is skipped where its programs are not there and can't be installed."""
    try:
        server = make()
    except PackagesError as error:
        lacking(str(error))
    with closing(server):
        server.start()
        yield server


@pytest.fixture(scope="session")
def powerdns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PowerDns]:
    """A running server."""
    with started(lambda: PowerDns(tmp_path_factory.mktemp("powerdns"))) as server:
        yield server


@pytest.fixture(scope="session", name="powerdns", params=["sqlite", "postgresql"])
def powerdns_of_each_database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PowerDns]:
    """A running server on each database in turn; imported in the other one's place, it is called ``powerdns``, too."""
    folder = tmp_path_factory.mktemp("powerdns")
    with started(lambda: PowerDns(folder, PostgreSql() if request.param == "postgresql" else None)) as server:
        yield server


@pytest.fixture(scope="session")
def recursor(powerdns: PowerDns, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recursor]:
    """A resolver in front of the server, as clients use one."""
    with started(lambda: Recursor(tmp_path_factory.mktemp("recursor"), powerdns.dns_port)) as resolver:
        yield resolver


@pytest.fixture
def zone(powerdns: PowerDns) -> Zone:
    """A new zone with foreign records in it."""
    zone = powerdns.make_zone(f"z{uuid.uuid4().hex[:8]}.example")
    zone.put(f"mail.{zone.name}", "A", "192.0.2.25")
    zone.put(f"www.{zone.name}", "CNAME", f"mail.{zone.name}.")
    zone.put(f"parked.{zone.name}", "A", "192.0.2.99", is_disabled=True)
    zone.put(zone.name, "MX", f"10 mail.{zone.name}.")
    return zone


@pytest.fixture
def proxy(powerdns: PowerDns) -> Iterator[FaultyProxy]:
    """An HTTP proxy in front of the server that forwards every request until a test injects a fault."""
    with FaultyProxy(powerdns.port) as proxy:
        yield proxy
