"""Re-reads what is cached, slowly, so that bytes that rot are found before an engine asks for them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvtier.index import Node
from kvtier.mover import Mover, Urgency
from kvtier.store.cache import Cache
from kvtier.store.loads import Loads, Missing
from kvtier.store.space import Space
from kvtier.types import NO_COPY, KvtierError, Tier

REST_S = 5.0
"""Between two rounds, and while there is nothing to read."""
_log = logging.getLogger("kvtier.scrub")


class Place(NamedTuple):
    """One copy of one item."""

    cache: Cache
    node: Node
    page: int
    group: int
    tier: int


class Scrub:
    """Walks every copy in memory and on disk at `rate` bytes a second, when nothing more urgent moves."""

    def __init__(
        self, caches: dict[int, Cache], loads: Loads, space: Space, mover: Mover, counts: Counter[str]
    ) -> None:
        self.caches = caches
        self.loads = loads
        self.space = space
        self.mover = mover
        self.counts = counts

    async def run(self, rate: float) -> None:
        """Scrub for ever."""
        while True:
            for place in self.places():
                if place.node.dead:
                    continue
                try:
                    read = await self.check(place)
                except KvtierError:  # busy: what engines wait for comes first
                    read = 0
                except Exception:  # noqa: BLE001 - one copy that cannot be read must not be the last one
                    _log.exception("a copy could not be checked")
                    read = 0
                await asyncio.sleep(read / rate if read else 0)
            self.counts["scrub_rounds"] += 1
            await asyncio.sleep(REST_S)

    def places(
        self, tiers: tuple[Tier, ...] = (Tier.DEVICE, Tier.HOST, Tier.DISK), caches: list[Cache] | None = None
    ) -> Iterator[Place]:
        """Every copy there is when its turn comes; nodes that come and go meanwhile are met in the next round."""
        for cache in list(self.caches.values()) if caches is None else caches:
            for node in cache.index.walk():
                for tier in tiers:
                    for group in range(cache.index.groups):
                        held = node.handles(tier, group)
                        if held is not None:
                            pages = np.flatnonzero(held != NO_COPY) + node.depth
                            yield from (Place(cache, node, int(page), group, tier) for page in pages)

    async def check(self, place: Place) -> int:
        """Re-read one copy under a lease; bytes that are not what was stored are dropped and counted. Bytes read."""
        cache, index = place.cache, place.cache.index
        node, at = index.locate(place.node, place.page)
        if node.dead or at >= node.pages:
            return 0
        handle = index.get(node, at, place.tier, place.group)
        sums = node.sums[place.group]
        if handle == NO_COPY or sums is None:
            return 0
        item = Missing(node, place.group, place.page, place.tier, handle, sums[at])
        with self.space.leased(cache, node):
            wrong = await self._wrong(cache, item)
            self.counts["scrubbed_bytes"] += cache.item_bytes[place.group]
            if wrong:
                self.loads.lose(cache, item, wrong)
        return cache.item_bytes[place.group]

    async def _wrong(self, cache: Cache, item: Missing) -> str:
        """'' or what is wrong with the copy."""
        if item.tier != Tier.DISK:
            copying = self.space.copying
            found = await copying.checksums(cache, item.group, [item.handle], item.tier, Urgency.BACKGROUND)
            return "" if found[0] == item.sum else "checksum"
        disk = self.loads.disk
        assert disk is not None
        slot, count = cache.shape.slot_bytes[item.group], cache.shape.slots_per_item[item.group]
        scratch = np.empty((count, slot), np.uint8)
        left = cache.item_bytes[item.group]
        views = [row[: min(slot, left - n * slot)] for n, row in enumerate(scratch)]
        results = await self.mover.run(disk.read, [(item.handle, item.group, views)], urgency=Urgency.BACKGROUND)
        return results[0]
