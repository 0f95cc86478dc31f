"""How the chance that something is used falls with its age, learnt, and what that makes of each kind and age."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

EARLY: Final = 0.05
"""Added to every age, in turnovers: what was used just now is not infinitely hot."""
FAITH: Final = 0.005
"""Turnovers of evidence with which every kind starts out as hot as all others."""
STEPS: Final = 8
"""What was seen is taken for what is to come so often in a turnover."""
FADE: Final = 0.5 ** (1 / (STEPS * 6.0))
"""Of the evidence, each time: in six turnovers it comes to count half."""
DOUBT: Final = 0.1
"""Turnovers of evidence with which the chance at any age counts as one that falls with one over it."""
EDGES: Final = (0.0, *(0.02 * 2 ** (0.7 * step) for step in range(17)))
"""Ages in turnovers, finer where most is used."""
BINS: Final = len(EDGES) - 1
HORIZON: Final = 12
"""What is older than the lower edge of this bin, four turnovers, is worth nothing."""
STARTS: Final[NDArray[np.float64]] = np.array(EDGES[:-1])
ENDS: Final[NDArray[np.float64]] = np.array(EDGES[1:])
WIDTHS: Final[NDArray[np.float64]] = ENDS - STARTS
MIDDLES: Final[NDArray[np.float64]] = STARTS + WIDTHS / 2
AHEAD: Final[NDArray[np.float64]] = np.triu(np.ones((HORIZON, HORIZON)))
"""From each bin: this one and those after it."""


def bins_of(ages: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which of the bins each age is in; the last one where it is past all."""
    return np.minimum(np.searchsorted(STARTS, ages, "right"), BINS) - 1


class Waits(NamedTuple):
    """Pages of a kind waited between two ages, in turnovers, and were then used (1) or given up (0)."""

    kind: NDArray[np.int64]
    since: NDArray[np.float64]
    until: NDArray[np.float64]
    pages: NDArray[np.float64]
    used: NDArray[np.float64]

    @classmethod
    def of(cls, heard: array[float]) -> Waits:
        """From rows of these five, one after the other."""
        kind, since, until, pages, used = np.frombuffer(heard).reshape(-1, len(cls._fields)).T
        return cls(kind.astype(np.int64), since, until, pages, used)


class Ages:
    """The common curve: uses by age over what waited that long. Kinds differ from it by a multiple each."""

    def __init__(self, kinds: int) -> None:
        self._hits = np.zeros(kinds)
        self._expected = np.zeros(kinds)
        self._multiples = np.ones(kinds)
        self._used = np.zeros(BINS)
        self._part = np.zeros(BINS)
        """Turnovers waited in a bin by what began or ended its wait in it."""
        self._whole = np.zeros(BINS + 1)
        """Running sums of it: what waited through a bin."""
        self._follow(1.0 / (MIDDLES + EARLY))

    def _follow(self, chance: NDArray[np.float64]) -> None:
        self._chance = chance
        self._sums = np.concatenate(([0.0], np.cumsum(chance * WIDTHS)))

    def wait(self, waits: Waits) -> None:
        """Take note of them."""
        kinds = len(self._hits)
        self._hits += np.bincount(waits.kind, waits.pages * waits.used, kinds)
        pages = waits.pages * (waits.until > waits.since)
        since = np.minimum(waits.since, EDGES[-1])
        until = np.clip(waits.until, since, EDGES[-1])
        first, last = bins_of(since), bins_of(until)
        across = pages * (first != last)
        self._part += np.bincount(first, pages * (np.where(across, ENDS[first], until) - since), BINS)
        self._part += np.bincount(last, across * (until - STARTS[last]), BINS)
        self._whole += np.bincount(first + 1, across, BINS + 1) - np.bincount(last, across, BINS + 1)
        self._used += np.bincount(last, pages * waits.used, BINS)
        self._expected += np.bincount(waits.kind, pages * (self._sum(last, until) - self._sum(first, since)), kinds)

    def _sum(self, at: NDArray[np.int64], ages: NDArray[np.float64]) -> NDArray[np.float64]:
        """Chances added up to ages in those bins."""
        return self._sums[at] + self._chance[at] * (ages - STARTS[at])

    def learn(self, size: int) -> None:
        """Take what was seen for what is to come; from now on it counts less. `size`: pages of the tier."""
        rate, faith = (self._hits.sum() + 1.0) / (self._expected.sum() + 1.0), FAITH * size + 1.0
        self._multiples = (self._hits / rate + faith) / (self._expected + faith)
        there = self._part + np.cumsum(self._whole)[:-1] * WIDTHS
        usual = (self._used.sum() + 1.0) / ((there / (MIDDLES + EARLY)).sum() + 1.0)
        doubt = DOUBT * size * WIDTHS + 1e-9
        self._follow((self._used + doubt * usual / (MIDDLES + EARLY)) / (there + doubt))
        for counts in (self._hits, self._expected, self._used, self._part, self._whole):
            np.multiply(counts, FADE, out=counts)

    def worth(self) -> list[list[float]]:
        """By kind and edge: uses for the room it takes, in turnovers, if it is kept for as long as pays best."""
        steps = self._multiples[:, None, None] * ((self._chance * WIDTHS)[:HORIZON] * AHEAD)
        after = np.exp(-np.cumsum(steps, axis=2))
        before = np.concatenate((np.ones((len(steps), HORIZON, 1)), after[:, :, :-1]), axis=2)
        room = np.cumsum((before + after) / 2 * WIDTHS[:HORIZON] * AHEAD, axis=2)
        out = np.zeros((len(steps), BINS + 1))
        out[:, :HORIZON] = ((1 - after) / np.maximum(room, 1e-9)).max(axis=2)
        table: list[list[float]] = out.tolist()
        return table


def at_age(row: Sequence[float], age: float) -> float:
    """A kind's worth at an age, between those at the edges."""
    at = min(bisect_right(EDGES, age), BINS) - 1
    part = min(1.0, (age - EDGES[at]) / (EDGES[at + 1] - EDGES[at]))
    return row[at] + (row[at + 1] - row[at]) * part
