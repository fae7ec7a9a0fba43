"""The clusters that backends are rendered to."""

from typing import Any

import pytest

from tests.unit.envoy import cases
from tests.unit.envoy.parts import static_configuration


def cluster(endpoints: list[dict[str, Any]], **fields: Any) -> Any:  # noqa: ANN401
    """The cluster of a backend with ``endpoints``."""
    spec = cases.spec([cases.http()], [{"name": "app", "endpoints": endpoints, **fields}])
    clusters = static_configuration(spec)["static_resources"]["clusters"]
    return next(each for each in clusters if each["name"] == "backend/app")


@pytest.mark.parametrize(
    ("endpoints", "static"),
    [("DNS", False), ("IPv4", True), ("IPv6", True), ("both families", True), ("mixed", False), ("weighted", False)],
)
def test_only_a_backend_with_a_dns_name_is_resolved(endpoints: str, *, static: bool) -> None:
    """A backend with any DNS name is a DNS cluster; a backend of IP addresses only is a static cluster."""
    found = cluster(cases.ENDPOINTS[endpoints])
    assert (found.get("type") == "STATIC") is static
    assert ("cluster_type" in found) is not static


def test_endpoints_keep_address_port_and_weight() -> None:
    """Every endpoint is rendered with its host as declared (IPv6 without brackets), its port and its weight."""
    endpoints = [{"host": "fd00::7", "port": 1}, {"host": "a.svc", "port": 65535, "weight": 128}]
    (locality,) = cluster(endpoints)["load_assignment"]["endpoints"]
    assert [
        (*each["endpoint"]["address"]["socket_address"].values(), each["load_balancing_weight"])
        for each in locality["lb_endpoints"]
    ] == [("fd00::7", 1, 1), ("a.svc", 65535, 128)]


@pytest.mark.parametrize(("written", "rendered"), [("1ms", "0.001s"), ("250ms", "0.25s"), ("5s", "5s"), ("60s", "60s")])
def test_connect_timeout_is_a_protobuf_duration(written: str, rendered: str) -> None:
    """A timeout is rendered in seconds with a fraction, the JSON form of a protobuf ``Duration``."""
    assert cluster(cases.ENDPOINTS["DNS"], connectTimeout=written)["connect_timeout"] == rendered
