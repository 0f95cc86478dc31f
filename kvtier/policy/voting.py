"""Rules that vote on each victim: which of them acts follows from what was evicted too early."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any, Final

from kvtier.policy.kinds import ByKind

FAITH: Final = 0.2
"""Turnovers of evidence with which the victims of each count as good as all together."""
SOON: Final = 1.0
"""Turnovers within which what was evicted is asked for soon."""
FADE: Final = 0.98
"""Of the evidence, with every eighth of a turnover."""


class Voting(ByKind):
    """The rules are those that `values` has an answer of; the first acts while there is nothing to tell them apart.

    Where rules agree there is nothing to choose, so that two are compared by the victims that one of them wanted alone.
    """

    def __init__(self, tier: int) -> None:
        super().__init__(tier)
        self.rules = len(self.values(0, 0.0))
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

    def regret(self, votes: int, pages: int, after: float) -> None:
        """Whoever wanted these pages to go was wrong, the less so the longer they would have had to be kept."""
        self._regrets[votes] += pages / (SOON + after)

    def learn(self) -> None:
        """Choose who acts."""
        super().learn()
        self._acting = self._best()
        self._regrets = [each * FADE for each in self._regrets]
        self._voted = [each * FADE for each in self._voted]

    def _best(self) -> int:
        """The rule whose own victims were regretted least, compared with those of every other rule."""
        usual = sum(self._regrets) / max(1.0, sum(self._voted))
        faith = FAITH * self.size + 1.0
        lead = [0.0] * self.rules
        for one, other in permutations(range(self.rules), 2):
            alone = [votes for votes in range(1 << self.rules) if votes >> one & 1 > votes >> other & 1]
            regretted, voted = (sum(map(pages.__getitem__, alone)) for pages in (self._regrets, self._voted))
            share = (regretted + usual * faith) / (voted + faith)
            lead[one] += share
            lead[other] -= share
        return lead.index(min(lead))

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
