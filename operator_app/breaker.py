"""When two writers want the same field: how to keep ours without a war. Pure, in virtual time.

Forcing a field back the moment it is taken is right the first few times, and a write at full speed for ever when the
other writer does the same (a second controller, a policy engine, a cron job). The breaker counts how often the *same*
fields of one object had to be taken back in a row. Past a threshold it opens: further repairs of just these fields
wait, longer each time. Everything else goes on: another field, another value, another object are never held up.

Guarantees
    - The k-th repair past the threshold is followed by a pause of ``min(cap_s, base_s * 2 ** k)`` seconds.
    - It closes by itself: once a repair has lasted ``memory_s`` (at least ``window_s``, and twice the last pause) the
      count starts anew.
    - Nothing is lost while it is open: a declaration that wants another value, or a difference in any other field,
      is not held up, and such a write takes the contended fields along.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from operator_app.kinds import Value
from operator_app.ownership import Path


@dataclass(frozen=True, slots=True)
class BreakerTimes:
    """How patient the breaker is; times in seconds.

    ``threshold`` repairs in a row, each within ``window_s`` of the one before, are taken for granted.
    """

    threshold: int = 3
    window_s: float = 60.0
    base_s: float = 2.0
    cap_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Contention:
    """A fight that goes on: who keeps taking which fields, and until when it is remembered (seconds from now)."""

    managers: tuple[str, ...]
    fields: tuple[str, ...]
    forgotten_in_s: float


@dataclass(frozen=True, slots=True)
class _Fight:
    wanted: Mapping[Path, str] = field(default_factory=dict)
    managers: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    streak: int = 0
    last_mono: float = 0.0
    pause_s: float = 0.0
    memory_s: float = 0.0


class Breaker:
    """One memory of fights for all objects, by UID. ``wanted`` maps contended paths to what we want there, as text."""

    def __init__(self, times: BreakerTimes) -> None:
        self._times = times
        self._fights: dict[str, _Fight] = {}

    def pause_s(self, uid: str, wanted: Mapping[Path, str], *, now_mono: float) -> float:
        """How long a repair of just these fields has to wait; 0 means: go ahead."""
        fight = self._current(uid, now_mono)
        if fight is None or any(fight.wanted.get(path) != value for path, value in wanted.items()):
            return 0.0
        return max(0.0, fight.last_mono + fight.pause_s - now_mono)

    def repaired(
        self,
        uid: str,
        wanted: Mapping[Path, str],
        *,
        managers: tuple[str, ...],
        fields: tuple[str, ...],
        now_mono: float,
    ) -> None:
        """Remember that these fields were taken back from ``managers``."""
        for stale in [each for each in self._fights if self._current(each, now_mono) is None]:
            del self._fights[stale]
        earlier = self._fights.get(uid)
        if earlier is None or not earlier.wanted.keys() & wanted.keys():
            earlier = _Fight()
        streak = earlier.streak + 1
        beyond = streak - self._times.threshold
        pause_s = min(self._times.cap_s, self._times.base_s * 2.0 ** min(beyond, 64)) if beyond >= 0 else 0.0
        self._fights[uid] = _Fight(
            wanted={**earlier.wanted, **wanted},
            managers=_union(earlier.managers, managers),
            fields=_union(earlier.fields, fields),
            streak=streak,
            last_mono=now_mono,
            pause_s=pause_s,
            memory_s=max(self._times.window_s, 2 * pause_s),
        )

    def contention(self, uid: str, *, now_mono: float) -> Contention | None:
        """The fight over an object, once it has gone past the threshold and until it is forgotten."""
        fight = self._current(uid, now_mono)
        if fight is None or fight.streak < self._times.threshold:
            return None
        return Contention(fight.managers, fight.fields, fight.last_mono + fight.memory_s - now_mono)

    def _current(self, uid: str, now_mono: float) -> _Fight | None:
        fight = self._fights.get(uid)
        return fight if fight is not None and now_mono < fight.last_mono + fight.memory_s else None


def as_text(value: Value) -> str:
    """A value in a form that can be compared and kept."""
    return repr(value)


def _union(earlier: tuple[str, ...], now: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*earlier, *now)))
