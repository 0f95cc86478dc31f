"""Heat: exponentially decayed access scores of nodes. Pure: the time is an argument.

A score is kept as the logarithm of its forward-decayed sum, log(sum of 2^(t / half-life) over accesses at t), so that
it never has to be aged: of two nodes the one with the larger number is the hotter, at any time. Scores for a small
fixed set of half-lives are kept side by side, and each tier reads the one that suits its turnover.

Only the node where a request ends is touched. What is above it was used too, and takes over the score when the node
goes; each access is handed up once.
"""

from __future__ import annotations

from array import array
from math import exp, expm1, inf, log, log1p
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

HALF_LIVES_S: Final = (8.0, 32.0, 128.0, 512.0, 2048.0, 8192.0)
_RATES: Final = tuple(log(2) / h for h in HALF_LIVES_S)
_COUNT: Final = len(HALF_LIVES_S)
SCORES: Final = 2 * _COUNT
"""Numbers kept of a node."""
_FAR: Final = 36.0
"""exp(-36) is below what a double adds to 1."""
TURNOVER: Final = 0.15
"""A tier reads the half-life next to this share of its turnover: longer ones keep what is dead for too long."""


class Warm(Protocol):
    """A node: `heat` is None, or scores followed by the parts of them that its parent has."""

    heat: array[float] | None


def both(a: float, b: float) -> float:
    """log(e^a + e^b)."""
    high, low = (a, b) if a > b else (b, a)
    return high if low == -inf or high - low > _FAR else high + log1p(exp(low - high))


def rest(a: float, b: float) -> float:
    """log(e^a - e^b) for b <= a; -inf where nothing is left."""
    if a <= b:
        return -inf
    return a if b == -inf or a - b > _FAR else a + log(-expm1(b - a))


def nearest(turnover_s: float) -> int:
    """Number of the half-life for a tier that replaces all it holds in `turnover_s` seconds."""
    want = log(max(turnover_s, 1e-3) * TURNOVER)
    return min(range(_COUNT), key=lambda n: abs(log(HALF_LIVES_S[n]) - want))


class Heat:
    """The scores of all nodes of a store."""

    def use(self, node: Warm, now: float) -> None:
        """One logical request ended in `node`."""
        heat = node.heat
        if heat is None:
            node.heat = array("d", [now * rate for rate in _RATES] + [-inf] * _COUNT)
            return
        for n, rate in enumerate(_RATES):
            heat[n] = both(heat[n], now * rate)

    def fresh(self, node: Warm, now: float) -> None:
        """`node` is new; the request that made it was counted above it already."""
        if node.heat is None:
            node.heat = array("d", [now * rate for rate in _RATES] * 2)

    def fall(self, node: Warm, parent: Warm) -> None:
        """`node` goes: the parent takes over what it does not have yet."""
        heat = node.heat
        if heat is None:
            return
        if parent.heat is None:
            parent.heat = array("d", [-inf] * (2 * _COUNT))
        up = parent.heat
        for n in range(_COUNT):
            up[n] = both(up[n], rest(heat[n], heat[_COUNT + n]))
            heat[_COUNT + n] = heat[n]

    def split(self, upper: Warm, lower: Warm) -> None:
        """`upper` is the new first part of what `lower` was: all uses of one were uses of the other."""
        heat = lower.heat
        if heat is not None:
            upper.heat = array("d", heat)
            heat[_COUNT:] = heat[:_COUNT]

    def join(self, upper: Warm, lower: Warm) -> None:
        """`lower` takes over the pages of `upper`, its parent."""
        self.fall(lower, upper)
        lower.heat = upper.heat

    @staticmethod
    def aged(node: Warm, now: float) -> list[float]:
        """A node's scores as seen from `now`, to be kept outside; -inf where it has none."""
        if node.heat is None:
            return [-inf] * SCORES
        return [score - now * rate for score, rate in zip(node.heat, _RATES + _RATES, strict=True)]

    @staticmethod
    def renewed(scores: NDArray[np.float32], then: float) -> NDArray[np.float64]:
        """The scores of many nodes again, a row each, that were seen from `then`; -inf where there were none."""
        return scores + then * np.array(_RATES + _RATES)

    @staticmethod
    def level(node: Warm, number: int, now: float) -> float:
        """Accesses of `node`, each counted down by the half-life since; the last one counts 1."""
        return 0.0 if node.heat is None else exp(node.heat[number] - now * _RATES[number])
