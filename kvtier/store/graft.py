"""Puts runs of the disk catalogue back into an index after a restart."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from kvtier.identity import CHAIN_BYTES
from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.tiers.ledger import PAGE_BITS
from kvtier.tiers.records import Run
from kvtier.types import NO_COPY, Tier

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
    first. Engines may store meanwhile: what they stored of the same pages stays, and gets the disk copies.
    """
    if cache.retired or not run.live:
        return _live(run, 0), None
    if cache.spec.keyed:
        return ([] if _graft_key(cache, run) else _live(run, 0)), None
    return _graft_part(places, Late(cache, run, run.keys, run.chains, 0))


def graft_late(late: Late, places: Places) -> tuple[list[int], Late | None]:
    """Index what had to wait, up to the next hole."""
    if late.cache.retired:
        return _live(late.run, late.first), None
    return _graft_part(places, late)


def _graft_part(places: Places, part: Late) -> tuple[list[int], Late | None]:
    """Index the pages of a run from `first` up to the next hole."""
    cache, run, first = part.cache, part.run, part.first
    end = first
    while run.live >> end & 1:
        end += 1
    depth = run.depth + first
    parent = places.get(run.parent if not first else part.chains[(first - 1) * CHAIN_BYTES : first * CHAIN_BYTES])
    if parent is None or parent.dead or parent.end < depth:
        return _live(run, first), None
    index = cache.radix
    if depth:
        parent = index.ending_at(parent, depth)
    node = index.extend(part.keys[first * index.stride : end * index.stride], 0.0, parent)
    for at in range(first, end):
        places[part.chains[at * CHAIN_BYTES : (at + 1) * CHAIN_BYTES]] = node
    refused = sorted(_put(cache, node, run, first, end))
    index.publish(node, node.end)
    after = _live(run, end)
    return refused, part._replace(first=after[0]) if after else None


def _live(run: Run, first: int) -> list[int]:
    """Pages from `first` on that the run still stores."""
    return [at for at in range(first, run.pages) if run.live >> at & 1]


def _graft_key(cache: Cache, run: Run) -> bool:
    index = cache.keyed
    group = next((g for g, cells in enumerate(run.cells) if cells[0] != NO_COPY), None)
    if group is None:
        return False
    node = index.ensure(index.name(group, run.keys), 0.0)
    if _put(cache, node, run, 0, 1):
        return False
    node.live = 1
    return True


def _put(cache: Cache, node: Node, run: Run, first: int, end: int) -> set[int]:
    """Record the copies of pages [first, end) of the run on the path to `node`; returns those that disk has already."""
    refused: set[int] = set()
    groups = range(cache.index.groups)
    for each in cache.index.path(node):
        lo, hi = max(each.depth - run.depth, first), min(each.end - run.depth, end)
        if lo >= hi:
            continue
        shift = run.depth - each.depth
        columns = [column for g in groups if (column := each.at[Tier.DISK * cache.index.groups + g])]
        taken = {at for at in range(lo, hi) if any(column[at + shift] != NO_COPY for column in columns)}
        refused |= taken
        for group in groups:
            cells = run.cells[group]
            handles = array(
                "q",
                [NO_COPY if cells[at] == NO_COPY or at in taken else run.id << PAGE_BITS | at for at in range(lo, hi)],
            )
            if handles.count(NO_COPY) < len(handles):
                cache.index.put(each, lo + shift, Tier.DISK, group, handles, run.sums[group][lo:hi])
    return refused
