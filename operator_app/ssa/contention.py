"""When two writers want the same field: how to keep ours without a war. Pure, in virtual time.

Forcing a field back the moment it is taken is right the first few times, and a write at full speed for ever when the
other writer does the same (a second controller, a policy engine, a cron job). The tracker counts, for every field of an
object, how often it had to be taken back in a row; an object that was deleted counts as one more field of itself. Past
a threshold it opens for that field: further repairs wait, longer each time. Everything else goes on: another field,
another value, another object are never held up.

Guarantees
    - The repair of a field that is the k-th past the threshold (the threshold itself is number 0) is followed by a
      pause of ``min(cap_s, base_s * 2 ** k)`` seconds, whichever other fields are fought over in between.
    - It closes by itself: once a repair has lasted ``memory_s`` (at least ``window_s``, and twice the last pause) the
      count starts anew.
    - Nothing is lost while it is open: a declaration that wants another value, or a difference in any other field,
      is not held up, and such a write takes the contended fields along.
    - A field that is no longer declared is forgotten, so that to declare it and take it back is no fight.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from operator_app.api.kinds import Value
from operator_app.ssa.fields import Path


@dataclass(frozen=True, slots=True)
class ContentionTimes:
    """How patient the tracker is; times in seconds.

    ``threshold`` repairs in a row, each within ``window_s`` of the one before, are taken for granted.
    """

    threshold: int = 3
    window_s: float = 60.0
    base_s: float = 2.0
    cap_s: float = 300.0


@dataclass(frozen=True, slots=True)
class ReclaimedField:
    """One field that was taken back: ``wanted`` is our value as text, ``field`` the path as people read it.

    ``managers`` had it; none of them means that the field had been removed, which leaves no trace of who did it.
    """

    path: Path
    field: str
    wanted: str
    managers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contention:
    """Fights that go on: who keeps taking which fields, and when the first of them is forgotten (seconds from now)."""

    managers: tuple[str, ...]
    fields: tuple[str, ...]
    forgotten_in_s: float

    def __str__(self) -> str:
        return f"{', '.join(self.managers) or 'another writer'} keeps taking {', '.join(self.fields)}"


@dataclass(frozen=True, slots=True)
class _FieldContention:
    """About one field of one object."""

    field: str
    wanted: str
    managers: tuple[str, ...]
    streak: int
    last_mono: float
    pause_s: float
    memory_s: float

    def is_over(self, now_mono: float) -> bool:
        return now_mono >= self.last_mono + self.memory_s


_FEW: Final = 64
"""Objects whose finished fights may be kept before anybody looks."""


class ContentionTracker:
    """One memory of fights for all objects, by whatever names an object for good, and by path."""

    def __init__(self, times: ContentionTimes) -> None:
        self._times = times
        self._fights: dict[str, dict[Path, _FieldContention]] = {}
        self._purge_above = _FEW

    def pause_s(self, subject: str, wanted: Mapping[Path, str], *, now_mono: float) -> float:
        """How long a repair of just these fields, to these values as text, has to wait; 0 means: go ahead."""
        fights = self._current(subject, now_mono)
        pauses_s = []
        for path, value in wanted.items():
            fight = fights.get(path)
            if fight is None or fight.wanted != value:
                return 0.0
            pauses_s.append(max(0.0, fight.last_mono + fight.pause_s - now_mono))
        return min(pauses_s, default=0.0)

    def record_repair(
        self, subject: str, taken: Iterable[ReclaimedField], *, given_up: Iterable[Path] = (), now_mono: float
    ) -> None:
        """Remember that these fields were taken back, and that we do not want the ones that are ``given_up`` any more.

        Costs amortised O(1) in the number of objects.
        """
        unwanted = tuple(given_up)
        earlier = {
            path: fight
            for path, fight in self._current(subject, now_mono).items()
            if not any(_is_within(path, other) or _is_within(other, path) for other in unwanted)
        }
        fights = earlier | {each.path: self._next(earlier.get(each.path), each, now_mono) for each in taken}
        if fights:
            self._fights[subject] = fights
        else:
            self._fights.pop(subject, None)
        if len(self._fights) > self._purge_above:
            self._fights = {each: left for each in self._fights if (left := self._current(each, now_mono))}
            self._purge_above = max(_FEW, 2 * len(self._fights))

    def contention(self, subject: str, *, now_mono: float) -> Contention | None:
        """The fights over an object that have gone past the threshold and are not forgotten."""
        fights = [each for each in self._current(subject, now_mono).values() if each.streak >= self._times.threshold]
        if not fights:
            return None
        return Contention(
            managers=tuple(dict.fromkeys(name for each in fights for name in each.managers)),
            fields=tuple(each.field for each in fights),
            forgotten_in_s=min(each.last_mono + each.memory_s for each in fights) - now_mono,
        )

    def _next(self, earlier: _FieldContention | None, taken: ReclaimedField, now_mono: float) -> _FieldContention:
        streak = earlier.streak + 1 if earlier else 1
        beyond = streak - self._times.threshold
        pause_s = min(self._times.cap_s, self._times.base_s * 2.0 ** min(beyond, 64)) if beyond >= 0 else 0.0
        known = earlier.managers if earlier else ()
        return _FieldContention(
            field=taken.field,
            wanted=taken.wanted,
            managers=tuple(dict.fromkeys((*known, *taken.managers))),
            streak=streak,
            last_mono=now_mono,
            pause_s=pause_s,
            memory_s=max(self._times.window_s, 2 * pause_s),
        )

    def _current(self, subject: str, now_mono: float) -> dict[Path, _FieldContention]:
        fights = self._fights.get(subject, {})
        return {path: fight for path, fight in fights.items() if not fight.is_over(now_mono)}


def as_text(value: Value) -> str:
    """A value in a form that can be compared and kept."""
    return repr(value)


def _is_within(path: Path, other: Path) -> bool:
    return path[: len(other)] == other
