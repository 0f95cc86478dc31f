"""How the chance that something is used falls with its age, learnt, and what that makes of each kind and age."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

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
WIDTHS: Final[NDArray[np.float64]] = np.diff(np.array(EDGES))
MIDDLES: Final[NDArray[np.float64]] = np.array(EDGES[:-1]) + WIDTHS / 2


def bin_of(age: float) -> int:
    """Which of the bins an age is in; the last one where it is past all."""
    return min(bisect_right(EDGES, age), BINS) - 1


class Ages:
    """The common curve: uses by age over what waited that long. Kinds differ from it by a multiple each."""

    def __init__(self, kinds: int) -> None:
        self._hits = [0.0] * kinds
        self._expected = [0.0] * kinds
        self._multiples = [1.0] * kinds
        self._used = [0.0] * BINS
        self._part = [0.0] * BINS
        """Turnovers waited in a bin by what began or ended its wait in it."""
        self._whole = [0.0] * (BINS + 1)
        """Running sums of it: what waited through a bin."""
        self._follow(1.0 / (MIDDLES + EARLY))

    def _follow(self, chance: NDArray[np.float64]) -> None:
        self._chance: list[float] = chance.tolist()
        self._sums: list[float] = [0.0, *np.cumsum(chance * WIDTHS).tolist()]

    def wait(self, kind: int, since: float, until: float, pages: float, *, used: bool) -> None:
        """Pages of a kind waited between these ages, and were used or given up."""
        self._hits[kind] += pages * used
        if until <= since:
            return
        since, until = min(since, EDGES[-1]), min(until, EDGES[-1])
        first, last = bin_of(since), bin_of(until)
        if first == last:
            self._part[first] += pages * (until - since)
        else:
            self._part[first] += pages * (EDGES[first + 1] - since)
            self._part[last] += pages * (until - EDGES[last])
            self._whole[first + 1] += pages
            self._whole[last] -= pages
        self._used[last] += pages * used
        self._expected[kind] += pages * (self._sum(last, until) - self._sum(first, since))

    def _sum(self, at: int, age: float) -> float:
        """Chances added up to an age in a bin."""
        return self._sums[at] + self._chance[at] * (age - EDGES[at])

    def learn(self, size: int) -> None:
        """Take what was seen for what is to come; from now on it counts less. `size`: pages of the tier."""
        rate, faith = (sum(self._hits) + 1.0) / (sum(self._expected) + 1.0), FAITH * size + 1.0
        self._multiples = [
            (hits / rate + faith) / (expected + faith)
            for hits, expected in zip(self._hits, self._expected, strict=True)
        ]
        there = np.array(self._part) + np.cumsum(self._whole)[:-1] * WIDTHS
        usual = (sum(self._used) + 1.0) / ((there / (MIDDLES + EARLY)).sum() + 1.0)
        doubt = DOUBT * size * WIDTHS + 1e-9
        self._follow((np.array(self._used) + doubt * usual / (MIDDLES + EARLY)) / (there + doubt))
        for counts in (self._hits, self._expected, self._used, self._part, self._whole):
            counts[:] = [each * FADE for each in counts]

    def worth(self) -> list[list[float]]:
        """By kind and edge: uses for the room it takes, in turnovers, if it is kept for as long as pays best."""
        multiples = np.array(self._multiples)
        steps = multiples[:, None] * (np.array(self._chance) * WIDTHS)[None, :HORIZON]
        out = np.zeros((len(multiples), BINS + 1))
        for start in range(HORIZON):
            after = np.exp(-np.cumsum(steps[:, start:], axis=1))
            before = np.concatenate((np.ones((len(multiples), 1)), after[:, :-1]), axis=1)
            room = np.cumsum((before + after) / 2 * WIDTHS[start:HORIZON], axis=1)
            out[:, start] = ((1 - after) / room).max(axis=1)
        table: list[list[float]] = out.tolist()
        return table


def at_age(row: Sequence[float], age: float) -> float:
    """A kind's worth at an age, between those at the edges."""
    at = bin_of(age)
    part = min(1.0, (age - EDGES[at]) / (EDGES[at + 1] - EDGES[at]))
    return row[at] + (row[at + 1] - row[at]) * part
