"""Puts runs of the disk catalogue back into an index after a restart."""

from __future__ import annotations

from array import array

from kvtier.identity import CHAIN_BYTES
from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.tiers.ledger import PAGE_BITS
from kvtier.tiers.records import Run
from kvtier.types import NO_COPY, Tier


def graft(cache: Cache, run: Run, places: dict[bytes, tuple[Node, int]]) -> bool:
    """Index one run; False when it has no place: its parent is gone, or its pages are there already.

    `places` maps chain keys of the cache's pages to (node, page number just after), and grows with each run. Runs come
    parents first.
    """
    pages = _leading(run.live)
    if not pages:
        return False
    if cache.spec.keyed:
        return _graft_key(cache, run)
    found = places.get(run.parent)
    if found is None or found[1] != run.depth:
        return False
    index = cache.radix
    parent = found[0] if run.depth == 0 else index.ending_at(found[0], run.depth)
    key = run.keys[: index.stride]
    if parent.children is not None and key in parent.children:
        return False
    node = index.grow(parent, run.keys[: pages * index.stride], 0.0)
    node.chain = run.chains[: pages * CHAIN_BYTES]
    _put(cache, node, run, pages)
    index.publish(node, node.end)
    for at in range(pages):
        places[node.chain[at * CHAIN_BYTES : (at + 1) * CHAIN_BYTES]] = (node, run.depth + at + 1)
    return True


def _graft_key(cache: Cache, run: Run) -> bool:
    index = cache.keyed
    group = next((g for g, cells in enumerate(run.cells) if cells[0] != NO_COPY), None)
    if group is None or index.find(index.name(group, run.keys)) is not None:
        return False
    node = index.ensure(index.name(group, run.keys), 0.0)
    _put(cache, node, run, 1)
    node.live = 1
    return True


def _leading(live: int) -> int:
    """Pages of a run up to its first hole: runs are trimmed from the tail."""
    return (~live & (live + 1)).bit_length() - 1


def _put(cache: Cache, node: Node, run: Run, pages: int) -> None:
    """Record the run's copies."""
    for group in range(cache.index.groups):
        cells, sums = run.cells[group], run.sums[group]
        handles = array(
            "q", [NO_COPY if cell == NO_COPY else run.id << PAGE_BITS | at for at, cell in enumerate(cells[:pages])]
        )
        if handles.count(NO_COPY) < pages:
            cache.index.put(node, 0, Tier.DISK, group, handles, sums[:pages])
