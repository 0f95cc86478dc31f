"""How fast pages come from each tier, as measured, and whether loading them beats computing them again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kvtier.mover import Mover, Urgency
from kvtier.store.cache import Cache
from kvtier.types import KvtierError, Tier
from kvtier.wire import Segment

SMALLEST: Final = 64 << 10
SIZES: Final = 6
"""Rates are kept for loads of up to 64 KiB, 256 KiB, 1 MiB, ... and of more."""
ASSUMED: Final = {Tier.DEVICE: 500e9, Tier.HOST: 10e9, Tier.DISK: 1e9}
"""Bytes a second where nothing was measured yet."""
LATEST: Final = 0.2
"""Weight of the latest measurement."""
STALE_S: Final = 60.0
"""A tier that was skipped for so long is tried again: it may be faster now."""


class Verdict(NamedTuple):
    """What a match costs: seconds to load each segment and to compute it again, and how many pages to load."""

    load_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    cut: int


class Link:
    """One tier's rate by the size of a load."""

    def __init__(self, tier: int) -> None:
        self._rates = [0.0] * SIZES
        self._assumed = ASSUMED[Tier(tier)]
        self.measured = 0
        self.tried = 0.0
        """When it was last measured, or allowed to be slow."""
        self.slow = False
        """Whether what an engine asked of it last is computed sooner than loaded."""

    @staticmethod
    def _size(nbytes: int) -> int:
        return min(SIZES - 1, max(0, (nbytes - 1) // SMALLEST).bit_length() + 1 >> 1)

    def note(self, nbytes: int, seconds: float, now: float) -> None:
        """A load took so long."""
        size, rate = self._size(nbytes), nbytes / max(seconds, 1e-9)
        known = self._rates[size]
        self._rates[size] = known + LATEST * (rate - known) if known else rate
        self.measured += 1
        self.tried = now

    def seconds(self, nbytes: int) -> float:
        """How long a load of so many bytes takes; sizes that were not measured are like the next that were."""
        size = self._size(nbytes)
        near = sorted((abs(other - size), rate) for other, rate in enumerate(self._rates) if rate)
        return nbytes / (near[0][1] if near else self._assumed)

    def rates(self) -> dict[str, float]:
        """Bytes a second by the largest load of each size; the last is of all larger ones."""
        return {str(SMALLEST << 2 * size): round(rate) for size, rate in enumerate(self._rates) if rate}


class Links:
    """All tiers' rates."""

    def __init__(self) -> None:
        self.links = {tier: Link(tier) for tier in ASSUMED}
        self.skipped: dict[int, int] = dict.fromkeys(ASSUMED, 0)
        """Pages of each tier that were left out because computing them is faster."""
        self.probing: asyncio.Task[None] | None = None

    def need(self, mover: Mover) -> None:
        """Somebody asks what loading costs: measure what was not."""
        if self.probing is None:
            self.probing = asyncio.get_running_loop().create_task(self._probe(mover))

    def close(self) -> None:
        """Ask for no more measurements."""
        if self.probing is not None:
            self.probing.cancel()

    async def _probe(self, mover: Mover) -> None:
        """Measure copies within host memory; where the mover has no time for it, whoever asks next has it done."""
        try:
            for nbytes in (SMALLEST, 1 << 20, 8 << 20):
                seconds = await mover.run(_copy, nbytes, urgency=Urgency.BACKGROUND)
                self.links[Tier.HOST].note(nbytes, seconds, time.monotonic())
        except KvtierError:
            self.probing = None

    def judge(self, cache: Cache, segments: Sequence[Segment], prefill: float) -> Verdict:
        """Load each segment, or compute it and all after it, at `prefill` tokens a second; the cheapest cut."""
        page_bytes = sum(cache.item_bytes[group] for group in cache.index.anchors)
        load = tuple(self.links[Tier(s.tier)].seconds(s.pages * page_bytes) for s in segments)
        again = tuple(s.pages * cache.spec.page_tokens / prefill for s in segments)
        cut = pages = 0
        cost = best = sum(again)
        for segment, loading, computing in zip(segments, load, again, strict=True):
            pages += segment.pages
            cost += loading - computing
            if cost <= best:
                best, cut = cost, pages
        return Verdict(load, again, cut)

    def loaded(self, segments: Sequence[Segment], verdict: Verdict, now: float) -> int:
        """How many pages to load where the engine asks for all: the cut, unless a tier is to be tried again."""
        pages, left = 0, []
        for segment, loading, computing in zip(segments, verdict.load_s, verdict.recompute_s, strict=True):
            pages += segment.pages
            self.links[Tier(segment.tier)].slow = loading > computing
            if pages > verdict.cut:
                left.append((segment.tier, min(segment.pages, pages - verdict.cut)))
        for tier, _ in left:
            link = self.links[Tier(tier)]
            if now - link.tried > STALE_S:
                link.tried = now
                return -1
        for tier, count in left:
            self.skipped[tier] += count
        return verdict.cut if left else -1

    def report(self) -> dict[str, Any]:
        """For status: rates of each tier, how much of it was left out, and whether it is slower than computing now."""
        return {
            tier.name.lower(): {
                "load_bytes_per_s": link.rates(),
                "loads_measured": link.measured,
                "pages_skipped": self.skipped[tier],
                "below_break_even": link.slow,
            }
            for tier, link in self.links.items()
            if link.measured or self.skipped[tier]
        }


def _copy(nbytes: int) -> float:
    """Seconds to copy so many bytes, the best of some tries."""
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return best
