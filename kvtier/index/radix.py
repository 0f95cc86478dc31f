"""The radix tree of a token cache: longest cached prefix over page keys.

Edges are bytes of whole page keys, compared by `startswith` (memcmp, no copy); only where an edge diverges does
numpy look for the page. A match touches only the deepest node: a parent takes its child's time when the child goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.identity import CHAIN_BYTES, CacheSpec
from kvtier.index.adopting import Adopting
from kvtier.index.node import LOCAL, Node
from kvtier.index.order import Order, Warmth
from kvtier.types import NO_COPY

CROWD: Final = 32
SHORT: Final = 8
"""So many nodes in a row with fewer pages each, on average, are joined where they can be."""


class Found(NamedTuple):
    """A match: `pages` pages from the root, the last of them in `node`; `pending` reserved pages follow."""

    node: Node
    pages: int
    pending: int


class RadixIndex(Adopting):
    """Token pages of one cache."""

    def __init__(
        self, spec: CacheSpec, root_chain: bytes, orders: Mapping[int, Order], heat: Warmth | None = None
    ) -> None:
        super().__init__(spec, root_chain, orders, heat)
        self._word = np.dtype("<u4") if self.stride % 4 == 0 else np.dtype("u1")

    def _common(self, edge: bytes, keys: bytes, at: int) -> int:
        """Leading whole pages that `edge` and keys[at:] share."""
        size = min(len(edge), len(keys) - at) // self.stride * self.stride
        words = size // self._word.itemsize
        left = np.frombuffer(edge, self._word, words)
        right = np.frombuffer(keys, self._word, words, at)
        differs = left != right
        first = int(differs.argmax()) if words else 0
        if not words or not differs[first]:
            return size // self.stride
        return first * self._word.itemsize // self.stride

    def match(self, keys: bytes, now: float) -> Found:
        """Deepest page boundary of `keys` where every group's rule holds; touches the node that ends there.

        A node that goes on after the boundary is not touched: its end was not asked for.
        """
        node, end, pending = self._descend(keys)
        if self.windows or self.states:
            node, end = self.resumable(node, end, LOCAL)
        if end and end == node.end:
            node.time = max(node.time, now)
        return Found(node, end, pending)

    def deepest(self, keys: bytes, above: Node | None = None) -> tuple[Node, int]:
        """Where the published part of the path below `above` (the root) ends, whatever the groups' rules say."""
        node, end, _ = self._descend(keys, above)
        return node, end

    def known(self, keys: bytes) -> int:
        """Pages of the path that are published or reserved by somebody."""
        _, end, pending = self._descend(keys)
        return end + pending

    def _descend(self, keys: bytes, above: Node | None = None) -> tuple[Node, int, int]:
        """The node that holds the last published page of the longest shared path, its boundary, pages pending."""
        stride = self.stride
        node = above or self.root
        at, size = 0, 0 if self.closed else len(keys)
        while at < size and node.children is not None:
            child = node.children.get(keys[at : at + stride])
            if child is None:
                break
            if child.live == child.pages and keys.startswith(child.edge, at):
                at += len(child.edge)
                node = child
                continue
            shared = self._common(child.edge, keys, at)
            done = min(shared, child.live)
            pending = shared - done
            if pending and shared == child.pages:
                pending += self._pending(child, keys, at + len(child.edge))
            return (child if done else node), at // stride + done, pending
        return node, at // stride, 0

    def _pending(self, node: Node, keys: bytes, at: int) -> int:
        """Reserved pages along keys[at:] below `node`."""
        total = 0
        while at < len(keys) and node.children is not None:
            child = node.children.get(keys[at : at + self.stride])
            if child is None:
                break
            if not keys.startswith(child.edge, at):
                return total + self._common(child.edge, keys, at)
            total += child.pages
            at += len(child.edge)
            node = child
        return total

    def resumable(self, node: Node, end: int, tiers: Sequence[int]) -> tuple[Node, int]:
        """The deepest boundary <= end where every group's rule holds with copies in `tiers`, and its node."""
        path = list(self.path(node))

        def along(group: int) -> NDArray[np.bool_]:
            parts = [n.present(group, tiers) for n in path]
            return np.concatenate(parts)[:end] if parts else np.zeros(0, dtype=bool)

        good = np.ones(end + 1, dtype=bool)
        if tiers is not LOCAL:
            for group in self.full:
                good[1:] &= np.logical_and.accumulate(along(group))
        for group in self.states:
            good[1:] &= along(group)
        boundary = np.arange(end + 1)
        tokens = self.spec.page_tokens
        for group, window in self.windows:
            missing = np.concatenate(([0], np.cumsum(~along(group))))
            good &= missing == missing[np.maximum(0, boundary * tokens - window) // tokens]
        good[0] = True
        end = int(np.flatnonzero(good)[-1])
        while end <= node.depth and node.parent is not None:
            node = node.parent
        return node, end

    def needed(self, pages: int) -> list[tuple[int, int, int]]:
        """(group, first, count) of the items that an engine resuming after `pages` pages reads."""
        out = [(group, 0, pages) for group in self.full]
        tokens = self.spec.page_tokens
        for group, window in self.windows:
            first = max(0, pages * tokens - window) // tokens
            out.append((group, first, pages - first))
        if pages:
            out += [(group, pages - 1, 1) for group in self.states]
        return sorted(out)

    def ending_at(self, node: Node, pages: int) -> Node:
        """The node that ends exactly at `pages`, splitting the one that `pages` falls inside."""
        node, at = self.locate(node, pages - 1)
        return node if at + 1 == node.pages else self.split(node, at + 1)

    def split(self, node: Node, at: int) -> Node:
        """Give the first `at` pages to a new parent, which is returned; `node` keeps the deeper ones.

        Whoever noted `node` meant its end or something below, so leases and page numbers stay right.
        """
        assert 0 < at < node.pages
        parent = node.parent
        assert parent is not None
        cut = at * self.stride
        upper = Node(parent, node.edge[:cut], node.depth, at, self.groups, node.time)
        upper.live = min(node.live, at)
        upper.refs, upper.low, upper.pins = node.refs, node.low, node.pins
        upper.keep = node.keep
        for slot, held in enumerate(node.at):
            if held is not None:
                upper.at[slot], node.at[slot] = _halves(held, at)
        for group, kept in enumerate(node.sums):
            if kept is not None:
                upper.sums[group], node.sums[group] = kept[:at], kept[at:]
        if node.chain is not None:
            upper.chain, node.chain = node.chain[: at * CHAIN_BYTES], node.chain[at * CHAIN_BYTES :] or None
        node.edge = node.edge[cut:]
        node.depth += at
        node.pages -= at
        node.live = max(0, node.live - at)
        node.parent = upper
        upper.children = {node.edge[: self.stride]: node}
        self._attach(parent, upper.edge[: self.stride], upper)
        self.nodes += 1
        if self.heat is not None:
            self.heat.split(upper, node)
        for order in self.orders.values():
            order.policy.split(upper, node)
        self._recount(upper, node)
        return upper

    def keep(self, node: Node, until: float) -> None:
        """Let a leaf go after those that nobody keeps, until then."""
        sooner = until < node.keep
        node.keep, node.over = until, False
        for order in self.orders.values() if sooner else ():
            order.moved(self, node)
        self._offer_all(node)

    def give_up(self, node: Node, page: int) -> None:
        """Let what ends at `node` go first, back to `page` or to where something else goes on; a use takes it back."""
        while node is not self.root and node.end > page and all(c.over for c in (node.children or {}).values()):
            if node.depth < page:
                self.split(node, page - node.depth)
            node.over, node.keep = True, 0.0
            self._offer_all(node)
            assert node.parent is not None
            node = node.parent

    def crowded(self, node: Node) -> bool:
        """Whether the path to `node` is cut into so many short nodes that a match of it is slow."""
        up, steps = node, 0
        while steps < CROWD and up.parent is not None:
            up, steps = up.parent, steps + 1
        return steps == CROWD and node.end - up.end < SHORT * CROWD

    def join(self, node: Node) -> int:
        """Give `node` the pages above it, as far as nothing ends or branches off between; returns nodes that went.

        Only for a node that was used just now, when all above it was used too: the order of eviction stays what it is.
        Whoever noted a node that goes held a lease on its end, and then it stays.
        """
        gone: list[Node] = []
        top = node
        while (up := top.parent) is not None and up is not self.root and self._joinable(up, node):
            gone.append(up)
            top = up
        if not gone:
            return 0
        chain = [*reversed(gone), node]
        node.at = [_joined([each.at[n] for each in chain], chain, b"\xff" * 8) for n in range(len(node.at))]
        node.sums = [_joined([each.sums[g] for each in chain], chain, bytes(8)) for g in range(self.groups)]
        for up in gone:
            if self.heat is not None:
                self.heat.join(up, node)
            for order in self.orders.values():
                order.policy.join(up, node)
        known = [each.chain or b"" for each in chain]
        whole = all(len(keys) == CHAIN_BYTES * each.pages for keys, each in zip(known, chain, strict=True))
        node.chain = b"".join(known) if whole else None
        node.edge = b"".join(each.edge for each in chain)
        node.depth, node.parent = top.depth, top.parent
        node.pages += sum(up.pages for up in gone)
        node.live += sum(up.pages for up in gone)
        node.count = [sum(each.count[tier] for each in chain) for tier in range(len(node.count))]
        assert node.parent is not None
        self._attach(node.parent, node.edge[: self.stride], node)
        for up in gone:
            self.pages += up.pages
            self._die(up)
        self._offer_all(node)
        return len(gone)

    @staticmethod
    def _joinable(up: Node, node: Node) -> bool:
        """Whether a node with one child only differs in nothing from it that matters."""
        assert up.children is not None
        held = (up.refs, up.low, up.pins) == (node.refs, node.low, node.pins)
        alike = held and up.keep == node.keep and not up.over
        return len(up.children) == 1 and up.live == up.pages and up.time <= node.time and alike

    def _recount(self, upper: Node, lower: Node) -> None:
        """Share the copies' counts out between the halves of a split."""
        for tier, total in enumerate(lower.count):
            if not total:
                upper.below[tier] = int(lower.below[tier] > 0)
                continue
            held = [lower.handles(tier, g) for g in range(self.groups)]
            kept = sum(int((h != NO_COPY).sum()) for h in held if h is not None)
            lower.count[tier], upper.count[tier] = kept, total - kept
            upper.below[tier] = int(kept > 0 or lower.below[tier] > 0)
            self._offer(upper, tier)

    def extend(self, keys: bytes, now: float, above: Node | None = None) -> Node:
        """The node that ends at the last page of `keys` below `above` (the root), unpublished where it was new."""
        node = above or self.root
        at = 0
        while at < len(keys):
            child = None if node.children is None else node.children.get(keys[at : at + self.stride])
            if child is None:
                return self.grow(node, keys[at:], now)
            if not keys.startswith(child.edge, at):
                child = self.split(child, self._common(child.edge, keys, at))
            at += len(child.edge)
            node = child
        return node

    def grow(self, parent: Node, edge: bytes, now: float) -> Node:
        """A new unpublished leaf under `parent`, whose children must not begin with its first page."""
        node = Node(parent, edge, parent.end, len(edge) // self.stride, self.groups, now)
        self._attach(parent, edge[: self.stride], node)
        self.nodes += 1
        self.pages += node.pages
        return node

    def publish(self, node: Node, through: int) -> None:
        """Serve the pages of the path up to page number `through` (exclusive), within `node` or above it."""
        up: Node | None = node
        while up is not None and up is not self.root:
            if up.depth < through:
                live = min(up.pages, through - up.depth)
                if up.live >= live:
                    return  # and so is all above
                up.live = live
            up = up.parent

    def cut_at(self, node: Node, depth: int) -> Node:
        """The node that begins exactly at page `depth`, splitting if need be (to `cut` it)."""
        node, at = self.locate(node, depth)
        if at:
            self.split(node, at)
        return node


def _halves(held: array[int], at: int) -> tuple[array[int] | None, array[int] | None]:
    """Handles before and after a split; a half without copies is None."""
    first, last = held[:at], held[at:]
    empty = b"\xff" * 8
    return (
        None if first.tobytes() == empty * len(first) else first,
        None if last.tobytes() == empty * len(last) else last,
    )


def _joined(parts: Sequence[array[int] | None], chain: Sequence[Node], empty: bytes) -> array[int] | None:
    """What nodes in a row have of each page, one after the other; None where none has anything."""
    kept = next((part for part in parts if part is not None), None)
    if kept is None:
        return None
    out = array(kept.typecode)
    for part, node in zip(parts, chain, strict=True):
        out.frombytes(empty * node.pages if part is None else part.tobytes())
    return out
