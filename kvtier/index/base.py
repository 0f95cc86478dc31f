"""What every index does with nodes: copies, leases, leaves, publishing, cutting. One owner thread; no locks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvtier.identity import CacheSpec, chain_keys
from kvtier.index.check import check
from kvtier.index.node import LOCAL, TIERS, Node, blank
from kvtier.index.order import Order
from kvtier.types import NO_COPY, RUN_PAGES, Kind

_HOLE = b"\xff" * 8
"""NO_COPY as it lies in an array of handles."""


class Dropped(NamedTuple):
    """Copies that left the index: the tier's owner frees them."""

    tier: int
    group: int
    handles: array[int]


class Cut(NamedTuple):
    """What a cut took away: free copies now; the rest is doomed until the leases on it end."""

    freed: list[Dropped]
    pages: int
    doomed: int


class Index:
    """Nodes of one cache. Token caches use RadixIndex, keyed ones KeyedIndex; the rest is common.

    Invariants (see `check`): a published page has a copy of every anchor group in some local tier; `refs` of a
    node is at least that of each child; counts and `below` agree with the handles.
    """

    def __init__(self, spec: CacheSpec, root_chain: bytes, orders: Mapping[int, Order]) -> None:
        self.spec = spec
        self.stride = spec.stride
        self.groups = len(spec.groups)
        self.full = [n for n, g in enumerate(spec.groups) if g.kind is Kind.FULL]
        self.states = [n for n, g in enumerate(spec.groups) if g.kind is Kind.STATE]
        self.windows = [(n, g.window) for n, g in enumerate(spec.groups) if g.kind is Kind.WINDOW]
        self.anchors = [] if spec.keyed else self.full or [self.windows[0][0]]
        """Groups that every published page has a copy of in some local tier."""
        self.orders = orders
        self.root = Node(None, b"", 0, 0, self.groups, 0.0)
        self.root.chain = root_chain
        self.nodes = 0
        self.pages = 0
        self.doomed: set[Node] = set()

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
        if isinstance(handles, array) and isinstance(sums, array) and _HOLE not in handles.tobytes():
            assert held[at:end].tobytes() == _HOLE * len(handles), "copy overwritten"
            held[at:end], kept[at:end] = handles, sums
            self._gain(node, tier, len(handles))
            return
        gained = 0
        for position, handle in enumerate(handles, at):
            if handle != NO_COPY:
                assert held[position] == NO_COPY, "copy overwritten"
                held[position] = handle
                kept[position] = sums[position - at]
                gained += 1
        if gained:
            self._gain(node, tier, gained)

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
            gone = array("q", [h for h in held[lo:hi] if h != NO_COPY])
            if gone:
                held[lo:hi] = blank(hi - lo)
                lost += len(gone)
                out.append(Dropped(tier, group, gone))
        if lost:
            node.count[tier] -= lost
            if node.count[tier] == 0:
                node.at[tier * self.groups : (tier + 1) * self.groups] = [None] * self.groups
                if node.below[tier] == 0:
                    self._vanish(node, tier)
        return out

    def _gain(self, node: Node, tier: int, copies: int) -> None:
        """Account for new copies; the first in a subtree shows all the way up."""
        before = node.count[tier]
        node.count[tier] = before + copies
        if node.below[tier]:
            return
        if before == 0:
            up = node.parent
            while up is not None:
                up.below[tier] += 1
                if up.below[tier] > 1 or up.count[tier]:
                    break
                up = up.parent
        self._offer_all(node)

    def _vanish(self, node: Node, tier: int) -> None:
        """The subtree of `node` holds nothing in the tier any more; its parent may be the leaf now."""
        up = node.parent
        while up is not None:
            up.below[tier] -= 1
            if up.below[tier]:
                return
            if up.count[tier]:
                up.time = max(up.time, node.time)
                self._offer(up, tier)
                return
            up = up.parent

    def _offer(self, node: Node, tier: int) -> None:
        """Queue a leaf that nobody holds for eviction."""
        order = self.orders.get(tier)
        if order is not None and not node.refs and not node.dead and node.tier_leaf(tier):
            order.push(self, node)

    def _offer_all(self, node: Node) -> None:
        """Queue a node in every tier where it is a free leaf."""
        for tier in self.orders:
            self._offer(node, tier)

    # -- eviction --------------------------------------------------------------------------------------------

    def rank(self, node: Node, tier: int) -> float:
        """Lower goes first: dead tails (no resume point left below them), then the least recently used."""
        del tier
        if self.states and node.children is None and self._alive(node) < node.pages:
            return float("-inf")
        return node.time

    def _alive(self, node: Node) -> int:
        """Leading pages of a childless node that some state point still makes useful."""
        for at in range(node.pages - 1, -1, -1):
            if all(any(self.get(node, at, t, g) != NO_COPY for t in LOCAL) for g in self.states):
                return at + 1
        return 0

    def tail(self, node: Node, tier: int, most: int = RUN_PAGES) -> tuple[int, int]:
        """Pages [lo, hi) to evict next from a leaf of the tier: its deepest copies, at most `most` pages.

        Empty where only this tier keeps a page that deeper pages in other tiers need; the leaf is offered again when
        those are gone.
        """
        last = 0
        for group in range(self.groups):
            held = node.handles(tier, group)
            if held is not None and (found := np.flatnonzero(held != NO_COPY)).size:
                last = max(last, int(found[-1]) + 1)
        first = max(0, last - most)
        if self.states and node.children is None:
            alive = self._alive(node)
            if first < alive < last:
                first = alive
        return self._expendable(node, tier, first, last), last

    def _expendable(self, node: Node, tier: int, first: int, last: int) -> int:
        """The first page of [first, last) from which on nothing cached would lose its parent."""
        beyond = node.children is not None or any(
            held is not None and held[last:].count(NO_COPY) < node.pages - last for held in node.at
        )
        if not beyond:
            return first
        others = [t for t in LOCAL if t != tier]
        for group in self.anchors:
            alone = np.flatnonzero(~node.present(group, others)[first:last])
            if alone.size:
                first += int(alone[-1]) + 1
        return first

    def requeue(self, node: Node, tier: int) -> None:
        """Put a popped leaf back if something of it can go."""
        lo, hi = self.tail(node, tier) if node.tier_leaf(tier) else (0, 0)
        if lo < hi:
            self._offer(node, tier)

    # -- leases ----------------------------------------------------------------------------------------------

    def lease(self, node: Node) -> None:
        """Hold the path from the root to the end of `node`."""
        up: Node | None = node
        while up is not None:
            up.refs += 1
            up = up.parent

    def unlease(self, node: Node) -> list[Dropped]:
        """Let the path go; returns copies of pages that were cut meanwhile and are free now."""
        out: list[Dropped] = []
        up: Node | None = node
        while up is not None:
            up.refs -= 1
            assert up.refs >= 0, "released more often than leased"
            if up.refs == 0:
                if up.dead:
                    out += self._bury(up)
                elif up is not self.root:
                    self._offer_all(up)
            up = up.parent
        if not node.dead and node.refs == 0 and (node.live < node.pages or not any(node.count)):
            self.settle(node)
        return out

    # -- structure -------------------------------------------------------------------------------------------

    def _attach(self, parent: Node, key: bytes, node: Node) -> None:
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
        self.nodes -= 1
        self.pages -= node.pages
        for tier, order in self.orders.items():
            if node.queued >> tier & 1:
                order.died()

    def _kept(self, node: Node) -> int:
        """Leading pages to keep: through the last published page whose required items some tier holds."""
        keep = 0
        present = np.full(node.pages, fill_value=bool(self.anchors))
        for group in self.anchors:
            present &= node.present(group)
        for group in () if self.anchors else range(self.groups):
            present |= node.present(group)
        found = np.flatnonzero(present[: node.live])
        if found.size:
            keep = int(found[-1]) + 1
        return keep

    def _truncate(self, node: Node, keep: int) -> None:
        assert all(held is None or all(h == NO_COPY for h in held[keep:]) for held in node.at), (
            "truncated pages still had copies"
        )
        self.pages -= node.pages - keep
        node.edge = node.edge[: keep * self.stride]
        node.pages = keep
        node.live = min(node.live, keep)
        node.at = [None if held is None else held[:keep] for held in node.at]
        node.sums = [None if kept is None else kept[:keep] for kept in node.sums]
        node.chain = None if node.chain is None else node.chain[: keep * 16]

    def cut(self, node: Node) -> Cut:
        """Take `node` and all below it out of the index: lost or invalidated. Leased nodes are doomed."""
        self._detach(node)
        freed: list[Dropped] = []
        pages = doomed = 0
        stack = [node]
        while stack:
            at = stack.pop()
            stack += (at.children or {}).values()
            self._die(at)
            pages += at.live
            if at.refs:
                self.doomed.add(at)
                doomed += at.pages
            else:
                freed += self._bury(at)
        return Cut(freed, pages, doomed)

    def _bury(self, node: Node) -> list[Dropped]:
        """All copies of a dead node that nobody holds."""
        self.doomed.discard(node)
        out = []
        for slot, held in enumerate(node.at):
            gone = array("q", [h for h in held or () if h != NO_COPY])
            node.at[slot] = None
            if gone:
                out.append(Dropped(slot // self.groups, slot % self.groups, gone))
        return out

    def chain_of(self, node: Node) -> bytes:
        """Chain keys of a node's pages, 16 bytes each (for the root: its own)."""
        missing = []
        at: Node = node
        while at.chain is None:
            missing.append(at)
            assert at.parent is not None
            at = at.parent
        for each in reversed(missing):
            assert each.parent is not None
            before = self.chain_of(each.parent)[-16:]
            each.chain = chain_keys(before, each.edge, self.stride)
        assert node.chain is not None
        return node.chain

    def path(self, node: Node) -> Iterator[Node]:
        """The nodes from just below the root to `node`."""
        up: list[Node] = []
        while node is not self.root:
            up.append(node)
            assert node.parent is not None
            node = node.parent
        return reversed(up)

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents before children."""
        stack = list((self.root.children or {}).values())
        while stack:
            node = stack.pop()
            yield node
            stack += (node.children or {}).values()

    def check(self) -> list[str]:
        """Broken invariants, in words; empty when all hold."""
        return check(self)
