"""What was evicted lately, by page, without its bytes: bounded, and sampled where the tier is large."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, Generic, TypeVar

MOST: Final = 8192
"""Entries for as many pages as the tier holds; with more, one page in 2, 4, 8 ... is remembered, by its name."""
M = TypeVar("M")


class Ghosts(Generic[M]):
    """A queue of page names, the oldest forgotten first, each with a mark. An entry stands for `scale` pages."""

    __slots__ = ("_mask", "_names", "bound", "share")

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        """How many pages are remembered, as a multiple of the tier's."""
        self.bound = 0
        self._names: OrderedDict[int, M] = OrderedDict()
        self._mask = 0

    @property
    def scale(self) -> int:
        """One page in so many is remembered."""
        return self._mask + 1

    def __len__(self) -> int:
        """Pages remembered."""
        return len(self._names) * self.scale

    def resize(self, pages: int) -> None:
        """Follow the size of the tier."""
        while pages > MOST * (self._mask + 1):
            self._mask = 2 * self._mask + 1
            for name in [name for name in self._names if name & self._mask]:
                del self._names[name]
        self.bound = int(pages * self.share) // (self._mask + 1)
        while len(self._names) > self.bound:
            self._names.popitem(last=False)

    def sampled(self, index: Any, node: Any, lo: int, hi: int) -> list[int]:
        """Names of the pages [lo, hi) of a node that the sample is to know: none of most evictions in a large tier."""
        found: list[int] = index.names(node, lo, hi, self._mask)
        return found

    def add(self, gone: list[int], mark: M) -> list[M]:
        """Pages of these names were evicted; returns the marks of those that are forgotten for them."""
        names = self._names
        out: list[M] = []
        for name in gone:
            if name in names:
                names.move_to_end(name)
            names[name] = mark
        while len(names) > self.bound:
            out.append(names.popitem(last=False)[1])
        return out

    def take(self, index: Any, node: Any, lo: int, hi: int) -> list[M]:
        """Marks of those of the pages that were remembered; they are forgotten."""
        names = self._names
        if not names:
            return []
        return [names.pop(name) for name in self.sampled(index, node, lo, hi) if name in names]
