"""The HTTP port over real connections: health by an injected clock, readiness, and the metrics page."""

import socket
import threading
from contextlib import closing
from http.client import HTTPConnection

import pytest

from operator_app.errors import ConfigurationError
from operator_app.observability.http import LOOP_STUCK_AFTER_S, MAX_CONNECTIONS, MAX_REQUEST_BYTES, Health, serving
from operator_app.observability.metrics import Metrics


class Clock:
    """A clock that tests move."""

    now = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str, str]:
    """Status, content type and body of one response."""
    with closing(HTTPConnection(host, port, timeout=5)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def test_healthz_is_about_the_event_loop() -> None:
    """An event loop without a beat for the limit counts as stuck, and as alive again after the next beat."""
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


def test_connections_are_bounded_and_probes_get_in() -> None:
    """Thousands of idle connections take a fixed number of threads, and a probe behind them is answered."""
    with serving(0, Metrics(), Health(Clock())) as port:
        idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(4 * MAX_CONNECTIONS)]
        assert get(port, "/healthz")[0] == 200
        served = [each for each in threading.enumerate() if "process_request_thread" in each.name]
        assert len(served) <= 2 * MAX_CONNECTIONS
        for each in idle:
            each.close()


def test_a_request_is_not_read_for_ever() -> None:
    """Header lines without an end are answered once they are too many, whatever else would come."""
    with serving(0, Metrics(), Health(Clock())) as port, socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"b" * (MAX_REQUEST_BYTES - 100))
        client.sendall(b"c" * 200)
        assert client.recv(12) == b"HTTP/1.0 200"


def test_readyz_is_about_being_ready_and_alive() -> None:
    """Not before the operator is ready, and not while the loop is stuck."""
    clock = Clock()
    health = Health(clock)
    with serving(0, Metrics(), health) as port:
        assert get(port, "/readyz")[0] == 503
        health.is_ready = True
        assert get(port, "/readyz")[0] == 200
        clock.now = LOOP_STUCK_AFTER_S
        assert get(port, "/readyz")[0] == 503


def test_a_blind_replica_is_not_ready_and_says_since_when() -> None:
    """It is alive all the same: a restart would not help against an API server that can't be reached."""
    health = Health(Clock())
    health.is_ready = True
    with serving(0, Metrics(), health) as port:
        health.blind = "nothing of Service has arrived since noon"
        assert get(port, "/healthz")[0] == 200
        assert get(port, "/readyz")[::2] == (
            503,
            "503 Service Unavailable: nothing of Service has arrived since noon\n",
        )
        health.blind = None
        assert get(port, "/readyz")[0] == 200


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


def test_a_silent_client_delays_no_other() -> None:
    """Probes get a response while a client keeps a connection open without sending a request."""
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
