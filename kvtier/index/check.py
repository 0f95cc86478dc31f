"""The index's invariants, checked from scratch: in tests after every step, in the daemon when it is idle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvtier.index.folded import FoldedNode
from kvtier.index.node import TIERS, Node
from kvtier.types import NO_COPY, Changed, Tier

if TYPE_CHECKING:
    from kvtier.index.base import Index


def checking(index: Index) -> Iterator[list[str]]:
    """Broken invariants, in words, a node a step; the index may change between two steps.

    Raises Changed at the end where it did: the nodes were right each at its time, the totals cannot be compared.
    """
    version = index.version
    nodes = pages = 0
    copies = [0] * TIERS
    for top in list((index.root.children or {}).values()):
        yield ["node at page 0: dead but reachable"] if top.dead and _reachable(index, top) else []
    for node in index.walk():
        nodes += 1
        pages += node.pages
        copies = [total + count for total, count in zip(copies, node.count, strict=True)]
        yield _check_place(index, node) + _check_copies(index, node)
    wrong = [f"doomed node at {n.depth} without lease" for n in index.doomed if not n.refs]
    if version == index.version:
        there = nodes, pages, [total + held for total, held in zip(copies, _doomed(index), strict=True)]
        if there != (index.nodes, index.pages, index.copies):
            wrong.append(f"counts (nodes, pages, copies) {(index.nodes, index.pages, index.copies)}; there are {there}")
        if index.copies != [sum(held) for held in index.held]:
            wrong.append(f"counts {index.copies} copies in all, by group {index.held}")
    yield wrong
    if version != index.version:
        raise Changed


def _doomed(index: Index) -> list[int]:
    """Copies per tier of the nodes that were cut while somebody held them."""
    found = [0] * TIERS
    for node in index.doomed:
        for tier in range(TIERS):
            held = [h for g in range(index.groups) if (h := node.handles(tier, g)) is not None]
            found[tier] += sum(int((h != NO_COPY).sum()) for h in held)
    return found


def _reachable(index: Index, node: Node) -> bool:
    """Whether the index still leads to a node."""
    parent = node.parent
    assert parent is not None
    return not parent.dead and (parent.children or {}).get(node.edge[: index.stride]) is node


def _check_place(index: Index, node: Node) -> list[str]:
    """Where a node is: its edge, its parent, its leases."""
    where = f"node at page {node.depth}"
    wrong = []
    if node.pages < 1 or (not isinstance(node, FoldedNode) and len(node.edge) != node.pages * index.stride):
        wrong.append(f"{where}: edge of {len(node.edge)} bytes for {node.pages} pages")
    if any(child.dead for child in (node.children or {}).values()):
        wrong.append(f"node at page {node.end}: dead but reachable")
    parent = node.parent
    assert parent is not None
    if parent.end != node.depth or (node.live and parent.live < parent.pages):
        wrong.append(f"{where}: published after unpublished pages of its parent")
    if sum(c.refs for c in (node.children or {}).values()) > node.refs:
        wrong.append(f"{where}: {node.refs} leases, fewer than its children")
    if not 0 <= node.pins <= node.low <= node.refs:
        wrong.append(f"{where}: {node.refs} leases, {node.low} of them not of a device, {node.pins} pins")
    return wrong


def _check_folded(index: Index, node: FoldedNode) -> list[str]:
    """What a node that nobody has looked into claims to hold."""
    pages = sum(run.pages for run in node.stored)
    claims = [pages * index.groups if tier == Tier.DISK else 0 for tier in range(TIERS)]
    right = pages == node.pages == node.live and node.count == claims
    return [] if right else [f"node at page {node.depth}: {node.count} copies of {node.pages} pages, disk has {pages}"]


def _check_copies(index: Index, node: Node) -> list[str]:
    """What a node holds: every published page somewhere, counts that agree, leaves that eviction finds."""
    where = f"node at page {node.depth}"
    if isinstance(node, FoldedNode):
        return _check_folded(index, node)
    wrong = [
        f"{where}: published page without group {group}"
        for group in index.anchors
        if not node.present(group)[: node.live].all()
    ]
    for tier in range(TIERS):
        held = [h for g in range(index.groups) if (h := node.handles(tier, g)) is not None]
        count = sum(int((h != NO_COPY).sum()) for h in held)
        below = sum(1 for c in (node.children or {}).values() if c.count[tier] or c.below[tier])
        if (count, below) != (node.count[tier], node.below[tier]):
            wrong.append(f"{where}: tier {tier} counts {node.count[tier]}/{node.below[tier]}, has {count}/{below}")
        order = index.orders.get(tier)
        queued = order is not None and (order.late or order.queued(node))
        free = order is not None and node.tier_leaf(tier) and not node.holds(tier)
        if free and not queued and (span := index.tail(node, tier))[0] < span[1]:
            wrong.append(f"{where}: free leaf of tier {tier} that eviction cannot find")
    return wrong
