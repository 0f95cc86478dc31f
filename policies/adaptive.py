"""adaptive: from plain LRU to wholly what was learnt of kinds, whichever is shown to have evicted least too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.policy import ByKind, Wait

POWERS = (0.0, 0.5, 1.0, 2.0)
MEMORY = 4.0
"""Turnovers in which a regret comes to count half."""
STEPS = 8


class Adaptive(ByKind):
    """Every victim is voted on; of the powers the one acts whose votes were regretted least, page for page."""

    def __init__(self, tier: int) -> None:
        super().__init__(tier)
        self._regrets = [0.0] * len(POWERS)
        self._votes = 0
        self._acting = 1

    def votes(self) -> int:
        """A bit for every power that would have taken the latest victim."""
        return self._votes

    def regret(self, wait: Wait, pages: int) -> None:
        """Whoever wanted these pages to go was wrong."""
        for number in range(len(POWERS)):
            if wait.votes >> number & 1:
                self._regrets[number] += pages

    def learn(self) -> None:
        """Choose who acts."""
        super().learn()
        self._acting = min(range(len(POWERS)), key=lambda number: (self._regrets[number], abs(number - 1)))
        self._regrets = [each * 0.5 ** (1 / (STEPS * MEMORY)) for each in self._regrets]

    def pick(self, heads: Sequence[Any | None], now: float) -> int:
        """What the acting power says."""
        del now
        chosen = [self.coldest(heads, power) for power in POWERS]
        lane = chosen[self._acting]
        self._votes = sum(1 << number for number, each in enumerate(chosen) if each == lane)
        return lane
