"""What the outside must show of a proxy's hostname in each state that the proxy can be in. Pure.

A hostname that is not declared any more is withdrawn in every state in which the operator may write; one that is still
declared is kept only where its record still leads to the proxy, or where nobody can tell.
"""

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """Why a proxy is not registered as usual, or that it is."""

    SERVED = "served"
    PAUSED = "paused"
    REFUSED = "refused spec"
    NO_ADDRESS = "no address"
    ADDRESS_UNUSABLE = "address unusable"
    SERVICE_IN_TROUBLE = "Service in trouble"
    REGISTRY_UNKNOWN = "registry unknown"
    REGISTRY_FAILS = "registry down, unauthorized or its circuit open"
    ZONE_GONE = "zone not configured any more"
    CLAIM_TAKEN = "claim taken"
    CLAIM_LOST = "claim taken, but the record outside is this proxy's"
    CLAIM_UNCERTAIN = "claim terminating or not writable"
    DELETING = "deleting"
    ABANDONED = "abandoned"
    ORPHANED = "orphaned"


class Declared(StrEnum):
    """The hostname and registry in the spec, compared with what the ledger has as published."""

    UNCHANGED = "unchanged"
    CHANGED = "changed"
    REMOVED = "removed"


class Shown(StrEnum):
    """What becomes of the published record."""

    KEPT = "kept"
    WITHDRAWN = "withdrawn"
    PENDING = "withdrawn once the registry answers"
    """The ledger lists it as retiring, and every reconcile tries again, with the backoff of the record."""


_NEVER_WRITTEN: Final = frozenset({State.PAUSED, State.ORPHANED})
"""The user asked that nothing changes: by ``spec.paused``, or by ``deletionPolicy: Orphan``."""

_WITHDRAWN: Final = frozenset(
    {State.NO_ADDRESS, State.ADDRESS_UNUSABLE, State.CLAIM_TAKEN, State.DELETING, State.ABANDONED}
)
"""The record leads to an address that may be somebody else's by now, or the hostname is not this proxy's any more."""


_NOT_REACHED: Final = frozenset({State.REGISTRY_FAILS, State.ZONE_GONE})
"""The record can't be removed for now."""


def shown(state: State, declared: Declared) -> Shown:
    """What the outside must show of a record that is published, in this state."""
    if state in _NEVER_WRITTEN:
        return Shown.KEPT
    if state in _NOT_REACHED:
        return Shown.KEPT if declared is Declared.UNCHANGED else Shown.PENDING
    if declared is not Declared.UNCHANGED or state in _WITHDRAWN:
        return Shown.WITHDRAWN
    return Shown.KEPT
