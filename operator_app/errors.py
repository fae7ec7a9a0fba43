"""Everything that can go wrong, as one tree::

    OperatorError
    |- ConfigurationError              a kubeconfig or setting that cannot work; said once, at the start
    |- TransientError(retry_after_s)   try again; nothing is wrong with the declaration
    |  |- ConflictError(reason, causes)  409: somebody else was first; re-read, then decide anew
    |  |- ThrottledError               429: come back after ``retry_after_s``
    |  |- GoneError                    410: a list or watch must start over from a fresh list
    |  |- UndecodableError             an answer that is not what its status or its kind promises
    |  |- FencedError                  another replica may have the shard by now; nothing was sent
    |  |- CircuitOpenError             an outside registry failed and is not called for now (``registration.circuit``)
    |- TerminalError(reason)           trying again changes nothing until an input changes
       |- NotFoundError                404 where the object was needed
       |- InvalidError(causes)         400, 422: the server refuses these contents
       |- ForbiddenError               401, 403: the operator lacks a permission

Errors are classified by HTTP status, ``Status.reason`` and ``Status.details.causes``, never by the text of a message.
They carry the object they are about, so that a log line needs no other context.
"""

import math
from dataclasses import dataclass
from typing import Final

from operator_app.api.kinds import Key, Kind

LONGEST_WAIT_S: Final = 3600.0
"""Nobody is waited for longer than this without another try, whatever is asked for."""


def bounded_s(asked_s: float) -> float:
    """A wait that somebody else asks for, in seconds between 0 and ``LONGEST_WAIT_S``.

    What a server's header or a registry's plugin says may be negative, infinite or undefined; the latter two mean the
    longest wait.
    """
    return min(max(0.0, asked_s), LONGEST_WAIT_S) if math.isfinite(asked_s) else LONGEST_WAIT_S


@dataclass(frozen=True, slots=True)
class Cause:
    """One entry of ``Status.details.causes``.

    ``field`` is the API server's path (``.spec.replicas``), ``reason`` a ``CauseType`` (``FieldManagerConflict``,
    ``FieldValueInvalid``, ...), ``message`` a sentence for people.
    """

    field: str
    reason: str
    message: str


class OperatorError(Exception):
    """Base of every error that the operator raises on purpose.

    ``kind`` and ``key`` name the object concerned, where there is one.
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
    """The operator cannot start like this; the message is one sentence that says what to change."""


class TransientError(OperatorError):
    """Worth another try: a timeout, a lost connection, a 5xx.

    ``retry_after_s`` is the server's wish in seconds, between 0 and ``LONGEST_WAIT_S`` whatever it was.
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
    """409. ``causes`` is filled for a field-manager conflict and empty for a lost optimistic-lock or UID race.

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
    """410, as an HTTP status or inside a watch stream: the resourceVersion is too old to continue from."""


class UndecodableError(TransientError):
    """An answer or a watch line that is not the JSON it should be: a proxy's page, or a stream cut inside an object."""


class FencedError(TransientError):
    """A write that was stopped before it was sent, since the right to write for its shard has run out."""


class TerminalError(OperatorError):
    """Another try with the same inputs ends the same way. ``reason`` is CamelCase and fit for a condition."""

    def __init__(self, reason: str, message: str, *, kind: Kind | None = None, key: Key | None = None) -> None:
        super().__init__(message, kind=kind, key=key)
        self.reason = reason


class NotFoundError(TerminalError):
    """404 where the object, its namespace or its kind was needed.

    ``reason`` tells which: ``NotFound`` (the object), ``NamespaceNotFound``, or ``KindNotServed`` (no CRD installed).
    """


class InvalidError(TerminalError):
    """400 or 422. ``causes`` names the fields that the server refused."""

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


class ForbiddenError(TerminalError):
    """401 or 403: the operator's identity may not do this.

    ``reason`` is ``Unauthorized``, ``Forbidden``, or ``NamespaceTerminating`` for a create in a dying namespace.
    """
