"""arc: what was used once and what was used more often share the tier as their ghosts say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.policy import Counting, Ghosts


class Arc(Counting):
    """Lane 0: used once; lane 1: more often. A page evicted too early moves the aim towards its own lane.

    Extra = lane in which the node's pages are counted.
    """

    lanes = 2

    def __init__(self, tier: int) -> None:
        super().__init__(tier)
        self._held = [0, 0]
        self._aim = 0.0
        """Pages that those used once should have."""
        self._ghosts: tuple[Ghosts[bool], Ghosts[bool]] = (Ghosts(), Ghosts())

    def gain(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """Where the pages are remembered, they come to lane 1 and the aim moves."""
        super().gain(index, node, lo, hi, copies)
        found = []
        for ghosts in self._ghosts:
            ghosts.resize(self.size)
            found.append(len(ghosts.take(index, node, lo, hi)) * ghosts.scale)
        once, often = map(len, self._ghosts)
        self._aim += found[0] * max(1.0, often / max(1, once)) - found[1] * max(1.0, once / max(1, often))
        self._aim = min(max(0.0, self._aim), float(self.size))
        uses = self.uses(node)
        if uses.extra is None:
            uses.count += 2 * sum(found) >= hi - lo
            uses.extra = int(uses.count > 1)
        self._held[uses.extra] += copies

    def lose(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """What goes is remembered by its lane."""
        super().lose(index, node, lo, hi, copies)
        lane = self.uses(node).extra or 0
        self._held[lane] -= copies
        self._ghosts[lane].add(self._ghosts[lane].sampled(index, node, lo, hi), mark=True)

    def _count(self, node: Any) -> None:
        """The second use moves what is there to lane 1."""
        uses = self.uses(node)
        if uses.extra == 0 and uses.count > 1:
            uses.extra = 1
            self._held[0] -= node.count[self.tier]
            self._held[1] += node.count[self.tier]

    def use(self, node: Any, now: float) -> None:
        """One more."""
        super().use(node, now)
        self._count(node)

    def fall(self, node: Any, parent: Any) -> None:
        """Uses come up from below."""
        super().fall(node, parent)
        self._count(parent)

    def join(self, upper: Any, lower: Any) -> None:
        """The upper node's pages count where the lower one's do."""
        super().join(upper, lower)
        self._count(lower)
        for node, sign in ((upper, -1), (lower, 1)):
            self._held[self.lane(node)] += sign * upper.count[self.tier]

    def lane(self, node: Any) -> int:
        """Once, or more often."""
        uses = self.note(node)
        return 0 if uses is None or uses.extra is None else uses.extra

    def pick(self, heads: Sequence[Any | None], now: float) -> int:
        """Whoever has more than it should."""
        del now
        if heads[0] is None or heads[1] is None:
            return 0 if heads[1] is None else 1
        return 0 if self._held[0] > self._aim else 1
