"""Memory goes from pool to pool, a slab at a time: to who needs it, from who needs it less."""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.index import Node
from kvtier.mover import Urgency
from kvtier.store.cache import Cache
from kvtier.store.carrier import Stuck
from kvtier.store.copying import Move
from kvtier.store.slices import sliced
from kvtier.tiers.pool import SlotPool
from kvtier.tiers.slab import Slab, SlotState
from kvtier.types import NO_COPY, KvtierError

if TYPE_CHECKING:
    from kvtier.store.space import Space

TRIES: Final = 4
BARREN_S: Final = 1.0
SLICE_S: Final = 3e-4
"""A slice of evictions to empty a slab."""
COLDER: Final = 4.0
"""A pool gives a slab up to another where what it would evict next is unused for so many times longer, and ..."""
IDLE_S: Final = 5.0
"""... for so long: pools that are used alike leave each other alone."""
log = logging.getLogger("kvtier.slabs")


class Slabs:
    """Slabs of one tier."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._barren: dict[SlotPool, float] = {}
        """Loop time until which a pool does not ask the richer ones again."""
        self._alike: dict[SlotPool, float] = {}
        """Loop time until which a pool is not compared with the others again."""
        self._growing: asyncio.Task[None] | None = None

    def forget(self, pool: SlotPool) -> None:
        """This pool is no more."""
        self._barren.pop(pool, None)
        self._alike.pop(pool, None)

    def _others(self, pool: SlotPool) -> list[SlotPool]:
        """Pools that have slabs, the richest first."""
        others = [other for other in self._space.memory.pools if other is not pool and other.total_bytes]
        return sorted(others, key=lambda other: -other.total_bytes)

    async def fair(self, pool: SlotPool, deadline: float) -> bool:
        """Let a pool below its fair share grow before it evicts its own pages; no second try soon after a failure."""
        now = asyncio.get_running_loop().time()
        if not self._poor(pool) or now < self._barren.get(pool, 0.0):
            return False
        richer = [one for one in self._others(pool) if one.total_bytes > pool.total_bytes or not pool.total_bytes]
        if await self._steal(richer, deadline):
            return True
        self._barren[pool] = now + BARREN_S
        return False

    def _poor(self, pool: SlotPool) -> bool:
        """Whether a pool has less than its fair share of the budget."""
        owners = sum(1 for p in self._space.memory.pools if p.total_bytes) + (0 if pool.total_bytes else 1)
        return pool.total_bytes < self._space.memory.budget_bytes // max(1, owners)

    async def give(self, pool: SlotPool, missing: list[int], deadline: float) -> bool:
        """Let a pool of which nothing can go grow at the cost of those of which something can, the coldest first.

        Before them of those whose free slots are a slab's, here and there between what is held.
        """
        turns = {other: self._turn(other) for other in self._others(pool)}
        able = sorted((other for other in turns if not math.isinf(turns[other][1])), key=turns.__getitem__)
        loose = [other for other in turns if self._loose(other)]
        return await self._steal(dict.fromkeys(loose + able), deadline) or await self._regroup(pool, missing)

    @staticmethod
    def _loose(pool: SlotPool) -> bool:
        """Whether a pool could do with a slab less."""
        return any(pool.capacity(s.group) - pool.used(s.group) >= s.slots for s in pool.slabs if not s.closed)

    @staticmethod
    def _elsewhere(pool: SlotPool, slab: Slab) -> int:
        """Free slots of its group in other slabs."""
        return pool.capacity(slab.group) - pool.used(slab.group) - slab.free

    def _turn(self, pool: SlotPool) -> tuple[bool, float]:
        """Whether what a pool would evict next is to be kept, and when it was used; infinity where nothing can go."""
        return self._space.order_of(pool).turn(self._space.ways.now())

    def grow_soon(self, pool: SlotPool) -> None:
        """A pool evicts: where another has not used its coldest for far longer, that one's slab goes beside.

        So a pool that nobody uses any more does not keep its share for ever.
        """
        loop = asyncio.get_running_loop()
        if self._growing is not None or loop.time() < self._alike.get(pool, 0.0):
            return
        now, (kept, used) = self._space.ways.now(), self._turn(pool)
        long_ago = now - max(IDLE_S, COLDER * (now - used))
        others = {} if kept else {other: self._turn(other) for other in self._others(pool)}
        colder = [other for other, turn in others.items() if turn <= (False, long_ago)]
        if colder:
            self._growing = loop.create_task(self._grow(pool, min(colder, key=lambda other: others[other])))
        else:
            self._alike[pool] = loop.time() + BARREN_S

    async def _grow(self, pool: SlotPool, other: SlotPool) -> None:
        """Take a slab of the other one."""
        loop, gained = asyncio.get_running_loop(), False
        try:
            gained = await self._steal([other], math.inf)
        except KvtierError as exc:
            log.debug("a slab stays where it is: %s", exc)
        except Exception:  # a policy may raise anything
            log.exception("emptying a slab failed")
        finally:
            self._growing = None
            if not gained:
                self._alike[pool] = loop.time() + BARREN_S

    async def close(self) -> None:
        """End what is being moved."""
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.wait([self._growing])

    async def _steal(self, donors: Iterable[SlotPool], deadline: float) -> bool:
        """Empty one slab of the first of these that can; True when memory went back to the budget."""
        loop = asyncio.get_running_loop()
        for donor in donors:
            if donor.shed():
                return True
            for slab in sorted((s for s in donor.slabs if not s.closed), key=lambda s: s.used)[:TRIES]:
                if loop.time() >= deadline:
                    return False
                if await self.empty(donor, slab):
                    self._space.counts["slabs_moved"] += 1
                    return True
        return False

    async def _regroup(self, pool: SlotPool, missing: list[int]) -> bool:
        """Empty one slab of a group of the same pool that has more than each of those that lack room."""
        slabs = pool.slabs
        share = [sum(s.hi - s.lo for s in slabs if s.group == group) for group in range(len(missing))]
        most = max(share[group] for group, n in enumerate(missing) if n)
        spare = [s for s in slabs if not s.closed and not missing[s.group] and (share[s.group] > most or not s.used)]
        for slab in sorted(spare, key=lambda s: s.used)[:TRIES]:
            if await self.empty(pool, slab):
                self._space.counts["slabs_moved"] += 1
                return True
        return False

    async def empty(self, donor: SlotPool, slab: Slab) -> bool:
        """Evict as many cold pages as it takes for what is in the slab to fit elsewhere, and relocate that."""
        if slab.closed:  # by somebody else who needs room, while this one emptied another
            return False
        donor.close_slab(slab)
        needs = [0] * len(donor.shape.slot_bytes)
        left = slab.used - self._elsewhere(donor, slab)
        try:
            while left > 0:
                before = donor.used(slab.group)
                needs[slab.group] = -(-left // donor.shape.slots_per_item[slab.group])
                if not self._space.evict(donor, needs, slice_s=SLICE_S):
                    break
                left -= before - donor.used(slab.group)
                await asyncio.sleep(0)
            if slab.used > self._elsewhere(donor, slab):  # what it holds could not go yet, or is held itself
                return False
            for cache in [c for c in self._space.caches.values() if c.pools.get(self._space.tier) is donor]:
                async for node in sliced(cache.index.walk()):
                    await self._relocate(cache, node, slab)
        finally:
            if slab.used:
                donor.reopen_slab(slab)
        return not slab.used

    async def _relocate(self, cache: Cache, node: Node, slab: Slab) -> None:
        """Move a node's items out of the slab, unless somebody may read it there."""
        if node.dead or node.readers(self._space.tier):
            return
        index, tier, group, pool = cache.index, self._space.tier, slab.group, cache.pools[self._space.tier]
        inside = self._inside(cache, node, slab)
        fresh = pool.alloc(group, len(inside)) if inside else array("q")
        plan = [
            (node.depth + at, index.get(node, at, tier, group), new) for at, new in zip(inside, fresh, strict=False)
        ]
        if not plan:
            return
        index.lease(node)
        pool.mark(group, [old for _, old, _ in plan], SlotState.RELOCATING)
        copied, good = False, SlotState.CACHED
        try:
            moves = [Move(group, (tier, old), (tier, new)) for _, old, new in plan]
            await self._space.copying.copy(cache, moves, Urgency.BACKGROUND)
            copied = True
        except Stuck:
            good = SlotState.QUARANTINED
        finally:
            pool.mark(group, [old for _, old, _ in plan], SlotState.CACHED)
            pool.mark(group, fresh, good)
            free = []
            for depth, _, new in plan:
                where, at = index.locate(node, depth)
                moved = copied and where.readers(tier) == 1 and not where.dead
                free.append(index.move(where, at, tier, group, new) if moved else new)
                self._space.counts["pages_relocated"] += moved
            if good == SlotState.CACHED:
                pool.free(group, free)
            self._space.unlease(cache, node)

    def _inside(self, cache: Cache, node: Node, slab: Slab) -> list[int]:
        """Which of a node's items have a slot in the slab."""
        held = node.handles(self._space.tier, slab.group)
        if held is None:
            return []
        pool = cache.pools[self._space.tier]
        if pool.shape.slots_per_item[slab.group] == 1:  # a handle is an address then
            return np.flatnonzero((held >= slab.lo) & (held < slab.hi)).tolist()
        there = np.flatnonzero(held != NO_COPY).tolist()
        return [at for at in there if _holds(pool, slab, slab.group, int(held[at]))]


def _holds(pool: SlotPool, slab: Slab, group: int, handle: int) -> bool:
    """Whether one of the item's slots is in the slab."""
    return any(slab.lo <= address < slab.hi for address in pool.offsets(group, [handle]))
