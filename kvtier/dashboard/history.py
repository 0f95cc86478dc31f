"""What the dashboard draws over time: readings of the daemon's counters, kept for an hour. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

EVERY_S: Final = 5.0
KEPT: Final = 720
"""Readings: an hour."""
TIERS: Final = ("device", "host", "peer", "disk")


class History:
    """Readings of counters, oldest first."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=KEPT)

    def add(self, at: float, counters: Mapping[str, int]) -> None:
        """Note the counters at a time, of a clock that nobody sets. A daemon that began anew begins a new history."""
        if self._readings and counters.get("tokens_asked", 0) < self._readings[-1][1].get("tokens_asked", 0):
            self._readings.clear()
        self._readings.append((at, counters))

    def steps(self) -> list[dict[str, Any]]:
        """Between each two readings: tokens asked for a second, and how many of them each tier served."""
        out = []
        for (since, before), (at, after) in itertools.pairwise(self._readings):
            seconds = max(1e-9, at - since)
            hit = {tier: _grown(before, after, f"tokens_hit_{tier}") / seconds for tier in TIERS}
            asked = _grown(before, after, "tokens_asked") / seconds
            out.append({"seconds": seconds, "asked_s": asked, "hit_s": hit})
        return out


def _grown(before: Mapping[str, int], after: Mapping[str, int], name: str) -> int:
    return after.get(name, 0) - before.get(name, 0)
