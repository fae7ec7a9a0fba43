"""The command line: what it prints, and one sentence with the right exit code for everything that is wrong."""

import io
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml

from operator_app import app
from operator_app.__main__ import _while_throttled, main
from operator_app.api.crd import crds
from operator_app.api.kinds import Object
from operator_app.envoy import files
from operator_app.errors import ThrottledError
from operator_app.kube.client import Cluster
from operator_app.settings import ENV_PREFIX, Settings
from tests.unit.kube.scripted_client import kubeconfig_in

GOOD = """
apiVersion: edge.operator-app.dev/v1alpha1
kind: EnvoyProxy
metadata: {name: checkout, namespace: team-a}
spec:
  listeners:
  - {name: http, port: 80, routes: [{backend: app}]}
  backends:
  - {name: app, endpoints: [{host: app.team-a.svc, port: 8080}]}
"""


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings from the environment of the tests; logging is restored afterwards."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"{ENV_PREFIX}{name.upper()}", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings with which the operator would have been started, instead of starting it."""
    found: list[Settings] = []

    async def run(settings: Settings) -> None:
        found.append(settings)

    monkeypatch.setattr(app, "run", run)
    return found


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence on standard error; nothing is on standard output."""
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("operator_app: ")
    return line.removeprefix("operator_app: ")


# --- run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "port"),
    [([], 8080), (["run"], 8080), (["--http-port", "9"], 9), (["--http-port=9"], 9), (["run", "--http-port", "9"], 9)],
    ids=str,
)
def test_run_is_the_default(started: list[Settings], arguments: list[str], port: int) -> None:
    """With or without the word, with or without flags."""
    assert main(arguments) == 0
    assert [each.http_port for each in started] == [port]


def test_a_flag_outdoes_the_environment(started: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the environment the default."""
    monkeypatch.setenv("OPERATOR_APP_WORKERS", "3")
    monkeypatch.setenv("OPERATOR_APP_HTTP_PORT", "3")
    assert main(["--workers", "5"]) == 0
    assert (started[0].workers, started[0].http_port) == (5, 3)


def test_every_setting_has_a_flag_and_help_that_names_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    """``run --help`` is the reference of the settings."""
    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')} VALUE" in text
        assert f"{ENV_PREFIX}{name.upper()}" in "".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (
            ["--http-port", "70000"],
            {},
            "OPERATOR_APP_HTTP_PORT (--http-port): Input should be less than or equal to 65535",
        ),
        ([], {"HTTP_PORT": "eighty"}, "OPERATOR_APP_HTTP_PORT (--http-port): Input should be a valid integer"),
        (["--workers=0"], {}, "OPERATOR_APP_WORKERS (--workers): Input should be greater than or equal to 1"),
        ([], {"LOG_LEVEL": "loud"}, "OPERATOR_APP_LOG_LEVEL (--log-level): Input should be 'debug', 'info', 'warning'"),
        (
            ["--namespaces", "A"],
            {},
            "OPERATOR_APP_NAMESPACES (--namespaces): 'A' can't be a namespace; write DNS labels",
        ),
        (
            ["--namespace", "Edge System"],
            {},
            "OPERATOR_APP_NAMESPACE (--namespace): 'Edge System' can't be a namespace; write a DNS label",
        ),
        (["--backoff-base-s", "90"], {}, "--backoff-base-s (90) must not exceed --backoff-cap-s (60)"),
    ],
    ids=str,
)
def test_a_bad_setting_is_one_sentence_that_names_variable_and_flag(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    started: list[Settings],
    arguments: list[str],
    environment: dict[str, str],
    sentence: str,
) -> None:
    """Whichever of the two was used; nothing is started, and the exit code is 2."""
    for name, value in environment.items():
        monkeypatch.setenv(f"{ENV_PREFIX}{name}", value)
    assert main(arguments) == 2
    assert complaint(capsys).startswith(sentence)
    assert started == []


@pytest.mark.parametrize("command", [["audit"], ["explain", "team-a/checkout"]], ids=str)
def test_a_bad_setting_is_the_same_sentence_in_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """Whichever command reads the environment."""
    monkeypatch.setenv("OPERATOR_APP_HTTP_PORT", "abc")
    assert main(command) == 2
    assert complaint(capsys).startswith("OPERATOR_APP_HTTP_PORT (--http-port): Input should be a valid integer")


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["run", "extra"], ["nonsense"], ["render"], ["crd", "--x"]], ids=str
)
def test_what_is_no_command_or_flag_is_a_usage_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """The exit code is 2, and the last line names what was not understood."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """``--help`` alone is about all of them."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("run", "crd", "render", "explain"))


def kubeconfig(folder: Path, text: str | None = None) -> str:
    """A kubeconfig of a server that does not answer."""
    path = kubeconfig_in(folder, {"server": "http://127.0.0.1:9"})
    if text is not None:
        path.write_text(text)
    return str(path)


def test_a_missing_kubeconfig_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It names the path that was tried."""
    assert main(["--kubeconfig", str(tmp_path / "nowhere")]) == 2
    assert str(tmp_path / "nowhere") in complaint(capsys)


@pytest.mark.parametrize(
    "text", ["", "a: [", "[]", "current-context: there"], ids=["empty", "no YAML", "list", "dangling"]
)
def test_a_bad_kubeconfig_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    """It names the file."""
    path = kubeconfig(tmp_path, text)
    assert main(["--kubeconfig", path]) == 2
    assert path in complaint(capsys)


def test_explain_refuses_a_name_that_cannot_be_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The input is wrong, so the exit code is 2."""
    assert main(["explain", "Team A/checkout", "--kubeconfig", kubeconfig(tmp_path)]) == 2
    assert "'Team A'" in complaint(capsys)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({}, "team-a/checkout: spec.listeners: Field required"),
        (yaml.safe_load(GOOD.replace("backend: app", "backend: b"))["spec"], "team-a/checkout: spec: every route's"),
    ],
    ids=["field", "rule"],
)
def test_explain_refuses_a_spec_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    spec: Object,
    sentence: str,
) -> None:
    """It names the proxy and the field, as ``render`` does; the exit code is 2."""

    async def get(*_: object) -> Object:
        return {"metadata": {"name": "checkout", "namespace": "team-a"}, "spec": spec}

    monkeypatch.setattr(Cluster, "get", get)
    assert main(["explain", "team-a/checkout", "--kubeconfig", kubeconfig(tmp_path)]) == 2
    assert complaint(capsys).startswith(sentence)


def test_a_taken_port_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It names the port and the flag, and the exit code is that of every setting that can't work."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--kubeconfig", kubeconfig(tmp_path), "--http-port", str(port)]) == 2
    sentence = complaint(capsys)
    assert f"port {port}" in sentence
    assert "--http-port" in sentence


# --- crd -----------------------------------------------------------------------------------------------------------


def test_crd_prints_the_definitions(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, as YAML that ``kubectl apply -f -`` takes."""
    assert main(["crd"]) == 0
    assert tuple(yaml.safe_load_all(capsys.readouterr().out)) == crds()


# --- render --------------------------------------------------------------------------------------------------------


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[Any]:
    """What ``render`` prints."""
    assert main(["render", *arguments]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def test_render_prints_the_children_of_every_proxy_in_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the order of applying; other documents are passed over."""
    file = tmp_path / "proxies.yaml"
    other = "apiVersion: v1\nkind: Namespace\nmetadata: {name: team-a}\n"
    file.write_text(
        f"{other}---\n{GOOD}---\n---\n{GOOD.replace('checkout', 'orders').replace(', namespace: team-a', '')}"
    )
    found = rendered(capsys, "-f", str(file), "--image", "envoy:mine")
    assert [(each["kind"], each["metadata"]["namespace"], each["metadata"]["name"]) for each in found] == [
        (kind, namespace, name)
        for namespace, name in (("team-a", "checkout-envoy"), ("default", "orders-envoy"))
        for kind in ("ConfigMap", "Deployment", "Service")
    ]
    assert found[1]["spec"]["template"]["spec"]["containers"][0]["image"] == "envoy:mine"


def test_render_takes_no_namespace_for_the_default_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """``namespace:`` without a value, or an empty one, is as good as none."""
    file = tmp_path / "proxies.yaml"
    for nothing in ("null", "''"):
        file.write_text(GOOD.replace("namespace: team-a", f"namespace: {nothing}, uid: {nothing}"))
        found = rendered(capsys, "-f", str(file))
        assert {each["metadata"]["namespace"] for each in found} == {"default"}
        assert all(each["metadata"]["ownerReferences"][0]["uid"] for each in found)


def test_render_prints_what_envoy_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With ``--envoy`` a document for each proxy: the files by their names, decoded."""
    file = tmp_path / "proxy.yaml"
    file.write_text(GOOD)
    (found,) = rendered(capsys, "-f", str(file), "--envoy")
    assert {name.partition("-")[0] for name in found} == {"cds.json", "envoy", "lds", "rds"}
    assert {each["name"] for each in found["cds.json"]["resources"]} >= {"backend/app"}


def test_render_reads_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A single dash, as everywhere."""
    monkeypatch.setattr("sys.stdin", io.StringIO(GOOD))
    assert len(rendered(capsys, "-f", "-")) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["can't read", "No such file"]),
        ("a: [", ["can't read"]),
        ("\x00", ["can't read"]),
        ("a: 2020-99-99", ["can't read"]),
        ("[" * 5000, ["can't read"]),
        (b"\xff\xfe\xfa", ["can't read"]),
        ("", ["holds no EnvoyProxy"]),
        ("kind: Service", ["holds no EnvoyProxy"]),
        ("[1, 2]", ["holds no EnvoyProxy"]),
        ("kind: EnvoyProxy", ["has no metadata.name"]),
        ("kind: EnvoyProxy\nmetadata: text", ["has no metadata.name"]),
        ("kind: EnvoyProxy\nmetadata: {name: 5}", ["has no metadata.name"]),
        ("kind: EnvoyProxy\nmetadata: {name: a, namespace: 5}", ["has no metadata.namespace that is text"]),
        ("kind: EnvoyProxy\nmetadata: {name: a}", ["a: spec.listeners: Field required"]),
        ("kind: EnvoyProxy\nmetadata: {name: a}\nspec: text", ["a: spec: Input should be a valid dictionary"]),
        (GOOD.replace("port: 80,", "port: 0,"), ["checkout: spec.listeners.0.port: Input should be greater than"]),
        (GOOD.replace("backend: app", "backend: other"), ["checkout: spec: every route's backend must be declared"]),
    ],
    ids=[
        "missing",
        "no YAML",
        "control character",
        "no date",
        "too deep",
        "no UTF-8",
        "empty",
        "no proxy",
        "list",
        "no metadata",
        "metadata text",
        "numeric name",
        "numeric namespace",
        "no spec",
        "spec text",
        "bad value",
        "broken rule",
    ],
)
def test_render_refuses_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | bytes | None, words: list[str]
) -> None:
    """It names the file or the proxy and its field, and prints no half of a result; the exit code is 2."""
    file = tmp_path / "proxies.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["render", "-f", str(file)]) == 2
    sentence = complaint(capsys)
    for each in words:
        assert each in sentence


def test_render_names_the_second_proxy_that_is_bad(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A good proxy before it is not printed either."""
    file = tmp_path / "proxies.yaml"
    file.write_text(f"{GOOD}---\n{GOOD.replace('checkout', 'orders').replace('port: 80,', 'port: 0,')}")
    assert main(["render", "-f", str(file)]) == 2
    assert complaint(capsys).startswith("orders: ")


def test_render_says_what_only_the_operator_can_see(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A configuration that no ConfigMap can hold passes the schema, and is refused all the same."""
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    file = tmp_path / "proxies.yaml"
    file.write_text(GOOD)
    assert main(["render", "-f", str(file)]) == 2
    assert complaint(capsys).startswith("checkout: the Envoy configuration takes ")


@pytest.mark.anyio
async def test_a_command_repeats_what_is_throttled_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Just after CRDs were installed the API server answers 429 "storage is (re)initializing" for a moment."""
    answers = [ThrottledError("storage is (re)initializing", retry_after_s=0.1)] * 3
    calls = 0

    async def read() -> str:
        nonlocal calls
        calls += 1
        if calls <= len(answers):
            raise answers[calls - 1]
        return "found"

    assert await _while_throttled(read) == "found"
    assert calls == 4
    monkeypatch.setattr("operator_app.__main__.RETRY_WITHIN_S", 0)
    calls = 0
    with pytest.raises(ThrottledError):
        await _while_throttled(read)
    assert calls == 1
