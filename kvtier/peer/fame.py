"""How often other hosts fetch a prompt's pages here lately, and to how many more homes it is given therefore. Pure."""

from __future__ import annotations

from collections import OrderedDict
from math import log2
from typing import Final, NamedTuple

HALF_S: Final = 60.0
"""A fetch counts half after so long."""
HOT: Final = 8.0
"""So many fetches are worth one home more, twice as many another one."""
MOST: Final = 4
"""Homes more than usual."""
MAX_KEYS: Final = 4096
TOLD_S: Final = 60.0
"""So long a home's word about others is believed."""


class Score(NamedTuple):
    """Fetches, decayed, at a time."""

    fetches: float
    at: float


class Fame:
    """Scores by the key that names a prompt's homes, and what other homes said of theirs."""

    def __init__(self) -> None:
        self._scores: OrderedDict[bytes, Score] = OrderedDict()
        self._told: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def note(self, key: bytes, now: float) -> bool:
        """Count a fetch; whether it is to be given to one home more now."""
        before = self.level(key, now)
        old = self._scores.pop(key, Score(0.0, now))
        self._scores[key] = Score(old.fetches * 0.5 ** ((now - old.at) / HALF_S) + 1.0, now)
        if len(self._scores) > MAX_KEYS:
            self._scores.popitem(last=False)
        return self.level(key, now) > before

    def level(self, key: bytes, now: float) -> int:
        """Homes more, by the fetches here: what others are told, who would hear their own words for ever else."""
        score = self._scores.get(key)
        if score is None:
            return 0
        fetches = score.fetches * 0.5 ** ((now - score.at) / HALF_S)
        return 0 if fetches < HOT else min(MOST, 1 + int(log2(fetches / HOT)))

    def tell(self, key: bytes, more: int, now: float) -> None:
        """Another home says to how many more it gave it."""
        if more > 0:
            self._told.pop(key, None)
            self._told[key] = min(more, MOST), now + TOLD_S
            if len(self._told) > MAX_KEYS:
                self._told.popitem(last=False)

    def more(self, key: bytes, now: float) -> int:
        """Homes more than usual, by the fetches here and what others said."""
        told, until = self._told.get(key, (0, 0.0))
        return max(self.level(key, now), told if now < until else 0)
