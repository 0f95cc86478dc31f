"""Puts runs of the disk catalogue back into an index after a restart."""

from __future__ import annotations

from array import array

from kvtier.identity import CHAIN_BYTES
from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.tiers.ledger import PAGE_BITS
from kvtier.tiers.records import Run
from kvtier.types import NO_COPY, Tier

Places = dict[bytes, Node]
"""Chain key of a page -> a node that ends at or below it; the root's chain key -> the root."""


def graft(cache: Cache, run: Run, places: Places) -> list[int]:
    """Index one run; returns the pages of it (0..63) that have no place: their parent is gone, or disk has them.

    `places` grows with each run; runs come parents first. Engines may store meanwhile: what they stored of the same
    pages stays, and gets the disk copies.
    """
    every = [at for at in range(run.pages) if run.live >> at & 1]
    pages = _leading(run.live)
    if not pages or cache.retired:
        return every
    if cache.spec.keyed:
        return [] if _graft_key(cache, run) else every
    parent = places.get(run.parent)
    if parent is None or parent.dead or parent.end < run.depth:
        return every
    index = cache.radix
    if run.depth:
        parent = index.ending_at(parent, run.depth)
    node = index.extend(run.keys[: pages * index.stride], 0.0, parent)
    for at in range(pages):
        places[run.chains[at * CHAIN_BYTES : (at + 1) * CHAIN_BYTES]] = node
    refused = _put(cache, node, run, pages)
    index.publish(node, node.end)
    return [at for at in every if at in refused or at >= pages]


def _graft_key(cache: Cache, run: Run) -> bool:
    index = cache.keyed
    group = next((g for g, cells in enumerate(run.cells) if cells[0] != NO_COPY), None)
    if group is None:
        return False
    node = index.ensure(index.name(group, run.keys), 0.0)
    if _put(cache, node, run, 1):
        return False
    node.live = 1
    return True


def _leading(live: int) -> int:
    """Pages of a run up to its first hole: runs are trimmed from the tail."""
    return (~live & (live + 1)).bit_length() - 1


def _put(cache: Cache, node: Node, run: Run, pages: int) -> set[int]:
    """Record the run's copies along the path to `node`; returns the pages that disk has already."""
    refused: set[int] = set()
    for each in cache.index.path(node):
        lo, hi = max(each.depth, run.depth), min(each.end, run.depth + pages)
        if lo >= hi:
            continue
        held = [each.at[Tier.DISK * cache.index.groups + g] for g in range(cache.index.groups)]
        taken = {
            at for column in held if column for at in range(lo, hi) if column[at - each.depth] != NO_COPY
        }  # fmt: skip
        refused |= {at - run.depth for at in taken}
        for group in range(cache.index.groups):
            cells, sums = run.cells[group][lo - run.depth : hi - run.depth], run.sums[group]
            handles = array(
                "q",
                [
                    NO_COPY if cell == NO_COPY or at in taken else run.id << PAGE_BITS | at - run.depth
                    for at, cell in enumerate(cells, lo)
                ],
            )
            if handles.count(NO_COPY) < len(handles):
                part = sums[lo - run.depth : hi - run.depth]
                cache.index.put(each, lo - each.depth, Tier.DISK, group, handles, part)
    return refused
