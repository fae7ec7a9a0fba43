"""Files arrive in Pods, which say so: who is asked, who is touched, what is told. Envoys are modelled."""

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from operator_app.api.kinds import CONFIG_MAP, POD, Key, Kind, Object
from operator_app.api.models import parse_spec
from operator_app.apply import Result
from operator_app.dataplane.answers import Answer, SecretUse
from operator_app.dataplane.asking import UnreachableError
from operator_app.dataplane.memory import SECRET_WAITS_S, STEP_TIMEOUT_S, UNREACHABLE_WAITS_S
from operator_app.dataplane.plane import MAX_ASKED_IN_TURN, DataPlane
from operator_app.desired import children
from operator_app.envoy.files import CLUSTERS_FILE, Files, rendered, version_of
from operator_app.results import NOT_ASKED, Outcome, Problem, Programming
from tests.unit.dataplane.pod_objects import pod
from tests.unit.scripted_api import Answer as ApiAnswer
from tests.unit.scripted_api import Line, ScriptedApi, components, refused, refused_by_policy

pytestmark = pytest.mark.anyio

KEY = Key("team-a", "web")
_VERSIONS = itertools.count(100)


def proxy(*backends: str, generation: int = 1) -> Object:
    """A proxy with a route to each of these backends."""
    routes = [{"backend": name, "match": {"pathPrefix": f"/{name}"}} for name in backends]
    spec = {
        "listeners": [{"name": "http", "port": 80, "routes": routes}],
        "backends": [{"name": name, "endpoints": [{"host": "10.0.0.7", "port": 80}]} for name in backends],
    }
    metadata = {"namespace": KEY.namespace, "name": KEY.name, "uid": "proxy-uid", "generation": generation}
    return {"apiVersion": "edge.operator-app.dev/v1alpha1", "kind": "EnvoyProxy", "metadata": metadata, "spec": spec}


def files_of(obj: Object) -> Files:
    """What a proxy declares."""
    return rendered(parse_spec(obj))


@dataclass
class Envoy:
    """One Pod's Envoy: what it has loaded, and what it does with the next files."""

    versions: dict[str, str]
    refuses: str = ""
    refusals: dict[str, int] = field(default_factory=dict)
    is_silent: bool = False
    warming: int = 0
    asked: int = 0
    secrets: dict[str, SecretUse] = field(default_factory=dict)

    def read(self, files: Files) -> None:
        """Load the files, but for the one that it refuses."""
        for stat, name in files.names.items():
            if name == self.refuses and self.versions.get(stat) != files.versions[stat]:
                self.refusals[stat] = self.refusals.get(stat, 0) + 1
            else:
                self.versions[stat] = files.versions[stat]


class World:
    """A proxy with Pods, its ConfigMap, and a clock."""

    def __init__(self, api: ScriptedApi, is_asking: bool) -> None:  # noqa: FBT001 - of one fixture
        self.api = api
        self.now_mono = 100.0
        self.envoys: dict[str, Envoy] = {}
        self.config_map: Object | None = None
        self.version = 10
        self.is_asking = is_asking
        self.plane: DataPlane
        self.writes: list[Kind] = []

    async def ask(self, ip: str) -> Answer:
        """One question."""
        envoy = self.envoys[ip]
        envoy.asked += 1
        if envoy.is_silent:
            raise UnreachableError("no route to host")
        return Answer(dict(envoy.versions), dict(envoy.refusals), envoy.warming, dict(envoy.secrets))

    def store_files(self, obj: Object, files: Files) -> Outcome:
        """Give the ConfigMap these files, owned by the operator; returns what became of it."""
        child = children(obj, parse_spec(obj), default_image="x", files=files)[CONFIG_MAP]
        if self.config_map is not None and child["data"] == self.config_map["data"]:
            return Outcome.UNCHANGED
        self.version += 1
        owned: Object = {"f:data": {f"f:{name}": {} for name in child["data"]}}
        entry = {"manager": "operator-app", "operation": "Apply", "apiVersion": "v1", "fieldsV1": owned}
        child["metadata"] |= {"resourceVersion": str(self.version), "managedFields": [entry]}
        self.config_map = deepcopy(child)
        return Outcome.CONFIGURED

    async def reconcile(self, obj: Object, problem: Problem | None = None, *, is_resync: bool = False) -> Programming:
        """One reconcile as far as files and Pods go."""
        files = files_of(obj)
        target = self.plane.next_step(obj, {CONFIG_MAP: self.config_map})(files)
        outcome = Outcome.SKIPPED if problem else self.store_files(obj, target)
        self.target = target
        result = Result(CONFIG_MAP, KEY, outcome, self.config_map, problem=problem)
        return await self.plane.program(obj, files, target, result, is_resync=is_resync)

    def deliver(self) -> None:
        """Let every kubelet bring the ConfigMap's files to its Pod's Envoy."""
        for envoy in self.envoys.values():
            envoy.read(self.target)

    @property
    def touches(self) -> int:
        """How often a Pod was touched."""
        return len(self.writes)


def touched(name: str, ip: str, revision: str) -> Any:  # noqa: ANN401 - a function of the script
    """The API server's answer to a touch."""

    def answer(body: Object) -> tuple[int, Object]:
        assert body["metadata"]["uid"] == name
        assert set(body) == {"metadata"}
        (value,) = body["metadata"]["annotations"].values()
        return 200, pod(name, ip=ip, revision=revision, configuration=value, resourceVersion=str(next(_VERSIONS)))

    return answer


def touches_of(names: dict[str, str], revision: str) -> list[Line]:
    """One touch of each of these Pods, by name with their addresses, in any order."""

    def answer(body: Object) -> tuple[int, Object]:
        found: tuple[int, Object] = touched(body["metadata"]["uid"], names[body["metadata"]["uid"]], revision)(body)
        return found

    return [("patch Pod/status", answer)] * len(names)


@asynccontextmanager
async def world(
    folder: Path, obj: Object, *, pods: int = 1, touches: int = 0, is_asking: bool = True, **changes: Any
) -> AsyncGenerator[World]:
    """A proxy whose Pods have loaded what ``obj`` declares; ``touches`` are expected after that."""
    files = files_of(obj)
    names = {f"web-{n}": f"10.0.0.{n}" for n in range(1, pods + 1)}
    known = [
        (
            POD,
            pod(
                name,
                ip=ip,
                revision=changes.get("revision", files.revision),
                configuration=changes.get("configuration", ""),
            ),
        )
        for name, ip in names.items()
    ]
    api = ScriptedApi()
    for _ in range(touches // pods):
        api.add(touches_of(names, files.revision))
    async with components(api, folder, *known) as own:
        found = World(api, is_asking)
        found.envoys = {ip: Envoy(dict(files.versions)) for ip in names.values()}
        found.plane = DataPlane(
            own.cluster,
            own.store,
            found.ask if is_asking else None,
            on_write=lambda kind, _outcome: found.writes.append(kind),
            mono=lambda: found.now_mono,
        )
        found.store_files(obj, files)
        yield found


LOADED = ("Loaded", True, None)


def told(found: Programming) -> tuple[str, bool | None, float | None]:
    """Reason, status and when to look again."""
    return found.reason, found.is_true, found.requeue_after_s


async def test_pods_that_have_loaded_it_are_asked_once_and_never_touched(tmp_path: Path) -> None:
    """After a restart of the operator each Pod is asked; then nobody is, until a resync."""
    async with world(tmp_path, proxy("a"), pods=3) as it:
        for _ in range(3):
            assert told(await it.reconcile(proxy("a"))) == LOADED
        assert [each.asked for each in it.envoys.values()] == [1, 1, 1]
        await it.reconcile(proxy("a"), is_resync=True)
        assert [each.asked for each in it.envoys.values()] == [2, 2, 2]
        assert it.touches == 0


async def test_an_edit_of_a_route_is_one_write_and_one_touch_a_pod(tmp_path: Path) -> None:
    """Pods that lack it are touched at once and looked at again soon, until they have it."""
    edited = proxy("b", "a", generation=2)
    async with world(tmp_path, proxy("a", "b"), pods=2, touches=2) as it:
        await it.reconcile(proxy("a", "b"))
        found = await it.reconcile(edited)
        assert (found.reason, found.is_true) == ("Loading", False)
        assert found.requeue_after_s is not None
        assert found.requeue_after_s < 1
        assert it.touches == 2
        again = await it.reconcile(edited)
        assert (again.reason, it.touches) == ("Loading", 2), "touched once for this content"
        it.deliver()
        assert told(await it.reconcile(edited)) == LOADED
        assert it.version == 12, "one write"


async def test_pods_that_were_touched_are_asked_a_few_at_a_time(tmp_path: Path) -> None:
    """While one of these lacks the files no more are asked, each in turn; once all have them, each is asked once."""
    edited, pods = proxy("b", "a", generation=2), 3 * MAX_ASKED_IN_TURN - 1
    async with world(tmp_path, proxy("a", "b"), pods=pods, touches=pods) as it:

        def asked() -> list[int]:
            return [each.asked for each in it.envoys.values()]

        await it.reconcile(proxy("a", "b"))
        await it.reconcile(edited)
        assert (asked(), it.touches) == ([2] * pods, pods), "a Pod that has the files is not touched"
        for rounds in (1, 2):
            it.now_mono += 1
            assert (await it.reconcile(edited)).reason == "Loading"
            assert sum(asked()) == 2 * pods + rounds * MAX_ASKED_IN_TURN
        assert max(asked()) == 3, "those asked longest ago come first"
        it.deliver()
        before = sum(asked())
        assert told(await it.reconcile(edited)) == LOADED
        assert sum(asked()) == before + pods


async def test_another_backend_is_made_before_the_old_one_is_broken(tmp_path: Path) -> None:
    """Clusters, routes, end of the old cluster: each after every Pod has the one before, in three writes."""
    edited = proxy("b", generation=2)
    async with world(tmp_path, proxy("a"), touches=3) as it:
        await it.reconcile(proxy("a"))
        reasons = []
        for _ in range(12):
            found = await it.reconcile(edited)
            reasons.append(found.reason)
            if found.reason == "Loaded":
                break
            it.deliver()
        assert reasons[-1] == "Loaded"
        assert (it.version, it.touches) == (14, 3)
        assert it.config_map is not None
        assert it.config_map["data"] == files_of(edited).texts


async def test_what_a_step_of_a_change_writes_is_no_repair(tmp_path: Path) -> None:
    """Each step of an edit declares other contents than those that held; contents that somebody changed do not."""
    edited = proxy("b", generation=2)
    async with world(tmp_path, proxy("a"), touches=3) as it:
        steps, declared = 0, Object()
        for obj in (proxy("a"), *[edited] * 8):
            target = it.plane.next_step(obj, {CONFIG_MAP: it.config_map})(files_of(obj))
            declared = children(obj, parse_spec(obj), default_image="x", files=target)[CONFIG_MAP]
            steps += it.plane.is_next(obj, declared)
            await it.reconcile(obj)
            it.plane.hold(obj, declared)
            assert not it.plane.is_next(obj, declared), "a repair would restore what held already"
            it.deliver()
        assert steps == 3
        assert it.plane.is_next(edited, declared | {"data": {"more": "x"}})


async def test_a_step_that_a_pod_never_takes_is_waited_for_within_a_bound(tmp_path: Path) -> None:
    """A backend that does not resolve keeps the next step for ``STEP_TIMEOUT_S``, and no longer."""
    edited = proxy("a", "b", generation=2)
    async with world(tmp_path, proxy("a"), touches=2) as it:
        await it.reconcile(proxy("a"))
        await it.reconcile(edited)
        it.deliver()
        it.envoys["10.0.0.1"].warming = 1
        for _ in range(2):
            await it.reconcile(edited)
            assert it.target.texts != files_of(edited).texts
        it.now_mono += STEP_TIMEOUT_S
        await it.reconcile(edited)
        assert it.target.texts == files_of(edited).texts


def log_of(it: World) -> ApiAnswer:
    """The log of an Envoy that has refused a file."""
    assert it.touches
    return lambda _: (200, {"line": "[2026-11-30 15:28:49][9][warning][config] config update rejected: no such field"})


async def test_a_log_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    """Without the right to read it the status says where Envoy's words are."""
    edited = proxy("b", "a", generation=2)
    async with world(tmp_path, proxy("a", "b"), touches=1) as it:
        await it.reconcile(proxy("a", "b"))
        await it.reconcile(edited)
        it.envoys["10.0.0.1"].refuses = "rds-http.json"
        it.deliver()
        it.api.add(("get Pod/log", refused(403, "Forbidden")))
        found = await it.reconcile(edited)
        assert found.reason == "ConfigurationRefused"
        assert "Why: kubectl logs -n team-a web-1" in found.message


@pytest.mark.parametrize("file", [CLUSTERS_FILE, "rds-http.json"])
async def test_what_an_envoy_refuses_is_taken_back(file: str, tmp_path: Path) -> None:
    """One Pod of two refuses a file: all that was there before returns, and stays until the declaration changes."""
    edited = proxy("b", "a", generation=2)
    edited["spec"]["backends"][0]["endpoints"][0]["port"] = 81
    before = proxy("a", "b")
    async with world(tmp_path, before, pods=2, touches=2) as it:
        await it.reconcile(before)
        await it.reconcile(edited)
        it.envoys["10.0.0.2"].refuses = file
        it.deliver()
        names = {"web-1": "10.0.0.1", "web-2": "10.0.0.2"}
        it.api.add(("get Pod/log", log_of(it)), touches_of(names, files_of(edited).revision))
        found = await it.reconcile(edited)
        assert told(found) == ("ConfigurationRefused", False, 0.0)
        assert found.needs_user_action
        assert f"Pod web-2 refuses {file}" in found.message
        assert "Why: no such field" in found.message

        await it.reconcile(edited)
        assert it.target.texts == files_of(before).texts
        it.deliver()
        assert told(await it.reconcile(edited)) == ("ConfigurationRefused", False, None)
        version = it.version
        assert told(await it.reconcile(edited)) == ("ConfigurationRefused", False, None)
        assert it.version == version, "nothing more is written"

        it.envoys["10.0.0.2"].refuses = ""
        other = deepcopy(before) | {"metadata": before["metadata"] | {"generation": 3}}
        assert told(await it.reconcile(other)) == LOADED


async def test_a_pod_that_cannot_be_asked_is_told_and_asked_ever_more_rarely(tmp_path: Path) -> None:
    """It is touched like the others, since it may lack the files, and holds up nobody."""
    async with world(tmp_path, proxy("a"), pods=1, touches=1) as it:
        envoy = it.envoys["10.0.0.1"]
        envoy.is_silent = True
        found = await it.reconcile(proxy("a"))
        assert told(found) == ("PodUnreachable", None, UNREACHABLE_WAITS_S[0])
        assert "Pod web-1 can't be asked at 10.0.0.1: no route to host" in found.message
        await it.reconcile(proxy("a"))
        assert (envoy.asked, it.touches) == (1, 1)
        for wait_s in UNREACHABLE_WAITS_S[1:]:
            it.now_mono += it_waits(found)
            found = await it.reconcile(proxy("a"))
            assert found.requeue_after_s == pytest.approx(wait_s)
        envoy.is_silent = False
        it.now_mono += it_waits(found)
        assert told(await it.reconcile(proxy("a"))) == LOADED


def it_waits(found: Programming) -> float:
    """When to look again."""
    assert found.requeue_after_s is not None
    return found.requeue_after_s


async def test_where_nobody_is_asked_each_pod_is_touched_once_for_each_content(tmp_path: Path) -> None:
    """The status says that it is not known; a change that needs steps takes them by time."""
    edited = proxy("a", "b", generation=2)
    async with world(tmp_path, proxy("a"), touches=3, is_asking=False) as it:
        for _ in range(2):
            assert told(await it.reconcile(proxy("a"))) == ("NotAsked", None, None)
        assert it.touches == 1
        found = await it.reconcile(edited)
        assert (found.reason, it.touches) == ("NotAsked", 2)
        assert found.requeue_after_s is not None
        await it.reconcile(edited)
        it.now_mono += STEP_TIMEOUT_S
        assert told(await it.reconcile(edited)) == ("NotAsked", None, None)
        assert (it.version, it.touches) == (13, 3)


async def test_without_a_serving_pod_nothing_waits(tmp_path: Path) -> None:
    """The declared files are stored at once, and it is said that no proxy serves."""
    async with world(tmp_path, proxy("a"), pods=0 + 1) as it:
        it.plane._store.forget(POD, pod())
        edited = proxy("b", generation=2)
        assert told(await it.reconcile(edited)) == ("NoServingPod", False, None)
        assert it.config_map is not None
        assert it.config_map["data"] == files_of(edited).texts


async def test_a_pod_of_an_older_template_keeps_it_from_being_programmed(tmp_path: Path) -> None:
    """It has listeners of its own; when it goes is an event of its Deployment."""
    async with world(tmp_path, proxy("a"), revision="older") as it:
        assert told(await it.reconcile(proxy("a"))) == ("OlderPodServes", False, None)


async def test_nobody_is_touched_for_what_is_not_stored(tmp_path: Path) -> None:
    """While another writer keeps the ConfigMap, or the proxy is paused, Pods stay as they are."""
    async with world(tmp_path, proxy("a")) as it:
        found = await it.reconcile(proxy("a", "b", generation=2), Problem("Paused", "paused", ends_with_event=True))
        assert told(found) == ("ConfigMapNotReady", False, None)
        assert it.touches == 0


async def test_a_pod_that_may_not_be_touched_is_told(tmp_path: Path) -> None:
    """Without the right, files arrive when the kubelet looks by itself; the reason is in the status."""
    edited = proxy("b", "a", generation=2)
    async with world(tmp_path, proxy("a", "b")) as it:
        await it.reconcile(proxy("a", "b"))
        it.api.add(("patch Pod/status", refused_by_policy(422, "no touching")))
        found = await it.reconcile(edited)
        assert found.reason == "Loading"
        assert "no touching" in found.message
        it.deliver()
        assert told(await it.reconcile(edited)) == LOADED


@pytest.mark.parametrize(
    "fault",
    [
        refused(401, "Unauthorized"),
        refused(403, "Forbidden"),
        refused(404, "NotFound"),
        refused(409, "Conflict"),
        refused(422, "Invalid"),
        refused(429, "TooManyRequests"),
        refused(500, "InternalError"),
        refused(503, "ServiceUnavailable"),
    ],
    ids=["401", "403", "404", "409", "422", "429", "500", "503"],
)
@pytest.mark.parametrize("is_asking", [True, False], ids=["asking", "not asking"])
async def test_a_touch_that_fails_is_made_again(fault: ApiAnswer, tmp_path: Path, *, is_asking: bool) -> None:
    """Whatever the API server answers to a touch, the reconcile goes on, and the next one touches once more.

    It comes soon and by itself, where nobody is asked as well.
    """
    edited = proxy("b", "a", generation=2)
    waiting, over = ("Loading", LOADED) if is_asking else (NOT_ASKED, (NOT_ASKED, None, None))
    # A minute after the start, where only time tells that kubelets have brought what was stored before.
    async with world(tmp_path, proxy("a", "b"), touches=0 if is_asking else 1, is_asking=is_asking) as it:
        await it.reconcile(proxy("a", "b"))
        it.now_mono += 60
        already = it.touches
        it.api.add(("patch Pod/status", fault))
        failed = await it.reconcile(edited)
        assert failed.reason == waiting
        assert failed.requeue_after_s is not None
        assert failed.requeue_after_s < 1
        it.api.add(("patch Pod/status", touched("web-1", "10.0.0.1", files_of(edited).revision)))
        assert (await it.reconcile(edited)).reason == waiting
        await it.reconcile(edited)
        assert it.touches == already + 1, "the one that came through, and no other"
        it.deliver()
        assert told(await it.reconcile(edited)) == over


async def test_a_repaired_config_map_is_asked_for_again(tmp_path: Path) -> None:
    """A drift may have reached an Envoy before its repair: each write has every Pod asked."""
    async with world(tmp_path, proxy("a"), touches=1) as it:
        await it.reconcile(proxy("a"))
        assert it.config_map is not None
        it.config_map["data"][CLUSTERS_FILE] = "{}"
        it.config_map["metadata"]["managedFields"][0]["fieldsV1"]["f:data"].pop(f"f:{CLUSTERS_FILE}")
        it.envoys["10.0.0.1"].versions["cluster_manager.cds"] = "sha256:0"
        found = await it.reconcile(proxy("a"))
        assert (found.reason, it.touches) == ("Loading", 1)
        assert version_of(it.config_map["data"][CLUSTERS_FILE]) == files_of(proxy("a")).versions["cluster_manager.cds"]
        it.deliver()
        assert told(await it.reconcile(proxy("a"))) == LOADED


def encrypted() -> Object:
    """A proxy whose listener speaks TLS."""
    obj = proxy("a")
    obj["spec"]["listeners"][0]["tls"] = {"secretName": "shop-tls"}
    return obj


async def test_a_secret_that_can_not_be_used_is_told_by_name(tmp_path: Path) -> None:
    """The Pod is asked ever more rarely and never touched for it; once the Secret is right, that is told."""
    async with world(tmp_path, encrypted()) as it:
        envoy = it.envoys["10.0.0.1"]
        envoy.secrets = {"certificate/shop-tls": SecretUse()}
        found = await it.reconcile(encrypted())
        assert told(found) == ("InvalidCertificateRef", False, SECRET_WAITS_S[0])
        assert "Pod web-1 finds no tls.crt and tls.key that fit in Secret shop-tls" in found.message
        assert "serves nobody" in found.message
        await it.reconcile(encrypted())
        assert envoy.asked == 1
        for _ in range(10):
            it.now_mono += it_waits(found)
            found = await it.reconcile(encrypted())
        assert (found.requeue_after_s, it.touches) == (SECRET_WAITS_S[-1], 0)
        envoy.secrets = {"certificate/shop-tls": SecretUse(is_known=True, reads=1)}
        it.now_mono += it_waits(found)
        assert told(await it.reconcile(encrypted())) == LOADED


async def test_a_renewal_that_can_not_be_used_is_told_until_the_next_one(tmp_path: Path) -> None:
    """The certificate before goes on serving, which is said, too."""
    async with world(tmp_path, encrypted()) as it:
        envoy = it.envoys["10.0.0.1"]
        envoy.secrets = {"certificate/shop-tls": SecretUse(is_known=True, reads=1)}
        assert told(await it.reconcile(encrypted())) == LOADED
        envoy.secrets = {"certificate/shop-tls": SecretUse(is_known=True, reads=2, refusals=1)}
        found = await it.reconcile(encrypted(), is_resync=True)
        assert told(found) == ("InvalidCertificateRef", False, SECRET_WAITS_S[0])
        assert "goes on with what was there before" in found.message
        it.now_mono += it_waits(found)
        assert (await it.reconcile(encrypted())).reason == "InvalidCertificateRef"
        envoy.secrets = {"certificate/shop-tls": SecretUse(is_known=True, reads=4, refusals=2)}
        it.now_mono += 60
        assert told(await it.reconcile(encrypted())) == LOADED


async def test_a_pod_with_clusters_of_its_own_is_neither_asked_nor_touched(tmp_path: Path) -> None:
    """It lacks the Secret that the new clusters need, so it keeps those before until it is replaced."""
    edited = proxy("a", generation=2)
    edited["spec"]["backends"][0]["tls"] = {"serverName": "a.internal", "caSecretName": "internal-ca"}
    async with world(tmp_path, proxy("a")) as it:
        assert told(await it.reconcile(proxy("a"))) == LOADED
        assert told(await it.reconcile(edited)) == ("OlderPodServes", False, None)
        assert it.target == files_of(edited)
        assert (it.envoys["10.0.0.1"].asked, it.touches) == (1, 0)
