"""The client of DNS updates: keys, and the mapping of a server's answers. What it writes is tested on a real server."""

from pathlib import Path

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from operator_app.errors import (
    ConfigurationError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    OperatorError,
    TransientError,
)
from operator_app.registration.identity import Installation
from operator_app.registration.rfc2136.client import Rfc2136Server, _cut, _refusal
from operator_app.registration.rfc2136.registry import connect
from operator_app.settings import Settings

pytestmark = pytest.mark.anyio

KEY = 'key "edge" {\n\talgorithm hmac-sha256;\n\tsecret "c2VjcmV0IHNlY3JldCBzZWNyZXQ=";\n};\n'


def a_server(file: Path) -> Rfc2136Server:
    """A server that nobody listens at."""
    return Rfc2136Server("127.0.0.1", 1, key_file=file, timeout_s=1)


@pytest.mark.parametrize("text", [KEY, KEY.replace('"', ""), " ".join(KEY.split()), f"# made by hand\n{KEY}"])
async def test_a_key_statement_is_read(tmp_path: Path, text: str) -> None:
    """As tsig-keygen writes it, in one line, without quotes, after a comment."""
    file = tmp_path / "key"
    file.write_text(text)
    key = await a_server(file)._key()
    assert (str(key.name), str(key.algorithm), key.secret) == ("edge.", "hmac-sha256.", b"secret secret secret")


@pytest.mark.parametrize(
    "text",
    ["", "secret", KEY.replace("hmac-sha256", "rsa"), KEY.replace("c2Vj", "***"), KEY.replace("Q=", "Q"), "\xff"],
)
async def test_a_key_that_cannot_be_used_is_refused_without_telling_it(tmp_path: Path, text: str) -> None:
    """The message names the file, and nothing of what is in it."""
    file = tmp_path / "key"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ForbiddenError) as refused:
        await a_server(file)._key()
    assert refused.value.reason == "RegistryUnauthorized"
    assert str(file) in refused.value.message
    assert "c2VjcmV0" not in refused.value.message


async def test_a_server_that_does_not_answer_is_a_transient_error(tmp_path: Path) -> None:
    """Neither the lack of a listener nor the lack of an address needs anybody to act."""
    file = tmp_path / "key"
    file.write_text(KEY)
    with pytest.raises(TransientError, match="no answer from the DNS server"):
        await a_server(file).query("example.com", "shop.example.com", "A")
    nowhere = Rfc2136Server("no-such-host.invalid", 53, key_file=file, timeout_s=5)
    with pytest.raises(TransientError, match="is not resolved"):
        await nowhere.query("example.com", "shop.example.com", "A")


async def test_a_truncated_answer_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as it is, it would say that records are gone that are there."""
    file = tmp_path / "key"
    file.write_text(KEY)

    async def truncated(asked: dns.message.Message, *_: object, **__: object) -> dns.message.Message:
        answer = dns.message.make_response(asked)
        answer.flags |= dns.flags.TC
        return answer

    monkeypatch.setattr("dns.asyncquery.tcp", truncated)
    with pytest.raises(TransientError, match="truncated"):
        await a_server(file).query("example.com", "shop.example.com", "A")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (dns.rcode.REFUSED, ForbiddenError),
        (dns.rcode.NOTAUTH, NotFoundError),
        (dns.rcode.NOTZONE, NotFoundError),
        (dns.rcode.FORMERR, InvalidError),
        (dns.rcode.NOTIMP, InvalidError),
        (dns.rcode.SERVFAIL, TransientError),
    ],
)
def test_the_answer_tells_whether_a_retry_may_help(code: dns.rcode.Rcode, error: type[OperatorError]) -> None:
    """What lasts until somebody acts is terminal."""
    assert type(_refusal(code, "example.com")) is error


@pytest.mark.parametrize(
    ("section", "record", "cut"),
    [
        ("authority", "eu.example.com. 60 IN NS ns.elsewhere.", "eu.example.com"),
        ("authority", "example.com. 60 IN NS ns.elsewhere.", None),
        ("authority", "eu.example.com. 60 IN SOA a. b. 1 2 3 4 5", "eu.example.com"),
        ("authority", "example.com. 60 IN SOA a. b. 1 2 3 4 5", None),
        ("authority", ". 60 IN NS a.root-servers.net.", None),
        ("answer", "eu.example.com. 60 IN DNAME elsewhere.", "eu.example.com"),
        ("answer", "shop.eu.example.com. 60 IN A 192.0.2.1", None),
    ],
)
def test_a_cut_is_seen_in_an_answer(section: str, record: str, cut: str | None) -> None:
    """By a referral, the SOA of another zone, or a DNAME; the zone's own are none."""
    response = dns.message.make_response(dns.message.make_query("shop.eu.example.com.", "A"))
    name, ttl, rdclass, kind, content = record.split(maxsplit=4)
    getattr(response, section).append(dns.rrset.from_text(name, int(ttl), rdclass, kind, content))
    assert _cut(response, "example.com") == cut


@pytest.mark.parametrize("missing", ["rfc2136_server", "rfc2136_zones", "rfc2136_key_file"])
async def test_missing_settings_are_refused_at_the_start(tmp_path: Path, missing: str) -> None:
    """In one sentence that names all three."""
    given = {
        "rfc2136_server": "ns1.example.com:53",
        "rfc2136_zones": "example.com",
        "rfc2136_key_file": str(tmp_path / "key"),
    }
    settings = Settings.model_validate({name: value for name, value in given.items() if name != missing})
    with pytest.raises(ConfigurationError, match="needs rfc2136_server, rfc2136_zones and rfc2136_key_file"):
        async with connect(settings, Installation.of("a", "b")):
            pass
