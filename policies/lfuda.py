"""lfuda: the least often used goes first, and every eviction ages those that stay."""

from __future__ import annotations

from typing import Any

from kvtier.policy import Ageing


class Lfuda(Ageing):
    """Rank = age of the tier at the last use + number of uses; the age is the rank of the last victim."""

    def rank(self, index: Any, node: Any) -> float:
        """Age at the last use and number of uses."""
        del index
        uses = self.note(node)
        return 0.0 if uses is None else uses.mark + uses.count
