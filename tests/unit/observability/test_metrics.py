"""What the operator tells about itself: health by an injected clock, metrics over real HTTP, logs as JSON lines."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection

import pytest
import structlog

from operator_app.errors import ConfigurationError
from operator_app.observability.metrics import (
    LOOP_STUCK_AFTER_S,
    OTHER_TENANTS,
    TENANT_LABELS,
    Backlog,
    Health,
    Metrics,
    configure_logging,
    serving,
)


class Clock:
    """A clock that tests move."""

    now = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str, str]:
    """Status, content type and body of one answer."""
    with closing(HTTPConnection(host, port, timeout=5)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def test_healthz_is_about_the_event_loop() -> None:
    """A loop that has not come around for the limit is stuck, and alive again once it does."""
    clock = Clock()
    health = Health(clock)
    with serving(0, Metrics(), health) as port:
        assert get(port, "/healthz")[0] == 200
        clock.now = LOOP_STUCK_AFTER_S - 0.001
        assert get(port, "/healthz")[0] == 200
        clock.now = LOOP_STUCK_AFTER_S
        assert get(port, "/healthz") == (503, "text/plain; charset=utf-8", "503 Service Unavailable\n")
        health.beat()
        assert get(port, "/healthz")[0] == 200


def test_readyz_is_about_being_ready_and_alive() -> None:
    """Not before the stores are full, and not while the loop is stuck."""
    clock = Clock()
    health = Health(clock)
    with serving(0, Metrics(), health) as port:
        assert get(port, "/readyz")[0] == 503
        health.is_ready = True
        assert get(port, "/readyz")[0] == 200
        clock.now = LOOP_STUCK_AFTER_S
        assert get(port, "/readyz")[0] == 503


def test_metrics_are_served_in_prometheus_text() -> None:
    """Of this operator alone: two in one process do not share a registry."""
    metrics = Metrics()
    Metrics().writes.labels("Service", "created").inc(7)
    metrics.writes.labels("Service", "created").inc()
    with serving(0, metrics, Health()) as port:
        status, content_type, body = get(port, "/metrics")
    assert status == 200
    assert content_type.startswith("text/plain")
    assert 'operator_app_writes_total{kind="Service",outcome="created"} 1.0' in body


def test_there_is_nothing_else() -> None:
    """Any other path is a 404."""
    with serving(0, Metrics(), Health()) as port:
        for path in ("/", "/healthz/", "/metrics/x", "/secret", "/healthz%2F.."):
            assert get(port, path)[0] == 404, path


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_both_families_are_served() -> None:
    """A probe comes by the family of the cluster's Pods, which may be IPv6 alone."""
    with serving(0, Metrics(), Health()) as port:
        assert [get(port, "/healthz", host)[0] for host in ("127.0.0.1", "::1")] == [200, 200]


def test_without_ipv6_there_is_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without IPv6 is no reason not to serve."""
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with serving(0, Metrics(), Health()) as port:
        assert get(port, "/healthz")[0] == 200
        with pytest.raises(OSError, match="refused"):
            get(port, "/healthz", "::1")


def test_a_silent_client_holds_up_nobody() -> None:
    """Probes are answered while somebody keeps a connection open without asking anything."""
    with serving(0, Metrics(), Health()) as port, socket.create_connection(("127.0.0.1", port)):
        assert get(port, "/healthz")[0] == 200


def test_a_taken_port_is_an_error() -> None:
    """And not a second listener beside the first."""
    with (
        serving(0, Metrics(), Health()) as port,
        pytest.raises(ConfigurationError, match="in use; choose another --http-port"),
        serving(port, Metrics(), Health()),
    ):
        pass


def test_nothing_is_left_when_the_context_ends() -> None:
    """The port is free and the thread has ended."""
    before = set(threading.enumerate())
    with serving(0, Metrics(), Health()) as port:
        get(port, "/healthz")
    with serving(port, Metrics(), Health()):
        pass
    assert [each for each in set(threading.enumerate()) - before if each.name == "http"] == []


# --- logs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Logging is one for the process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was logged."""
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_every_event_is_one_json_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With event, level, logger and time in UTC; an exception and a line end stay within the line."""
    configure_logging("info", "json")
    structlog.get_logger("operator_app.x").info("child", kind="Service", fields=[".spec.x"], note="a\nb")
    try:
        int("broken")
    except ValueError:
        structlog.get_logger("operator_app.x").exception("round_crashed")
    first, second = map(json.loads, lines(capsys))
    assert first.pop("timestamp").endswith("Z")
    assert first == {
        "event": "child",
        "kind": "Service",
        "fields": [".spec.x"],
        "note": "a\nb",
        "level": "info",
        "logger": "operator_app.x",
    }
    assert second["level"] == "error"
    assert "ValueError: invalid literal" in second["exception"]


def test_records_of_libraries_come_out_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader of the log needs one parser."""
    configure_logging("info", "json")
    logging.getLogger("some.library").warning("trouble with %s", "it")
    (line,) = map(json.loads, lines(capsys))
    assert (line["event"], line["level"], line["logger"]) == ("trouble with it", "warning", "some.library")


def test_the_level_holds_and_clients_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing below the level, and no line for each request of an HTTP client."""
    configure_logging("warning", "json")
    structlog.get_logger("operator_app.x").info("quiet")
    configure_logging("debug", "json")
    for name in ("httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(name).info("GET /")
    assert lines(capsys) == []


def test_console_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """The same event as text, without escape sequences."""
    configure_logging("info", "console")
    structlog.get_logger("operator_app.x").info("child", kind="Service")
    (line,) = lines(capsys)
    assert "child" in line
    assert "kind=Service" in line
    assert "\x1b" not in line


def test_tenants_have_series_of_their_own_up_to_a_bound() -> None:
    """However many tenants there are, the number of series stays; who is not shown by name is counted all the same."""
    metrics = Metrics()
    for number in range(TENANT_LABELS + 10):
        metrics.count_round_of(f"team-{number}")
    metrics.show_backlogs(Backlog(f"team-{number}", depth=number, oldest_s=float(number)) for number in range(100))
    value = metrics.registry.get_sample_value
    assert value("operator_app_tenant_rounds_total", {"tenant": "team-0"}) == 1
    assert value("operator_app_tenant_rounds_total", {"tenant": OTHER_TENANTS}) == 10
    assert value("operator_app_tenant_queue_depth", {"tenant": "team-99"}) == 99
    assert value("operator_app_tenant_queue_depth", {"tenant": OTHER_TENANTS}) == sum(range(50))
    assert value("operator_app_tenant_oldest_seconds", {"tenant": OTHER_TENANTS}) == 49
    series = [sample for family in metrics.registry.collect() for sample in family.samples if "tenant" in sample.labels]
    assert len({each.labels["tenant"] for each in series}) <= 2 * TENANT_LABELS + 1


def test_a_backlog_that_is_gone_is_not_shown() -> None:
    """A tenant that waits for nothing leaves no series behind."""
    metrics = Metrics()
    metrics.show_backlogs([Backlog("team-a", 3, 1.0)])
    metrics.show_backlogs([])
    assert metrics.registry.get_sample_value("operator_app_tenant_queue_depth", {"tenant": "team-a"}) is None


def test_a_backlog_that_stays_is_shown_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may scrape at any moment, so the series of a tenant that goes on waiting is never taken away."""
    metrics = Metrics()
    metrics.show_backlogs([Backlog("team-a", 3, 1.0)])
    for gauge in (metrics.tenant_depth, metrics.tenant_oldest):
        monkeypatch.setattr(gauge, "clear", lambda: pytest.fail("the series is missing for a moment"))
    metrics.show_backlogs([Backlog("team-a", 4, 2.0)])
    assert metrics.registry.get_sample_value("operator_app_tenant_queue_depth", {"tenant": "team-a"}) == 4
