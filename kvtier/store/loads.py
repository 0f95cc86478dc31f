"""Brings pages from disk or a device to host, each once however many wait for it; verifies every byte on the way."""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtier.index import Node, RadixIndex
from kvtier.index.node import LOCAL
from kvtier.mover import Mover, Urgency, Views, batches, copy_items, digest, digests
from kvtier.store.cache import Cache
from kvtier.store.carrier import Stuck
from kvtier.store.copying import Move
from kvtier.store.space import Space
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.slab import SlotState
from kvtier.types import NO_COPY, KvtierError, Tier

AT_ONCE = 1024
"""Items looked at before others on the loop have their turn: one or two milliseconds."""
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
Load = asyncio.Task[bool]
"""Brings some items; whether there was no room for all."""


class Brought(enum.Enum):
    """What became of items that were to be loaded."""

    ALL = enum.auto()
    """Nothing more is on its way, and there was room for all."""
    SHORT = enum.auto()
    """Nothing more is on its way; there was no room for some."""
    LATE = enum.auto()
    """Some are still on their way."""


class Loads:
    """Load-back. The caller holds a lease on the path; so does a load that outlives its caller."""

    def __init__(self, disk: DiskTier | None, mover: Mover, space: Space, counts: Counter[str]) -> None:
        self.disk = disk
        self.mover = mover
        self.space = space
        self.counts = counts
        self.moving: dict[tuple[int, int, int], Load] = {}
        """(tier, handle there, group) -> the load that brings it."""
        self._turn = asyncio.Lock()
        self.mending: dict[tuple[int, int], asyncio.Task[None]] = {}
        """(group, handle in host) -> what puts its bytes right."""

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
            held = cache.found(node, group, first, count, tiers)
            if NO_COPY not in held:
                continue
            sums = cache.gather_sums(node, group, first, count)
            others = [tier for tier in LOCAL if tier not in {*tiers, but} and self.space.copying.reaches(tier)]
            away = {tier: cache.gather(node, group, first, count, tier) for tier in others}
            for at, handle in enumerate(held):
                if handle == NO_COPY:
                    has = next((tier for tier, row in away.items() if row[at] != NO_COPY), None)
                    if has is not None:
                        out.append(Missing(node, group, first + at, has, away[has][at], sums[at]))
        return out

    def under_way(self, missing: list[Missing]) -> bool:
        """Whether somebody brings some of these already."""
        return any((m.tier, m.handle, m.group) in self.moving for m in missing) if self.moving else False

    async def bring(self, cache: Cache, missing: list[Missing], deadline: float) -> Brought:
        """Load the items, until the deadline; after that loads go on by themselves."""
        waits = await self.begin(cache, missing, deadline)
        left = deadline - asyncio.get_running_loop().time()
        late: set[Load] = set()
        if waits:
            _, late = await asyncio.wait(waits, timeout=max(0.0, left))
        if late or not waits:
            return Brought.LATE
        return Brought.SHORT if any(not each.cancelled() and each.result() for each in waits) else Brought.ALL

    async def begin(self, cache: Cache, missing: list[Missing], deadline: float) -> set[Load]:
        """Begin to load them, some at a time; returns the loads that bring them."""
        waits: set[Load] = set()
        for at in range(0, len(missing), AT_ONCE):
            if at:
                await asyncio.sleep(0)
            waits |= self.start(cache, missing[at : at + AT_ONCE], deadline)
        return waits

    async def lacking(
        self, cache: Cache, node: Node, needed: list[tuple[int, int, int]], tiers: Sequence[int] = (Tier.HOST,)
    ) -> list[Missing]:
        """The same as `missing`, some pages at a time, of a path that the caller holds."""
        out: list[Missing] = []
        for group, first, count in needed:
            for at in range(first, first + count, AT_ONCE):
                if at > first:
                    await asyncio.sleep(0)
                out += self.missing(cache, node, [(group, at, min(AT_ONCE, first + count - at))], tiers)
        return out

    def start(self, cache: Cache, missing: list[Missing], deadline: float) -> set[Load]:
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

    async def _load(self, cache: Cache, batch: list[Missing], deadline: float) -> bool:
        """Read one batch into fresh slots and publish what verified, under leases of its own; whether room was short.

        What a device had wrong comes from disk, where that has it too; by then no load finds this one to wait for.
        """
        wrong: list[Missing] = []
        short = False
        try:
            async with self._turn:
                await asyncio.sleep(0)  # a long prompt's batches begin together: what else is ready goes in between
            got = await self.space.take_first(cache, [m.group for m in batch], deadline)
            plan = []
            for m in batch:
                if got[m.group]:
                    plan.append((m, got[m.group].pop(0)))
                else:
                    self.counts["loads_no_space"] += 1
                    short = True
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
        return short

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
        slots = _by_group(plan)
        for group, mine in slots.items():
            cache.pool.mark(group, mine, SlotState.FILLING)
        way = f"{Tier(tier).name.lower()}_to_host"
        try:
            with self.space.ways.busy.moving(way):
                results = await (self._read if tier == Tier.DISK else self._fetch)(cache, plan)
        except BaseException as exc:
            for group, mine in slots.items():
                if isinstance(exc, Stuck):
                    cache.pool.mark(group, mine, SlotState.QUARANTINED)
                else:
                    cache.pool.free(group, mine)
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
        index = cache.index
        lost: list[tuple[Missing, str]] = []
        back: Plan = []
        there: Plan = []
        for (m, slot), reason in zip(plan, results, strict=True):
            good = not (reason or m.node.dead)
            if reason and not m.node.dead:  # else its cells may be another's by now
                lost.append((m, reason))
            if good:
                where, at = index.locate(m.node, m.page)
                good = index.get(where, at, Tier.HOST, m.group) == NO_COPY  # it may have come from another tier
            (there if good else back).append((m, slot))
        for group, slots in _by_group(back).items():
            cache.pool.free(group, slots)
        for group, slots in _by_group(there).items():
            cache.pool.mark(group, slots, SlotState.CACHED)
            self._put(cache, group, [(m, slot) for m, slot in there if m.group == group])
        for m, reason in lost:
            self.lose(cache, m, reason)
        return [m for m, _ in lost]

    def _put(self, cache: Cache, group: int, plan: Plan) -> None:
        """Note items of one group in host, pages that follow each other in a node at once."""
        while plan:
            first = plan[0][0]
            where, at = cache.index.locate(first.node, first.page)
            most = min(len(plan), where.pages - at)
            count = next(
                (n for n, (m, _) in enumerate(plan[:most]) if m.node is not first.node or m.page != first.page + n),
                most,
            )
            slots, sums = array("q", [slot for _, slot in plan[:count]]), array("Q", [m.sum for m, _ in plan[:count]])
            cache.index.put(where, at, Tier.HOST, group, slots, sums)
            name = Tier(first.tier).name.lower()
            self.counts[f"pages_loaded_{name}"] += count
            self.counts[f"bytes_{name}_to_host"] += count * cache.item_bytes[group]
            plan = plan[count:]

    def lose(self, cache: Cache, m: Missing, reason: str) -> None:
        """A copy is not what was stored: a miss, counted and logged. Where no other tier has it, its subtree is cut.

        The caller holds a lease of its own. A host copy that others hold too is put right where it is.
        """
        index, tier = cache.index, m.tier
        where, at = index.locate(m.node, m.page)
        if not self._same(cache, m):
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
        held = tier == Tier.HOST and where.refs > 1
        if held and index.get(where, at, Tier.DISK, m.group) != NO_COPY:
            self._put_right(cache, m)
            return
        others = [other for other in LOCAL if other != tier]
        needed = index.anchors if isinstance(index, RadixIndex) else [m.group]
        if not held and all(any(index.get(where, at, other, g) != NO_COPY for other in others) for g in needed):
            if tier == Tier.DEVICE and where.holds(tier) > 1:
                return  # an engine may read it in place
            cache.release(index.drop(where, at, at + 1, tier), self.disk)
            self.space.persist.offer(cache, m.node, m.page, m.page + 1)
            return
        self._cut(cache, m, reason)

    def _cut(self, cache: Cache, m: Missing, reason: str) -> None:
        """A page is lost, with all that goes on from it: who holds it keeps it, nobody is given it again."""
        index = cache.index
        where, _ = index.locate(m.node, m.page)
        if isinstance(index, RadixIndex):
            where = index.cut_at(where, m.page)
        seconds = time.time(), self.space.ways.now()
        self.space.persist.room.evictions.note(index, where, 0, where.pages, Tier(m.tier), f"lost: {reason}", *seconds)
        cut = index.cut(where)
        cache.release(cut.freed, self.disk)
        self.counts["pages_cut"] += cut.pages

    def _put_right(self, cache: Cache, m: Missing) -> None:
        """Begin to mend a host copy, unless that is under way."""
        key = m.group, m.handle
        if key not in self.mending:
            self.mending[key] = asyncio.get_running_loop().create_task(self._mend(cache, m))

    async def _mend(self, cache: Cache, m: Missing) -> None:
        """Put back from disk what a slot has lost that others read in place, which changes no byte that was right.

        Where disk has lost it too, it is in no tier any more.
        """
        try:
            with self.space.leased(cache, m.node):
                if not await self._mended(cache, m):
                    self._cut(cache, m, "checksum")
        except KvtierError:  # busy: whoever reads it next finds it again
            log.debug("a host copy was not mended")
        finally:
            del self.mending[m.group, m.handle]

    async def _mended(self, cache: Cache, m: Missing) -> bool:
        """Whether disk had the right bytes, which are in the slot now, or the slot is not what it was."""
        index = cache.index
        if not self._same(cache, m):
            return True
        where, at = index.locate(m.node, m.page)
        stored, slot = index.get(where, at, Tier.DISK, m.group), cache.views(m.group, m.handle)
        if stored == NO_COPY:
            return False
        right = [np.empty_like(view) for view in slot]
        found = await self.mover.run(self._read_right, (stored, m.group, right), m.sum, urgency=Urgency.BACKGROUND)
        if not self._same(cache, m):
            return True
        if found:
            await self.mover.run(copy_items, [(right, slot)], urgency=Urgency.BACKGROUND)
            self.counts["host_mended"] += 1
        return found

    @staticmethod
    def _same(cache: Cache, m: Missing) -> bool:
        """Whether an item is still where it was."""
        where, at = cache.index.locate(m.node, m.page)
        return not cache.gone(m.node) and cache.index.get(where, at, m.tier, m.group) == m.handle

    def _read_right(self, there: tuple[int, int, Views], value: int) -> bool:
        """In a worker thread: whether disk has an item of that checksum; its bytes are in the views then."""
        assert self.disk is not None
        return self.disk.read([there]) == [""] and digest(there[2]) == value


def _by_group(plan: Plan) -> dict[int, list[int]]:
    """The slots of each group: a pool is told once of many."""
    slots: dict[int, list[int]] = {}
    for m, slot in plan:
        slots.setdefault(m.group, []).append(slot)
    return slots
