"""Calls of gRPC through a running Envoy: messages, trailers and errors arrive as they were sent."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.envoy.envoy_process import NEEDS_ENVOY, EnvoyProcess
from tests.e2e.traffic.grpc_calls import (
    INTERNAL,
    NOT_FOUND,
    OK,
    UNAVAILABLE,
    Call,
    GrpcClient,
    GrpcServer,
    Method,
    Outcome,
    Refusal,
    serving_grpc,
)
from tests.unit.envoy import cases

pytestmark = [NEEDS_ENVOY, pytest.mark.traffic]

ORDERS = "/orders.v1.Orders"


def listed(call: Call) -> Outcome:
    """Three messages for the one of the call."""
    return Outcome(tuple(b"%d %s" % (number, call.messages[0]) for number in range(3)))


METHODS: Final[dict[str, Method]] = {
    f"{ORDERS}/Get": lambda call: Outcome((b"order " + call.messages[0],)),
    f"{ORDERS}/List": listed,
    f"{ORDERS}/Missing": lambda _: Outcome(status=NOT_FOUND, text="no order 7%3A gone"),
    f"{ORDERS}/Broken": lambda _: Outcome((b"half",), INTERNAL, "the rest is lost"),
}


@pytest.fixture(scope="module")
def orders() -> Iterator[GrpcServer]:
    """A backend called orders."""
    with serving_grpc("orders", METHODS) as server:
        yield server


@contextmanager
def proxying(orders: GrpcServer, *routes: Any, **backend: Any) -> Iterator[EnvoyProcess]:
    """A running Envoy in front of a backend that speaks gRPC."""
    spec = cases.spec([cases.http(*(routes or [{"backend": "orders"}]))], [orders.declared(**backend)])
    with tempfile.TemporaryDirectory() as directory, EnvoyProcess(spec, Path(directory)) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def proxy(orders: GrpcServer) -> Iterator[EnvoyProcess]:
    """A proxy whose backend says by gRPC's own health service that it serves."""
    with proxying(orders, healthCheck={"interval": "1s"}) as running:
        yield running


@pytest.fixture
def client(proxy: EnvoyProcess) -> Iterator[GrpcClient]:
    """A connection to the proxy."""
    with GrpcClient(proxy.port("http")) as connected:
        yield connected


def test_a_call_gets_its_messages_and_its_status(client: GrpcClient, orders: GrpcServer) -> None:
    """Message and metadata reach the backend; messages and trailers, with the status, reach the client."""
    reply = client.call(f"{ORDERS}/Get", b"7", headers=[("x-trace-bin", "AAEC"), ("grpc-timeout", "5S")])
    assert (reply.headers[":status"], reply.headers["content-type"]) == ("200", "application/grpc")
    assert reply.messages == [b"order 7"]
    assert reply.trailers == {"grpc-status": str(OK)}
    (call,) = [each for each in orders.calls if each.path == f"{ORDERS}/Get"]
    assert call.headers.items() >= {"te": "trailers", "x-trace-bin": "AAEC", "grpc-timeout": "5S"}.items()


def test_many_messages_arrive_in_their_order(client: GrpcClient) -> None:
    """A method that streams, and several calls on one connection."""
    for item in (b"a", b"b" * 20_000):
        reply = client.call(f"{ORDERS}/List", item)
        assert reply.messages == [b"0 " + item, b"1 " + item, b"2 " + item]
        assert reply.trailers["grpc-status"] == str(OK)


def test_both_sides_talk_at_the_same_time(client: GrpcClient) -> None:
    """A message is answered while the call goes on: the proxy holds neither requests nor responses back."""
    stream = client.begin(f"{ORDERS}/Talk")
    for number, word in enumerate((b"one", b"two", b"three"), 1):
        client.say(stream, word)
        assert client.hear(stream, number)[-1] == word.upper()
    assert client.end(stream).trailers["grpc-status"] == str(OK)


def test_an_error_of_the_backend_passes_through(client: GrpcClient) -> None:
    """Status and text are the backend's, without any message and after some; HTTP's own status is 200 each time."""
    missing = client.call(f"{ORDERS}/Missing", b"7")
    assert (missing.headers[":status"], missing.status, missing.messages) == ("200", NOT_FOUND, [])
    assert (missing.headers | missing.trailers)["grpc-message"] == "no order 7%3A gone"
    broken = client.call(f"{ORDERS}/Broken", b"7")
    assert (broken.headers[":status"], broken.messages) == ("200", [b"half"])
    assert broken.trailers == {"grpc-status": str(INTERNAL), "grpc-message": "the rest is lost"}


@pytest.mark.parametrize(
    ("refusal", "status", "calls"),
    [(Refusal.CLOSED, UNAVAILABLE, 1), (Refusal.NOT_BEGUN, OK, 2)],
    ids=lambda each: each,
)
def test_a_call_is_paid_once(refusal: Refusal, status: int, calls: int) -> None:
    """With every retry declared, a call is sent again only where the backend says that it has not begun."""
    tried: list[Call] = []

    def pay(call: Call) -> Outcome | Refusal:
        tried.append(call)
        return refusal if len(tried) == 1 else Outcome((b"paid",))

    retries = {"attempts": 3, "after": ["connection", "gateway-error", "server-error"]}
    with serving_grpc("orders", {f"{ORDERS}/Pay": pay}) as bank:
        route = {"backend": "orders", "retries": retries}
        with proxying(bank, route) as proxy, GrpcClient(proxy.port("http")) as client:
            assert client.call(f"{ORDERS}/Pay", b"100").status == status
    assert len(tried) == calls


def test_an_error_of_the_proxy_is_one_of_grpc(orders: GrpcServer) -> None:
    """A rate limit, and a backend that is not there, are a status that gRPC clients understand."""
    limited = {
        "match": {"pathPrefix": ORDERS},
        "backend": "orders",
        "rateLimit": {"requests": 1, "per": "hour"},
    }
    with proxying(orders, limited) as proxy, GrpcClient(proxy.port("http")) as client:
        assert client.call(f"{ORDERS}/Get", b"7").status == OK
        reply = client.call(f"{ORDERS}/Get", b"7")
        assert (reply.headers[":status"], reply.status) == ("200", UNAVAILABLE)
    with serving_grpc("gone", {}) as gone:
        port = gone.port
    endpoints = [{"host": "127.0.0.1", "port": port}]
    with proxying(orders, endpoints=endpoints) as proxy, GrpcClient(proxy.port("http")) as client:
        reply = client.call(f"{ORDERS}/Get", b"7")
        assert (reply.headers[":status"], reply.status) == ("200", UNAVAILABLE)
