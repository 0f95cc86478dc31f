"""One node of the index: a run of pages on a radix edge (or one keyed page) and where their copies are."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.types import NO_COPY, Tier

TIERS = len(Tier)
LOCAL = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""Tiers whose copies count for what is cached here; a peer's copy is a hint."""


class Hold(enum.IntEnum):
    """What whoever holds a path does with it, and so what may become of its copies."""

    READ = 0
    """Reads it in any tier: nothing of it goes or moves."""
    LOW = 1
    """Reads it in host: what a device has of it may go."""
    PIN = 2
    """Reads none of it: it stays in host, and may be moved there, too."""


class Node:
    """`pages` consecutive pages. Only Index changes a node.

    `at[tier * groups + group]` holds one copy handle per page (or None: no copy there at all); `sums[group]`
    the xxh3-64 of each page's item. Plain ints and arrays, so that a page costs tens of bytes.
    """

    __slots__ = (
        "at", "below", "chain", "children", "count", "dead", "depth", "edge", "heat", "keep", "live", "low", "name",
        "notes", "over", "pages", "parent", "pins", "queued", "refs", "squeezed", "stored", "sums", "time",
    )  # fmt: skip

    stored: Any
    """See folded.py."""

    def __init__(self, parent: Node | None, edge: bytes, depth: int, pages: int, groups: int, time: float) -> None:
        self.parent = parent
        self.edge = edge
        self.depth = depth
        """Page number (from the root) of the first page."""
        self.pages = pages
        self.live = 0
        """Leading pages that are published; the rest is reserved and not served."""
        self.children: dict[bytes, Node] | None = None
        self.refs = 0
        """Leases that pass through this node."""
        self.low = 0
        """Those among them that are no Hold.READ."""
        self.pins = 0
        """Those among them that are Hold.PIN."""
        self.time = time
        self.dead = False
        """Cut from the index; its copies go when the last lease does."""
        self.queued = 0
        """Byte per tier: the lane of that tier's order that has an entry of this node, plus one; 0 for none."""
        self.keep = 0.0
        """Until when it goes after all that nobody asked to keep."""
        self.squeezed = 0.0
        """Until when a flush leaves it alone: disk gave it up for want of room. A use takes that back."""
        self.over = False
        """Somebody said that nothing will come after it: it goes first."""
        self.heat: Any = None
        """Access scores, once there are any."""
        self.notes: list[Any] | None = None
        """What each tier's policy notes of it."""
        self.at: list[array[int] | None] = [None] * (TIERS * groups)
        self.sums: list[array[int] | None] = [None] * groups
        self.count = [0] * TIERS
        """Copies per tier, over all groups."""
        self.below = [0] * TIERS
        """Children per tier whose subtrees hold copies there."""
        self.chain: bytes | None = None
        """Chain keys of the leading pages, 16 bytes each, as far as somebody asked."""
        self.name: int | None = None
        """Name of the last page, once somebody asked (see names)."""

    @property
    def end(self) -> int:
        """Page number just after the last page."""
        return self.depth + self.pages

    def holds(self, tier: int) -> int:
        """Leases that keep its copies in a tier where they are."""
        return self.refs - self.low if tier == Tier.DEVICE else self.refs

    def readers(self, tier: int) -> int:
        """Leases whose holders may read its copies in a tier where they lie."""
        return self.refs - (self.low if tier == Tier.DEVICE else self.pins)

    def tier_leaf(self, tier: int) -> bool:
        """Whether copies are here and none below, in this tier."""
        return self.count[tier] > 0 and self.below[tier] == 0

    def handles(self, tier: int, group: int) -> NDArray[np.int64] | None:
        """A copy of the handles of one tier and group, or None."""
        held = self.at[tier * len(self.sums) + group]
        return None if held is None else np.array(held, dtype=np.int64)

    def present(self, group: int, tiers: Sequence[int] = LOCAL) -> NDArray[np.bool_]:
        """Per page: whether one of `tiers` holds this group's item."""
        out = np.zeros(self.pages, dtype=bool)
        for tier in tiers:
            held = self.handles(tier, group)
            if held is not None:
                out |= held != NO_COPY
        return out


def blank(pages: int) -> array[int]:
    """Handles of `pages` pages with no copy."""
    return array("q", b"\xff" * (8 * pages))


def held_to(held: array[int] | None) -> int:
    """Pages up to the last that has a copy. No handle is negative, so that the last byte of none is that of NO_COPY."""
    return 0 if held is None else -(-len(held.tobytes().rstrip(b"\xff")) // 8)


def shared_to(one: Node, other: Node) -> int:
    """Where the paths to two nodes of one index part: the end of the last node that is on both."""
    up: Node | None = one
    beside: Node | None = other
    while up is not beside:
        if up is None or beside is None:
            return 0
        if up.end >= beside.end:
            up = up.parent
        else:
            beside = beside.parent
    return 0 if up is None else up.end


def on_path(deep: Node, node: Node) -> bool:
    """Whether `node` is on the path to `deep`."""
    up: Node | None = deep
    while up is not None and up.depth >= node.depth:
        if up is node:
            return True
        up = up.parent
    return False
