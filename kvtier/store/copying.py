"""Copies of items between slots, in whatever memory these are: by worker threads, or by the device where it has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.mover import INLINE_BYTES, Mover, Urgency, batches, copy_items, digests
from kvtier.store.cache import Cache
from kvtier.store.carrier import Carrier
from kvtier.types import Code, KvtierError, Tier


class Move(NamedTuple):
    """One item on its way; both slots are held by whoever asks."""

    group: int
    source: tuple[int, int]
    """Tier and handle."""
    target: tuple[int, int]


class Copying:
    """Who moves what."""

    def __init__(self, mover: Mover, carrier: Carrier | None = None) -> None:
        self.mover = mover
        self.carrier = carrier

    async def copy(self, cache: Cache, moves: Sequence[Move], urgency: Urgency) -> None:
        """Copy items; ends only when no byte moves any more. Raises busy, io, Stuck (of the device)."""
        if not any(Tier.DEVICE in {move.source[0], move.target[0]} for move in moves):
            for part in batches(moves, lambda move: cache.item_bytes[move.group]):
                pairs = [(cache.views(m.group, m.source[1]), cache.views(m.group, m.target[1])) for m in part]
                if sum(cache.item_bytes[m.group] for m in part) <= INLINE_BYTES:  # sooner done than handed over
                    copy_items(pairs)
                else:
                    await self.mover.run(copy_items, pairs, urgency=urgency)
            return
        for part in batches(moves, lambda move: cache.item_bytes[move.group]):
            spans = [
                (cache.spans(*_at(move.source, move.group)), cache.spans(*_at(move.target, move.group)))
                for move in part
            ]
            await self._device.copy(spans, urgency)

    async def checksums(
        self, cache: Cache, group: int, handles: Sequence[int], tier: int, urgency: Urgency
    ) -> list[int]:
        """xxh3-64 of items of one group in a tier. Raises busy, io, Stuck."""
        if tier == Tier.DEVICE:
            return await self._device.checksums([cache.spans(tier, group, handle) for handle in handles], urgency)
        items = [cache.views(group, handle) for handle in handles]
        return await self.mover.run(digests, items, urgency=urgency)

    def reaches(self, tier: int) -> bool:
        """Whether the bytes of a tier can be read: not where its device failed."""
        return tier != Tier.DEVICE or (self.carrier is not None and not self.carrier.sick)

    @property
    def _device(self) -> Carrier:
        if self.carrier is None:
            raise KvtierError(Code.IO, "there is no device")
        return self.carrier


def _at(where: tuple[int, int], group: int) -> tuple[int, int, int]:
    return where[0], group, where[1]
