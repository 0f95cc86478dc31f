"""tlru: ends of prompts that are computed again within a bearable time go first, then the least recently used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.policy import Counting

BEARABLE_TOKENS = 1024
"""So much of a prompt's end may be missing without anybody noticing at its next turn."""


class Tlru(Counting):
    """Lane 0: leaves within that many tokens of the end of the longest request that used them; lane 1: all others."""

    lanes = 2

    def gain(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """Until it is used again, a node's end is a request's end."""
        super().gain(index, node, lo, hi, copies)
        uses = self.uses(node)
        uses.extra = max(uses.extra or 0, node.depth + hi)
        self.tokens = self.page_tokens or index.spec.page_tokens
        self.each = len(index.anchors) or 1

    def use(self, node: Any, now: float) -> None:
        """A request ended here."""
        super().use(node, now)
        uses = self.uses(node)
        uses.extra = max(uses.extra or 0, node.end)

    def fall(self, node: Any, parent: Any) -> None:
        """The parent is part of the same request."""
        super().fall(node, parent)
        uses, up = self.note(node), self.note(parent)
        if uses is not None and up is not None:
            up.extra = max(up.extra or 0, uses.extra or 0)

    def _spare_pages(self, node: Any) -> int:
        """Pages of the node that nobody would miss."""
        uses = self.note(node)
        if uses is None or not uses.extra:
            return 0
        held = node.depth + max(node.count[self.tier] // self.each, 1)
        return int(held - max(node.depth, uses.extra - BEARABLE_TOKENS // self.tokens))

    def lane(self, node: Any) -> int:
        """0 where some of it can be missed."""
        return 0 if self._spare_pages(node) > 0 else 1

    def share(self, node: Any) -> int:
        """Only those."""
        return min(super().share(node), self._spare_pages(node)) if self.lane(node) == 0 else super().share(node)

    def pick(self, heads: Sequence[Any | None], now: float) -> int:
        """What can be missed first."""
        del now
        return 0 if heads[0] is not None else 1
