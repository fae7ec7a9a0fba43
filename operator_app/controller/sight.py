"""Whether the watches of a replica deliver: since when each kind and scope was silent, and when that means blind. Pure.

A healthy watch is never silent for long: without changes the API server sends a bookmark about once a minute. A replica
whose watches are silent for longer acts on what was, not on what is, so it must not hold shards.
"""

from dataclasses import dataclass, field

from operator_app.api.kinds import Kind
from operator_app.kube.hash_ranges import Coverage

Watch = tuple[Kind, Coverage]
"""A kind and what its watch covers."""


@dataclass(slots=True)
class Sight:
    """When each watch last delivered something, in seconds of one monotonic clock; ``stale_after_s`` is in seconds."""

    stale_after_s: float
    seen_mono: dict[Watch, float] = field(default_factory=dict)

    def record(self, watch: Watch, *, now_mono: float) -> None:
        """Record that a watch has delivered a page, an event or a bookmark."""
        self.seen_mono[watch] = now_mono

    def forget(self, watch: Watch) -> None:
        """Expect nothing more of a watch that has been ended."""
        self.seen_mono.pop(watch, None)

    def silent_s(self, now_mono: float) -> dict[Kind, float]:
        """For how many seconds the longest-silent watch of each kind has delivered nothing."""
        silent: dict[Kind, float] = {}
        for (kind, _), seen_mono in self.seen_mono.items():
            silent[kind] = max(silent.get(kind, 0.0), now_mono - seen_mono)
        return silent

    def stale(self, now_mono: float) -> tuple[Kind, float] | None:
        """The kind that has been silent for longest and for how long, if that is ``stale_after_s`` or more.

        A watch that never delivered anything does not count: its namespace may not exist, and what is not synced is
        not reconciled anyway.
        """
        kind, silent_s = max(self.silent_s(now_mono).items(), key=lambda each: each[1], default=(None, 0.0))
        return (kind, silent_s) if kind is not None and silent_s >= self.stale_after_s else None
