"""A set of disjoint byte ranges: which parts of an address space are free, warm or cold."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from kvtier.types import align_up


class Extents:
    """Sorted disjoint half-open ranges [lo, hi); neighbours are merged, `bytes` is their sum."""

    def __init__(self) -> None:
        self._lo: list[int] = []
        self._hi: list[int] = []
        self.bytes = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._lo, self._hi, strict=True))

    def add(self, lo: int, hi: int) -> None:
        """The union with [lo, hi)."""
        first = bisect.bisect_left(self._hi, lo)
        last = bisect.bisect_right(self._lo, hi)
        merged = sum(self._hi[first:last]) - sum(self._lo[first:last])
        if first < last:
            lo, hi = min(lo, self._lo[first]), max(hi, self._hi[last - 1])
        self._lo[first:last] = [lo]
        self._hi[first:last] = [hi]
        self.bytes += hi - lo - merged

    def discard(self, lo: int, hi: int) -> int:
        """Take [lo, hi) out; returns how many bytes of it were in."""
        first = bisect.bisect_right(self._hi, lo)
        last = bisect.bisect_left(self._lo, hi)
        if first >= last:
            return 0
        low, high = self._lo[first], self._hi[last - 1]
        gone = sum(self._hi[first:last]) - sum(self._lo[first:last])
        rest = [(a, b) for a, b in ((low, lo), (hi, high)) if a < b]
        gone -= sum(b - a for a, b in rest)
        self._lo[first:last] = [a for a, _ in rest]
        self._hi[first:last] = [b for _, b in rest]
        self.bytes -= gone
        return gone

    def covers(self, lo: int, hi: int) -> bool:
        """Whether all of [lo, hi) is in."""
        at = bisect.bisect_right(self._lo, lo) - 1
        return at >= 0 and hi <= self._hi[at]

    def fit(self, size: int, align: int) -> int | None:
        """The lowest aligned address where `size` bytes are in; None where nothing fits."""
        for lo, hi in self:
            at = align_up(lo, align)
            if at + size <= hi:
                return at
        return None

    def largest(self, align: int) -> int:
        """The most bytes that start at an aligned address and are in."""
        return max((hi - align_up(lo, align) for lo, hi in self), default=0)

    def head(self, size: int) -> tuple[int, int]:
        """The lowest range, cut to `size` bytes."""
        return self._lo[0], min(self._hi[0], self._lo[0] + size)

    def tail(self, size: int) -> tuple[int, int]:
        """The highest range, cut to its last `size` bytes."""
        return max(self._lo[-1], self._hi[-1] - size), self._hi[-1]
