"""Re-reads what is cached, slowly, so that bytes that rot are found before an engine asks for them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvtier.index import Node
from kvtier.mover import Mover, Urgency
from kvtier.store.cache import Cache
from kvtier.store.loads import Loads, Missing
from kvtier.store.slices import sliced
from kvtier.store.space import Space
from kvtier.types import NO_COPY, KvtierError, Tier

REST_S = 5.0
"""Between two rounds, and while there is nothing to read."""
BATCH_BYTES: Final = 1 << 20
"""Copies are read in batches of so much: one job of the mover each, and one turn of the loop,"""
BATCH_COPIES: Final = 256
"""and of so many at most: that turn is to take less than a millisecond."""
_log = logging.getLogger("kvtier.scrub")


class Pace(NamedTuple):
    """How fast the scrub goes."""

    bytes_s: float
    """At most so many bytes a second."""
    round_s: float
    """A round takes at least so long: a small cache is not read over and over beside the engines."""

    def rest_s(self, read: int, cached: int) -> float:
        """Seconds to rest after `read` bytes of `cached` ones."""
        return max(read / self.bytes_s, self.round_s * min(1.0, read / max(cached, 1)))


class Place(NamedTuple):
    """One copy of one item."""

    cache: Cache
    node: Node
    page: int
    group: int
    tier: int

    @property
    def nbytes(self) -> int:
        """Of its item."""
        return self.cache.item_bytes[self.group]


class Scrub:
    """Walks every copy in memory and on disk at a pace, when nothing more urgent moves."""

    def __init__(
        self, caches: dict[int, Cache], loads: Loads, space: Space, mover: Mover, counts: Counter[str]
    ) -> None:
        self.caches = caches
        self.loads = loads
        self.space = space
        self.mover = mover
        self.counts = counts

    async def run(self, pace: Pace) -> None:
        """Scrub for ever."""
        while True:
            async for batch in self.batches():
                read = 0
                try:
                    _, read = await self.check(batch)
                except KvtierError:
                    pass  # busy: what engines wait for comes first
                except Exception:  # noqa: BLE001 - copies that cannot be read must not be the last ones
                    _log.exception("copies could not be checked")
                await asyncio.sleep(pace.rest_s(read, self._cached()))
            self.counts["scrub_rounds"] += 1
            await asyncio.sleep(REST_S)

    async def batches(
        self, tiers: Sequence[Tier] = (Tier.DEVICE, Tier.HOST, Tier.DISK), caches: list[Cache] | None = None
    ) -> AsyncIterator[list[Place]]:
        """Every copy there is when its turn comes, of one cache at a time; what comes and goes is met the next time."""
        for cache in list(self.caches.values()) if caches is None else caches:
            batch: list[Place] = []
            size = 0
            async for node in sliced(cache.index.walk()):
                for place in _places(cache, node, tiers):
                    batch.append(place)
                    size += place.nbytes
                    if size >= BATCH_BYTES or len(batch) == BATCH_COPIES:
                        yield batch
                        batch, size = [], 0
            if batch:
                yield batch

    def _cached(self) -> int:
        """Bytes of all copies."""
        return sum(
            held * cache.item_bytes[group]
            for cache in self.caches.values()
            for tier in cache.index.held
            for group, held in enumerate(tier)
        )

    async def check(self, batch: Sequence[Place]) -> tuple[int, int]:
        """Re-read copies of one cache under leases; what is not what was stored is dropped and counted.

        How many were read, and their bytes.
        """
        found = [item for item in map(_found, batch) if item is not None]
        if not found:
            return 0, 0
        cache = batch[0].cache
        size = sum(cache.item_bytes[item.group] for item in found)
        with self.space.leased(cache, *{item.node: None for item in found}):
            for item, wrong in await self._read(cache, found):
                if wrong:
                    self.loads.lose(cache, item, wrong)
            self.counts["scrubbed_bytes"] += size
        return len(found), size

    async def _read(self, cache: Cache, items: list[Missing]) -> list[tuple[Missing, str]]:
        """Each with '' or what is wrong with the copy."""
        parts: dict[tuple[int, int], list[Missing]] = {}
        for item in items:
            parts.setdefault((item.tier, item.group), []).append(item)
        out: list[tuple[Missing, str]] = []
        for (tier, group), part in parts.items():
            handles = [item.handle for item in part]
            if tier == Tier.DISK:
                out += zip(part, await self._from_disk(cache, group, handles), strict=True)
                continue
            sums = await self.space.copying.checksums(cache, group, handles, tier, Urgency.BACKGROUND)
            out += [(item, "" if item.sum == now else "checksum") for item, now in zip(part, sums, strict=True)]
        return out

    async def _from_disk(self, cache: Cache, group: int, handles: list[int]) -> list[str]:
        """What is wrong with copies on disk."""
        disk = self.loads.disk
        assert disk is not None
        slot, count = cache.shape.slot_bytes[group], cache.shape.slots_per_item[group]
        left = cache.item_bytes[group]
        scratch = np.empty((len(handles), count, slot), np.uint8)
        views = [[row[: min(slot, left - n * slot)] for n, row in enumerate(rows)] for rows in scratch]
        reads = [(handle, group, into) for handle, into in zip(handles, views, strict=True)]
        return await self.mover.run(disk.read, reads, urgency=Urgency.BACKGROUND)


def _places(cache: Cache, node: Node, tiers: Sequence[Tier]) -> Iterator[Place]:
    """Every copy of a node."""
    for tier in tiers:
        for group in range(cache.index.groups):
            held = node.handles(tier, group)
            if held is not None:
                pages = (np.flatnonzero(held != NO_COPY) + node.depth).tolist()
                yield from (Place(cache, node, page, group, tier) for page in pages)


def _found(place: Place) -> Missing | None:
    """The copy as it is now, if it is still there."""
    if place.node.dead:
        return None
    index = place.cache.index
    node, at = index.locate(place.node, place.page)
    if node.dead or at >= node.pages:
        return None
    handle, sums = index.get(node, at, place.tier, place.group), node.sums[place.group]
    if handle == NO_COPY or sums is None:
        return None
    return Missing(node, place.group, place.page, place.tier, handle, sums[at])
