"""How hard the API server pushes back, and who slows down for it. Pure, in virtual time.

An answer of 429 says that the API server sheds load (its priority and fairness, or a full queue). The operator then
makes room in the order of what people wait for: sweeps first, repairs second, users' edits last.
"""

from typing import Final

from operator_app.controller.workqueue import Priority

STEP: Final = 0.2
"""What one refusal adds to the level, up to 1."""

HALF_LIFE_S: Final = 10.0
"""In this time without refusals the level halves."""

LEAST_SHARE: Final = 0.1
"""The share of workers that goes on under full backpressure."""

_NEGLIGIBLE: Final = 0.01

# For each priority: the level from which it slows down, and its delay in seconds at level 1; linear in between. None is
# longer than the backpressure takes to fade.
_DELAYS: Final = {Priority.RESYNC: (0.0, 60.0), Priority.REPAIR: (0.3, 10.0), Priority.USER: (0.8, 1.0)}


class Backpressure:
    """One level between 0 and 1, raised by refusals and fading with time. ``now_mono`` never goes back."""

    def __init__(self) -> None:
        self._level = 0.0
        self._at_mono = 0.0

    def refused(self, *, now_mono: float) -> None:
        """The API server answered 429."""
        self._level = min(1.0, self.level(now_mono=now_mono) + STEP)
        self._at_mono = now_mono

    def level(self, *, now_mono: float) -> float:
        """The level now; exactly 0 once it has faded."""
        faded: float = self._level * 0.5 ** ((now_mono - self._at_mono) / HALF_LIFE_S)
        return faded if faded >= _NEGLIGIBLE else 0.0

    def delay_s(self, priority: Priority, *, now_mono: float) -> float:
        """How long a new round of that priority is put off, in seconds."""
        begins, longest_s = _DELAYS[priority]
        beyond = self.level(now_mono=now_mono) - begins
        return max(0.0, beyond / (1.0 - begins)) * longest_s

    def share(self, *, now_mono: float) -> float:
        """The share of workers to use, between ``LEAST_SHARE`` and 1."""
        return max(LEAST_SHARE, 1.0 - self.level(now_mono=now_mono) * (1.0 - LEAST_SHARE))
