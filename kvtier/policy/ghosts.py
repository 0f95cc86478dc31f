"""What was evicted lately, by page, without its bytes: bounded, and sampled where the tier is large."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import numpy as np

MOST: Final = 8192
"""Entries for as many pages as the tier holds; with more, one page in 2, 4, 8 ... is remembered, by its name."""


class Ghosts:
    """A queue of page names, the oldest forgotten first. Counts are in pages, scaled up from the sample."""

    __slots__ = ("_mask", "_names", "bound", "share")

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        """How many pages are remembered, as a multiple of the tier's."""
        self.bound = 0
        self._names: OrderedDict[int, float] = OrderedDict()
        self._mask = 0

    def __len__(self) -> int:
        """Pages remembered."""
        return len(self._names) * (self._mask + 1)

    def resize(self, pages: int) -> None:
        """Follow the size of the tier."""
        while pages > MOST * (self._mask + 1):
            self._mask = 2 * self._mask + 1
            for name in [name for name in self._names if name & self._mask]:
                del self._names[name]
        self.bound = int(pages * self.share) // (self._mask + 1)
        while len(self._names) > self.bound:
            self._names.popitem(last=False)

    def _sampled(self, index: Any, node: Any, lo: int, hi: int) -> list[int]:
        """Names of the pages [lo, hi) of a node that the sample is to know."""
        names = np.frombuffer(index.chain_of(node), "<u8")[2 * lo : 2 * hi : 2]
        if self._mask:
            names = names[names & np.uint64(self._mask) == 0]
        found: list[int] = names.tolist()
        return found

    def add(self, index: Any, node: Any, lo: int, hi: int, stamp: float = 0.0) -> None:
        """Pages [lo, hi) of a node were evicted."""
        names = self._names
        for name in self._sampled(index, node, lo, hi):
            names[name] = stamp
            names.move_to_end(name)
        while len(names) > self.bound:
            names.popitem(last=False)

    def take(self, index: Any, node: Any, lo: int, hi: int) -> int:
        """How many of the pages were remembered (scaled up); they are forgotten."""
        found = 0
        for name in self._sampled(index, node, lo, hi):
            if self._names.pop(name, None) is not None:
                found += 1
        return found * (self._mask + 1)
