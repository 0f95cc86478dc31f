"""Takes in what disk has when a store starts, without a look at each page."""

from __future__ import annotations

from typing import Final

from kvtier.index.base import Index
from kvtier.index.folded import FoldedNode, Stored, folded
from kvtier.index.node import Node
from kvtier.types import Tier

MOST: Final = 512
"""Pages of one node: a match that looks into it takes a fraction of a millisecond longer."""


class Adopting(Index):
    """What a token index does at a start."""

    def adopt(self, parent: Node, run: Stored) -> Node | None:
        """The published node that ends with a run below the end of `parent`; eviction is not told.

        None, and no change, where a child begins with the same page. The same as extend, put and publish, at a
        fraction of their cost. Where it can be, `parent` itself goes on.
        """
        pages, groups = run.pages, self.groups
        if isinstance(parent, FoldedNode) and parent.children is None and parent.pages < MOST and not parent.time:
            node, lo = parent, parent.pages
            node.stored.append(run)
            node.pages = node.live = lo + pages
        else:
            first, lo = run.first_key(self.stride), 0
            if parent.children is not None and first in parent.children:
                return None
            node = folded(parent, [run], pages, groups)
            self._attach(parent, first, node)
            self.nodes += 1
        self.pages += pages
        for group in range(groups):
            self._hold(Tier.DISK, group, pages)
        self._arrive(node, Tier.DISK, pages * groups)
        if (order := self.orders.get(Tier.DISK)) is not None:
            order.policy.found(self, node, lo, lo + pages, pages * groups)
        if self.watch is not None:
            self.watch.stored(self, node, Tier.DISK, lo, lo + pages)
        return node

    def requeue(self, node: Node, tier: int) -> None:
        """The same where nobody looks into the node: all that only disk has can go."""
        if isinstance(node, FoldedNode) and node.children is None:
            self._offer(node, tier)
        else:
            super().requeue(node, tier)

    def fork(self, node: Node, depth: int) -> Node | None:
        """The node that ends at page number `depth`, where `node` or what is above it has that; cut between two runs.

        None, and no change, where it is not between two.
        """
        while depth <= node.depth and node.parent is not None:
            node = node.parent
        if node.depth + node.pages == depth:
            return node
        if not isinstance(node, FoldedNode):
            return None
        at, runs = 0, 0
        while at < depth - node.depth:
            at += node.stored[runs].pages
            runs += 1
        return self._cut_between(node, at, runs) if at == depth - node.depth else None

    def _cut_between(self, node: FoldedNode, at: int, runs: int) -> FoldedNode:
        """What `split` does, between two runs."""
        parent, stored = node.parent, node.stored
        assert parent is not None
        assert parent.children is not None
        upper = folded(parent, stored[:runs], at, self.groups)
        upper.time, upper.refs, upper.low, upper.pins = node.time, node.refs, node.low, node.pins
        upper.children = {stored[runs].first_key(self.stride): node}
        upper.count[Tier.DISK], upper.below[Tier.DISK] = at * self.groups, 1
        self._attach(parent, stored[0].first_key(self.stride), upper)
        self.nodes += 1
        node.parent, node.stored, node.depth = upper, stored[runs:], node.depth + at
        node.pages -= at
        node.live = node.pages
        node.count[Tier.DISK] -= at * self.groups
        if self.heat is not None:
            self.heat.split(upper, node)
        for order in self.orders.values():
            order.policy.split(upper, node)
        return upper
