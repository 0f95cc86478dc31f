"""Pages on their way between device and host memory: down before they are evicted, up where they are hot.

A copy is published only when the device said that it is done and its bytes check out; the path is leased meanwhile, so
neither slot is given away before.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, NamedTuple

from kvtier.heat import Heat
from kvtier.index import Node
from kvtier.mover import Urgency, batches
from kvtier.store.cache import Cache
from kvtier.store.carrier import Stuck
from kvtier.store.copying import Move
from kvtier.store.loads import Loads, Missing
from kvtier.store.space import Space
from kvtier.tiers.slab import SlotState
from kvtier.types import NO_COPY, KvtierError, Tier

MOST_PAGES: Final = 1 << 16
"""Pages that may be on their way at once; more are refused."""
ROOM_S: Final = 1.0
"""So long a page on its way down waits for room in host."""
FULL_S: Final = 0.5
"""So long after it had no room, host is taken for full."""

HEAT_OF: Final = 3
"""Half-life by which pages are hot: 512 s."""
HOT: Final = 2.0
"""Uses, its storing included, after which a page may push others out of the device."""

Task = asyncio.Task[None]
log = logging.getLogger("kvtier.shifts")


class Shift(NamedTuple):
    """One item, and the fresh slot that it goes to."""

    item: Missing
    slot: int


class Shifter:
    """What both ways share: items to fresh slots of `to`, whose tier publishes them."""

    def __init__(self, to: Space, loads: Loads, source: Tier) -> None:
        self.to = to
        self.loads = loads
        self.source = source
        self.way = f"{source.name.lower()}_to_{to.name}"
        self.pages = 0
        """On their way."""
        self.moved = asyncio.Event()
        self.tasks: set[Task] = set()

    def items(
        self, cache: Cache, node: Node, ranges: Iterable[tuple[int, int, int]], lacking: Iterable[int]
    ) -> list[Missing]:
        """Items among (group, first, count) ranges that the source has and the tiers `lacking` have not, in order."""
        out = []
        for group, first, count in ranges:
            here = cache.gather(node, group, first, count, self.source)
            sums = cache.gather_sums(node, group, first, count)
            there = [cache.gather(node, group, first, count, tier) for tier in lacking]
            out += [
                Missing(node, group, first + at, self.source, handle, sums[at])
                for at, handle in enumerate(here)
                if handle != NO_COPY and all(row[at] == NO_COPY for row in there)
            ]
        return sorted(out, key=lambda m: m.page)

    def start(self, cache: Cache, node: Node, pages: int, work: Coroutine[Any, Any, None]) -> Task:
        """Let work on a path go on by itself, under a lease of its own."""
        cache.index.lease(node)
        cache.own += 1
        self.pages += pages
        task = asyncio.get_running_loop().create_task(self._guarded(cache, node, pages, work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _guarded(self, cache: Cache, node: Node, pages: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except KvtierError as exc:
            self.to.counts[f"refused_{self.way}"] += pages
            log.debug("pages stay where they are: %s", exc)
        except Exception:
            log.exception("moving pages failed")
        finally:
            self.pages -= pages
            cache.own -= 1
            self.to.unlease(cache, node)
            self.moved.set()

    async def settled(self) -> None:
        """Wait until nothing is on its way that was when this was called."""
        if self.tasks:
            await asyncio.wait(set(self.tasks))

    async def move(self, cache: Cache, items: list[Missing], deadline: float) -> bool:
        """Copy items in batches and publish them; False where there was no room for all. Raises io, busy, Stuck."""
        for batch in batches(items, lambda m: cache.item_bytes[m.group]):
            plan = await self._slots(cache, batch, deadline)
            if plan:
                with self.to.coming(cache, [m.group for m, _ in plan]):
                    await self._carry(cache, plan)
            if len(plan) < len(batch):
                return False
        return True

    async def _slots(self, cache: Cache, batch: list[Missing], deadline: float) -> list[Shift]:
        """Fresh slots for the leading items that there is room for."""
        got = await self.to.take_first(cache, [m.group for m in batch], deadline)
        plan = []
        for m in batch:
            if not got[m.group]:
                break
            plan.append(Shift(m, got[m.group].pop(0)))
        self.to.give_back(cache, got)
        return plan

    async def _carry(self, cache: Cache, plan: list[Shift]) -> None:
        """Copy, verify, publish; slots go back where that does not come about, unless the device may still write."""
        pool, tier = cache.pools[self.to.tier], int(self.to.tier)
        for m, slot in plan:
            pool.mark(m.group, [slot], SlotState.FILLING)
        state: SlotState | None = None
        good: list[bool] = []
        try:
            with self.to.ways.busy.moving(self.way):
                good = await self._copied(cache, plan)
        except Stuck:
            state = SlotState.QUARANTINED
            raise
        finally:
            for at, (m, slot) in enumerate(plan):
                where, position = cache.index.locate(m.node, m.page)
                known = m.node.dead or cache.index.get(where, position, tier, m.group) != NO_COPY
                if state is not None:
                    pool.mark(m.group, [slot], state)
                elif not good or not good[at] or known:
                    pool.free(m.group, [slot])
                else:
                    pool.mark(m.group, [slot], SlotState.CACHED)
                    cache.index.put(where, position, tier, m.group, [slot], [m.sum])
                    self.to.counts[f"bytes_{self.way}"] += cache.item_bytes[m.group]
        for (m, _), right in zip(plan, good, strict=True):
            if not right:
                self.wrong(cache, m)

    def wrong(self, cache: Cache, item: Missing) -> None:
        """The bytes that arrived are not what was stored."""
        self.loads.lose(cache, item, "checksum")

    async def _copied(self, cache: Cache, plan: list[Shift]) -> list[bool]:
        """Copy items; whether each arrived as it was stored."""
        copying = self.to.copying
        moves = [Move(m.group, (self.source, m.handle), (self.to.tier, slot)) for m, slot in plan]
        await copying.copy(cache, moves, Urgency.BACKGROUND)
        found: dict[tuple[int, int], int] = {}
        for group in {m.group for m, _ in plan}:
            slots = [slot for m, slot in plan if m.group == group]
            sums = await copying.checksums(cache, group, slots, self.to.tier, Urgency.BACKGROUND)
            found.update(zip(((group, slot) for slot in slots), sums, strict=True))
        return [found[m.group, slot] == m.sum for m, slot in plan]


class Demote(Shifter):
    """From device to host, before pages leave the device, and at once those that an engine computed there."""

    def __init__(self, to: Space, loads: Loads) -> None:
        super().__init__(to, loads, Tier.DEVICE)
        self._full_until = 0.0
        self._saving: dict[Node, Task] = {}
        """The latest save of each node that is not done."""

    @property
    def there(self) -> bool:
        """Whether there is a host tier."""
        return self.to.memory.budget_bytes > 0

    def declines(self, node: Node) -> bool:
        """Whether host had no room just now."""
        del node
        return asyncio.get_running_loop().time() < self._full_until

    def offer(self, cache: Cache, node: Node, first: int, end: int) -> bool:
        """Take pages [first, end) of the path to `node` that only the device has, which then drops them."""
        if not self.there or cache.retired or self.pages + end - first > MOST_PAGES:
            return False
        self.start(cache, node, end - first, self._leave(cache, node, first, end))
        return True

    def save(self, cache: Cache, node: Node, first: int, end: int, notify: Callable[[int], None] | None = None) -> None:
        """Copy what of committed pages the device has to host, and from there to disk.

        Pages in host go this way too: disk takes them only after those before them, which may be on their way here.
        Where too many are, only what is in host goes on.
        `notify(end)` is called once all are durable.
        """
        if self.there and not cache.retired and self.pages + end - first > MOST_PAGES:
            self.to.persist.offer(cache, node, first, end, notify)
        elif self.there and not cache.retired:
            work = self._save(cache, node, first, end, notify, self._before(node))
            task = self._saving[node] = self.start(cache, node, end - first, work)
            task.add_done_callback(functools.partial(self._saved, node))

    def _before(self, node: Node) -> set[Task]:
        """Saves that are under way on the path to `node`."""
        found, up = set(), node
        while up.parent is not None:
            if up in self._saving:
                found.add(self._saving[up])
            up = up.parent
        return found

    def _saved(self, node: Node, task: Task) -> None:
        """A save ended."""
        if self._saving.get(node) is task:
            del self._saving[node]

    async def progress(self, deadline: float) -> bool:
        """Wait until some page came down, or went on to disk; False at once when none does, or at the deadline."""
        if not self.tasks:
            return await self.to.persist.progress(deadline)
        self.moved.clear()
        left = deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(self.moved.wait(), max(0.0, left))
        except TimeoutError:
            return False
        return True

    def alone(self, cache: Cache, node: Node, first: int, end: int) -> list[Missing]:
        """What only the device has of pages [first, end) of the path to `node`."""
        ranges = [(group, first, end - first) for group in range(cache.index.groups)]
        return self.items(cache, node, ranges, (Tier.HOST, Tier.DISK))

    async def _down(self, cache: Cache, node: Node, first: int, end: int) -> bool:
        """Bring what only the device has to host; False where that has no room."""
        loop = asyncio.get_running_loop()
        if await self.move(cache, self.alone(cache, node, first, end), loop.time() + ROOM_S):
            return True
        self._full_until = loop.time() + FULL_S
        return False

    async def _save(
        self,
        cache: Cache,
        node: Node,
        first: int,
        end: int,
        notify: Callable[[int], None] | None,
        before: set[Task],
    ) -> None:
        down = await self._down(cache, node, first, end)
        if before:
            await asyncio.wait(before)
        if down and not node.dead:
            self.to.persist.offer(cache, node, first, end, notify)

    async def _leave(self, cache: Cache, node: Node, first: int, end: int) -> None:
        """Bring pages down, and drop the device's copies that nobody else holds."""
        await self._down(cache, node, first, end)
        index = cache.index
        for page in range(first, end):
            where, at = index.locate(node, page)
            if where.dead or where.holds(Tier.DEVICE) > 1:
                continue
            held = [g for g in range(index.groups) if index.get(where, at, Tier.DEVICE, g) != NO_COPY]
            if held and all(index.get(where, at, Tier.HOST, g) != NO_COPY for g in held):
                cache.release(index.drop(where, at, at + 1, Tier.DEVICE), self.to.persist.disk)
                self.to.counts["pages_demoted_device"] += 1
        if not node.dead:
            self.to.persist.offer(cache, node, first, end)


class Promote(Shifter):
    """From host to device: what an engine reads there, where there is room or it is hot."""

    def __init__(self, to: Space, loads: Loads) -> None:
        super().__init__(to, loads, Tier.HOST)

    def wish(self, cache: Cache, node: Node, pages: int) -> None:
        """Bring pages of a leased path up, as many as may be on their way."""
        if self.pages or Tier.DEVICE not in cache.pools:
            return
        items = self.items(cache, node, cache.radix.needed(pages), (Tier.DEVICE,))[:MOST_PAGES]
        if items and (self._room(cache, items) or Heat.level(node, HEAT_OF, self.to.ways.now()) > HOT):
            self.start(cache, node, len(items), self._up(cache, items))

    def _room(self, cache: Cache, items: list[Missing]) -> bool:
        """Whether nothing has to go for them."""
        pool = cache.pools[Tier.DEVICE]
        cost = sum(cache.slot_cost(m.group) for m in items)
        free = sum((pool.capacity(g) - pool.used(g)) * size for g, size in enumerate(pool.shape.slot_bytes))
        return cost <= free + self.to.memory.free_bytes

    async def _up(self, cache: Cache, items: list[Missing]) -> None:
        await self.move(cache, items, asyncio.get_running_loop().time())

    def wrong(self, cache: Cache, item: Missing) -> None:
        """The copy in host may be right: what is wrong there its readers and the scrub find."""
        del cache, item
        self.to.counts["device_checksum"] += 1
