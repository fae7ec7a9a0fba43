"""Backpressure from the API server: which reconciles are delayed by it, and how many may run. Pure, in virtual time.

A 429 says that the API server sheds load (its priority and fairness, or a full queue). The operator then sends less:
resyncs are delayed first, repairs second, users' edits last.
"""

from typing import Final

from operator_app.controller.workqueue import Priority

STEP: Final = 0.2
"""One 429 adds this to the level, up to 1."""

HALF_LIFE_S: Final = 10.0
"""The level halves in this time without a 429."""

LEAST_SHARE: Final = 0.1
"""The share of workers that run at level 1."""

_NEGLIGIBLE: Final = 0.01

# For each priority: the level at which its delay begins, and the delay in seconds at level 1; linear in between. No
# delay is longer than the backpressure takes to fade.
_DELAYS: Final = {Priority.RESYNC: (0.0, 60.0), Priority.REPAIR: (0.3, 10.0), Priority.USER: (0.8, 1.0)}


class Backpressure:
    """A level between 0 and 1, raised by each 429 and fading with time. ``now_mono`` must never decrease."""

    def __init__(self) -> None:
        self._level = 0.0
        self._at_mono = 0.0

    def refused(self, *, now_mono: float) -> None:
        """Record that the API server responded with 429."""
        self._level = min(1.0, self.level(now_mono=now_mono) + STEP)
        self._at_mono = now_mono

    def level(self, *, now_mono: float) -> float:
        """The level now; exactly 0 once it has faded."""
        faded: float = self._level * 0.5 ** ((now_mono - self._at_mono) / HALF_LIFE_S)
        return faded if faded >= _NEGLIGIBLE else 0.0

    def delay_s(self, priority: Priority, *, now_mono: float) -> float:
        """By how many seconds a new request of that priority is delayed."""
        begins, longest_s = _DELAYS[priority]
        beyond = self.level(now_mono=now_mono) - begins
        return max(0.0, beyond / (1.0 - begins)) * longest_s

    def share(self, *, now_mono: float) -> float:
        """The share of workers that may run, between ``LEAST_SHARE`` and 1."""
        return max(LEAST_SHARE, 1.0 - self.level(now_mono=now_mono) * (1.0 - LEAST_SHARE))
