"""Makes room in the host tier: evict the coldest leaves, wait for disk writes, take slabs from richer pools."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Iterable, Iterator

import numpy as np

from kvtier.index import ANY, Index, Node, Order
from kvtier.mover import Mover, Urgency, copy_items
from kvtier.store.cache import Cache
from kvtier.store.persist import Persist
from kvtier.store.ways import Ways
from kvtier.tiers.host import HostPool, HostTier
from kvtier.tiers.slab import Slab, SlotState
from kvtier.types import NO_COPY, Code, Tier

STEAL_TRIES = 4
BARREN_S = 1.0
MOST_OWN = 256
"""Items that a cache over its quota gives up at once, before others have their turn."""
AHEAD = 16
"""Items a slice: half a millisecond."""
MAX_UNSAVED = 64
"""So many leaves that disk refuses are passed over in search of one that it has."""


class Space:
    """Slots for caches, from free memory or from whoever needs theirs least."""

    def __init__(self, host: HostTier, persist: Persist, mover: Mover, ways: Ways) -> None:
        self.host = host
        self.persist = persist
        self.mover = mover
        self.ways = ways
        self.counts = ways.counts
        self.caches: dict[Index, Cache] = {}
        """Caches by their index: orders speak of indexes."""
        self.orders: dict[HostPool, Order] = {}
        self._ahead: set[HostPool] = set()
        """Pools in which room is being made ahead."""
        self._barren: dict[HostPool, float] = {}
        """Loop time until which a pool does not ask the richer ones again."""

    def order_of(self, pool: HostPool) -> Order:
        """The leaves whose eviction frees slots of this pool."""
        order = self.orders.get(pool)
        if order is None:
            order = self.orders[pool] = Order(Tier.HOST, self.ways.policy(Tier.HOST))
        return order

    def forget(self, pools: Iterable[HostPool]) -> None:
        """These pools are no more."""
        for pool in pools:
            self.orders.pop(pool, None)
            self._barren.pop(pool, None)

    async def take(self, cache: Cache, needs: list[int], deadline: float) -> list[array[int]]:
        """Up to needs[group] reserved slots' handles per group; fewer when no room could be made by `deadline`.

        `deadline` is in the loop's time. Free memory first; then clean cold pages; then, within the deadline, pages
        that wait for disk and slabs of pools above their fair share.
        """
        if not await self._within(cache, needs, deadline):
            return [array("q") for _ in needs]
        got = [cache.pool.alloc(group, n) if n else array("q") for group, n in enumerate(needs)]
        try:
            await self._more(cache.pool, needs, got, deadline)
        except BaseException:
            self.give_back(cache, got)
            raise
        return got

    def fits(self, cache: Cache, needs: list[int]) -> bool:
        """Whether so many items more are within the cache's quota, after its own coldest pages went."""
        cost = sum(n * cache.slot_cost(group) for group, n in enumerate(needs))

        def evict(over: int, share: int) -> None:
            groups = [group for group, n in enumerate(needs) if n]
            wanted = [0] * len(needs)
            for group in groups:
                wanted[group] = min(MOST_OWN, -(-over // cache.slot_cost(group)))
            self.evict(cache.pool, wanted, share)

        return not self.ways.quotas.blocks(cache, cost, Tier.HOST, evict)

    def short(self, cache: Cache, needs: list[int]) -> Code:
        """Why fewer slots came than were needed."""
        cost = sum(n * cache.slot_cost(group) for group, n in enumerate(needs))
        return Code.OVER_CAP if self.ways.quotas.over(cache, cost, Tier.HOST) else Code.NO_SPACE

    async def _within(self, cache: Cache, needs: list[int], deadline: float) -> bool:
        """Wait until they are: what is on its way to disk can go soon."""
        gone = self.counts["evictions_host"]
        while not self.fits(cache, needs):
            moving = bool(self.ways.quotas.moving) and asyncio.get_running_loop().time() < deadline
            if self.counts["evictions_host"] > gone or moving:
                gone = self.counts["evictions_host"]
                await asyncio.sleep(0)
            elif not await self.persist.progress(deadline):
                self.counts["refused_quota"] += 1
                return False
        return True

    async def _more(self, pool: HostPool, needs: list[int], got: list[array[int]], deadline: float) -> None:
        """Add to `got` until it is what is needed, or nothing helps."""
        loop = asyncio.get_running_loop()
        progress = True
        while progress:
            missing = [n - len(have) for n, have in zip(needs, got, strict=True)]
            if not any(missing):
                return
            progress = loop.time() < deadline and await self._fair(pool)
            progress = progress or self.evict(pool, missing)
            if not progress and loop.time() < deadline:
                progress = await self._wait_or_steal(pool, missing, deadline)
            for group, n in enumerate(missing):
                if n:
                    got[group].extend(pool.alloc(group, n))

    def ahead(self, pool: HostPool) -> None:
        """Where little room is left, make some before it is asked for, a slice at a time."""
        if pool not in self._ahead and any(self._over(pool, self.ways.high_water)):
            self._ahead.add(pool)
            asyncio.get_running_loop().call_soon(self._make_ahead, pool)

    def _make_ahead(self, pool: HostPool) -> None:
        """One slice, and another until the low mark is reached or nothing goes."""
        wanted = [min(AHEAD, n) for n in self._over(pool, 2 * self.ways.high_water - 1)]
        if any(wanted) and self.evict(pool, wanted):
            self.counts["slices_ahead"] += 1
            asyncio.get_running_loop().call_soon(self._make_ahead, pool)
        else:
            self._ahead.discard(pool)

    def _over(self, pool: HostPool, share: float) -> list[int]:
        """Items of each group beyond that share of its slots; none while there is memory that no pool has."""
        if share >= 1 or self.host.free_bytes:
            return []
        return [
            max(0, pool.used(group) - int(pool.capacity(group) * share)) // per_item
            for group, per_item in enumerate(pool.shape.slots_per_item)
        ]

    def give_back(self, cache: Cache, got: list[array[int]]) -> None:
        """Slots that were taken and not used."""
        for group, handles in enumerate(got):
            cache.free_host(group, handles)

    # -- eviction --------------------------------------------------------------------------------------------

    def evict(self, pool: HostPool, missing: list[int], share: int = ANY) -> bool:
        """Drop cold clean pages until `missing` items per group fit; False when nothing could be dropped.

        A page that no tier but host holds is offered to disk first; where that is refused, it is lost only when there
        is no copy to drop that disk has too. A group without any slot is not helped by evicting the others' pages.
        Of one quota, or of all.
        """
        order = self.order_of(pool)
        left = [n if pool.used(group) else 0 for group, n in enumerate(missing)]
        dropped = offered = 0
        unsaved: list[tuple[Index, Node]] = []
        while offered < max(left):
            taken = order.pop(self.ways.now(), share) if len(unsaved) < MAX_UNSAVED else None
            if taken is None and not unsaved:
                break
            index, node = taken or unsaved.pop(0)
            lo, hi = index.tail(node, Tier.HOST, min(order.policy.share(node), max(left)))
            if lo == hi:
                continue
            if taken is not None and self.unsaved_from(index, node, lo, hi) < hi:
                pages = self._save(index, node)
                offered += pages
                if not pages and self.persist.disk is not None:
                    unsaved.append(taken)
                if pages or self.persist.disk is not None:
                    continue  # held until written; comes back to the order then
            self._drop(index, node, lo, hi, left)
            dropped += hi - lo
        for index, node in unsaved:
            index.requeue(node, Tier.HOST)
        self.persist.evictions.batch(Tier.HOST, dropped)
        return dropped > 0

    def _save(self, index: Index, node: Node) -> int:
        """Offer what is unsaved of a leaf's last run to disk; returns how many pages that takes, 0 for none."""
        if self.persist.declines(node):
            return 0
        lo, hi = index.tail(node, Tier.HOST)
        lo = self.unsaved_from(index, node, lo, hi)
        return hi - lo if self.persist.offer(self.caches[index], node, node.depth + lo, node.depth + hi) else 0

    def _drop(self, index: Index, node: Node, lo: int, hi: int, left: list[int]) -> None:
        """Free the slots of pages [lo, hi), and put the leaf back if something of it lasts."""
        cache = self.caches[index]
        if self.unsaved_from(index, node, lo, hi) < hi:
            self.counts["pages_lost_unsaved"] += hi - lo
        why = "no room in host"
        self.persist.evictions.note(index, node, lo, hi, Tier.HOST, why, time.time(), self.ways.now())
        gone = index.evict(node, lo, hi, Tier.HOST)
        cache.release(gone, self.persist.disk)
        for dropped in gone:
            left[dropped.group] -= len(dropped.handles) * (dropped.tier == Tier.HOST)
        self.counts["pages_evicted_host"] += hi - lo
        index.settle(node)
        index.requeue(node, Tier.HOST)

    @staticmethod
    def unsaved_from(index: Index, node: Node, lo: int, hi: int) -> int:
        """First page of [lo, hi) with an item that only host holds; hi when all are saved."""
        first = hi
        for group in range(index.groups):
            host = node.handles(Tier.HOST, group)
            if host is None:
                continue
            disk = node.handles(Tier.DISK, group)
            only = host[lo:hi] != NO_COPY
            if disk is not None:
                only &= disk[lo:hi] == NO_COPY
            if only.any():
                first = min(first, lo + int(only.argmax()))
        return first

    async def _wait_or_steal(self, pool: HostPool, missing: list[int], deadline: float) -> bool:
        """Get room from elsewhere: what is being written comes free, or another pool gives a slab."""
        if await self.persist.progress(deadline):
            return True
        return await self._steal(pool) or await self._regroup(pool, missing)

    # -- slabs of other pools -----------------------------------------------------------------------------------

    async def _fair(self, pool: HostPool) -> bool:
        """Let a pool below its fair share grow before it evicts its own pages; no second try soon after a failure."""
        now = asyncio.get_running_loop().time()
        if not self._poor(pool) or now < self._barren.get(pool, 0.0):
            return False
        if await self._steal(pool):
            return True
        self._barren[pool] = now + BARREN_S
        return False

    def _poor(self, pool: HostPool) -> bool:
        """Whether a pool has less than its fair share of the budget."""
        owners = sum(1 for p in self.host.pools if p.total_bytes) + (0 if pool.total_bytes else 1)
        return pool.total_bytes < self.host.budget_bytes // max(1, owners)

    async def _steal(self, pool: HostPool) -> bool:
        """Empty one slab of the richest other pool; True when memory went back to the budget."""
        donors = sorted((p for p in self.host.pools if p is not pool and p.total_bytes), key=lambda p: -p.total_bytes)
        for donor in donors:
            before = self.host.free_bytes
            donor.shed()
            if self.host.free_bytes > before:
                return True
            if donor.total_bytes <= pool.total_bytes and pool.total_bytes:
                return False
            for slab in sorted((s for s in donor.slabs if not s.closed), key=lambda s: s.used)[:STEAL_TRIES]:
                if await self._empty(donor, slab):
                    self.counts["slabs_moved"] += 1
                    return True
        return False

    async def _regroup(self, pool: HostPool, missing: list[int]) -> bool:
        """Empty one slab of a group of the same pool that has more than each of those that lack room."""
        slabs = pool.slabs
        share = [sum(s.hi - s.lo for s in slabs if s.group == group) for group in range(len(missing))]
        most = max(share[group] for group, n in enumerate(missing) if n)
        spare = [s for s in slabs if not s.closed and not missing[s.group] and share[s.group] > most]
        for slab in sorted(spare, key=lambda s: s.used)[:STEAL_TRIES]:
            if await self._empty(pool, slab):
                self.counts["slabs_moved"] += 1
                return True
        return False

    async def _empty(self, donor: HostPool, slab: Slab) -> bool:
        """Evict as many cold pages as the slab holds, then relocate what is left in it."""
        if slab.closed:  # by somebody else who needs room, while this one emptied another
            return False
        donor.close_slab(slab)
        needs = [0] * len(donor.shape.slot_bytes)
        needs[slab.group] = slab.used
        try:
            self.evict(donor, needs)
            for cache in [c for c in self.caches.values() if c.pool is donor]:
                for node, at, group in _inside(cache, slab):
                    await self._relocate(cache, node, at, group, slab)
        finally:
            if slab.used:
                donor.reopen_slab(slab)
        return not slab.used

    async def _relocate(self, cache: Cache, node: Node, depth: int, group: int, slab: Slab) -> None:
        """Move one item out of the slab, unless somebody holds it."""
        index = cache.index
        node, at = index.locate(node, depth)
        if node.dead or node.refs or at >= node.pages:
            return
        old = index.get(node, at, Tier.HOST, group)
        if old == NO_COPY or not _holds(cache, slab, group, old):
            return
        fresh = cache.pool.alloc(group, 1)
        if not fresh:
            return
        index.lease(node)
        cache.pool.mark(group, [old], SlotState.RELOCATING)
        copied = False
        try:
            await self.mover.run(
                copy_items, [(cache.views(group, old), cache.views(group, fresh[0]))], urgency=Urgency.BACKGROUND
            )
            copied = True
        finally:
            cache.pool.mark(group, [old], SlotState.CACHED)
            where, at = index.locate(node, depth)
            if copied and where.refs == 1 and not where.dead:
                cache.pool.mark(group, fresh, SlotState.CACHED)
                cache.pool.free(group, [index.move(where, at, Tier.HOST, group, fresh[0])])
                self.counts["pages_relocated"] += 1
            else:
                cache.pool.free(group, fresh)
            self.unlease(cache, node)

    @contextlib.contextmanager
    def leased(self, cache: Cache, *nodes: Node) -> Iterator[None]:
        """Hold paths for a job of the daemon's own, which the daemon's check of itself knows of."""
        for node in nodes:
            cache.index.lease(node)
        cache.own += len(nodes)
        try:
            yield
        finally:
            cache.own -= len(nodes)
            for node in nodes:
                self.unlease(cache, node)

    def unlease(self, cache: Cache, node: Node) -> None:
        """Let a path go, freeing what was doomed on it."""
        cache.release(cache.index.unlease(node), self.persist.disk)


def _inside(cache: Cache, slab: Slab) -> Iterable[tuple[Node, int, int]]:
    """(node, page number, group) of every item of the cache with a slot in the slab."""
    out: list[tuple[Node, int, int]] = []
    for node in cache.index.walk():
        held = node.handles(Tier.HOST, slab.group)
        if held is not None:
            found = np.flatnonzero(held != NO_COPY)
            out += [
                (node, node.depth + int(at), slab.group)
                for at in found
                if _holds(cache, slab, slab.group, int(held[at]))
            ]
    return out


def _holds(cache: Cache, slab: Slab, group: int, handle: int) -> bool:
    """Whether one of the item's slots is in the slab."""
    return any(slab.lo <= address < slab.hi for address in cache.pool.offsets(group, [handle]))
