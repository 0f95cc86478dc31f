"""Brings pages back from disk to host, each once however many wait for it, and verifies every byte on the way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import NamedTuple

from kvtier.index import Node, RadixIndex
from kvtier.mover import Mover, Urgency, batches
from kvtier.store.cache import Cache
from kvtier.store.space import Space
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.slab import SlotState
from kvtier.types import NO_COPY, Tier

log = logging.getLogger("kvtier.loads")


class Missing(NamedTuple):
    """One item that is on disk and not in host."""

    node: Node
    group: int
    page: int
    disk: int
    sum: int


class Loads:
    """Load-back. The caller holds a lease on the path; so does a load that outlives its caller."""

    def __init__(self, disk: DiskTier | None, mover: Mover, space: Space, counts: Counter[str]) -> None:
        self.disk = disk
        self.mover = mover
        self.space = space
        self.counts = counts
        self.moving: dict[tuple[int, int], asyncio.Task[None]] = {}
        """(disk handle, group) -> the load that brings it."""

    def missing(self, cache: Cache, node: Node, needed: list[tuple[int, int, int]]) -> list[Missing]:
        """Items among (group, first, count) ranges of the path to `node` that host lacks and disk has."""
        out = []
        for group, first, count in needed:
            host = cache.gather(node, group, first, count, Tier.HOST)
            if NO_COPY not in host:
                continue
            disk = cache.gather(node, group, first, count, Tier.DISK)
            sums = cache.gather_sums(node, group, first, count)
            out += [
                Missing(node, group, first + at, disk[at], sums[at])
                for at, handle in enumerate(host)
                if handle == NO_COPY and disk[at] != NO_COPY
            ]
        return out

    async def bring(self, cache: Cache, missing: list[Missing], deadline: float) -> None:
        """Load the items; returns when all are settled or at the deadline (loads then go on by themselves)."""
        waits = self.start(cache, missing, deadline)
        left = deadline - asyncio.get_running_loop().time()
        if waits:
            await asyncio.wait(waits, timeout=max(0.0, left))

    def start(self, cache: Cache, missing: list[Missing], deadline: float) -> set[asyncio.Task[None]]:
        """Begin loading what nobody loads yet; returns the loads that bring the items."""
        wanted = {(m.disk, m.group): m for m in missing}
        waits = {self.moving[key] for key in wanted if key in self.moving}
        fresh = [m for key, m in wanted.items() if key not in self.moving]
        for batch in batches(fresh, lambda m: cache.item_bytes[m.group]):
            for node in {m.node for m in batch}:
                cache.index.lease(node)
            task = asyncio.get_running_loop().create_task(self._load(cache, batch, deadline))
            waits.add(task)
            for m in batch:
                self.moving[m.disk, m.group] = task
        return waits

    async def _load(self, cache: Cache, batch: list[Missing], deadline: float) -> None:
        """Read one batch into fresh slots and publish what verified, under leases of its own."""
        try:
            needs = [sum(1 for m in batch if m.group == g) for g in range(cache.index.groups)]
            got = await self.space.take(cache, needs, deadline)
            plan = []
            for m in batch:
                if got[m.group]:
                    plan.append((m, got[m.group].pop(0)))
                else:
                    self.counts["loads_no_space"] += 1
            self.space.give_back(cache, got)
            if plan:
                await self._read(cache, plan)
        except Exception:
            log.exception("load failed")
        finally:
            for m in batch:
                self.moving.pop((m.disk, m.group), None)
            for node in {m.node for m in batch}:
                self.space.unlease(cache, node)

    async def _read(self, cache: Cache, plan: list[tuple[Missing, int]]) -> None:
        disk = self.disk
        assert disk is not None
        for m, slot in plan:
            cache.pool.mark(m.group, [slot], SlotState.FILLING)
        requests = [(m.disk, m.group, cache.views(m.group, slot)) for m, slot in plan]
        try:
            with self.space.ways.busy.moving("disk_to_host"):
                results = await self.mover.run(disk.read, requests, urgency=Urgency.LOAD)
        except BaseException:
            for m, slot in plan:
                cache.pool.free(m.group, [slot])
            raise
        lost = []
        for (m, slot), reason in zip(plan, results, strict=True):
            if reason or m.node.dead:
                cache.pool.free(m.group, [slot])
                if not m.node.dead:  # else its cells may be another's by now
                    lost.append((m, reason))
                continue
            where, at = cache.index.locate(m.node, m.page)
            cache.pool.mark(m.group, [slot], SlotState.CACHED)
            cache.index.put(where, at, Tier.HOST, m.group, [slot], [m.sum])
            self.counts["pages_loaded_disk"] += 1
            self.counts["bytes_disk_to_host"] += cache.item_bytes[m.group]
        for m, reason in lost:
            self.lose(cache, m, reason)

    def lose(self, cache: Cache, m: Missing, reason: str, tier: int = Tier.DISK) -> None:
        """A copy is not what was stored: a miss, counted and logged. Where no other tier has it, its subtree is cut.

        The caller holds a lease of its own; a host copy that others hold too is left for later.
        """
        index = cache.index
        self.counts[f"load_{reason}" if tier == Tier.DISK else f"host_{reason}"] += 1
        log.warning("cache %s page %d group %d: copy lost (%s)", cache.id.hex()[:12], m.page, m.group, reason)
        if reason in {"io", "closing"} or m.node.dead:
            return  # the device may come back; the bytes were not wrong
        where, at = index.locate(m.node, m.page)
        if m.group not in index.anchors and isinstance(index, RadixIndex) and tier == Tier.DISK:
            dropped = index.forget(where, at, Tier.DISK, m.group)
            if all(index.get(where, at, Tier.DISK, group) != m.disk for group in range(index.groups)):
                cache.release([dropped], self.disk)  # else the run's page holds other groups' items that are good
            return
        if tier == Tier.HOST and where.refs > 1:
            return
        other = Tier.DISK if tier == Tier.HOST else Tier.HOST
        needed = index.anchors if isinstance(index, RadixIndex) else [m.group]
        if all(index.get(where, at, other, g) != NO_COPY for g in needed):
            cache.release(index.drop(where, at, at + 1, tier), self.disk)
            self.space.persist.offer(cache, m.node, m.page, m.page + 1)
            return
        if isinstance(index, RadixIndex):
            where = index.cut_at(where, m.page)
        seconds = time.time(), self.space.ways.now()
        self.space.persist.evictions.note(index, where, 0, where.pages, Tier(tier), f"lost: {reason}", *seconds)
        cut = index.cut(where)
        cache.release(cut.freed, self.disk)
        self.counts["pages_cut"] += cut.pages
