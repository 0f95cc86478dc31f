"""Rules that vote on each victim: which of them acts follows from what was evicted too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from kvtier.policy.kinds import ByKind, Wait

FAITH: Final = 0.2
"""Turnovers of evidence with which each counts as good as all together."""
FADE: Final = 0.98
"""Of the evidence, with every eighth of a turnover."""


class Voting(ByKind):
    """The rules are those that `coldest` has an answer of; the first acts while there is nothing to tell them apart."""

    rules: ClassVar[int]

    def __init__(self, tier: int) -> None:
        super().__init__(tier)
        self._regrets = [0.0] * self.rules
        self._voted = [0.0] * self.rules
        self._votes = 0
        self._acting = 0

    def votes(self) -> int:
        """A bit for every rule that would have taken the latest victim."""
        return self._votes

    def lose(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """Count the votes."""
        super().lose(index, node, lo, hi, copies)
        self._voted = [each + copies * (self._votes >> number & 1) for number, each in enumerate(self._voted)]

    def regret(self, wait: Wait, pages: int) -> None:
        """Whoever wanted these pages to go was wrong."""
        self._regrets = [each + pages * (wait.votes >> number & 1) for number, each in enumerate(self._regrets)]

    def learn(self) -> None:
        """Choose who acts."""
        super().learn()
        usual = sum(self._regrets) / max(1.0, sum(self._voted))
        faith = FAITH * self.size + 1.0
        shares = [
            (regrets + usual * faith) / (voted + faith)
            for regrets, voted in zip(self._regrets, self._voted, strict=True)
        ]
        self._acting = min(range(self.rules), key=lambda number: (shares[number], number))
        self._regrets = [each * FADE for each in self._regrets]
        self._voted = [each * FADE for each in self._voted]

    def pick(self, heads: Sequence[Any | None], now: float) -> int:
        """What the acting rule says."""
        del now
        chosen = self.coldest(heads)
        lane = chosen[self._acting]
        self._votes = sum(1 << number for number, each in enumerate(chosen) if each == lane)
        return lane
