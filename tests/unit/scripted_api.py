"""An API server that follows a script, and the operator's rooms connected to it.

The script is the specification of a test: the requests that are expected, in order, each with its answer. A request
that is not in the script fails the test, and so does a line of the script that is never asked for.
"""

import itertools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio.lowlevel
import httpx2

from operator_app.api.kinds import (
    ALL_CHILD_KINDS,
    ENVOY_PROXY,
    HOSTNAME_CLAIM,
    POD,
    PROXY_REGISTRATION,
    Key,
    Kind,
    Object,
)
from operator_app.apply import Applier
from operator_app.finalizer import Finalizer
from operator_app.kube.client import REQUEST_EXTENSION, Cluster, Request
from operator_app.kube.store import Store
from operator_app.pods import owner_uid
from operator_app.results import Outcome
from operator_app.ssa.contention import ContentionTimes, ContentionTracker
from operator_app.status import StatusWriter
from tests.unit.kube.scripted_client import cluster_over
from tests.unit.ssa.field_sets import configuration, entry, field_set, stored

PROXY_UID = "proxy-uid"
SETTLE_S = 2.0
_VERSIONS = itertools.count(1000)

Answer = Callable[[Object], tuple[int, Object]]
"""From the body of a request to the status and body of its answer."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request as it arrived: its line of the script, its body, whether it forces."""

    line: str
    body: Object
    is_forced: bool


Line = tuple[str, Answer]
"""One request that is expected, and its answer."""

Step = Line | list[Line]
"""A line, or lines that come in any order."""


class ScriptedApi(httpx2.AsyncBaseTransport):
    """Answers a script of lines such as ``apply Service``, ``get ConfigMap`` or ``apply EnvoyProxy/status``."""

    def __init__(self, *script: Step) -> None:
        self._script: list[list[Line]] = []
        self.add(*script)
        self.sent: list[Sent] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The answer of the script's next line, or of one of its next ones, if this is its request.

        It yields to other tasks before and after, as a connection does, so that what is concurrent runs concurrently.
        """
        await anyio.lowlevel.checkpoint()
        asked: Request = request.extensions[REQUEST_EXTENSION]
        line = f"{asked.verb} {asked.kind}" + (f"/{asked.subresource}" if asked.subresource else "")
        step = self._script[0] if self._script else []
        expected = [each for each, _ in step]
        assert line in expected, f"{line} {asked.key} came where the script has: {' | '.join(expected) or 'nothing'}"
        _, answer = step.pop(expected.index(line))
        if not step:
            self._script.pop(0)
        body = json.loads(request.content) if request.content else {}
        self.sent.append(Sent(line, body, request.url.params.get("force") == "true"))
        status, content = answer(deepcopy(body))
        await anyio.lowlevel.checkpoint()
        return httpx2.Response(status, json=content)

    def add(self, *script: Step) -> None:
        """Expect more."""
        self._script += [step if isinstance(step, list) else [step] for step in script]

    def body(self, line: str) -> Object:
        """The body of the only request of this line."""
        (found,) = (each.body for each in self.sent if each.line == line)
        return found

    @property
    def left(self) -> list[str]:
        """Lines that were not asked for."""
        return [line for step in self._script for line, _ in step]


# --- answers -------------------------------------------------------------------------------------------------------


def ok(obj: Object) -> Answer:
    """This very object."""
    return lambda _: (200, obj)


def created(**metadata: Any) -> Answer:
    """The applied object on a free name, with what the server adds."""

    def answer(body: Object) -> tuple[int, Object]:
        return 201, stored(body, version=next(_VERSIONS), uid=f"{body['kind']}-uid", **metadata)

    return answer


def repaired(**changes: Any) -> Answer:
    """The applied object again under its own UID; ``changes`` are what the server stores otherwise."""

    def answer(body: Object) -> tuple[int, Object]:
        live = stored(body, version=next(_VERSIONS), uid=body["metadata"]["uid"])
        return 200, live | changes

    return answer


def stored_status(proxy: Object) -> Answer:
    """``proxy`` with the applied status."""

    def answer(body: Object) -> tuple[int, Object]:
        return 200, with_status(proxy, body["status"])

    return answer


def with_finalizer(proxy: Object) -> Answer:
    """``proxy`` with the applied finalizers, and only those of ours that are applied."""

    def answer(body: Object) -> tuple[int, Object]:
        live = deepcopy(proxy)
        live["metadata"]["resourceVersion"] = str(next(_VERSIONS))
        others = [each for each in live["metadata"].get("finalizers", []) if "operator-app" not in each]
        live["metadata"]["finalizers"] = others + body["metadata"].get("finalizers", [])
        live["metadata"]["managedFields"] = [entry(live, field_set(configuration(body)))]
        return 200, live

    return answer


def refused(code: int, reason: str, *fields: str, message: str = "a sentence") -> Answer:
    """A ``Status`` that names fields."""
    causes = [{"reason": "FieldValueInvalid", "field": each, "message": "no"} for each in fields]
    details = {"name": "it", "kind": "things", "causes": causes}
    status = {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}
    return lambda _: (code, status)


def refused_by_policy(code: int, message: str = "a policy says no") -> Answer:
    """A ``Status`` as the API server makes it of a ValidatingAdmissionPolicy's denial."""
    details = {"name": "it", "kind": "things", "causes": [{"message": message}]}
    status = {"kind": "Status", "code": code, "reason": "Invalid", "message": message, "details": details}
    return lambda _: (code, status)


NOT_FOUND = refused(404, "NotFound")
CONFLICT = refused(409, "Conflict")
UNAVAILABLE = refused(503, "ServiceUnavailable")


# --- objects -------------------------------------------------------------------------------------------------------


def proxy_of_team(spec: Object | None = None, **metadata: Any) -> Object:
    """A stored EnvoyProxy, as its author applied it."""
    declared: Object = {
        "listeners": [{"name": "http", "port": 80, "routes": [{"backend": "app"}]}],
        "backends": [{"name": "app", "endpoints": [{"host": "app.team-a.svc", "port": 8080}]}],
    }
    return {
        "apiVersion": ENVOY_PROXY.api_version,
        "kind": ENVOY_PROXY.kind,
        "metadata": {
            "name": "checkout",
            "namespace": "team-a",
            "uid": PROXY_UID,
            "generation": 1,
            "resourceVersion": "10",
        }
        | metadata,
        "spec": declared | (spec or {}),
    }


def with_status(proxy: Object, status: Object) -> Object:
    """``proxy`` after our apply of ``status``."""
    live = deepcopy(proxy | {"status": status})
    live["metadata"]["resourceVersion"] = str(next(_VERSIONS))
    mine = entry(live, {"f:status": field_set(status)}, subresource="status")
    others = [each for each in live["metadata"].get("managedFields", []) if "subresource" not in each]
    live["metadata"]["managedFields"] = [*others, mine]
    return live


# --- rooms ---------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    mono: float = 100.0

    def __call__(self) -> float:
        """Now."""
        return self.mono


@dataclass
class Components:
    """The operator's rooms around one cluster, and what they told."""

    cluster: Cluster
    store: Store
    clock: Clock = field(default_factory=Clock)
    writes: list[tuple[str, Outcome]] = field(default_factory=list)

    def __post_init__(self) -> None:
        tracker = ContentionTracker(ContentionTimes())
        self.applier = Applier(self.cluster, self.store, tracker, on_write=self.on_write, mono=self.clock)
        self.finalizer = Finalizer(self.cluster, self.store, tracker, on_write=self.on_write, mono=self.clock)
        self.statuses = StatusWriter(
            self.cluster, self.store, tracker, on_write=self.on_write, mono=self.clock, settle_s=SETTLE_S
        )

    def on_write(self, kind: Kind, outcome: Outcome) -> None:
        """Keep what was written."""
        self.writes.append((kind.kind, outcome))


def controller_uid(obj: Object) -> str | None:
    """The index of children, as the operator has it."""
    references = obj["metadata"].get("ownerReferences", ())
    return next((each["uid"] for each in references if each.get("controller")), None)


def proxy_of(record: Object) -> Key:
    """The index of records, as the operator has it."""
    reference = record["spec"]["proxy"]
    return Key(reference["namespace"], reference["name"])


@asynccontextmanager
async def components(api: ScriptedApi, folder: Path, *known: tuple[Kind, Object]) -> AsyncGenerator[Components]:
    """Components whose every request goes to ``api``, and whose store knows these objects by their watches.

    When the context ends well, the whole script must have been asked for.
    """
    store = Store(
        {ENVOY_PROXY: lambda _: None, PROXY_REGISTRATION: proxy_of, HOSTNAME_CLAIM: proxy_of}
        | dict.fromkeys(ALL_CHILD_KINDS, controller_uid)
        | {POD: owner_uid}
    )
    for kind, obj in known:
        store.learn(kind, obj)
    async with cluster_over(api, folder) as cluster:
        yield Components(cluster, store)
    assert api.left == [], "the script has requests that did not come"
