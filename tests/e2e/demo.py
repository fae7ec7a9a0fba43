"""The whole promise, played once: ``make demo``, or ``python -m tests.e2e.demo``.

On a control plane that it starts and stops, or on the cluster that ``E2E_KUBECONFIG`` names. Every line tells what was
really seen: conditions as the API server gave them, answers that Envoy gave, writes that the audit log counted. The
exit code is 0 only if every act ended as announced.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import httpx2
import yaml

from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    EVENT,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.desired import child_key, selector_labels
from operator_app.ssa.fields import dotted, owners_of
from tests.e2e.kube import POD, KubeError, wait_until
from tests.e2e.node import Node, network
from tests.e2e.node.envoy import configuration_error
from tests.e2e.proxies import holds, record_key
from tests.e2e.stage import EXPECTED_ERRORS, Stage, StageError, borrowed_stage, local_stage, sentence
from tests.paths import MANIFESTS

SAMPLE: Final = MANIFESTS / "samples" / "checkout.yaml"
PROXY: Final = Key("team-a", "checkout")
CHILD: Final = child_key(PROXY)
APPLICATION: Final = Key("team-a", "app")

CONVERGE_TIMEOUT_S: Final = 180.0
ANSWER_TIMEOUT_S: Final = 30.0
REPAIR_TIMEOUT_S: Final = 30.0
GONE_TIMEOUT_S: Final = 120.0
QUIET_REPORT_INTERVAL_S: Final = 10.0

TARGET_PORT: Final = ("f:spec", "f:ports", 'k:{"port":80,"protocol":"TCP"}', "f:targetPort")
"""The field that is broken, in the spelling of ``managedFields``."""


class Story:
    """Prints what happens, each line with the seconds since the start."""

    def __init__(self) -> None:
        self._started_mono = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_mono

    def act(self, title: str) -> None:
        """Begin the next part."""
        print(f"\n== {title}", flush=True)

    def say(self, line: str) -> None:
        """One thing that happened just now."""
        print(f"{self.elapsed_s:7.1f} s  {line}", flush=True)

    def show(self, title: str, content: Object) -> None:
        """A piece of YAML under a title."""
        text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=160)
        print("\n".join([f"           {title}", *(f"             {line}" for line in text.splitlines())]), flush=True)


def main() -> int:
    """Play it; the exit code is 0 if all went as announced, 1 if not, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.demo", description=__doc__)
    parser.add_argument(
        "--quiet-seconds", type=_seconds, default=30.0, metavar="S", help="how long nothing may be written (default 30)"
    )
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    story = Story()
    try:
        with _logs() as logs, _stage(logs, story) as stage:
            _play(stage, story, quiet_s=arguments.quiet_seconds)
            story.act("The end: everything that was started is stopped")
    except KeyboardInterrupt:
        print("\ndemo: interrupted; everything that was started is stopped", file=sys.stderr)
        return 130
    except EXPECTED_ERRORS as error:
        print(f"\ndemo: {sentence(error)}", file=sys.stderr)
        return 1
    story.say(f"done: the demo took {story.elapsed_s:.0f} s")
    return 0


def _play(stage: Stage, story: Story, *, quiet_s: float) -> None:
    proxy = _converge(stage, story)
    _show(stage, story, proxy)
    _ask(stage, story)
    _break(stage, story)
    _be_quiet(stage, story, quiet_s)
    _part(stage, story, proxy)


def _converge(stage: Stage, story: Story) -> Object:
    story.act(f"One EnvoyProxy is declared: {SAMPLE.relative_to(MANIFESTS.parent)}")
    manifests = [each for each in yaml.safe_load_all(SAMPLE.read_text(encoding="utf-8")) if each]
    writes = stage.writes_from_now()
    begun_s = story.elapsed_s
    stage.make(manifests)
    story.say(f"applied: {', '.join(each['kind'] + ' ' + each['metadata']['name'] for each in manifests)}")
    told: dict[str, str] = {}
    # Nothing becomes ready without Pods; all that the operator itself can do is done then.
    goal = "Ready" if stage.runs_pods else "Reconciled"

    def is_ready() -> Object | None:
        live = stage.admin.get(ENVOY_PROXY, PROXY)
        now = dict(_conditions(live))
        for name in (*now, *(told.keys() - now.keys())):
            if told.get(name) != now.get(name):
                story.say(f"{name:<11}  {now.get(name, 'is no longer a condition')}")
        told.clear()
        told.update(now)
        return live if holds(goal)(live) else None

    proxy = wait_until(is_ready, CONVERGE_TIMEOUT_S, f"{goal}=True of EnvoyProxy {PROXY}")
    story.say(f"converged in {story.elapsed_s - begun_s:.1f} s with {len(writes())} write requests by the operator")
    return proxy


def _conditions(proxy: Object) -> Iterator[tuple[str, str]]:
    for each in (proxy.get("status") or {}).get("conditions") or ():
        yield each["type"], f"{each['status']:<5}  {each['reason']}: {each['message']}"


def _show(stage: Stage, story: Story, proxy: Object) -> None:
    story.act("What is there now")
    spec, status = proxy["spec"], proxy["status"]
    listeners = [f"{each['name']} {each['port']}, {len(each['routes'])} routes" for each in spec["listeners"]]
    endpoints = {
        each["name"]: ", ".join(f"{to['host']}:{to['port']}" for to in each["endpoints"]) for each in spec["backends"]
    }
    conditions = [
        {name: each[name] for name in ("type", "status", "reason", "observedGeneration", "lastTransitionTime")}
        for each in status["conditions"]
    ]
    summary = {"replicas": spec["replicas"], "listeners": listeners, "backends": endpoints}
    story.show(f"EnvoyProxy {PROXY}", {"spec": summary, "status": status | {"conditions": conditions}})
    children = {
        f"{kind} {CHILD.name}": {name: live["metadata"][name] for name in ("uid", "resourceVersion")}
        for kind in CHILD_KINDS
        if (live := stage.admin.get(kind, CHILD))
    }
    children[f"{SERVICE} {CHILD.name}"]["clusterIP"] = stage.admin.get(SERVICE, CHILD)["spec"]["clusterIP"]
    pods = {
        f"Pod {each['metadata']['name']}": {
            "podIP": each["status"]["podIP"],
            "node": each["spec"]["nodeName"],
            "image": each["status"]["containerStatuses"][0]["image"],
        }
        for each in _pods(stage)
    }
    story.show(f"its children, in namespace {CHILD.namespace}", children | pods)
    record = stage.admin.get(PROXY_REGISTRATION, record_key(proxy))
    story.show(f"its record, ProxyRegistration {record_key(proxy)}", record["spec"])


def _pods(stage: Stage) -> list[Object]:
    """The proxy's Pods that are ready and stay."""
    selector = ",".join(f"{name}={value}" for name, value in selector_labels(PROXY.name).items())
    return [
        each
        for each in stage.admin.list(POD, CHILD.namespace, label_selector=selector)
        if "deletionTimestamp" not in each["metadata"]
        and any(c["type"] == "Ready" and c["status"] == "True" for c in each["status"].get("conditions", ()))
    ]


def _ask(stage: Stage, story: Story) -> None:
    story.act("Real HTTP, through the proxy")
    if not stage.runs_pods:
        _validate(stage, story)
        return
    application = stage.admin.wait_until(DEPLOYMENT, APPLICATION, _is_available, CONVERGE_TIMEOUT_S)
    story.say(f"the application behind it is available, replicas: {application['status']['availableReplicas']}")
    service = stage.admin.get(SERVICE, CHILD)["spec"]
    port = service["ports"][0]
    if stage.node is not None:
        story.say(f"Service {CHILD} has the cluster IP {service['clusterIP']}, which the node's network knows")
        _ask_service(stage.node, service["clusterIP"], port["port"], story)
    else:
        pod = _pods(stage)[0]
        numbers = {each.get("name"): each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
        name = f"{pod['metadata']['name']}:{numbers[port['targetPort']]}"
        _ask_through_api_server(stage, f"/api/v1/namespaces/{CHILD.namespace}/pods/{name}/proxy", story)


def _validate(stage: Stage, story: Story) -> None:
    """What can be seen of a proxy where none runs: whether Envoy would take its configuration."""
    (config,) = stage.admin.get(CONFIG_MAP, CHILD)["data"].values()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(config)
        file.flush()
        if error := configuration_error(Path(file.name)):
            raise StageError(f"Envoy refuses the configuration of {CHILD}: {error}")
    story.say(
        "not asked: no Pod runs on this machine; Envoy has read the configuration and finds nothing wrong with it"
    )


def _is_available(deployment: Object) -> bool:
    return bool((deployment.get("status") or {}).get("availableReplicas"))


def _ask_service(node: Node, address: str, port: int, story: Story) -> None:
    """Ask at the Service's cluster IP, a new connection each time, so that any of the Pods may answer."""
    for path, host, expected in (
        ("/", "checkout.example.com", "hello from app"),
        ("/assets/logo.svg", "checkout.example.com", "hello from assets"),
        ("/", "assets.example.com", "hello from assets"),
    ):

        def get(path: str = path, host: str = host) -> tuple[int, str]:
            with node.inside():
                return network.get(address, port, path, host=host)

        _expect(story, f"GET http://{address}:{port}{path} with Host: {host}", get, expected)


def _ask_through_api_server(stage: Stage, base: str, story: Story) -> None:
    """Ask one of its Pods by the API server's Pod proxy, which carries paths but not host names."""
    for path, expected in (("/", "hello from app"), ("/assets/logo.svg", "hello from assets")):

        def get(path: str = path) -> tuple[int, str]:
            try:
                answer = stage.admin.request("GET", base + path)
            except KubeError as error:
                return error.code, str(error)
            return answer.status_code, answer.text

        _expect(story, f"GET {base}{path} at the API server", get, expected)


def _expect(story: Story, request: str, get: Callable[[], tuple[int, str]], expected: str) -> None:
    """Ask until the answer is the application's.

    Envoy learns of a backend that has just started with some delay, and kube-proxy of a Pod that has just become ready.
    """
    story.say(request)
    begun_s = story.elapsed_s
    refusals: list[str] = []

    def is_answered() -> str | None:
        try:
            code, text = get()
        except OSError as error:
            refusals.append(sentence(error))
            return None
        if code == httpx2.codes.OK and text.strip() == expected:
            return text.strip()
        refusals.append(str(code))
        return None

    text = wait_until(is_answered, ANSWER_TIMEOUT_S, f"the answer {expected!r} to {request}")
    story.say(f"  200 {text!r}" + (f", before that {refusals[-1]}" if refusals else ""))
    if refusals:
        story.say(
            f"  (Envoy looks up names every few seconds, and kube-proxy hears of ready Pods a moment later; "
            f"here it took {story.elapsed_s - begun_s:.1f} s)"
        )


def _break(stage: Stage, story: Story) -> None:
    story.act("Somebody else breaks the Service")
    before = stage.admin.get(SERVICE, CHILD)
    right = before["spec"]["ports"][0]["targetPort"]
    lines = len(stage.operator.log())
    writes = stage.writes_from_now()
    wrong = {"spec": {"ports": [{"port": 80, "protocol": "TCP", "targetPort": 1}]}}
    broken = stage.admin.patch(SERVICE, CHILD, wrong, patch_type="strategic-merge", field_manager="intruder")
    begun_s = story.elapsed_s
    story.say(f"the manager 'intruder' sets {dotted(TARGET_PORT)} from {right} to 1")
    story.say(f"managedFields says whose the field is now: {', '.join(owners_of(TARGET_PORT, broken))}")

    def is_right(service: Object) -> bool:
        return bool(service["spec"]["ports"][0]["targetPort"] == right)

    repaired = stage.admin.wait_until(SERVICE, CHILD, is_right, REPAIR_TIMEOUT_S)
    story.say(f"repaired after {story.elapsed_s - begun_s:.2f} s: {dotted(TARGET_PORT)} is {right} again")

    def repair_in_log() -> Object | None:
        news = stage.operator.log()[lines:]
        return next((each for each in news if each.get("event") == "child" and each["kind"] == SERVICE.kind), None)

    logged = wait_until(repair_in_log, REPAIR_TIMEOUT_S, "the repair in the operator's log")
    story.show(
        "the operator's log", {name: value for name, value in logged.items() if value and name not in _LOG_FRAME}
    )
    event = wait_until(lambda: _drift_event(stage), REPAIR_TIMEOUT_S, "the Event that tells of the repair")
    story.say(f"an Event on the EnvoyProxy tells it to the tenant: {event['reason']}: {event['note']}")
    # Everybody can read an object a moment before its writer has the response and counts the write.
    wait_until(lambda: any("create event" in each.lower() for each in writes()), REPAIR_TIMEOUT_S, "its write counted")
    if owners_of(TARGET_PORT, repaired):
        raise StageError(f"{dotted(TARGET_PORT)} is still owned by {', '.join(owners_of(TARGET_PORT, repaired))}")
    if repaired["metadata"]["uid"] != before["metadata"]["uid"]:
        raise StageError("the Service was replaced instead of repaired")
    story.say("the field is the operator's alone again, and the Service is the same object: its UID has not changed")


def _drift_event(stage: Stage) -> Object | None:
    events = stage.admin.list(EVENT, PROXY.namespace)
    return next((each for each in events if each["reason"] == "DriftRepaired"), None)


_LOG_FRAME: Final = frozenset({"event", "level", "logger", "timestamp"})


def _be_quiet(stage: Stage, story: Story, quiet_s: float) -> None:
    source = "the API server's audit log" if stage.audit else "the operator's own metrics"
    story.act(f"{quiet_s:g} quiet seconds: nothing is wrong, so nothing may be written")
    writes = stage.writes_from_now()
    end_mono = time.monotonic() + quiet_s
    while (left_s := end_mono - time.monotonic()) > 0:
        time.sleep(min(left_s, QUIET_REPORT_INTERVAL_S))
        story.say(f"write requests by the operator: {len(writes())}, says {source}")
    if sent := writes():
        raise StageError(f"the operator wrote although nothing was wrong: {'; '.join(sent)}")


def _part(stage: Stage, story: Story, proxy: Object) -> None:
    story.act("The EnvoyProxy is deleted")
    uid = proxy["metadata"]["uid"]
    watched: list[tuple[Kind, Key]] = [
        (PROXY_REGISTRATION, record_key(proxy)),
        (ENVOY_PROXY, PROXY),
        *((kind, CHILD) for kind in CHILD_KINDS),
    ]
    stage.admin.delete(ENVOY_PROXY, PROXY, uid=uid)
    if stage.is_borrowed:
        story.say("the children are the garbage collector's: it looks for new kinds of owners every 30 s")

    def is_gone() -> bool:
        # What goes last is looked for first, so that the order of the lines is the order of the events.
        gone = [(kind, key) for kind, key in reversed(watched) if stage.admin.find(kind, key) is None]
        for kind, key in reversed(gone):
            watched.remove((kind, key))
            story.say(f"gone: {kind} {key}")
        return not watched

    wait_until(is_gone, GONE_TIMEOUT_S, f"the end of everything that belonged to {PROXY}")


def _stage(logs: Path, story: Story) -> AbstractContextManager[Stage]:
    external = os.environ.get("E2E_KUBECONFIG")
    if not external:
        story.act("A Kubernetes control plane, a node and the operator, on this machine")
        return local_stage(logs, story.say)
    story.act(f"The operator, on the cluster of E2E_KUBECONFIG={external}")
    return borrowed_stage(Path(external), logs, story.say, wants_namespace=PROXY.namespace)


@contextmanager
def _logs() -> Iterator[Path]:
    """A directory for logs, kept only if something went wrong that they may explain."""
    directory = Path(tempfile.mkdtemp(prefix="operator-app-demo-"))
    is_kept = False
    try:
        yield directory
    except EXPECTED_ERRORS:
        is_kept = any(file.stat().st_size for file in directory.iterdir())
        raise
    finally:
        if is_kept:
            print(f"\ndemo: what the operator and the node said is kept in {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError("a number of seconds above 0, at most 3600, is needed")
    return seconds


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """End like Ctrl-C, once: cleaning up is not to be interrupted again."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
