"""Kubernetes Events about proxies: aggregated, and sent without delaying a reconcile.

One Event object stands for all occurrences of the same reason about the same proxy and child; it is created once, and
its ``series`` has the count (events.k8s.io/v1). Its name is derived from proxy, reason and child, so a restarted
operator continues the count. Events are best effort: one that can't be sent is dropped and logged.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NoReturn

import anyio
import structlog

from operator_app.api.kinds import EVENT, FIELD_MANAGER, Key, Object
from operator_app.errors import ConflictError, OperatorError
from operator_app.kube import fencing
from operator_app.kube.client import Cluster
from operator_app.kube.fencing import FencingToken

log = structlog.get_logger(__name__)

BACKLOG: Final = 1000
"""How many occurrences may wait to be sent; further ones are dropped."""

NOTE_BYTES: Final = 1024
"""The API server's limit on ``note`` (k8s.io/kubernetes, pkg/apis/core/validation/events.go), in UTF-8."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Something that happened to ``proxy``.

    ``reason`` and ``action`` are CamelCase, ``note`` is a sentence for people. Occurrences of one reason with different
    ``about`` (such as a child's kind) have Events of their own.
    """

    proxy: Object
    type: Literal["Normal", "Warning"]
    reason: str
    action: str
    about: str
    note: str


class EventRecorder:
    """Queues occurrences and sends them one after the other. ``now`` returns aware UTC."""

    def __init__(self, cluster: Cluster, *, instance: str, now: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._instance = instance
        self._now = now
        self._sender, self._receiver = anyio.create_memory_object_stream[tuple[Occurrence, FencingToken | None]](
            BACKLOG
        )

    def record(self, occurrence: Occurrence) -> None:
        """Queue an occurrence, to be sent with the caller's fencing token; never waits, never raises."""
        try:
            self._sender.send_nowait((occurrence, fencing.current_token()))
        except anyio.WouldBlock:
            log.warning("event_dropped", reason=occurrence.reason, note=occurrence.note)

    async def run(self) -> NoReturn:
        """Send what is queued, until cancelled; the recorder can't be used after that."""
        with self._sender, self._receiver:
            while True:
                occurrence, token = await self._receiver.receive()
                try:
                    with fencing.holding(token):
                        await self._send(occurrence)
                except OperatorError as error:
                    log.warning("event_failed", reason=occurrence.reason, error=str(error))

    async def _send(self, occurrence: Occurrence) -> None:
        event = self._event(occurrence)
        try:
            await self._cluster.create(EVENT, event)
        except ConflictError as error:
            if error.reason != "AlreadyExists":
                raise
            await self._increment(Key(event["metadata"]["namespace"], event["metadata"]["name"]))

    async def _increment(self, key: Key) -> None:
        live = await self._cluster.get(EVENT, key)
        if live is None:
            return  # it expired in between; the next occurrence makes a new one
        count = (live.get("series") or {}).get("count", 1) + 1
        series = {"count": count, "lastObservedTime": self._micro_time()}
        pinned = {"resourceVersion": live["metadata"]["resourceVersion"]}
        await self._cluster.merge_patch(EVENT, key, {"metadata": pinned, "series": series})

    def _event(self, occurrence: Occurrence) -> Object:
        metadata = occurrence.proxy["metadata"]
        identity = "/".join((metadata["uid"], occurrence.reason, occurrence.about))
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {
                "namespace": metadata["namespace"],
                "name": f"{metadata['name']}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}",
            },
            "eventTime": self._micro_time(),
            "type": occurrence.type,
            "reason": occurrence.reason,
            "action": occurrence.action,
            "note": occurrence.note.encode()[:NOTE_BYTES].decode(errors="ignore"),
            "regarding": {
                "apiVersion": occurrence.proxy["apiVersion"],
                "kind": occurrence.proxy["kind"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "reportingController": FIELD_MANAGER,
            "reportingInstance": self._instance,
        }

    def _micro_time(self) -> str:
        """A ``MicroTime``, which has six digits of a second even when they are zero."""
        return self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
