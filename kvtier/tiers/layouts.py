"""Which cells packed items may have.

A packed item lies in a smaller cell. In its run it is filed under another group: group g packed to the n-th share of a
full cell is group g + n * groups, so that all that is done with cells is the same for it.
"""

from __future__ import annotations

from typing import Final

from kvtier.tiers.cells import BLOCK, Layout

SHARES: Final = (13, 11, 8)
"""Sixteenths of a full cell that packed ones may have: with the full one four sizes a group."""


def packed_layouts(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """The layouts of a run with packed items: full ones, then those of each share; no blocks where none is gained."""
    out = list(layouts)
    last = [layout.blocks for layout in layouts]
    for share in SHARES:
        for group, (blocks, parts, slab) in enumerate(layouts):
            size = -(-blocks * share // 16)
            gains = parts == 1 and size < last[group]
            last[group] = size if gains else last[group]
            out.append(Layout(size if gains else 0, 1, slab))
    return tuple(out)


def packed_group(layouts: tuple[Layout, ...], group: int, size: int) -> int:
    """The group under which an item of so many packed bytes is filed; its own where no cell is small enough for it."""
    groups = len(layouts) // (1 + len(SHARES))
    best = group
    for virtual in range(group + groups, len(layouts), groups):
        if layouts[virtual].blocks * BLOCK >= size:
            best = virtual
    return best
