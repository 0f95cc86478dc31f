"""gdsf: what is used least, times what a byte of it costs to compute again, goes first; what stays grows older."""

from __future__ import annotations

from typing import Any

from kvtier.policy import Ageing

ATTENTION_TOKENS = 32768
"""With so many tokens before it, a token takes twice the time to compute: attention grows, all else does not."""


class Gdsf(Ageing):
    """Rank = age of the tier at the last use + number of uses * seconds to recompute a byte, 1 for a prompt's first."""

    def rank(self, index: Any, node: Any) -> float:
        """Pages of a cache are of one size, so that only the tokens before them tell their costs apart."""
        uses = self.note(node)
        if uses is None:
            return 0.0
        before = node.end * (self.page_tokens or index.spec.page_tokens)
        rank: float = uses.mark + uses.count * (1 + before / ATTENTION_TOKENS)
        return rank
