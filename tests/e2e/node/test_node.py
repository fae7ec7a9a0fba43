"""The stand-in node behaves like a node: everything that the other tests rely on when they say that a proxy runs."""

import json
import os
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from operator_app.api.kinds import CONFIG_MAP, DEPLOYMENT, SERVICE, Key, Object
from tests.e2e.controlplane import Cluster
from tests.e2e.kube import NODE, POD, SERVICE_ACCOUNT, Kube, KubeError, wait_until
from tests.e2e.node import StandInNode, names
from tests.e2e.node.container import is_envoy
from tests.e2e.node.standin import REPOSITORY
from tests.e2e.prerequisites import lacking

IMAGE = "envoyproxy/envoy:v1.40.0"
PORT = 8080
START_S = 20.0
TYPE = "type.googleapis.com/envoy.extensions"


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("envoyproxy/envoy:v1.40.0", True),
        ("registry.example:5000/mirror/envoy:distroless-v1.36.2", True),
        ("envoy@sha256:0000", True),
        ("envoyproxy/gateway:v1", False),
        ("library/nginx:envoy", False),
    ],
)
def test_envoy_images_are_told_by_their_last_path_component(image: str, *, expected: bool) -> None:
    """Registry, repository, tag and digest do not make an image an Envoy; its own name does."""
    assert is_envoy(image) is expected


def question(name: str, record_type: int = 1) -> bytes:
    """A DNS query for one name."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + labels + b"\x00" + struct.pack("!HH", record_type, 1)


def endpoint_slice(*endpoints: tuple[str, bool]) -> Object:
    """The EndpointSlice of Service ``app`` in ``team-a``."""
    return {
        "metadata": {"namespace": "team-a", "labels": {"kubernetes.io/service-name": "app"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": ready}} for address, ready in endpoints],
    }


@pytest.mark.parametrize(
    ("name", "record_type", "code", "addresses"),
    [
        ("app.team-a.svc.cluster.local", 1, 0, [b"\x0a\x00\x00\x02"]),
        ("APP.team-a.svc.cluster.local", 1, 0, [b"\x0a\x00\x00\x02"]),
        ("app.team-a.svc.cluster.local", 28, 0, []),
        ("app.team-b.svc.cluster.local", 1, 3, []),
        ("app.team-a.svc", 1, 3, []),
    ],
)
def test_names_are_answered_as_by_a_cluster(name: str, record_type: int, code: int, addresses: list[bytes]) -> None:
    """A Service's full name has its ready addresses and no IPv6 ones; any other name does not exist."""
    slices = [endpoint_slice(("10.0.0.2", True), ("10.0.0.3", False))]
    response = names.answer(question(name, record_type), lambda asked: names.service_addresses(asked, slices))
    assert response[:2] == b"\x12\x34"
    assert response[3] & 0x0F == code
    assert int.from_bytes(response[6:8]) == len(addresses)
    assert all(response.endswith(address) for address in addresses)


@pytest.mark.parametrize("length", range(len(question("app.team-a.svc.cluster.local"))))
def test_a_query_that_is_cut_off_is_refused(length: int) -> None:
    """No beginning of a query is taken for a query."""
    with pytest.raises(ValueError, match=r".+"):
        names.answer(question("app.team-a.svc.cluster.local")[:length], lambda _name: [])


@pytest.fixture
def node(standin_node: StandInNode | None) -> StandInNode:
    """The session's node, where it runs Envoy; elsewhere the test is skipped."""
    if standin_node is None or not standin_node.runs_envoy:
        lacking("needs a stand-in node with network namespaces (root on Linux with iproute2)")
    return standin_node


@pytest.fixture
def namespace(admin: Kube, namespace: str) -> str:
    """A namespace in which Pods may be created: admission wants its default ServiceAccount first."""
    admin.wait_until(SERVICE_ACCOUNT, Key(namespace, "default"), bool)
    return namespace


def direct_response(text: str, path: str = "/", status: int = 200) -> Object:
    """One route that Envoy answers itself."""
    return {"match": {"path": path}, "direct_response": {"status": status, "body": {"inline_string": text}}}


def bootstrap(*routes: Object, clusters: tuple[Object, ...] = ()) -> str:
    """An Envoy configuration with one HTTP listener on ``PORT``."""
    manager = {
        "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "test",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": list(routes)}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{TYPE}.filters.http.router.v3.Router"},
            }
        ],
        "access_log": [
            {
                "name": "envoy.access_loggers.stdout",
                "typed_config": {
                    "@type": f"{TYPE}.access_loggers.stream.v3.StdoutAccessLog",
                    "log_format": {"text_format_source": {"inline_string": "took %REQ(:PATH)%\n"}},
                },
            }
        ],
    }
    listener = {
        "name": "http",
        "address": {"socket_address": {"address": "0.0.0.0", "port_value": PORT}},  # noqa: S104
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": list(clusters)}})


def config_map(namespace: str, name: str, *routes: Object, clusters: tuple[Object, ...] = ()) -> Object:
    """A ConfigMap with a bootstrap file."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": {"envoy.yaml": bootstrap(*routes, clusters=clusters)},
    }


def pod_spec(config: str, **container: Any) -> Object:
    """A Pod that runs Envoy with a ConfigMap mounted; keywords change the container."""
    return {
        "terminationGracePeriodSeconds": 5,
        "containers": [
            {
                "name": "envoy",
                "image": IMAGE,
                "args": ["-c", "/etc/envoy/envoy.yaml", "--concurrency", "1", "--log-level", "warn"],
                "ports": [{"name": "http", "containerPort": PORT}],
                "volumeMounts": [{"name": "config", "mountPath": "/etc/envoy", "readOnly": True}],
                "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1},
                **container,
            }
        ],
        "volumes": [{"name": "config", "configMap": {"name": config}}],
    }


def start_pod(admin: Kube, namespace: str, name: str, spec: Object, labels: dict[str, str] | None = None) -> None:
    """Create a Pod."""
    metadata = {"name": name, "namespace": namespace, "labels": labels or {}}
    admin.create(POD, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


def is_ready(pod: Object) -> bool:
    """The Pod's Ready condition."""
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in pod.get("status", {}).get("conditions", ())
    )


def ready_pod(admin: Kube, namespace: str, name: str) -> Object:
    """The Pod once it is Ready."""
    return admin.wait_until(POD, Key(namespace, name), is_ready, timeout_s=START_S)


def container_of(pod: Object) -> Object:
    """The status of the Pod's only container."""
    (status,) = pod["status"]["containerStatuses"]
    assert isinstance(status, dict)
    return status


def pid_of(pod: Object) -> int:
    """The process behind the Pod's only container."""
    return int(container_of(pod)["containerID"].removeprefix("standin://"))


def is_running(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not yet waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def get(pod: Object, path: str = "/") -> httpx2.Response:
    """The answer of the Pod's Envoy."""
    return httpx2.get(f"http://{pod['status']['podIP']}:{PORT}{path}", trust_env=False, timeout=2)


def is_gone(admin: Kube, namespace: str, name: str) -> bool:
    """Whether the Pod object is no more."""
    return admin.find(POD, Key(namespace, name)) is None


@pytest.mark.usefixtures("node")
def test_a_deployment_becomes_available_and_answers(admin: Kube, namespace: str) -> None:
    """Deployment controller, scheduler and node together bring up an Envoy that serves what its ConfigMap says."""
    admin.create(CONFIG_MAP, config_map(namespace, "hello", direct_response("hello")))
    labels = {"app": "hello"}
    admin.create(
        DEPLOYMENT,
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "hello", "namespace": namespace},
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod_spec("hello")},
            },
        },
    )
    admin.wait_until(
        DEPLOYMENT,
        Key(namespace, "hello"),
        lambda deployment: deployment.get("status", {}).get("availableReplicas") == 2,
        timeout_s=START_S,
    )
    pods = admin.list(POD, namespace)
    assert [get(pod).text for pod in pods] == ["hello", "hello"]
    assert len({pod["status"]["podIP"] for pod in pods}) == 2, "both bind the same port, so each has its own address"


@pytest.mark.usefixtures("node")
def test_status_is_complete(admin: Kube, namespace: str) -> None:
    """A running Pod's status names phase, addresses, start and a ready container that was never restarted."""
    admin.create(CONFIG_MAP, config_map(namespace, "hello", direct_response("hello")))
    start_pod(admin, namespace, "hello", pod_spec("hello"))
    pod = ready_pod(admin, namespace, "hello")
    status = pod["status"]
    assert status["phase"] == "Running"
    assert status["podIPs"] == [{"ip": status["podIP"]}]
    assert status["startTime"]
    conditions = {condition["type"]: condition["status"] for condition in status["conditions"]}
    assert all(conditions[name] == "True" for name in ("PodScheduled", "Initialized", "ContainersReady", "Ready")), (
        conditions
    )
    container = container_of(pod)
    assert (container["ready"], container["started"], container["restartCount"]) == (True, True, 0)
    assert "running" in container["state"]


@pytest.mark.usefixtures("node")
def test_a_pod_waits_for_its_config_map(admin: Kube, namespace: str) -> None:
    """A Pod whose ConfigMap is missing is ContainerCreating and says why; it starts when the ConfigMap appears."""
    start_pod(admin, namespace, "early", pod_spec("late"))
    waiting = admin.wait_until(
        POD,
        Key(namespace, "early"),
        lambda pod: "late" in json.dumps(pod.get("status", {}).get("containerStatuses", "")),
        timeout_s=START_S,
    )
    assert container_of(waiting)["state"]["waiting"]["reason"] == "ContainerCreating"
    assert waiting["status"]["phase"] == "Pending"
    admin.create(CONFIG_MAP, config_map(namespace, "late", direct_response("hello")))
    assert get(ready_pod(admin, namespace, "early")).text == "hello"


@pytest.mark.usefixtures("node")
def test_a_config_map_change_reaches_the_running_envoy(admin: Kube, namespace: str) -> None:
    """The mounted files are swapped under a running Envoy, whose file-based route discovery takes the new routes."""
    routes = {
        "@type": "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
        "name": "routes",
        "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [direct_response("one")]}],
    }
    config = json.loads(bootstrap())
    config["node"] = {"id": "test", "cluster": "test"}
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["route_config"]
    manager["rds"] = {
        "route_config_name": "routes",
        "config_source": {
            "path_config_source": {"path": "/etc/envoy/rds.json", "watched_directory": {"path": "/etc/envoy"}}
        },
    }
    metadata = {"name": "live", "namespace": namespace}
    data = {"envoy.yaml": json.dumps(config), "rds.json": json.dumps({"resources": [routes]})}
    admin.create(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    start_pod(admin, namespace, "live", pod_spec("live"))
    pod = ready_pod(admin, namespace, "live")
    assert get(pod).text == "one"

    changed = data["rds.json"].replace('"one"', '"two"')
    admin.patch(CONFIG_MAP, Key(namespace, "live"), {"data": {"rds.json": changed}})
    wait_until(lambda: get(pod).text == "two", what="the new route")
    assert container_of(admin.get(POD, Key(namespace, "live")))["restartCount"] == 0


@pytest.mark.usefixtures("node")
def test_a_deleted_pod_is_gone_with_its_process_and_namespace(admin: Kube, namespace: str) -> None:
    """After the deletion of a Pod neither its object, nor its Envoy, nor its address remain."""
    admin.create(CONFIG_MAP, config_map(namespace, "hello", direct_response("hello")))
    start_pod(admin, namespace, "hello", pod_spec("hello"))
    pod = ready_pod(admin, namespace, "hello")
    assert is_running(pid_of(pod))
    admin.delete(POD, Key(namespace, "hello"))
    wait_until(lambda: is_gone(admin, namespace, "hello"), what="the Pod's end")
    assert not is_running(pid_of(pod))
    with pytest.raises(httpx2.TransportError):
        get(pod)


def test_the_pre_stop_hook_runs_while_envoy_still_serves(admin: Kube, namespace: str, node: StandInNode) -> None:
    """An exec hook runs inside the Pod's own network before SIGTERM, and traffic is answered meanwhile."""
    hook = {"exec": {"command": ["/bin/sh", "-c", "cat /proc/net/fib_trie; echo drained; sleep 1.5"]}}
    admin.create(CONFIG_MAP, config_map(namespace, "hello", direct_response("hello")))
    start_pod(admin, namespace, "hello", pod_spec("hello", lifecycle={"preStop": hook}))
    pod = ready_pod(admin, namespace, "hello")
    admin.delete(POD, Key(namespace, "hello"))
    wait_until(lambda: "drained" in node.log(namespace, "hello", "envoy"), what="the hook")
    assert get(pod).text == "hello"
    assert pod["status"]["podIP"] in node.log(namespace, "hello", "envoy")
    wait_until(lambda: is_gone(admin, namespace, "hello"), what="the Pod's end")


def test_http_and_sleep_hooks_run(admin: Kube, namespace: str, node: StandInNode) -> None:
    """An httpGet hook asks the Pod itself; a sleep hook keeps Envoy serving for as long as it says."""
    admin.create(
        CONFIG_MAP, config_map(namespace, "hello", direct_response("hello"), direct_response("bye", path="/drain"))
    )
    asks = {"httpGet": {"path": "/drain", "port": "http"}}
    start_pod(admin, namespace, "asks", pod_spec("hello", lifecycle={"preStop": asks}))
    start_pod(admin, namespace, "sleeps", pod_spec("hello", lifecycle={"preStop": {"sleep": {"seconds": 2}}}))
    ready_pod(admin, namespace, "asks")
    sleeping = ready_pod(admin, namespace, "sleeps")
    admin.delete(POD, Key(namespace, "sleeps"))
    admin.delete(POD, Key(namespace, "asks"))
    wait_until(lambda: is_gone(admin, namespace, "asks"), what="the Pod's end")
    assert "took /drain" in node.log(namespace, "asks", "envoy")
    assert get(sleeping).text == "hello"
    wait_until(lambda: is_gone(admin, namespace, "sleeps"), what="the Pod's end")


@pytest.mark.usefixtures("node")
def test_the_grace_period_ends_a_hook_that_does_not(admin: Kube, namespace: str) -> None:
    """When the grace period is over the container is killed, whatever its hook is doing."""
    admin.create(CONFIG_MAP, config_map(namespace, "hello", direct_response("hello")))
    spec = pod_spec("hello", lifecycle={"preStop": {"sleep": {"seconds": 100}}})
    start_pod(admin, namespace, "slow", spec | {"terminationGracePeriodSeconds": 101})
    pod = ready_pod(admin, namespace, "slow")
    admin.delete(POD, Key(namespace, "slow"))
    admin.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/slow", body={"gracePeriodSeconds": 1})
    wait_until(lambda: is_gone(admin, namespace, "slow"), what="the Pod's end")
    assert not is_running(pid_of(pod))


@pytest.mark.usefixtures("node")
def test_readiness_follows_the_probe(admin: Kube, namespace: str) -> None:
    """A Pod is Ready while its probe succeeds, not Ready after the probe's failures, and Ready again."""
    health = {
        "name": "envoy.filters.http.health_check",
        "typed_config": {
            "@type": f"{TYPE}.filters.http.health_check.v3.HealthCheck",
            "pass_through_mode": False,
            "headers": [{"name": ":path", "string_match": {"exact": "/health"}}],
        },
    }
    config = json.loads(bootstrap(direct_response("hello")))
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"].insert(0, health)
    config["admin"] = {"address": {"socket_address": {"address": "0.0.0.0", "port_value": 9901}}}  # noqa: S104
    metadata = {"name": "health", "namespace": namespace}
    data = {"envoy.yaml": json.dumps(config)}
    admin.create(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    probe = {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 1, "failureThreshold": 2}
    start_pod(admin, namespace, "health", pod_spec("health", readinessProbe=probe))
    pod = ready_pod(admin, namespace, "health")
    since = transition_of(pod)

    envoy_admin = f"http://{pod['status']['podIP']}:9901"
    httpx2.post(f"{envoy_admin}/healthcheck/fail", trust_env=False)
    admin.wait_until(POD, Key(namespace, "health"), lambda live: not is_ready(live))
    httpx2.post(f"{envoy_admin}/healthcheck/ok", trust_env=False)
    pod = ready_pod(admin, namespace, "health")
    assert transition_of(pod) > since
    assert container_of(pod)["restartCount"] == 0


def transition_of(pod: Object) -> str:
    """``lastTransitionTime`` of Ready."""
    (since,) = (item["lastTransitionTime"] for item in pod["status"]["conditions"] if item["type"] == "Ready")
    return str(since)


@pytest.mark.usefixtures("node")
def test_a_probe_that_never_succeeds_keeps_the_pod_unready(admin: Kube, namespace: str) -> None:
    """A Pod whose Envoy runs and whose probe fails is Running and not Ready."""
    admin.create(CONFIG_MAP, config_map(namespace, "sick", direct_response("no", status=503)))
    start_pod(admin, namespace, "sick", pod_spec("sick"))
    pod = admin.wait_until(
        POD, Key(namespace, "sick"), lambda pod: pod.get("status", {}).get("phase") == "Running", timeout_s=START_S
    )
    wait_until(lambda: answers(pod), what="Envoy's answer")
    assert not is_ready(admin.get(POD, Key(namespace, "sick")))


def answers(pod: Object) -> bool:
    """Whether Envoy listens already."""
    try:
        return get(pod).status_code == 503
    except httpx2.TransportError:
        return False


@pytest.mark.usefixtures("node")
def test_a_crashed_envoy_is_restarted(admin: Kube, namespace: str) -> None:
    """An Envoy that ends is started again in the same Pod, and the restart is counted with its reason."""
    admin.create(CONFIG_MAP, config_map(namespace, "hello", direct_response("hello")))
    start_pod(admin, namespace, "hello", pod_spec("hello"))
    before = ready_pod(admin, namespace, "hello")
    os.kill(pid_of(before), 9)
    after = admin.wait_until(
        POD,
        Key(namespace, "hello"),
        lambda pod: is_ready(pod) and container_of(pod)["restartCount"] == 1,
        timeout_s=START_S,
    )
    assert container_of(after)["lastState"]["terminated"]["exitCode"] == 128 + 9
    assert pid_of(after) != pid_of(before)
    assert after["status"]["podIP"] == before["status"]["podIP"]


@pytest.mark.usefixtures("node")
def test_a_configuration_that_envoy_refuses_is_told(admin: Kube, namespace: str) -> None:
    """A Pod with a broken configuration is in CrashLoopBackOff with Envoy's own words, and never Ready."""
    metadata = {"name": "broken", "namespace": namespace}
    data = {"envoy.yaml": '{"no_such_field": 1}'}
    admin.create(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    start_pod(admin, namespace, "broken", pod_spec("broken"))
    pod = admin.wait_until(
        POD, Key(namespace, "broken"), lambda pod: "CrashLoopBackOff" in json.dumps(pod["status"]), timeout_s=START_S
    )
    assert "no_such_field" in container_of(pod)["state"]["waiting"]["message"]
    assert not is_ready(pod)


@pytest.mark.usefixtures("node")
def test_an_image_that_is_not_envoy_is_refused(admin: Kube, namespace: str) -> None:
    """A Pod with another image gets a waiting state that says so, and never becomes Ready."""
    admin.create(CONFIG_MAP, config_map(namespace, "hello", direct_response("hello")))
    start_pod(admin, namespace, "other", pod_spec("hello", image="library/nginx:1"))
    pod = admin.wait_until(
        POD, Key(namespace, "other"), lambda pod: "ErrImagePull" in json.dumps(pod["status"]), timeout_s=START_S
    )
    assert "library/nginx:1" in container_of(pod)["state"]["waiting"]["message"]
    assert not is_ready(pod)


@pytest.mark.usefixtures("node")
def test_a_service_name_resolves_to_a_ready_pod(admin: Kube, namespace: str) -> None:
    """An Envoy that knows its upstream by a Service's short name reaches that Service's Pod while it is ready."""
    admin.create(CONFIG_MAP, config_map(namespace, "back", direct_response("from the back")))
    ports = [{"port": PORT, "targetPort": PORT}]
    metadata = {"name": "back", "namespace": namespace}
    spec = {"selector": {"app": "back"}, "ports": ports}
    admin.create(SERVICE, {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    address = {"socket_address": {"address": f"back.{namespace}.svc", "port_value": PORT}}
    upstream = {
        "name": "back",
        "type": "STRICT_DNS",
        "dns_refresh_rate": "0.5s",
        "connect_timeout": "0.5s",
        "load_assignment": {
            "cluster_name": "back",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "back"}}
    admin.create(CONFIG_MAP, config_map(namespace, "front", route, clusters=(upstream,)))
    tcp = {"tcpSocket": {"port": PORT}}
    start_pod(admin, namespace, "front", pod_spec("front", readinessProbe=tcp))
    front = ready_pod(admin, namespace, "front")
    assert get(front).status_code == 503

    start_pod(admin, namespace, "back", pod_spec("back"), labels={"app": "back"})
    ready_pod(admin, namespace, "back")
    wait_until(lambda: get(front).status_code == 200, what="the upstream's answer")
    assert get(front).text == "from the back"
    admin.delete(POD, Key(namespace, "back"))
    wait_until(lambda: get(front).status_code == 503, what="the upstream's end")


@pytest.mark.usefixtures("node")
def test_environment_and_arguments_know_the_pod(admin: Kube, namespace: str) -> None:
    """``fieldRef`` variables have the Pod's values and are expanded in its arguments."""
    route = direct_response("")
    route["direct_response"]["body"] = {"environment_variable": "WHERE"}
    admin.create(CONFIG_MAP, config_map(namespace, "env", route))
    fields = {"NAME": "metadata.name", "NAMESPACE": "metadata.namespace", "ADDRESS": "status.podIP"}
    env = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    env.append({"name": "WHERE", "value": "$(NAMESPACE)/$(NAME)@$(ADDRESS)"})
    admin_address = '{"address":{"socket_address":{"address":"$(ADDRESS)","port_value":9901}}}'
    args = ["-c", "/etc/envoy/envoy.yaml", "--concurrency", "1", "--config-yaml", f'{{"admin":{admin_address}}}']
    start_pod(admin, namespace, "env", pod_spec("env", env=env, args=args))
    pod = ready_pod(admin, namespace, "env")
    ip = pod["status"]["podIP"]
    assert get(pod).text == f"{namespace}/env@{ip}"
    assert httpx2.get(f"http://{ip}:9901/ready", trust_env=False).text.strip() == "LIVE"


@pytest.mark.usefixtures("node")
def test_the_container_can_not_write_to_the_machine(admin: Kube, namespace: str) -> None:
    """A container's files are its own: the host's programs are read-only to it, and it does not run as root."""
    admin.create(CONFIG_MAP, config_map(namespace, "hello", direct_response("hello")))
    start_pod(admin, namespace, "hello", pod_spec("hello"))
    pid = pid_of(ready_pod(admin, namespace, "hello"))
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert set(status["Uid"].split()) == {"65532"}
    writable = [
        line.split()[4]
        for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        if "rw" in line.split()[5].split(",") and line.split()[4].startswith(("/usr", "/etc/envoy", "/bin", "/lib"))
    ]
    assert writable == []


# A node of its own, next to the session's: the scheduler is told by name.


@pytest.fixture
def own_name(admin: Kube) -> Iterator[str]:
    """A node name that no other test uses."""
    name = f"standin-{uuid.uuid4().hex[:6]}"
    yield name
    try:
        admin.delete(NODE, Key("", name))
    except KubeError as error:
        if error.reason != "NotFound":
            raise


def test_killed_node_leaves_no_envoy_and_the_next_one_cleans_up(
    admin: Kube, control_plane: Cluster, namespace: str, node: StandInNode, own_name: str
) -> None:
    """After kill -9 of a node its Envoys are dead, and the next node removes its network namespaces."""
    admin.create(CONFIG_MAP, config_map(namespace, "hello", direct_response("hello")))
    with StandInNode(control_plane.kubeconfig, own_name) as doomed:
        start_pod(admin, namespace, "hello", pod_spec("hello") | {"nodeName": own_name})
        pod = ready_pod(admin, namespace, "hello")
        left = {entry for entry in network_namespaces() if entry[1] == network_namespace_of(pod)}
        os.kill(doomed.pid, 9)
        wait_until(lambda: not is_running(pid_of(pod)), what="the Envoy's end")
    assert node.runs_envoy, "the session's node lives on"
    with StandInNode(control_plane.kubeconfig, own_name):
        again = admin.wait_until(
            POD, Key(namespace, "hello"), lambda live: is_ready(live) and pid_of(live) != pid_of(pod), timeout_s=START_S
        )
        assert get(again).text == "hello"
    assert left
    assert not left & network_namespaces()
    assert admin.find(NODE, Key("", own_name)) is None


def network_namespace_of(pod: Object) -> int:
    """The inode of the network namespace that the Pod's process is in."""
    return Path(f"/proc/{pid_of(pod)}/ns/net").stat().st_ino


def network_namespaces() -> set[tuple[str, int]]:
    """Name and inode of all named network namespaces."""
    found = set()
    for file in Path("/run/netns").iterdir():
        with suppress(FileNotFoundError):  # another run's Pods come and go meanwhile
            found.add((file.name, file.stat().st_ino))
    return found


def test_without_namespaces_envoy_validates(
    admin: Kube, control_plane: Cluster, namespace: str, node: StandInNode, own_name: str
) -> None:
    """A node that can't run Pods makes them Ready only after Envoy has accepted their configuration, and says so."""
    assert node.runs_envoy
    admin.create(CONFIG_MAP, config_map(namespace, "good", direct_response("hello")))
    metadata = {"name": "bad", "namespace": namespace}
    data = {"envoy.yaml": '{"no_such_field": 1}'}
    admin.create(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    with StandInNode(control_plane.kubeconfig, own_name, validate_only=True) as validating:
        assert not validating.runs_envoy
        assert admin.get(NODE, Key("", own_name))["metadata"]["labels"]["standin"] == "validate-only"
        for name in ("good", "bad"):
            start_pod(admin, namespace, name, pod_spec(name) | {"nodeName": own_name})
        ready_pod(admin, namespace, "good")
        bad = admin.wait_until(
            POD, Key(namespace, "bad"), lambda pod: "CrashLoopBackOff" in json.dumps(pod["status"]), timeout_s=START_S
        )
        assert "no_such_field" in json.dumps(container_of(bad)["state"])
        assert not is_ready(bad)


def test_a_node_without_a_cluster_says_so(tmp_path: Path) -> None:
    """A node whose kubeconfig is missing or leads nowhere ends at once, with one sentence in its log."""
    missing = tmp_path / "missing"
    nowhere = tmp_path / "nowhere"
    cluster = {"name": "a", "cluster": {"server": "https://127.0.0.1:1"}}
    context = {"name": "a", "context": {"cluster": "a", "user": "a"}}
    users = [{"name": "a", "user": {}}]
    config = {"clusters": [cluster], "contexts": [context], "users": users, "current-context": "a"}
    nowhere.write_text(json.dumps(config))
    for kubeconfig, sentence in ((missing, "not found"), (nowhere, "connection attempts failed")):
        log_file = tmp_path / f"{kubeconfig.name}.log"
        with pytest.raises(RuntimeError, match="ended before it was ready"):
            StandInNode(kubeconfig, log_file=log_file).start()
        last = log_file.read_text().splitlines()[-1]
        assert last.startswith("stand-in node standin-0: ")
        assert sentence in last


@pytest.mark.usefixtures("node")
def test_a_pod_with_an_impossible_mount_hurts_only_itself(admin: Kube, namespace: str) -> None:
    """A container that can't be set up is never Ready and says why; its neighbour starts as always."""
    admin.create(CONFIG_MAP, config_map(namespace, "hello", direct_response("hello")))
    start_pod(
        admin, namespace, "bad", pod_spec("hello", volumeMounts=[{"name": "config", "mountPath": "/usr/nowhere"}])
    )
    start_pod(admin, namespace, "good", pod_spec("hello"))
    ready_pod(admin, namespace, "good")
    bad = admin.wait_until(
        POD, Key(namespace, "bad"), lambda pod: "CrashLoopBackOff" in json.dumps(pod["status"]), timeout_s=START_S
    )
    assert "/usr/nowhere" in container_of(bad)["state"]["waiting"]["message"]
    assert not is_ready(bad)


def test_a_node_ends_with_its_parent(admin: Kube, control_plane: Cluster, own_name: str, node: StandInNode) -> None:
    """When the process that started a node is killed, the node ends in its own order: its Node object is removed."""
    assert node.runs_envoy
    program = (
        "import sys, pathlib; from tests.e2e.node import StandInNode; "
        "node = StandInNode(pathlib.Path(sys.argv[1]), sys.argv[2]); node.start(); "
        "print(node.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(control_plane.kubeconfig), own_name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=REPOSITORY
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert admin.find(NODE, Key("", own_name)) is not None
        parent.kill()
    wait_until(lambda: not is_running(pid), what="the node's end")
    assert admin.find(NODE, Key("", own_name)) is None
