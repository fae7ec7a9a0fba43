"""The Leases of the election as they are stored: names, fields, and what each field means. Pure.

There are two kinds. Every replica has a *heartbeat* Lease, which it rewrites every few seconds and which names the
shards that it holds. Every shard has a Lease of its own, which is written only when the shard changes hands. What
follows from them is in ``election``; ``elector`` reads and writes them.

A heartbeat has the label and the name of a shard's Lease, with a number that no shard has, and says 0 for the number of
shards. Replicas of the format before, which rewrote the Lease of each shard instead of a heartbeat, take it for the
Lease of a shard under another number of shards. They acquire nothing while such a Lease is rewritten, so they never
take a shard for free whose Lease stands still.
"""

import functools
import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from operator_app.api.kinds import FIELD_MANAGER, GROUP, LEASE, Object

LABEL_ROLE: Final = f"{GROUP}/lease"
"""Label of every Lease of this operator. Its value is ``shard``, and ``replica`` for a ``FORMER_MEMBERSHIP``."""

ANNOTATION_SHARDS: Final = f"{GROUP}/shards"
"""The number of the division that the writer of a shard's Lease uses, ``hashing.Division``; 0 in a heartbeat."""

ANNOTATION_DIVISION: Final = f"{GROUP}/division"
"""In a heartbeat, the number of the division that the replica uses; 0 while it gives its shards back."""

ANNOTATION_HOLDS: Final = f"{GROUP}/holds"
"""In a heartbeat, the shards that the replica holds or has just acquired: a hexadecimal number with a bit for each."""

ANNOTATION_RELEASED: Final = f"{GROUP}/released"
"""In a shard's Lease ``true`` if the holder itself released it. Without a holder and with ``false`` it was edited."""

PREFIX: Final = "operator-app"

FIRST_HEARTBEAT: Final = 10**15
"""The names of heartbeats end in numbers from here on; no shard has one."""

MAX_EPOCH: Final = 2**31 - 1
"""``leaseTransitions`` is an int32; after this comes 0."""


class Role(StrEnum):
    """The kinds of Lease."""

    SHARD = "shard"
    HEARTBEAT = "heartbeat"
    FORMER_MEMBERSHIP = "replica"
    """What a replica of the format before wrote to tell that it runs; these are only removed."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """The three times of an election, in seconds. Raises ``ValueError``, which names their flags, if they don't fit.

    A replica sends a heartbeat every ``retry_period_s`` at the latest. At least two attempts of up to
    ``request_timeout_s`` each fit between a heartbeat and the deadline.
    """

    duration_s: int = 15
    renew_deadline_s: float = 10
    retry_period_s: float = 2

    def __post_init__(self) -> None:
        if not 0 < self.retry_period_s < self.renew_deadline_s < self.duration_s:
            raise ValueError(
                f"--retry-period-s ({self.retry_period_s:g}), --renew-deadline-s ({self.renew_deadline_s:g}) and "
                f"--lease-duration-s ({self.duration_s:g}) must grow in this order"
            )
        if self.renew_deadline_s - self.retry_period_s < 1:
            raise ValueError(
                f"--renew-deadline-s ({self.renew_deadline_s:g}) must exceed --retry-period-s "
                f"({self.retry_period_s:g}) by 1 s or more: two requests have to fit in between"
            )

    @property
    def request_timeout_s(self) -> float:
        """Timeout of each request about a Lease."""
        return (self.renew_deadline_s - self.retry_period_s) / 2


@dataclass(frozen=True, slots=True)
class Lease:
    """The fields of a Lease.

    ``shard`` is None where the role is not ``SHARD``. ``division`` is the number of the writer's division, of a
    heartbeat 0 while the replica gives its shards back. ``held`` has a bit for each shard that a heartbeat names.
    """

    name: str
    role: Role
    shard: int | None
    holder: str | None
    epoch: int
    duration_s: float
    division: int
    held: int
    is_released: bool
    uid: str
    version: int

    def holds(self, shard: int) -> bool:
        """Whether a heartbeat names ``shard``."""
        return bool(self.held >> shard & 1)


def shard_lease_name(shard: int) -> str:
    """The name of a shard's Lease."""
    return f"{PREFIX}-{Role.SHARD}-{shard}"


@functools.lru_cache(maxsize=1024)
def heartbeat_lease_name(replica: str) -> str:
    """The name of a replica's heartbeat, by a hash of the replica's name with 48 bits."""
    number = int.from_bytes(hashlib.blake2b(replica.encode(), digest_size=6).digest(), "big")
    return shard_lease_name(FIRST_HEARTBEAT + number)


def label_of(name: str) -> str:
    """The value of ``LABEL_ROLE`` for a Lease of this operator, by the Lease's name."""
    is_former = name.startswith(f"{PREFIX}-{Role.FORMER_MEMBERSHIP}-")
    return Role.FORMER_MEMBERSHIP if is_former else Role.SHARD


def lease_of(obj: Object, times: LeaseTimes, *, known: Lease | None = None) -> Lease | None:
    """The fields of a stored Lease; None for a Lease that is not one of this operator's.

    A field that somebody has removed by hand gets the default that can't lead to two holders. A duration that no
    replica has written does not count: the one of ``known``, the Lease as observed before, or the own one is used.
    """
    metadata, spec = obj["metadata"], obj.get("spec") or {}
    label, annotations = metadata.get("labels", {}).get(LABEL_ROLE), metadata.get("annotations", {})
    number = _number_in(metadata["name"])
    if label == Role.FORMER_MEMBERSHIP:
        role = Role.FORMER_MEMBERSHIP
    elif label == Role.SHARD and number is not None:
        role = Role.SHARD if number < FIRST_HEARTBEAT else Role.HEARTBEAT
    else:
        return None
    holder = spec.get("holderIdentity") or None
    return Lease(
        name=metadata["name"],
        role=role,
        shard=number if role == Role.SHARD else None,
        holder=holder,
        epoch=spec.get("leaseTransitions") or 0,
        duration_s=_duration_s(obj, times, known),
        division=_natural(annotations.get(ANNOTATION_DIVISION if role == Role.HEARTBEAT else ANNOTATION_SHARDS), 10),
        held=_natural(annotations.get(ANNOTATION_HOLDS), 16) if role == Role.HEARTBEAT else 0,
        is_released=role == Role.SHARD and holder is None and annotations.get(ANNOTATION_RELEASED) != "false",
        uid=metadata["uid"],
        version=int(metadata["resourceVersion"]),
    )


def _number_in(name: str) -> int | None:
    """The number in the name of a shard's Lease or of a heartbeat."""
    number = name.removeprefix(f"{PREFIX}-{Role.SHARD}-")
    is_number = number.isascii() and number.isdigit()
    return int(number) if is_number and name == shard_lease_name(int(number)) else None


def _natural(text: str | None, base: int) -> int:
    """A number that a replica has written; 0 for text that none can have written."""
    digits = "0123456789abcdef"[:base]
    return int(text, base) if text and len(text) <= 64 and set(text) <= set(digits) else 0


def _duration_s(obj: Object, times: LeaseTimes, known: Lease | None) -> float:
    written: float | None = (obj.get("spec") or {}).get("leaseDurationSeconds")
    foreign = (
        "f:leaseDurationSeconds" in (entry.get("fieldsV1") or {}).get("f:spec", {})
        for entry in obj["metadata"].get("managedFields", ())
        if entry.get("manager") != FIELD_MANAGER
    )
    if written is not None and not any(foreign):
        return written
    return times.duration_s if known is None else max(known.duration_s, times.duration_s)


def lease_object(
    name: str, namespace: str, spec: Object, annotations: dict[str, str], *, known: Object | None
) -> Object:
    """A whole Lease to write; fields that others have added to ``known``, the stored one, stay.

    ``holderIdentity`` is absent unless ``spec`` has it.
    """
    known = known or {}
    metadata = {key: value for key, value in known.get("metadata", {}).items() if key != "managedFields"}
    kept = {key: value for key, value in (known.get("spec") or {}).items() if key != "holderIdentity"}
    metadata |= {
        "name": name,
        "namespace": namespace,
        "labels": metadata.get("labels", {}) | {LABEL_ROLE: label_of(name)},
        "annotations": metadata.get("annotations", {}) | annotations,
    }
    return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": kept | spec}
