"""Makes room in a tier of slots: evict the coldest leaves, wait for what saves them, take slabs from other pools."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import numpy as np

from kvtier.index import ANY, Hold, Index, Node, Order
from kvtier.index.node import LOCAL, on_path
from kvtier.store.allowance import Allowance, cost_of
from kvtier.store.cache import Cache
from kvtier.store.copying import Copying
from kvtier.store.persist import Persist
from kvtier.store.slabs import Slabs
from kvtier.store.slices import SLICE_S
from kvtier.store.ways import Ways
from kvtier.tiers.host import SlabTier
from kvtier.tiers.pool import SlotPool
from kvtier.types import NO_COPY, Tier

AHEAD_S: Final = 3e-4
"""A slice of evictions that nobody waits for; a good part of a long leaf at a time is cheaper than a few pages."""
MAX_UNSAVED = 64
"""So many leaves that disk refuses are passed over in search of one that it has."""


class Below(Protocol):
    """What takes the pages that only this tier holds, before they are evicted from it."""

    @property
    def there(self) -> bool:
        """Whether it takes any at all."""

    def declines(self, node: Node) -> bool:
        """Whether it would not take this leaf's pages now."""

    def offer(self, cache: Cache, node: Node, first: int, end: int) -> bool:
        """Let it take pages [first, end) of the path to `node`; False when it does not."""

    async def progress(self, deadline: float) -> bool:
        """Wait until some of what it took ended; False at once when there is nothing, or at the deadline."""


class Space:
    """Slots of one tier for caches, from free memory or from whoever needs theirs least."""

    def __init__(
        self, tier: Tier, memory: SlabTier[Any], below: Below, persist: Persist, copying: Copying, ways: Ways
    ) -> None:
        self.tier = tier
        self.memory = memory
        self.below = below
        self.saved = (Tier.DISK,) if tier == Tier.HOST else (Tier.HOST, Tier.DISK)
        """Tiers whose copy makes this tier's one that can go."""
        self.others = tuple(other for other in LOCAL if other != tier)
        self.name = tier.name.lower()
        self.persist = persist
        self.copying = copying
        self.ways = ways
        self.counts = ways.counts
        self.allowance = Allowance(self)
        self.caches: dict[Index, Cache] = {}
        """Caches by their index: orders speak of indexes."""
        self.orders: dict[SlotPool, Order] = {}
        self._ahead: set[SlotPool] = set()
        """Pools in which room is being made ahead."""
        self._keeping: list[tuple[Node, int]] = []
        """See keeping."""
        self.slabs = Slabs(self)

    def order_of(self, pool: SlotPool) -> Order:
        """The leaves whose eviction frees slots of this pool."""
        order = self.orders.get(pool)
        if order is None:
            order = self.orders[pool] = Order(self.tier, self.ways.policy(self.tier))
        return order

    def forget(self, pools: Iterable[SlotPool]) -> None:
        """These pools are no more."""
        for pool in pools:
            self.orders.pop(pool, None)
            self.slabs.forget(pool)

    async def take(self, cache: Cache, needs: list[int], deadline: float) -> list[array[int]]:
        """Up to needs[group] reserved slots' handles per group; fewer when no room could be made by `deadline`.

        `deadline` is in the loop's time. Free memory first; then clean cold pages; then, within the deadline, pages
        that wait for disk and slabs of pools above their fair share.
        """
        if not await self.allowance.wait(cache, needs, deadline):
            return [array("q") for _ in needs]
        pool = cache.pools[self.tier]
        got = [pool.alloc(group, n) if n else array("q") for group, n in enumerate(needs)]
        try:
            with self.ways.quotas.coming(cache, self.tier, cost_of(cache, needs)):
                await self._more(pool, needs, got, deadline)
        except BaseException:
            self.give_back(cache, got)
            raise
        return got

    async def take_first(self, cache: Cache, groups: Sequence[int], deadline: float) -> list[array[int]]:
        """Slots for one item of each of these groups; where the quota has no room for all, for the first of them."""
        allowed = self.allowance.first(cache, groups, now=False)
        self.counts["refused_quota"] += allowed < len(groups)
        got = await self.take(cache, _needs(cache, groups[:allowed]), deadline)
        if not any(got) and (less := self.allowance.first(cache, groups, now=True)) < allowed:
            got = await self.take(cache, _needs(cache, groups[:less]), deadline)
        return got

    def coming(self, cache: Cache, groups: Iterable[int]) -> AbstractContextManager[None]:
        """Count taken slots, an item of each of these groups, until they are published or given back."""
        return self.ways.quotas.coming(cache, self.tier, sum(cache.slot_cost(group) for group in groups))

    async def _more(self, pool: SlotPool, needs: list[int], got: list[array[int]], deadline: float) -> None:
        """Add to `got` until it is what is needed, or nothing helps."""
        loop = asyncio.get_running_loop()
        progress = True
        while progress and any(missing := [n - len(have) for n, have in zip(needs, got, strict=True)]):
            progress = loop.time() < deadline and await self.slabs.fair(pool, deadline)
            self.slabs.grow_soon(pool)
            progress = progress or self.evict(pool, missing, slice_s=SLICE_S)
            if not progress and loop.time() < deadline:
                progress = await self._wait_or_steal(pool, missing, deadline)
            for group, n in enumerate(missing):
                if n:
                    got[group].extend(pool.alloc(group, n))
            if sum(map(len, got)) < sum(needs):
                await asyncio.sleep(0)

    def ahead(self, pool: SlotPool) -> None:
        """Where little room is left, make some before it is asked for, a slice at a time."""
        if pool not in self._ahead and any(self._over(pool, self.ways.high_water)):
            self._ahead.add(pool)
            asyncio.get_running_loop().call_soon(self._make_ahead, pool)

    def _make_ahead(self, pool: SlotPool) -> None:
        """One slice, and another until the low mark is reached or nothing goes."""
        self._ahead.discard(pool)  # whatever a policy raises, there is a next time
        wanted = self._over(pool, 2 * self.ways.high_water - 1)
        if any(wanted):
            self.slabs.grow_soon(pool)
        if any(wanted) and self.evict(pool, wanted, slice_s=AHEAD_S):
            self.counts["slices_ahead"] += 1
            self._ahead.add(pool)
            asyncio.get_running_loop().call_soon(self._make_ahead, pool)

    def _over(self, pool: SlotPool, share: float) -> list[int]:
        """Items of each group beyond that share of its slots; none while there is memory to grow by."""
        if share >= 1 or self.memory.free_bytes >= pool.step_bytes:
            return []
        return [
            max(0, pool.used(group) - int(pool.capacity(group) * share)) // per_item
            for group, per_item in enumerate(pool.shape.slots_per_item)
        ]

    def give_back(self, cache: Cache, got: list[array[int]]) -> None:
        """Slots that were taken and not used."""
        for group, handles in enumerate(got):
            cache.free(self.tier, group, handles)

    # -- eviction --------------------------------------------------------------------------------------------

    def evict(self, pool: SlotPool, missing: list[int], share: int = ANY, slice_s: float = math.inf) -> bool:
        """Drop cold clean pages until `missing` items per group fit; False when nothing could be dropped.

        A page that no slower tier holds is offered to the next one first; where that is refused, it is lost only when
        there is no copy to drop that such a tier has too. A group without any slot is not helped by evicting pages of
        the others. Of one quota, or of all. Ends `slice_s` after something went first: what is passed over before that
        would else be passed over again for every few pages.
        """
        order = self.order_of(pool)
        left = [n if pool.used(group) else 0 for group, n in enumerate(missing)]
        dropped = offered = 0
        unsaved: list[tuple[Index, Node]] = []
        kept: list[tuple[Index, Node]] = []
        until = math.inf
        try:
            while offered < max(left) and time.perf_counter() < until:
                if (dropped or offered) and math.isinf(until):
                    until = time.perf_counter() + slice_s
                taken = order.pop(self.ways.now(), share) if len(unsaved) + len(kept) < MAX_UNSAVED else None
                if taken is None and not unsaved:
                    break
                index, node = taken or unsaved.pop(0)
                with order.kept(index, node):
                    lo, hi = index.tail(node, self.tier, min(order.policy.share(node), max(left)))
                    if lo == hi:
                        continue
                    fresh = taken if self.below.there else None
                    if (fresh or self._keeping) and self.unsaved_from(index, node, lo, hi) < hi:
                        if fresh:
                            pages = self._save(index, node)
                            offered += pages
                            if not pages:  # what somebody reads in host, once it is there, is lost for no room here
                                (kept if node.refs else unsaved).append(fresh)
                            continue  # held until written; comes back to the order then
                        lo = max(lo, self._kept_to(node))
                        if lo >= hi:
                            kept.append((index, node))
                            continue
                    self._drop(index, node, lo, hi, left)
                    dropped += hi - lo
        finally:
            for index, node in unsaved + kept:
                index.requeue(node, self.tier)
            self.persist.room.evictions.batch(self.tier, dropped)
        return dropped > 0

    @contextlib.contextmanager
    def keeping(self, node: Node, end: int) -> Iterator[None]:
        """Let no room be made of what only this tier has of the first `end` pages of the path to `node`."""
        path = (node, end)
        self._keeping.append(path)
        try:
            yield
        finally:
            self._keeping.remove(path)

    def _kept_to(self, node: Node) -> int:
        """How many of a node's first pages are kept for those who go on from them."""
        return max((end - node.depth for deep, end in self._keeping if on_path(deep, node)), default=0)

    def _save(self, index: Index, node: Node) -> int:
        """Offer what is unsaved of a leaf's last run to the tier below; how many pages that takes, 0 for none."""
        if self.below.declines(node):
            return 0
        lo, hi = index.tail(node, self.tier)
        lo = self.unsaved_from(index, node, lo, hi)
        return hi - lo if self.below.offer(self.caches[index], node, node.depth + lo, node.depth + hi) else 0

    def _drop(self, index: Index, node: Node, lo: int, hi: int, left: list[int]) -> None:
        """Free the slots of pages [lo, hi), and put the leaf back if something of it lasts."""
        cache = self.caches[index]
        if self._alone_from(index, node, lo, hi, self.others) < hi:
            self.counts["pages_lost_unsaved"] += hi - lo
        why = f"no room in {self.name}"
        self.persist.room.evictions.note(index, node, lo, hi, self.tier, why, time.time(), self.ways.now())
        gone = index.evict(node, lo, hi, self.tier)
        cache.release(gone, self.persist.disk)
        for dropped in gone:
            left[dropped.group] -= len(dropped.handles) * (dropped.tier == self.tier)
        self.counts[f"pages_evicted_{self.name}"] += hi - lo
        index.settle(node)
        index.requeue(node, self.tier)

    def unsaved_from(self, index: Index, node: Node, lo: int, hi: int, groups: Iterable[int] = ()) -> int:
        """First page of [lo, hi) with an item (of these groups) here and in no slower tier; hi when all are saved."""
        return self._alone_from(index, node, lo, hi, self.saved, groups)

    def _alone_from(
        self, index: Index, node: Node, lo: int, hi: int, others: Sequence[Tier], groups: Iterable[int] = ()
    ) -> int:
        """First page of [lo, hi) with an item that is here and in none of the others; hi when there is none."""
        others = [tier for tier in others if node.count[tier]]
        if lo == hi or index.complete(node, others):
            return hi
        first = hi
        for group in groups or range(index.groups):
            held = node.at[self.tier * index.groups + group]
            if held is None:
                continue
            if not others and held[lo] != NO_COPY:
                return lo
            here = np.array(held, dtype=np.int64)
            only = (here != NO_COPY) & ~node.present(group, others)
            if only[lo:hi].any():
                first = min(first, lo + int(only[lo:hi].argmax()))
        return first

    async def _wait_or_steal(self, pool: SlotPool, missing: list[int], deadline: float) -> bool:
        """Get room from elsewhere: what is being written comes free, or another pool gives a slab."""
        return await self.below.progress(deadline) or await self.slabs.give(pool, missing, deadline)

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

    def unlease(self, cache: Cache, node: Node, hold: Hold = Hold.READ) -> None:
        """Let a path go, freeing what was doomed on it."""
        cache.release(cache.index.unlease(node, hold), self.persist.disk)


def _needs(cache: Cache, groups: Sequence[int]) -> list[int]:
    """How many items of each group these are."""
    return [groups.count(group) for group in range(cache.index.groups)]
