"""How long each verb took and what was refused, counted on the serving loop for less than a microsecond each."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Any, Final

from kvtier import wire
from kvtier.types import Code

BOUNDS_S: Final = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the latency buckets, in seconds; one more bucket is without bound."""
CODES: Final = frozenset(code.value for code in Code)
NAMES: Final = {number: kind.__name__ for kind, number in wire.VERBS.items()}


class Stats:
    """Counters of one server."""

    def __init__(self) -> None:
        self.buckets: dict[int, list[int]] = {number: [0] * (len(BOUNDS_S) + 1) for number in NAMES}
        self.seconds: dict[int, float] = dict.fromkeys(NAMES, 0.0)
        self.refused: Counter[str] = Counter()

    def took(self, verb: int, seconds: float) -> None:
        """A request of a known verb was answered after so long."""
        self.buckets[verb][bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds[verb] += seconds

    def refuse(self, code: str) -> None:
        """Work was refused by that name."""
        self.refused[code if code in CODES else Code.INTERNAL.value] += 1

    def data(self) -> dict[str, Any]:
        """Everything as a plain tree; verbs that nobody used are left out."""
        return {
            "bounds_s": list(BOUNDS_S),
            "verbs": {
                NAMES[verb]: {"buckets": list(buckets), "seconds": self.seconds[verb]}
                for verb, buckets in self.buckets.items()
                if any(buckets)
            },
            "refused": dict(self.refused),
        }
