"""What left a tier lately and why, so that a miss can be explained. Bounded; owned by the loop thread."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import Any, Final, NamedTuple

from kvtier.index import Index, Node
from kvtier.types import Tier

MOST: Final = 4096
"""Evictions that are remembered; older ones are forgotten."""

BATCH_PAGES: Final = (1, 4, 16, 64, 256, 1024, 4096)
"""Upper bounds of the buckets of eviction batches; one more is without bound."""

Key = tuple[Index, int, bytes]


class Eviction(NamedTuple):
    """Pages [first, first + pages) of one path left `tier`."""

    when: float
    """Seconds since the epoch."""
    tier: str
    first: int
    pages: int
    why: str
    idle_s: float
    """Seconds since the pages were last used."""


class Evictions:
    """The latest evictions by the first page that went."""

    def __init__(self) -> None:
        self._by_page: OrderedDict[Key, Eviction] = OrderedDict()
        self._batches: dict[str, list[int]] = {}
        self._pages: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_page)

    def note(self, index: Index, node: Node, lo: int, hi: int, tier: Tier, why: str, when: float, now: float) -> None:
        """Pages [lo, hi) of a node leave a tier; `now` is in the seconds of node.time."""
        stride = index.stride
        key = index, node.depth + lo, node.edge[lo * stride : (lo + 1) * stride]
        self._by_page.pop(key, None)
        record = Eviction(when, tier.name.lower(), node.depth + lo, hi - lo, why, max(0.0, now - node.time))
        self._by_page[key] = record
        if len(self._by_page) > MOST:
            self._by_page.popitem(last=False)

    def batch(self, tier: Tier, pages: int) -> None:
        """So many pages left a tier at once to make room; none is no batch."""
        if pages:
            name = tier.name.lower()
            self._batches.setdefault(name, [0] * (len(BATCH_PAGES) + 1))[bisect_left(BATCH_PAGES, pages)] += 1
            self._pages[name] = self._pages.get(name, 0) + pages

    def batches(self) -> dict[str, Any]:
        """Histogram of the sizes of batches, by tier."""
        rows = {tier: {"buckets": list(self._batches[tier]), "pages": self._pages[tier]} for tier in self._batches}
        return {"bounds": list(BATCH_PAGES), "tiers": rows}

    def of(self, index: Index, page: int, key: bytes) -> Eviction | None:
        """The eviction that began with this page key at this page number, if it is remembered."""
        return self._by_page.get((index, page, key))

    def forget(self, index: Index) -> None:
        """Drop what is remembered of an index that ends."""
        for key in [key for key in self._by_page if key[0] is index]:
            del self._by_page[key]
