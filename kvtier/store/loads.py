"""Brings pages from disk or a device to host, each once however many wait for it; verifies every byte on the way."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.index import Node, RadixIndex
from kvtier.index.node import LOCAL
from kvtier.mover import Mover, Urgency, batches, digests
from kvtier.store.cache import Cache
from kvtier.store.carrier import Stuck
from kvtier.store.copying import Move
from kvtier.store.space import Space
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.slab import SlotState
from kvtier.types import NO_COPY, KvtierError, Tier

log = logging.getLogger("kvtier.loads")


class Missing(NamedTuple):
    """One item that is in `tier` by that handle, and not where it is to be read."""

    node: Node
    group: int
    page: int
    tier: int
    handle: int
    sum: int


Plan = list[tuple[Missing, int]]
"""Items and the host slots that they are to be brought to."""


class Loads:
    """Load-back. The caller holds a lease on the path; so does a load that outlives its caller."""

    def __init__(self, disk: DiskTier | None, mover: Mover, space: Space, counts: Counter[str]) -> None:
        self.disk = disk
        self.mover = mover
        self.space = space
        self.counts = counts
        self.moving: dict[tuple[int, int, int], asyncio.Task[None]] = {}
        """(tier, handle there, group) -> the load that brings it."""

    def missing(
        self,
        cache: Cache,
        node: Node,
        needed: list[tuple[int, int, int]],
        tiers: Sequence[int] = (Tier.HOST,),
        but: int = -1,
    ) -> list[Missing]:
        """Items among (group, first, count) ranges of the path to `node` that `tiers` lack and another tier has.

        `but`: a tier whose copies are of no use.
        """
        out = []
        for group, first, count in needed:
            held, sums = cache.readable(node, group, first, count, tiers)
            if NO_COPY not in held:
                continue
            others = [tier for tier in LOCAL if tier not in {*tiers, but} and self.space.copying.reaches(tier)]
            away = {tier: cache.gather(node, group, first, count, tier) for tier in others}
            for at, handle in enumerate(held):
                if handle == NO_COPY:
                    has = next((tier for tier, row in away.items() if row[at] != NO_COPY), None)
                    if has is not None:
                        out.append(Missing(node, group, first + at, has, away[has][at], sums[at]))
        return out

    async def bring(self, cache: Cache, missing: list[Missing], deadline: float) -> bool:
        """Load the items; False at the deadline, after which loads go on by themselves."""
        waits = self.start(cache, missing, deadline)
        left = deadline - asyncio.get_running_loop().time()
        if waits:
            _, late = await asyncio.wait(waits, timeout=max(0.0, left))
            return not late
        return False

    def start(self, cache: Cache, missing: list[Missing], deadline: float) -> set[asyncio.Task[None]]:
        """Begin loading what nobody loads yet; returns the loads that bring the items."""
        wanted = {(m.tier, m.handle, m.group): m for m in missing}
        waits = {self.moving[key] for key in wanted if key in self.moving}
        fresh = sorted((m for key, m in wanted.items() if key not in self.moving), key=lambda m: m.page)
        for batch in batches(fresh, lambda m: cache.item_bytes[m.group]):
            for node in {m.node for m in batch}:
                cache.index.lease(node)
            task = asyncio.get_running_loop().create_task(self._load(cache, batch, deadline))
            waits.add(task)
            for m in batch:
                self.moving[m.tier, m.handle, m.group] = task
        return waits

    async def _load(self, cache: Cache, batch: list[Missing], deadline: float) -> None:
        """Read one batch into fresh slots and publish what verified, under leases of its own.

        What a device had wrong comes from disk, where that has it too; by then no load finds this one to wait for.
        """
        wrong: list[Missing] = []
        try:
            got = await self.space.take_first(cache, [m.group for m in batch], deadline)
            plan = []
            for m in batch:
                if got[m.group]:
                    plan.append((m, got[m.group].pop(0)))
                else:
                    self.counts["loads_no_space"] += 1
            self.space.give_back(cache, got)
            with self.space.coming(cache, [m.group for m, _ in plan]):
                wrong = await self._bring_all(cache, plan)
        except Exception:
            log.exception("load failed")
        finally:
            for m in batch:
                self.moving.pop((m.tier, m.handle, m.group), None)
            for node in {m.node for m in batch}:
                self.space.unlease(cache, node)
        again: list[Missing] = []
        for m in wrong:
            if m.tier == Tier.DEVICE and not m.node.dead:
                again += self.missing(cache, m.node, [(m.group, m.page, 1)], but=m.tier)
        if again:
            await asyncio.wait(self.start(cache, again, deadline))

    async def _bring_all(self, cache: Cache, plan: Plan) -> list[Missing]:
        """Fill slots tier by tier; gives what did not verify."""
        parts = {tier: [(m, slot) for m, slot in plan if m.tier == tier] for tier in {m.tier for m, _ in plan}}
        wrong: list[Missing] = []
        try:
            while parts:
                wrong += await self._bring(cache, *parts.popitem())
        finally:
            for m, slot in itertools.chain(*parts.values()):
                cache.pool.free(m.group, [slot])
        return wrong

    async def _bring(self, cache: Cache, tier: int, plan: Plan) -> list[Missing]:
        """Fill slots from one tier and publish what verified; gives what did not."""
        for m, slot in plan:
            cache.pool.mark(m.group, [slot], SlotState.FILLING)
        way = f"{Tier(tier).name.lower()}_to_host"
        try:
            with self.space.ways.busy.moving(way):
                results = await (self._read if tier == Tier.DISK else self._fetch)(cache, plan)
        except BaseException as exc:
            for m, slot in plan:
                if isinstance(exc, Stuck):
                    cache.pool.mark(m.group, [slot], SlotState.QUARANTINED)
                else:
                    cache.pool.free(m.group, [slot])
            raise
        return self._publish(cache, plan, results)

    async def _read(self, cache: Cache, plan: Plan) -> list[str]:
        """Read from disk; '' or what is wrong, for each."""
        assert self.disk is not None
        requests = [(m.handle, m.group, cache.views(m.group, slot)) for m, slot in plan]
        return await self.mover.run(self.disk.read, requests, urgency=Urgency.LOAD)

    async def _fetch(self, cache: Cache, plan: Plan) -> list[str]:
        """The same from a device. Raises Stuck."""
        moves = [Move(m.group, (m.tier, m.handle), (Tier.HOST, slot)) for m, slot in plan]
        try:
            await self.space.copying.copy(cache, moves, Urgency.LOAD)
        except Stuck:
            raise
        except KvtierError:
            return ["io"] * len(plan)
        items = [cache.views(m.group, slot) for m, slot in plan]
        found = await self.mover.run(digests, items, urgency=Urgency.LOAD)
        return ["" if value == m.sum else "checksum" for value, (m, _) in zip(found, plan, strict=True)]

    def _publish(self, cache: Cache, plan: Plan, results: list[str]) -> list[Missing]:
        """Serve what came in whole; what did not, which it gives, is lost where it was."""
        lost = []
        for (m, slot), reason in zip(plan, results, strict=True):
            if reason or m.node.dead:
                cache.pool.free(m.group, [slot])
                if not m.node.dead:  # else its cells may be another's by now
                    lost.append((m, reason))
                continue
            where, at = cache.index.locate(m.node, m.page)
            if cache.index.get(where, at, Tier.HOST, m.group) != NO_COPY:  # it came from another tier meanwhile
                cache.pool.free(m.group, [slot])
                continue
            cache.pool.mark(m.group, [slot], SlotState.CACHED)
            cache.index.put(where, at, Tier.HOST, m.group, [slot], [m.sum])
            name = Tier(m.tier).name.lower()
            self.counts[f"pages_loaded_{name}"] += 1
            self.counts[f"bytes_{name}_to_host"] += cache.item_bytes[m.group]
        for m, reason in lost:
            self.lose(cache, m, reason)
        return [m for m, _ in lost]

    def lose(self, cache: Cache, m: Missing, reason: str) -> None:
        """A copy is not what was stored: a miss, counted and logged. Where no other tier has it, its subtree is cut.

        The caller holds a lease of its own; a host copy that others hold too is left for later.
        """
        index, tier = cache.index, m.tier
        where, at = index.locate(m.node, m.page)
        if cache.gone(m.node) or index.get(where, at, tier, m.group) != m.handle:
            return  # another reader of the same copy found it first
        self.counts[f"load_{reason}" if tier == Tier.DISK else f"{Tier(tier).name.lower()}_{reason}"] += 1
        log.warning("cache %s page %d group %d: copy lost (%s)", cache.id.hex()[:12], m.page, m.group, reason)
        if reason in {"io", "closing"}:
            return  # the device may come back; the bytes were not wrong
        if m.group not in index.anchors and isinstance(index, RadixIndex) and tier == Tier.DISK:
            dropped = index.forget(where, at, Tier.DISK, m.group)
            if all(index.get(where, at, Tier.DISK, group) != m.handle for group in range(index.groups)):
                cache.release([dropped], self.disk)  # else the run's page holds other groups' items that are good
            return
        if tier == Tier.HOST and where.refs > 1:
            return
        others = [other for other in LOCAL if other != tier]
        needed = index.anchors if isinstance(index, RadixIndex) else [m.group]
        if all(any(index.get(where, at, other, g) != NO_COPY for other in others) for g in needed):
            if tier == Tier.DEVICE and where.refs > 1:
                return  # an engine may read it in place
            cache.release(index.drop(where, at, at + 1, tier), self.disk)
            self.space.persist.offer(cache, m.node, m.page, m.page + 1)
            return
        if isinstance(index, RadixIndex):
            where = index.cut_at(where, m.page)
        seconds = time.time(), self.space.ways.now()
        self.space.persist.room.evictions.note(index, where, 0, where.pages, Tier(tier), f"lost: {reason}", *seconds)
        cut = index.cut(where)
        cache.release(cut.freed, self.disk)
        self.counts["pages_cut"] += cut.pages
