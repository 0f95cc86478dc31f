"""What a quota lets caches have of one tier of slots, and who among its own makes room."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.store.cache import Cache
from kvtier.tiers.pool import SlotPool
from kvtier.types import Code

if TYPE_CHECKING:
    from kvtier.store.space import Space

MOST_OWN = 256
"""Items that a cache over its quota gives up at once, before others have their turn."""


class Allowance:
    """Quotas as one tier of slots keeps them."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._quotas = space.ways.quotas

    def free(self, cache: Cache, needs: list[int]) -> bool:
        """Whether so many items more are within the cache's quota as things are."""
        return not self._quotas.over(cache, cost_of(cache, needs), self._space.tier)

    def fits(self, cache: Cache, needs: list[int]) -> bool:
        """Whether so many items more are within the cache's quota, after its rule's coldest pages went."""
        return not self._quotas.blocks(cache, cost_of(cache, needs), self._space.tier, self._evict)

    def never(self, cache: Cache, nbytes: int) -> bool:
        """Whether the cache's quota is less than so many bytes, whatever goes."""
        limit = self._quotas.limit(cache, self._space.tier)
        return limit is not None and nbytes > limit

    def short(self, cache: Cache, groups: Sequence[int]) -> Code:
        """Why fewer slots came than an item of each of these groups needs."""
        over = self._quotas.over(cache, sum(cache.slot_cost(group) for group in groups), self._space.tier)
        return Code.OVER_CAP if over else Code.NO_SPACE

    def first(self, cache: Cache, groups: Sequence[int], *, now: bool) -> int:
        """How many of these items, from the first on, the quota allows at most, or as things are now."""
        room = self._quotas.limit(cache, self._space.tier)
        if room is None:
            return len(groups)
        if now:
            room -= self._quotas.held(cache.index.share, self._space.tier)
        for at, group in enumerate(groups):
            room -= cache.slot_cost(group)
            if room < 0:
                return at
        return len(groups)

    async def wait(self, cache: Cache, needs: list[int], deadline: float) -> bool:
        """Wait until they fit: what is on its way to disk can go soon. False where they do not by the deadline."""
        counts, evicted = self._space.counts, f"pages_evicted_{self._space.name}"
        gone = counts[evicted]
        while not self.fits(cache, needs):
            never = self.never(cache, cost_of(cache, needs))
            moving = bool(self._quotas.moving) and asyncio.get_running_loop().time() < deadline
            if not never and (counts[evicted] > gone or moving):
                gone = counts[evicted]
                await asyncio.sleep(0)
            elif never or not await self._space.below.progress(deadline):
                counts["refused_quota"] += 1
                return False
        return True

    def _evict(self, over: int, share: int) -> None:
        """Evict so many bytes of a rule's, of whichever shape is the coldest; of another where none of that can go."""
        tier, held = self._space.tier, dict[SlotPool, Counter[int]]()
        for tally in self._quotas.tallies(share):
            one = tally.one
            if tier in one.pools:
                bytes_of = held.setdefault(one.pools[tier], Counter())
                for group in one.index.anchors or range(one.index.groups):
                    bytes_of[group] += tally.copies[tier][group] * one.slot_cost(group)
        now = self._space.ways.now()
        for pool in sorted(held, key=lambda pool: self._space.order_of(pool).turn(now, share)):
            group, _ = max(held[pool].items(), key=lambda item: item[1])
            wanted = [0] * len(pool.shape.slot_bytes)
            each = pool.shape.slot_bytes[group] * pool.shape.slots_per_item[group]
            wanted[group] = min(MOST_OWN, -(-over // each))
            if self._space.evict(pool, wanted, share):
                return


def cost_of(cache: Cache, needs: list[int]) -> int:
    """Arena bytes that so many items of each group take."""
    return sum(n * cache.slot_cost(group) for group, n in enumerate(needs))
