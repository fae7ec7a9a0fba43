"""Keeping count of what passes a carrier, and saying where the plan strikes. No I/O but through ``tell``.

One ledger lives as long as its carrier counts. It learns from what it sees whose record or claim is whose: its
address does not name the proxy, but its contents do.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from operator_app.api.kinds import HOSTNAME_CLAIM, PROXY_REGISTRATION
from tests.e2e.faults.plan import EVENT_VERB, Asked, Fault, FaultKind, Plan, Point

_ELSEWHERE = frozenset({PROXY_REGISTRATION.kind, HOSTNAME_CLAIM.kind})
"""Kinds whose objects are in the operator's namespace and about another."""

Tell = Callable[[Mapping[str, Any]], None]
"""Told ``{"struck": id}`` of every fault, and ``{"about": ..., "point": ...}`` of everything that is recorded."""


class Ledger:
    """One plan and how far it has come. Not safe for threads."""

    def __init__(self, plan: Plan, tell: Tell) -> None:
        self._faults = {(fault.about, fault.point): fault for fault in plan.faults}
        self._recorded = frozenset(plan.recorded)
        self._known = self._recorded | {fault.about for fault in plan.faults}
        self._replayed = {(fault.about, fault.point.kind) for fault in plan.faults if fault.kind is FaultKind.REPLAY}
        self._write_status = tell
        self._counts: Counter[tuple[str, str, str, str]] = Counter()
        self._record_of: dict[str, str] = {}
        self._past: defaultdict[tuple[str, str], list[bytes]] = defaultdict(list)

    def request(self, asked: Asked, body: bytes) -> Fault | None:
        """Count a request; the fault that strikes it, if any."""
        if asked.kind in _ELSEWHERE and not asked.subresource and asked.verb in ("apply", "create", "update") and body:
            self.learn(asked.kind, json.loads(body))
        if asked.verb in ("list", "watch"):
            about = ""
        elif asked.kind in _ELSEWHERE:
            about = self._record_of.get(asked.name, "")
        else:
            about = asked.namespace
        return self._count(about, asked.verb, asked.kind, asked.subresource)

    def event(self, kind: str, line: bytes) -> Fault | None:
        """Count an event of a watch stream; the fault that strikes it, if any."""
        event = json.loads(line)
        if event["type"] not in ("ADDED", "MODIFIED", "DELETED"):
            return None
        about = self.learn(kind, event["object"])
        if (about, kind) in self._replayed:
            self._past[about, kind].append(line)
        return self._count(about, EVENT_VERB, kind, "")

    def listed(self, kind: str, page: bytes) -> None:
        """Learn from a list: what it shows counts as the past of its objects."""
        for obj in json.loads(page).get("items") or ():
            about = self.learn(kind, obj)
            if (about, kind) in self._replayed:
                self._past[about, kind].append(json.dumps({"type": "ADDED", "object": obj}).encode())

    def past(self, about: str, kind: str) -> tuple[bytes, ...]:
        """Every event about a namespace so far, oldest first, as lines without their end."""
        return tuple(self._past[about, kind])

    def learn(self, kind: str, obj: Mapping[str, Any]) -> str:
        """What namespace an object is about."""
        if kind not in _ELSEWHERE:
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
            self._write_status({"about": about, "point": point})
        fault = self._faults.get((about, point))
        if fault is not None:
            self._write_status({"struck": fault.id})
        return fault
