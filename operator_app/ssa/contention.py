"""Another writer of the same fields: restoring ours without writing at full speed. Pure, in virtual time.

Restoring a field the moment it is changed is right the first few times, and endless writing at full speed when the
other writer does the same: a second controller, a policy engine, a cron job, a second installation of this operator.
The tracker counts, for every field of an object, how often it was restored to the same value in a row. A deleted object
counts as one field (``WHOLE_OBJECT``), and so does every object as a whole, so that a writer that takes another field
each time is met in the same way. Past a threshold the next restoration waits, longer each time.

Guarantees
    - The restoration that is the k-th past the threshold (the threshold itself is number 0) is followed by a pause of
      ``min(cap_s, base_s * 2 ** k)`` seconds.
    - So in any ``window_s`` seconds an object is restored at most ``bound`` times, whatever the other writers do and
      whatever they are called.
    - It ends by itself: once a restoration has lasted ``memory_s`` (at least ``window_s``, and twice the last pause)
      the count starts anew.
    - What our own side changes is not held up: another declared value counts from one, and a field that is no longer
      declared is forgotten. Only a *repair*, of a generation that the status covers already, waits for its whole
      object.
    - Memory is bounded: digests instead of values, at most ``MANAGERS`` names a field, ``FIELDS`` fields an object.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from operator_app.api.kinds import Value
from operator_app.ssa.fields import Path

WHOLE_OBJECT: Final[Path] = ("",)
"""The path under which the deletion of an object is tracked, where otherwise there is the path of a field."""

MANAGERS: Final = 4
"""So many names of other writers are kept and told for one field."""

FIELDS: Final = 32
"""So many fields are kept for one object; of further ones only the count of the whole object is kept."""

_ANY_FIELD: Final[Path] = ("*",)
"""The path under which all restorations of an object are counted together."""

_FEW: Final = 64
"""Objects whose ended contention may be kept before memory is cleaned up."""


@dataclass(frozen=True, slots=True)
class ContentionTimes:
    """When restorations slow down; times in seconds.

    ``threshold`` restorations of a field in a row, each within ``window_s`` of the one before, go without a pause, and
    four times as many of an object, if they are of different fields.
    """

    threshold: int = 3
    window_s: float = 60.0
    base_s: float = 2.0
    cap_s: float = 300.0

    @property
    def object_threshold(self) -> int:
        """How many restorations of one object in a row go without a pause."""
        return 4 * self.threshold

    def pause_s(self, streak: int, threshold: int) -> float:
        """The pause after the ``streak``-th restoration in a row."""
        beyond = streak - threshold
        return min(self.cap_s, self.base_s * 2.0 ** min(beyond, 64)) if beyond >= 0 else 0.0

    @property
    def bound(self) -> int:
        """How often one object is restored in any ``window_s`` seconds at most."""
        count, elapsed_s = self.object_threshold, 0.0
        while elapsed_s < self.window_s:
            elapsed_s += self.pause_s(count, self.object_threshold)
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class RestoredField:
    """One field that was restored: ``declared`` is the digest of our value, ``field`` the path as people read it.

    ``managers`` had it; none of them means that the field had been removed, which leaves no trace of who did it. A
    ``known_rival`` is one that is sure to come back: the next restoration waits already.
    """

    path: Path
    field: str
    declared: str
    managers: tuple[str, ...]
    known_rival: bool = False


@dataclass(frozen=True, slots=True)
class Contention:
    """Who keeps changing which fields, and in how many seconds the first of them is forgotten."""

    managers: tuple[str, ...]
    fields: tuple[str, ...]
    forgotten_in_s: float

    def __str__(self) -> str:
        return f"{_listed(self.managers) or 'another writer'} keeps taking {_listed(self.fields)}"


@dataclass(frozen=True, slots=True)
class _Streak:
    """Restorations of one field of one object in a row."""

    field: str
    declared: str
    managers: tuple[str, ...]
    count: int
    last_mono: float
    pause_s: float
    memory_s: float

    def is_over(self, now_mono: float) -> bool:
        return now_mono >= self.last_mono + self.memory_s


class ContentionTracker:
    """Restorations of all objects, by whatever identifies an object for good, and by path. ``now_mono`` in seconds."""

    def __init__(self, times: ContentionTimes) -> None:
        self._times = times
        self._streaks: dict[str, dict[Path, _Streak]] = {}
        self._purge_above = _FEW

    def pause_s(self, subject: str, declared: Mapping[Path, str], *, is_repair: bool, now_mono: float) -> float:
        """How long restoring just these fields, to the values with these digests, has to wait; 0: not at all.

        A field that is not contended, or is declared with another value than before, makes the write go ahead and take
        the contended ones along; a repair up to the bound of the whole object.
        """
        if not declared:
            return 0.0
        streaks = self._current(subject, now_mono)
        whole = streaks.get(_ANY_FIELD) if is_repair else None
        whole_s = max(0.0, whole.last_mono + whole.pause_s - now_mono) if whole else 0.0
        pauses_s = []
        for path, value in declared.items():
            known = streaks.get(path)
            if known is None or known.declared != value:
                return whole_s
            pauses_s.append(max(0.0, known.last_mono + known.pause_s - now_mono))
        return max(whole_s, min(pauses_s))

    def record(
        self,
        subject: str,
        restored: Iterable[RestoredField],
        *,
        released: Iterable[Path] = (),
        is_repair: bool,
        now_mono: float,
    ) -> None:
        """Count that these fields were restored, and forget the ``released`` ones, which are not declared any more.

        Costs amortised O(1) in the number of objects.
        """
        gone = tuple(released) if not is_repair else ()
        known = {
            path: streak
            for path, streak in self._current(subject, now_mono).items()
            if not any(_is_within(path, other) or _is_within(other, path) for other in gone)
        }
        fields = list(restored)
        streaks = dict(known)
        for each in fields:
            if each.path in known or len(streaks) < FIELDS:
                streaks[each.path] = self._next(known.get(each.path), each, self._times.threshold, now_mono)
        if fields and is_repair:
            names = tuple(dict.fromkeys(name for each in fields for name in each.managers))
            whole = RestoredField(_ANY_FIELD, "one field after the other", "", names)
            streaks[_ANY_FIELD] = self._next(known.get(_ANY_FIELD), whole, self._times.object_threshold, now_mono)
        if streaks:
            self._streaks[subject] = streaks
        else:
            self._streaks.pop(subject, None)
        if len(self._streaks) > self._purge_above:
            self._streaks = {each: left for each in self._streaks if (left := self._current(each, now_mono))}
            self._purge_above = max(_FEW, 2 * len(self._streaks))

    def contention(self, subject: str, *, now_mono: float) -> Contention | None:
        """The fields of an object that were restored more often than the threshold and are not forgotten."""
        current = self._current(subject, now_mono)
        whole = current.pop(_ANY_FIELD, None)
        contended = [each for each in current.values() if each.count >= self._times.threshold]
        if not contended and whole is not None and whole.count >= self._times.object_threshold:
            contended = [whole]
        if not contended:
            return None
        return Contention(
            managers=tuple(dict.fromkeys(name for each in contended for name in each.managers)),
            fields=tuple(each.field for each in contended),
            forgotten_in_s=min(each.last_mono + each.memory_s for each in contended) - now_mono,
        )

    def _next(self, known: _Streak | None, restored: RestoredField, threshold: int, now_mono: float) -> _Streak:
        is_same = known is not None and known.declared == restored.declared
        count = known.count + 1 if known is not None and is_same else 1
        if restored.known_rival:
            count = max(count, threshold)
        pause_s = self._times.pause_s(count, threshold)
        names = known.managers if known else ()
        return _Streak(
            field=restored.field,
            declared=restored.declared,
            managers=tuple(dict.fromkeys((*names, *restored.managers)))[:MANAGERS],
            count=count,
            last_mono=now_mono,
            pause_s=pause_s,
            memory_s=max(self._times.window_s, 2 * pause_s),
        )

    def _current(self, subject: str, now_mono: float) -> dict[Path, _Streak]:
        streaks = self._streaks.get(subject, {})
        return {path: streak for path, streak in streaks.items() if not streak.is_over(now_mono)}


def digest_of(value: Value) -> str:
    """What tells one declared value from another: 16 hexadecimal digits."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:MANAGERS])
    return f"{shown} and {len(names) - MANAGERS} more" if len(names) > MANAGERS else shown


def _is_within(path: Path, other: Path) -> bool:
    return path[: len(other)] == other
