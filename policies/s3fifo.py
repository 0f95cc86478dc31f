"""s3fifo: a small queue for what is new, a main one for what was used again, and memory of what left the small one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from kvtier.policy import Counting, Ghosts

SMALL = 0.1
"""The small queue's share of the tier."""
MOST = 3
"""Uses that count for another round in the main queue."""


class S3fifo(Counting):
    """Lane 0 is the small queue, lane 1 the main one. Extra = (lane, place in it, uses that were spent on rounds)."""

    lanes = 2

    def __init__(self, tier: int) -> None:
        super().__init__(tier)
        self._places = count(1)
        self._small = 0
        self._ghosts: Ghosts[bool] = Ghosts()

    def gain(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """New pages go to the small queue, pages that left it too early to the main one."""
        super().gain(index, node, lo, hi, copies)
        self._ghosts.resize(self.size)
        known = len(self._ghosts.take(index, node, lo, hi)) * self._ghosts.scale
        uses = self.uses(node)
        if uses.extra is None:
            uses.extra = (int(2 * known >= hi - lo), next(self._places), uses.count)
        self._small += copies * (uses.extra[0] == 0)

    def lose(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """What leaves the small queue is remembered."""
        super().lose(index, node, lo, hi, copies)
        if self.lane(node) == 0:
            self._small -= copies
            self._ghosts.add(self._ghosts.sampled(index, node, lo, hi), mark=True)

    def spare(self, node: Any) -> bool:
        """What was used since it was last looked at has another round in the main queue."""
        uses = self.note(node)
        if uses is None or uses.extra is None or uses.count <= uses.extra[2]:
            return False
        lane, _, spent = uses.extra
        self._small -= node.count[self.tier] * (lane == 0)
        spent = uses.count if lane == 0 else max(spent, uses.count - MOST) + 1
        uses.extra = (1, next(self._places), spent)
        return True

    def join(self, upper: Any, lower: Any) -> None:
        """The upper node's pages stand where the lower one's do."""
        super().join(upper, lower)
        self._small += upper.count[self.tier] * ((self.lane(lower) == 0) - (self.lane(upper) == 0))

    def lane(self, node: Any) -> int:
        """Small or main."""
        uses = self.note(node)
        return 0 if uses is None or uses.extra is None else uses.extra[0]

    def rank(self, index: Any, node: Any) -> float:
        """First in, first out."""
        del index
        uses = self.note(node)
        return 0.0 if uses is None or uses.extra is None else float(uses.extra[1])

    def pick(self, heads: Sequence[Any | None], now: float) -> int:
        """The small queue while it has more than its share."""
        del now
        return 0 if heads[1] is None or (heads[0] is not None and self._small > SMALL * self.size) else 1
