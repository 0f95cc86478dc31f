"""lfuda: the least often used goes first, and every eviction ages those that stay."""

from __future__ import annotations

from typing import Any

from kvtier.policy import Counting


class Lfuda(Counting):
    """Rank = age of the tier at the last use + number of uses; the age is the rank of the last victim."""

    def __init__(self, tier: int) -> None:
        super().__init__(tier)
        self.age = 0.0

    def mark(self) -> float:
        """The age."""
        return self.age

    def lose(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """What goes sets the age."""
        super().lose(index, node, lo, hi, copies)
        if node.below[self.tier] == 0:
            self.age = max(self.age, self.rank(index, node))

    def rank(self, index: Any, node: Any) -> float:
        """Age at the last use and number of uses."""
        del index
        uses = self.note(node)
        return 0.0 if uses is None else uses.mark + uses.count
