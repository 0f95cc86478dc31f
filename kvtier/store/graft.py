"""Puts runs of the disk catalogue back into an index after a restart."""

from __future__ import annotations

import struct
from array import array
from itertools import repeat
from typing import Final, NamedTuple

from kvtier.identity import CHAIN_BYTES
from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.tiers.ledger import PAGE_BITS, PAGE_MASK
from kvtier.tiers.records import Run
from kvtier.types import NO_COPY, RUN_PAGES, Tier

_CHAINS: Final = [struct.Struct(f"{CHAIN_BYTES}s" * pages) for pages in range(RUN_PAGES + 1)]

Places = dict[bytes, Node]
"""Chain key of a page -> a node that ends at or below it; the root's chain key -> the root."""


class Late(NamedTuple):
    """The rest of a run with a hole: it hangs below a page that another run brings."""

    cache: Cache
    run: Run
    keys: bytes
    chains: bytes
    first: int


def graft(cache: Cache, run: Run, places: Places) -> tuple[list[int], Late | None]:
    """Index one run; returns the pages of it (0..63) that have no place, and what must wait for other runs.

    A page has no place when its parent is gone or disk has it already. `places` grows with each run; runs come parents
    first. Engines may store meanwhile: what they stored of the same pages stays, and gets the disk copies. A run may
    bring other groups' items of pages that earlier runs brought.
    """
    if cache.retired or not run.live:
        return _live(run, 0), None
    if cache.spec.keyed:
        return ([] if _graft_key(cache, run) else _live(run, 0)), None
    return graft_late(Late(cache, run, run.keys, run.chains, 0), places)


def graft_late(part: Late, places: Places) -> tuple[list[int], Late | None]:
    """Index the pages of a run from `first` up to the next hole."""
    cache, run, first = part.cache, part.run, part.first
    index = cache.radix
    depth = run.depth + first
    parent = places.get(run.parent if not first else part.chains[(first - 1) * CHAIN_BYTES : first * CHAIN_BYTES])
    if cache.retired or parent is None or parent.dead or parent.end < depth:
        return _live(run, first), None
    if depth:
        parent = index.ending_at(parent, depth)
    keys = part.keys[first * index.stride :]
    end = _whole(run, first + index.deepest(keys, parent)[1], index.anchors)
    if end == first:
        return _live(run, first), None
    node = index.extend(keys[: (end - first) * index.stride], 0.0, parent)
    chains = part.chains[first * CHAIN_BYTES : end * CHAIN_BYTES]
    places.update(zip(_CHAINS[end - first].unpack(chains), repeat(node)))
    if not first and end == run.pages and node.pages == end and _put_whole(cache, node, run):
        index.publish(node, node.end)
        return [], None
    used = _put(cache, node, run, first, end)
    index.publish(node, node.end)
    after = _live(run, end)
    refused = [at for at in _live(run, first) if at < end and at not in used]
    return refused, part._replace(first=after[0]) if after else None


def _live(run: Run, first: int) -> list[int]:
    """Pages from `first` on that the run still stores."""
    return [at for at in range(first, run.pages) if run.live >> at & 1]


def _whole(run: Run, known: int, anchors: list[int]) -> int:
    """Leading pages that are `known` already or of which the run has all that a page needs."""
    if run.live == (1 << run.pages) - 1 and not any(NO_COPY in run.cells[g] for g in anchors):
        return run.pages
    while known < run.pages and run.live >> known & 1 and all(run.cells[g][known] != NO_COPY for g in anchors):
        known += 1
    return known


def _graft_key(cache: Cache, run: Run) -> bool:
    index = cache.keyed
    group = next((g for g, cells in enumerate(run.cells) if cells[0] != NO_COPY), None)
    if group is None:
        return False
    node = index.ensure(index.name(group, run.keys), 0.0)
    if not _put(cache, node, run, 0, 1):
        return False
    node.live = 1
    return True


def _put_whole(cache: Cache, node: Node, run: Run) -> bool:
    """The same for most runs: all of a run that makes up a node that disk had nothing of; False where it is not so."""
    index = cache.index
    if node.count[Tier.DISK] or run.live != (1 << run.pages) - 1 or any(NO_COPY in cells for cells in run.cells):
        return False
    handles = array("q", range(run.id << PAGE_BITS, (run.id << PAGE_BITS) + run.pages))
    for group, sums in enumerate(run.sums):
        index.put(node, 0, Tier.DISK, group, handles, sums)
    return True


def _put(cache: Cache, node: Node, run: Run, first: int, end: int) -> set[int]:
    """Record the copies of pages [first, end) of the run that disk does not have; returns their pages."""
    used: set[int] = set()
    below: list[Node] = []
    up: Node | None = node
    while up is not None and up.end > run.depth + first:
        below.append(up)
        up = up.parent
    for each in reversed(below):
        lo, hi = max(each.depth, run.depth + first), min(each.end, run.depth + end)
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
