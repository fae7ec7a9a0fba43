"""Counts the requests and events that pass a carrier, and says at which of them the plan has a fault. No I/O.

One injector counts from the moment that it is made. Which proxy a record or a claim is about, it learns from their
contents as they pass, because their addresses do not tell.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from operator_app.api.kinds import HOSTNAME_CLAIM, PROXY_REGISTRATION
from tests.e2e.faults.plan import EVENT_VERB, SECOND, Asked, Fault, FaultKind, Plan, Point

_REGISTRY_KINDS = frozenset({PROXY_REGISTRATION.kind, HOSTNAME_CLAIM.kind})
"""Kinds whose objects are not in a tenant's namespace and about a proxy in another one."""

Notify = Callable[[Mapping[str, Any]], None]
"""Called with ``{"injected": id}`` for a fault, and with ``{"about": ..., "point": ...}`` for a recorded point."""


class Injector:
    """One plan, and the points that were reached so far. Not safe for threads."""

    def __init__(self, plan: Plan, notify: Notify) -> None:
        self._faults = {(fault.about, fault.point): fault for fault in plan.faults}
        self._recorded = frozenset(plan.recorded)
        self._known = self._recorded | {fault.about for fault in plan.faults}
        self._replayed = {(fault.about, fault.point.kind) for fault in plan.faults if fault.kind is FaultKind.REPLAY}
        self._notify = notify
        self._counts: Counter[tuple[str, str, str, str]] = Counter()
        self._record_of: dict[str, str] = {}
        self._armed: dict[str, Fault] = {}
        self._past: defaultdict[tuple[str, str], list[bytes]] = defaultdict(list)

    def request(self, asked: Asked, body: bytes) -> Fault | None:
        """Count a request; returns the fault to inject there, if any."""
        has_object = not asked.subresource and asked.verb in ("apply", "create", "update") and bool(body)
        if asked.kind in _REGISTRY_KINDS and has_object:
            self.learn(asked.kind, json.loads(body))
        if asked.verb in ("list", "watch"):
            about = ""
        elif asked.kind in _REGISTRY_KINDS:
            about = self._record_of.get(asked.name, "")
        else:
            about = asked.namespace
        return self._count(about, asked.verb, asked.kind, asked.subresource)

    def event(self, kind: str, line: bytes) -> Fault | None:
        """Count an event of a watch stream; returns the fault to inject there, if any."""
        event = json.loads(line)
        if event["type"] not in ("ADDED", "MODIFIED", "DELETED"):
            return None
        about = self.learn(kind, event["object"])
        if (about, kind) in self._replayed:
            self._past[about, kind].append(line)
        return self._count(about, EVENT_VERB, kind, "")

    def listed(self, kind: str, page: bytes) -> None:
        """Learn from a page of a list: its items count as earlier events of these objects."""
        for obj in json.loads(page).get("items") or ():
            about = self.learn(kind, obj)
            if (about, kind) in self._replayed:
                self._past[about, kind].append(json.dumps({"type": "ADDED", "object": obj}).encode())

    def past(self, about: str, kind: str) -> tuple[bytes, ...]:
        """Every event about a namespace so far, oldest first, as lines without their end of line."""
        return tuple(self._past[about, kind])

    def learn(self, kind: str, obj: Mapping[str, Any]) -> str:
        """The namespace that an object is about; of a record or a claim it is remembered for its name."""
        if kind not in _REGISTRY_KINDS:
            namespace: str = obj["metadata"].get("namespace", "")
            return namespace
        about: str = obj["spec"]["proxy"]["namespace"]
        self._record_of[obj["metadata"]["name"]] = about
        return about

    def _count(self, about: str, verb: str, kind: str, subresource: str) -> Fault | None:
        if about not in self._known:
            return None
        self._counts[about, verb, kind, subresource] += 1
        point = Point(verb, kind, subresource, self._counts[about, verb, kind, subresource])
        if about in self._recorded:
            self._notify({"about": about, "point": point})
        fault = self._faults.get((about, point))
        if fault is None and verb != EVENT_VERB:
            fault = self._armed.pop(about, None)
        if fault is None:
            return None
        self._notify({"injected": fault.id})
        if fault.then is not None:
            self._armed[about] = Fault(fault.id + SECOND, fault.then, point, about)
        return fault
