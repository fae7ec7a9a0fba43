"""The node is what other tests take it for: Pods really run on it, apart from everything else on this machine."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from operator_app.api.kinds import CONFIG_MAP, SERVICE, Key, Object
from tests.e2e.kube import NODE, POD, SERVICE_ACCOUNT, Kube, wait_until
from tests.e2e.node import NodeUnavailableError, cgroups, network, policy_agent, relay, requirements
from tests.e2e.node.addresses import NODE_NAME
from tests.e2e.node.fixture import Nodes
from tests.e2e.node.images import ENVOY_IMAGE
from tests.e2e.node.node import Node
from tests.e2e.node.policy_agent import PoliciesUnavailableError
from tests.e2e.process_tree import alive, command_line, family_of, node_mounts
from tests.paths import ROOT

PORT = 8080
START_S = 30.0
START_CLUSTER_S = 100.0
TYPE = "type.googleapis.com/envoy.extensions"


@pytest.fixture
def local(nodes: Nodes) -> Node:
    """The node that was started here."""
    if nodes.local is None:
        pytest.skip("is about the node that is started here, and E2E_KUBECONFIG names another cluster")
    return nodes.local


@pytest.fixture
def namespace(admin: Kube, namespace: str, nodes: Nodes) -> str:  # noqa: ARG001  # its Pods run
    """A namespace in which Pods may be created: admission wants its default ServiceAccount first."""
    admin.wait_until(SERVICE_ACCOUNT, Key(namespace, "default"), bool)
    return namespace


def bootstrap(route: Object, *backends: str) -> str:
    """An Envoy configuration with one route on ``PORT``, and a cluster for each name that it resolves."""
    manager = {
        "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "test",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{TYPE}.filters.http.router.v3.Router"}}
        ],
    }
    listener = {
        "name": "http",
        "address": {"socket_address": {"address": "0.0.0.0", "port_value": PORT}},  # noqa: S104  # a Pod's own address
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    clusters = [
        {
            "name": name,
            "type": "STRICT_DNS",
            "dns_lookup_family": "V4_ONLY",
            "load_assignment": {
                "cluster_name": name,
                "endpoints": [
                    {
                        "lb_endpoints": [
                            {"endpoint": {"address": {"socket_address": {"address": name, "port_value": 80}}}}
                        ]
                    }
                ],
            },
        }
        for name in backends
    ]
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": clusters}})


def answer(text: str) -> Object:
    """A route that Envoy answers itself."""
    return {"match": {"prefix": "/"}, "direct_response": {"status": 200, "body": {"inline_string": text}}}


def start(admin: Kube, namespace: str, name: str, config: str, **spec: Any) -> None:
    """A Pod that runs Envoy with a configuration, and a Service in front of it; keywords change the Pod's spec."""
    at, labels = {"namespace": namespace, "name": name}, {"app": name}
    data = {"envoy.json": config}
    admin.create(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": at, "data": data})
    container = {
        "name": "envoy",
        "image": ENVOY_IMAGE,
        "args": ["-c", "/etc/envoy/envoy.json", "--concurrency", "1", "--disable-hot-restart"],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/envoy", "readOnly": True}],
        "securityContext": {"runAsUser": 101, "readOnlyRootFilesystem": True},
    }
    pod: Object = {
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": name}}],
    }
    metadata = at | {"labels": labels}
    admin.create(POD, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod | spec})
    ports = {"selector": labels, "ports": [{"port": 80, "targetPort": PORT}]}
    admin.create(SERVICE, {"apiVersion": "v1", "kind": "Service", "metadata": at, "spec": ports})


def is_ready(obj: Object) -> bool:
    """The condition Ready of a Pod or of a Node."""
    conditions = obj.get("status", {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def test_a_service_answers_at_its_cluster_ip_and_by_its_name(admin: Kube, namespace: str, nodes: Nodes) -> None:
    """A client reaches one Pod by a Service's virtual address, and that Pod another one by a Service's short name."""
    start(admin, namespace, "back", bootstrap(answer("from the back")))
    route = {"match": {"prefix": "/"}, "route": {"cluster": "back"}}
    start(admin, namespace, "front", bootstrap(route, "back"))
    for name in ("back", "front"):
        admin.wait_until(POD, Key(namespace, name), is_ready, START_S)
    address = admin.get(SERVICE, Key(namespace, "front"))["spec"]["clusterIP"]

    def answered() -> bool:
        with nodes.inside():
            try:
                return network.get(address, 80) == (200, "from the back")
            except OSError:
                return False

    wait_until(answered, START_S, "an answer at the cluster IP")


def test_a_pod_has_its_token_and_its_log_is_served(admin: Kube, namespace: str, local: Node) -> None:
    """The kubelet projects a token of the Pod's ServiceAccount, and hands out what the container wrote."""
    start(admin, namespace, "one", bootstrap(answer("one")))
    pod = admin.wait_until(POD, Key(namespace, "one"), is_ready, START_S)
    log = admin.request("GET", f"/api/v1/namespaces/{namespace}/pods/one/log").text
    assert "starting main dispatch loop" in log
    projected = f"/var/lib/kubelet/pods/{pod['metadata']['uid']}/volumes/kubernetes.io~projected"
    found = subprocess.run(
        local.command("sh", "-c", f"cat {projected}/*/token"), capture_output=True, text=True, check=True
    )
    assert len(found.stdout.split(".")) == 3, "a JSON web token"


def test_a_machine_without_what_it_takes_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another system, another user, or programs that can't be installed: each is one sentence and no traceback."""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(NodeUnavailableError, match=r"^no Pods can run here: a node needs Linux$"):
        requirements.ensure(print)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NodeUnavailableError, match=r"^no Pods can run here: a node needs root, .*$"):
        requirements.ensure(print)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda *_args, **_options: None)
    with pytest.raises(NodeUnavailableError, match=r"^no Pods can run here: .*missing.*runc.*$"):
        requirements.ensure(print)
    with pytest.raises(PoliciesUnavailableError, match=r"^NetworkPolicies can't be enforced here: .*ipset.*$"):
        policy_agent.ensure(print)
    with pytest.raises(NodeUnavailableError, match=r"^no Pods can run here: /run/x is below /run.*$"):
        requirements.ensure(print, Path("/run/x"))


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\n\r\n", b"CONNECT nowhere HTTP/1.1\r\n\r\n", b"\xff\r\n\r\n"])
def test_the_way_inwards_takes_only_connect(head: bytes) -> None:
    """Whatever else is asked of the proxy is refused."""
    assert relay._target(b"CONNECT 10.244.0.2:8080 HTTP/1.1\r\nHost: x\r\n\r\n") == ("10.244.0.2", 8080)
    with pytest.raises(ValueError, match=r".+"):
        relay._target(head)


@contextmanager
def another() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """``python -m tests.e2e.node`` once its node is ready, and its kubeconfig."""
    command = [sys.executable, "-m", "tests.e2e.node"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            kubeconfig = Path(process.stdout.readline().strip().removeprefix("KUBECONFIG="))
            process.stdout.readline()
            yield process, kubeconfig
        finally:
            process.kill()


def cgroups_of(family: Mapping[int, str]) -> list[Path]:
    """The cgroups that one of these processes has made; other test runs beside this one make and remove their own."""
    ends = {f"-{pid}-{started}" for pid, started in family.items()}
    return [each for each in cgroups.all_of_nodes() if any(each.name.endswith(end) for end in ends)]


@pytest.mark.timeout(900)
def test_a_killed_run_leaves_nothing_and_its_neighbour_goes_on(local: Node, admin: Kube, namespace: str) -> None:
    """After ``kill -9`` of a run no process, mount and cgroup of its node is left; another node's Pods never notice."""
    start(admin, namespace, "neighbour", bootstrap(answer("here")))
    before = admin.wait_until(POD, Key(namespace, "neighbour"), is_ready, START_S)
    mounts = node_mounts()
    with another() as (process, kubeconfig):
        with Kube(kubeconfig) as there:
            there.wait_until(SERVICE_ACCOUNT, Key("default", "default"), bool)
            start(there, "default", "neighbour", bootstrap(answer("there")))
            there.wait_until(POD, Key("default", "neighbour"), is_ready, START_S)
            assert is_ready(there.get(NODE, Key("", NODE_NAME)))
        family = family_of(process.pid)
        assert len(family) > len(("keeper", "unshare", "init", "containerd", "kubelet", "shim", "pause", "envoy"))
        assert cgroups_of(family)
        process.kill()
        process.wait()
        wait_until(lambda: not alive(family), what="the end of all its processes")
        wait_until(lambda: not cgroups_of(family), what="the end of its cgroups")
    assert node_mounts() <= mounts
    after = admin.get(POD, Key(namespace, "neighbour"))
    assert is_ready(after)
    assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]
    assert local.pid in family_of(os.getpid())


@pytest.mark.timeout(900)
def test_a_node_dies_with_its_keeper(local: Node) -> None:  # noqa: ARG001  # everything is built, within no time limit
    """After ``kill -9`` of the keeper, too, no process is left; the empty cgroup goes with the next sweep."""
    with another() as (process, _):
        run = family_of(process.pid)
        keeper = next(pid for pid in run if b"tests.e2e.node.keeper" in command_line(pid))
        family, made = family_of(keeper), {keeper: run[keeper]}
        assert family
        assert cgroups_of(made)
        os.kill(keeper, 9)
        wait_until(lambda: not alive(family), what="the end of all its processes")

    def swept() -> bool:
        cgroups.sweep()
        return not cgroups_of(made)

    wait_until(swept, what="the end of its cgroups")
