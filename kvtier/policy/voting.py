"""Rules that vote on each victim: which of them acts follows from what was evicted too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from kvtier.policy.kinds import ByKind

FAITH: Final = 0.2
"""Turnovers of evidence with which each counts as good as all together."""
FADE: Final = 0.98
"""Of the evidence, with every eighth of a turnover."""


class Voting(ByKind):
    """The rules are those that `values` has an answer of; the first acts while there is nothing to tell them apart."""

    rules: ClassVar[int]

    def __init__(self, tier: int) -> None:
        super().__init__(tier)
        self._regrets = [0.0] * (1 << self.rules)
        """Pages by who voted for them: a bit for every rule."""
        self._voted = [0.0] * (1 << self.rules)
        self._votes = 0
        self._acting = 0

    def votes(self) -> int:
        """A bit for every rule that would have taken the latest victim."""
        return self._votes

    def lose(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """Count the votes."""
        super().lose(index, node, lo, hi, copies)
        self._voted[self._votes] += copies

    def regret(self, votes: int, pages: int) -> None:
        """Whoever wanted these pages to go was wrong."""
        self._regrets[votes] += pages

    def _by_rule(self, pages: list[float]) -> list[float]:
        """Pages that each rule voted for."""
        return [sum(n for votes, n in enumerate(pages) if votes >> rule & 1) for rule in range(self.rules)]

    def learn(self) -> None:
        """Choose who acts."""
        super().learn()
        regretted, voted = self._by_rule(self._regrets), self._by_rule(self._voted)
        usual = sum(regretted) / max(1.0, sum(voted))
        faith = FAITH * self.size + 1.0
        shares = [(bad + usual * faith) / (every + faith) for bad, every in zip(regretted, voted, strict=True)]
        self._acting = min(range(self.rules), key=lambda number: (shares[number], number))
        self._regrets = [each * FADE for each in self._regrets]
        self._voted = [each * FADE for each in self._voted]

    def pick(self, heads: Sequence[Any | None], now: float) -> int:
        """What the acting rule says."""
        del now
        chosen = self.chosen(heads)
        lane = chosen[self._acting]
        votes = 0
        for number, each in enumerate(chosen):
            if each == lane:
                votes |= 1 << number
        self._votes = votes
        return lane
