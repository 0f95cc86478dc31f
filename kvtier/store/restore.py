"""The catalogue back into the indexes after a start, in slices, while engines are served.

What an engine asks for meanwhile is looked up at once: the runs along its path, by depth and parent, parents first.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.identity import CHAIN_BYTES, base_id
from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.store.graft import Late, Places, adopt, graft, graft_late
from kvtier.store.slices import sliced
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.records import PAGE_BITS, Run, name_of
from kvtier.types import Tier

if TYPE_CHECKING:
    from kvtier.store.parts import Parts

SLICE_S: Final = 4e-4
"""Engines that ask while the catalogue loads wait for no more than one slice of it."""
MOST_SOUGHT: Final = 1 << 20


class Restore:
    """Belongs to one start of the store."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._places: dict[int, Places] = {}
        self._late: list[tuple[int, int, Late]] = []
        """A heap of parts of runs that hang below what other runs bring: where each begins, a number, the part."""
        self._sought: set[tuple[int, bytes]] = set()
        """What was looked up: the tier's number of the cache, and the name."""
        self._hand: tuple[Cache, Run] | None = None
        """The run that the loader has and nobody else finds, while its place is looked for."""

    async def run(self) -> None:
        """Index everything; ends when all is loaded."""
        disk = self.parts.disk
        if disk is None:
            return
        self.parts.persist.room.order.late = True
        owners = self._caches(disk)
        await self.parts.warmth.load()
        async for run in sliced(disk.load(), slice_s=SLICE_S):
            owner = owners.get(run.cache)
            if owner is None or owner.disk is None:
                run.keys = run.chains = b""
                self._refuse(run, list(range(run.pages)))
                continue
            if not self._adopt(owner, run):
                self._hand = owner, run
                await self._look(run.cache, run.parent, run.depth)
                self._put_down()
        await self._graft_late()
        await self._queue(owners)
        self._places.clear()
        self._sought.clear()
        self.parts.warmth.forget()
        self.parts.loading = False
        self.parts.persist.pump()
        self.parts.prune()

    def _caches(self, disk: DiskTier) -> dict[int, Cache]:
        """The caches on disk by the tier's numbers; those of old epochs are dropped."""
        owners = {}
        for number, record in disk.caches().items():
            if record.epoch < self.parts.epoch(base_id(record.spec, record.scope)):
                disk.drop_cache(number)
                continue
            cache = self.parts.cache(record.spec, record.scope, record.epoch)
            cache.disk = number
            self._places[number] = Places(cache.index.root, cache.id[:CHAIN_BYTES])
            owners[number] = cache
        return owners

    def _put_down(self) -> bool:
        """Index the run in hand; whether there was one."""
        hand, self._hand = self._hand, None
        if hand is not None:
            self._graft(*hand)
        return hand is not None

    def _adopt(self, cache: Cache, run: Run) -> bool:
        """Index a run where that is simple; whether it was."""
        places = self._places[run.cache]
        node = adopt(cache, run, places)
        if node is not None:
            self.parts.warmth.apply(cache, run, places, node)
        return node is not None

    def _graft(self, cache: Cache, run: Run) -> None:
        """Index a run below a place that is known, or has none."""
        if self._adopt(cache, run):
            return
        places = self._places[run.cache]
        refused, rest = graft(cache, run, places, waiting=bool(self._late))
        self.parts.warmth.apply(cache, run, places)
        run.keys = run.chains = b""
        self._refuse(run, refused)
        if rest is not None:
            heapq.heappush(self._late, (rest.depth, run.id, rest))

    async def _look(self, number: int, parent: bytes, depth: int) -> None:
        """Have the place known below which page number `depth` goes, if it has one; that may mean to look at many."""
        places = self._places.get(number)
        if places is not None and places.strange(parent):
            async for _ in sliced(places.looking(depth), slice_s=SLICE_S):
                pass

    async def _graft_late(self) -> None:
        """Those that begin first, first."""
        async for part in sliced(_first(self._late), slice_s=SLICE_S):
            await self._look(part.run.cache, part.parent, part.depth)
            refused, rest = graft_late(part, self._places[part.run.cache])
            self._refuse(part.run, refused)
            if rest is not None:
                heapq.heappush(self._late, (rest.depth, rest.run.id, rest))

    async def _queue(self, owners: dict[int, Cache]) -> None:
        """Let eviction find what was indexed; had it been told run by run, nearly all would be no leaf any more."""
        for number, places in self._places.items():
            index = owners[number].index
            async for node in sliced(places.leaves, slice_s=SLICE_S):
                index.requeue(node, Tier.DISK)
        self.parts.persist.room.order.late = False

    def _refuse(self, run: Run, pages: list[int]) -> None:
        """Free pages of a run that the index has no place for."""
        if pages:
            assert self.parts.disk is not None
            self.parts.disk.free([run.id << PAGE_BITS | at for at in pages])
            self.parts.counts["orphan_pages"] += len(pages)

    # -- looking up while it loads -------------------------------------------------------------------------------

    async def path(self, cache: Cache, keys: bytes) -> None:
        """Index what disk has along a path of a token cache. Returns soon where nothing is to be had."""
        index, stride = cache.radix, cache.index.stride
        at, progress = 0, True
        until = time.perf_counter() + SLICE_S
        while progress and self._loading(cache):
            progress = False
            node, end = index.deepest(keys)
            chains = self._chains(cache, node, end)
            for page in _on_disk(cache, node, at, end):
                parent = chains[page * CHAIN_BYTES : (page + 1) * CHAIN_BYTES]
                first = keys[page * stride : (page + 1) * stride]
                await self._look(cache.disk or 0, parent, page)
                progress |= bool(first) and self._seek(cache, page, parent, first)
                if time.perf_counter() > until:
                    await asyncio.sleep(0)
                    until = time.perf_counter() + SLICE_S
            at = end

    async def keys(self, cache: Cache, keys: list[bytes]) -> None:
        """Index what disk has of these keys of a keyed cache."""
        async for key in sliced(keys, slice_s=SLICE_S):
            if not self._loading(cache):
                return
            self._seek(cache, 0, b"", key)

    def _loading(self, cache: Cache) -> bool:
        """Whether runs of this cache may still be found on disk that are not indexed."""
        return self.parts.loading and not cache.retired and cache.disk in self._places

    @staticmethod
    def _chains(cache: Cache, node: Node, end: int) -> bytes:
        """Chain keys of the root and of the first `end` pages of the path to `node`."""
        index = cache.index
        parts = [cache.id[:CHAIN_BYTES], *(index.chain_of(each) for each in index.path(node))]
        return b"".join(parts)[: (end + 1) * CHAIN_BYTES]

    def _seek(self, cache: Cache, depth: int, parent: bytes, first: bytes) -> bool:
        """Index the runs that begin with this page, unless that was done; whether something was indexed."""
        disk, name = self.parts.disk, name_of(parent, first)
        held = self._put_down()
        if (cache.disk, name) in self._sought or disk is None or cache.disk is None:
            return held
        if len(self._sought) < MOST_SOUGHT:
            self._sought.add((cache.disk, name))  # nothing is written to disk meanwhile: no more will be there
        found = disk.seek(cache.disk, depth, parent, first)
        for run in found:
            self._graft(cache, run)
        self.parts.counts["runs_looked_up"] += len(found)
        return held or bool(found)


def _first(late: list[tuple[int, int, Late]]) -> Iterator[Late]:
    """Parts of a heap that grows meanwhile, those that begin first, first."""
    while late:
        yield heapq.heappop(late)[2]


def _on_disk(cache: Cache, node: Node, first: int, end: int) -> list[int]:
    """Boundaries from `first` to `end`, on the path to `node`, after a page that disk is known to have.

    The last of all where all items of a page are in one run: then no other run begins before it.
    """
    found: list[int] = []
    one = cache.index.groups == 1
    first = 0 if one else first
    up = node
    while up.parent is not None and up.end >= first and not (one and found):
        there = np.logical_or.reduce([up.present(group, (Tier.DISK,)) for group in range(cache.index.groups)])
        found[:0] = [at for at in (np.flatnonzero(there) + up.depth + 1).tolist() if first <= at <= end]
        up = up.parent
    if not first and not (one and found):
        found.insert(0, 0)
    return found[-1:] if one else found
