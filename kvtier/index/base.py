"""What every index does with nodes: copies, leases, leaves, publishing, cutting. One owner thread; no locks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from kvtier.identity import CHAIN_BYTES, CacheSpec, chain_keys
from kvtier.index.check import checking
from kvtier.index.copies import Copies, Dropped, Watch
from kvtier.index.names import MASK, Ends, added, total
from kvtier.index.node import LOCAL, TIERS, Hold, Node, blank, held_to
from kvtier.index.order import Order, Warmth
from kvtier.types import NO_COPY, Tier


class Cut(NamedTuple):
    """What a cut took away: free copies now; the rest is doomed until the leases on it end."""

    freed: list[Dropped]
    pages: int
    doomed: int


class Index(Copies):
    """Nodes of one cache. Token caches use RadixIndex, keyed ones KeyedIndex; the rest is common.

    Invariants (see `checking`): a published page has a copy of every anchor group in some local tier; `refs` of a
    node is at least that of each child; counts and `below` agree with the handles.
    """

    def __init__(
        self, spec: CacheSpec, root_chain: bytes, orders: Mapping[int, Order], heat: Warmth | None = None
    ) -> None:
        super().__init__(spec, root_chain, orders, heat)
        self.nodes = 0
        self.pages = 0
        self.doomed: set[Node] = set()
        self._ends = Ends()

    # -- leases ----------------------------------------------------------------------------------------------

    def lease(self, node: Node, hold: Hold = Hold.READ) -> None:
        """Hold the path from the root to the end of `node`."""
        up: Node | None = node
        while up is not None:
            up.refs += 1
            if hold:
                up.low += 1
                up.pins += hold == Hold.PIN
            up = up.parent

    def unlease(self, node: Node, hold: Hold = Hold.READ) -> list[Dropped]:
        """Let the path go, as it was held; returns copies of pages that were cut meanwhile and are free now."""
        out: list[Dropped] = []
        up: Node | None = node
        while up is not None:
            up.refs -= 1
            if hold:
                up.low -= 1
                up.pins -= hold == Hold.PIN
            assert up.refs >= 0, "released more often than leased"
            if up.refs == 0:
                if up.dead:
                    out += self._bury(up)
                elif up is not self.root:
                    self._offer_all(up)
            elif up.refs == up.low:
                self._offer(up, Tier.DEVICE)
            up = up.parent
        if not node.dead and node.refs == 0 and (node.live < node.pages or not any(node.count)):
            self.settle(node)
        return out

    # -- structure -------------------------------------------------------------------------------------------

    def _attach(self, parent: Node, key: bytes, node: Node) -> None:
        self.version += 1
        if parent.children is None:
            parent.children = {}
        parent.children[key] = node

    def _detach(self, node: Node) -> None:
        """Take a node (with its subtree) off its parent, and its copies off the counts above."""
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[node.edge[: self.stride]]
        if not parent.children:
            parent.children = None
        for tier in range(TIERS):
            if node.count[tier] or node.below[tier]:
                self._vanish(node, tier)
        self._offer_all(parent)

    def settle(self, node: Node) -> None:
        """Drop tail pages that no tier holds, up to the first that is held, shared or leased."""
        while node is not self.root and not node.refs and node.children is None and not node.dead:
            parent = node.parent
            assert parent is not None
            keep = self._kept(node)
            if keep:
                if keep < node.pages:
                    self._truncate(node, keep)
                self._offer_all(node)
                return
            self._detach(node)
            self._die(node)
            parent.time = max(parent.time, node.time)
            node = parent

    def _die(self, node: Node) -> None:
        """Count a node out; orders that hold many dead entries sweep them."""
        node.dead = True
        self.version += 1
        self.nodes -= 1
        self.pages -= node.pages
        for order in self.orders.values():
            if order.queued(node):
                order.died()

    def _kept(self, node: Node) -> int:
        """Leading pages to keep: through the last published page whose required items some tier holds."""
        keep = 0
        there = [tier for tier in LOCAL if node.count[tier]]
        if len(self.anchors) < 2 or not there:
            for tier in there:
                for group in self.anchors or range(self.groups):
                    held = node.at[tier * self.groups + group]
                    keep = keep if held is None else max(keep, held_to(held[: node.live]))
            return keep
        present = np.ones(node.pages, dtype=bool)
        for group in self.anchors:
            present &= node.present(group)
        found = np.flatnonzero(present[: node.live])
        return int(found[-1]) + 1 if found.size else 0

    def _truncate(self, node: Node, keep: int) -> None:
        hole = blank(node.pages - keep).tobytes()
        assert all(held is None or held[keep:].tobytes() == hole for held in node.at), "truncated pages had copies"
        self.version += 1
        self.pages -= node.pages - keep
        if node.name is not None:
            node.name = self._ends.cut(node.name, node.edge, self.stride, node.depth, keep)
        node.edge = node.edge[: keep * self.stride]
        node.pages = keep
        node.live = min(node.live, keep)
        node.at = [None if held is None else held[:keep] for held in node.at]
        node.sums = [None if kept is None else kept[:keep] for kept in node.sums]
        node.chain = None if node.chain is None else node.chain[: keep * CHAIN_BYTES]

    def cut(self, node: Node) -> Cut:
        """Take `node` and all below it out of the index: lost or invalidated. Leased nodes are doomed."""
        self._detach(node)
        freed: list[Dropped] = []
        pages = doomed = 0
        stack = [node]
        while stack:
            at = stack.pop()
            stack += (at.children or {}).values()
            if self.watch is not None:
                self._untell(self.watch, at)
            self._die(at)
            pages += at.live
            if at.refs:
                self.doomed.add(at)
                doomed += at.pages
            else:
                freed += self._bury(at)
        return Cut(freed, pages, doomed)

    def _untell(self, watch: Watch, node: Node) -> None:
        """Tell the watch that nobody finds a node's pages any more, though leases may hold their copies yet.

        When those end is too late: the same pages may have been computed anew by then.
        """
        for tier in range(TIERS):
            held = node.at[tier * self.groups + self.anchors[0]]
            if held is not None:
                watch.lost(self, node, tier, 0, held_to(held))

    def _bury(self, node: Node) -> list[Dropped]:
        """All copies of a dead node that nobody holds."""
        self.doomed.discard(node)
        out = []
        for slot, held in enumerate(node.at):
            gone = array("q", [h for h in held or () if h != NO_COPY])
            node.at[slot] = None
            if gone:
                out.append(Dropped(slot // self.groups, slot % self.groups, gone))
                self._hold(slot // self.groups, slot % self.groups, -len(gone))
                self._told(node, slot // self.groups, 0, node.pages, len(gone))
        return out

    def chain_of(self, node: Node) -> bytes:
        """Chain keys of a node's pages, 16 bytes each (for the root: its own)."""
        return self.chain_to(node, node.pages)

    def chain_to(self, node: Node, pages: int) -> bytes:
        """The same of its first pages at least: those of a prompt of a million tokens take tens of milliseconds."""
        missing: list[Node] = []
        at, most = node, pages
        while len(at.chain or b"") < CHAIN_BYTES * most:
            missing.append(at)
            up = at.parent
            assert up is not None
            at, most = up, up.pages
        for each in reversed(missing):
            assert each.parent is not None
            known = each.chain or b""
            before = known[-CHAIN_BYTES:] or (each.parent.chain or b"")[-CHAIN_BYTES:]
            end = (pages if each is node else each.pages) * self.stride
            each.chain = known + chain_keys(
                before, each.edge[len(known) // CHAIN_BYTES * self.stride : end], self.stride
            )
        assert node.chain is not None
        return node.chain

    def name_of(self, node: Node) -> int:
        """The name of a node's last page (for the root: its own)."""
        missing: list[Node] = []
        at = node
        while (name := at.name) is None:
            missing.append(at)
            assert at.parent is not None
            at = at.parent
        for each in reversed(missing):
            name = each.name = name + total(each.edge, self.stride, each.depth) & MASK
        return name

    def names(self, node: Node, lo: int, hi: int, mask: int = 0) -> list[int]:
        """Names of pages [lo, hi) of a node, those with no bit of a mask."""
        if lo + 1 == node.pages:
            name = self.name_of(node)
            return [] if name & mask else [name]
        sums = np.cumsum(added(node.edge[lo * self.stride :], self.stride, node.depth + lo), dtype=np.uint64)
        found = sums[: hi - lo] + np.uint64(self.name_of(node) - int(sums[-1]) & MASK)
        out: list[int] = found[found & np.uint64(mask) == 0].tolist()
        return out

    def path(self, node: Node) -> Iterator[Node]:
        """The nodes from just below the root to `node`."""
        up: list[Node] = []
        while node is not self.root:
            up.append(node)
            assert node.parent is not None
            node = node.parent
        return reversed(up)

    @staticmethod
    def heir(node: Node) -> Node:
        """The node that a match has joined this one into, if one did, where nobody leased it meanwhile.

        It still has the next as its child. What was cut ends in something dead.
        """
        while node.dead and node.children:
            node = next(iter(node.children.values()))
        return node

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents before children, and all that is below one before all else.

        The index may change between two: pages that a split has moved to a node above are met there, and those of a
        node that was joined to one below are met below.
        """
        tops = list((self.root.children or {}).values())
        stack: list[tuple[Node, int]] = []
        while stack or tops:
            node, first = stack.pop() if stack else (tops.pop(), 0)  # pages before `first` were met
            if node.depth > first and not node.dead:
                above = next(up for up in self.path(node) if up.end > first)
                yield above
                stack.append((node, first if above.dead else above.end))
                continue
            if not node.dead:
                yield node
            if not node.dead:
                first = node.end
            stack += [(child, first) for child in (node.children or {}).values()]

    def move_to(self, share: int) -> Iterator[None]:
        """Belong to another quota from now on; every step finds one more node there. It may change between steps.

        Until the last step a node may be found under either, by whoever looks under all.
        """
        self.share, self.moving = share, True
        for node in self.walk():
            for order in self.orders.values():
                order.moved(self, node)
            yield
        self.moving = False

    def checking(self) -> Iterator[list[str]]:
        """Broken invariants, in words, in steps between which it may change; see kvtier.index.check.checking."""
        return checking(self)

    def check(self) -> list[str]:
        """All of them at once; empty when all hold."""
        return [line for step in self.checking() for line in step]
