"""Puts runs of the disk catalogue back into an index after a restart."""

from __future__ import annotations

from array import array

from kvtier.identity import CHAIN_BYTES
from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.tiers.ledger import PAGE_BITS, PAGE_MASK
from kvtier.tiers.records import Run
from kvtier.types import NO_COPY, Tier

Places = dict[bytes, Node]
"""Chain key of a page -> a node that ends at or below it; the root's chain key -> the root."""


def graft(cache: Cache, run: Run, places: Places) -> list[int]:
    """Index one run; returns the pages of it (0..63) that have no place: their parent is gone, or disk has them.

    `places` grows with each run; runs come parents first. Engines may store meanwhile: what they stored of the same
    pages stays, and gets the disk copies. A run may bring other groups' items of pages that earlier runs brought.
    """
    every = [at for at in range(run.pages) if run.live >> at & 1]
    if not every or cache.retired:
        return every
    if cache.spec.keyed:
        return [] if _graft_key(cache, run) else every
    parent = places.get(run.parent)
    if parent is None or parent.dead or parent.end < run.depth:
        return every
    index = cache.radix
    if run.depth:
        parent = index.ending_at(parent, run.depth)
    pages = _whole(run, index.deepest(run.keys, parent)[1], index.anchors)
    if not pages:
        return every
    node = index.extend(run.keys[: pages * index.stride], 0.0, parent)
    for at in range(pages):
        places[run.chains[at * CHAIN_BYTES : (at + 1) * CHAIN_BYTES]] = node
    used = _put(cache, node, run, pages)
    index.publish(node, node.end)
    return [at for at in every if at not in used]


def _whole(run: Run, known: int, anchors: list[int]) -> int:
    """Leading pages that are `known` already or of which the run has all that a page needs."""
    while known < run.pages and run.live >> known & 1 and all(run.cells[g][known] != NO_COPY for g in anchors):
        known += 1
    return known


def _graft_key(cache: Cache, run: Run) -> bool:
    index = cache.keyed
    group = next((g for g, cells in enumerate(run.cells) if cells[0] != NO_COPY), None)
    if group is None:
        return False
    node = index.ensure(index.name(group, run.keys), 0.0)
    if not _put(cache, node, run, 1):
        return False
    node.live = 1
    return True


def _put(cache: Cache, node: Node, run: Run, pages: int) -> set[int]:
    """Record those of the run's copies along the path to `node` that disk does not have; returns their pages."""
    used: set[int] = set()
    for each in cache.index.path(node):
        lo, hi = max(each.depth, run.depth), min(each.end, run.depth + pages)
        if lo >= hi:
            continue
        part = slice(lo - run.depth, hi - run.depth)
        for group in range(cache.index.groups):
            column = each.at[Tier.DISK * cache.index.groups + group]
            held = column[lo - each.depth : hi - each.depth] if column else [NO_COPY] * (hi - lo)
            handles = array(
                "q",
                [
                    run.id << PAGE_BITS | at if cell != NO_COPY == have and run.live >> at & 1 else NO_COPY
                    for at, (cell, have) in enumerate(zip(run.cells[group][part], held, strict=True), lo - run.depth)
                ],
            )
            mine = [handle & PAGE_MASK for handle in handles if handle != NO_COPY]
            if mine:
                used.update(mine)
                cache.index.put(each, lo - each.depth, Tier.DISK, group, handles, run.sums[group][part])
    return used
