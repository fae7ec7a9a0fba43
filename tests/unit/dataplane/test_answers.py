"""What an Envoy says it has loaded, and what is no answer of one."""

import pytest

from operator_app.dataplane.answers import MOST_WORDS, SecretUse, parsed, refusal_in

TEXT = """\
cluster_manager.cds.version_text: "sha256:1"
listener_manager.lds.version_text: "sha256:2"
http.listener/web.rds.listener/web.version_text: ""
cluster_manager.cds.update_failure: 1
cluster_manager.cds.update_rejected: 2
cluster_manager.warming_clusters: 0
listener_manager.total_listeners_warming: 0
something.else: 7
"""


def test_an_answer_has_versions_and_refusals() -> None:
    """Versions by the prefix of their statistics; what was refused and what could not be read count together."""
    answer = parsed(TEXT)
    assert answer.versions == {
        "cluster_manager.cds": "sha256:1",
        "listener_manager.lds": "sha256:2",
        "http.listener/web.rds.listener/web": "",
    }
    assert answer.refusals == {"cluster_manager.cds": 3}
    assert answer.warming == 0


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({}, True),
        ({"cluster_manager.cds": "sha256:1"}, True),
        ({"cluster_manager.cds": "sha256:1", "http.of.a.listener.that.it.does.not.have": "sha256:9"}, True),
        ({"cluster_manager.cds": "sha256:9"}, False),
        ({"http.listener/web.rds.listener/web": "sha256:3"}, False),
    ],
    ids=str,
)
def test_what_is_loaded_is_compared_with_what_should_be(versions: dict[str, str], *, expected: bool) -> None:
    """Of the files that this Envoy reads: an older one does not have those of a new listener."""
    assert parsed(TEXT).has(versions) is expected


@pytest.mark.parametrize("what", ["warming_clusters: 0", "total_listeners_warming: 0"])
def test_what_is_warming_is_not_loaded_yet(what: str) -> None:
    """A cluster whose names are not resolved answers nothing."""
    answer = parsed(TEXT.replace(what, what.replace("0", "1")))
    assert not answer.has({"cluster_manager.cds": "sha256:1"})


@pytest.mark.parametrize("text", ["", "<html>", "a: b\n", "cluster_manager.warming_clusters: many\n"], ids=repr)
def test_anything_else_is_no_answer(text: str) -> None:
    """A page of somebody else at that address does not count as loaded."""
    with pytest.raises(ValueError, match=r"."):
        parsed(text)


SECRETS = """\
sds.certificate/shop.tls.key_rotation_failed: {refusals}
sds.certificate/shop.tls.update_success: {reads}
sds.authorities/partners.key_rotation_failed: 0
sds.authorities/partners.update_success: {others}
"""
KNOWN = "listener.0.0.0.0_10443.ssl.certificate.{}.expiration_unix_time_seconds: 32503680000\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SECRETS.format(reads=1, refusals=0, others=1), ["authorities/partners", "certificate/shop.tls"]),
        (SECRETS.format(reads=1, refusals=0, others=0), ["authorities/partners"]),
        (SECRETS.format(reads=1, refusals=1, others=1), ["certificate/shop.tls"]),
        (
            SECRETS.format(reads=3, refusals=2, others=1) + KNOWN.format("certificate/shop.tls"),
            ["authorities/partners"],
        ),
    ],
    ids=["never looked at again", "one is missing", "one is broken", "one is known"],
)
def test_secrets_that_nothing_serves_with(text: str, expected: list[str]) -> None:
    """What was never right since Envoy's start is told; what is right waits for what it is needed with."""
    assert parsed(TEXT + text).unusable(["certificate/shop.tls", "authorities/partners"]) == expected


def test_secrets_that_are_used() -> None:
    """A later change that can't be used leaves a Secret in use, and counts."""
    text = SECRETS.format(reads=3, refusals=2, others=1)
    text += KNOWN.format("certificate/shop.tls") + KNOWN.format("authorities/partners")
    answer = parsed(TEXT + text)
    assert answer.unusable(answer.secrets) == []
    assert answer.secrets["certificate/shop.tls"] == SecretUse(is_known=True, reads=3, refusals=2)
    assert answer.versions == parsed(TEXT).versions


ENTRY = "[2026-11-30 15:28:49.668][9][warning][config] [file.cc:81] Filesystem "


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", ""),
        (ENTRY + "started\n", ""),
        (ENTRY + "config update rejected: no such  field: 'a'\n" + '{"path":"/"}\n', "no such field: 'a'"),
        (ENTRY + "config update failure: not JSON\n" + ENTRY + "started\n", "not JSON"),
        (ENTRY + "config update rejected: one\n" + ENTRY + "config update rejected: two\n", "two"),
        (
            ENTRY + 'config update rejected: goo.gle/debugonly   \nname: "a"\n: no name\n' + '{"path":"/"}\n',
            'name: "a" : no name',
        ),
        (
            ENTRY + "config update rejected: a\n" + ENTRY + "config update rejected: Invalid path: /etc/envoy-tls/x\n",
            "a",
        ),
        (ENTRY + "config update rejected: " + "x" * 1000, "... " + "x" * MOST_WORDS),
    ],
    ids=["empty", "none", "one", "unreadable", "the last", "with the message", "of a Secret", "long"],
)
def test_why_a_file_was_refused(log: str, words: str) -> None:
    """Envoy's last words about a file, in one line of bounded length, without requests of clients."""
    assert refusal_in(log) == words
