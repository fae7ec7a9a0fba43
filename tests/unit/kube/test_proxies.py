"""Which proxy leads to a server, as Go's programs read the environment."""

import pytest

from operator_app.kube.proxies import fault_of_proxy, proxy_for

PROXY = "http://proxy.example.org:3128"


@pytest.mark.parametrize(
    ("no_proxy", "server", "is_direct"),
    [
        ("", "https://api.example.org:6443", False),
        ("*", "https://api.example.org:6443", True),
        ("example.org", "https://api.example.org", True),
        ("example.org", "https://example.org", True),
        ("example.org", "https://another-example.org", False),
        (".example.org", "https://api.example.org", True),
        (".example.org", "https://example.org", False),
        ("*.example.org", "https://api.example.org", True),
        ("API.Example.org", "https://api.example.org.", True),
        ("api.example.org:6443", "https://api.example.org:6443", True),
        ("api.example.org:443", "https://api.example.org", True),
        ("api.example.org:443", "https://api.example.org:6443", False),
        ("a.org, 10.96.0.1", "https://10.96.0.1:443", True),
        ("10.96.0.0/12", "https://10.96.0.1:443", True),
        ("10.96.0.0/12", "https://10.200.0.1:443", False),
        ("10.96.0.1:80", "https://10.96.0.1:443", False),
        ("0.0.1", "https://10.0.0.1", False),
        ("fd00::/8", "https://[fd00::1]:6443", True),
        ("[fd00::1]:6443", "https://[fd00::1]:6443", True),
        ("", "https://127.0.0.1:6443", True),
        ("", "https://[::1]:6443", True),
        ("", "https://localhost:6443", True),
    ],
)
def test_no_proxy_names_hosts_domains_addresses_and_networks(no_proxy: str, server: str, *, is_direct: bool) -> None:
    """And what is on this machine is never asked for by way of a proxy."""
    assert proxy_for(server, {"HTTPS_PROXY": PROXY, "NO_PROXY": no_proxy}) == (None if is_direct else PROXY)


def test_each_scheme_has_its_variable_and_upper_case_comes_first() -> None:
    """``HTTP_PROXY`` does not count for https, and a proxy without a scheme is an HTTP proxy."""
    server = "https://api.example.org"
    assert proxy_for(server, {"HTTPS_PROXY": PROXY, "https_proxy": "http://other"}) == PROXY
    assert proxy_for(server, {"https_proxy": "proxy:3128"}) == "http://proxy:3128"
    assert proxy_for(server, {"HTTP_PROXY": PROXY}) is None
    assert proxy_for("http://api.example.org", {"HTTP_PROXY": PROXY}) == PROXY
    assert proxy_for(server, {"HTTPS_PROXY": PROXY, "no_proxy": "api.example.org"}) is None
    assert proxy_for(server, {}) is None


@pytest.mark.parametrize(
    ("proxy", "says"),
    [
        ("socks5://s3cret:s3cret@proxy:1080", "socks5"),
        ("http://", "no URL with a host"),
        ("http://proxy:0", "no URL with a host"),
        ("http://proxy:s3cret", "no URL with a host"),
        ("http://pro xy", "no URL with a host"),
        ("http://[::1", "no URL with a host"),
    ],
)
def test_a_proxy_that_can_not_be_used_is_a_sentence_without_secrets(proxy: str, says: str) -> None:
    """What is wrong is told, and no part of the URL, which may hold a password."""
    fault = fault_of_proxy(proxy)
    assert fault is not None
    assert says in fault
    assert "s3cret" not in fault
    assert fault_of_proxy("https://user:s3cret@proxy.example.org") is None
