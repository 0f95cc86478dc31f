"""Puts runs of the disk catalogue back into an index after a restart."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Final, NamedTuple

from kvtier.identity import CHAIN_BYTES, TOKEN_BYTES
from kvtier.index import Node, RadixIndex
from kvtier.store.cache import Cache
from kvtier.tiers.records import PAGE_BITS, PAGE_MASK, Run
from kvtier.types import NO_COPY, RUN_PAGES, Tier

_CHAINS: Final = [struct.Struct(f"{CHAIN_BYTES}s" * pages) for pages in range(RUN_PAGES + 1)]


class Places:
    """Which node a page of the disk is in, by its chain key, while a catalogue loads."""

    def __init__(self, root: Node, chain: bytes) -> None:
        self._ends: dict[bytes, Node] = {chain: root}
        """By the chain key of a stretch's last page, and of every page of those that were looked into."""
        self._inner: dict[int, list[tuple[bytes, Node]]] = {}
        """By the number of their first page: stretches that nobody has looked into yet."""
        self.leaves: dict[Node, None] = {}
        """What nothing goes on from so far, among the runs that were put in whole: eviction was not told of it."""

    def add(self, chains: bytes, node: Node, depth: int) -> None:
        """Pages from page number `depth` on are in, or above, `node`."""
        self._ends[chains[-CHAIN_BYTES:]] = node
        if len(chains) > CHAIN_BYTES:
            self._inner.setdefault(depth, []).append((chains, node))

    def known(self, chain: bytes) -> Node | None:
        """The node that ends with the page with this chain key, if that is known without a look into stretches."""
        return self._ends.get(chain)

    def strange(self, chain: bytes) -> bool:
        """Whether `find` would have to look into stretches for the page with this chain key."""
        return chain not in self._ends and bool(self._inner)

    def looking(self, end: int) -> Iterator[None]:
        """Look into all stretches that may have the page `end` pages from the root, one a step."""
        for depth in range(max(0, end - RUN_PAGES), end):
            while inner := self._inner.get(depth):
                chains, node = inner.pop()
                self._ends.update(zip(_CHAINS[len(chains) // CHAIN_BYTES].unpack(chains)[:-1], repeat(node)))
                yield
            self._inner.pop(depth, None)

    def find(self, chain: bytes, end: int) -> Node | None:
        """A node that ends at or below the page with this chain key, `end` pages from the root; None where unknown."""
        if self.strange(chain):
            for _ in self.looking(end):
                pass
        return self._ends.get(chain)

    def below(self, run: Run, page: int) -> Node | None:
        """A node that ends at or below a page of a run; None where the page was given no place."""
        node = self._ends.get(run.chains[-CHAIN_BYTES:])
        if node is None:
            node = self.find(run.chains[page * CHAIN_BYTES : (page + 1) * CHAIN_BYTES], run.depth + page + 1)
        return node


class Late(NamedTuple):
    """The rest of a run with a hole: it hangs below a page that another run brings."""

    cache: Cache
    run: Run
    keys: bytes
    chains: bytes
    first: int

    @property
    def depth(self) -> int:
        """Page number of its first page."""
        return self.run.depth + self.first

    @property
    def parent(self) -> bytes:
        """Chain key of the page before."""
        at = self.first * CHAIN_BYTES
        return self.chains[at - CHAIN_BYTES : at] if at else self.run.parent


def adopt(cache: Cache, run: Run, places: Places) -> Node | None:
    """Index a run as most are: a whole one that goes on where another ends. None, and no change, for others.

    The node keeps the run's keys and chains as they are until somebody looks into it.
    """
    index, depth, pages, parent = cache.index, run.depth, run.pages, places.known(run.parent)
    if parent is None or cache.retired or not isinstance(index, RadixIndex):
        return None
    if run.live != (1 << pages) - 1 or len(run.packed) * TOKEN_BYTES != run.planes * pages * index.stride:
        return None
    for cells in run.cells:
        if NO_COPY in cells:
            return None
    if parent.depth + parent.pages != depth:
        parent = index.fork(parent, depth)
    if parent is None or parent.dead or parent.live < parent.pages:
        return None
    node = index.adopt(parent, run)
    if node is not None:
        if node is not parent:
            places.leaves.pop(parent, None)
            places.leaves[node] = None
        places.add(run.chains, node, depth)
    return node


def graft(cache: Cache, run: Run, places: Places, *, waiting: bool) -> tuple[list[int], Late | None]:
    """Index any run; returns the pages of it (0..63) that have no place, and what must wait for other runs.

    A page has no place when its parent is gone or disk has it already. `places` grows with each run; runs come parents
    first. Engines may store meanwhile: what they stored of the same pages stays, and gets the disk copies. A run may
    bring other groups' items of pages that earlier runs brought. `waiting`: parts of runs wait for others, and one of
    them may have its parent.
    """
    if cache.retired or not run.live:
        return _live(run, 0), None
    if cache.spec.keyed:
        return ([] if _graft_key(cache, run) else _live(run, 0)), None
    whole = Late(cache, run, run.keys, run.chains, 0)
    return ([], whole) if waiting and places.find(run.parent, run.depth) is None else graft_late(whole, places)


def graft_late(part: Late, places: Places) -> tuple[list[int], Late | None]:
    """Index the pages of a run from `first` up to the next hole."""
    cache, run, first, depth = part.cache, part.run, part.first, part.depth
    index = cache.radix
    parent = places.find(part.parent, depth)
    if cache.retired or parent is None or parent.dead or parent.end < depth:
        return _live(run, first), None
    if depth:
        parent = index.ending_at(parent, depth)
    keys = part.keys[first * index.stride :]
    end = _whole(run, first + index.deepest(keys, parent)[1], index.anchors)
    if end == first:
        return _live(run, first), None
    node = index.extend(keys[: (end - first) * index.stride], 0.0, parent)
    places.add(part.chains[first * CHAIN_BYTES : end * CHAIN_BYTES], node, depth)
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


def _put(cache: Cache, node: Node, run: Run, first: int, end: int) -> set[int]:
    """Record the copies of pages [first, end) of the run that disk does not have; returns their pages.

    What an engine stored meanwhile with other bytes stays as it is: it goes to disk, too, and has one checksum.
    """
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
            others = _others(each, group, lo - each.depth, run.sums[group][part])
            rows = enumerate(zip(run.cells[group][part], held, others, strict=True), lo - run.depth)
            handles = array(
                "q",
                [
                    run.id << PAGE_BITS | at
                    if cell != NO_COPY == have and run.live >> at & 1 and not other
                    else NO_COPY
                    for at, (cell, have, other) in rows
                ],
            )
            mine = [handle & PAGE_MASK for handle in handles if handle != NO_COPY]
            if mine:
                used.update(mine)
                cache.index.put(each, lo - each.depth, Tier.DISK, group, handles, run.sums[group][part])
    return used


def _others(node: Node, group: int, at: int, sums: Sequence[int]) -> list[bool]:
    """Per page from position `at` on: whether a faster tier has other bytes of it than those with these checksums."""
    kept, there = node.sums[group], node.present(group, (Tier.DEVICE, Tier.HOST))[at : at + len(sums)]
    if kept is None or not there.any():
        return [False] * len(sums)
    rows = zip(there.tolist(), kept[at : at + len(sums)], sums, strict=True)
    return [has and mine != disks for has, mine, disks in rows]
