"""The two commands of the README: the demo from end to end, and a cluster that runs until it is stopped."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.kinds import NAMESPACE, Key
from tests.e2e.controlplane import ControlPlane, Report
from tests.e2e.controlplane.build import built_binary, built_programs, cache_directory
from tests.e2e.kube import CUSTOM_RESOURCE_DEFINITION, Kube, kind_of, kubeconfig_context, wait_until
from tests.e2e.node import Node, NodeUnavailableError
from tests.e2e.node.node import PROGRAMS
from tests.e2e.operator_process import OPERATOR_NAMESPACE
from tests.e2e.prerequisites import lacking
from tests.e2e.shipped import CRDS, IDENTITY
from tests.e2e.stage import objects_in
from tests.paths import ROOT

pytestmark = [
    pytest.mark.skipif(
        bool(os.environ.get("E2E_KUBECONFIG")),
        reason="the demo removes what it makes: it is tried on clusters of its own",
    ),
    pytest.mark.timeout(900),  # each starts clusters and nodes, the garbage collector looks every 30 s, and Pods drain
]

DEMO: Final = (sys.executable, "-m", "tests.e2e.demo", "--quiet-seconds=3")
DEV: Final = (sys.executable, "-m", "tests.e2e.dev")


@pytest.fixture(scope="module", autouse=True)
def _binary(report: Report) -> None:
    """Control plane and node are built before a test's time limit runs."""
    built_binary(report)
    built_programs(PROGRAMS, report)


@pytest.fixture(scope="module")
def existing_cluster(_binary: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A cluster with a node, in which nothing of the operator is installed."""
    with ControlPlane() as cluster:
        try:
            node = Node(cluster, logs=tmp_path_factory.mktemp("node"))
            node.start()
        except NodeUnavailableError as error:
            lacking(str(error))
        try:
            yield cluster
        finally:
            node.stop()


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """One command in the repository's root, whatever its exit code."""
    return subprocess.run(
        command, cwd=ROOT, env=environment(variables), capture_output=True, text=True, check=False, timeout=280
    )


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's variables, with those given and without a cluster of the caller's own."""
    return {name: value for name, value in os.environ.items() if name != "KUBECONFIG"} | dict(variables)


def api_server_answers(port: int) -> bool:
    """Whether anything listens on that port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def port_in(output: str) -> int:
    """The local API server's port, from the line that says it is ready."""
    found = re.search(r"https://127\.0\.0\.1:(\d+) is ready", output)
    assert found, output
    return int(found[1])


def test_the_demo_shows_the_whole_promise() -> None:
    """It converges, asks through the proxy, repairs, counts no write while quiet, deletes, and stops all it started."""
    demo = run(*DEMO)

    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stderr == ""
    for line in (
        r"Ready +True +Ready: reconciled, available, registered and programmed",
        r"converged in \d+\.\d s with [1-9]\d* write requests by the operator",
        r"Deployment checkout-envoy: \{uid: ",
        r"hostname: checkout\.example\.com",
        r"whose the field is now: intruder",
        r"repaired after \d+\.\d\d s: \.spec\.ports\[port=80,protocol=\"TCP\"\]\.targetPort is http again",
        r"managers: \[intruder\]",
        r"an Event on the EnvoyProxy .*DriftRepaired: .*targetPort",
        r"write requests by the operator: 0, says the API server's audit log",
        r"gone: ProxyRegistration edge-system/proxy-",
        r"gone: Service team-a/checkout-envoy",
        r"done: the demo took \d+ s",
    ):
        assert re.search(line, demo.stdout), f"no {line!r} in:\n{demo.stdout}"
    if "no Pods can run here" in demo.stdout:
        assert "not asked: no Pod runs on this machine" in demo.stdout
    else:
        for answer in (r"Host: checkout\.example\.com\n.* 200 'hello from app'", r"200 'hello from assets'"):
            assert re.search(answer, demo.stdout), f"no {answer!r} in:\n{demo.stdout}"
    assert not api_server_answers(port_in(demo.stdout))


def test_the_demo_ends_cleanly_when_it_is_interrupted() -> None:
    """Ctrl-C in the middle stops everything that was started, and the exit code says that it was interrupted."""
    with subprocess.Popen(
        [*DEMO], cwd=ROOT, env=environment({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        output = ""
        for line in demo.stdout:
            output += line
            if "applied:" in line:
                break
        demo.send_signal(signal.SIGINT)
        demo.stdout.read()
        errors = demo.stderr.read()

    assert demo.returncode == 130, errors
    assert errors.strip() == "demo: interrupted; everything that was started is stopped"
    assert not api_server_answers(port_in(output))


def test_the_demo_leaves_nothing_running_when_it_is_killed() -> None:
    """After ``kill -9`` the control plane, the node and the operator end by themselves."""
    with subprocess.Popen([*DEMO], cwd=ROOT, env=environment({}), stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        output = ""
        for line in demo.stdout:
            output += line
            if "applied:" in line:
                break
        started = descendants(demo.pid)
        logs = {log_of(number).parent for number, command in started.items() if "leashed_operator" in command}
        assert any("leashed_operator" in command for command in started.values()), started
        demo.kill()

    assert demo.returncode == -signal.SIGKILL
    wait_until(lambda: not still_running(started), 40, f"the end of {started}")
    for directory in logs:  # a demo that is killed can't remove it
        shutil.rmtree(directory)
    # A process that is gone from the list may still be closing its sockets.
    wait_until(lambda: not api_server_answers(port_in(output)), 10, "the API server to be gone")


def log_of(pid: int) -> Path:
    """The file to which a process writes."""
    return Path(f"/proc/{pid}/fd/1").readlink()


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below ``pid``, by process id."""
    listed = subprocess.run(("ps", "-eo", "pid=,ppid=,args="), capture_output=True, text=True, check=True).stdout
    rows = [
        (int(number), int(parent), command)
        for number, parent, command in (r.split(None, 2) for r in listed.splitlines())
    ]
    found: dict[int, str] = {}
    wanted = {pid}
    while new := {number: command for number, parent, command in rows if parent in wanted and number not in found}:
        found |= new
        wanted = set(new)
    return found


def still_running(processes: Mapping[int, str]) -> dict[int, str]:
    """Those that run under the same command line as before, so that a reused number does not count."""
    listed = subprocess.run(("ps", "-eo", "pid=,args="), capture_output=True, text=True, check=True).stdout
    now = {int(number): command for number, command in (row.split(None, 1) for row in listed.splitlines())}
    return {number: command for number, command in processes.items() if now.get(number) == command}


def test_the_demo_leaves_a_borrowed_cluster_as_it_was(existing_cluster: ControlPlane) -> None:
    """With E2E_KUBECONFIG it runs there, sends requests through the API server, and removes all that it created."""
    demo = run(*DEMO, E2E_KUBECONFIG=str(existing_cluster.kubeconfig))

    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "write requests by the operator: 0, says the operator's own metrics" in demo.stdout
    assert re.search(r"/proxy/ at the API server\n.* 200 'hello from app'", demo.stdout), demo.stdout
    with Kube(existing_cluster.kubeconfig) as admin:
        assert admin.list(CUSTOM_RESOURCE_DEFINITION) == []
        for manifest in objects_in(*IDENTITY):
            kind = kind_of(manifest)
            name = manifest["metadata"]["name"]
            namespace = manifest["metadata"].get("namespace", "")
            assert admin.find(kind, Key(namespace, name)) is None, manifest
        assert admin.find(NAMESPACE, Key("", "team-a")) is None


def test_the_demo_refuses_a_cluster_that_has_its_namespace(existing_cluster: ControlPlane) -> None:
    """Where a namespace has the sample's name: one sentence, a non-zero exit, and nothing is created."""
    with Kube(existing_cluster.kubeconfig) as admin:
        theirs = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a"}}
        admin.create(NAMESPACE, theirs)
        try:
            demo = run(*DEMO, E2E_KUBECONFIG=str(existing_cluster.kubeconfig))
            assert admin.find(NAMESPACE, Key("", "team-a")) is not None
            assert admin.find(NAMESPACE, Key("", OPERATOR_NAMESPACE)) is None
            assert admin.list(CUSTOM_RESOURCE_DEFINITION) == []
        finally:
            admin.delete(NAMESPACE, Key("", "team-a"))
            admin.wait_gone(NAMESPACE, Key("", "team-a"), timeout_s=60)

    assert demo.returncode == 1
    assert demo.stderr.strip() == (
        "demo: the cluster has a namespace team-a already, which the demo would fill and delete"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "There is no kubeconfig"),
        ("not: a kubeconfig\n", "current-context"),
        ("{", "is not YAML"),
    ],
)
def test_the_demo_says_what_is_wrong_with_a_kubeconfig(tmp_path: Path, content: str | None, expected: str) -> None:
    """One line that names the file, a non-zero exit, and no traceback."""
    file = tmp_path / "kubeconfig"
    if content is not None:
        file.write_text(content)

    demo = run(*DEMO, E2E_KUBECONFIG=str(file))

    assert demo.returncode == 1
    assert demo.stderr.strip().count("\n") == 0, demo.stderr
    assert str(file) in demo.stderr
    assert expected in demo.stderr


def test_a_dev_cluster_stays_until_it_is_stopped(tmp_path: Path) -> None:
    """Start leaves it running and prints its KUBECONFIG, a second start finds the same one, stop ends all of it."""
    cache = tmp_path / "operator-app"
    cache.mkdir()
    for name in ("controlplane", "images", "node"):
        (cache / name).symlink_to(cache_directory() / name)
    variables = {"XDG_CACHE_HOME": str(tmp_path)}
    try:
        first = run(*DEV, **variables)
        assert first.returncode == 0, first.stdout + first.stderr
        printed = re.search(r"^KUBECONFIG=(.+)$", first.stdout, re.MULTILINE)
        assert printed, first.stdout
        kubeconfig = Path(printed[1])
        server = kubeconfig_context(kubeconfig).cluster.server
        with Kube(kubeconfig) as admin:
            assert len(admin.list(CUSTOM_RESOURCE_DEFINITION)) == len(CRDS)

        second = run(*DEV, **variables)
        assert second.returncode == 0
        assert f"KUBECONFIG={kubeconfig}" in second.stdout
        assert kubeconfig_context(kubeconfig).cluster.server == server
    finally:
        stopped = run(*DEV, "stop", **variables)

    assert (stopped.returncode, stopped.stdout) == (0, "dev: stopped\n"), stopped.stderr
    assert not kubeconfig.exists()
    assert not api_server_answers(int(server.rpartition(":")[2]))
    again = run(*DEV, "stop", **variables)
    assert (again.returncode, again.stdout) == (0, "dev: no cluster is running\n")
