"""Which leaf of a tier goes first: one persistent lazy heap, shared by every index whose slots are shared.

An entry is not moved when its node is touched; a popped entry that is out of date goes back with the node's
present rank, so that a touch costs nothing and an eviction O(log leaves), whatever the number of leaves.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.index.base import Index
    from kvtier.index.node import Node


class Order:
    """Leaves of one tier, coldest first."""

    __slots__ = ("_dead", "_heap", "_tie", "tier")

    def __init__(self, tier: int) -> None:
        self.tier = tier
        self._heap: list[tuple[float, int, Node, Index]] = []
        self._tie = 0
        self._dead = 0

    def __len__(self) -> int:
        """Entries, stale ones included; at most one a node."""
        return len(self._heap)

    def push(self, index: Index, node: Node) -> None:
        """Let a node that just became a free leaf of the tier be found; does nothing when it is already queued."""
        bit = 1 << self.tier
        if node.queued & bit:
            return
        node.queued |= bit
        self._tie += 1
        heapq.heappush(self._heap, (index.rank(node, self.tier), self._tie, node, index))

    def pop(self) -> tuple[Index, Node] | None:
        """Take out the coldest leaf that nobody holds, or None. The caller trims it and puts it back if it lasts."""
        bit = 1 << self.tier
        while self._heap:
            rank, tie, node, index = heapq.heappop(self._heap)
            if node.dead or node.refs or not node.tier_leaf(self.tier):
                node.queued &= ~bit
                continue
            now = index.rank(node, self.tier)
            if now > rank:
                heapq.heappush(self._heap, (now, tie, node, index))
                continue
            node.queued &= ~bit
            return index, node
        return None

    def died(self) -> None:
        """A queued node left the index; sweep when the dead outnumber the living."""
        self._dead += 1
        if self._dead > max(1024, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if not entry[2].dead]
            heapq.heapify(self._heap)
            self._dead = 0
