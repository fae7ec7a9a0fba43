"""Reading the API server's audit log: who asked for what, and what was answered.

Written by kube-apiserver in blocking mode, one JSON object a line (``audit.k8s.io/v1`` Event), at the stage
``ResponseComplete`` only: a watch appears when it ends. What is recorded, ``policy`` says.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NewType

import msgspec

from operator_app.api.kinds import Object

WRITE_VERBS: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})

CLUSTER_USERS: Final = frozenset(
    {
        "system:apiserver",
        "system:coredns",
        "system:kube-controller-manager",
        "system:kube-proxy",
        "system:kube-scheduler",
    }
)
"""Who asks all the time on behalf of the cluster itself, beside nodes and the controllers' ServiceAccounts."""

Mark = NewType("Mark", int)
"""A position in the log, in bytes."""

START: Final = Mark(0)

_BARRIER_PATH: Final = "/version?barrier="
_BARRIER_TIMEOUT_S: Final = 60.0


class AuditUnavailableError(RuntimeError):
    """The cluster's audit log can't be read from here."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One answered request.

    ``request`` and ``resource_version`` (of the object in the answer) are recorded for writes by service accounts of
    the operator's namespace only. ``name`` is empty where the server chose it. ``message`` is the server's, where it
    refused. ``decision`` is the authorizer's ("allow" or "forbid"), and ``grant`` is why. ``credential`` tells one
    token from another, and ``pod`` is the one that it was issued to.
    """

    user: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    subresource: str
    code: int
    received_at: datetime
    user_agent: str
    path: str
    resource_version: str | None = None
    request: Object | None = None
    message: str = ""
    decision: str = ""
    grant: str = ""
    credential: str = ""
    pod: str = ""

    @property
    def is_write(self) -> bool:
        """Whether the verb may change objects."""
        return self.verb in WRITE_VERBS

    def __str__(self) -> str:
        resource = f"{self.resource}.{self.group}" if self.group else self.resource
        subresource = f"/{self.subresource}" if self.subresource else ""
        return f"{self.user} {self.verb} {resource}{subresource} {self.namespace}/{self.name} {self.code}"


def service_account_user(namespace: str, name: str) -> str:
    """The user name under which a ServiceAccount's requests are recorded."""
    return f"system:serviceaccount:{namespace}:{name}"


def policy(operator_namespace: str, *, with_bodies: bool = True) -> Object:
    """The audit policy: nothing of the control plane itself, the operator's writes whole, the rest as metadata.

    Without bodies the operator's writes are metadata, too, as on most clusters: it takes less of the server's time.
    """
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "ResponseStarted", "Panic"],
        "omitManagedFields": True,
        "rules": [
            {"level": "None", "users": sorted(CLUSTER_USERS)},
            {"level": "None", "userGroups": ["system:serviceaccounts:kube-system", "system:nodes"]},
            {"level": "None", "nonResourceURLs": ["/healthz*", "/livez*", "/readyz*", "/openapi*"]},
            {
                "level": "RequestResponse" if with_bodies else "Metadata",
                "verbs": sorted(WRITE_VERBS),
                "userGroups": [f"system:serviceaccounts:{operator_namespace}"],
            },
            {"level": "Metadata"},
        ],
    }


class AuditLog:
    """The log of one API server.

    ``send`` makes one GET request to the path given and returns when it is answered. It serves as a barrier: an entry
    is written before its answer is complete, so once the barrier's own entry is in the log, so is every request that
    was answered before. Reading raises ``TimeoutError`` if the barrier does not appear.
    """

    def __init__(self, path: Path, send: Callable[[str], object]) -> None:
        self._path = path
        self._send = send

    def mark(self) -> Mark:
        """The position behind every request answered so far."""
        return self._read(Mark(self._path.stat().st_size))[1]

    def entries(self, since: Mark = START) -> list[AuditEntry]:
        """Every recorded request answered since ``since`` until now, in the order of completion."""
        return self._read(since)[0]

    def writes(self, user: str | None = None, since: Mark = START) -> list[AuditEntry]:
        """Those of ``entries`` that may have changed something, of one user or of all."""
        return [entry for entry in self.entries(since) if entry.is_write and user in {None, entry.user}]

    def _read(self, since: Mark) -> tuple[list[AuditEntry], Mark]:
        """Entries from ``since`` up to a barrier sent now, and the position behind them."""
        barrier = f"{_BARRIER_PATH}{uuid.uuid4()}".encode()
        self._send(barrier.decode())
        deadline_mono = time.monotonic() + _BARRIER_TIMEOUT_S
        while True:
            with self._path.open("rb") as log:
                log.seek(since)
                text = log.read()
            found = text.find(barrier)
            end = text.find(b"\n", found) + 1
            if found >= 0 and end > 0:
                break
            if time.monotonic() > deadline_mono:
                msg = f"the API server did not record a request within {_BARRIER_TIMEOUT_S} s"
                raise TimeoutError(msg)
            time.sleep(0.005)
        events = [_EVENT_DECODER.decode(line) for line in text[:end].splitlines()]
        entries = [_entry(event) for event in events if not event.request_uri.startswith(_BARRIER_PATH)]
        return entries, Mark(since + end)


class _User(msgspec.Struct):
    username: str = ""
    extra: dict[str, list[str]] = {}


class _ObjectRef(msgspec.Struct, rename="camel"):
    resource: str = ""
    namespace: str = ""
    name: str = ""
    api_group: str = ""
    subresource: str = ""


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


_EVENT_NAMES: Final = {
    "received_at": "requestReceivedTimestamp",
    "request_uri": "requestURI",
    "user_agent": "userAgent",
    "object_ref": "objectRef",
    "response_status": "responseStatus",
    "request": "requestObject",
    "response": "responseObject",
}


class _Event(msgspec.Struct, rename=_EVENT_NAMES):
    verb: str
    request_uri: str
    received_at: datetime
    user: _User
    user_agent: str = ""
    object_ref: _ObjectRef = msgspec.field(default_factory=_ObjectRef)
    response_status: _Status = msgspec.field(default_factory=_Status)
    annotations: dict[str, str] = {}
    request: Any = None
    response: Any = None


_EVENT_DECODER: Final = msgspec.json.Decoder(_Event)


def _entry(event: _Event) -> AuditEntry:
    answer = event.response if isinstance(event.response, dict) else {}
    return AuditEntry(
        user=event.user.username,
        verb=event.verb,
        group=event.object_ref.api_group,
        resource=event.object_ref.resource,
        namespace=event.object_ref.namespace,
        name=event.object_ref.name,
        subresource=event.object_ref.subresource,
        code=event.response_status.code,
        received_at=event.received_at,
        user_agent=event.user_agent,
        path=event.request_uri,
        resource_version=answer.get("metadata", {}).get("resourceVersion"),
        request=event.request,
        message=event.response_status.message,
        decision=event.annotations.get("authorization.k8s.io/decision", ""),
        grant=event.annotations.get("authorization.k8s.io/reason", ""),
        credential="".join(event.user.extra.get("authentication.kubernetes.io/credential-id", ())),
        pod="".join(event.user.extra.get("authentication.kubernetes.io/pod-name", ())),
    )
