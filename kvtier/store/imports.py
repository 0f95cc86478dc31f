"""Operators' imports: runs of an export file become pages, each verified before it is served."""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import ExitStack
from typing import Final

import numpy as np

from kvtier import archive, wire
from kvtier.identity import CHAIN_BYTES, base_id, chain_keys
from kvtier.index import Node
from kvtier.mover import Urgency, digests
from kvtier.store.cache import Cache
from kvtier.store.parts import Parts
from kvtier.store.visits import Visits
from kvtier.tiers.slab import SlotState
from kvtier.types import NO_COPY, SCOPE, Code, KvtierError, Tier, bad

ROOM_S: Final = 30.0
"""So long a run waits for room in host."""
LOCAL = (Tier.DEVICE, Tier.HOST, Tier.DISK)


class Filling:
    """One run whose bytes are arriving: a slot for each item, in the order of the payload."""

    def __init__(self, run: archive.Run, pages: int, slots: list[int]) -> None:
        self.run = run
        self.pages = pages
        self.slots = slots
        """Handle by item; NO_COPY for what need not be kept."""
        self.at = 0
        """Item that the next bytes belong to."""
        self.within = 0
        self.counted = ExitStack()
        """While it is open, quotas count the slots."""


class Import:
    """One file on its way in."""

    def __init__(self, cache: Cache, root: bytes) -> None:
        self.cache = cache
        self.places: dict[bytes, tuple[Node, int]] = {root: (cache.index.root, -1)}
        """Chain key in the file of a run's last page -> the page here; the file's root -> the root."""
        self.leased = cache.index.root
        """The last run's end, so that what follows it has a parent."""
        self.filling: Filling | None = None
        self.counts: Counter[str] = Counter()


class Imports:
    """The verbs Import, ImportRun, ImportData and ImportEnd."""

    def __init__(self, parts: Parts, visits: Visits) -> None:
        self.parts = parts
        self.visits = visits

    def begin(self, msg: wire.Import) -> wire.Info:
        """The cache that the file's KV goes to: the same spec and epoch, in `scope` or the file's own.

        Raises bad_request, version, busy, over_cap.
        """
        if self.parts.loading:
            raise KvtierError(Code.BUSY, "the catalogue is still being indexed")
        head = archive.decode_header(msg.header)
        scope = msg.scope or head.scope
        if len(scope) > 2 * wire.MAX_NAME or not SCOPE.fullmatch(scope):
            raise bad("scope", f"uid:N or uid:N:LABEL, of at most {2 * wire.MAX_NAME} characters", scope)
        known = self.parts.epoch(base_id(head.spec, scope))
        if head.epoch != known:
            raise bad(
                "epoch", f"KV of epoch {known}, which is this cache's (its weights were changed so often)", head.epoch
            )
        self.parts.room_for(head.spec, scope, known)
        self.parts.arenas(scope)
        cache = self.parts.cache(head.spec, scope, known)
        number = self.visits.add(Import(cache, head.cache_id[:CHAIN_BYTES]), self._drop)
        cache.index.lease(cache.index.root)
        cache.own += 1
        return wire.Info({"import": number, "cache": cache.id.hex()})

    def _drop(self, held: Import) -> None:
        """It has ended: what is half there goes."""
        self._give_up(held)
        held.cache.own -= 1
        self.parts.unlease(held.cache, held.leased)
        self.parts.prune()

    def _give_up(self, held: Import) -> None:
        """Slots of the run that is arriving go back."""
        filling, held.filling = held.filling, None
        for item, slot in zip(filling.run.items, filling.slots, strict=True) if filling else ():
            if slot != NO_COPY:
                held.cache.free_host(item.group, [slot])
        if filling is not None:
            filling.counted.close()

    async def run(self, msg: wire.ImportRun) -> wire.Info:
        """Make room for a run. `wanted` says whether its bytes are to follow; else why not, in `refused`."""
        with self.visits.using(msg.number, Import) as held:
            self._give_up(held)
            run = archive.decode_run(msg.run)
            pages = run.check(held.cache.spec)
            refused = self._refuse(held, run)
            slots: list[int] = []
            if not refused:
                slots = await self._room(held.cache, run)
                if slots.count(NO_COPY) == len(slots):
                    refused = "no_space"
            if refused:
                held.counts[refused] += pages
                return wire.Info({"wanted": False, "refused": refused})
            held.filling = Filling(run, pages, slots)
            taken = [item.group for item, slot in zip(run.items, slots, strict=True) if slot != NO_COPY]
            held.filling.counted.enter_context(self.parts.space.coming(held.cache, taken))
        return wire.Info({"wanted": True, "refused": ""})

    def _refuse(self, held: Import, run: archive.Run) -> str:
        """Why a run is not wanted: known already, or without a parent here."""
        cache = held.cache
        if cache.retired:
            return "reset"
        if cache.spec.keyed:
            node = cache.keyed.find(cache.keyed.name(run.items[0].group, run.keys))
            return "known" if node is not None and node.live else ""
        above = self._above(held, run.parent)
        if above is None:
            return "parent"
        index = cache.radix
        node, end = index.deepest(run.keys, above)
        have = len(run.keys) // index.stride <= end and all(
            any(self._get(cache, node, above.end + item.page, item.group, tier) != NO_COPY for tier in LOCAL)
            for item in run.items
        )
        if have:
            self._remember(held, run, node, above.end, end)
        return "known" if have else ""

    @staticmethod
    def _get(cache: Cache, node: Node, page: int, group: int, tier: int) -> int:
        where, at = cache.index.locate(node, page)
        return cache.index.get(where, at, tier, group)

    @staticmethod
    def _above(held: Import, parent: bytes) -> Node | None:
        """The node that ends with a run's parent; None where that is not served here."""
        found = held.places.get(parent)
        if found is None:
            return None
        node, page = found
        if page < 0:
            return node
        index = held.cache.radix
        if node.dead:
            return None
        node, at = index.locate(node, page)
        return index.ending_at(node, page + 1) if at < node.live else None

    def _remember(self, held: Import, run: archive.Run, node: Node, first: int, pages: int) -> None:
        """Where the run's pages are, for the runs that follow it."""
        stride = held.cache.spec.stride
        last = chain_keys(run.parent, run.keys[: pages * stride], stride)[-CHAIN_BYTES:]
        held.places[last] = (node, first + pages - 1)

    async def _room(self, cache: Cache, run: archive.Run) -> list[int]:
        """A slot for each item, NO_COPY from the first on for which there is none."""
        deadline = self.parts.deadline(int(ROOM_S * 1000))
        got = await self.parts.space.take_first(cache, [item.group for item in run.items], deadline)
        slots: list[int] = []
        for item in run.items:
            slots.append(got[item.group].pop(0) if got[item.group] and NO_COPY not in slots else NO_COPY)
        self.parts.space.give_back(cache, got)
        for item, slot in zip(run.items, slots, strict=True):
            if slot != NO_COPY:
                cache.pool.mark(item.group, [slot], SlotState.FILLING)
        return slots

    async def data(self, msg: wire.ImportData) -> wire.Info:
        """The run's next bytes. With the last of them it is verified and served; `stored` pages of it."""
        with self.visits.using(msg.number, Import) as held:
            if held.filling is None:
                raise bad("number", "an import with a run whose bytes are wanted", msg.number)
            left = self._write(held.cache, held.filling, np.frombuffer(msg.data, np.uint8))
            if left:
                self._give_up(held)
                raise bad("data", "no more bytes than the run's items have", left)
            stored = await self._finish(held) if held.filling.at == len(held.filling.run.items) else 0
        return wire.Info({"stored": stored})

    @staticmethod
    def _write(cache: Cache, filling: Filling, data: np.ndarray) -> int:
        """Put bytes into the slots; how many were too many."""
        items = filling.run.items
        while data.size and filling.at < len(items):
            item, slot = items[filling.at], filling.slots[filling.at]
            size = min(data.size, cache.item_bytes[item.group] - filling.within)
            if slot != NO_COPY:
                start = 0
                for view in cache.views(item.group, slot):
                    lo, hi = max(filling.within, start), min(filling.within + size, start + view.size)
                    if lo < hi:
                        view[lo - start : hi - start] = data[lo - filling.within : hi - filling.within]
                    start += view.size
            data, filling.within = data[size:], filling.within + size
            if filling.within == cache.item_bytes[item.group]:
                filling.at, filling.within = filling.at + 1, 0
        return int(data.size)

    async def _finish(self, held: Import) -> int:
        """Verify what has arrived, serve the pages that are whole, free the rest."""
        cache, filling = held.cache, held.filling
        assert filling is not None
        items = filling.run.items
        there = [n for n, slot in enumerate(filling.slots) if slot != NO_COPY]
        views = [cache.views(items[n].group, filling.slots[n]) for n in there]
        sums = await self.parts.mover.run(digests, views, urgency=Urgency.BACKGROUND)
        good = {(items[n].page, items[n].group): n for n, sum_ in zip(there, sums, strict=True) if sum_ == items[n].sum}
        why = "checksum" if len(good) < len(there) else "no_space" if len(there) < len(items) else "parent"
        stored = self._serve_key(held, good) if cache.spec.keyed else self._serve(held, good)
        self._give_up(held)
        held.counts["stored"] += stored
        held.counts[why] += filling.pages - stored
        return stored

    def _serve(self, held: Import, good: dict[tuple[int, int], int]) -> int:
        """Publish the run's leading pages that are whole, here already or in what has arrived."""
        cache, filling = held.cache, held.filling
        assert filling is not None
        index, run = cache.radix, filling.run
        above = None if cache.retired else self._above(held, run.parent)
        if above is None:
            return 0
        known = index.deepest(run.keys, above)[1]
        end = known
        while end < filling.pages and all((end, group) in good for group in index.anchors):
            end += 1
        if not end:
            return 0
        first = above.end
        node = index.extend(run.keys[: end * index.stride], self.parts.now(), above)
        index.lease(node)
        for (page, group), number in good.items():
            if page < end:
                self._put(held, node, first + page, group, number)
        index.publish(node, node.end)
        self._remember(held, run, node, first, end)
        leased, held.leased = held.leased, node
        self.parts.unlease(cache, leased)
        self.parts.persist.offer(cache, node, first, first + end)
        return end

    def _serve_key(self, held: Import, good: dict[tuple[int, int], int]) -> int:
        """Publish one key."""
        cache, filling = held.cache, held.filling
        assert filling is not None
        if cache.retired or len(good) < len(filling.run.items):
            return 0
        node = cache.keyed.ensure(cache.keyed.name(filling.run.items[0].group, filling.run.keys), self.parts.now())
        for (_, group), number in good.items():
            self._put(held, node, 0, group, number)
        node.live = 1
        self.parts.persist.offer(cache, node, 0, 1)
        return 1

    @staticmethod
    def _put(held: Import, node: Node, page: int, group: int, number: int) -> None:
        """Hand one slot to the index, unless a local tier has the item."""
        filling, index = held.filling, held.cache.index
        assert filling is not None
        where, at = index.locate(node, page)
        if all(index.get(where, at, tier, group) == NO_COPY for tier in LOCAL):
            slot, filling.slots[number] = filling.slots[number], NO_COPY
            held.cache.settle(Tier.HOST, group, array("q", [slot]))
            index.put(where, at, Tier.HOST, group, [slot], [filling.run.items[number].sum])

    def end(self, msg: wire.ImportEnd) -> wire.Info:
        """How it went: pages stored, known before, and refused by reason. What is arriving is given up.

        Raises unknown.
        """
        held = self.visits.of(msg.number, Import)
        counts = {name: count for name, count in held.counts.items() if count}
        self.visits.end(msg.number)
        return wire.Info({"pages": counts})
