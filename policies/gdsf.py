"""gdsf: what is used least, times what a byte of it costs to compute again, goes first; what stays grows older."""

from __future__ import annotations

from typing import Any

from kvtier.policy import Counting

ATTENTION_TOKENS = 32768
"""With so many tokens before it, a token takes twice the time to compute: attention grows, all else does not."""


class Gdsf(Counting):
    """Rank = age of the tier at the last use + number of uses * seconds to recompute a byte, 1 for a prompt's first."""

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
        """Pages of a cache are of one size, so that only the tokens before them tell their costs apart."""
        uses = self.note(node)
        if uses is None:
            return 0.0
        before = node.end * (self.page_tokens or index.spec.page_tokens)
        rank: float = uses.mark + uses.count * (1 + before / ATTENTION_TOKENS)
        return rank
