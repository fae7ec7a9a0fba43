"""Which server and which identity a kubeconfig, or a Pod, stands for; and what is refused in a sentence."""

import base64
from pathlib import Path
from typing import Any

import pytest

from operator_app.errors import ConfigurationError
from operator_app.kube.kubeconfig import Endpoint, ExecPlugin, endpoint
from tests.unit.kube.scripted_client import kubeconfig_in

SERVER = "https://api.example.org:6443"
V1 = "client.authentication.k8s.io/v1"
PEM = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"


def written(
    folder: Path, cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None, **rest: object
) -> Path:
    """A kubeconfig with one context."""
    return kubeconfig_in(folder, {"server": SERVER} | (cluster or {}), user, **rest)


def read(path: Path | None, context: str | None = None, **environ: str) -> Endpoint:
    """The endpoint, in an environment that holds nothing else."""
    return endpoint(path, context, environ=environ, service_account=Path("/nonexistent"))


def pod(folder: Path) -> Path:
    """A service account as the kubelet mounts it."""
    account = folder / "serviceaccount"
    account.mkdir()
    (account / "token").write_text("t")
    (account / "ca.crt").write_text(PEM)
    return account


def test_the_order_is_explicit_then_in_cluster_then_environment_then_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An explicit file wins over all; a Pod over KUBECONFIG; KUBECONFIG over ~/.kube/config."""
    account = pod(tmp_path)
    path = written(tmp_path, user={"token": "t"})
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443", "KUBECONFIG": str(path)}
    home = tmp_path / "home"
    (home / ".kube").mkdir(parents=True)
    written(home / ".kube", {"server": "https://home.example.org"}).rename(home / ".kube" / "config")
    monkeypatch.setenv("HOME", str(home))

    assert endpoint(path, None, environ=inside, service_account=account).server == SERVER
    assert endpoint(None, None, environ=inside, service_account=account) == Endpoint(
        server="https://10.0.0.1:443", ca=PEM, token_file=account / "token"
    )
    assert endpoint(None, "here", environ=inside, service_account=account).server == SERVER
    assert read(None, KUBECONFIG=str(path)).server == SERVER
    assert read(None, KUBECONFIG="").server == "https://home.example.org"
    assert read(None).server == "https://home.example.org"


def test_the_way_to_the_server_comes_from_the_kubeconfig_and_then_from_the_environment(tmp_path: Path) -> None:
    """``proxy-url`` wins over ``HTTPS_PROXY``, which counts in a Pod, too; no repr shows what may hold a password."""
    proxy = "http://user:s3cret@proxy.example.org:3128"
    path = written(tmp_path, {"proxy-url": "http://own.example.org:8080", "tls-server-name": "kubernetes.default.svc"})
    found = read(path, HTTPS_PROXY=proxy)
    assert (found.proxy, found.tls_server_name) == ("http://own.example.org:8080", "kubernetes.default.svc")
    found = read(written(tmp_path), HTTPS_PROXY=proxy)
    assert (found.proxy, found.tls_server_name) == (proxy, None)
    assert "s3cret" not in repr(found)
    assert read(written(tmp_path), HTTPS_PROXY=proxy, NO_PROXY="example.org").proxy is None
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443", "HTTPS_PROXY": proxy}
    account = pod(tmp_path)
    assert endpoint(None, None, environ=inside, service_account=account).proxy == proxy
    inside["NO_PROXY"] = "10.0.0.0/8"
    assert endpoint(None, None, environ=inside, service_account=account).proxy is None
    with pytest.raises(ConfigurationError, match=r"HTTPS_PROXY.*socks5"):
        read(written(tmp_path), HTTPS_PROXY="socks5://user:s3cret@proxy:1080")


def test_a_pod_of_an_ipv6_cluster_reaches_its_server(tmp_path: Path) -> None:
    """An IPv6 address stands in brackets."""
    inside = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert endpoint(None, None, environ=inside, service_account=pod(tmp_path)).server == "https://[fd00::1]:443"


def test_paths_count_from_the_kubeconfigs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative tokenFile, certificates and plugin commands do not depend on the working directory."""
    (tmp_path / "ca.pem").write_text(PEM)
    path = written(
        tmp_path,
        {"certificate-authority": "ca.pem"},
        {"tokenFile": "token", "exec": {"apiVersion": V1, "command": "./plugin"}},
    )
    monkeypatch.chdir("/")
    found = read(path)
    assert found.ca == PEM
    assert found.token_file == tmp_path / "token"
    assert found.exec_plugin is not None
    assert found.exec_plugin.command == str(tmp_path / "plugin")


def test_inline_data_wins_over_a_file(tmp_path: Path) -> None:
    """As in kubectl, -data overrides the path beside it."""
    inline = base64.b64encode(b"inline").decode()
    assert (
        read(written(tmp_path, {"certificate-authority": "none", "certificate-authority-data": inline})).ca == "inline"
    )


def test_an_exec_plugin_is_taken_over_whole(tmp_path: Path) -> None:
    """v1 and v1beta1 plugins with arguments and environment; a bare command is looked up on PATH."""
    for version in ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"):
        entry = {"apiVersion": version, "command": "aws", "args": ["token", 1], "env": [{"name": "A", "value": "b"}]}
        assert read(written(tmp_path, user={"exec": entry})).exec_plugin == ExecPlugin(
            version, "aws", ("token", "1"), (("A", "b"),)
        )


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    """The endpoint's repr holds no token, password or key."""
    found = read(written(tmp_path, user={"token": "s3cret", "username": "u", "password": "s3cret"}))
    assert (found.token, found.basic) == ("s3cret", ("u", "s3cret"))
    assert "s3cret" not in repr(found)


@pytest.mark.parametrize(
    ("cluster", "user", "rest", "says"),
    [
        ({"proxy-url": "socks5://proxy:1080"}, {}, {}, "socks5"),
        ({"proxy-url": "proxy"}, {}, {}, "proxy-url"),
        ({"proxy-url": "http://proxy:x"}, {}, {}, "proxy-url"),
        ({"proxy-url": 5}, {}, {}, "`proxy-url`"),
        ({"tls-server-name": "a b"}, {}, {}, "tls-server-name"),
        ({"tls-server-name": 5}, {}, {}, "`tls-server-name`"),
        ({}, {"as": "admin"}, {}, "`as`"),
        ({}, {"as-groups": ["system:masters"]}, {}, "as-groups"),
        ({}, {"as-uid": "1"}, {}, "as-uid"),
        ({}, {"as-user-extra": {"a": ["b"]}}, {}, "as-user-extra"),
        ({}, {"auth-provider": {"name": "gcp"}}, {}, "auth-provider"),
        ({}, {"exec": {"apiVersion": "client.authentication.k8s.io/v1alpha1", "command": "x"}}, {}, "v1alpha1"),
        ({}, {"exec": {"apiVersion": V1}}, {}, "command"),
        (
            {},
            {"exec": {"apiVersion": V1, "command": "x", "interactiveMode": "Always"}},
            {},
            "terminal",
        ),
        (
            {},
            {"exec": {"apiVersion": V1, "command": "x", "provideClusterInfo": True}},
            {},
            "provideClusterInfo",
        ),
        ({"server": "api.example.org"}, {}, {}, "https://"),
        ({"server": ""}, {}, {}, "https://"),
        ({"certificate-authority": "absent.pem"}, {}, {}, "absent.pem"),
        ({"certificate-authority-data": "###"}, {}, {}, "base64"),
        ({"certificate-authority-data": 7}, {}, {}, "base64"),
        ({"certificate-authority-data": "QQ==", "insecure-skip-tls-verify": True}, {}, {}, "insecure-skip-tls-verify"),
        ({}, {"client-certificate-data": "QQ=="}, {}, "key"),
        ({}, {"exec": {"apiVersion": V1, "command": "x", "env": [{"name": "A"}]}}, {}, "`env`"),
        ({}, {"exec": {"apiVersion": V1, "command": "x", "env": {"A": "b"}}}, {}, "`env`"),
        ({}, {"exec": {"apiVersion": V1, "command": "x", "args": "token"}}, {}, "`args`"),
        ({}, {"exec": {"apiVersion": V1, "command": 5}}, {}, "`command`"),
        ({}, {"exec": "aws"}, {}, "`exec`"),
        ({"certificate-authority": 5}, {}, {}, "`certificate-authority`"),
        ({"insecure-skip-tls-verify": "false"}, {}, {}, "`insecure-skip-tls-verify`"),
        ({}, {"tokenFile": 5}, {}, "`tokenFile`"),
        ({}, {"token": 5}, {}, "`token`"),
        ({}, {"username": "u", "password": 5}, {}, "`password`"),
        ({"server": 5}, {}, {}, "`server`"),
        ({"server": "https://h:abc"}, {}, {}, "'https://h:abc'"),
        ({"server": "https://h:99999"}, {}, {}, "'https://h:99999'"),
        ({"server": "https://h:0"}, {}, {}, "'https://h:0'"),
        ({"server": "http://[::1"}, {}, {}, "'http://[::1'"),
        ({"server": "http://[::x]"}, {}, {}, "'http://[::x]'"),
        ({"server": "https://"}, {}, {}, "'https://'"),
        ({"server": "https://a..b"}, {}, {}, "'https://a..b'"),
        ({"server": "https://a\nb"}, {}, {}, "https://"),
        ({"server": "https://h/?a=b"}, {}, {}, "https://"),
        ({}, {}, {"contexts": 5}, "`contexts`"),
        ({}, {}, {"contexts": "x"}, "`contexts`"),
        ({"certificate-authority": "a\0"}, {}, {}, "`certificate-authority`"),
        ({}, {"exec": {"apiVersion": V1, "command": "x", "args": ["\0"]}}, {}, "`args`"),
        ({}, {}, {"current-context": ""}, "current-context"),
        ({}, {}, {"current-context": "absent"}, "'absent'"),
        ({}, {}, {"clusters": []}, "no cluster named 'there'"),
        ({}, {}, {"users": None}, "no user named 'me'"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_in_one_sentence(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any], rest: dict[str, Any], says: str
) -> None:
    """The sentence names the file and what in it is at fault."""
    path = written(tmp_path, cluster, user, **rest)
    with pytest.raises(ConfigurationError) as refused:
        read(path)
    assert says in str(refused.value)
    assert str(path.parent) in str(refused.value)
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize(
    "user",
    [
        {"token": "s3cret\nline"},
        {"token": "s3cret word"},
        {"token": "s3cret\x7f"},
        {"token": "s3crét"},
        {"token": ["s3cret"]},
        {"username": "u", "password": "s3cret\n"},
        {"username": "u", "password": ["s3cret"]},
        {"username": "a:b", "password": "s3cret"},
        {"exec": {"apiVersion": V1, "command": "x", "env": [{"name": "A", "value": ["s3cret"]}]}},
    ],
    ids=str,
)
def test_a_secret_that_cannot_be_sent_is_refused_without_it(tmp_path: Path, user: dict[str, Any]) -> None:
    """No sentence quotes a token or a password."""
    with pytest.raises(ConfigurationError) as refused:
        read(written(tmp_path, user=user))
    assert "s3cr" not in str(refused.value)


def test_credentials_in_the_servers_url_are_refused_without_them(tmp_path: Path) -> None:
    """They would be sent in place of the user's, and shown wherever the server is named."""
    with pytest.raises(ConfigurationError, match="credentials") as refused:
        read(written(tmp_path, {"server": "https://u:s3cret@h"}))
    assert "s3cret" not in str(refused.value)


def test_blanks_around_token_and_server_do_not_count(tmp_path: Path) -> None:
    """A block of YAML (``token: |``) ends in a line break that nobody means."""
    found = read(written(tmp_path, {"server": f"{SERVER}\n"}, {"token": "s3cret\n"}))
    assert (found.server, found.token) == (SERVER, "s3cret")


@pytest.mark.parametrize(
    "server", ["https://h/k8s/clusters/c-1", "https://[fd00::1]:6443", "http://127.0.0.1:65535", "https://h."]
)
def test_every_usable_server_is_taken_as_it_is(tmp_path: Path, server: str) -> None:
    """A path (several clusters behind one host), an IPv6 address and the last port are none of the refused."""
    assert read(written(tmp_path, {"server": server})).server == server


def test_a_password_of_nothing_is_empty(tmp_path: Path) -> None:
    """``password:`` without a value is none, not the word None."""
    assert read(written(tmp_path, user={"username": "u", "password": None})).basic == ("u", "")


def test_a_pod_whose_environment_names_no_port_is_a_sentence(tmp_path: Path) -> None:
    """The address of the API server in a Pod is checked like any other."""
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "tcp"}
    with pytest.raises(ConfigurationError, match="KUBERNETES_SERVICE_PORT"):
        endpoint(None, None, environ=inside, service_account=pod(tmp_path))


def test_a_missing_context_file_or_yaml_is_named(tmp_path: Path) -> None:
    """A file that is not there, is no YAML or no mapping, several files, and an unknown context are each a sentence."""
    with pytest.raises(ConfigurationError, match="no kubeconfig at"):
        read(tmp_path / "absent")
    with pytest.raises(ConfigurationError, match="several files"):
        read(None, KUBECONFIG="/a:/b")
    with pytest.raises(ConfigurationError, match="no context named 'absent'"):
        read(written(tmp_path), "absent")
    broken = tmp_path / "broken"
    no_yaml = ("a: [", "a: 2020-99-99", "[" * 5000)
    for text, says in (*((each, "not YAML") for each in no_yaml), ("- a", "not a mapping"), ("", "not a mapping")):
        broken.write_text(text)
        with pytest.raises(ConfigurationError, match=says):
            read(broken)
