"""For how long bytes move in each direction, so that what moved over it is what a tier really brings."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

LOADS: Final = {"device": "device_to_host", "disk": "disk_to_host", "host": "host_to_region"}
"""Direction in which a tier's pages go to whoever asked; pages in host are read in place, or copied to a region."""


class Busy:
    """Counts microseconds during which at least one transfer of a direction runs, under busy_us_<direction>."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._running: Counter[str] = Counter()
        self._since: dict[str, float] = {}

    @contextlib.contextmanager
    def moving(self, direction: str) -> Iterator[None]:
        """One transfer runs; several at once count once."""
        if not self._running[direction]:
            self._since[direction] = time.perf_counter()
        self._running[direction] += 1
        try:
            yield
        finally:
            self._running[direction] -= 1
            if not self._running[direction]:
                passed = time.perf_counter() - self._since[direction]
                self._counts[f"busy_us_{direction}"] += round(passed * 1e6)


def rates(counts: Mapping[str, int]) -> dict[str, float]:
    """Bytes a second that each tier has brought so far while it was asked to; tiers that brought nothing are absent."""
    return {
        tier: counts[f"bytes_{direction}"] / counts[f"busy_us_{direction}"] * 1e6
        for tier, direction in LOADS.items()
        if counts.get(f"bytes_{direction}") and counts.get(f"busy_us_{direction}")
    }
