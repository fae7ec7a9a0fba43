"""The operator's exceptions, as one tree::

    OperatorError
    |- ConfigurationError                a kubeconfig or setting that can't work; raised only while starting
    |- TransientError(retry_after_s)     a retry may succeed without any change of the inputs
    |  |- ConflictError(reason, causes)  409: another writer was first; read the object again before a retry
    |  |- ThrottledError                 429: retry after ``retry_after_s``
    |  |- GoneError                      410: the list or watch must restart with a new list
    |  |- UndecodableError               a response whose body does not match its status or kind
    |  |- FencedError                    the fencing token has expired, so the write was not sent
    |  |- CircuitOpenError               the circuit breaker of an outside registry is open (``registration.circuit``)
    |- TerminalError(reason)             a retry fails until an input changes
       |- NotFoundError                  404 where the object was needed
       |- InvalidError(causes)           400, 422: the server refused the contents
       |- PolicyError                    400, 403, 422: an admission policy or webhook of the cluster refused it
       |- ForbiddenError                 401, 403: the operator lacks a permission

Errors are classified by HTTP status, ``Status.reason`` and ``Status.details.causes``, never by the text of a message.
Each carries the key and kind of its object, if it has one, so that a log line needs no other context.
"""

import math
from dataclasses import dataclass
from typing import Final

from operator_app.api.kinds import Key, Kind

REFUSED_BY_POLICY: Final = "RefusedByPolicy"
"""The reason of a request that an admission policy or webhook of the cluster refuses."""

LONGEST_WAIT_S: Final = 3600.0
"""Upper bound on any requested retry delay."""


def bounded_s(asked_s: float) -> float:
    """A requested retry delay, limited to 0 to ``LONGEST_WAIT_S`` seconds.

    The delay comes from a server's header or a registry plugin, so it may be negative (0 is returned), infinite or NaN
    (``LONGEST_WAIT_S`` is returned).
    """
    return min(max(0.0, asked_s), LONGEST_WAIT_S) if math.isfinite(asked_s) else LONGEST_WAIT_S


@dataclass(frozen=True, slots=True)
class Cause:
    """One item of ``Status.details.causes``.

    ``field`` is the API server's path (``.spec.replicas``), ``reason`` a ``CauseType`` (``FieldManagerConflict``,
    ``FieldValueInvalid``, ...), ``message`` a sentence for people.
    """

    field: str
    reason: str
    message: str


class OperatorError(Exception):
    """Base of the operator's own exceptions.

    ``kind`` and ``key`` name the object that the error is about, if there is one.
    """

    def __init__(self, message: str, *, kind: Kind | None = None, key: Key | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.key = key

    def __str__(self) -> str:
        if self.kind is None:
            return self.message
        return f"{self.kind} {self.key}: {self.message}" if self.key else f"{self.kind}: {self.message}"


class ConfigurationError(OperatorError):
    """The operator can't start; the message is one sentence that says what to change."""


class TransientError(OperatorError):
    """A retry may succeed: a timeout, a lost connection, a 5xx.

    ``retry_after_s`` is the delay that the server requested, limited to 0 to ``LONGEST_WAIT_S`` seconds; ``None`` if it
    requested none.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: Kind | None = None,
        key: Key | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, kind=kind, key=key)
        self.retry_after_s = None if retry_after_s is None else bounded_s(retry_after_s)


class ConflictError(TransientError):
    """409. ``causes`` lists the conflicts of an apply; it is empty if a resourceVersion or UID did not match.

    ``reason`` is ``Status.reason``: ``Conflict``, or ``AlreadyExists`` for a create under a name that is taken.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: Kind | None = None,
        key: Key | None = None,
        reason: str = "Conflict",
        causes: tuple[Cause, ...] = (),
    ) -> None:
        super().__init__(message, kind=kind, key=key)
        self.reason = reason
        self.causes = causes


class ThrottledError(TransientError):
    """429 from the API server's priority and fairness, or from an outside registry."""


class GoneError(TransientError):
    """410, as an HTTP status or as an event of a watch: the resourceVersion is too old to continue from."""


class UndecodableError(TransientError):
    """A response or a line of a watch that is not the expected JSON: a proxy's error page, or a truncated stream."""


class FencedError(TransientError):
    """A write that was not sent, because the fencing token has expired: another replica may own the shard by now."""


class TerminalError(OperatorError):
    """A retry with the same inputs fails again. ``reason`` is CamelCase and valid as a condition's reason."""

    def __init__(self, reason: str, message: str, *, kind: Kind | None = None, key: Key | None = None) -> None:
        super().__init__(message, kind=kind, key=key)
        self.reason = reason


class NotFoundError(TerminalError):
    """404 where the object, its namespace or its kind was needed.

    ``reason`` tells which: ``NotFound`` (the object), ``NamespaceNotFound``, or ``KindNotServed`` (no CRD installed).
    """


class InvalidError(TerminalError):
    """400 or 422. ``causes`` lists the fields that the server refused."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        kind: Kind | None = None,
        key: Key | None = None,
        causes: tuple[Cause, ...] = (),
    ) -> None:
        super().__init__(reason, message, kind=kind, key=key)
        self.causes = causes


class PolicyError(TerminalError):
    """400, 403 or 422 by an admission policy or webhook of the cluster, whose name is in the message.

    What it judges may lie outside of the object, so a retry may succeed after minutes. ``reason`` is
    ``RefusedByPolicy``.
    """

    def __init__(self, message: str, *, kind: Kind | None = None, key: Key | None = None) -> None:
        super().__init__(REFUSED_BY_POLICY, message, kind=kind, key=key)


class ForbiddenError(TerminalError):
    """401 or 403: the operator's identity may not do this.

    ``reason`` is ``Unauthorized``, ``Forbidden``, or ``NamespaceTerminating`` for a create in a namespace that is being
    deleted.
    """
