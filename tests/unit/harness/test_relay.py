"""The relay of DNS messages: each fault is what its name says, as the operator's own client of updates sees it."""

import socketserver
import threading
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import dns.message
import dns.rrset
import dns.tsig
import pytest

from operator_app.errors import (
    ForbiddenError,
    InvalidError,
    NotFoundError,
    OperatorError,
    TransientError,
    UndecodableError,
)
from operator_app.registration.rfc2136.client import Rfc2136Server
from tests.e2e.faults.lives import DNS_FAULTS
from tests.e2e.faults.outside import TIMEOUT_S
from tests.e2e.rfc2136 import relay
from tests.e2e.rfc2136.relay import FaultyRelay

pytestmark = pytest.mark.anyio

SECRET = b64encode(b"0" * 32).decode()
KEY = dns.tsig.Key("operator", SECRET, "hmac-sha256")

SEEN: dict[str, tuple[type[OperatorError], str]] = {
    "reset before": (TransientError, "no answer"),
    "carried out, answer lost": (TransientError, "no answer"),
    "half an answer": (TransientError, "no answer"),
    "late answer": (TransientError, "did not answer within"),
    "no DNS message": (UndecodableError, "can't be read"),
    "truncated": (UndecodableError, "truncated"),
    "not signed": (UndecodableError, "FormError"),
    "SERVFAIL": (TransientError, "SERVFAIL"),
    "REFUSED": (ForbiddenError, "REFUSED"),
    "NOTAUTH": (NotFoundError, "NOTAUTH"),
    "FORMERR": (InvalidError, "FORMERR"),
    "NOTIMP": (InvalidError, "NOTIMP"),
    "BADSIG": (ForbiddenError, "PeerBadSignature"),
    "BADKEY": (ForbiddenError, "PeerBadKey"),
    "BADTIME": (ForbiddenError, "PeerBadTime"),
}


class Answering(socketserver.BaseRequestHandler):
    """A server that has one record, and signs."""

    def handle(self) -> None:
        """Answer one message."""
        asked = dns.message.from_wire(relay.received(self.request), keyring=KEY)
        answer = dns.message.make_response(asked)
        answer.answer.append(dns.rrset.from_text("shop.example.", 60, "IN", "A", "192.0.2.1"))
        relay.send(self.request, answer.to_wire())


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where the server listens."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answering) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("fault", DNS_FAULTS)
async def test_each_fault_strikes_once_and_is_seen_by_the_client(tmp_path: Path, port: int, fault: str) -> None:
    """The message before and the one after are answered."""
    error, words = SEEN[fault]
    (tmp_path / "key").write_text(f'key "operator" {{ algorithm hmac-sha256; secret "{SECRET}"; }};')
    with FaultyRelay(port, KEY) as own:
        client = Rfc2136Server("127.0.0.1", own.port, key_file=tmp_path / "key", timeout_s=TIMEOUT_S)
        own.inject("QUERY", DNS_FAULTS[fault], nth=2)
        assert (await client.query("example", "shop.example", "A")).exists
        with pytest.raises(error, match=words):
            await client.query("example", "shop.example", "A")
        assert not own.withdraw(), "it has struck"
        assert (await client.query("example", "shop.example", "A")).exists
        assert own.requests == ["QUERY"] * 3
