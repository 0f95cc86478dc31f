"""Room on disk: what is coldest there goes for what comes, and a reserve is kept free ahead of it."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, Final

from kvtier.index import ANY, Node, Order
from kvtier.store.cache import Cache
from kvtier.store.evictions import Evictions
from kvtier.store.slices import SLICE_S
from kvtier.store.ways import Ways
from kvtier.tiers.disk import DiskTier
from kvtier.types import Tier

FULL_S: Final = 1.0
"""So long after it gave something up for new pages, or could not, disk is taken for full."""
AGAIN_S: Final = 60.0
"""So long a flush leaves alone what disk gave up for want of room."""
MOST_OWN = 4 << 20
"""Bytes that a cache over its quota gives up at once, before others have their turn."""
RESERVE_PARTS: Final = 64
MOST_RESERVE: Final = 128 << 20
"""One part in so many of the disk, and at most so many bytes, is kept free: what is written while a commit runs."""
MOST_RUN: Final = 64 << 20
"""Bytes of a run, however large its pages are, and ..."""
RUN_PARTS: Final = 8
"""... so many runs fit on disk, and in a quota: room for one is made without giving up much. A page is always one."""


class DiskRoom:
    """What disk gives up, and when. Without a disk tier nothing is asked of it."""

    def __init__(self, disk: DiskTier | None, ways: Ways) -> None:
        self._disk = disk
        self.ways = ways
        self.order = Order(Tier.DISK, ways.policy(Tier.DISK))
        self.evictions = Evictions()
        self.caches: dict[Any, Cache] = {}
        self.gave_way = False
        """Whether the latest look at a quota made somebody give pages up."""
        self._making_ahead = False
        """Whether room is about to be made ahead."""
        self._stuck_until = self._full_until = self._given_up = 0.0
        self._room_then: dict[int, int] = {}
        """By share, or ANY: see gained."""
        self.reserve = 0 if disk is None else min(disk.capacity_bytes // RESERVE_PARTS, MOST_RESERVE)
        """Bytes of disk that are kept free."""

    @property
    def disk(self) -> DiskTier:
        """The tier."""
        assert self._disk is not None
        return self._disk

    def stuck(self) -> None:
        """Nothing can go: disk is full for a while."""
        self._stuck_until = asyncio.get_running_loop().time() + FULL_S

    def refuses(self, node: Node) -> bool:
        """Whether disk was full just now, and what it would give up for the node is as warm."""
        now = asyncio.get_running_loop().time()
        return now < self._stuck_until or (now < self._full_until and node.time <= self._given_up and not node.keep)

    def gave_up(self, node: Node) -> bool:
        """Whether disk gave pages of the node up for want of room, not long ago and not before it was last used."""
        return asyncio.get_running_loop().time() < node.squeezed

    def gained(self, share: int) -> int:
        """Bytes of room that disk (ANY), or a quota, has more than when something was last given up for want of it."""
        return self._room(share) - self._room_then.get(share, 0)

    def _room(self, share: int) -> int:
        """Bytes that disk (ANY), or a quota, has left."""
        if share == ANY:
            return self.disk.free_bytes + self.disk.freeing_bytes
        return self.ways.quotas.room(share, Tier.DISK)

    def most_run(self, cache: Cache) -> int:
        """Bytes of one of a cache's runs."""
        room, limit = self.disk.room_bytes, self.ways.quotas.limit(cache, Tier.DISK)
        return min(MOST_RUN, (room if limit is None else min(room, limit)) // RUN_PARTS)

    def evict_own(self, over: int, share: int) -> None:
        """Evict what is over a quota, some of it at a time."""
        self.gave_way = self.evict(min(over, MOST_OWN), share, SLICE_S) > 0

    def ahead_soon(self) -> None:
        """Make room when the loop has its next turn, where the reserve is drawn on.

        Cells come free only with a commit: those of the reserve have, so that a write need not wait for one.
        """
        if not self._making_ahead and self._lacking() > 0:
            self._making_ahead = True
            asyncio.get_running_loop().call_soon(self._make_ahead)

    def _make_ahead(self) -> None:
        """Evict a slice of what the reserve lacks, and another until it is whole or nothing goes."""
        self._making_ahead = False
        lacking = self._lacking()
        if lacking > 0 and self.evict(min(lacking, MOST_OWN), slice_s=SLICE_S):
            self.ahead_soon()

    def _lacking(self) -> int:
        """Bytes that the reserve is short of, where those are there that are being freed."""
        return self.reserve - self._room(ANY)

    def evict(self, nbytes: int, share: int = ANY, slice_s: float = math.inf) -> int:
        """Free `nbytes` of cold pages on disk, of one quota or of all; how many it was, 0 when nothing is free to go.

        Ends after `slice_s`, once something went: small pages are many.
        """
        freed = pages = 0
        until = time.perf_counter() + slice_s
        while freed < nbytes and not (freed and time.perf_counter() > until):
            taken = self.order.pop(self.ways.now(), share)
            if taken is None:
                break
            index, node = taken
            with self.order.kept(index, node):
                cache = self.caches[index]
                each = sum(map(cache.slot_cost, index.anchors)) or 1
                most = max(1, self.most_run(cache) // each)
                lo, hi = index.tail(node, Tier.DISK, min(most, self.order.policy.share(node)))
                if lo == hi:
                    continue
                self._given_up = max(self._given_up, node.time)
                self.evictions.note(index, node, lo, hi, Tier.DISK, "no room on disk", time.time(), self.ways.now())
                gone = index.evict(node, lo, hi, Tier.DISK)
                cache.release(gone, self.disk)
                freed += sum(len(d.handles) * cache.slot_cost(d.group) for d in gone if d.tier == Tier.DISK)
                self.ways.counts["pages_evicted_disk"] += hi - lo
                pages += hi - lo
                index.settle(node)
                index.requeue(node, Tier.DISK)
                now = asyncio.get_running_loop().time()
                self._full_until, node.squeezed = now + FULL_S, now + AGAIN_S
        self._room_then[share] = self._room(share)
        self.evictions.batch(Tier.DISK, pages)
        return freed
