"""Where the copies of pages are, which of them may go, and what policies are told of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.identity import CacheSpec
from kvtier.index.node import LOCAL, TIERS, Node, blank, held_to
from kvtier.index.order import Order, Warmth
from kvtier.types import NO_COPY, RUN_PAGES, Kind, stretches

_HOLE = b"\xff" * 8
"""NO_COPY as it lies in an array of handles."""


class Dropped(NamedTuple):
    """Copies that left the index: the tier's owner frees them."""

    tier: int
    group: int
    handles: array[int]


class Watch(Protocol):
    """Is told which pages of the first anchor group a tier gained and lost."""

    def stored(self, index: Any, node: Node, tier: int, lo: int, hi: int) -> None:
        """Pages [lo, hi) of a node have a copy in the tier."""

    def lost(self, index: Any, node: Node, tier: int, lo: int, hi: int) -> None:
        """Pages [lo, hi) of a node have none any more that anybody finds."""


class Copies:
    """Copies of the nodes of one index, counted per tier, and the leaves that eviction finds."""

    def __init__(
        self, spec: CacheSpec, root_chain: bytes, orders: Mapping[int, Order], heat: Warmth | None = None
    ) -> None:
        self.spec = spec
        self.stride = spec.stride
        self.groups = len(spec.groups)
        self.full = [n for n, g in enumerate(spec.groups) if g.kind is Kind.FULL]
        self.states = [n for n, g in enumerate(spec.groups) if g.kind is Kind.STATE]
        self.windows = [(n, g.window) for n, g in enumerate(spec.groups) if g.kind is Kind.WINDOW]
        self.anchors = [] if spec.keyed else self.full or [self.windows[0][0]]
        """Groups that every published page has a copy of in some local tier."""
        self.orders = orders
        self.heat = heat
        self.share = 0
        """Whose leaves these are in the orders: 0, or the number of a quota."""
        self.moving = False
        """Whether leaves may still be queued under the quota that this was of before."""
        self.held = [[0] * self.groups for _ in range(TIERS)]
        """Copies by tier and group."""
        self.tally: list[list[int]] | None = None
        """The same of all indexes of a quota whose groups are alike, where this is of one."""
        self.watch: Watch | None = None
        self.closed = False
        """Nothing is found any more: all that is here is on its way out."""
        self.version = 0
        """Grows with whatever changes in nodes or copies."""
        self.copies = [0] * TIERS
        """Copies per tier, those of doomed nodes included."""
        self.root = Node(None, b"", 0, 0, self.groups, 0.0)
        self.root.chain = root_chain
        self.root.name = int.from_bytes(root_chain[:8], "little")

    # -- where copies are ------------------------------------------------------------------------------------

    def locate(self, node: Node, depth: int) -> tuple[Node, int]:
        """The node and position that page `depth` has now; `node` was at or below it when it was noted.

        A split gives the upper part to a new parent, so walking up always finds a page that is still held.
        """
        while depth < node.depth:
            assert node.parent is not None
            node = node.parent
        return node, depth - node.depth

    def get(self, node: Node, at: int, tier: int, group: int) -> int:
        """Handle of one copy, or NO_COPY."""
        held = node.at[tier * self.groups + group]
        return NO_COPY if held is None else held[at]

    def put(self, node: Node, at: int, tier: int, group: int, handles: Sequence[int], sums: Sequence[int]) -> None:
        """Record copies of pages [at, at + len(handles)); NO_COPY entries leave what is there.

        The caller makes sure that no copy is overwritten. Sums are recorded where a handle is given.
        """
        slot = tier * self.groups + group
        held = node.at[slot]
        if held is None:
            held = node.at[slot] = blank(node.pages)
        kept = node.sums[group]
        if kept is None:
            kept = node.sums[group] = array("Q", bytes(8 * node.pages))
        end = at + len(handles)
        if self.watch is not None and group == self.anchors[0] and not node.dead:
            self._announce(node, tier, at, handles)
        if isinstance(handles, array) and isinstance(sums, array) and _HOLE not in handles.tobytes():
            assert held[at:end].tobytes() == _HOLE * len(handles), "copy overwritten"
            held[at:end], kept[at:end] = handles, sums
            self._hold(tier, group, len(handles))
            self._gain(node, tier, at, end, len(handles))
            return
        gained = 0
        for position, handle in enumerate(handles, at):
            if handle != NO_COPY:
                assert held[position] == NO_COPY, "copy overwritten"
                held[position] = handle
                kept[position] = sums[position - at]
                gained += 1
        if gained:
            self._hold(tier, group, gained)
            self._gain(node, tier, at, end, gained)

    def _announce(self, node: Node, tier: int, at: int, handles: Sequence[int]) -> None:
        """Tell the watch of each stretch of new copies."""
        assert self.watch is not None
        for lo, hi in stretches(handles):
            self.watch.stored(self, node, tier, at + lo, at + hi)

    def move(self, node: Node, at: int, tier: int, group: int, handle: int) -> int:
        """Replace one copy by another in the same tier (relocation); returns the old handle."""
        held = node.at[tier * self.groups + group]
        assert held is not None
        assert held[at] != NO_COPY
        old, held[at] = held[at], handle
        return old

    def forget(self, node: Node, at: int, tier: int, group: int) -> Dropped:
        """Forget one copy of a group that is no anchor (its bytes were lost)."""
        held = node.at[tier * self.groups + group]
        assert held is not None
        assert group not in self.anchors
        gone = array("q", [held[at]])
        held[at] = NO_COPY
        node.count[tier] -= 1
        self._hold(tier, group, -1)
        self._told(node, tier, at, at + 1, 1)
        if node.count[tier] == 0 and node.below[tier] == 0:
            self._vanish(node, tier)
        return Dropped(tier, group, gone)

    def drop(self, node: Node, lo: int, hi: int, tier: int) -> list[Dropped]:
        """Forget the tier's copies of pages [lo, hi), of every group; returns their handles."""
        out = []
        lost = 0
        for group in range(self.groups):
            held = node.at[tier * self.groups + group]
            if held is None:
                continue
            gone = held[lo:hi]
            if _HOLE in gone.tobytes():
                gone = array("q", [h for h in gone if h != NO_COPY])
            if gone:
                if self.watch is not None and group == self.anchors[0] and not node.dead:
                    self.watch.lost(self, node, tier, lo, hi)
                held[lo:hi] = blank(hi - lo)
                lost += len(gone)
                self._hold(tier, group, -len(gone))
                out.append(Dropped(tier, group, gone))
        if lost:
            node.count[tier] -= lost
            self._told(node, tier, lo, hi, lost)
            if node.count[tier] == 0:
                node.at[tier * self.groups : (tier + 1) * self.groups] = [None] * self.groups
                if node.below[tier] == 0:
                    self._vanish(node, tier)
        return out

    def evict(self, node: Node, lo: int, hi: int, tier: int) -> list[Dropped]:
        """The same, with what other tiers hold of pages that have lost an anchor: they are of no use."""
        out = self.drop(node, lo, hi, tier)
        if len(self.anchors) == self.groups:
            return out
        for at in np.flatnonzero(~self._whole(node, LOCAL)[lo:hi]) + lo:
            for other in LOCAL:
                out += self.drop(node, int(at), int(at) + 1, other)
        return out

    def complete(self, node: Node, tiers: Iterable[int]) -> bool:
        """Whether one of the tiers holds every item of a node."""
        return any(node.count[tier] == node.pages * self.groups for tier in tiers)

    def _whole(self, node: Node, tiers: Sequence[int]) -> NDArray[np.bool_]:
        """Per page: whether `tiers` hold every anchor of it."""
        out = np.ones(node.pages, dtype=bool)
        for group in self.anchors:
            out &= node.present(group, tiers)
        return out

    def _gain(self, node: Node, tier: int, lo: int, hi: int, copies: int) -> None:
        """Account for new copies, and offer the leaf that they make."""
        self._arrive(node, tier, copies)
        if (order := self.orders.get(tier)) is not None:
            order.policy.gain(self, node, lo, hi, copies)
        if not node.below[tier]:
            self._offer_all(node)

    def _hold(self, tier: int, group: int, copies: int) -> None:
        """Count copies that came, or went."""
        self.held[tier][group] += copies
        if self.tally is not None:
            self.tally[tier][group] += copies

    def _arrive(self, node: Node, tier: int, copies: int) -> None:
        """Count new copies; the first in a subtree shows all the way up."""
        before = node.count[tier]
        node.count[tier] = before + copies
        self.copies[tier] += copies
        self.version += 1
        if node.below[tier] or before:
            return
        up = node.parent
        while up is not None:
            up.below[tier] += 1
            if up.below[tier] > 1 or up.count[tier]:
                break
            up = up.parent

    def _told(self, node: Node, tier: int, lo: int, hi: int, copies: int) -> None:
        """Copies of pages [lo, hi) are gone: count them, and let the tier's policy know."""
        self.copies[tier] -= copies
        self.version += 1
        if (order := self.orders.get(tier)) is not None:
            order.policy.lose(self, node, lo, hi, copies)

    def _vanish(self, node: Node, tier: int) -> None:
        """The subtree of `node` holds nothing in the tier any more; its parent may be the leaf now."""
        up = node.parent
        while up is not None:
            self._fall(node, up, tier)
            up.below[tier] -= 1
            if up.below[tier]:
                return
            if up.count[tier]:
                self._offer(up, tier)
                return
            node, up = up, up.parent

    def _fall(self, node: Node, up: Node, tier: int) -> None:
        """What was known of the uses of `node` is known of its parent from now on."""
        up.time = max(up.time, node.time)
        if up is self.root:
            return
        up.over = up.over and node.over
        if self.heat is not None:
            self.heat.fall(node, up)
        if (order := self.orders.get(tier)) is not None:
            order.policy.fall(node, up)

    def _offer(self, node: Node, tier: int) -> None:
        """Queue a leaf that nobody holds there for eviction."""
        order = self.orders.get(tier)
        if order is not None and not node.holds(tier) and not node.dead and node.tier_leaf(tier):
            order.push(self, node)

    def _offer_all(self, node: Node) -> None:
        """Queue a node in every tier where it is a free leaf."""
        for tier in self.orders:
            self._offer(node, tier)

    # -- eviction --------------------------------------------------------------------------------------------

    def use(self, node: Node, now: float) -> None:
        """Count one logical request whose path ends at the end of `node`."""
        if node is self.root:
            return
        node.time = max(node.time, now)
        node.over, node.squeezed = False, 0.0
        if self.heat is not None:
            self.heat.use(node, now)
        for order in self.orders.values():
            order.use(self, node, now)

    def fresh(self, node: Node, now: float) -> None:
        """Note that a request whose use was counted above `node` has made it."""
        node.time = max(node.time, now)
        if self.heat is not None:
            self.heat.fresh(node, now)

    def doomed_tail(self, node: Node) -> bool:
        """Whether the end of a node is of no use to anybody: no resume point is left below it."""
        if node.over:
            return True
        if not self.states or node.children is not None:
            return False
        last = node.pages - 1  # asked of a leaf with each of its uses, however long it is
        return not all(any(self.get(node, last, t, g) != NO_COPY for t in LOCAL) for g in self.states)

    def _alive(self, node: Node) -> int:
        """Leading pages of a childless node that some state point still makes useful."""
        there = np.flatnonzero(np.logical_and.reduce([node.present(g) for g in self.states]))
        return int(there[-1]) + 1 if there.size else 0

    def tail(self, node: Node, tier: int, most: int = RUN_PAGES) -> tuple[int, int]:
        """Pages [lo, hi) to evict next from a leaf of the tier: its deepest copies, at most `most` pages.

        Empty where only this tier keeps a page that deeper pages in other tiers need; the leaf is offered again when
        those are gone.
        """
        last = max(map(held_to, node.at[tier * self.groups : (tier + 1) * self.groups]))
        first = max(0, last - most)
        if self.states and node.children is None:
            alive = self._alive(node)
            if first < alive < last:
                first = alive
        return self._expendable(node, tier, first, last), last

    def _expendable(self, node: Node, tier: int, first: int, last: int) -> int:
        """The first page of [first, last) from which on nothing cached would lose its parent."""
        others = [other for other in LOCAL if other != tier and node.count[other]]
        if not self.anchors or self.complete(node, others):
            return first
        if not others:
            return first if node.children is None else last
        lasting = self._whole(node, others)
        found = np.flatnonzero(lasting)
        deepest = node.pages if node.children is not None else int(found[-1]) if found.size else 0
        missing = np.flatnonzero(~lasting[first : min(deepest, last)])
        return first + int(missing[-1]) + 1 if missing.size else first

    def requeue(self, node: Node, tier: int) -> None:
        """Put a popped leaf back if something of it can go."""
        lo, hi = self.tail(node, tier) if node.tier_leaf(tier) else (0, 0)
        if lo < hi:
            self._offer(node, tier)
