"""decay: what has the lowest decayed access score goes first; the half-life follows the tier's turnover."""

from __future__ import annotations

from math import log
from typing import Any

from kvtier.heat import HALF_LIVES_S, nearest
from kvtier.policy import Policy

SECONDS = tuple(half / log(2) for half in HALF_LIVES_S)


class Decay(Policy[None]):
    """Rank = the time at which a single access would give as much heat: comparable whatever the half-life."""

    def rank(self, index: Any, node: Any) -> float:
        """The score at the half-life of this tier, in seconds."""
        if node.heat is None:
            return super().rank(index, node)
        number = nearest(self.turnover_s)
        seconds: float = node.heat[number] * SECONDS[number]
        return seconds
